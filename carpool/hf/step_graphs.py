"""The forward and backward of a micro-batch as a CUDA graph: the host launches one thing instead of ten thousand.

A step of Qwen3-30B-A3B has 48 layers of some 200 kernels, each of which costs the host about 5 us to launch, and more
in autograd. A captured graph is launched at once:

    steps 1, 2       eager: kernels are compiled, buffers and counters made
    step 3           captured, then replayed
    further steps    batch into the graph's own tensors, replay, gradients are where they were before

A graph is all of a micro-batch: embedding, layers with their rides, loss, backward, reductions of gradients. With
several micro-batches in a step there are up to three graphs, because the first one makes the gradients to which the
others add, and the last one reduces them. All share one pool of memory. Where two micro-batches run at a time
(`carpool.ride.two_batch`), a graph is of both; an odd last one has its own. Whatever a layer counts on the device
it counts in a replay too; what it counts on the host is counted once more by hand (`LayerStats.add`). A pipeline has a
graph for each forward and backward of a stage (`carpool.train.steps.stage_graphs`), and the body of a model under
transformers' Trainer one for each of both (`fast_steps.py`): these are `NodeGraphs`.

What a graph holds may not move: if buffers grow, the step is repeated eagerly and captured anew. Steps
that a profiler watches run eagerly, because a graph has no names of layers, unless whoever watches needs none
(`replays_watched`).
"""

from __future__ import annotations

import gc
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from carpool.activations.offload import Offloader
from carpool.hf.decoder_layers import offloaders
from carpool.hf.documents import one_row_only
from carpool.hf.seam.expert_rides import ExpertRides, buffers_of_rides, restart_arenas, why_experts_wait
from carpool.kernels.capture import Recorder
from carpool.metrics.counters import HostCounts, LayerStats, watched
from carpool.optim.in_backward import ConsumedGradients
from carpool.parallel import fsdp
from carpool.parallel.replicated import replicated
from carpool.planner.candidate import FSDP, LENGTHS, PLANS_OF, of_transport

Batch = dict[str, torch.Tensor]
Tensors = tuple[torch.Tensor, ...]
# Is called with a loss between forward and backward.
BeforeBackward = Callable[[torch.Tensor], None]
# As `Objective.run_together`.
Together = Callable[[Sequence[Batch], torch.Tensor, int, torch.Tensor, bool, bool, BeforeBackward | None], None]
# Of a graph: whether its micro-batches are the first of a step, whether they are the last, and how many they are.
Place = tuple[bool, bool, int]
# Steps before the capture, of which the first may be repeated with larger buffers.
EAGER_STEPS = 2


def why_model_waits(model: nn.Module, layers: Sequence[ExpertRides], lengths: bool = False) -> str | None:
    """Why forward and backward of a model on GPUs are not captured, by the model alone; None: they can be. `lengths`:
    its forward is given where documents end."""
    transport = layers[0].transport
    if not getattr(transport, "graphable", False):
        return of_transport(None if transport is None else transport.name)
    if any(own.compute is None for own in layers):
        return "experts run the model's own forward, which may wait for the host"
    if reason := why_experts_wait(layers[0]):
        return reason
    if fsdp.states(model):
        return FSDP
    if transport is not None and layers[0].reads_plans:
        return PLANS_OF.format(transport.name)
    return LENGTHS if one_row_only(model) and not lengths else None


class Replay(NamedTuple):
    """A recorded piece of work: what does it again, and what is counted on the host for it, where anything is. A stage
    of a pipeline has some hundred pieces a step, most of which concern few of a rank's layers."""

    again: Callable[[], None]
    counted: list[tuple[LayerStats, HostCounts]]


class StepGraphs:
    """The graphs of one run. All ranks construct and call it alike.

    Args:
        model: may be captured (`why_no_graphs`);  layers: its rides.
        compute: micro-batches of a step, eagerly.
        known: gets, after each capture, why steps are not captured; None: they are.
        required: raise if the capture fails; else go on eagerly.
        consumed: what uses gradients in the backward.
        recorder: makes what records the graphs of a step.
        at_once: micro-batches that `compute` takes together; fewer are left at the end of a step.

    Attributes:
        bytes: that the graphs hold for what layers keep; the allocator counts them as reserved, not as allocated.
        replays_watched: also replay where a profiler watches.
    """

    replays_watched = False

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[ExpertRides],
        compute: Together,
        known: Callable[[str | None], None],
        required: bool = False,
        consumed: ConsumedGradients | None = None,
        recorder: Callable[[], Recorder] = Recorder,
        at_once: int = 1,
        sums: int = 2,
    ) -> None:
        self.model, self.layers, self.compute, self.known, self.required = model, layers, compute, known, required
        self.consumed, self.recorder, self.at_once = consumed, recorder, at_once
        device = next(model.parameters()).device
        self._factor = torch.zeros((), dtype=torch.float64, device=device)
        self._sums = torch.zeros(sums, dtype=torch.float64, device=device)
        self._failed = False
        self._offloaders: list[Offloader] = []
        self.forget()

    def forget(self) -> None:
        """Give the graphs and their memory back: what they hold is about to move. New ones come after two steps."""
        self._eager = 0
        self._shapes: tuple[object, ...] = ()
        self._captured = False
        self._replays: dict[Any, Replay] = {}
        self._gradients: list[tuple[nn.Parameter, torch.Tensor]] = []
        self.bytes = 0

    def try_again(self) -> None:
        """As `forget`, although a capture may have failed: what is to be captured is another step."""
        self.forget()
        self._failed = False

    def run(
        self, batches: Sequence[Batch], factor: float, before_backward: BeforeBackward | None = None
    ) -> torch.Tensor | None:
        """Compute the micro-batches of a step by graphs.

        Args:
            factor: of the loss of each micro-batch.
            before_backward: is captured, too, so it must not wait for the host.

        Returns:
            (sums,) float64 on the device: sums of losses, as `compute` adds them, valid until the next call. None: this
            step is to be computed eagerly.

        Raises:
            RuntimeError: the capture has failed, and graphs are required.
        """
        if self._failed:
            return None
        if watched() and not self.replays_watched:
            # Both would need memory for what layers keep.
            self.forget()
            return None
        shapes = tuple(tuple((name, tuple(x.shape), x.dtype) for name, x in one.items()) for one in batches)
        if any(shape != shapes[number % self.at_once] for number, shape in enumerate(shapes)):
            return None
        if shapes != self._shapes:
            self.forget()
            self._shapes = shapes
        if not self._captured:
            self._eager += 1
            if self._eager <= EAGER_STEPS or not self._capture(batches, before_backward):
                return None
        self._join_copies()
        if self.consumed is not None:
            self.consumed.prepare()
        self._factor.fill_(factor)
        self._sums.zero_()
        self._replay(batches)
        self._restart_arenas()
        if (kept := replicated(self.model)) is not None:
            kept.written()
        if self.consumed is not None:
            self.consumed.replayed()
        for parameter, gradient in self._gradients:
            if parameter.grad is None:
                parameter.grad = gradient
        return self._sums

    def _replay(self, batches: Sequence[Batch]) -> None:
        """Compute a step by what `_record` has recorded."""
        for place, together in self._places(batches):
            for static, batch in zip(self._inputs, together, strict=False):
                for name, value in batch.items():
                    static[name].copy_(value)
            self._repeat(place)

    def _places(self, batches: Sequence[Batch]) -> Iterator[tuple[Place, Sequence[Batch]]]:
        """The micro-batches of a step that are computed together, and which graph's they are."""
        for first in range(0, len(batches), self.at_once):
            together = batches[first : first + self.at_once]
            yield (first == 0, first + len(together) == len(batches), len(together)), together

    def _repeat(self, key: Any) -> None:
        """Replay a graph, and count on the host what it has counted there."""
        replay, counted = self._replays[key]
        replay()
        for stats, counts in counted:
            stats.add(counts)

    def _capture(self, batches: Sequence[Batch], before_backward: BeforeBackward | None) -> bool:
        """Whether all ranks have captured all graphs of a step."""
        problem = None
        self._offloaders = offloaders(self.model)
        torch.cuda.empty_cache()
        reserved, allocated = _memory(self._sums.device)
        try:
            if self.consumed is None:
                self._record(batches, before_backward)
            else:
                self.consumed.prepare()
                with self.consumed.record():
                    self._record(batches, before_backward)
                self.consumed.recorded()
        except Exception as error:
            problem = error
        failed = torch.tensor([float(problem is not None)], device=self._sums.device)
        if dist.is_initialized():
            dist.all_reduce(failed)
        if failed.item():
            self._abandon(problem)
            return False
        now_reserved, now_allocated = _memory(self._sums.device)
        # The gradients that graphs leave behind are allocated.
        self.bytes = now_reserved - reserved - max(0, now_allocated - allocated)
        self._gradients = [(p, p.grad) for p in self.model.parameters() if p.grad is not None]
        for parameter, _ in self._gradients:
            parameter.grad = None
        self._captured = True
        self.known(None)
        return True

    def _record(self, batches: Sequence[Batch], before_backward: BeforeBackward | None) -> None:
        """Record all graphs of a step."""
        self._inputs = [{name: value.clone() for name, value in one.items()} for one in batches[: self.at_once]]
        recorder, kept = self.recorder(), replicated(self.model)
        for place in dict.fromkeys(place for place, _ in self._places(batches)):

            def work(place: Place = place) -> None:
                first, last, number = place
                self._restart_arenas()
                if first and kept is not None:
                    kept.expire()
                inputs = self._inputs[:number]
                self.compute(inputs, self._factor, len(batches), self._sums, first, last, before_backward)
                if kept is not None:
                    kept.drain()
                if self.consumed is not None:
                    self.consumed.drain()
                self._join_copies()

            self._join_copies()
            self._record_one(place, recorder, work)
            self._restart_arenas()

    def _record_one(self, key: Any, recorder: Recorder, work: Callable[[], None]) -> None:
        before = [own.stats.exchange(HostCounts()) for own in self.layers]
        counted: list[tuple[LayerStats, HostCounts]] = []
        try:
            replay = recorder.record(work)
        finally:
            counted += [(own.stats, own.stats.exchange(one)) for own, one in zip(self.layers, before, strict=True)]
        self._replays[key] = Replay(replay, [one for one in counted if one[1] != HostCounts()])

    def _join_copies(self) -> None:
        """Wait, on the device, for copies to host memory and from there: a graph and what is around it share their
        memory."""
        for offloader in self._offloaders:
            offloader.join()

    def _restart_arenas(self) -> None:
        restart_arenas(self.layers)

    def _abandon(self, problem: BaseException | None) -> None:
        """Some rank's capture has failed: what was begun on this one is void, and steps stay eager."""
        self._failed = True
        self.forget()
        self.model.zero_grad(set_to_none=True)
        if (kept := replicated(self.model)) is not None:
            kept.abandon()
        if self.consumed is not None:
            self.consumed.abandon()
        for offloader in self._offloaders:
            offloader.abandon()
        for buffers in buffers_of_rides(self.layers):
            buffers.abandon()
        why = "another rank could not" if problem is None else f"{type(problem).__name__}: {problem}".split("\n")[0]
        if self.required:
            raise RuntimeError(
                f"a step could not be captured as a CUDA graph ({why}); set training.cuda_graphs=auto"
            ) from problem
        # What failed holds all that its layers have kept.
        while problem is not None:
            traceback.clear_frames(problem.__traceback__)
            problem = problem.__context__
        gc.collect()
        self._restart_arenas()
        self.known(why)


class Edge:
    """The tensors at the edge of a forward's graph and of its backward's, which share them: what the forward is given
    and makes, and the gradients of both.

    Args:
        given, made: of these sizes and dtypes, maybe on the device "meta". `made` None: as the first forward makes it.
    """

    def __init__(self, device: torch.device, given: Tensors = (), made: Tensors | None = None) -> None:
        self.device = device
        self.given, self.dgiven = self._zeros(given), self._zeros(given)
        self.made, self._dmade = (
            None if made is None else self._zeros(made),
            None if made is None else self._zeros(made),
        )

    def _zeros(self, like: Tensors) -> Tensors:
        return tuple(torch.zeros_like(one, device=self.device) for one in like)

    @property
    def dmade(self) -> Tensors:
        """Made outside of a capture, which would zero it in each replay."""
        if self._dmade is None:
            assert self.made is not None, "a backward before its forward"
            self._dmade = self._zeros(self.made)
        return self._dmade

    def forward(self, compute: Callable[[Tensors], Tensors]) -> tuple[Tensors, Tensors]:
        """To be recorded. What was given is copied for the backward to find. Returns what `backward` takes."""
        given = tuple(one.clone().requires_grad_() for one in self.given)
        made = compute(given)
        if self.made is None:
            self.made = tuple(one.detach().clone() for one in made)
        else:
            copy(self.made, [one.detach() for one in made])
        return given, made

    def backward(self, given: Tensors, made: Tensors, deferred: bool = False) -> None:
        """To be recorded. `deferred`: gradients of weights, computed later, may read what has come; so it is copied."""
        dmade = tuple(one.clone() for one in self.dmade) if deferred else self.dmade
        pairs = [pair for pair in zip(made, dmade, strict=True) if pair[0].requires_grad]
        with torch.autocast(self.device.type, enabled=False):
            torch.autograd.backward([one for one, _ in pairs], [gradient for _, gradient in pairs])
        copy(self.dgiven, [one.grad for one in given])


def copy(static: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor | None]) -> None:
    """Into tensors of a graph; None is 0."""
    for one, other in zip(static, tensors, strict=True):
        one.zero_() if other is None else one.copy_(other)


class NodeGraphs(StepGraphs):
    """Graphs that autograd sees as nodes: a forward, whose backward replays another graph. What is around them is
    eager."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # It requires a gradient, where nothing is received that does.
        self._anchor = torch.zeros((), device=self._sums.device, requires_grad=True)

    def node(self, key: Any, received: Tensors = ()) -> Tensors:
        """Replay a forward. Its outputs have a node whose backward replays the other graph."""
        made: Tensors = _Node.apply(self, key, self._anchor, *received)
        return made

    def replay_forward(self, key: Any, received: Tensors) -> Tensors:
        """What the forward makes of what it received."""
        raise NotImplementedError

    def replay_backward(self, key: Any, gradients: Sequence[torch.Tensor | None]) -> Tensors:
        """The gradients of what the forward received, by those of what it made."""
        raise NotImplementedError


class _Node(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, graphs: NodeGraphs, key: Any, _: torch.Tensor, *received: torch.Tensor) -> Tensors:
        ctx.graphs, ctx.key = graphs, key
        ctx.set_materialize_grads(False)
        made = graphs.replay_forward(key, received)
        ctx.mark_non_differentiable(*(one for one in made if not one.is_floating_point()))
        return made

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        return None, None, None, *ctx.graphs.replay_backward(ctx.key, gradients)


def _memory(device: torch.device) -> tuple[int, int]:
    """Bytes that PyTorch's allocator of GPU memory holds, and those of them that tensors have."""
    if device.type != "cuda":
        return 0, 0
    return torch.cuda.memory_reserved(device), torch.cuda.memory_allocated(device)
