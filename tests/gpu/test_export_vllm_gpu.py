"""vLLM, where it is installed, continues with an exported model as Transformers does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from carpool.hf.weights.model_config import make_config
from carpool.train.checkpoints.export import export_checkpoint, find_checkpoint
from carpool.train.checkpoints.manager import CheckpointManager
from carpool.train.checkpoints.run_source import keep_source

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]
# Sizes that vLLM's attention knows.
SIZES = {
    "vocab_size": 320, "hidden_size": 256, "intermediate_size": 256, "moe_intermediate_size": 128, "head_dim": 64,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "num_experts": 8,
    "num_experts_per_tok": 2, "max_position_embeddings": 512, "initializer_range": 0.2, "bos_token_id": 257,
    "eos_token_id": 256,
}  # fmt: skip


def test_vllm_continues_as_transformers_does(tmp_path: Path) -> None:
    vllm: Any = pytest.importorskip("vllm", reason="vLLM is not installed")
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(make_config("qwen3_moe", SIZES), dtype=torch.bfloat16)
    CheckpointManager(tmp_path).save(1, model, torch.optim.SGD(model.parameters()), {})
    keep_source(tmp_path, None, "bytes")
    out = export_checkpoint(tmp_path, find_checkpoint(tmp_path, 1), tmp_path / "model").folder
    prompt = list(b"The fullest rank computes ")
    with torch.no_grad():
        best = model.eval()(input_ids=torch.tensor([prompt])).logits[0, -1].float().log_softmax(0)
    engine = vllm.LLM(
        model=str(out), dtype="bfloat16", enforce_eager=True, gpu_memory_utilization=0.3, max_model_len=256
    )
    wanted = vllm.SamplingParams(temperature=0.0, max_tokens=1, logprobs=5)
    [answer] = engine.generate([{"prompt_token_ids": prompt}], wanted)
    ours = {token: one.logprob for token, one in answer.outputs[0].logprobs[0].items()}
    assert answer.outputs[0].token_ids[0] in best.topk(2).indices.tolist()
    for token, value in ours.items():
        assert abs(value - best[token].item()) < 0.1, token
