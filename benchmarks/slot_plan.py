"""Plans of spare slots: what they bring on real routing, on any machine, and how long they take on a GPU.

    python -m benchmarks.slot_plan --out slot_plan.json
    python -m benchmarks.slot_plan --names e64-1435 --spare 2 --trip 8

Each layer of each trace of docs/traces is one micro-batch. Its sequences are distributed to the ranks in turn, homes
are experts in order, and the plan is made from its choices. Numbers are means over layers, of loads also the worst:

    load      of the fullest rank over the mean, before, and with the plan
    replicas  experts that are fetched, by all ranks together
    visits    ranks beside its own that a token visits, before, and with the plan, as `dedup` sends

On a GPU, for each --shapes E,W,S,T,K (experts, ranks, spare slots of a rank, tokens of a rank, top-k) and Zipf's law
with exponent 1.2: microseconds of the plan, and of who serves the tokens of a rank; beside them PyTorch's, which
defines both. Each is captured in a CUDA graph, which is replayed; median of --repetitions. Answers are compared first.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmarks.placement import TRACES
from benchmarks.script import make_parser, show, write_results
from carpool.bench.options import parse_sizes
from carpool.bench.routings import make_routings
from carpool.layout import ExpertLayout
from carpool.placement.trace import Trace
from carpool.replicas import slot_plan
from carpool.replicas.slot_plan import Costs, count_choices, plan_slots, served_by

SHAPES = ("64,8,2,8192,8", "256,8,4,8192,8", "512,8,4,8192,8", "512,32,4,4096,8")


def visited(rank_TK: torch.Tensor, source_T: torch.Tensor, ranks: int) -> float:
    """Ranks beside its own that a token visits, on average."""
    visits_TW = torch.zeros(len(rank_TK), ranks, dtype=torch.bool).scatter_(1, rank_TK, True)
    return float(visits_TW.scatter(1, source_T[:, None], False).sum(1).double().mean())


def on_trace(path: Path, ranks: int, spare: int, costs: Costs) -> dict[str, Any]:
    trace, rows = Trace.load(path), []
    home_E = torch.arange(trace.num_experts) * ranks // trace.num_experts
    source_T = torch.from_numpy(trace.sequence_T - trace.sequence_T[0]).long() % ranks
    for expert in torch.from_numpy(trace.expert_LTK.astype("int32")):
        of_ranks = [source_T == rank for rank in range(ranks)]
        load_WE = torch.stack([count_choices(expert[of_rank_T], trace.num_experts) for of_rank_T in of_ranks])
        plan = plan_slots(load_WE, home_E, spare, costs)
        before_TK = home_E[expert.long()]
        after_TK = before_TK.clone()
        for rank, of_rank_T in enumerate(of_ranks):
            slot_TK = served_by(expert[of_rank_T], load_WE, home_E, plan, rank).long()
            after_TK[of_rank_T] = torch.where(slot_TK < 0, before_TK[of_rank_T], slot_TK // spare)
        loads = [torch.bincount(rank_TK.flatten(), minlength=ranks).double() for rank_TK in (before_TK, after_TK)]
        assert torch.equal(loads[1].long(), plan.load_W)
        numbers = {
            "before": float(loads[0].max() / loads[0].mean()),
            "load": float(loads[1].max() / loads[1].mean()),
            "replicas": int((plan.expert_WS >= 0).sum()),
            "visits_before": visited(before_TK, source_T, ranks),
            "visits": visited(after_TK, source_T, ranks),
        }
        rows.append(numbers)
    found = {name: round(statistics.fmean(row[name] for row in rows), 6) for name in rows[0]}
    worst = {f"worst_{name}": round(max(row[name] for row in rows), 6) for name in ("before", "load", "replicas")}
    return {"trace": path.stem, "ranks": ranks, "spare": spare, **found, **worst}


def microseconds(run: Callable[[], Any], repetitions: int, inside: int = 20) -> float:
    """Of one call on the GPU: a graph of `inside` calls is replayed."""
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        run()
    stream.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(inside):
            run()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    times = []
    for _ in range(repetitions + 2):
        events[0].record()
        graph.replay()
        events[1].record()
        events[1].synchronize()
        times.append(events[0].elapsed_time(events[1]) * 1000 / inside)
    return statistics.median(times[2:])


def on_gpu(shape: str, repetitions: int) -> list[dict[str, Any]]:
    experts, ranks, spare, tokens, top_k = parse_sizes(shape, ("E", "W", "S", "T", "K"), SHAPES[0])
    layout = ExpertLayout.contiguous(experts, ranks)
    routings = make_routings("zipf", tokens, top_k, layout, zipf_exponent=1.2)
    choices = [routing.expert_TK for routing in routings]
    home_E = torch.tensor([rank for rank, _ in layout.home_of])
    load_WE = torch.stack([count_choices(one, experts) for one in choices])
    want = plan_slots(load_WE, home_E, spare, Costs(4, 100))
    slot_TK = served_by(choices[0], load_WE, home_E, want, 0)
    load_WE, home_E, expert_TK = load_WE.cuda(), home_E.cuda(), choices[0].cuda()
    plan = plan_slots(load_WE, home_E, spare, Costs(4, 100))
    same = all(torch.equal(one.cpu(), other) for one, other in zip(plan, want, strict=True))
    if not same or not torch.equal(served_by(expert_TK, load_WE, home_E, plan, 0).cpu(), slot_TK):
        raise RuntimeError(f"the kernels differ from PyTorch at {shape}")
    verbs = {
        "plan": lambda: plan_slots(load_WE, home_E, spare, Costs(4, 100)),
        "serve": lambda: served_by(expert_TK, load_WE, home_E, plan, 0),
        "count": lambda: count_choices(expert_TK, experts),
    }
    found = []
    for verb, run in verbs.items():
        row = {"label": f"{verb} {shape}", "replicas": int((want.expert_WS >= 0).sum())}
        row["us_median"] = microseconds(run, repetitions)
        with mock.patch.object(slot_plan, "on_gpu", lambda _: False):
            row["pytorch_us"] = microseconds(run, repetitions, inside=1)
        found.append(row)
    return found


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--traces", type=Path, default=TRACES)
    parser.add_argument("--names", nargs="*", default=None, help="files of the folder, without .npz; default: all")
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--spare", type=int, nargs="+", default=[1, 2, 4], help="slots of a rank")
    parser.add_argument("--trip", type=int, default=0, help="cost of a choice that comes from another rank, see Costs")
    parser.add_argument("--shapes", nargs="+", default=SHAPES, metavar="E,W,S,T,K", help="on a GPU")
    parser.add_argument("--repetitions", type=int, default=21)
    args = parser.parse_args()
    names = args.names if args.names is not None else sorted(p.stem for p in args.traces.glob("*.npz"))
    quality = [
        on_trace(args.traces / f"{name}.npz", ranks, spare, Costs(args.trip))
        for name in names if not name.endswith("-loads") for ranks in args.ranks for spare in args.spare
    ]  # fmt: skip
    columns = ["trace, ranks, spare slots", "load before (worst)", "with the plan (worst)", "replicas", "visits"]
    show("On traces", columns, [
        [f"{row['trace']}, {row['ranks']}, {row['spare']}", f"{row['before']:.2f} ({row['worst_before']:.2f})",
         f"{row['load']:.3f} ({row['worst_load']:.2f})", f"{row['replicas']:.1f}",
         f"{row['visits_before']:.2f} to {row['visits']:.2f}"]
        for row in quality
    ])  # fmt: skip
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    times = [row for shape in args.shapes for row in on_gpu(shape, args.repetitions)] if device.type == "cuda" else []
    for row in times:
        print(
            f"{row['label']}: {row['us_median']:.1f} us ({row['replicas']} replicas; PyTorch {row['pytorch_us']:.0f})"
        )
    if not times:
        print("without a GPU nothing is timed")
    write_results(args, device, quality=quality, results=times)


if __name__ == "__main__":
    main()
