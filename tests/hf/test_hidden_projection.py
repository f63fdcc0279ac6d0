"""Hidden states that are projected before dispatch, in a model of Transformers: two ranks against one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from carpool.hf import rides, set_transport
from carpool.hf.architecture_changes import add_change, changes_of, row_size
from carpool.hf.build_model import build_model
from carpool.hf.seam.find_modules import experts_modules
from carpool.parallel.degrees import Degrees
from carpool.train.blueprint import meta_model
from carpool.train.config import load_config
from carpool.train.plan.division import distributed_config
from carpool.train.plan.dry_run import dry_run
from carpool.train.steps.training_objective import Objective
from tests.hf.meshes import reuse_meshes
from tests.hf.parity import full_gradients, gradient_errors, quiet
from tests.hf.tiny_models import discover, tiny_config
from tests.ranks import Ranks

SIZE, TOP_K = 8, 2


def config() -> Any:
    found = tiny_config(discover()["qwen3_moe"])
    add_change(found, "hidden_projection", {"size": SIZE})
    return found


def batch(rank: int, world: int) -> dict[str, torch.Tensor]:
    ids_BL = torch.randint(3, 40, (4, 7), generator=torch.Generator().manual_seed(0)).chunk(world)[rank]
    return {"input_ids": ids_BL, "labels": ids_BL}


def on_rank() -> Any:
    """Loss, gradients, and rows and bytes of all dispatches; of rank 0."""
    quiet()
    reuse_meshes()
    world, rank = dist.get_world_size(), dist.get_rank()
    parallel = distributed_config(Degrees(fsdp=world, ep=world), False)
    model = build_model(config(), distributed_config=parallel, dtype=torch.float32, seed=0)
    set_transport(model, "dedup")
    objective = Objective(model, top_k=TOP_K, aux_coef=0.01, dp_size=world, autocast=None)
    losses = objective.backward([batch(rank, world)])
    traffic = [own.stats.traffic for own in rides(model).values()]
    rows, sizes = (
        sum(sum(one["dispatch"]) for one in of) for of in ([t.rows for t in traffic], [t.bytes for t in traffic])
    )
    gradients = full_gradients(model)
    return None if rank else (losses.loss, gradients, rows, sizes)


def in_one_process() -> tuple[Any, float]:
    """The model and its loss, by Transformers' own experts between the projections."""
    model = build_model(config(), distributed_config=None, dtype=torch.float32, seed=0)
    for name in experts_modules(model):
        block, experts = model.get_submodule(name.rpartition(".")[0]), model.get_submodule(name)
        own = experts.forward
        experts.forward = lambda x, index, weight, block=block, own=own: block.ascend(
            own(block.descend(x), index, weight)
        )
    losses = Objective(model, top_k=TOP_K, aux_coef=0.01, dp_size=1, autocast=None).backward([batch(0, 1)])
    return model, losses.loss


def test_ranks_compute_what_one_process_does_and_send_short_rows(two_ranks: Ranks) -> None:
    loss, gradients, rows, sizes = two_ranks(on_rank)[0]
    reference, expected = in_one_process()
    errors, missing = gradient_errors(reference, gradients)
    assert not missing and max(errors.values()) < 1e-5 and abs(loss - expected) < 1e-5
    assert sum("scend.weight" in name for name in gradients) == 2 * len(experts_modules(reference))
    assert sizes == rows * (4 * SIZE + 8 * TOP_K) and reference.config.hidden_size > SIZE


def test_what_a_narrow_model_is() -> None:
    model = meta_model(config())
    assert row_size(model.config) == SIZE
    assert {SIZE} == {set(p.shape[1:]) & {SIZE} and SIZE for name in experts_modules(model)
                      for p in model.get_submodule(name).parameters()}  # fmt: skip
    plain = tiny_config(discover()["qwen3_moe"])
    assert not changes_of(plain) and row_size(plain) == plain.hidden_size


def test_a_checkpoint_is_not_made_another_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_text("")
    with pytest.raises(ValueError, match=r"hidden_projection.size makes another model"):
        load_config(None, [f"model.path={tmp_path}", "data.train=text.txt", "hidden_projection.size=8"])
    with pytest.raises(ValueError, match=r"hidden_projection.size = 64 makes no hidden state smaller, for .* is 64"):
        dry_run(load_config(None, ["model.config.hidden_size=64", "hidden_projection.size=64"]), gpu="h100")
    with pytest.raises(ValueError, match=r"tp_size = 2 with hidden_projection.size = 8: gradients of projections"):
        load_config(None, ["parallelism.tp_size=2", "hidden_projection.size=8"])
    with pytest.raises(ValueError, match=r"model.travel_size .*version 0.1: write hidden_projection.size = 8"):
        load_config(None, ["model.travel_size=8"])
