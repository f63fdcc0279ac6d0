"""Experts over two ranges of slots in Triton's interpreter: bit by bit those over one tensor of all slots.

Spare slots are waited for when homes have been computed, and are overwritten as soon as the experts have returned.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock
from weakref import ref

import pytest
import torch

from carpool.experts import ExpertWeights, GroupedExperts
from carpool.experts.gemm import grouped
from carpool.experts.gemm.choices import Choices
from carpool.experts.gemm.grouped_products import GroupedProducts
from carpool.experts.pairs import sort_pairs
from carpool.experts.slot_ranges import RangeGradients, SlotRanges, stack, travelling
from tests.experts_problem import ACTIVATIONS, ExpertProblem
from tests.interpreted.test_experts import nan_in_fresh_memory  # noqa: F401
from tests.interpreted.test_gemm import few_rows, tiny_tiles


class InRanges(GroupedExperts):
    """Gets the weights of all slots, and computes homes and spare slots apart.

    Attributes:
        held, first: homes, and where spare slots begin.
        launched: of each forward and backward, the products before the spare slots were waited for."""

    held, first = 3, 3

    def __init__(self, *given: Any, **settings: Any) -> None:
        super().__init__(*given, **settings)
        self.launched: list[str] = []

    def ranges(self, weights: ExpertWeights) -> tuple[SlotRanges, Callable[[], None]]:
        rows = [one[self.first :].clone() for one in travelling(weights).values()]
        homes = ExpertWeights._make(None if one is None else one[: self.held] for one in weights)

        def fetched() -> list[torch.Tensor]:
            self.launched.append("wait")
            return rows

        def release() -> None:
            for one in rows:
                one.view(torch.uint8).fill_(255)

        return SlotRanges(homes, self.first, len(weights.up_SFH) - self.first, fetched), release

    def forward(self, arrivals: Any, weights: Any, *rest: Any) -> Any:
        weights, release = self.ranges(weights)
        saved = super().forward(arrivals, weights, *rest)
        release()
        return saved

    def backward(self, saved: Any, x: Any, weights: Any, *rest: Any) -> Any:
        weights, release = self.ranges(weights)
        dweight_RJ, finish = super().backward(saved, x, weights, *rest)
        release()
        assert finish is not None

        def stacked() -> ExpertWeights:
            found = finish()
            assert isinstance(found, RangeGradients), "what pieces of a ride return is added up"
            assert {len(one) for one in found.homes if one is not None} == {self.held}
            pairs = zip(*found, strict=True)
            return ExpertWeights._make(None if a is None or b is None else stack(a, self.first, b) for a, b in pairs)

        return dweight_RJ, stacked


@pytest.mark.parametrize(
    ("name", "transposed", "ranks", "quantised", "held", "way", "recompute", "pattern"),
    [
        ("gpt-oss", False, (0, 0), False, 3, "flat", False, "random"),
        ("SwiGLU", True, (0, 0), False, 2, "square", True, "random"),
        ("relu2", False, (8, 4), False, 1, "wide", False, "random"),
        ("gpt-oss", True, (0, 19), False, 3, "flat", True, "random"),
        ("SwiGLU", False, (3, 8), True, 3, "wide", False, "random"),
        # All at once, from one tensor: no home, no row, an adapter too large for the fused products, and the library's.
        ("SwiGLU", False, (0, 0), False, 0, "flat", False, "random"),
        ("SwiGLU", False, (8, 4), False, 3, "flat", True, "no rows"),
        ("SwiGLU", False, (129, 8), False, 3, "flat", False, "random"),
        ("SwiGLU", True, (4, 0), True, 2, "library", False, "random"),
    ],
)
def test_ranges_have_the_bits_of_one_tensor(
    name: str,
    transposed: bool,
    ranks: tuple[int, int],
    quantised: bool,
    held: int,
    way: str,
    recompute: bool,
    pattern: str,
) -> None:
    slot_RJ, slots = few_rows(pattern, 3)
    # A rank with fewer homes than another has slots that are always empty.
    slot_RJ = torch.where((slot_RJ >= held) & (slot_RJ < 3), -1, slot_RJ)
    hidden, inner = (64, 128) if quantised else (24, 40)
    problem = ExpertProblem(
        (slot_RJ, slots), hidden, inner, ACTIVATIONS[name], True, torch.float32, transposed, ranks, frozen=quantised
    )
    if quantised:
        problem.quantise("nf4")
    given = problem.function, Choices.all(way), recompute
    ours = InRanges(*given)
    ours.held = held
    apart = held > 0 and max(ranks) <= 128 and way != "library" and len(slot_RJ) > 0

    def watched(product: str) -> Any:
        right = getattr(GroupedProducts, product)

        def launch(self: Any, *rest: Any, **settings: Any) -> Any:
            ours.launched.append(product)
            return right(self, *rest, **settings)

        return mock.patch.object(GroupedProducts, product, launch)

    with tiny_tiles():
        want = problem.run(GroupedExperts(*given), use_arena=transposed, all_rows=False)
        with watched("up"), watched("down"), watched("dact"), watched("dx"):
            got = problem.run(ours, use_arena=transposed, all_rows=False)
    assert set(got) == set(want)
    for field, tensor in got.items():
        other = want[field]
        if field in ("partial", "dx"):
            tensor, other = tensor[problem.wanted_R], other[problem.wanted_R]
        elif field.startswith("d") and field != "dweight":
            assert not tensor[held:3].any()
        assert torch.equal(tensor, other), field
    forward, backward = ["up", "down"], [*["up"] * recompute, "dact", "dx"]
    if apart:
        assert ours.launched == [*forward, "wait", *forward, *backward, "wait", *backward]
    else:
        assert ours.launched == ["wait", *forward, "wait", *backward]


@pytest.mark.parametrize("way", ["flat", "library"])
def test_delayed_gradients_hold_no_fetched_weight(way: str) -> None:
    problem = ExpertProblem(few_rows("random", 3), 24, 40, ACTIVATIONS["SwiGLU"], True, torch.float32, ranks=(8, 4))
    held = []

    class Watched(InRanges):
        def ranges(self, weights: ExpertWeights) -> tuple[SlotRanges, Callable[[], None]]:
            homes = ExpertWeights._make(None if one is None else one[:3] for one in weights)
            coming = [[one[3:].clone() for one in travelling(weights).values()]]
            ranges = SlotRanges(homes, 3, 2, coming.pop)
            held[:] = [ref(one) for one in coming[0]]

            def release() -> None:
                ranges.release()
                gc.collect()
                assert not any(one() is not None for one in held)

            return ranges, release

    with tiny_tiles():
        problem.run(Watched(problem.function, Choices.all(way)), use_arena=False, all_rows=False)
    assert held


def test_only_who_chose_the_library_for_all_products_has_it() -> None:
    problem = ExpertProblem("random", 8, 8, ACTIVATIONS["silu"], False, torch.float32)
    weights, _ = InRanges(problem.function).ranges(problem.weights)
    pairs = sort_pairs(problem.slot_RJ, 5, 100)
    with mock.patch.object(grouped, "default_choices", lambda *shape: Choices.all("square" if shape[-1] else "wide")):
        used = [grouped._choices_of_ranges(one, weights, pairs) for one in (None, Choices(up="flat"), Choices())]
    assert used == [Choices.all("wide"), replace(Choices.all("square"), up="flat"), Choices()]
