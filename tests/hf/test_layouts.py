"""Experts of transformers models that move, layer by layer, and replicas that are filled once for several forwards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from transformers import PreTrainedModel
from transformers.distributed import DistributedConfig

import carpool.hf
from carpool.hf.layouts import current_layouts, is_logical, logical_order, slots_kept
from carpool.layout import ExpertLayout
from carpool.layouts import Layouts
from carpool.parallel import migrate
from tests.hf.meshes import reuse_meshes
from tests.hf.parity import IMPLEMENTATION, full_gradients, quiet
from tests.hf.tiny_models import discover, tiny_batch, tiny_model
from tests.ranks import Ranks

EP4, EFSDP, HSDP = {"fsdp_size": 4, "ep_size": 4}, {"fsdp_size": 4, "ep_size": 2}, {"dp_replicate_size": 2}
HSDP |= {"fsdp_size": 2, "ep_size": 2}
NAMES = ("model.layers.0.mlp.experts", "model.layers.1.mlp.experts")
ORDERS = ([5, 2, 7, 0, 1, 6, 3, 4], [0, 1, 4, 6, 2, 3, 7, 5])


def _model(path: str, sizes: dict[str, int]) -> PreTrainedModel:
    quiet()
    if dist.get_rank() == 0:
        tiny_model(discover()["olmoe"]).save_pretrained(path)
    dist.barrier()
    reuse_meshes()
    config = DistributedConfig(ep_implementation=IMPLEMENTATION, **sizes)
    cls = discover()["olmoe"].model_class
    return cls.from_pretrained(path, distributed_config=config, dtype=torch.float32).train()


def _own(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    return {name: value[dist.get_rank() :][:1] for name, value in tiny_batch(model).items()}


def _train(path: str, sizes: dict[str, int], moves: bool) -> tuple[list[float], list[torch.Tensor], int, bool]:
    """Losses, the experts' parameters in logical order at the end, bytes moved, and whether that was as it should."""
    model = _model(path, sizes)
    # Meshes differ, and one fused update over two of them is refused.
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, foreach=False)
    ranks = sizes["ep_size"]
    layouts = {
        1: Layouts({name: ExpertLayout.permuted(o, ranks) for name, o in zip(NAMES, ORDERS, strict=True)}),
        3: ExpertLayout.permuted(ORDERS[1], ranks).with_replicas([(0, ranks - 1), (5, 0)]),
    }
    losses, moved, right = [], 0, True
    for step in range(5):
        if moves and step in layouts:
            before = current_layouts(model)
            done = carpool.hf.set_layout(model, layouts[step], optimizer)
            after = current_layouts(model)
            moved += done.bytes
            right &= done.layers == sum(before[name] != after[name] for name in NAMES) and not is_logical(model)
        loss = model(**_own(model)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(float(total))
    experts = {name: p.detach() for name, p in model.named_parameters() if ".experts." in name}
    logical = [p.full_tensor() for p in logical_order(model, experts).values()]
    return losses, logical, moved, right


def _both(path: str, sizes: dict[str, int], broken: bool) -> tuple[float, float, int, bool]:
    stayed, weights, _, _ = _train(path, sizes, False)

    def weights_alone(parameter: Any, optimizer: Any) -> Iterator[Any]:
        yield None, "", parameter.data

    with mock.patch.object(migrate, "_tensors", weights_alone if broken else migrate._tensors):
        went, moved_weights, moved, right = _train(path, sizes, True)
    loss_error = max(abs(a - b) / abs(a) for a, b in zip(stayed, went, strict=True))
    weight_error = max(float((a - b).abs().max()) for a, b in zip(weights, moved_weights, strict=True))
    return loss_error, weight_error, moved, right


@pytest.mark.parametrize("sizes", [EP4, EFSDP, HSDP], ids=["ep4", "ep2 efsdp2", "hsdp"])
def test_training_goes_on_as_if_nobody_had_moved(ranks: Ranks, tmp_path: Path, sizes: dict[str, int]) -> None:
    """Two layers, another layout for each, then one with replicas for both: AdamW's moments move along."""
    for loss_error, weight_error, moved, right in ranks(_both, str(tmp_path), sizes, False):
        assert loss_error < 2e-6 and weight_error < 1e-4
        assert moved > 0 and right


def test_moments_that_stay_behind_show(ranks: Ranks, tmp_path: Path) -> None:
    assert all(loss_error > 2e-5 for loss_error, *_ in ranks(_both, str(tmp_path), EP4, True))


def _kept(path: str) -> tuple[bool, list[int], list[int]]:
    """Two micro-batches with checkpointed layers, replicas filled each time and once: equal gradients?, bytes sent."""
    model = _model(path, EP4)
    model.activation_checkpointing_enable({"use_reentrant": False, "context_fn": carpool.keep_rides})
    layout = ExpertLayout.permuted(ORDERS[0], 4).with_replicas([(5, 3), (5, 2), (4, 0)])
    carpool.hf.set_layout(model, layout)
    gradients, filled, summed = [], [], []
    for keep in (nullcontext(), slots_kept(model)):
        for own in carpool.hf.rides(model).values():
            own.filler.bytes_filled = own.filler.bytes_summed = 0
        with keep:
            for _ in range(2):
                model(**_own(model)).loss.backward()
        gradients.append(full_gradients(model))
        model.zero_grad(set_to_none=True)
        filled.append(sum(own.filler.bytes_filled for own in carpool.hf.rides(model).values()))
        summed.append(sum(own.filler.bytes_summed for own in carpool.hf.rides(model).values()))
    again, once = gradients
    equal = all(g is once[name] or torch.equal(g, once[name]) for name, g in again.items())  # type: ignore[arg-type]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01)
    before = float(model(**_own(model)).loss)
    with slots_kept(model):  # a new step: what was kept before is gone
        equal &= float(model(**_own(model)).loss) == before
    return equal, filled, summed


def test_replicas_are_filled_once_a_step(ranks: Ranks, tmp_path: Path) -> None:
    results = ranks(_kept, str(tmp_path))
    assert all(equal for equal, _, _ in results)
    # Two forwards and two that checkpointing repeats, against one; gradients go home in both backwards.
    assert sum(filled[0] for _, filled, _ in results) == 4 * sum(filled[1] for _, filled, _ in results) > 0
    for _, _, (again, once) in results:
        assert again == once


def _refused(path: str) -> list[str]:
    model, found = _model(path, EP4), []
    good = ExpertLayout.permuted(ORDERS[0], 4)
    for layouts in (
        Layouts({NAMES[0]: good}, source="some/layout.json"),
        Layouts({NAMES[0]: good, NAMES[1]: good, "model.layers.7.mlp.experts": good}),
        Layouts({NAMES[0]: good, NAMES[1]: ExpertLayout(((0, 1, 2), (3,), (4, 5), (6, 7)))}),
    ):
        with pytest.raises(ValueError) as error:
            carpool.hf.set_layout(model, layouts)
        found.append(str(error.value))
    assert is_logical(model)
    return found


def test_layouts_that_do_not_fit_are_refused_with_the_layer(ranks: Ranks, tmp_path: Path) -> None:
    for missing, unknown, uneven in ranks(_refused, str(tmp_path)):
        assert "some/layout.json" in missing and NAMES[1] in missing
        assert "model.layers.7.mlp.experts" in unknown
        assert NAMES[1] in uneven and "equally many" in uneven
