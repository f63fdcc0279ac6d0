"""`carpool bench experts`: how fast one device computes the experts of a layer, nothing travelling.

For each shape and routing every contender gets the same rows, choices, routing weights and parameters, and

    1  is checked against the definition in float32 (`answers.py`); a wrong answer ends the benchmark
    2  is timed: repetition by repetition, contender by contender, the order turned round each time
    3  is asked once what it keeps between forward and backward, and takes at most (`memory.py`)

    contender                 what it is
    carpool NAME              `carpool.experts.EXPERTS[NAME]` within `carpool.ride.ride`, as a layer runs it
    carpool fp8-held          fp8, with weights quantised once and held, as in the further micro-batches of a step
    transformers grouped_mm   the experts module of the model's class, by grouped products
    transformers eager        the same, by the loop over experts that its file has

    section            what is timed
    forward            with what it takes to be differentiated later
    backward           gradients of rows, routing weights, and parameters
    forward_backward   one after the other, in one go

On CUDA a delay of about 10 ms is queued before the first event of each section, so that the host has launched all of it
before the device begins, as it has in training (`timing.py`). A contender that waits for the device in between (the
loop does, once per expert) waits for the delay too, and what it launches after that is in its time. `host_ms` tells how
long the host took: much more than the delay means that launching was not hidden.

A contender that has not enough memory, or cannot compute a shape, gets a row that says so.

Files: DIR/experts.json, every repetition and where it ran; DIR/experts.png.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from carpool.bench.moe import memory
from carpool.bench.moe.answers import Case, check
from carpool.bench.moe.home import Home
from carpool.bench.moe.modules import make_module, use
from carpool.bench.moe.results import PASSES, CaseResult, Row, Times, show
from carpool.bench.moe.run import OUT_OF_MEMORY, Forward, forward_backward, free, is_out_of_memory, why_not
from carpool.bench.moe.settings import HELD, Settings, fast_experts, lossy_reasons
from carpool.bench.moe.shapes import Shape
from carpool.bench.options import find_device
from carpool.bench.results import Result, now, publish
from carpool.bench.routings import make_routings
from carpool.bench.timing import Clock, rounds
from carpool.experts import ExpertWeights, FP8Experts, make_experts
from carpool.hf.expert_parallel import expert_function, weight_names
from carpool.layout import ExpertLayout
from carpool.observe.stats import LayerStats
from carpool.ride import RideSetup, ride
from carpool.routing import Routing
from carpool.train.launch.start import find_world
from carpool.train.run.flops import peak_flops

WARMUP = 3
PLOT = "carpool.bench.moe.plot:write_plot"
DELAY_CYCLES = 20_000_000  # about 10 ms at 2 GHz


@dataclass(frozen=True)
class Contender:
    """Attributes:
    name: of Carpool's experts, or of transformers' implementation if `theirs`.
    """

    name: str
    theirs: bool = False

    @property
    def label(self) -> str:
        return f"{'transformers' if self.theirs else 'carpool'} {self.name}"

    @property
    def lossy(self) -> tuple[str, ...]:
        return lossy_reasons(self.name) if not self.theirs else ()

    def make(self, case: Case, scope: ExitStack) -> Forward:
        """The forward, on the inputs of `case`, while `scope` is open.

        Raises:
            ValueError, NotImplementedError: these experts cannot compute that.
        """
        if not self.theirs:
            return carpool_experts(self.name, case, scope)

        def forward() -> torch.Tensor:
            use(case.module, self.name)
            y_TH: torch.Tensor = case.module(case.x_TH, case.index_TK, case.weight_TK)
            return y_TH

        return forward


BASELINE = Contender("grouped_mm", theirs=True)


def benchmark(settings: Settings, *, command: str = "carpool bench experts") -> None:
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
    publish(Result.of(started, command, settings.to_json(), device, 1, cases), "experts", show, PLOT)


class ExpertsBenchmark:
    """Measures every shape and routing of resolved settings on one device."""

    def __init__(self, settings: Settings, device: torch.device) -> None:
        self.settings, self.device = settings, device
        self.dtype: torch.dtype = getattr(torch, settings.dtype)
        self.contenders = [Contender(name) for name in settings.experts or (*fast_experts(), HELD)]
        self.contenders += [Contender(name, theirs=True) for name in settings.against]
        # The datasheet's rates are those of 16-bit numbers.
        self.peak = peak_flops(device, None)[0] if self.dtype.itemsize == 2 else None

    def measure_all(self) -> list[CaseResult]:
        settings = self.settings
        return [self._measure(shape, kind) for shape in settings.shapes for kind in settings.routings]

    def _measure(self, shape: Shape, kind: str) -> CaseResult:
        result = CaseResult(shape, kind, 1, shape.flops, self.peak, BASELINE.label)
        result.rows = [Row(c.label, c.name, lossy=c.lossy) for c in self.contenders]
        try:
            case = self._case(shape, kind)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            for row in result.rows:
                row.unavailable = f"{OUT_OF_MEMORY} for the weights and rows alone"
            free(self.device)
            return result
        with ExitStack() as scope:
            self._run(case, result, scope)
        result.compare()
        return result

    def _run(self, case: Case, result: CaseResult, scope: ExitStack) -> None:
        shape, running = result.shape, {}
        for c, row in zip(self.contenders, result.rows, strict=True):
            if (forward := self._start(c, case, row, scope)) is not None:
                running[c] = forward
        clock = Clock(self.device, None, DELAY_CYCLES)
        rows = dict(zip(self.contenders, result.rows, strict=True))
        for number, order in rounds(running, self.settings.repetitions, WARMUP):
            clock.keep = number >= 0
            for c in order:
                once = partial(self._time, clock, c.label, running[c], case)
                if not self._attempt(c, rows[c], once):
                    del running[c]
        times = clock.slowest()
        for c, forward in running.items():
            row = rows[c]
            for section, forwards in PASSES.items():
                ms = [us / 1e3 for us in times[c.label, section]]
                host_ms = clock.host_us(c.label, section) / 1e3
                row.sections[section] = Times.of(ms, host_ms, forwards * shape.flops, self.peak)
            row.saved_bytes, row.peak_bytes = memory.measure(forward, case.leaves, case.dy_TH)

    def _case(self, shape: Shape, kind: str) -> Case:
        settings, device, dtype = self.settings, self.device, self.dtype
        layout = ExpertLayout.contiguous(shape.experts, 1)
        (routing,) = make_routings(
            kind, shape.tokens, shape.top_k, layout, seed=settings.seed, zipf_exponent=settings.zipf_exponent
        )
        assert routing.weight_TK is not None
        module = make_module(shape, shape.experts, device, dtype, settings.seed)
        generator = torch.Generator(device).manual_seed(7919 * (settings.seed + 1))
        x_TH, dy_TH = (
            torch.randn(shape.tokens, shape.hidden, generator=generator, device=device).to(dtype) for _ in range(2)
        )
        weight_TK = routing.weight_TK.to(device, dtype)
        return Case(
            module, x_TH.requires_grad_(), routing.expert_TK.long().to(device), weight_TK.requires_grad_(), dy_TH
        )

    def _start(self, contender: Contender, case: Case, row: Row, scope: ExitStack) -> Forward | None:
        """The contender, checked; None if it cannot run, which `row` then says.

        Raises:
            ValueError: it cannot run, and was asked for by name.
            RuntimeError: its answer is wrong.
        """
        made: list[Forward] = []
        answers: list[tuple[torch.Tensor, tuple[torch.Tensor, ...]]] = []

        def first() -> None:
            made.append(contender.make(case, scope))
            answers.append(forward_backward(made[0], case))

        if not self._attempt(contender, row, first):
            if contender.name in self.settings.experts and row.unavailable != OUT_OF_MEMORY:
                raise ValueError(
                    f"experts {contender.name} cannot run here: {row.unavailable}; leave them out of --experts, or "
                    "leave --experts out to measure those that can"
                )
            return None
        y_TH, gradients = answers[0]
        row.error = check(contender.label, y_TH, gradients, case, fp8=bool(contender.lossy))
        return made[0]

    def _attempt(self, contender: Contender, row: Row, what: Callable[[], object]) -> bool:
        """Whether `what()` went well; if it did not, `row` says why."""
        try:
            what()
        except Exception as error:
            row.unavailable = why_not(error, contender.theirs)
            if row.unavailable is None:
                raise
        else:
            return True
        free(self.device)  # only here, where the error no longer holds the tensors of its frames
        return False

    @staticmethod
    def _time(clock: Clock, label: str, forward: Forward, case: Case) -> None:
        with clock.section(label, "forward"):
            y_TH = forward()
        with clock.section(label, "backward"):
            gradients = torch.autograd.grad(y_TH, case.leaves, case.dy_TH)
        del y_TH, gradients
        with clock.section(label, "forward_backward"):
            torch.autograd.grad(forward(), case.leaves, case.dy_TH)


def carpool_experts(name: str, case: Case, scope: ExitStack) -> Forward:
    """Carpool's experts on the parameters of the module, in a ride that goes nowhere."""
    module = case.module
    function = expert_function(module)
    if function is None:
        raise ValueError(f"{type(module).__name__} computes what Carpool's experts do not know")
    experts, transport = make_experts(name.removesuffix("-held"), function), Home()
    if name == HELD:
        assert isinstance(experts, FP8Experts)
        scope.enter_context(experts.weights_unchanged())
    setup = RideSetup(transport, experts, LayerStats(module.num_experts, 1, 0))
    weights = ExpertWeights._make(getattr(module, n) if n else None for n in weight_names(module))

    def forward() -> torch.Tensor:
        routing = Routing(case.index_TK.int(), case.weight_TK.float())
        return ride(case.x_TH, routing, routing.expert_TK, weights, setup)[0]

    return forward
