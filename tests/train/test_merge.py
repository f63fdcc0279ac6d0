"""`carpool merge` layer by layer: the bits of peft's own merge of a whole model, and memory for a layer."""

from __future__ import annotations

import copy
import gc
import json
from functools import partial
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.peaks import growth
from carpool.hf.weights.original_layout import OriginalLayout
from carpool.train.checkpoints import adapter_files as merging
from carpool.train.checkpoints import adapter_files as unmerged
from carpool.train.checkpoints.adapter_files import merge_adapter
from carpool.train.checkpoints.checkpoint_files import CheckpointWriteError
from carpool.train.checkpoints.export import export_checkpoint, find_checkpoint
from carpool.train.checkpoints.manager import CheckpointManager
from carpool.train.checkpoints.run_source import keep_source
from tests.hf.tiny_models import discover, tiny_model
from tests.shards import CUTS, reshard

EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]
KINDS = {
    "olmoe": {"target_modules": ["q_proj", "o_proj"], "target_parameters": EXPERTS},
    "qwen3_moe": {"target_modules": ["v_proj"], "target_parameters": [*EXPERTS, "mlp.gate.weight"], "use_rslora": True},
    "mixtral": {"target_modules": ["k_proj"], "target_parameters": EXPERTS},
    "deepseek_v3": {"target_modules": ["q_b_proj", "kv_b_proj"], "use_dora": True},
    "gpt_oss": {"target_modules": ["q_proj"], "target_parameters": EXPERTS, "modules_to_save": ["lm_head"]},
    "glm4_moe": {"target_modules": ["o_proj"], "target_parameters": EXPERTS},
}


def make_run(folder: Path, model: Any, kind: dict[str, Any], cut: str | None = None) -> Path:
    """A run directory with an adapter of random values, beside a base model, whose files are cut so."""
    base, run = folder / "base", folder / "run"
    model.save_pretrained(base, max_shard_size="500KB")
    if cut is not None:
        assert reshard(base, cut) > 1
    adapted = get_peft_model(copy.deepcopy(model), LoraConfig(r=3, lora_alpha=5, task_type="CAUSAL_LM", **kind))
    torch.manual_seed(1)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name or "modules_to_save" in name or "magnitude" in name:
            parameter.data += 0.1 * torch.randn_like(parameter)
    adapted.peft_config["default"].base_model_name_or_path = str(base)
    adapted.save_pretrained(run / "adapter", save_embedding_layers=False)
    keep_source(run, base, None)
    return run


def all_weights(folder: Path) -> dict[str, torch.Tensor]:
    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}


@pytest.mark.parametrize("family", KINDS)
@pytest.mark.parametrize(
    ("cut", "dtype"),
    [
        (None, torch.bfloat16),
        ("turns", torch.bfloat16),
        *((cut, torch.float32) for cut in CUTS),
        *(pytest.param(cut, torch.bfloat16, marks=pytest.mark.slow) for cut in CUTS if cut != "turns"),
        pytest.param(None, torch.float32, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_bits_of_pefts_merge(cut: str | None, family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """However the base's files cut layers, experts, and gate from up."""
    model: Any = tiny_model(discover()[family]).to(dtype)
    run = make_run(tmp_path, model, KINDS[family], cut)
    merged = merge_adapter(run, tmp_path / "merged", logits=True)
    assert "tensors differ from base plus adapter by at most" in merged.checked, merged.checked
    assert "of 64 random tokens by" in merged.checked, merged.checked
    if cut is not None:
        indices = [tmp_path / folder / "model.safetensors.index.json" for folder in ("base", "merged")]
        assert json.loads(indices[0].read_text()) == json.loads(indices[1].read_text())
    whole: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=dtype)
    whole = PeftModel.from_pretrained(whole, str(run / "adapter")).merge_and_unload()
    whole.save_pretrained(tmp_path / "expected")
    ours, theirs, before = (all_weights(tmp_path / name) for name in ("merged", "expected", "base"))
    assert ours.keys() == theirs.keys() == before.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []
    assert any(not torch.equal(ours[name], before[name]) for name in ours)


def drops_an_expert(name: str, merged: torch.Tensor, base: torch.Tensor) -> None:
    if name.endswith("layers.1.mlp.experts.down_proj"):
        merged[5] = base[5]


def swaps_gate_and_up(name: str, merged: torch.Tensor, base: torch.Tensor) -> None:
    if name.endswith("gate_up_proj"):
        delta = merged - base
        merged.copy_(base + delta.roll(delta.shape[1] // 2, 1))


def transposes(name: str, merged: torch.Tensor, base: torch.Tensor) -> None:
    if name.endswith("o_proj.weight"):
        merged.copy_(merged.T.clone())


def scales(name: str, merged: torch.Tensor, base: torch.Tensor) -> None:
    if name.endswith("layers.0.self_attn.q_proj.weight"):
        merged.copy_(base + 0.9 * (merged - base))


def touches_another(name: str, merged: torch.Tensor, base: torch.Tensor) -> None:
    if name == "model.norm.weight":
        merged.view(torch.int16 if merged.dtype == torch.bfloat16 else torch.int32)[3] += 1


def is_not_a_number(name: str, merged: torch.Tensor, base: torch.Tensor) -> None:
    if name.endswith("layers.1.mlp.experts.gate_up_proj"):
        merged[2, 0, 0] = float("nan")


BREAKS = {
    drops_an_expert: "layers.1.mlp.experts.down_proj, expert 5 is wrong in",
    swaps_gate_and_up: "layers.0.mlp.experts.gate_up_proj, expert 0, gate is wrong in",
    transposes: "layers.0.self_attn.o_proj.weight is wrong in",
    scales: "layers.0.self_attn.q_proj.weight is wrong in",
    touches_another: "model.norm.weight is wrong in 1 of 32 values",
    is_not_a_number: "layers.1.mlp.experts.gate_up_proj, expert 2, gate is wrong in 1 of",
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("wrong", BREAKS, ids=lambda wrong: wrong.__name__)
def test_a_wrong_merge_is_found_and_leaves_no_folder(
    wrong: Any, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path, tiny_model(discover()["olmoe"]).to(dtype), KINDS["olmoe"], "turns")
    read = merging._merged

    def broken(modules: Any, weights: Any, name: str) -> torch.Tensor:
        merged = read(modules, weights, name).clone()
        wrong(name, merged, weights.read(name))
        return merged

    monkeypatch.setattr(merging, "_merged", broken)
    with pytest.raises(CheckpointWriteError, match=f"merged was not written: .*{BREAKS[wrong]}"):
        merge_adapter(run, tmp_path / "merged")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "run"]


@pytest.mark.parametrize("damage", ["delta", "config", "lacks", "nothing"])
def test_the_whole_model_is_compared(damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What each tensor by itself does not show."""
    run = make_run(tmp_path, tiny_model(discover()["qwen3_moe"]), KINDS["qwen3_moe"], "kinds")
    expected = {
        "delta": "more than by rounding",
        "config": "logits of the median random token differ by",
        "lacks": "lm_head.weight",
        "nothing": "peft merged nothing into",
    }
    if damage == "delta":  # values are not looked at
        monkeypatch.setattr(unmerged, "check_values", lambda *_: 0.0)
        wrong = partial(torch.Tensor.mul, other=1.5)
        monkeypatch.setattr(
            peft.tuners.lora.layer.ParamWrapper,
            "get_delta_weight",
            lambda *args, real=peft.tuners.lora.layer.ParamWrapper.get_delta_weight: wrong(real(*args)),
        )
    elif damage == "config":
        path = run / "source" / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"rms_norm_eps": 0.5}))
    elif damage == "lacks":
        path = run / "source" / "source.json"
        record = json.loads(path.read_text())
        del record["weights"]["lm_head.weight"]
        path.write_text(json.dumps(record))
        monkeypatch.setattr(merging, "OriginalLayout", without_head)
    else:
        monkeypatch.setattr(peft.tuners.lora.layer, "check_adapters_to_merge", lambda *_: [])
    with pytest.raises(CheckpointWriteError, match=expected[damage]):
        merge_adapter(run, tmp_path / "merged", logits=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "run"]


def without_head(model: Any, tensors: Any, source: Any) -> Any:
    layout = OriginalLayout(model, tensors, source)
    layout.groups = [group for group in layout.groups if "lm_head.weight" not in group.inputs]
    for entries in layout.files.values():
        entries.pop("lm_head.weight", None)
    return layout


def test_tied_embeddings(tmp_path: Path) -> None:
    """They are merged beside adapters of others; an adapter of one of the two is refused."""
    model = tiny_model(discover()["qwen3_moe"], tie_word_embeddings=True)
    run = make_run(tmp_path / "a", model, KINDS["qwen3_moe"], "turns")
    assert "lm_head.weight" not in all_weights(tmp_path / "a" / "base")
    assert "logits of 64" in merge_adapter(run, tmp_path / "merged", logits=True).checked
    run = make_run(tmp_path / "b", model, {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]})
    with pytest.raises(ValueError, match=r"changes one of .*embed_tokens.weight, which are one tensor"):
        merge_adapter(run, tmp_path / "again")


def deep_model() -> Any:
    """12 layers of 384 KiB of experts."""
    config = AutoConfig.for_model(
        "qwen3_moe", hidden_size=64, moe_intermediate_size=64, num_hidden_layers=12, num_attention_heads=2,
        num_key_value_heads=2, head_dim=16, num_experts=8, num_experts_per_tok=2, vocab_size=64, bos_token_id=None,
        eos_token_id=None,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config)


LAYER = 4 * 8 * 3 * 64 * 64


def test_an_export_needs_memory_for_one_layer(tmp_path: Path) -> None:
    model = deep_model()
    whole = sum(parameter.nbytes for parameter in model.parameters())
    model.save_pretrained(tmp_path / "base", max_shard_size="500KB")
    keep_source(tmp_path / "run", tmp_path / "base", None)
    CheckpointManager(tmp_path / "run").save(1, model, torch.optim.SGD(model.parameters()), {})
    del model
    gc.collect()
    run = tmp_path / "run"
    taken = growth(lambda: export_checkpoint(run, find_checkpoint(run, None), tmp_path / "out"))
    # The checkpoint is one file, which is mapped.
    assert LAYER < taken < whole + 2 * LAYER


def test_a_merge_needs_memory_for_one_layer(tmp_path: Path) -> None:
    model = deep_model()
    run = make_run(tmp_path, model, KINDS["olmoe"])
    whole, config = sum(parameter.nbytes for parameter in model.parameters()), model.config
    del model
    gc.collect()
    taken = growth(lambda: merge_adapter(run, tmp_path / "merged"))
    mapped = (run / "adapter" / "adapter_model.safetensors").stat().st_size + 500_000
    assert LAYER < taken < mapped + 4 * LAYER < whole / 2
    with pytest.raises(ValueError, match=r"is not an adapter of this model: base_model\.model\.model\.layers\.11"):
        config.num_hidden_layers = 11
        AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "other")
        merge_adapter(run, tmp_path / "again", base=tmp_path / "other")
    config.num_hidden_layers, config.num_experts = 12, 2 * config.num_experts
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "wider")
    with pytest.raises(ValueError, match=r"is \(.*\) there, and beside .*wider it would be \("):
        merge_adapter(run, tmp_path / "again", base=tmp_path / "wider")
