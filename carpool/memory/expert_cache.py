"""Memory that holds single experts of all layers, as many as it has slots for.

    3 slots       layer 0, expert 5 | layer 0, expert 2 | layer 1, expert 7
    put (1, 4)    the one with the lowest priority goes, (0, 2) say; layers that are at work keep theirs

Priorities are those of whoever predicts (`carpool.memory.next_experts`). Without any, the one that came first goes.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import numpy.typing as npt
import torch

from carpool.activations.host_memory import host_zeros

_ALIGNMENT = 256
Priority = npt.NDArray[np.float64]


class ExpertCache:
    """Which experts are in the memory, and where.

    Args:
        layers: of each layer its parameters; a row of each belongs to one expert.
        size: bytes at most.
        host: the memory is the host's, from which the device copies by itself.

    Attributes:
        slots: how many experts there is room for.
        bytes: that are taken.
    """

    def __init__(
        self, layers: Sequence[Sequence[torch.Tensor]], size: int, device: torch.device, host: bool = False
    ) -> None:
        self._rows = [[(weight.shape[1:], weight.dtype) for weight in layer] for layer in layers]
        self._slot_bytes = max(expert_bytes(layer) for layer in layers)
        experts = max(weight.shape[0] for layer in layers for weight in layer)
        self.slots = min(size // self._slot_bytes, experts * len(layers))
        self.bytes = self.slots * self._slot_bytes
        shape = self.slots, self._slot_bytes
        if host:
            self._memory = host_zeros(shape, torch.uint8, device)
        else:
            self._memory = torch.empty(shape, dtype=torch.uint8, device=device)
        self._free = list(range(self.slots))
        # Of each layer and expert: its slot, or -1; and how manieth it came.
        self._slot: npt.NDArray[np.int64] = np.full((len(layers), experts), -1)
        self._since = np.zeros((len(layers), experts))
        self._puts = 0

    def held(self, layer: int) -> set[int]:
        """The experts of a layer that are there."""
        return set(np.flatnonzero(self._slot[layer] >= 0).tolist())

    def find(self, layer: int, expert: int) -> list[torch.Tensor] | None:
        """Where the expert's parameters are; None: they are not there."""
        slot = int(self._slot[layer, expert])
        return None if slot < 0 else self._views(layer, slot)

    def put(
        self,
        layer: int,
        expert: int,
        priority: Priority | None = None,
        stay: Collection[int] = (),
        only_lower: bool = False,
    ) -> list[torch.Tensor] | None:
        """Where an expert may be written that is not there; None: there is no room.

        Args:
            priority: of each layer and expert; of those that are there, the one with the lowest goes.
            stay: layers of which none goes.
            only_lower: none goes for one of a lower priority than its own. Where layers come in turn, each would
                otherwise lose its experts to the others before its next turn.
        """
        if self._free:
            slot = self._free.pop()
        else:
            leaves = np.where(self._slot >= 0, self._since if priority is None else priority, np.inf)
            leaves[list(stay)] = np.inf
            lowest = int(leaves.argmin())
            if not np.isfinite(leaves.flat[lowest]):
                return None
            if only_lower and priority is not None and leaves.flat[lowest] >= priority[layer, expert]:
                return None
            slot = int(self._slot.flat[lowest])
            self._slot.flat[lowest] = -1
        self._puts += 1
        self._slot[layer, expert], self._since[layer, expert] = slot, self._puts
        return self._views(layer, slot)

    def clear(self) -> None:
        """Nothing is there any more."""
        self._slot[:] = -1
        self._free = list(range(self.slots))

    def slot_of(self, layer: int, expert: int) -> int:
        """The number of the expert's slot."""
        return int(self._slot[layer, expert])

    def _views(self, layer: int, slot: int) -> list[torch.Tensor]:
        found, start = [], 0
        for shape, dtype in self._rows[layer]:
            size = shape.numel() * dtype.itemsize
            found.append(self._memory[slot, start : start + size].view(dtype).view(shape))
            start += _aligned(size)
        return found


def expert_bytes(layer: Sequence[torch.Tensor]) -> int:
    """What one expert of a layer takes in a cache."""
    return sum(_aligned(weight.shape[1:].numel() * weight.dtype.itemsize) for weight in layer)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
