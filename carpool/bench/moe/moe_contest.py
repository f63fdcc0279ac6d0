"""What `carpool bench experts` and `carpool bench layer` have in common: contenders on one module of experts, in turns.

For each shape and routing every contender gets the same rows, choices, routing weights and parameters (one experts
module of transformers per rank), and

    1  is checked against the definition in float32 (`module_answers.py`); a wrong answer ends the benchmark
    2  is timed: repetition by repetition, contender by contender, the order turned round each time
    3  is asked once what it keeps between forward and backward, takes at most, and sends

A contender that has not enough memory, or cannot compute a shape, gets a row that says so.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from carpool.bench.bench_settings import HELD, ExpertsSettings, LayerSettings, fast_experts
from carpool.bench.contest import OUT_OF_MEMORY, attempt_together, draw_routings, draw_rows, measure_cases
from carpool.bench.moe import module_answers as memory
from carpool.bench.moe.module_answers import Case, check, make_module, use
from carpool.bench.moe.moe_results import PASSES, CaseResult, ContenderResult, Times, show
from carpool.bench.options import LayerShape, find_device
from carpool.bench.result_files import Result, now, publish
from carpool.bench.timing import Clock, rounds
from carpool.experts import EXPERTS, ExpertWeights, FP8Experts, make_experts
from carpool.hf.seam.experts_module import expert_function, weight_names
from carpool.metrics.counters import LayerStats
from carpool.parallel.world import find_world
from carpool.ride.function import ride
from carpool.ride.setup import RideSetup
from carpool.routing import Routing
from carpool.train.blueprint import peak_flops
from carpool.transport import find_transport
from carpool.transport.local import Local

Forward = Callable[[], torch.Tensor]


@dataclass(frozen=True)
class Contender:
    """Attributes:
    experts: by name: Carpool's, or transformers' implementation if `theirs`.
    transport: how rows travel; None if they do not.
    theirs: all of it is transformers'.
    spare: spare slots of each rank.
    captured: its passes are CUDA graphs.
    """

    experts: str
    transport: str | None = None
    theirs: bool = False
    spare: int = 0
    captured: bool = False

    @property
    def label(self) -> str:
        if self.transport is None:
            return f"{'transformers' if self.theirs else 'carpool'} {self.experts}"
        spare = f", {self.spare} spare slot{'s' if self.spare > 1 else ''}" if self.spare else ""
        captured = ", captured" if self.captured else ""
        return f"{'transformers ' if self.theirs else ''}{self.transport} + {self.experts}{spare}{captured}"

    @property
    def lossy(self) -> tuple[str, ...]:
        if self.theirs:
            return ()
        return tuple(getattr(EXPERTS.get(self.experts.removesuffix("-held")), "lossy_reasons", ()))


class Contest(ABC):
    """Measures every shape and routing of resolved settings; all ranks construct and call it alike.

    Args:
        baseline: whom the others are compared with.
        group: the ranks; None for one device.

    Attributes:
        PASSES: what is timed.
        WARMUP: rounds before those that count.
        delay_cycles, iterations: see `Clock`, and how often a pass runs in one repetition.
    """

    PASSES: Sequence[str]
    WARMUP: int
    delay_cycles: int
    iterations = 1

    def __init__(
        self,
        settings: ExpertsSettings | LayerSettings,
        device: torch.device,
        contenders: Sequence[Contender],
        baseline: Contender,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.settings, self.device, self.group = settings, device, group
        self.contenders, self.baseline = contenders, baseline
        self.rank, self.num_ranks = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
        self.dtype: torch.dtype = getattr(torch, settings.dtype)
        # The datasheet's rates are those of 16-bit numbers.
        self.peak = peak_flops(device, None)[0] if self.dtype.itemsize == 2 else None

    @abstractmethod
    def _make(self, contender: Contender, case: Case, scope: ExitStack) -> Forward:
        """The contender's forward on the inputs of `case`, while `scope` is open.

        Raises:
            ValueError, NotImplementedError: it cannot compute that.
        """

    def _answer(self, forward: Forward, case: Case) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """What is checked."""
        return forward_backward(forward, case)

    @abstractmethod
    def _time(self, clock: Clock, label: str, forward: Forward, case: Case) -> None:
        """One repetition of all `PASSES`, each a section of the clock."""

    @abstractmethod
    def _weigh(self, row: ContenderResult, forward: Forward, case: Case) -> None:
        """Fill in memory and bytes of one forward and backward. Collective."""

    def measure_all(self) -> list[CaseResult]:
        """The results in the order of the settings."""
        return measure_cases(self.settings, self._measure)

    def _measure(self, shape: LayerShape, kind: str) -> CaseResult:
        result = CaseResult(shape, kind, self.num_ranks, shape.flops, self.peak, self.baseline.label)
        rows = {
            c: ContenderResult(label=c.label, experts=c.experts, transport=c.transport, lossy=c.lossy, spare=c.spare)
            for c in self.contenders
        }
        result.rows = list(rows.values())
        made: list[Case] = []
        if why := attempt_together(lambda: made.append(self._case(shape, kind)), self.group, self.device):
            for row in result.rows:
                row.unavailable = f"{why} for the weights and rows alone"
            return result
        with ExitStack() as scope:
            self._run(made[0], rows, shape, scope)
        result.compare()
        return result

    def _run(self, case: Case, rows: dict[Contender, ContenderResult], shape: LayerShape, scope: ExitStack) -> None:
        running = {c: made for c, row in rows.items() if (made := self._start(c, case, row, scope)) is not None}
        clock = Clock(self.device, self.group, self.delay_cycles)
        for number, order in rounds(running, self.settings.repetitions, self.WARMUP):
            clock.keep = number >= 0
            for c in order:
                once = partial(self._time, clock, c.label, running[c], case)
                if why := attempt_together(once, self.group, self.device, c.theirs):
                    rows[c].unavailable = why
                    del running[c]
        times = clock.slowest()
        for c, forward in running.items():
            for section in self.PASSES:
                ms = [us / 1e3 / self.iterations for us in times[c.label, section]]
                host_ms = clock.host_us(c.label, section) / 1e3 / self.iterations
                rows[c].sections[section] = Times.of(ms, host_ms, PASSES[section] * shape.flops, self.peak)
            self._weigh(rows[c], forward, case)

    def _case(self, shape: LayerShape, kind: str) -> Case:
        device, rank, seed = self.device, self.rank, self.settings.seed
        _, routings = draw_routings(self.settings, shape, kind, self.num_ranks)
        module = make_module(shape, shape.experts // self.num_ranks, device, self.dtype, 1000 * seed + rank)
        x_TH, dy_TH = draw_rows(shape.tokens, shape.hidden, self.dtype, device, seed, rank)
        weight_TK = routings[rank].weight_TK
        assert weight_TK is not None
        weight_TK = weight_TK.to(device, self.dtype).requires_grad_()
        return Case(module, x_TH.requires_grad_(), routings, weight_TK, dy_TH, self.group, rank)

    def _start(self, contender: Contender, case: Case, row: ContenderResult, scope: ExitStack) -> Forward | None:
        """The contender, checked; None if it cannot run, which `row` then says. Collective.

        Raises:
            ValueError: it cannot run, and was asked for by name.
            RuntimeError: its answer is wrong.
        """
        made: list[Forward] = []
        answers: list[tuple[torch.Tensor, tuple[torch.Tensor, ...]]] = []

        def first() -> None:
            made.append(self._make(contender, case, scope))
            answers.append(self._answer(made[0], case))

        option, name = "transports", contender.transport
        row.unavailable = self._unreachable(contender, case)
        if not row.unavailable:
            row.unavailable = attempt_together(first, self.group, self.device, contender.theirs)
            option, name = "experts", contender.experts
        if row.unavailable:
            asked = not contender.theirs and name in getattr(self.settings, option)
            if asked and row.unavailable != OUT_OF_MEMORY:
                raise ValueError(
                    f"{contender.label} cannot run here: {row.unavailable}; change --{option}, or leave it out to "
                    "measure what can"
                )
            return None
        y_TH, gradients = answers[0]
        row.error = check(contender.label, y_TH, gradients, case, fp8=bool(contender.lossy))
        return made[0]

    def _unreachable(self, contender: Contender, case: Case) -> str | None:
        if contender.transport is None or contender.theirs:
            return None
        way = find_transport(contender.transport)
        return way.why_not_hidden(case.x_TH.shape[1], self.dtype.itemsize) or way.why_not(self.group)


def forward_backward(forward: Forward, case: Case) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """The output and the gradients of `case.leaves`."""
    y_TH = forward()
    return y_TH.detach(), torch.autograd.grad(y_TH, case.leaves, case.dy_TH)


BASELINE = Contender("grouped_mm", theirs=True)


def benchmark(settings: ExpertsSettings, *, command: str = "carpool bench experts") -> None:
    """Measure on this device, and show and write the results.

    Raises:
        ValueError: no GPU where one is asked for, several ranks, or experts asked for by name that cannot run here.
        RuntimeError: a contender gives a wrong answer.
        OSError: the folder cannot be written.
    """
    world = find_world(os.environ)
    if world is not None and world.world_size > 1:
        raise ValueError(f"experts are measured on one device, but {world.started_by} started {world.world_size} ranks")
    cuda = find_device(settings.device)
    settings = settings.resolve(cuda=cuda)
    Path(settings.out).mkdir(parents=True, exist_ok=True)
    started = now()
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    cases = ExpertsBenchmark(settings, device).measure_all()
    publish(Result.of(started, command, settings.to_json(), device, 1, cases), "experts", show, "write_experts")


class ExpertsBenchmark(Contest):
    """`carpool bench experts`: how fast one device computes the experts of a layer; nothing travels.

    contender                 what it is
    carpool NAME              `carpool.experts.EXPERTS[NAME]` within `carpool.ride.function.ride`, as a layer runs it
    carpool fp8-held          fp8, with weights quantised once and held, as in the further micro-batches of a step
    transformers grouped_mm   the experts module of the model's class, by grouped products
    transformers eager        the same, by the loop over experts that its file has

    section            what is timed
    forward            with what it takes to be differentiated later
    backward           gradients of rows, routing weights, and parameters
    forward_backward   one after the other, in one go

    On CUDA a delay of about 10 ms is queued before the first event of each section, so that the host has launched all
    of it before the device begins, as it has in training (`timing.py`). A contender that waits for the device in
    between (the loop does, once per expert) waits for the delay too, and what it launches after that is in its time.
    `host_ms` tells how long the host took: much more than the delay means that launching was not hidden.

    Files: DIR/experts.json, every repetition and where it ran; DIR/experts.png."""

    PASSES = tuple(PASSES)
    WARMUP = 3
    delay_cycles = 20_000_000  # about 10 ms at 2 GHz

    def __init__(self, settings: ExpertsSettings, device: torch.device) -> None:
        ours = [Contender(name) for name in settings.experts or (*fast_experts(), HELD)]
        theirs = [Contender(name, theirs=True) for name in settings.against]
        super().__init__(settings, device, ours + theirs, BASELINE)

    def _make(self, contender: Contender, case: Case, scope: ExitStack) -> Forward:
        return (their_experts if contender.theirs else carpool_experts)(contender.experts, case, scope)

    def _time(self, clock: Clock, label: str, forward: Forward, case: Case) -> None:
        with clock.section(label, "forward"):
            y_TH = forward()
        with clock.section(label, "backward"):
            gradients = torch.autograd.grad(y_TH, case.leaves, case.dy_TH)
        del y_TH, gradients
        with clock.section(label, "forward_backward"):
            torch.autograd.grad(forward(), case.leaves, case.dy_TH)

    def _weigh(self, row: ContenderResult, forward: Forward, case: Case) -> None:
        row.saved_bytes, row.peak_bytes = memory.measure(forward, case.leaves, case.dy_TH)


def their_experts(name: str, case: Case, scope: ExitStack) -> Forward:
    """The module's own forward, by an implementation of transformers."""

    def forward() -> torch.Tensor:
        use(case.module, name)
        y_TH: torch.Tensor = case.module(case.x_TH, case.index_TK, case.weight_TK)
        return y_TH

    return forward


def carpool_experts(name: str, case: Case, scope: ExitStack) -> Forward:
    """Carpool's experts on the parameters of the module, in a ride that goes nowhere."""
    module = case.module
    function = expert_function(module)
    if function is None:
        raise ValueError(f"{type(module).__name__} computes what Carpool's experts do not know")
    experts, transport = make_experts(name.removesuffix("-held"), function), Local(None, module.num_experts)
    if name == HELD:
        assert isinstance(experts, FP8Experts)
        scope.enter_context(experts.weights_unchanged())
    setup = RideSetup(transport, experts, LayerStats(module.num_experts, 1, 0))
    weights = ExpertWeights.of(getattr(module, n) if n else None for n in weight_names(module))

    def forward() -> torch.Tensor:
        routing = Routing(case.index_TK.int(), case.weight_TK.float())
        return ride(case.x_TH, routing, routing.expert_TK, weights, setup)[0]

    return forward
