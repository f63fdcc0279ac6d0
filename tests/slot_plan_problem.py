"""Choices of ranks on which the kernels of a plan of spare slots must equal plain PyTorch. Shared by the tests in the
interpreter and on GPUs."""

from __future__ import annotations

from typing import NamedTuple

import torch

from carpool.replicas.slot_costs import Costs


class Case(NamedTuple):
    """One problem.

    Attributes:
        skew: the exponent of Zipf's law; None: every token chooses expert 1, if only once.
        uneven: homes are no blocks of experts, and ranks have unequally many, maybe none.
        nodes: among which ranks are divided; 0: copies may go anywhere.
    """

    ranks: int
    experts: int
    spare: int
    top_k: int = 4
    tokens: int = 48
    skew: float | None = 1.2
    costs: Costs = Costs()
    uneven: bool = False
    nodes: int = 0

    def __str__(self) -> str:
        sizes = f"W{self.ranks}-E{self.experts}-S{self.spare}-K{self.top_k}-T{self.tokens}-{self.skew}"
        more = f"-costs{self.costs.trip},{self.costs.fetch},{self.costs.limit}" if self.costs != Costs() else ""
        return f"{sizes}{more}{'-uneven' if self.uneven else ''}{f'-nodes{self.nodes}' if self.nodes else ''}"


CASES = [
    Case(2, 4, 1, 2),
    Case(1, 3, 2, 1),
    Case(2, 1, 1, 1, skew=None),
    Case(4, 16, 2, 3, uneven=True),
    Case(8, 64, 4, 8),
    Case(8, 64, 4, 8, skew=None),
    Case(8, 64, 4, 8, skew=0.0, costs=Costs(4, 20)),
    Case(8, 64, 4, 8, skew=0.7, uneven=True, costs=Costs(7, 100, 1100)),
    Case(4, 32, 3, 5, skew=1.0, costs=Costs(0, 3000)),
    Case(4, 32, 3, 5, skew=1.0, costs=Costs(40, 10, 1050)),
    Case(4, 32, 3, 5, skew=1.0, costs=Costs(2**20, 2**30, 2**20)),
    Case(3, 7, 1, 1, tokens=37),
    Case(3, 7, 3, 7, tokens=37, uneven=True, costs=Costs(4, 0)),
    Case(6, 37, 2, 3, tokens=119, nodes=2, costs=Costs(4, 10, 1200)),
    Case(8, 64, 2, 4, nodes=3, uneven=True),
    Case(5, 20, 8, 11, tokens=100, uneven=True),
    Case(33, 40, 8, 4, tokens=20),
    Case(16, 32, 1, 2, tokens=0),
    Case(64, 66, 1, 3, tokens=12, skew=None, costs=Costs(4, 2)),
]


class PlanArguments(NamedTuple):
    """Those of `plan_slots`."""

    load_WE: torch.Tensor
    home_E: torch.Tensor
    spare: int
    costs: Costs
    node_W: torch.Tensor | None


def random_plan(seed: int) -> PlanArguments:
    """Loads without tokens: ranks prefer their own experts, and one rank's experts have more than others."""
    generator = torch.Generator().manual_seed(seed)

    def draw(high: int, *shape: int) -> torch.Tensor:
        return torch.randint(high, shape, generator=generator)

    ranks, spare = 2 + int(draw(7)), 1 + int(draw(4))
    experts = ranks + int(draw(25))
    home_E = draw(ranks, experts)
    load_WE = draw(1 + int(draw(60)), ranks, experts) * draw(2, ranks, experts)
    load_WE *= 1 + (home_E == torch.arange(ranks)[:, None]) * draw(9)
    load_WE *= 1 + draw(9) * (home_E == draw(ranks))
    costs = Costs(int(draw(200)), int(draw(2) * draw(2000)), int(draw(2) * (1000 + draw(300))))
    node_W = torch.arange(ranks) // (1 + draw(3)) if draw(2) else None
    return PlanArguments(load_WE, home_E, spare, costs, node_W)


class SlotPlanProblem(NamedTuple):
    """choices: (T, K) int32 of each rank, some missing; the second rank has no tokens."""

    choices: list[torch.Tensor]
    load_WE: torch.Tensor
    home_E: torch.Tensor
    node_W: torch.Tensor | None


def problem(case: Case, seed: int = 0) -> SlotPlanProblem:
    generator = torch.Generator().manual_seed(seed)
    experts, ranks = case.experts, case.ranks
    weight_E = (torch.randperm(experts, generator=generator) + 1.0) ** -(case.skew or 0.0)
    choices = []
    for rank in range(ranks):
        number = 0 if rank == 1 else case.tokens
        expert_TK = torch.empty(number, case.top_k, dtype=torch.int32)
        if number:
            expert_TK = torch.multinomial(weight_E.expand(number, -1), case.top_k, generator=generator).int()
        if case.skew is None:
            chosen = min(1, experts - 1)
            expert_TK.masked_fill_(expert_TK == chosen, -1)
            expert_TK[:, -1] = chosen
        choices.append(expert_TK.masked_fill(torch.rand(expert_TK.shape, generator=generator) < 0.05, -1))
    load_WE = torch.stack([torch.bincount(one[one >= 0].long(), minlength=experts) for one in choices]).int()
    home_E = torch.arange(experts) * ranks // experts
    if case.uneven:
        home_E = torch.randint(ranks, (experts,), generator=generator)
    node_W = torch.arange(ranks) * case.nodes // ranks * 7 - 7 if case.nodes else None
    return SlotPlanProblem(choices, load_WE, home_E, node_W)
