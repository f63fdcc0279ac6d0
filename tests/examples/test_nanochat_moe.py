"""`examples/nanochat_moe`: text is split and counted right, both variants learn, and equal losses are compared."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("tokenizers")

ROOT = Path(__file__).parents[2]
NAMES = ("prepare", "model", "train", "compare")
TINY = (
    *("--device", "cpu", "--compile", "none", "--depth", "2", "--sequence", "32", "--minutes", "0.5"),
    *("--batch-tokens", "256", "--device-batch", "4", "--evaluations", "2", "--evaluation-tokens", "1024"),
)


@pytest.fixture(scope="module")
def scripts() -> Iterator[Any]:
    """The example's files, imported as scripts import them."""
    sys.path.insert(0, str(ROOT / "examples/nanochat_moe"))
    try:
        yield SimpleNamespace(**{name: importlib.import_module(name) for name in NAMES})
    finally:
        sys.path.pop(0)
        for name in NAMES:
            sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def data(scripts: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("data")
    scripts.prepare.main([str(ROOT / "docs"), str(out), "--vocabulary", "512", "--validation-share", "0.05"])
    return out


def test_the_split_is_of_documents_and_all_bytes_are_counted(scripts: Any, data: Path) -> None:
    training, validation = scripts.prepare.split_documents(ROOT / "docs", 0.05)
    assert training and validation and not set(training) & set(validation)
    found = json.loads((data / "data.json").read_text())
    tokens = np.fromfile(data / "validation.bin", dtype=np.uint16)
    assert (tokens == found["bos"]).sum() == len(validation) and found["bytes_of_token"][found["bos"]] == 0
    assert found["validation"]["bytes"] == sum(len(path.read_bytes()) for path in validation)
    assert found["validation"]["tokens"] == len(tokens)


def test_both_variants_learn_from_the_same_batches(
    scripts: Any, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class EvenClock(scripts.train.Clock):  # type: ignore[misc]
        """Half a second for each step, on any machine."""

        def stop(self) -> float:
            self.total += 0.5
            return 0.5

    monkeypatch.setattr(scripts.train, "Clock", EvenClock)
    runs = {}
    for name, more in (("dense", ()), ("moe", ("--experts", "8", "--top-k", "3"))):
        given = scripts.train.arguments().parse_args([str(data), str(tmp_path / f"{name}.json"), *TINY, *more])
        run = runs[name] = scripts.train.train(given)
        assert run == json.loads((tmp_path / f"{name}.json").read_text())
        losses = [one["bits_per_byte"] for one in run["evaluations"]]
        assert losses[-1] < losses[0] - 0.2 and len(run["steps"]) == 60 and len(losses) == 3, losses
    # Equal but for the router: 8 rows in each of 2 layers.
    dense, moe = runs["dense"], runs["moe"]
    assert moe["active_parameters"] - dense["active_parameters"] == 2 * 8 * 128
    assert moe["parameters"] > 1.5 * dense["parameters"]
    assert moe["worst_load"] < 8 / 3, "no layer sends every token to one expert"
    scripts.compare.main([str(tmp_path / "dense.json"), str(tmp_path / "moe.json")])
    printed = capsys.readouterr().out
    assert "| dense |" in printed and "| MoE, 8 experts, 3 + 1 for each token |" in printed


def test_outputs_that_cannot_be_written_are_refused_first(
    scripts: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "file"
    file.write_text("{}")
    with pytest.raises(SystemExit):
        scripts.prepare.main([str(ROOT / "docs"), str(file)])
    with pytest.raises(SystemExit):
        scripts.compare.main([str(file), "--plot", str(tmp_path / "no" / "loss.png")])
    with pytest.raises(SystemExit):
        scripts.compare.main([str(file)])
    errors = capsys.readouterr().err
    assert f"{file} is not what train.py writes" in errors
    assert f"nothing can be written to {file} (File exists)" in errors and "there is no folder" in errors


def test_windows_are_visited_once_and_in_one_order(scripts: Any, tmp_path: Path) -> None:
    np.arange(32 * 50 + 9, dtype=np.uint16).tofile(tmp_path / "tokens.bin")
    tokens = scripts.train.Tokens(tmp_path / "tokens.bin", 32, torch.device("cpu"))
    batches, again = (tokens.shuffled(4, seed=3) for _ in range(2))
    first = [next(batches) for _ in range(12)]
    starts = [int(row[0]) for x, _ in first for row in x]
    assert len(set(starts)) == 48 and starts != sorted(starts) and {start % 32 for start in starts} == {0}
    assert all(torch.equal(x, next(again)[0]) for x, _ in first)
    assert all(torch.equal(x[:, 1:], target[:, :-1]) for x, target in first)


def test_the_rate_follows_the_clock(scripts: Any) -> None:
    rates = [scripts.train.share_of_peak(share) for share in (0.0, 0.05, 0.1, 0.49, 0.75, 1.0)]
    assert rates == pytest.approx([0.01, 0.51, 1.0, 1.0, 0.525, 0.05], abs=0.01)


def test_time_to_equal_loss_is_between_evaluations(scripts: Any) -> None:
    points = [(0.0, 4.0), (10.0, 2.0), (20.0, 1.0)]
    run = {"evaluations": [{"seconds": seconds, "bits_per_byte": loss} for seconds, loss in points]}
    assert scripts.compare.seconds_to(run, 1.25) == 17.5 and scripts.compare.seconds_to(run, 0.9) is None
