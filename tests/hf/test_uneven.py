"""Experts that the ranks do not divide: loss and every gradient are those of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import carpool
from carpool.hf.build_model import build_model
from carpool.hf.sharding import keep_experts, replicate_dense
from carpool.parallel.degrees import Degrees
from carpool.parallel.replicated import sharded_parameters
from carpool.train.plan.division import distributed_config
from carpool.train.steps.objective import Objective
from tests.hf.meshes import reuse_meshes
from tests.hf.parity import full_gradients, gradient_errors, quiet
from tests.hf.test_sequence_parallel import Case, batches, reference_of
from tests.hf.tiny_models import discover, tiny_config
from tests.ranks import Ranks

EXPERTS = (("num_experts", 7),)


def on_rank(dense: str) -> Any:
    """Sizes of homes, loss and gradients; of rank 0."""
    quiet()
    reuse_meshes()
    world, rank = dist.get_world_size(), dist.get_rank()
    degrees = Degrees(fsdp=world, ep=world)
    config = tiny_config(discover()["qwen3_moe"], **dict(EXPERTS))
    settings: dict[str, Any] = {"dtype": torch.float32, "seed": 0, "dense": dense}
    model = build_model(config, distributed_config=distributed_config(degrees, False), **settings)
    kept = replicate_dense(model, False) if dense == "zero1" else keep_experts(model)
    assert kept is not None
    objective = Objective(model, top_k=2, aux_coef=0.0, dp_size=world, autocast=None)
    losses = objective.backward(batches(Case(), rank, world))
    homes = [len(rank) for rank in next(iter(carpool.hf.rides(model).values())).layout.homes]
    kept.finish()
    with sharded_parameters(model):
        gradients = full_gradients(model)
    return None if rank else (homes, losses.loss, gradients)


@pytest.mark.parametrize("dense", ["fsdp", pytest.param("zero1", marks=pytest.mark.slow)])
def test_gradients(two_ranks: Ranks, dense: str) -> None:
    homes, loss, gradients = two_ranks(on_rank, dense)[0]
    reference, expected = reference_of(Case(config=EXPERTS, on=False))
    assert homes == [4, 3] and abs(loss - expected.loss) < 1e-5
    errors, missing = gradient_errors(reference, gradients)
    assert not missing and max(errors.values()) < 1e-5, errors
