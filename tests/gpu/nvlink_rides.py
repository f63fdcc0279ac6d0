"""Rides whose answer is known bit by bit: random routings, experts that only scale, and what must come of them.

A rank's experts scale a row by the sum over its slots s of weight_s (s + 1) (rank + 1). Weights are multiples of 1/64,
so that this sum is exact in whatever order it is added, and what is left to rounding is the same on both sides: one
rounding of each partial sum, additions in float32 in the order of ranks, one rounding of the total.

    4 steps of a ride           checked when it ends
    dispatch                    every row, slot and weight, where the plan's definition says; how many came
    combine                     sums
    dispatch_gradients          every row
    combine_gradients           sums, and the gradient of each weight

Everybody's routing and rows are known to every rank, so nothing is gathered to check. Mismatches are counted on the
device: no step waits for it.

Letters: W ranks, T tokens of the largest rank, K choices, S slots of a rank, R rows of a buffer, H hidden.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from carpool.metrics.counters import Traffic
from carpool.transport import Arrivals, Pending

KINDS = ("rows", "slots", "weights", "counts", "sums", "gradient rows", "gradient sums", "weight gradients", "traffic")
# Which of two rides takes its next step; at most two of them are between a dispatch and its combine.
PATTERNS = ("aaaabbbb", "ababbaba", "abbaabba", "aababbab")


def rows_of(arrivals: Arrivals, dtype: torch.dtype) -> torch.Tensor:
    """(R, H) rows that came, those at home included, in the dtype of the layer if they came as FP8."""
    return arrivals.tokens.widened(dtype).contiguous(arrivals.slot_RJ.shape[0])


def gradient_rows(result: Any, num_rows: int, dtype: torch.dtype) -> torch.Tensor:
    """(R, H) rows that `dispatch_gradients` gave, as `rows_of`."""
    rows: torch.Tensor = result.widened(dtype).contiguous(num_rows)
    return rows


@dataclass(frozen=True)
class Shape:
    """What is the same in many rides, and compiled into kernels; `tokens` is T."""

    ranks: int
    hidden: int
    top_k: int
    slots: int
    dtype: torch.dtype = torch.bfloat16
    tokens: int = 600

    def __str__(self) -> str:
        return f"H {self.hidden} K {self.top_k} S {self.slots} {str(self.dtype).removeprefix('torch.')}"


@dataclass(frozen=True)
class Case:
    """One routing of all ranks, padded to T tokens: slot -1 past a rank's own number of tokens.

    sizes: tokens of each rank. slot_WTK: int32, -1: none. weight_WTK: float32, also where no slot is. x_WTH, dy_WTH."""

    sizes: tuple[int, ...]
    slot_WTK: torch.Tensor
    weight_WTK: torch.Tensor
    x_WTH: torch.Tensor
    dy_WTH: torch.Tensor


def draw_sizes(ranks: int, tokens: int, draw: random.Random) -> tuple[int, ...]:
    """Tokens of each rank: ragged, few, full, of one rank only, or none at all."""
    kind = draw.choice(("ragged", "ragged", "ragged", "few", "full", "one", "none"))
    sizes = {
        "ragged": [draw.randint(0, tokens) for _ in range(ranks)],
        "few": [draw.randint(0, 3) for _ in range(ranks)],
        "full": [tokens] * ranks,
        "one": [0] * ranks,
        "none": [0] * ranks,
    }[kind]
    if kind == "one":
        sizes[draw.randrange(ranks)] = tokens
    return tuple(sizes)


def draw_routings(
    shape: Shape, sizes: list[tuple[int, ...]], generator: torch.Generator, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """(B, W, T, K) slots, distinct ones for each token, and weights. Some routings prefer some slots by a lot, some
    have holes, some have nothing but holes."""
    place: dict[str, Any] = {"generator": generator, "device": device}
    count, everywhere = len(sizes), shape.ranks * shape.slots
    size = (count, shape.ranks, shape.tokens)
    skew = torch.randint(4, (count, 1, 1, 1), **place)
    score = torch.rand(*size, everywhere, **place) + skew * torch.rand(count, 1, 1, everywhere, **place)
    choices = min(shape.top_k, everywhere)
    slot = torch.full((*size, shape.top_k), -1, dtype=torch.int32, device=device)
    slot[..., :choices] = score.topk(choices, dim=-1).indices.int()
    share = torch.tensor([0.0, 0.0, 0.1, 0.3, 0.6, 1.0], device=device)
    holes = share[torch.randint(len(share), (count, 1, 1, 1), **place)]
    slot.masked_fill_(torch.rand(slot.shape, **place) < holes, -1)
    past = torch.arange(shape.tokens, device=device) >= torch.tensor(sizes, device=device)[:, :, None]
    slot.masked_fill_(past[..., None], -1)
    return slot, torch.randint(1, 65, slot.shape, **place) / 64.0


class Mismatches:
    """Counted on the device, by kind; and the number of the first case that had any."""

    def __init__(self, device: torch.device) -> None:
        self.counts = torch.zeros(len(KINDS), dtype=torch.int64, device=device)
        self.first = torch.full((1,), 2**62, dtype=torch.int64, device=device)
        self.number = 0

    def add(self, kind: str, wrong: torch.Tensor) -> None:
        """Count what is True in `wrong`."""
        count = wrong.sum()
        self.counts[KINDS.index(kind)] += count
        self.first.clamp_(max=torch.where(count > 0, self.number, 2**62))

    def __str__(self) -> str:
        found = {kind: n for kind, n in zip(KINDS, self.counts.tolist(), strict=True) if n}
        return f"{sum(found.values())} mismatches" + (f" {found}, first in case {int(self.first)}" if found else "")


class Ride:
    """One case on one rank, forward and backward, step by step: `start` sends, `finish` waits, checks and computes.

    Attributes:
        row_WT: the row of this rank's buffer where each token of each rank lands, R if nowhere.
        want_WT: whether it is wanted here.
        y_TH, dx_TH: what came back, once it has.
    """

    def __init__(self, transport: Any, shape: Shape, case: Case, traffic: Traffic, found: Mismatches) -> None:
        self.transport, self.shape, self.case, self.traffic, self.found = transport, shape, case, traffic, found
        self.rank, self.number = transport.rank, found.number
        self.device = case.slot_WTK.device
        capacity, most = transport.buffers.capacity, transport.buffers.most
        self.num_rows = (shape.ranks - 1) * capacity + most
        here = case.slot_WTK // shape.slots == self.rank
        self.local_WTK = torch.where(here, case.slot_WTK % shape.slots, -1)
        self.want_WT = here.any(2)
        place_WT = self.want_WT.cumsum(1) - 1
        place_WT[self.rank] = torch.arange(shape.tokens, device=self.device)
        # Slabs are in the order of the ranks that follow; the own one is the last.
        slab_W1 = ((torch.arange(shape.ranks, device=self.device) - self.rank - 1) % shape.ranks)[:, None]
        room_W1 = torch.where(slab_W1 == shape.ranks - 1, most, capacity)
        self.row_WT = torch.where(self.want_WT & (place_WT < room_W1), place_WT + capacity * slab_W1, self.num_rows)

        own = (self.rank, slice(case.sizes[self.rank]))
        self.slot_TK, self.weight_TK = case.slot_WTK[own], case.weight_WTK[own]
        self.x_TH, self.dy_TH = case.x_WTH[own], case.dy_WTH[own]
        self.y_TH: torch.Tensor | None = None
        self.dx_TH: torch.Tensor | None = None
        self.steps: list[tuple[Callable[[], Pending], Callable[[Pending], None]]] = [
            (self._dispatch, self._arrived),
            (self._combine, self._summed),
            (self._dispatch_gradients, self._gradients_arrived),
            (self._combine_gradients, self._gradients_summed),
        ]

    def start(self) -> Pending:
        """Begin the next step."""
        return self.steps[0][0]()

    def finish(self, pending: Pending) -> None:
        """End the step that `start` began."""
        self.found.number = self.number
        self.steps.pop(0)[1](pending)

    def step(self) -> None:
        self.finish(self.start())

    # -- forward ------------------------------------------------------------------------------------------------

    def _dispatch(self) -> Pending:
        self.route = self.transport.plan(self.slot_TK, self.weight_TK, self.traffic)
        return self.transport.dispatch(self.x_TH, self.route)

    def _arrived(self, pending: Pending) -> None:
        arrivals = pending.wait()
        rows_RH = rows_of(arrivals, self.shape.dtype)
        self.slot_RK, self.weight_RK = arrivals.slot_RJ, arrivals.weight_RJ
        self._check_rows("rows", rows_RH, self.case.x_WTH)
        self.found.add("slots", self._scattered(self.local_WTK, -1) != self.slot_RK)
        weight_WTK = self.case.weight_WTK.masked_fill(self.local_WTK < 0, 0.0)
        self.found.add("weights", self._scattered(weight_WTK, 0.0) != self.weight_RK)
        sender_W = (torch.arange(self.shape.ranks, device=self.device) + self.rank + 1) % self.shape.ranks
        came_W = self.want_WT.sum(1)[sender_W]
        came_W[-1] = 0  # the own rows are at home
        self.found.add("counts", arrivals.tokens.came_W != came_W)
        self._write_partial(rows_RH)

    def _combine(self) -> Pending:
        return self.transport.combine(self.route, self.partial_RH)

    def _summed(self, pending: Pending) -> None:
        self.y_TH = pending.wait()
        assert self.y_TH is not None
        self.found.add("sums", self.y_TH != scaled(self.x_TH, self.slot_TK, self.weight_TK, self.shape))

    # -- backward -----------------------------------------------------------------------------------------------

    def _dispatch_gradients(self) -> Pending:
        return self.transport.dispatch_gradients(self.dy_TH, self.route)

    def _gradients_arrived(self, pending: Pending) -> None:
        rows_RH = gradient_rows(pending.wait(), self.num_rows, self.shape.dtype)
        self._check_rows("gradient rows", rows_RH, self.case.dy_WTH)
        self._write_partial(rows_RH)
        factor_RK = (self.slot_RK + 1 + self.shape.slots * self.rank).float()
        # Where there is no slot nothing may be read.
        self.dweight_RK = torch.where(self.slot_RK < 0, torch.nan, rows_RH[:, :1].float() * factor_RK)

    def _combine_gradients(self) -> Pending:
        return self.transport.combine_gradients(self.route, self.partial_RH, self.dweight_RK)

    def _gradients_summed(self, pending: Pending) -> None:
        self.dx_TH, dweight_TK = pending.wait()
        assert self.dx_TH is not None
        self.found.add("gradient sums", self.dx_TH != scaled(self.dy_TH, self.slot_TK, self.weight_TK, self.shape))
        want_TK = torch.where(self.slot_TK < 0, 0.0, self.dy_TH[:, :1].float() * (self.slot_TK + 1).float())
        self.found.add("weight gradients", dweight_TK != want_TK)

    # -- how ----------------------------------------------------------------------------------------------------

    def _write_partial(self, rows_RH: torch.Tensor) -> None:
        self.partial_RH = self.route.new_partial(self.shape.hidden, self.shape.dtype, self.device)
        scale_rows(rows_RH, self.slot_RK, self.weight_RK, self.rank, self.partial_RH)

    def _check_rows(self, kind: str, got_RH: torch.Tensor, want_WTH: torch.Tensor) -> None:
        got_WTH = got_RH[self.row_WT.clamp(max=self.num_rows - 1)]
        self.found.add(kind, (got_WTH != want_WTH).any(2) & (self.row_WT < self.num_rows))

    def _scattered(self, values_WTK: torch.Tensor, absent: float) -> torch.Tensor:
        """(R, K) what each token has, at its row; `absent` where none lands. Those that land nowhere share a row."""
        rows = values_WTK.new_full((self.num_rows + 1, values_WTK.shape[2]), absent)
        rows[self.row_WT.reshape(-1)] = values_WTK.reshape(-1, values_WTK.shape[2])
        return rows[: self.num_rows]


def scale_rows(
    rows_RH: torch.Tensor, slot_RK: torch.Tensor, weight_RK: torch.Tensor, rank: int, out_RH: torch.Tensor
) -> None:
    """The experts. Rows that nobody wants become NaN: nobody may read them."""
    factor_R1 = (weight_RK * (slot_RK + 1)).sum(1, keepdim=True) * (rank + 1)
    out_RH.copy_(torch.where(factor_R1 > 0, rows_RH.float() * factor_R1, torch.nan))


def scaled(values_TH: torch.Tensor, slot_TK: torch.Tensor, weight_TK: torch.Tensor, shape: Shape) -> torch.Tensor:
    """(T, H) what comes back for `values_TH` from the experts of all ranks."""
    total_TH = torch.zeros_like(values_TH, dtype=torch.float32)
    for rank in range(shape.ranks):
        factor_TK = torch.where(slot_TK // shape.slots == rank, weight_TK * (slot_TK % shape.slots + 1), 0.0)
        factor_T1 = factor_TK.sum(1, keepdim=True) * (rank + 1)
        total_TH += (values_TH.float() * factor_T1).to(shape.dtype).float()
    return total_TH.to(shape.dtype)
