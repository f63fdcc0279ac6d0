"""`carpool bench layer`: how fast whole MoE layers are over the ranks of a machine: rows travel, experts compute.

Every rank holds its share of the experts and its own tokens; the routing is given (see `contest.py`).

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

from contextlib import ExitStack

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers.distributed.expert_parallel import AllToAllEP

from carpool.bench.moe import memory
from carpool.bench.moe.answers import Case
from carpool.bench.moe.contest import PLOT, Contender, Contest, Forward, forward_backward
from carpool.bench.moe.layers import Layer, OurLayer, TheirLayer, arena_bytes
from carpool.bench.moe.modules import use
from carpool.bench.moe.results import CaseResult, ContenderResult, show
from carpool.bench.moe.settings import LayerSettings, fast_experts
from carpool.bench.moe.shapes import Shape
from carpool.bench.ranks import RankBenchmark
from carpool.bench.timing import Clock
from carpool.hf import CarpoolEP
from carpool.transport import NVLinkOptions, between_ranks, find_transport

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

    def _case(self, shape: Shape, kind: str) -> Case:
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


BENCHMARK = RankBenchmark("layer", LayerSettings, measure, show, PLOT)
