"""Choices of a run: its schedule, its transport and whether layers are compiled. Each is asked for, made by a rule or
by measuring, recorded, and taken again."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from carpool.layout.topology import Topology
from carpool.parallel.degrees import Degrees
from carpool.planner.candidate import Candidate
from carpool.planner.decisions.chosen import Chosen, Decisions
from carpool.planner.decisions.rules import COMPILE_LAYER, COMPILE_START, compiled_by_rule
from carpool.planner.machine.hardware import HARDWARE, find_hardware
from carpool.planner.model.shape import ModelShape
from carpool.ride.chunks import PLAIN, ChunkedOrder
from carpool.ride.schedule import Schedule
from carpool.train.blueprint import Blueprint
from carpool.train.build import measured_choices as schedules
from carpool.train.build.measured_choices import SCHEDULE_KIND, choose_schedule, decide_schedule, neighbours
from carpool.train.config import load_config
from carpool.train.config.published import read_keys
from carpool.train.config.schema import Config
from carpool.train.config.schema_moe import MoeSection
from carpool.train.data.tokenizer import tokenizer_of
from carpool.train.launch.machine import Machine, imagine_machine
from carpool.train.plan.compile_and_capture import COMPILE_KIND
from carpool.train.plan.resolve import Plan, resolve
from carpool.train.plan.start_checks import decisions_of
from carpool.train.plan.transport_choice import TRANSPORT_KIND, choose_on_ranks, expected_transport
from carpool.transport import NVLinkOptions
from carpool.transport.dedup import Dedup
from carpool.transport.exchange import ExchangeTransport
from tests.ranks import Ranks
from tests.train.test_loop import MODEL, losses, run, start

SHAPE = {"device": "NVIDIA H200", "dtype": "bfloat16", "tokens": 8192, "ranks": 4}
RECORD = {"name": "chunks", "chunks": 4, "backward_chunks": None, "how": "measured", "shape": SHAPE}


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


@pytest.mark.parametrize(
    "name, chunks, says",
    [("tile", 1, "not known"), ("none", 2, "schedule='chunks'"), ("chunks", 0, "must be 1"), ("chunks", 65, "1..64")],
)
def test_schedules_that_make_no_sense(name: str, chunks: int, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Schedule(name, chunks)


def test_orders_and_neighbours_of_schedules() -> None:
    assert neighbours(Schedule()) == ()
    assert neighbours(Schedule("chunks", 2)) == (Schedule("chunks", 2, 4), Schedule("chunks", 4, 2))
    assert Schedule("chunks", 4, 6).pieces == 12 and str(Schedule("chunks", 4, 6)) == "chunks=4,6"
    transport = Dedup(None, 4)
    assert Schedule("tiles", 2).order(transport, torch.device("cpu")) == ChunkedOrder(2, 2)
    assert Schedule("chunks", 2, 3).order(transport, torch.device("cuda")) == ChunkedOrder(2, 3)
    assert Schedule("chunks").order(transport, torch.device("cuda")) is PLAIN
    with pytest.raises(ValueError, match=r"'dedup' has no signals.*schedule='chunks'"):
        Schedule("tiles", 2).order(transport, torch.device("cuda"))


def test_buffers_are_for_a_chunk() -> None:
    options = NVLinkOptions(max_tokens=100, capacity=50, num_leases=1, balance_limit=1.5).under(Schedule("chunks", 3))
    assert options.side_stream
    assert (options.max_tokens, options.capacity, options.num_leases) == (34, 34, 2)
    assert options.balance_limit == 4.5, "a chunk's choices may all be of one rank"
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
    candidates = [Schedule("chunks", 3), Schedule("chunks", 2)]
    with mock.patch.multiple(schedules, HIDES_NOTHING=(), candidates_of=lambda *_: candidates):
        return run(output, overrides)


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_losses_of_two_batches_are_those_without(
    two_ranks: Ranks, text: list[str], tmp_path: Path, micro_batches: int
) -> None:
    settings = [*text, "training.max_steps=3", "training.per_device_train_batch_size=2"]
    settings.append(f"training.gradient_accumulation_steps={micro_batches}")
    halves, schedule = micro_batches == 1, "two-batch"
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


LONG = [
    "model.config=olmoe-1b-7b", "model.dtype=bfloat16", "training.max_steps=100000", "data.sequence_length=2048",
    "data.tokenizer=bytes",
]  # fmt: skip
CONSUMED = ["training.optimizer_in_backward=true", "training.max_grad_norm=0", "memory.experts=host"]
LINEAR = ["model.config=qwen3-next-80b-a3b", "model.config.num_hidden_layers=4"]
STAGES = ["parallelism.num_ranks=2", "parallelism.pp_size=2", "training.gradient_accumulation_steps=4"]


def plan_of(*overrides: str, gpu: str | None = "h100", recorded: Any = None) -> Plan:
    config = load_config(None, [*LONG, "parallelism.num_ranks=1", *overrides])
    blueprint = Blueprint.of_config(config, tokenizer_of(config))
    return resolve(config, imagine_machine(config, gpu), blueprint, Decisions(lambda: recorded))


@pytest.mark.parametrize(
    ("overrides", "on", "why"),
    [
        ([], True, "and the run has 100,000"),
        (["training.max_steps=20"], False, "and the run has 20"),
        (["training.torch_compile=off"], False, "asked for"),
        (["training.torch_compile=true", "training.max_steps=20"], True, "asked for"),
        (["model.config.num_hidden_layers=1"], False, "there is no GPU"),
        (CONSUMED, False, "compiled layers hold their parameters"),
        (STAGES, True, "and the run has 100,000"),
        (["parallelism.num_ranks=2", "parallelism.tp_size=2", "parallelism.ep_size=2"], False, "divide tokens"),
        (["data.packing=off"], False, "as long as their longest sequence"),
        (["training.full_determinism=true"], False, "PyTorch's own kernels"),
        ([*LINEAR, "data.packing=off", "data.pad_to=sequence_length"], False, "token to token"),
    ],
)
def test_where_layers_are_compiled(overrides: list[str], on: bool, why: str) -> None:
    gpu = None if why == "there is no GPU" else "h100"
    plan = plan_of(*overrides, gpu=gpu)
    assert (plan.compiled.answer, plan.candidate.compiled) == (on, on) and why in plan.compiled.why
    assert gpu is None or any("decoder layers: " in line and why in line for line in plan.describe())
    assert plan.decisions.record()["torch_compile"]["on"] == on
    # A file says what was asked for.
    asked = load_config(None, overrides).training.torch_compile
    assert (plan.config.training.torch_compile, plan.written.training.torch_compile) == ("on" if on else "off", asked)


def test_a_choice_is_taken_again_whatever_the_length() -> None:
    recorded = json.loads(json.dumps({"torch_compile": COMPILE_KIND.record(plan_of().compiled)}))
    again = plan_of("training.max_steps=20", recorded=recorded).compiled
    assert again.answer and again.why == "as recorded in this run (default)"
    elsewhere = plan_of("training.max_steps=20", gpu="h200", recorded=recorded).compiled
    assert not elsewhere.answer and "chosen anew: device was H100, is H200" in elsewhere.why
    assert not plan_of("training.torch_compile=off", recorded=recorded).compiled.answer


def test_a_search_knows_what_is_compiled() -> None:
    """Eager layers keep more, so a plan that took them to be compiled may not fit."""
    short, long = (plan_of("parallelism=auto", "memory=auto", *more) for more in (["training.max_steps=20"], []))
    assert [one.candidate.compiled for one in (short, long)] == [False, True]
    assert short.searched is not None and long.searched is not None
    assert short.searched.answer.taken.step_ms[1] > long.searched.answer.taken.step_ms[1]
    assert list(short.decisions.record()).count("torch_compile") == 1


def test_an_epoch_has_as_many_steps_as_the_files_give(tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    more = [f"data.train={file}", "training.num_train_epochs=2", "training.max_steps=none"]
    a_step = 12 * 2048 * 4
    for size, steps in ((4 * a_step, 8), (1, 1)):
        file.write_bytes(b"a" * size)
        assert plan_of(*more).compiled.why.endswith(f"and the run has {steps}")


def test_break_even() -> None:
    """docs/measurements.md: 8 layers of Qwen3-30B-A3B took 18.3 ms less when compiled."""
    shape = ModelShape.read({**read_keys("qwen3-30b-a3b"), "num_hidden_layers": 8})
    one = Candidate(Degrees(1, 1, 1, 1), 4096, 1, transport="local", data_parallel="fsdp", compiled=False)
    settings = load_config(None, []).model_dump()

    def compiles(seconds: float) -> bool:
        settings["training"]["max_steps"] = round((COMPILE_START + COMPILE_LAYER) / seconds)
        return compiled_by_rule(settings, shape, HARDWARE["H200"], one, 8)[0]

    assert compiles(0.012) and not compiles(0.024)
    settings["adapter"]["kind"] = "lora"
    assert not compiles(0.014)


def way(wanted: str, unfit: str | None = "there is no CUDA device", folder: Path | None = None) -> Any:
    layer: Any = SimpleNamespace(compute=object(), group=None, num_ranks=4)
    reasons = {} if unfit is None else {"nvlink": unfit}
    config = Config()
    config = config.model_copy(update={"moe": config.moe.model_copy(update={"transport": wanted})})
    with mock.patch("carpool.train.plan.transport_choice.unfit_transports", lambda *args, **kwargs: reasons):
        plan: Any = SimpleNamespace(
            config=config,
            degrees=Degrees(fsdp=4, ep=4),
            machine=Machine(Topology.even(4), find_hardware("cpu"), 0, cuda=False, device=torch.device("cpu")),
            blueprint=SimpleNamespace(top_k=8, row_size=64),
            dtype=torch.float32,
            decisions=decisions_of([] if folder is None else [folder]),
        )
        return choose_on_ranks(plan, layer)[0]


def test_as_asked_for_or_by_the_rule() -> None:
    asked, auto = way("gather"), way("auto")
    assert (asked.answer, asked.how, asked.why) == ("gather", "given", "asked for")
    assert (auto.answer, auto.how) == ("dedup", "default") and "not nvlink: there is no CUDA device" in auto.why
    assert way("auto", None).answer == "nvlink"
    with pytest.raises(ValueError, match="transport='pigeon' is not known"):
        way("pigeon")


@pytest.mark.parametrize(
    ("nodes", "top_k", "answer"), [(2, 8, "hierarchical"), (2, 2, "dedup"), (1, 8, "nvlink"), (16, 8, "dedup")]
)
def test_a_prediction_knows_the_rule_for_several_nodes(nodes: int, top_k: int, answer: str) -> None:
    blueprint: Any = SimpleNamespace(top_k=top_k, row_size=2048)
    machine = Machine(Topology.even(16, nodes), find_hardware("H100"), 0, cuda=True, here=False)
    way = expected_transport(Config(), Degrees(fsdp=16, ep=16), blueprint, machine)
    assert way.answer == answer, way.why
    if nodes == 1:
        without = replace(machine, hardware=replace(machine.hardware, nvlink=None))
        way = expected_transport(Config(), Degrees(fsdp=16, ep=16), blueprint, without)
        assert way.answer == "dedup" and "H100 has no NVLink" in way.why


def test_a_resumed_run_takes_what_it_recorded_while_it_can(tmp_path: Path) -> None:
    first = way("auto", None)
    # As if the rule had been another then.
    record = {**TRANSPORT_KIND.record(first), "name": "alltoall"}
    (tmp_path / "run.json").write_text(json.dumps({"decisions": {"transport": record}}))
    again = way("auto", None, tmp_path)
    assert again.answer == "alltoall" and again.why == "as recorded in this run (default)"
    gone = way("auto", "its ranks are on 2 hosts", tmp_path)
    assert gone.answer == "dedup" and "chosen anew: unfit was [], is ['nvlink']" in gone.why
    assert way("gather", None, tmp_path).answer == "gather"
