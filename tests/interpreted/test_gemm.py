"""The fused grouped products in Triton's interpreter, on the CPU, against plain PyTorch in float64.

Written as test_experts.py is: tiny tiles, NaN in memory
that nobody initialised, and bounds instead of counts.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

import pytest
import torch

from carpool.activations import Arena, HiddenStates
from carpool.experts import GroupedExperts, make_activation
from carpool.experts.gemm import (
    adapter_kernels,
    dact_kernels,
    gemm_tiles,
    outer_kernels,
    product_kernels,
    table_kernels,
    up_kernels,
)
from carpool.experts.gemm.choices import STAGES, Choices
from carpool.experts.gemm.gemm_tiles import Tiling
from carpool.experts.pairs import Pairs, gather_rows, sort_pairs
from tests.experts_problem import ACTIVATIONS, PATTERNS, ExpertProblem, draw_slots
from tests.interpreted.test_experts import close, kernels, nan_in_fresh_memory  # noqa: F401

TINY = Tiling(columns=32, warps=4, stages=2, depth=16)


@contextmanager
def tiny_tiles() -> Iterator[None]:
    with ExitStack() as patches:
        patches.enter_context(kernels())
        for module in (gemm_tiles, up_kernels, product_kernels, dact_kernels, outer_kernels, adapter_kernels):
            patches.enter_context(mock.patch.multiple(module, TILE_ROWS=16, BAND=2))
        patches.enter_context(mock.patch.dict(gemm_tiles.TILINGS, {"wide": TINY, "flat": TINY, "square": TINY}))
        yield


def few_rows(pattern: str, seed: int, rows: int = 20) -> tuple[torch.Tensor, int]:
    slot_RJ, slots = draw_slots(pattern, torch.Generator().manual_seed(seed))
    return slot_RJ[:rows], slots


# -- the whole computation ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(ACTIVATIONS))
def test_every_activation(name: str) -> None:
    i = list(ACTIVATIONS).index(name)
    hidden, inner = [(40, 24), (16, 72), (72, 16)][i % 3]
    problem = ExpertProblem(
        few_rows("random", i, 12), hidden, inner, ACTIVATIONS[name], i % 2 == 0, torch.float32, transposed=i % 4 < 2
    )
    with tiny_tiles():
        experts = GroupedExperts(problem.function, Choices.all("wide"), recompute=i % 3 == 2)
        got = problem.run(experts, use_arena=i % 3 > 0, all_rows=i % 3 == 1)
    problem.check(got, 5e-6, all_rows=i % 3 == 1)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_every_pattern(pattern: str) -> None:
    for i, transposed in enumerate((False, True)):
        problem = ExpertProblem(
            few_rows(pattern, i), 40, 24, make_activation("silu", True), i == 0, torch.float32, transposed
        )
        with tiny_tiles():
            experts = GroupedExperts(problem.function, Choices.all("square"))
            got = problem.run(experts, use_arena=i == 0, all_rows=i == 1)
        problem.check(got, 5e-6, all_rows=i == 1)


@pytest.mark.parametrize("stage", STAGES)
def test_one_fused_stage_among_the_librarys(stage: str) -> None:
    problem = ExpertProblem(few_rows("random", 3), 24, 40, ACTIVATIONS["gpt-oss"], True, torch.float32)
    with tiny_tiles():
        got = problem.run(GroupedExperts(problem.function, Choices(**{stage: "flat"})), True, False)
    problem.check(got, 5e-6, all_rows=False)


@pytest.mark.parametrize("choices", [Choices.all("flat"), Choices.all("library")], ids=["fused", "library"])
@pytest.mark.parametrize(
    ("ranks", "name", "transposed", "pattern"),
    [
        ((8, 4), "gpt-oss", False, "random"),
        ((0, 19), "gpt-oss", True, "random"),
        ((8, 0), "SwiGLU", False, "idle slots"),
        ((3, 17), "SwiGLU", True, "random"),
        ((4, 8), "relu2", False, "random"),
        ((129, 8), "SwiGLU", False, "random"),
    ],
)
def test_adapters(ranks: tuple[int, int], name: str, transposed: bool, pattern: str, choices: Choices) -> None:
    """Inside the fused products, and beside the library's."""
    frozen = pattern == "random"
    problem = ExpertProblem(
        few_rows(pattern, 3), 24, 40, ACTIVATIONS[name], True, torch.float32, transposed, ranks, frozen
    )
    with tiny_tiles():
        got = problem.run(GroupedExperts(problem.function, choices), True, False)
    problem.check(got, 5e-6, all_rows=False)


@pytest.mark.parametrize("name", ["SwiGLU", "gpt-oss", "relu2"])
@pytest.mark.parametrize("transposed", [False, True])
def test_matrices_come_without_tensor_maps(name: str, transposed: bool) -> None:
    """As cards before Hopper read them; sizes are no multiples of a tile's."""
    problem = ExpertProblem(
        few_rows("random", 5, 12), 24, 40, ACTIVATIONS[name], True, torch.float32, transposed, (8, 4), False
    )
    with tiny_tiles(), ExitStack() as patches:
        for module in (gemm_tiles, up_kernels, product_kernels, dact_kernels):
            patches.enter_context(mock.patch.object(module, "has_maps", lambda _: False))
        got = problem.run(GroupedExperts(problem.function, Choices.all("square")), True, False)
    problem.check(got, 5e-6, all_rows=False)


@pytest.mark.parametrize("name", ["SwiGLU", "gpt-oss"])
def test_half_precision_is_no_worse_than_pytorchs_operations(name: str) -> None:
    """In float16, for the interpreter does not multiply bf16."""
    problem = ExpertProblem("random", 104, 40, ACTIVATIONS[name], True, torch.float16)
    with tiny_tiles():
        got = problem.run(GroupedExperts(problem.function, Choices.all("wide")), use_arena=True, all_rows=False)
    plain, exact = problem.run(GroupedExperts(problem.function), False, False), problem.expected()
    for key in got:
        picked = problem.wanted_R if key in ("partial", "dx") else slice(None)
        ours, theirs = (float((t[key].double() - exact[key])[picked].square().mean().sqrt()) for t in (got, plain))
        assert ours <= 1.05 * theirs, f"{key}: {ours / theirs:.2f} times the error of plain float16"


def test_what_the_kernels_do_not_take_is_the_librarys() -> None:
    def softplus(h: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.softplus(h[..., ::2]) * h[..., 1::2]

    for hidden, inner, activation in ((37, 24, ACTIVATIONS["SwiGLU"]), (40, 24, softplus)):
        problem = ExpertProblem(few_rows("random", 4), hidden, inner, activation, True, torch.float32)
        with tiny_tiles():
            got = problem.run(GroupedExperts(problem.function, Choices.all("wide")), True, False)
        problem.check(got, 5e-6, all_rows=False)


@pytest.mark.parametrize("recompute", [True, False])
def test_what_is_kept(recompute: bool) -> None:
    problem = ExpertProblem(few_rows("random", 5), 40, 24, ACTIVATIONS["SwiGLU"], False, torch.float32)
    arena = Arena(10**5, torch.device("cpu"))
    with tiny_tiles():
        from carpool.transport import Arrivals

        arrivals = Arrivals(HiddenStates.of(problem.x_RH), problem.slot_RJ, problem.weight_RJ, 500)
        experts = GroupedExperts(problem.function, Choices.all("wide"), recompute=recompute)
        saved = experts.forward(arrivals, problem.weights, torch.empty_like(problem.x_RH), arena)
    assert (saved[1] is None) == recompute
    count = int((problem.slot_RJ >= 0).sum())
    assert int(arena.needed) == (0 if recompute else -(-count * 48 * 4 // 256) * 256)


# -- one kernel at a time -------------------------------------------------------------------------------------------


def sorted_twice(pattern: str) -> tuple[Pairs, int]:
    slot_RJ, slots = few_rows(pattern, 1)
    return sort_pairs(slot_RJ, slots, 500), int((slot_RJ >= 0).sum())


@pytest.mark.parametrize("pattern", ["random", "one slot", "idle slots", "no pairs"])
def test_tables_of_tiles(pattern: str) -> None:
    pairs, _ = sorted_twice(pattern)
    tiles, ranked, _ = table_kernels.tile_table(pairs.offsets_S, len(pairs.order_P), 4)
    want, slots, begin = [], [], 0
    for slot, end in enumerate(pairs.offsets_S.tolist()):
        want += [[slot, first, end] for first in range(begin, end, 4)]
        slots.append([slot, begin, end])
        begin = end
    assert int(tiles[0, 0]) == len(want) and tiles[1 : 1 + len(want), :3].tolist() == want
    assert ranked[:, :3].tolist() == sorted(slots, key=lambda entry: (entry[1] - entry[2], entry[0]))


def test_more_tiles_than_a_program_writes() -> None:
    offsets = torch.randint(0, 3, (150,), generator=torch.Generator().manual_seed(0)).cumsum(0).int()
    tiles, *_ = table_kernels.tile_table(offsets, int(offsets[-1]) + 40, 1)
    count = int(offsets[-1])
    assert int(tiles[0, 0]) == count and tiles[1 : 1 + count, 1].tolist() == list(range(count))


def places(rows_RH: torch.Tensor, home: slice) -> dict[str, HiddenStates]:
    """The same rows in a tensor, in slabs of an arena, and partly at home."""
    width, slab = rows_RH.shape[1], 5
    arena = Arena(10**5, torch.device("cpu"))
    arena.bytes.fill_(255)
    counts = torch.tensor([min(slab, len(rows_RH) - first) for first in range(0, len(rows_RH), slab)])
    kept = arena.reserve(width, rows_RH.dtype, counts, slab)
    assert kept.start is not None
    for number, start in enumerate(kept.start.tolist()):
        part = rows_RH[number * slab : (number + 1) * slab].flatten()
        kept.data[start : start + len(part)] = part
    missing = rows_RH.clone()
    missing[home] = torch.nan
    at_home = rows_RH[home].clone()
    slabs_missing = HiddenStates(kept.data.clone(), width, kept.start, slab, at_home, home.start)
    for row in range(home.start, home.stop):
        start = int(kept.start[row // slab]) + row % slab * width
        slabs_missing.data[start : start + width] = torch.nan
    return {
        "tensor": HiddenStates.of(rows_RH),
        "home": HiddenStates(missing, width, home=at_home, home_row=home.start),
        "shorter": HiddenStates(
            rows_RH[: home.start].clone(), width, home=rows_RH[home.start :].clone(), home_row=home.start
        ),
        "slabs": kept,
        "slabs and home": slabs_missing,
        "nowhere": HiddenStates(kept.data, width, torch.full_like(kept.start, -1), slab),
    }


@pytest.mark.parametrize("place", ["tensor", "home", "shorter", "slabs", "slabs and home", "nowhere"])
def test_rows_are_read_where_they_are(place: str) -> None:
    pairs, count = sorted_twice("random")
    rows_RH = torch.randn(len(pairs.slot_RJ), 40)
    rows = places(rows_RH, slice(12, len(rows_RH)))[place]
    weights = ExpertProblem(few_rows("random", 1), 40, 24, ACTIVATIONS["silu"], False, torch.float32).weights
    activation = ACTIVATIONS["silu"]
    values = torch.randn(len(pairs.order_P), 24)
    with tiny_tiles():
        addresses = table_kernels.row_addresses(rows, pairs.order_P, pairs.offsets_S, pairs.slot_RJ.shape[1])
        tiles, ranked, _ = table_kernels.tile_table(pairs.offsets_S, len(pairs.order_P), 16)
        h = HiddenStates(torch.empty(len(pairs.order_P), 24), 24)
        a = up_kernels.up(addresses.address_P, weights.up_SFH, False, None, activation, h, tiles, True, TINY)
        dup = outer_kernels.outer(values, addresses.address_P, (24, 40), ranked, torch.float32, TINY)
        gathered = gather_rows(rows, pairs, torch.float32)[:count]
    if place == "nowhere":
        assert not gathered.any()
    else:
        assert torch.equal(gathered, rows_RH[pairs.row_P[:count].long()])
    slot = pairs.slot_P[:count].long()
    want = torch.einsum("ph,pfh->pf", gathered.double(), weights.up_SFH.double()[slot])
    close(h.data[:count], want, 1e-6)
    close(a[:count], activation(want), 1e-6)
    assert h.data[count:].isnan().all() and a[count:].isnan().all(), "nothing past the count is written"
    want_dup = torch.zeros(len(pairs.offsets_S), 24, 40, dtype=torch.float64)
    want_dup.index_add_(0, slot, torch.einsum("pf,ph->pfh", values[:count].double(), gathered.double()))
    close(dup, want_dup, 1e-6)


def test_without_room_in_the_arena_the_output_is_right_and_nothing_is_touched() -> None:
    pairs, count = sorted_twice("random")
    problem = ExpertProblem(few_rows("random", 1), 40, 24, ACTIVATIONS["SwiGLU"], True, torch.float32)
    x = problem.x_RH.nan_to_num()
    arena = Arena(512, torch.device("cpu"))
    arena.bytes.fill_(7)
    h = arena.reserve(48, torch.float32, pairs.count_1)
    with tiny_tiles():
        addresses = table_kernels.row_addresses(
            HiddenStates.of(x), pairs.order_P, pairs.offsets_S, pairs.slot_RJ.shape[1]
        )
        tiles, *_ = table_kernels.tile_table(pairs.offsets_S, len(pairs.order_P), 16)
        weights = problem.weights
        a = up_kernels.up(
            addresses.address_P, weights.up_SFH, False, weights.up_bias_SF, ACTIVATIONS["SwiGLU"], h, tiles, True, TINY
        )
        dh, scaled, _ = dact_kernels.down_backward(
            addresses.address_P, weights.down_SHF, False, ACTIVATIONS["SwiGLU"], h, problem.weight_RJ, pairs.order_P,
            tiles, True, TINY,
        )  # fmt: skip
    assert (arena.bytes == 7).all() and dh.isnan().all() and scaled.isnan().all()
    assert weights.up_bias_SF is not None
    slot = pairs.slot_P[:count].long()
    want = torch.einsum("ph,pfh->pf", x[pairs.row_P[:count].long()], weights.up_SFH[slot]) + weights.up_bias_SF[slot]
    close(a[:count], ACTIVATIONS["SwiGLU"](want), 1e-6)
