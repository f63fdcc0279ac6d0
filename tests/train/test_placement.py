"""Experts that move while a run goes on: the same losses, the same bits twice, resumed or not, and honest forecasts;
and what moving costs by the model."""

from __future__ import annotations

import errno
import json
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import numpy as np
import pytest
import torch

from carpool.hf.step_graphs import StepGraphs
from carpool.layout import ExpertLayout
from carpool.layout.layouts import Layouts
from carpool.layout.topology import Topology
from carpool.placement.adopt import aligned
from carpool.placement.objective import evaluate
from carpool.placement.predicted_volume import predict
from carpool.planner.machine.cost import CostModel
from carpool.planner.machine.hardware import DEFAULT as H200
from carpool.report import write_report
from carpool.train.build import assemble
from carpool.train.config import load_config
from carpool.train.moving.runtime import load_ratio, newest
from carpool.train.moving.solve import NOT_WRITTEN, Facts, Solving, foretell, outlook
from carpool.train.plan.dry_run import dry_run
from carpool.transport import Codecs, TransportOptions, find_transport
from carpool.transport.codecs import PLAIN
from tests.placement.synthetic import topics
from tests.ranks import Ranks
from tests.replayed import Again
from tests.train import test_loop
from tests.train.test_loop import goes_on, losses, records, run, weights

MODEL = [
    *test_loop.MODEL, "model.config.num_experts=16", "model.config.router_aux_loss_coef=0.01",
    # From scratch at full speed, the routing of one step says little of the next but one.
    "training.per_device_train_batch_size=8", "training.learning_rate=3e-4", "training.max_steps=9",
    "training.save_steps=7", "training.eval_steps=none", "training.eval_on_start=false",
]  # fmt: skip
# A few steps are enough to pay for so small a move.
PLACED = [
    "placement.every=3",
    "placement.lag=2",
    "placement.hysteresis=0",
    "placement.background=false",
]


def start(ranks: Ranks, output: Path, *overrides: str) -> Path:
    assert ranks(run, str(output), [*MODEL, *overrides]) == [""] * 4
    return output


def looks(output: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == "placement"]


def layouts_of(output: Path, step: int) -> Layouts:
    state = json.loads((output / "checkpoints" / f"step-{step:08d}" / "state.json").read_text())["state"]
    return Layouts.from_dict(state["placement"]["layouts"])


class Later(Again):
    """Does nothing where it is recorded, as a capture."""

    made: ClassVar = list[Any]()

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        self.made.append(work)

        def again() -> None:
            with torch.enable_grad():
                work()

        return again


def run_captured(output: str, overrides: list[str]) -> str:
    """As `run`; gives back how often a step was captured."""
    Later.made.clear()
    graphs = partial(StepGraphs, recorder=Later)
    with mock.patch.multiple(assemble, why_no_graphs=lambda *_: None, StepGraphs=graphs):
        return run(output, overrides) or str(len(Later.made))


@pytest.fixture(scope="module")
def stayed(ranks: Ranks, text: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return start(ranks, tmp_path_factory.mktemp("runs") / "stayed", *text)


@pytest.fixture(scope="module")
def moved(ranks: Ranks, text: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return start(ranks, tmp_path_factory.mktemp("runs") / "moved", *text, *PLACED)


def test_losses_are_those_of_a_run_that_stayed(stayed: Path, moved: Path) -> None:
    found = looks(moved)
    assert [look["step"] for look in found if look["event"] == "moved"], "nothing was adopted, so nothing is tested"
    for step, expected in losses(stayed).items():
        assert losses(moved)[step] == pytest.approx(expected, rel=3e-5), step
    first, second = weights(stayed, 9), weights(moved, 9)
    assert first.keys() == second.keys()
    for name in first:
        torch.testing.assert_close(second[name], first[name], rtol=0, atol=3e-4, msg=name)


def test_what_was_foretold_is_measured(moved: Path) -> None:
    """Forecasts come from tokens that the solver did not see, of other steps: they are near, not equal."""
    found = looks(moved)
    for look in (look for look in found if look["event"] == "moved"):
        measured = next(m["measured"] for m in found if m["event"] == "measured" and m["since"] == look["step"])
        assert look["experts"] > 0 and look["bytes"] > 0 and look["layers"] > 0 and look["why"]
        assert measured["rows"] == pytest.approx(look["predicted"]["rows"], rel=0.15)
        assert measured["bytes"] == pytest.approx(look["predicted"]["bytes"], rel=0.15)
    first = next(m for m in found if m["event"] == "measured")
    then = records(moved)[first["since"]]  # the last step before the move
    assert first["measured"]["rows"] < 0.95 * then["rows_remote_per_token"]
    assert first["measured"]["load"] < 0.95 * then["rank_load_max_over_mean"]
    assert Layouts.load(moved / "layout.json") == layouts_of(moved, 9)
    lines = map(json.loads, (moved / "metrics.jsonl").read_text().splitlines())
    layouts = [line for line in lines if line["kind"] == "layout"]
    assert [line["step"] for line in layouts] == [0, *(look["step"] for look in found if look["event"] == "moved")]
    assert Layouts.from_dict(layouts[-1]) == layouts_of(moved, 9)
    assert "moved: " in write_report(moved).read_text()


def test_a_resumed_run_goes_on_with_what_moved(ranks: Ranks, moved: Path, text: list[str], tmp_path: Path) -> None:
    """From between a look and the use of its answer, a step after it: bit by bit the same."""
    goes_on(ranks, moved, output := tmp_path / "resumed", [*MODEL, *text, *PLACED], 7)
    assert layouts_of(output, 9) == layouts_of(moved, 9)
    assert json.loads((output / "run.json").read_text())["layout"]["source"] == "checkpoint"


@pytest.mark.parametrize("policy", ["migrate", "pick"])
def test_steps_are_captured_between_looks(ranks: Ranks, text: list[str], tmp_path: Path, policy: str) -> None:
    """The step before a look records choices, eagerly; each move ends the graphs. The bits are those of eager steps."""
    few = ["placement.every=6", "placement.lag=1", "placement.tokens=128", f"placement.policy={policy}"]
    few += [one for one in PLACED[2:] if policy == "migrate"]
    few += ["training.max_steps=14", "training.save_steps=none"]
    eager = start(ranks, tmp_path / "eager", *text, *few)
    moves = [look["step"] for look in looks(eager) if look["event"] == "moved"]
    assert moves == ([7, 13] if policy == "migrate" else [6, 12])
    # Captured in step 3, and in step 10, or 9 where loads decide and no step is recorded.
    found = ranks(run_captured, str(tmp_path / "captured"), [*MODEL, *text, *few])
    assert found == ["2"] * 4
    assert losses(tmp_path / "captured") == losses(eager)
    assert Layouts.load(tmp_path / "captured" / "layout.json") == Layouts.load(eager / "layout.json")


def test_on_other_ranks_it_starts_from_the_configured_layout(
    ranks: Ranks, stayed: Path, moved: Path, text: list[str], tmp_path: Path
) -> None:
    resume = f"training.resume_from_checkpoint={moved}/checkpoints/step-00000007"
    output = start(ranks, tmp_path / "other", *text, *PLACED, resume, "parallelism.ep_size=2")
    assert json.loads((output / "run.json").read_text())["layout"]["source"] == "contiguous"
    for step, found in losses(output).items():
        assert found == pytest.approx(losses(stayed)[step], rel=3e-5), step


@pytest.mark.slow
def test_beside_training_or_inside_it(ranks: Ranks, moved: Path, text: list[str], tmp_path: Path) -> None:
    change = [*PLACED, "placement.background=true"]
    output = start(ranks, tmp_path / "beside", *text, *change)
    assert losses(output) == losses(moved) and layouts_of(output, 9) == layouts_of(moved, 9)
    assert not any((output / "placement").iterdir())


def _without_a_solver(output: str, overrides: list[str], solver: str) -> str:
    with (
        mock.patch.object(sys, "executable", solver),
        mock.patch("carpool.placement.solvers.solve", side_effect=ValueError("no way")),
    ):
        return run(output, overrides)


@pytest.mark.parametrize(
    ("does", "reason"),
    [
        ("echo out of luck; exit 1", "the solver ended with exit code 1: out of luck (see "),
        # There was no room for the answer, so that the main process solves.
        (f"exit {NOT_WRITTEN}", "no way"),
        ("kill -9 $$", "the solver was killed by SIGKILL"),
        ("exec sleep 600", "the solver had no answer after 1 s: look at fewer tokens"),
        (None, "no way"),
    ],
)
def test_a_solver_that_fails_ends_the_run_on_all_ranks_alike(
    two_ranks: Ranks, tmp_path: Path, does: str | None, reason: str
) -> None:
    solver = tmp_path / "solver"
    solver.write_text(f"#!/bin/sh\n{does}\n")
    solver.chmod(0o755)
    settings = [*MODEL, *PLACED, "parallelism.timeout_seconds=1"]
    settings.append(f"placement.background={'false' if does is None else 'true'}")
    errors = two_ranks(_without_a_solver, str(tmp_path / "run"), settings, str(solver))
    assert len(set(errors)) == 1
    assert f"placement could not be solved: {reason}" in errors[0]


def test_a_question_for_which_there_is_no_room_is_answered_at_once(tmp_path: Path) -> None:
    question = mock.Mock(save=mock.Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
    with mock.patch("carpool.train.moving.solve.solve", side_effect=lambda asked: {"asked": asked}):
        assert Solving(question, tmp_path / "placement").answer(1.0) == {"asked": question}


LAYERS = tuple(f"model.layers.{number}.mlp.experts" for number in range(2))
SOLVED = {name: ExpertLayout([[2, 0, 1, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]) for name in LAYERS}
ABOUT = {"solver": dict.fromkeys(LAYERS, "occult"), "trace_meta": {"model_type": "olmoe"}}


@pytest.mark.parametrize(
    ("layers", "about", "reason"),
    [
        (SOLVED, ABOUT, ""),
        (SOLVED, {}, "does not say which solver made it; write it again"),
        (SOLVED, ABOUT | {"solver": {**ABOUT["solver"], LAYERS[1]: "lpt"}}, "layers.1.mlp.experts was placed by 'lpt'"),
        (SOLVED, ABOUT | {"trace_meta": {"model_type": "mixtral"}}, "a trace of the model type 'mixtral'"),
        ({LAYERS[0]: SOLVED[LAYERS[0]]}, ABOUT, "no layout for layer 'model.layers.1.mlp.experts'"),
        ({**SOLVED, "model.layers.2.mlp.experts": SOLVED[LAYERS[0]]}, ABOUT, "a layout for 'model.layers.2"),
        (dict.fromkeys(LAYERS, ExpertLayout.contiguous(8, 4)), ABOUT, "8 experts on 4 ranks, but the model has 16"),
        (dict.fromkeys(LAYERS, ExpertLayout.contiguous(16, 2)), ABOUT, "16 experts on 2 ranks, but the model has 16"),
    ],
    ids=["right", "unknown solver", "solver", "model", "layer missing", "layer too many", "experts", "ranks"],
)
def test_the_file_of_a_policy_must_be_what_it_says(
    tmp_path: Path, layers: dict[str, ExpertLayout], about: dict[str, Any], reason: str
) -> None:
    Layouts(layers, about).save(file := tmp_path / "layouts.json")
    settings = [f"moe.layout={file}", "placement.policy=place", "placement.solver=occult", "parallelism.device=cpu"]
    config = load_config(None, [*MODEL, *settings])
    with pytest.raises(ValueError, match=reason) if reason else nullcontext():
        dry_run(config)


COST = CostModel(transport="dedup", tokens_per_rank=8192, hidden=64, expert_hidden=1024, element_size=2, hardware=H200)
FACTS = Facts(COST, Topology.even(4), top_k=4, micro_batches=2)


def _moves(before: ExpertLayout, after: ExpertLayout) -> int:
    return sum(a[0] != b[0] for a, b in zip(before.home_of, after.home_of, strict=True))


def test_ranks_of_a_node_stay_together_wherever_they_are() -> None:
    """Ranks 0, 2, 4 are one node, 1 and 5 another, 3 a third: only ranks of one node may change places."""
    topology, current = Topology((0, 1, 0, 2, 0, 1), (0, 1, 0, 2, 0, 1)), ExpertLayout.contiguous(12, 6)
    found = ExpertLayout([current.homes[rank] for rank in (2, 5, 4, 3, 0, 1)])
    assert aligned(found, current, topology) == current
    over_nodes = ExpertLayout([current.homes[rank] for rank in (0, 3, 2, 1, 4, 5)])
    assert aligned(over_nodes, current, topology) == over_nodes


@pytest.mark.parametrize(("num_ranks", "num_nodes"), [(4, 1), (8, 2), (8, 4)])
def test_ranks_are_named_so_that_few_experts_move(num_ranks: int, num_nodes: int) -> None:
    current = ExpertLayout.permuted([int(e) for e in np.random.default_rng(0).permutation(64)], num_ranks)
    # The same parts, nodes and ranks renamed, rows shuffled, and two experts swapped.
    draw, per_node = np.random.default_rng(1), num_ranks // num_nodes
    order = [n * per_node + r for n in draw.permutation(num_nodes) for r in draw.permutation(per_node)]
    homes = [list(draw.permutation(current.homes[rank])) for rank in order]
    homes[0][0], homes[1][0] = homes[1][0], homes[0][0]
    found = ExpertLayout(homes)
    new = aligned(found, current, Topology.even(num_ranks, num_nodes))
    assert _moves(current, new) == 2 <= _moves(current, found)
    assert set(map(frozenset, new.homes)) == set(map(frozenset, found.homes))
    stay = sum(a == b for a, b in zip(current.home_of, new.home_of, strict=True))
    assert stay == 62, "experts that stay on their rank keep their rows"
    # Which ranks share a node is part of what was found.
    together = {frozenset(e for rank in new.homes[n * per_node :][:per_node] for e in rank) for n in range(num_nodes)}
    assert together == {
        frozenset(int(e) for rank in found.homes[n * per_node :][:per_node] for e in rank) for n in range(num_nodes)
    }


def test_what_is_foretold_is_what_transports_would_count() -> None:
    trace, layout = topics(experts=16, top_k=4, tokens=600, length=30).layer(0), ExpertLayout.contiguous(16, 4)
    source_T, topology = trace.source_T(4), Topology.even(4, 2)
    routings = [trace.expert_TK[source_T == rank] for rank in range(4)]
    halved = Codecs(dispatch="fp8", inter_node="nodes")
    for transport, codecs in (("dedup", PLAIN), ("alltoall", PLAIN), ("gather", PLAIN), ("hierarchical", halved)):
        one = replace(FACTS, cost=replace(COST, transport=transport, codecs=codecs))
        told = outlook([evaluate(trace, layout, topology=topology, cost=one.cost)] * 2, one)
        options = find_transport(transport).own_options(TransportOptions(codecs=codecs))
        volume = predict(transport, routings, layout, hidden=64, element_size=2, topology=topology, options=options)
        rides = volume.bytes_remote("dispatch", "combine", "dispatch_backward", "combine_backward")
        assert told["rows"] == pytest.approx(volume.rows_remote / 600)
        assert told["bytes"] == pytest.approx(2 * rides / 600), transport
    trace = topics(experts=16, top_k=4, tokens=600, length=30).layer(0)
    layout = ExpertLayout.contiguous(16, 4)
    same, found = foretell(trace, layout, 10.0 * trace.load_E, FACTS), evaluate(trace, layout, cost=COST)
    assert same.load_W == pytest.approx(found.load_W) and same.compute_seconds == pytest.approx(found.compute_seconds)
    load_E = trace.load_E.astype(float)
    load_E[5] *= 4  # on rank 1, alone
    then = foretell(trace, layout, load_E, FACTS)
    share_W = found.load_W + 3 * trace.load_E[5] * (np.arange(4) == 1)
    assert then.load_W / then.load_W.sum() == pytest.approx(share_W / share_W.sum())
    assert then.rows_remote == found.rows_remote


def test_loads_and_tokens_that_count() -> None:
    load_E = np.array([8.0, 1, 1, 1, 1, 4, 1, 1])
    assert load_ratio(load_E, ExpertLayout.contiguous(8, 4)) == pytest.approx(9 / 4.5)
    trace = topics(experts=16, top_k=2, tokens=100, length=30)
    kept = newest(trace, 35)
    assert kept.num_tokens == 40 and np.array_equal(kept.expert_LTK, trace.expert_LTK[:, 60:])
    assert newest(trace, 40).num_tokens == 40 and newest(trace, 41).num_tokens == 70 and newest(trace, 999) is trace
