"""How rows become bytes on their way between ranks, and rows again.

| name   | bytes of a row of H elements          | what it changes                                                |
|--------|---------------------------------------|----------------------------------------------------------------|
| `none` | as the model computes                 | nothing                                                        |
| `bf16` | 2 H                                   | rows of float32 lose 16 bits; rows of 16 bits stay as they are |
| `fp8`  | H, and 4 for each 128, rounded to 16  | three bits are left behind the point: LOSSY                    |

A ride has four verbs that carry rows, and each has a codec of its own:

    Codecs(dispatch="fp8")                                     DeepSeek-V3: rows out as FP8, sums back as they are
    Codecs(dispatch="fp8", combine="bf16", inter_node="nodes")        only over the hop between nodes

    dispatch           rows to experts                      combine_backward    gradients of sums to experts
    combine            experts' partial sums back           dispatch_backward   gradients of rows back

Only rows that leave their rank are encoded. A rank's rows for itself stay as they are. Gradients pass a codec straight
through: the gradient of what was decoded is the gradient of what was encoded.

Rows may also become fewer: a plug-in of `MERGES` (`carpool_systems.merging`) lets similar ones travel as one.

Rows that are decoded and encoded again, as over two hops, do not change a second time.

Sources: DeepSeek-V3 (arXiv 2412.19437, section 3.3) for FP8 with scales of 1 x 128.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from carpool.kernels.packets import pack, packet_bytes, unpack
from carpool.plugins import Registry
from carpool.plugins.nearest import nearest

if TYPE_CHECKING:
    from carpool.ride.setup import RideSetup
    from carpool.routing import Routing

__all__ = ["CODECS", "HOPS", "MERGES", "PLAIN", "TOKEN_VERBS", "Codec", "Codecs", "Merge"]


class Codec(ABC):
    """One way for rows to become bytes.

    Attributes:
        name: what settings call it.
        lossy: how rows travel then, for logs: "as FP8". "": nothing is lost.
    """

    name: ClassVar[str]
    lossy: ClassVar[str] = ""

    @abstractmethod
    def row_bytes(self, hidden: int, element_size: int) -> int:
        """Bytes of a row of `hidden` elements of `element_size` bytes."""

    @abstractmethod
    def encode(self, x_NH: torch.Tensor) -> torch.Tensor:
        """Rows as they travel: (N, ...), `row_bytes` each."""

    @abstractmethod
    def decode(self, coded: torch.Tensor, hidden: int, dtype: torch.dtype) -> torch.Tensor:
        """(N, hidden) rows in `dtype`."""


class AsTheyAre(Codec):
    """Rows travel as the model computes them."""

    name = "none"

    def row_bytes(self, hidden: int, element_size: int) -> int:
        return hidden * element_size

    def encode(self, x_NH: torch.Tensor) -> torch.Tensor:
        return x_NH

    def decode(self, coded: torch.Tensor, hidden: int, dtype: torch.dtype) -> torch.Tensor:
        return coded


BYTES = 2


class BF16(Codec):
    """Rows of float32 travel as bfloat16: half the bytes. LOSSY for these; rows of 16 bits stay as they are."""

    name = "bf16"
    lossy = "as bfloat16"

    def row_bytes(self, hidden: int, element_size: int) -> int:
        return hidden * min(BYTES, element_size)

    def encode(self, x_NH: torch.Tensor) -> torch.Tensor:
        return x_NH.bfloat16() if x_NH.element_size() > BYTES else x_NH

    def decode(self, coded: torch.Tensor, hidden: int, dtype: torch.dtype) -> torch.Tensor:
        return coded.to(dtype)


class FP8(Codec):
    """Rows travel as e4m3 with a float32 scale for each 128 columns: about half the bytes of bfloat16. LOSSY.

        H 7168        7168 codes and 56 scales: 7392 bytes, instead of 14336 in bfloat16 or 28672 in float32

    Codes and scales are one packet (`carpool.kernels.packets`), so a row and its scales travel together. An element is
    off by up to 1/16 of itself. DeepSeek-V3 sends rows to experts so and sums back in bfloat16.
    """

    name = "fp8"
    lossy = "as FP8"

    def row_bytes(self, hidden: int, element_size: int) -> int:
        return packet_bytes(hidden)

    def encode(self, x_NH: torch.Tensor) -> torch.Tensor:
        return pack(x_NH)

    def decode(self, coded: torch.Tensor, hidden: int, dtype: torch.dtype) -> torch.Tensor:
        if not coded.is_cuda:
            return unpack(coded, hidden).to(dtype)
        from carpool.kernels.packet_kernel import launch_dequantise  # Triton, which a CPU can do without

        rows = coded.shape[0]
        return launch_dequantise(
            coded, torch.full((1,), rows, dtype=torch.int32, device=coded.device), rows, hidden, dtype
        )


CODECS: MappingProxyType[str, Codec] = MappingProxyType({one.name: one for one in (AsTheyAre(), BF16(), FP8())})
# The verbs of `carpool.metrics.counters.VERBS` that carry rows, with what they carry.
TOKEN_VERBS = {
    "dispatch": "rows to experts",
    "combine": "sums of experts",
    "dispatch_backward": "gradients of rows",
    "combine_backward": "gradients of sums",
}
HOPS = ("all", "nodes")


class Merge(ABC):
    """Lets several hidden states travel as one, before anything is encoded. Made with its options, as keywords.

    Attributes:
        name: what settings call it.
        options: the types of its options, by name.
    """

    name: ClassVar[str]
    options: ClassVar[Mapping[str, Any]] = {}

    @abstractmethod
    def ride(
        self,
        x_TH: torch.Tensor,
        routing: Routing,
        slot_TK: torch.Tensor,
        setup: RideSetup,
        ride_tokens: Callable[[torch.Tensor, Routing, torch.Tensor, RideSetup], tuple[torch.Tensor, Any]],
    ) -> tuple[torch.Tensor, Any]:
        """y_TH, and what else `ride_tokens` returned, which is a ride of fewer rows.

        Args: as of `carpool.ride.function.ride`."""


MERGES: Registry[type[Merge]] = Registry("codec merge", "carpool.merges", {})


@dataclass(frozen=True)
class Codecs:
    """Names of codecs; see the module's docstring.

    Attributes:
        dispatch, combine, dispatch_backward, combine_backward: of each verb.
        inter_node: over which hops rows are encoded; "nodes": of a transport with two hops, that between nodes only.
        merge: which similar rows travel as one, before anything is encoded: a name in `MERGES`, or "none".
        merge_options: its options.

    Raises:
        ValueError: a name that is not known, or a number that cannot be.
    """

    dispatch: str = "none"
    combine: str = "none"
    dispatch_backward: str = "none"
    combine_backward: str = "none"
    inter_node: str = "all"
    merge: str = "none"
    merge_options: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        merges = ("none",) if self.merge == "none" else ("none", *MERGES)
        for key, known in (*((verb, tuple(CODECS)) for verb in TOKEN_VERBS), ("inter_node", HOPS), ("merge", merges)):
            if (name := getattr(self, key)) not in known:
                near = nearest(name, known)
                hint = f"; did you mean {near}?" if near else ""
                raise ValueError(f"codec {key} = {name!r}: expected one of {', '.join(known)}{hint}")
        if self.merge != "none":
            self.merger()

    @property
    def plain(self) -> bool:
        """Whether all rows travel, as they are."""
        return self.merge == "none" and all(getattr(self, verb) == "none" for verb in TOKEN_VERBS)

    def merger(self) -> Merge | None:
        """What merges rows.

        Raises:
            ValueError: options that cannot be."""
        return None if self.merge == "none" else MERGES[self.merge](**self.merge_options)

    def of(self, verb: str) -> Codec:
        """The codec of a verb; a plan carries no rows, and has none."""
        return CODECS[getattr(self, verb, "none")]

    def for_element_size(self, element_size: int) -> Codecs:
        """The same for rows of so many bytes an element: "bf16" means nothing to rows of 16 bits."""
        if element_size > 2:
            return self
        meaningless: Any = {verb: "none" for verb in TOKEN_VERBS if getattr(self, verb) == "bf16"}
        return replace(self, **meaningless)

    @property
    def lossy_reasons(self) -> list[str]:
        """What is lost, for logs and reports."""
        where = " between nodes" if self.inter_node == "nodes" else ""
        coded = {what: self.of(verb).lossy for verb, what in TOKEN_VERBS.items()}
        merged = [] if self.merge == "none" else [f"similar rows for an expert travel as one ({self.merge})"]
        return merged + [f"{what} travel {how}{where}" for what, how in coded.items() if how]


PLAIN = Codecs()
