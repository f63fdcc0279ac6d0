"""Kernels that keep rows and find them again, in Triton's interpreter, against plain PyTorch."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1; tests/conftest.py sets it where there is no GPU", allow_module_level=True)

from carpool.activations import Arena, HiddenStates
from carpool.activations.arena import copy_states
from carpool.activations.arena_kernels import copy_slabs as copy_arenas
from carpool.activations.arena_kernels import reserve
from carpool.experts.pair_kernels import gather_rows
from carpool.experts.pairs import sort_pairs
from carpool.transport.nvlink.keep_kernel import copy_slabs
from carpool.transport.nvlink.route import LeasedStates

CPU = torch.device("cpu")


def test_a_reservation_by_the_kernel_is_the_one_in_pytorch() -> None:
    generator = torch.Generator().manual_seed(0)
    arena = Arena(40_000, CPU)
    pointer, peak = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    held = []
    for slabs in (1, 4, 3, 2, 4, 4):
        count = torch.randint(0, 40, (slabs,), generator=generator, dtype=torch.int32)
        begin, start = reserve(pointer, peak, count, pointer.clone(), 24 * 2, 2, 256, arena.capacity)
        held.append(arena.reserve(24, torch.bfloat16, count, slab=40))
        assert torch.equal(start, held[-1].start) and int(begin) <= int(pointer)
        assert torch.equal(pointer, arena.pointer) and torch.equal(peak, arena.needed)
    assert int(peak) > 0


@pytest.mark.parametrize("width", [8, 37, 1040])
@pytest.mark.parametrize("room", [0, 1 << 20, 256], ids=["tensor", "arena", "no room"])
def test_what_came_is_kept_and_found(width: int, room: int) -> None:
    generator = torch.Generator().manual_seed(width)
    slab, came, home_row = 6, torch.tensor([4, 0, 6, 0], dtype=torch.int32), 18
    x_RH = torch.randn(3 * slab, width, generator=generator)
    home_TH = torch.randn(5, width, generator=generator)
    valid = torch.tensor([*range(4), *range(12, 18), *range(18, 23)])
    slot_RJ = torch.full((24, 2), -1, dtype=torch.int32)
    slot_RJ[valid] = torch.randint(0, 3, (len(valid), 2), generator=generator, dtype=torch.int32)
    leased = LeasedStates(x_RH, width, home=home_TH, home_row=home_row, came_W=came, capacity=slab)
    want = torch.cat([x_RH, home_TH, torch.zeros(1, width)])
    arena = Arena(room, CPU) if room else None
    if arena is not None:
        arena.bytes.fill_(255)
    kept = leased.saved(arena)
    by_kernel = replace(kept, data=torch.full_like(kept.data, torch.nan))
    copy_slabs(x_RH, came, slab, by_kernel)
    x_RH.fill_(torch.nan)  # the lease goes to others
    pairs = sort_pairs(slot_RJ, 3, 99)
    count = int(pairs.offsets_S[-1])
    assert type(kept) is HiddenStates and kept.gaps
    for rows in (kept, by_kernel):
        if room == 256:
            assert rows.start is not None and (rows.start == -1).all()
            continue
        assert torch.equal(rows.contiguous(24)[valid], want[valid])
        got = gather_rows(rows, pairs.order_P, pairs.offsets_S, 2, torch.float32)
        assert torch.equal(got[:count], want[pairs.row_P[:count].long()])
    if room == 256:
        assert arena is not None and (arena.bytes == 255).all(), "nothing was written where there was no room"


@pytest.mark.parametrize(
    ("width", "dtype"), [(8, torch.bfloat16), (37, torch.float32), (33, torch.uint8), (2049, torch.float16)]
)
def test_rows_are_copied_to_another_arena(width: int, dtype: torch.dtype) -> None:
    count = torch.tensor([5, 0, 19, 1], dtype=torch.int32)
    first, second = Arena(1 << 20, CPU), Arena(1 << 20, CPU)
    first.reserve(3, torch.float32, torch.tensor([1]))
    rows = first.reserve(width, dtype, count, slab=32)
    first.bytes.random_(generator=torch.Generator().manual_seed(width))
    kept = copy_states(rows, second)
    second.bytes.fill_(7)
    copy_arenas(rows, kept)
    valid = torch.tensor([*range(5), *range(64, 83), 96])
    assert torch.equal(*(one.contiguous(128)[valid].view(torch.uint8) for one in (rows, kept)))
    assert kept.start is not None and (second.bytes[int(second.pointer) :] == 7).all()
    second.bytes.fill_(7)
    copy_arenas(rows, replace(kept, start=torch.full_like(kept.start, -1)))
    assert (second.bytes == 7).all(), "nothing is written where there was no room"


def test_rows_of_a_tensor_with_others_at_home() -> None:
    data, home = torch.arange(12.0).view(6, 2), -torch.ones(2, 2)
    rows = HiddenStates(data, 2, home=home, home_row=3)
    assert rows.contiguous(6).tolist() == [[0, 1], [2, 3], [4, 5], [-1, -1], [-1, -1], [10, 11]]
    assert data[3, 0] == 6, "the rows themselves are left alone"
