"""The numbers of a model's MoE layers over one or more steps and all ranks: from each layer's counters to one record.

Each rank has counted its own tokens (carpool.observe.stats). Two reductions make one record of them: sums (rows, bytes,
load) and maxima (milliseconds: the slowest rank decides). The device is read three times, whatever the number of
layers: for what kernels counted, for the sums, for the maxima.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from carpool.hf.expert_parallel import ExpertRides, rides
from carpool.observe.traffic import Traffic

SPANS = ("dispatch", "experts", "combine")
# See `RideMetrics._counts`.
Counts = tuple[torch.Tensor, list[dict[str, list[float]]]]


@dataclass(frozen=True)
class RideRecord:
    """The rides of one or more steps, over all layers and ranks.

    Attributes:
        record: fields of a "train" line that come from the rides.
        load_LE: choices of each expert, per layer.
        copies_L: rows dispatched per token, per layer.
        traffic_WW: rows dispatched from rank i to rank j of an expert-parallel group, over layers.
        rank_load_W: choices that each rank of an expert-parallel group computes, over layers.
        rank_ms: for "experts" and "rides" (dispatch and combine), milliseconds per step on each rank of the job.
    """

    record: dict[str, Any]
    load_LE: list[list[int]]
    copies_L: list[float]
    traffic_WW: list[list[int]]
    rank_load_W: list[int]
    rank_ms: dict[str, list[float]]


class RideMetrics:
    """Collects the counters of a model's MoE layers. All ranks construct and call it together."""

    def __init__(self, model: nn.Module) -> None:
        self.layers: list[ExpertRides] = list(rides(model).values())
        self._aside: list[Counts] = []

    def reset(self) -> None:
        """Forget what was counted so far (a warm-up)."""
        self._aside = []
        self.forget_current()

    def set_aside(self, device: torch.device) -> None:
        """Keep what was counted so far for the next `collect`, whatever is counted and forgotten until then. Waits for
        the device; not collective."""
        self._aside.append(self._counts(device))
        self.forget_current()

    def forget_current(self) -> None:
        """Forget what was counted since the last reset, collection or setting aside (an evaluation)."""
        for own in self.layers:
            own.reset_counts()

    def collect(self, device: torch.device, steps: int = 1) -> RideRecord:
        """Everything counted since the last reset, over all ranks, and reset."""
        parts = [*self._aside, self._counts(device)]
        total = torch.stack([counts for counts, _ in parts]).sum(0) if self._aside else parts[0][0]
        maxima = []
        for span in SPANS:
            calls = [ms for _, times in parts for layer in times for ms in layer.get(span, [])]
            maxima += [percentile(calls, 0.5), percentile(calls, 0.99), sum(calls) / steps]
        # Each rank's own times ride along: the maximum over ranks of zeros and one number is that number.
        dispatch, experts_ms, combine = maxima[2::3]
        rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        own_ms = [0.0] * (2 * world)
        own_ms[rank], own_ms[world + rank] = experts_ms, dispatch + combine
        slowest = torch.tensor([*maxima, *own_ms], dtype=torch.float64, device=device)
        if dist.is_initialized():
            dist.all_reduce(total)
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        self.reset()
        experts = max(own.num_experts for own in self.layers)
        return self._record(total.cpu(), slowest.tolist(), experts, self.layers[0].num_ranks)

    def _counts(self, device: torch.device) -> Counts:
        """What this rank has counted: a row per layer, to be summed over ranks, and each layer's milliseconds."""
        ranks = self.layers[0].num_ranks
        experts = max(own.num_experts for own in self.layers)
        traffics = Traffic.read_all([own.stats.traffic for own in self.layers])
        counted = []
        for own, (rows, sizes, baseline) in zip(self.layers, traffics, strict=True):
            stats, traffic = own.stats, own.stats.traffic
            rows_WW = [[0] * ranks for _ in range(ranks)]
            rows_WW[own.rank] = rows["dispatch"]
            numbers = [
                stats.tokens,
                stats.tokens_dispatched,
                traffic.remote(rows, "dispatch"),
                traffic.remote(sizes),
                sum(baseline.values()) + traffic.remote(sizes, "plan"),
                own.filler.bytes_filled + own.filler.bytes_summed,
            ]
            counted.append([n for row in rows_WW for n in row] + numbers)
        # Load and entropy stay on the device until they are summed.
        loads = [
            F.pad(own.stats.load_E.to(device, torch.float64), (0, experts - own.num_experts)) for own in self.layers
        ]
        entropies = torch.stack([own.stats.entropy.to(device) for own in self.layers])
        none = torch.zeros((), dtype=torch.int64)
        dropped = torch.stack(
            [(none if own.dropped is None else own.dropped).to(device).double() for own in self.layers]
        )
        served = [_served_by_replicas(own, device) for own in self.layers]
        host = torch.tensor(counted, dtype=torch.float64).to(device)
        total = torch.cat(
            [torch.stack(loads), torch.stack(served), host, entropies.unsqueeze(1), dropped.unsqueeze(1)], dim=1
        )
        return total, [own.stats.meter.milliseconds() for own in self.layers]

    def _record(self, total: torch.Tensor, slowest: list[float], experts: int, ranks: int) -> RideRecord:
        own_ms = slowest[3 * len(SPANS) :]
        world = len(own_ms) // 2
        load_LE, replicas_LW, rows_LWW, numbers = total.split([experts, ranks, ranks * ranks, 8], dim=1)
        tokens_L, dispatched_L, rows_L, bytes_L, baseline_L, slots_L, entropy_L, dropped_L = numbers.unbind(1)
        copies_L = (rows_LWW.sum(1) / dispatched_L.clamp(min=1)).tolist()
        loads = [row[: own.num_experts] for row, own in zip(load_LE, self.layers, strict=True)]
        parts = zip(self.layers, loads, replicas_LW, strict=True)
        served_LW = torch.stack([_served(own, load_E, replicas_W) for own, load_E, replicas_W in parts])
        record = {
            "copies_per_token": statistics.fmean(copies_L),
            "rows_remote": int(rows_L.sum()),
            "rows_remote_per_token": float(rows_L.sum() / dispatched_L.sum().clamp(min=1)),
            "bytes_remote": int(bytes_L.sum()),
            "bytes_remote_alltoall": int(baseline_L.sum()),
            "bytes_replicas": int(slots_L.sum()),
            "load_max_over_mean": max((float(load.max() / load.mean()) if load.sum() else 0.0) for load in loads),
            "rank_load_max_over_mean": float((served_LW.amax(1) / served_LW.mean(1).clamp(min=1e-9)).mean()),
            "dead_experts": sum(int((load == 0).sum()) for load in loads),
            "router_entropy": float((entropy_L / tokens_L.clamp(min=1)).mean()),
            "dropped_tokens": int(dropped_L.sum()),
            "ms": {
                span: dict(zip(("p50", "p99", "total"), slowest[3 * i : 3 * i + 3], strict=True))
                for i, span in enumerate(SPANS)
            },
        }
        return RideRecord(
            record=record,
            load_LE=[[int(n) for n in load] for load in loads],
            copies_L=copies_L,
            traffic_WW=rows_LWW.sum(0).view(ranks, ranks).long().tolist(),
            rank_load_W=served_LW.sum(0).long().tolist(),
            rank_ms={"experts": own_ms[:world], "rides": own_ms[world:]},
        )


def _served_by_replicas(own: ExpertRides, device: torch.device) -> torch.Tensor:
    """(W,) float64: choices of this rank's tokens that each rank computes, where the experts' load does not tell."""
    counted = own.filler.load_P
    if counted is None:
        return torch.zeros(own.num_ranks, dtype=torch.float64, device=device)
    return counted[:-1].view(own.num_ranks, -1).sum(1).to(device, torch.float64)


def _served(own: ExpertRides, load_E: torch.Tensor, replicas_W: torch.Tensor) -> torch.Tensor:
    """(W,) choices that each rank computes, over all ranks' tokens."""
    if own.layout.num_replicas:
        return replicas_W
    return torch.stack([load_E[[e for e in rank if e != -1]].sum() for rank in own.layout.slots])


def percentile(values: list[float], share: float) -> float:
    """The smallest value that at least this share of the values does not exceed; 0 for none."""
    if not values:
        return 0.0
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, -(-int(share * 1000) * len(ordered) // 1000) - 1))]
