"""`carpool profile` end to end on two ranks: traces, numbers and the page agree; names of ranges; errors that help."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from carpool import cli
from carpool.hf.seam.find_modules import short_names
from carpool.metrics import counters as meter_module
from carpool.metrics.counters import Meter
from carpool.profile.numbers import load_profile
from carpool.profile.rank_trace import load, parse
from carpool.train.config import load_config
from carpool.train.run.profile_run import check_profile, profile
from tests.ranks import Ranks
from tests.train.test_cli import error_of
from tests.train.test_loop import MODEL

CPU = torch.device("cpu")


def record(output: str, overrides: Sequence[str], steps: int, compare: str | None = None) -> str:
    """On a rank: profile, and give back the error's text if it ends in one."""
    try:
        config = load_config(None, [*MODEL, *overrides, f"training.output_dir={output}"])
        profile(config, steps=steps, compare=compare, command="test")
    except ValueError as error:
        return str(error)
    return ""


def names(folder: Path, rank: int) -> list[str]:
    events = load(folder / "profile" / f"rank{rank}.json.gz")["traceEvents"]
    return [event["name"] for event in events if event.get("cat") == "user_annotation"]


def test_profile_of_two_schedules(two_ranks: Ranks, text: list[str], tmp_path: Path):
    before, after = tmp_path / "before", tmp_path / "after"
    assert two_ranks(record, str(before), [*text, "moe.transport=alltoall"], 2) == [""] * 2
    # An existing run in the folder is left as it is.
    after.mkdir()
    (after / "metrics.jsonl").write_text("")
    two = ["moe.schedule=two-batch", "memory.layer_activations=recompute", "memory.moe_outputs=recompute"]
    assert two_ranks(record, str(after), [*text, *two], 4, str(before)) == [""] * 2
    assert sorted(path.name for path in after.iterdir()) == ["metrics.jsonl", "profile", "profile.html"]

    for folder in (before, after):
        found = load_profile(folder / "profile" / "profile.json")
        assert not found.on_device
        assert (found.plain_ms is None) == (folder == before), "two steps leave none without the profiler"
        assert [one.rank for one in found.ranks] == [0, 1]
        for one in found.ranks:
            t = one.times
            assert 0 < t.exposed == t.ride < t.step
            assert t.computation + t.exposed + t.other_exposed + t.idle == pytest.approx(t.step)
        ways = ["forward", "backward"] if folder == before else ["forward", "recompute", "backward"]
        expected = {(layer, way) for layer in ("layers.0", "layers.1") for way in ways}
        assert {(layer.layer, layer.direction) for layer in found.layers()} == expected
        assert all(layer.ride > 0 and layer.experts > 0 for layer in found.layers())

        merged = load(folder / "profile" / "trace.json.gz")["traceEvents"]
        processes = {e["pid"]: e["args"]["name"] for e in merged if e["name"] == "process_name"}
        assert processes == {rank: f"rank {rank}" for rank in range(2)}
        for rank in range(2):
            ours = [name for name in names(folder, rank) if parse(name)]
            halves = 1 if folder == before else 2
            for layer, way in expected:
                if way == "backward":
                    assert ours.count(f"carpool::{layer}::backward::weight-gradients") == halves
                for piece in ("dispatch", "experts", "combine"):
                    # A ride asks for some pieces first, and waits for them later; each half has a ride.
                    assert ours.count(f"carpool::{layer}::{way}::{piece}") in (halves, 2 * halves)
            assert [e["name"] for e in merged if e["pid"] == rank and parse(e["name"])] == ours
            assert names(folder, rank).count("carpool::step") == 1, "one step is recorded"

    page = (after / "profile.html").read_text()
    assert f"Before: {before}" in page and f"After: {after}" in page
    for rank in range(2):
        assert page.count(f">rank {rank}</text>") == 2
    assert "host 1: rides" in page, "a lane for the thread of the second half"
    mean = load_profile(after / "profile" / "profile.json").mean()
    assert f"{100 * mean.exposed / mean.step:.0f} %" in page
    about = json.loads((after / "profile" / "run.json").read_text())
    assert about["decisions"]["schedule"]["name"] == "two-batch"


def test_what_cannot_be_profiled(two_ranks: Ranks, text: list[str], tmp_path: Path):
    assert two_ranks(record, str(tmp_path), text, 1) == ["--steps 1 must be 2 or more: one to warm up, and one that is "
                                                     "recorded"] * 2  # fmt: skip
    wanted = [*text, "training.resume_from_checkpoint=last"]
    assert all(f"{tmp_path} holds no checkpoint" in error for error in two_ranks(record, str(tmp_path), wanted, 2))


def test_errors_of_the_command_are_one_line_and_before_the_run(tmp_path):
    assert "has no profile" in error_of("profile", "--show", str(tmp_path))
    assert "has no profile" in error_of("profile", "--compare", str(tmp_path))
    assert "unknown key training.max_step" in error_of("profile", "training.max_step=3")
    assert "--show records nothing" in error_of("profile", "--show", str(tmp_path), "training.max_steps=3")
    assert "--output is of --show" in error_of("profile", "--output", str(tmp_path / "page.html"))
    given = [*MODEL, "parallelism.num_ranks=2", "parallelism.device=cpu", f"training.output_dir={tmp_path}"]
    (tmp_path / "metrics.jsonl").write_text("")
    check_profile(load_config(None, given), ())
    with pytest.raises(ValueError, match="transport 'nvlink' cannot be used here: there is no CUDA device"):
        check_profile(load_config(None, [*given, "moe.transport=nvlink"]), ())


def test_what_the_command_starts(monkeypatch, tmp_path):
    started, ahead = [], []
    module = sys.modules["carpool.cli.train"]
    monkeypatch.setattr(module, "look_ahead", lambda *args, **kwargs: nullcontext(ahead.append((args, kwargs))))
    monkeypatch.setattr(module, "read_data", lambda config: None)
    monkeypatch.setattr("carpool.train.launch.start.run", lambda *args, **kwargs: started.append((args, kwargs)))
    (tmp_path / "metrics.jsonl").touch()  # a folder that holds a run
    result = CliRunner().invoke(cli.app, ["profile", f"training.output_dir={tmp_path}", "--steps", "3"])
    assert result.exit_code == 0, result.output
    ((config, entry), kwargs) = started[0]
    assert (config.training.output_dir, entry) == (str(tmp_path), "carpool.train.run.profile_run:profile")
    assert (kwargs["steps"], kwargs["compare"]) == (3, None)
    assert kwargs["fixed"] == ahead[0][1]["fixed"] and "training.output_dir" in kwargs["fixed"]
    assert ahead[0][0] == (config, "carpool.train.run.profile_run:check_profile")


@pytest.mark.parametrize(
    ("long", "short"),
    [
        (["model.layers.0.mlp.experts", "model.layers.11.mlp.experts"], ["layers.0", "layers.11"]),
        (["a.layers.0.experts", "b.layers.0.experts"], ["a.layers.0.experts", "b.layers.0.experts"]),
        (["experts"], ["experts"]),
    ],
)
def test_short_names(long, short):
    assert short_names(long) == short


def test_profilers_see_names_and_nobody_else_pays(monkeypatch):
    meter = Meter("layers.3")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        spans = meter.ride(CPU, "backward", chunks=2)
        spans.begin("dispatch", 0)
        with spans.named("dispatch", 1):
            pass
        spans.end()
        with meter.span("fill", CPU):
            pass
    ours = {event.key for event in seen.key_averages() if event.key.startswith("carpool::")}
    assert ours == {
        "carpool::layers.3::backward::dispatch::0",
        "carpool::layers.3::backward::dispatch::1",
        "carpool::layers.3::forward::fill",
    }
    assert {name: len(calls) for name, calls in meter.milliseconds().items()} == {"dispatch": 1, "fill": 1}

    shown: list[str] = []
    monkeypatch.setattr(torch.profiler, "record_function", lambda name: pytest.fail("nobody profiles"))
    monkeypatch.setattr(torch.cuda.nvtx, "range", lambda name: shown.append(name) or torch.no_grad())
    with meter.span("experts", CPU):
        pass
    assert shown == []
    monkeypatch.setattr(meter_module, "NSIGHT", True)
    with meter.span("experts", CPU):
        pass
    assert shown == ["carpool::layers.3::forward::experts"]
