"""What a router decides: K expert ids and K weights for each token.

Whoever makes one, our `Router`, a model of Hugging Face or a recording, the rest of the layer treats alike.
Choices may be dropped between a router and the ride: `DropOptions`. LOSSY, off by default.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Routing:
    """Which experts serve each token, and with which weight.

    Attributes:
        expert_TK: (T, K) int32, logical expert ids, -1 for none. A token names an expert at most once.
        weight_TK: (T, K) float32, or float64 of tokens that are; it travels as float32. None in a recording of choices
            only: the router then computes the weights.
    """

    expert_TK: torch.Tensor
    weight_TK: torch.Tensor | None

    def detach(self) -> Routing:
        """The same routing as a recording, which `moe(x, routing=...)` replays on any layout."""
        return Routing(self.expert_TK, None if self.weight_TK is None else self.weight_TK.detach())

    def of_slices(self, slices: int) -> Routing:
        """The same choices once for each slice of an expert (`ExpertLayout.slices`), in the order of `assign`: slices
        have the weight of their expert, whose gradient is the sum of theirs."""
        if slices == 1:
            return self
        wide = [None if of_TK is None else _repeated(of_TK, slices) for of_TK in (self.expert_TK, self.weight_TK)]
        assert wide[0] is not None
        return Routing(wide[0], wide[1])

    def check(self, num_tokens: int, num_experts: int) -> int:
        """The smallest id. ValueError if this cannot route `num_tokens` tokens to `num_experts` experts.

        Looks at values (one host synchronisation), so it is for recordings and other input of a user, not for the
        hot path."""
        shape = tuple(self.expert_TK.shape)
        if len(shape) != 2 or shape[0] != num_tokens:
            raise ValueError(f"routing.expert_TK has shape {shape}, but the layer got {num_tokens} tokens")
        if not shape[1]:
            raise ValueError(f"routing.expert_TK has shape {shape}: it has no choices; -1 means no expert")
        if self.expert_TK.dtype != torch.int32:
            raise ValueError(f"routing.expert_TK must be int32, not {self.expert_TK.dtype}; use .int()")
        if self.weight_TK is not None and tuple(self.weight_TK.shape) != shape:
            raise ValueError(f"routing.weight_TK has shape {tuple(self.weight_TK.shape)}, expert_TK has {shape}")
        if not self.expert_TK.numel():
            return 0
        ids_TK = self.expert_TK.sort(dim=1).values
        twice = ((ids_TK[:, 1:] == ids_TK[:, :-1]) & (ids_TK[:, 1:] >= 0)).any()
        least, most, repeats = torch.stack([ids_TK[:, 0].min(), ids_TK[:, -1].max(), twice.int()]).tolist()
        if least < -1 or most >= num_experts:
            ids = f"ids from {least} to {most}; experts are 0..{num_experts - 1}, and -1 means none"
            raise ValueError(f"routing.expert_TK holds {ids}")
        if repeats:
            raise ValueError("routing.expert_TK names an expert twice for one token; add the two weights instead")
        return int(least)


def _repeated(of_TK: torch.Tensor, times: int) -> torch.Tensor:
    """Example, 2 times: [[3, 5]]  ->  [[3, 3, 5, 5]]"""
    return of_TK.unsqueeze(2).expand(-1, -1, times).flatten(1)


@dataclass(frozen=True)
class DropOptions:
    """Which choices are not served. LOSSY; the defaults drop nothing. What is kept is not weighed anew.

    Attributes:
        capacity_factor: at most ceil(capacity_factor * T * K / E) choices of each expert are kept among this rank's T
            tokens that choose any, and the others dropped. None: no limit.
        first_choices_first: who fills that capacity: all tokens' best choices, then all second ones, and so on
            (GShard, arXiv 2006.16668, algorithm 1). False: token after token.
        random_second: with K = 2 and while training, a token keeps its second choice with probability
            min(1, 2 w2 / (w1 + w2)) (GShard, "random routing"). One that is not kept takes no place.

    Example, E = 2, K = 1, T = 3, capacity_factor 1: each expert keeps ceil(3 / 2) = 2 choices; of 0, 0, 0 the third is
    dropped.
    """

    capacity_factor: float | None = None
    first_choices_first: bool = False
    random_second: bool = False

    def check(self, top_k: int) -> None:
        """Raise ValueError for what cannot be with K choices per token."""
        if self.capacity_factor is not None and self.capacity_factor <= 0:
            raise ValueError(f"capacity_factor={self.capacity_factor} must be positive, or None to drop nothing")
        if self.first_choices_first and self.capacity_factor is None:
            raise ValueError("first_choices_first says who fills a capacity, but capacity_factor is None; set it")
        if self.random_second and top_k != 2:
            raise ValueError(f"random_second drops second choices of two, but a token has {top_k}")

    @property
    def active(self) -> bool:
        return self.capacity_factor is not None or self.random_second

    @property
    def lossy_reasons(self) -> list[str]:
        """For logs and reports: how this changes the model's function."""
        reasons = []
        if self.capacity_factor is not None:
            reasons.append(f"choices beyond {self.capacity_factor:g} times an expert's even share are dropped")
        if self.random_second:
            reasons.append("second choices are dropped at random")
        return reasons

    @torch.no_grad()
    def kept(self, routing: Routing, num_experts: int, training: bool) -> torch.Tensor:
        """(T, K) bool: whether a choice is served. Looks at no value on the host; random numbers are the device's."""
        expert_TK, weight_TK = routing.expert_TK, routing.weight_TK
        kept_TK = expert_TK >= 0
        if self.random_second and training:
            assert weight_TK is not None
            share_T = weight_TK[:, 1] / weight_TK.sum(1).clamp(min=1e-20)
            kept_TK[:, 1] &= torch.rand_like(share_T) < 2 * share_T
        if self.capacity_factor is None:
            return kept_TK
        # Padding, which chooses nothing, is no token.
        choices = (expert_TK >= 0).any(1).sum() * expert_TK.shape[1]
        capacity = torch.ceil(self.capacity_factor * choices.double() / num_experts)
        # N: choices in the order in which they take their places.
        order = (lambda matrix: matrix.t()) if self.first_choices_first else (lambda matrix: matrix)
        # One expert more, of choices that take no place.
        expert_N = order(torch.where(kept_TK, expert_TK, num_experts)).reshape(-1).long()
        sorted_N, choice_N = expert_N.sort(stable=True)
        every_N = torch.arange(len(expert_N), device=expert_N.device)
        place_N = torch.empty_like(expert_N).scatter_(0, choice_N, every_N - torch.searchsorted(sorted_N, sorted_N))
        fits_N = (expert_N < num_experts) & (place_N < capacity)
        return order(fits_N.view(order(expert_TK).shape))

    def drop(self, routing: Routing, num_experts: int, training: bool) -> tuple[Routing, torch.Tensor]:
        """(What is left, how many choices were dropped, as a scalar on the device)."""
        assert routing.weight_TK is not None
        kept_TK = self.kept(routing, num_experts, training)
        dropped = ((routing.expert_TK >= 0) & ~kept_TK).sum()
        expert_TK, weight_TK = routing.expert_TK.masked_fill(~kept_TK, -1), routing.weight_TK.masked_fill(~kept_TK, 0.0)
        return Routing(expert_TK, weight_TK), dropped


class Rule(NamedTuple):
    """How to score, select, weigh and balance; fields as the arguments of `Router`."""

    top_k: int
    score: Literal["softmax", "sigmoid"] = "softmax"
    normalize: bool = True
    scaling_factor: float = 1.0
    num_groups: int = 0
    topk_groups: int = 0
    aux_loss_coef: float = 0.0
    z_loss_coef: float = 0.0


class Routed(NamedTuple):
    """What becomes of logits.

    Attributes:
        expert_TK: (T, K) int32, best first.
        weight_TK: (T, K), differentiable.
        aux_loss: scalar, differentiable.
        count_E: (E,) int64, choices of each expert by these tokens.
    """

    expert_TK: torch.Tensor
    weight_TK: torch.Tensor
    aux_loss: torch.Tensor
    count_E: torch.Tensor


def sum_over(total: torch.Tensor, groups: Sequence[dist.ProcessGroup | None]) -> int:
    """Sum in place over all ranks of the groups, one group after another; how many ranks they are."""
    ranks = 1
    for group in groups:
        dist.all_reduce(total, group=group)
        ranks *= dist.get_world_size(group)
    return ranks
