"""The update of parameters whose state is in host memory: it goes through the device in tiles.

    copies in     tile 0 | tile 1 |        tile 2 |        tile 3 | ...      a stream of its own
    update                 tile 0 | tile 1 |        tile 2 | ...             a stream of its own, after the caller's
    copies out                      tile 0 | tile 1 |        tile 2 | ...    a stream of its own

Buffers of the device take turns. While one is copied out another is copied in, so that both directions of the link are
busy; the update itself takes a tenth of that. A buffer is filled again when its tile has gone out. Two would do if each
update began at once, but a kernel of the backward may hold all multiprocessors for longer than a tile's copies take:
there are `TILES` of them, and the update's stream comes first when a multiprocessor is free.

The caller's stream waits for none of them until `join`: a backward goes on beside them. What the update reads and
writes, weights and gradients, must stay until `done`.

The kernel is that of state on the device, and knows nothing of tiles: addresses in its table point so far before the
buffer that the tile's first element is where it should be. No arithmetic is done on the CPU. On a CPU device tiles are
copied to buffers and back by plain copies.

State on disk (ZeRO-Infinity, arXiv 2104.07857) comes and goes through page-locked buffers, which a thread reads ahead
and writes behind; all else is the same.

A CUDA graph may hold all of it but state on disk (`carpool.optim.adamw`): memory in slabs and buffers stays
where it is, so the copies of a replay are those of the capture. The three streams are forked into the capture by
`count` and joined by `join`, which waits for copies out, too: nothing of a graph is under way when it ends. Tables are
those of the eager steps before, in which tiles came in the same turns.

What is in host memory is valid on the host after `synchronize`.

**Slabs.** State of one kind (all first moments, say) is one piece of memory, parameter after parameter. So a tile that
takes the end of one parameter and the start of the next is still one copy for each kind:

    exp_avg      | embedding ................ | norm | experts ........
    exp_avg_sq   | embedding ................ | norm | experts ........
    low_bits     | embedding ................ | norm | experts ........
    tiles        |--- 0 ---|--- 1 ---|---- 2 ----|---- 3 ----| ...

**Tiles** end at blocks of 256 elements, with 8-bit moments at rows of the last dimension, so that no block and no scale
is in two of them. The update of an element depends on nothing but that element and its block. Therefore tiles of any
size give the same bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from carpool.activations.host_memory import event_now, host_zeros, on_stream
from carpool.kernels.device import on_gpu
from carpool.memory import TIERS
from carpool.optim.adamw_reference import BLOCK, scale_shape
from carpool.optim.update import KINDS, State, Update, Use, local

# Of state in a buffer: at 50 GB/s more than a millisecond each way, which the host's work for a tile is hidden behind.
TILE_BYTES = 64 * 2**20
TILES = 8  # on the device at a time
_ROUND = 256
# Parameters begin at multiples of so many elements: the kernel reads round addresses faster.
ALIGNMENT = 64
SCALES = ("exp_avg_scale", "exp_avg_sq_scale")


@dataclass(frozen=True)
class Place:
    """Where a parameter's state lies in its slab.

    Attributes:
        start, scale_start: its first element, and its first scale.
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
        folder: the memory is that of files there; None: page-locked memory.

    Attributes:
        memory: by kind of state, all parameters' side by side.
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
            else TIERS["disk"].zeros(folder, (sizes[name],), dtype)
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


class StreamedUpdate(Update):
    """As `Update`, of parameters whose state is in slabs.

    Args:
        slabs: of each parameter: its slab, and its place there.
        on_disk: slabs are memory of files (`carpool.memory.TIERS`).

    Attributes:
        bytes_in, bytes_out: that have travelled so far.
        staging: between slabs on disk and the device; None: they are in host memory.
    """

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        groups: Sequence[int],
        states: Sequence[State],
        slabs: Sequence[tuple[Slab, int]],
        device: torch.device,
        on_disk: bool = False,
    ) -> None:
        super().__init__(parameters, groups, states, device)
        self._slabs, self._tile_bytes = list(slabs), TILE_BYTES
        self._tiles: dict[tuple[int, ...], list[Tile]] = {}
        self._buffers: list[torch.Tensor] = [torch.empty(0, dtype=torch.uint8, device=device) for _ in range(TILES)]
        self._turn = self.bytes_in = self.bytes_out = 0
        # Before what is captured, too (`carpool.kernels.capture`).
        streams: list[Any] = [torch.cuda.Stream(device, -2) if device.type == "cuda" else None for _ in range(3)]
        self._into, self._work, self._out = streams
        self._free: list[Any] = [None] * TILES
        self.staging = TIERS["disk"].staging(device) if on_disk else None
        # Bytes each way before a capture; and what was captured: the next turn, and bytes each way.
        self._before, self._captured = (0, 0), (0, 0, 0)

    def count(self, rates: dict[int, torch.Tensor], factor: torch.Tensor | None) -> None:
        super().count(rates, factor)
        self._turn = 0  # so that a tile finds its tables of the step before
        if self._into is None:
            return
        self._free = [None] * TILES
        if torch.cuda.is_current_stream_capturing():
            # After what was sent out before (`settle`).
            self._fork()
        else:
            # What the step before has sent out is what this one takes in, through the same buffers.
            self._into.wait_stream(self._out)

    def apply(self, numbers: Iterable[int], use: Use) -> None:
        with on_stream(self._work, event_now(self.device)):
            super().apply(numbers, use)
            self.done = event_now(self.device)

    def join(self) -> None:
        if self._into is not None and torch.cuda.is_current_stream_capturing():
            for stream in (self._into, self._work, self._out):
                self._after(stream)
        elif self.done is not None:
            torch.cuda.current_stream(self.device).wait_event(self.done)

    def settle(self) -> None:
        self._after(self._out)

    def record(self) -> None:
        super().record()
        self._before = self.bytes_in, self.bytes_out

    def note_recorded(self) -> None:
        super().note_recorded()
        bytes_in, bytes_out = self._before
        self._captured = self._turn, self.bytes_in - bytes_in, self.bytes_out - bytes_out
        self.bytes_in, self.bytes_out = bytes_in, bytes_out
        # Nobody may wait for events of a capture after it.
        self.done, self._free = None, [None] * TILES

    def replayed(self) -> None:
        self._turn, bytes_in, bytes_out = self._captured
        self.bytes_in, self.bytes_out = self.bytes_in + bytes_in, self.bytes_out + bytes_out
        self.done, self._free = None, [None] * TILES
        self._fork()

    def synchronize(self) -> None:
        """Wait until host memory has what the last update has made."""
        if self._out is not None:
            self._out.synchronize()
        if self.staging is not None:
            self.staging.flush()

    def _launch(self, numbers: tuple[int, ...], grads: dict[int, torch.Tensor], use: Use) -> None:
        for tile in self._tiles_of(numbers):
            self._stream(tile, grads, use)

    def _plainly(self, grads: dict[int, torch.Tensor], use: Use) -> None:
        for tile in self._tiles_of(tuple(grads)):
            self._stream(tile, grads, use)

    def _tiles_of(self, numbers: tuple[int, ...]) -> list[Tile]:
        if numbers not in self._tiles:
            self._tiles[numbers] = list(cut(self._slabs, numbers, self._tile_bytes))
        return self._tiles[numbers]

    def _stream(self, tile: Tile, grads: dict[int, torch.Tensor], use: Use) -> None:
        """One tile in, updated, and out."""
        if not any(segment.number in grads for segment in tile.segments):
            return
        turn, self._turn = self._turn, (self._turn + 1) % TILES
        views = self._views(tile, turn)
        hosts = {name: tile.slab.memory[name][slice(*tile.range_of(name))] for name in views}
        if self.staging is not None:
            hosts = dict(zip(hosts, self.staging.take(tile, list(hosts.values())), strict=True))
        with on_stream(self._into, self._free[turn]):
            for name, view in views.items():
                view.copy_(hosts[name], non_blocking=True)
                self.bytes_in += view.nbytes
        self._after(self._into)
        if on_gpu(self.coefficients):
            self._launch_tile(tile, turn, views, grads, use)
        else:
            self._update_tile(tile, views, grads, use)
        with on_stream(self._out, event_now(self.device)):
            for name, view in views.items():
                hosts[name].copy_(view, non_blocking=True)
                self.bytes_out += view.nbytes
            self._free[turn] = event_now(self.device)
        if self.staging is not None:
            self.staging.give(tile, self._free[turn])

    # -- streams: nothing on a CPU ---------------------------------------------------------------------------------

    def _fork(self) -> None:
        """All streams go on after what the current one has been asked for."""
        for stream in (self._into, self._work, self._out):
            if stream is not None:
                stream.wait_stream(torch.cuda.current_stream(self.device))

    def _after(self, stream: Any) -> None:
        """The current stream goes on when another has done what it was asked for."""
        if stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(stream)

    # -- buffers ---------------------------------------------------------------------------------------------------

    def _views(self, tile: Tile, turn: int) -> dict[str, torch.Tensor]:
        """Where a tile's state is in a buffer, by kind."""
        memory, starts, size = tile.slab.memory, {}, 0
        for name in KINDS:
            if name in memory:
                begin, end = tile.range_of(name)
                starts[name] = size, end - begin
                size += -(-(end - begin) * memory[name].itemsize // _ROUND) * _ROUND
        if self._buffers[turn].numel() < size:
            self._make_buffers(max(size, self._tile_bytes + len(KINDS) * _ROUND))
        buffer = self._buffers[turn]
        return {
            name: buffer[start : start + numel * memory[name].itemsize].view(memory[name].dtype)
            for name, (start, numel) in starts.items()
        }

    def _make_buffers(self, size: int) -> None:
        if self._into is not None:
            # Copies on other streams may still use those of before.
            torch.cuda.synchronize(self.device)
        self._buffers = [torch.empty(size, dtype=torch.uint8, device=self.device) for _ in self._buffers]
        if self._into is not None:
            # Deterministic algorithms fill new memory on the current stream; copies in come after that.
            self._into.wait_stream(torch.cuda.current_stream(self.device))
        self._tables.clear()

    # -- what updates ----------------------------------------------------------------------------------------------

    def _launch_tile(
        self, tile: Tile, turn: int, views: dict[str, torch.Tensor], grads: dict[int, torch.Tensor], use: Use
    ) -> None:
        numbers = [segment.number for segment in tile.segments]
        weights = [local(self.parameters[number]).data_ptr() for number in numbers]

        def row_of(place: int) -> tuple[list[int], int]:
            """Addresses as if the buffer held the state of the whole parameter."""
            segment, row = tile.segments[place], [weights[place]]
            for name in KINDS:
                if (view := views.get(name)) is None:
                    row.append(0)
                    continue
                start = segment.place.scale_start if name in SCALES else segment.place.start
                row.append(view.data_ptr() + (start - tile.range_of(name)[0]) * view.itemsize)
            whole = segment.place
            return [*row, whole.width, segment.stop, whole.blocks_per_row, segment.number], segment.first

        self._launch_rows((tile, turn), numbers, weights, row_of, grads, use)

    def _update_tile(
        self, tile: Tile, views: dict[str, torch.Tensor], grads: dict[int, torch.Tensor], use: Use
    ) -> None:
        for segment in tile.segments:
            number, place = segment.number, segment.place
            if (grad := grads.get(number)) is None:
                continue
            state = {}
            for name, view in views.items():
                scales = name in SCALES
                begin = tile.range_of(name)[0]
                first = place.scale_start + segment.first if scales else place.start + segment.start
                length = segment.stop - segment.first if scales else segment.end - segment.start
                part = view[first - begin : first - begin + length]
                state[name] = part.view(-1, place.blocks_per_row) if scales else self._rows(part, tile, place.width)
            weight, part = (
                self._rows(whole.view(-1)[segment.start : segment.end], tile, place.width)
                for whole in (local(self.parameters[number]), grad)
            )
            self._update_plainly(number, weight, part, state, use, segment.start)

    @staticmethod
    def _rows(part: torch.Tensor, tile: Tile, width: int) -> torch.Tensor:
        return part.view(-1, width) if SCALES[0] in tile.slab.memory else part
