"""What each transport sends over the slow links between nodes, and how long that takes.

    python -m benchmarks.nodes --nodes 2 --ranks 4 --out nodes_2x2.json      # root, Linux: a cluster on this machine
    torchrun --nnodes 2 --nproc-per-node 4 ... -m benchmarks.nodes           # on a real one
    python -m benchmarks.nodes --compare nodes_2x2.json nodes_2x8.json       # predicted beside measured, as a table
    python -m benchmarks.nodes --nodes 2 --ranks 16 --predict H200 --dtype bfloat16 --tokens 8192 --hidden 2048

Tokens choose experts as a trained model did (`--trace`, a layer of it): half of the trace's sequences are used to place
experts, the others are timed. Contenders are all transports that can be used here, with experts in order, and
`hierarchical` with experts placed for it, with counts and with as many rows as are needed at most ("fixed"); with
`--codec`, also those that take it, for all that travels. Each is first checked against `gather` in float64, but for
those with a codec, whose rounding the tests check; then they take turns. A ride is a plan, a dispatch, a combine, and
the two of the backward, without experts: what comes is sent back.

    ms          forward and backward, slowest rank: median, and the fastest
    predicted   the fastest by the cost model, with rates of links that are measured here, before and after, and of each
                size the faster time (`alpha + bytes / beta`): what travels, and nothing of what the ranks compute
    counted     bytes between nodes that the transports count; must equal what they say they send, to the byte
    cable       bytes that the nodes' interfaces counted while rows travelled, headers and acknowledgements included
    rows        dispatched between nodes, for each token

For `hierarchical` the rows must equal the (token, node) pairs of the routing: one for each other node where a token has
an expert.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.script import join_group, make_parser, show, write_results
from carpool.bench.hardware.measure_links import Fit, fit, measure_links
from carpool.bench.hardware.measure_machine import measured_links
from carpool.bench.options import RideShape
from carpool.bench.transport.ride_check import Case, check, forward_and_backward, oracle, rows_of
from carpool.layout import ExpertLayout
from carpool.layout.topology import Topology
from carpool.metrics.counters import Traffic
from carpool.metrics.host import device_name, timed
from carpool.placement.objective import served_by
from carpool.placement.solvers import solve
from carpool.placement.trace import Trace
from carpool.planner.machine.cost import CostModel
from carpool.planner.machine.hardware import Hardware, find_hardware, hardware_of
from carpool.routing import Routing
from carpool.transport import (
    TRANSPORTS,
    HierarchicalOptions,
    TransportOptions,
    check_transport,
    make_transport,
    set_topology,
    topology_of,
)
from carpool.transport.codecs import CODECS, TOKEN_VERBS, Codecs
from tools.cluster import DEVICE, Cluster, why_not

TRACE = Path(__file__).parents[1] / "docs" / "traces" / "e64-1435.npz"
PLACED = "hierarchical"


def interface_bytes() -> int | None:
    """Bytes that this node has sent over its network interface; None where it is not a cluster's of `tools.cluster`."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == DEVICE:
            return int(counts.split()[8])
    return None


class Contest:
    """All contenders for tokens of H elements. Every rank makes and calls it alike."""

    def __init__(self, args: Any, device: torch.device, hidden: int) -> None:
        self.args, self.device, self.hidden = args, device, hidden
        group = dist.group.WORLD
        assert group is not None
        self.group, self.rank, self.num_ranks = group, dist.get_rank(), dist.get_world_size()
        self.topology = topology_of(group)
        solved, timed = Trace.load(args.trace).split(2)
        self.solved, trace = solved.layer(args.layer), timed.layer(args.layer)
        source_T = trace.source_T(self.num_ranks)
        self.parts = [trace.subset(np.flatnonzero(source_T == rank)[: args.tokens]) for rank in range(self.num_ranks)]
        self.shape = RideShape(args.tokens, hidden, trace.num_experts, trace.top_k)

    def layouts(self) -> list[tuple[str, str, ExpertLayout, TransportOptions]]:
        """(label, transport, layout, options) of each contender."""
        in_order = ExpertLayout.contiguous(self.shape.experts, self.num_ranks)
        plain, found = TransportOptions(self.args.tokens), []
        coded = replace(plain, codecs=Codecs(**dict.fromkeys(TOKEN_VERBS, self.args.codec)))
        for name in TRANSPORTS:
            try:
                check_transport(name, self.group)
            except ValueError as error:
                if self.rank == 0:
                    print(f"not {name}: {error}", flush=True)
                continue
            found.append((name, name, in_order, plain))
            if not coded.codecs.plain and TRANSPORTS[name].why_no_codecs(coded.codecs) is None:
                found.append((f"{name}, {self.args.codec}", name, in_order, coded))
        cost = CostModel(hidden=self.hidden, transport=PLACED)
        if any(name == PLACED for _, name, _, _ in found):
            placed = solve("search", self.solved, self.topology, cost=cost)
            found.append((f"{PLACED}, placed", PLACED, placed, plain))
            sent_WW = TRANSPORTS[PLACED].tokens_sent(self.rank_TK(placed), self.topology)
            most = int(sent_WW[self.topology.pairs["network"]].max())
            fixed = HierarchicalOptions(self.args.tokens, first_hop="fixed", capacity=max(1, most))
            found.append((f"{PLACED}, placed, fixed", PLACED, placed, fixed))
        return found

    def rank_TK(self, layout: ExpertLayout) -> list[Any]:
        """For each source rank, the rank that serves each choice."""
        rank_of_E = np.array([home for home, _ in layout.home_of])
        return [rank_of_E[part.expert_TK] for part in self.parts]

    def case(self, layout: ExpertLayout) -> Case:
        routings = [
            Routing(torch.from_numpy(part.expert_TK.astype(np.int32)), torch.full(part.expert_TK.shape, 0.125))
            for part in self.parts
        ]
        dtype = getattr(torch, self.args.dtype)
        return Case.make(self.shape, layout, routings, self.rank, dtype, self.device, self.args.seed)

    def run(self) -> Callable[[Hardware], list[dict[str, Any]]]:
        """Time all contenders. Returns what makes a row for each, in rank 0 and in all others, once the rates of links
        are known."""
        riders: dict[str, tuple[str, Case, Any, TransportOptions]] = {}
        for label, name, layout, options in self.layouts():
            case = self.case(layout)
            transport = make_transport(name, self.group, layout.slots_per_rank, options)
            if name != "gather" and options.codecs.plain:
                traffic = Traffic(self.num_ranks, self.rank)
                answers = forward_and_backward(transport, case, self.rank, traffic, backward=True)
                want = oracle(case, self.group, self.rank)
                check(label, answers, want, case, self.group, case.x_TH.dtype)
            riders[label] = (name, case, transport, options)
        times: dict[str, list[float]] = {label: [] for label in riders}
        cable: dict[str, list[int]] = {label: [] for label in riders}
        traffics = {label: Traffic(self.num_ranks, self.rank) for label in riders}
        for number in range(self.args.repetitions + 1):
            for label, (_, case, transport, _) in riders.items():
                traffics[label].reset()
                before = self._sent()
                took = timed(partial(self._ride, transport, case, traffics[label]), self.device)
                dist.barrier()
                if number:  # the first makes connections
                    times[label].append(1e-3 * took.ms)
                    cable[label].append(self._sent() - before)
        return lambda hardware: [
            self._row(label, name, case, options, traffics[label], times[label], cable[label], hardware)
            for label, (name, case, _, options) in riders.items()
        ]

    def _ride(self, transport: Any, case: Case, traffic: Traffic) -> None:
        """A forward and backward of rows."""
        route = transport.plan(case.slot_TK, case.weight_TK, traffic)
        arrivals = transport.dispatch(case.x_TH, route).wait()
        back = rows_of(arrivals, case.x_TH.dtype)
        transport.combine(route, route.new_partial(self.hidden, back.dtype, self.device).copy_(back)).wait()
        gradients = transport.dispatch_gradients(case.dy_TH, route).wait().widened(case.dy_TH.dtype)
        dx_RH = route.new_partial(self.hidden, back.dtype, self.device).copy_(gradients.contiguous(route.num_rows))
        transport.combine_gradients(route, dx_RH, arrivals.weight_RJ).wait()

    def _sent(self) -> int:
        """Bytes that all nodes have sent."""
        first = self.rank == self.topology.ranks_of(self.topology.node_of[self.rank])[0]
        sent = torch.tensor(float((interface_bytes() or 0) * first), dtype=torch.float64, device=self.device)
        dist.all_reduce(sent)
        return int(sent)

    def _row(
        self, label: str, name: str, case: Case, options: TransportOptions, traffic: Traffic, times: list[float],
        cable: list[int], hardware: Hardware,
    ) -> dict[str, Any]:  # fmt: skip
        topology, cls = self.topology, TRANSPORTS[name]
        rank_TK = self.rank_TK(case.layout)
        size = case.x_TH.element_size()
        volume = cls.volume(rank_TK, topology, self.shape.top_k, self.hidden, size, cls.own_options(options))
        between_WW = np.not_equal.outer(topology.node_of, topology.node_of)
        said = {verb: int(bytes_WW[between_WW].sum()) for verb, bytes_WW in volume.bytes_WW.items()}
        mine = {verb: sum(np.array(traffic.bytes[verb])[between_WW[self.rank]]) for verb in said}
        gathered: list[Any] = [None] * self.num_ranks
        dist.all_gather_object(gathered, {verb: int(value) for verb, value in mine.items()})
        counted = {verb: sum(one[verb] for one in gathered) for verb in said}
        if counted != said:
            raise RuntimeError(f"{label}: {counted} bytes were counted between nodes, but {said} are what it sends")
        rows = int(volume.rows_WW[between_WW].sum())
        pairs = token_nodes(rank_TK, topology)
        if name == PLACED and type(options) is TransportOptions and rows != pairs:
            raise RuntimeError(f"{label}: {rows} rows between nodes, but {pairs} (token, node) pairs")
        cost = CostModel(hidden=self.hidden, element_size=size, hardware=hardware, transport=name)
        predicted = cost.volume_seconds(volume, topology)
        return {
            "contender": label,
            "hidden": self.hidden,
            "ms": round(1e3 * statistics.median(times), 2),
            "fastest_ms": round(1e3 * min(times), 2),
            "slowest_ms": round(1e3 * max(times), 2),
            "predicted_ms": round(1e3 * sum(predicted.values()), 2),
            "counted_bytes": sum(counted.values()),
            "cable_bytes": int(statistics.median(cable)),
            "rows_between_nodes": rows,
            "token_node_pairs": pairs,
            "tokens": sum(len(one) for one in rank_TK),
        }


def predict(args: Any) -> None:
    """The table of what is predicted alone, by the rates of `--predict`: no rank is started."""
    hardware, topology = find_hardware(args.predict), Topology.even(args.ranks, args.nodes)
    solved, timed = (one.layer(args.layer) for one in Trace.load(args.trace).split(2))
    source_T = timed.source_T(args.ranks)
    in_order = ExpertLayout.contiguous(timed.num_experts, args.ranks)
    placed = solve("search", solved, topology, cost=CostModel(transport=PLACED, hardware=hardware))
    table: list[list[str]] = []
    ways = [(name, name, in_order) for name, way in TRANSPORTS.items() if way.why_not_on(topology) is None]
    for hidden in args.hidden:
        for label, name, layout in [*ways, (f"{PLACED}, placed", PLACED, placed)]:
            rank_TK = served_by(timed, layout)
            size = getattr(torch, args.dtype).itemsize
            parts = [rank_TK[source_T == rank] for rank in range(args.ranks)]
            volume = TRANSPORTS[name].volume(parts, topology, timed.top_k, hidden, size)
            # A trace is a sample of what a rank has.
            scale = args.tokens * args.ranks / timed.num_tokens
            whole, *hops = (
                {verb: bytes_WW * scale for verb, bytes_WW in sent.items()} for sent in (volume.bytes_WW, *volume.hops)
            )
            volume = replace(volume, bytes_WW=whole, hops=tuple(hops))
            cost = CostModel(hidden=hidden, element_size=size, hardware=hardware, transport=name)
            between_WW = np.not_equal.outer(topology.node_of, topology.node_of)
            sent = sum(bytes_WW[between_WW].sum() for bytes_WW in volume.bytes_WW.values())
            seconds = sum(cost.volume_seconds(volume, topology).values())
            rows = volume.rows_WW[between_WW].sum() / timed.num_tokens
            table.append([label, str(hidden), f"{1e6 * seconds:.0f}", f"{sent / 1e6:.1f}", f"{rows:.3f}"])
    title = (
        f"{args.ranks} ranks on {args.nodes} nodes, {hardware.name} ({hardware.source}), {args.tokens} tokens a rank"
    )
    show(title, ["contender", "H", "predicted us", "MB between nodes", "rows"], table)


def token_nodes(rank_TK: list[Any], topology: Topology) -> int:
    """For all tokens, the other nodes where they have an expert: the least that can cross, one row each."""
    node_W, found = np.array(topology.node_of), 0
    for rank, ranks in enumerate(rank_TK):
        nodes = node_W[ranks]
        others = set(range(topology.num_nodes)) - {int(node_W[rank])}
        found += sum(int(np.any(nodes == node, axis=1).sum()) for node in others)
    return found


def measure(args: Any) -> None:
    """One rank's part."""
    device = join_group()
    torch.set_num_threads(1)
    topology = topology_of(dist.group.WORLD)
    set_topology(dist.group.WORLD, topology)
    found, measured = [], []
    name = device_name(device)
    for hidden in args.hidden:
        before, shared = measure_links(topology, device)
        rows_by = Contest(args, device, hidden).run()
        fits = [faster(*pair) for pair in zip(before, measure_links(topology, device)[0], strict=True)]
        rates: list[Any] = [replace(hardware_of(name), **measured_links(fits), shared_network=shared)]
        dist.broadcast_object_list(rates)
        found += rows_by(rates[0])
        measured.append({"hidden": hidden, "shared_network": shared, "links": [one.to_dict() for one in fits]})
    columns = ["contender", "H", "ms", "fastest", "predicted", "counted MB", "cable MB", "rows"]
    title = f"{topology.num_ranks} ranks on {topology.num_nodes} nodes (by {topology.source})"
    show(title, columns, [cells(row) for row in found])
    write_results(args, device, topology=topology.to_dict(), measured=measured, rows=found)
    dist.barrier()
    dist.destroy_process_group()


def faster(one: Fit, other: Fit) -> Fit:
    """The line through the faster times of each size that both have measured."""
    times = dict(other.points)
    return fit(one.name, [(size, min(seconds, times[size])) for size, seconds in one.points if size in times])


def cells(row: dict[str, Any]) -> list[str]:
    return [
        row["contender"],
        str(row["hidden"]),
        *(f"{row[key]:.1f}" for key in ("ms", "fastest_ms", "predicted_ms")),
        *(f"{row[key] / 1e6:.2f}" for key in ("counted_bytes", "cable_bytes")),
        f"{row['rows_between_nodes'] / row['tokens']:.3f}",
    ]


def compare(files: Sequence[Path], within: float = 0.15) -> None:
    """What was predicted beside the fastest that was measured, as a table of the docs."""
    print("| nodes x ranks | H | transport | fastest ms | median | predicted | off | MB between nodes | rows a token |")
    print("|" + "---|" * 9)
    close = {"fastest_ms": 0, "ms": 0}
    points, quiet = 0, [0, 0]
    for file in files:
        told = json.loads(file.read_text())
        topology = Topology.from_dict(told["topology"])
        for row in told["rows"]:
            points += 1
            for key in close:
                close[key] += abs(row["predicted_ms"] / row[key] - 1) <= within
            if row["ms"] <= (1 + within) * row["fastest_ms"]:
                quiet = [quiet[0] + 1, quiet[1] + (abs(row["predicted_ms"] / row["fastest_ms"] - 1) <= within)]
            print(
                f"| {topology.num_nodes} x {topology.num_ranks // topology.num_nodes} | {row['hidden']} "
                f"| {row['contender']} | {row['fastest_ms']:.0f} | {row['ms']:.0f} | {row['predicted_ms']:.0f} "
                f"| {row['predicted_ms'] / row['fastest_ms'] - 1:+.0%} | {row['counted_bytes'] / 1e6:.2f} "
                f"| {row['rows_between_nodes'] / row['tokens']:.3f} |"
            )
    print(
        f"\nOf {points} points {close['fastest_ms']} are predicted within {within:.0%} of the fastest, "
        f"{close['ms']} within {within:.0%} of the median. The median of {quiet[0]} points is within {within:.0%} of "
        f"their fastest: of these {quiet[1]} are."
    )


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--nodes", type=int, default=2, help="of the cluster that is made on this machine")
    parser.add_argument("--ranks", type=int, default=4, help="of all its nodes")
    parser.add_argument("--rate", default="1gbit", help="of each node's cable, in the words of tc")
    parser.add_argument("--trace", type=Path, default=TRACE)
    parser.add_argument("--layer", type=int, default=4, help="of the trace")
    parser.add_argument("--tokens", type=int, default=512, help="per rank")
    parser.add_argument("--hidden", type=int, nargs="+", default=[512])
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--codec", default="none", choices=tuple(CODECS), help="adds contenders whose rows travel so")
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--predict", metavar="HARDWARE", help="start nothing, predict: a GPU's name, or a hardware.json"
    )
    parser.add_argument("--compare", type=Path, nargs="+", metavar="FILE", help="start nothing, read what was measured")
    args = parser.parse_args()
    if args.compare is not None:
        compare(args.compare)
        return
    if args.predict is not None:
        predict(args)
        return
    if "RANK" in os.environ:
        measure(args)
        return
    if reason := why_not():
        parser.error(f"no cluster here: {reason}; start it with torchrun on a real one")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # which removes the cluster
    with Cluster(args.nodes, args.rate) as cluster:
        path = os.pathsep.join(filter(None, [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")]))
        program = ["-m", "benchmarks.nodes", *sys.argv[1:]]
        codes = [agent.wait() for agent in cluster.torchrun(program, args.ranks, env={"PYTHONPATH": path})]
    sys.exit(max(codes))


if __name__ == "__main__":
    main()
