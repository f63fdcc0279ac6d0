"""Non-expert parameters that are whole on each rank: what is saved, and what is refused. Steps, and every gradient:
tests/meshes; whole runs: tests/train/test_dense.py."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

import carpool.hf
from carpool.hf import set_transport
from carpool.hf.build_model import build_model
from carpool.hf.sharding import replicate_dense
from carpool.hf.step_graphs import EAGER_STEPS, StepGraphs
from carpool.hf.weights.model_config import make_config
from tests.full_tensor import full_tensor
from tests.hf.meshes import reuse_meshes
from tests.hf.test_build import COMMON
from tests.ranks import Ranks, on_ranks
from tests.replayed import Again

TINY = COMMON | {"vocab_size": 60, "num_experts": 8, "num_experts_per_tok": 2}
MODELS: dict[str, dict[str, Any]] = {
    "olmoe": {"intermediate_size": 16},
    "qwen3_moe": {"moe_intermediate_size": 16, "tie_word_embeddings": True},
}


def _saved(folder: str) -> dict[str, torch.Tensor]:
    reuse_meshes()
    config = DistributedConfig(fsdp_size=4, ep_size=4, ep_implementation="carpool")
    settings = {"distributed_config": config, "dtype": torch.float32, "seed": 0, "dense": "zero1"}
    model: Any = build_model(make_config("qwen3_moe", TINY | MODELS["qwen3_moe"]), **settings)  # type: ignore[arg-type]
    kept = replicate_dense(model, bfloat16=False)
    model.save_pretrained(folder)
    loaded: Any = build_model(folder, **settings)  # type: ignore[arg-type]
    replicate_dense(loaded, bfloat16=False)
    with kept.shards():
        whole = {name: full_tensor(parameter).detach().clone() for name, parameter in model.named_parameters()}
    for name, tensor in loaded.state_dict().items():
        assert name == "lm_head.weight" or torch.equal(full_tensor(tensor), whole[name]), name
    return whole


def test_save_pretrained_writes_whole_weights(ranks: Ranks, tmp_path: Path) -> None:
    whole = ranks(_saved, str(tmp_path))[0]
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert all(torch.equal(parameter, whole[name]) for name, parameter in plain.named_parameters())


def _steps(way: str) -> tuple[list[torch.Tensor], list[str | None], bool]:
    """Losses and parameters of steps of two micro-batches with experts of two groups, why they are not captured, and
    whether the update left experts as they were.

    Args:
        way: experts are gathered "after" the update, "beside" the next forward, or there in a "replay"; or a capture
            has "failed", after its forward."""
    reuse_meshes()
    config = DistributedConfig(fsdp_size=4, ep_size=2, ep_implementation="carpool")
    sizes = make_config("olmoe", TINY | MODELS["olmoe"])
    model: Any = build_model(sizes, distributed_config=config, dtype=torch.float32, seed=0, dense="zero1")
    carpool.hf.install(model)
    set_transport(model, "dedup")
    kept = replicate_dense(model, bfloat16=True)
    kept.writes_late = way != "after"
    with kept.shards():
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

    def compute(
        batches: Any, factor: torch.Tensor, _: int, sums: torch.Tensor, first: bool, last: bool, *rest: Any
    ) -> None:
        kept.begin(first, last)
        (batch,) = batches
        loss = model(input_ids=batch["input_ids"], labels=batch["input_ids"], use_cache=False).loss
        (loss * factor / dist.get_world_size()).backward()
        sums[0] += loss.detach()

    class Failing(Again):
        def record(self, work: Callable[[], None]) -> Callable[[], None]:
            before = [parameter.detach().clone() for parameter in model.parameters()]
            work()
            for parameter, value in zip(model.parameters(), before, strict=True):
                parameter.data.copy_(value)  # a capture writes nothing
            raise RuntimeError("no")

    told: list[str | None] = []
    layers, recorder = list(carpool.hf.rides(model).values()), Failing if way == "failed" else Again
    graphs = StepGraphs(model, layers, compute, told.append, way == "replay", recorder=recorder)
    generator = torch.Generator().manual_seed(dist.get_rank())
    experts, found, late = model.model.layers[1].mlp.experts, [], False
    for _ in range(EAGER_STEPS + 3):
        batches = [{"input_ids": torch.randint(2, 60, (2, 8), generator=generator)} for _ in range(2)]
        sums = graphs.run(batches, 0.5) if way in ("replay", "failed") else None
        if sums is None:
            sums = torch.zeros(2, dtype=torch.float64)
            for number, batch in enumerate(batches):
                compute([batch], torch.tensor(0.5), 2, sums, number == 0, number == 1)
        kept.finish()
        optimizer.step()
        optimizer.zero_grad()
        before = experts.down_proj.detach().clone()
        kept.write()
        late = torch.equal(before, experts.down_proj)
        found += [sums.clone(), *(full_tensor(shard).detach().clone() for shard in kept.shard_parameters)]
    with torch.no_grad():
        model(input_ids=torch.ones(1, 4, dtype=torch.long))
    return [*found, *(parameter.detach().clone() for parameter in model.parameters())], told, late


def test_shared_experts_are_gathered_beside_the_next_forward(ranks: Ranks) -> None:
    """The same bits, also where the first micro-batch of a step is a graph, or was to be one."""
    every = zip(*(ranks(_steps, way) for way in ("after", "beside", "replay", "failed")), strict=True)
    for (want, _, at_once), (ours, _, late), (again, told, _), (eager, why, _) in every:
        assert late and not at_once and told == [None] and why == ["RuntimeError: no"]
        for other in (ours, again, eager):
            assert len(other) == len(want) and all(map(torch.equal, other, want))


@on_ranks()
def test_adapters_that_come_too_late_are_refused() -> None:
    reuse_meshes()
    config = DistributedConfig(fsdp_size=4, ep_size=4, ep_implementation="carpool")
    model: Any = build_model(
        make_config("olmoe", TINY | MODELS["olmoe"]),
        distributed_config=config,
        dtype=torch.float32,
        seed=0,
        dense="zero1",
    )
    replicate_dense(model, bfloat16=False)
    with pytest.raises(ValueError, match="before non-expert parameters are made whole"):
        get_peft_model(model, LoraConfig(target_modules=["q_proj"]))


def _refused(rows: int, **settings: Any) -> str:
    reuse_meshes()
    config = make_config("qwen3_moe", TINY | MODELS["qwen3_moe"] | {"vocab_size": rows})
    distributed = DistributedConfig(**{"fsdp_size": 4, "ep_size": 4, "ep_implementation": "carpool"} | settings)
    try:
        build_model(
            config, distributed_config=distributed, dtype=torch.float32, seed=0, dense="fsdp" if rows % 2 else "zero1"
        )
    except ValueError as error:
        return str(error)
    return ""


def test_what_is_refused(ranks: Ranks) -> None:
    assert "is tied, and FSDP cannot shard its 61 rows evenly over 4 ranks" in ranks(_refused, 61)[0]
    assert "tensor parallelism divides non-expert parameters" in ranks(_refused, 60, fsdp_size=2, tp_size=2)[0]
