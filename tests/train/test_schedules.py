"""The schedule of a run: asked for, recorded, or the fastest."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from carpool.planner.decisions.chosen import Chosen, Decisions, fastest
from carpool.ride.chunks import PLAIN, ChunkedOrder
from carpool.ride.schedule import Schedule
from carpool.train.build import measured_choices as schedules
from carpool.train.build.measured_choices import SCHEDULE_KIND, choose_schedule, decide_schedule, neighbours
from carpool.train.config import load_config
from carpool.train.config.schema_moe import MoeSection
from carpool.transport import NVLinkOptions
from carpool.transport.dedup import Dedup
from carpool.transport.exchange import ExchangeTransport
from tests.ranks import Ranks
from tests.train.test_loop import MODEL, losses, run, start

SHAPE = {"device": "NVIDIA H200", "dtype": "bfloat16", "tokens": 8192, "ranks": 4}
RECORD = {
    "name": "chunks",
    "chunks": 4,
    "backward_chunks": None,
    "how": "measured",
    "why": "measured",
    "shape": SHAPE,
    "milliseconds": {"chunks=4": 1.0},
}


def info(output: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((output / "run.json").read_text())["decisions"]["schedule"]
    return found


def decided(
    wanted: Schedule | None, shape: dict[str, Any] = SHAPE, record: Any = None, own_forward: bool = False
) -> tuple[Chosen[Schedule], bool]:
    return decide_schedule(wanted, shape, *SCHEDULE_KIND.recall(record, shape), own_forward)


def test_what_is_asked_for_is_followed() -> None:
    for wanted, schedule in (
        ({}, Schedule()),
        ({"schedule": "chunks"}, Schedule("chunks", 2)),
        ({"schedule": "chunks", "chunks": 3}, Schedule("chunks", 3)),
        ({"schedule": "chunks", "backward_chunks": 4}, Schedule("chunks", 2, 4)),
        ({"schedule": "two-batch"}, Schedule("two-batch")),
        ({"schedule": "tiles"}, Schedule("tiles", 4)),
    ):
        chosen, to_measure = decided(MoeSection(**wanted).asked_schedule(), record=RECORD)  # type: ignore[arg-type]
        assert chosen.answer == schedule and chosen.why == "asked for" and not to_measure


def test_a_recorded_choice_is_kept_unless_the_shape_changed() -> None:
    chosen, to_measure = decided(None, record=RECORD)
    assert chosen.answer == Schedule("chunks", 4) and not to_measure
    assert SCHEDULE_KIND.record(chosen) == {**RECORD, "why": chosen.why}
    chosen, to_measure = decided(None, {**SHAPE, "tokens": 4096}, RECORD)
    assert to_measure and "tokens was 8192, is 4096" in chosen.why, "it has to be measured again"
    assert decided(None)[1]


@pytest.mark.parametrize("in_parts", [True, False])
def test_tiles_are_no_candidate_where_rows_must_be_whole(monkeypatch: pytest.MonkeyPatch, in_parts: bool) -> None:
    monkeypatch.setattr(schedules, "device_name", lambda _: "NVIDIA H200")
    monkeypatch.setattr(schedules, "why_not_follow", lambda *_: None)
    monkeypatch.setattr(schedules, "_milliseconds", lambda _, way, *__: 1.0 if way.name == "tiles" else 2.0)
    layer: Any = mock.Mock(num_ranks=4, options=None, whole_rides=not in_parts)
    plan: Any = SimpleNamespace(
        config=SimpleNamespace(moe=MoeSection(schedule="auto")),
        machine=SimpleNamespace(device=torch.device("cpu")),
        blueprint=SimpleNamespace(top_k=2, row_size=64),
        dtype=torch.bfloat16,
        tokens=8192,
        decisions=Decisions(),
    )
    chosen = choose_schedule(plan, [layer])
    assert (chosen.answer == Schedule("tiles", 2)) == in_parts
    layer.set_schedule.assert_called_with(chosen.answer)


@pytest.mark.parametrize("shape", [{**SHAPE, "device": "cpu"}, {**SHAPE, "ranks": 1}])
def test_nothing_is_measured_where_nothing_can_hide(shape: dict[str, Any]) -> None:
    chosen, to_measure = decided(None, shape)
    assert chosen.answer == Schedule() and chosen.times is None and not to_measure
    chosen, to_measure = decided(None, own_forward=True)
    assert "own forward" in chosen.why and not to_measure


def test_more_chunks_must_be_clearly_faster() -> None:
    times = {Schedule(): 10.0, Schedule("chunks", 1): 9.9, Schedule("chunks", 2): 9.5, Schedule("chunks", 4): 9.4}
    assert fastest(times) == Schedule("chunks", 2)


@pytest.mark.parametrize(
    "name, chunks, says",
    [("tile", 1, "not known"), ("none", 2, "schedule='chunks'"), ("chunks", 0, "must be 1"), ("chunks", 65, "1..64")],
)
def test_schedules_that_make_no_sense(name: str, chunks: int, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Schedule(name, chunks)


def test_chunks_that_do_not_go_together() -> None:
    with pytest.raises(ValueError, match="backward_chunks"):
        load_config(None, ["moe.schedule=chunks", "moe.chunks=7", "moe.backward_chunks=10"])


def test_forward_and_backward_are_tried_apart() -> None:
    assert neighbours(Schedule()) == ()
    assert neighbours(Schedule("chunks", 2)) == (Schedule("chunks", 2, 4), Schedule("chunks", 4, 2))
    assert Schedule("chunks", 4, 6).pieces == 12 and str(Schedule("chunks", 4, 6)) == "chunks=4,6"


def test_tiles_on_a_gpu_need_a_transport_with_signals() -> None:
    transport = Dedup(None, 4)
    assert Schedule("tiles", 2).order(transport, torch.device("cpu")) == ChunkedOrder(2, 2)
    assert Schedule("chunks", 2, 3).order(transport, torch.device("cuda")) == ChunkedOrder(2, 3)
    assert Schedule("chunks").order(transport, torch.device("cuda")) is PLAIN
    with pytest.raises(ValueError, match=r"'dedup' has no signals.*schedule='chunks'"):
        Schedule("tiles", 2).order(transport, torch.device("cuda"))


def test_buffers_are_for_a_chunk() -> None:
    options = NVLinkOptions(max_tokens=100, capacity=50, num_leases=1).under(Schedule("chunks", 3))
    assert options.side_stream
    assert (options.max_tokens, options.capacity, options.num_leases) == (34, 34, 2)
    again = NVLinkOptions(max_tokens=100).under(Schedule("chunks", 2), resend=True)
    assert again.num_leases == 4
    apart = NVLinkOptions(max_tokens=100).under(Schedule("chunks", 2, 6))
    assert (apart.max_tokens, apart.num_leases) == (17, 6), "two chunks of three parts under way"
    assert NVLinkOptions().under(Schedule()) == NVLinkOptions()


def run_counted(output: str, overrides: list[str]) -> tuple[str, int]:
    """The error, if any, and how many dispatches were asked for in the forward."""
    plan, plans = ExchangeTransport.plan_pieces, []

    def counted(*args: Any) -> Any:
        routes = plan(*args)
        plans.extend(routes)
        return routes

    with mock.patch.object(ExchangeTransport, "plan_pieces", counted):
        return run(output, overrides), len(plans)


def test_chunks_reach_the_layers(two_ranks: Ranks, text: list[str], tmp_path: Path) -> None:
    settings = [*MODEL, *text, "training.max_steps=2", "training.eval_steps=none", "training.eval_on_start=false"]
    rides = {}
    for chunks in (1, 3):
        found = two_ranks(
            run_counted, str(tmp_path / str(chunks)), [*settings, "moe.schedule=chunks", f"moe.chunks={chunks}"]
        )
        assert {error for error, _ in found} == {""}
        rides[chunks] = {plans for _, plans in found}
    assert len(rides[1]) == len(rides[3]) == 1 and rides[3].pop() == 3 * rides[1].pop()


def run_measured(output: str, overrides: list[str]) -> str:
    """As on a GPU: the schedule is timed. What is timed here is real, only that it can be faster is not."""
    with (
        mock.patch("carpool.train.build.measured_choices.HIDES_NOTHING", ()),
        mock.patch(
            "carpool.train.build.measured_choices.candidates_of",
            lambda *_: [Schedule("chunks", 3), Schedule("chunks", 2)],
        ),
    ):
        return run(output, overrides)


@pytest.mark.parametrize(("schedule", "micro_batches"), [("chunks", 1), ("two-batch", 1), ("two-batch", 2)])
def test_losses_of_a_schedule_are_those_without(
    two_ranks: Ranks, text: list[str], tmp_path: Path, schedule: str, micro_batches: int
) -> None:
    settings = [*text, "training.max_steps=3", "training.per_device_train_batch_size=2"]
    settings.append(f"training.gradient_accumulation_steps={micro_batches}")
    halves = (schedule, micro_batches) == ("two-batch", 1)
    for name in ("none", schedule):
        assert start(two_ranks, tmp_path / name, [*settings, f"moe.schedule={name}"]) == [""] * 2
    for (loss, norm), (wanted, wanted_norm) in zip(
        losses(tmp_path / schedule).values(), losses(tmp_path / "none").values(), strict=True
    ):
        # The balance loss is a product of means, of each half of a micro-batch by itself.
        assert loss == pytest.approx(wanted, rel=1e-3 if halves else 1e-5)
        assert norm == pytest.approx(wanted_norm, rel=3e-2 if halves else 1e-5)
    assert info(tmp_path / schedule)["name"] == schedule
    said = json.loads((tmp_path / schedule / "run.json").read_text())["lossy_reasons"]
    assert said == (["schedule two-batch: the balance loss is of each half of a micro-batch"] if halves else [])


def test_what_is_measured_is_recorded_and_used_again(two_ranks: Ranks, text: list[str], tmp_path: Path) -> None:
    output = tmp_path / "run"
    settings = [*MODEL, *text, "moe.schedule=auto", "training.max_steps=3", "training.save_steps=2"]
    assert two_ranks(run_measured, str(output), [*settings, "training.stop_at_step=2"]) == [""] * 2
    first = info(output)
    assert {"chunks=3", "chunks=2"} < set(first["milliseconds"]) and len(first["milliseconds"]) == 4
    assert first["name"] == "chunks"
    assert min(first["milliseconds"].values()) > 0
    assert two_ranks(run_measured, str(output), [*settings, "training.resume_from_checkpoint=last"]) == [""] * 2
    again = info(output)
    assert again["why"] == "as recorded in this run (measured)" and {**again, "why": ""} == {**first, "why": ""}
