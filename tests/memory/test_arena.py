"""The arena: where rows land, when their place is given back, and what happens when they do not fit."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from carpool.activations import Arena, HiddenStates

CPU = torch.device("cpu")


def count(n: int) -> torch.Tensor:
    return torch.tensor([n])


def start(rows: HiddenStates) -> int:
    assert rows.start is not None
    return int(rows.start)


def write(rows: HiddenStates, value: float, n: int) -> None:
    # As a kernel does: autograd does not see it.
    rows.data.data[start(rows) : start(rows) + n * rows.width] = value


def test_rows_of_several_layers_do_not_touch() -> None:
    arena = Arena(1 << 16, CPU)
    a, b = arena.reserve(7, torch.float32, count(5)), arena.reserve(24, torch.bfloat16, count(3))
    write(a, 1.0, 5)
    write(b, 2.0, 3)
    assert torch.equal(a.contiguous(5), torch.ones(5, 7))
    assert torch.equal(b.contiguous(3), torch.full((3, 24), 2.0, dtype=torch.bfloat16))
    assert int(arena.needed) == 256 + 256


def test_released_rows_give_their_place_back_from_the_top() -> None:
    arena = Arena(1 << 16, CPU)
    a, b, c = (arena.reserve(64, torch.float32, count(1)) for _ in range(3))
    del b  # below c: its place stays taken until c is released
    d = arena.reserve(64, torch.float32, count(1))
    assert [start(r) for r in (a, c, d)] == [0, 128, 192]
    del c, d
    e = arena.reserve(64, torch.float32, count(2))
    assert start(e) == 64 and int(arena.pointer) == 256 + 512


def test_what_does_not_fit_is_marked_and_counted() -> None:
    arena = Arena(1024, CPU)
    fits = arena.reserve(64, torch.float32, count(4))
    late = arena.reserve(64, torch.float32, count(1))
    assert start(fits) == 0 and start(late) == -1
    assert int(arena.needed) == 1280 > arena.capacity
    del late
    assert start(arena.reserve(64, torch.float32, count(0))) == 256  # nothing to write: it fits


def test_autograd_and_checkpointing_hold_the_place_just_as_long_as_they_need_it() -> None:
    arena, used = Arena(1 << 16, CPU), []

    class Keep(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):  # type: ignore[no-untyped-def]
            rows = arena.reserve(4, torch.float32, count(2))
            ctx.save_for_backward(rows.data, rows.start)
            return x * 2

        @staticmethod
        def backward(ctx, dy):  # type: ignore[no-untyped-def]
            data, where = ctx.saved_tensors
            write(HiddenStates(data, 4, where), 3.0, 2)
            used.append(sum(held.alive for _, held in arena._stack))
            return dy * 2

    x = torch.ones(2, requires_grad=True)
    y = Keep.apply(Keep.apply(x))
    assert sum(held.alive for _, held in arena._stack) == 2
    y.sum().backward()
    assert used == [2, 1] or used == [2, 2]
    del y
    assert not any(held.alive for _, held in arena._stack)
    used.clear()
    y = checkpoint(Keep.apply, checkpoint(Keep.apply, x, use_reentrant=False), use_reentrant=False)
    assert not any(held.alive for _, held in arena._stack), "what is recomputed is not kept"
    y.sum().backward()
    assert used == [1, 1]


def test_it_begins_anew_only_when_nobody_holds_anything() -> None:
    arena = Arena(4096, torch.device("cpu"))
    rows = arena.reserve(4, torch.float32, torch.tensor([3]))
    with pytest.raises(RuntimeError, match="still keeps rows"):
        arena.restart()
    del rows
    arena.restart()
    assert arena.reserve(4, torch.float32, torch.tensor([3])).start.tolist() == [0]
