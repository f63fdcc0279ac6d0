"""Moving experts to other homes between two steps: their parameters and their optimizer state.

An expert's home has one row of each stacked parameter and one of each optimizer state of that shape (both moments of
Adam, the low bits of float32 masters, the scales of 8-bit moments). Training continues unchanged only if all of them
move together: with the moments of other experts the loss curve would look normal. Every rank knows both layouts, so
nothing is negotiated: rows that change their rank are sent once, in one all-to-all per tensor, and rows that only
change their place are copied.

    homes 0: [0, 1]  1: [2, 3]   ->   homes 0: [2, 0]  1: [1, 3]
    rank 0 sends row 1 (expert 1), and puts the received row (expert 2) first, its own row 0 second;  rank 1 the reverse

Memory: if numbers of experts per rank do not change, they move in place, through buffers of at most `CHUNK_BYTES` on
    each
side: long rows are cut into pieces of columns, and all rows of a piece move together. Otherwise the parameter's shape
changes, and one new tensor at a time is allocated.

The parameter stays the same object, so that the optimizer finds its state. Rows are copied exactly; another layout only
changes the order in which sums over ranks are computed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from carpool.parallel.ranks import gather

# Size of the send buffer, and of the receive buffer.
CHUNK_BYTES = 64 * 2**20
Rows = Sequence[Sequence[int]]


@dataclass(frozen=True)
class Moved:
    """Statistics of a migration, over all layers and all ranks of one data-parallel replica.

    Attributes:
        layers: number of layers whose homes or slots changed.
        experts: homes that changed rank.
        bytes: sent between ranks.
        seconds: of this rank.
    """

    layers: int = 0
    experts: int = 0
    bytes: int = 0
    seconds: float = 0.0

    def __add__(self, other: Moved) -> Moved:
        return Moved(
            self.layers + other.layers,
            self.experts + other.experts,
            self.bytes + other.bytes,
            self.seconds + other.seconds,
        )


class RowMove:
    """The sends, receives and copies of one rank that reorder the rows of a distributed matrix.

    Args:
        before, after: for each rank, the ids of its rows, in order. Each id occurs once.
    """

    def __init__(self, before: Rows, after: Rows, rank: int) -> None:
        where = {name: r for r, names in enumerate(before) for name in names}
        place = {name: i for i, name in enumerate(before[rank])}
        assert sorted(where) == sorted(name for names in after for name in names), "rows would be lost"
        peers = range(len(before))
        self.send = [[place[n] for n in names if n in place] if r != rank else [] for r, names in enumerate(after)]
        wanted = [(where[name], i) for i, name in enumerate(after[rank])]
        self.receive = [[i for source, i in wanted if source == r != rank] for r in peers]
        self.stay = [(place[name], i) for i, name in enumerate(after[rank]) if name in place]
        self.rows = len(after[rank])
        # The same on all ranks: rows that are sent, and the largest number that any rank sends, receives or copies.
        self.travelling = sum(where[name] != r for r, names in enumerate(after) for name in names)
        self.most = max(1, *map(len, before), *map(len, after))

    def apply(
        self, rows: torch.Tensor, group: dist.ProcessGroup | None, chunk_bytes: int = CHUNK_BYTES
    ) -> torch.Tensor:
        """Reorder rows: in place if their number on this rank does not change, else in a new tensor. Collective over
        `group` (None: all ranks), whose ranks are those of `before`, if anything is sent."""
        in_place = self.rows == rows.shape[0] and rows.is_contiguous()
        out = rows if in_place else rows.new_empty(self.rows, *rows.shape[1:])
        stay = [(i, j) for i, j in self.stay if not in_place or i != j]
        columns = rows.flatten(1).shape[1] if rows.dim() > 1 else 1
        source, target = rows.reshape(rows.shape[0], columns), out.view(self.rows, columns)
        width = max(1, chunk_bytes // (self.most * rows.element_size()))
        index = [
            torch.tensor(one, dtype=torch.int64, device=rows.device)
            for one in (_flat(self.send), _flat(self.receive), [i for i, _ in stay], [j for _, j in stay])
        ]
        for first in range(0, columns, width):
            part = slice(first, min(first + width, columns))
            leaving, staying = source[index[0], part], source[index[2], part]
            if self.travelling:
                came = leaving.new_empty(len(index[1]), leaving.shape[1])
                # As bytes: gloo and NCCL do not support int16.
                to, of = came.view(torch.uint8), leaving.view(torch.uint8)
                dist.all_to_all_single(to, of, _lengths(self.receive), _lengths(self.send), group=group)
                target[index[1], part] = came
            target[index[3], part] = staying
        return out


@torch.no_grad()
def move_experts(
    parameters: Iterable[nn.Parameter],
    move: RowMove,
    optimizer: torch.optim.Optimizer | None,
    group: dist.ProcessGroup | None,
    chunk_bytes: int = CHUNK_BYTES,
    average: torch.optim.Optimizer | None = None,
) -> int:
    """Move rows of parameters and of their optimizer state. Collective, between an optimizer's step and the next
    forward.

    Args:
        average: has an average of each parameter, which moves with it.

    Returns:
        Bytes sent, over all ranks of the move.

    Raises:
        ValueError: the optimizer has state that cannot be divided by experts; see `check_can_move`.
    """
    moved = 0
    for parameter in parameters:
        averages = [] if average is None else list(_tensors(parameter, average))[1:]
        for owner, key, tensor in [*_tensors(parameter, optimizer), *averages]:
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            rows = move.apply(local, group, chunk_bytes)
            moved += move.travelling * local.element_size() * math.prod(local.shape[1:])
            if rows is local:
                continue
            if isinstance(tensor, DTensor):
                local.copy_(rows)  # FSDP references this memory
            elif owner is None:
                _replace(parameter, rows)
            else:
                owner[key] = rows
    return moved


def check_can_move(
    parameters: Iterable[nn.Parameter],
    optimizer: torch.optim.Optimizer | None,
    group: dist.ProcessGroup | None,
    problem: str = "",
) -> None:
    """Raise the ValueErrors of `move_experts`, on all ranks, before anything has moved. Collective over `group` (None:
    all ranks). problem: a reason of this rank against the move, or ""."""
    kept = []
    for parameter in parameters:
        if parameter.grad is not None:
            problem = (
                "experts move between steps, and their parameters have gradients: call this after optimizer.step() and "
                "zero_grad(set_to_none=True)"
            )
        try:
            found = sorted(key for _, key, _ in _tensors(parameter, optimizer))
        except ValueError as error:
            problem, found = str(error), []
        steps = optimizer.state.get(parameter, {}).get("step", 0) if optimizer is not None else 0
        kept.append((found, float(steps)))
    for rank, (text, theirs) in enumerate(gather((problem, kept), group)):
        if text:
            raise ValueError(f"rank {rank}: {text}")
        if theirs != kept:
            raise ValueError(
                f"the optimizer of rank {rank} keeps other things of its experts than that of this rank, or has taken "
                "another number of steps: experts cannot move between them. Every rank's experts need a gradient in "
                "every step, zero where no token came (carpool.reduce_gradients sees to that)"
            )


def _tensors(
    parameter: nn.Parameter, optimizer: torch.optim.Optimizer | None
) -> Iterator[tuple[dict[str, Any] | None, str, torch.Tensor]]:
    """(state dict, key, tensor) of all tensors with a row for each of the parameter's rows: the parameter itself, with
    state dict None, and its optimizer state. Scales of blocks differ in the last dimension alone."""
    found: list[tuple[dict[str, Any] | None, str, torch.Tensor]] = [(None, "", parameter.data)]
    state = optimizer.state.get(parameter, {}) if optimizer is not None else {}
    for key in sorted(state):
        value = state[key]
        if not isinstance(value, torch.Tensor):
            continue
        if value.dim() == parameter.dim() > 0 and value.shape[:-1] == parameter.shape[:-1]:
            found.append((state, key, value))
        elif value.numel() != 1:
            raise ValueError(
                f"{type(optimizer).__name__} keeps {key!r} of shape {tuple(value.shape)} for experts of shape "
                f"{tuple(parameter.shape)}, and which part belongs to which expert is not known: experts cannot move "
                "with this optimizer"
            )
    yield from found


def _replace(parameter: nn.Parameter, rows: torch.Tensor) -> None:
    """Give a parameter memory of another shape."""
    # If the last loss is still alive, its graph references the node that accumulates this parameter's gradient, which
    # expects the old shape. PyTorch creates a new node when the dtype changes.
    other = torch.float16 if parameter.dtype != torch.float16 else torch.float32
    parameter.data = rows.new_empty(0, dtype=other)
    parameter.data = rows


class Stopwatch:
    """Measures the seconds of work on a device. Reading it waits for the device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._wait()
        self._start = time.perf_counter()

    def seconds(self) -> float:
        self._wait()
        return time.perf_counter() - self._start

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _flat(lists: Sequence[Sequence[int]]) -> list[int]:
    return [one for part in lists for one in part]


def _lengths(lists: Sequence[Sequence[int]]) -> list[int]:
    return [len(part) for part in lists]
