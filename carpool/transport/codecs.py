"""Codecs: how hidden states are encoded for sending, and decoded again.

| name   | bytes of a hidden state of H elements | what it changes                                         |
|--------|---------------------------------------|---------------------------------------------------------|
| `none` | those of the model's dtype            | nothing                                                 |
| `bf16` | 2 H                                   | float32 loses 16 bits; 16-bit dtypes do not change      |
| `fp8`  | H, and 4 for each 128, rounded to 16  | LOSSY: three bits of mantissa are left                  |

A ride has four verbs that send hidden states, and each has a codec of its own:

    Codecs(dispatch="fp8")                                         DeepSeek-V3: tokens in FP8, outputs not encoded
    Codecs(dispatch="fp8", combine="bf16", inter_node="nodes")     on the inter-node hop only

    dispatch    tokens to experts                    combine_backward     gradients of MoE outputs to experts
    combine     partial outputs of experts back      dispatch_backward    gradients of tokens back

Only what leaves its rank is encoded. Gradients pass a codec straight through: the gradient of the decoded value is the
gradient of the encoded one.

The number of tokens can be reduced, too: a plug-in of `MERGES` (`carpool_systems.merging`) sends similar tokens as one.

Encoding a decoded value again, as over two hops, changes nothing.

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
from carpool.plugins.nearest import did_you_mean

if TYPE_CHECKING:
    from carpool.ride.setup import RideSetup
    from carpool.routing import Routing

__all__ = ["CODECS", "HOPS", "MERGES", "PLAIN", "TOKEN_VERBS", "Codec", "Codecs", "Merge"]


class Codec(ABC):
    """An encoding of hidden states.

    Attributes:
        name: in settings.
        lossy: how hidden states are sent, for logs: "as FP8". "": nothing is lost.
    """

    name: ClassVar[str]
    lossy: ClassVar[str] = ""

    @abstractmethod
    def row_bytes(self, hidden: int, element_size: int) -> int:
        """Bytes of an encoded hidden state of `hidden` elements of `element_size` bytes."""

    @abstractmethod
    def encode(self, x_NH: torch.Tensor) -> torch.Tensor:
        """Encode: (N, hidden) to (N, ...), `row_bytes` per row."""

    @abstractmethod
    def decode(self, coded: torch.Tensor, hidden: int, dtype: torch.dtype) -> torch.Tensor:
        """Decode to (N, hidden) in `dtype`."""


class AsTheyAre(Codec):
    """No encoding."""

    name = "none"

    def row_bytes(self, hidden: int, element_size: int) -> int:
        return hidden * element_size

    def encode(self, x_NH: torch.Tensor) -> torch.Tensor:
        return x_NH

    def decode(self, coded: torch.Tensor, hidden: int, dtype: torch.dtype) -> torch.Tensor:
        return coded


BYTES = 2


class BF16(Codec):
    """float32 as bfloat16: half the bytes. LOSSY for float32; 16-bit dtypes do not change."""

    name = "bf16"
    lossy = "as bfloat16"

    def row_bytes(self, hidden: int, element_size: int) -> int:
        return hidden * min(BYTES, element_size)

    def encode(self, x_NH: torch.Tensor) -> torch.Tensor:
        return x_NH.bfloat16() if x_NH.element_size() > BYTES else x_NH

    def decode(self, coded: torch.Tensor, hidden: int, dtype: torch.dtype) -> torch.Tensor:
        return coded.to(dtype)


class FP8(Codec):
    """e4m3 with a float32 scale for each 128 columns: about half the bytes of bfloat16. LOSSY.

        H 7168        7168 codes and 56 scales: 7392 bytes, instead of 14336 in bfloat16 or 28672 in float32

    Codes and scales of a hidden state are one packet (`carpool.kernels.packets`). The relative error of an element is
    up to 1/16. DeepSeek-V3 dispatches in this format, and combines in bfloat16.
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
# The verbs of `carpool.metrics.counters.VERBS` that send hidden states, and what these are.
TOKEN_VERBS = {
    "dispatch": "tokens to experts",
    "combine": "outputs of experts",
    "dispatch_backward": "gradients of tokens",
    "combine_backward": "gradients of MoE outputs",
}
HOPS = ("all", "nodes")


class Merge(ABC):
    """Sends several hidden states as one, before encoding. Constructed with its options as keywords.

    Attributes:
        name: in settings.
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
        """(y_TH, the second result of `ride_tokens`), where `ride_tokens` is called with fewer tokens.

        Args: as of `carpool.ride.function.ride`."""


MERGES: Registry[type[Merge]] = Registry("codec merge", "carpool.merges", {})


@dataclass(frozen=True)
class Codecs:
    """Names of codecs; see the module's docstring.

    Attributes:
        dispatch, combine, dispatch_backward, combine_backward: the codec of each verb.
        inter_node: the hops that are encoded; "nodes": of a transport with two hops, the inter-node hop only.
        merge: how similar tokens are merged before encoding: a name in `MERGES`, or "none".
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
                raise ValueError(
                    f"codec {key} = {name!r}: expected one of {', '.join(known)}{did_you_mean(name, known)}"
                )
        if self.merge != "none":
            self.merger()

    @property
    def plain(self) -> bool:
        """Whether nothing is encoded or merged."""
        return self.merge == "none" and all(getattr(self, verb) == "none" for verb in TOKEN_VERBS)

    def merger(self) -> Merge | None:
        """The `Merge` of these settings, or None.

        Raises:
            ValueError: options that cannot be."""
        return None if self.merge == "none" else MERGES[self.merge](**self.merge_options)

    def of(self, verb: str) -> Codec:
        """The codec of a verb; a plan sends no hidden states, and has none."""
        return CODECS[getattr(self, verb, "none")]

    def for_element_size(self, element_size: int) -> Codecs:
        """The same for elements of so many bytes: "bf16" is "none" for 16-bit dtypes."""
        if element_size > 2:
            return self
        meaningless: Any = {verb: "none" for verb in TOKEN_VERBS if getattr(self, verb) == "bf16"}
        return replace(self, **meaningless)

    @property
    def lossy_reasons(self) -> list[str]:
        """What is lost, for logs and reports."""
        where = " inter-node" if self.inter_node == "nodes" else ""
        coded = {what: self.of(verb).lossy for verb, what in TOKEN_VERBS.items()}
        merged = [] if self.merge == "none" else [f"similar tokens for an expert are sent as one ({self.merge})"]
        return merged + [f"{what} are sent {how}{where}" for what, how in coded.items() if how]


PLAIN = Codecs()
