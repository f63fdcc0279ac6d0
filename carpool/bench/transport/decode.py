"""Decoding: few tokens per rank, so that what counts is not bytes but everything that is not bytes.

A transport that needs nothing from the host (`graphable`) is recorded into a CUDA graph (plan, dispatch and combine)
and replayed, as inference engines do. The others are timed call by call. The experts between dispatch and combine are
left out: the partial sums are whatever lies in the buffer. Before timing, a replay's answer is compared with what is
right: one replay brings the rows, the multiplying experts of `rides.py` fill the buffer, the next replay combines it.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from carpool.bench.timing import Clock
from carpool.bench.transport.rides import Answers, Case, check, forward_and_backward, multiply
from carpool.observe.traffic import Traffic
from carpool.transport import Arrivals, Transport

TOKENS = 128


class Decoder:
    """Runs plan, dispatch and combine of one contender: as a graph if it may, and eagerly otherwise.

    All contenders are constructed, which makes the buffers that they share as large as any of them needs, before any
    of them is recorded, which fixes the buffers' addresses.

    Args:
        case: of `TOKENS` tokens.
        label: the contender's name in messages.
        want: the right answers.
        fp8: its rows travel as FP8.

    Raises:
        RuntimeError: its answer is wrong.
    """

    def __init__(
        self, transport: Transport, case: Case, rank: int, group: dist.ProcessGroup | None, label: str, want: Answers,
        *, fp8: bool,
    ) -> None:  # fmt: skip
        self.transport, self.case, self.label, self.fp8 = transport, case, label, fp8
        self.rank, self.group, self.want = rank, group, want
        self.traffic = Traffic(case.layout.num_ranks, rank)
        self.graph: torch.cuda.CUDAGraph | None = None
        answers = forward_and_backward(transport, case, rank, self.traffic, backward=False)
        self.error = check(label, answers, want, case, group, case.x_TH.dtype, fp8)

    def record(self) -> None:
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
        self.error = check(label, Answers(y_TH), self.want, case, self.group, dtype, self.fp8)

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
