"""A ride in which similar rows travel as one (`carpool.transport.merging`). LOSSY.

    choices (token, expert)     groups of them     one row with one choice for each group rides     each choice takes
    its group's output, weighted where the token is

Choices on this rank are groups of their own, so they lose nothing. What rides is exact: the gradients are those of the
function that is computed, means and all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

import torch

from carpool.metrics.counters import LayerStats, Traffic
from carpool.ride.setup import RideSetup
from carpool.routing import Routing
from carpool.transport.merging import Merger

Made = TypeVar("Made")


class _MergedTraffic(Traffic):
    """Counts what rides in a layer's counts, beside the baseline of all choices that there were."""

    def __init__(self, layer: Traffic, choices_W: Sequence[int]) -> None:
        self.num_ranks, self.rank = layer.num_ranks, layer.rank
        self._layer, self._choices_W = layer, choices_W

    def add(
        self, verb: str, rows_W: Sequence[int], row_bytes: int, choices_W: Sequence[int] = (), baseline_bytes: int = 0
    ) -> None:
        self._layer.add(verb, rows_W, row_bytes, self._choices_W if choices_W else (), baseline_bytes)

    def tally(
        self, verb: str, row_bytes: int, baseline_bytes: int, device: torch.device, ranks: tuple[int, ...] | None = None
    ) -> torch.Tensor:
        """The layer's, in which choices of merged rows take no bytes. Asked for once by each verb of a ride."""
        if baseline_bytes:
            self._layer.add(verb, (), 0, self._choices_W, baseline_bytes)
        return self._layer.tally(verb, row_bytes, 0, device, ranks)


class _MergedStats(LayerStats):
    """Tokens are counted before they are merged."""

    def __init__(self, layer: LayerStats, choices_W: Sequence[int]) -> None:
        self.traffic, self.meter, self.tokens_dispatched = _MergedTraffic(layer.traffic, choices_W), layer.meter, 0

    def count(self, expert_TK: torch.Tensor, weight_TK: torch.Tensor) -> None:
        pass


# How many groups there are depends on values.
@torch._disable_dynamo
def ride_merged(
    x_TH: torch.Tensor,
    routing: Routing,
    slot_TK: torch.Tensor,
    setup: RideSetup,
    merger: Merger,
    ride_rows: Callable[[torch.Tensor, Routing, torch.Tensor, RideSetup], tuple[torch.Tensor, Made]],
) -> tuple[torch.Tensor, Made]:
    """Merge rows, let the groups ride, and give each choice its group's output. Waits for the device.

    Args:
        x_TH, routing, slot_TK: as of `ride`.
        ride_rows: a ride of (x_CH, routing, slot_C1, setup), with one choice per row.

    Returns:
        y_TH, and what else `ride_rows` returned."""
    transport, stats = setup.transport, setup.stats
    assert routing.weight_TK is not None
    (num_tokens, top_k), own = slot_TK.shape, transport.rank
    stats.count(routing.expert_TK, routing.weight_TK)
    routing = routing.of_slices(top_k // max(1, routing.expert_TK.shape[1]))
    weight_TK = routing.weight_TK
    assert weight_TK is not None
    stats.tokens_dispatched += num_tokens
    choice_N = (slot_TK.reshape(-1) >= 0).nonzero().squeeze(1)
    token_N, slot_N = choice_N // max(1, top_k), slot_TK.reshape(-1)[choice_N]
    rank_N = slot_N // transport.slots_per_rank
    leaves_N = rank_N != own
    rows_NH = x_TH[token_N]
    away_M, here_M = leaves_N.nonzero().squeeze(1), (~leaves_N).nonzero().squeeze(1)
    group_M, number = merger.groups(rows_NH[away_M], slot_N[away_M])
    x_CH = torch.cat([merger.merged(rows_NH[away_M], group_M, number), rows_NH[here_M]])
    group_N = torch.empty_like(choice_N)
    group_N[away_M] = group_M
    group_N[here_M] = number + torch.arange(len(here_M), device=group_N.device)

    def of_group(of_TK: torch.Tensor) -> torch.Tensor:
        # All of a group have the same slot, and the same expert.
        of_C = of_TK.new_empty(x_CH.shape[0], 1)
        of_C[group_N, 0] = of_TK.reshape(-1)[choice_N]
        return of_C

    choices_W = torch.bincount(rank_N.long(), minlength=transport.num_ranks).tolist()
    counted = replace(setup, stats=_MergedStats(stats, choices_W))
    ones = Routing(of_group(routing.expert_TK), weight_TK.new_ones(x_CH.shape[0], 1))
    y_CH, made = ride_rows(x_CH, ones, of_group(slot_TK), counted)
    y_NH = y_CH[group_N].float()
    if merger.residual:
        y_NH = y_NH + (rows_NH - x_CH[group_N]).float()
    y_NH = y_NH * weight_TK.reshape(-1, 1)[choice_N]
    y_PH = y_NH.new_zeros(num_tokens * top_k, x_TH.shape[1]).index_copy(0, choice_N, y_NH)
    return y_PH.view(num_tokens, top_k, x_TH.shape[1]).sum(1).to(y_CH.dtype), made
