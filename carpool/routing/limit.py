"""Routing limited to few ranks or nodes per token: LOSSY, off by default.

A row travels once to each rank that holds any of its token's experts. Limited to D ranks, a token has at most D copies,
whatever the layout. That changes what the model computes, so it is meant for fine-tuning (Occult's "collaboration
pruning", arXiv 2505.13345) or for training from the start (DeepSeek-V3's node-limited routing, section 2.1.2).

    limit_ranks, limit_nodes     at most so many ranks, or nodes, per token. Which ones, and what it gets there:
      limit_by = "score"         the ranks that hold most of the weight of the token's own choices; its K choices are
                                 then made anew among the experts of those ranks
      limit_by = "groups"        DeepSeek's: the ranks whose two best experts have the largest sum, then K among them

Worked example, K = 3, experts 0 1 2 on rank 0, 3 4 5 on rank 1, limit_ranks = 1:

    scores     .30 .02 .10 | .25 .15 .18      chosen 0, 3, 5: rank 0 holds .30 of it, rank 1 .43, so rank 1 is kept
    "score"        3, 5, 4                    the best three of rank 1
    "groups"       rank 0: .30 + .10, rank 1: .25 + .18, so rank 1 here too; in general they differ

The weights of the new choices are the router's own, taken from its scores and normalised as it does that, so gradients
need nothing special: `Router` weighs given choices anyway, and carpool/hf/routing/router_limits.py lets the routers of
transformers do it. Ranks are chosen one after the other, each time the one that adds most. A token whose choices are
within the limit keeps them all.

Plain PyTorch on the device: a matrix of (T, E) booleans, two top-k, D rounds over (T, K, W), no synchronisation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from carpool.layout import ExpertLayout
from carpool.layout.topology import Topology
from carpool.plugins.counted import counted

LimitBy = Literal["score", "groups"]


@dataclass(frozen=True)
class LimitOptions:
    """What the routing is limited to; see carpool/routing/limit.py. The defaults limit nothing.

    Args:
        topology: of the ranks of the expert-parallel group, for limits by node. None: all are on one node.
    """

    limit_ranks: int | None = None
    limit_nodes: int | None = None
    limit_by: LimitBy = "score"
    topology: Topology | None = None

    @property
    def num_nodes(self) -> int:
        return 1 if self.topology is None else self.topology.num_nodes

    def check(self, num_ranks: int) -> None:
        """Raise ValueError for what cannot be on `num_ranks` ranks."""
        if self.limit_by not in ("score", "groups"):
            raise ValueError(f"limit_by={self.limit_by!r} is not known; use 'score' or 'groups'")
        if self.topology is not None and self.topology.num_ranks != num_ranks:
            raise ValueError(
                f"the topology of the limit has {self.topology.num_ranks} ranks, but the expert-parallel group "
                f"{num_ranks}: give the topology of the group (`Topology.of`)"
            )
        if self.topology is not None and self.limit_nodes is not None:
            self.topology.even_nodes()
        for name, limit in (("limit_ranks", self.limit_ranks), ("limit_nodes", self.limit_nodes)):
            if limit is not None and limit < 1:
                raise ValueError(f"{name}={limit} must be at least 1, or None for no limit")

    def active(self, num_ranks: int) -> bool:
        """Whether this changes any routing on `num_ranks` ranks: a limit of all ranks is none."""
        return (self.limit_ranks is not None and self.limit_ranks < num_ranks) or (
            self.limit_nodes is not None and self.limit_nodes < self.num_nodes
        )

    def lossy_reasons(self, num_ranks: int) -> list[str]:
        """For logs and reports: how this changes the model's function."""
        reasons = []
        if self.limit_nodes is not None and self.limit_nodes < self.num_nodes:
            reasons.append(
                f"each token's experts are limited to {counted(self.limit_nodes, 'node')}, by {self.limit_by}"
            )
        if self.limit_ranks is not None and self.limit_ranks < num_ranks:
            reasons.append(
                f"each token's experts are limited to {counted(self.limit_ranks, 'rank')}, by {self.limit_by}"
            )
        return reasons


__all__ = ["LimitOptions", "RoutingLimit", "drop_outside"]


class Tables(NamedTuple):
    """What is asked of a layout on a device."""

    present_WE: torch.Tensor  # bool: rank w holds expert e
    slot_WS: torch.Tensor  # int64: expert in each slot, 0 where empty
    empty_WS: torch.Tensor  # bool


class RoutingLimit:
    """Chooses experts within the limits, for one layer on one rank.

    Raises:
        ValueError: limits that do not fit."""

    def __init__(self, options: LimitOptions, num_ranks: int) -> None:
        options.check(num_ranks)
        self.options, self.num_ranks = options, num_ranks
        self.ranks_per_node = num_ranks // options.num_nodes
        self._tables: tuple[ExpertLayout, torch.device, Tables] | None = None
        self._fits: tuple[ExpertLayout, int] | None = None

    @torch.no_grad()
    def choose(self, score_TE: torch.Tensor, share_TE: torch.Tensor, top_k: int, layout: ExpertLayout) -> torch.Tensor:
        """The K experts of each token, (T, K) int64, best first by score.

        Args:
            score_TE: what the router selects by: the more, the better; -inf for what it does not want.
            share_TE: what the choices weigh when ranks are compared: not negative."""
        self._check_fits(layout, top_k)
        score_TE, share_TE = score_TE.detach(), share_TE.detach()
        chosen_TK = score_TE.topk(top_k, dim=-1).indices
        present_WE = self._of(layout, score_TE.device).present_WE
        kept_TW = torch.ones(len(chosen_TK), self.num_ranks, dtype=torch.bool, device=chosen_TK.device)
        for size, count in self._stages():
            share_TK = share_TE.gather(1, chosen_TK)
            kept_TW = self._narrowed(kept_TW, size, count, score_TE, share_TK, chosen_TK, layout)
            open_TE = (kept_TW.float() @ present_WE.float()) > 0
            # What the router does not want is still better than what is out of reach.
            wanted_TE = score_TE.clamp(min=torch.finfo(score_TE.dtype).min).masked_fill(~open_TE, -math.inf)
            chosen_TK = wanted_TE.topk(top_k, dim=-1).indices
        return chosen_TK

    def _stages(self) -> list[tuple[int, int]]:
        """(ranks of a group, how many groups a token may keep), the larger groups first."""
        options, stages = self.options, []
        if options.limit_nodes is not None and options.limit_nodes < options.num_nodes:
            stages.append((self.ranks_per_node, options.limit_nodes))
        if options.limit_ranks is not None and options.limit_ranks < self.num_ranks:
            stages.append((1, options.limit_ranks))
        return stages

    def _narrowed(
        self,
        kept_TW: torch.Tensor,
        size: int,
        count: int,
        score_TE: torch.Tensor | None,
        share_TK: torch.Tensor,
        chosen_TK: torch.Tensor,
        layout: ExpertLayout,
    ) -> torch.Tensor:
        """(T, W) bool: of the kept ranks those in the best `count` groups of `size` ranks. Choices of -1 are nobody's.
        Without scores, by what the choices weigh."""
        tables = self._of(layout, chosen_TK.device)
        if self.options.limit_by == "groups" and score_TE is not None:
            allowed_TG = kept_TW.unflatten(1, (-1, size)).any(-1)
            two_TG = self._two_best(score_TE, tables, size).masked_fill(~allowed_TG, -math.inf)
            group_TG = _top(two_TG, count) & allowed_TG
        else:
            present_TKW = tables.present_WE.t()[chosen_TK.clamp(min=0)] & (chosen_TK >= 0).unsqueeze(-1)
            present_TKG = (present_TKW & kept_TW.unsqueeze(1)).unflatten(2, (-1, size)).any(-1)
            group_TG = _cover(present_TKG, share_TK, count)
        return kept_TW & group_TG.repeat_interleave(size, dim=1)

    def _two_best(self, score_TE: torch.Tensor, tables: Tables, ranks: int) -> torch.Tensor:
        """(T, groups of `ranks` ranks): the sum of the two best scores in each."""
        score_TWS = score_TE[:, tables.slot_WS].masked_fill(tables.empty_WS, -math.inf)
        score_TGe = score_TWS.flatten(1).unflatten(1, (self.num_ranks // ranks, -1))
        best_TG2 = score_TGe.topk(min(2, score_TGe.shape[-1]), dim=-1).values
        return best_TG2.clamp(min=torch.finfo(best_TG2.dtype).min / 4).sum(-1)

    def _of(self, layout: ExpertLayout, device: torch.device) -> Tables:
        if self._tables is None or self._tables[0] is not layout or self._tables[1] != device:
            expert_WS = layout.expert_WS.long()
            present_WE = torch.zeros(layout.num_ranks, layout.num_experts + 1, dtype=torch.bool)
            present_WE.scatter_(1, torch.where(expert_WS < 0, layout.num_experts, expert_WS), True)
            tables = Tables(present_WE[:, :-1].contiguous(), expert_WS.clamp(min=0), expert_WS < 0)
            self._tables = layout, device, Tables(*(table.to(device) for table in tables))
        return self._tables[2]

    def _check_fits(self, layout: ExpertLayout, top_k: int) -> None:
        """Raise ValueError if tokens could not have K experts within the limit."""
        if self._fits is not None and self._fits[0] is layout and self._fits[1] == top_k:
            return
        options, ranks = self.options, self.ranks_per_node
        held = [len(rank) for rank in layout.homes]
        nodes = [sum(held[first : first + ranks]) for first in range(0, self.num_ranks, ranks)]
        limits = [("limit_nodes", nodes, options.limit_nodes, "node")] if options.limit_nodes else []
        limits += [("limit_ranks", held, options.limit_ranks, "rank")] if options.limit_ranks else []
        for name, sizes, limit, what in limits:
            least = sum(sorted(sizes)[:limit])
            if limit < len(sizes) and least < top_k:
                raise ValueError(
                    f"{name}: {counted(limit, what)} may hold only {least} different experts, fewer than the {top_k} "
                    "that each token takes; raise the limit"
                )
        self._fits = layout, top_k


def drop_outside(
    limit: RoutingLimit, expert_TK: torch.Tensor, weight_TK: torch.Tensor, layout: ExpertLayout
) -> tuple[torch.Tensor, torch.Tensor]:
    """For routers whose scores are not known: choices outside the kept ranks are dropped (-1), and the weights of the
    others scaled so that the token's sum stays. A token keeps at least the choices of the rank that weighs most.

    Returns: expert_TK, weight_TK (differentiable)."""
    with torch.no_grad():
        kept_TW = torch.ones(len(expert_TK), limit.num_ranks, dtype=torch.bool, device=expert_TK.device)
        for size, count in limit._stages():
            kept_TW = limit._narrowed(kept_TW, size, count, None, weight_TK, expert_TK.long(), layout)
        present_TKW = limit._of(layout, expert_TK.device).present_WE.t()[expert_TK.clamp(min=0).long()]
        kept_TK = (present_TKW & kept_TW.unsqueeze(1)).any(-1) & (expert_TK >= 0)
    left_TK = weight_TK.masked_fill(~kept_TK, 0.0)
    total_T1 = weight_TK.masked_fill(expert_TK < 0, 0.0).sum(1, keepdim=True)
    left_T1 = left_TK.sum(1, keepdim=True)
    scale_T1 = torch.where(kept_TK.all(1, keepdim=True), 1.0, total_T1 / torch.where(left_T1 == 0, 1.0, left_T1))
    return expert_TK.masked_fill(~kept_TK, -1), left_TK * scale_T1


def _cover(present_TKG: torch.Tensor, share_TK: torch.Tensor, count: int) -> torch.Tensor:
    """(T, G) bool: `count` groups, one after the other the one that holds most of what is not held yet. Tokens that
    need fewer get fewer."""
    # Something for each choice: where shares are zero, the group that holds more choices comes first.
    left_TK = share_TK.detach().float().clamp(min=1e-12) * present_TKG.any(-1)
    kept_TG = torch.zeros_like(present_TKG[:, 0])
    for _ in range(count):
        gain_TG = (left_TK.unsqueeze(-1) * present_TKG).sum(1)
        best_T1 = gain_TG.argmax(-1, keepdim=True)
        kept_TG = kept_TG.scatter(1, best_T1, kept_TG.gather(1, best_T1) | (left_TK > 0).any(1, keepdim=True))
        held_TK = present_TKG.gather(2, best_T1.unsqueeze(1).expand(-1, present_TKG.shape[1], -1)).squeeze(-1)
        left_TK = left_TK.masked_fill(held_TK, 0.0)
    return kept_TG


def _top(value_TG: torch.Tensor, count: int) -> torch.Tensor:
    # Of equal ones the first.
    best = value_TG.sort(dim=-1, descending=True, stable=True).indices[:, :count]
    return torch.zeros_like(value_TG, dtype=torch.bool).scatter_(1, best, True)
