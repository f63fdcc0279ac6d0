"""Expert tensor parallelism of transformers' models: ep 2 x etp 2 on four ranks against one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.distributed import DistributedConfig

import carpool
from carpool.hf.build_model import build_model
from carpool.hf.seam.expert_rides import rides
from carpool.hf.seam.find_modules import experts_modules
from carpool.hf.seam.moved_experts import is_logical, logical_order, set_layout
from carpool.hf.sharding import SlicedExperts, keep_experts, replicate_dense
from carpool.hf.weights.model_config import make_config
from carpool.layout import ExpertLayout
from carpool.parallel.degrees import Degrees
from carpool.parallel.replicated import sharded_parameters
from carpool.train.checkpoints.manager import CheckpointManager
from carpool.train.checkpoints.reading import load
from carpool.train.plan.division import distributed_config
from carpool.train.steps.training_objective import Objective
from tests.hf.meshes import reuse_meshes
from tests.hf.parity import full_gradients, gradient_errors, quiet
from tests.hf.test_build import COMMON
from tests.hf.test_sequence_parallel import Case, batches, reference_of
from tests.hf.tiny_models import discover, tiny_config
from tests.ranks import Ranks

TINY: dict[str, dict[str, Any]] = {
    "olmoe": COMMON | {"num_experts": 6, "num_experts_per_tok": 3},
    # Fewer experts than ranks.
    "mixtral": COMMON | {"num_local_experts": 2, "num_experts_per_tok": 2, "head_dim": 8},
    # Transposed, interleaved, clamped, with biases.
    "gpt_oss": COMMON | {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8, "sliding_window": 8},
    "qwen3_moe": COMMON | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "head_dim": 8},
}
MODELS = ["gpt_oss", *(pytest.param(name, marks=pytest.mark.slow) for name in ("mixtral", "olmoe", "qwen3_moe"))]


def build(name: str, ep: int = 0, cut: int = 1, source: Path | None = None, seed: int = 0) -> PreTrainedModel:
    """A model over four ranks; ep = 0: on one process. Biases are drawn, too: they start as zeros."""
    reuse_meshes()
    spread = DistributedConfig(fsdp_size=4, ep_size=ep * cut, ep_implementation="carpool-dedup") if ep else None
    config = make_config(name, TINY[name])
    options: dict[str, Any] = {"distributed_config": spread, "dtype": torch.float32, "seed": seed, "slices": cut}
    return build_model(source or config, **options, attn_implementation="eager")


def whole(model: nn.Module, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors of a model in full, experts whole and in logical order."""
    logical = logical_order(model, tensors)
    return {name: (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone() for name, t in logical.items()}


def batch() -> torch.Tensor:
    return torch.randint(2, 64, (4, 10), generator=torch.Generator().manual_seed(0))


def gradients(model: PreTrainedModel, ids: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model.zero_grad()
    out = model(input_ids=ids, labels=ids)
    out.loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return out.logits.detach(), whole(model, grads)


def differences(name: str, folder: str) -> dict[str, float]:
    """How far a sliced model is from one process: its values, its outputs, every gradient."""
    rank, path = dist.get_rank(), Path(folder)
    reference = build(name)
    with torch.no_grad():
        for parameter in reference.parameters():  # biases and norms, too
            parameter += 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(parameter.numel()))
    if rank == 0:
        reference.save_pretrained(path)
    dist.barrier()
    drawn, other = build(name, 2, 2, seed=1), build(name, seed=1)
    values = whole(drawn, dict(drawn.named_parameters()))
    found = {"drawn": float(any(not torch.equal(v, other.get_parameter(n)) for n, v in values.items()))}
    model = build(name, 2, 2, source=path)
    values = whole(model, dict(model.named_parameters()))
    found["read"] = float(any(not torch.equal(v, reference.get_parameter(n)) for n, v in values.items()))
    ids = batch()
    logits, grads = gradients(model, ids[rank : rank + 1])
    expected, want = gradients(reference, ids)
    found["logits"] = float((logits - expected[rank]).abs().max() / expected.abs().max())
    assert grads.keys() == want.keys()
    most = max(float(g.abs().max()) for g in want.values())
    for key, grad in grads.items():
        found[key] = float((grad - want[key]).abs().max()) / max(float(want[key].abs().max()), 1e-3 * most)
    layer = next(iter(rides(model).values()))
    assert layer.layout == ExpertLayout.sliced(layer.num_experts, 2, 2) and not is_logical(model)
    assert all(p.to_local().numel() * 4 == p.numel() for p in layer.experts.parameters())
    return found


@pytest.mark.parametrize("name", MODELS)
def test_a_sliced_model_computes_what_one_process_computes(ranks: Ranks, name: str, tmp_path: Path) -> None:
    for found in ranks(differences, name, str(tmp_path)):
        assert found.pop("drawn") == found.pop("read") == 0
        assert len(found) > 10 and max(found.values()) < 1e-5, found


def steps(model: PreTrainedModel, optimizer: torch.optim.Optimizer, number: int) -> None:
    for _ in range(number):
        gradients(model, batch()[dist.get_rank() :][:1])
        optimizer.step()
    model.zero_grad()


def everything(model: PreTrainedModel, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    found = whole(model, dict(model.named_parameters()))
    for key in ("exp_avg", "exp_avg_sq"):
        states = {name: optimizer.state[p][key] for name, p in model.named_parameters() if p in optimizer.state}
        found |= {f"{name} {key}": value for name, value in whole(model, states).items()}
    return found


def resumed(name: str, folder: str, ways: list[tuple[int, int]]) -> list[bool]:
    """Train on one mesh, go on on the next ones: whether weights and moments are bitwise those that were saved."""
    equal = []
    before: dict[str, torch.Tensor] = {}
    for number, (ep, cut) in enumerate(ways):
        model = build(name, ep, cut, seed=number)
        set_layout(model, next(iter(rides(model).values())).layout)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        manager = CheckpointManager(Path(folder))
        if number:
            load(manager.latest(), model, optimizer)
            now = everything(model, optimizer)
            equal += [now.keys() == before.keys() and all(torch.equal(now[n], before[n]) for n in now)]
        steps(model, optimizer, 1)
        before = everything(model, optimizer)
        manager.save(number + 1, model, optimizer, {})
        # What `save_pretrained` would write.
        state = model.state_dict()
        equal += [all(state[n].shape == before[n].shape for n in state if n in before)]
    return equal


@pytest.mark.parametrize(
    "ways",
    [[(4, 1), (2, 2)], pytest.param([(4, 1), (2, 2), (1, 4), (1, 2), (4, 1)], marks=pytest.mark.slow)],
    ids=["once", "often"],
)
def test_checkpoints_go_from_whole_experts_to_slices(ranks: Ranks, tmp_path: Path, ways: list[tuple[int, int]]) -> None:
    assert ranks(resumed, "gpt_oss", str(tmp_path / "a"), ways) == [[True] * (2 * len(ways) - 1)] * 4


@pytest.mark.slow
def test_fewer_experts_than_ranks_are_saved(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(resumed, "mixtral", str(tmp_path), [(2, 2), (1, 2), (1, 4)]) == [[True] * 5] * 4


def test_what_cannot_be_cut_is_refused() -> None:
    model = build("qwen3_moe")
    modules = experts_modules(model)
    with pytest.raises(ValueError, match="have a hidden dimension of 12, which 8 slices do not divide"):
        SlicedExperts(model, modules, 8, 8)
    own = model.get_submodule(next(iter(modules)))
    own._apply_gate = lambda h: h  # type: ignore[assignment]
    with pytest.raises(
        ValueError, match=r"Qwen3MoeExperts \(model.layers.0.mlp.experts\) computes its experts by a fu"
    ):
        SlicedExperts(model, modules, 2, 2)


# --------------------------------------------------------------------------------------------------------------------
# Experts that the ranks do not divide: loss and every gradient are those of one process.


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
