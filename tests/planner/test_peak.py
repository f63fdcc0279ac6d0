"""The memory of a step: of a plan, whose sizes are counted, and of a run, whose model is asked for them."""

from __future__ import annotations

from typing import Any

import pytest
import tomli_w
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from benchmarks.peaks import growth
from carpool.parallel.degrees import Degrees
from carpool.planner.candidate import KEEP, Candidate
from carpool.planner.model.routes import Routes
from carpool.planner.model.shape import ModelShape
from carpool.planner.step.peak import _loss, memory_of
from carpool.planner.step.sizes import alone_bytes, sizes_of
from carpool.train.blueprint import meta_model, model_config
from carpool.train.config import load_config
from carpool.train.config.published import read_keys
from carpool.train.plan.estimate import MemoryEstimate
from tests.planner.step_problem import shape as shape_of
from tests.ranks import Ranks

QWEN = "qwen3-30b-a3b"


@pytest.mark.parametrize(
    ("name", "candidate"),
    [
        (QWEN, Candidate(Degrees(1, 2, 1, 2), 4096, 2, moments="bfloat16")),
        (QWEN, Candidate(Degrees(1, 2, 1, 2), 4096, 2, moments="int8", optimizer_in_backward=True, eager="asked for")),
        (QWEN, Candidate(Degrees(1, 8, 1, 4), 4096, 2, 3, "dedup", data_parallel="fsdp", compiled=False,
                         policies={"layer_activations": "recompute"})),
        ("deepseek-v3", Candidate(Degrees(1, 8, 1, 8), 4096, 1, data_parallel="fsdp", compiled=False,
                                  policies={"layer_activations": "recompute", "moe_outputs": "recompute"})),
        ("glm-4.5-air", Candidate(Degrees(1, 8, 1, 8), 4096, 2, policies={"expert_activations": "offload"})),
        ("mixtral-8x7b", Candidate(Degrees(1, 8, 1, 8), 4096, 2, transport="dedup", optimizer_offload="host")),
        (QWEN, Candidate(Degrees(1, 8, 1, 4), 4096, 1, data_parallel="fsdp", stored=4)),
        (QWEN, Candidate(Degrees(1, 8, 1, 4, etp=2), 4096, 1, data_parallel="fsdp", optimizer="torch", stored=4)),
        (QWEN, Candidate(Degrees(1, 4, 2, 4), 4096, 2, data_parallel="fsdp")),
        (QWEN, Candidate(Degrees(1, 4, 1, 4, pp=2), 4096, 2, 4, data_parallel="fsdp", compiled=False,
                         pipeline="ZBVZeroBubble")),
    ],
)  # fmt: skip
def test_what_is_counted_is_what_the_model_has(name: str, candidate: Candidate, tmp_path: Any) -> None:
    keys = {"from": name, "num_hidden_layers": 5}
    candidate = Candidate(**{**vars(candidate), "policies": {**KEEP, **candidate.policies}})
    settings = candidate.settings()
    (tmp_path / "plan.toml").write_text(tomli_w.dumps(settings))
    graphs = f"training.cuda_graphs={'off' if candidate.eager else 'auto'}"
    config = load_config(tmp_path / "plan.toml", ["data.tokenizer=bytes", f"model.config={name}", graphs])
    estimate = MemoryEstimate(config, candidate.degrees, meta_model(model_config(keys)), True)
    theirs = estimate(candidate.transport, candidate.data_parallel)
    peak = memory_of(ModelShape.read(read_keys(keys)), candidate)
    assert peak.total == pytest.approx(theirs["total"], rel=0.015)
    assert peak.host == pytest.approx(estimate.host_bytes(candidate.transport), rel=0.01)


def test_the_timeline_rises_and_falls() -> None:
    shape = shape_of(QWEN)
    candidate = Candidate(Degrees(1, 8, 1, 8), 4096, 1, 2)
    peak = memory_of(shape, candidate, every_layer=True)
    sizes = dict(peak.timeline)
    assert max(sizes.values()) == pytest.approx(peak.tensors) and peak.at in sizes
    assert sizes["forward of layer 3"] < sizes["forward of layer 30"] < sizes["loss"]
    assert memory_of(shape, candidate).parts == peak.parts
    shape = shape_of(QWEN)
    candidate = Candidate(Degrees(1, 8, 1, 8), 4096, 1, 2, policies={**KEEP, "layer_activations": "recompute"})
    found, sizes = dict(memory_of(shape, candidate, every_layer=True).timeline), sizes_of(shape, candidate, 0, Routes())
    last = len(sizes.layers) - 1
    logits, _ = _loss(sizes, candidate)
    assert found[f"forward of layer {last}"] - (found["loss"] - logits) == pytest.approx(max(sizes.layers))
    assert found[f"backward of layer {last - 1}"] > found["loss"] - logits + max(sizes.layers)


def test_sizes_of_gradients_and_stages() -> None:
    shape = shape_of(QWEN, 4)
    # Pre-activations of a layer are larger than the gradients of its experts.
    alone, whole = (Candidate(Degrees(1, ranks), 8192, 8, compiled=False) for ranks in (1, 8))
    assert alone.captured and whole.captured and whole.experts_in_buffers
    for one, fewer in ((alone, True), (whole, False)):
        of_two = memory_of(shape, Candidate(**{**vars(one), "accumulation": 2})).parts["gradients"]
        assert (memory_of(shape, one).parts["gradients"] < of_two) == fewer
    shape = shape_of(QWEN)
    one, four = (
        memory_of(shape, Candidate(Degrees(1, 8 // pp, 1, 2, pp=pp), 4096, 1, 8)).parts["activations"] for pp in (1, 4)
    )
    # A quarter of the layers, four micro-batches of them.
    assert four == pytest.approx(one, rel=0.25)


def growth_of_a_backward(stored: str, reduced: str) -> tuple[int, int]:
    """(parameters, bytes that the backward of a module takes) whose FSDP group is this rank alone."""
    rows, columns = 37, 4099
    mesh = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("ep", "efsdp"))["efsdp"]
    module = torch.nn.Linear(rows, columns, bias=False, dtype=getattr(torch, stored))
    fully_shard(module, mesh=mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=getattr(torch, reduced)))
    module.set_gradient_divide_factor(2.0)
    taken = []
    for _ in range(3):
        loss = module(torch.ones(1, rows, dtype=getattr(torch, stored), requires_grad=True)).sum()
        taken.append(growth(loss.backward))
        module.zero_grad()
    # What was allocated before and is freed meanwhile makes it less.
    return rows * columns, max(taken)


def test_fsdp_copies_what_no_other_rank_has(two_ranks: Ranks) -> None:
    for parameters, taken in two_ranks(growth_of_a_backward, "bfloat16", "float32"):
        _, _, at_once = alone_bytes(parameters, 2, 4)
        assert taken == pytest.approx(at_once, rel=0.02)


def test_experts_that_fsdp_copies_need_more_memory(tmp_path: Any) -> None:
    shape = shape_of("mixtral-8x7b", 2)
    alone, without = (
        memory_of(shape, Candidate(degrees, 4096, 1, data_parallel="fsdp", moments="bfloat16"))
        for degrees in (Degrees(dp_replicate=2, fsdp=2, ep=2), Degrees(fsdp=2, ep=2))
    )
    layer = shape.num_experts * shape.expert_parameters / 2
    assert alone.tensors - without.tensors > 1.5 * 2 * layer
