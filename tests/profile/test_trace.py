"""From a trace to numbers, on a trace whose answer is known; several ranks' traces in one; unions of spans; and a
simulated step as a profile."""

from __future__ import annotations

import gzip
import json
import random
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from carpool.metrics.counters import range_name
from carpool.planner.simulator.simulate import drawn_seconds, sampled
from carpool.planner.step.events import execute
from carpool.profile.numbers import LayerTimes, Profile, Times, load_profile, measure, save_profile
from carpool.profile.rank_trace import Label, Span, _flat, kind_of, length, load, merge, parse, read, subtract, union
from carpool.report.profile_page import profile_path, write_profile
from carpool.report.simulation import simulated_profile, write_simulated_trace
from tests.planner.step_problem import build
from tests.profile.traces import BACKWARD, START, annotated, kernel, two_streams
from tests.report.test_profile import recorded


def test_names_of_ranges_are_read_back():
    assert parse(range_name("layers.3", "forward", "dispatch")) == Label("layers.3", "forward", "dispatch")
    assert parse(range_name("moe", "backward", "combine", 2)) == Label("moe", "backward", "combine", 2)
    for name in ("carpool::step", "aten::mm", "carpool::a::b::c::d", "FSDP::all_gather (x)", "other::a::b::c"):
        assert parse(name) is None


RIDE, EXPERTS = Label("layers.0", "backward", "combine"), Label("layers.0", "forward", "experts")


@pytest.mark.parametrize(
    ("name", "label", "kind"),
    [
        ("dispatch_kernel", None, "dispatch"),
        ("combine_kernel", RIDE, "combine"),
        ("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", RIDE, "combine"),
        ("ncclDevKernel_AllGather_RING_LL", None, "other"),
        ("ncclDevKernel_SendRecv", Label("layers.0", "forward", "fill"), "other"),
        ("Memcpy PtoP (Device -> Device)", RIDE, "combine"),
        ("plan_kernel", RIDE, "packing"),
        ("_grouped_gemm", EXPERTS, "experts"),
        ("_outer_kernel", Label("layers.0", "backward", "weight-gradients"), "experts"),
        ("Memcpy HtoD (Pageable -> Device)", None, "computation"),
        ("void at::native::vectorized_elementwise_kernel<4>", None, "computation"),
    ],
)
def test_kinds_of_kernels(name, label, kind):
    assert kind_of(name, label) == kind


def test_nested_ranges_become_a_row():
    a, b, c = (Label(name, "forward", "experts") for name in "abc")
    assert _flat([((3, 5), b), ((0, 9), a)]) == [((0, 3), a), ((3, 5), b), ((5, 9), a)]
    assert _flat([((0, 9), a), ((0, 4), b), ((4, 9), c)]) == [((0, 4), b), ((4, 9), c)]
    assert _flat([((0, 4), a), ((6, 8), b)]) == [((0, 4), a), ((6, 8), b)]
    assert _flat([((0, 6), a), ((4, 8), b)]) == [((0, 4), a), ((4, 8), b)]
    assert _flat([]) == []


def test_two_streams():
    recorded = read(two_streams())
    assert recorded.on_device
    start = round(1000 * START)
    found = {((p.start - start) // 1000, (p.end - start) // 1000): (p.lane, p.kind, p.label) for p in recorded.pieces}
    forward = {piece: Label("layers.0", "forward", piece, 0) for piece in ("dispatch", "experts", "combine")}
    assert found == {
        (50, 150): ("stream 7", "computation", None),
        (150, 170): ("stream 7", "packing", forward["dispatch"]),
        (100, 200): ("stream 20", "dispatch", Label("layers.0", "forward", "dispatch", 1)),
        (200, 400): ("stream 7", "experts", forward["experts"]),
        (380, 500): ("stream 20", "combine", forward["combine"]),
        (480, 600): ("stream 24", "other", None),
        (600, 700): ("stream 20", "dispatch", Label("layers.0", "backward", "dispatch")),
        (710, 790): ("stream 7", "experts", Label("layers.0", "backward", "experts")),
        (900, 910): ("stream 7", "computation", None),
        (995, 1000): ("stream 7", "computation", None),
    }
    numbers = measure(recorded, rank=3)
    assert numbers.rank == 3
    assert numbers.times == Times(
        step=1.0, computation=0.415, ride=0.32, exposed=0.23, other=0.12, other_exposed=0.1, idle=0.255
    )
    assert numbers.layers == [
        LayerTimes(layer="layers.0", direction="forward", ride=0.22, exposed=0.13, packing=0.02, experts=0.2),
        LayerTimes(layer="layers.0", direction="backward", ride=0.1, exposed=0.1, packing=0.0, experts=0.08),
    ]
    assert [lane.name for lane in numbers.lanes] == [
        "stream 7: computation",
        "stream 20: rides",
        "stream 24: other communication",
    ]
    # Columns are as wide as half a microsecond, so nothing is lost here.
    assert numbers.lanes[1].runs == [
        (0.1, 0.2, "dispatch", "layers.0, forward, dispatch, chunk 1"),
        (0.38, 0.5, "combine", "layers.0, forward, combine, chunk 0"),
        (0.6, 0.7, "dispatch", "layers.0, backward, dispatch"),
    ]


def test_many_short_kernels_make_a_small_picture():
    trace = two_streams()
    for i in range(5000):
        at = i / 5
        trace["traceEvents"].append(kernel("short", 9, at, at + 0.02))  # a tenth of the time: blank
        trace["traceEvents"].append(kernel("longer", 10, at, at + 0.15))
    lanes = {lane.name: lane for lane in measure(read(trace), 0).lanes}
    assert lanes["stream 9: computation"].runs == []
    assert lanes["stream 10: computation"].runs == [(0.0, 1.0, "computation", "")]


def test_without_kernels_the_ranges_count():
    trace = two_streams()
    trace["traceEvents"] = [e for e in trace["traceEvents"] if e.get("cat") == "user_annotation"]
    trace["traceEvents"].append(annotated("carpool::layers.0::forward::fill", 500, 600))
    recorded = read(trace)
    assert not recorded.on_device
    numbers = measure(recorded, 0)
    # 20 us of the forward's rides, 10 of the backward's, which run on another thread; 100 us of filling.
    assert numbers.times == Times(
        step=1.0, computation=0.87, ride=0.03, exposed=0.03, other=0.1, other_exposed=0.1, idle=0.0
    )
    assert [lane.name for lane in numbers.lanes] == ["host: computation", "host 1: rides"]
    assert sum(layer.exposed for layer in numbers.layers) == pytest.approx(0.03)


def test_a_trace_without_a_step_is_refused():
    trace = two_streams()
    trace["traceEvents"] = [e for e in trace["traceEvents"] if e["name"] != "carpool::step"]
    with pytest.raises(ValueError, match="no range 'carpool::step'"):
        read(trace)


def test_files_that_are_no_trace_are_refused(tmp_path: Path):
    for content, message in ((b"{}", "has no list of traceEvents"), (b"[", "cannot be read as a trace")):
        (tmp_path / "t.json").write_bytes(content)
        with pytest.raises(ValueError, match=message):
            load(tmp_path / "t.json")
    (tmp_path / "t.json.gz").write_bytes(gzip.compress(b'{"traceEvents": []}')[:-9])
    with pytest.raises(ValueError, match="cannot be read as a trace"):
        load(tmp_path / "t.json.gz")


def test_merged_ranks_are_processes_on_one_clock(tmp_path: Path):
    base = 1_790_000_000_000_000_000
    # Rank 1 counts from a second later, so its events are a second later than rank 0's.
    for rank in (0, 1):
        with gzip.open(tmp_path / f"rank{rank}.json.gz", "wt") as file:
            json.dump(two_streams(base + rank * 10**9), file)
    merge({rank: tmp_path / f"rank{rank}.json.gz" for rank in (0, 1)}, tmp_path / "trace.json.gz")
    events = load(tmp_path / "trace.json.gz")["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {0: "rank 0", 1: "rank 1"}
    steps = {e["pid"]: e["ts"] for e in events if e["name"] == "carpool::step"}
    assert steps[1] - steps[0] == pytest.approx(1e6, abs=1e-3)
    assert min(e["ts"] for e in events if e["ph"] != "M") == 0.0
    arrows = {(e["pid"], e["ph"]): e["id"] for e in events if e["ph"] in "sf"}
    assert arrows[0, "s"] == arrows[0, "f"] != arrows[1, "s"] == arrows[1, "f"]
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert {name for (pid, _), name in threads.items() if pid == 1} >= {"GPU 0: stream 7", f"CPU: {BACKWARD}"}
    assert len(threads) == 2 * len({(e["pid"], e["tid"]) for e in two_streams()["traceEvents"] if e["ph"] != "M"})
    assert {pid for pid, _ in threads} == {0, 1}


def test_numbers_are_read_back(tmp_path: Path):
    numbers = measure(read(two_streams()), 0)
    profile = Profile(about={"transport": "nvlink"}, on_device=True, ranks=[numbers, numbers])
    (tmp_path / "profile").mkdir()
    path = tmp_path / "profile" / "profile.json"
    with pytest.raises(ValueError, match=f"{tmp_path} has no profile .* record one with `carpool profile"):
        load_profile(path)
    save_profile(profile, path)
    assert load_profile(path) == profile
    assert profile.mean() == numbers.times
    assert profile.layers() == numbers.layers
    path.write_text(path.read_text()[:-20])
    with pytest.raises(ValueError, match="is damaged"):
        load_profile(path)


def moments(spans: list[Span]) -> set[int]:
    return {moment for start, end in spans for moment in range(start, end)}


def test_against_sets_of_moments():
    rng = random.Random(0)
    for _ in range(500):
        one, other = (
            [(start, start + rng.randint(0, 6)) for start in rng.choices(range(30), k=rng.randint(0, 7))]
            for _ in range(2)
        )
        first, second = union(one), union(other)
        assert moments(first) == moments(one)
        assert all(a[1] < b[0] for a, b in pairwise(first))
        assert moments(subtract(first, second)) == moments(one) - moments(other)
        assert length(first) == len(moments(one))


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
