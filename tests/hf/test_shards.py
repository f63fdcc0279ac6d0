"""Weight files that cut a layer, an expert, and gate from up: whatever reads them finds all of a tensor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import carpool.hf
from carpool.hf import rides
from carpool.hf.build_model import build_model
from carpool.hf.quantised_base import quantised_while_loading
from carpool.hf.seam.experts_module import base_of
from carpool.hf.seam.find_modules import experts_modules
from carpool.hf.weights.original_layout import OriginalLayout, OriginalWeights
from carpool.hf.weights.stored_experts import StoredExperts, read_without_experts
from carpool.hf.weights.weight_files import stored_weights
from carpool.train.blueprint import meta_model
from carpool.train.checkpoints.checkpoint_files import CheckpointWriteError
from carpool.train.checkpoints.export import export_checkpoint, find_checkpoint
from carpool.train.checkpoints.run_source import keep_source
from tests.hf.test_quantised_base import SIZES
from tests.hf.tiny_models import discover, tiny_model
from tests.shards import CUTS, reshard
from tests.train.test_export import _logits, trained_run

# One file of each expert's matrix, in two ways of naming; stacked experts as they are, and transposed with biases;
# experts of which some layers have none, and shared ones; names that change besides.
FAMILIES = ["olmoe", "mixtral", "gpt_oss", "granitemoe", "deepseek_v3", "jamba", "phimoe", "minimax_m2"]


def save(folder: Path, family: str, cut: str, **sizes: int) -> dict[str, torch.Tensor]:
    """Saves a model in files that are cut so. Returns what Transformers loads from one file."""
    tiny_model(discover()[family], **sizes).save_pretrained(folder)
    whole: Any = AutoModelForCausalLM.from_pretrained(folder)
    assert reshard(folder, cut) > 1
    return dict(whole.state_dict())


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_tensors_and_experts_of_cut_files(family: str, cut: str, tmp_path: Path) -> None:
    whole = save(tmp_path, family, cut)
    loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path)
    stored = stored_weights(tmp_path)
    weights = OriginalWeights(
        meta_model(tmp_path), tmp_path, stored, OriginalLayout(meta_model(tmp_path), None, stored)
    )
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, whole[name]) and torch.equal(weights.read(name), whole[name]), name

    model = meta_model(tmp_path)
    modules = list(experts_modules(model))
    experts = StoredExperts(tmp_path, model, modules)
    for layer, module in enumerate(modules):
        names = [f"{module}.{name}" for name, _ in model.get_submodule(module).named_parameters()]
        for expert in (0, 3, 7):
            memory = [torch.empty_like(whole[name][expert]) for name in names]
            experts.read(layer, expert, memory)
            assert all(torch.equal(one, whole[name][expert]) for one, name in zip(memory, names, strict=True))
    read_without_experts(tmp_path, model, modules, torch.float32, torch.device("cpu"))
    for name, tensor in model.state_dict().items():
        inside = any(name.startswith(f"{module}.") for module in modules)
        assert tensor.is_meta if inside else torch.equal(tensor, whole[name]), name


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("family", SIZES)
def test_quantised_experts_of_cut_files(family: str, cut: str, tmp_path: Path) -> None:
    tiny_model(discover()[family], **SIZES[family]).save_pretrained(tmp_path)
    codes = []
    for again in (False, True):
        if again:
            assert reshard(tmp_path, cut) > 1
        with quantised_while_loading("int8"):
            model: Any = AutoModelForCausalLM.from_pretrained(tmp_path)
        carpool.hf.install(model)
        codes.append([value for layer in rides(model).values() for value in base_of(layer.experts).values()])
    assert len(codes[0]) == 4
    for one, other in zip(*codes, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("family", ["olmoe", "mixtral", "gpt_oss", "minimax_m2"])
def test_an_export_into_cut_files(family: str, cut: str, tmp_path: Path) -> None:
    source, run, model = trained_run(tmp_path, family)
    assert reshard(source, cut) > 1
    keep_source(run, source, str(source))
    exported = export_checkpoint(run, find_checkpoint(run, None), tmp_path / "out")
    assert exported.checked == "read back: it is what was to be written, bit by bit"
    assert torch.equal(_logits(AutoModelForCausalLM.from_pretrained(exported.folder)), _logits(model))
    assert stored_weights(exported.folder) == stored_weights(source)


def test_an_export_that_writes_something_else_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, run, _ = trained_run(tmp_path, "olmoe")
    values = OriginalLayout._values

    def longer(self: Any, entries: Any, read: Any) -> Any:
        for name, value in values(self, entries, read):
            yield name, value * 1.01 if name.endswith("layers.1.mlp.experts.6.up_proj.weight") else value

    monkeypatch.setattr(OriginalLayout, "_values", longer)
    with pytest.raises(
        CheckpointWriteError, match=r"layers\.1\.mlp\.experts\.gate_up_proj is wrong in 1,024 of 16,384"
    ):
        export_checkpoint(run, find_checkpoint(run, None), tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["published", "run"]


@pytest.mark.parametrize("kept", ["index", "single"])
def test_files_of_an_earlier_save_are_not_read(kept: str, tmp_path: Path) -> None:
    """Where Transformers reads others: what the index names, or model.safetensors, which comes before an index."""
    model = tiny_model(discover()["qwen3_moe"])
    model.save_pretrained(tmp_path)
    reshard(tmp_path, "turns")
    tensors = {name: value for path in tmp_path.glob("*.safetensors") for name, value in load_file(path).items()}
    others = {name: torch.zeros_like(value) for name, value in tensors.items()}
    if kept == "index":
        save_file(others, tmp_path / "model-00009-of-00009.safetensors", metadata={"format": "pt"})
    else:
        save_file(others, tmp_path / "model.safetensors", metadata={"format": "pt"})
    whole: Any = AutoModelForCausalLM.from_pretrained(tmp_path)
    stored = stored_weights(tmp_path)
    layout = OriginalLayout(meta_model(tmp_path), None, stored)
    weights = OriginalWeights(meta_model(tmp_path), tmp_path, stored, layout)
    for name, tensor in whole.state_dict().items():
        assert torch.equal(weights.read(name), tensor), name
        assert tensor.any() == (kept == "index"), name
    built: Any = build_model(tmp_path, distributed_config=None, dtype=torch.float32, seed=0)
    assert torch.equal(built.lm_head.weight, whole.lm_head.weight)


def test_one_numbered_file_has_an_index(tmp_path: Path) -> None:
    """Transformers finds a file of another name than model.safetensors by an index alone."""
    source, run, model = trained_run(tmp_path, "gpt_oss")
    tensors = {name: value for path in source.glob("*.safetensors") for name, value in load_file(path).items()}
    for path in [*source.glob("*.safetensors"), *source.glob("*.index.json")]:
        path.unlink()
    save_file(tensors, source / "model-00001-of-00001.safetensors", metadata={"format": "pt"})
    keep_source(run, source, str(source))
    out = export_checkpoint(run, find_checkpoint(run, None), tmp_path / "out").folder
    assert torch.equal(_logits(AutoModelForCausalLM.from_pretrained(out)), _logits(model))
