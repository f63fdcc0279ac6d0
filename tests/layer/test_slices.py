"""Layers whose experts are cut into slices: states, what is refused."""

from __future__ import annotations

import torch

import carpool
from carpool import ExpertLayout
from carpool.experts import ExpertWeights
from carpool.experts.slices import weights_of_slices
from carpool.routing.limit import LimitOptions
from tests.ranks import WORLD_SIZE, Ranks, mesh

H, F, E, K = 20, 12, 2, 2


def build(layout: ExpertLayout | None = None) -> carpool.MoE:
    torch.manual_seed(0)
    ep = mesh((WORLD_SIZE,), ("ep",)) if layout is not None else None
    return carpool.MoE(H, F, E, K, ep_mesh=ep, layout=layout, bias=True, dtype=torch.float64)


def test_weights_of_slices_save_nothing_for_their_gradients() -> None:
    """A schedule of stages computes them after the backward: layers that are computed again would be so once more."""
    home = ExpertWeights.of(torch.randn(shape, requires_grad=True) for shape in ((2, 6, 4), (2, 4, 3), (2, 6), (2, 4)))
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(saved.append, lambda packed: saved[0]):
        slots = weights_of_slices(home, torch.tensor([[True], [False]]))
    assert not saved
    sum(slot.sum() for slot in slots if slot is not None).backward()
    gradients = [None if weight is None else weight.grad for weight in home]
    assert gradients[3] is not None and gradients[3].tolist() == [[1.0] * 4, [0.0] * 4]
    assert all(g is not None and bool((g == 1).all()) for g in gradients[:3])


def states(layout: ExpertLayout, whole: dict[str, torch.Tensor]) -> bool:
    moe = build(layout)
    drawn_alike = all(torch.equal(v, whole[k]) for k, v in moe.logical_state_dict().items())
    other = {name: value + 1 if value.is_floating_point() else value for name, value in whole.items()}
    moe.load_logical_state_dict(other)
    return drawn_alike and all(torch.equal(v, other[k]) for k, v in moe.logical_state_dict().items())


def test_states_have_whole_experts(ranks: Ranks) -> None:
    """Whatever the slices, a seed gives the same experts; a state of one process goes into slices and back."""
    whole = build().logical_state_dict()
    uneven = ExpertLayout(((0, 5), (1, 2, 3), (4,), ()), slices=3)
    for layout in (ExpertLayout.sliced(E, 2, 2), uneven):
        assert ranks(states, layout, whole) == [True] * WORLD_SIZE


def refusals() -> list[str]:
    moe, said = build(ExpertLayout.sliced(E, 2, 2)), []
    for call in (
        lambda: moe.set_layout(ExpertLayout.sliced(E, 1, 4)),
        lambda: moe.set_limit(LimitOptions(limit_ranks=2)),
        lambda: build(ExpertLayout(((0, 1, 2, 3, 4), (5, 6), (7, 8), (9,)), slices=5)),
    ):
        try:
            call()
            said.append("")
        except ValueError as error:
            said.append(str(error))
    return said


def test_what_slices_cannot_do_is_refused(ranks: Ranks) -> None:
    for other, limit, size in ranks(refusals):
        assert "cuts each expert into 4 slices, the layer has 2: their number is part of the parameters' shape" in other
        assert "a token visits every slice of its experts, and MoE cuts each into 2" in limit
        assert "have a hidden dimension of 12, which 5 slices do not divide" in size and "1, 2, 3, 4, 6, 12" in size
