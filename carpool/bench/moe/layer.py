"""`carpool bench layer`: how fast whole MoE layers are over the ranks of a machine: rows travel, experts compute.

Every rank holds its share of the experts and its own tokens; the routing is given. For each shape and routing every
contender gets the same rows, choices, routing weights and parameters (one experts module of transformers per rank),

    1  is checked against the definition in float32 over all ranks (`answers.py`); a wrong answer ends the benchmark
    2  is timed: repetition by repetition, contender by contender, the order turned round each time
    3  is asked once what it keeps, takes at most (`memory.py`), and sends

    contender                             what it is
    TRANSPORT + NAME                      Carpool behind transformers' seam (`carpool.hf.CarpoolEP`), with that
                                          transport and those experts
    transformers all_to_all + grouped_mm  transformers' own expert parallelism (`AllToAllEP`) with its fast experts

The baseline, and some transports, ask the device how many rows will come, in the middle of each layer. A delay in front
would hide the launches of those that do not ask and nothing of those that do, so there is none: after all ranks have
met, the host launches `iterations` layers back to back, and the time from the first event to the last is divided by
their number. What the host makes the device wait for counts, for every contender alike.

    forward            with what it takes to be differentiated later
    forward_backward   gradients of rows, routing weights and parameters included; nothing is reduced over data-parallel
                       ranks, and nothing is unsharded

Files: DIR/layer.json, every repetition and where it ran; DIR/layer.png.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers.distributed.expert_parallel import AllToAllEP

from carpool.bench.moe import memory
from carpool.bench.moe.agreement import attempt_together
from carpool.bench.moe.answers import Case, check
from carpool.bench.moe.experts import BASELINE as THEIRS
from carpool.bench.moe.layers import Layer, OurLayer, TheirLayer, arena_bytes
from carpool.bench.moe.modules import make_module, use
from carpool.bench.moe.results import PASSES, CaseResult, Row, Times, show
from carpool.bench.moe.run import OUT_OF_MEMORY, Forward, forward_backward
from carpool.bench.moe.settings import LayerSettings, fast_experts, lossy_reasons
from carpool.bench.moe.shapes import Shape
from carpool.bench.ranks import rank_device, start_ranks
from carpool.bench.results import Result, now, publish
from carpool.bench.routings import make_routings
from carpool.bench.timing import Clock, rounds
from carpool.hf import CarpoolEP
from carpool.layout import ExpertLayout
from carpool.routing import Routing
from carpool.train.config import Config
from carpool.train.run.flops import peak_flops
from carpool.transport import TRANSPORTS, NVLinkOptions, find_transport

WARMUP = 2
PLOT = "carpool.bench.moe.plot:write_plot"


@dataclass(frozen=True)
class Contender:
    """Attributes:
    transport: of Carpool, or None for transformers' expert parallelism.
    experts: Carpool's, or transformers' implementation.
    """

    transport: str | None
    experts: str

    @property
    def label(self) -> str:
        return f"{self.transport or 'transformers all_to_all'} + {self.experts}"

    @property
    def lossy(self) -> tuple[str, ...]:
        return lossy_reasons(self.experts) if self.transport is not None else ()


BASELINE = Contender(None, THEIRS.name)


def benchmark(settings: LayerSettings, *, debug: bool = False, command: str = "carpool bench layer") -> None:
    """Start the ranks (or be one, under torchrun or Slurm), measure, and show and write the results.

    Raises:
        ValueError: settings that do not fit this machine, or contenders asked for by name that cannot run here.
        OSError: the folder cannot be written.
        carpool.train.launch.failure.RankFailure: a rank failed.
    """
    start_ranks(settings, "carpool.bench.moe.layer:measure", debug=debug, command=command)


def measure(config: Config, settings: dict[str, Any], command: str) -> None:
    """One rank's part of the benchmark; the process group is there."""
    started, device = now(), rank_device()
    cases = LayerBenchmark(LayerSettings.from_json(settings), device).measure_all()
    if dist.get_rank() == 0:
        publish(Result.of(started, command, settings, device, dist.get_world_size(), cases), "layer", show, PLOT)


class LayerBenchmark:
    """Measures every shape and routing on the default process group; all ranks construct and call it alike."""

    def __init__(self, settings: LayerSettings, device: torch.device) -> None:
        self.settings, self.device = settings, device
        self.dtype: torch.dtype = getattr(torch, settings.dtype)
        self.rank, self.num_ranks = dist.get_rank(), dist.get_world_size()
        # No tensor parallelism: its group is a rank alone.
        mesh = init_device_mesh(device.type, (self.num_ranks, 1), mesh_dim_names=("ep", "tp"))
        self.ep_mesh, self.tp_mesh = mesh["ep"], mesh["tp"]
        self.group = self.ep_mesh.get_group()
        experts, transports = settings.experts or fast_experts(), settings.transports or tuple(TRANSPORTS)
        self.contenders = [Contender(way, name) for way in transports for name in experts] + [BASELINE]
        self.peak = peak_flops(device, None)[0] if self.dtype.itemsize == 2 else None

    def measure_all(self) -> list[CaseResult]:
        """The results in the order of the settings."""
        settings = self.settings
        results = {}
        # Buffers of `nvlink` grow and never shrink: small shapes first, so that each has buffers of its size.
        for shape in sorted(settings.shapes, key=lambda shape: shape.tokens):
            for kind in settings.routings:
                results[shape, kind] = self._measure(shape, kind)
        return [results[shape, kind] for shape in settings.shapes for kind in settings.routings]

    def _measure(self, shape: Shape, kind: str) -> CaseResult:
        settings = self.settings
        result = CaseResult(shape, kind, self.num_ranks, shape.flops, self.peak, BASELINE.label)
        result.rows = [Row(c.label, c.experts, c.transport or "all_to_all", c.lossy) for c in self.contenders]
        layout = ExpertLayout.contiguous(shape.experts, self.num_ranks)
        routings = make_routings(
            kind, shape.tokens, shape.top_k, layout, seed=settings.seed, zipf_exponent=settings.zipf_exponent
        )
        made: list[Case] = []
        if why := attempt_together(lambda: made.append(self._case(shape, routings)), self.group, self.device):
            for row in result.rows:
                row.unavailable = f"{why} for the weights and rows alone"
            return result
        case = made[0]
        rows, running = dict(zip(self.contenders, result.rows, strict=True)), {}
        for c, row in rows.items():
            if (forward := self._start(c, case, routings, layout, row)) is not None:
                running[c] = forward
        clock, iterations = Clock(self.device, self.group, delay_cycles=0), settings.iterations
        for number, order in rounds(running, settings.repetitions, WARMUP):
            clock.keep = number >= 0
            for c in order:
                several = partial(self._time, clock, c.label, running[c], case)
                if why := attempt_together(several, self.group, self.device, c.transport is None):
                    rows[c].unavailable = why
                    del running[c]
        times = clock.slowest()
        for c, forward in running.items():
            for section in ("forward", "forward_backward"):
                ms = [us / 1e3 / iterations for us in times[c.label, section]]
                host_ms = clock.host_us(c.label, section) / 1e3 / iterations
                rows[c].sections[section] = Times.of(ms, host_ms, PASSES[section] * shape.flops, self.peak)
            self._weigh(rows[c], c, forward, case)
        result.compare()
        return result

    def _case(self, shape: Shape, routings: list[Routing]) -> Case:
        seed, device, rank = self.settings.seed, self.device, self.rank
        module = make_module(shape, shape.experts // self.num_ranks, device, self.dtype, 1000 * seed + rank)
        module._is_expert_parallel = True  # as transformers marks experts that it has split
        generator = torch.Generator(device).manual_seed(7919 * (seed + 1) + rank)
        x_TH, dy_TH = (
            torch.randn(shape.tokens, shape.hidden, generator=generator, device=device).to(self.dtype) for _ in range(2)
        )
        index_TK, weight_TK = routings[rank].expert_TK.long().to(device), routings[rank].weight_TK
        assert weight_TK is not None
        weight_TK = weight_TK.to(device, self.dtype).requires_grad_()
        return Case(module, x_TH.requires_grad_(), index_TK, weight_TK, dy_TH, self.group, rank)

    def _start(
        self, contender: Contender, case: Case, routings: list[Routing], layout: ExpertLayout, row: Row
    ) -> Layer | None:
        """The contender, checked; None if it cannot run, which `row` then says. Collective.

        Raises:
            ValueError: it cannot run, and was asked for by name.
            RuntimeError: its answer is wrong.
        """
        made: list[Layer] = []
        answers: list[tuple[torch.Tensor, tuple[torch.Tensor, ...]]] = []

        def first() -> None:
            made.append(self._make(contender, case, routings, layout))
            answers.append(forward_backward(made[0], case))

        theirs, option = contender.transport is None, "--transports"
        row.unavailable, asked = self._unreachable(contender, case), contender.transport in self.settings.transports
        if not row.unavailable:
            row.unavailable = attempt_together(first, self.group, self.device, theirs)
            option, asked = "--experts", contender.experts in self.settings.experts
        if row.unavailable:
            if asked and not theirs and row.unavailable != OUT_OF_MEMORY:
                raise ValueError(
                    f"{contender.label} cannot run here: {row.unavailable}; change {option}, or leave it out to "
                    "measure what can"
                )
            return None
        made[0].check()
        y_TH, gradients = answers[0]
        row.error = check(contender.label, y_TH, gradients, case, fp8=bool(contender.lossy))
        return made[0]

    def _unreachable(self, contender: Contender, case: Case) -> str | None:
        if contender.transport is None:
            return None
        way = find_transport(contender.transport)
        return way.why_no_rows(case.x_TH.shape[1], self.dtype.itemsize) or way.why_not(self.group)

    def _make(self, contender: Contender, case: Case, routings: list[Routing], layout: ExpertLayout) -> Layer:
        if contender.transport is None:
            use(case.module, contender.experts)
            return TheirLayer(AllToAllEP(case.module, self.ep_mesh, self.tp_mesh), case, contender.experts)
        options = None
        if find_transport(contender.transport).options_class is NVLinkOptions:
            tokens = case.x_TH.shape[0]
            options = NVLinkOptions(max_tokens=tokens, arena_bytes=arena_bytes(case, routings, layout))
        layer = CarpoolEP(case.module, self.ep_mesh, self.tp_mesh)
        return OurLayer(layer, case, contender.transport, contender.experts, options)

    def _time(self, clock: Clock, label: str, forward: Forward, case: Case) -> None:
        iterations = self.settings.iterations
        with clock.section(label, "forward"):
            for _ in range(iterations):
                forward()
        with clock.section(label, "forward_backward"):
            for _ in range(iterations):
                torch.autograd.grad(forward(), case.leaves, case.dy_TH)

    def _weigh(self, row: Row, contender: Contender, layer: Layer, case: Case) -> None:
        """Memory and bytes of one forward and backward. Collective."""
        layer.check()
        layer.reset()
        saved, peak = memory.measure(layer, case.leaves, case.dy_TH, layer.arena)
        if peak is None:  # then there was no backward yet
            layer.reset()
            forward_backward(layer, case)
        layer.check()
        most = torch.tensor([saved, peak or 0, layer.buffer_bytes], dtype=torch.int64, device=self.device)
        sent = torch.tensor(layer.remote_bytes(), dtype=torch.int64, device=self.device)
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=self.group)
        dist.all_reduce(sent, group=self.group)
        row.saved_bytes, row.peak_bytes, row.buffer_bytes = most.tolist()
        row.peak_bytes = None if peak is None else row.peak_bytes
        row.remote_bytes = int(sent) // self.num_ranks
