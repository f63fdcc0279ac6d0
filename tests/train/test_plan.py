"""`parallelism=auto` and `memory=auto`: what is left to the planner, taken again on resume, and held against steps."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from carpool.planner.candidate import POLICIES
from carpool.planner.machine.hardware import HARDWARE
from carpool.planner.search.plan import USABLE
from carpool.report.page import plan_rows
from carpool.report.read import read_run
from carpool.train.blueprint import meta_model, model_config, model_source
from carpool.train.config import Config, load_config, resolve_config
from carpool.train.data.tokenizer import load_tokenizer
from carpool.train.plan.auto_plan import (
    MEASURED,
    SKIPPED,
    Planned,
    Predicted,
    describe,
    free_keys,
    make_plan,
    measured_beside,
    with_settings,
)
from carpool.train.plan.dry_run import dry_run
from carpool.train.run.finish import finish
from carpool.train.run.loop import loop
from carpool.train.run.run import start_run
from tests.ranks import Ranks
from tests.train.test_loop import MODEL, losses

OLMOE = meta_model(model_config("olmoe-1b-7b"))
GiB = 2**30


def planned(*overrides: str, world: int = 8, memory: int = 80 * GiB) -> tuple[Config, Config, Planned, str]:
    """(As configured, as planned, the plan, why), for OLMoE on H100s."""
    overrides = ("model.config=olmoe-1b-7b", "data.sequence_length=2048", "model.dtype=bfloat16", *overrides)
    resolved = resolve_config(None, list(overrides))
    plan, why = make_plan(
        resolved.config, resolved.fixed, OLMOE, HARDWARE["H100"], world=world, per_node=8, memory=memory
    )
    return resolved.config, with_settings(resolved.config, plan.taken.settings), plan, why


def tokens(config: Config, world: int) -> int:
    training = config.training
    sequences = training.per_device_train_batch_size * training.gradient_accumulation_steps
    return sequences * config.parallelism.resolve(world, 64).dp


def test_a_section_is_left_to_the_plan_in_one_word(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('memory = "auto"\n[moe]\ntransport = "dedup"\n')
    resolved = resolve_config(path, ["parallelism.ep_size=2", "parallelism=auto"])
    config = resolved.config
    assert config.parallelism.plan == config.memory.plan == "auto" and config.parallelism.ep_size == 2
    free = free_keys(config, resolved.fixed)
    assert not {"parallelism.ep_size", "moe.transport"} & free
    assert {"parallelism.tp_size", "memory.expert_inputs", "training.optimizer_offload"} <= free
    assert free_keys(load_config(None, ["moe.schedule=auto"]), []) == set()
    with pytest.raises(ValueError, match="training is a section"):
        load_config(None, ["training=auto"])
    with pytest.raises(ValueError, match=r"memory is a section; .*; memory=auto leaves it to the planner"):
        load_config(None, ["memory=automatic"])


def test_what_is_planned_fits_and_keeps_the_tokens_of_a_step() -> None:
    before, after, plan, why = planned("parallelism=auto", "memory=auto")
    assert tokens(after, 8) == tokens(before, 8) and after.parallelism.plan is None
    assert plan.taken.memory_bytes <= 0.92 * 80 * GiB
    assert [one.step_ms[1] for one in (plan.taken, *plan.others)] == sorted(
        one.step_ms[1] for one in (plan.taken, *plan.others)
    )
    assert sum(plan.taken.kinds_ms.values()) == pytest.approx(plan.taken.step_ms[1])
    assert plan.taken.label in why and "H100" in why and plan.inputs
    small = planned("parallelism=auto", "memory=auto", memory=24 * GiB)[2].taken
    assert small.memory_bytes <= 0.92 * 24 * GiB and small.step_ms[1] >= plan.taken.step_ms[1]
    with pytest.raises(ValueError, match=r"no plan fits into 1\.0 GiB of a rank\. The configuration that needs least"):
        planned("parallelism=auto", "memory=auto", memory=GiB)


def test_what_the_user_says_stays() -> None:
    asked = ("parallelism.ep_size=4", "parallelism.data_parallel=fsdp", "training.gradient_accumulation_steps=2")
    before, after, _, _ = planned("parallelism=auto", "memory=auto", *asked, "memory.expert_activations=recompute")
    assert (after.parallelism.ep_size, after.parallelism.data_parallel) == (4, "fsdp")
    assert after.memory.expert_activations == "recompute" and after.training.gradient_accumulation_steps == 2
    assert tokens(after, 8) == tokens(before, 8)
    before, after, plan, _ = planned("memory=auto", "parallelism.data_parallel=fsdp")
    assert after.parallelism == before.parallelism and after.moe == before.moe
    assert set(plan.taken.settings) <= {f"memory.{item}" for item in POLICIES} | {"training.optimizer_offload"}


def test_gradients_are_left_to_the_plan_where_none_are_clipped() -> None:
    kept = [f"memory.{item}=save" for item in POLICIES]
    asked = (
        "memory=auto", "parallelism.ep_size=8", *kept, "training.optimizer_offload=none",
        "parallelism.data_parallel=zero1",
    )  # fmt: skip
    room = int(planned(*asked, memory=200 * GiB)[2].taken.memory_bytes / USABLE - GiB)
    consumed = planned(*asked, "training.max_grad_norm=0", memory=room)[2].taken
    assert consumed.settings["training.optimizer_in_backward"] is True and consumed.memory_bytes < USABLE * room
    with pytest.raises(ValueError, match="no plan fits"):
        planned(*asked, memory=room)
    several = ("training.optimizer_in_backward=true", "training.max_grad_norm=0", "moe.schedule=two-batch")
    with pytest.raises(ValueError, match="the optimizer in the backward takes one micro-batch"):
        planned("parallelism=auto", "training.per_device_train_batch_size=2", *several)


@pytest.mark.parametrize(
    "asked", [["memory=auto"], ["parallelism=auto", "moe.transport=auto", "parallelism.data_parallel=auto"]]
)
def test_what_a_run_decides_by_a_rule_is_predicted_as_something_that_can_be(asked: list[str]) -> None:
    label = planned(*asked)[2].taken.label
    assert "auto" not in label and ("zero1" in label or "fsdp" in label)


def test_plans_that_cannot_be_run_are_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many of them would be faster."""
    seen: list[int] = []

    def refused(config: Config, settings: dict[str, Any], degrees: Any, model: Any, whole: bool = False) -> str | None:
        if whole:
            seen.append(degrees.pp)
        return "not here" if whole and degrees.pp == 1 else None

    monkeypatch.setattr("carpool.train.plan.auto_plan._refused", refused)
    taken = planned("parallelism=auto", "memory=auto", "data.sequence_length=512", "parallelism.tp_size=1")[2]
    assert seen.count(1) > 2 and taken.taken.settings["parallelism.pp_size"] > 1
    assert all(one.settings["parallelism.pp_size"] > 1 for one in taken.others)
    monkeypatch.setattr("carpool.train.plan.auto_plan._refused", lambda *_, whole=False: "not here" if whole else None)
    with pytest.raises(ValueError, match=r"no plan that fits can be run: not here \([0-9]+\)"):
        planned("memory=auto", "parallelism.data_parallel=fsdp")


def test_no_plan_divides_a_key_value_head() -> None:
    one_head = ["model_type=mixtral", "num_key_value_heads=1", "num_hidden_layers=2", "hidden_size=256"]
    asked = [*(f"model.config.{one}" for one in one_head), "parallelism=auto"]
    for tp, plans in ((1, True), (2, False)):
        resolved = resolve_config(None, [*asked, f"parallelism.tp_size={tp}"])
        model = meta_model(model_source(resolved.config, load_tokenizer(None, None, None)))
        with nullcontext() if plans else pytest.raises(ValueError, match="no plan"):
            make_plan(resolved.config, resolved.fixed, model, HARDWARE["H100"], world=4, per_node=4, memory=80 * GiB)


def predicted(label: str, rides: float, experts: float, rest: float, **settings: Any) -> Predicted:
    step = rides + experts + rest
    return Predicted(
        label, settings, (0.9 * step, step, 1.2 * step), {"rides": rides, "experts": experts, "rest": rest}, 2e9, 1e9
    )


def steps(rides: float, experts: float, rest: float, number: int = SKIPPED + MEASURED) -> list[dict[str, Any]]:
    ms = {"dispatch": {"total": rides / 2}, "combine": {"total": rides / 2}, "experts": {"total": experts}}
    slow = {"step_ms": 900.0, "memory_peak_bytes": 9, "ms": ms}
    return [slow] * SKIPPED + [{"step_ms": rides + experts + rest, "memory_peak_bytes": 7, "ms": ms}] * (
        number - SKIPPED
    )


def test_other_plans_are_corrected_by_what_was_measured() -> None:
    plan = Planned(predicted("a", 10, 20, 30, x=1), (predicted("b", 5, 25, 31, x=2), predicted("c", 50, 20, 30)), {})
    assert measured_beside(plan, steps(40, 20, 33)[:-1]) is None, "not enough steps"
    found = measured_beside(plan, steps(40, 20, 33))
    assert found is not None
    assert found["step_ms"] == 93 and found["memory_bytes"] == 7
    assert found["factors"] == {"rides": 4.0, "experts": 1.0, "rest": 1.1}
    assert found["exposed_share"] == pytest.approx(40 / 93)
    assert found["others_ms"] == {"b": pytest.approx(20 + 25 + 34.1), "c": pytest.approx(200 + 20 + 33)}
    first, second = describe(plan, found)
    assert "a step takes 93.0 ms, and 60.0 (54 to 72) were predicted" in first
    assert "exposed rides 43%, predicted 17%" in first
    assert "b would take 79.1 ms" in second and "x=2" in second
    right = measured_beside(plan, steps(10, 20, 30))
    assert right is not None and len(describe(plan, right)) == 1, "nothing would be faster"
    plan = Planned(predicted("a", 10, 20, 30), (predicted("b", 0, 20, 20),), {})
    found = measured_beside(plan, [{**one, "ms": {}} for one in steps(20, 40, 60)])
    assert found is not None
    assert found["exposed_share"] is None and set(found["factors"].values()) == {2.0}
    assert found["others_ms"] == {"b": 80.0}


def run(output: str, overrides: list[str]) -> tuple[str, dict[str, Any]]:
    """On a rank: train; the degrees, and what run.json says."""
    resolved = resolve_config(None, [*MODEL, *overrides, f"training.output_dir={output}"])
    one = start_run(resolved.config, None, "test", resolved.fixed)
    try:
        loop(one)
        finish(one)
        return str(one.plan.degrees), one.records.info
    finally:
        one.close()


def test_a_run_follows_its_plan_and_a_resumed_one_the_same(two_ranks: Ranks, text: list[str], tmp_path: Path) -> None:
    last = SKIPPED + MEASURED
    settings = [
        *text, "parallelism=auto", "memory=auto", f"training.max_steps={last}", "training.save_steps=6",
        "training.eval_steps=none", "training.eval_on_start=false", "training.sample_prompt=none",
        "training.save_pretrained=false",
    ]  # fmt: skip
    whole, branch = tmp_path / "whole", tmp_path / "branch"
    (degrees, info), (other, _) = two_ranks(run, str(whole), settings)
    decision = info["decisions"]["plan"]
    assert degrees == other and decision["how"] == "modelled" and "fastest of" in decision["why"]
    taken = decision["taken"]["settings"]
    assert f"fsdp {taken['parallelism.fsdp_size']} x tp {taken['parallelism.tp_size']}" in degrees
    path = whole / "run.json"
    written = json.loads(path.read_text())
    told = written["plan"]
    assert told["measured"]["step_ms"] > 0 and told["predicted"]["step_ms"] == list(decision["taken"]["step_ms"])
    what = [name for name, *_ in plan_rows(read_run(whole))]
    assert what[:3] == ["Step time", "Memory of a rank", "Exposed rides"]
    # A plan that this version would not make: the resumed run takes it all the same.
    written["decisions"]["plan"]["taken"]["label"] = "another"
    path.write_text(json.dumps(written))
    resume = f"training.resume_from_checkpoint={whole}/checkpoints/step-00000006"
    _, again = two_ranks(run, str(branch), [*settings, resume])[0]
    assert again["decisions"]["plan"]["taken"]["label"] == "another"
    assert again["decisions"]["plan"]["why"] == "as recorded in this run (modelled)"
    assert "plan" not in again, "too few steps"
    assert losses(branch) == {step: loss for step, loss in losses(whole).items() if step > 6}, "bit by bit"


def test_rules_of_a_run_are_decisions_too(two_ranks: Ranks, text: list[str], tmp_path: Path) -> None:
    settings = [*text, "parallelism.tp_size=2", "training.eval_on_start=false"]
    _, info = two_ranks(begin, str(tmp_path), settings)[0]
    told = info["decisions"]["sequence_parallel"]
    assert told["on"] == info["parallelism"]["sequence_parallel"] and told["how"] == "default" and told["why"]
    assert list(info["decisions"])[-1] == "cuda_graphs"


def begin(output: str, overrides: list[str]) -> tuple[str, dict[str, Any]]:
    """On a rank: what a run says before its first step."""
    one = start_run(load_config(None, [*MODEL, *overrides, f"training.output_dir={output}"]), None, "test")
    one.close()
    return str(one.plan.degrees), one.records.info


def test_a_dry_run_shows_the_plan() -> None:
    resolved = resolve_config(
        None, ["model.config=olmoe-1b-7b", "model.dtype=bfloat16", "parallelism=auto", "memory=auto"]
    )
    shown = dry_run(resolved.config, resolved.sources, gpu="h100")
    assert "\n# plan: " in shown and "the fastest of" in shown and "\n#   then " in shown
    assert 'plan = "none"' in shown and "  # the plan\n" in shown
