"""Pipeline parallelism: each rank has some of the layers, and micro-batches pass from stage to stage.

The schedules and their execution are PyTorch's (`torch.distributed.pipelining`). P ranks, M micro-batches, F a forward,
B a backward; here P = 2, M = 3, and rank 0 is idle at a dot:

    GPipe                    rank 0   F0 F1 F2 .  .  B0 B1 B2      all forwards, then all backwards
    1F1B                     rank 0   F0 F1 .  B0 F2 B1 .  B2      backwards as early as possible: at most P
                                                                   micro-batches are in flight
    Interleaved1F1B          each rank has two stages, r and P + r: the pipeline fills in half the time. Supports pairs
    InterleavedZeroBubble    the same; a backward is split into gradients of inputs (I), for which others wait, and of
                             weights (W), which fill the gaps
    ZBVZeroBubble            the same with stages r and 2P - 1 - r, a V: rank 0 has the embedding and the head
    DualPipeV                a V, with pairs of a forward and a backward of two micro-batches in its middle: one after
                             the other, or the rides of each overlapped with the other's computation (`Pipeline.pairs`)

Papers: GPipe (arXiv 1811.06965), 1F1B (PipeDream, arXiv 1806.03377; Megatron-LM's interleaving, arXiv 2104.04473; its
pairs, Pangu Ultra MoE, arXiv 2505.04519), zero bubble and ZBV (arXiv 2401.10241, 2405.15362), DualPipe (DeepSeek-V3,
arXiv 2412.19437), of which DualPipeV is one half.

Stages send a tuple of tensors forward, of the same sizes for all micro-batches, and their gradients back. Everything
else that a stage reads of a batch (labels, positions) is on all ranks of the pipeline, and is not sent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.distributed.pipelining.schedules import OVERLAP_F_B, _Action, _wait_batch_p2p

from carpool.parallel.schedules import PAIRED, SCHEDULES, check_micro_batches, in_flight, in_pairs, stages_of

Tensors = tuple[torch.Tensor, ...]
# (number of the stage, number of the micro-batch, outputs of the previous stage) -> outputs; of the last stage, the
# loss.
Forward = Callable[[int, int, Tensors], Tensors]
# (forward, backward, callback for each turn of half 0, the forward, or half 1) -> the result of the forward.
Pairs = Callable[[Callable[[], Any], Callable[[], None], Callable[[int], None]], Any]


# PyTorch's class of each of `carpool.parallel.schedules.SCHEDULES`.
_MADE_BY: dict[str, Any] = {
    "GPipe": ScheduleGPipe,
    "1F1B": Schedule1F1B,
    "Interleaved1F1B": ScheduleInterleaved1F1B,
    "InterleavedZeroBubble": ScheduleInterleavedZeroBubble,
    "ZBVZeroBubble": ScheduleZBVZeroBubble,
    "DualPipeV": ScheduleDualPipeV,
}


class Action(NamedTuple):
    """An action of a rank with one micro-batch in one stage: a forward ("F"), a backward ("B"), or, if the schedule
    splits backwards, its weight gradients ("W"); and its lane (`Work.lane`)."""

    kind: str
    stage: int
    number: int
    lane: int


class Work(NamedTuple):
    """The computation of a pipeline.

    Attributes:
        forward: of a stage.
        around_backward: returns the context of every backward.
        weights: for schedules that split backwards: called after each one, returns a function that computes its
            deferred weight gradients.
        lane: called before each forward with a number that no other micro-batch in flight has, in any stage of this
            rank, and before its backward with the same number.
    """

    forward: Forward
    around_backward: Callable[[], AbstractContextManager[Any]] = nullcontext
    weights: Callable[[], Callable[[], None]] = lambda: _nothing
    lane: Callable[[int], None] = lambda number: None


class Pipeline:
    """Runs the micro-batches of a step through the stages of all ranks.

    Args:
        schedule: one of `SCHEDULES`.
        group: the ranks of this pipeline, in order.
        pairs: runs the forward and the backward of a pair at the same time
            (`carpool.ride.forward_backward.ForwardBesideBackward.run`), for schedules with pairs. Default: one after
            the other.

    Attributes:
        stages: the numbers of this rank's stages.
        order: the actions of this rank in the last step; (forward, backward) of those that ran at the same time.
    """

    def __init__(
        self,
        schedule: str,
        group: dist.ProcessGroup,
        stages: int,
        work: Work,
        device: torch.device,
        pairs: Pairs | None = None,
    ) -> None:
        self.schedule, self.group, self.number = schedule, group, stages
        self.work, self.device, self.pairs = work, device, pairs
        self.order: list[tuple[Action, ...]] = []
        self._in_pair, self._backward_action = False, Action("B", 0, 0, 0)
        assert pairs is None or schedule in PAIRED, f"{schedule} has no pairs"
        placed = stages_of(schedule, dist.get_world_size(group))
        self.rank_of = {stage: rank for rank, own in enumerate(placed) for stage in own}
        assert len(self.rank_of) == stages, f"{schedule} has {len(self.rank_of)} stages, not {stages}"
        self.stages = placed[dist.get_rank(group)]
        self._modules = [_StageModule(stage, self._forward) for stage in self.stages]
        # The lane of each (stage, micro-batch) in flight.
        self._lanes: dict[tuple[int, int], int] = {}
        self._made: dict[Any, Any] = {}

    def lanes(self, micro_batches: int) -> int:
        """An upper bound of the number of lanes, on any rank."""
        # In GPipe all micro-batches are in flight at once.
        if self.schedule == "GPipe":
            return 1
        ranks, paired = dist.get_world_size(self.group), self.pairs is not None
        return math.ceil(in_flight(self.schedule, ranks, micro_batches, paired) * SCHEDULES[self.schedule].stages)

    def _lane_of(self, stage: int, number: int) -> int:
        """The lane of a micro-batch in flight, or a free one."""
        if (stage, number) not in self._lanes:
            taken = set(self._lanes.values())
            self._lanes[stage, number] = next((lane for lane in range(self._most_lanes) if lane not in taken), 0)
        return self._lanes[stage, number]

    def _forward(self, stage: int, number: int, received: Tensors) -> Tensors:
        lane = self._lane_of(stage, number)
        self._note(Action("F", stage, number, lane))
        self.work.lane(lane)
        return self.work.forward(stage, number, received)

    def _note(self, action: Action) -> None:
        if not self._in_pair:
            self.order.append((action,))

    @contextmanager
    def _backward(self, stage: int, number: int) -> Iterator[None]:
        self._backward_action = Action("B", stage, number, self._lanes[stage, number])
        self._note(self._backward_action)
        self.work.lane(self._backward_action.lane)
        with self.work.around_backward():
            yield
        del self._lanes[stage, number]

    def _weights(self) -> Callable[[], None]:
        """A function that computes the deferred weight gradients of the last backward."""
        action, compute = self._backward_action._replace(kind="W"), self.work.weights()

        def weights() -> None:
            self.order.append((action,))
            compute()

        return weights

    def step(self, micro_batches: int, travels: Tensors) -> None:
        """Run all forwards and backwards of a step. Collective over the ranks of the pipeline.

        Args:
            travels: for each tensor that a stage sends to the next, a tensor of its size and dtype on "meta".
        """
        key = (micro_batches, *((one.shape, one.dtype) for one in travels))
        if key not in self._made:
            self._made = {key: self._make(micro_batches, travels)}
        self._lanes.clear()
        self.order.clear()
        self._most_lanes = self.lanes(micro_batches)
        for module in self._modules:
            module.number = 0
        # Empty targets, one row per micro-batch: the forward of the last stage computes the loss.
        self._made[key].step(target=torch.empty(micro_batches, 0), return_outputs=False)

    def _make(self, micro_batches: int, travels: Tensors) -> Any:
        """Construct PyTorch's schedule."""
        kind = SCHEDULES[self.schedule]
        check_micro_batches(self.schedule, dist.get_world_size(self.group), micro_batches)
        metas = tuple(one.detach().requires_grad_() for one in travels)
        loss = torch.empty((), device="meta", requires_grad=True)
        stages = [
            _Stage(
                partial(self._backward, module.stage),
                module,
                module.stage,
                self.number,
                self.device,
                input_args=metas if module.stage else (),
                output_args=loss if module.stage == self.number - 1 else metas,
                group=self.group,
                # Without this PyTorch would run each node of the graph twice, for inputs and for weights, rides
                # included.
                dw_builder=self._weights if kind.splits else None,
            )
            for module in self._modules
        ]
        # Losses are already divided by tokens: PyTorch must not divide gradients by micro-batches.
        whole = stages if kind.stages > 1 else stages[0]
        made = _MADE_BY[self.schedule](whole, micro_batches, loss_fn=_given, scale_grads=False)
        if self.pairs is not None:
            if not kind.splits:
                made._prepare_schedule_with_comms({rank: _paired(one) for rank, one in made.pipeline_order.items()})
            made.register_custom_function(OVERLAP_F_B, self._run_pair)
        return made

    def _run_pair(self, action: Any, context: Any) -> None:
        """PyTorch's action OVERLAP_F_B: runs its two actions at the same time instead of one after the other."""
        assert self.pairs is not None
        runtime, stages = context.schedule_ref, {one.stage_index: one for one in context.schedule_ref._stages}
        (ahead, _, number), (back, _, other) = ((one[0], one[1], one[2]) for one in action.sub_actions)
        if ahead and ahead - 1 not in stages:
            _wait_batch_p2p(runtime.fwd_recv_ops.pop((ahead, number)))
        if back + 1 < self.number and back + 1 not in stages:
            _wait_batch_p2p(runtime.bwd_recv_ops.pop((back, other)))
        loss = runtime._maybe_get_loss(stages[back], other)
        splits = SCHEDULES[self.schedule].splits
        runtime.backward_counter[back] += 1
        last = runtime.backward_counter[back] == runtime._n_microbatches
        lanes = self._lane_of(ahead, number), self._lane_of(back, other)

        def forward() -> Any:
            given = context.arg_mbs[number], context.kwarg_mbs[number]
            made = stages[ahead].forward_one_chunk(number, *given, save_forward_output=False)
            runtime._maybe_compute_loss(stages[ahead], made, context.target_mbs, number)
            return made

        def backward() -> None:
            stages[back].backward_one_chunk(
                other, loss=loss, full_backward=not splits, last_backward=last and not splits
            )

        self.order.append((Action("F", ahead, number, lanes[0]), Action("B", back, other, lanes[1])))
        self._in_pair = True
        try:
            made = self.pairs(forward, backward, lambda half: self.work.lane(lanes[half]))
        finally:
            self._in_pair = False
        if ahead + 1 in stages:
            stages[ahead + 1].set_local_fwd_input(made, number)
        if back - 1 in stages:
            stages[back - 1].set_local_bwd_input(stages[back].get_local_bwd_output(other), other)
        if splits:
            # Nobody waits for it.
            stages[back].backward_weight_one_chunk(other, last)

    @torch.no_grad()
    def forward_only(self, micro_batches: int, travels: Tensors) -> None:
        """Run the forwards of `micro_batches` micro-batches, one after the other. Collective over the pipeline."""
        sent: list[tuple[dist.Work | None, torch.Tensor]] = []
        for number in range(micro_batches):
            made: Tensors = ()
            for stage in self.stages:
                received = made
                if stage and self.rank_of[stage - 1] != self.rank_of[stage]:
                    received = tuple(torch.empty_like(one, device=self.device) for one in travels)
                    for tensor in received:
                        dist.recv(tensor, group=self.group, group_src=self.rank_of[stage - 1])
                made = self.work.forward(stage, number, received)
                if stage + 1 < self.number and self.rank_of[stage + 1] != self.rank_of[stage]:
                    for one in made:
                        tensor = one.contiguous()
                        work = dist.isend(tensor, group=self.group, group_dst=self.rank_of[stage + 1])
                        sent.append((work, tensor))
        for work, _ in sent:
            if work is not None:
                work.wait()


class _Stage(PipelineStage):
    """PyTorch's stage, with a context around its backwards."""

    def __init__(self, around: Callable[[int], AbstractContextManager[Any]], *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._around = around

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        with self._around(bwd_chunk_id):
            return super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)


class _StageModule(nn.Module):
    """The module of a stage, which counts micro-batches: each schedule runs the forwards of a stage in order."""

    def __init__(self, stage: int, compute: Forward) -> None:
        super().__init__()
        self.stage, self.compute, self.number = stage, compute, 0

    def forward(self, *received: torch.Tensor) -> Any:
        number, self.number = self.number, self.number + 1
        made = self.compute(self.stage, number, received)
        return made if len(made) > 1 else made[0]


def _paired(order: Sequence[_Action | None]) -> list[_Action | None]:
    """PyTorch's order of a rank, with the pairs of `in_pairs`."""
    pairs = in_pairs([one for one in order if one is not None], lambda one: one.computation_type.value)
    return [one[0] if len(one) == 1 else _Action(-1, OVERLAP_F_B, None, one) for one in pairs]


def _given(loss: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return loss


def _nothing() -> None: ...
