"""Steps that are captured as CUDA graphs, on one rank and on two: bit by bit those of eager runs, with all that runs
may have."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import nn

from carpool.activations.whole_layers import ActivationOffload
from carpool.hf.decoder_layers import _ATTRIBUTE
from carpool.hf.step_graphs import StepGraphs
from carpool.kernels.capture import Recorder
from carpool.kernels.signals import nanoseconds
from carpool.kernels.stamps import Stamp, stamp_buffer
from carpool.metrics.counters import Meter
from tests.gpu.ranks import needs
from tests.gpu.runs import ALONE, FOUR, RUNS, TOGETHER, train
from tests.no_waits import no_waits

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(560), needs(2)]
COUNTED = ("loss", "grad_norm", "bytes_remote", "copies_per_token", "load_max_over_mean", "router_entropy")


@triton.jit
def _spin(nanoseconds_1):  # type: ignore[no-untyped-def]
    begin = nanoseconds()
    while nanoseconds() - begin < tl.load(nanoseconds_1):
        pass


def compare(tmp_path: Path, name: str) -> None:
    """name: of a run of RUNS that is there eager and captured."""
    eager = train(f"{name} eager", tmp_path / "eager")
    captured = train(f"{name} captured", tmp_path / "captured")
    decided = json.loads((tmp_path / "captured" / "run.json").read_text())["decisions"]["cuda_graphs"]
    assert decided["used"], decided
    kinds = ("train", "eval", "repeat")
    assert [line["kind"] for line in captured if line["kind"] in kinds] == [
        line["kind"] for line in eager if line["kind"] in kinds
    ]
    moved = [line["step"] for line in captured if line["kind"] == "placement" and line["event"] == "moved"]
    assert bool(moved) == ("move" in name) and moved == [
        line["step"] for line in eager if line["kind"] == "placement" and line["event"] == "moved"
    ]
    for one, other in zip(eager, captured, strict=True):
        if one["kind"] in ("train", "eval"):
            assert {key: one.get(key) for key in COUNTED} == {key: other.get(key) for key in COUNTED}, one["step"]
        if one["kind"] == "train":
            # Times of rides come from events in the graph.
            spans = ("dispatch", "experts", "combine") if RUNS[f"{name} eager"].ranks > 1 else ("experts",)
            assert all(other["ms"][span]["total"] > 0 for span in spans)


@pytest.mark.parametrize("name", ALONE)
def test_alone(tmp_path: Path, name: str) -> None:
    compare(tmp_path, f"1 {name}")


@pytest.mark.parametrize("name", TOGETHER)
def test_a_captured_run_is_an_eager_one(tmp_path: Path, name: str) -> None:
    compare(tmp_path, f"2 {name}")


@needs(4)
@pytest.mark.parametrize("name", FOUR)
def test_experts_that_several_groups_hold(tmp_path: Path, name: str) -> None:
    compare(tmp_path, f"4 {name}")


@pytest.mark.parametrize("fails", [False, True])
def test_gradients_of_offloaded_layers(fails: bool) -> None:
    """Replayed, or computed eagerly because the backward cannot be captured: those of layers that keep all."""
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(5)).bfloat16().cuda()
    offload, told = ActivationOffload(), list[str | None]()
    object.__setattr__(layers, _ATTRIBUTE, offload)

    def compute(batches: Any, factor: Any, _: int, sums: torch.Tensor, *__: Any, away: bool = True) -> None:
        x = batches[0]["x"]
        for layer in layers:
            with offload.layer(x.device) if away else nullcontext():
                x = torch.nn.functional.silu(layer(x))
        loss = x.square().mean() * factor
        sums[0] += loss.detach()
        loss.backward()

    def refuse(gradient: torch.Tensor) -> None:
        if fails and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("this layer cannot be captured")

    layers[2].weight.register_hook(refuse)
    graphs = StepGraphs(layers, [], compute, told.append)
    for number in range(6):
        batch = {"x": torch.randn(512, 256, generator=torch.Generator().manual_seed(number)).bfloat16().cuda()}
        sums = torch.zeros(2, dtype=torch.float64, device="cuda")
        found: list[list[torch.Tensor]] = []
        for away in (True, False):
            layers.zero_grad()
            if not away or graphs.run([batch], 0.5) is None:
                compute([batch], 0.5, 1, sums, away=away)
            found.append([p.grad.clone() for p in layers.parameters() if p.grad is not None])
        assert len(found[0]) == 10 and all(torch.equal(one, other) for one, other in zip(*found, strict=True)), number
    assert offload.offloader._pool is not None and offload.offloader._pool.bytes > 0
    assert told == (["RuntimeError: this layer cannot be captured"] if fails else [None])


def test_stamps_are_of_the_latest_replay() -> None:
    """A graph spins for as long as a tensor says; stamps around it measure each replay anew, as events do."""
    device = torch.device("cuda", torch.cuda.current_device())
    free = len(stamp_buffer(device).free)
    time_1 = torch.full((1,), 1000, device=device)
    _spin[(1,)](time_1)
    stamps = list[Stamp]()

    def work() -> None:
        stamps.append(Stamp(device))
        _spin[(1,)](time_1)
        stamps.append(Stamp(device))

    again = Recorder().record(work)
    for milliseconds in (5, 20, 1):
        time_1.fill_(milliseconds * 1_000_000)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        again()
        end.record()
        stamps[1].synchronize()
        assert milliseconds <= stamps[0].elapsed_time(stamps[1]) <= begin.elapsed_time(end) + 0.01
    # What comes after a graph is not waited for.
    again()
    time_1.fill_(200_000_000)
    _spin[(1,)](time_1)
    end.record()
    with no_waits():
        assert stamps[0].elapsed_time(stamps[1]) < 2
    assert not end.query()
    assert len(stamp_buffer(device).free) == free - 2
    del stamps[:]
    assert len(stamp_buffer(device).free) == free


def test_spans_in_a_graph_that_no_recorder_has_captured() -> None:
    """Nobody counts the launches of such a graph, so its spans are timed by events, which each replay records again."""
    device = torch.device("cuda", torch.cuda.current_device())
    time_1 = torch.full((1,), 1000, device=device)
    _spin[(1,)](time_1)
    meter, graph = Meter(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        spans = meter.ride(device, "forward")
        spans.begin("experts")
        _spin[(1,)](time_1)
        spans.end()
    for milliseconds in (5, 20, 1):
        time_1.fill_(milliseconds * 1_000_000)
        graph.replay()
        (measured,) = meter.milliseconds(reset=False)["experts"]
        assert milliseconds <= measured < milliseconds + 1
