"""A forward of one micro-batch beside a backward of another: the ride of each beside the computation of the other.

DualPipe's pairs (DeepSeek-V3, arXiv 2412.19437, section 3.2.1). A pipeline's rank has a forward and a backward to do,
of two micro-batches in two of its stages. Each runs in a thread of its own, and wherever a ride is under way it hands
over to the other (`carpool.ride.turns`). D: dispatch, E: experts, C: combine, A: attention; a backward begins with the
layer's last step:

    backward    D dy            E            C            A           D dy           ...
    forward            A        D            E            C           A              D
                beside D dy   beside E   beside C    beside A

The backward has the first turn, because it begins with a ride and the forward with attention. The forward is half 0 and
runs in the caller's thread, which so goes on with its random numbers, as if there were no backward.

What is computed is the same as one after the other, bit by bit, because only the backward has gradients. FSDP gathers
and reduces as ever, but for two things. Its hooks count on one pass at a time, and here its root is in two, and so are
the layers of a stage whose forward and backward meet (Interleaved1F1B; a V pairs two stages). So each of the two has
phases of its own, and what the other still computes with is not freed (`carpool.parallel.fsdp.TwoPhases`). And after a
backward FSDP closes the books of all modules: here that comes when both are done.

Weight gradients that a schedule of stages computes apart (`carpool.ride.split_backward`) come after the pair.
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
        processors: is asked for the multiprocessors that are left to rides throughout (`carpool.kernels.device`).
    """

    def __init__(self, model: nn.Module, processors: Callable[[], int] = lambda: 0) -> None:
        self.model, self.processors = model, processors
        self._threads = TwoThreads()

    def run(self, forward: Callable[[], Result], backward: Callable[[], None], resume: Callable[[int], None]) -> Result:
        """What `forward` returns, once both are done. All ranks call it together.

        Args:
            forward, backward: of two micro-batches.
            resume: is called whenever one of them has the turn again: 0 the forward, 1 the backward.

        Raises:
            The error of the one that failed first, if one does."""
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
            # In this thread, or on a GPU it would be autograd's own, which cannot wait for turns.
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
