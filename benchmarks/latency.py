"""How long one dispatch and one combine take: alone, under load, and with a slow rank.

    torchrun --nproc-per-node 4 -m benchmarks.latency --out latency.json
    torchrun --nproc-per-node 2 -m benchmarks.latency --tokens 64 --hidden 64 --experts 8 --top-k 2 --verbs 20   # CPUs

For each number of tokens per rank (128 is like decoding, 8192 like training) and each transport, some hundred verbs one
by one, under each of these conditions in turns, so that a drift of the machine meets all of them:

    alone              nothing else
    products           matrix products like the experts' follow each other on the computation's stream, on all
                       multiprocessors; each rank's begin at a random moment of their own
    products, reserved the same, but they leave the multiprocessors that the transport takes, as a schedule does (GPUs)
    all-reduce         all-reduces of dense gradients follow each other on the links, in a process group of their own
    slow D ms          one rank sleeps D ms before the verb, on its device

All ranks begin a verb together: they meet on the host, then each device sleeps while its host asks for everything,
then a tiny all-reduce. A load runs already when the verb begins, at a random moment of it, and is asked for in such a
number that it outlasts the verb; "under" is the share of verbs for which it did. "ahead" is the share of verbs that the
host had asked for before the device came to them. A verb's time is from its begin until what it brings can be
used on the stream that asked, on the slowest rank; with a slow rank, on the slowest of the others, and "seen" is how
much of the sleep they wait: (median - their median alone) / D. Routes are planned before; the plan is not timed. Before
anything is timed, each transport's answer is compared with `gather` in float64.

On a CPU the host's clock, a thread that multiplies, and gloo's own threads: to see that it works.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F

from benchmarks.script import join_group, make_parser, show, write_results
from carpool.bench.options import RideShape
from carpool.bench.routings import make_routings
from carpool.bench.timing import begin_together, percentile, rounds
from carpool.bench.transport.ride_check import Case, check, forward_and_backward, oracle
from carpool.bench.transport.ride_contest import why_unavailable
from carpool.kernels.device import reserved
from carpool.layout import ExpertLayout
from carpool.metrics.counters import Traffic
from carpool.metrics.host import slowest
from carpool.transport import NVLinkOptions, Transport, make_transport

WARMUP = 3
DELAY_CYCLES = 6_000_000  # 3 ms: the host asks for a load and a verb meanwhile
VERBS = ("dispatch", "combine")


@dataclass(frozen=True)
class Condition:
    name: str
    load: str = ""
    reserved: bool = False
    delay_ms: float = 0.0


class Timed(NamedTuple):
    """One verb on this rank. us: microseconds; ahead: see "ahead"; under: see "under"."""

    us: float
    ahead: bool
    under: bool


def conditions(delays: list[float], cuda: bool) -> list[Condition]:
    found = [Condition("alone"), Condition("products", "products")]
    if cuda:
        found.append(Condition("products, reserved", "products", reserved=True))
    found.append(Condition("all-reduce", "all-reduce"))
    return found + [Condition(f"slow {ms:g} ms", delay_ms=ms) for ms in delays]


class OnGpu:
    """Times a verb on CUDA, by events."""

    def __init__(self, device: torch.device, slow: bool, gradient_bytes: int) -> None:
        self.device, self.slow = device, slow
        self.stream = torch.cuda.Stream(device)
        self.together, self.apart = random.Random(0), random.Random(1 + dist.get_rank())
        self.group = dist.new_group()
        self.gradient = torch.zeros(gradient_bytes // 2, dtype=torch.bfloat16, device=device)
        self.flag = torch.zeros(1, device=device)
        # As the up projection of 8 experts, 4096 rows each: some tenths of a millisecond.
        self.rows = torch.randn(32768, 2048, device=device, dtype=torch.bfloat16)
        self.weights = torch.randn(8, 2048, 2048, device=device, dtype=torch.bfloat16).transpose(1, 2)
        self.ends = torch.arange(4096, 32769, 4096, device=device, dtype=torch.int32)
        self.cycles = 1e6 / self._milliseconds(lambda: torch.cuda._sleep(1_000_000))  # in a millisecond
        self.unit_ms = {"products": self._milliseconds(self._product), "all-reduce": self._milliseconds(self._reduce)}

    def _milliseconds(self, run: Callable[[], Any]) -> float:
        """Of one call, the largest of all ranks: so that all of them ask for as many."""
        for _ in range(3):
            run()
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        events[0].record()
        for _ in range(10):
            run()
        events[1].record()
        events[1].synchronize()
        return slowest([events[0].elapsed_time(events[1]) / 10], self.device)[0]

    def _product(self) -> None:
        F.grouped_mm(self.rows, self.weights, offs=self.ends)

    def _reduce(self) -> None:
        dist.all_reduce(self.gradient, group=self.group)

    def _sleep(self, ms: float) -> None:
        torch.cuda._sleep(int(self.cycles * ms))

    def timed(self, verb: Callable[[], Any], condition: Condition, most_ms: float, processors: int) -> Timed:
        """`most_ms`: what the verb may take while the load outlasts it."""
        begin_together(self.device, dist.group.WORLD, DELAY_CYCLES, self.flag)
        begin, end, over = (torch.cuda.Event(enable_timing=True) for _ in range(3))
        if condition.load:
            unit = self.unit_ms[condition.load]
            lead = unit * (1 + self.together.random())
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream), reserved(processors if condition.reserved else 0):
                if condition.load == "products":
                    self._sleep(unit * self.apart.random())
                for _ in range(math.ceil((lead + most_ms) / unit)):
                    (self._product if condition.load == "products" else self._reduce)()
                over.record()
            self._sleep(lead)
        begin.record()
        if condition.delay_ms and self.slow:
            self._sleep(condition.delay_ms)
        verb()
        end.record()
        ahead = not begin.query()
        torch.cuda.synchronize()
        under = not condition.load or end.elapsed_time(over) > 0
        return Timed(1e3 * begin.elapsed_time(end), ahead, under)


class OnCpu:
    """Times a verb on a CPU, by the clock."""

    def __init__(self, device: torch.device, slow: bool, gradient_bytes: int) -> None:
        self.slow = slow
        self.group = dist.new_group()
        self.gradient = torch.zeros(gradient_bytes // 4)

    def timed(self, verb: Callable[[], Any], condition: Condition, most_ms: float, processors: int) -> Timed:
        dist.barrier()
        with self._load(condition.load) as under:
            begin = time.perf_counter()
            if condition.delay_ms and self.slow:
                time.sleep(condition.delay_ms / 1e3)
            verb()
            took = time.perf_counter() - begin
            covered = under()
        return Timed(1e6 * took, True, covered)

    @contextmanager
    def _load(self, kind: str) -> Iterator[Callable[[], bool]]:
        if kind == "products":
            over, matrix = threading.Event(), torch.ones(256, 256)

            def multiply() -> None:
                while not over.is_set():
                    torch.mm(matrix, matrix)

            thread = threading.Thread(target=multiply)
            thread.start()
            yield lambda: True
            over.set()
            thread.join()
        elif kind == "all-reduce":
            work = dist.all_reduce(self.gradient, group=self.group, async_op=True)
            assert work is not None
            yield lambda: not work.is_completed()
            work.wait()
        else:
            yield lambda: True


class Rides:
    """One number of tokens: every transport with a route, and buffers of this size."""

    def __init__(self, shape: RideShape, args: argparse.Namespace, device: torch.device) -> None:
        rank, world = dist.get_rank(), dist.get_world_size()
        self.group = dist.new_group()  # buffers belong to a group: each size has its own
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        layout = ExpertLayout.contiguous(shape.experts, world)
        routings = make_routings("uniform", shape.tokens, shape.top_k, layout)
        self.case = Case.make(shape, layout, routings, rank, dtype, device, seed=0)
        self.traffic = Traffic(world, rank)
        options = NVLinkOptions(
            max_tokens=shape.tokens, dispatch_ctas=args.ctas, combine_ctas=args.ctas, side_stream=True
        )
        want = oracle(self.case, self.group, rank)
        self.transports: dict[str, Transport] = {}
        self.routes: dict[str, Any] = {}
        for name in args.transports:
            if why := why_unavailable(name, self.group, shape, dtype):
                if rank == 0:
                    print(f"{name} is left out: {why}", flush=True)
                continue
            transport = make_transport(name, self.group, layout.slots_per_rank, options)
            got = forward_and_backward(transport, self.case, rank, self.traffic, backward=True)
            check(name, got, want, self.case, self.group, dtype)
            self.transports[name] = transport
            self.routes[name] = transport.plan(self.case.slot_TK, self.case.weight_TK, self.traffic)

    def once(self, name: str, timed: Callable[[Callable[[], Any], str], None]) -> None:
        """A dispatch and its combine, each by itself; experts that write zeros between them."""
        transport, case = self.transports[name], self.case
        route = self.routes[name].again()
        timed(lambda: transport.dispatch(case.x_TH, route).wait(), "dispatch")
        partial_RH = route.new_partial(case.shape.hidden, case.x_TH.dtype, case.x_TH.device).zero_()
        timed(lambda: transport.combine(route, partial_RH).wait(), "combine")


def measure(
    shape: RideShape, args: argparse.Namespace, device: torch.device, bench: OnGpu | OnCpu
) -> list[dict[str, Any]]:
    rides = Rides(shape, args, device)
    ways = conditions(args.delays, device.type == "cuda")
    found: dict[tuple[str, str, Condition], list[Timed]] = defaultdict(list)
    # What a verb may take: enough for the first ones, then by what it takes alone.
    most_ms = dict.fromkeys(((name, verb) for name in rides.transports for verb in VERBS), 5.0)
    for number, order in rounds(rides.transports, args.verbs, WARMUP):
        if number == 0:
            for name, verb in most_ms:
                most_ms[name, verb] = 1 + 4e-3 * _largest(found[name, verb, ways[0]][1:], device)
            found.clear()
        for condition in ways if number % 2 else reversed(ways):
            for name in order:

                def timed(verb: Callable[[], Any], what: str, name: str = name, way: Condition = condition) -> None:
                    processors = rides.transports[name].processors
                    found[name, what, way].append(bench.timed(verb, way, most_ms[name, what], processors))

                rides.once(name, timed)
    results = []
    for name in rides.transports:
        alone = {verb: _everyone(found[name, verb, ways[0]], device) for verb in VERBS}
        for verb in VERBS:
            for way in ways:
                results.append(_row(way, alone[verb], _everyone(found[name, verb, way], device), args.slow_rank))
                results[-1] = {"tokens": shape.tokens, "transport": name, "verb": verb, **results[-1]}
                if device.type == "cpu":
                    results[-1]["ahead"] = None  # nothing is asked for ahead there
    return results


def _largest(values: list[Timed], device: torch.device) -> float:
    """Median over repetitions, largest of all ranks, which must ask for equal loads."""
    return slowest([statistics.median(one.us for one in values)], device)[0]


def _everyone(values: list[Timed], device: torch.device) -> list[list[Timed]]:
    """By rank."""
    mine = torch.tensor(values, dtype=torch.float64, device=device)
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    return [[Timed(us, bool(ahead), bool(under)) for us, ahead, under in one.tolist()] for one in everyone]


def _row(way: Condition, alone: list[list[Timed]], values: list[list[Timed]], slow_rank: int) -> dict[str, Any]:
    """Percentiles of one case from all ranks' times."""

    def by_repetition(table: list[list[Timed]]) -> list[float]:
        ranks = [one for rank, one in enumerate(table) if not (way.delay_ms and rank == slow_rank)]
        return [max(one.us for one in column) for column in zip(*ranks, strict=True)]

    us, before = by_repetition(values), statistics.median(by_repetition(alone))
    flat = [one for column in values for one in column]
    seen = (statistics.median(us) - before) / (1e3 * way.delay_ms) if way.delay_ms else None
    return {
        "condition": way.name,
        "p50_us": percentile(us, 50),
        "p99_us": percentile(us, 99),
        "max_us": max(us),
        "against_alone": statistics.median(us) / before,
        "seen": seen,
        "ahead": sum(one.ahead for one in flat) / len(flat),
        "under": sum(one.under for one in flat) / len(flat) if way.load else None,
        "us": [round(one, 1) for one in us],
    }


def cells(row: dict[str, Any]) -> list[str]:
    shares = (row[key] for key in ("seen", "under", "ahead"))
    return [
        f"{row['transport']}, {row['verb']}, {row['condition']}",
        str(row["tokens"]),
        *(f"{row[key]:.1f}" for key in ("p50_us", "p99_us", "max_us")),
        f"{row['against_alone']:.2f}",
        *("" if share is None else f"{share:.0%}" for share in shares),
    ]


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[128, 8192], help="per rank")
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--transports", nargs="+", default=["nvlink", "dedup", "alltoall"])
    parser.add_argument("--ctas", type=int, default=16, help="of nvlink's verbs")
    parser.add_argument("--verbs", type=int, default=200, help="of each kind, under each condition")
    parser.add_argument("--delays", type=float, nargs="*", default=[0.5, 2.0, 10.0], help="milliseconds")
    parser.add_argument("--slow-rank", type=int, default=0)
    parser.add_argument("--gradient-mib", type=float, default=64.0, help="of one all-reduce")
    args = parser.parse_args()

    device = join_group()
    rank, world = dist.get_rank(), dist.get_world_size()
    if not (world > 1 and 0 <= args.slow_rank < world):
        raise ValueError(f"--slow-rank {args.slow_rank} must be one of {world} ranks, and there must be two or more")
    make = OnGpu if device.type == "cuda" else OnCpu
    bench = make(device, rank == args.slow_rank, int(args.gradient_mib * 2**20))
    shape, results = RideShape(0, args.hidden, args.experts, args.top_k), []
    for tokens in args.tokens:
        results += measure(replace(shape, tokens=tokens), args, device, bench)
    columns = ["", "tokens", "p50", "p99", "max", "x alone", "seen", "under", "ahead"]
    show("microseconds of a verb", columns, [cells(row) for row in results])
    write_results(args, device, results=results)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
