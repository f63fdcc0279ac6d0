"""`carpool bench layer`: how fast whole MoE layers are over the ranks of a machine: rows travel, experts compute.

Every rank holds its share of the experts and its own tokens; the routing is given (see `moe_contest.py`).

    contender                             what it is
    TRANSPORT + NAME                      Carpool behind transformers' seam (`carpool.hf.CarpoolEP`), with that
                                          transport and those experts
    transformers all_to_all + grouped_mm  transformers' own expert parallelism (`AllToAllEP`) with its fast experts

The baseline, and some transports, ask the device how many rows will come, in the middle of each layer. A delay in front
would hide the launches of those that do not ask and nothing of those that do, so there is none: after all ranks have
met, the host launches `iterations` layers back to back, and the time from the first event to the last is divided by
their number. What the host makes the device wait for counts, for every contender alike. With --captured these layers
are one CUDA graph over transports that never wait for the host, and only the device counts.

    forward            with what it takes to be differentiated later
    forward_backward   gradients of rows, routing weights and parameters included; nothing is reduced over data-parallel
                       ranks, and nothing is unsharded

Files: DIR/layer.json, every repetition and where it ran; DIR/layer.png.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers.distributed.expert_parallel import AllToAllEP

from carpool.activations import Arena
from carpool.bench.bench_settings import LayerSettings, fast_experts
from carpool.bench.contest import RankBenchmark, draw_routings
from carpool.bench.moe import module_answers as memory
from carpool.bench.moe.module_answers import Case, use
from carpool.bench.moe.moe_contest import Contender, Contest, Forward, forward_backward
from carpool.bench.moe.moe_results import CaseResult, ContenderResult, Modelled, show
from carpool.bench.options import LayerShape
from carpool.bench.result_files import Result, now, publish
from carpool.bench.timing import Clock
from carpool.hf import CarpoolEP
from carpool.hf.seam.expert_rides import buffers_of_rides, restart_arenas
from carpool.kernels.capture import Recorder
from carpool.metrics.counters import HostCounts
from carpool.metrics.host import device_name
from carpool.planner.machine.balanced_layer import ModelledLayer, model_layer
from carpool.planner.machine.cost import CostModel
from carpool.planner.machine.hardware import Hardware, find_hardware, hardware_of
from carpool.ride.balanced import SpareSlotOptions
from carpool.transport import NVLinkOptions, between_ranks, check_overflow, find_transport

BASELINE = Contender("grouped_mm", "all_to_all", theirs=True)


class LayerBenchmark(Contest):
    """On the default process group."""

    PASSES = ("forward", "forward_backward")
    WARMUP = 2
    delay_cycles = 0

    def __init__(self, settings: LayerSettings, device: torch.device) -> None:
        # No tensor parallelism: its group is a rank alone.
        mesh = init_device_mesh(device.type, (dist.get_world_size(), 1), mesh_dim_names=("ep", "tp"))
        self.ep_mesh, self.tp_mesh, self.iterations = mesh["ep"], mesh["tp"], settings.iterations
        experts, transports = settings.experts or fast_experts(), settings.transports or between_ranks()
        spares = settings.slots or (0,)
        graphs = {
            way: settings.captured and device.type == "cuda" and find_transport(way).graphable for way in transports
        }
        ours = [
            Contender(name, way, spare=spare, captured=graphs[way])
            for way in transports for name in experts for spare in spares
        ]  # fmt: skip
        super().__init__(settings, device, [*ours, BASELINE], BASELINE, self.ep_mesh.get_group())

    def _case(self, shape: LayerShape, kind: str) -> Case:
        case = super()._case(shape, kind)
        case.module._is_expert_parallel = True  # as transformers marks experts that it has split
        return case

    def _make(self, contender: Contender, case: Case, scope: ExitStack) -> Layer:
        assert contender.transport is not None
        if contender.theirs:
            use(case.module, contender.experts)
            return TheirLayer(AllToAllEP(case.module, self.ep_mesh, self.tp_mesh), case, contender.experts)
        options = None
        if find_transport(contender.transport).options_class is NVLinkOptions:
            tokens = case.x_TH.shape[0]
            options = NVLinkOptions(max_tokens=tokens, arena_bytes=arena_bytes(case))
        layer = CarpoolEP(case.module, self.ep_mesh, self.tp_mesh)
        return OurLayer(layer, case, contender, options)

    def _answer(self, forward: Forward, case: Case) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        answer = forward_backward(forward, case)
        assert isinstance(forward, Layer)
        forward.check()
        return answer

    def _time(self, clock: Clock, label: str, forward: Forward, case: Case) -> None:
        assert isinstance(forward, Layer)
        for name, run in forward.passes(case, self.iterations).items():
            with clock.section(label, name):
                run()

    def _weigh(self, row: ContenderResult, forward: Forward, case: Case) -> None:
        assert isinstance(forward, Layer)
        forward.check()
        forward.reset()
        saved, peak = memory.measure(forward, case.leaves, case.dy_TH, forward.arena)
        if peak is None:  # then there was no backward yet
            forward.reset()
            forward_backward(forward, case)
        forward.check()
        most = torch.tensor([saved, peak or 0, forward.buffer_bytes], dtype=torch.int64, device=self.device)
        sent = torch.tensor(forward.remote_bytes(), dtype=torch.int64, device=self.device)
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=self.group)
        dist.all_reduce(sent, group=self.group)
        row.saved_bytes, row.peak_bytes, row.buffer_bytes = most.tolist()
        row.peak_bytes = None if peak is None else row.peak_bytes
        row.remote_bytes, row.load = int(sent) // self.num_ranks, forward.load()


def measure(settings: LayerSettings, device: torch.device, command: str) -> list[CaseResult]:
    """All cases. All ranks together."""
    cases = LayerBenchmark(settings, device).measure_all()
    if settings.slots:
        hardware = hardware_of(device_name(device))
        model_cases(settings, cases, hardware)
    return cases


def model_only(settings: LayerSettings, command: str) -> None:
    """`--modelled`: without ranks. Show and write the results.

    Raises:
        ValueError: unknown hardware, or sizes that do not fit together.
        OSError: the folder cannot be written.
    """
    hardware, started = find_hardware(settings.modelled), now()
    settings = settings.resolve(cuda=True, num_ranks=settings.ranks or 8)
    Path(settings.out).mkdir(parents=True, exist_ok=True)
    cases = [
        CaseResult(shape, kind, settings.ranks or 8, shape.flops, None, BASELINE.label)
        for shape in settings.shapes
        for kind in settings.routings
    ]
    model_cases(settings, cases, hardware)
    result = Result.of(started, command, settings.to_json(), torch.device("cpu"), settings.ranks or 8, cases)
    publish(result, "layer", show, None)


def model_cases(settings: LayerSettings, cases: Sequence[CaseResult], hardware: Hardware) -> None:
    """Add to each case what the cost model says of each number of spare slots, and to each contender its time over
    that in forced balance."""
    forced = {case.shape: case for case in cases if case.routing == "even"}
    for case in cases:
        shape, even = case.shape, forced[case.shape]
        cost = CostModel(shape.hidden, shape.inner, 2, shape.tokens, hardware, "dedup")

        def model(kind: str, spare: int, shape: LayerShape = shape, cost: CostModel = cost) -> ModelledLayer:
            layout, routings = draw_routings(settings, shape, kind, settings.ranks or 1)
            return model_layer([routing.expert_TK for routing in routings], layout, spare, cost)

        least = model("even", 0).seconds
        for spare in settings.slots if case is not even else ():
            one = model(case.routing, spare)
            ratio, ms = one.seconds / least, 1e3 * one.seconds
            case.modelled.append(Modelled(hardware.name, spare, one.before, one.after, one.replicas, ms, ratio))
        times = {
            (row.transport, row.experts): row.sections["forward_backward"].ms_median
            for row in even.rows
            if row.sections and not row.spare
        }
        for row in case.rows:
            if row.sections and (row.transport, row.experts) in times:
                own = row.sections["forward_backward"].ms_median
                row.of_forced = own / times[row.transport, row.experts]


BENCHMARK = RankBenchmark("layer", LayerSettings, measure, show, "write_experts")


class Layer(ABC):
    """A contender at work on this rank's tokens."""

    captured = False
    _recorded: dict[str, Callable[[], None]] | None = None

    def passes(self, case: Case, iterations: int) -> dict[str, Callable[[], None]]:
        """What is timed, by its name: so many layers back to back. All contenders have computed before."""

        def forward() -> None:
            for _ in range(iterations):
                self()

        def forward_backward() -> None:
            for _ in range(iterations):
                torch.autograd.grad(self(), case.leaves, case.dy_TH)

        if not self.captured:
            return {"forward": forward, "forward_backward": forward_backward}
        if self._recorded is None:
            torch.cuda.synchronize()
            recorder = Recorder()
            self._recorded = {run.__name__: self._record(recorder, run) for run in (forward, forward_backward)}
        return self._recorded

    def _record(self, recorder: Recorder, run: Callable[[], None]) -> Callable[[], None]:
        """What repeats such a pass."""
        return recorder.record(run)

    @abstractmethod
    def __call__(self) -> torch.Tensor:
        """Its output for the case's tokens, differentiable."""

    @property
    def arena(self) -> Arena | None:
        """Where it keeps rows, if not in tensors."""
        return None

    @property
    def buffer_bytes(self) -> int:
        """What it has allocated once, for all layers."""
        return 0

    def reset(self) -> None:
        """Count from zero."""
        return

    def check(self) -> None:
        """Raise if rows had no place."""
        return

    def load(self) -> float | None:
        """The fullest rank's choices over the mean since `reset`, with spare slots."""
        return None

    @abstractmethod
    def remote_bytes(self) -> int:
        """What this rank sent to others in a forward and backward since `reset`."""


class TheirLayer(Layer):
    def __init__(self, layer: AllToAllEP, case: Case, implementation: str) -> None:
        self.layer, self.case, self.implementation = layer, case, implementation

    def __call__(self) -> torch.Tensor:
        use(self.case.module, self.implementation)
        y_TH: torch.Tensor = self.layer(self.case.x_TH, self.case.index_TK, self.case.weight_TK)
        return y_TH

    def remote_bytes(self) -> int:
        """A row for each choice of an expert elsewhere, and for each that came from elsewhere: out, back, and the same
        for gradients. Between two ranks as much goes one way as comes the other way later, so that over all ranks
        each choice makes four rows."""
        case, local = self.case, self.case.module.num_experts
        elsewhere = int((case.index_TK // local != case.rank).sum())
        return 4 * elsewhere * case.x_TH.shape[1] * case.x_TH.element_size()


class OurLayer(Layer):
    """Carpool behind transformers' seam, with a transport and experts by name.

    Raises:
        ValueError: experts that Carpool does not know, or that these cannot compute.
    """

    def __init__(self, layer: CarpoolEP, case: Case, contender: Contender, options: NVLinkOptions | None) -> None:
        self.layer, self.case, self.rides, self.captured = layer, case, layer.rides, contender.captured
        self._counted: list[HostCounts] = []
        assert contender.transport is not None
        self.rides.set_transport(contender.transport, options)
        self.rides.set_experts(contender.experts)
        self.rides.set_spare_slots(SpareSlotOptions.of(contender.spare))
        if self.rides.compute is None:
            raise ValueError(f"{type(case.module).__name__} computes what Carpool's experts do not know")

    def __call__(self) -> torch.Tensor:
        return self.layer(self.case.x_TH, self.case.index_TK, self.case.weight_TK)

    def _record(self, recorder: Recorder, run: Callable[[], None]) -> Callable[[], None]:
        # A graph's places in an arena do not depend on those of eager calls, and its events live as long as it does.
        def work() -> None:
            restart_arenas([self.rides])
            run()

        before = self.rides.stats.exchange(HostCounts())
        try:
            return recorder.record(work)
        finally:
            self._counted.append(self.rides.stats.exchange(before))
            restart_arenas([self.rides])

    @property
    def arena(self) -> Arena | None:
        return None if self.rides.transport is None else self.rides.transport.arena

    @property
    def buffer_bytes(self) -> int:
        return sum(buffers.size for buffers in buffers_of_rides([self.rides]))

    def reset(self) -> None:
        self.rides.reset_counts()

    def check(self) -> None:
        check_overflow(self.rides.transport)
        for buffers in buffers_of_rides([self.rides]):
            if needed := buffers.arena_overflow():
                raise RuntimeError(f"the arena was too small: {needed} bytes were needed of {buffers.size}")

    def remote_bytes(self) -> int:
        traffic = self.rides.stats.traffic
        return traffic.remote(traffic.bytes) + (0 if self.rides.spare is None else int(self.rides.spare.bytes_sent))

    def load(self) -> float | None:
        return None if self.rides.spare is None else self.rides.spare.load().after


def arena_bytes(case: Case) -> int:
    """Enough for what one layer keeps on the rank that most rows come to: the rows, and the experts' pre-activations;
    twice that, for what experts may keep besides. The same on all ranks."""
    local, ranks = case.module.num_experts, len(case.routings)
    expert_X = torch.cat([routing.expert_TK.flatten() for routing in case.routings]).long()
    pairs = int(torch.bincount(expert_X // local, minlength=ranks).max())
    up, hidden = getattr(case.module, case.names[0]), case.x_TH.shape[1]
    width = up.shape[1] * up.shape[2] // hidden
    rows = ranks * case.x_TH.shape[0]
    return 2 * (pairs * width + rows * hidden) * up.element_size() + (64 << 20)
