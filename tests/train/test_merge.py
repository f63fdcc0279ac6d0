"""`carpool merge` layer by layer: the bits of peft's own merge of a whole model, and memory for a layer."""

from __future__ import annotations

import copy
import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.peaks import growth
from carpool.train.checkpoints.export import export_checkpoint, find_checkpoint
from carpool.train.checkpoints.manager import CheckpointManager
from carpool.train.checkpoints.merge import merge_adapter
from carpool.train.checkpoints.source import keep_source
from tests.hf.tiny_models import discover, tiny_model

EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]
KINDS = {
    "olmoe": {"target_modules": ["q_proj", "o_proj"], "target_parameters": EXPERTS},
    "qwen3_moe": {"target_modules": ["v_proj"], "target_parameters": [*EXPERTS, "mlp.gate.weight"], "use_rslora": True},
    "mixtral": {"target_modules": ["k_proj"], "target_parameters": EXPERTS},
    "deepseek_v3": {"target_modules": ["q_b_proj", "kv_b_proj"], "use_dora": True},
    "gpt_oss": {"target_modules": ["q_proj"], "target_parameters": EXPERTS, "modules_to_save": ["lm_head"]},
    "glm4_moe": {"target_modules": ["o_proj"], "target_parameters": EXPERTS},
}


def make_run(folder: Path, model: Any, kind: dict[str, Any]) -> Path:
    """A run directory with an adapter of random values, beside a base model."""
    base, run = folder / "base", folder / "run"
    model.save_pretrained(base, max_shard_size="500KB")
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
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bits_of_pefts_merge(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model: Any = tiny_model(discover()[family]).to(dtype)
    run = make_run(tmp_path, model, KINDS[family])
    merge_adapter(run, tmp_path / "merged")
    whole: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=dtype)
    whole = PeftModel.from_pretrained(whole, str(run / "adapter")).merge_and_unload()
    whole.save_pretrained(tmp_path / "expected")
    ours, theirs, before = (all_weights(tmp_path / name) for name in ("merged", "expected", "base"))
    assert ours.keys() == theirs.keys() == before.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []
    assert any(not torch.equal(ours[name], before[name]) for name in ours)


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
