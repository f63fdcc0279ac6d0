"""What limiting tokens to few ranks costs and saves: the same fine-tune unlimited, and limited to 2 ranks and to 1.

    python benchmarks/train_traces.py prepare --work /tmp/work
    python benchmarks/train_traces.py train --work /tmp/work --name e64
    torchrun --nproc-per-node 4 benchmarks/prune_finetune.py --work /tmp/work --name e64 --out prune_finetune.json

Occult's collaboration pruning (arXiv 2505.13345): experts are placed on the 4 ranks by `--solver`, from the model's own
routing on training text; then every contender starts from the same weights, trains on one kind of text (`--text`), the
same batches in the same order, everything but experts and routers frozen (`--train-all`: nothing is), and is measured:

    copies per token      rows dispatched per token and layer, by the transport's counters
    intra, inter          of all pairs of experts that a token chose, the share on one rank and on two
    step                  milliseconds, median, slowest rank
    held out              loss per token before and after, on the text that it trains on and on the other kinds

Contenders: no limit; 2 ranks and 1 rank, each by router score and by similarity (of experts' co-activation rows).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers.distributed import DistributedConfig

from benchmarks.train_traces import KINDS, corpora, evaluate, held_out, say, to_device
from carpool.hf import rides, set_layout, set_transport
from carpool.hf.build import build_model
from carpool.hf.freeze import freeze_dense
from carpool.hf.limit import limit_routing
from carpool.hf.metrics import RideMetrics
from carpool.hf.trace import TraceRecorder
from carpool.layout import ExpertLayout
from carpool.layouts import Layouts
from carpool.parallel.clip import clip_grad_norm
from carpool.placement.solvers import SOLVERS, solve
from carpool.placement.trace import Trace
from carpool.routing_limit import LimitOptions, coactivation_similarity
from carpool.train.environment import environment
from carpool.train.loader import TrainLoader
from carpool.train.model import top_k_of
from carpool.train.schema import TrainingSection
from carpool.train.step import Objective, learning_rate, make_optimizer
from carpool.transport import check_overflow

CONTENDERS: dict[str, LimitOptions | None] = {
    "unlimited": None,
    "2 ranks, score": LimitOptions(limit_ranks=2, limit_by="score"),
    "2 ranks, similarity": LimitOptions(limit_ranks=2, limit_by="similarity"),
    "1 rank, score": LimitOptions(limit_ranks=1, limit_by="score"),
    "1 rank, similarity": LimitOptions(limit_ranks=1, limit_by="similarity"),
}


class Contest:
    """One model, whose weights go back to the start for each contender. All ranks."""

    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        self.args, self.device = args, device
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.tokenizer, self.texts = corpora(args.work)
        self.share = {"dp_rank": self.rank, "dp_size": self.world}
        self.model = build_model(
            args.work / "models" / args.name,
            distributed_config=DistributedConfig(
                fsdp_size=self.world,
                ep_size=self.world,
                ep_implementation="carpool",
                fsdp_mixed_precision=device.type == "cuda",
            ),
            dtype=torch.float32,
            seed=args.seed,
        )
        set_transport(self.model, args.transport, max_tokens=args.batch * args.length)
        trained = sum(parameter.numel() for parameter in self.model.parameters())
        self.trained = trained if args.train_all else freeze_dense(self.model)
        self.objective = Objective(
            self.model,
            top_k=top_k_of(self.model),
            aux_coef=self.model.config.router_aux_loss_coef,
            dp_size=self.world,
            autocast=None,
        )
        self.trace = self.record()
        self.place()
        names = rides(self.model)
        self.similarity = {
            name: coactivation_similarity(torch.from_numpy(self.trace.layer(name).coactivation_EE)).to(device)
            for name in names
        }
        self.reshard()
        self.start = [local(parameter).detach().clone() for parameter in self.model.parameters()]

    def record(self) -> Trace:
        """The routing of the model, as it is now, on the text to train on."""
        loader = self.loader()
        with TraceRecorder(self.model, self.args.trace_tokens, stretch=256) as recorder, torch.no_grad():
            for _ in range(-(-self.args.trace_tokens // (256 * self.world))):
                for batch in next(loader):
                    self.objective.forward(to_device(batch, self.device))
            return recorder.trace(data=self.args.text)

    def place(self) -> None:
        """Experts to the ranks that the solver says, each layer by itself."""
        layouts = {name: solve(self.args.solver, self.trace.layer(name), self.world) for name in self.trace.layers}
        set_layout(self.model, Layouts(layouts))

    def loader(self) -> TrainLoader:
        return TrainLoader(
            self.texts[self.args.text].train,
            fingerprint=self.args.text,
            sequence_length=self.args.length,
            batch_size=self.args.batch,
            seed=self.args.seed,
            **self.share,
        )

    def held_out(self) -> dict[str, float]:
        result = {}
        for kind in KINDS:
            loader = held_out(
                self.texts[kind], self.args.length, self.args.eval_sequences, self.args.batch, **self.share
            )
            result[kind] = evaluate(self.objective, loader, self.device, reduce=self.reduce)
        return result

    def reduce(self, sums: torch.Tensor) -> None:
        """Sum a CPU tensor over the ranks."""
        total = sums.to(self.device)
        dist.all_reduce(total)
        sums.copy_(total)

    def run(self, name: str) -> dict[str, Any]:
        """Fine-tune from the start under one limit."""
        args = self.args
        self.reshard()
        with torch.no_grad():
            for parameter, start in zip(self.model.parameters(), self.start, strict=True):
                local(parameter).copy_(start)
        reasons = limit_routing(self.model, CONTENDERS[name], similarity=self.similarity)
        settings = TrainingSection(
            max_steps=args.steps, learning_rate=args.learning_rate, warmup_steps=max(1, args.steps // 20)
        )
        # Before the evaluation, after which parameters may be gathered ones.
        optimizer, loader = make_optimizer(self.model, settings), self.loader()
        before = self.held_out()
        metrics, losses, times = RideMetrics(self.model), [], []
        metrics.reset()
        recorder = TraceRecorder(self.model, args.trace_tokens, stretch=256)
        for step in range(1, args.steps + 1):
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, settings)
            batches = [to_device(batch, self.device) for batch in next(loader)]
            dist.barrier()
            self.wait()
            begin = time.perf_counter()
            losses.append(self.objective.backward(batches).loss)
            clip_grad_norm([p for p in self.model.parameters() if p.requires_grad], settings.max_grad_norm)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            self.wait()
            slowest = torch.tensor([1e3 * (time.perf_counter() - begin)], dtype=torch.float64, device=self.device)
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
            times.append(float(slowest))
        record = metrics.collect(self.device, args.steps).record
        for own in rides(self.model).values():
            check_overflow(own.transport)
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
            "transport": sorted({own.transport.name for own in rides(self.model).values() if own.transport}),
            "step_ms": statistics.median(times[len(times) // 3 :]),
            "ms": record["ms"],
        }
        limit_routing(self.model, None)
        return result

    def reshard(self) -> None:
        """FSDP keeps what the last forward gathered for a backward that may not come; here it does not."""
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def local(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.data.to_local() if isinstance(parameter.data, DTensor) else parameter.data


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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder of benchmarks/train_traces.py")
    parser.add_argument("--name", default="e64", help="the model in it")
    parser.add_argument("--text", choices=KINDS, default="prose", help="what to train on")
    parser.add_argument("--solver", default="occult", choices=SOLVERS, help="of the placement")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--batch", type=int, default=16, help="sequences of a rank and step")
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--learning-rate", type=float, default=2e-4)
    parser.add_argument("--train-all", action="store_true", help="do not freeze what is no expert and no router")
    parser.add_argument("--transport", default="auto")
    parser.add_argument("--trace-tokens", type=int, default=8192)
    parser.add_argument("--eval-sequences", type=int, default=128, help="of each kind of text")
    parser.add_argument("--contenders", nargs="+", default=list(CONTENDERS), choices=list(CONTENDERS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()

    if torch.cuda.is_available():
        index = int(os.environ["LOCAL_RANK"])
        torch.cuda.set_device(index)
        device = torch.device("cuda", index)
        dist.init_process_group("nccl", device_id=device)
    else:
        device = torch.device("cpu")
        dist.init_process_group("gloo")
    contest = Contest(args, device)
    results = []
    for name in args.contenders:
        results.append(contest.run(name))
        if contest.rank == 0:
            show(args, results[-1])
    if contest.rank == 0 and args.out is not None:
        settings = {name: value for name, value in vars(args).items() if not isinstance(value, Path)}
        about = {"settings": settings, "environment": environment(device, contest.world)}
        placed = intra_collaboration(contest.trace, {n: own.layout for n, own in rides(contest.model).items()})
        summary = {"trained_parameters": contest.trained, "intra_collaboration_of_the_start": placed}
        args.out.write_text(json.dumps({**about, **summary, "results": results}, indent=1) + "\n")
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
