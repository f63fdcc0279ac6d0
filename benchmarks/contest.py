"""What benchmarks of one trained model on several ranks share: the model, its text, a timed step.

A contest builds a model that was trained on the text of benchmarks/texts.py, FSDP x EP over all ranks, and gives it to
its contenders in turn. They differ in a layout, a limit or the routing, so all see the same weights and batches.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers.distributed import DistributedConfig

from benchmarks.texts import KINDS, corpora
from carpool.hf import rides, set_transport
from carpool.hf.build import build_model
from carpool.hf.layouts import slots_kept
from carpool.hf.trace import TraceRecorder
from carpool.layout import ExpertLayout
from carpool.layout.layouts import Layouts
from carpool.layout.topology import Topology
from carpool.observe.clock import timed
from carpool.parallel.clip import clip_grad_norm
from carpool.placement.solvers import solve
from carpool.placement.trace import Trace
from carpool.train.data.loader import EvalLoader, TrainLoader, count_targets
from carpool.train.data.sequences import Stream
from carpool.train.run.model import top_k_of
from carpool.train.run.step import Batch, Objective
from carpool.transport import check_overflow

STRETCH = 256  # neighbouring tokens of a sample, at most


class Contest:
    """One model that several contenders use in turn. All ranks.

    Args:
        args: of `add_arguments`.
        device: of `join_group`.
    """

    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        self.args, self.device = args, device
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.tokenizer, self.texts = corpora(args.work)
        self.stretch = min(STRETCH, args.length)
        self.share = {"dp_rank": self.rank, "dp_size": self.world}
        self.model = build_model(
            args.work / args.name / "model",
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
        self.top_k = top_k_of(self.model)
        self.objective = Objective(
            self.model,
            top_k=self.top_k,
            aux_coef=self.model.config.router_aux_loss_coef,
            dp_size=self.world,
            autocast=None,
        )

    def loader(self, tokens: np.ndarray[Any, Any], fingerprint: str) -> TrainLoader:
        return TrainLoader(
            Stream(tokens, self.args.length, fingerprint),
            batch_size=self.args.batch,
            seed=self.args.seed,
            **self.share,
        )

    def batches(self, loader: TrainLoader) -> list[Batch]:
        """This rank's part of the next step, on the device."""
        return [self.on_device(batch) for batch in next(loader)]

    def record(self, loader: TrainLoader, data: str) -> Trace:
        """The routing of the model, as it is now, on the loader's next batches."""
        with TraceRecorder(self.model, self.args.trace_tokens, stretch=self.stretch) as recorder, torch.no_grad():
            for _ in range(-(-self.args.trace_tokens // (self.stretch * self.world))):
                for batch in self.batches(loader):
                    self.objective.forward(batch)
            trace = recorder.trace(data=data)
        self.reshard()
        return trace

    def solve(self, solver: str, trace: Trace, **options: Any) -> Layouts:
        """What a solver finds for each layer by itself, layers divided among the ranks. `options`: of `solve`."""
        mine: dict[str, ExpertLayout] = {
            name: solve(solver, trace.layer(name), Topology.even(self.world), seed=self.args.seed, **options)
            for name in trace.layers[self.rank :: self.world]
        }
        parts: list[dict[str, ExpertLayout]] = [{} for _ in range(self.world)]
        dist.all_gather_object(parts, mine)
        found = {name: layout for part in parts for name, layout in part.items()}
        return Layouts({name: found[name] for name in trace.layers})

    def step(self, batches: Sequence[Batch], optimizer: torch.optim.Optimizer, max_norm: float) -> tuple[float, float]:
        """One training step: its loss, and the slowest rank's milliseconds."""
        losses = []

        def step() -> None:
            with slots_kept(self.model):
                losses.append(self.objective.backward(batches).loss)
            clip_grad_norm([p for p in self.model.parameters() if p.requires_grad], max_norm)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        took = timed(step, self.device)
        return losses[0], took.ms

    def held_out(self) -> dict[str, float]:
        """Mean loss per held-out token of each kind of text."""
        args, found = self.args, {}
        self.model.eval()
        for kind in KINDS:
            sums = torch.zeros(2, dtype=torch.float64, device=self.device)
            for batch in EvalLoader(
                Stream(self.texts[kind].eval, args.length, partial=True),
                batch_size=args.batch,
                max_sequences=args.eval_sequences,
                **self.share,
            ):
                sums[1] += count_targets(batch["labels"])
                with torch.no_grad():
                    sums[0] += self.objective.forward(self.on_device(batch))[0]
            dist.all_reduce(sums)
            found[kind] = float(sums[0] / sums[1])
        self.model.train()
        return found

    def on_device(self, batch: Batch) -> Batch:
        return {name: value.to(self.device, non_blocking=True) for name, value in batch.items()}

    def reshard(self) -> None:
        """FSDP keeps what the last forward gathered for a backward that may not come; here it does not."""
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def transports(self) -> list[str]:
        """How rows travel. Raises an error if there was no room for some since the buffers were made."""
        layers = rides(self.model).values()
        for own in layers:
            check_overflow(own.transport)
        return sorted({own.transport.name for own in layers if own.transport is not None})


def local(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.data.to_local() if isinstance(parameter.data, DTensor) else parameter.data


def add_arguments(parser: argparse.ArgumentParser, batch: int) -> None:
    """Those that a `Contest` looks at."""
    parser.add_argument("--work", type=Path, required=True, help="folder of benchmarks/texts.py")
    parser.add_argument("--name", default="e64", help="a run of carpool train in it")
    parser.add_argument("--batch", type=int, default=batch, help="sequences of a rank and step")
    parser.add_argument("--length", type=int, default=512, help="tokens of a sequence")
    parser.add_argument("--transport", default="auto")
    parser.add_argument("--trace-tokens", type=int, default=8192, help="whose choices the solver is given")
    parser.add_argument("--seed", type=int, default=0)
