"""What limiting tokens to few ranks costs and saves: the same fine-tune unlimited, and limited to 2 ranks and to 1.

    python -m benchmarks.texts --work work
    carpool train --config work/train.toml training.output_dir=work/e64
    torchrun --nproc-per-node 4 -m benchmarks.prune_finetune --work work --name e64 --out prune_finetune.json

Occult's collaboration pruning (arXiv 2505.13345): experts are placed on the 4 ranks by `--solver`, from the model's own
routing on training text; then every contender starts from the same weights, trains on one kind of text (`--text`), the
same batches in the same order, everything but experts and routers frozen (`--train-all`: nothing is), and is measured:

    copies per token      rows dispatched per token and layer, by the transport's counters
    intra, inter          of all pairs of experts that a token chose, the share on one rank and on two
    step                  milliseconds, median, slowest rank
    held out              loss per token before and after, on the text that it trains on and on the other kinds

Contenders: no limit; 2 ranks and 1 rank, by router score.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.contest import Contest, add_arguments, local
from benchmarks.texts import KINDS, say
from carpool.bench.script import join_group, make_parser, write_results
from carpool.hf import rides, set_layout
from carpool.hf.freeze import freeze_dense
from carpool.hf.limit import limit_routing
from carpool.hf.metrics import RideMetrics
from carpool.hf.trace import TraceRecorder
from carpool.layout import ExpertLayout
from carpool.placement.solvers import solver_names
from carpool.placement.trace import Trace
from carpool.routing.limit import LimitOptions
from carpool.train.config.schema import TrainingSection
from carpool.train.data.loader import TrainLoader
from carpool.train.run.step import learning_rate, make_optimizer

CONTENDERS: dict[str, LimitOptions | None] = {
    "unlimited": None,
    "2 ranks, score": LimitOptions(limit_ranks=2),
    "1 rank, score": LimitOptions(limit_ranks=1),
}


class PruneContest(Contest):
    """Weights go back to the start for each contender."""

    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        super().__init__(args, device)
        trained = sum(parameter.numel() for parameter in self.model.parameters())
        self.trained = trained if args.train_all else freeze_dense(self.model)
        self.trace = self.record(self.training_text(), args.text)
        set_layout(self.model, self.solve(args.solver, self.trace))
        self.start = [local(parameter).detach().clone() for parameter in self.model.parameters()]

    def training_text(self) -> TrainLoader:
        return self.loader(self.texts[self.args.text].train, self.args.text)

    def run(self, name: str) -> dict[str, Any]:
        """Fine-tune from the start under one limit."""
        args = self.args
        self.reshard()
        with torch.no_grad():
            for parameter, start in zip(self.model.parameters(), self.start, strict=True):
                local(parameter).copy_(start)
        reasons = limit_routing(self.model, CONTENDERS[name])
        settings = TrainingSection(
            max_steps=args.steps, learning_rate=args.learning_rate, warmup_steps=max(1, args.steps // 20)
        )
        # Before the evaluation, after which parameters may be gathered ones.
        optimizer, loader = make_optimizer(self.model, settings), self.training_text()
        before = self.held_out()
        metrics, losses, times = RideMetrics(self.model), [], []
        metrics.reset()
        recorder = TraceRecorder(self.model, args.trace_tokens, stretch=self.stretch)
        for step in range(1, args.steps + 1):
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, settings)
            loss, ms = self.step(self.batches(loader), optimizer, settings.max_grad_norm)
            losses.append(loss)
            times.append(ms)
        record = metrics.collect(self.device, args.steps).record
        transports = self.transports()
        trace = recorder.trace()
        recorder.close()
        layouts = {layer: own.layout for layer, own in rides(self.model).items()}
        result = {
            "contender": name,
            "lossy_reasons": reasons,
            "loss": losses,
            "held_out_before": before,
            "held_out_after": self.held_out(),
            "copies_per_token": record["copies_per_token"],
            "bytes_remote_per_step": record["bytes_remote"] / args.steps,
            "load_max_over_mean": record["load_max_over_mean"],
            "intra_collaboration": intra_collaboration(trace, layouts),
            "transport": transports,
            "step_ms": statistics.median(times[len(times) // 3 :]),
            "ms": record["ms"],
        }
        limit_routing(self.model, None)
        return result


def intra_collaboration(trace: Trace, layouts: dict[str, ExpertLayout]) -> float:
    """Of all pairs of experts that a token chose, the share whose homes are on one rank."""
    together = pairs = 0
    for name in trace.layers:
        rank_E = np.array([rank for rank, _ in layouts[name].home_of])
        rank_TK = rank_E[trace.layer(name).expert_TK]
        same_TKK = rank_TK[:, :, None] == rank_TK[:, None, :]
        together += int(same_TKK.sum()) - rank_TK.size
        pairs += rank_TK.size * (rank_TK.shape[1] - 1)
    return together / max(1, pairs)


def main() -> None:
    parser = make_parser(__doc__)
    add_arguments(parser, batch=16)
    parser.add_argument("--text", choices=KINDS, default="prose", help="what to train on")
    parser.add_argument("--solver", default="occult", choices=solver_names(), help="of the placement")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--learning-rate", type=float, default=2e-4)
    parser.add_argument("--train-all", action="store_true", help="do not freeze what is no expert and no router")
    parser.add_argument("--eval-sequences", type=int, default=128, help="of each kind of text")
    parser.add_argument("--contenders", nargs="+", default=list(CONTENDERS), choices=list(CONTENDERS))
    args = parser.parse_args()

    contest = PruneContest(args, join_group())
    results = []
    for name in args.contenders:
        results.append(contest.run(name))
        if contest.rank == 0:
            show(args, results[-1])
    placed = intra_collaboration(contest.trace, {n: own.layout for n, own in rides(contest.model).items()})
    about = {"trained_parameters": contest.trained, "intra_collaboration_of_the_start": placed}
    write_results(contest.args, contest.device, **about, results=results)
    dist.destroy_process_group()


def show(args: argparse.Namespace, result: dict[str, Any]) -> None:
    held = "; ".join(
        f"{kind}{' (trained on)' if kind == args.text else ''} {result['held_out_before'][kind]:.4f} -> "
        f"{result['held_out_after'][kind]:.4f}"
        for kind in KINDS
    )
    intra = result["intra_collaboration"]
    say(
        f"{result['contender']:<20} copies {result['copies_per_token']:.3f}  intra {intra:.3f} inter {1 - intra:.3f}  "
        f"step {result['step_ms']:.1f} ms  MB a step between ranks {result['bytes_remote_per_step'] / 1e6:.1f}  "
        f"load {result['load_max_over_mean']:.2f}  held out: {held}"
    )


if __name__ == "__main__":
    main()
