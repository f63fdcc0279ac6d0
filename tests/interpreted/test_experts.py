"""The experts' kernels in Triton's interpreter, on the CPU, against plain PyTorch in float64.

tests/conftest.py chooses the interpreter where there is no GPU.
`kernels` makes the experts take their CUDA side for tensors on the CPU, with tiles so small that loops run several
times; PyTorch fills memory that nobody initialised with NaN, so that what is read past the count is found.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
import torch

from carpool.activations import Arena, HiddenStates
from carpool.experts import (
    Activation,
    GroupedExperts,
    activation_kernels,
    make_activation,
    pair_kernels,
    sort_kernel,
)
from carpool.experts import pairs as sides
from carpool.experts.base import ActivationFunction
from carpool.experts.pairs import Pairs, sort_pairs
from tests.experts_problem import ACTIVATIONS, PATTERNS, ExpertProblem, draw_slots

SIZES = [(8, 8), (37, 19), (130, 37), (40, 24), (1, 1)]


@contextmanager
def kernels(small_tiles: bool = True, sort: bool = False) -> Iterator[None]:
    """Take the CUDA side. Sorting is slow in the interpreter, so its kernels run only where asked for."""
    tiling = (lambda *_: (16, 64)) if small_tiles else pair_kernels.tiling
    kernel = functools.partial(sort_kernel.sort_pairs, block=16, chunk=4)
    plain = functools.partial(plain_sort, sides.on_gpu)
    with (
        mock.patch.object(sides, "on_gpu", lambda _: True),
        mock.patch.object(sort_kernel, "sort_pairs", kernel if sort else plain),
        mock.patch.object(pair_kernels, "tiling", tiling),
        mock.patch.object(activation_kernels, "tiling", tiling),
    ):
        yield


def plain_sort(on_gpu: object, slot_RJ: torch.Tensor, slots: int, bound: int) -> tuple[torch.Tensor, ...]:
    with mock.patch.object(sides, "on_gpu", on_gpu):
        return sort_pairs(slot_RJ, slots, bound)[1:]


@pytest.fixture(autouse=True)
def nan_in_fresh_memory() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


def close(got: torch.Tensor, want: torch.Tensor, tolerance: float) -> None:
    assert got.shape == want.shape
    if got.numel():
        scale = float(want.double().abs().max()) or 1e-30
        error = float((got.double() - want.double()).abs().max())
        assert error <= tolerance * scale, f"error {error / scale:.1e}, allowed {tolerance:.0e}"


# -- sorting --------------------------------------------------------------------------------------------------------


def check_sort(slot_RJ: torch.Tensor, slots: int, bound: int) -> None:
    with kernels(sort=True):
        got = sort_pairs(slot_RJ, slots, bound)
    for name, a, b in zip(Pairs._fields, got, sort_pairs(slot_RJ, slots, bound), strict=True):
        assert a.dtype == b.dtype == torch.int32 and torch.equal(a, b), name


@pytest.mark.parametrize("pattern", PATTERNS)
def test_sort(pattern: str) -> None:
    slot_RJ, slots = draw_slots(pattern, torch.Generator().manual_seed(0))
    count = int((slot_RJ >= 0).sum())
    check_sort(slot_RJ, slots, {"full": count, "random": count + 1}.get(pattern, 10**6))


@pytest.mark.parametrize(("rows", "columns", "slots"), [(20, 1, 70), (17, 1, 1), (3, 22, 31)])
def test_sort_of_many_slots_and_columns(rows: int, columns: int, slots: int) -> None:
    generator = torch.Generator().manual_seed(0)
    slot_RJ = torch.randint(-1, slots, (rows, columns), generator=generator).int()
    check_sort(slot_RJ, slots, slot_RJ.numel())


# -- the whole computation ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(ACTIVATIONS))
def test_every_activation(name: str) -> None:
    i = list(ACTIVATIONS).index(name)
    hidden, inner = SIZES[i % len(SIZES)]
    slot_RJ, slots = draw_slots("random", torch.Generator().manual_seed(i))
    some = (slot_RJ[:12], slots)
    problem = ExpertProblem(some, hidden, inner, ACTIVATIONS[name], bias=i % 2 == 0, dtype=torch.float64)
    with kernels():
        got = problem.run(GroupedExperts(problem.function), use_arena=i % 3 > 0, all_rows=i % 3 == 1)
    problem.check(got, 1e-12, all_rows=i % 3 == 1)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_every_pattern(pattern: str) -> None:
    for i, (hidden, inner) in enumerate([(40, 24), (37, 19)]):
        slot_RJ, slots = draw_slots(pattern, torch.Generator().manual_seed(i))
        some = (slot_RJ[:20], slots)
        problem = ExpertProblem(some, hidden, inner, make_activation("silu", True), i == 0, torch.float32, i == 1)
        with kernels():
            got = problem.run(GroupedExperts(problem.function), use_arena=i == 0, all_rows=i == 1)
        problem.check(got, 5e-6, all_rows=i == 1)


@pytest.mark.parametrize("name", ["SwiGLU", "gpt-oss"])
def test_half_precision_with_tiles_as_on_a_gpu(name: str) -> None:
    """Not less exact than operations of PyTorch, each of which rounds. In float16, for the interpreter cuts bits off
    where a GPU rounds to bf16."""
    problem = ExpertProblem("random", 104, 40, ACTIVATIONS[name], bias=True, dtype=torch.float16)
    with kernels(small_tiles=False):
        got = problem.run(GroupedExperts(problem.function), use_arena=True, all_rows=False)
    plain, exact = problem.run(GroupedExperts(problem.function), False, False), problem.expected()
    for key in got:
        picked = problem.wanted_R if key in ("partial", "dx") else slice(None)
        ours, theirs = (float((t[key].double() - exact[key])[picked].square().mean().sqrt()) for t in (got, plain))
        assert ours <= 1.05 * theirs, f"{key}: {ours / theirs:.2f} times the error of plain float16"


def test_an_activation_that_no_kernel_knows() -> None:
    def softplus(h: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.softplus(h[..., ::2]) * h[..., 1::2]

    for pattern, use_arena in (("random", True), ("no pairs", False)):
        problem = ExpertProblem(pattern, 37, 19, softplus, bias=True, dtype=torch.float64)
        with kernels(sort=True):
            got = problem.run(GroupedExperts(problem.function), use_arena, all_rows=False)
        problem.check(got, 1e-12, all_rows=False)


# -- one kernel at a time -------------------------------------------------------------------------------------------


def two_sorts(pattern: str, bound: int = 500) -> tuple[Pairs, Pairs, int]:
    """Exact, as plain PyTorch wants it, and with a bound."""
    slot_RJ, slots = draw_slots(pattern, torch.Generator().manual_seed(1))
    count = int((slot_RJ >= 0).sum())
    return sort_pairs(slot_RJ, slots, count), sort_pairs(slot_RJ, slots, bound), count


@pytest.mark.parametrize("width", [1, 8, 37, 200])
def test_gather(width: int) -> None:
    exact, pairs, count = two_sorts("random")
    rows = torch.randn(len(pairs.slot_RJ), width, dtype=torch.float64)
    arena = Arena(10**6, torch.device("cpu"))
    arena.reserve(3, torch.float64, torch.tensor([5]))
    kept = arena.reserve(width, torch.float64, torch.tensor([len(rows)]))
    assert kept.start is not None
    kept.data[int(kept.start) : int(kept.start) + rows.numel()] = rows.flatten()
    want = sides.gather_rows(HiddenStates(rows, width), exact, torch.float32)
    with kernels():
        for source in (HiddenStates(rows, width), kept):
            got = sides.gather_rows(source, pairs, torch.float32)
            assert torch.equal(got[:count], want) and got[count:].isnan().all(), "nothing past the count is written"
        nowhere = HiddenStates(kept.data, width, torch.tensor([-1]))
        got = sides.gather_rows(nowhere, pairs, torch.float32)
        assert not got[:count].any() and got[count:].isnan().all(), "no room: zeros, and nothing is read"


@pytest.mark.parametrize("activation", [make_activation("silu", True), abs], ids=["known", "unknown"])
def test_without_room_in_the_arena_the_output_is_right(activation: ActivationFunction) -> None:
    exact, pairs, count = two_sorts("random")
    arena = Arena(512, torch.device("cpu"))
    arena.bytes.fill_(7)
    h = torch.randn(len(pairs.order_P), 38)
    with kernels():
        a, kept = sides.activate(activation, h.clone(), None, pairs, arena)
    assert kept.start is not None and int(kept.start) < 0 and (arena.bytes == 7).all()
    want, _ = sides.activate(activation, h[:count].clone(), None, exact, None)
    close(a[:count], want, 1e-6)


@pytest.mark.parametrize(("pattern", "width"), [("random", 130), ("one slot", 8), ("no pairs", 37)])
def test_sums(pattern: str, width: int) -> None:
    exact, pairs, count = two_sorts(pattern)
    wanted = (pairs.slot_RJ >= 0).any(1)
    weight = torch.where(pairs.slot_RJ < 0, torch.nan, torch.rand(pairs.slot_RJ.shape))
    values = torch.full((len(pairs.order_P), width), torch.nan, dtype=torch.float64)
    values[:count] = torch.randn(count, width)
    bias = torch.randn(len(pairs.offsets_S), width, dtype=torch.float64)
    for arguments in ((), (weight,), (weight, bias)):
        want = torch.empty(len(wanted), width, dtype=torch.float64)
        sides.sum_pairs(values[:count], exact, want, True, *arguments)
        for all_rows in (True, False):
            got = torch.full_like(want, 3.0)
            with kernels():
                sides.sum_pairs(values, pairs, got, all_rows, *arguments)
            close(got[wanted], want[wanted], 1e-13)
            assert (got[~wanted] == (0.0 if all_rows else 3.0)).all()
    for scale in (None, weight):
        with kernels():
            got = sides.slot_sums(values, pairs, scale)
        close(got, sides.slot_sums(values[:count], exact, scale), 1e-13)


def test_clamped_and_infinite_and_nan_values_go_through_as_in_pytorch() -> None:
    activation = Activation("silu", gated=True, limit=1.0)
    slot_RJ = torch.zeros(6, 1, dtype=torch.int32)
    pairs = sort_pairs(slot_RJ, 1, 6)
    gate = torch.tensor([1.0, 1.5, torch.nan, torch.inf, -3.0, 0.0], dtype=torch.float64)
    up = torch.tensor([-1.0, -1.5, 1.0, 2.0, torch.nan, -torch.inf], dtype=torch.float64)
    h, d = torch.stack([gate, up], 1), torch.ones(6, 1, dtype=torch.float64)
    arguments = (HiddenStates(h, 2), d, d, None, torch.full((6, 1), 0.5), pairs, True)
    want = (*sides.activate_backward(activation, *arguments), sides.activate(activation, h, None, pairs, None)[0])
    with kernels():
        got = (*sides.activate_backward(activation, *arguments), sides.activate(activation, h, None, pairs, None)[0])
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, equal_nan=True, rtol=1e-6, atol=1e-12)
