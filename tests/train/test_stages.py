"""The ways of the experts' stages in a run: the setting, the choice, the same on all ranks, recorded, used again."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from carpool.experts import Activation, Choices
from carpool.experts.gemm.choices import STAGES
from carpool.experts.gemm.measure_choices import Measured, _Problem
from carpool.planner.decisions.chosen import Chosen
from carpool.train.build.measured_choices import (
    KERNELS_KIND,
    Shape,
    decide_kernels,
    describe_kernels,
    explain_kernels,
    mean_over_ranks,
)
from carpool.train.config import describe, load_config
from carpool.train.records.run_folder import read_record
from carpool.train.run.finish import finish
from carpool.train.run.loop import loop
from carpool.train.run.run import start_run
from tests.ranks import Ranks
from tests.train import test_loop
from tests.train.test_loop import losses

CPU = torch.device("cpu")
SILU = Activation("silu", gated=True)
SHAPE = Shape("cpu", "float32", rows=32, slots_per_row=1, slots=2, hidden=32, inner=32)
MIXED = Choices(up="flat", dact="wide", ddown="square")


def test_a_word_or_a_table() -> None:
    assert load_config(None).moe.expert_kernels == "default"
    assert load_config(None, ["moe.expert_kernels=measure"]).moe.expert_kernels == "measure"
    both = ['moe.expert_kernels={up = "flat", dup = "library"}', "moe.expert_kernels.up=wide"]
    assert load_config(None, both).moe.expert_kernels == {"up": "wide", "dup": "library"}
    assert load_config(None, [*both, "moe.expert_kernels=measure"]).moe.expert_kernels == "measure"
    assert {name: kind for name, kind, *_ in describe()}["moe.expert_kernels"] == "default | measure | table"


@pytest.mark.parametrize("comments", [False, True])
@pytest.mark.parametrize("value", ["measure", '{up = "flat", dup = "library"}'])
def test_round_trip(tmp_path: Path, value: str, comments: bool) -> None:
    config = load_config(None, [f"moe.expert_kernels={value}", "memory.expert_activations=recompute"])
    (tmp_path / "config.toml").write_text(config.to_toml(comments))
    assert load_config(tmp_path / "config.toml") == config


def record_of(choices: Choices, how: str = "measured", shape: Shape = SHAPE) -> dict[str, Any]:
    times = {stage: {"library": 3.0, "flat": 2.0} for stage in STAGES} if how == "measured" else None
    return json.loads(json.dumps(KERNELS_KIND.record(Chosen(choices, asdict(shape), how, "because", times))))


def decided(wanted: Any, shape: Shape = SHAPE, record: Any = None) -> tuple[Chosen[Choices], bool]:
    return decide_kernels(wanted, shape, CPU, SILU, *KERNELS_KIND.recall(record, asdict(shape)))


def test_what_a_new_run_takes() -> None:
    for wanted in ("default", "measure"):
        chosen, to_measure = decided(wanted)
        assert (chosen.answer, chosen.how, to_measure) == (Choices(), "default", False)
        assert ("nothing was measured: the kernels need a GPU" in chosen.why) == (wanted == "measure")
    given = {"up": "square", "dup": "flat"}
    chosen, to_measure = decided(given)
    assert (chosen.answer, chosen.how, to_measure) == (Choices(up="square", dup="flat"), "given", False)
    assert "up, dup as moe.expert_kernels says; the rest by the shape" in chosen.why
    assert "the library computes all of them" in chosen.why  # on this device, as said in the same breath
    chosen, _ = decided(given, record=record_of(MIXED))
    assert chosen.answer == replace(MIXED, up="square", dup="flat") and chosen.how == "given"


def test_a_quantised_base_is_never_whole() -> None:
    """As the library's products would need it, whether its experts have adapters or not."""
    shape = replace(SHAPE, dtype="bfloat16", hidden=2048, inner=768, rows=16384, slots=128)
    where = mock.patch.object(torch.cuda, "get_device_capability", lambda _: (9, 0))
    for more, library in (({}, True), ({"quantised": True}, False), ({"adapter_rank": 16}, False)):
        with where, mock.patch("carpool.train.build.measured_choices.why_no_kernels", lambda *_: ""):
            chosen, _ = decide_kernels("default", replace(shape, **more), torch.device("cuda"), SILU, None, "")
        assert ("library" in chosen.answer.to_dict().values()) == library


@pytest.mark.parametrize("stages", [{"up": "huge"}, {"huge": "flat"}])
def test_records_of_other_versions(stages: dict[str, str]) -> None:
    kept, note = KERNELS_KIND.recall({**record_of(MIXED), "stages": stages}, asdict(SHAPE))
    assert kept is None and "chosen anew" in note and "huge" in note


def test_the_first_record_counts(tmp_path: Path) -> None:
    assert read_record([], "experts") is None and read_record([tmp_path], "experts") is None
    for name, written in (("a", "{}"), ("b", '{"experts": {"how": "given"}}')):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.json").write_text(written)
    assert read_record([tmp_path / "none", tmp_path / "b", tmp_path / "a"], "experts") == {"how": "given"}
    assert read_record([tmp_path / "a", tmp_path / "b"], "experts") is None, "an older version's"
    (tmp_path / "a" / "run.json").write_text("[]")
    with pytest.raises(ValueError, match=r"a/run\.json is damaged \(a list, not an object\); delete it"):
        read_record([tmp_path / "a"], "experts")


def times_of(rank: int) -> Measured:
    """Flat is faster than the library on ranks 0 to 2, and so much slower on rank 3 that the library wins in total.
    Wide is the fastest wherever it works, but it does not on rank 2."""
    microseconds = {stage: {"library": 10.0, "flat": 40.0 if rank == 3 else 9.0, "wide": 1.0} for stage in STAGES}
    microseconds["dx"]["flat"] = 5.0 + rank
    if rank == 2:
        for times in microseconds.values():
            del times["wide"]
    return Measured(Choices.all("wide"), microseconds, gather=float(rank))


def agreed() -> Measured | None:
    return mean_over_ranks(times_of(dist.get_rank()), CPU)


def one_has_none() -> Measured | None:
    return mean_over_ranks(times_of(0) if dist.get_rank() else None, CPU)


def test_ranks_add_up_their_times_and_choose_alike(ranks: Ranks) -> None:
    found = ranks(agreed)
    assert found == [found[0]] * 4 and found[0] is not None
    assert found[0].choices == Choices(dx="flat") and found[0].gather == 1.5
    assert found[0].microseconds["up"] == {"library": 10.0, "flat": 16.75}
    assert found[0].microseconds["dx"] == {"library": 10.0, "flat": 6.5}
    assert explain_kernels(found[0]).startswith("measured, in microseconds: up 10 (flat 17), down 10 (flat 17), ")
    assert "dx 6 (library 10)" in explain_kernels(found[0])
    assert describe_kernels(found[0].choices) == "library: up, down, dact, dup, ddown; flat: dx"


def test_if_one_rank_cannot_measure_none_does(ranks: Ranks) -> None:
    assert ranks(one_has_none) == [None] * 4


MODEL = [
    *test_loop.MODEL, "model.config.intermediate_size=24", "training.max_steps=4", "training.save_steps=2",
    "training.eval_steps=none", "training.eval_on_start=false", "training.sample_prompt=none",
    "training.warmup_steps=1", "training.save_pretrained=false",
]  # fmt: skip


def run(output: str, overrides: Sequence[str]) -> list[tuple[Choices | None, bool]]:
    """On a rank: train, and give back how each layer's experts were computed."""
    one = start_run(load_config(None, [*MODEL, *overrides, f"training.output_dir={output}"]), None, "test")
    try:
        loop(one)
        finish(one)
    finally:
        one.close()
    return [(own.compute.choices, own.compute.recompute) for own in one.built.rides]  # type: ignore[union-attr]


def info(output: Path) -> dict[str, Any]:
    return json.loads((output / "run.json").read_text())["decisions"]["experts"]


def test_recorded_and_used_again(two_ranks: Ranks, text: list[str], tmp_path: Path) -> None:
    whole, output = tmp_path / "whole", tmp_path / "resumed"
    assert two_ranks(run, str(whole), text) == [[(Choices(), False)] * 2] * 2
    # Two sequences of 32 tokens on each of 2 ranks, three experts a token, four slots a rank.
    shape = {
        "device": "cpu", "dtype": "float32", "rows": 96, "slots_per_row": 2, "slots": 4, "hidden": 32, "inner": 24,
        "adapter_rank": 0, "quantised": False,
    }  # fmt: skip
    assert info(whole) == {
        "stages": Choices().to_dict(), "how": "default", "why": "by the shape",
        "shape": shape,
    }  # fmt: skip

    stop = ["moe.expert_kernels=measure", "memory.expert_activations=recompute", "training.stop_at_step=2"]
    assert two_ranks(run, str(output), [*text, *stop]) == [[(Choices(), True)] * 2] * 2
    first = info(output)
    assert first["how"] == "default" and "nothing was measured" in first["why"]
    # As if that run had measured: what it chose is used again, though the default is another.
    path = output / "run.json"
    written = json.loads(path.read_text())
    written["decisions"]["experts"] |= record_of(MIXED, shape=Shape(**shape))
    path.write_text(json.dumps(written))
    resume = ["training.resume_from_checkpoint=last"]
    assert two_ranks(run, str(output), [*text, *resume, "moe.expert_kernels=measure"]) == [[(MIXED, False)] * 2] * 2
    again = info(output)
    assert again["stages"] == MIXED.to_dict() and again["how"] == "measured"
    assert again["microseconds"] == written["decisions"]["experts"]["microseconds"]
    assert losses(output) == losses(whole), "bitwise, with and without what recompute drops"

    # A run that goes on elsewhere from a checkpoint takes the record of the run that wrote it; a table overrides.
    resume = [f"training.resume_from_checkpoint={output}/checkpoints/step-00000002", "moe.expert_kernels.up=square"]
    expected = replace(MIXED, up="square")
    assert two_ranks(run, str(tmp_path / "branch"), [*text, *resume]) == [[(expected, False)] * 2] * 2
    assert info(tmp_path / "branch")["how"] == "given" and info(tmp_path / "branch")["stages"] == expected.to_dict()
    assert losses(tmp_path / "branch") == {step: losses(whole)[step] for step in (3, 4)}


def timed(*sizes: Any, bias: bool, use_arena: bool, adapter_rank: int) -> Measured:
    """In place of times, which a CPU has none of. All else is real: the problem that would be timed is computed."""
    assert not bias and not use_arena and not adapter_rank
    problem = _Problem(*sizes, bias, use_arena, 0)
    for stage in STAGES:
        problem.calls(stage)["library"]()
    assert problem.weights.up_SFH.shape == (2, 48, 32) and problem.x.data.shape == (192, 32)
    return times_of(dist.get_rank())


def run_timed(output: str, overrides: Sequence[str]) -> list[tuple[Choices | None, bool]]:
    with (
        mock.patch("carpool.train.build.measured_choices.why_no_kernels", return_value=""),
        mock.patch("carpool.train.build.measured_choices.measure_choices", timed),
    ):
        return run(output, overrides)


def test_what_is_measured_reaches_the_layers_and_the_record(ranks: Ranks, text: list[str], tmp_path: Path) -> None:
    output, expected = tmp_path / "run", Choices(dx="flat")
    settings = [*text, "moe.expert_kernels=measure"]
    assert ranks(run_timed, str(output), [*settings, "training.stop_at_step=2"]) == [[(expected, False)] * 2] * 4
    first = info(output)
    assert first["stages"] == expected.to_dict() and first["how"] == "measured"
    assert first["microseconds"]["up"] == {"library": 10.0, "flat": 16.75}
    # Resumed without anything in the place of times: there is nothing to measure any more.
    assert ranks(run, str(output), [*settings, "training.resume_from_checkpoint=last"]) == [[(expected, False)] * 2] * 4
    assert {**info(output), "why": ""} == {**first, "why": ""}
