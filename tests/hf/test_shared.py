"""Shared experts beside the ride: when they compute, and that answers stay what they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import carpool
import carpool.hf
from carpool.families import Family, family_of_class
from carpool.hf.seam.find_modules import experts_modules
from carpool.hf.seam.shared import overlap_shared_experts, shared_experts
from carpool.ride.schedule import Schedule
from carpool.ride.two_batch import TwoBatch
from carpool.transport import Pending
from carpool.transport.dedup import Dedup
from tests.hf.parity import BOUND, EXCEPTIONS, full_gradients, relative_error
from tests.hf.test_behaviours import _model, _own, _save
from tests.hf.tiny_models import discover, tiny_batch, tiny_model
from tests.ranks import mesh, on_ranks


def _answer(model: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor | None]]:
    model.zero_grad(set_to_none=True)
    loss = model(**_own(model)).loss
    loss.backward()
    return loss.detach(), full_gradients(model)


@pytest.mark.parametrize(
    ("folder", "how"),
    [
        *((folder, "") for folder in ("deepseek_v3", "nemotron_h", "aria", "qwen2_moe")),
        pytest.param("deepseek_v3", "with reentry", marks=pytest.mark.slow),
        *(("deepseek_v3", how) for how in ("without", "rides kept")),
    ],
)
@on_ranks("two_ranks")
def test_answers_are_those_of_shared_experts_after_the_ride(path: str, folder: str, how: str) -> None:
    _save(folder, path)
    model = _model(folder, path, "carpool-dedup")
    if how:
        keep = {"context_fn": carpool.keep_rides} if how == "rides kept" else {}
        model.activation_checkpointing_enable({"use_reentrant": how == "with reentry", **keep})
    loss, gradients = _answer(model)
    assert bool(overlap_shared_experts(model, True)) == (folder != "qwen2_moe")
    beside, ours = _answer(model)
    overlap_shared_experts(model, False)
    again, after = _answer(model)
    assert torch.equal(beside, loss) and torch.equal(again, loss)
    for name, gradient in gradients.items():
        assert gradient is None or torch.equal(gradient, after[name]), name
    # A key's bias has no gradient but rounding: see tests/hf/parity.py.
    least = 1e-3 * max(float(g.abs().max()) for g in gradients.values() if g is not None)
    for name, gradient in gradients.items():
        assert gradient is None or relative_error(ours[name], gradient, least) <= BOUND, name


class _Watched(Dedup):
    """Notes when rows are asked for and waited for."""

    def __init__(self, told: list[str], *args: Any) -> None:
        super().__init__(*args)
        self.told = told

    def dispatch(self, x_TH: torch.Tensor, route: Any) -> Any:
        return self._watch("dispatch", super().dispatch(x_TH, route))

    def combine(self, route: Any, partial_RH: torch.Tensor) -> Any:
        return self._watch("combine", super().combine(route, partial_RH))

    def dispatch_gradients(self, dy_TH: torch.Tensor, route: Any) -> Any:
        return self._watch("dispatch gradients", super().dispatch_gradients(dy_TH, route))

    def combine_gradients(self, route: Any, *gradients: torch.Tensor) -> Any:
        return self._watch("combine gradients", super().combine_gradients(route, *gradients))

    def _watch(self, what: str, pending: Any) -> Any:
        self.told.append(f"{what} asked")
        return Pending(lambda: (self.told.append(what), pending.wait())[1])


FORWARD = ["dispatch asked", "shared", "dispatch", "combine asked", "combine"]
BACKWARD = ["dispatch gradients asked", "dispatch gradients", "combine gradients asked", "shared backward",
            "combine gradients"]  # fmt: skip


def _told(module: nn.Module, own: Any, run: Any) -> list[str]:
    told: list[str] = []
    own.transport = _Watched(told, own.group, own.layout.slots_per_rank)
    first = next(child for child in module.modules() if isinstance(child, nn.Linear))
    first.register_forward_hook(lambda *_: told.append("shared"))
    first.register_full_backward_hook(lambda *_: told.append("shared backward"))
    run()
    return told


@on_ranks("two_ranks")
def test_when_a_models_shared_experts_compute(path: str) -> None:
    _save("deepseek_v3", path, num_hidden_layers=1)
    model = _model("deepseek_v3", path, "carpool-dedup")
    carpool.hf.set_schedule(model, Schedule("chunks"))
    ((name, own),) = carpool.hf.rides(model).items()
    block = model.get_submodule(name.rpartition(".")[0])
    assert _told(block.shared_experts, own, lambda: _answer(model)) == FORWARD + BACKWARD


@on_ranks("two_ranks")
def test_when_the_layers_shared_experts_compute() -> None:
    layer = carpool.MoE(16, 8, 8, 2, ep_mesh=mesh((2,), ("ep",))["ep"], transport="dedup", shared_intermediate_size=8)
    x = torch.randn(5, 16, requires_grad=True)
    assert layer.shared is not None
    assert _told(layer.shared, layer.core, lambda: layer(x).sum().backward()) == FORWARD + BACKWARD


@pytest.mark.parametrize("how", ["", "without", "rides kept"])
@on_ranks("two_ranks")
def test_two_halves_each_compute_theirs_once(path: str, how: str) -> None:
    _save("deepseek_v3", path)
    model = _model("deepseek_v3", path, "carpool-dedup")
    if how:
        keep = {"context_fn": carpool.keep_rides} if how == "rides kept" else {}
        model.activation_checkpointing_enable({"use_reentrant": False, **keep})
    carpool.hf.set_schedule(model, Schedule("two-batch"))
    calls: list[int] = []
    layers = carpool.hf.rides(model)
    for name in layers:
        shared = model.get_submodule(name.rpartition(".")[0]).shared_experts
        next(m for m in shared.modules() if isinstance(m, nn.Linear)).register_forward_hook(lambda *_: calls.append(1))
    batch = _own(model)
    TwoBatch(model).backward([lambda: model(**batch).loss] * 2)
    # A checkpoint that computes again stops as soon as it has what the ride saves.
    assert len(calls) == 2 * len(layers) * (2 if how else 1)
    assert not any(any(own.shared._early) for own in layers.values() if own.shared is not None)


def _calls_shared_experts_last(model: Any, block: Any) -> bool:
    """Watched: whether the block calls its routed experts, then its shared ones, on the rows that it is given."""
    shared = [
        getattr(block, name) for name in Family("").shared_experts if isinstance(getattr(block, name, None), nn.Module)
    ]
    if len(shared) != 1:
        return False
    told: list[tuple[str, int, int]] = []
    watched = {"block": block, "routed": block.experts, "shared": shared[0]}

    def watch(what: str) -> Any:
        return lambda _, args, kwargs: told.append((what, args[0].data_ptr(), len(args) + len(kwargs)))

    handles = [one.register_forward_pre_hook(watch(what), with_kwargs=True) for what, one in watched.items()]
    with torch.no_grad():
        model(**tiny_batch(model))
    for handle in handles:
        handle.remove()
    called = [what for what, *_ in told] == list(watched)
    return called and told[0][1] == told[2][1] and told[2][2] == 1


@pytest.mark.parametrize("folder", sorted(discover().keys() - EXCEPTIONS.keys()))
def test_the_blocks_of_all_models_are_known(folder: str) -> None:
    """A model that a later transformers adds, or changes, shows here whether its family is `shared_after_routed`."""
    model = tiny_model(discover()[folder]).eval()
    blocks = {type(b).__name__: b for b in (model.get_submodule(n.rpartition(".")[0]) for n in experts_modules(model))}
    for name, block in blocks.items():
        last = family_of_class(type(block)).shared_after_routed
        assert _calls_shared_experts_last(model, block) == last, name
        assert (shared_experts(block) is not None) == last


def test_a_forward_of_ones_own_is_left_alone() -> None:
    model: Any = tiny_model(discover()["deepseek_v3"])
    block = model.model.layers[0].mlp
    derived = type("Derived", (type(block),), {})
    block.__class__ = derived
    assert shared_experts(block) is not None  # as FSDP does
    block.__class__ = type("Derived", (derived,), {"forward": lambda self, x: x})
    assert shared_experts(block) is None
