"""`carpool bench experts`: how fast one device computes the experts of a layer; nothing travels (see `moe_contest.py`).

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

Files: DIR/experts.json, every repetition and where it ran; DIR/experts.png.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path

import torch

from carpool.bench.bench_settings import HELD, ExpertsSettings, fast_experts
from carpool.bench.moe import module_answers as memory
from carpool.bench.moe.module_answers import Case, use
from carpool.bench.moe.moe_contest import Contender, Contest, Forward
from carpool.bench.moe.moe_results import PASSES, ContenderResult, show
from carpool.bench.options import find_device
from carpool.bench.result_files import Result, now, publish
from carpool.bench.timing import Clock
from carpool.experts import ExpertWeights, FP8Experts, make_experts
from carpool.hf.seam.experts_module import expert_function, weight_names
from carpool.metrics.counters import LayerStats
from carpool.ride.function import ride
from carpool.ride.setup import RideSetup
from carpool.routing import Routing
from carpool.train.launch.start import find_world
from carpool.transport.local import Local

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
    """On one device."""

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
