"""Layouts and choices on which the kernel of `assign` must equal plain PyTorch. Shared by the tests in the interpreter
and on GPUs."""

from __future__ import annotations

from typing import NamedTuple

import torch

from carpool import ExpertLayout


class Case(NamedTuple):
    """One problem.

    Attributes:
        uneven: ranks own unequally many experts (some maybe none), and some slots are empty.
        limited: each token may be served by some ranks only (one choice in twenty by none of those that hold it).
        same: a token may name an expert twice.
        source: the rank of the tokens.
        slices: of each expert; `replicas` and unevenness are then of slices.
    """

    experts: int
    ranks: int
    replicas: int
    top_k: int
    tokens: int = 37
    uneven: bool = False
    limited: bool = False
    same: bool = False
    source: int = 0
    slices: int = 1

    def __str__(self) -> str:
        flags = [name for name in ("uneven", "limited", "same") if getattr(self, name)]
        flags += [f"slices{self.slices}"] if self.slices > 1 else []
        sizes = f"E{self.experts}-W{self.ranks}-replicas{self.replicas}-K{self.top_k}-T{self.tokens}"
        return "-".join([sizes, *flags, f"from{self.source}"])


CASES = [
    Case(64, 4, 8, 8),
    Case(64, 4, 8, 8, limited=True, source=3),
    Case(64, 4, 8, 8, tokens=1, uneven=True),
    Case(64, 4, 8, 8, tokens=0),
    Case(12, 4, 20, 8, uneven=True, source=1),
    Case(12, 4, 20, 8, uneven=True, limited=True, source=2),
    Case(12, 6, 30, 8, tokens=300),
    Case(12, 6, 20, 6, same=True),
    Case(8, 4, 3, 8, same=True, source=1),
    Case(9, 2, 1, 1, source=1),
    Case(9, 2, 5, 3, uneven=True, limited=True),
    Case(37, 5, 37, 3, uneven=True, source=4),
    Case(37, 7, 60, 16, same=True, uneven=True, source=2),
    Case(64, 16, 64, 11, limited=True, source=9),
    Case(256, 32, 64, 8, source=17),
    Case(256, 32, 256, 8, uneven=True),
    Case(130, 33, 300, 13, uneven=True, limited=True, source=32),
    Case(128, 63, 200, 16, uneven=True, source=62),
    Case(128, 63, 400, 9, limited=True, same=True, source=31),
    Case(16, 4, 0, 5, source=1),
    Case(17, 3, 0, 4, uneven=True, limited=True),
    Case(8, 4, 0, 2, slices=2, source=1),
    Case(9, 5, 30, 3, slices=3, uneven=True, limited=True, source=4),
    Case(8, 16, 40, 2, slices=4, source=7),
]


class AssignProblem(NamedTuple):
    expert_TK: torch.Tensor
    layout: ExpertLayout
    source: int
    serving_TW: torch.Tensor | None


def problem(case: Case, seed: int = 0) -> AssignProblem:
    generator = torch.Generator().manual_seed(seed)
    layout = _layout(case, generator)
    popular_E = (1.0 / torch.arange(1, case.experts + 1)).sqrt().expand(max(case.tokens, 1), -1)
    expert_TK = torch.multinomial(popular_E, case.top_k, replacement=case.same, generator=generator).int()[
        : case.tokens
    ]
    expert_TK[torch.rand(expert_TK.shape, generator=generator) < 0.15] = -1
    expert_TK[5:6] = -1
    serving_TW = None
    if case.limited:
        serving_TW = torch.rand(case.tokens, case.ranks, generator=generator) < 0.6
        serving_TW[3:4] = False
    return AssignProblem(expert_TK, layout, case.source, serving_TW)


def _layout(case: Case, generator: torch.Generator) -> ExpertLayout:
    def draw(high: int) -> int:
        return int(torch.randint(high, (), generator=generator))

    names = case.experts * case.slices
    order = torch.randperm(names, generator=generator).tolist()
    homes: list[list[int]] = [[] for _ in range(case.ranks)]
    for number, expert in enumerate(order):
        homes[draw(case.ranks) if case.uneven else number % case.ranks].append(expert)
    slots = [list(rank) for rank in homes]
    for _ in range(case.replicas):
        # Popular ones are copied more often; a rank that has the expert stays as it is.
        expert, rank = draw(1 + draw(names)), draw(case.ranks)
        if expert not in slots[rank]:
            slots[rank].append(expert)
    if case.uneven:
        for rank in slots[::2]:
            rank.insert(draw(len(rank) + 1), -1)
    return ExpertLayout(tuple(map(tuple, homes)), tuple(map(tuple, slots)), case.slices)
