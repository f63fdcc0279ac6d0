"""Experts of transformers models that move, layer by layer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import PreTrainedModel
from transformers.distributed import DistributedConfig

import carpool.hf
from carpool.hf.seam.moved_experts import is_logical
from carpool.layout import ExpertLayout
from carpool.layout.layouts import Layouts
from tests.hf.meshes import reuse_meshes
from tests.hf.parity import IMPLEMENTATION, quiet
from tests.hf.tiny_models import discover, tiny_batch, tiny_model
from tests.ranks import on_ranks

EP4, EFSDP = {"fsdp_size": 4, "ep_size": 4}, {"fsdp_size": 4, "ep_size": 2}
NAMES = ("model.layers.0.mlp.experts", "model.layers.1.mlp.experts")
ORDERS = ([5, 2, 7, 0, 1, 6, 3, 4], [0, 1, 4, 6, 2, 3, 7, 5])


def _model(path: str, sizes: dict[str, Any]) -> PreTrainedModel:
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


@on_ranks()
def test_layouts_that_do_not_fit_are_refused_with_the_layer(path: str) -> None:
    model, good = _model(path, EP4), ExpertLayout.permuted(ORDERS[0], 4)
    uneven = ExpertLayout(((0, 1, 2), (3,), (4, 5), (6, 7)))
    for layouts, parts in (
        (Layouts({NAMES[0]: good}, source="some/layout.json"), ("some/layout.json", NAMES[1])),
        (
            Layouts({NAMES[0]: good, NAMES[1]: good, "model.layers.7.mlp.experts": good}),
            ("model.layers.7.mlp.experts",),
        ),
        (Layouts({NAMES[0]: good, NAMES[1]: uneven}), (NAMES[1], "equally many")),
    ):
        with pytest.raises(ValueError) as error:
            carpool.hf.set_layout(model, layouts)
        assert all(part in str(error.value) for part in parts)
    assert is_logical(model)


@pytest.mark.parametrize("sizes", [EP4, EFSDP], ids=["ep4", "efsdp"])
@on_ranks()
def test_states_and_exports_are_in_logical_order(path: str, sizes: dict[str, int]) -> None:
    """Logits of the export, and of a model in another layout that loaded the state, are those of the model itself, and
    a state in memory is what it was."""
    model = _model(path, sizes)
    ranks = sizes["ep_size"]
    stayed = {name: p.full_tensor() for name, p in model.state_dict().items()}
    carpool.hf.set_layout(model, ExpertLayout.permuted(ORDERS[0], ranks))
    state = {name: value.clone() for name, value in model.state_dict().items()}
    assert all(torch.equal(state[name].full_tensor(), value) for name, value in stayed.items())
    with torch.no_grad():
        want = model(**_own(model)).logits
    model.save_pretrained(f"{path}/moved")
    dist.barrier()
    alone = discover()["olmoe"].model_class.from_pretrained(f"{path}/moved", dtype=torch.float32)
    with torch.no_grad():
        exported = alone(**_own(alone)).logits
    carpool.hf.set_layout(model, ExpertLayout.permuted(ORDERS[1], ranks))
    for parameter in model.parameters():
        parameter.data.zero_()
    model.load_state_dict(state)
    with torch.no_grad():
        loaded = model(**_own(model)).logits
    carpool.hf.set_layout(model, ExpertLayout.contiguous(8, ranks))
    assert all(torch.equal(p.full_tensor(), stayed[name]) for name, p in model.state_dict().items())
    assert (exported - want).abs().max() < 1e-5 and (loaded - want).abs().max() < 1e-5


@on_ranks()
def test_a_layout_before_the_backward_is_refused(path: str) -> None:
    model, layout = _model(path, EP4), ExpertLayout.permuted(ORDERS[0], 4)
    loss = model(**_own(model)).loss
    with pytest.raises(ValueError, match="wait for their backward"):
        carpool.hf.set_layout(model, layout)
    loss.backward()
    model.zero_grad()
    carpool.hf.set_layout(model, layout)
