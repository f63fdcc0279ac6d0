"""Decoding: few tokens per rank, so that what counts is not bytes but everything that is not bytes.

A transport that needs nothing from the host (`graphable`) is recorded into a CUDA graph (plan, dispatch and combine)
and replayed, as inference engines do. The others are timed call by call. The experts between dispatch and combine are
left out: the partial sums are whatever lies in the buffer. Before timing, a replay's answer is compared with what is
right: one replay brings the rows, the multiplying experts of `rides.py` fill the buffer, the next replay combines it.
"""

from __future__ import annotations

import torch

from carpool.bench.timing import Clock
from carpool.bench.transport.rides import Answers, Rider, check, multiply
from carpool.transport import Arrivals

TOKENS = 128


class Decoder(Rider):
    """Runs plan, dispatch and combine of `TOKENS` tokens: as a graph if it may, and eagerly otherwise.

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
