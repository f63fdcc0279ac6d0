"""Experts in host memory on a GPU: equal bits with copies on streams of their own, and less memory."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from carpool.experts.host_experts import host_experts
from carpool.hf import install
from carpool.hf.build_model import build_model
from carpool.hf.generation import Sampling, generate
from carpool.hf.held_experts import keep_experts_in_host_memory
from carpool.hf.routing.router_answers import force_choices
from carpool.hf.seam.expert_rides import rides
from carpool.hf.weights.model_config import make_config
from carpool.optim import AdamW
from carpool.optim import offloaded_state as streamed
from carpool.optim.in_backward import ConsumedGradients
from carpool.parallel.replicated import sharded_parameters
from carpool.serve.serve_memory import ExpertTier
from carpool.serve.served_model import find_source, open_model
from carpool_systems.cpu_experts import compute_few_on_cpu
from carpool_systems.predictors import Popularity
from tests.serve.checkpoints import save

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


def _trained(
    host: bool, checkpointing: bool, folder: Path | None = None
) -> tuple[list[float], dict[str, torch.Tensor], int]:
    """Losses, values, and peak bytes of the steps after the first, beyond what there was before. `folder`: on disk, not
    in host memory."""
    gc.collect()
    before = torch.cuda.memory_allocated()
    model: Any = build_model(make_config("olmoe", SIZES), distributed_config=None, dtype=torch.bfloat16, seed=0)
    install(model)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    optimizer = AdamW(model.parameters(), lr=1e-2, moments="int8", offload=host, folder=folder)
    away = keep_experts_in_host_memory(model, folder=folder) if host else None
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


@pytest.mark.parametrize(("checkpointing", "disk"), [(False, False), (True, False), (False, True)])
def test_training_has_the_same_bits_in_less_memory(checkpointing: bool, disk: bool, tmp_path: Path) -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        losses, values, most = _trained(False, checkpointing)
        # Tiles for a model of this size.
        with mock.patch.object(streamed, "TILE_BYTES", 2**22):
            other, others, least = _trained(True, checkpointing, tmp_path if disk else None)
    finally:
        torch.use_deterministic_algorithms(False)
    assert losses == other
    assert all(torch.equal(value, others[name]) for name, value in values.items())
    experts = sum(value.nbytes for name, value in values.items() if ".experts." in name)
    # Three of eight layers' experts at most, and no state but the tiles'.
    print(f"peak {most / 1e6:.0f} MB, from host memory {least / 1e6:.0f} MB, experts {experts / 1e6:.0f} MB")
    assert least < most - experts // 2


@pytest.mark.parametrize(("frozen", "few"), [(True, 0), (False, 0), (True, 4), (False, 4)])
def test_experts_that_come_when_they_are_chosen(frozen: bool, few: int) -> None:
    """The same bits; beside experts that the CPU computes, gradients to rounding, and the same bits each time."""
    popularity_E, generator = 1.0 / torch.arange(1, 33), torch.Generator().manual_seed(0)
    choices = [torch.multinomial(popularity_E.expand(48, 32), 4, generator=generator).cuda() for _ in range(8)]
    found, came = [], []
    for how in ("device", "layers", "popular", "popular"):
        model: Any = build_model(make_config("olmoe", SIZES), distributed_config=None, dtype=torch.bfloat16, seed=0)
        install(model)
        for own in rides(model).values():
            own.experts.requires_grad_(not frozen)
        if few:  # or a token near a tie might choose another expert in a later layer
            force_choices(model, dict(zip(rides(model), choices, strict=True)), 32)
        away = None
        if how != "device":
            away = keep_experts_in_host_memory(model, predictor=Popularity if how == "popular" else None)
            compute_few_on_cpu(model, away, few if how == "popular" else 0)
        for step in range(3):
            model.zero_grad()
            ids = torch.randint(0, 512, (1, 48), generator=torch.Generator().manual_seed(step)).cuda()
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
        gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        found.append({"loss": loss.detach(), **gradients})
        came.append(0 if away is None else away.bytes_in)
    right, layers, ours, again = found
    for name, value in right.items():
        assert torch.equal(layers[name], value) and torch.equal(ours[name], again[name])
        error = (ours[name].float() - value.float()).norm()
        assert error <= (0.06 if few else 0) * value.float().norm(), name
    print(f"frozen {frozen}, few {few}: {came[1] / 1e6:.0f} MB came by layers, {came[2] / 1e6:.0f} MB when chosen")
    assert came[2] < came[1] or not frozen


@pytest.mark.parametrize(
    "tier",
    [ExpertTier("host"), ExpertTier("host", memory=2**25, predictor="matrix"), ExpertTier("disk", memory=2**25)],
    ids=["host", "cache", "disk"],
)
def test_a_generation_makes_the_same_text(tmp_path: Path, tier: ExpertTier) -> None:
    save(tmp_path, "qwen3_moe", num_hidden_layers=6, hidden_size=256, moe_intermediate_size=128, num_experts=64)
    made = []
    for where in (ExpertTier(), tier):
        model = open_model(find_source(tmp_path), dtype="bfloat16", max_tokens=64, cached_tokens=128, experts=where)
        sampling = Sampling(max_new_tokens=40)
        made.append([generate(model, [[5, 9, 11, 40 + i]], sampling, end=[2]).tokens for i in range(3)])
        away = host_experts(model)
        assert (away is None) == (not where.away)
    assert away is not None and made[0] == made[1]
    assert away.hits.chosen > 0 and (away.hits.kept > 0) == (tier.memory > 0)
    assert (away.disk_bytes[0] > 0) == (tier.where == "disk")
