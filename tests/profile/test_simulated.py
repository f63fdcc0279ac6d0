"""A simulated step as a profile: the same numbers as the event graph's, a page that says so, a trace for Perfetto."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from carpool.planner.simulator.simulate import drawn_seconds, sampled
from carpool.planner.step.events import execute
from carpool.profile.numbers import load_profile, save_profile
from carpool.profile.rank_trace import load
from carpool.report.profile_page import profile_path, write_profile
from carpool.report.simulation import simulated_profile, write_simulated_trace
from tests.planner.step_problem import build
from tests.report.test_profile import recorded


def _executed(stages: int = 1):  # type: ignore[no-untyped-def]
    step = build(16, layers=4, stages=stages)
    return execute(step.graph, step.ranks, drawn_seconds(step, sampled(step, None)), kept=(0, 5))


@pytest.mark.parametrize("stages", [1, 2])
def test_the_numbers_are_those_of_the_graph(stages: int) -> None:
    done = _executed(stages)
    found = simulated_profile(done, {"plan": "x"})
    assert [one.rank for one in found.ranks] == [0, 5, 8, 13][: 2 * stages] and found.simulated
    for number, one in enumerate(found.ranks):
        stage, rank = divmod(number, 2)
        exposed = done.exposed_seconds(stage, (0, 5)[rank])
        assert one.times.step == pytest.approx(1e3 * done.step, rel=1e-6)
        assert one.times.computation == pytest.approx(1e3 * (exposed["attention"] + exposed["experts"]), rel=1e-6)
        assert one.times.exposed == pytest.approx(1e3 * (exposed["dispatch"] + exposed["combine"]), rel=1e-6)
        assert one.times.other_exposed == pytest.approx(1e3 * exposed["reduction"], rel=1e-6)
        assert one.times.idle == pytest.approx(1e3 * exposed["idle"], rel=1e-6, abs=1e-6)
    layers = {(layer.layer, layer.direction) for layer in found.layers()}
    assert layers == {(f"layers.{i}", way) for i in range(4) for way in ("forward", "backward")}


def test_the_page_says_that_it_is_simulated(tmp_path: Path) -> None:
    (tmp_path / "a" / "profile").mkdir(parents=True)
    save_profile(simulated_profile(_executed(), {"plan": "x"}), profile_path(tmp_path / "a"))
    assert load_profile(profile_path(tmp_path / "a")).simulated
    page = write_profile(tmp_path / "a").read_text()
    assert "One step, simulated: nothing ran." in page and "(simulated)" in page and "profiler" not in page
    both = write_profile(recorded(tmp_path / "b"), tmp_path / "a", tmp_path / "both.html").read_text()
    assert "The first step is simulated: nothing ran. The second is recorded by PyTorch" in both


def test_the_trace_is_one_that_perfetto_reads(tmp_path: Path) -> None:
    done = _executed(stages=2)
    write_simulated_trace(done, tmp_path / "trace.json.gz")
    events = load(tmp_path / "trace.json.gz")["traceEvents"]
    work = [event for event in events if event["ph"] == "X" and event["tid"] >= 0]
    assert {event["pid"] for event in work} == {0, 5, 8, 13}
    assert max(event["ts"] + event["dur"] for event in work) == pytest.approx(1e6 * done.step, rel=1e-6)
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert {names[event["pid"], event["tid"]] for event in work} == {"computation", "rides", "collectives"}
    marked = sum(event["dur"] for event in work if "critical path" in event["args"] and event["pid"] in (0, 8))
    assert marked > 0
    # On one thread nothing overlaps.
    own = sorted((e["ts"], e["ts"] + e["dur"]) for e in work if (e["pid"], e["tid"]) == (0, 0))
    assert np.all(np.array([a for a, _ in own[1:]]) >= np.array([b for _, b in own[:-1]]) - 1e-3)
