"""One layer of experts that are in host memory or on disk, and its parameters: what is where. Who moves them, and when,
is in `host_experts`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from carpool.memory.disk import Staging


class HostWeight:
    """One parameter, which moves to `device` if it is not there.

    Attributes:
        device: its memory on the device; without any while the parameter is away.
        here: the same memory, whose changes autograd does not count.
        host: its values in host memory or a file of this process, if they are not newer elsewhere; None: they are in a
            checkpoint's files.
        shard: the DTensor of the same memory, if the model is sharded.
    """

    def __init__(
        self,
        whole: nn.Parameter,
        shard: nn.Parameter | None,
        device: torch.device,
        memory: Callable[[torch.Size, torch.dtype], torch.Tensor] | None,
    ) -> None:
        self.whole, self.shard = whole, shard
        values: torch.Tensor = whole.detach()
        self.host = None if memory is None else memory(values.shape, values.dtype).copy_(values)
        if values.device != device:
            values = torch.empty_like(values, device=device)
        elif values.untyped_storage().nbytes() != values.nbytes or not values.untyped_storage().resizable():
            values = values.clone()  # it was a part of a file that is mapped, say
        self.device = whole.data = values
        if isinstance(shard, DTensor):
            shard._local_tensor = values
        self.here = values.data
        self.size = values.untyped_storage().nbytes()

    @property
    def key(self) -> int:
        return storage_key(self.whole)

    @property
    def shown(self) -> bool:
        """Whether the parameter is its values in host memory."""
        return self.host is not None and self.whole.data_ptr() == self.host.data_ptr()


class HostLayer:
    """The experts of one layer.

    Attributes:
        here: whether they are on the device, or on their way to it.
        reads: what threads do for that.
        ready: when they have come; None: the device has waited for that.
        gone: when their newest values are in host memory.
        rows: experts that are here; None: all of them.
        foretold: those of them that came because they had been predicted.
        wanted: those that the last forward has brought in; None: all.
        few: those that the CPU computes in this forward.
        staging: between them and the device, if they are in a file of this process.
    """

    def __init__(self, weights: Sequence[HostWeight]) -> None:
        self.weights = list(weights)
        self.trained = any(weight.whole.requires_grad for weight in weights)
        self.wanted: list[int] | None = None
        self.few: list[int] = []
        self.staging: Staging | None = None
        self.here = True
        self.rows: set[int] | None = None
        self.reads: list[Future[None]] = []
        self.foretold: set[int] = set()
        self.ready: Any = None
        self.gone: Any = None

    @property
    def experts(self) -> int:
        return int(self.weights[0].whole.shape[0])

    @property
    def values(self) -> list[torch.Tensor]:
        """Of each parameter, in host memory or a file of this process."""
        return [weight.host for weight in self.weights if weight.host is not None]


def layers_on_disk(layers: Sequence[Sequence[torch.Tensor]], host_bytes: int) -> set[int]:
    """The layers that are on disk, if host memory takes the others. Each comes as often as any other, so no choice of
    them is better; spread over the model, what comes from disk has the time of several layers.

    Example: 6 layers of 2 bytes, 5 of host memory -> {0, 1, 3, 4}; layers 2 and 5 are in host memory."""
    number = min(len(layers), host_bytes // max(1, *(sum(weight.nbytes for weight in layer) for layer in layers)))
    return {i for i in range(len(layers)) if (i + 1) * number // len(layers) == i * number // len(layers)}


def storage_key(tensor: torch.Tensor) -> int:
    """The same for tensors in the same memory, also while it has none."""
    own = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return int(own.untyped_storage()._cdata)
