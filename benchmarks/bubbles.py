"""The bubble of each schedule of stages, measured beside the published one: the share of a step in which a rank waits.

    torchrun --nproc-per-node 4 -m benchmarks.bubbles --micro-batches 8 16 --out bubbles.json

Each rank is a stage of a pipeline, or two where the schedule has two. All stages are equal: `--layers` square products
of `--hidden` for `--tokens` tokens, divided among the stages of a rank. So what is measured is the schedule, PyTorch's
runtime and the sends, and not how well a model can be cut. On CPUs, where ranks share cores, a rank sleeps instead:
`--sleep` ms forward, as long for the gradients of inputs, and as long for those of weights.

    measured    1 - (time in forwards, backwards and weight gradients) / (time of the slowest rank), mean over ranks
    played      the same of PyTorch's order, played on paper with the measured times of the three
    formula     1F1B, GPipe: (p - 1) / (m + p - 1); interleaved, v stages: (p - 1) / (v m + p - 1); p ranks, m
                micro-batches. Of zero-bubble schedules: their order, where all three take equally long

Pairs of a forward and a backward run one after the other: stages here have no rides to hide. Schedules take turns.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.script import join_group, make_parser, show, write_results
from carpool.bench.timing import in_turns
from carpool.parallel.pipeline import Pipeline, Tensors, Work
from carpool.parallel.schedules import SCHEDULES, check_micro_batches
from carpool.planner.step.clock import Clock
from carpool.planner.step.pipelines import Action, add_pipeline, pipeline
from carpool.planner.step.pipelines import in_turns as actions_in_turns
from carpool.ride.split_backward import SplitBackward

ALL = tuple(SCHEDULES)


class Measured(NamedTuple):
    """Of one schedule and number of micro-batches: shares of a step, and seconds of a step and of a micro-batch's
    forward, backward for inputs, and weight gradients on a rank; without a split, the last two together are the
    second."""

    measured: float
    played: float
    formula: float
    step: float
    seconds: tuple[float, float, float]


def played(schedule: str, ranks: int, micro_batches: int, seconds: Sequence[float]) -> float:
    """The bubble of an order on paper. `seconds`: of F, I and W of a micro-batch on a rank."""
    chunks, took = SCHEDULES[schedule].stages, dict(zip("FIW", seconds, strict=True))

    def work(clock: Clock, action: Action, stage: int, after: tuple[int, ...]) -> Iterator[int]:
        for kind in "IW" if action.kind == "B" else action.kind:
            after = (clock.add("", "dense", took[kind] / chunks, after, stage=stage),)
            yield after[0]

    clock = Clock()
    add_pipeline(clock, pipeline(schedule, ranks, micro_batches, chunks), actions_in_turns(work), 0.0)
    return 1 - micro_batches * sum(seconds) / clock.step


def formula(schedule: str, ranks: int, micro_batches: int) -> float:
    """As published; of zero-bubble schedules, their order where F, I and W take equally long."""
    kind = SCHEDULES[schedule]
    if kind.splits:
        return played(schedule, ranks, micro_batches, (1.0, 1.0, 1.0))
    return (ranks - 1) / (kind.stages * micro_batches + ranks - 1)


class _Busy:
    """Adds up what this rank does, by kind. Of weight gradients inside of a whole backward, the backward loses their
    time."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.spans: list[tuple[str, int, Any, Any]] = []
        self._around: list[str] = []

    def _now(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    @contextmanager
    def span(self, kind: str) -> Iterator[None]:
        self._around.append(kind)
        begin = self._now()
        yield
        end = self._now()
        self._around.pop()
        self.spans.append((kind, 1, begin, end))
        if self._around:
            self.spans.append((self._around[-1], -1, begin, end))

    def seconds(self, kind: str) -> float:
        of = [(sign, begin, end) for one, sign, begin, end in self.spans if one == kind]
        if self.device.type != "cuda":
            return sum(sign * (end - begin) for sign, begin, end in of)
        return sum(sign * begin.elapsed_time(end) for sign, begin, end in of) / 1e3


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, back: float) -> torch.Tensor:
        ctx.back = back
        return x * weight

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        time.sleep(ctx.back)
        return dy, dy.sum().reshape(1, 1), None


class Bubble:
    """One schedule of stages. All ranks make and run it together.

    Args:
        layers, hidden, tokens: products of a rank, and their sizes; on CPUs they are not computed.
        sleep: on CPUs, milliseconds of a rank's forward."""

    def __init__(
        self,
        schedule: str,
        micro_batches: int,
        device: torch.device,
        *,
        layers: int = 8,
        hidden: int = 4096,
        tokens: int = 8192,
        sleep: float = 20.0,
    ) -> None:
        kind, self.micro_batches = SCHEDULES[schedule], micro_batches
        self.schedule, self.ranks, self.device = schedule, dist.get_world_size(), device
        check_micro_batches(schedule, self.ranks, micro_batches)
        self.busy, self.last = _Busy(device), self.ranks * kind.stages - 1
        self.sleeps, dtype = device.type != "cuda", torch.bfloat16 if device.type == "cuda" else torch.float32
        hidden, tokens = (1, 1) if self.sleeps else (hidden, tokens)
        number = 1 if self.sleeps else max(1, layers // kind.stages)
        self.model = nn.ModuleList(
            nn.Sequential(*(nn.Linear(hidden, hidden, bias=False) for _ in range(number))) for _ in range(self.last + 1)
        ).to(device, dtype)
        self.asleep = sleep / 1e3 / kind.stages
        self.back = self.asleep * (1 if kind.splits else 2)
        self.split = SplitBackward(self.model, []) if kind.splits and not self.sleeps else None
        self.x_TH = torch.randn(tokens, hidden, device=device, dtype=dtype)
        work = Work(self._forward, lambda: self.busy.span("I"), self._weights)
        group = dist.group.WORLD
        assert group is not None
        self.pipeline = Pipeline(schedule, group, self.last + 1, work, device)
        self.travels = (torch.empty_like(self.x_TH, device="meta"),)

    def _forward(self, stage: int, number: int, received: Tensors) -> Tensors:
        with self.busy.span("F"):
            x_TH = received[0] if stage else self.x_TH
            if self.sleeps:
                time.sleep(self.asleep)
                y_TH = _Sleep.apply(x_TH, self.model[stage][0].weight, self.back)
            else:
                y_TH = self.model[stage](x_TH)
            return (y_TH.float().mean() if stage == self.last else y_TH,)

    def _weights(self) -> Callable[[], None]:
        compute = (lambda: time.sleep(self.asleep)) if self.split is None else self.split.weights()

        def weights() -> None:
            with self.busy.span("W"):
                compute()

        return weights

    def step(self) -> tuple[float, list[float]]:
        """(seconds, and those of F, I and W on this rank)"""
        self.model.zero_grad()
        self.busy.spans.clear()
        dist.barrier()
        begin = self._wait()
        with self.split or nullcontext():
            self.pipeline.step(self.micro_batches, self.travels)
        return self._wait() - begin, [self.busy.seconds(kind) for kind in "FIW"]

    def _wait(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def summary(self, steps: Sequence[tuple[float, list[float]]]) -> Measured:
        """Of steps on all ranks."""
        rows = torch.tensor([[step, *of] for step, of in steps], dtype=torch.float64, device=self.device)
        every = torch.empty(self.ranks * len(rows), 4, dtype=torch.float64, device=self.device)
        dist.all_gather(list(every.chunk(self.ranks)), rows)
        every = every.view(self.ranks, -1, 4)
        shares = [1 - float(one[:, 1:].sum() / (self.ranks * one[:, 0].max())) for one in every.transpose(0, 1)]
        seconds = (every[:, :, 1:].mean((0, 1)) / self.micro_batches).tolist()
        return Measured(
            statistics.median(shares),
            played(self.schedule, self.ranks, self.micro_batches, seconds),
            formula(self.schedule, self.ranks, self.micro_batches),
            float(every[:, :, 0].max(0).values.median()),
            (seconds[0], seconds[1], seconds[2]),
        )


def measure(
    schedules: Sequence[str], micro_batches: Sequence[int], device: torch.device, steps: int, **sizes: Any
) -> dict[tuple[str, int], Measured]:
    """Schedules in turns; those that cannot run so many micro-batches are left out."""
    contenders: dict[tuple[str, int], Bubble] = {}
    for number in micro_batches:
        for schedule in schedules:
            try:
                check_micro_batches(schedule, dist.get_world_size(), number)
            except ValueError as error:
                if dist.get_rank() == 0:
                    print(f"left out: {error}")
                continue
            contenders[schedule, number] = Bubble(schedule, number, device, **sizes)
    found = in_turns({name: one.step for name, one in contenders.items()}, steps, warmup=2)
    return {name: contenders[name].summary(rows) for name, rows in found.items()}


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--schedules", nargs="+", choices=ALL, default=list(ALL))
    parser.add_argument("--micro-batches", type=int, nargs="+", default=None, help="default: 2 and 4 times the ranks")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--layers", type=int, default=8, help="products of a rank")
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--sleep", type=float, default=20.0, help="ms of a forward on a CPU")
    args = parser.parse_args()
    device = join_group()
    ranks = dist.get_world_size()
    numbers = args.micro_batches or [2 * ranks, 4 * ranks]
    sizes = {"layers": args.layers, "hidden": args.hidden, "tokens": args.tokens, "sleep": args.sleep}
    found = measure(args.schedules, numbers, device, args.steps, **sizes)
    rows = [
        [name, str(number), *(f"{share:.1%}" for share in one[:3]), f"{1e3 * one.step:.1f}",
         " ".join(f"{1e3 * each:.2f}" for each in one.seconds)]
        for (name, number), one in found.items()
    ]  # fmt: skip
    columns = ["schedule", "micro-batches", "measured", "played", "formula", "step, ms", "F, I, W, ms"]
    show(f"bubbles of {ranks} stages on {device.type}", columns, rows)
    results = [{"schedule": name, "micro_batches": number, **one._asdict()} for (name, number), one in found.items()]
    write_results(args, device, results=results)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
