"""From a trace to numbers, on a trace whose answer is known; and several ranks' traces in one."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from carpool.metrics.counters import range_name
from carpool.profile.numbers import LayerTimes, Profile, Times, load_profile, measure, save_profile
from carpool.profile.rank_trace import Label, _flat, kind_of, load, merge, parse, read
from tests.profile.traces import BACKWARD, START, annotated, kernel, two_streams


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
