"""The FP8 experts' kernels in Triton's interpreter, on the CPU, against their definition in plain PyTorch.

tests/conftest.py chooses the interpreter where there is no GPU.
PyTorch fills memory that nobody initialised with NaN, so that what is read past the count is found.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
import torch

from carpool.activations import Arena, HiddenStates
from carpool.experts import Activation, FP8Experts
from carpool.experts.fp8 import fp8_products as fp8
from carpool.experts.fp8 import gemm_kernels as fp8_gemm_kernels
from carpool.experts.fp8.fp8_products import Columns, Quantised
from carpool.kernels import GROUP
from carpool.kernels.packet_kernel import launch_quantise
from carpool.kernels.packets import pack, packet_bytes, unpack
from tests.experts_problem import ACTIVATIONS, PATTERNS, ExpertProblem, draw_slots
from tests.interpreted.test_experts import kernels as expert_kernels
from tests.interpreted.test_experts import nan_in_fresh_memory, two_sorts  # noqa: F401
from tests.interpreter_rounding import rounding_as_on_a_gpu


@contextmanager
def kernels() -> Iterator[None]:
    """Take the CUDA side, with tiles of few rows, so that loops run several times; but for sorting, which is slow."""
    with (
        expert_kernels(small_tiles=False),
        mock.patch.object(fp8, "on_gpu", lambda _: True),
        mock.patch.object(fp8_gemm_kernels, "tiling", lambda _: fp8_gemm_kernels.Tiling(16)),
    ):
        yield


@pytest.fixture(autouse=True)
def rounding() -> Iterator[None]:
    with rounding_as_on_a_gpu():
        yield


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def same(got: Quantised, want: Quantised) -> None:
    assert torch.equal(got.code.view(torch.uint8), want.code.view(torch.uint8)) and torch.equal(got.scale, want.scale)


def close(got: torch.Tensor, want: torch.Tensor, tolerance: float) -> None:
    assert got.shape == want.shape and got.dtype == want.dtype
    error = float((got.double() - want.double()).abs().max())
    assert error <= tolerance * float(want.abs().max()), f"{error / float(want.abs().max()):.1e}"


# -- one kernel at a time -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hidden", [8, 37, 128, 200, 256])
def test_packets(hidden: int) -> None:
    x = draw(37, hidden).bfloat16()
    x[3] = 0
    x[5, ::3] *= 1e4
    want = pack(x)
    assert torch.equal(unpack(launch_quantise(x, packet_bytes(hidden)), hidden), unpack(want, hidden))
    close(unpack(want, hidden), x.float(), 2**-4)
    came = torch.tensor([3, 0, 10])
    garbage = torch.full_like(x, torch.nan)
    there = (torch.arange(37) % 13) < came[torch.arange(37) // 13]
    garbage[there] = x[there]
    got = launch_quantise(garbage, packet_bytes(hidden), came, 13)
    assert torch.equal(unpack(got[there], hidden), unpack(want[there], hidden))


@pytest.mark.parametrize("columns", [Columns(1, 200, False), Columns(2, 19, False), Columns(2, 136, True)], ids=str)
@pytest.mark.parametrize("orders", [(True, False), (False, True), (True, True)], ids=str)
def test_weights(columns: Columns, orders: tuple[bool, bool]) -> None:
    for inner in (40, 130):
        weight = draw(3, columns.parts * columns.inner, inner).bfloat16()
        for stored in (weight, weight.transpose(1, 2).contiguous().transpose(1, 2)):
            with kernels():
                got = fp8.quantise_weight(stored, columns, *orders)
            for ours, theirs in zip(got, fp8.quantise_weight(weight, columns, *orders), strict=True):
                assert (ours is None) == (theirs is None)
                if ours is not None and theirs is not None:
                    same(ours, theirs)


def straight(weight: torch.Tensor, columns: Columns) -> Quantised:
    codes = fp8.quantise_weight(weight, columns, True, False).straight
    assert codes is not None
    return codes


@pytest.mark.parametrize(("rows", "offsets"), [(4, [3, 3, 8]), (16, [0, 0, 0]), (16, [1, 500, 500, 517])])
def test_the_schedule_of_tiles(rows: int, offsets: list[int]) -> None:
    ends = torch.tensor(offsets, dtype=torch.int32)
    slot, row, tiles = fp8_gemm_kernels.schedule(ends, 600, rows)
    begins = [0, *offsets]
    want = [(s, r) for s, end in enumerate(offsets) for r in range(begins[s], end, rows)]
    assert int(tiles) == len(want) <= len(slot)
    assert list(zip(slot[: len(want)].tolist(), row[: len(want)].tolist(), strict=True)) == want


@pytest.mark.parametrize("pattern", PATTERNS)
def test_products(pattern: str) -> None:
    exact, pairs, count = two_sorts(pattern)
    slots = len(exact.offsets_S)
    for width, height, out in ((256, 128, 100), (128, 384, 384)):
        x = Quantised(*fp8.quantise(draw(count, width)))
        weight = straight(draw(slots, height, width), Columns(1, height, False))
        bound = pairs.order_P.shape[0]
        code = torch.full((bound, width), 0x7F, dtype=torch.uint8).view(x.code.dtype)  # NaN past the count
        scale = torch.full((bound, width // GROUP), torch.nan)
        code.view(torch.uint8)[:count], scale[:count] = x.code.view(torch.uint8), x.scale
        for dtype in (torch.float32, torch.bfloat16):
            with kernels():
                got = fp8.product(Quantised(code, scale), weight, pairs, out, dtype)
            if count:
                want = fp8.product(x, weight, exact, out, torch.float32)
                close(got[:count].float(), want, 2e-6 if dtype == torch.float32 else 8e-3)
            assert got[count:].isnan().all(), "nothing past the count is written"


@pytest.mark.parametrize("hidden", [8, 37, 200, 256])
@pytest.mark.parametrize("home_row", [None, 0, 20], ids=str)
def test_products_and_rows_of_packets(hidden: int, home_row: int | None) -> None:
    exact, pairs, count = two_sorts("random")
    rows = len(pairs.slot_RJ)
    packets = pack(draw(rows, hidden).bfloat16())
    data, home = packets.clone(), None
    if home_row is not None:
        data, home = packets[:home_row].clone(), packets[home_row:].clone()
    source = HiddenStates(data, data.shape[1], home=home, home_row=home_row or 0)
    plain = HiddenStates.of(packets)
    weight = straight(draw(5, 136, hidden), Columns(1, 136, False))
    want = fp8.gathered_product(plain, hidden, weight, exact, 136, torch.float32)
    wide = fp8.gather_wide(plain, hidden, exact, torch.bfloat16)
    with kernels():
        got = fp8.gathered_product(source, hidden, weight, pairs, 136, torch.float32)
        got_wide = fp8.gather_wide(source, hidden, pairs, torch.bfloat16)
    close(got[:count], want, 2e-6)
    assert torch.equal(got_wide[:count], wide) and got_wide[count:].isnan().all() and got[count:].isnan().all()


@pytest.mark.parametrize("hidden", [8, 200])
def test_rows_of_packets_in_an_arena(hidden: int) -> None:
    exact, pairs, count = two_sorts("random")
    packets = pack(draw(len(pairs.slot_RJ), hidden))
    arena = Arena(10**6, torch.device("cpu"))
    arena.bytes.fill_(255)
    arena.reserve(3, torch.uint8, torch.tensor([5]))
    kept = arena.reserve(packets.shape[1], torch.uint8, torch.tensor([20, 17]), slab=20)
    assert kept.start is not None
    for number, part in enumerate(packets.split(20)):
        kept.data[int(kept.start[number]) :][: part.numel()] = part.flatten()
    want = fp8.gather_wide(HiddenStates.of(packets), hidden, exact, torch.float32)
    with kernels():
        got = fp8.gather_wide(kept, hidden, pairs, torch.float32)
        nowhere = HiddenStates(kept.data, kept.width, torch.tensor([-1]))
        none = fp8.gather_wide(nowhere, hidden, pairs, torch.float32)
    assert torch.equal(got[:count], want)
    assert not none[:count].any(), "no room: zeros, and nothing is read"


# -- the whole computation ------------------------------------------------------------------------------------------


def compare(problem: ExpertProblem, use_arena: bool, all_rows: bool) -> None:
    """Against the definition, by root mean squares: sums in another order round a few codes the other way."""
    want = problem.run(FP8Experts(problem.function), use_arena, True)
    with kernels():
        got = problem.run(FP8Experts(problem.function), use_arena, all_rows)
    assert set(got) == set(want)
    for name, tensor in got.items():
        assert tensor.shape == want[name].shape and tensor.dtype == want[name].dtype, name
        picked = problem.wanted_R if name in ("partial", "dx") else slice(None)
        ours, theirs = tensor[picked].double(), want[name][picked].double()
        assert ours.isfinite().all(), name
        error, scale = float((ours - theirs).norm()), float(theirs.norm())
        assert error <= (2e-3 if problem.dtype == torch.float32 else 1e-2) * scale, f"{name}: {error / scale:.1e}"
        if all_rows and name in ("partial", "dx"):
            assert not tensor[~problem.wanted_R].any()
    assert not got["dweight"][problem.slot_RJ < 0].any()


@pytest.mark.parametrize("name", list(ACTIVATIONS))
def test_every_activation(name: str) -> None:
    i = list(ACTIVATIONS).index(name)
    hidden, inner = [(200, 136), (37, 19), (128, 128)][i % 3]
    slot_RJ, slots = draw_slots("random", torch.Generator().manual_seed(i))
    problem = ExpertProblem(
        (slot_RJ[:12], slots), hidden, inner, ACTIVATIONS[name], i % 2 == 0, torch.float32, transposed=i % 4 < 2
    )
    compare(problem, use_arena=i % 3 != 1, all_rows=i % 2 == 1)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_every_pattern(pattern: str) -> None:
    slot_RJ, slots = draw_slots(pattern, torch.Generator().manual_seed(0))
    problem = ExpertProblem(
        (slot_RJ[:20], slots), 136, 120, Activation("silu", gated=True), pattern == "random", torch.bfloat16
    )
    compare(problem, use_arena=False, all_rows=pattern in ("random", "no pairs"))


def test_without_room_in_the_arena_the_output_is_right() -> None:
    problem = ExpertProblem("random", 40, 24, Activation("silu", gated=True), False, torch.float32)
    arena = Arena(512, torch.device("cpu"))
    arena.bytes.fill_(7)
    exact, pairs, count = two_sorts("random")
    up = straight(problem.weights.up_SFH, Columns(2, 24, False))
    packets = pack(draw(len(pairs.slot_RJ), 40))
    run = functools.partial(fp8.up_and_activate, Activation("silu", gated=True), HiddenStates.of(packets), 40, up, None)
    want, _ = run(exact, torch.float32, None)
    with kernels():
        got, h = run(pairs, torch.float32, arena)
    assert h.start is not None and int(h.start) < 0 and (arena.bytes == 7).all()
    close(got.scale[:count], want.scale, 1e-6)
