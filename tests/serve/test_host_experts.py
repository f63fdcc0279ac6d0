"""`carpool generate --experts host`: the same text, with experts that come when they are chosen."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

from carpool.cli import app
from carpool.hf import decode_graph
from carpool.memory import host
from carpool.memory.host_experts import host_experts
from carpool.serve import room, source
from carpool.serve.source import find_source, open_model
from tests.serve.checkpoints import greedy, save


def _run(*arguments: object) -> Result:
    return CliRunner(env={"COLUMNS": "1000", "NO_COLOR": "1"}).invoke(app, ["generate", *map(str, arguments)])


@pytest.mark.parametrize("architecture", ["qwen3_moe", "deepseek_v3", pytest.param("gpt_oss", marks=pytest.mark.slow)])
def test_it_is_what_experts_on_the_device_make(tmp_path: Path, architecture: str) -> None:
    plain = save(tmp_path, architecture)
    model = open_model(find_source(tmp_path), max_tokens=64, host_experts=True)
    away = host_experts(model)
    assert away is not None and away.predictor is not None
    for prompt in ([5, 9, 11, 40], [7]):
        assert greedy(model, prompt, 10) == greedy(plain, prompt, 10)
    assert away.predictor.right > 0 and away.bytes_out == 0


def test_the_command_says_what_came(tmp_path: Path) -> None:
    save(tmp_path, "qwen3_moe")
    ours, theirs = (
        _run(tmp_path, "--prompt", "ab", "--max-new-tokens", 6, "--temperature", 0, "--experts", where, "--ranks", 1)
        for where in ("host", "device")
    )
    assert ours.exit_code == theirs.exit_code == 0, ours.output
    assert ours.stdout.splitlines()[0] == theirs.stdout.splitlines()[0]
    assert "GB came from host memory" in ours.output and "GB came from host memory" not in theirs.output


def test_what_cannot_be_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, "qwen3_moe")
    assert (
        "'hots' is not known; use device or host; did you mean host?"
        in _run(tmp_path, "--prompt", "x", "--experts", "hots").output
    )
    found = find_source(tmp_path)
    monkeypatch.setattr(source, "_ranks", lambda: 2)
    with pytest.raises(ValueError, match="experts come from host memory on one rank alone; use --ranks 1"):
        open_model(found, max_tokens=64, host_experts=True)
    monkeypatch.setattr(source, "_ranks", lambda: 1)
    monkeypatch.setattr(source, "build_model", None)
    monkeypatch.setattr(host, "free_host_memory", lambda: 1000)
    with pytest.raises(ValueError, match=r"the experts \(--experts host\) of 1 ranks .* 0.0 GiB are free"):
        open_model(found, max_tokens=64, host_experts=True)


def test_the_gpu_needs_two_layers_of_experts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, "qwen3_moe", num_hidden_layers=6)
    needed = room.needed_bytes(tmp_path, torch.float32, 1, 4, 4)
    experts, layers = room.expert_elements(tmp_path)
    assert layers == 6
    # Enough for all but three layers' experts.
    monkeypatch.setattr(room, "rank_memory", lambda *_: sum(needed.values()) - 4 * experts // 2)
    with pytest.raises(ValueError, match="or on one rank --experts host"):
        room.check_room(tmp_path, torch.float32, 1, 4, 4)
    room.check_room(tmp_path, torch.float32, 1, 4, 4, host_experts=True)


def test_decode_steps_are_no_graphs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, "qwen3_moe")
    model = open_model(find_source(tmp_path), max_tokens=64, host_experts=True)
    monkeypatch.setattr(type(model), "device", torch.device("cuda"))
    assert decode_graph.why_not(model) == "experts come from host memory"
