"""The numbers of a model's MoE layers over one or more steps and all ranks: from each layer's counters to one record.

Each rank has counted its own tokens (carpool.metrics.counters). Two reductions make one record of them: sums (rows,
bytes, load) and maxima (milliseconds: the slowest rank decides).

    later = metrics.start(device)       counters are summed, sent to the host, and set to zero, behind what is computed
    ...                                 the next step is under way
    later.read()                        a `RideRecord`

Times of rides are read from events, so `start` waits until the last ride is over, and for nothing that comes after it.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from carpool.hf.seam.expert_rides import ExpertRides, rides
from carpool.layout import ExpertLayout
from carpool.metrics.counters import Traffic
from carpool.metrics.host import ToHost, to_device
from carpool.ride.balanced import Load
from carpool.transport.nodes import known_topology

SPANS = ("dispatch", "experts", "combine")
# And, where slots are filled, what waits for them; a part of the others.
FILL = "fill"
# See `RideMetrics._counts`.
Counts = tuple[torch.Tensor, list[dict[str, list[float]]]]


@dataclass(frozen=True)
class RideRecord:
    """The rides of one or more steps, over all layers and ranks: fields of a "train" line, choices of each expert and
    ranks per token of each layer; over layers, tokens dispatched from rank i to rank j and choices computed on each
    rank of an expert-parallel group; milliseconds of "experts" and "rides" per step on each rank of the job; and of the
    numbers that `RideMetrics.start` was given beside, the largest over ranks. With spare slots, the load of
    each layer's rides."""

    record: dict[str, Any]
    load_LE: list[list[int]]
    copies_L: list[float]
    traffic_WW: list[list[int]]
    rank_load_W: list[int]
    rank_ms: dict[str, list[float]]
    most: list[float]
    spare_L: list[Load]


class RideMetrics:
    """Collects the counters of a model's MoE layers. All ranks construct and call it together.

    Args:
        names: of all MoE layers, where the model has those of some stages of a pipeline. None: it has all.
    """

    def __init__(self, model: nn.Module, names: Sequence[str] | None = None) -> None:
        own = rides(model)
        self.layers: list[ExpertRides] = list(own.values())
        # Which rows of the record are this rank's layers; and, of all rows, a layer that is like it.
        self.rows = list(range(len(own))) if names is None else [names.index(name) for name in own]
        self.number = len(own) if names is None else len(names)
        self._aside: list[Counts] = []
        self._rows_there: torch.Tensor | None = None

    def reset(self) -> None:
        """Forget what was counted so far (a warm-up)."""
        self._aside = []
        self.forget_current()

    def set_aside(self, device: torch.device) -> None:
        """Keep what was counted so far for the next `collect`, whatever is counted and forgotten until then. Not
        collective."""
        self._aside.append(self._counts(device))
        self.forget_current()

    def forget_current(self) -> None:
        """Forget what was counted since the last reset, collection or setting aside (an evaluation)."""
        for own in self.layers:
            own.reset_counts()

    def collect(self, device: torch.device, steps: int = 1) -> RideRecord:
        """Everything counted since the last reset, over all ranks, and reset. Waits for the device."""
        return self.start(device, steps).read()

    def start(self, device: torch.device, steps: int = 1, beside: Sequence[float] = ()) -> LaterRecord:
        """As `collect`, but the record is read later.

        Args:
            beside: numbers of this rank; their maxima over ranks come with the record.
        """
        parts = [*self._aside, self._counts(device)]
        total = torch.stack([counts for counts, _ in parts]).sum(0) if self._aside else parts[0][0]
        maxima = []
        for span in (*SPANS, FILL):
            calls = [ms for _, times in parts for layer in times for ms in layer.get(span, [])]
            maxima += [percentile(calls, 0.5), percentile(calls, 0.99), sum(calls) / steps]
        # Each rank's own times ride along: the maximum over ranks of zeros and one number is that number.
        dispatch, experts_ms, combine, _ = maxima[2::3]
        rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        own_ms = [0.0] * (2 * world)
        own_ms[rank], own_ms[world + rank] = experts_ms, dispatch + combine
        slowest = to_device([*maxima, *own_ms, *beside], device)
        if dist.is_initialized():
            dist.all_reduce(total)
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        self.reset()
        return LaterRecord(self, ToHost(total), ToHost(slowest), len(own_ms))

    def _counts(self, device: torch.device) -> Counts:
        """What this rank has counted: a row per layer, to be summed over ranks, and each layer's milliseconds."""
        layers, ranks, rank = self.layers, self.layers[0].num_ranks, self.layers[0].rank
        experts = max(own.num_experts for own in layers)
        traffic = Traffic.totals([own.stats.traffic for own in layers], device, self._far or ())
        rows_LWW = torch.zeros(len(layers), ranks, ranks, dtype=torch.float64, device=device)
        rows_LWW[:, rank] = traffic[:, :ranks]
        none = torch.zeros((), dtype=torch.int64, device=device)
        tokens, sent, spare = [], [], []
        for own in layers:
            tokens.append((own.stats.tokens, own.stats.tokens_dispatched))
            sent.append(none if own.spare is None else none + own.spare.bytes_sent)
            spare.append(none.expand(7) if own.spare is None or own.spare.counts is None else own.spare.counts)
        loads = [own.stats.load_E.to(device) for own in layers]
        if any(own.num_experts != experts for own in layers):
            loads = [F.pad(load_E, (0, experts - len(load_E))) for load_E in loads]
        served_W = rows_LWW.new_zeros(ranks)
        columns = [
            torch.stack(loads).double(),
            torch.stack([_served_by_replicas(own, served_W) for own in layers]),
            rows_LWW.flatten(1),
            to_device(tokens, device),
            traffic[:, ranks:],
            torch.stack(sent).double().unsqueeze(1),
            torch.stack([own.stats.entropy.to(device) for own in layers]).unsqueeze(1),
            torch.stack([none if own.dropped is None else own.dropped for own in layers]).double().unsqueeze(1),
            torch.stack(spare)[:, :6].double(),
        ]
        own_LN = torch.cat(columns, 1)
        if self.number > len(layers):
            own_LN = own_LN.new_zeros(self.number, own_LN.shape[1]).index_copy(0, self._rows(device), own_LN)
        return own_LN, [own.stats.meter.milliseconds() for own in layers]

    @cached_property
    def _far(self) -> list[int] | None:
        """The ranks of other nodes; None: there are none, or where ranks are was not known at the first record."""
        topology = None if self.layers[0].group is None else known_topology(self.layers[0].group)
        if topology is None or topology.num_nodes == 1:
            return None
        own = topology.node_of[self.layers[0].rank]
        return [rank for rank, node in enumerate(topology.node_of) if node != own]

    @property
    def balanced(self) -> bool:
        """Whether rides have spare slots."""
        return self.layers[0].spare_options is not None and self.layers[0].num_ranks > 1

    def _rows(self, device: torch.device) -> torch.Tensor:
        # Made once: what is made of numbers of the host waits for all that the device was given before.
        if self._rows_there is None or self._rows_there.device != device:
            self._rows_there = torch.tensor(self.rows, device=device)
        return self._rows_there

    def layouts(self) -> list[ExpertLayout]:
        """Of all layers. Those of other stages are as this rank's are: layouts of a pipeline do not differ."""
        own = [one.layout for one in self.layers]
        return own if self.number == len(own) else [own[0]] * self.number

    def record(
        self,
        total: torch.Tensor,
        slowest: list[float],
        own_ms: list[float],
        most: list[float],
        layouts: Sequence[ExpertLayout],
    ) -> RideRecord:
        """From what `start` has reduced."""
        experts, ranks, world = max(own.num_experts for own in self.layers), self.layers[0].num_ranks, len(own_ms) // 2
        load_LE, replicas_LW, rows_LWW, numbers = total.split([experts, ranks, ranks * ranks, 15], dim=1)
        tokens_L, dispatched_L, rows_L, bytes_L, baseline_L, far_L, slots_L, entropy_L, dropped_L = numbers[
            :, :9
        ].unbind(1)
        # All ranks of a group have counted the same rides.
        spare_L = [Load.of(counts, ranks) for counts in (numbers[:, 9:] / ranks).tolist()] if self.balanced else []
        if self.layers[0].padded:
            # Padding is among the tokens, but chooses nothing. It is among the rows of a single rank, too.
            share_L = (load_LE.sum(1) + dropped_L) / (tokens_L * max(1, self.layers[0].stats.top_k)).clamp(min=1)
            tokens_L, dispatched_L = tokens_L * share_L, dispatched_L * (share_L if ranks > 1 else 1)
        copies_L = (rows_LWW.sum(1) / dispatched_L.clamp(min=1)).tolist()
        loads = [row[: layout.num_experts] for row, layout in zip(load_LE, layouts, strict=True)]
        parts = zip(layouts, loads, replicas_LW, strict=True)
        served_LW = torch.stack([_served(layout, load_E, replicas_W) for layout, load_E, replicas_W in parts])
        record = {
            "copies_per_token": statistics.fmean(copies_L),
            "rows_remote": int(rows_L.sum()),
            "rows_remote_per_token": float(rows_L.sum() / dispatched_L.sum().clamp(min=1)),
            "bytes_remote": int(bytes_L.sum()),
            "bytes_remote_alltoall": int(baseline_L.sum()),
            **({} if self._far is None else {"bytes_network": int(far_L.sum())}),
            "bytes_replicas": int(slots_L.sum()),
            "load_max_over_mean": max((float(load.max() / load.mean()) if load.sum() else 0.0) for load in loads),
            "rank_load_max_over_mean": float((served_LW.amax(1) / served_LW.mean(1).clamp(min=1e-9)).mean()),
            **_loads_of(spare_L),
            "dead_experts": sum(int((load == 0).sum()) for load in loads),
            "router_entropy": float((entropy_L / tokens_L.clamp(min=1)).mean()),
            "dropped_tokens": int(dropped_L.sum()),
            "ms": {
                span: dict(zip(("p50", "p99", "total"), slowest[3 * i : 3 * i + 3], strict=True))
                for i, span in enumerate((*SPANS, FILL) if self.balanced else SPANS)
            },
        }
        return RideRecord(
            record=record,
            load_LE=[load.long().tolist() for load in loads],
            copies_L=copies_L,
            traffic_WW=rows_LWW.sum(0).view(ranks, ranks).long().tolist(),
            rank_load_W=served_LW.sum(0).long().tolist(),
            rank_ms={"experts": own_ms[:world], "rides": own_ms[world:]},
            most=most,
            spare_L=spare_L,
        )


class LaterRecord:
    """A `RideRecord` whose numbers are on their way to the host."""

    def __init__(self, metrics: RideMetrics, total: ToHost, slowest: ToHost, times: int) -> None:
        self._metrics, self._total, self._slowest, self._times = metrics, total, slowest, times
        # As they were when it was counted: experts may have moved since.
        self._layouts = metrics.layouts()

    def arrived(self) -> bool:
        """Whether `read` would not wait."""
        return self._total.arrived() and self._slowest.arrived()

    def read(self) -> RideRecord:
        """The record. Waits until its numbers are there."""
        spans, slowest = 3 * (len(SPANS) + 1), self._slowest.read().tolist()
        own_ms, most = slowest[spans : spans + self._times], slowest[spans + self._times :]
        return self._metrics.record(self._total.read(), slowest[:spans], own_ms, most, self._layouts)


def _served_by_replicas(own: ExpertRides, none_W: torch.Tensor) -> torch.Tensor:
    """(W,) float64: with spare slots, the choices of all tokens that this rank computes; else zeros."""
    if own.spare is not None and own.spare.counts is not None:
        return F.pad(own.spare.counts[6:].to(none_W), (own.rank, own.num_ranks - own.rank - 1))
    return none_W


def _loads_of(spare_L: Sequence[Load]) -> dict[str, float | int]:
    """With spare slots, what a step's record says of the load of ranks."""
    if not spare_L:
        return {}
    return {
        "rank_load_before": statistics.fmean(load.before for load in spare_L),
        "rank_load_after": statistics.fmean(load.after for load in spare_L),
        "replicas_per_ride": statistics.fmean(load.replicas for load in spare_L),
        "rides_beyond_limit": sum(load.beyond for load in spare_L),
    }


def _served(layout: ExpertLayout, load_E: torch.Tensor, replicas_W: torch.Tensor) -> torch.Tensor:
    """(W,) choices (or slices of choices) that each rank computes, over all ranks' tokens."""
    if replicas_W.any():
        return replicas_W
    return torch.stack([load_E[[e // layout.slices for e in rank]].sum() for rank in layout.homes])


def percentile(values: list[float], share: float) -> float:
    """The smallest value that at least this share of the values does not exceed; 0 for none."""
    if not values:
        return 0.0
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, -(-int(share * 1000) * len(ordered) // 1000) - 1))]
