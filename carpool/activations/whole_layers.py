"""What a whole layer of a model saves around its rides: all but them computed again, or all of it in host memory.

**Computed again, without the ride.** A checkpointed decoder layer saves its input and computes everything else a second
time in the backward. For a ride that means that every token travels twice, and every expert computes twice. With

    checkpoint(layer, x, use_reentrant=False, context_fn=carpool.keep_rides)
    model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": carpool.keep_rides})    # transformers

rides are left out of that: the layer that is computed again gets the outputs of the first time, and the backward what
the experts saved then.

    forward     attention   router   ride -> y, saved      stays: the layer's input, y, and what the experts save
    again       attention   router   y, saved
    backward    of the ride, of the router, of attention

It costs memory for y, tokens and pre-activations; without the latter if `ActivationPolicies` recomputes them.
Losses and gradients are the same, bit by bit. Experts that run a model's own forward are autograd's, not ours: they
ride and compute again. PyTorch's selective checkpointing would do it too, but watches every operation of the layer, at
some 10 us each, and refuses layers that FSDP2 shards, whose second forward has other profiler ranges than the first
(torch 2.13).

**In host memory.**

    offload = ActivationOffload()
    with offload.layer(x.device):
        y = layer(x)

Hooks on saved tensors (`torch.autograd.graph.saved_tensors_hooks`) collect what the layer's operations save. At the end
of the layer all of it goes to host memory together, each tensor once, however many operations have saved it. The first
that the backward wants brings all of them back, and those of the layer before it are then under way: see
`carpool.activations.offload`, which does both.

What stays: parameters and their copies in another dtype, tensors of fewer than `LEAST_BYTES`, tensors with gaps between
their elements, and what a ride saves by a policy of its own (`carpool.activations`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple, TypeVar

import torch

from carpool.activations.arrivals import Rows
from carpool.activations.offload import Away, Offloader

# Of what is offloaded, by the kind of device. On a GPU each copy costs some microseconds.
LEAST_BYTES = {"cuda": 64 * 1024, "cpu": 256}
Kept = TypeVar("Kept")


class KeptRides:
    """The rides of one checkpointed region, in the order in which it takes them."""

    def __init__(self) -> None:
        self._rides: list[tuple[torch.Tensor, int, object]] = []
        self._next: int | None = None

    def start(self, again: bool) -> None:
        """The region runs, for the first time or again."""
        self._next = 0 if again else None

    @property
    def again(self) -> bool:
        return self._next is not None

    def ride(self, forward: Callable[[], tuple[torch.Tensor, Kept]]) -> tuple[torch.Tensor, Kept]:
        """What `forward` returns, or what it returned in its place the first time.

        Raises:
            RuntimeError: the region is not the same the second time, or has changed a ride's sums in place."""
        if self._next is None:
            y_TH, kept = forward()
            self._rides.append((y_TH.detach(), y_TH._version, kept))
            return y_TH, kept
        if self._next >= len(self._rides):
            raise RuntimeError(
                f"a checkpointed region took {len(self._rides)} rides in the forward and more when it was computed "
                "again; it must do the same both times, or be checkpointed without carpool.keep_rides"
            )
        y_TH, version, again = self._rides[self._next]
        self._next += 1
        if y_TH._version != version:
            raise RuntimeError(
                "what a MoE layer returned was changed in place (such as by +=) in a checkpointed region that keeps "
                "rides; write y = y + z there, or checkpoint it without carpool.keep_rides"
            )
        return y_TH.detach(), again  # type: ignore[return-value]  # it is what the same place put there


class _Inside(AbstractContextManager[None]):
    """Code that runs in a region. May be entered again: a retained graph computes it once more."""

    def __init__(self, rides: KeptRides, again: bool) -> None:
        self.rides, self.again = rides, again

    def __enter__(self) -> None:
        self.rides.start(self.again)
        self._token = checkpointed.set(self.rides)

    def __exit__(self, *_: object) -> None:
        checkpointed.reset(self._token)


# The rides of the checkpointed region in which this code runs.
checkpointed: ContextVar[KeptRides | None] = ContextVar("carpool_kept_rides", default=None)


def taken_before() -> bool:
    """Whether this code runs in a region that is computed again, whose rides are those of the first time."""
    region = checkpointed.get()
    return region is not None and region.again


def keep_rides() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """`context_fn` of `torch.utils.checkpoint.checkpoint`; see the module's docstring."""
    rides = KeptRides()
    return _Inside(rides, again=False), _Inside(rides, again=True)


class _Packed(NamedTuple):
    """What autograd holds of a tensor."""

    layer: OffloadedLayer
    number: int
    shape: torch.Size
    stride: tuple[int, ...]


class OffloadedLayer:
    """The tensors of one layer, in one forward.

    Attributes:
        device: whose tensors are offloaded.
        stays: where the memory of tensors begins that stay there.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stays: set[int] = set()
        self.tensors: list[torch.Tensor] = []
        self.numbers: dict[Any, int] = {}
        self.away: list[Away] = []
        self.back: list[Rows] = []

    def stay_on_device(self, tensors: Iterable[torch.Tensor | None]) -> None:
        """These are not offloaded, if autograd saves them."""
        self.stays.update(tensor.untyped_storage().data_ptr() for tensor in tensors if tensor is not None)

    def pack(self, tensor: torch.Tensor) -> torch.Tensor | _Packed:
        if self._stays(tensor):
            # Not itself: it may be the output of the operation that saves it, which would then hold itself.
            return tensor.detach()
        # Views of the same range of memory are one. It is held, so no other tensor can come to lie there.
        key = tensor.data_ptr(), tensor.numel(), tensor.dtype, tensor._version
        if key not in self.numbers:
            self.numbers[key] = len(self.tensors)
            self.tensors.append(tensor.detach().as_strided((tensor.numel(),), (1,)))
        return _Packed(self, self.numbers[key], tensor.shape, tensor.stride())

    def _stays(self, tensor: torch.Tensor) -> bool:
        if type(tensor) is not torch.Tensor or tensor.device != self.device:
            return True
        if tensor.nbytes < LEAST_BYTES[self.device.type] or tensor.untyped_storage().data_ptr() in self.stays:
            return True
        return not _without_gaps(tensor) or _is_parameter(tensor)


class ActivationOffload:
    """See the module's docstring. All layers of a model share one."""

    def __init__(self) -> None:
        self.offloader = Offloader()

    @contextmanager
    def layer(self, device: torch.device, lane_number: int = 0) -> Iterator[None]:
        """Around the forward of one layer.

        Args:
            device: of the layer.
            lane_number: which layers follow each other, as of `Offloader.put`."""
        if not torch.is_grad_enabled():
            yield
            return
        self.offloader.staging(None, lane_number)
        layer = OffloadedLayer(device)
        token = offloaded.set(layer)
        try:
            with torch.autograd.graph.saved_tensors_hooks(layer.pack, self._unpack):
                yield
        finally:
            offloaded.reset(token)
        if layer.tensors:
            layer.away = self.offloader.put([Rows(tensor, 0) for tensor in layer.tensors], lane_number)
            layer.tensors, layer.numbers = [], {}

    def _unpack(self, packed: torch.Tensor | _Packed) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        layer = packed.layer
        if layer.away and not layer.back:
            layer.back = self.offloader.get(layer.away)
        # Else it is a backward inside the forward.
        flat = layer.back[packed.number].data if layer.away else layer.tensors[packed.number]
        return flat.as_strided(packed.shape, packed.stride)


# The layer in whose forward this code runs, if its activations are offloaded.
offloaded: ContextVar[OffloadedLayer | None] = ContextVar("carpool_offloaded_layer", default=None)


def _without_gaps(tensor: torch.Tensor) -> bool:
    """Whether its elements fill a range of memory, in any order of dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def _is_parameter(tensor: torch.Tensor) -> bool:
    """Whether it is a parameter, as it is or in autocast's dtype, or a view of one. What FSDP has gathered is one."""
    base = tensor if tensor._base is None else tensor._base
    if isinstance(base, torch.nn.Parameter):
        return True
    function = base.grad_fn
    if function is None or function.name() != "ToCopyBackward0":
        return False
    return hasattr(function.next_functions[0][0], "variable")
