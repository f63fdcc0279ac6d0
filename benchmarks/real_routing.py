"""What learned routing costs against perfectly balanced routing, and how much of that placement gives back.

    python -m benchmarks.texts --work work
    carpool train --config work/train.toml training.output_dir=work/e64
    torchrun --nproc-per-node 4 -m benchmarks.real_routing --work work --name e64 --out real_routing.json

One trained model, the same weights and the same batches for every contender. Its own routing loads some ranks more than
others, and every layer waits for the fullest; balanced routing, which no trained model has, is what one would like:

    balanced                  each token's K experts are replaced, where they enter the rides, by K others, so that of
                              each rank's tokens every expert gets equally many (to within one), at random. Routing
                              weights stay, so the computation is the same with other choices. Experts in order
    real, in order            the model's own choices; experts in order
    real, LPT                 experts placed by load alone
    real, placed              experts placed by `--solver`, layer by layer
    real, EPLB                load alone, with `--replicas` more slots on each rank
    real, placed, replicas    `--solver` with these slots

Layouts come from the choices that the model makes on training text. What is timed is held-aside text, which neither the
model was trained on nor a solver has seen. A step is a whole training step: forward, backward, clipping, AdamW. Its
learning rate is 0: all is computed, and no weight changes, so every contender meets the same routing in every round.
Contenders alternate over `--rounds`; experts (with both moments of AdamW) move between them outside of what is timed,
and `--warmup` steps follow that are not timed either.

    step              milliseconds of the slowest rank, median of all timed steps
    of balanced       throughput divided by that of "balanced"
    d, e, c           dispatch, experts, combine: milliseconds of a layer, forward and backward, slowest rank,
                      waiting for other ranks included; median of steps
    copies            rows dispatched per token and layer
    MB                between ranks in a step: predicted from the routing on training text, and counted
    load              choices that the fullest rank computes, by the mean: mean over layers and steps, and the worst
    replicas MB       weights out and gradients home in a step
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.contest import Contest, add_arguments
from benchmarks.texts import KINDS, say
from carpool.bench.script import join_group, make_parser, show, write_results
from carpool.hf import rides, set_layout
from carpool.hf.expert_parallel import ExpertRides
from carpool.hf.forced import balanced_choices
from carpool.hf.layouts import current_layouts
from carpool.hf.limit import limit_routing
from carpool.hf.metrics import SPANS, RideMetrics
from carpool.placement.solvers import solver_names
from carpool.placement.volume import VERBS, predict
from carpool.planner.cost import CostModel
from carpool.routing import Routing
from carpool.train.config.schema import TrainingSection
from carpool.train.run.step import make_optimizer

BALANCED = "balanced"
CONTENDERS = (
    BALANCED,
    "real, in order",
    "real, LPT",
    "real, placed",
    "real, EPLB",
    "real, placed, replicas",
)


class Balanced:
    """Stands before the rides of a layer (`carpool.hf.expert_parallel.RouterLimit`) and gives tokens other experts.

    The choices of a few steps are dealt beforehand, as choosing is not what is timed, and used in turn."""

    def __init__(self, own: ExpertRides, choices: list[torch.Tensor]) -> None:
        self.own, self.choices, self.used = own, choices, 0
        own.router_limit = self

    def before_ride(self, routing: Routing) -> Routing:
        expert_TK = self.choices[self.used % len(self.choices)]
        self.used += 1
        return Routing(expert_TK, routing.weight_TK)

    def remove(self) -> None:
        self.own.router_limit = None


class RoutingContest(Contest):
    """Contenders differ in who chooses experts and where these are."""

    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        super().__init__(args, device)
        kinds = KINDS if args.text == "all" else (args.text,)
        train, held = (
            np.concatenate([getattr(self.texts[kind], part) for kind in kinds]) for part in ("train", "eval")
        )
        self.trace = self.record(self.loader(train, "training text"), args.text)
        timed = self.loader(held, "held-aside text")
        self.steps = [self.batches(timed) for _ in range(args.steps)]
        self.settings = TrainingSection(learning_rate=0.0)
        self.optimizer = make_optimizer(self.model, self.settings)
        self.metrics = RideMetrics(self.model)
        config = self.model.config
        self.element_size = 2 if device.type == "cuda" else 4
        self.tokens = args.batch * args.length  # of a rank and step
        cost = CostModel(
            hidden=config.hidden_size,
            expert_hidden=config.intermediate_size,
            element_size=self.element_size,
            tokens_per_rank=self.tokens,
        )
        self.layouts = {BALANCED: current_layouts(self.model), "real, in order": current_layouts(self.model)}
        self.seconds = {}
        for name, solver, extra in (
            ("real, LPT", "lpt", 0),
            ("real, placed", args.solver, 0),
            ("real, EPLB", "eplb", args.replicas),
            ("real, placed, replicas", args.solver, args.replicas),
        ):
            if name in args.contenders:
                began = time.perf_counter()
                self.layouts[name] = self.solve(
                    solver, self.trace, extra_slots=extra, load_limit=args.load_limit, cost=cost
                )
                self.seconds[name] = time.perf_counter() - began
        # Of each layer, for a few steps, other tokens of other ranks.
        seeds = itertools.count(1_000_000 * (1 + args.seed) + 10_000 * self.rank)
        self.dealt = {
            layer: [self.deal(self.tokens, own.num_experts, next(seeds)).to(device) for _ in range(4)]
            for layer, own in rides(self.model).items()
        }

    def deal(self, tokens: int, experts: int, seed: int) -> torch.Tensor:
        return balanced_choices(tokens, experts, self.top_k, seed).int()

    def turn(self, name: str) -> list[dict[str, Any]]:
        """One round of a contender: what each timed step took and counted."""
        set_layout(self.model, self.layouts[name], self.optimizer)
        if name == BALANCED:
            for layer, own in rides(self.model).items():
                Balanced(own, self.dealt[layer])
        for number in range(self.args.warmup):
            self.step(self.steps[number % len(self.steps)], self.optimizer, self.settings.max_grad_norm)
        found = []
        for batches in self.steps:
            self.metrics.reset()
            loss, ms = self.step(batches, self.optimizer, self.settings.max_grad_norm)
            load_LW = self.rank_loads()
            record = self.metrics.collect(self.device).record
            found.append(
                {
                    "loss": loss,
                    "step_ms": ms,
                    "layer_ms": {span: record["ms"][span]["total"] / len(load_LW) for span in SPANS},
                    "load_L": (load_LW.amax(1) / load_LW.mean(1)).tolist(),
                    **{key: record[key] for key in ("copies_per_token", "bytes_remote", "bytes_replicas")},
                }
            )
        self.transports()  # looks whether there was room for all rows
        limit_routing(self.model, None)
        return found

    def rank_loads(self) -> torch.Tensor:
        """(L, W) choices of all tokens that each rank has computed since counters were reset, on the CPU."""
        rows = []
        for own in rides(self.model).values():
            if own.layout.num_replicas:  # this rank's tokens by slot, and one place for no expert
                assert own.filler.load_P is not None
                rows.append(own.filler.load_P[:-1].view(own.num_ranks, -1).sum(1))
            else:
                rank_E = torch.tensor([rank for rank, _ in own.layout.home_of], device=self.device)
                load_E = own.stats.load_E
                rows.append(torch.zeros(own.num_ranks, dtype=load_E.dtype, device=self.device))
                rows[-1].scatter_add_(0, rank_E, load_E.to(self.device))
        load_LW = torch.stack(rows).double()
        dist.all_reduce(load_LW)
        return load_LW.cpu()

    def predicted_bytes(self, name: str) -> float | None:
        """Bytes between ranks in a step, from the trace, or from choices dealt anew for "balanced"."""
        (transport,) = self.transports()
        seeds, total = itertools.count(self.args.seed), 0.0
        for layer, layout in self.layouts[name].items():
            trace = self.trace.layer(layer)
            source_T = trace.source_T(self.world)
            routings = [
                torch.from_numpy(trace.expert_TK[source_T == rank].astype(np.int32)) for rank in range(self.world)
            ]
            if name == BALANCED:
                routings = [self.deal(len(one), trace.num_experts, next(seeds)) for one in routings]
            volume = predict(
                transport, routings, layout, hidden=self.model.config.hidden_size, element_size=self.element_size
            )
            rows = volume.bytes_remote(*(verb for verb in VERBS if verb != "plan"))
            total += rows * self.tokens * self.world / trace.num_tokens + volume.bytes_remote("plan")
        return total

    def sum_up(self, name: str, found: list[dict[str, Any]]) -> dict[str, Any]:
        def mean(key: str) -> float:
            return statistics.fmean(step[key] for step in found)

        ms = statistics.median(step["step_ms"] for step in found)
        load_SL = np.array([step["load_L"] for step in found])
        layouts = self.layouts[name]
        return {
            "contender": name,
            "rounds": self.args.rounds,
            "step_ms": ms,
            "tokens_per_second": self.tokens * self.world / ms * 1e3,
            "layer_ms": {span: statistics.median(step["layer_ms"][span] for step in found) for span in SPANS},
            "copies_per_token": mean("copies_per_token"),
            "bytes_predicted": self.predicted_bytes(name),
            "bytes_remote": mean("bytes_remote"),
            "load": float(load_SL.mean()),
            "load_worst": float(load_SL.max()),
            "load_by_layer": load_SL.mean(0).tolist(),
            "replicas": sum(layouts[layer].num_replicas for layer in layouts),
            "bytes_replicas": mean("bytes_replicas"),
            "solve_seconds": self.seconds.get(name),
            "all_ms": [step["step_ms"] for step in found],
            "loss": [step["loss"] for step in found],
        }


def loss_difference(results: list[dict[str, Any]]) -> float | None:
    """Largest relative difference between losses of the same step, of contenders with the model's own routing: that of
    rounding, as only the order of sums differs. Nothing else may have changed from round to round either."""
    loss_CRS = [np.array(own["loss"]).reshape(own["rounds"], -1) for own in results if own["contender"] != BALANCED]
    if not loss_CRS:
        return None
    first_S = loss_CRS[0][0]
    return max(float(np.abs(loss_RS / first_S - 1).max()) for loss_RS in loss_CRS)


def cells(own: dict[str, Any]) -> list[str]:
    return [
        own["contender"],
        f"{own['step_ms']:.1f}",
        f"{own['tokens_per_second']:.0f}",
        f"{own['of_balanced']:.1%}" if own["of_balanced"] else "-",
        ", ".join(f"{own['layer_ms'][span]:.2f}" for span in SPANS),
        f"{own['copies_per_token']:.2f}",
        f"{own['bytes_remote'] / 1e6:.1f} ({own['bytes_predicted'] / 1e6:.1f})",
        f"{own['load']:.2f} ({own['load_worst']:.2f})",
        f"{own['bytes_replicas'] / 1e6:.1f}",
    ]


def main() -> None:
    parser = make_parser(__doc__)
    add_arguments(parser, batch=32)
    parser.add_argument("--text", choices=("all", *KINDS), default="all", help="what is read")
    parser.add_argument("--solver", default="search", choices=solver_names(), help="of the placement")
    parser.add_argument("--replicas", type=int, default=2, help="slots on each rank beside its own experts")
    parser.add_argument("--load-limit", type=float, default=1.1, help="of the fullest rank by the mean, for the solver")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each contender")
    parser.add_argument("--steps", type=int, default=12, help="timed in a turn, each with other text")
    parser.add_argument("--warmup", type=int, default=3, help="steps before these")
    parser.add_argument("--contenders", nargs="+", default=list(CONTENDERS), choices=CONTENDERS)
    parser.set_defaults(trace_tokens=16384)
    args = parser.parse_args()

    contest = RoutingContest(args, join_group())
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in args.contenders}
    for _ in range(args.rounds):
        for name in args.contenders:
            found[name] += contest.turn(name)
    results = [contest.sum_up(name, steps) for name, steps in found.items()]
    goal = {own["contender"]: own["step_ms"] for own in results}.get(BALANCED)
    for own in results:
        own["of_balanced"] = goal / own["step_ms"] if goal else None
    difference = loss_difference(results)
    columns = ["", "step ms", "tokens/s", "of balanced", "d, e, c ms", "copies", "MB (predicted)", "load (worst)"]
    show("steps of one trained model", [*columns, "replicas MB"], [cells(own) for own in results])
    if contest.rank == 0 and difference is not None:
        say(f"losses of the same step with the model's own routing differ by {difference:.1e} at most")
    about = {"transport": contest.transports(), "loss_difference": difference}
    write_results(contest.args, contest.device, **about, results=results)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
