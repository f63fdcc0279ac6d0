"""The forward of one micro-batch overlapped with the backward of another: each one's ride with the other's computation.

DualPipe's pairs (DeepSeek-V3, arXiv 2412.19437, section 3.2.1). A rank of a pipeline runs a forward and a backward, of
two micro-batches in two of its stages. Each has a thread of its own, which lets the other one run while its ride is in
flight (`carpool.ride.turns`). D: dispatch, E: experts, C: combine, A: attention; a backward begins with the layer's
last step:

    backward    D dy            E            C            A           D dy           ...
    forward            A        D            E            C           A              D
                beside D dy   beside E   beside C    beside A

The backward has the first turn, because it begins with a ride and the forward with attention. The forward is half 0 and
runs in the caller's thread, so that its random numbers are the same as without a backward.

The results are bit-identical to running one after the other, because only the backward has gradients. FSDP gathers and
reduces as usual, with two exceptions. Its hooks expect one pass at a time, but here its root is in two, and so are the
layers of a stage whose forward and backward overlap (Interleaved1F1B; a V pairs two stages). So each of the two has
phases of its own, and parameters that the other one still uses are not freed (`carpool.parallel.fsdp.TwoPhases`). And
FSDP's final callback, which covers all modules, runs when both are done.

A pair can be captured as a CUDA graph, whose replay has no threads (`carpool.ride.two_batch` says why that is right).

Deferred weight gradients of a pipeline schedule (`carpool.ride.split_backward`) are computed after the pair.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import nn

from carpool.kernels.device import reserved
from carpool.parallel import fsdp
from carpool.ride.turns import Turns, TwoThreads

Result = TypeVar("Result")


class ForwardBesideBackward:
    """Runs a forward and a backward of a model at the same time; see the module's docstring.

    Args:
        model: plain, or sharded by FSDP2.
        processors: returns the multiprocessors that are reserved for rides (`carpool.kernels.device`).
    """

    def __init__(self, model: nn.Module, processors: Callable[[], int] = lambda: 0) -> None:
        self.model, self.processors = model, processors
        self._threads = TwoThreads()

    def run(self, forward: Callable[[], Result], backward: Callable[[], None], resume: Callable[[int], None]) -> Result:
        """Run both, and return the result of `forward`. Collective.

        Args:
            forward, backward: of two micro-batches.
            resume: called whenever one of them gets the turn: with 0 for the forward, 1 for the backward.

        Raises:
            The error of the one that failed first."""
        device = next(self.model.parameters()).device
        phases, replaced = fsdp.TwoPhases(self.model), fsdp.Replaced()

        def resumed(half: int) -> None:
            phases.switch()
            resume(half)

        turns = Turns(device, resumed)

        def ahead() -> Result:
            turns.hand_over(0)
            return forward()

        def back() -> None:
            # In this thread: autograd's own thread, its default on a GPU, could not wait for turns.
            with torch.autograd.set_multithreading_enabled(False):
                backward()

        try:
            phases.keep_for_other(replaced)
            for state in fsdp.states(self.model):
                replaced.replace(state, fsdp.REGISTER_FINAL_CALLBACK, _nothing)
            with reserved(self.processors()):
                result, _ = self._threads.run(turns, ahead, back)
        finally:
            replaced.restore()
        fsdp.end_backward(self.model)
        return result


def _nothing() -> None: ...
