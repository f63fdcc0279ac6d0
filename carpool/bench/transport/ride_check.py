"""What a contender is asked to do: all verbs, in the order of training; once for the answer, then for the time.

    forward    plan, dispatch x, partial sums, combine
    again      dispatch x on the same route (its plan is known), partial sums, combine
    backward   dispatch dy, row gradients, combine (dx, dweight)

Every dispatch is followed by its combine, which a transport with buffers relies on.

In the check the "experts" multiply: slot s of all slots scales a row by f(s) = 1 + s / number of slots, so that a row
that came to the wrong slot, with the wrong weight, or not at all, changes the answer

    y_t = sum_k weight_tk f(slot_tk) x_t           dx_t = sum_k weight_tk f(slot_tk) dy_t      dweight_tk = f(slot_tk)

The transport `gather` in float64 is the oracle; it is itself compared with the formula. All terms are of one sign per
element of x, so rounding is relative to the answer. Allowed are: half a unit in the last place for each partial sum
and half a unit for y (together one eps of the dtype), and a few float32 roundings for the sums. With FP8 on the way out
1/16 of the element (3 bits of mantissa) and 1e-4 of its row's largest, because small values underflow.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist

from carpool.bench.contest import draw_rows
from carpool.bench.options import RideShape
from carpool.bench.timing import Clock
from carpool.layout import ExpertLayout, assign
from carpool.metrics.counters import Traffic
from carpool.routing import Routing
from carpool.transport import Arrivals, Transport, make_transport

CHUNK = 2048  # rows that are scaled at a time, to keep temporary memory small


@dataclass(frozen=True)
class Case:
    """One shape and routing, as this rank sees it: the input of every contender."""

    shape: RideShape
    layout: ExpertLayout
    routings: list[Routing]
    x_TH: torch.Tensor
    dy_TH: torch.Tensor
    slot_TK: torch.Tensor
    weight_TK: torch.Tensor

    @classmethod
    def make(
        cls, shape: RideShape, layout: ExpertLayout, routings: list[Routing], rank: int, dtype: torch.dtype,
        device: torch.device, seed: int,
    ) -> Case:  # fmt: skip
        x_TH, dy_TH = draw_rows(shape.tokens, shape.hidden, dtype, device, seed, rank)
        weight_TK = routings[rank].weight_TK
        assert weight_TK is not None
        slot_TK = assign(routings[rank].expert_TK, layout).to(device)
        return cls(shape, layout, routings, x_TH, dy_TH, slot_TK, weight_TK.to(device))

    @cached_property
    def factor_S(self) -> torch.Tensor:
        """(W * S,) float64: f of every global slot."""
        slots = self.layout.num_ranks * self.layout.slots_per_rank
        return 1 + torch.arange(slots, dtype=torch.float64, device=self.x_TH.device) / slots

    def factors(self, rank: int) -> torch.Tensor:
        """(S,) float64: f of the slots of one rank."""
        return self.factor_S[rank * self.layout.slots_per_rank :][: self.layout.slots_per_rank]


@dataclass
class Answers:
    """What came back; the gradients are None without a backward."""

    y_TH: torch.Tensor
    dx_TH: torch.Tensor | None = None
    dweight_TK: torch.Tensor | None = None


def forward_and_backward(
    transport: Transport, case: Case, rank: int, traffic: Traffic, *, backward: bool, dtype: torch.dtype | None = None
) -> Answers:
    """One training step of the multiplying experts, through `transport`. `dtype`: of the rows, if not the case's."""
    x_TH, dy_TH = (rows.to(dtype or rows.dtype) for rows in (case.x_TH, case.dy_TH))
    hidden, device = case.shape.hidden, x_TH.device
    route = transport.plan(case.slot_TK, case.weight_TK, traffic)
    arrivals: Arrivals = transport.dispatch(x_TH, route).wait()
    partial_RH = route.new_partial(hidden, x_TH.dtype, device)
    multiply(arrivals, None, case.factors(rank), partial_RH)
    answers = Answers(transport.combine(route, partial_RH).wait())
    if backward:
        dpartial = transport.dispatch_gradients(dy_TH, route).wait().widened(dy_TH.dtype)
        dx_RH = route.new_partial(hidden, dy_TH.dtype, device)
        multiply(arrivals, dpartial.contiguous(route.num_rows), case.factors(rank), dx_RH)
        dweight_RJ = _factors_of(arrivals.slot_RJ, case.factors(rank)).float()
        answers.dx_TH, answers.dweight_TK = transport.combine_gradients(route, dx_RH, dweight_RJ).wait()
    return answers


def multiply(
    arrivals: Arrivals, gradient_RH: torch.Tensor | None, factor_S: torch.Tensor, out_RH: torch.Tensor
) -> None:
    """The experts of the check, forward (of `arrivals.tokens`) or backward (of `gradient_RH`).

    out = row * (sum over its wanted slots of weight * f(slot)), and 0 where nobody wants a row.
    """
    rows_RH = rows_of(arrivals, out_RH.dtype) if gradient_RH is None else gradient_RH
    wide = torch.promote_types(out_RH.dtype, torch.float32)
    for start in range(0, rows_RH.shape[0], CHUNK):
        chunk = slice(start, start + CHUNK)
        slot_RJ = arrivals.slot_RJ[chunk]
        # A weight where no slot is may be anything, even NaN.
        weight_RJ = torch.where(slot_RJ < 0, 0.0, arrivals.weight_RJ[chunk])
        factor_R1 = (weight_RJ * _factors_of(slot_RJ, factor_S)).sum(1, keepdim=True)
        value_RH = rows_RH[chunk].to(wide)
        wanted_R1 = (slot_RJ >= 0).any(1, keepdim=True)
        out_RH[chunk] = torch.where(wanted_R1, value_RH * factor_R1.to(wide), 0.0).to(out_RH.dtype)


def rows_of(arrivals: Arrivals, dtype: torch.dtype) -> torch.Tensor:
    """(R, H) all rows that came, those at home included."""
    return arrivals.tokens.widened(dtype).contiguous(arrivals.slot_RJ.shape[0])


def _factors_of(slot_RJ: torch.Tensor, factor_S: torch.Tensor) -> torch.Tensor:
    """f of each entry, 0 where there is no slot."""
    return torch.where(slot_RJ < 0, 0.0, factor_S[slot_RJ.clamp(min=0).long()])


def oracle(case: Case, group: dist.ProcessGroup | None, rank: int) -> Answers:
    """What is right: `gather` in float64, compared with the formula of the module's docstring."""
    gather = make_transport("gather", group, case.layout.slots_per_rank)
    traffic = Traffic(case.layout.num_ranks, rank)
    answers = forward_and_backward(gather, case, rank, traffic, backward=True, dtype=torch.float64)
    factor_TK = case.factor_S[case.slot_TK.long()]
    sum_T1 = (case.weight_TK * factor_TK).sum(1, keepdim=True)
    formula = Answers(case.x_TH * sum_T1, case.dy_TH * sum_T1, factor_TK)
    check("gather in float64", answers, formula, case, group, torch.float64)
    return answers


def check(
    label: str,
    got: Answers,
    want: Answers,
    case: Case,
    group: dist.ProcessGroup | None,
    dtype: torch.dtype,
    fp8: bool = False,
) -> float:
    """Compare with what is right. Collective.

    Returns:
        The largest error of all ranks, as a share of what is allowed.

    Raises:
        RuntimeError: it is more than 1, or not a number. On every rank.
    """
    sums = case.layout.num_ranks + case.shape.top_k + 3
    rounding = torch.finfo(dtype).eps + sums * torch.finfo(torch.float32).eps
    # Numbers this small are rounded to multiples of it.
    smallest = torch.finfo(dtype).tiny * torch.finfo(dtype).eps
    ratios = []
    for name in ("y_TH", "dx_TH", "dweight_TK"):
        mine, right = getattr(got, name), getattr(want, name)
        if mine is None:
            continue
        lossy = fp8 and name == "y_TH"
        relative = rounding + (2**-4 if lossy else 0.0)
        allowed = relative * right.abs() + sums * smallest
        if lossy:
            allowed += 1e-4 * right.abs().amax(1, keepdim=True)
        # What is not a number is wrong.
        ratio = ((mine.double() - right).abs() / allowed).nan_to_num(nan=torch.inf)
        ratios.append(ratio.max() if ratio.numel() else ratio.new_zeros(()))
    worst = torch.stack(ratios).max().double()
    if group is not None:
        dist.all_reduce(worst, op=dist.ReduceOp.MAX, group=group)
    if not float(worst) <= 1:
        raise RuntimeError(
            f"{label} gives a wrong answer for {case.shape}: the largest error is {float(worst):.3g} times what "
            "rounding allows, so it is not timed"
        )
    return float(worst)


class Rider:
    """A contender at work: one training step of the multiplying experts is checked, then all verbs are timed.

    Args:
        label: the contender's name, here and on the clock.
        want: the right answers.
        fp8: its rows travel as FP8.
        backward: also the verbs of the backward.

    Raises:
        RuntimeError: its answer is wrong.
    """

    def __init__(
        self, transport: Transport, case: Case, rank: int, group: dist.ProcessGroup | None, label: str, want: Answers,
        *, fp8: bool, backward: bool,
    ) -> None:  # fmt: skip
        self.transport, self.case, self.rank, self.group, self.label = transport, case, rank, group, label
        self.fp8, self.backward = fp8, backward
        self.traffic = Traffic(case.layout.num_ranks, rank)
        answers = forward_and_backward(transport, case, rank, self.traffic, backward=backward)
        self.error = check(label, answers, want, case, group, case.x_TH.dtype, fp8)

    def once(self, clock: Clock) -> None:
        """All verbs once, each a section of `clock`. What experts would write is a copy of what came, untimed."""
        transport, case, label = self.transport, self.case, self.label
        x_TH, dy_TH = case.x_TH, case.dy_TH
        hidden, dtype, device = case.shape.hidden, x_TH.dtype, x_TH.device

        def copied(rows_RH: torch.Tensor, route: Any) -> torch.Tensor:
            partial_RH: torch.Tensor = route.new_partial(hidden, dtype, device)
            return partial_RH.copy_(rows_RH)

        with clock.section(label, "plan_dispatch"):
            route = transport.plan(case.slot_TK, case.weight_TK, self.traffic)
            arrivals = transport.dispatch(x_TH, route).wait()
        partial_RH = copied(rows_of(arrivals, dtype), route)
        with clock.section(label, "combine"):
            transport.combine(route, partial_RH).wait()
        del arrivals, partial_RH
        with clock.section(label, "dispatch"):
            arrivals = transport.dispatch(x_TH, route).wait()
        transport.combine(route, copied(rows_of(arrivals, dtype), route)).wait()
        if not self.backward:
            return
        dweight_RJ = torch.rand_like(arrivals.weight_RJ)
        del arrivals
        with clock.section(label, "dispatch_gradients"):
            dpartial = transport.dispatch_gradients(dy_TH, route).wait().widened(dtype)
        dx_RH = copied(dpartial.contiguous(route.num_rows), route)
        with clock.section(label, "combine_gradients"):
            transport.combine_gradients(route, dx_RH, dweight_RJ).wait()


# Per section: the verb under which `Traffic` counts it.
VERB_OF_SECTION = {
    "plan_dispatch": "dispatch",
    "dispatch": "dispatch",
    "combine": "combine",
    "dispatch_gradients": "combine_backward",
    "combine_gradients": "dispatch_backward",
}
# How often `Rider.once` does each verb.
CALLS = {"dispatch": 2, "combine": 2, "combine_backward": 1, "dispatch_backward": 1}


TOKENS = 128


class Decoder(Rider):
    """Few tokens per rank, so that what counts is not bytes but everything that is not bytes.

    A transport that needs nothing from the host (`graphable`) is recorded into a CUDA graph (plan, dispatch and
    combine) and replayed, as inference engines do. The others are timed call by call. The experts between dispatch and
    combine are left out: the partial sums are whatever is in the buffer. Before timing, a replay's answer is compared
    with what is right: one replay brings the rows, the multiplying experts fill the buffer, the next combines it.

    All contenders are constructed, which makes the buffers that they share as large as any of them needs, before any
    of them is recorded, which fixes the buffers' addresses.
    """

    graph: torch.cuda.CUDAGraph | None = None

    def record(self, want: Answers) -> None:
        """Record the graph, if this transport has one, and check its answer. Collective."""
        case = self.case
        if case.x_TH.device.type != "cuda" or not getattr(self.transport, "graphable", False):
            return
        # Once more outside: buffers that a later contender made anew are there now.
        self._ride()
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        # Other threads (NCCL's watchdog) may look at events meanwhile.
        with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
            arrivals, partial_RH, y_TH = self._ride()
        self.graph.replay()
        multiply(arrivals, None, case.factors(self.rank), partial_RH)
        self.graph.replay()
        label, dtype = f"{self.label} in a graph", case.x_TH.dtype
        self.error = check(label, Answers(y_TH), want, case, self.group, dtype, self.fp8)

    def once(self, clock: Clock) -> None:
        """One timed repetition."""
        with clock.section(self.label, "decode"):
            if self.graph is not None:
                self.graph.replay()
            else:
                self._ride()

    def _ride(self) -> tuple[Arrivals, torch.Tensor, torch.Tensor]:
        case = self.case
        route = self.transport.plan(case.slot_TK, case.weight_TK, self.traffic)
        arrivals = self.transport.dispatch(case.x_TH, route).wait()
        partial_RH = route.new_partial(case.shape.hidden, case.x_TH.dtype, case.x_TH.device)
        return arrivals, partial_RH, self.transport.combine(route, partial_RH).wait()
