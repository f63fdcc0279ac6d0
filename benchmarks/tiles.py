"""A layer's ride in tiles against chunks and the plain ride.

    torchrun --nproc-per-node 4 -m benchmarks.tiles --out tiles.json

For each shape one layer's ride, forward and backward, bf16, tokens that choose their experts uniformly:

    none         everything in turn
    chunks r     `carpool/schedule/chunks.py`
    tiles n/c    `carpool/schedule/tiles.py` in n parts, c multiprocessors for the rides and the others for the experts

All contenders take turns within each repetition. The host is ahead (the device sleeps first), and all ranks begin
together. Milliseconds of the slowest rank, median over repetitions: forward + backward.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.chunks import DELAY_CYCLES, WARMUP, Layer
from carpool.bench.script import join_group, make_parser, write_results
from carpool.bench.timing import begin_together, rounds, slowest_medians
from carpool.ride import RideSetup, ride
from carpool.routing import Routing
from carpool.schedule import Schedule
from carpool.schedule.orders import order_of
from carpool.transport import NVLinkOptions, make_transport

SHAPES = ["8192,2048,1024,64,8", "16384,2048,1024,64,8", "8192,2048,768,128,8", "8192,4096,1024,128,8",
          "4096,7168,2048,64,8", "8192,4096,14336,8,2", "16384,1536,256,128,8"]  # fmt: skip
CHUNKS, PARTS, CTAS = (1, 2, 4), (2, 4, 8), (8, 16, 24)


class Way:
    """One contender: a schedule with so many multiprocessors for its rides."""

    def __init__(self, layer: Layer, schedule: Schedule, ctas: int) -> None:
        self.layer, self.schedule = layer, schedule
        sizes = NVLinkOptions(max_tokens=layer.tokens, dispatch_ctas=ctas, combine_ctas=ctas)
        options = sizes.under(schedule)
        transport = make_transport("nvlink", layer.group, layer.layout.slots_per_rank, options)
        order = order_of(schedule, transport, layer.device)
        self.setup = RideSetup(transport, layer.experts, layer.stats(), order)

    def run(self) -> list[float]:
        """Milliseconds of forward and backward."""
        layer = self.layer
        for leaf in (layer.x, layer.routing.weight_TK, *layer.weights):
            if leaf is not None:
                leaf.grad = None
        routing = Routing(layer.routing.expert_TK, layer.routing.weight_TK)
        stats, events = layer.stats(), [torch.cuda.Event(enable_timing=True) for _ in range(3)]
        begin_together(layer.device, layer.group, DELAY_CYCLES)
        events[0].record()
        setup = replace(self.setup, stats=stats)
        y, _ = ride(layer.x, routing, layer.slot_TK, layer.weights, setup)
        events[1].record()
        y.backward(layer.x.detach())
        events[2].record()
        events[2].synchronize()
        return [events[0].elapsed_time(events[1]), events[1].elapsed_time(events[2])]


def contest(shape: str, args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    layer = Layer(shape, args, device)
    ways = {"none": Way(layer, Schedule(), 16)}
    ways |= {f"chunks {r}": Way(layer, Schedule("chunks", r), 16) for r in CHUNKS}
    ways |= {f"tiles {n}/{c}": Way(layer, Schedule("tiles", n), c) for n in args.parts for c in args.ctas}
    times: dict[str, list[list[float]]] = {name: [] for name in ways}
    for number, order in rounds(ways, args.repetitions, WARMUP):
        for name in order:
            milliseconds = ways[name].run()
            if number >= 0:
                times[name].append([*milliseconds, sum(milliseconds)])
    names = "forward", "backward", "both"
    measured = {way: dict(zip(names, slowest_medians(values, device), strict=True)) for way, values in times.items()}
    best = {kind: min(m["both"] for way, m in measured.items() if way.startswith(kind)) for kind in ("chunks", "tiles")}
    return {"shape": shape, "milliseconds": measured, "tiles_to_chunks": best["tiles"] / best["chunks"]}


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--shapes", nargs="+", default=SHAPES, metavar="T,H,F,E,K")
    parser.add_argument("--parts", nargs="+", type=int, default=PARTS)
    parser.add_argument("--ctas", nargs="+", type=int, default=CTAS)
    parser.add_argument("--repetitions", type=int, default=7)
    args = parser.parse_args()
    args.transport = "nvlink"
    device = join_group()
    results = []
    for shape in args.shapes:
        results.append(contest(shape, args, device))
        if dist.get_rank() == 0:
            show(results[-1])
        torch.cuda.empty_cache()
    write_results(args, device, results=results)
    dist.destroy_process_group()


def show(result: dict[str, Any]) -> None:
    print(f"\n{result['shape']}: the best tiles take {result['tiles_to_chunks']:.3f} of the time of the best chunks")
    for way, took in result["milliseconds"].items():
        print(f"  {way:<14}{took['both']:>8.3f} ms = {took['forward']:.3f} + {took['backward']:.3f}", flush=True)


if __name__ == "__main__":
    main()
