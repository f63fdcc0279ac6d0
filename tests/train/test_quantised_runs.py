"""Runs of one rank whose frozen matrices are in few bits: experts as gpt-oss is published, all else in nf4."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from carpool.cli import app
from carpool.experts.quantised import dequantise, quantise
from carpool.hf.seam.experts_module import base_of
from carpool.serve.served_model import find_source, open_model
from carpool.train.checkpoints.resume import check_base
from carpool.train.config import load_config
from carpool.train.config.schema import AdapterSection, Config
from carpool.train.run.run import train
from tests.hf.tiny_models import discover, tiny_model
from tests.train.test_memory_estimate import peak

SIZES = {
    "gpt_oss": {"hidden_size": 64, "intermediate_size": 96},
    "qwen3_moe": {"hidden_size": 64, "moe_intermediate_size": 64, "tie_word_embeddings": True},
}
SMALL = [
    "adapter.dtype=bfloat16", "training.optimizer_state_dtype=int8", "training.optimizer_in_backward=true",
    "training.grad_clipping=delayed", "memory.layer_activations=recompute", "memory.moe_outputs=recompute",
]  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    dist.init_process_group(
        "gloo", store=dist.FileStore(str(tmp_path_factory.mktemp("store") / "file"), 1), rank=0, world_size=1
    )
    yield
    dist.destroy_process_group()


def checkpoint(folder: Path, family: str, packed: bool = False) -> Path:
    """Of a tiny model in bfloat16, whose experts have values of MXFP4; packed: as gpt-oss has them in its files."""
    model = tiny_model(discover()[family], vocab_size=320, head_dim=32, **SIZES[family]).bfloat16()
    model.save_pretrained(folder)
    file, found = folder / "model.safetensors", dict[str, torch.Tensor]()
    for name, value in load_file(file).items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            one = quantise(value.transpose(1, 2), "mxfp4")
            if packed:
                found[f"{name}_blocks"], found[f"{name}_scales"] = one.code.unflatten(-1, (-1, 16)), one.scale
            else:
                found[name] = dequantise(*one, value.dtype).transpose(1, 2).contiguous()
        else:
            found[name] = value
    save_file(found, file, metadata={"format": "pt"})
    if packed:
        config = json.loads((folder / "config.json").read_text()) | {"quantization_config": {"quant_method": "mxfp4"}}
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def run(base: Path, output: Path, text: list[str], *overrides: str) -> dict[str, Any]:
    """What the run's folder says of it."""
    settings = [
        f"model.path={base}", f"training.output_dir={output}", "data.tokenizer=bytes", "data.sequence_length=24",
        "data.max_bytes=4000", "training.per_device_train_batch_size=2", "training.gradient_accumulation_steps=1",
        "training.max_steps=4", "training.learning_rate=1e-2", "training.save_steps=2", "training.sample_prompt=none",
        "adapter.kind=lora", "adapter.rank=4",
    ]  # fmt: skip
    train(load_config(None, [*settings, *text, *overrides]), compare=None, command="test")
    found: dict[str, Any] = json.loads((output / "run.json").read_text())
    return found


def adapter(output: Path) -> dict[str, torch.Tensor]:
    return load_file(output / "adapter" / "adapter_model.safetensors")


def same(a: Path, b: Path) -> bool:
    found, other = adapter(a), adapter(b)
    return found.keys() == other.keys() and all(torch.equal(found[name], other[name]) for name in other)


def test_experts_in_mxfp4_are_those_of_the_files(text: list[str], tmp_path: Path) -> None:
    """Bit by bit the run on the model dequantised: nothing is lost, and the log says nothing of a loss."""
    packed, plain = checkpoint(tmp_path / "packed", "gpt_oss", True), checkpoint(tmp_path / "plain", "gpt_oss")
    info = run(packed, tmp_path / "a", text)
    run(plain, tmp_path / "b", text)
    assert same(tmp_path / "a", tmp_path / "b") and info["lossy_reasons"] == []
    for out, more in (("again", ["--dtype", "mxfp4"]), ("exact", []), ("beside", ["--base", str(plain)])):
        command = ["merge", str(tmp_path / "a"), "--out", str(tmp_path / out), *more]
        merged = CliRunner().invoke(app, command)
        assert merged.exit_code == 0, merged.output
        assert ("LOSSY: from what was trained" in merged.output) == (out == "again")
        assert ("quantization_config" in json.loads((tmp_path / out / "config.json").read_text())) == (out == "again")
    exact, expected = (load_file(tmp_path / out / "model.safetensors") for out in ("exact", "beside"))
    assert exact.keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in exact.items())
    with pytest.raises(ValueError, match=r"adapter\.kind=lora and parallelism\.num_ranks=1"):
        run(packed, tmp_path / "c", text, "adapter.kind=none")


@pytest.mark.parametrize(("family", "kind"), [("gpt_oss", "nf4"), ("qwen3_moe", "nf4"), ("qwen3_moe", "mxfp4")])
def test_all_in_few_bits_resumes_and_merges(text: list[str], tmp_path: Path, family: str, kind: str) -> None:
    base = checkpoint(tmp_path / "base", family, family == "gpt_oss")
    settings = [f"adapter.base_dtype={kind}", *SMALL]
    info = run(base, tmp_path / "whole", text, *settings)
    assert f"the frozen weights are stored in {kind}" in info["lossy_reasons"]
    run(base, tmp_path / "rest", text, *settings, f"training.resume_from_checkpoint={tmp_path}/whole/checkpoints/"
        "step-00000002")  # fmt: skip
    assert same(tmp_path / "rest", tmp_path / "whole")
    found = adapter(tmp_path / "whole")
    assert {value.dtype for value in found.values()} == {torch.bfloat16}
    assert any("experts.lora_B" in name and value.abs().max() > 1e-3 for name, value in found.items())
    result = CliRunner().invoke(app, ["merge", str(tmp_path / "whole"), "--out", str(tmp_path / "merged")])
    assert result.exit_code == 0 and f"differ from base in {kind} plus adapter" in result.output, result.output
    assert "logits of 64 random tokens" in result.output


def served(run: Path) -> set[str]:
    """What is quantised in the model that a run has trained."""
    model = open_model(find_source(run), max_tokens=8)
    return {name for module in model.modules() for name in base_of(module)}


def test_a_run_is_served_beside_the_base_that_it_has_trained_beside(
    text: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of several ranks had its experts alone in 4 bits."""
    base, folder = checkpoint(tmp_path / "base", "qwen3_moe"), tmp_path / "run"
    info = run(base, folder, text, "adapter.base_dtype=nf4", "training.max_steps=1")
    assert served(folder) == {"weight", "gate_up_proj", "down_proj"}
    with monkeypatch.context() as patch, pytest.raises(ValueError, match=r"trained on one rank, .*: use --ranks 1"):
        patch.setattr("carpool.serve.served_model.world", lambda: 2)
        served(folder)
    info["parallelism"]["world_size"] = 2
    (folder / "run.json").write_text(json.dumps(info))
    assert served(folder) == {"gate_up_proj", "down_proj"}


# On a CPU the one-pass optimizer takes more than its state, so adapters of experts are for PyTorch's.
@pytest.mark.parametrize(("then", "now"), [(1, 2), (2, 1), (1, 1), (2, 4)])
def test_a_run_goes_on_beside_its_own_base(tmp_path: Path, then: int, now: int) -> None:
    checkpoint = tmp_path / "checkpoints" / "step-00000004"
    (tmp_path / "run.json").write_text(json.dumps({"parallelism": {"world_size": then}}))
    for settings, differs in (
        ({"base_dtype": "nf4"}, True),
        ({}, False),
        ({"base_dtype": "nf4", "kind": "dora"}, False),
    ):
        config = Config(adapter=AdapterSection(**{"kind": "lora", "targets": ("attention",)} | settings))
        if differs and (then == 1) != (now == 1):
            with pytest.raises(ValueError, match=f"trained on {then} ranks, beside a base with .* in nf4"):
                check_base(checkpoint, config, now)
        else:
            check_base(checkpoint, config, now)


@pytest.mark.parametrize(("targets", "more"), [("['attention']", SMALL), ("['attention','experts']", SMALL[-2:])])
def test_a_step_takes_what_is_predicted(
    text: list[str], tmp_path: Path, targets: str, more: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All in 4 bits, layers computed again."""
    monkeypatch.setattr("carpool.experts.quantised.PIECE", 2**15)  # a GPU needs nothing beside what it makes
    sizes = {
        "hidden_size": 256, "moe_intermediate_size": 256, "head_dim": 64, "num_hidden_layers": 4, "num_experts": 16,
        "max_position_embeddings": 512,
    }  # fmt: skip
    model = tiny_model(discover()["qwen3_moe"], vocab_size=1088, **sizes).bfloat16()
    model.save_pretrained(tmp_path / "base")
    del model
    settings = [
        f"model.path={tmp_path}/base", "data.tokenizer=bytes", "data.sequence_length=256",
        "training.per_device_train_batch_size=2", "training.gradient_accumulation_steps=1",
        "training.max_steps=9", "training.save_steps=none", "training.eval_on_start=false", "adapter.kind=lora",
        "adapter.base_dtype=nf4", f"adapter.targets={targets}", "training.loss_chunk_size=128",
    ]  # fmt: skip
    measured, predicted = peak(str(tmp_path / "run"), [*settings, *text, *more], alone=True)
    assert predicted == pytest.approx(measured, rel=0.1)
