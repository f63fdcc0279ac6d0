"""Two micro-batches, half a layer apart: the attention of one overlaps the ride of the other.

With gradient accumulation the two are successive micro-batches. A step of only one micro-batch is cut into halves,
which costs smaller and twice as many kernels. Here each of the two is called a half.

The model's code does not change. Each half runs in a thread of its own, first the whole forward and then the whole
backward, and lets the other one run while its ride is in flight (`carpool.ride.turns`):

    half 0     attn 0  dispatch . . . experts 0  combine . . . attn 1  dispatch . . .          . . .  attn 1  ...
    half 1             attn 0  dispatch . . . experts 0  combine . . . attn 1  dispatch          backward, the same

The host enqueues all computation in one stream, in the order of the turns. Rides run concurrently, on the transport's
stream or NCCL's, and the kernels that `wait()` enqueues come after the other half's computation. Both halves share one
stream, because then memory is reused in the order in which the host frees it, as usual: parameters, gradients and
FSDP's gathered parameters need no events. Two streams of computation would only compete for the same multiprocessors.
`nvlink` needs `side_stream`, and two leases (four if tokens are sent again).

Neither half begins its backward before both have ended their forward. Half 0's output layer and loss hide half 1's
last combine.

Each half computes like a micro-batch. Losses, and gradients without FSDP, are bit-identical to two successive
micro-batches, because half 0 is first wherever both add to the same gradient. Under FSDP the halves share all-gathers
and reductions, and gradients are equal up to rounding (below). Half 1 has its own random numbers: on a CPU a seed from
half 0's, on a GPU the same seed `DRAWS` further. So with drop-out both differ from two micro-batches, but not from run
to run. The balance loss is computed for each half, as for each micro-batch.

Tried on 4 gloo ranks:
  - Strict alternation works in forward and backward, for layers of different sizes, dense layers, shared experts,
    checkpoints with and without reentry, and compiled layers (each call has its own ticket). If one half fails, the
    other is woken and abandoned.
  - Without a barrier between forward and backward gradients were right, but half 0's backward is in the output layer
    before half 1's forward is, which FSDP does not expect, and no more communication is hidden.
  - Each backward must run in the thread that called it, or it could not wait: `set_multithreading_enabled(False)`.
    Otherwise, on a GPU, one thread of autograd would run both.

The capture of a CUDA graph works in the same way: both threads enqueue into the captured stream, one at a time, as
autograd's thread does, and rides fork from it and join it. A replay has the same two streams and no threads, so it
takes no host time. Random numbers are those of an eager step, also in layers that are computed again.

CUDA graphs of whole layers (`mode="reduce-overhead"`) are not supported, because they have one memory for all calls.
DeepSeek-V3 (arXiv 2412.19437, section 3.2.1) overlaps two micro-batches of a pipeline like this; here there is no
pipeline (`carpool.ride.forward_backward` is for pipelines).

**FSDP2 with two forwards and backwards at a time.** FSDP gathers a module's parameters before its forward and frees
them after it, and in the backward gathers them again, reduces the gradients and frees both. Its hooks expect one
forward at a time: of two halves that are half a layer apart, the first to leave a module would free parameters that the
other uses, and reduce gradients to which the other has not added. Here both halves share one pass of each module
through FSDP:

    forward     half 0 enters: gathers    half 0 leaves    half 1 leaves: frees
    backward    half 0 enters: gathers    half 0 leaves: gradients in the dtype of the reduction, not reduced
                                          half 1 leaves: adds its own, reduces the sum, frees
    end         half 1: reduces gradients that no hook has reduced (modules whose inputs need none); waits for all

So parameters are gathered, and their gradients reduced, once for both halves, and not twice as for two micro-batches.
They stay in memory half a layer longer than usual, not for the whole step. Gradients are those of two micro-batches of
which only the second reduces (`set_requires_gradient_sync`): bit-identical if gradients are reduced in the dtype in
which they are computed. In mixed precision a part of half 1's may already be added in bfloat16.

Alternatives, tried on 4 ranks with fsdp 4 and ep 2:
  - FSDP unchanged: half 1 computes with a weight whose memory has been freed, and PyTorch raises.
  - FSDP's public switches, `set_reshard_after_forward(False)` and `set_reshard_after_backward(False)`: most gradients
    are missing, because the callback at the end of half 0's backward finishes all modules, half 1's included. With
    `set_requires_gradient_sync(False)`, too, gradients are never reduced, or all at the end, without overlap.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from carpool.kernels.device import reserved
from carpool.parallel import fsdp
from carpool.ride.turns import HALF, Turns, TwoThreads

Loss = Callable[[], torch.Tensor]
# Random numbers that a half may draw on a GPU, as each of its threads counts them. A graph counts both in 32 bits.
DRAWS = 2**30


class TwoBatch:
    """Runs two halves of a step through a model at the same time; see the module's docstring.

    Args:
        model: plain, or sharded by FSDP2.

    Raises:
        ValueError: the model is wrapped in a module whose hooks expect one backward at a time.
    """

    def __init__(self, model: nn.Module) -> None:
        for name, module in model.named_modules():
            if isinstance(module, (DistributedDataParallel, FullyShardedDataParallel)):
                raise ValueError(
                    f"two batches at a time do not work with {type(module).__name__} (module {name!r}), which reduces "
                    "gradients after one backward; shard the model by FSDP2 (fully_shard)"
                )
        self.model = model
        self._threads = TwoThreads()

    def backward(self, losses: Sequence[Loss], processors: int = 0) -> list[torch.Tensor]:
        """Compute two losses and accumulate the gradients of both. Collective.

        Args:
            losses: two functions, each of which runs the model's forward on its half and returns a scalar. The second
                runs in another thread.
            processors: multiprocessors that are reserved for rides (`carpool.kernels.device`).

        Returns:
            The losses, detached.

        Raises:
            The error of the half that failed first; gradients are invalid then.
        """
        if len(losses) != 2:
            raise ValueError(f"two batches take two losses, not {len(losses)}")
        device = next(self.model.parameters()).device
        turns, seed = Turns(device), int(torch.randint(2**62, ()))
        begin = torch.cuda.get_rng_state(device) if device.type == "cuda" else None

        def half(number: int) -> torch.Tensor:
            if number == 1:
                torch.default_generator.manual_seed(seed)
                _draw_from(begin, DRAWS, device)
            with torch.enable_grad():
                value = losses[number]()
            turns.meet(number)
            with torch.autograd.set_multithreading_enabled(False):
                value.backward()
            return value.detach()

        with shared_shards(self.model), reserved(processors):
            values = list(self._threads.run(turns, partial(half, 0), partial(half, 1)))
        _draw_from(begin, 2 * DRAWS, device)
        return values


def _draw_from(state: torch.Tensor | None, further: int, device: torch.device) -> None:
    """Let a GPU's generator continue so many numbers after a state, which is its seed and its offset. During a capture
    the offset is that inside of the graph."""
    if state is not None:
        state = state.clone()
        state.view(torch.int64)[1] += further
        torch.cuda.set_rng_state(state, device)


class _Shared:
    """Replaces the hooks of one of FSDP's parameter groups, through which both halves pass."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self.enter, self.leave, self.reduce = group.pre_forward, group.post_forward, group.post_backward
        self.inside = [False, False]

    def pre_forward(self, module: Any, args: Any, kwargs: Any) -> Any:
        half = _half()
        # Called for each half, because the original hook registers the hook of the half's backward. Several modules may
        # be one group: then a half enters with the first.
        fsdp.set_phase(self.group, "forward" if self.inside[half] else "idle")
        self.inside[half] = True
        return self.enter(module, args, kwargs)

    def post_forward(self, module: Any, given: Any, output: Any) -> Any:
        half = _half()
        self.inside[half] = False
        # The other half may be inside a module that is used twice.
        if half == 0 or self.inside[0]:
            return output
        return self.leave(module, given, output)

    def post_backward(self, *_: Any) -> None:
        if _half() == 1:
            self.reduce()
            return
        fsdp.reduce_later(self.group, self.reduce)
        # Half 1 is still inside.
        fsdp.set_phase(self.group, "pre_backward")


@contextmanager
def shared_shards(model: nn.Module) -> Iterator[None]:
    """Context in which two halves may run through the FSDP2 modules of a model, half 0 first, phase by phase."""
    # Hooks may already be replaced by `carpool.ride.priority`.
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
