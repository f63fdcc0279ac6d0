"""What `HostExperts` moves: the parameters of one layer of experts, and where their values are.

HostWeight    one parameter: its values in host memory or in a file, and its tensor on the device, whose memory is
              freed and reallocated
HostLayer     the parameters of a layer; which of its experts are on the device, and the copies that are in flight
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from carpool.memory import Staging


class HostWeight:
    """One offloaded parameter.

    Attributes:
        device: the tensor on the device, without memory while the parameter is offloaded.
        here: the same memory, without autograd's version counter.
        host: its values in host memory or a file of this process, unless those on the device are newer; None: they are
            in a checkpoint's files.
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
            values = values.clone()  # for instance a part of a mapped file
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
        """Whether the parameter refers to its values in host memory."""
        return self.host is not None and self.whole.data_ptr() == self.host.data_ptr()


class HostLayer:
    """The experts of one layer.

    Attributes:
        here: whether they are on the device, or being copied to it.
        reads: the reading threads' tasks.
        ready: the event after the copy to the device; None: the device has waited for it.
        gone: the event after the copy of the newest values to the host.
        rows: numbers of the experts on the device; None: all.
        foretold: those of them that were predicted.
        wanted: numbers of the experts of the last forward; None: all.
        staging: buffer between a file of this process and the device.
    """

    def __init__(self, weights: Sequence[HostWeight]) -> None:
        self.weights = list(weights)
        self.trained = any(weight.whole.requires_grad for weight in weights)
        self.wanted: list[int] | None = None
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
        """The values of each parameter, in host memory or a file of this process."""
        return [weight.host for weight in self.weights if weight.host is not None]


def layers_on_disk(layers: Sequence[Sequence[torch.Tensor]], host_bytes: int) -> set[int]:
    """The layers on disk, if host memory is for the others. All are read equally often; distributing them over the
    model gives each read from disk the time of several layers.

    Example: 6 layers of 2 bytes, 5 of host memory -> {0, 1, 3, 4}; layers 2 and 5 are in host memory."""
    number = min(len(layers), host_bytes // max(1, *(sum(weight.nbytes for weight in layer) for layer in layers)))
    return {i for i in range(len(layers)) if (i + 1) * number // len(layers) == i * number // len(layers)}


def storage_key(tensor: torch.Tensor) -> int:
    """A key that is equal for tensors of the same storage, also while it has no memory."""
    own = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return int(own.untyped_storage()._cdata)
