"""What other programs expect of an exported model: vLLM's loaders, and gguf's names.

vLLM reads a checkpoint tensor by tensor and looks for a place of each by its name
(vllm/model_executor/models/qwen3_moe.py, olmoe.py and mixtral.py, `load_weights`; commit 2e0831b). q, k and v go into
`qkv_proj`; what contains `experts.5.gate_proj.` (`w1` of Mixtral) goes into expert 5 of `w13_weight`, and so on
(`FusedMoE.make_expert_params_mapping`); everything else must be the name of a parameter. A name without a place is a
KeyError; a place without a name stays random without an error. So names must be exactly these:
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
import pytest
from safetensors import safe_open
from transformers import PreTrainedConfig

from carpool.train.checkpoints.export import export_checkpoint, find_checkpoint
from tests.train.test_export import trained_run

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class Family(NamedTuple):
    """Names in one family's files. `norm`: what q_norm and k_norm are of; gguf: the architecture there."""

    architecture: str
    experts: str
    gate: str
    up: str
    down: str
    norm: str | None
    gguf: str


FAMILIES = {
    "qwen3_moe": Family("Qwen3MoeForCausalLM", "mlp", "gate_proj", "up_proj", "down_proj", "head", "QWEN3MOE"),
    "olmoe": Family("OlmoeForCausalLM", "mlp", "gate_proj", "up_proj", "down_proj", "heads", "OLMOE"),
    "mixtral": Family("MixtralForCausalLM", "block_sparse_moe", "w1", "w3", "w2", None, "LLAMA"),
}


def expected_shapes(family: Family, config: PreTrainedConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes that vLLM's loader has places for."""
    text: Any = config
    hidden, heads, kv_heads = text.hidden_size, text.num_attention_heads, text.num_key_value_heads
    head = getattr(text, "head_dim", None) or hidden // heads
    inner = getattr(text, "moe_intermediate_size", None) or text.intermediate_size
    experts = getattr(text, "num_experts", None) or text.num_local_experts
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (text.vocab_size, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (text.vocab_size, hidden),
    }
    for layer in range(text.num_hidden_layers):
        at = f"model.layers.{layer}"
        shapes |= {f"{at}.{norm}.weight": (hidden,) for norm in ("input_layernorm", "post_attention_layernorm")}
        shapes[f"{at}.self_attn.q_proj.weight"] = (heads * head, hidden)
        shapes |= {f"{at}.self_attn.{one}_proj.weight": (kv_heads * head, hidden) for one in "kv"}
        shapes[f"{at}.self_attn.o_proj.weight"] = (hidden, heads * head)
        if family.norm is not None:
            sizes = (head, head) if family.norm == "head" else (heads * head, kv_heads * head)
            shapes |= {f"{at}.self_attn.{one}_norm.weight": (size,) for one, size in zip("qk", sizes, strict=True)}
        shapes[f"{at}.{family.experts}.gate.weight"] = (experts, hidden)
        for expert in range(experts):
            names = f"{at}.{family.experts}.experts.{expert}"
            shapes |= {f"{names}.{one}.weight": (inner, hidden) for one in (family.gate, family.up)}
            shapes[f"{names}.{family.down}.weight"] = (hidden, inner)
    return shapes


def _exported(family: str, folder: Path) -> tuple[Path, PreTrainedConfig, dict[str, np.ndarray[Any, Any]]]:
    _, run, model = trained_run(folder, family)
    out = export_checkpoint(run, find_checkpoint(run, None), folder / "out").folder
    values: dict[str, np.ndarray[Any, Any]] = {}
    for path in out.glob("*.safetensors"):
        with safe_open(path, framework="np") as file:
            values |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return out, model.config, values


@pytest.mark.parametrize("family", FAMILIES)
def test_every_weight_has_a_place_in_vllm(family: str, tmp_path: Path) -> None:
    out, config, values = _exported(family, tmp_path)
    shapes = {name: value.shape for name, value in values.items()}
    assert shapes == expected_shapes(FAMILIES[family], config)
    # By which vLLM finds its class.
    assert json.loads((out / "config.json").read_text())["architectures"] == [FAMILIES[family].architecture]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_weight_has_a_name_in_gguf(family: str, tmp_path: Path) -> None:
    """As llama.cpp's convert_hf_to_gguf.py does it: one tensor for the experts of a layer, names through gguf's map."""
    _, config, values = _exported(family, tmp_path)
    architecture = gguf.MODEL_ARCH[FAMILIES[family].gguf]
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    experts: dict[str, dict[int, np.ndarray[Any, Any]]] = {}
    tensors: dict[str, np.ndarray[Any, Any]] = {}
    for name, value in values.items():
        if of_expert := re.search(r"\.experts\.(\d+)\.", name):
            experts.setdefault(name.replace(of_expert[0], ".experts."), {})[int(of_expert[1])] = value
        else:
            tensors[name] = value
    tensors |= {name: np.stack([rows[expert] for expert in range(len(rows))]) for name, rows in experts.items()}
    converted = {names.get_name(name, try_suffixes=(".weight",)): value for name, value in tensors.items()}
    assert None not in converted and len(converted) == len(tensors)
    # Every tensor of an MoE layer that the architecture has, with values that come back.
    assert {"blk.0.ffn_gate_inp.weight", "blk.0.ffn_gate_exps.weight", "blk.0.ffn_up_exps.weight"} <= converted.keys()
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", gguf.MODEL_ARCH_NAMES[architecture])
    for name, value in converted.items():
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    read = {tensor.name: tensor.data for tensor in gguf.GGUFReader(tmp_path / "model.gguf").tensors}
    assert read.keys() == converted.keys()
    assert all(np.array_equal(read[name], value) for name, value in converted.items())
