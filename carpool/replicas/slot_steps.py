"""Replicas between two updates of the weights: received once, prefetched, and with deferred reduction of gradients.

Between two updates a layer runs several times: in each micro-batch, again under activation checkpointing, in every
batch of an evaluation. Inside `keep_slots` its weights do not change, which allows three optimisations:

  reused      the parameters of slots are received once, for all these forwards
  prefetched  the fill of a layer starts after the previous MoE layer has computed, and that of the first one at once.
              It overlaps the layers between (attention, norms, the router), and the layer waits for it when it needs
              its slots. If it started earlier, it would delay the previous layer's rides, which use the same
              communicator. (Pro-Prophet's block-wise scheduler: arXiv 2411.10003)
  deferred    a backward starts to send replicas' gradients to their homes, and does not wait. They are summed in the
              next backward of the same layer, or at the end of `keep_slots`, and then added to `.grad` of their homes

    forward      attention 0      experts 0   attention 1      experts 1
    overlapped   fill of layer 0  rides       fill of layer 1  rides
    backward     experts 1        attention 1                    experts 0   attention 0           end of keep_slots
    overlapped   rides            gradients of layer 1 to homes  rides       gradients of layer 0  added to .grad

All of this is bit-identical. The backward gives zero gradients to homes with replicas, and stores the terms of their
sums until all have arrived. Then they are rounded and added in the order without deferral: those of a micro-batch in
order of (rank, slot), then micro-batch after micro-batch. This takes memory for these gradients in all layers, and for
the received parameters.

One send for all micro-batches would need fewer bytes for more than two micro-batches (their sums must be sent in
float32), but at the end of the step, where no computation overlaps, and with other rounding.

**FSDP2 and homes.** `experts._parameters[name]` is FSDP's shard between two forwards. With efsdp size 1 the shard has
all experts of the rank. FSDP, if it manages them (`carpool.hf.sharding`), then only casts them, and divides their
gradients at the end of the layer's backward. So a deferred gradient is divided here in the same way, and added to the
shard's gradient without FSDP. Where FSDP shards experts over ranks, a layer fills its slots and reduces their gradients
without these optimisations; where it sums gradients over data-parallel replicas (HSDP), only gradients are not
deferred. A plain `carpool.MoE` always has its homes, and supports both.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from typing import NamedTuple

import torch
from torch.distributed.tensor import DTensor

from carpool.replicas.slots import SlotFiller, Transfer


class Home(NamedTuple):
    """A stacked parameter of this rank's homes between two forwards.

    Attributes:
        parameter: of all experts of this rank; may be a DTensor.
        dtype: the compute dtype of the layer.
        divisor: by which a gradient is divided before it is added to `parameter.grad`; None: it must not be deferred.
    """

    parameter: torch.Tensor
    dtype: torch.dtype
    divisor: float | None


Homes = Mapping[str, Home]


class SlotStep:
    """The slots of one layer inside `keep_slots`.

    Args:
        filler: of the layer.
        homes: by the names in `SlotFiller.fill`. None: nothing is prefetched or deferred.
    """

    def __init__(self, filler: SlotFiller, homes: Homes | None) -> None:
        self.filler = filler
        self.homes: Homes = homes if homes is not None and filler.travels else {}
        self.next: SlotStep | None = None
        self._started = False
        self._received: dict[str, torch.Tensor] = {}
        self._filling: dict[str, Transfer] = {}
        # Gradients in flight, each with those of this rank's own slots for the same experts; and the sums so far.
        self._coming: dict[str, tuple[Transfer, torch.Tensor]] = {}
        self._reduced: dict[str, torch.Tensor] = {}

    # The transfers outlive the call: torch.compile must not treat them as values of a graph.
    @torch._disable_dynamo
    @torch.no_grad()
    def start(self) -> None:
        """Start to fill, unless this was done."""
        if self._started or self._received:
            return
        self._started = True
        for name, home in self.homes.items():
            rows = local(home.parameter)
            self._filling[name] = self.filler.send_rows(rows, home.dtype)

    def start_next(self) -> None:
        """Start to fill the slots of the layer that follows."""
        if self.next is not None:
            self.next.start()

    def arrivals(self, home: torch.Tensor, name: str) -> torch.Tensor:
        """The parameters of this rank's slots whose homes are on other ranks, received at most once."""
        if name not in self._received:
            transfer, ahead = self._filling.pop(name, None), True
            if transfer is None or transfer.out.dtype != home.dtype:
                transfer, ahead = self.filler.send_rows(home.detach(), home.dtype), False
            self._received[name] = self.filler.wait(transfer, ahead)
        return self._received[name]

    def send_home(self, dslots: torch.Tensor, name: str) -> bool:
        """Start to send the gradients of slots to homes on other ranks, and store the terms of their sums; or return
        False: they must not be deferred."""
        if name not in self.homes or self.homes[name].divisor is None:
            return False
        # At most one transfer is in flight: several micro-batches need no more memory than one.
        self._settle(name)
        own = dslots[self.filler.indices(dslots.device).summed_slots]
        self._coming[name] = self.filler.send_gradients(dslots), own
        return True

    def _settle(self, name: str) -> None:
        if name not in self._coming:
            return
        transfer, own = self._coming.pop(name)
        back, home = transfer.wait(), self.homes[name]
        assert home.divisor is not None
        total = self.filler.add_up(back, own).to(home.parameter.dtype).div_(home.divisor)
        self._reduced[name] = self._reduced[name].add_(total) if name in self._reduced else total

    @torch.no_grad()
    def finish(self) -> None:
        """Wait for all transfers, and add the gradients of replicas to those of their homes.

        Raises:
            RuntimeError: a home has no gradient to add to."""
        for transfer in self._filling.values():
            transfer.wait()
        for name in list(self._coming):
            self._settle(name)
        for name, total in self._reduced.items():
            if not len(total):
                continue
            grad = self.homes[name].parameter.grad
            if grad is None:
                raise RuntimeError(
                    "the gradients of replicas are added to those of their homes when slots are no longer kept, and "
                    f"{name} has none; gradients must not be set to None, nor used by an optimizer, before"
                )
            rows, index = local(grad), self.filler.indices(total.device).summed_rows
            rows[index] = rows[index] + total


@contextmanager
def keep_slots(layers: Iterable[tuple[SlotFiller, Homes | None]]) -> Iterator[None]:
    """Context in which weights do not change; gradients are complete afterwards. Collective; see the module's
    docstring.

    Args:
        layers: in the order of their forwards, each with its homes, or None: without prefetching and deferral."""
    # With several hops, only the first has homes that exist between two forwards.
    hops = [(hop, homes if not number else None) for filler, homes in layers for number, hop in enumerate(filler.hops)]
    # Without replicas there is nothing to do, which saves host time before a captured step.
    steps = [SlotStep(filler, homes) for filler, homes in hops] if any(hop.travels for hop, _ in hops) else []
    for before, after in pairwise(steps):
        before.next = after
    for step in steps:
        step.filler.step = step
    try:
        if steps:
            steps[0].start()
        yield
        for step in steps:
            step.finish()
    finally:
        for step in steps:
            step.filler.step = None


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor, detached."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
