"""`carpool bench layer`: how fast whole MoE layers are over the ranks of a machine: rows travel, experts compute.

Every rank holds its share of the experts and its own tokens; the routing is given (see `moe_contest.py`).

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

from abc import ABC, abstractmethod
from contextlib import ExitStack

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers.distributed.expert_parallel import AllToAllEP

from carpool.activations import Arena
from carpool.bench.bench_settings import LayerSettings, fast_experts
from carpool.bench.contest import RankBenchmark
from carpool.bench.moe import module_answers as memory
from carpool.bench.moe.module_answers import Case, use
from carpool.bench.moe.moe_contest import Contender, Contest, Forward, forward_backward
from carpool.bench.moe.moe_results import CaseResult, ContenderResult, show
from carpool.bench.options import LayerShape
from carpool.bench.timing import Clock
from carpool.hf import CarpoolEP
from carpool.hf.seam.expert_rides import buffers_of_rides
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
        ours = [Contender(name, way) for way in transports for name in experts]
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
        return OurLayer(layer, case, contender.transport, contender.experts, options)

    def _answer(self, forward: Forward, case: Case) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        answer = forward_backward(forward, case)
        assert isinstance(forward, Layer)
        forward.check()
        return answer

    def _time(self, clock: Clock, label: str, forward: Forward, case: Case) -> None:
        with clock.section(label, "forward"):
            for _ in range(self.iterations):
                forward()
        with clock.section(label, "forward_backward"):
            for _ in range(self.iterations):
                torch.autograd.grad(forward(), case.leaves, case.dy_TH)

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
        row.remote_bytes = int(sent) // self.num_ranks


def measure(settings: LayerSettings, device: torch.device, command: str) -> list[CaseResult]:
    """All cases. All ranks together."""
    return LayerBenchmark(settings, device).measure_all()


BENCHMARK = RankBenchmark("layer", LayerSettings, measure, show, "write_experts")


class Layer(ABC):
    """A contender at work on this rank's tokens."""

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

    def __init__(
        self, layer: CarpoolEP, case: Case, transport: str, experts: str, options: NVLinkOptions | None
    ) -> None:
        self.layer, self.case, self.rides = layer, case, layer.rides
        self.rides.set_transport(transport, options)
        self.rides.set_experts(experts)
        if self.rides.compute is None:
            raise ValueError(f"{type(case.module).__name__} computes what Carpool's experts do not know")

    def __call__(self) -> torch.Tensor:
        return self.layer(self.case.x_TH, self.case.index_TK, self.case.weight_TK)

    @property
    def arena(self) -> Arena | None:
        return None if self.rides.transport is None else self.rides.transport.arena

    @property
    def buffer_bytes(self) -> int:
        return sum(buffers.size for buffers in buffers_of_rides([self.rides]))

    def reset(self) -> None:
        self.rides.stats.reset()

    def check(self) -> None:
        check_overflow(self.rides.transport)
        for buffers in buffers_of_rides([self.rides]):
            if needed := buffers.arena_overflow():
                raise RuntimeError(f"the arena was too small: {needed} bytes were needed of {buffers.size}")

    def remote_bytes(self) -> int:
        traffic = self.rides.stats.traffic
        return traffic.remote(traffic.bytes)


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
