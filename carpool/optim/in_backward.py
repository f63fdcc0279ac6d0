"""Gradients that are used inside the backward and freed: no rank holds those of more than a layer or two.

By default all gradients are there before the first parameter is updated, because clipping wants the norm of all of
them. Without clipping each parameter may be updated as soon as its own gradient is there:

    backward of layer 2    gradient of its experts -> update -> freed
    backward of layer 1                 gradient of its experts -> update -> freed

A bfloat16 parameter then takes 6 bytes in place of 8 (8-bit moments): weight 2, low bits 2, moments 2. The update of
a layer runs beside the backward of the layers below, on a stream of its own: while rows travel, most multiprocessors
have nothing else to do, and what comes from host memory takes no computation. A few gradients stay until their update
is done: `HELD` times the elements of the largest parameter.

    parameters                            their gradient is final                   updated
    of one process, or sharded by FSDP2   when autograd or FSDP2 has it             then
    experts beside whole non-expert ones  when autograd has it                      then
    whole non-expert ones (`replicated`)  after the reduce-scatters                 in `finish`

What a regular step looks at before its update is looked at between forward and backward: a factor that all ranks agree
on, and that is NaN if the loss of a rank is not finite or rows of a ride had no place. Then nothing is updated, and the
step can be repeated. The norm is known after the backward. If it is not finite although the loss was, parameters of
this step have been updated, and the run cannot go on.

Clipping needs a norm before the first update, and there is one: that of the step before. With `max_norm` gradients are
multiplied by what that norm would have been clipped by, which is LOSSY: a gradient that suddenly grows is clipped one
step late. The first step is not clipped.

Every parameter has one gradient in a step: no micro-batches are added.

A forward and backward with the updates between can be captured in a CUDA graph, with copies of the optimizer's state
from host memory and back, but not from disk. What is left for `finish` is not in it:

    with consumed.record(): capture (forward, begin, backward, drain)
    each step               prepare, replay, replayed, ..., finish
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from carpool.activations.host_memory import wait_for
from carpool.experts.host_experts import HostExperts
from carpool.optim.clip import clip_factor, copies_of
from carpool.optim.update import local
from carpool.parallel.replicated import on_gradient, replicated

# Gradients wait until there are so many elements, and go in one launch.
LEAST_ELEMENTS = 2**20
# Of gradients that wait for an update beside the backward: those of an expert layer are its two largest parameters.
HELD = 2


class ConsumedGradients:
    """Updates parameters in the backward. All ranks construct and call it alike.

    Args:
        model: its parameters have been given to the optimizer.
        optimizer: one with `in_backward` (`carpool.optim.base`), whose `step` is not called any more.
        away: what keeps experts in host memory.
        max_norm: gradients are clipped to it, by the norm of the step before.

    Attributes:
        norm: of the last step that updated anything, float32 on the device; 0 before the first.
    """

    def __init__(
        self, model: nn.Module, optimizer: Any, away: HostExperts | None = None, max_norm: float = math.inf
    ) -> None:
        self.optimizer, self._away, self._max_norm = optimizer, away, max_norm
        self._parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        self._waiting: list[torch.Tensor] = []
        self._events: list[Any] = []
        # Gradients that an update beside the backward reads, oldest first: until when, and elements.
        self._held: deque[tuple[list[Any], list[torch.Tensor | None], int]] = deque()
        self._most_held = HELD * max(local(parameter).numel() for parameter in self._parameters)
        self._begun = False
        # Parameters that this step has updated so far, and those that a captured one updates.
        self._updated: set[torch.Tensor] = set()
        self._replayed: set[torch.Tensor] = set()
        device = self._parameters[0].device
        # Experts in host memory have streams of their own, which wait for what computes.
        self._beside = torch.cuda.Stream(device) if device.type == "cuda" and away is None else None
        self._factor = torch.ones((), device=device)
        # Of the gradients, by the number of ranks that hold the same ones.
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        self._copies = {parameter: copies_of(parameter, ranks) for parameter in self._parameters}
        self._squares = {copies: torch.zeros((), device=device) for copies in sorted(set(self._copies.values()))}
        self.norm = torch.zeros((), device=device)
        shards: set[torch.Tensor] = set()
        if (kept := replicated(model)) is not None:
            shards = set(kept.shard_parameters)
            kept.on_expert_gradient(self._take)
        for parameter in self._parameters:
            if parameter not in shards:
                on_gradient(parameter, self._take)

    @torch.no_grad()
    def begin(self, fine: torch.Tensor) -> None:
        """Between forward and backward.

        Args:
            fine: bool scalar on the device: whether this rank's loss may be learned from.
        """
        fine = fine.float()
        if dist.is_initialized():
            dist.all_reduce(fine, op=dist.ReduceOp.MIN)
        self._factor.copy_(torch.where(fine > 0, clip_factor(self.norm, self._max_norm), torch.nan))
        for squares in self._squares.values():
            squares.zero_()
        self._updated.clear()
        self._waiting.clear()
        self._events.clear()
        self._let_go(0)
        self.optimizer.begin(self._factor)
        self._begin(True)

    @torch.no_grad()
    def finish(self) -> torch.Tensor:
        """After the backward, and after `Replicated.finish`: update what is left.

        Returns:
            The norm of the gradient over all ranks: 0-dimensional, on the device. NaN if nothing was updated.
        """
        self.drain()
        self._waiting += [p for p in self._parameters if p.grad is not None]
        self.drain()
        self.optimizer.finish(self._factor)
        self._begin(False)
        total = sum((squares / copies for copies, squares in self._squares.items()), torch.zeros_like(self.norm))
        if dist.is_initialized():
            dist.all_reduce(total)
        norm = total.sqrt() / self._factor
        self.norm.copy_(torch.where(torch.isfinite(self._factor), norm, self.norm))
        return norm

    @torch.no_grad()
    def drain(self) -> None:
        """Update what waits, and wait for all updates. At the end of a capture, inside: nothing of it is left for
        later."""
        if self._waiting:
            self._flush()
        wait_for(*self._events)
        self._events.clear()
        self._let_go(0)
        self.optimizer.join()

    # -- in a CUDA graph ------------------------------------------------------------------------------------------

    def record(self) -> AbstractContextManager[None]:
        """Around captures. Call `prepare` before."""
        return self.optimizer.record()

    def prepare(self) -> None:
        """Before captures, and before each replay."""
        self.optimizer.prepare()

    def recorded(self) -> None:
        """After captures: what they have updated is what each replay updates."""
        self._replayed = set(self._updated)

    def replayed(self) -> None:
        """After a replay, as if its `begin` and its backward had been computed eagerly."""
        self.optimizer.replayed(self._replayed)
        self._begin(True)

    def abandon(self) -> None:
        """Forget what a capture that has failed has begun. Nobody may wait for its events any more."""
        self._waiting.clear()
        self._events.clear()
        self._held.clear()
        self._begin(False)

    def _begin(self, begun: bool) -> None:
        self._begun = begun
        if self._away is not None:
            self._away.consuming = begun

    @torch.no_grad()
    def _take(self, parameter: torch.Tensor) -> None:
        """A gradient has come."""
        if not self._begun:  # somebody else's backward: a probe, a profile
            return
        self._waiting.append(parameter)
        if parameter.is_cuda:
            self._events.append(torch.cuda.current_stream().record_event())
        if sum(p.numel() for p in self._waiting) >= LEAST_ELEMENTS:
            self._flush()

    def _flush(self) -> None:
        """Update what waits, and free its gradients."""
        # The range in which profiles look for it (`carpool.profile.kinds`).
        with torch.profiler.record_function("carpool::optimizer"), self._on_its_stream() as stream:
            wait_for(*self._events)
            done = []
            for copies, squares in self._squares.items():
                if alike := [parameter for parameter in self._waiting if self._copies[parameter] == copies]:
                    done += self.optimizer.update(alike, self._factor, squares)
            if self._away is not None:
                wait_for(*done)
                self._away.updated(self._waiting)
            now = [] if stream is None else [stream.record_event()]
        self._updated.update(self._waiting)
        gradients = [parameter.grad for parameter in self._waiting]
        for parameter in self._waiting:
            parameter.grad = None
        if stream is not None and not torch.cuda.is_current_stream_capturing():
            # It may have been made on yet another stream, which must not get its memory back too early. (In a capture
            # all are made on one stream, which waits for the update before their memory is used again.)
            for gradient in gradients:
                if gradient is not None:
                    local(gradient).record_stream(stream)
        if done or self._beside is not None:
            elements = sum(local(one).numel() for one in gradients if one is not None)
            self._held.append(([*done, *now], gradients, elements))
            self._let_go(self._most_held)
        self._waiting.clear()
        self._events = now if self._beside is None else []

    @contextmanager
    def _on_its_stream(self) -> Iterator[Any]:
        """Inside, updates are launched. The stream on which they are; None on a CPU."""
        if self._beside is None:
            yield torch.cuda.current_stream() if self._events else None
            return
        self._beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._beside):
            yield self._beside

    def _let_go(self, most: int) -> None:
        """Keep gradients of `most` elements, and the memory of older ones once their update is done."""
        while self._held and sum(elements for *_, elements in self._held) > most:
            events, gradients, _ = self._held.popleft()
            wait_for(*events)
            del gradients
