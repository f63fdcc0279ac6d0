"""`carpool.hf.set_experts`: what experts keep and how their stages are computed, in a model of transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from carpool import KeptPolicies
from carpool.experts import Choices
from carpool.hf import install, rides, set_experts, set_kept
from tests.hf.parity import quiet
from tests.hf.tiny_models import discover, tiny_batch, tiny_model


def gradients(model: nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    model.zero_grad(set_to_none=True)
    model(**batch).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def saved_bytes(model: nn.Module, batch: dict[str, torch.Tensor]) -> int:
    """Bytes that autograd keeps for the backward, each storage once."""
    kept: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(**batch)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


@pytest.mark.parametrize("folder", ["olmoe", "gpt_oss"])
def test_recompute_gives_the_same_bits_from_less_memory(folder: str) -> None:
    quiet()
    model: Any = tiny_model(discover()[folder]).train()
    install(model)
    batch = tiny_batch(model)
    kept, size = gradients(model, batch), saved_bytes(model, batch)
    set_kept(model, KeptPolicies(hidden="recompute"))
    assert all(own.compute.recompute for own in rides(model).values())  # type: ignore[union-attr]
    again = gradients(model, batch)
    assert list(again) == list(kept) and any("experts" in name for name in kept)
    for name, gradient in kept.items():
        assert torch.equal(again[name], gradient), name
    # Per layer the pre-activation of each pair of a token and an expert, in float32.
    own = next(iter(rides(model).values()))
    assert own.routing is not None
    pairs, width = own.routing.expert_TK.numel(), own.experts.gate_up_proj.shape[1 if folder == "olmoe" else 2]
    assert size - saved_bytes(model, batch) == 4 * pairs * width * len(rides(model))


def test_choices_reach_every_layer() -> None:
    model: Any = tiny_model(discover()["olmoe"]).train()
    install(model)
    choices = Choices(up="flat", ddown="square")
    set_experts(model, "grouped", choices=choices)
    assert [own.compute.choices for own in rides(model).values()] == [choices] * len(rides(model))  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="experts='fp8' has no option 'choices'"):
        set_experts(model, "fp8", choices=choices)
    set_experts(model, "reference")
    with pytest.raises(ValueError, match="experts='reference' has no option 'recompute'"):
        set_kept(model, KeptPolicies(hidden="recompute"))
    assert all(own.policies == KeptPolicies() for own in rides(model).values())


def test_own_forwards_have_no_stages_and_cannot_recompute() -> None:
    model: Any = tiny_model(discover()["olmoe"]).train()
    install(model)
    own = next(iter(rides(model).values()))
    own.function = own.compute = None  # as of experts that only their own forward knows
    own.set_experts("auto", Choices.all("flat"))
    assert own.compute is None
    with pytest.raises(ValueError, match="runs its own forward, which keeps what it needs: keep rows and hidden"):
        own.set_kept(KeptPolicies(hidden="recompute"))
