"""`carpool adapter`: how vLLM and SGLang would read an adapter, and layouts that they read. And for each family: what
was trained is what peft, a merge and servers get."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from carpool.cli import app
from carpool.train.checkpoints import served_adapter
from carpool.train.checkpoints.checkpoint_files import CheckpointWriteError
from carpool.train.checkpoints.served_adapter import VERSIONS, check_served
from tests.hf.tiny_models import discover, tiny_model
from tests.ranks import Ranks
from tests.train.adapter_families import BOUND, FAMILIES, MOVED, follow
from tests.train.test_merge import EXPERTS, make_run

ATTENTION = {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]}
KIND: dict[str, Any] = {**ATTENTION, "target_parameters": EXPERTS}
Tensors = dict[str, torch.Tensor]


def adapter(folder: Path, family: str, **kind: Any) -> Path:
    return make_run(folder, tiny_model(discover()[family]), {**KIND, **kind}) / "adapter"


@pytest.mark.parametrize("server", VERSIONS)
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "gpt_oss", "granitemoe"])
def test_what_is_written_for_a_server_is_read_as_trained(family: str, server: str, tmp_path: Path) -> None:
    """Also with rsLoRA, whose scaling SGLang does not know."""
    folder = adapter(tmp_path, family, use_rslora=True)
    command = ["adapter", str(folder.parent), "--server", server]
    plain = CliRunner().invoke(app, command)
    stacks = (family, server) == ("gpt_oss", "vllm")
    assert plain.exit_code == (0 if stacks else 1), plain.output
    assert stacks or "it reads no stacks of all experts" in plain.output or server == "sglang", plain.output
    written = CliRunner().invoke(app, [*command, "--out", str(tmp_path / "out")])
    assert written.exit_code == 0 and "reads 56 of 56" in written.output, written.output
    names = load_file(tmp_path / "out" / "adapter_model.safetensors").keys()
    last = {"mixtral": "w2", "gpt_oss": "down_proj"}.get(family, "down_proj")
    last = last if server == "vllm" else "down_proj"
    block = "block_sparse_moe" if family in ("mixtral", "granitemoe") else "mlp"
    each = f"base_model.model.model.layers.1.{block}.experts.7.{last}.lora_B.weight"
    assert (each in names) != stacks


def test_routers_are_in_the_block_that_the_server_knows(tmp_path: Path) -> None:
    """Transformers calls it mlp, and vLLM as it is published."""
    folder = adapter(tmp_path, "mixtral", target_parameters=[*EXPERTS, "mlp.gate.weight"])
    assert "model.layers.0: gate" in str(check_served(folder, tmp_path / "base", "vllm"))
    found = check_served(folder, tmp_path / "base", "vllm", out=tmp_path / "out")
    assert found.matrices == 58 and not found.wrong
    tensors = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert "base_model.model.model.layers.1.block_sparse_moe.gate.lora_A.weight" in tensors
    assert "gate and 1 others: refused" in str(check_served(folder, tmp_path / "base", "sglang", tmp_path / "out"))


def mix_columns(tensors: Tensors, config: dict[str, Any]) -> None:
    """As column e * Q + q, which has the same shape."""
    name = "base_model.model.model.layers.0.mlp.experts.lora_B.weight"
    tensors[name] = tensors[name].unflatten(1, (3, 8)).transpose(1, 2).flatten(1).contiguous()


def drop_one(tensors: Tensors, config: dict[str, Any]) -> None:
    del tensors["base_model.model.model.layers.0.mlp.experts.3.up_proj.lora_B.weight"]


def drop_both(tensors: Tensors, config: dict[str, Any]) -> None:
    drop_one(tensors, config)
    del tensors["base_model.model.model.layers.0.mlp.experts.3.up_proj.lora_A.weight"]


def swap_gate_and_up(tensors: Tensors, config: dict[str, Any]) -> None:
    gate, up = (f"base_model.model.model.layers.1.mlp.experts.2.{one}_proj.lora_B.weight" for one in ("gate", "up"))
    tensors[gate], tensors[up] = tensors[up], tensors[gate]


def rename_block(tensors: Tensors, config: dict[str, Any]) -> None:
    for name in [name for name in tensors if ".experts." in name]:
        tensors[name.replace(".mlp.", ".block_sparse_moe.")] = tensors.pop(name)


def forget_targets(tensors: Tensors, config: dict[str, Any]) -> None:
    config["target_modules"].remove("up_proj")


def scale_by_the_root(tensors: Tensors, config: dict[str, Any]) -> None:
    config["use_rslora"] = True


def pattern(tensors: Tensors, config: dict[str, Any]) -> None:
    config["alpha_pattern"] = {"q_proj": 3}


MISTAKES: list[tuple[str, str, Callable[[Tensors, dict[str, Any]], None], str, int]] = [
    ("gpt_oss", "vllm", mix_columns, "layers.0, expert 0, down and 7 others: read as something else", 48),
    ("qwen3_moe", "vllm", drop_both, "refused: it packs all experts of a layer, and expert 3 lacks up", 32),
    ("qwen3_moe", "sglang", drop_one, "layers.0, expert 3, up: refused: one of its two matrices is not", 55),
    ("qwen3_moe", "sglang", drop_both, "layers.0, expert 3, up: left out without a word", 55),
    ("qwen3_moe", "vllm", swap_gate_and_up, "layers.1, expert 2, gate and 1 others: read as something else", 54),
    ("qwen3_moe", "vllm", rename_block, "left out without a word: experts are looked for in mlp.experts", 8),
    ("qwen3_moe", "sglang", forget_targets, "refused: target_modules lacks up_proj", 8),
    ("qwen3_moe", "vllm", scale_by_the_root, "and 55 others: read as something else", 0),
    ("qwen3_moe", "sglang", pattern, "alpha_pattern are not read", 0),
]


@pytest.mark.parametrize(("family", "server", "mistake", "says", "read"), MISTAKES)
def test_mistakes_are_noticed(family: str, server: str, mistake: Any, says: str, read: int, tmp_path: Path) -> None:
    folder, out = adapter(tmp_path, family), tmp_path / "out"
    check_served(folder, tmp_path / "base", server, out=out)
    tensors = load_file(out / "adapter_model.safetensors")
    config = json.loads((out / "adapter_config.json").read_text())
    mistake(tensors, config)
    save_file(tensors, out / "adapter_model.safetensors")
    (out / "adapter_config.json").write_text(json.dumps(config))
    found = check_served(folder, tmp_path / "base", server, written=out)
    assert says in str(found) and f"reads {read} of 56" in str(found), found
    command = ["adapter", str(folder), "--server", server, "--written", str(out)]
    assert CliRunner().invoke(app, command).exit_code == 1


@pytest.mark.parametrize(
    ("server", "kind", "says"),
    [
        ("vllm", {"use_dora": True, "target_parameters": None}, "it has no DoRA"),
        ("vllm", {"modules_to_save": ["lm_head"]}, "modules_to_save are for classification alone"),
        ("sglang", {"modules_to_save": ["lm_head"]}, "lm_head.weight: left out without a word"),
        ("sglang", {"target_modules": ["q_proj", "k_proj"]}, "q_proj and 1 others: refused: it fuses this with v_proj"),
        ("vllm", {"target_parameters": ["experts.gate_up_proj"]}, "reads no stacks"),
    ],
)
def test_what_servers_do_not_have(server: str, kind: dict[str, Any], says: str, tmp_path: Path) -> None:
    folder = adapter(tmp_path, "qwen3_moe", **kind)
    assert says in str(check_served(folder, tmp_path / "base", server))


def test_what_is_written_wrongly_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = adapter(tmp_path, "olmoe")
    real = served_adapter.save_file
    lossy = lambda tensors, *args, **more: real(dict(list(tensors.items())[2:]), *args, **more)  # noqa: E731
    monkeypatch.setattr(served_adapter, "save_file", lossy)
    with pytest.raises(CheckpointWriteError, match="out was not written: vllm"):
        check_served(folder, tmp_path / "base", "vllm", out=tmp_path / "out")
    with pytest.raises(ValueError, match="no layout is known"):
        check_served(adapter(tmp_path / "b", "flex_olmo"), tmp_path / "b" / "base", "vllm", out=tmp_path / "out")
    assert not (tmp_path / "out").exists()
    gone = CliRunner().invoke(app, ["adapter", str(tmp_path), "--server", "vllm"])
    assert gone.exit_code == 1 and "neither an adapter as peft writes it nor a run" in gone.output


@pytest.mark.parametrize(
    "family",
    [pytest.param(one, marks=() if one in ("gpt_oss", "deepseek_v3") else pytest.mark.slow) for one in FAMILIES],
)
def test_adapters_are_what_was_trained(ranks: Ranks, family: str, tmp_path: Path) -> None:
    outcome = follow(ranks, family, tmp_path)
    assert outcome.moved > MOVED, outcome
    assert max(outcome.peft, outcome.merged) < BOUND, outcome
