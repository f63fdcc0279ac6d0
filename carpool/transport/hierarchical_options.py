"""Options of the `hierarchical` transport, and how "auto" is resolved.

    HierarchicalOptions(max_tokens=8192).settled(group, 8, 2048)    the options, and a sentence for the log

If overflowing steps are repeated (`step_tokens`) and the intra-node hop does not wait for the host either, hop 1 has a
fixed size, which follows the need of the steps (`carpool.transport.token_capacity`). Otherwise it has a fixed size
unless too much of it would be padding: as measured (`node_rows`), or as expected of uniform choices. With K = 8,
padding is 0.4 % for 2 nodes, 10 % for 4 nodes, 34 % for 8 nodes.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, Self

import torch.distributed as dist

from carpool.transport.codecs import PLAIN, Codecs
from carpool.transport.nodes import hops_of, topology_of
from carpool.transport.nvlink import NVLink, NVLinkOptions
from carpool.transport.options import RunSizes, TransportOptions
from carpool.transport.token_capacity import GROWN

if TYPE_CHECKING:
    from carpool.ride.schedule import Schedule

# The largest share of padding of a hop of fixed size: the price of not waiting for counts.
MOST_EMPTY = 0.125


@dataclass(frozen=True)
class HierarchicalOptions(TransportOptions):
    """How the `hierarchical` transport works; all is exact but codecs.

    Attributes:
        first_hop: "fixed": equally many tokens to each other node; needs `max_tokens`. "counted": only tokens that
            chose experts there. "auto": resolved by `settled`; a transport constructed without `settled` counts.
        inside: the transport of the intra-node hop. "auto": resolved by `settled`; dedup without it.
        node_rows: mean inter-node sends per token, if measured.
        capacity: of a hop of fixed size, tokens to each other node. None: the tokens of the largest rank, which always
            suffice. If more are needed, MoE outputs are NaN, and `Transport.check` raises.
        step_tokens: tokens of the largest rank in a step, if overflowing steps are repeated, as `carpool train` does.
            The capacity then follows the need of the steps, and starts from `node_rows`. None: it is constant.
        nvlink: options of the intra-node `nvlink`; `max_tokens` and `capacity` are for one rank's tokens.
    """

    first_hop: Literal["auto", "fixed", "counted"] = "auto"
    inside: Literal["auto", "nvlink", "dedup"] = "auto"
    node_rows: float | None = None
    capacity: int | None = None
    step_tokens: int | None = None
    nvlink: NVLinkOptions = field(default_factory=NVLinkOptions)

    def __post_init__(self) -> None:
        for name, known in (("first_hop", ("auto", "fixed", "counted")), ("inside", ("auto", "nvlink", "dedup"))):
            if getattr(self, name) not in known:
                raise ValueError(f"{name}={getattr(self, name)!r} is not known; use one of {', '.join(known)}")
        if self.first_hop == "fixed" and self.max_tokens is None:
            raise ValueError("first_hop='fixed' needs max_tokens: the tokens of the largest rank")
        if self.capacity is not None and self.first_hop != "fixed":
            raise ValueError(
                f"the capacity={self.capacity} of transport hierarchical is of a hop of fixed size, and first_hop="
                f"{self.first_hop!r}: set first_hop='fixed', too, or leave capacity out"
            )
        if self.capacity is not None and not 1 <= self.capacity <= (self.max_tokens or 0):
            raise ValueError(
                f"the capacity={self.capacity} of transport hierarchical must be between 1 and the tokens of the "
                f"largest rank, max_tokens={self.max_tokens}"
            )
        if self.node_rows is not None and not 0 < self.node_rows < math.inf:
            raise ValueError(f"the node_rows={self.node_rows} of transport hierarchical must be a positive number")

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any], sizes: RunSizes, codecs: Codecs = PLAIN) -> Self:
        """settings["nvlink"]: the section [nvlink]."""
        others = dict(settings)
        nvlink = NVLinkOptions.from_settings(others.pop("nvlink"), sizes)
        return cls(max_tokens=sizes.max_tokens, codecs=codecs, nvlink=nvlink, **others)

    @property
    def codecs_inside(self) -> Codecs:
        """The codecs of hop 2."""
        return PLAIN if self.codecs.inter_node == "nodes" else self.codecs

    def under(self, schedule: Schedule, resend: bool = False) -> Self:
        return replace(self, nvlink=self.nvlink.under(schedule, resend))

    def settled(
        self, group: dist.ProcessGroup | None, top_k: int, hidden: int, own_forward: bool = False
    ) -> tuple[Self, str]:
        """These options with "auto" resolved, and why. The first call is collective over the group.

        Args:
            own_forward: experts run a model's own forward, which would compute the padding of buffers, too.

        Raises:
            ValueError: nodes that do not hold equally many consecutive ranks."""
        num_nodes = len(hops_of(group).rail_ranks)
        inside, first_hop, notes = self.inside, self.first_hop, []
        if inside == "auto":
            # For elements of two bytes; if these are supported, elements of four are, too.
            reason = (
                _why_not_nvlink(group) or NVLink.why_no_codecs(self.codecs_inside) or NVLink.why_not_hidden(hidden, 2)
            )
            if own_forward:
                reason = "the experts run their own forward"
            elif self.max_tokens is None:
                reason = reason or "the number of tokens of a rank is not limited (max_tokens)"
            inside = "dedup" if reason else "nvlink"
            notes.append(f"intra-node {inside}" + (f", not nvlink: {reason}" if reason else ""))
        if first_hop == "auto":
            first_hop, why = self._first_hop(inside, num_nodes, top_k)
            notes.append(f"inter-node {why}")
        capacity = self.capacity
        if first_hop == "fixed" and capacity is None and self.step_tokens is not None and self.node_rows is not None:
            mean = self.node_rows / max(1, num_nodes - 1) * self.step_tokens
            capacity = min(self.step_tokens, max(1, math.ceil(GROWN * mean)))
        return replace(self, inside=inside, first_hop=first_hop, capacity=capacity), "; ".join(notes)

    def _first_hop(self, inside: str, num_nodes: int, top_k: int) -> tuple[Literal["fixed", "counted"], str]:
        if self.max_tokens is None:
            return "counted", "counted tokens, because the number of tokens of a rank is not limited (max_tokens)"
        if inside == "nvlink" and self.step_tokens is not None:
            return "fixed", "as many tokens as steps need: the host does not wait"
        others = num_nodes - 1
        needed, source = self.node_rows, "were measured"
        if needed is None:
            needed, source = others * (1 - (1 - 1 / num_nodes) ** top_k), "are expected of uniform choices"
        reason = f"of {others} sends to other nodes a token needs {needed:.3g}, as {source}"
        if needed < (1 - MOST_EMPTY) * others:
            return "counted", f"counted tokens: {reason}"
        return "fixed", f"a fixed number of tokens: {reason}"

    def nvlink_inside(self, num_nodes: int) -> NVLinkOptions:
        """Options of the intra-node `nvlink`, where each rank forwards the tokens of a whole rail."""
        most, capacity = self.nvlink.max_tokens or self.max_tokens, self.nvlink.capacity
        return replace(
            self.nvlink,
            max_tokens=None if most is None else num_nodes * most,
            capacity=None if capacity is None else num_nodes * capacity,
            codecs=self.codecs_inside,
        )


# Results that the ranks of a group have agreed on. They are freed with the group.
_FOUND: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], str | None]] = weakref.WeakKeyDictionary()


def _why_not_nvlink(group: dist.ProcessGroup | None) -> str | None:
    """Why the ranks of some node cannot use `nvlink`, or None if all can. The first call is collective over the
    group."""
    if group is None:
        return NVLink.why_not(None)
    found, nodes = _FOUND.setdefault(group, {}), topology_of(group).node_of
    if nodes not in found:
        reasons: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(reasons, NVLink.why_not(hops_of(group).node), group=group)
        found[nodes] = next((reason for reason in reasons if reason), None)
    return found[nodes]
