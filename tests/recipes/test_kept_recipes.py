"""Recipes of what is kept for the backward: each mechanism changes what autograd saves, and not what is computed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import carpool
from carpool import ActivationPolicies
from carpool.activations import Offloader
from carpool.recipes import read
from carpool.train.build.assemble import make_optimizer
from carpool_systems.resolve import resolve

H, F, E, K, TOKENS = 32, 24, 8, 2, 40


def layer(recipe: str, policies: ActivationPolicies | None = None) -> carpool.MoE:
    config = resolve(read(recipe))
    torch.manual_seed(0)
    moe = carpool.MoE(H, F, E, K, experts=config.moe.experts, schedule=config.moe.asked_schedule(), transport="dedup")
    moe.set_activation_policies(config.memory.activation_policies if policies is None else policies, Offloader())
    return moe


def train(moe: carpool.MoE) -> tuple[list[torch.Tensor], int]:
    """(output and gradients, bytes that autograd saves besides parameters)."""
    found: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor.detach()

    x = torch.randn(TOKENS, H, generator=torch.Generator().manual_seed(1)).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = moe(x)
    y.square().sum().backward()
    given = {tensor.untyped_storage().data_ptr() for tensor in (x, *moe.parameters())}
    gradients = [tensor.grad for tensor in (x, *moe.parameters()) if tensor.grad is not None]
    return [y.detach(), *gradients], sum(size for where, size in found.items() if where not in given)


@pytest.mark.parametrize(
    ("recipe", "gone"),
    # With alltoall (a row for each choice) and one rank, or one row for each token.
    [("mpipemoe", 4 * TOKENS * (K * 2 * F) + 4 * TOKENS * H), ("megascale-memory", 4 * TOKENS * H)],
)
def test_what_is_not_kept_is_not_saved_and_changes_nothing(recipe: str, gone: int) -> None:
    (kept, size), (got, less) = train(layer(recipe, ActivationPolicies())), train(layer(recipe))
    assert all(map(torch.equal, got, kept)) and len(got) == len(kept)
    assert size - less >= gone - 64, "but for tickets"


@pytest.mark.parametrize("recipe", ["megascale-memory", "megascale-moe", "deepseek-v3-memory"])
def test_activated_rows_are_never_kept(recipe: str) -> None:
    moe = layer(recipe, ActivationPolicies())
    sizes: list[tuple[int, ...]] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(tuple(t.shape)) or t.detach(), lambda t: t):
        moe(torch.randn(TOKENS, H, requires_grad=True))
    assert any(shape[-1:] == (2 * F,) for shape in sizes), "pre-activations are kept"
    assert not any(len(shape) == 2 and shape[-1] == F for shape in sizes)


def test_deepseek_v3_keeps_layers_inputs_and_moments_in_two_bytes() -> None:
    config = resolve(read("deepseek-v3-memory"))
    assert config.memory.policies["layer_activations"] == "recompute" and config.codec.dispatch == "fp8"
    net = torch.nn.Sequential(torch.nn.Linear(H, 4 * H), torch.nn.GELU(), torch.nn.Linear(4 * H, H)).bfloat16()
    x, saved = torch.randn(TOKENS, H, dtype=torch.bfloat16, requires_grad=True), []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor.nbytes)
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y: Any = checkpoint(net, x, use_reentrant=False, context_fn=carpool.keep_rides)
    assert saved == [x.nbytes], "a layer that is computed again keeps its input"
    y.sum().backward()
    optimizer = make_optimizer(net, config.training)
    optimizer.step()
    state = optimizer.state[next(net.parameters())]
    assert [value.dtype for name, value in state.items() if "avg" in name] == [torch.bfloat16] * 2
