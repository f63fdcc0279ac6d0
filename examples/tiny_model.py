"""A tiny OLMoE with random weights, so that the examples download nothing."""

import tempfile
from collections.abc import Callable

import torch
import torch.distributed as dist
from transformers import OlmoeConfig, OlmoeForCausalLM


def on_rank_0(write: Callable[[str], None]) -> str:
    """Lets rank 0 write a checkpoint; every rank gets its folder."""
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder)
    if dist.get_rank() == 0:
        write(folder[0])
    dist.barrier()
    return folder[0]


def write_tiny_olmoe() -> str:
    """Writes the checkpoint; every rank gets its folder. 2 layers, 8 experts, 2 of them per token."""
    config = OlmoeConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, num_experts=8, num_experts_per_tok=2, pad_token_id=0, eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    return on_rank_0(lambda folder: OlmoeForCausalLM(config).save_pretrained(folder))
