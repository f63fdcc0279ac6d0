"""Experts as two grouped matrix products over arrivals sorted by slot.

    arrivals      token 0 chose slots 1 and 0, token 1 chose slot 1          slot_RJ = [[1, 0], [1, -1]]
    pairs         sorted by slot, then by token: (token 0, slot 0), (token 0, slot 1), (token 1, slot 1)
    offsets       end of each slot's pairs: [1, 3]
    h = x[token] @ up[slot],  y = act(h) @ down[slot],  partial[token] += weight * y

The forward saves the pre-activation h, the weights and the order, and the caller saves the arrived tokens. The outputs
of the activation and of the down projection are not saved: with dA = gather(dpartial) @ down (not yet weighted), the
routing weight's gradient is the row sum of dA * A, and A is recomputed from h (SonicMoE, arXiv 2512.14080, section 3).
With `recompute` h is not saved either, and the backward recomputes it. Weight gradients are grouped products over the
pairs; sums over a token's pairs are computed in float32 and in a fixed order.

The six products between sorting and summing are `GroupedProducts`; `Choices` selects how each is computed.

Slots may be in two ranges (`carpool.experts.slot_ranges`): homes and spare slots. Each product is then two launches,
which read and write other rows of the same tensors, all of homes before the weights of spare slots are waited for:

    slots 0-2 are homes, 3 is spare, offsets [3, 3, 5, 9]    rows 0-4 are of homes, rows 5-8 of the spare slot
    forward     up 0-4, down 0-4, wait, up 5-8, down 5-8, sums
    backward    dact and dx likewise, sums, then gradients of the weights, a tensor for each range

Only the device may know how many pairs there are. `arrivals.num_pairs` is then a bound: temporary tensors have that
many rows, but only those that are there are read or written, h goes into an arena, and the host does not wait. With one
exception on CUDA: products of dtypes or sizes that `torch.nn.functional.grouped_mm` does not take there (anything but
bfloat16 with widths that are multiples of 8) are a loop over slots, for which the host asks where each slot ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from carpool.activations import Arena, Arrivals, HiddenStates
from carpool.experts.base import NUM_BASE, ExpertFunction, ExpertWeights
from carpool.experts.gemm.choices import LIBRARY, Choices, default_choices
from carpool.experts.gemm.grouped_products import GroupedProducts
from carpool.experts.pairs import Pairs, count_pairs, slot_sums, sort_pairs, sum_pairs
from carpool.experts.slot_ranges import RangeGradients, SlotRanges


class GroupedExperts:
    """See the module's docstring.

    Args:
        choices: the implementation of each product, if it supports the dtype and the sizes; default: by the shape.
        recompute: recompute the pre-activation in the backward, instead of saving it.
    """

    name = "grouped"
    computes_adapters = can_defer = computes_ranges = True
    options = ("choices", "recompute")

    def __init__(self, function: ExpertFunction, choices: Choices | None = None, recompute: bool = False) -> None:
        self.function, self.choices, self.recompute = function, choices, recompute

    def forward(
        self,
        arrivals: Arrivals,
        weights: ExpertWeights | SlotRanges,
        partial_RH: torch.Tensor,
        arena: Arena | None = None,
        backward: bool = True,
        deferred: list[Callable[[], None]] | None = None,
    ) -> tuple[Any, ...]:
        weight_RJ = arrivals.weight_RJ.contiguous()
        num_pairs = count_pairs(arrivals.slot_RJ, arrivals.num_pairs)
        each: Iterable[GroupedProducts]
        if isinstance(weights, SlotRanges):
            pairs = sort_pairs(arrivals.slot_RJ, weights.num_slots, num_pairs)
            each = self._by_range(weights, pairs, (arrivals.tokens,))
        else:
            pairs = sort_pairs(arrivals.slot_RJ, weights.up_SFH.shape[0], num_pairs)
            each = [GroupedProducts(self.function, weights, pairs, self.choices)]

        keep = backward and not self.recompute
        up = y_PH = None
        ranges: list[GroupedProducts] = []
        for products in each:
            ranges.append(products)
            up = products.up(arrivals.tokens, arena, keep, out=up)
            if deferred is None:
                y_PH = products.down(up[0], out_PH=y_PH)
        assert up is not None
        a_PF, h = up
        of_sums = pairs, partial_RH, not arrivals.tokens.gaps, weight_RJ, products.bias_SH
        if y_PH is not None:
            sum_pairs(y_PH, *of_sums)
        elif deferred is not None:
            assert len(ranges) == 1, "what is fetched is not there any more"
            products.inner_of_down(a_PF)
            deferred.append(lambda: sum_pairs(products.down(a_PF), *of_sums))
        inner = products.inner if backward else (None, None)
        tiles: tuple[torch.Tensor | None, ...] = ()
        for products in ranges:
            tiles += products.tiles or (None, None)
        return weight_RJ, h if keep else None, *inner, *pairs, *tiles

    def backward(
        self,
        saved: tuple[Any, ...],
        x: HiddenStates,
        weights: ExpertWeights | SlotRanges,
        dpartial: HiddenStates,
        dx_RH: torch.Tensor,
        needs_dweights: bool,
    ) -> tuple[torch.Tensor, Callable[[], ExpertWeights | RangeGradients] | None]:
        weight_RJ, h, inner, pairs, tiles = *saved[:2], saved[2:4], Pairs._make(saved[4:8]), saved[8:]
        each: Iterable[GroupedProducts]
        if isinstance(weights, SlotRanges):
            like, each = weights.homes, self._by_range(weights, pairs, (x, dpartial), tiles, inner)
        else:
            like, of_all = weights, None if tiles[0] is None else tiles
            each = [GroupedProducts(self.function, weights, pairs, self.choices, of_all, inner)]
        needs_any = needs_dweights or like.adapted
        # With `recompute`, of all ranges.
        again = out = dx_PH = None
        ranges: list[GroupedProducts] = []
        for products in each:
            ranges.append(products)
            if saved[1] is None:
                again = products.up(x, None, keep=True, wants_a=False, out=again)
                h = again[1]
            out = products.dact(h, dpartial, weight_RJ, needs_any, out=out)
            dx_PH = products.dx(out[0], out_PH=dx_PH)
        assert out is not None and dx_PH is not None
        dh_PF1, scaled_a_PF, dweight_RJ = out
        del h, again, out
        sum_pairs(dx_PH, pairs, dx_RH, not x.gaps)
        del dx_PH
        if not needs_any:
            return dweight_RJ, None

        of_down, ddowns = [], []
        for one in ranges:
            of_down.append(one.down_adapter_gradients(dpartial, scaled_a_PF, weight_RJ))
            ddowns.append(one.ddown(dpartial, scaled_a_PF) if needs_dweights else None)
        ddown_bias = None
        if needs_dweights and like.down_bias_SH is not None:
            ddown_bias = slot_sums(products.dy(dpartial), pairs, weight_RJ)
        # The gradients' memory may be reused from here on, and that of weights that were fetched.
        products.addresses.clear()
        if isinstance(weights, SlotRanges):
            for one in ranges:
                one.drop_weights()

        def finish() -> ExpertWeights | RangeGradients:
            dup_bias = slot_sums(dh_PF1, pairs) if needs_dweights and like.up_bias_SF is not None else None
            found = []
            for one, ddown, adapter in zip(ranges, ddowns, of_down, strict=True):
                of_up = one.up_adapter_gradients(dh_PF1, x)
                base: tuple[torch.Tensor | None, ...] = (None,) * NUM_BASE
                if needs_dweights:
                    of_up_bias = None if dup_bias is None else dup_bias[one.slots]
                    of_down_bias = None if ddown_bias is None else ddown_bias[one.slots]
                    base = one.dup(dh_PF1, x), ddown, of_up_bias, of_down_bias
                found.append(ExpertWeights.of((*base, *of_up, *adapter)))
            if len(found) == 2:
                return RangeGradients(*found)
            # Also of a piece without pairs, whose sum with others' is taken.
            return weights.apart(found[0]) if isinstance(weights, SlotRanges) else found[0]

        return dweight_RJ, finish

    def _by_range(
        self,
        weights: SlotRanges,
        pairs: Pairs,
        rows: Sequence[HiddenStates],
        tiles: Sequence[torch.Tensor | None] = (),
        inner: tuple[torch.Tensor | None, ...] = (None, None),
    ) -> Iterator[GroupedProducts]:
        """The products of homes, then those of spare slots, for which the current stream then waits. One for all where
        some product of these rows is the library's, which takes no ranges."""
        given = [None if a is None or b is None else (a, b) for a, b in zip(tiles[::2], tiles[1::2], strict=True)]
        choices = _choices_of_ranges(self.choices, weights, pairs)
        of_each = given if len(given) == 2 else [None, None]
        homes = GroupedProducts(self.function, weights.homes, pairs, choices, of_each[0], inner)
        if homes.take_ranges(rows):
            yield homes
            yield GroupedProducts(self.function, weights.spare, pairs, choices, of_each[1], inner, homes, weights.first)
        else:
            of_all = given[0] if len(given) == 1 else None
            yield GroupedProducts(self.function, weights.stacked(), pairs, self.choices, of_all, inner)


def _choices_of_ranges(choices: Choices | None, weights: SlotRanges, pairs: Pairs) -> Choices:
    """As without ranges, but fused, where a device has that: the library's products take no range of slots. Who chose
    the library for all products has it."""
    given = weights.homes.up_SFH.device, pairs.order_P.shape[0] // weights.num_slots
    fused = default_choices(*given, True)
    choices = choices or default_choices(*given, weights.homes.adapted or weights.homes.quantised)
    ways = {stage: way for stage, way in choices.to_dict().items() if way != LIBRARY}
    return Choices(**(fused.to_dict() | ways)) if ways else choices
