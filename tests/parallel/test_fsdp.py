"""What Carpool relies on in FSDP2 beyond its public interface (carpool/parallel/fsdp.py). If a test here fails after an
update of PyTorch, that file is what must follow; the schedules and layouts that use it come after."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from carpool.parallel import fsdp


@pytest.fixture
def alone() -> Iterator[Any]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def sharded(mesh: Any, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for layer in (*model, model):
        fully_shard(layer, mesh=mesh, **options)
    return model


def test_states_and_groups(alone: Any) -> None:
    model = sharded(alone)
    states = fsdp.states(model)
    assert len(states) == 3 and fsdp.states(nn.Linear(2, 2)) == [] == fsdp.groups_of(nn.Linear(2, 2))
    found = [one for state in states for group in fsdp.groups(state) for one in fsdp.parameters_of(group)]
    assert {(id(module), name) for module, name in found} == {(id(m), n) for m in model for n in ("weight", "bias")}
    assert fsdp.groups_of(model[0]) == fsdp.groups(model[0]._get_fsdp_state())
    assert all(fsdp.is_alone(group) for state in states for group in fsdp.groups(state))


def test_inside_a_forward_the_root_is_known(alone: Any) -> None:
    model, seen = sharded(alone), []
    model[0].register_forward_pre_hook(lambda module, _: seen.append(list(fsdp.states_in_forward(module))))
    model(torch.ones(2, 4))
    assert len(seen[0]) == 3
    assert [module for state in seen[0] for module in fsdp.root_modules(state)] == [model]
    assert list(fsdp.states_in_forward(nn.Linear(2, 2))) == []


def test_gradients_in_float16_are_divided_once(alone: Any) -> None:
    """Without a word FSDP divides by 16 what one rank has all rows of, if it is told to divide by 4."""
    found = []
    for told in (False, True):
        model = sharded(alone).half()
        for layer in model:
            layer.set_gradient_divide_factor(4.0)
        if told:
            fsdp.reduce_in_float32(model)
        model(torch.ones(2, 4, dtype=torch.float16)).sum().backward()
        found.append(model[1].bias.grad.full_tensor())
    assert torch.equal(found[0], torch.full((4,), 2 / 16).half()), "mended in PyTorch: reduce_in_float32 can go"
    assert torch.equal(found[1], torch.full((4,), 2 / 4).half())


def test_the_hooks_run_where_they_are_expected(alone: Any) -> None:
    """Each stand-in is called, once, in this order, and nothing is left of it afterwards."""
    model, told = sharded(alone), []
    replaced = fsdp.Replaced()

    def watch(owner: Any, name: str, what: str) -> None:
        before = getattr(owner, name)

        def called(*args: Any, **kwargs: Any) -> Any:
            told.append(what)
            return before(*args, **kwargs)

        replaced.replace(owner, name, called)

    for i, layer in enumerate(model):
        (group,) = fsdp.groups_of(layer)
        for name in ("pre_forward", "post_forward", "post_backward"):
            watch(group, name, f"{name} {i}")
    for state in fsdp.states(model):
        watch(state, fsdp.REGISTER_FINAL_CALLBACK, "register")
        watch(state, fsdp.FINAL_CALLBACK, "final")
    x = torch.ones(2, 4, requires_grad=True)
    model(x).sum().backward()
    once = [what for i, what in enumerate(told) if what not in told[:i]]
    assert once == ["pre_forward 0", "post_forward 0", "pre_forward 1", "post_forward 1", "register", "post_backward 1",
                    "post_backward 0", "final"]  # fmt: skip
    assert all(told.count(what) == 1 for what in once if what != "register")
    replaced.restore()
    told.clear()
    model(x).sum().backward()
    assert told == [] and all("post_backward" not in vars(fsdp.groups_of(layer)[0]) for layer in model)


def test_a_reduction_can_be_left_to_a_later_one(alone: Any) -> None:
    """Two forwards in flight, the backward of the first without a reduction: the sum of both."""
    model, x = sharded(alone), torch.randn(2, 4)
    model(x).sum().backward()
    want = [2 * p.grad.full_tensor() for p in model.parameters()]
    model.zero_grad()
    replaced = fsdp.Replaced()
    for layer in model:
        (group,) = fsdp.groups_of(layer)
        later = lambda *_, group=group, reduce=group.post_backward: fsdp.reduce_later(group, reduce)  # noqa: E731
        replaced.replace(group, "post_backward", later)
    model(x).sum().backward()
    assert not any(isinstance(p, DTensor) for p in model.parameters())  # neither reduced nor freed
    replaced.restore()
    model(x).sum().backward()
    assert all(torch.allclose(p.grad.full_tensor(), w) for p, w in zip(model.parameters(), want, strict=True))


def test_phases_have_these_names(alone: Any) -> None:
    (group,) = fsdp.groups_of(sharded(alone)[0])
    before = group._training_state
    for phase in ("forward", "pre_backward", "idle"):
        fsdp.set_phase(group, phase)
    assert group._training_state == before


def test_a_dtensor_like_another(alone: Any) -> None:
    weight = sharded(alone)[0].weight  # type: ignore[index]
    local = torch.randn(4, 4)
    made = fsdp.dtensor_like(local, weight.data)
    assert (made.placements, made.device_mesh, made.shape) == (weight.placements, weight.device_mesh, weight.shape)
    assert made.to_local().data_ptr() == local.data_ptr() and not made.requires_grad
