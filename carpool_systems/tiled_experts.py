"""Grouped experts on rows that come in parts, while later parts are under way (`carpool_systems.tiles`).

A part is a range of every rank's tokens (`carpool.activations.arrivals.Ready`). Pairs are sorted as ever, by slot, and
within a slot by part, so that

    what is of a slot      lies together: gradients of weights are one product over all parts, as without parts
    what is of a part      are tiles of their own, listed part by part (`table_kernels.tile_table`)

    slots 0 and 1, parts a and b, 8 pairs       0a 0a 0b | 1b 1b 1b 1b 1b
    tiles of 4 pairs                            a: 0a 0a      b: 0b, 1b 1b 1b 1b, 1b

    forward     sort | up, which waits for each part | down and sum of part a | of part b
    backward    dact, which waits for each part | dx and sum of part a | of part b | dup, ddown

Outputs and gradients of rows are those of `GroupedExperts` bit by bit: rows are computed alone, and a row's pairs are
added in the order of its columns. Gradients of weights add the same products in float32, in another order.

A part of a slot may end within a tile, so there are up to `parts` times as many tiles that are not full. A slot with
few pairs is better off without parts.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from carpool.activations import Arena, Arrivals, HiddenStates, Ready
from carpool.experts.base import Activation, Experts, ExpertWeights
from carpool.experts.gemm.choices import LIBRARY, Choices, default_choices
from carpool.experts.gemm.grouped import GroupedExperts
from carpool.experts.gemm.grouped_products import GroupedProducts, has_kernels
from carpool.experts.pairs import Pairs, count_pairs, slot_sums, sort_pairs

FUSED = "flat"  # the way of a stage that has to be fused, where one was chosen that cannot be used
# Ways of which a multiprocessor holds one program. A kernel that waits must not spread over more multiprocessors than
# it has programs for, or none are left to the rides that it waits for.
ALONE = ("wide", "flat")


def why_no_parts(experts: Experts, weights: ExpertWeights) -> str | None:
    """Why these experts cannot compute on rows that come in parts, or None if they can."""
    if not isinstance(experts, GroupedExperts):
        return f"experts {experts.name!r} have no kernels that wait for rows, only 'grouped' has"
    if weights.adapted or weights.quantised:
        return f"kernels that wait for rows have no {'adapters' if weights.adapted else 'quantised base'}"
    if not isinstance(experts.function.activation, Activation):
        return "their activation is a function that kernels cannot compute (carpool.experts.Activation describes one)"
    sizes = weights.down_SHF.shape[1:]
    if any(size % 8 for size in sizes):
        return f"kernels take widths that are multiples of 8, not {sizes[0]} and {sizes[1]}"
    if not has_kernels(weights.up_SFH):
        return f"kernels take bfloat16 on Hopper GPUs, not {weights.up_SFH.dtype} on {weights.up_SFH.device}"
    return None


class Forward:
    """One forward: `part` for each part in turn, then `saved` is what the backward needs.

    Args: as of `GroupedExperts.forward`; the arrivals come in parts.
    """

    def __init__(
        self,
        experts: GroupedExperts,
        arrivals: Arrivals,
        weights: ExpertWeights,
        partial_RH: torch.Tensor,
        arena: Arena | None,
        backward: bool,
    ) -> None:
        assert arrivals.ready is not None and arrivals.tokens.gaps
        self.ready, self.partial_RH = arrivals.ready, partial_RH
        self.weight_RJ = arrivals.weight_RJ.contiguous()
        pairs, tiles = sort_parts(arrivals, weights.up_SFH.shape[0])
        self.stages = stages_of(experts, weights, pairs, tiles)
        keep = backward and not experts.recompute
        self.h: HiddenStates | None = None
        if tiles is not None:
            self.a_PF, self.h = self.stages.up(arrivals.tokens, arena, keep, ready=self.ready)
            self.y_PH = self.a_PF.new_empty(self.a_PF.shape[0], partial_RH.shape[1])
        self.kept = keep and tiles is not None

    def part(self, part: int) -> None:
        """Write the sums of one part's rows."""
        stages, bias_SH = self.stages, self.stages.weights.down_bias_SH
        if stages.tiles is not None:
            stages.down(self.a_PF, part, self.y_PH)
            _sum_part(self.y_PH, stages.pairs, self.partial_RH, self.ready, part, self.weight_RJ, bias_SH)

    @property
    def saved(self) -> tuple[Any, ...]:
        tiles = self.stages.tiles or (None,) * 3
        return self.weight_RJ, self.h if self.kept else None, *tiles, *self.stages.pairs


class Backward:
    """One backward: `part` for each part in turn, then `dweights`.

    Args: as of `GroupedExperts.backward`; the gradients come in parts.

    Attributes:
        dweight_RJ: complete at once.
    """

    def __init__(
        self,
        experts: GroupedExperts,
        saved: tuple[Any, ...],
        x: HiddenStates,
        weights: ExpertWeights,
        dpartial: HiddenStates,
        ready: Ready,
        needs_dweights: bool,
    ) -> None:
        weight_RJ, h, *tiles = saved[:5]
        self.pairs, self.ready, self.weights = Pairs._make(saved[5:]), ready, weights
        self.weight_RJ, self.dpartial, self.needs_dweights = weight_RJ, dpartial, needs_dweights
        self.stages = stages_of(experts, weights, self.pairs, None if tiles[0] is None else tuple(tiles))
        if self.stages.tiles is None:
            self.dweight_RJ = torch.zeros_like(weight_RJ)
            return
        if h is None:
            _, h = self.stages.up(x, None, keep=True, wants_a=False)
        self.dh_PF1, self.scaled_PF, self.dweight_RJ = self.stages.dact(h, dpartial, weight_RJ, needs_dweights, ready)
        self.dx_PH = self.dh_PF1.new_empty(self.dh_PF1.shape[0], dpartial.width)

    def part(self, part: int, dx_RH: torch.Tensor) -> None:
        """Write the gradients of one part's rows."""
        if self.stages.tiles is not None:
            self.stages.dx(self.dh_PF1, part, self.dx_PH)
            _sum_part(self.dx_PH, self.pairs, dx_RH, self.ready, part)
            if part == self.ready.parts - 1:
                del self.dx_PH

    def ddown(self) -> None:
        """The last that reads the gradients that came."""
        if not self.needs_dweights or self.stages.tiles is None:
            return
        self._ddown = self.stages.ddown(self.dpartial, self.scaled_PF)
        self._ddown_bias = None
        if self.weights.down_bias_SH is not None:
            self._ddown_bias = slot_sums(self.stages.dy(self.dpartial), self.pairs, self.weight_RJ)

    def dweights(self, x: HiddenStates) -> ExpertWeights | None:
        """After `ddown`: the gradients of the weights, if they are needed. `x`: the rows that came in the forward."""
        if not self.needs_dweights:
            return None
        if self.stages.tiles is None:
            return ExpertWeights._make(None if w is None else torch.zeros_like(w) for w in self.weights)
        dup_bias = None if self.weights.up_bias_SF is None else slot_sums(self.dh_PF1, self.pairs)
        return ExpertWeights(self.stages.dup(self.dh_PF1, x), self._ddown, dup_bias, self._ddown_bias)


def sort_parts(arrivals: Arrivals, slots: int) -> tuple[Pairs, tuple[torch.Tensor, ...] | None]:
    """The pairs, by slot and then by part, and their tiles; None: there is nothing to compute here."""
    ready, slot_RJ = arrivals.ready, arrivals.slot_RJ.contiguous()
    assert ready is not None
    num_pairs = count_pairs(slot_RJ, arrivals.num_pairs)
    by_group = sort_pairs(ready.group_RJ, slots * ready.parts, num_pairs)
    offsets_S = by_group.offsets_S[ready.parts - 1 :: ready.parts].contiguous()
    pairs = by_group._replace(slot_RJ=slot_RJ, offsets_S=offsets_S)
    if slots == 0 or pairs.order_P.shape[0] == 0:
        return pairs, None
    from carpool.experts.gemm import gemm_tiles, table_kernels

    tiles = table_kernels.tile_table(by_group.offsets_S, pairs.order_P.shape[0], gemm_tiles.TILE_ROWS, ready.parts)
    return pairs, tiles


def stages_of(
    experts: GroupedExperts, weights: ExpertWeights, pairs: Pairs, tiles: tuple[torch.Tensor, ...] | None
) -> GroupedProducts:
    """The experts' own choices, where they can be used here."""
    pairs_per_slot = pairs.order_P.shape[0] // max(1, weights.up_SFH.shape[0])
    choices = experts.choices or default_choices(weights.up_SFH.device, pairs_per_slot)
    return GroupedProducts(experts.function, weights, pairs, fused(choices), tiles)


def fused(choices: Choices) -> Choices:
    """Products of rows by fused kernels; those that wait, in one of the ways in `ALONE`."""
    ways = {stage: getattr(choices, stage) for stage in ("down", "dx") if getattr(choices, stage) != LIBRARY}
    ways |= {stage: getattr(choices, stage) for stage in ("up", "dact") if getattr(choices, stage) in ALONE}
    return replace(choices, **{stage: ways.get(stage, FUSED) for stage in ("up", "down", "dact", "dx")})


def _sum_part(
    values_PH: torch.Tensor,
    pairs: Pairs,
    out_RH: torch.Tensor,
    ready: Ready,
    part: int,
    weight_RJ: torch.Tensor | None = None,
    bias_SH: torch.Tensor | None = None,
) -> None:
    """`sum_pairs` of one part's rows."""
    from carpool.experts import pair_kernels

    positions, slots, begins = pairs.position_RJ, pairs.slot_RJ, ready.begins_NW
    pair_kernels.sum_part(values_PH, positions, out_RH, weight_RJ, bias_SH, slots, begins, part, ready.slab)
