"""How replicas reach spare slots, and their gradients the homes: `SlotLinks`, and PyTorch's collectives as one.

    loads_WE = links.gather_loads(load_E)          every rank's choices of every expert, before the plan
    handle = links.take(plan)                      what further calls need of the plan, before the dispatch
    coming = links.fetch(homes, handle)            beside dispatch and homes' products; wait() gives spare slots
    coming.release()                               after the experts that read them have been launched
    links.send_home(dhomes, dspare, handle)        beside the last combine

A transport that has a way of its own brings it (`carpool.transport.Transport.slot_links`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any, ClassVar, Protocol

import torch
import torch.distributed as dist

from carpool.experts.slot_ranges import stack
from carpool.layout import ExpertLayout
from carpool.metrics.counters import Meter
from carpool.metrics.host import ToHost
from carpool.replicas.node_slots import make_fillers
from carpool.replicas.slot_plan import SlotPlan
from carpool.replicas.slots import SlotFiller, Transfer
from carpool.transport import Fetched

# Plans whose lists of sends and receives are kept: routing changes slowly, and micro-batches repeat plans.
KEPT_PLANS = 64


class SlotLinks(Protocol):
    """The way of replicas between the ranks of one layer. All calls are collective.

    Attributes:
        waits_for_host: whether `fetch` and `send_home` wait until the host has read the plan. So they are called after
            the dispatch, and no CUDA graph can contain them.
    """

    waits_for_host: ClassVar[bool]

    def gather_loads(self, load_E: torch.Tensor) -> torch.Tensor:
        """(E,) int32 of each rank -> (W, E) on all."""
        ...

    def take(self, plan: SlotPlan) -> Any:
        """A handle of the plan, for the calls below. It may be kept until the backward, and holds no parameters."""
        ...

    def fetch(self, homes: Sequence[torch.Tensor], handle: Any) -> Fetched:
        """Start to fetch. Each of `homes` is (homes of this rank, ...); `wait()` gives a list of (S, ...), the spare
        slots. Empty slots hold anything finite."""
        ...

    def send_home(
        self, dhomes: Sequence[torch.Tensor], dspare: Sequence[torch.Tensor], handle: Any
    ) -> list[torch.Tensor]:
        """Gradients of homes, each (homes of this rank, ...), from this rank's terms of them, which may be overwritten,
        and those of its spare slots, (S, ...). The terms of an expert are added in float32, in order of (rank,
        slot)."""
        ...

    def sent(self, handle: Any) -> tuple[int | torch.Tensor, int | torch.Tensor]:
        """How many experts are sent to other ranks in a fetch, and home, after the fetch: by this rank, or, where only
        the device knows the plan, by all ranks on the first one and 0 on the others."""
        ...


class CollectiveLinks:
    """`SlotLinks` over all-to-alls of `torch.distributed`. Over several nodes an expert crosses to a node once, if that
    saves anything (`node_slots.py`). The host reads the plan when transports that send lists have waited for the device
    anyway.

    Args:
        group: the expert-parallel process group.
    """

    waits_for_host: ClassVar[bool] = True

    def __init__(self, layout: ExpertLayout, group: dist.ProcessGroup, meter: Meter | None = None) -> None:
        self.layout, self.group, self.meter = layout, group, meter
        self._fillers = lru_cache(KEPT_PLANS)(self._make_fillers)

    def gather_loads(self, load_E: torch.Tensor) -> torch.Tensor:
        load_WE = load_E.new_empty(self.layout.num_ranks, len(load_E))
        # Newer torch calls it all_gather_single and warns whoever uses the name that torch 2.11 knows.
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        gather(load_WE.view(-1), load_E.contiguous(), group=self.group)
        return load_WE

    def take(self, plan: SlotPlan) -> ToHost:
        return ToHost(plan.expert_WS)

    def fetch(self, homes: Sequence[torch.Tensor], handle: ToHost) -> Fetched:
        fillers = self.fillers(handle)
        coming = [fillers[0].send_rows(home) for home in homes]
        most = self.layout.slots_per_rank
        return Fetched(lambda: [_arrive(fillers, *one, most) for one in zip(homes, coming, strict=True)])

    def send_home(
        self, dhomes: Sequence[torch.Tensor], dspare: Sequence[torch.Tensor], handle: ToHost
    ) -> list[torch.Tensor]:
        most, (first, *further) = self.layout.slots_per_rank, self.fillers(handle)
        # Unless a rank has a replica of a home of its own.
        if not further and first.own_slots[-1:] < [most]:
            coming = [first.send_gradients(one, most) for one in dspare]
            return [first.add_to(one, transfer.wait()) for one, transfer in zip(dhomes, coming, strict=True)]
        rows = [stack(home, most, spare) for home, spare in zip(dhomes, dspare, strict=True)]
        for hop in (*reversed(further), first):
            coming = [hop.send_gradients(one) for one in rows]
            rows = [hop.homes(one, transfer.wait()) for one, transfer in zip(rows, coming, strict=True)]
        return rows

    def sent(self, handle: ToHost) -> tuple[int, int]:
        hops = self.fillers(handle)
        return sum(sum(hop.send) for hop in hops), sum(sum(hop.receive) for hop in hops)

    def fillers(self, handle: ToHost) -> tuple[SlotFiller, ...]:
        """What fills the slots of a plan, one after the other."""
        return self._fillers(tuple(map(tuple, handle.read().tolist())))

    def _make_fillers(self, replicas: tuple[tuple[int, ...], ...]) -> tuple[SlotFiller, ...]:
        most = self.layout.slots_per_rank
        slots = [
            (*homes, *(-1,) * (most - len(homes)), *more)
            for homes, more in zip(self.layout.homes, replicas, strict=True)
        ]
        return make_fillers(self.layout.homes, slots, self.group, self.meter)


def _arrive(fillers: Sequence[SlotFiller], home: torch.Tensor, coming: Transfer, first: int = 0) -> torch.Tensor:
    """Slots from `first` on."""
    rows, last = home, fillers[-1]
    for hop, following in pairwise(fillers):
        rows = hop.slots(rows, hop.wait(coming))
        coming = following.send_rows(rows)
    return last.slots(rows, last.wait(coming), first)
