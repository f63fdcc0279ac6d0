"""Experts in host memory on a GPU: equal bits with copies on streams of their own, and less memory."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from carpool.hf import install
from carpool.hf.build import build_model, make_config
from carpool.hf.host_experts import keep_experts_in_host_memory
from carpool.memory.optimizer import AdamW
from carpool.parallel.consumed import ConsumedGradients
from carpool.parallel.replicated import sharded_parameters

pytestmark = pytest.mark.gpu
SIZES = {
    "hidden_size": 512,
    "intermediate_size": 256,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "vocab_size": 512,
}


def _trained(host: bool, checkpointing: bool) -> tuple[list[float], dict[str, torch.Tensor], int]:
    """Losses, values, and peak bytes of the steps after the first, beyond what there was before."""
    gc.collect()
    before = torch.cuda.memory_allocated()
    model: Any = build_model(make_config("olmoe", SIZES), distributed_config=None, dtype=torch.bfloat16, seed=0)
    install(model)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    optimizer = AdamW(model.parameters(), lr=1e-2, moments="int8", offload=host)
    away = keep_experts_in_host_memory(model) if host else None
    consumed = ConsumedGradients(model, optimizer, away)
    losses = []
    for step in range(6):
        ids = torch.randint(0, 512, (4, 256), generator=torch.Generator().manual_seed(step)).cuda()
        loss = model(input_ids=ids, labels=ids).loss
        consumed.begin(torch.isfinite(loss))
        loss.backward()
        consumed.finish()
        losses.append(loss)
        if step == 0:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
    peak = torch.cuda.max_memory_allocated() - before
    optimizer.synchronize()
    with sharded_parameters(model):
        values = {name: p.detach().cpu() for name, p in model.named_parameters()}
    return [loss.item() for loss in losses], values, peak


@pytest.mark.parametrize("checkpointing", [False, True])
def test_training_has_the_same_bits_in_less_memory(checkpointing: bool) -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        (losses, values, most), (other, others, least) = [_trained(host, checkpointing) for host in (False, True)]
    finally:
        torch.use_deterministic_algorithms(False)
    assert losses == other
    assert all(torch.equal(value, others[name]) for name, value in values.items())
    experts = sum(value.nbytes for name, value in values.items() if ".experts." in name)
    # Three of eight layers' experts at most, and no state but the tiles'.
    print(f"peak {most / 1e6:.0f} MB, from host memory {least / 1e6:.0f} MB, experts {experts / 1e6:.0f} MB")
    assert least < most - experts // 2
