"""`carpool generate --experts host`: the same text, with experts that come when they are chosen."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

from carpool.activations import host_memory as host
from carpool.cli import app
from carpool.experts.host_experts import host_experts
from carpool.hf import generation as decode_graph
from carpool.hf.seam.expert_rides import rides
from carpool.parallel.replicated import sharded_parameters
from carpool.serve import serve_memory, served_model
from carpool.serve.serve_memory import ExpertTier
from carpool.serve.served_model import find_source, open_model
from tests.serve.checkpoints import greedy, save

HOST = ExpertTier("host")


def _run(*arguments: object) -> Result:
    return CliRunner(env={"COLUMNS": "1000", "NO_COLOR": "1"}).invoke(app, ["generate", *map(str, arguments)])


@pytest.mark.parametrize("tier", [HOST, ExpertTier("disk", memory=20_000)], ids=["host", "disk"])
@pytest.mark.parametrize(
    "architecture",
    ["qwen3_moe", *(pytest.param(one, marks=pytest.mark.slow) for one in ("mixtral", "deepseek_v3", "gpt_oss"))],
)
def test_it_is_what_experts_on_the_device_make(tmp_path: Path, architecture: str, tier: ExpertTier) -> None:
    plain = save(tmp_path, architecture)
    model = open_model(find_source(tmp_path), max_tokens=64, experts=tier)
    away = host_experts(model)
    assert away is not None
    for prompt in ([5, 9, 11, 40], [7]):
        assert greedy(model, prompt, 10) == greedy(plain, prompt, 10)
    assert away.hits.foretold > 0 and away.bytes_out == 0
    if tier is not HOST:
        assert away.disk_bytes[0] > 0
        with sharded_parameters(model):
            held = sum(p.untyped_storage().nbytes() for own in rides(model).values() for p in own.experts.parameters())
        assert held == 0


def test_the_command_says_what_came(tmp_path: Path) -> None:
    save(tmp_path, "qwen3_moe")
    ours, theirs = (
        _run(tmp_path, "--prompt", "ab", "--max-new-tokens", 6, "--temperature", 0, "--experts", where, "--ranks", 1)
        for where in ("host", "device")
    )
    assert ours.exit_code == theirs.exit_code == 0, ours.output
    assert ours.stdout.splitlines()[0] == theirs.stdout.splitlines()[0]
    assert "GB came to the device" in ours.output and "GB came to the device" not in theirs.output


def test_what_cannot_be_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, "qwen3_moe")
    assert (
        "'hots' is not known; use device, host or disk; did you mean host?"
        in _run(tmp_path, "--prompt", "x", "--experts", "hots").output
    )
    found = find_source(tmp_path)
    monkeypatch.setattr(served_model, "world", lambda: 2)
    with pytest.raises(
        ValueError, match="--experts host: experts come when they are chosen on one rank alone; use --ranks 1"
    ):
        open_model(found, max_tokens=64, experts=HOST)
    monkeypatch.setattr(served_model, "world", lambda: 1)
    monkeypatch.setattr(served_model, "build_model", None)
    monkeypatch.setattr(host, "free_host_memory", lambda: 1000)
    with pytest.raises(ValueError, match=r"the experts \(--experts host\) of 1 ranks .* 0.0 GiB are free"):
        open_model(found, max_tokens=64, experts=HOST)


def test_what_cannot_be_read_from_disk_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / "whole", "qwen3_moe")
    found = find_source(tmp_path / "whole")
    with pytest.raises(ValueError, match=r"is a run, .*: name what `carpool export .* --out DIR` writes"):
        open_model(replace(found, checkpoint=tmp_path), max_tokens=64, experts=ExpertTier("disk"))
    with pytest.raises(ValueError, match="--experts-memory and --predictor are about experts that come to the GPU"):
        ExpertTier(memory=5)
    with pytest.raises(ValueError, match="--experts-host-memory is for experts on disk: add --experts disk"):
        ExpertTier("host", host_memory=5)
    monkeypatch.setattr(host, "free_host_memory", lambda: 1000)
    with pytest.raises(ValueError, match=r"experts that were read \(--experts disk\) .* Lower --experts-host-memory"):
        open_model(found, max_tokens=64, experts=ExpertTier("disk"))
    file = tmp_path / "whole" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"is not a whole safetensors file: .*; copy or download it again"):
        find_source(tmp_path / "whole")


def test_one_gpu_needs_two_layers_of_experts_and_no_graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, "qwen3_moe", num_hidden_layers=6)
    needed = serve_memory.needed_bytes(tmp_path, torch.float32, 1, 4, 4)
    experts, layers = serve_memory.expert_elements(tmp_path)
    assert layers == 6
    # Enough for all but three layers' experts.
    monkeypatch.setattr(serve_memory, "rank_memory", lambda *_: sum(needed.values()) - 4 * experts // 2)
    with pytest.raises(ValueError, match="or on one rank --experts host"):
        serve_memory.check_room(tmp_path, torch.float32, 1, 4, 4)
    serve_memory.check_room(tmp_path, torch.float32, 1, 4, 4, experts=HOST)
    save(tmp_path, "qwen3_moe")
    model = open_model(find_source(tmp_path), max_tokens=64, experts=HOST)
    monkeypatch.setattr(type(model), "device", torch.device("cuda"))
    assert decode_graph.why_not(model) == "experts come from host memory"


def test_host_memory_keeps_what_was_read(tmp_path: Path) -> None:
    save(tmp_path, "qwen3_moe", num_hidden_layers=6)
    read = []
    for size in (0, 2**30):
        model = open_model(find_source(tmp_path), max_tokens=64, experts=ExpertTier("disk", host_memory=size))
        away = host_experts(model)
        assert away is not None
        greedy(model, [5, 9, 11, 40], 12)
        read.append(away.disk_bytes[0])
    whole = sum(p.nbytes for own in rides(model).values() for p in own.experts.parameters())
    assert read[1] <= whole < read[0]
