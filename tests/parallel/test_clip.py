"""Gradients of all ranks: their norm, clipping, hooks, and those that are used in the backward (the bits of a regular
step, the same norm, and hardly any gradient at a time)."""

from __future__ import annotations

import gc
import math
import weakref
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from carpool.optim import AdamW
from carpool.optim import in_backward as consumed
from carpool.optim.clip import clip_factor, clip_grad_norm, grad_norm
from carpool.optim.in_backward import ConsumedGradients
from carpool.parallel.replicated import on_gradient
from tests.no_waits import no_waits
from tests.ranks import Ranks, mesh, on_ranks

# What FSDP2 gives experts that are split over ep first and over efsdp second.
EXPERTS = (_StridedShard(0, split_factor=2), Shard(0))


def _layouts() -> dict[str, tuple[DeviceMesh | None, tuple[Any, ...]]]:
    """One parameter of every kind that a model on 4 ranks has: its mesh and placements, None for a plain tensor."""
    dense, expert = mesh((4,), ("fsdp",)), mesh((2, 2), ("efsdp", "ep"))
    return {
        "dense": (dense, (Shard(0),)),
        "uneven": (dense, (Shard(0),)),
        "empty_on_most_ranks": (dense, (Shard(0),)),
        "experts": (expert, EXPERTS),
        "experts_uneven": (expert, EXPERTS),
        "experts_ep_only": (expert["ep"], (Shard(0),)),
        "hsdp": (mesh((2, 2), ("dp_replicate", "fsdp")), (Replicate(), Shard(0))),
        "replicated_dtensor": (dense, (Replicate(),)),
        "plain": (None, ()),
        "frozen": (dense, (Shard(0),)),
    }


SHAPES = {
    "dense": (8, 3),
    "uneven": (7, 5),
    "empty_on_most_ranks": (1, 9),
    "experts": (8, 3, 2),
    "experts_uneven": (6, 3, 2),
    "experts_ep_only": (4, 5),
    "hsdp": (6, 4),
    "replicated_dtensor": (3, 3),
    "plain": (11,),
    "frozen": (8, 2),
}


def _full_grads(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Gradients of very different size, so that counting any of them wrongly shows."""
    generator = torch.Generator().manual_seed(7)
    return {
        name: (torch.randn(shape, generator=generator, dtype=torch.float64) * 3.0**i).to(dtype)
        for i, (name, shape) in enumerate(SHAPES.items())
        if name != "frozen"
    }


def _shard(full: torch.Tensor, device_mesh: DeviceMesh, placements: tuple[Any, ...]) -> DTensor:
    if placements != EXPERTS:
        return distribute_tensor(full, device_mesh, placements, src_data_rank=None)
    # Written out by hand: rank (f, e) holds block f of the block e of the rows.
    f, e = device_mesh.get_coordinate() or (0, 0)
    ours = full.chunk(2)[e].split(math.ceil(len(full) / 4))[f]
    return DTensor.from_local(
        ours.contiguous(), device_mesh, placements, run_check=False, shape=full.shape, stride=full.stride()
    )


def _parameters(dtype: torch.dtype) -> dict[str, torch.nn.Parameter]:
    parameters, grads = {}, _full_grads(dtype)
    for name, (device_mesh, placements) in _layouts().items():
        full = torch.zeros(SHAPES[name], dtype=dtype)
        parameter = torch.nn.Parameter(full if device_mesh is None else _shard(full, device_mesh, placements))
        if name in grads:
            parameter.grad = grads[name] if device_mesh is None else _shard(grads[name], device_mesh, placements)
        parameters[name] = parameter
    return parameters


def _clip(dtype: torch.dtype, max_norm: float) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The norm, and the clipped gradients in full."""
    parameters = _parameters(dtype)
    norm = clip_grad_norm(parameters.values(), max_norm)
    again = clip_grad_norm(_parameters(dtype).values(), max_norm)
    assert norm.equal(again), "two runs must give the same bits"
    assert parameters["frozen"].grad is None
    grads = {n: p.grad for n, p in parameters.items() if p.grad is not None}
    return norm, {n: g.full_tensor() if isinstance(g, DTensor) else g for n, g in grads.items()}


@pytest.mark.parametrize(
    ("dtype", "rtol"), [(torch.float32, 1e-6), (torch.float64, 1e-12), (torch.bfloat16, 1e-6)], ids=str
)
def test_equals_the_single_process_norm(ranks: Ranks, dtype: torch.dtype, rtol: float) -> None:
    full = _full_grads(dtype)
    expected_norm = torch.cat([g.double().flatten() for g in full.values()]).norm()
    max_norm = float(expected_norm) / 8
    coefficient = max_norm / (expected_norm + 1e-6)
    for norm, grads in ranks(_clip, dtype, max_norm):
        assert norm.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        torch.testing.assert_close(norm.double(), expected_norm, rtol=rtol, atol=0.0)
        assert grads.keys() == full.keys()
        for name, grad in grads.items():
            tolerance = 1e-2 if dtype == torch.bfloat16 else rtol * 10
            torch.testing.assert_close(
                grad.double(), full[name].double() * coefficient, rtol=tolerance, atol=0.0, msg=name
            )


@on_ranks()
def test_each_kind_of_parameter_counts_once() -> None:
    """Alone, so that no large parameter hides a small one that is counted wrongly."""
    parameters = _parameters(torch.float64)
    for name, grad in _full_grads(torch.float64).items():
        norm = clip_grad_norm([parameters[name]], math.inf)
        torch.testing.assert_close(norm, grad.norm(), rtol=1e-12, atol=0.0, msg=name)


def test_a_small_norm_leaves_gradients_alone(ranks: Ranks) -> None:
    full = _full_grads(torch.float32)
    for max_norm in (1e9, math.inf):
        for _, grads in ranks(_clip, torch.float32, max_norm):
            assert all(grads[name].equal(full[name]) for name in full)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@on_ranks()
def test_a_norm_that_is_not_finite_is_returned_and_nothing_is_scaled(bad: float) -> None:
    """One element on one rank is enough, and all ranks learn of it."""
    parameters = _parameters(torch.float32)
    grad = parameters["experts"].grad
    assert isinstance(grad, DTensor)
    if dist.get_rank() == 2:
        grad.to_local()[0, 0, 0] = bad
    before = _local_grads(parameters)
    assert not clip_grad_norm(parameters.values(), 1e-3).isfinite()
    after = _local_grads(parameters)
    assert all(after[name].equal(before[name]) for name in before)


def _local_grads(parameters: dict[str, torch.nn.Parameter]) -> dict[str, torch.Tensor]:
    """This rank's shards, with a number where there is none, so that they can be compared."""
    grads = {name: p.grad for name, p in parameters.items() if p.grad is not None}
    shards = {name: grad.to_local() if isinstance(grad, DTensor) else grad for name, grad in grads.items()}
    return {name: shard.nan_to_num(nan=123.0, posinf=456.0).clone() for name, shard in shards.items()}


@on_ranks()
def test_ranks_without_any_gradient_take_part() -> None:
    parameter = torch.nn.Parameter(distribute_tensor(torch.zeros(4, 2), mesh((4,), ("fsdp",)), [Shard(0)]))
    if dist.get_rank() == 1:
        local = torch.tensor([[3.0, 4.0]])
        parameter.grad = DTensor.from_local(local, mesh((4,), ("fsdp",)), [Shard(0)], run_check=False)
    assert clip_grad_norm([parameter], 1.0).item() == 5.0


def test_one_process_agrees_with_torch() -> None:
    torch.manual_seed(0)
    ours = torch.nn.Linear(5, 3)
    ours(torch.randn(4, 5)).square().sum().backward()
    theirs = {name: p.grad.clone() for name, p in ours.named_parameters() if p.grad is not None}
    reference = [torch.nn.Parameter(torch.zeros_like(grad)) for grad in theirs.values()]
    for parameter, grad in zip(reference, theirs.values(), strict=True):
        parameter.grad = grad
    expected = torch.nn.utils.clip_grad_norm_(reference, 0.5)
    # A tied weight is passed twice; it is one parameter.
    norm = clip_grad_norm([*ours.parameters(), ours.weight], 0.5)
    torch.testing.assert_close(norm, expected)
    for parameter, wanted in zip(ours.parameters(), reference, strict=True):
        torch.testing.assert_close(parameter.grad, wanted.grad)


@pytest.mark.parametrize("max_norm", [0.0, -1.0, math.nan])
def test_a_norm_to_clip_by_is_positive(max_norm: float) -> None:
    with pytest.raises(ValueError, match="max_norm"):
        clip_grad_norm([torch.nn.Parameter(torch.zeros(1))], max_norm)


@pytest.mark.gpu
def test_no_host_sync_on_cuda() -> None:
    parameters = [torch.nn.Parameter(torch.zeros(n, device="cuda")) for n in (3, 5)]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    with no_waits():
        norm = clip_grad_norm(parameters, 1.0)
    assert norm.item() == pytest.approx(math.sqrt(8))


class _Layers(nn.Module):
    """Four layers and one that no forward uses; counts the gradients that are there in each step of the backward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(40, 40) for _ in range(4))
        self.unused = nn.Linear(3, 3)
        self.most = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
            x.register_hook(self._look)
        return x.square().mean()

    def _look(self, _: torch.Tensor) -> None:
        self.most = max(self.most, sum(p.grad is not None for p in self.parameters()))


def _data(step: int) -> torch.Tensor:
    return torch.randn(5, 40, generator=torch.Generator().manual_seed(step))


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("least", [1, 10**9])
def test_it_is_a_regular_step(least: int, offload: bool) -> None:
    right, found = _Layers(), _Layers()
    theirs = AdamW(right.parameters(), lr=1e-2, moments="bfloat16")
    ours = AdamW(found.parameters(), lr=1e-2, moments="bfloat16", offload=offload)
    with mock.patch.object(consumed, "LEAST_ELEMENTS", least):
        gradients = ConsumedGradients(found, ours)
        for step in range(3):
            right(_data(step)).backward()
            norm = grad_norm(right.parameters())
            theirs.step()
            theirs.zero_grad()
            loss = found(_data(step))
            gradients.begin(torch.isfinite(loss))
            loss.backward()
            torch.testing.assert_close(gradients.finish(), norm)
            assert all(p.grad is None for p in found.parameters())
    assert all(torch.equal(p, q) for p, q in zip(found.parameters(), right.parameters(), strict=True))
    for p, q in zip(found.parameters(), right.parameters(), strict=True):
        assert all(torch.equal(ours.state[p][name], value) for name, value in theirs.state[q].items())
    assert right.most == 6 and found.most == (0 if least == 1 else 6)


def test_it_clips_by_the_norm_of_the_step_before() -> None:
    right, found = _Layers(), _Layers()
    theirs, ours = AdamW(right.parameters(), lr=1e-2), AdamW(found.parameters(), lr=1e-2)
    gradients, norm, clipped = ConsumedGradients(found, ours, max_norm=0.01), torch.zeros(()), 0
    for step in range(4):
        right(_data(step)).backward()
        factor = clip_factor(norm, 0.01)
        clipped += bool(factor < 1)
        norm = grad_norm(right.parameters())
        theirs.step(factor=factor)
        theirs.zero_grad()
        # The second one is void, and its norm counts for nothing.
        for fine in (True, False):
            loss = found(_data(step))
            gradients.begin(torch.tensor(fine))
            loss.backward()
            gradients.finish()
    assert clipped == 3
    # Their norms are summed in other orders.
    for p, q in zip(found.parameters(), right.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-7)


def test_what_may_not_be_learned_from_changes_nothing_and_can_be_repeated() -> None:
    model = _Layers()
    optimizer = AdamW(model.parameters(), lr=1e-2)
    gradients = ConsumedGradients(model, optimizer)
    before = [p.detach().clone() for p in model.parameters()]
    for fine in (False, True):
        loss = model(_data(0))
        gradients.begin(torch.tensor(fine))
        loss.backward()
        gradients.finish()
        same = [torch.equal(p, q) for p, q in zip(model.layers.parameters(), before, strict=False)]
        assert all(same) if not fine else not any(same)
    assert optimizer.state[model.layers[0].weight]["step"] == 1


def test_other_backwards_keep_their_gradients() -> None:
    model = _Layers()
    ConsumedGradients(model, AdamW(model.parameters()))
    before = model.layers[0].weight.detach().clone()
    model(_data(0)).backward()
    assert model.layers[0].weight.grad is not None and torch.equal(model.layers[0].weight, before)


class Owner:
    """Holds a parameter, which has a hook that calls it."""

    def __init__(self) -> None:
        # A view, as parameters of flat buffers are.
        self.parameter = nn.Parameter(torch.zeros(8).view(2, 4))
        self.came: list[int] = []
        on_gradient(self.parameter, self.take, 7)

    def take(self, number: int, parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        self.came.append(number)


def test_a_hook_is_called_and_keeps_nothing() -> None:
    owner = Owner()
    for _ in range(2):
        owner.parameter.sum().backward()
    assert owner.came == [7, 7]
    held = weakref.ref(owner)
    del owner
    gc.collect()
    assert held() is None
