"""CUDA graphs of the forwards and backwards of pipeline stages.

A rank's step is a list of actions, in the order of its schedule: forwards (F), backwards (B) and, where a schedule
splits them, weight gradients (W) of micro-batches in its stages. Each action is one graph. Between two graphs PyTorch's
runtime sends and receives eagerly:

    rank 1 of 2, 1F1B     receive | F0 | send, receive | B0 | send, receive | F1 | ...
    graph F               copy of the received activations -> layers -> activations to send
    graph B               received gradient -> backward of the layers of its F -> gradient to send

A forward and a backward that run at the same time (`carpool.ride.forward_backward`) are one graph. Two threads record
it. Its replay needs one: the forward stores its inputs, and the backward launches the graph.

The order comes from an eager step. Graphs are recorded in that order, without communication with other ranks. They
share one memory pool, so a micro-batch holds memory from its F to its B, as in an eager step, and later graphs reuse
it. That is correct because replays have the same order.

Each stage has static tensors for the inputs and outputs of its graphs, and for the gradients of both. The F copies its
inputs for its B. Its outputs are copied for the runtime, which may still send them when the next graph begins.

In autograd a replayed forward is one node, whose backward replays the B.
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

# For each stage and micro-batch: inputs and outputs of the forward, until its backward runs.
InFlight = dict[tuple[int, int], tuple[Tensors, Tensors]]
Actions = tuple[Action, ...]


class StageGraphs(NodeGraphs):
    """`StepGraphs` of the pipeline stages of a rank, which `objective` computes in eager steps."""

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
        # For each action, the actions of its graph: a pair shares one graph.
        self._graph_of: dict[tuple[str, int, int], Actions] = {}
        self._last_backward: tuple[int, int] | None = None
        self._pair_outputs: tuple[Tensors, Tensors] = (), ()

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
        in_flight: InFlight = {}
        deferred: dict[tuple[int, int], Callable[[], None]] = {}
        order = list(objective.pipeline.order)
        with objective.split or nullcontext():
            for index, actions in enumerate(order):

                def work(actions: Actions = actions, first: bool = index == 0) -> None:
                    if first:
                        self._restart_arenas()
                        objective.begin(self._batches, self._factor, self._sums)
                    run, *overlapped = [partial(self._run, action, in_flight, deferred) for action in actions]
                    if not overlapped:
                        run()
                        return
                    assert objective.beside is not None
                    objective.beside.run(run, overlapped[0], lambda half: objective.use_lane(actions[half].lane))

                self._record_one(actions, recorder, work)
            if (replicas := objective.kept) is not None:

                def end() -> None:
                    objective.end()
                    replicas.drain()

                self._record_one("end", recorder, end)
        self._restart_arenas()
        self._graph_of = {(each.kind, each.stage, each.number): actions for actions in order for each in actions}

    def _run(self, action: Action, in_flight: InFlight, deferred: dict[tuple[int, int], Callable[[], None]]) -> None:
        """Run one action on the static tensors of its stage. `deferred`: weight gradients to compute later."""
        objective, key, edge = self.objective, (action.stage, action.number), self._edges[action.stage]
        objective.use_lane(action.lane)
        if action.kind == "W":
            deferred.pop(key)()
        elif action.kind == "F":
            in_flight[key] = edge.forward(partial(objective.compute, *key))
        else:
            with objective.around_backward():
                edge.backward(*in_flight.pop(key), deferred=objective.split is not None)
            if objective.split is not None:
                deferred[key] = objective.split.weights()

    # -- replaying ------------------------------------------------------------------------------------------------

    def _replay(self, batches: Sequence[Batch]) -> None:
        for static, batch in zip(self._batches, batches, strict=True):
            for name, value in batch.items():
                static[name].copy_(value)
        with self._stages_replay():
            self.objective.pipeline.step(len(batches), self.objective.travels(batches[0]))
        if "end" in self._replays:
            self._repeat("end")

    @contextmanager
    def _stages_replay(self) -> Iterator[None]:
        """Inside, the pipeline's stages replay graphs."""
        pipeline = self.objective.pipeline
        before = pipeline.work, pipeline.pairs
        pipeline.work = before[0]._replace(
            forward=lambda stage, number, received: self.node((stage, number), received),
            around_backward=nullcontext, weights=self._weights, lane=lambda number: None,
        )  # fmt: skip
        pipeline.pairs = before[1] and _run_in_order
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
            return tuple(output.clone() for output in edge.made)
        # The backward of the pair, which runs next, replays the graph of both and writes these outputs.
        self._pair_outputs = tuple(torch.empty_like(output) for output in edge.made), edge.made
        return self._pair_outputs[0]

    def replay_backward(self, key: tuple[int, int], gradients: Sequence[torch.Tensor | None]) -> Tensors:
        edge = self._edges[key[0]]
        copy(edge.dmade, gradients)
        self._repeat(self._graph_of["B", *key])
        self._last_backward = key
        (outputs, made), self._pair_outputs = self._pair_outputs, ((), ())
        copy([output.detach() for output in outputs], made)
        return tuple(gradient.clone() for gradient in edge.dgiven)

    def _weights(self) -> Callable[[], None]:
        assert self._last_backward is not None
        return partial(self._repeat, self._graph_of["W", *self._last_backward])


def _run_in_order(forward: Callable[[], Any], backward: Callable[[], None], _: Callable[[int], None]) -> Any:
    """Replaces the threads of a pair: in a replay, the host stores the inputs of both and launches one graph."""
    made = forward()
    backward()
    return made
