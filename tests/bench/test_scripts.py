"""The scripts of benchmarks/: their options parse, and what runs on CPUs does with tiny settings."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from carpool.bench.timing import rounds

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = [path.stem for path in sorted((ROOT / "benchmarks").glob("*.py")) if "__main__" in path.read_text()]


def test_rounds_turn_about_and_forget_who_left() -> None:
    running = {"a": 1, "b": 2}
    seen = []
    for number, order in rounds(running, repetitions=2, warmup=1):
        seen.append((number, order))
        if number == 0:
            del running["a"]
    assert seen == [(-1, ["a", "b"]), (0, ["b", "a"]), (1, ["b"])]


@pytest.mark.parametrize("script", SCRIPTS)
def test_options_parse(script: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", [script, "--help"])
    module = importlib.import_module(f"benchmarks.{script}")
    with pytest.raises(SystemExit) as left:
        module.main()
    assert left.value.code == 0
    assert capsys.readouterr().out.startswith("usage: ")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "options"),
    [
        ("chunks", "--transport dedup --shapes 32,16,16,8,2 --repetitions 2"),
        ("overlap", "--model tiny --transport dedup --sequence 32 --layers 2 --steps 2 --chunks 2"),
        ("priority", "--model tiny --transport dedup --sequence 32 --layers 2 --steps 2"),
        ("bubbles", "--micro-batches 4 --steps 1 --sleep 2"),
        ("latency", "--transports dedup --tokens 8 --hidden 16 --experts 8 --top-k 2 --verbs 3 --delays 1"),
    ],
)
def test_a_tiny_run(script: str, options: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += ["-m", f"benchmarks.{script}", *options.split(), "--out", str(tmp_path / "out.json")]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["results"] and found["environment"]["torch"] and "out" not in found["settings"]


@pytest.mark.slow
def test_a_tiny_run_of_adapters(tmp_path: Path) -> None:
    """On one process. Both contenders begin with the same model."""
    keys = {
        "hidden_size": 32, "num_experts": 8, "moe_intermediate_size": 16, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 16, "vocab_size": 64,
    }  # fmt: skip
    command = [sys.executable, "-m", "benchmarks.adapters", "--layers", "1", "--tokens", "32", "--repetitions", "1"]
    command += ["--warmup", "0", "--keys", json.dumps(keys), "--out", str(tmp_path / "out.json")]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr[-3000:]
    carpool, peft = json.loads((tmp_path / "out.json").read_text())["results"]
    assert carpool["loss"] == pytest.approx(peft["loss"], rel=1e-4) and carpool["trained"] == peft["trained"]
