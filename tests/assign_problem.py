"""Layouts and choices on which the kernel of `assign` must equal plain PyTorch. Shared by the tests in the interpreter
and on GPUs."""

from __future__ import annotations

from typing import NamedTuple

import torch

from carpool import ExpertLayout


class Case(NamedTuple):
    """One problem.

    Attributes:
        uneven: ranks own unequally many experts, some maybe none.
        slices: of each expert; unevenness is then of slices.
    """

    experts: int
    ranks: int
    top_k: int
    tokens: int = 37
    uneven: bool = False
    slices: int = 1

    def __str__(self) -> str:
        words = [f"E{self.experts}", f"W{self.ranks}", f"K{self.top_k}", f"T{self.tokens}"]
        words += ["uneven"] * self.uneven + [f"slices{self.slices}"] * (self.slices > 1)
        return "-".join(words)


CASES = [
    Case(64, 4, 8),
    Case(64, 4, 8, tokens=1, uneven=True),
    Case(64, 4, 8, tokens=0),
    Case(12, 6, 8, tokens=300),
    Case(9, 2, 1),
    Case(37, 7, 16, uneven=True),
    Case(256, 32, 8),
    Case(130, 33, 13, uneven=True),
    Case(16, 1, 5),
    Case(8, 4, 2, slices=2),
    Case(9, 5, 3, slices=3, uneven=True),
    Case(8, 16, 2, slices=4),
]


def problem(case: Case, seed: int = 0) -> tuple[torch.Tensor, ExpertLayout]:
    """expert_TK, and the layout."""
    generator = torch.Generator().manual_seed(seed)
    names = case.experts * case.slices
    homes: list[list[int]] = [[] for _ in range(case.ranks)]
    for number, expert in enumerate(torch.randperm(names, generator=generator).tolist()):
        drawn = int(torch.randint(case.ranks, (), generator=generator))
        homes[drawn if case.uneven else number % case.ranks].append(expert)
    expert_TK = torch.rand(case.tokens, case.experts, generator=generator).argsort(1)[:, : case.top_k].int()
    expert_TK[torch.rand(expert_TK.shape, generator=generator) < 0.15] = -1
    expert_TK[5:6] = -1
    return expert_TK, ExpertLayout(tuple(map(tuple, homes)), case.slices)
