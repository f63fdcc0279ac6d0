"""FSDP2 under two forwards and backwards at a time.

FSDP gathers a module's parameters before its forward and frees them after it, and in the backward gathers them again,
reduces the gradients and frees both. Its hooks count on one forward at a time: of two halves that are half a layer
apart, the first to leave a module would free what the other computes with, and reduce gradients to which the other
has not added. Here both halves share one pass of each module through FSDP:

    forward     half 0 enters: gathers    half 0 leaves    half 1 leaves: frees
    backward    half 0 enters: gathers    half 0 leaves: gradients in the dtype of the reduction, not reduced
                                          half 1 leaves: adds its own, reduces the sum, frees
    end         half 1: what no hook has reduced (modules whose inputs need no gradient); waits for all reductions

So parameters are gathered, and their gradients reduced, once for both halves, and not twice as for two micro-batches;
and they stay half a layer longer than usual, not for the whole step. Gradients are those of two micro-batches of which
only the second reduces (`set_requires_gradient_sync`): bit by bit if gradients are reduced in the dtype in which they
are computed. In mixed precision a part of half 1's may be added in bfloat16 already.

Tried instead, on 4 ranks with fsdp 4 and ep 2:
  - FSDP as it is: half 1 computes with a weight whose memory has been freed, and PyTorch raises.
  - FSDP's public switches, `set_reshard_after_forward(False)` and `set_reshard_after_backward(False)`: most gradients
    are missing. The callback at the end of half 0's backward closes the books of all modules, half 1's included. With
    `set_requires_gradient_sync(False)` besides, nobody ever reduces, or the whole model at the end, hidden by nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from carpool.parallel import fsdp
from carpool.ride.turns import HALF


class _Shared:
    """Stands for the hooks of one of FSDP's parameter groups, which both halves pass."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self.enter, self.leave, self.reduce = group.pre_forward, group.post_forward, group.post_backward
        self.inside = [False, False]

    def pre_forward(self, module: Any, args: Any, kwargs: Any) -> Any:
        half = _half()
        # Each half enters by itself, or its gradients would pass without the hook that the backward needs. Several
        # modules may be one group: then a half enters with the first.
        fsdp.set_phase(self.group, "forward" if self.inside[half] else "idle")
        self.inside[half] = True
        return self.enter(module, args, kwargs)

    def post_forward(self, module: Any, given: Any, output: Any) -> Any:
        half = _half()
        self.inside[half] = False
        # A module that is used again may have the other half inside.
        if half == 0 or self.inside[0]:
            return output
        return self.leave(module, given, output)

    def post_backward(self, *_: Any) -> None:
        if _half() == 1:
            self.reduce()
            return
        fsdp.reduce_later(self.group, self.reduce)
        # It has not been through: half 1 is still inside.
        fsdp.set_phase(self.group, "pre_backward")


@contextmanager
def shared_shards(model: nn.Module) -> Iterator[None]:
    """Inside, two halves may run through the FSDP2 modules of a model, half 0 first, one phase after the other."""
    # Somebody else's may stand there: `carpool.ride.priority`'s.
    replaced = fsdp.Replaced()
    try:
        for state in fsdp.states(model):
            replaced.replace(state, fsdp.REGISTER_FINAL_CALLBACK, _in_half_1(state))
            for group in fsdp.groups(state):
                shared = _Shared(group)
                for name in ("pre_forward", "post_forward", "post_backward"):
                    replaced.replace(group, name, getattr(shared, name))
        yield
    finally:
        replaced.restore()


def _in_half_1(state: Any) -> Any:
    register = getattr(state, fsdp.REGISTER_FINAL_CALLBACK)

    def registered() -> None:
        if _half() == 1:
            register()

    return registered


def _half() -> int:
    half = HALF.get()
    assert half is not None, "FSDP's hooks ran outside of both halves"
    return half.number
