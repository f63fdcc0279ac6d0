"""Copies of experts: where they are, and recovery from those that are left."""

from __future__ import annotations

import contextlib
import io
import re
import shutil
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest
import torch

from carpool.train.checkpoints.checkpoint_files import read_state
from carpool.train.checkpoints.memory_files import MemoryFiles
from carpool_systems.rank_overlap import allocate, place, survival
from tests.ranks import Ranks
from tests.train.test_elastic import PATIENCE, RUN, agents
from tests.train.test_kill import LONG
from tests.train.test_loop import TWO, losses, start
from tests.train.test_snapshots import LAYOUTS, fail

STEPS = 9
NODES = ["parallelism.ranks_per_node=1", "copies.fewest=2", "training.resume_from_checkpoint=auto"]


def best(copies_E: list[int], nodes: int, slots: int, dead: int) -> float:
    """The largest probability of survival of all placements."""
    found = 0.0
    for chosen in product(*(list(combinations(range(nodes), copies)) for copies in copies_E)):
        held = [{expert for expert, its in enumerate(chosen) if node in its} for node in range(nodes)]
        if max(map(len, held)) <= slots:
            found = max(found, survival(held, len(copies_E), dead))
    return found


@pytest.mark.parametrize(
    ("load_E", "nodes", "slots", "fewest"),
    [
        ([1, 1, 1, 1], 4, 2, 2),
        ([1, 2, 3, 9], 5, 2, 2),  # figure 4 of the paper: 2, 2, 2 and 4 copies
        ([5, 1, 1], 4, 2, 2),
        ([1, 1, 1], 3, 2, 2),  # slots do not divide experts
        ([1, 1, 1, 2], 3, 3, 2),
        ([3, 1, 4, 1, 5], 3, 2, 1),
        ([1, 6, 2, 1, 1], 2, 4, 1),
    ],
)
def test_no_placement_survives_more_often(load_E: list[int], nodes: int, slots: int, fewest: int) -> None:
    copies_E = allocate(load_E, nodes * slots, fewest, nodes)
    assert min(copies_E) >= fewest and sum(copies_E) <= nodes * slots
    assert all(a <= b for (x, a), (y, b) in product(zip(load_E, copies_E, strict=True), repeat=2) if x < y)
    for homes in (
        [set[int]() for _ in range(nodes)],
        [{e for e in range(len(load_E)) if e % nodes == n} for n in range(nodes)],
    ):
        held = place(copies_E, slots, homes)
        assert max(map(len, held)) <= slots
        assert [sum(expert in its for its in held) for expert in range(len(load_E))] == copies_E
        for dead in range(1, nodes):
            assert survival(held, len(load_E), dead) == best(copies_E, nodes, slots, dead)
            assert dead >= fewest or survival(held, len(load_E), dead) == 1


def test_overlap_survives_more_often_than_other_placements() -> None:
    """6 nodes of 4 experts each, two copies of each expert. Two nodes die: overlap loses experts in 3 of 15 cases."""
    homes = [set(range(4 * node, 4 * node + 4)) for node in range(6)]
    overlap = place(allocate([1] * 24, 48, 2, 6), 8, homes)
    assert all(its <= held for its, held in zip(homes, overlap, strict=True))
    spread = [its | homes[node - 1] for node, its in enumerate(homes)]
    compact = [{e for e in range(24) if e // 8 == node} for node in range(3)] * 2  # the same nodes twice
    apart = [
        its | {(e + 4 * (e % 4 + 1)) % 24 for e in range(24) if (e // 4 + e % 4 + 1) % 6 == node}
        for node, its in enumerate(homes)
    ]
    found = [survival(held, 24, 2) for held in (overlap, spread, apart)]
    assert found == [pytest.approx(12 / 15), pytest.approx(9 / 15), 0.0]
    assert survival(compact, 24, 2) == found[0]
    assert [round(survival(overlap, 24, dead), 3) for dead in (1, 3, 4)] == [1.0, 0.4, 0.0]
    # Popular experts get more copies, and the others as many as before.
    assert allocate([1, 1, 1, 5], 12, 2, 4) == [2, 2, 2, 4] and allocate([0, 0, 0], 4, 2, 4) == [1, 1, 2]


@pytest.mark.parametrize("layout", ["ep", "masters, moments of 8 bits, consumed", "fsdp, replicated experts", "muon"])
def test_a_lost_node_is_replaced(two_ranks: Ranks, text: list[str], tmp_path: Path, layout: str) -> None:
    """The run without the fault, bit by bit. There is no checkpoint: all comes from what the other node kept."""
    settings = [*text, *LONG, *LAYOUTS[layout], f"training.stop_at_step={STEPS}", "training.save_steps=none"]
    assert start(two_ranks, tmp_path / "whole", [*settings, NODES[0]]) == [""] * 2
    run, memory = str(tmp_path / "run"), str(tmp_path / "memory-{}")
    settings += [*NODES, "copies.slots=1", "copies.every=2"]
    assert two_ranks(fail, run, settings, memory, 6) == ["a fault"] * 2
    left = sorted(path.name for path in (tmp_path / "memory-0").glob("*/*/rank-00000/of-00001/*"))
    assert left == ["step-00000004.safetensors", "step-00000005.safetensors"]
    shutil.rmtree(tmp_path / "memory-1")
    assert two_ranks(fail, run, settings, memory, None) == [""] * 2
    assert sorted(losses(tmp_path / "run")) == list(range(1, STEPS + 1))
    states = [read_state(tmp_path / one / f"checkpoints/step-{STEPS:08d}") for one in ("whole", "run")]
    assert states[0]["files"] == states[1]["files"] and states[0]["ranks"] == states[1]["ranks"]
    assert states[0]["state"] == states[1]["state"]
    assert not list(tmp_path.glob("memory-*/*/*"))  # the run came to its end


def test_two_nodes_of_four_go_on(ranks: Ranks, two_ranks: Ranks, text: list[str], tmp_path: Path) -> None:
    """Of each pair of nodes with the same experts one is left. What a rank lacks, the other one sends."""
    settings = [*text, *LONG, "training.save_steps=none", "model.config.router_aux_loss_coef=0.0"]
    settings += ["training.max_grad_norm=0", f"training.stop_at_step={STEPS}"]
    two = [*TWO, *settings]
    assert start(two_ranks, tmp_path / "whole", two) == [""] * 2
    run, memory = str(tmp_path / "run"), str(tmp_path / "memory-{}")
    assert ranks(fail, run, [*settings, *NODES], memory, 6) == ["a fault"] * 4
    for rank in (0, 3):
        shutil.rmtree(tmp_path / f"memory-{rank}")
    (tmp_path / "memory-2").rename(tmp_path / "memory-0")
    assert two_ranks(fail, run, [*two, *NODES], memory, None) == [""] * 2
    found, whole = losses(tmp_path / "run"), losses(tmp_path / "whole")
    assert found.keys() == whole.keys() and all(found[step] == pytest.approx(whole[step], rel=1e-4) for step in whole)


def said(*args: Any) -> tuple[str, str]:
    """What `fail` returns, and what the run printed."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        return fail(*args), out.getvalue()


def test_experts_that_are_lost_come_from_the_checkpoint(two_ranks: Ranks, text: list[str], tmp_path: Path) -> None:
    """The other node has no copy, and the run says what is lost. Then both live, and no checkpoint is read."""
    settings = [*text, *LONG, "training.save_steps=3", f"training.stop_at_step={STEPS}", *NODES, "copies.fewest=1"]
    run, memory = str(tmp_path / "run"), str(tmp_path / "memory-{}")
    assert two_ranks(fail, run, settings, memory, 6) == ["a fault"] * 2
    shutil.rmtree(tmp_path / "memory-1")
    (error, printed), _ = two_ranks(said, run, settings, memory, 8)
    assert error == "a fault" and "step 4/9" in printed
    assert "of step 4, experts 4, 5, 6, 7 of model.layers.0.mlp.experts (and in 1 further layers) have no" in printed
    assert "the run goes on from the checkpoint step-00000003" in printed
    for path in (tmp_path / "run/checkpoints/step-00000006").glob("*/shard-*"):
        content = path.read_bytes()
        path.write_bytes(content[:-64] + bytes(64))  # whoever reads the checkpoint says that it is damaged
    (error, printed), _ = two_ranks(said, run, settings, memory, None)
    assert not error and "step 7/9" not in printed and "step 8/9" in printed
    assert "expert copies: after step 7 all tensors have one that is left; no checkpoint is read" in printed


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_agents_that_lose_one_go_on_from_copies(two_ranks: Ranks, text: list[str], tmp_path: Path) -> None:
    """An agent is killed, with its rank and its memory. There is no checkpoint, and the steps are those of all."""
    two = ["parallelism.num_ranks=2", "training.per_device_train_batch_size=4", "training.save_steps=none"]
    assert start(two_ranks, tmp_path / "whole", [*RUN, *text, *two, "training.stop_at_step=60"]) == [""] * 2
    more = ["training.save_steps=none", "training.stop_at_step=60", *NODES[:2]]
    with agents([*text, *more], tmp_path) as run:
        run.wait(lambda: run.step() > 10, "four agents train")
        lost = int(re.findall(r"here are ranks (\d+)", (tmp_path / "agent3.log").read_text())[-1])
        run.kill(3)
        home = MemoryFiles(run.run, torch.device("cpu"), "").home
        shutil.rmtree(home / f"rank-{lost:05d}")
        run.wait(lambda: run.ranks_of_groups()[-1:] == [3] or run.step() >= 60, "three agents go on")
        recovery = run.records("recovery")[0]
        assert recovery["from_step"] >= 9, recovery
        assert "no checkpoint is read" in run.said() and not run.records("checkpoint")
        for one in run.agents.values():
            assert one.wait(PATIENCE) == 0, run.said()
        found, whole = losses(run.run), losses(tmp_path / "whole")
        assert found.keys() == whole.keys()
        assert all(found[step] == pytest.approx(whole[step], rel=2e-3) for step in whole), (found, whole)
        assert not home.exists()
