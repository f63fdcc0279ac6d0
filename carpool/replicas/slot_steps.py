"""Replicas from one update of the weights to the next: filled once, ahead of their layer; nobody waits for gradients.

Between two updates a layer runs several times: in each micro-batch, again under activation checkpointing, in every
batch of an evaluation. Inside `keep_slots` its weights do not change, which allows three things:

  kept    what arrived for the slots travels once, and serves all these forwards
  ahead   the fill of a layer starts when the MoE layer before it has computed, and that of the first one at once. It
          travels while the layers between compute (attention, norms, the router), and is waited for where the layer
          needs its slots. Started earlier, it would queue in front of the previous layer's own rides, which use the
          same communicator. (Pro-Prophet's block-wise scheduler: arXiv 2411.10003)
  late    a backward sends replicas' gradients home and does not wait. They are added up in the next backward of the
          same layer, or at the end of `keep_slots`, and only then to `.grad` of their homes, which lacks them before

    forward    attention 0      experts 0   attention 1      experts 1
    beside it  fill of layer 0  rides       fill of layer 1  rides
    backward   experts 1        attention 1                   experts 0   attention 0           end of keep_slots
    beside it  rides            gradients of layer 1, home    rides       gradients of layer 0  added to the homes'

All of this is exact, bit for bit. In the backward a home's row that has replicas gets zero, and its summands are kept
until all have come. Then they are rounded and added as if they had been waited for: those of a micro-batch in order of
(rank, slot), then micro-batch after micro-batch. It takes memory for these rows, in all layers, as kept fills do.

One send for all micro-batches would need fewer bytes if there are more than two (sums of several travel in float32),
but all of them at the step's end, where nothing is left to compute beside; and it would round differently.

FSDP2 and homes. `experts._parameters[name]` is FSDP's shard between two forwards. If an expert-parallel rank's experts
are on that rank alone (efsdp size 1), the shard has all of its rows: FSDP, if it has them at all
(`carpool.hf.sharding`), then only casts them, and divides their gradients at the end of the layer's backward, where
there is nothing left to overlap with. So a late gradient is divided here in the same way, and added to the shard's
gradient past FSDP. Where FSDP has divided the rows among ranks, a layer fills its slots itself and sums where it is;
where it sums gradients over copies of the model (HSDP), only gradients are not late. A plain `carpool.MoE` has its
homes at any time, and both work.
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
    """A parameter of this rank's homes, as it is between two forwards.

    Attributes:
        parameter: all of this rank's rows; a DTensor may hold them.
        dtype: in which the layer computes with them.
        divisor: by which a gradient is divided on its way to `parameter.grad`; None: it must not be late.
    """

    parameter: torch.Tensor
    dtype: torch.dtype
    divisor: float | None


Homes = Mapping[str, Home]


class SlotStep:
    """The slots of one layer inside `keep_slots`.

    Args:
        filler: of the layer.
        homes: by the names that `SlotFiller.fill` is given. None: nothing is ahead or late.
    """

    def __init__(self, filler: SlotFiller, homes: Homes | None) -> None:
        self.filler = filler
        self.homes: Homes = homes if homes is not None and filler.travels else {}
        self.next: SlotStep | None = None
        self._started = False
        self._kept: dict[str, torch.Tensor] = {}
        self._filling: dict[str, Transfer] = {}
        # Gradients under way, each with those of this rank's own slots for the same rows, and what has come.
        self._coming: dict[str, tuple[Transfer, torch.Tensor]] = {}
        self._sums: dict[str, torch.Tensor] = {}

    # What it starts outlives the call: torch.compile must not take it for values of a graph.
    @torch._disable_dynamo
    @torch.no_grad()
    def start(self) -> None:
        """Start to fill, unless the layer has begun already."""
        if self._started or self._kept:
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
        """The rows of this rank's slots that live on other ranks, waited for at most once."""
        if name not in self._kept:
            transfer, ahead = self._filling.pop(name, None), True
            if transfer is None or transfer.out.dtype != home.dtype:
                transfer, ahead = self.filler.send_rows(home.detach(), home.dtype), False
            self._kept[name] = self.filler.wait(transfer, ahead)
        return self._kept[name]

    def send_home(self, dslots: torch.Tensor, name: str) -> bool:
        """Start to send the gradients of other ranks' slots, and keep what they will be added to; or False: they must
        not be late."""
        if name not in self.homes or self.homes[name].divisor is None:
            return False
        # At most one is under way: several micro-batches need no more memory than one.
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
        self._sums[name] = self._sums[name].add_(total) if name in self._sums else total

    @torch.no_grad()
    def finish(self) -> None:
        """Wait for whatever is under way, and bring gradients that came to their homes'.

        Raises:
            RuntimeError: a home's gradient is gone, and what came for it would be lost."""
        for transfer in self._filling.values():
            transfer.wait()
        for name in list(self._coming):
            self._settle(name)
        for name, total in self._sums.items():
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
    """Inside, weights do not change; gradients are complete afterwards. All ranks together; see the module's docstring.

    Args:
        layers: in the order of their forwards, each with its homes, or None: it then fills and sums when it runs."""
    # Of several hops, only the first has homes that are there between two forwards.
    hops = [(hop, homes if not number else None) for filler, homes in layers for number, hop in enumerate(filler.hops)]
    # Without replicas there is nothing to keep, and a captured step waits for a host that prepares it.
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
    """What this rank holds of it, detached."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
