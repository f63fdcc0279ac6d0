"""Ranks that share sequences on GPUs: the losses of ranks with whole ones, captured steps, and longer sequences."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.gpu.ranks import needs
from tests.gpu.runs import train

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(560), needs(2)]


def lines(name: str, output: Path, kinds: tuple[str, ...] = ("train", "eval")) -> list[dict[str, Any]]:
    return [line for line in train(name, output) if line["kind"] in kinds]


@pytest.mark.parametrize("dense", ["fsdp", "zero1"])
@pytest.mark.parametrize(
    ("way", "bf16", "error"), [("ulysses", "false", 2e-4), ("ulysses", "true", 5e-3), ("ring", "true", 5e-3)]
)
def test_a_run_learns_what_ranks_with_whole_sequences_learn(
    tmp_path: Path, dense: str, way: str, bf16: str, error: float
) -> None:
    whole = lines(f"whole sequences {dense} {bf16}", tmp_path / "whole")
    parts = lines(f"shared {way} {dense} {bf16}", tmp_path / "parts")
    assert [line["tokens"] for line in parts] == [line["tokens"] for line in whole]
    assert [line["loss"] for line in parts] == pytest.approx([line["loss"] for line in whole], rel=error)


@pytest.mark.parametrize("way", ["ulysses", "ring"])
def test_a_captured_run_is_an_eager_one(tmp_path: Path, way: str) -> None:
    eager, captured = (lines(f"shared {way} graphs {graphs}", tmp_path / graphs) for graphs in ("off", "on"))
    assert [(line["loss"], line.get("grad_norm")) for line in captured] == [
        (line["loss"], line.get("grad_norm")) for line in eager
    ]


def test_longer_sequences_take_less_memory(tmp_path: Path) -> None:
    whole = lines("long whole", tmp_path / "whole", kinds=("train",))
    parts = lines("long shared", tmp_path / "parts", kinds=("train",))
    assert parts[0]["loss"] == pytest.approx(whole[0]["loss"], rel=5e-3)
    # As many tokens a rank, of twice as many sequences.
    assert parts[-1]["memory_peak_bytes"] < 1.3 * whole[-1]["memory_peak_bytes"]
    twice = lines("long shared, half", tmp_path / "twice", kinds=("train",))
    assert twice[-1]["memory_peak_bytes"] < 0.8 * whole[-1]["memory_peak_bytes"]
