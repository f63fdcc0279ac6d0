"""The forwards and backwards of a pipeline's stages as CUDA graphs.

A rank's step is a list of actions, in the order of its schedule: forwards (F), backwards (B) and, where a schedule
splits them, weight gradients (W) of micro-batches in its stages. Each is a graph of its own. Between two graphs
PyTorch's runtime sends and receives, eagerly:

    rank 1 of 2, 1F1B     receive | F0 | send, receive | B0 | send, receive | F1 | ...
    graph F               copy of what was received -> layers -> what is sent
    graph B               gradient that was received -> backward of that F's layers -> gradient that is sent

The order is taken from an eager step, and graphs are recorded in it, without a word to other ranks. They share one pool
of memory, so a micro-batch takes memory from its F to its B, as in an eager step, and what it gives back the next one
gets. That is right because they are replayed in the same order.

What crosses the edge of a graph lies in tensors of the stage's own, one for each direction: what a stage is given and
makes, and the gradients of both. The F copies what it was given, for its B to find; what was made is copied for the
runtime, which may still be sending it when the next graph begins.

To the runtime a replayed forward is one node of autograd, whose backward replays the B.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch

from carpool.hf.seam.expert_rides import ExpertRides
from carpool.hf.step_graphs import Batch, BeforeBackward, StepGraphs
from carpool.kernels.capture import Recorder
from carpool.parallel.pipeline import Action, Tensors
from carpool.train.steps.pipeline_objective import PipelineObjective


class _Edge(NamedTuple):
    """The tensors at the edge of a stage's graphs, and the gradients of both; the first stage is given nothing, and of
    the last one only the loss is made."""

    given: Tensors
    made: Tensors
    dgiven: Tensors
    dmade: Tensors


class StageGraphs(StepGraphs):
    """As `StepGraphs`, of the stages of a rank, which `objective` computes eagerly."""

    def __init__(
        self,
        objective: PipelineObjective,
        layers: Sequence[ExpertRides],
        known: Callable[[str | None], None],
        required: bool = False,
        recorder: Callable[[], Recorder] = Recorder,
    ) -> None:
        self.objective = objective
        self._anchor = torch.zeros((), requires_grad=True)
        super().__init__(
            objective.model, layers, objective.run_together, known, required, recorder=recorder, sums=objective.sums
        )

    def forget(self) -> None:
        super().forget()
        self._edges: dict[int, _Edge] = {}
        self._batches: list[Batch] = []
        self._actions: dict[tuple[str, int, int], Action] = {}
        self._last_backward: tuple[int, int] | None = None

    # -- recording ------------------------------------------------------------------------------------------------

    def _record(self, batches: Sequence[Batch], before_backward: BeforeBackward | None) -> None:
        objective, recorder = self.objective, self.recorder()
        self._batches = [{name: value.clone() for name, value in batch.items()} for batch in batches]
        travels = objective.travels(batches[0])
        self._edges = {stage: self._edge(stage, travels) for stage in objective.pipeline.stages}
        flying: dict[tuple[int, int], tuple[Tensors, Tensors]] = {}
        owed: dict[tuple[int, int], Callable[[], None]] = {}
        order = objective.pipeline.order
        with objective.split or nullcontext():
            for number, action in enumerate(order):

                def work(action: Action = action, first: bool = number == 0) -> None:
                    if first:
                        self._restart_arenas()
                        objective.begin(self._batches, self._factor, self._sums)
                    self._do(action, flying, owed)

                self._record_one(action, recorder, work)
            if (kept := objective.kept) is not None:

                def end() -> None:
                    objective.end()
                    kept.drain()

                self._record_one("end", recorder, end)
        self._restart_arenas()
        self._actions = {(one.kind, one.stage, one.number): one for one in order}

    def _edge(self, stage: int, travels: Tensors) -> _Edge:
        device, last = self._sums.device, stage == self.objective.pipeline.number - 1
        loss = torch.empty((), dtype=torch.float32, device="meta")

        def static(metas: Tensors) -> Tensors:
            return tuple(torch.zeros_like(one, device=device) for one in metas)

        given, made = travels if stage else (), (loss,) if last else travels
        return _Edge(static(given), static(made), static(given), static(made))

    def _do(
        self,
        action: Action,
        flying: dict[tuple[int, int], tuple[Tensors, Tensors]],
        owed: dict[tuple[int, int], Callable[[], None]],
    ) -> None:
        """One action, from and to the tensors at the edge. `flying`: what forwards were given and have made, whose
        backwards are to come; `owed`: deferred weight gradients."""
        objective, key, edge = self.objective, (action.stage, action.number), self._edges[action.stage]
        objective.use_lane(action.lane)
        if action.kind == "W":
            owed.pop(key)()
            return
        if action.kind == "F":
            given = tuple(one.clone().requires_grad_() for one in edge.given)
            made = objective.compute(*key, given)
            flying[key] = given, made
            for static, one in zip(edge.made, made, strict=True):
                static.copy_(one.detach())
            return
        given, made = flying.pop(key)
        with objective.around_backward():
            pairs = [pair for pair in zip(made, edge.dmade, strict=True) if pair[0].requires_grad]
            torch.autograd.backward([one for one, _ in pairs], [gradient for _, gradient in pairs])
        for static, one in zip(edge.dgiven, given, strict=True):
            if one.grad is None:
                static.zero_()
            else:
                static.copy_(one.grad)
        if objective.split is not None:
            owed[key] = objective.split.weights()

    # -- replaying ------------------------------------------------------------------------------------------------

    def _replay(self, batches: Sequence[Batch]) -> None:
        for static, batch in zip(self._batches, batches, strict=True):
            for name, value in batch.items():
                static[name].copy_(value)
        with self._in_place_of_computation():
            self.objective.pipeline.step(len(batches), self.objective.travels(batches[0]))
        if "end" in self._replays:
            self._repeat("end")

    @contextmanager
    def _in_place_of_computation(self) -> Iterator[None]:
        """Inside, the pipeline's stages are graphs."""
        pipeline = self.objective.pipeline
        before = pipeline.work
        pipeline.work = before._replace(
            forward=self._forward, around_backward=nullcontext, weights=self._weights, lane=lambda number: None
        )
        try:
            yield
        finally:
            pipeline.work = before

    def _forward(self, stage: int, number: int, received: Tensors) -> Tensors:
        made: Tensors = _Stage.apply(self, stage, number, self._anchor, *received)
        return made

    def replay_forward(self, stage: int, number: int, received: Tensors) -> Tensors:
        """What a stage makes of what it received."""
        edge = self._edges[stage]
        _copy(edge.given, received)
        self._repeat(self._actions["F", stage, number])
        return tuple(one.clone() for one in edge.made)

    def replay_backward(self, stage: int, number: int, gradients: Tensors) -> Tensors:
        """The gradients of what it received, by those of what it made."""
        edge = self._edges[stage]
        _copy(edge.dmade, gradients)
        self._repeat(self._actions["B", stage, number])
        self._last_backward = stage, number
        return tuple(one.clone() for one in edge.dgiven)

    def _weights(self) -> Callable[[], None]:
        assert self._last_backward is not None
        action = self._actions["W", *self._last_backward]
        return lambda: self._repeat(action)


class _Stage(torch.autograd.Function):
    """A forward that is a graph, and its backward that is another.

    (The anchor requires a gradient, where nothing is received that does.)"""

    @staticmethod
    def forward(
        ctx: Any, graphs: StageGraphs, stage: int, number: int, anchor: torch.Tensor, *received: torch.Tensor
    ) -> Tensors:
        ctx.graphs, ctx.stage, ctx.number = graphs, stage, number
        return graphs.replay_forward(stage, number, received)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        return None, None, None, None, *ctx.graphs.replay_backward(ctx.stage, ctx.number, gradients)


def _copy(static: Tensors, tensors: Tensors) -> None:
    for one, other in zip(static, tensors, strict=True):
        one.copy_(other)
