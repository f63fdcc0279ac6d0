"""Steps that are captured as CUDA graphs, on one rank and on two: bit by bit those of eager runs, with all that runs
may have."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from carpool.hf.memory.offload import _ATTRIBUTE
from carpool.memory.activations import ActivationOffload
from carpool.train.steps.graphs import StepGraphs
from tests.gpu.ranks import needs, torchrun

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(560), needs(2)]
SETTINGS = [
    "training.max_steps=9", "training.eval_steps=5", "training.save_pretrained=false", "training.save_steps=none",
    "training.sample_tokens=4", "parallelism.dense=replicate",
    "training.full_determinism=true", "model.dtype=bfloat16", "parallelism.timeout_seconds=120",
    "data.eval_max_sequences=16",
]  # fmt: skip
COUNTED = ("loss", "grad_norm", "bytes_remote", "copies_per_token", "load_max_over_mean", "router_entropy")


STREAMED = ("training.optimizer_state=host", "training.gradients=consumed", "training.optimizer_moments=int8")
OFFLOADED = ("memory.dense=offload", "memory.hidden=offload")


def lines(ranks: int, output: Path, *overrides: str) -> list[dict[str, Any]]:
    settings = [*SETTINGS, f"parallelism.num_ranks={ranks}", f"training.output_dir={output}", *overrides]
    torchrun(ranks, "carpool.cli", "train", *settings, seconds=240)
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def compare(tmp_path: Path, ranks: int, *overrides: str) -> None:
    eager = lines(ranks, tmp_path / "eager", *overrides, "training.cuda_graphs=off")
    captured = lines(ranks, tmp_path / "captured", *overrides)
    decided = json.loads((tmp_path / "captured" / "run.json").read_text())["decisions"]["cuda_graphs"]
    assert decided["used"], decided
    kinds = ("train", "eval", "repeat")
    assert [line["kind"] for line in captured if line["kind"] in kinds] == [
        line["kind"] for line in eager if line["kind"] in kinds
    ]
    for one, other in zip(eager, captured, strict=True):
        if one["kind"] in ("train", "eval"):
            assert {key: one.get(key) for key in COUNTED} == {key: other.get(key) for key in COUNTED}, one["step"]
        if one["kind"] == "train":
            # Times of rides come from events in the graph.
            spans = ("dispatch", "experts", "combine") if ranks > 1 else ("experts",)
            assert all(other["ms"][span]["total"] > 0 for span in spans)


@pytest.mark.parametrize(
    "overrides",
    [
        OFFLOADED,
        (*OFFLOADED, "training.gradient_accumulation_steps=3"),
        ("moe.schedule=two-batch", "training.gradient_accumulation_steps=3"),
        (*STREAMED, "training.max_grad_norm=0"),
        (*STREAMED, "training.clip_by=previous", "memory.hidden=offload"),
        (*STREAMED, "training.max_grad_norm=0", "memory.dense=recompute", "training.torch_compile=true"),
    ],
    ids=[
        "offloaded",
        "offloaded accumulated",
        "two batches",
        "streamed",
        "streamed offloaded",
        "streamed recomputed compiled",
    ],
)
def test_alone(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    compare(tmp_path, 1, *overrides)


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("training.gradient_accumulation_steps=3", "moe.router_aux_loss_coef=0.02"),
        ("training.torch_compile=true", "training.gradient_accumulation_steps=2"),
        ("moe.schedule=chunks", "moe.chunks=2"),
        # Two micro-batches at a time: halves of one, and a pair and one more.
        ("moe.schedule=two-batch", "moe.router_aux_loss_coef=0.02"),
        ("moe.schedule=two-batch", "training.gradient_accumulation_steps=3"),
        ("moe.schedule=two-batch", "training.gradient_accumulation_steps=2", "training.torch_compile=true"),
        ("moe.schedule=two-batch", "training.gradient_accumulation_steps=4", "memory.dense=recompute"),
        ("memory.dense=recompute", "memory.hidden=recompute"),
        ("memory.dense=recompute", "training.torch_compile=true"),
        ("memory.dense=offload", "memory.rows=offload", "memory.hidden=offload"),
        ("training.gradients=consumed", "training.clip_by=previous", "training.optimizer_moments=int8"),
        ("training.gradients=consumed", "training.max_grad_norm=0", "nvlink.capacity=0.125"),
        (*STREAMED, "training.clip_by=previous"),
        ("parallelism.tp_size=2", "parallelism.dense=fsdp"),
        ("memory.rows=offload", "memory.hidden=offload", "nvlink.capacity=0.125", "training.learning_rate=0.02"),
        # Slabs of an eighth: some step overflows, is repeated eagerly, and captured anew.
        ("nvlink.capacity=0.125", "training.learning_rate=0.02"),
    ],
    ids=[
        "plain",
        "accumulated",
        "compiled",
        "chunks",
        "two batches, halves",
        "two batches",
        "two batches, compiled",
        "two batches, recomputed",
        "recomputed",
        "recomputed compiled",
        "offloaded",
        "consumed",
        "consumed overflow",
        "streamed",
        "tensor parallel",
        "offloaded overflow",
        "overflow",
    ],
)
def test_a_captured_run_is_an_eager_one(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    compare(tmp_path, 2, *overrides)


@pytest.mark.parametrize("fails", [False, True])
def test_gradients_of_offloaded_layers(fails: bool) -> None:
    """Replayed, or computed eagerly because the backward cannot be captured: those of layers that keep all."""
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(5)).bfloat16().cuda()
    offload, told = ActivationOffload(), list[str | None]()
    object.__setattr__(layers, _ATTRIBUTE, offload)

    def compute(batches: Any, factor: Any, _: int, sums: torch.Tensor, *__: Any, away: bool = True) -> None:
        x = batches[0]["x"]
        for layer in layers:
            with offload.layer(x.device) if away else nullcontext():
                x = torch.nn.functional.silu(layer(x))
        loss = x.square().mean() * factor
        sums[0] += loss.detach()
        loss.backward()

    def refuse(gradient: torch.Tensor) -> None:
        if fails and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("this layer cannot be captured")

    layers[2].weight.register_hook(refuse)
    graphs = StepGraphs(layers, [], compute, told.append)
    for number in range(6):
        batch = {"x": torch.randn(512, 256, generator=torch.Generator().manual_seed(number)).bfloat16().cuda()}
        sums = torch.zeros(2, dtype=torch.float64, device="cuda")
        found: list[list[torch.Tensor]] = []
        for away in (True, False):
            layers.zero_grad()
            if not away or graphs.run([batch], 0.5) is None:
                compute([batch], 0.5, 1, sums, away=away)
            found.append([p.grad.clone() for p in layers.parameters() if p.grad is not None])
        assert len(found[0]) == 10 and all(torch.equal(one, other) for one, other in zip(*found, strict=True)), number
    assert offload.offloader._pool is not None and offload.offloader._pool.bytes > 0
    assert told == (["RuntimeError: this layer cannot be captured"] if fails else [None])
