"""CUDA graphs of micro-batches: the host launches one graph instead of ten thousand kernels.

A step of Qwen3-30B-A3B has 48 layers of some 200 kernels. Each launch costs the host about 5 us, and more in autograd.
One call launches a captured graph:

    steps 1, 2       run eagerly: kernels are compiled, buffers and counters allocated
    step 3           is captured, then replayed
    later steps      copy the batch into static tensors and replay; gradients appear in the same tensors as before

A graph contains a whole micro-batch: embedding, layers with their rides, loss, backward, reductions of gradients. A
step of several micro-batches has up to three graphs, because the first one creates the gradients, the others add to
them, and the last one reduces them. All share one memory pool. Where two micro-batches run at a time
(`carpool.ride.two_batch`), a graph contains both, and an odd last one has its own. Counters on the device count in a
replay as well; `LayerStats.add` repeats what the host counted in the capture. A pipeline has a graph for each forward
and backward of a stage (`carpool.train.steps.stage_graphs`). The decoder of a model under Transformers' Trainer has one
for its forward and one for its backward (`fast_steps.py`). Both are `NodeGraphs`.

A graph's buffers may not move: if they grow, the step is repeated eagerly and captured anew. Profiled steps run
eagerly, because a graph has no names of layers, unless the profiler needs none (`replays_watched`).
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
# A callback that receives the loss between forward and backward.
BeforeBackward = Callable[[torch.Tensor], None]
# The signature of `Objective.run_together`.
Together = Callable[[Sequence[Batch], torch.Tensor, int, torch.Tensor, bool, bool, BeforeBackward | None], None]
# The key of a graph: whether it has the first micro-batches of a step, whether the last ones, and how many.
Place = tuple[bool, bool, int]
# Steps before the capture, of which the first may be repeated with larger buffers.
EAGER_STEPS = 2


def why_model_waits(model: nn.Module, layers: Sequence[ExpertRides], lengths: bool = False) -> str | None:
    """Why a model prevents the capture of its forward and backward on GPUs; None if it does not. `lengths`: its forward
    receives the ends of documents."""
    transport = layers[0].transport
    if not getattr(transport, "graphable", False):
        return of_transport(None if transport is None else transport.name)
    if any(layer.compute is None for layer in layers):
        return "experts run the model's own forward, which may wait for the host"
    if reason := why_experts_wait(layers[0]):
        return reason
    if fsdp.states(model):
        return FSDP
    if transport is not None and layers[0].reads_plans:
        return PLANS_OF.format(transport.name)
    return LENGTHS if one_row_only(model) and not lengths else None


class Replay(NamedTuple):
    """A recorded graph: the function that replays it, and the host's counts for layers that have some. A pipeline
    stage has some hundred graphs in a step, most of which contain few of a rank's layers."""

    replay: Callable[[], None]
    counted: list[tuple[LayerStats, HostCounts]]


class StepGraphs:
    """The graphs of one run. All ranks construct and call it alike.

    Args:
        model: a model that can be captured (`why_no_graphs`);  layers: its rides.
        compute: computes micro-batches of a step eagerly.
        known: receives after each capture the reason why it failed, or None.
        required: raise if the capture fails; otherwise continue eagerly.
        consumed: the optimizer in backward, which uses gradients there.
        recorder: constructs the recorder of a step's graphs.
        at_once: number of micro-batches that `compute` takes together; the last ones of a step may be fewer.

    Attributes:
        bytes: memory of the graphs for saved activations; the allocator counts it as reserved, not as allocated.
        replays_watched: replay profiled steps as well.
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
        """Release the graphs and their memory before their buffers move. Two eager steps precede the next capture."""
        self._eager = 0
        self._shapes: tuple[object, ...] = ()
        self._captured = False
        self._replays: dict[Any, Replay] = {}
        self._gradients: list[tuple[nn.Parameter, torch.Tensor]] = []
        self.bytes = 0

    def try_again(self) -> None:
        """Like `forget`, but also allow a new capture after a failed one, because the step has changed."""
        self.forget()
        self._failed = False

    def run(
        self, batches: Sequence[Batch], factor: float, before_backward: BeforeBackward | None = None
    ) -> torch.Tensor | None:
        """Compute the micro-batches of a step by graphs.

        Args:
            factor: the factor of each micro-batch's loss.
            before_backward: is captured as well, so it must not wait for the host.

        Returns:
            (sums,) float64 on the device: the sums of losses that `compute` adds, valid until the next call. None means
            that the caller computes this step eagerly.

        Raises:
            RuntimeError: the capture failed, and graphs are required.
        """
        if self._failed:
            return None
        if watched() and not self.replays_watched:
            # Graphs and an eager step would both hold saved activations.
            self.forget()
            return None
        shapes = tuple(tuple((name, tuple(x.shape), x.dtype) for name, x in batch.items()) for batch in batches)
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
        if (replicas := replicated(self.model)) is not None:
            replicas.written()
        if self.consumed is not None:
            self.consumed.replayed()
        for parameter, gradient in self._gradients:
            if parameter.grad is None:
                parameter.grad = gradient
        return self._sums

    def _replay(self, batches: Sequence[Batch]) -> None:
        """Replay the graphs of a step."""
        for place, together in self._places(batches):
            for static, batch in zip(self._inputs, together, strict=False):
                for name, value in batch.items():
                    static[name].copy_(value)
            self._repeat(place)

    def _places(self, batches: Sequence[Batch]) -> Iterator[tuple[Place, Sequence[Batch]]]:
        """Yields the micro-batches that are computed together, with the key of their graph."""
        for first in range(0, len(batches), self.at_once):
            together = batches[first : first + self.at_once]
            yield (first == 0, first + len(together) == len(batches), len(together)), together

    def _repeat(self, key: Any) -> None:
        """Replay a graph, and repeat its counts on the host."""
        replay, counted = self._replays[key]
        replay()
        for stats, counts in counted:
            stats.add(counts)

    def _capture(self, batches: Sequence[Batch], before_backward: BeforeBackward | None) -> bool:
        """Capture all graphs of a step. Returns whether all ranks succeeded."""
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
        # The gradients outlive the graphs, and count as allocated.
        self.bytes = now_reserved - reserved - max(0, now_allocated - allocated)
        self._gradients = [(p, p.grad) for p in self.model.parameters() if p.grad is not None]
        for parameter, _ in self._gradients:
            parameter.grad = None
        self._captured = True
        self.known(None)
        return True

    def _record(self, batches: Sequence[Batch], before_backward: BeforeBackward | None) -> None:
        """Record all graphs of a step."""
        self._inputs = [{name: value.clone() for name, value in batch.items()} for batch in batches[: self.at_once]]
        recorder, replicas = self.recorder(), replicated(self.model)
        for place in dict.fromkeys(place for place, _ in self._places(batches)):

            def work(place: Place = place) -> None:
                first, last, number = place
                self._restart_arenas()
                if first and replicas is not None:
                    replicas.expire()
                inputs = self._inputs[:number]
                self.compute(inputs, self._factor, len(batches), self._sums, first, last, before_backward)
                if replicas is not None:
                    replicas.drain()
                if self.consumed is not None:
                    self.consumed.drain()
                self._join_copies()

            self._join_copies()
            self._record_one(place, recorder, work)
            self._restart_arenas()

    def _record_one(self, key: Any, recorder: Recorder, work: Callable[[], None]) -> None:
        before = [layer.stats.exchange(HostCounts()) for layer in self.layers]
        counted: list[tuple[LayerStats, HostCounts]] = []
        try:
            replay = recorder.record(work)
        finally:
            pairs = zip(self.layers, before, strict=True)
            counted += [(layer.stats, layer.stats.exchange(counts)) for layer, counts in pairs]
        self._replays[key] = Replay(replay, [pair for pair in counted if pair[1] != HostCounts()])

    def _join_copies(self) -> None:
        """Let the device wait for copies to and from host memory, which a graph and eager kernels share."""
        for offloader in self._offloaders:
            offloader.join()

    def _restart_arenas(self) -> None:
        restart_arenas(self.layers)

    def _abandon(self, problem: BaseException | None) -> None:
        """Discard this rank's capture after a failure on any rank. All later steps run eagerly."""
        self._failed = True
        self.forget()
        self.model.zero_grad(set_to_none=True)
        if (replicas := replicated(self.model)) is not None:
            replicas.abandon()
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
        # The frames of the exception hold the saved activations of all layers.
        while problem is not None:
            traceback.clear_frames(problem.__traceback__)
            problem = problem.__context__
        gc.collect()
        self._restart_arenas()
        self.known(why)


class Edge:
    """The static tensors that a forward's graph and its backward's share: the forward's inputs (given) and outputs
    (made), and the gradients of both.

    Args:
        given, made: tensors of these shapes and dtypes, maybe on the device "meta". `made` None: the first forward
            determines them.
    """

    def __init__(self, device: torch.device, given: Tensors = (), made: Tensors | None = None) -> None:
        self.device = device
        self.given, self.dgiven = self._zeros(given), self._zeros(given)
        self.made, self._dmade = (
            None if made is None else self._zeros(made),
            None if made is None else self._zeros(made),
        )

    def _zeros(self, like: Tensors) -> Tensors:
        return tuple(torch.zeros_like(tensor, device=self.device) for tensor in like)

    @property
    def dmade(self) -> Tensors:
        """The gradients of outputs. They are allocated outside a capture, because each replay would zero them."""
        if self._dmade is None:
            assert self.made is not None, "the backward runs before its forward"
            self._dmade = self._zeros(self.made)
        return self._dmade

    def forward(self, compute: Callable[[Tensors], Tensors]) -> tuple[Tensors, Tensors]:
        """The work of a forward's graph. Copies inputs for the backward. Returns the arguments of `backward`."""
        given = tuple(tensor.clone().requires_grad_() for tensor in self.given)
        made = compute(given)
        if self.made is None:
            self.made = tuple(tensor.detach().clone() for tensor in made)
        else:
            copy(self.made, [tensor.detach() for tensor in made])
        return given, made

    def backward(self, given: Tensors, made: Tensors, deferred: bool = False) -> None:
        """The work of a backward's graph. `deferred`: copy gradients of outputs, which later weight gradients read."""
        dmade = tuple(gradient.clone() for gradient in self.dmade) if deferred else self.dmade
        pairs = [pair for pair in zip(made, dmade, strict=True) if pair[0].requires_grad]
        with torch.autocast(self.device.type, enabled=False):
            torch.autograd.backward([output for output, _ in pairs], [gradient for _, gradient in pairs])
        copy(self.dgiven, [tensor.grad for tensor in given])


def copy(static: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor | None]) -> None:
    """Copy into the static tensors of a graph. None means zeros."""
    for target, source in zip(static, tensors, strict=True):
        target.zero_() if source is None else target.copy_(source)


class NodeGraphs(StepGraphs):
    """Graphs that are nodes in autograd: a replayed forward, whose backward replays another graph. Code around them
    runs eagerly."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # An input that requires a gradient, in case no received tensor does.
        self._anchor = torch.zeros((), device=self._sums.device, requires_grad=True)

    def node(self, key: Any, received: Tensors = ()) -> Tensors:
        """Replay a forward. The backward of its outputs replays the other graph."""
        made: Tensors = _Node.apply(self, key, self._anchor, *received)
        return made

    def replay_forward(self, key: Any, received: Tensors) -> Tensors:
        """Returns the outputs of a forward with these inputs."""
        raise NotImplementedError

    def replay_backward(self, key: Any, gradients: Sequence[torch.Tensor | None]) -> Tensors:
        """Returns the gradients of the forward's inputs, from those of its outputs."""
        raise NotImplementedError


class _Node(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, graphs: NodeGraphs, key: Any, _: torch.Tensor, *received: torch.Tensor) -> Tensors:
        ctx.graphs, ctx.key = graphs, key
        ctx.set_materialize_grads(False)
        made = graphs.replay_forward(key, received)
        ctx.mark_non_differentiable(*(tensor for tensor in made if not tensor.is_floating_point()))
        return made

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        return None, None, None, *ctx.graphs.replay_backward(ctx.key, gradients)


def _memory(device: torch.device) -> tuple[int, int]:
    """Returns the bytes that PyTorch's GPU allocator has reserved and those that tensors use."""
    if device.type != "cuda":
        return 0, 0
    return torch.cuda.memory_reserved(device), torch.cuda.memory_allocated(device)
