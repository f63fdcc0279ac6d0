"""A tiny OLMoE with random weights, so that the examples download nothing."""

import tempfile

import torch
import torch.distributed as dist
from transformers import OlmoeConfig, OlmoeForCausalLM


def write_tiny_olmoe() -> str:
    """Writes the checkpoint on rank 0; every rank gets its folder. 2 layers, 8 experts, 2 of them per token."""
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    if dist.get_rank() == 0:
        config = OlmoeConfig(
            vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=4, num_experts=8, num_experts_per_tok=2, pad_token_id=0, eos_token_id=None,
        )  # fmt: skip
        torch.manual_seed(0)
        OlmoeForCausalLM(config).save_pretrained(folder[0])
    dist.barrier()
    return folder[0]
