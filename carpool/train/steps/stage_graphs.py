"""The forwards and backwards of a pipeline's stages as CUDA graphs.

A rank's step is a list of actions, in the order of its schedule: forwards (F), backwards (B) and, where a schedule
splits them, weight gradients (W) of micro-batches in its stages. Each is a graph of its own. Between two graphs
PyTorch's runtime sends and receives, eagerly:

    rank 1 of 2, 1F1B     receive | F0 | send, receive | B0 | send, receive | F1 | ...
    graph F               copy of what was received -> layers -> what is sent
    graph B               gradient that was received -> backward of that F's layers -> gradient that is sent

A pair of a forward and a backward that run at the same time (`carpool.ride.forward_backward`) is one graph. Two threads
record it; its replay has none: the forward says what it was given, and the backward launches both.

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
from functools import partial
from typing import Any

import torch

from carpool.hf.seam.expert_rides import ExpertRides
from carpool.hf.step_graphs import Batch, BeforeBackward, Edge, NodeGraphs, copy
from carpool.kernels.capture import Recorder
from carpool.parallel.pipeline import Action, Tensors
from carpool.train.steps.pipeline_objective import PipelineObjective

# By stage and micro-batch: what forwards were given and have made, whose backwards are to come.
Flying = dict[tuple[int, int], tuple[Tensors, Tensors]]
Actions = tuple[Action, ...]


class StageGraphs(NodeGraphs):
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
        super().__init__(
            objective.model, layers, objective.run_together, known, required, recorder=recorder, sums=objective.sums
        )

    def forget(self) -> None:
        super().forget()
        self._edges: dict[int, Edge] = {}
        self._batches: list[Batch] = []
        # Whose graph has an action; a pair has one.
        self._graph_of: dict[tuple[str, int, int], Actions] = {}
        self._last_backward: tuple[int, int] | None = None
        self._late: tuple[Tensors, Tensors] = (), ()

    # -- recording ------------------------------------------------------------------------------------------------

    def _record(self, batches: Sequence[Batch], before_backward: BeforeBackward | None) -> None:
        objective, recorder = self.objective, self.recorder()
        self._batches = [{name: value.clone() for name, value in batch.items()} for batch in batches]
        travels, stages = objective.travels(batches[0]), objective.pipeline.number
        loss = torch.empty((), dtype=torch.float32, device="meta")
        self._edges = {
            stage: Edge(self._sums.device, travels if stage else (), (loss,) if stage == stages - 1 else travels)
            for stage in objective.pipeline.stages
        }
        flying: Flying = {}
        deferred: dict[tuple[int, int], Callable[[], None]] = {}
        order = list(objective.pipeline.order)
        with objective.split or nullcontext():
            for number, actions in enumerate(order):

                def work(actions: Actions = actions, first: bool = number == 0) -> None:
                    if first:
                        self._restart_arenas()
                        objective.begin(self._batches, self._factor, self._sums)
                    first_way, *others = [partial(self._do, action, flying, deferred) for action in actions]
                    if not others:
                        first_way()
                        return
                    assert objective.beside is not None
                    objective.beside.run(first_way, others[0], lambda half: objective.use_lane(actions[half].lane))

                self._record_one(actions, recorder, work)
            if (kept := objective.kept) is not None:

                def end() -> None:
                    objective.end()
                    kept.drain()

                self._record_one("end", recorder, end)
        self._restart_arenas()
        self._graph_of = {(one.kind, one.stage, one.number): actions for actions in order for one in actions}

    def _do(self, action: Action, flying: Flying, deferred: dict[tuple[int, int], Callable[[], None]]) -> None:
        """One action, from and to the tensors at the edge. `deferred`: weight gradients that are to come."""
        objective, key, edge = self.objective, (action.stage, action.number), self._edges[action.stage]
        objective.use_lane(action.lane)
        if action.kind == "W":
            deferred.pop(key)()
        elif action.kind == "F":
            flying[key] = edge.forward(partial(objective.compute, *key))
        else:
            with objective.around_backward():
                edge.backward(*flying.pop(key), deferred=objective.split is not None)
            if objective.split is not None:
                deferred[key] = objective.split.weights()

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
        before = pipeline.work, pipeline.pairs
        pipeline.work = before[0]._replace(
            forward=lambda stage, number, received: self.node((stage, number), received),
            around_backward=nullcontext, weights=self._weights, lane=lambda number: None,
        )  # fmt: skip
        pipeline.pairs = before[1] and _one_after_the_other
        try:
            yield
        finally:
            pipeline.work, pipeline.pairs = before

    def replay_forward(self, key: tuple[int, int], received: Tensors) -> Tensors:
        edge, actions = self._edges[key[0]], self._graph_of["F", *key]
        copy(edge.given, received)
        assert edge.made is not None
        if len(actions) == 1:
            self._repeat(actions)
            return tuple(one.clone() for one in edge.made)
        # Of a pair: the backward, which comes next, replays the graph of both, and writes what this returns.
        self._late = tuple(torch.empty_like(one) for one in edge.made), edge.made
        return self._late[0]

    def replay_backward(self, key: tuple[int, int], gradients: Sequence[torch.Tensor | None]) -> Tensors:
        edge = self._edges[key[0]]
        copy(edge.dmade, gradients)
        self._repeat(self._graph_of["B", *key])
        self._last_backward = key
        (late, made), self._late = self._late, ((), ())
        copy([one.detach() for one in late], made)
        return tuple(one.clone() for one in edge.dgiven)

    def _weights(self) -> Callable[[], None]:
        assert self._last_backward is not None
        return partial(self._repeat, self._graph_of["W", *self._last_backward])


def _one_after_the_other(forward: Callable[[], Any], backward: Callable[[], None], _: Callable[[int], None]) -> Any:
    """In the place of what runs a pair: the host only says what both are given."""
    made = forward()
    backward()
    return made
