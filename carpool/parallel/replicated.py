"""ZeRO-1: whole parameters on every rank that computes with them, sharded optimizer state, no all-gather per layer.

FSDP2 gathers the parameters of each layer in the forward and again in the backward. With expert parallelism over all
ranks of a few hosts, few parameters are non-expert (Qwen3-30B-A3B: 1.5 of 30.5 billion), and gathering them costs more
than the memory is worth. Here each rank has them whole: stage 1 of ZeRO (arXiv 1910.02054, section 5.1). Experts that
several expert-parallel groups hold are treated alike, over the ranks that hold the same ones (axis efsdp):

    backward     the gradients of a bucket are complete -> reduce-scatter, overlapped with the rest of the backward
    finish()     each rank has the gradients of its shards, summed over all ranks
    optimizer    updates its shards, and has moments of these alone
    write()      one all-gather per dtype writes all whole parameters, in place: addresses never change. With `beside`,
                 experts of several groups are written beside the next forward, before it comes to their layer

Shards are DTensors with FSDP2's placement: `Shard(0)`, rank r of W has the rows [r * c, (r + 1) * c) of a parameter of
n rows, c = ceil(n / W); the last ranks may have fewer, or none. Of experts, n are the rows of an expert-parallel rank,
and W the ranks of efsdp. So clipping, optimizers and checkpoints work as under
FSDP2, with the same checkpoint files. A parameter padded to W * c rows is a matrix with one row for each rank, and so
are all parameters concatenated (`flat_buffers.py`):

    a (3, 2) and b (4,) on 2 ranks    whole      a0 a0 a1 a1 a2 a2 .. ..   b0 b1 b2 b3     each parameter contiguous
                                      by rank    a0 a0 a1 a1 b0 b1                         row 0
                                                 a2 a2 .. .. b2 b3                         row 1

A reduce-scatter of gradients by rank gives this rank's row; an all-gather of shards gives parameters by rank. As in
FSDP2, `torch._chunk_cat` and `split_with_sizes_copy` convert between the two forms and dtypes, in one kernel each.

Worked example, one step of 2 micro-batches on W ranks, 3 buckets:

    begin(last=False), backward        3 buckets are added to the gradients of this rank; nothing is communicated
    begin(first=False), backward       bucket 0 is complete: added, its reduce-scatter begins; then buckets 1 and 2
    finish()                           after 3 reduce-scatters
    clip, optimizer.step(), write()    1 all-gather

Cost. Parameters P, stored in s bytes, computed with in c, reduced in r:

                       memory of a rank                      sent by a rank in a step of M micro-batches
    FSDP2              P * 2s / W and two layers whole       P * (2c + r) * (W - 1) / W * M
    here               P * (c + r) + P * (s + r) / W         P * (c + r) * (W - 1) / W

Gradients are *summed* over ranks, not averaged: the loss is divided by the number of ranks before. So gradients of
experts that one rank holds alone need no further operation, and the optimizer uses them directly. Where FSDP shards
all non-expert parameters, this class only handles such experts (`carpool.hf.sharding.keep_experts`).

Micro-batches are accumulated in the dtype of the reduction. A bucket is accumulated when all of its gradients are
complete, by few kernels, and buckets are reduced in one order, the same on all ranks: that in which the backward
completes them, those of experts among the others. Nothing synchronises with the host.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from carpool.experts.host_experts import host_experts
from carpool.parallel import fsdp
from carpool.parallel.flat_buffers import Bucket, FlatBuffers, Place, shard_axis

# Axes of the mesh of non-expert parameters: the last one shards, the one before replicates.
MESH_AXES = {"dp_replicate", "fsdp"}
BUCKET_BYTES = 100 * 2**20
_ATTRIBUTE = "_carpool_replicated"


class Replicated:
    """Manages the sharded parameters of a model that FSDP does not manage. All methods are collective.

    Args:
        model: its non-expert parameters are DTensors, `Shard(0)` on a mesh of `MESH_AXES`; experts are DTensors on
            another mesh, sharded as `FlatBuffers` says or held by one rank alone. Modules then get whole non-expert
            parameters and this rank's experts, as plain parameters. Either may have hooks of FSDP instead. Parameters
            must be frozen before.
        computed: the dtype of whole parameters; None: that of the model. Gradients are then accumulated in float32.
        bucket_bytes: size of a bucket of gradients that are reduced together.
        layers: of the model, in the order of a forward, which each call runs once.

    Attributes:
        writes_late: `write` leaves trained experts in buffers to the next forward, whose layers wait for their own.

    Raises:
        ValueError: the model is not sharded.
    """

    def __init__(
        self,
        model: nn.Module,
        computed: torch.dtype | None = None,
        bucket_bytes: int = BUCKET_BYTES,
        layers: Sequence[nn.Module] = (),
    ) -> None:
        self._shown, self.writes_late = 0, False
        self._experts: list[Place] = []
        kinds: dict[tuple[Any, ...], list[tuple[nn.Parameter, list[tuple[nn.Module, str]]]]] = {}
        order: dict[tuple[int, str], int] = {}
        for parameter, owners in _sharded(model):
            assert isinstance(parameter, DTensor)
            axes = parameter.device_mesh.mesh_dim_names or ()
            if set(axes) <= MESH_AXES or _is_shared(parameter, computed):
                order[id(owners[0][0]), owners[0][1]] = len(order)
                kinds.setdefault((parameter.dtype, parameter.requires_grad, axes), []).append((parameter, owners))
            else:
                whole = nn.Parameter(parameter.to_local().detach(), requires_grad=parameter.requires_grad)
                self._experts.append(Place(owners, whole, parameter))
        if not kinds and not fsdp.states(model):
            raise ValueError("no non-expert parameter of this model is sharded, so there is nothing to keep whole")
        self.buffers = [
            FlatBuffers(parameters, computed or dtype, torch.float32 if computed else dtype, bucket_bytes)
            for (dtype, *_), parameters in kinds.items()
        ]
        self._trained = [buffers for buffers in self.buffers if buffers.trained]
        self._buckets = [(buffers, bucket) for buffers in self._trained for bucket in buffers.buckets]
        # The gradient that a bucket gets last is that of its first parameter in the model.
        self._buckets.sort(key=lambda one: -min(order[id(p.owners[0][0]), p.owners[0][1]] for p in one[1].places))
        self._places = [place for buffers in self.buffers for bucket in buffers.buckets for place in bucket.places]
        self._places += self._experts
        self._last, self._at_once, self._next = True, 0, 0
        self._works: list[dist.Work] = []
        self._take_expert: Callable[[nn.Parameter], None] | None = None
        for number, (_, bucket) in enumerate(self._buckets):
            bucket.forget()
            for index, place in enumerate(bucket.places):
                on_gradient(place.whole, self._take, number, index)
        self._set(shards=False)
        for buffers in self.buffers:
            buffers.gather()
        self._late = _Late(self._buckets, layers)
        object.__setattr__(model, _ATTRIBUTE, self)
        # So that state dicts always have the entries and names of FSDP2's.
        model.register_state_dict_pre_hook(lambda *_: self._show())
        model.register_state_dict_post_hook(lambda *_: self._hide())
        model.register_load_state_dict_pre_hook(lambda *_: self._show())
        model.register_load_state_dict_post_hook(lambda *_: self._hide(write=True))

    @property
    def shard_parameters(self) -> list[nn.Parameter]:
        """The optimizer's parameters: the shards of all managed parameters."""
        return [place.shard for place in self._places]

    @property
    def expert_shards(self) -> list[nn.Parameter]:
        """The shards of experts that this rank holds alone, which share memory with the modules' parameters."""
        return [place.shard for place in self._experts]

    def on_expert_gradient(self, take: Callable[[nn.Parameter], None]) -> None:
        """Call `take` with the shard of an expert parameter whenever a backward has computed its gradient."""
        self._take_expert = take
        for number, place in enumerate(self._experts):
            if place.whole.requires_grad:
                on_gradient(place.whole, self._came, number)

    @property
    def places(self) -> set[tuple[int, str]]:
        """The managed parameters: id of the module and name there."""
        return {(id(module), name) for place in self._places for module, name in place.owners}

    @property
    def buffered(self) -> set[tuple[int, str]]:
        """Those in flat buffers."""
        found = (place for buffers in self.buffers for bucket in buffers.buckets for place in bucket.places)
        return {(id(module), name) for place in found for module, name in place.owners}

    # -- a step ---------------------------------------------------------------------------------------------------

    def begin(self, first: bool = True, last: bool = True, at_once: int = 1) -> None:
        """Called before each backward.

        Args:
            first: of the step. State of an unfinished step is discarded.
            last: of the step: reductions overlap this backward.
            at_once: micro-batches whose backwards run at the same time (`carpool.ride.two_batch`).
        """
        if first:
            self._wait()
            for _, bucket in self._buckets:
                bucket.forget()
            for place in self._experts:
                place.shard.grad = None
        else:
            self._end_pass()
        self._last, self._at_once, self._next = last, at_once, 0
        for _, bucket in self._buckets:
            bucket.done = False

    def _came(self, number: int, whole: torch.Tensor) -> None:
        """Hook: the gradient of an expert parameter is complete."""
        place = self._experts[number]
        grad, whole.grad = whole.grad, None
        assert grad is not None and isinstance(place.shard, DTensor) and self._take_expert is not None
        place.shard.grad = DTensor(grad, place.shard._spec, requires_grad=False)
        self._take_expert(place.shard)

    def _take(self, number: int, index: int, parameter: torch.Tensor) -> None:
        """Hook: the gradient of a parameter in buffers is complete."""
        buffers, bucket = self._buckets[number]
        assert self._at_once, "a backward without Replicated.begin"
        assert parameter.grad is not None
        bucket.waiting[index].append(parameter.grad)
        parameter.grad = None
        bucket.came += 1
        if bucket.came == len(bucket.waiting) * self._at_once:
            buffers.put_waiting(bucket)
            self._reduce_complete()

    def _reduce_complete(self) -> None:
        """Start to reduce complete buckets, in order."""
        while self._last and self._next < len(self._buckets) and self._buckets[self._next][1].done:
            buffers, bucket = self._buckets[self._next]
            if work := buffers.reduce(bucket):
                self._works.append(work)
            self._next += 1

    def _end_pass(self) -> None:
        """Complete buckets that lack gradients of unused parameters."""
        for buffers, bucket in self._buckets:
            if not bucket.done:
                buffers.put_waiting(bucket)
        self._reduce_complete()

    def _wait(self) -> None:
        for work in self._works:
            work.wait()
        if self._works:
            for buffers in self._trained:
                buffers.join()
        self._works.clear()

    def drain(self) -> None:
        """Finish all reductions of a backward. Called at the end of the capture of a CUDA graph."""
        self._late.join()
        self._end_pass()
        self._wait()

    def abandon(self) -> None:
        """Discard what a failed capture has begun. It has reduced and written nothing."""
        self._works.clear()
        self.expire()

    @torch.no_grad()
    def finish(self) -> None:
        """Set `.grad` of all shards, after the last backward and all other additions to gradients of experts. None for
        parameters that the step has not used."""
        self.drain()
        for buffers in self._trained:
            buffers.finish()
        for _, bucket in self._buckets:
            for place, seen in zip(bucket.places, bucket.seen, strict=True):
                place.shard.grad = place.gradient if seen else None
        for place in self._experts:
            grad, place.whole.grad = place.whole.grad, None
            assert isinstance(place.shard, DTensor)
            if grad is not None:
                _sum_over_replicas(grad, place.shard)
                place.shard.grad = DTensor(grad, place.shard._spec, requires_grad=False)
        self._at_once = 0

    @torch.no_grad()
    def write(self) -> None:
        """After the optimizer step: update the whole parameters from the trained shards."""
        for buffers in self._trained:
            if not (self.writes_late and buffers in self._late.buffers):
                buffers.gather()
        self.expire()

    def expire(self) -> None:
        """Let the next forward write what it writes late: after a step, and where one is captured."""
        self._late.expire(self.writes_late)

    def written(self) -> None:
        """A replayed forward has written them."""
        self._late.stale = False

    # -- shards in place of whole parameters ----------------------------------------------------------------------

    @contextmanager
    def shards(self, write: bool = False) -> Iterator[None]:
        """Context in which the model's parameters are shards. `write`: update whole parameters from them afterwards."""
        self._show()
        try:
            yield
        except BaseException:
            # Other ranks may not have failed: nothing collective.
            self._hide()
            raise
        self._hide(write)

    def _show(self) -> None:
        self._shown += 1
        if self._shown == 1:
            self._set(shards=True)

    @torch.no_grad()
    def _hide(self, write: bool = False) -> None:
        self._shown -= 1
        if self._shown == 0:
            self._set(shards=False)
        if write:
            self._late.expire(False)
            for buffers in self.buffers:
                buffers.gather()

    def _set(self, shards: bool) -> None:
        for place in self._places:
            for module, name in place.owners:
                module._parameters[name] = place.shard if shards else place.whole


class _Late:
    """Writes experts in buffers beside a forward, by hooks of its layers, on a stream of its own:

        first layer    all-gathers of all layers begin
        layer i        waits for its own

    Attributes:
        stale: the next forward is to do so.
    """

    def __init__(self, buckets: Sequence[tuple[FlatBuffers, Bucket]], layers: Sequence[nn.Module]) -> None:
        self.stale = False
        self._side: torch.cuda.Stream | None = None
        inside = {id(module): number for number, layer in enumerate(layers) for module in layer.modules()}
        owners = {bucket: [id(one) for place in bucket.places for one, _ in place.owners] for _, bucket in buckets}
        # All buckets of a buffer, or none: `Replicated.write` writes whole buffers.
        outside = {buffers for buffers, bucket in buckets if not inside.keys() >= set(owners[bucket])}
        self._buckets: dict[int, list[tuple[FlatBuffers, Bucket]]] = {}
        for buffers, bucket in buckets:
            if buffers.of_experts and buffers not in outside:
                number = min(inside[owner] for owner in owners[bucket])
                self._buckets.setdefault(number, []).append((buffers, bucket))
        self.buffers = [buffers for some in self._buckets.values() for buffers, _ in some]
        # Of layers that have not waited for theirs.
        self._events: dict[int, torch.cuda.Event] = {}
        for number, layer in enumerate(layers if self._buckets else ()):
            layer.register_forward_pre_hook(lambda *_, number=number: self._before(number))

    def expire(self, stale: bool) -> None:
        """Let the next forward gather, or not. Events may be those of a capture, for which nobody can wait."""
        self.stale = stale
        self._events.clear()

    def _before(self, number: int) -> None:
        """Hook: before a layer's forward."""
        if self.stale:
            self._gather()
            self.stale = False
        if (event := self._events.pop(number, None)) is not None:
            torch.cuda.current_stream(self.buffers[0].device).wait_event(event)

    def _gather(self) -> None:
        device = self.buffers[0].device
        if device.type == "cuda":
            self._side = self._side or torch.cuda.Stream(device)
            self._side.wait_stream(torch.cuda.current_stream(device))
        # (On a CPU there is no stream to enter.)
        with torch.cuda.stream(self._side):
            for number in sorted(self._buckets):
                for buffers, bucket in self._buckets[number]:
                    buffers.gather_bucket(bucket)
                if self._side is not None:
                    self._events[number] = self._side.record_event()

    def join(self) -> None:
        """Wait, on the device, for experts of layers that this forward has not called."""
        if self._side is not None and self._events:
            torch.cuda.current_stream(self.buffers[0].device).wait_stream(self._side)
        self._events.clear()


def replicated(model: nn.Module) -> Replicated | None:
    """The `Replicated` of a model, or None."""
    found: Replicated | None = getattr(model, _ATTRIBUTE, None)
    return found


@contextmanager
def sharded_parameters(model: nn.Module, write: bool = False) -> Iterator[None]:
    """Context in which the parameters of a model are those of its optimizer: DTensors if it is sharded, and parameters
    in host memory for offloaded experts.

    `write`: they are changed inside. Collective then."""
    found, offloaded = replicated(model), host_experts(model)
    with (
        nullcontext() if found is None else found.shards(write),
        nullcontext() if offloaded is None else offloaded.shown(),
    ):
        yield


def _is_shared(parameter: DTensor, computed: torch.dtype | None) -> bool:
    """Whether an expert parameter is to be in buffers: other ranks hold the same experts, or compute in another dtype.
    Adapters of experts are small, and whole in the optimizer of each of these ranks."""
    axis, mesh = shard_axis(parameter), parameter.device_mesh
    if axis is None or parameter.placements[axis].is_replicate():
        return False
    return math.prod(mesh.shape[: axis + 1]) > 1 or computed not in (None, parameter.dtype)


def _sum_over_replicas(grad: torch.Tensor, shard: DTensor) -> None:
    """Sum the gradient of a shard over its replicas: for adapters of experts, which FSDP does not manage."""
    mesh = shard.device_mesh
    for axis, placement in enumerate(shard.placements):
        if placement.is_replicate() and mesh.size(axis) > 1:
            dist.all_reduce(grad, group=mesh.get_group(axis))


def _sharded(model: nn.Module) -> list[tuple[nn.Parameter, list[tuple[nn.Module, str]]]]:
    """All DTensors among a model's parameters that FSDP does not manage, each once, with their owners."""
    known = {
        (id(module), name)
        for state in fsdp.states(model)
        for group in fsdp.groups(state)
        for module, name in fsdp.parameters_of(group)
    }
    found: dict[int, tuple[nn.Parameter, list[tuple[nn.Module, str]]]] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if isinstance(parameter, DTensor) and (id(module), name) not in known:
                found.setdefault(id(parameter), (parameter, []))[1].append((module, name))
    return list(found.values())


def on_gradient(parameter: torch.Tensor, method: Callable[..., None], *arguments: Any) -> None:
    """Call `method(*arguments, parameter)` whenever a backward has computed the parameter's gradient.

    Python's garbage collector does not see the references of such a hook. A reference to the owner of the parameter
    would leak both. So the method's object is referenced weakly.

    Args:
        method: of an object that lives as long as the parameter is trained.
        arguments: without references to parameters.
    """
    held = weakref.WeakMethod(method)

    def came(parameter: torch.Tensor) -> None:
        if (call := held()) is not None:
            call(*arguments, parameter)

    parameter.register_post_accumulate_grad_hook(came)
