"""Experts that move between steps: rows arrive where they should, and training goes on as if they had stayed."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.distributed as dist

import carpool
from carpool.layout import ExpertLayout
from carpool.optim import AdamW
from carpool.replicas.migrate import RowMove, check_can_move, move_experts
from tests.layouts import EXPERTS, layout_of
from tests.ranks import WORLD_SIZE, mesh, on_ranks

H, F, K, STEPS = 16, 8, 3, 6


@pytest.mark.parametrize("chunk_bytes", [400, 10**6])
@on_ranks()
def test_rows_arrive_whatever_the_size_of_the_pieces(chunk_bytes: int) -> None:
    """Rows named by numbers travel between random deals of 37 names to the ranks; some ranks have none."""
    dealer, rank = random.Random(7), dist.get_rank()
    for case, shape in enumerate([(), (1,), (3, 5), (199,)]):
        deals = []
        for _ in range(2):
            names = dealer.sample(range(37), 37)
            cuts = sorted(dealer.choice([0, 37, dealer.randrange(38)]) for _ in range(WORLD_SIZE - 1))
            deals.append([names[a:b] for a, b in zip([0, *cuts], [*cuts, 37], strict=True)])
        if case == 2:  # as many as before on each rank
            names = iter(dealer.sample(range(37), 37))
            deals[1] = [[next(names) for _ in part] for part in deals[0]]
        before, after = deals

        def rows_of(names: list[int], shape: tuple[int, ...] = shape) -> torch.Tensor:
            columns = torch.arange(max(1, torch.Size(shape).numel()), dtype=torch.float32).view(1, *shape)
            base = torch.tensor(names, dtype=torch.float32).view(-1, *[1] * len(shape))
            return base * 1000 + (columns if shape else 0)

        rows, move = rows_of(before[rank]), RowMove(before, after, rank)
        got = move.apply(rows, None, chunk_bytes)
        assert torch.equal(got, rows_of(after[rank])), shape
        assert (got is rows) == (len(before[rank]) == len(after[rank])), shape


def test_only_rows_that_change_rank_travel_each_once() -> None:
    before, after = [[0, 1], [2, 3], []], [[1, 0], [2], [3]]
    moves = [RowMove(before, after, rank) for rank in range(3)]
    assert [move.send for move in moves] == [[[], [], []], [[], [], [1]], [[], [], []]]
    assert [move.receive for move in moves] == [[[], [], []], [[], [], []], [[], [0], []]]
    assert [move.stay for move in moves] == [[(1, 0), (0, 1)], [(0, 0)], []]
    assert [move.travelling for move in moves] == [1, 1, 1]


def _layer(layout: ExpertLayout) -> carpool.MoE:
    torch.manual_seed(0)
    ep = mesh((WORLD_SIZE,), ("ep",))
    return carpool.MoE(H, F, EXPERTS, K, ep_mesh=ep, layout=layout, transport="dedup", bias=True, dtype=torch.float64)


def _train(layouts: dict[int, str]) -> tuple[list[float], dict[str, Any], int, int]:
    """Losses of some steps of AdamW, moving to another layout before those named; the layer's state in logical order;
    bytes that were moved, and that these moves should take."""
    moe = _layer(layout_of("contiguous", WORLD_SIZE))
    optimizer = torch.optim.AdamW(moe.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(dist.get_rank())
    losses, moved, expected = [], 0, 0
    for step in range(STEPS):
        x = torch.randn(9, H, generator=generator, dtype=torch.float64)
        if step in layouts:
            before = moe.layout
            moved += moe.set_layout(layout_of(layouts[step], WORLD_SIZE), optimizer).bytes
            changed = sum(a[0] != b[0] for a, b in zip(before.home_of, moe.layout.home_of, strict=True))
            expected += changed * 3 * 8 * (2 * F * H + H * F + 2 * F + H)
        loss = (moe(x) - x.roll(1, dims=1)).square().mean()
        loss.backward()
        carpool.reduce_gradients(moe, mesh((WORLD_SIZE,), ("ep",)))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        total = loss.detach()
        dist.all_reduce(total)
        losses.append(float(total))
    return losses, {k: v.numpy() for k, v in moe.logical_state_dict().items()}, moved, expected


@on_ranks()
def test_training_goes_on_as_if_nobody_had_moved() -> None:
    stayed, state, _, _ = _train({})
    # From even to uneven homes, one rank with none, and home again.
    went, moved_state, moved, expected = _train({2: "permuted", 3: "uneven", 5: "contiguous"})
    assert moved == expected > 0
    assert max(abs(a - b) / abs(a) for a, b in zip(stayed, went, strict=True)) < 1e-12
    assert max(float(abs(state[k] - moved_state[k]).max()) for k in state) < 1e-9


@pytest.mark.parametrize(("moments", "even"), [("int8", True), ("int8", False), ("float32", False)])
@on_ranks()
def test_low_bits_and_scales_move_with_their_experts(moments: str, even: bool) -> None:
    """Steps before and after a move, against experts that all live in one parameter."""
    rank, experts = dist.get_rank(), 9
    before = [[0, 1, 2], [3, 4], [5, 6], [7, 8]]
    after = [[8, 4, 0], [3, 1], [2, 7], [6, 5]] if even else [[8], [], [7, 3, 1, 0, 2], [4, 5, 6]]

    def values(names: list[int], seed: int) -> torch.Tensor:
        rows = [torch.randn(24, 300, generator=torch.Generator().manual_seed(seed * 100 + name)) for name in names]
        return torch.stack(rows or [torch.empty(24, 300)])[: len(names)].bfloat16()

    here = torch.nn.Parameter(values(before[rank], 0))
    everywhere = torch.nn.Parameter(values(list(range(experts)), 0))
    optimizers = [AdamW([p], lr=1e-2, moments=moments) for p in (here, everywhere)]
    for step in range(1, 5):
        if step == 3:
            check_can_move([here], optimizers[0], None)
            move_experts([here], RowMove(before, after, rank), optimizers[0], None, chunk_bytes=999)
        for p, names, optimizer in zip(
            (here, everywhere), ((before, after)[step > 2][rank], list(range(experts))), optimizers, strict=True
        ):
            p.grad = values(names, step)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    assert torch.equal(here, everywhere[after[rank]])
    for name, value in optimizers[1].state[everywhere].items():
        ours = optimizers[0].state[here][name]
        assert torch.equal(ours, value[after[rank]] if value.dim() else value), name


@on_ranks()
def test_what_cannot_move_is_refused_before_anything_has() -> None:
    moe = _layer(layout_of("contiguous", WORLD_SIZE))
    optimizer = torch.optim.Adafactor(moe.parameters(), lr=0.1)

    def refused(layout: ExpertLayout, why: str) -> None:
        with pytest.raises(ValueError, match=why):
            moe.set_layout(layout, optimizer)

    refused(ExpertLayout.contiguous(EXPERTS, 2), "for 12 experts on 2 ranks")
    moe(torch.ones(2, H, dtype=torch.float64)).sum().backward()
    refused(layout_of("uneven", WORLD_SIZE), r"zero_grad\(set_to_none=True\)")
    carpool.reduce_gradients(moe, mesh((WORLD_SIZE,), ("ep",)))
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    before = [p.detach().clone() for p in moe.parameters()]
    refused(layout_of("uneven", WORLD_SIZE), "(?s)Adafactor keeps.*cannot move with this optimizer")
    assert all(torch.equal(a, b) for a, b in zip(before, moe.parameters(), strict=True))
