"""`carpool bench transport`: how long rows travel, all transports side by side in one run.

For each shape and routing the ranks draw the same input, and every contender

    1  is checked: forward and backward against `gather` in float64 (`ride_check.py`); a wrong answer ends the benchmark
    2  rides: repetition by repetition, contender by contender, the order turned round each time (`timing.py`)
    3  has its bytes compared: what `Traffic` counted equals what `carpool.placement.predicted_volume` predicts

    section              what is timed
    plan_dispatch        plan and dispatch, until what arrived can be used: end to end
    dispatch             dispatch on a route that was planned before
    combine              until the sums are there
    dispatch_gradients   with --backward: the backward of combine
    combine_gradients    with --backward: the backward of dispatch
    decode               with --decode: plan, dispatch and combine of 128 tokens per rank (`Decoder`)

GB/s are the bytes that the busiest rank sends to or receives from others, whichever is more, per second of the median.
On GPUs the same run measures what plain copies reach between the same GPUs (`Ceiling`); a contender's share of it
compares its GB/s with theirs. A contender that sends more bytes than necessary may use the links well and be slow.

Files: DIR/transport.json, every repetition and where it ran; DIR/transport.png.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from carpool.bench.bench_settings import TransportSettings, has_ctas
from carpool.bench.contest import RankBenchmark, draw_routings, measure_cases
from carpool.bench.options import RideShape
from carpool.bench.timing import Clock, rounds
from carpool.bench.transport.ride_check import CALLS, TOKENS, VERB_OF_SECTION, Case, Decoder, Rider, oracle
from carpool.bench.transport.transport_results import CaseResult, ContenderResult, Times, show
from carpool.layout import ExpertLayout
from carpool.layout.topology import Topology
from carpool.metrics.counters import Traffic
from carpool.placement.predicted_volume import predict
from carpool.routing import Routing
from carpool.transport import (
    Codecs,
    NVLinkOptions,
    Transport,
    TransportOptions,
    between_ranks,
    find_transport,
    make_transport,
    set_topology,
    topology_of,
)
from carpool.transport.codecs import PLAIN
from carpool.transport.nvlink import why_not

WARMUP = 3


class TransportBenchmark:
    """Measures every case on the default process group; all ranks construct and call it alike.

    Raises:
        ValueError: a transport that was asked for by name cannot run here.
    """

    def __init__(self, settings: TransportSettings, device: torch.device) -> None:
        self.settings, self.device = settings, device
        self.dtype: torch.dtype = getattr(torch, settings.dtype)
        self.rank, self.num_ranks = dist.get_rank(), dist.get_world_size()
        self.group = dist.group.WORLD if self.num_ranks > 1 else None
        self.contenders = list_contenders(settings)
        # A group, and so buffers, of their own: those of the larger shapes would be too large.
        self.decode_group = dist.new_group() if settings.decode and self.group is not None else None
        set_topology(self.decode_group, topology_of(self.group))
        self.ceiling: Ceiling | None = None
        for shape in settings.shapes:
            self._runnable(shape, self.group)

    def measure_all(self) -> list[CaseResult]:
        """The results in the order of the settings, and once more with few tokens."""
        modes = (False, True) if self.settings.decode else (False,)
        return [case for mode in modes for case in measure_cases(self.settings, partial(self._measure, decode=mode))]

    def _measure(self, shape: RideShape, kind: str, decode: bool) -> CaseResult:
        settings, group, rank = self.settings, self.decode_group if decode else self.group, self.rank
        shape = replace(shape, tokens=TOKENS) if decode else shape
        case = self._case(shape, kind)
        result = CaseResult(shape, kind, "decode" if decode else "train", self.num_ranks)
        want, reasons = oracle(case, group, rank), self._runnable(shape, group)
        running: dict[Contender, Rider] = {}
        for c in self.contenders:
            if c.transport not in reasons:
                transport, backward = build(c, group, case.layout, shape.tokens), settings.backward and not decode
                make = Decoder if decode else Rider
                running[c] = make(transport, case, rank, group, c.label, want, fp8=c.fp8, backward=backward)
        for rider in running.values():
            if isinstance(rider, Decoder):
                rider.record(want)
        del want
        # The bytes of one row per (token, rank), the mean over ranks.
        ceiling_bytes = int(self._expected(Contender("dedup"), case)["dispatch"].sum()) // self.num_ranks
        clock, pushed = Clock(self.device, group), 0
        ceiling = None if decode else self._ceiling(ceiling_bytes)
        for number, order in rounds(running, settings.repetitions, WARMUP):
            clock.keep = number >= 0
            if number == 0:
                for rider in running.values():
                    rider.traffic.reset()
            for c in order:
                running[c].once(clock)
            if ceiling is not None:
                pushed = ceiling.push(ceiling_bytes, clock, "push")
        times = clock.slowest()
        if pushed:
            result.ceiling_bytes = pushed
            result.ceiling = Times.of(times[LABEL, "push"], pushed, None, clock.host_us(LABEL, "push"))
        ceiling_rate = None if result.ceiling is None else result.ceiling.gb_per_s
        for c in self.contenders:
            lossy = tuple(c.codecs.lossy_reasons)
            why = reasons.get(c.transport)
            row = ContenderResult(label=c.label, transport=c.transport, ctas=c.ctas, lossy=lossy, unavailable=why)
            result.rows.append(row)
            if (own := running.get(c)) is None:
                continue
            row.error = own.error
            if isinstance(own, Decoder):
                row.graph, expected = own.graph is not None, {}
            else:
                expected = self._expected(c, case)
                row.bytes_sent, row.bytes_predicted = self._check_bytes(c, own.traffic, expected)
            for section in (name for name in (*VERB_OF_SECTION, "decode") if (c.label, name) in times):
                num_bytes = None if decode else busiest(expected[VERB_OF_SECTION[section]])
                host_us = clock.host_us(c.label, section)
                row.sections[section] = Times.of(times[c.label, section], num_bytes, ceiling_rate, host_us)
        return result

    def _case(self, shape: RideShape, kind: str) -> Case:
        layout, routings = draw_routings(self.settings, shape, kind, self.num_ranks)
        return Case.make(shape, layout, routings, self.rank, self.dtype, self.device, self.settings.seed)

    def _expected(self, contender: Contender, case: Case) -> dict[str, np.ndarray]:
        shape = (case.shape.hidden, self.dtype.itemsize)
        return expected_bytes(contender, case.routings, case.layout, *shape, topology_of(self.group))

    def _runnable(self, shape: RideShape, group: dist.ProcessGroup | None) -> dict[str, str]:
        """Why transports cannot run here, for those that cannot. Collective."""
        reasons = {}
        for name in dict.fromkeys(c.transport for c in self.contenders):
            if why := why_unavailable(name, group, shape, self.dtype):
                if name in self.settings.transports:
                    raise ValueError(
                        f"transport {name} cannot run here: {why}; leave it out of --transports, or leave --transports "
                        "out to measure those that can"
                    )
                reasons[name] = why
        return reasons

    def _ceiling(self, num_bytes: int) -> Ceiling | None:
        """What measures the ceiling, for at least so many bytes per rank; None where ranks cannot write into each
        other's memory. Collective."""
        if self.device.type != "cuda" or self.group is None or num_bytes == 0 or why_not(self.group) is not None:
            return None
        if self.ceiling is None or self.ceiling.most_bytes < num_bytes:
            self.ceiling = Ceiling(self.group, self.device, num_bytes)
        return self.ceiling

    def _check_bytes(
        self, contender: Contender, traffic: Traffic, expected: dict[str, np.ndarray]
    ) -> tuple[dict[str, list[int]], dict[str, list[int]]]:
        """Bytes that each rank sent to others in one call of each verb, counted and predicted. Collective.

        Raises:
            RuntimeError: they differ.
        """
        calls = {verb: n * self.settings.repetitions for verb, n in CALLS.items()}
        verbs = [verb for verb in calls if self.settings.backward or not verb.endswith("_backward")]
        counted = {verb: traffic.bytes[verb] for verb in verbs}
        everyone: list[Any] = [None] * self.num_ranks
        dist.all_gather_object(everyone, counted)
        sent: dict[str, list[int]] = {}
        for verb in verbs:
            total_WW = np.array([of_rank[verb] for of_rank in everyone])
            np.fill_diagonal(total_WW, 0)
            if not np.array_equal(total_WW, calls[verb] * expected[verb]):
                raise RuntimeError(
                    f"{contender.label} counted other bytes than predicted in {verb}: in {calls[verb]} calls, from "
                    f"rank [i] to rank [j], {total_WW.tolist()}; each call should be {expected[verb].tolist()}"
                )
            sent[verb] = (total_WW.sum(1) // calls[verb]).tolist()
        return sent, {verb: expected[verb].sum(1).tolist() for verb in verbs}


def measure(settings: TransportSettings, device: torch.device, command: str) -> list[CaseResult]:
    """All cases. All ranks together."""
    return TransportBenchmark(settings, device).measure_all()


BENCHMARK = RankBenchmark("transport", TransportSettings, measure, show, "write_rides")


FP8_OUT = Codecs(dispatch="fp8")


@dataclass(frozen=True)
class Contender:
    """Attributes:
    transport: the name of the transport.
    ctas: thread blocks of its kernels; None: not ours to choose (NCCL and gloo decide).
    fp8: rows travel out to experts as FP8. Lossy.
    """

    transport: str
    ctas: int | None = None
    fp8: bool = False

    @property
    def label(self) -> str:
        about = ["fp8"] * self.fp8 + ([] if self.ctas is None else [f"{self.ctas} CTAs"])
        return f"{self.transport} ({', '.join(about)})" if about else self.transport

    @property
    def codecs(self) -> Codecs:
        return FP8_OUT if self.fp8 else PLAIN


def list_contenders(settings: TransportSettings) -> list[Contender]:
    """One for each transport; where thread blocks are ours to choose, one for each number. One more where rows can
    travel as FP8, if that is asked for."""
    found = []
    for name in settings.transports or between_ranks():
        found += [Contender(name, ctas) for ctas in (settings.ctas if has_ctas(name) else (None,))]
        if settings.fp8 and find_transport(name).why_no_codecs(FP8_OUT) is None:
            found.append(replace(found[-1], fp8=True))
    return list(dict.fromkeys(found))


def why_unavailable(name: str, group: dist.ProcessGroup | None, shape: RideShape, dtype: torch.dtype) -> str | None:
    """Why transport `name` cannot run here, or None. Collective over the group."""
    way = find_transport(name)
    return way.why_not_hidden(shape.hidden, dtype.itemsize) or way.why_not(group)


def build(contender: Contender, group: dist.ProcessGroup | None, layout: ExpertLayout, tokens: int) -> Transport:
    """The transport itself, with buffers for `tokens` tokens per rank where it has any."""
    options = TransportOptions(codecs=contender.codecs)
    if contender.ctas is not None:
        options = NVLinkOptions(
            dispatch_ctas=contender.ctas, combine_ctas=contender.ctas, max_tokens=tokens, codecs=contender.codecs
        )
    return make_transport(contender.transport, group, layout.slots_per_rank, options)


def expected_bytes(
    contender: Contender,
    routings: Sequence[Routing],
    layout: ExpertLayout,
    hidden: int,
    element_size: int,
    topology: Topology | None = None,
) -> dict[str, np.ndarray]:
    """For each verb of `carpool.metrics.counters.VERBS` but the plan: (W, W) bytes from rank [i] to [j], 0 to itself.

    As FP8 a row is a packet of codes and scales, on the way out of the forward only.
    """
    experts, options = [routing.expert_TK for routing in routings], TransportOptions(codecs=contender.codecs)
    volume = predict(
        contender.transport, experts, layout, hidden=hidden, element_size=element_size,
        options=find_transport(contender.transport).own_options(options), topology=topology,
    )  # fmt: skip
    bytes_WW = {verb: matrix.copy() for verb, matrix in volume.bytes_WW.items() if verb != "plan"}
    for matrix in bytes_WW.values():
        np.fill_diagonal(matrix, 0)
    return bytes_WW


def busiest(bytes_WW: np.ndarray) -> int:
    """Bytes through the link of the rank that has most to do. Links carry both directions at once."""
    return int(max(bytes_WW.sum(0).max(), bytes_WW.sum(1).max()))


LABEL = "copy engines"


class Ceiling:
    """The practical ceiling of the links: every rank pushes the same bytes to every other with plain copies.

    Copies between the memories of two GPUs are done by copy engines; no SM is used, nothing is selected or added. What
    they reach is what a transport's kernels can hope for. Rank r begins with rank r + 1, so that no two ranks write to
    the same peer at a time, and one copy follows the other:

        rank 0 -> 1, 2, 3      rank 1 -> 2, 3, 0      rank 2 -> 3, 0, 1      rank 3 -> 0, 1, 2

    (A stream for each peer, all copies at once, reaches less: 227 GB/s instead of 370 on 4 H200.) The bytes are those
    that one row per (token, rank) takes for the routing in question, the mean over ranks, spread evenly over the peers:
    a skewed routing is slower than its ceiling for that alone. Collective to make, and to call.

    Args:
        group: at least two ranks, each with a GPU, of one host.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, most_bytes: int) -> None:
        from torch.distributed import _symmetric_memory as symmetric_memory

        self.rank, self.num_ranks = dist.get_rank(group), dist.get_world_size(group)
        self.most_bytes, each = most_bytes, self._share(most_bytes)
        self.source = torch.zeros(each, dtype=torch.uint8, device=device)
        # One place per sender: nobody overwrites what another writes.
        total = self.num_ranks * each
        self.memory = symmetric_memory.empty(total, dtype=torch.uint8, device=device)
        handle = symmetric_memory.rendezvous(self.memory, group)
        order = [(self.rank + i) % self.num_ranks for i in range(1, self.num_ranks)]
        self.targets = [handle.get_buffer(peer, (total,), torch.uint8)[self.rank * each :][:each] for peer in order]

    def push(self, num_bytes: int, clock: Clock, name: str) -> int:
        """Time one push of `num_bytes` bytes per rank as section (`LABEL`, name); returns the bytes in fact pushed."""
        size = self._share(num_bytes)
        with clock.section(LABEL, name):
            for target in self.targets:
                target[:size].copy_(self.source[:size], non_blocking=True)
        return size * (self.num_ranks - 1)

    def _share(self, num_bytes: int) -> int:
        """Bytes to each peer, a multiple of 16 and at least that."""
        return max(16, num_bytes // (self.num_ranks - 1) // 16 * 16)
