"""Multi-token prediction layers on two GPUs: captured steps against eager ones, compiled ones, and stages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.ranks import needs
from tests.gpu.runs import FURTHER, train

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(560), needs(2)]
COUNTED = ("loss", "mtp_losses", "aux_loss", "grad_norm", "bytes_remote", "load_max_over_mean")


def steps_of(name: str, depth: int, output: Path) -> list[dict[str, Any]]:
    """What is compared, of steps and evaluations in order."""
    found = train(f"further: {name}", output)
    decided = json.loads((output / "run.json").read_text())["decisions"]
    assert bool(decided["cuda_graphs"]["used"]) == name.endswith(("captured", "compiled")), decided["cuda_graphs"]
    assert decided["torch_compile"]["on"] == name.endswith("compiled"), decided["torch_compile"]
    first, *_, last = steps = [line["mtp_losses"] for line in found if line["kind"] == "train"]
    assert len(steps) == 6 and len(first) == depth and all(one < other for one, other in zip(last, first, strict=True))
    return [{key: line.get(key) for key in COUNTED} for line in found if line["kind"] in ("train", "eval")]


def numbers(lines: list[dict[str, Any]]) -> list[float]:
    """The losses of all lines."""
    return [number for line in lines for number in (line["loss"], *(line["mtp_losses"] or ()))]


@pytest.mark.parametrize("name", FURTHER)
def test_captured_steps_are_eager_ones_and_compiled_ones_near_them(tmp_path: Path, name: str) -> None:
    depth, settings = FURTHER[name]
    eager = steps_of(f"{name} eager", depth, tmp_path / "eager")
    assert steps_of(f"{name} captured", depth, tmp_path / "captured") == eager
    # bf16: what is fused is rounded less often.
    assert numbers(steps_of(f"{name} compiled", depth, tmp_path / "compiled")) == pytest.approx(
        numbers(eager), rel=5e-3
    )
    if any("pp_size" in setting for setting in settings):
        whole = steps_of(f"{depth} in one stage", depth, tmp_path / "whole")
        assert numbers(eager) == pytest.approx(numbers(whole), rel=5e-3)
