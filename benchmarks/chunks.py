"""A ride in chunks or in tiles: what the cost model predicts of chunks, and what is measured of both.

    torchrun --nproc-per-node 4 -m benchmarks.chunks --out chunks.json
    torchrun --nproc-per-node 4 -m benchmarks.chunks --transport dedup --out chunks_dedup.json
    torchrun --nproc-per-node 4 -m benchmarks.chunks --tiles 2 4 --ctas 8 16 --out tiles.json

For each shape, one layer's ride forward and backward, bf16, tokens that choose their experts uniformly:

    pieces      dispatch, experts, combine of rides of T/8, T/4, T/2 and T tokens, one after the other, the experts on
                the multiprocessors that they have beside rides; from these `carpool_systems.planners` predicts T(r)
    measured    the ride itself in r = 1, 2, 4, 8 chunks, and the plain one, in turns; with `--tiles` also in n tiles
                (over nvlink), c multiprocessors for the rides and the others for the experts: "tiles n/c"

The host is ahead in both (the device sleeps first), and all ranks begin together; milliseconds are of the slowest rank,
median. "loses" is how much slower the predicted best is than the measured best.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.script import join_group, make_parser, show, write_results
from carpool.bench.timing import Clock, begin_together, medians, rounds
from carpool.experts import ExpertFunction, ExpertWeights, make_activation, make_experts
from carpool.kernels.device import reserved
from carpool.layout import ExpertLayout, assign
from carpool.metrics.counters import LayerStats
from carpool.planner.decisions.chosen import fastest as fastest_of
from carpool.ride.function import ride
from carpool.ride.schedule import Schedule
from carpool.ride.setup import RideSetup
from carpool.routing import Routing
from carpool.transport import NVLinkOptions, make_transport
from carpool_systems.planners import Pieces, chunked

CHUNKS = (1, 2, 4, 8)
SHAPES = ["4096,2048,1024,64,8", "8192,2048,1024,64,8", "16384,2048,1024,64,8", "32768,2048,1024,64,8",
          "8192,2048,768,128,8", "16384,2048,768,128,8", "8192,4096,1024,128,8", "4096,7168,2048,64,8",
          "8192,7168,2048,64,4", "8192,4096,14336,8,2", "16384,1536,256,128,8", "8192,2880,2880,32,4"]  # fmt: skip
WARMUP = 2
DELAY_CYCLES = 40_000_000  # 20 ms: the host asks for a ride in 8 chunks, forward and backward, meanwhile


class Layer:
    """One shape's ride, on this rank."""

    def __init__(self, shape: str, args: argparse.Namespace, device: torch.device) -> None:
        self.tokens, hidden, inner, experts, self.top_k = (int(n) for n in shape.split(","))
        self.group, self.device, self.name = dist.group.WORLD, device, args.transport
        rank, world = dist.get_rank(), dist.get_world_size()
        self.layout, self.num_experts = ExpertLayout.contiguous(experts, world), experts
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        draw = torch.Generator(device).manual_seed(rank)

        def leaf(*sizes: int) -> torch.Tensor:
            return torch.randn(*sizes, generator=draw, device=device, dtype=dtype).mul_(0.02).requires_grad_()

        own = experts // world
        self.weights = ExpertWeights(leaf(own, 2 * inner, hidden), leaf(own, hidden, inner))
        self.x = leaf(self.tokens, hidden)
        self.experts = make_experts("auto", ExpertFunction(make_activation("silu", True)))
        scores = torch.rand(self.tokens, experts, generator=draw, device=device)
        weight = torch.full((self.tokens, self.top_k), 1 / self.top_k, device=device)
        self.routing = Routing(scores.topk(self.top_k).indices.int(), weight.requires_grad_())
        self.slot_TK = assign(self.routing.expert_TK, self.layout)

    def setup(self, schedule: Schedule, **options_of_nvlink: int) -> RideSetup:
        options = NVLinkOptions(max_tokens=self.tokens, **options_of_nvlink).under(schedule)
        transport = make_transport(self.name, self.group, self.layout.slots_per_rank, options)
        return RideSetup(transport, self.experts, self.stats(), schedule.order(transport, self.device))

    def run(self, setup: RideSetup, tokens: int | None = None) -> None:
        """Forward and backward of the first tokens."""
        rows = slice(tokens)
        for leaf in (self.x, self.routing.weight_TK, *self.weights):
            if leaf is not None:
                leaf.grad = None
        assert self.routing.weight_TK is not None
        routing = Routing(self.routing.expert_TK[rows], self.routing.weight_TK[rows])
        y, _ = ride(self.x[rows], routing, self.slot_TK[rows], self.weights, setup)
        y.backward(self.x.detach()[rows])

    def stats(self) -> LayerStats:
        return LayerStats(self.num_experts, dist.get_world_size(), dist.get_rank())


def slowest_medians(rows: Sequence[Sequence[float]], device: torch.device) -> list[float]:
    """Of each column the median over rows of the largest over ranks."""
    table = torch.tensor(rows, dtype=torch.float64, device=device)
    dist.all_reduce(table, op=dist.ReduceOp.MAX)
    return medians(table.tolist())


def pieces_of(layer: Layer, tokens: int, repetitions: int, device: torch.device) -> list[Pieces]:
    """Of a ride of so many tokens, forward and backward."""
    setup, found = layer.setup(Schedule("chunks")), []
    for number in range(-WARMUP, repetitions):
        stats = layer.stats()
        begin_together(device, layer.group, DELAY_CYCLES)
        with reserved(setup.transport.processors):
            layer.run(replace(setup, stats=stats), tokens)
        if number >= 0:
            parts = stats.meter.pieces()
            flat = [sum(parts["dispatch"][0]), sum(parts["experts"][0]), sum(parts["combine"][0])]
            rows, after = (*parts["experts"][1], 0.0)[:2]
            flat += [sum(parts["dispatch"][1]), rows, sum(parts["combine"][1]), after]
            found.append(flat)
    there, experts, back, *backward = slowest_medians(found, device)
    return [Pieces(there, experts, back), Pieces(*backward)]


def contest(shape: str, args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    layer = Layer(shape, args, device)
    pieces = {r: pieces_of(layer, -(-layer.tokens // r), args.repetitions, device) for r in CHUNKS}
    predicted = {r: sum(chunked(one, r) for one in pieces[r]) for r in CHUNKS}
    best = fastest_of(predicted)
    setups = {"none": layer.setup(Schedule()), **{str(r): layer.setup(Schedule("chunks", r)) for r in CHUNKS}}
    setups |= {
        f"tiles {n}/{c}": layer.setup(Schedule("tiles", n), dispatch_ctas=c, combine_ctas=c)
        for n in args.tiles
        for c in args.ctas
    }
    clock = Clock(device, layer.group, DELAY_CYCLES)
    for number, order in rounds(setups, args.repetitions, WARMUP):
        clock.keep = number >= 0
        for name in order:
            now = replace(setups[name], stats=layer.stats())
            with clock.section(name, "ride"):
                layer.run(now)
    measured = {name: statistics.median(us) / 1e3 for (name, _), us in clock.slowest().items()}
    fastest = min(measured[str(r)] for r in CHUNKS)
    alone = sum(chunked(one, 1, beside=False) for one in pieces[1])
    compute = sum(one.experts + one.after for one in pieces[1])
    links = sum(one.dispatch + one.combine for one in pieces[1])
    return {
        "shape": shape,
        "pieces": {r: [vars(one) for one in both] for r, both in pieces.items()},
        "predicted": predicted,
        "predicted_best": best,
        "measured": measured,
        "loses": measured[str(best)] / fastest - 1,
        "alone": alone,
        "perfect": max(compute, links),
        # How much of what could be hidden is.
        "hidden": (measured["none"] - fastest) / max(1e-9, measured["none"] - max(compute, links)),
    }


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--shapes", nargs="+", default=SHAPES, metavar="T,H,F,E,K")
    parser.add_argument("--transport", default="nvlink")
    parser.add_argument("--tiles", nargs="*", type=int, default=[], help="also rides in so many tiles")
    parser.add_argument("--ctas", nargs="+", type=int, default=[8, 16, 24], help="multiprocessors of rides in tiles")
    parser.add_argument("--repetitions", type=int, default=7)
    args = parser.parse_args()
    device = join_group()
    results = []
    for shape in args.shapes:
        results.append(contest(shape, args, device))
        if device.type == "cuda":
            torch.cuda.empty_cache()
    ways = [way for way in results[0]["measured"] if way not in map(str, CHUNKS)]
    columns = ["T,H,F,E,K", *ways, *(f"r={r} (model)" for r in CHUNKS), "best", "model", "loses", "perfect", "hidden"]
    show("milliseconds of a ride, forward and backward", columns, [cells(result, ways) for result in results])
    write_results(args, device, results=results)
    dist.destroy_process_group()


def cells(result: dict[str, Any], ways: list[str]) -> list[str]:
    measured, predicted = result["measured"], result["predicted"]
    best = min(CHUNKS, key=lambda r: measured[str(r)])
    return [
        result["shape"],
        *(f"{measured[way]:.2f}" for way in ways),
        *(f"{measured[str(r)]:.2f} ({predicted[r]:.2f})" for r in CHUNKS),
        *(str(best), str(result["predicted_best"]), f"{result['loses']:.1%}"),
        *(f"{result['perfect']:.2f}", f"{result['hidden']:.0%}"),
    ]


if __name__ == "__main__":
    main()
