"""The optimizer's state in host memory, and the tiles in which it goes through the device.

**Slabs.** State of one kind (all first moments, say) lies side by side in one piece of memory, parameter after
parameter. So a tile that takes the end of one parameter and the start of the next is still one copy for each kind:

    exp_avg      | embedding ................ | norm | experts ........
    exp_avg_sq   | embedding ................ | norm | experts ........
    low_bits     | embedding ................ | norm | experts ........
    tiles        |--- 0 ---|--- 1 ---|---- 2 ----|---- 3 ----| ...

**Tiles** end at blocks of 256 elements, with 8-bit moments at rows of the last dimension, so that no block and no scale
is in two of them. The update of an element depends on nothing but that element and its block. Therefore tiles of any
size give the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from carpool.activations.host_memory import host_zeros
from carpool.memory.disk import mapped_zeros
from carpool.optim.state_bits import BLOCK, scale_shape

# Parameters begin at multiples of so many elements: the kernel reads round addresses faster.
ALIGNMENT = 64
SCALES = ("exp_avg_scale", "exp_avg_sq_scale")


@dataclass(frozen=True)
class Place:
    """Where a parameter's state lies in its slab.

    Attributes:
        start, scale_start: its first element, and its first scale.
        elements: of the parameter.
        width: elements of a row of blocks: all, but for 8-bit moments, whose blocks end with rows.
    """

    start: int
    scale_start: int
    elements: int
    width: int

    @property
    def blocks_per_row(self) -> int:
        return -(-self.width // BLOCK)


class Slab:
    """State of parameters that are kept alike, in host memory.

    Args:
        shapes: of each parameter's part on this rank.
        low_bits: whether they have any.
        moments: float32, bfloat16 or uint8.
        device: what copies.
        folder: the memory is that of files there; None: page-locked memory.

    Attributes:
        memory: by kind of state, all parameters' side by side.
        places: of each parameter.
    """

    def __init__(
        self,
        shapes: Sequence[torch.Size],
        low_bits: bool,
        moments: torch.dtype,
        device: torch.device,
        folder: Path | None = None,
    ) -> None:
        self.shapes, self.places = list(shapes), list[Place]()
        elements = scales = 0
        for shape in shapes:
            numel = shape.numel()
            width = shape[-1] if moments == torch.uint8 else numel
            self.places.append(Place(elements, scales, numel, max(1, width)))
            elements += -(-numel // ALIGNMENT) * ALIGNMENT
            if moments == torch.uint8:
                scales += torch.Size(scale_shape(shape)).numel()
        kinds = {"exp_avg": moments, "exp_avg_sq": moments} | ({"low_bits": torch.int16} if low_bits else {})
        sizes = dict.fromkeys(kinds, elements)
        if moments == torch.uint8:
            kinds |= dict.fromkeys(SCALES, torch.float32)
            sizes |= dict.fromkeys(SCALES, scales)
        self.memory = {
            name: host_zeros((sizes[name],), dtype, device)
            if folder is None
            else mapped_zeros(folder, (sizes[name],), dtype)
            for name, dtype in kinds.items()
        }
        self.bytes_per_element = sum(value.itemsize for name, value in self.memory.items() if name not in SCALES)

    def state(self, i: int) -> dict[str, torch.Tensor]:
        """Of the i-th parameter, in its shape; scales in `scale_shape`."""
        place, shape, found = self.places[i], self.shapes[i], {}
        for name, memory in self.memory.items():
            own = torch.Size(scale_shape(shape)) if name in SCALES else shape
            start = place.scale_start if name in SCALES else place.start
            found[name] = memory[start : start + own.numel()].view(own)
        return found


@dataclass(frozen=True)
class Segment:
    """Blocks `first` to `stop` of one parameter.

    Attributes:
        number: of the parameter among the optimizer's.
        start, end: its elements.
    """

    number: int
    place: Place
    first: int
    stop: int
    start: int
    end: int


@dataclass(frozen=True)
class Tile:
    """Segments that lie side by side in one slab."""

    slab: Slab
    segments: tuple[Segment, ...]

    def range_of(self, name: str) -> tuple[int, int]:
        """What it takes of a kind of state: first and last element in the slab."""
        first, last = self.segments[0], self.segments[-1]
        if name in SCALES:
            return first.place.scale_start + first.first, last.place.scale_start + last.stop
        return first.place.start + first.start, last.place.start + last.end


def cut(slabs: Sequence[tuple[Slab, int]], numbers: Sequence[int], tile_bytes: int) -> Iterator[Tile]:
    """The tiles of some parameters, in their order.

    Args:
        slabs: of each of the optimizer's parameters: its slab, and its place there.
        numbers: of the parameters.
        tile_bytes: of state that a tile takes at most; a row of 8-bit moments is not cut.
    """
    found: list[Segment] = []
    room, slab = 0, None
    for number in numbers:
        its, i = slabs[number]
        place = its.places[i]
        # A row with its scales; without scales, a block.
        by_rows = SCALES[0] in its.memory
        blocks = place.blocks_per_row if by_rows else 1
        unit = place.width if by_rows else BLOCK
        size = unit * its.bytes_per_element + (8 * blocks if by_rows else 0)
        units, done = -(-place.elements // unit) if place.elements else 0, 0
        if found and (its is not slab or not _adjoins(found[-1], place)):
            assert slab is not None
            yield Tile(slab, tuple(found))
            found, room = [], 0
        slab = its
        while done < units:
            if not found:
                room = tile_bytes
            take = min(units - done, max(room // size, 0 if found else 1))
            if take:
                end = min((done + take) * unit, place.elements)
                found.append(Segment(number, place, done * blocks, (done + take) * blocks, done * unit, end))
                done, room = done + take, room - take * size
            if done < units:
                yield Tile(slab, tuple(found))
                found = []
    if found:
        assert slab is not None
        yield Tile(slab, tuple(found))


def _adjoins(before: Segment, place: Place) -> bool:
    """Whether the slab has nothing but padding between a segment and the next parameter."""
    last = before.place
    return before.end == last.elements and 0 <= place.start - (last.start + last.elements) < ALIGNMENT
