"""Two stages on two GPUs: the losses of one stage on one GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.gpu.ranks import needs
from tests.gpu.runs import COMPILED_STAGES, losses

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(560), needs(2)]


@pytest.mark.parametrize("bf16", ["false", "true"])
def test_stages_learn_what_the_whole_model_learns(tmp_path: Path, bf16: str) -> None:
    whole = losses(f"one stage {bf16}", tmp_path / "whole")
    for schedule in ("1F1B", "DualPipeV"):
        cut = losses(f"stages {schedule} {bf16}", tmp_path / schedule)
        assert cut == pytest.approx(whole, rel=5e-3 if bf16 == "true" else 1e-4)


@needs(4)
@pytest.mark.parametrize("schedule", ["1F1B", "ZBVZeroBubble"])
def test_rides_inside_of_stages(tmp_path: Path, schedule: str) -> None:
    """Over nvlink: their buffers are one stage's, and what they keep is freed in another order than it was made."""
    ways = {name: losses(f"stages {schedule} {name}", tmp_path / name) for name in ("alltoall", "nvlink")}
    assert ways["nvlink"] == pytest.approx(ways["alltoall"], rel=5e-3)


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=needs(4))])
@pytest.mark.parametrize("schedule", ["1F1B", "ZBVZeroBubble"])
def test_captured_stages_are_eager_ones(tmp_path: Path, schedule: str, ranks: int) -> None:
    """From the third step on each forward and backward of a stage is a graph; rides over nvlink are in it."""
    ways = [losses(f"stages {schedule} {ranks} {way}", tmp_path / way) for way in ("off", "auto")]
    assert ways[0] == ways[1]
    assert json.loads((tmp_path / "auto" / "run.json").read_text())["decisions"]["cuda_graphs"]["used"]


@needs(4)
@pytest.mark.parametrize("schedule", ["DualPipeV", "Interleaved1F1B"])
@pytest.mark.parametrize("transport", ["nvlink", "alltoall"])
def test_pairs_at_the_same_time(tmp_path: Path, transport: str, schedule: str) -> None:
    """The rides of one micro-batch beside the computation of another: the same bits."""
    ways = [losses(f"pairs {schedule} {transport} {way}", tmp_path / way) for way in ("none", "two-batch")]
    assert ways[0] == ways[1]


@needs(4)
@pytest.mark.parametrize("name", COMPILED_STAGES)
def test_compiled_and_captured_stages(tmp_path: Path, name: str) -> None:
    """Captured steps have the bits of steps that are not, compiled or not; and compiled ones learn what eager ones do.
    A pair of a forward and a backward is one graph, recorded by two threads."""
    found = {}
    for compiled in ("false", "true"):
        for graphs in ("off", "auto"):
            folder = tmp_path / f"{compiled}-{graphs}"
            found[compiled, graphs] = losses(f"{name} compiled {compiled} graphs {graphs}", folder)
            decided = json.loads((folder / "run.json").read_text())["decisions"]
            assert decided["torch_compile"]["on"] == (compiled == "true"), decided["torch_compile"]
            assert bool(decided["cuda_graphs"]["used"]) == (graphs == "auto"), decided["cuda_graphs"]
        assert found[compiled, "off"] == found[compiled, "auto"]
    assert found["true", "off"] == pytest.approx(found["false", "off"], rel=5e-3)
