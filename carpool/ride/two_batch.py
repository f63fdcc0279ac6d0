"""Two micro-batches, half a layer apart: attention of one beside the ride of the other.

With accumulation of gradients the two are micro-batches as they come. A step of only one micro-batch cuts it into
halves, which costs: kernels are smaller, and there are twice as many. Here each of the two is called a half.

No code of the model changes. Each half runs in a thread of its own, the whole forward and then the whole backward, and
wherever a ride is under way it hands over to the other half (`carpool.ride.turns`):

    half 0     attn 0  dispatch . . . experts 0  combine . . . attn 1  dispatch . . .          . . .  attn 1  ...
    half 1             attn 0  dispatch . . . experts 0  combine . . . attn 1  dispatch          backward, the same

The host enqueues all computation in one stream, in the order of the turns. A ride runs beside it, on the transport's
own stream or NCCL's, and what `wait()` enqueues comes after the other half's computation. One stream for both halves,
because then memory is used again in the order in which the host let go of it, as always: what both halves touch
(parameters, gradients, what FSDP gathers) needs no events. And two streams of computation would only compete for the
same multiprocessors. `nvlink` needs `side_stream` for that, and two leases (four if tokens are sent again).

Neither half begins its backward before both have ended their forward. Half 0's output layer and loss hide half 1's
last combine.

What is computed: each half is a micro-batch. Losses, and gradients without FSDP, are bit by bit those of two
micro-batches one after the other, because half 0 comes first wherever both add to the same gradient. Under FSDP the
halves share gathers and reductions, and gradients are the same to rounding (below). Random
numbers: half 1 has its own, seeded from half 0's, so with drop-out both differ from two micro-batches, but not from run
to run. The balance loss is of each half, as it is of each micro-batch.

What was tried, on 4 gloo ranks:
  - Strict alternation holds in forward and backward, for layers of different sizes, dense layers, shared experts,
    checkpoints with and without reentry, and compiled layers (each call has its own ticket). If one half fails, the
    other is woken and abandoned.
  - Halves that do not meet between forward and backward. Gradients were right, but half 0's backward is in the output
    layer before half 1's forward is, which FSDP does not expect, and nothing more is hidden.
  - Each backward must run in the thread that called it, or it could not wait: `set_multithreading_enabled(False)`.
    Otherwise, on a GPU, one thread of autograd's would run both.

Under the capture of a CUDA graph nothing changes: both threads enqueue into the stream that is captured, one at a time,
as autograd's own thread does, and rides fork from it and join it. A replay has the same two streams and no threads, so
the host's time is gone. The model must draw no random numbers
(`carpool.hf.decoder_layers.draws_random_numbers`).

Not with CUDA graphs of whole layers (`mode="reduce-overhead"`), which have one memory for all calls. DeepSeek-V3 (arXiv
2412.19437, section 3.2.1) overlaps two micro-batches of a pipeline like this; here there is no pipeline
(`carpool.ride.forward_backward` is that of one).

FSDP2 under two forwards and backwards at a time.

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


class TwoBatch:
    """Runs two halves of a step through a model at the same time; see the module's docstring.

    Args:
        model: plain, or sharded by FSDP2.

    Raises:
        ValueError: the model is wrapped in something whose hooks count on one backward at a time.
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
        """Compute two losses and accumulate the gradients of both. All ranks call it together.

        Args:
            losses: two functions, each of which runs the model's forward on its half and returns a scalar. The second
                runs in another thread.
            processors: multiprocessors that are left to rides throughout (`carpool.kernels.device`).

        Returns:
            Their values, detached.

        Raises:
            The error of the half that failed first, if one does; gradients are worthless then.
        """
        if len(losses) != 2:
            raise ValueError(f"two batches take two losses, not {len(losses)}")
        device = next(self.model.parameters()).device
        draws = device.type != "cuda" or not torch.cuda.is_current_stream_capturing()
        turns = Turns(device, draws=draws)
        seed = int(torch.randint(2**62, ())) if draws else 0

        def half(number: int) -> torch.Tensor:
            if number == 1 and draws:
                torch.manual_seed(seed)
            with torch.enable_grad():
                value = losses[number]()
            turns.meet(number)
            with torch.autograd.set_multithreading_enabled(False):
                value.backward()
            return value.detach()

        with shared_shards(self.model), reserved(processors):
            return list(self._threads.run(turns, partial(half, 0), partial(half, 1)))


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
