"""Which experts come from host memory or disk, and which stay: predictions, caches, and memory that is a file's.

What is below host memory is a plug-in's ("carpool.tiers"): carpool_systems has "disk", which `memory.experts` and
`training.optimizer_offload` name."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from carpool.plugins import Registry


class Staging(Protocol):
    """Page-locked buffers between memory of a tier and a device.

    Attributes:
        bytes_read, bytes_written: so far."""

    bytes_read: int
    bytes_written: int

    def take(self, name: Hashable, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The values of tensors of the tier, in a buffer, until they are given back. `name`: the same each time."""

    def release(self, name: Hashable, event: Any) -> None:
        """Give values back as they are. `event`: of the device, after which it has read them; None: it has."""

    def put(self, name: Hashable, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """A buffer for new values of tensors of the tier, until they are given back."""

    def give(self, name: Hashable, event: Any) -> None:
        """Write the values in the buffer back. `event`: of the device, after which they are there; None: they are."""

    def flush(self) -> None:
        """Wait until all is written, and forget what was read ahead."""


class Tier(Protocol):
    """Memory below the host's, from which a device does not copy by itself.

    Attributes:
        BUFFERS: how many buffers of a `Staging` there are at most."""

    BUFFERS: int

    @staticmethod
    def zeros(folder: Path, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Zeros in a folder. Raises ValueError if there is no space."""

    @staticmethod
    def staging(device: torch.device) -> Staging:
        """Buffers of a device."""

    @staticmethod
    def check(needed: int, what: str, folder: Path, ranks: int = 1) -> None:
        """Raise ValueError if `ranks` ranks of this machine cannot all write so many bytes of `what` to a folder."""


TIERS: Registry[Tier] = Registry("tier", "carpool.tiers", {})
