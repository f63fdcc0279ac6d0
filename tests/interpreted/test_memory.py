"""Small kernels in Triton's interpreter against plain PyTorch: rows that are kept and found again, `ordered_sum`,
dequantisation, the cross-entropy and `assign`."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from carpool import assign
from carpool.activations import Arena, HiddenStates
from carpool.activations.arena import copy_states
from carpool.activations.arena_kernels import copy_slabs as copy_arenas
from carpool.activations.arena_kernels import reserve
from carpool.experts.pair_kernels import gather_rows
from carpool.experts.pairs import sort_pairs
from carpool.kernels import cross_entropy_kernel
from carpool.kernels.cross_entropy import IGNORED, cross_entropy_
from carpool.kernels.device import ordered_lists, ordered_sum
from carpool.kernels.ordered_sum_kernel import launch
from carpool.layout import assign_kernel
from carpool.layout import expert_layout as layout_module
from carpool.replicas import slots
from carpool.replicas.slots import SlotFiller
from carpool.transport.nvlink.keep_kernel import copy_slabs
from carpool.transport.nvlink.route import LeasedStates
from tests.assign_problem import CASES, Case, problem

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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(("n", "width", "rows"), [(37, 5, 7), (23, 1030, 1), (0, 4, 3), (9, 33, 25)])
def test_the_kernel_equals_what_defines_it(n: int, width: int, rows: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(n)
    values = torch.randn(n, width, generator=generator).to(dtype)
    index = torch.randint(0, rows, (n,), generator=generator)
    for factor in (None, torch.rand(n, generator=generator)):
        expected = ordered_sum(values, index, rows, factor)
        out = torch.full_like(expected, torch.nan)
        launch(values, *ordered_lists(index, rows), factor, out)
        assert torch.equal(out, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "columns"), [(13, 7), (5, 1000), (3, 64), (4, 129), (2, 1), (0, 9)])
def test_the_cross_entropy_is_what_it_is_defined_as(
    rows: int, columns: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cross_entropy_kernel, "BLOCK", 64)  # loops run several times
    generator = torch.Generator().manual_seed(rows)
    logits = (5 * torch.randn(rows, columns, generator=generator)).to(dtype)
    target = torch.randint(columns, (rows,), generator=generator)
    target[1::3] = IGNORED
    for gradient in (False, True):
        plain, own = logits.clone(), logits.clone()
        expected, loss = cross_entropy_(plain, target, gradient), torch.full((rows,), torch.nan)
        cross_entropy_kernel.launch(own, target, loss, IGNORED, gradient)
        torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
        assert (loss[1::3] == 0).all()
        if gradient:
            unit = torch.finfo(dtype).eps
            torch.testing.assert_close(own, plain, rtol=2 * unit, atol=1e-6)
        else:
            assert torch.equal(own, logits)


def test_infinity_and_what_is_no_number() -> None:
    inf, nan = torch.inf, torch.nan
    logits = torch.tensor([[-inf, 1.0, 2.0], [1.0, inf, 2.0], [nan, 0.0, 1.0], [0.0, 1.0, 2.0]])
    expected, loss = cross_entropy_(logits.clone(), torch.tensor([1, 0, 1, 2]), False), torch.zeros(4)
    cross_entropy_kernel.launch(logits, torch.tensor([1, 0, 1, 2]), loss, IGNORED, True)
    torch.testing.assert_close(loss[[0, 3]], expected[[0, 3]])
    assert not loss[1:3].isfinite().any() and not expected[1:3].isfinite().any()
    cross_entropy_kernel.launch(torch.zeros(2, 3), torch.tensor([3, -1]), loss[:2], IGNORED, False)
    assert loss[:2].isnan().all()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_kernel_equals_plain_pytorch(case: Case) -> None:
    for seed in (0, 1):
        expert_TK, layout = problem(case, seed)
        want = assign(expert_TK, layout)
        # Choices may be columns of something else.
        wide_TK = torch.full((len(expert_TK), case.top_k + 3), 7, dtype=torch.int32)
        wide_TK[:, 3:] = expert_TK
        with mock.patch.object(layout_module, "on_gpu", lambda _: True):
            got, again = assign(expert_TK, layout), assign(wide_TK[:, 3:], layout)
        assert got.dtype == want.dtype == torch.int32 and torch.equal(got, want) and torch.equal(again, want)
        assert case.tokens < 30 or len(want.unique()) > 2


def test_under_torch_compile_it_is_pytorch() -> None:
    expert_TK, layout = problem(CASES[5])
    want = assign(expert_TK, layout)
    with (
        mock.patch.object(layout_module, "on_gpu", lambda _: True),
        mock.patch.object(assign_kernel, "look_up", side_effect=AssertionError),
    ):
        compiled = torch.compile(lambda expert_TK: assign(expert_TK, layout), backend="eager", fullgraph=True)
        assert torch.equal(compiled(expert_TK), want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_gradients_of_replicas_are_added_alike(dtype: torch.dtype) -> None:
    """Expert 0 has four summands, on all ranks; 1 and 2 have two, and 2 none of them at home."""
    generator = torch.Generator().manual_seed(0)
    with mock.patch.object(dist, "get_rank", return_value=0):
        filler = SlotFiller([(0, 2, 1), (3,), (4,), (5,)], [(0, 1), (3, 2, 0), (1, 0, 4), (2, 5, 0)], None)  # type: ignore[arg-type]
    back = torch.randn(sum(filler.send), 3, 7, generator=generator).to(dtype)
    own = torch.randn(2, 3, 7, generator=generator).to(dtype)
    want = filler.add_up(back, own)
    # In order of (rank, slot): rank 1 sends those of 2 and 0, rank 2 of 1 and 0, rank 3 of 2 and 0.
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    from_1, from_2, from_3 = back.to(wide).split(2)
    own_0, own_1 = own.to(wide)
    rows = own_0 + from_1[1] + from_2[1] + from_3[1], from_1[0] + from_3[0], own_1 + from_2[0]
    assert torch.equal(want, torch.stack(rows).to(dtype))
    with mock.patch.object(slots, "on_gpu", lambda _: True):
        assert torch.equal(filler.add_up(back, own), want)
