"""Which codec carries what: one for each verb that carries rows."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from carpool.plugins.nearest import nearest
from carpool.transport.codecs.base import AsTheyAre, Codec
from carpool.transport.codecs.bf16 import BF16
from carpool.transport.codecs.fp8 import FP8

CODECS: MappingProxyType[str, Codec] = MappingProxyType({one.name: one for one in (AsTheyAre(), BF16(), FP8())})
# The verbs of `carpool.metrics.counters.VERBS` that carry rows, with what they carry.
ROW_VERBS = {
    "dispatch": "rows to experts",
    "combine": "sums of experts",
    "dispatch_backward": "gradients of rows",
    "combine_backward": "gradients of sums",
}
HOPS = ("all", "nodes")
MERGES = ("none", "lsh", "condense")


@dataclass(frozen=True)
class Codecs:
    """Names of codecs; see the package's docstring.

    Attributes:
        dispatch, combine, dispatch_backward, combine_backward: of each verb.
        inter_node: over which hops rows are encoded; "nodes": of a transport with two hops, that between nodes only.
        merge: which similar rows travel as one, before anything is encoded (`merging.py`).
        merge_hashes, merge_width: for "lsh", how many hashes must agree, and how many numbers each is made of.
        merge_similarity: for "condense", the least cosine similarity.

    Raises:
        ValueError: a name that is not known, or a number that cannot be.
    """

    dispatch: str = "none"
    combine: str = "none"
    dispatch_backward: str = "none"
    combine_backward: str = "none"
    inter_node: str = "all"
    merge: str = "none"
    merge_hashes: int = 2
    merge_width: int = 16
    merge_similarity: float = 0.9

    def __post_init__(self) -> None:
        for key, known in (*((verb, tuple(CODECS)) for verb in ROW_VERBS), ("inter_node", HOPS), ("merge", MERGES)):
            if (name := getattr(self, key)) not in known:
                near = nearest(name, known)
                hint = f"; did you mean {near}?" if near else ""
                raise ValueError(f"codec {key} = {name!r}: expected one of {', '.join(known)}{hint}")
        if self.merge_hashes < 1 or self.merge_width < 1 or (2 * self.merge_width) ** self.merge_hashes > 2**62:
            raise ValueError(
                f"codec merge_hashes={self.merge_hashes} and merge_width={self.merge_width} must be at least 1, and "
                "(2 * merge_width) ** merge_hashes at most 2**62"
            )
        if not 0 < self.merge_similarity <= 1:
            raise ValueError(f"codec merge_similarity={self.merge_similarity} must be above 0 and at most 1")

    @property
    def plain(self) -> bool:
        """Whether all rows travel, as they are."""
        return self.merge == "none" and all(getattr(self, verb) == "none" for verb in ROW_VERBS)

    def of(self, verb: str) -> Codec:
        """The codec of a verb; a plan carries no rows, and has none."""
        return CODECS[getattr(self, verb, "none")]

    def for_rows_of(self, element_size: int) -> Codecs:
        """The same for rows of so many bytes an element: "bf16" means nothing to rows of 16 bits."""
        if element_size > 2:
            return self
        meaningless: Any = {verb: "none" for verb in ROW_VERBS if getattr(self, verb) == "bf16"}
        return replace(self, **meaningless)

    @property
    def lossy_reasons(self) -> list[str]:
        """What is lost, for logs and reports."""
        where = " between nodes" if self.inter_node == "nodes" else ""
        coded = {what: self.of(verb).lossy for verb, what in ROW_VERBS.items()}
        merged = [] if self.merge == "none" else [f"similar rows for an expert travel as one ({self.merge})"]
        return merged + [f"{what} travel {how}{where}" for what, how in coded.items() if how]


PLAIN = Codecs()
