"""Configurations of `carpool train` in the planner's words, on any number of GPUs; the command `carpool simulate`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from carpool.cli import app
from carpool.parallel.degrees import Degrees
from carpool.planner.decisions.chosen import Chosen, Decisions, Kind, fastest
from carpool.planner.decisions.configured import SIMULATED, candidate_of, model_of
from carpool.planner.machine.hardware import find_hardware
from carpool.planner.simulator.simulate import drawn_seconds, sampled, scaled, step_on
from carpool.planner.step.events import execute
from carpool.planner.step.lengths import Lengths
from carpool.planner.step.peak import memory_of
from carpool.planner.step.prediction import predict
from carpool.train.config import load_config
from carpool.train.plan.division import decide_data_parallel
from tests.environment import TRACES

H100 = find_hardware("H100")
PLAN = """
[model]
config = {from = "olmoe-1b-7b", num_hidden_layers = 2}
[data]
sequence_length = 4096
[parallelism]
num_ranks = 16
ep_size = 8
[training]
per_device_train_batch_size = 2
"""


def _configured(**sections: dict[str, Any]):  # type: ignore[no-untyped-def]
    overrides = [f"{section}.{key}={value}" for section, keys in sections.items() for key, value in keys.items()]
    config = load_config(None, ["model.config=olmoe-1b-7b", "data.sequence_length=4096", *overrides])
    settings = config.model_dump()
    shape = model_of(settings, config.model.config)
    degrees = config.parallelism.resolve(config.parallelism.num_ranks or 16, shape.num_experts)
    return shape, *candidate_of(settings, degrees, shape, H100, 8)


def test_settings_become_a_candidate() -> None:
    shape, candidate, notes = _configured(
        parallelism={"num_ranks": 16, "ep_size": 4, "data_parallel": "fsdp"},
        moe={"transport": "dedup", "schedule": "two-batch", "experts": "grouped"},
        training={
            "per_device_train_batch_size": 3,
            "gradient_accumulation_steps": 2,
            "optimizer": "torch",
            "torch_compile": "off",
        },
        memory={"expert_activations": "recompute"},
    )
    assert (shape.num_experts, shape.top_k, len(shape.layers)) == (64, 8, 16) and not notes
    assert candidate.degrees == Degrees(fsdp=16, ep=4)
    assert (candidate.transport, candidate.schedule, candidate.data_parallel) == ("dedup", "two-batch", "fsdp")
    assert (candidate.micro_batch, candidate.accumulation, candidate.sequence_length) == (3, 2, 4096)
    assert candidate.optimizer == "torch" and not candidate.compiled and candidate.eager is None
    auto = [_configured(model={"dtype": dtype})[1].optimizer for dtype in ("float32", "bfloat16")]
    assert auto == ["torch", "one-pass"]
    assert candidate.policies["expert_activations"] == "recompute" and candidate.policies["expert_inputs"] == "save"


@pytest.mark.parametrize(("ep", "transport"), [(1, "local"), (8, "nvlink")])
def test_what_a_run_decides_is_noted(ep: int, transport: str) -> None:
    _, candidate, notes = _configured(parallelism={"ep_size": ep}, moe={"schedule": "auto"})
    assert candidate.transport == transport
    decided = ("moe.schedule", "moe.transport", "parallelism.data_parallel", "training.torch_compile")
    assert set(notes) == {f"{key} = auto" for key in decided}


@pytest.mark.parametrize("share", [0.78, 0.85])
def test_dense_parameters_are_whole_by_the_rule_of_runs(share: float) -> None:
    given = {"parallelism": {"ep_size": 8}, "moe": {"transport": "nvlink"}}
    _, whole, _ = _configured(**{**given, "parallelism": {"ep_size": 8, "data_parallel": "zero1"}})
    config = load_config(None, ["model.config=olmoe-1b-7b", "data.sequence_length=4096", "parallelism.ep_size=8"])
    shape = model_of(config.model_dump(), config.model.config)
    needed = memory_of(shape, whole).total
    machine = replace(H100, capacity=needed / share)
    settings = config.model_dump() | {"moe": config.model_dump()["moe"] | {"transport": "nvlink"}}
    found, notes = candidate_of(settings, whole.degrees, shape, machine, 8)
    assert (
        found.data_parallel
        == decide_data_parallel(config, whole.degrees, lambda _: int(needed), int(needed / share))[0]
    )
    assert found.data_parallel == ("zero1" if share < 0.8 else "fsdp")
    assert ("more than 80%" in notes["parallelism.data_parallel = auto"]) == (share > 0.8)


def test_chunks_of_a_ride() -> None:
    for given, chunks in (({"schedule": "chunks"}, 2), ({"schedule": "chunks", "chunks": 3}, 3), ({}, 1)):
        _, candidate, notes = _configured(moe={"transport": "nvlink", **given})
        assert candidate.chunks == chunks and "moe.schedule" not in str(notes)


def test_between_nodes_the_shorter_ride_is_taken() -> None:
    shape, candidate, notes = _configured(parallelism={"ep_size": 16})
    seconds = {}
    for way in ("dedup", "hierarchical"):
        other = type(candidate)(**{**vars(candidate), "transport": way})
        piece = Lengths(shape, H100, other, 8).ride("dispatch", "dispatch", "dispatch")
        assert piece is not None
        seconds[way] = piece.seconds
    assert candidate.transport == min(seconds, key=seconds.__getitem__) and "as modelled" in str(notes)


def test_degrees_on_other_numbers() -> None:
    assert scaled(Degrees(fsdp=8, ep=8), 64) == Degrees(fsdp=64, ep=8)
    assert scaled(Degrees(fsdp=8, dp_replicate=2, ep=8), 64) == Degrees(fsdp=8, dp_replicate=8, ep=8)
    assert scaled(Degrees(fsdp=4, tp=2, pp=2, ep=4), 32) == Degrees(fsdp=8, tp=2, pp=2, ep=4)
    with pytest.raises(ValueError, match=r"100 GPUs cannot be .* a multiple of 16; nearest: 96 and 112"):
        scaled(Degrees(fsdp=8, tp=2, pp=2, ep=8), 100)
    with pytest.raises(ValueError, match="nearest: 8"):
        scaled(Degrees(fsdp=8, ep=8), 4)


def test_balanced_ranks_are_the_prediction() -> None:
    """One builder in the house: the graph is that of `predict`, and ranks that are alike take what one takes."""
    shape, candidate, _ = _configured(parallelism={"ep_size": 8}, training={"per_device_train_batch_size": 2})
    step = step_on(shape, H100, candidate, 8, 16)
    predicted = predict(shape, H100, candidate, 8).seconds.middle
    assert execute(step.graph).step == pytest.approx(predicted, rel=1e-12)
    alike = sampled(step, None, stretch=0.0)
    assert execute(step.graph, 16, drawn_seconds(step, alike)).step == pytest.approx(predicted)
    assert step.tokens == 16 * 2 * 4096 and step.spread.group == (8, 1)
    with pytest.raises(ValueError, match="24 GPUs are not whole nodes of 16"):
        step_on(shape, H100, candidate, 16, 24)


@pytest.mark.parametrize(
    "pipeline", ["GPipe", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"]
)
def test_every_order_of_a_pipeline_does_the_same_work(pipeline: str) -> None:
    """Stages compute as long as under 1F1B, all together; when, depends on the order."""

    def busy(name: str) -> dict[str, float]:
        parallelism = {"ep_size": 4, "pp_size": 2, "data_parallel": "zero1", "pp_schedule": name}
        shape, candidate, _ = _configured(parallelism=parallelism, training={"gradient_accumulation_steps": 4})
        graph = step_on(shape, H100, candidate, 8, 16).graph
        kinds = ("attention", "dense", "experts", "dispatch", "combine", "loss", "optimizer")
        return {kind: sum(float(event.seconds) for event in graph.events if event.kind == kind) for kind in kinds}

    plain = busy("1F1B")
    for kind, seconds in busy(pipeline).items():
        # Latencies of kernels are few microseconds, and each half of a product has its own.
        assert seconds == pytest.approx(plain[kind], rel=1e-6), kind


def _run(tmp_path: Path, *arguments: str, plan: str = PLAN) -> Any:
    (tmp_path / "plan.toml").write_text(plan)
    line = ["simulate", str(tmp_path / "plan.toml"), "--hardware", "H100", "--out", str(tmp_path / "out"), *arguments]
    return CliRunner().invoke(app, line)


def test_the_command(tmp_path: Path) -> None:
    done = _run(tmp_path, "--gpus", "64", "--trace", str(TRACES / "e64-143.npz"), "--json")
    assert done.exit_code == 0, done.output
    record = json.loads(done.stdout)
    assert record["gpus"] == 64 and [size["gpus"] for size in record["sizes"]] == [16, 64]
    assert record["about"]["choices of experts"] == f"resampled from {TRACES / 'e64-143.npz'} (measured)"
    assert record["failures"]["failures_per_day"] == pytest.approx(64 * 24 / 50676, rel=1e-3)
    assert record == json.loads((tmp_path / "out" / "simulation.json").read_text())
    shown = _run(tmp_path)
    assert "16 GPUs take" in shown.output and "moe.transport = auto: simulated as nvlink" in shown.output


def test_a_stretched_plan_says_why_it_is_slow_and_what_to_ask_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    call = "plan --model qwen3-30b-a3b --hardware H200 --gpus 4 --gpus-per-node 4 --tokens-per-batch 32K --out small"
    assert CliRunner().invoke(app, [*call.split(), "--moments", "bfloat16"]).exit_code == 0
    slow = CliRunner().invoke(app, ["simulate", "small/plan-1.toml", "--gpus", "16384", "--hardware", "H200"]).output
    assert "The step goes to reductions of gradients" in slow and "gathers of parameters" in slow
    (asked,) = re.findall(r"^The file is for 4 GPUs\. .*: carpool (plan .*)$", slow, re.MULTILINE)
    assert "--moments bfloat16 " in asked
    assert CliRunner().invoke(app, asked.split()).exit_code == 0
    command = ["simulate", "runs/plan-16384/plan-1.toml", "--hardware", "H200", "--out", "fast"]
    plain = CliRunner().invoke(app, command).output
    record = json.loads(Path("fast/simulation.json").read_text())
    assert record["gpus"] == 16384 and record["tokens"] == 16384 * 8192
    assert record["sizes"][-1]["efficiency"] > 0.8 and record["step_seconds"] < 2
    assert "The step goes to" in plain and "The file is for" not in plain


class _Read(dict[str, Any]):
    """Settings that remember which of them were asked for."""

    def __init__(self, section: str, values: dict[str, Any], asked: set[str]) -> None:
        super().__init__(values)
        self.section, self.asked = section, asked

    def __getitem__(self, key: str) -> Any:
        self.asked.add(f"{self.section}.{key}")
        return super().__getitem__(key)


def test_what_is_simulated_is_what_is_read() -> None:
    # Some are read only beside others; the mesh is read from the section itself, and paths by the command.
    variants: list[list[str]] = [
        ["moe.schedule=chunks"], ["training.optimizer_state_dtype=int8", "training.optimizer=auto"],
    ]  # fmt: skip
    asked: set[str] = set()
    for variant in variants:
        config = load_config(None, ["model.config=olmoe-1b-7b", "parallelism.num_ranks=8", *variant])
        settings = {name: _Read(name, values, asked) for name, values in config.model_dump().items()}
        shape = model_of(settings, config.model.config)
        candidate_of(settings, config.parallelism.resolve(8, shape.num_experts), shape, H100, 8)
    mesh = {f"parallelism.{axis}_size" for axis in ("fsdp", "tp", "cp", "pp", "dp_replicate", "ep", "etp")}
    others = {"parallelism.num_ranks", "parallelism.ranks_per_node", "parallelism.hardware"}
    assert asked | mesh | others | {"model.path", "model.config"} == SIMULATED


@pytest.mark.parametrize(
    ("plan", "arguments", "says"),
    [
        (PLAN, ["--gpus", "20"], "take a multiple of 8; nearest: 16 and 24"),
        (PLAN, ["--trace", str(TRACES / "e128-1390.npz")], "the trace has 8 of 128 experts"),
        (PLAN, ["--hardware", "H101"], "did you mean H100"),
        (PLAN, ["--checkpoint-seconds", "0"], "must be a positive number"),
        (PLAN, ["--restart-seconds", "nan"], "--restart-seconds nan must be 0 or a positive number"),
        (PLAN, ["--measured-run", "nowhere"], "nowhere has recorded 0 checkpoints and 0 recoveries"),
        (PLAN, ["moe.chunks=4"], "moe.chunks = 4 (on the command line) changes nothing without"),
        (
            PLAN + "gradient_accumulation_steps = 4",
            ["parallelism.pp_size=4", "parallelism.ep_size=4"],
            "2 layers cannot be cut into 4 stages",
        ),
        (PLAN, ["training.seed=3"], "training.seed (on the command line) changes nothing that is simulated"),
        (
            PLAN + "optimizer_in_backward = false\ngrad_clipping = 'delayed'",
            [],
            "changes nothing without training.optimizer_in_backward=true",
        ),
        (PLAN.replace("num_ranks = 16", ""), [], "say so with --gpus"),
        ("[model]\nmodle_type = 'olmoe'", [], "modle_type"),
        ("this is no TOML", [], "plan.toml"),
    ],
)
def test_bad_input(tmp_path: Path, plan: str, arguments: list[str], says: str) -> None:
    done = _run(tmp_path, *arguments, plan=plan)
    assert done.exit_code == 1 and says in " ".join(done.output.split()), done.output


KIND: Kind[int] = Kind("width", lambda answer: {"tiles": answer}, lambda record: int(record["tiles"]), "microseconds")
SHAPE = {"device": "NVIDIA H200", "rows": 512}


def chosen(record: Mapping[str, Any] | None, shape: Mapping[str, Any] = SHAPE, measured: int = 8) -> Chosen[int]:
    """As a run with a rule that says 4, and that it is to be measured."""
    decisions = Decisions(lambda: None if record is None else {"width": record})

    def decide(kept: Chosen[int] | None, note: str) -> tuple[Chosen[int], bool]:
        return (kept, False) if kept else (Chosen(4, shape, "default", "by the rule" + note), True)

    def measure(fallback: Chosen[int]) -> Chosen[int]:
        return Chosen(measured, fallback.shape, "measured", fallback.why, {"8": 1.5})

    found = decisions.choose(KIND, shape, decide, measure)
    assert decisions.record() == {"width": KIND.record(found)}
    return found


def test_what_was_measured_is_taken_again() -> None:
    first = chosen(None)
    record = json.loads(json.dumps(KIND.record(first)))
    assert record == {
        "tiles": 8, "how": "measured", "why": "by the rule", "shape": SHAPE, "microseconds": {"8": 1.5},
    }  # fmt: skip
    again = chosen(record, measured=16)
    assert (again.answer, again.how, again.times) == (8, "measured", {"8": 1.5})
    assert again.why == "as recorded in this run (measured)"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"shape": {**SHAPE, "rows": 64}}, "chosen anew: rows was 64, is 512"),
        ({"shape": None}, "chosen anew: device was None"),
        ({"tiles": "many"}, "chosen anew: of what was recorded, invalid literal"),
    ],
)
def test_what_cannot_be_taken_again_is_chosen_anew_and_says_why(change: dict[str, Any], says: str) -> None:
    found = chosen({**KIND.record(chosen(None)), **change}, measured=16)
    assert found.answer == 16 and says in found.why


def test_decisions_are_one_record_that_may_hold_none() -> None:
    assert KIND.recall({"name": "grouped"}, SHAPE) == (None, "") == KIND.recall(None, SHAPE)
    decisions, other = Decisions(), Kind[str]("way", lambda name: {"name": name}, lambda record: str(record["name"]))
    decisions.add(KIND, Chosen(4, SHAPE, "default", "by the rule"))
    decisions.add(other, Chosen("dedup", {}, "given", "asked for"))
    decisions.add(KIND, Chosen(8, SHAPE, "default", "by the rule; with a note"))
    assert [(key, one["how"], one["why"]) for key, one in decisions.record().items()] == [
        ("width", "default", "by the rule; with a note"), ("way", "given", "asked for"),
    ]  # fmt: skip
    asked = []

    def from_rank_0(make: Any) -> Any:
        asked.append(1)
        return make()

    again = Decisions(decisions.record, from_rank_0)
    assert again.choose(other, {}, lambda kept, note: (kept or Chosen("x", {}, "", note), False)).answer == "dedup"
    assert asked == [1], "one rank reads and decides"
    assert fastest({"a": 10.0, "b": 9.9, "c": 9.5, "d": 9.4}) == "c"
