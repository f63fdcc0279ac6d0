"""`training.torch_compile = "auto"`: on where it pays, off with a reason, and taken again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from carpool.parallel.degrees import Degrees
from carpool.planner.candidate import Candidate
from carpool.planner.decisions.chosen import Decisions
from carpool.planner.decisions.rules import COMPILE_LAYER, COMPILE_START, compiled_by_rule
from carpool.planner.machine.hardware import HARDWARE
from carpool.planner.model.shape import ModelShape
from carpool.train.blueprint import Blueprint
from carpool.train.config import load_config
from carpool.train.config.published import read_keys
from carpool.train.data.tokenizer import tokenizer_of
from carpool.train.launch.machine import imagine_machine
from carpool.train.plan.compile_and_capture import COMPILE_KIND
from carpool.train.plan.dry_run import dry_run
from carpool.train.plan.resolve import Plan, resolve

LONG = [
    "model.config=olmoe-1b-7b",
    "model.dtype=bfloat16",
    "training.max_steps=100000",
    "data.sequence_length=2048",
    "data.tokenizer=bytes",
]
CONSUMED = ["training.optimizer_in_backward=true", "training.max_grad_norm=0", "memory.experts=host"]
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
        (["training.torch_compile=false"], False, "asked for"),
        (["training.torch_compile=true", "training.max_steps=20"], True, "asked for"),
        (CONSUMED, False, "compiled layers hold their parameters"),
        (STAGES, False, "not tried with stages"),
        (["parallelism.num_ranks=2", "parallelism.tp_size=2", "parallelism.ep_size=2"], False, "divide tokens"),
        (["data.packing=off"], False, "as long as their longest sequence"),
        (["training.full_determinism=true"], False, "PyTorch's own kernels"),
        (
            ["model.config=qwen3-next-80b-a3b", "data.packing=off", "data.pad_to=sequence_length"],
            False,
            "token to token",
        ),
    ],
)
def test_where_layers_are_compiled(overrides: list[str], on: bool, why: str) -> None:
    plan = plan_of(*overrides)
    assert (plan.compiled.answer, plan.candidate.compiled) == (on, on) and why in plan.compiled.why
    assert any("decoder layers: " in line and why in line for line in plan.describe())
    assert plan.decisions.record()["torch_compile"]["on"] == on
    # A file says what was asked for.
    asked = load_config(None, overrides).training.torch_compile
    assert (plan.config.training.torch_compile, plan.written.training.torch_compile) == ("on" if on else "off", asked)


def test_nothing_is_compiled_on_cpus() -> None:
    plan = plan_of("model.config.num_hidden_layers=1", gpu=None)
    assert not plan.compiled.answer and plan.compiled.why == "there is no GPU"


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


def test_a_dry_run_shows_it() -> None:
    shown = dry_run(load_config(None, [*LONG, "parallelism.num_ranks=1"]), gpu="h200")
    assert 'torch_compile = "auto"' in shown and "# decoder layers: compiled: compilation takes about 16 s" in shown


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
