"""Layers whose experts are cut into slices: degrees that change between steps, states, what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import carpool
from carpool import ExpertLayout
from carpool.experts import ExpertWeights
from carpool.replicas.slots import SlotFiller, fill_slots
from carpool.routing.limit import LimitOptions
from tests.ranks import WORLD_SIZE, Ranks, mesh

H, F, E, K = 20, 12, 2, 2


def build(layout: ExpertLayout | None = None, **options: Any) -> carpool.MoE:
    torch.manual_seed(0)
    ep = mesh((WORLD_SIZE,), ("ep",)) if layout is not None else None
    return carpool.MoE(H, F, E, K, ep_mesh=ep, layout=layout, bias=True, dtype=torch.float64, **options)


def train(degrees: tuple[int, ...]) -> dict[str, Any]:
    """Three steps of AdamW in each of these degrees; 2 experts on 4 ranks, so each rank is home to half of one."""
    home, rank = ExpertLayout.sliced(E, 2, 2), dist.get_rank()
    moe = build(home.with_degree(degrees[0]), transport="dedup")
    optimizer = torch.optim.AdamW(moe.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(rank)
    losses, rows, filled, moved = [], [], [], 0
    for degree in degrees:
        change = moe.set_layout(home.with_degree(degree), optimizer)
        moved += change.experts + change.bytes
        moe.stats(reset=True)
        for _ in range(3):
            x = torch.randn(7, H, generator=generator, dtype=torch.float64)
            loss = (moe(x) - x.roll(1, dims=1)).square().mean()
            loss.backward()
            carpool.reduce_gradients(moe, mesh((WORLD_SIZE,), ("ep",)))
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            total = loss.detach()
            dist.all_reduce(total)
            losses.append(float(total))
        rows.append((moe.stats().rows_dispatched, moe.stats().rows_remote))
        filled.append(moe.core.filler.bytes_filled)
    state = {name: value.numpy() for name, value in moe.logical_state_dict().items()}
    return {"losses": losses, "rows": rows, "filled": filled, "moved": moved, "state": state}


def test_a_degree_changes_what_travels_and_nothing_else(ranks: Ranks) -> None:
    stayed, switched = ranks(train, (2, 2, 2)), ranks(train, (2, 1, 0))
    for one, other in zip(stayed, switched, strict=True):
        torch.testing.assert_close(other["losses"], one["losses"], rtol=1e-12, atol=1e-12)
        for name, value in one["state"].items():
            torch.testing.assert_close(other["state"][name], value, rtol=1e-9, atol=1e-11)
        assert other["moved"] == 0, "switching a degree moves no parameter"
        # Both experts serve each of 21 tokens: both slices of both on 4 ranks, each expert on one of 2 ranks, all here.
        assert [rows for rows, _ in other["rows"]] == [84, 42, 21]
        assert [remote for _, remote in other["rows"]] == [63, 21, 0]
        assert other["filled"][0] == 0 < other["filled"][1] < other["filled"][2]
        assert one["rows"] == [(84, 63)] * 3 and one["filled"] == [0] * 3


def test_weights_of_slices_save_nothing_for_their_gradients() -> None:
    """A schedule of stages computes them after the backward: layers that are computed again would be so once more."""
    home = ExpertWeights.of(torch.randn(shape, requires_grad=True) for shape in ((2, 6, 4), (2, 4, 3), (2, 6), (2, 4)))
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(saved.append, lambda packed: saved[0]):
        slots = fill_slots(home, SlotFiller(ExpertLayout(((0, 1),), slices=2), None))
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


def test_degrees_of_a_layout() -> None:
    home = ExpertLayout.sliced(2, 1, 4)
    assert home.with_degree(4) == home
    assert home.with_degree(2).slots[1] == (1, 5, 3, 7) and home.with_degree(1).slots[2][:3] == (2, 6, 0)
    assert all(set(slots) == set(range(8)) for slots in home.with_degree(0).slots)
    assert home.with_degree(1).homes == home.homes
    with pytest.raises(ValueError, match=r"in 4 slices cannot be computed by 3 ranks; degrees are 0 .*, 1, 2, 4"):
        home.with_degree(3)
