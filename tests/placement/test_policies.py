"""Policies of published systems, and the decision to move."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from carpool.layout import ExpertLayout
from carpool.layout.topology import Topology
from carpool.placement.adopt import decide, moved_bytes
from carpool.placement.policies import POLICIES, LoadModel
from carpool.planner.machine.cost import CostModel
from carpool.planner.machine.hardware import DEFAULT, LinkRate
from carpool_systems.policies import lpt_cv, make_pool, pick
from tests.placement.synthetic import layer

PLAIN = ExpertLayout.contiguous(8, 4)
HOT = np.array([90, 10, 10, 10, 10, 10, 10, 10])
EVEN = np.full(8, 10)
MODEL = LoadModel(CostModel(hidden=2048, expert_hidden=256), top_k=2)


def test_the_model_of_time_by_hand() -> None:
    cost = CostModel(hidden=100, expert_hidden=10, element_size=4, tokens_per_rank=20,
                     hardware=replace(DEFAULT, nvlink=LinkRate(400.0, 1.0), flops=18_000.0))  # fmt: skip
    model = LoadModel(cost, top_k=2)  # 160 pairs, which is the sum of HOT
    assert model.rank_loads(HOT, PLAIN).tolist() == [100, 20, 20, 20]
    rides = 4 * (1 + 100 * (1 - 1 / 4) * 400 / 400)
    assert model.seconds(HOT, PLAIN) == pytest.approx(rides + 100 * 3 * 6 * 1000 / 18_000)
    # Over two nodes, half of the ranks are behind the slower link.
    far = replace(cost, hardware=replace(cost.hardware, network=LinkRate(40.0, 2.0)))
    rides = 4 * (2 + 100 * (1 / 2) * 400 / 40)
    over_nodes = LoadModel(far, top_k=2, topology=Topology.even(4, 2)).seconds(HOT, PLAIN)
    assert over_nodes == pytest.approx(rides + 100 * 3 * 6 * 1000 / 18_000)


def test_lpt_is_adopted_only_for_a_real_gain() -> None:
    load_E = np.array([40, 40, 10, 10, 10, 10, 10, 10])
    found = lpt_cv(load_E, PLAIN)
    assert found != PLAIN and MODEL.rank_loads(load_E, found).max() == 50
    assert lpt_cv(load_E, found) == found and lpt_cv(EVEN, PLAIN) == PLAIN
    nearly = np.array([10, 10, 10, 10, 10, 10, 10.5, 10.5])
    assert lpt_cv(nearly, PLAIN) == PLAIN and lpt_cv(nearly, PLAIN, fall=0.0) != PLAIN


def test_the_pool_offers_a_layout_for_each_part() -> None:
    trace = layer(24, 4, 3000, zipf=1.0)
    parts = np.array_split(np.arange(trace.num_tokens), 16)
    pool = make_pool(np.stack([trace.subset(part).load_E for part in parts]), 4, size=4)
    assert 1 < len(pool) <= 4
    start = ExpertLayout.contiguous(24, 4)
    model = LoadModel(top_k=4)
    found = pick(trace.load_E, start, model=model, pool=pool)
    assert found in pool and model.seconds(trace.load_E, found) < model.seconds(trace.load_E, start)
    assert pick(trace.load_E, found, model=model, pool=pool) is found


def test_every_policy_is_deterministic_and_keeps_sizes() -> None:
    for name, policy in POLICIES.items():
        found = policy(HOT, PLAIN)
        assert found == policy(HOT, PLAIN), name
        assert [len(home) for home in found.homes] == [2] * 4, name


# -- adopt ----------------------------------------------------------------------------------------------------------

SWAPPED = ExpertLayout(((4, 1), (2, 3), (0, 5), (6, 7)))
COST = CostModel(hidden=10, expert_hidden=10, element_size=2, hardware=replace(DEFAULT, nvlink=LinkRate(4200.0, 0.5)))


def test_moved_bytes_are_parameters_masters_and_moments() -> None:
    sent_WW, number = moved_bytes(PLAIN, SWAPPED, COST)
    assert number == 2 and sent_WW[0, 2] == sent_WW[2, 0] == 300 * 14 and sent_WW.sum() == 2 * 4200
    with pytest.raises(ValueError, match="cannot move 8 experts on 4 ranks to a layout of 8 on 2"):
        moved_bytes(PLAIN, ExpertLayout.contiguous(8, 2), COST)


def test_moves_only_if_it_pays() -> None:
    def ask(now: float, new: float, **options: int | float) -> tuple[bool, str]:
        decision = decide({"a": PLAIN}, {"a": SWAPPED}, now, new, cost=COST, **{"steps_left": 100, **options})  # type: ignore[arg-type]
        assert decision.cost_seconds == pytest.approx(1.5) and decision.moved_experts == 2
        assert decision.saved_seconds == pytest.approx((now - new) * decision.steps)
        return decision.adopt, decision.why

    assert ask(1.0, 0.9) == (True, ask(1.0, 0.9)[1])  # 10 s saved, 1.5 s paid
    assert ask(1.0, 0.9)[1].startswith("move: moving 2 experts (0.0 MB, 1500.00 ms) saves 100 ms per step (10.0%)")
    assert ask(1.0, 0.9, steps_left=20)[0] is False and "not 2 times its cost" in ask(1.0, 0.9, steps_left=20)[1]
    assert ask(1.0, 0.9, steps_left=20, hysteresis=1.0)[0] is True
    assert ask(1.0, 1.1)[0] is False and "slower" in ask(1.0, 1.1)[1]
    assert ask(1.0, 0.995, steps_left=500)[0] is False and ask(1.0, 0.995, steps_left=500, hysteresis=0.9)[0] is True
    assert ask(1.0, 0.9, steps_left=10**6)[1].endswith("in 500 steps, more than 2 times its cost")
    assert ask(1.0, 0.9, steps_left=0)[0] is False


def test_the_same_layout_and_other_layers() -> None:
    decision = decide({"a": PLAIN}, {"a": PLAIN}, 1.0, 1.0, steps_left=10)
    assert not decision.adopt and "in use" in decision.why
    with pytest.raises(ValueError, match=r"different layers: \['a', 'b'\]"):
        decide({"a": PLAIN}, {"b": PLAIN}, 1.0, 1.0, steps_left=10)
