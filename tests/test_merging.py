"""Similar rows travel as one: which they are, what comes back, and how many rows are left."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import carpool
from carpool import ExpertLayout, Routing
from carpool.layout.topology import Topology
from carpool.placement import predict
from carpool.transport import Codecs, TransportOptions
from carpool.transport.codecs import TOKEN_VERBS
from carpool_systems.merging import LSH as Hashed
from carpool_systems.merging import Condense
from tests.ranks import WORLD_SIZE, Ranks, mesh

H, F, E, K, T = 24, 16, 8, 3, 21
LAYOUT = ExpertLayout.contiguous(E, WORLD_SIZE)
LSH = Codecs(merge="lsh", merge_options={"hashes": 1, "width": 2})
CONDENSE = Codecs(merge="condense", merge_options={"similarity": 0.95})
NEVER = Codecs(merge="condense", merge_options={"similarity": 1.0})
CASES = [("alltoall", LSH), ("dedup", CONDENSE), ("hierarchical", LSH), ("dedup", NEVER)]


def problem(rank: int) -> dict[str, torch.Tensor]:
    """Tokens of a few directions, so that some are alike."""
    generator = torch.Generator().manual_seed(rank)
    directions = torch.randn(4, H, generator=generator)
    x_TH = directions[torch.randint(4, (T,), generator=generator)] + 0.05 * torch.randn(T, H, generator=generator)
    expert_TK = torch.rand(T, E, generator=generator).argsort(1)[:, :K].int()
    expert_TK[::5, 1] = -1
    return {
        "x_TH": x_TH,
        "expert_TK": expert_TK,
        "weight_TK": torch.rand(T, K, generator=generator),
        "dy_TH": torch.randn(T, H, generator=generator),
    }


def weights() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(99)
    up_EFH = torch.randn(E, 2 * F, H, generator=generator) / H**0.5
    return up_EFH, torch.randn(E, H, F, generator=generator) / F**0.5


def with_weights(moe: Any, homes: slice) -> Any:
    with torch.no_grad():
        for parameter, value in zip((moe.up_proj, moe.down_proj), weights(), strict=True):
            parameter.copy_(value[homes])
    return moe


def ride_merged(cases: list[Any]) -> list[dict[str, Any]]:
    rank, found = dist.get_rank(), []
    homes = slice(rank * E // WORLD_SIZE, (rank + 1) * E // WORLD_SIZE)
    ep_mesh = mesh((1, WORLD_SIZE), ("edp", "ep"))["ep"]
    for name, codecs in cases:
        options, given = TransportOptions(codecs=codecs), problem(rank)
        moe = carpool.MoE(H, F, E, K, ep_mesh=ep_mesh, transport=name, transport_options=options)
        with_weights(moe, homes)
        x_TH, weight_TK = (given[key].requires_grad_() for key in ("x_TH", "weight_TK"))
        y_TH = moe(x_TH, routing=Routing(given["expert_TK"], weight_TK))
        y_TH.backward(given["dy_TH"])
        stats, traffic = moe.stats(), moe.core.stats.traffic
        assert moe.core.why_not_move() == "", "its backward has run"
        found.append(
            {
                "y": y_TH.detach(), "dx": x_TH.grad, "dweight": weight_TK.grad,
                "dup": moe.up_proj.grad, "ddown": moe.down_proj.grad,
                "tokens": stats.tokens, "top_k": stats.num_experts_per_tok, "load": stats.load_E,
                "bytes": traffic.bytes, "baseline": traffic.baseline, "rows": sum(traffic.rows["dispatch"]),
            }
        )  # fmt: skip
    return found


def by_hand(codecs: Codecs, rank: int, one: Any) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """What a rank's tokens give, group by group, and the expert of each row that rides."""
    given = problem(rank)
    x_TH, weight_TK = (given[key].requires_grad_() for key in ("x_TH", "weight_TK"))
    choices = [(t, k) for t in range(T) for k in range(K) if given["expert_TK"][t, k] >= 0]
    experts = {at: int(given["expert_TK"][at]) for at in choices}
    away = [at for at in choices if experts[at] // (E // WORLD_SIZE) != rank]
    rows = torch.stack([x_TH[t] for t, _ in away]).detach()
    merger: Any = codecs.merger()
    group_N, number = merger.groups(rows, torch.tensor([experts[at] for at in away]))
    groups = [[at for at, group in zip(away, group_N.tolist(), strict=True) if group == g] for g in range(number)]
    groups += [[at] for at in choices if at not in away]
    y_TH, ridden = [torch.zeros(H) for _ in range(T)], []
    for members in groups:
        assert len({experts[at] for at in members}) == 1
        expert = experts[members[0]]
        if codecs.merge == "lsh":
            row = torch.stack([x_TH[t] for t, _ in members]).mean(0)
        else:
            row = x_TH[members[0][0]]
        ridden.append(expert)
        out = one(row[None], routing=Routing(torch.tensor([[expert]], dtype=torch.int32), torch.ones(1, 1)))[0]
        for t, k in members:
            rest = x_TH[t] - row if codecs.merge == "lsh" else 0.0
            y_TH[t] = y_TH[t] + weight_TK[t, k] * (out + rest)
    y = torch.stack(y_TH)
    y.backward(given["dy_TH"])
    return {"y": y.detach(), "dx": x_TH.grad, "dweight": weight_TK.grad}, torch.tensor(ridden, dtype=torch.int32)


@pytest.fixture(scope="module")
def rides(ranks: Ranks) -> list[list[dict[str, Any]]]:
    return ranks(ride_merged, CASES)


@pytest.mark.parametrize("number", range(len(CASES)))
def test_each_gets_what_its_group_computed(rides: list[list[dict[str, Any]]], number: int) -> None:
    name, codecs = CASES[number]
    one, ridden = with_weights(carpool.MoE(H, F, E, 1), slice(None)), []
    for rank, found in enumerate(rides):
        want, experts = by_hand(codecs, rank, one)
        ridden.append(experts[:, None])
        for key, right in want.items():
            torch.testing.assert_close(found[number][key], right, rtol=1e-4, atol=1e-5, msg=key)
        assert (found[number]["tokens"], found[number]["top_k"]) == (T, K)
    for key, parameter in (("dup", one.up_proj), ("ddown", one.down_proj)):
        got = torch.cat([found[number][key] for found in rides])
        torch.testing.assert_close(got, parameter.grad, rtol=1e-4, atol=1e-4, msg=key)

    shape: dict[str, Any] = {"hidden": H, "element_size": 4, "topology": Topology.even(WORLD_SIZE, 2)}
    volume = predict(name, ridden, LAYOUT, **shape)
    every = [problem(rank)["expert_TK"] for rank in range(WORLD_SIZE)]
    baseline = predict("alltoall", every, LAYOUT, **shape)
    for verb in TOKEN_VERBS:
        counted = np.array([found[number]["bytes"][verb] for found in rides])
        np.testing.assert_array_equal(counted, volume.bytes_WW[verb], err_msg=verb)
        assert sum(found[number]["baseline"][verb] for found in rides) == baseline.bytes_remote(verb)
    alone = [expert_TK[expert_TK >= 0][:, None] for expert_TK in every]
    merges = volume.bytes_remote("dispatch") < predict(name, alone, LAYOUT, **shape).bytes_remote("dispatch")
    assert merges == (codecs != NEVER), "no two rows are equal here"
    loads = np.array([found[number]["load"] for found in rides])
    assert np.array_equal(loads.sum(0), np.bincount(torch.cat(alone)[:, 0], minlength=E))


def test_alike_are_alike_enough() -> None:
    generator = torch.Generator().manual_seed(0)
    x_NH = torch.randn(300, 8, generator=generator)
    slot_N = torch.randint(3, (300,), generator=generator)
    group_N, number = Condense(0.8).groups(x_NH, slot_N)
    assert 3 < number < 250
    for group in range(number):
        members = (group_N == group).nonzero().squeeze(1)
        first = x_NH[members[0]]
        assert len(set(slot_N[members].tolist())) == 1
        assert (torch.cosine_similarity(x_NH[members], first[None]) >= 0.8 - 1e-6).all()


def test_equal_hashes_are_the_same_direction() -> None:
    x_NH = torch.randn(50, 12, generator=torch.Generator().manual_seed(1))
    merger, slot_N = Hashed(hashes=3), torch.zeros(200, dtype=torch.int64)
    scaled = torch.cat([x_NH, 3 * x_NH, -x_NH, x_NH.flip(1)])
    group_N, number = merger.groups(scaled, slot_N)
    assert torch.equal(group_N[:50], group_N[50:100]), "how long a row is does not matter"
    assert not (group_N[:50] == group_N[100:150]).any(), "its sign does"
    assert number > 100
    assert merger.groups(scaled[:0], slot_N[:0])[1] == Condense(0.95).groups(scaled[:0], slot_N[:0])[1] == 0


@pytest.mark.parametrize(
    "wrong",
    [
        {"merge": "lhs"},
        {"merge": "lsh", "merge_options": {"hashes": 0}},
        {"merge": "lsh", "merge_options": {"hashes": 20}},
        {"merge": "condense", "merge_options": {"similarity": 2}},
    ],
)
def test_merging_that_cannot_be_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="codec merge"):
        Codecs(**wrong)
