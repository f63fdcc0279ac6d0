"""Activation checkpointing of decoder layers that does not repeat their rides, and offloading of their activations.

**Checkpointing without the ride.** A checkpointed decoder layer saves its input and computes everything else a second
time in the backward. With rides, that dispatches every token twice, and runs every expert twice. With

    checkpoint(layer, x, use_reentrant=False, context_fn=carpool.keep_rides)
    model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": carpool.keep_rides})    # transformers

rides are not repeated: the recomputed layer reuses the MoE output of the first forward, and the backward reuses the
activations that the experts saved then.

    forward      attention   router   ride -> y, saved      saved: the layer's input, y, and the experts' activations
    recompute    attention   router   y, saved
    backward     of the ride, of the router, of attention

This takes memory for y, tokens and pre-activations; for y and tokens alone with
`ActivationPolicies(expert_activations="recompute")`. Losses and gradients are bit-identical. Experts that run a model's
own forward are not covered, because autograd saves their activations: their rides are repeated. PyTorch's selective
checkpointing could do the same, but it intercepts every operation of the layer, at some 10 us each, and refuses layers
that FSDP2 shards, whose second forward has other profiler ranges than the first (torch 2.13).

**Offloading to host memory.**

    offload = ActivationOffload()
    with offload.layer(x.device):
        y = layer(x)

Hooks on saved tensors (`torch.autograd.graph.saved_tensors_hooks`) collect the tensors that the layer's operations
save. At the end of the layer they are copied to host memory together, each once, however many operations have saved it.
The first one that the backward reads brings all of them back, and starts the prefetch of the layer before
(`carpool.activations.offload`).

Some tensors stay on the device: parameters and their casts to another dtype, tensors smaller than `LEAST_BYTES`,
tensors with gaps between their elements, and activations of a ride that has a policy of its own
(`carpool.activations`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple, TypeVar

import torch

from carpool.activations.arrivals import HiddenStates
from carpool.activations.offload import Offloaded, Offloader

# The smallest tensor that is offloaded, by device type. On a GPU each copy costs some microseconds.
LEAST_BYTES = {"cuda": 64 * 1024, "cpu": 256}
Saved = TypeVar("Saved")


class SavedRides:
    """The outputs and saved activations of the rides of one checkpointed region, in order."""

    def __init__(self) -> None:
        self._rides: list[tuple[torch.Tensor, int, object]] = []
        self._next: int | None = None

    def start(self, again: bool) -> None:
        """Called when the region begins to run: for the first time, or again."""
        self._next = 0 if again else None

    @property
    def again(self) -> bool:
        return self._next is not None

    def ride(self, forward: Callable[[], tuple[torch.Tensor, Saved]]) -> tuple[torch.Tensor, Saved]:
        """Run `forward`; in the recomputation return what the same ride returned the first time.

        Raises:
            RuntimeError: the recomputation has other rides, or the region has changed a MoE output in place."""
        if self._next is None:
            y_TH, saved = forward()
            self._rides.append((y_TH.detach(), y_TH._version, saved))
            return y_TH, saved
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
        return y_TH.detach(), again  # type: ignore[return-value]  # of the same ride, so of the same type


class _Inside(AbstractContextManager[None]):
    """A region while it runs. It may be entered again, because a retained graph recomputes it for each backward."""

    def __init__(self, rides: SavedRides, again: bool) -> None:
        self.rides, self.again = rides, again

    def __enter__(self) -> None:
        self.rides.start(self.again)
        self._token = checkpointed.set(self.rides)

    def __exit__(self, *_: object) -> None:
        checkpointed.reset(self._token)


# The rides of the checkpointed region that is running, if any.
checkpointed: ContextVar[SavedRides | None] = ContextVar("carpool_kept_rides", default=None)


def taken_before() -> bool:
    """Whether a checkpointed region is being recomputed, whose rides are not repeated."""
    region = checkpointed.get()
    return region is not None and region.again


def keep_rides() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """`context_fn` of `torch.utils.checkpoint.checkpoint`; see the module's docstring."""
    rides = SavedRides()
    return _Inside(rides, again=False), _Inside(rides, again=True)


class _Packed(NamedTuple):
    """What autograd saves in place of an offloaded tensor."""

    layer: OffloadedLayer
    number: int
    shape: torch.Size
    stride: tuple[int, ...]


class OffloadedLayer:
    """The tensors of one layer, in one forward.

    Attributes:
        device: whose tensors are offloaded.
        stays: addresses of the storages that stay on the device.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stays: set[int] = set()
        self.tensors: list[torch.Tensor] = []
        self.numbers: dict[Any, int] = {}
        self.offloaded: list[Offloaded] = []
        self.back: list[HiddenStates] = []

    def stay_on_device(self, tensors: Iterable[torch.Tensor | None]) -> None:
        """Exclude tensors from offloading."""
        self.stays.update(tensor.untyped_storage().data_ptr() for tensor in tensors if tensor is not None)

    def pack(self, tensor: torch.Tensor) -> torch.Tensor | _Packed:
        if self._stays(tensor):
            # Detached: it may be the output of the operation that saves it, which would be a reference cycle.
            return tensor.detach()
        # Views of the same memory are saved once. The reference prevents the reuse of that memory.
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
            lane_number: as in `Offloader.put`."""
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
            layer.offloaded = self.offloader.put([HiddenStates(tensor, 0) for tensor in layer.tensors], lane_number)
            layer.tensors, layer.numbers = [], {}

    def _unpack(self, packed: torch.Tensor | _Packed) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        layer = packed.layer
        if layer.offloaded and not layer.back:
            layer.back = self.offloader.get(layer.offloaded)
        # Without `offloaded` this is a backward inside the forward, before anything was offloaded.
        flat = layer.back[packed.number].data if layer.offloaded else layer.tensors[packed.number]
        return flat.as_strided(packed.shape, packed.stride)


# The layer whose forward is running, if its activations are offloaded.
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
    """Whether it is a parameter, autocast's cast of one, or a view of one. Parameters that FSDP has gathered count."""
    base = tensor if tensor._base is None else tensor._base
    if isinstance(base, torch.nn.Parameter):
        return True
    function = base.grad_fn
    if function is None or function.name() != "ToCopyBackward0":
        return False
    return hasattr(function.next_functions[0][0], "variable")
