"""Choices that are dropped between the router and the ride. LOSSY, off by default."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from carpool.routing.routing import Routing


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
        left = Routing(expert_TK, weight_TK, routing.serving_TW)
        return left, dropped
