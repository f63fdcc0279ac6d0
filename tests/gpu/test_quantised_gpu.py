"""Experts in 4 and 8 bits on a GPU: codes, what kernels make of them, and the memory that they take."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from carpool.experts import Choices, GroupedExperts, make_activation
from carpool.experts.quantised import Kind, dequantise, quantise
from carpool.hf import install, quantise_experts
from carpool.hf.build_model import build_model
from carpool.hf.weights.model_config import make_config
from tests.experts_problem import ExpertProblem
from tests.test_quantised import KINDS

pytestmark = pytest.mark.gpu
SIZES = {
    "hidden_size": 512,
    "moe_intermediate_size": 256,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "num_experts": 64,
    "num_experts_per_tok": 4,
    "vocab_size": 512,
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_gpu_makes_the_same_bits_as_a_cpu(kind: Kind) -> None:
    weight = torch.randn(5, 130, 320, generator=torch.Generator().manual_seed(0)).bfloat16()
    cpu, gpu = quantise(weight, kind), quantise(weight.cuda(), kind)
    assert torch.equal(cpu.code, gpu.code.cpu()) and torch.equal(cpu.scale, gpu.scale.cpu())
    for dtype in (torch.bfloat16, torch.float32):
        assert torch.equal(dequantise(*gpu, dtype).cpu(), dequantise(*cpu, dtype))
    offsets = torch.tensor([0, 3, 3, 5, 5], dtype=torch.int32, device="cuda")
    some = dequantise(*gpu, torch.bfloat16, offsets).cpu()
    assert torch.equal(some[[1, 3]], dequantise(*cpu, torch.bfloat16)[[1, 3]])


@pytest.mark.parametrize(("way", "elements"), [("library", 2**27), ("flat", 2**27), ("flat", 2**17), ("square", 1)])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_experts_compute_with_dequantised_matrices(
    kind: Kind, transposed: bool, way: str, elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit by bit what they compute with these in memory, at once or some experts at a time, and the host does not
    wait."""
    monkeypatch.setattr("carpool.experts.gemm.grouped_products.AT_ONCE", elements)
    activation = make_activation("silu", True)
    problem = ExpertProblem(
        "idle slots", 256, 128, activation, False, torch.bfloat16, transposed, ranks=(8, 16), frozen=True
    )
    twin = problem.quantise(kind)
    experts = GroupedExperts(problem.function, Choices.all(way))
    # The table of levels is made once in a process, and copied to the device then, for which the host waits.
    dequantise(*quantise(torch.ones(1, 64, 64, dtype=torch.bfloat16, device="cuda"), kind), torch.bfloat16)
    got, want = (one.run(experts, True, True, device="cuda") for one in (problem, twin))
    assert all(torch.equal(got[name], want[name]) for name in want)
    twin.check(got, 3e-2, all_rows=True)


def _train(kind: Kind | None) -> tuple[list[float], int]:
    """Losses, and the peak of bytes of a step, the model counted."""
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    model: Any = build_model(make_config("qwen3_moe", SIZES), distributed_config=None, dtype=torch.bfloat16, seed=0)
    install(model)
    if kind is not None:
        quantise_experts(model, kind)
    torch.manual_seed(0)
    targets = ["experts.gate_up_proj", "experts.down_proj"]
    adapted: Any = get_peft_model(model, LoraConfig(r=8, target_modules=["q_proj"], target_parameters=targets))
    optimizer = torch.optim.AdamW([p for p in adapted.parameters() if p.requires_grad], lr=1e-3)
    losses = []
    for step in range(4):
        ids = torch.randint(0, 512, (2, 256), generator=torch.Generator().manual_seed(step)).cuda()
        torch.cuda.reset_peak_memory_stats()
        loss = adapted(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, torch.cuda.max_memory_allocated() - before


def test_training_takes_less_memory() -> None:
    """Of 6 layers with 64 experts: 302 MB in bf16, 85 in nf4, 151 in int8, and one matrix of 34 at a time."""
    (plain, whole), (eight, some), (four, least) = (_train(kind) for kind in (None, "int8", "nf4"))
    assert least < some - 50e6 < whole - 150e6
    assert max(abs(a - b) for a, b in zip(plain, eight, strict=True)) < 0.02
    assert max(abs(a - b) for a, b in zip(plain, four, strict=True)) < 0.2


def test_loading_needs_one_layer_beside_the_codes(tmp_path: Path) -> None:
    build_model(make_config("qwen3_moe", SIZES), distributed_config=None, dtype=torch.bfloat16, seed=0).save_pretrained(
        tmp_path
    )
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    model = build_model(tmp_path, distributed_config=None, dtype=torch.bfloat16, seed=0, base_dtype="nf4")
    held, peak = torch.cuda.memory_allocated() - before, torch.cuda.max_memory_allocated() - before
    assert sum(p.numel() for p in model.parameters()) > 150e6
    assert held < 110e6 and peak < held + 130e6, "a layer's experts are 50 MB, and are put together of pieces"
