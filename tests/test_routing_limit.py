"""Routing limited to few ranks: against a slow definition in plain Python, and over four ranks."""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import carpool
from carpool import ExpertLayout, assign
from carpool.layout.topology import Topology
from carpool.routing.limit import LimitOptions, RoutingLimit, drop_outside
from tests.layouts import layout_of
from tests.ranks import WORLD_SIZE, Ranks, mesh
from tests.reference import Problem, rank_loss, solve
from tests.test_parity import Case, build, problem

Layout = ExpertLayout


# -- the definition: one token after the other, plain Python ----------------------------------------------------------


def best(scores: list[float], count: int, among: Any) -> list[int]:
    return sorted(among, key=lambda e: (-scores[e], e))[:count]


def define(options: LimitOptions, layout: Layout, scores: list[float], shares: list[float], top_k: int) -> list[int]:
    """The experts of one token."""
    holds = [set(home) for home in layout.homes]
    ranks = set(range(len(holds)))
    size = len(holds) // options.num_nodes
    chosen = best(scores, top_k, range(len(scores)))
    nodes = [set(range(first, first + size)) for first in range(0, len(holds), size)]
    for groups, limit in ((nodes, options.limit_nodes), ([{r} for r in sorted(ranks)], options.limit_ranks)):
        if limit is None or limit >= len(groups):
            continue
        held = [set().union(*(holds[r] for r in group & ranks)) if group & ranks else set() for group in groups]
        if options.limit_by == "groups":
            copies = [[e for r in group for e in holds[r]] for group in groups]
            value = [sum(sorted((scores[e] for e in own), reverse=True)[:2]) if kept else -np.inf
                     for own, kept in zip(copies, held, strict=True)]  # fmt: skip
            kept = sorted(range(len(groups)), key=lambda g: -value[g])[:limit]
        else:
            left, kept = list(chosen), []
            while left and len(kept) < limit:
                kept.append(max(range(len(groups)), key=lambda g: (sum(shares[e] for e in left if e in held[g]), -g)))
                left = [e for e in left if e not in held[kept[-1]]]
        ranks &= set().union(*(groups[g] for g in kept))
        reach = set().union(*(holds[r] for r in ranks))
        chosen = best(scores, top_k, reach)
    return chosen


LAYOUTS = {
    "contiguous": ExpertLayout.contiguous(199, 4),
    "permuted": ExpertLayout.permuted([(7 * i) % 37 for i in range(37)], 4),
    "uneven": ExpertLayout([list(range(9)), list(range(9, 20)), list(range(20, 29)), list(range(29, 37))]),
    "eight": ExpertLayout.contiguous(64, 8),
}
TWO_NODES = Topology.even(4, 2)
OPTIONS = [
    *(LimitOptions(limit_ranks=d, limit_by=by) for d in (1, 2, 3) for by in ("score", "groups")),
    *(LimitOptions(limit_nodes=1, topology=TWO_NODES, limit_by=by) for by in ("score", "groups")),
    LimitOptions(limit_nodes=1, limit_ranks=1, topology=TWO_NODES),
    LimitOptions(limit_nodes=1, limit_ranks=2, topology=TWO_NODES, limit_by="groups"),
    LimitOptions(limit_nodes=2, limit_ranks=3, topology=Topology.even(4, 4)),
]


def name(options: LimitOptions) -> str:
    """For the lists of tests."""
    set_here = {key: value for key, value in vars(options).items() if value is not None and key != "topology"}
    return " ".join([f"{key}={value}" for key, value in set_here.items()] + [f"{options.num_nodes} nodes"])


def on(layout: Layout, options: LimitOptions) -> LimitOptions:
    """The same number of nodes for the ranks of this layout."""
    return replace(options, topology=Topology.even(layout.num_ranks, options.num_nodes))


def draw(tokens: int, experts: int, seed: int = 0, masked: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """(scores, shares): probabilities with a bias for the selection; `masked`: a third is unwanted."""
    generator = torch.Generator().manual_seed(seed)
    share_TE = (2 * torch.randn(tokens, experts, generator=generator)).softmax(-1)
    score_TE = share_TE + 0.01 * torch.randn(experts, generator=generator)
    if masked:
        score_TE[torch.rand(score_TE.shape, generator=generator) < 0.3] = -torch.inf
    return score_TE, share_TE


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("options", OPTIONS, ids=name)
def test_as_defined(options: LimitOptions, layout: str) -> None:
    where = LAYOUTS[layout]
    experts, top_k = where.num_experts, 5
    score_TE, share_TE = draw(137, experts)
    limit = RoutingLimit(on(where, options), where.num_ranks)
    expert_TK = limit.choose(score_TE, share_TE, top_k, where)
    for token in range(137):
        chosen = define(options, where, score_TE[token].tolist(), share_TE[token].tolist(), top_k)
        assert set(expert_TK[token].tolist()) == set(chosen)
    own = score_TE.gather(1, expert_TK)
    assert (own[:, :-1] >= own[:, 1:]).all(), "not best first"


@pytest.mark.parametrize("options", OPTIONS, ids=name)
def test_whatever_the_scores(options: LimitOptions) -> None:
    """K different experts within the limit, also where the router wants fewer or none at all."""
    for layout, tokens, masked in itertools.product(LAYOUTS.values(), (0, 1, 64), (False, True)):
        score_TE, share_TE = draw(tokens, layout.num_experts, masked=masked)
        if masked and tokens:
            score_TE[0] = -torch.inf
            share_TE[1 % tokens] = 0.0
        limit = RoutingLimit(on(layout, options), layout.num_ranks)
        expert_TK = limit.choose(score_TE, share_TE, 5, layout)
        assert (expert_TK.sort(1).values.diff(dim=1) > 0).all()
        slot_TK = assign(expert_TK.int(), layout)
        assert (slot_TK >= 0).all()
        rank_TK = slot_TK.div(layout.slots_per_rank, rounding_mode="floor")
        assert (layout.expert_WS.flatten()[slot_TK.long()] == expert_TK).all()
        visits_TW = (rank_TK.unsqueeze(-1) == torch.arange(layout.num_ranks)).any(1)
        if options.limit_ranks:
            assert (visits_TW.sum(1) <= options.limit_ranks).all()
        if options.limit_nodes:
            nodes_TN = visits_TW.unflatten(1, (options.num_nodes, -1)).any(-1)
            assert (nodes_TN.sum(1) <= options.limit_nodes).all()


@pytest.mark.parametrize(
    "options",
    [LimitOptions(limit_ranks=2), LimitOptions(limit_nodes=1, topology=TWO_NODES, limit_ranks=1)],
    ids=name,
)
def test_dropping_where_scores_are_unknown(options: LimitOptions) -> None:
    layout, generator = LAYOUTS["contiguous"], torch.Generator().manual_seed(0)
    expert_TK = torch.rand(200, 199, generator=generator).argsort(1)[:, :8].int()
    expert_TK[::3, 5:] = -1
    expert_TK[7] = -1
    weight_TK = torch.rand(200, 8, generator=generator, dtype=torch.float64, requires_grad=True)
    limit = RoutingLimit(options, 4)
    kept_TK, scaled_TK = drop_outside(limit, expert_TK, weight_TK, layout)
    real_TK = expert_TK >= 0
    assert ((kept_TK == expert_TK) | (kept_TK == -1)).all() and (kept_TK < 0).any()
    assert ((kept_TK >= 0).any(1) == real_TK.any(1)).all(), "a token lost all its experts"
    total_T = weight_TK.masked_fill(~real_TK, 0.0).sum(1)
    torch.testing.assert_close(scaled_TK.sum(1), total_T)
    home_E = torch.tensor([rank for rank, _ in layout.home_of])
    visits_TW = ((home_E[kept_TK.long()].unsqueeze(-1) == torch.arange(4)) & (kept_TK >= 0).unsqueeze(-1)).any(1)
    assert (visits_TW.sum(1) <= (options.limit_ranks or 4)).all()
    whole_T = (kept_TK == expert_TK).all(1) & real_TK.all(1)
    assert torch.equal(scaled_TK[whole_T], weight_TK[whole_T])
    assert torch.autograd.gradcheck(lambda w: drop_outside(limit, expert_TK[:9], w, layout)[1], weight_TK[:9])


@pytest.mark.parametrize("options", OPTIONS, ids=name)
def test_nothing_is_read_from_the_device(options: LimitOptions) -> None:
    """The meta device has no values: whoever reads one fails."""
    layout = LAYOUTS["permuted"]
    score_TE = torch.empty(64, 37, device="meta")
    limit = RoutingLimit(options, 4)
    expert_TK = limit.choose(score_TE, score_TE, 5, layout)
    assert assign(expert_TK.int(), layout).shape == (64, 5)
    weight_TK = torch.empty(64, 5, device="meta")
    assert drop_outside(limit, expert_TK.int(), weight_TK, layout)[1].shape == (64, 5)


def test_errors_say_what_to_do() -> None:
    for options, message in [
        (LimitOptions(limit_by="best"), "limit_by='best' is not known"),  # type: ignore[arg-type]
        (LimitOptions(limit_ranks=0), "limit_ranks=0 must be at least 1"),
        (LimitOptions(topology=Topology.even(6, 3)), "the topology of the limit has 6 ranks, but the expert-parallel"),
        (LimitOptions(limit_nodes=1, topology=Topology((0, 0, 0, 1), (0, 0, 0, 1))), "equally many consecutive ranks"),
    ]:
        with pytest.raises(ValueError, match=message):
            RoutingLimit(options, 4)
    score_TE, share_TE = draw(3, 12)
    with pytest.raises(ValueError, match="limit_ranks: 1 rank may hold only 3 different experts, fewer than the 4"):
        RoutingLimit(LimitOptions(limit_ranks=1), 4).choose(score_TE, share_TE, 4, ExpertLayout.contiguous(12, 4))


def test_what_it_says_of_itself() -> None:
    assert LimitOptions().lossy_reasons(4) == [] and not LimitOptions(limit_ranks=4).active(4)
    options = LimitOptions(limit_ranks=2, limit_nodes=1, topology=TWO_NODES)
    assert options.lossy_reasons(4) == [
        "each token's experts are limited to 1 node, by score",
        "each token's experts are limited to 2 ranks, by score",
    ]


# -- the layer on four ranks -----------------------------------------------------------------------------------------

CASES = [
    (Case(), LimitOptions(limit_ranks=1)),
    (Case(top_k=4, layout="permuted"), LimitOptions(limit_ranks=2)),
    (Case(top_k=4, layout="permuted", score="sigmoid", selection="bias", balance="aux+z", scaling=2.5),
     LimitOptions(limit_ranks=2, limit_by="groups")),
    (Case(top_k=5, normalize=False, balance="aux"), LimitOptions(limit_ranks=2)),
    (Case(top_k=4, layout="uneven", tokens="empty_ranks"), LimitOptions(limit_ranks=3)),
    (Case(top_k=3, layout="permuted", selection="groups"), LimitOptions(limit_ranks=3)),
    (Case(top_k=4, layout="permuted"), LimitOptions(limit_nodes=1, topology=TWO_NODES)),
    (Case(top_k=2, tokens="no_tokens"), LimitOptions(limit_ranks=1)),
]  # fmt: skip


def _step(case: Case, options: LimitOptions | None) -> dict[str, Any]:
    rank, numbers = dist.get_rank(), problem(case)
    moe = build(case)
    reasons = moe.set_limit(options)
    x = numbers.x[rank].clone().requires_grad_()
    y = moe(x)
    (rank_loss(y.float(), numbers.projection[rank]) + moe.aux_loss).backward()
    grid = mesh((1, WORLD_SIZE), ("edp", "ep"))
    carpool.reduce_gradients(moe, grid["ep"], grid["edp"])
    stats = moe.stats()
    assert moe.routing is not None
    return {
        "y": y.detach().numpy(),
        "x": x.grad.numpy() / WORLD_SIZE,
        "aux": moe.aux_loss.item(),
        "gradients": {name: p.grad.numpy() for name, p in moe.named_parameters()},
        "expert": moe.routing.expert_TK.numpy(),
        "copies": stats.copies_per_token,
        "rows": stats.rows_dispatched,
        "by_rank": list(moe.core.stats.traffic.rows["dispatch"]),
        "reasons": reasons,
    }


@functools.cache
def _define_all(case: Case, options: LimitOptions) -> list[list[set[int]]]:
    """The experts of each token of each rank, from the definition."""
    numbers, layout = problem(case), layout_of(case.layout, 4)
    weight_EH = numbers.parameters["router.weight"]
    result = []
    for x_TH in numbers.x:
        logits_TE = x_TH @ weight_EH.t()
        share_TE = logits_TE.softmax(-1) if case.score == "softmax" else logits_TE.sigmoid()
        score_TE = share_TE + numbers.parameters.get("selection_bias", torch.zeros(1))
        result.append(
            [
                set(define(options, layout, s, p, case.top_k))
                for s, p in zip(score_TE.tolist(), share_TE.tolist(), strict=True)
            ]
        )
    return result


@pytest.mark.parametrize("number", range(len(CASES)), ids=[f"{case}-{options}" for case, options in CASES])
def test_four_ranks_as_one_process_with_the_same_choices(ranks: Ranks, number: int) -> None:
    case, options = CASES[number]
    results = ranks(_step, case, options)
    numbers = problem(case)
    expert = [torch.from_numpy(result["expert"]) for result in results]
    assert all((e.long().sort(1).values.diff(dim=1) > 0).all() for e in expert), "an expert twice"
    expected = solve(Problem(numbers.spec, numbers.parameters, numbers.x, numbers.projection, expert=expert))
    layout = layout_of(case.layout, 4)
    largest = max(float(g.abs().max()) for g in expected.gradients.values() if g.numel())
    for rank, result in enumerate(results):
        np.testing.assert_allclose(result["y"], expected.y[rank].numpy(), atol=2e-5)
        np.testing.assert_allclose(result["x"], expected.gradients[f"x {rank}"].numpy(), atol=1e-5 * largest)
        np.testing.assert_allclose(result["aux"], float(expected.aux), rtol=1e-5, atol=1e-7)
        for name, got in result["gradients"].items():
            want = expected.gradients[name].numpy()
            want = want[list(layout.homes[rank])] if name.startswith(("up_", "down_")) else want
            np.testing.assert_allclose(got, want, atol=1e-5 * largest, err_msg=name)
        if options.limit_ranks:
            assert result["copies"] <= options.limit_ranks
            assert result["rows"] <= options.limit_ranks * len(numbers.x[rank])
        if options.limit_nodes:
            ranks_of = torch.tensor([r for r, _ in layout.home_of])[expert[rank].long()]
            assert ((ranks_of // 2) == (ranks_of // 2)[:, :1]).all()
        assert result["reasons"] == options.lossy_reasons(4)
    if case.selection != "groups":
        chosen = [[set(row) for row in e.tolist()] for e in expert]
        assert chosen == _define_all(case, options)


@pytest.mark.parametrize(
    ("top_k", "options"),
    [
        # Of all ranks: there is no limit.
        (4, LimitOptions(limit_ranks=9, limit_nodes=2, topology=TWO_NODES)),
        # Three ranks for two experts: the limit is looked at, and nothing is outside.
        (2, LimitOptions(limit_ranks=3)),
    ],
)
def test_a_limit_that_does_not_bind_changes_no_bit(ranks: Ranks, top_k: int, options: LimitOptions) -> None:
    case = Case(top_k=top_k, balance="aux+z")
    for free, limited in zip(ranks(_step, case, None), ranks(_step, case, options), strict=True):
        assert bool(limited["reasons"]) == (top_k == 2) and (free["expert"] == limited["expert"]).all()
        assert (free["y"] == limited["y"]).all() and (free["x"] == limited["x"]).all()
        for name, gradient in free["gradients"].items():
            assert (gradient == limited["gradients"][name]).all(), name
