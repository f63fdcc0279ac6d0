"""The CUDA side of `Arena.reserve` and `copy_states`.

A reservation is one program, so that it is one launch.

A copy moves a matrix from one arena to another, which may be in pinned host memory. The rows of a slab are contiguous,
and begin at a multiple of 256 bytes. So a slab is copied in words of 16 bytes, whatever its dtype, and the last word
may contain some padding. A small grid suffices, because a link to host memory is slower than a few multiprocessors, and
the other multiprocessors compute meanwhile.

The copy engine would take no multiprocessor, but the host would have to know the begin and the size of each slab.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from carpool.activations.arrivals import HiddenStates
from carpool.kernels.quick import power_of_2, quick

PROGRAMS = 8  # thread blocks; not tuned


@quick
@triton.jit(do_not_specialize=["slabs", "row_bytes", "capacity"])
def _reserve(  # type: ignore[no-untyped-def]
    pointer, peak, count, from_here, begin, start, slabs, row_bytes, capacity, ELEMENT: tl.constexpr,
    ALIGNMENT: tl.constexpr, PAD: tl.constexpr,
):  # fmt: skip
    first = tl.load(from_here)
    slab = tl.arange(0, PAD)
    rows = tl.load(count + slab, mask=slab < slabs, other=0).to(tl.int64)
    size = (rows * row_bytes + (ALIGNMENT - 1)) // ALIGNMENT * ALIGNMENT
    end = first + tl.sum(size, 0)
    place = first + tl.cumsum(size, 0) - size
    tl.store(begin, first)
    tl.store(pointer, end)
    tl.store(peak, tl.maximum(tl.load(peak), end))
    tl.store(start + slab, tl.where(end > capacity, -1, place // ELEMENT), mask=slab < slabs)


def reserve(
    pointer: torch.Tensor,
    peak: torch.Tensor,
    count: torch.Tensor,
    from_here: torch.Tensor,
    row_bytes: int,
    element: int,
    alignment: int,
    capacity: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(begin, start): the begin of the reservation, in bytes, and of its slabs, in elements. `from_here`: the pointer,
    or the earlier place to which it is reset first."""
    slabs = count.shape[0]
    begin, start = torch.empty_like(pointer), pointer.new_empty(slabs)
    _reserve[(1,)](
        pointer, peak, count, from_here, begin, start, slabs, row_bytes, capacity,
        ELEMENT=element, ALIGNMENT=alignment, PAD=power_of_2(slabs), num_warps=1,
    )  # fmt: skip
    return begin, start


@quick
@triton.jit(do_not_specialize=["slabs", "row_bytes"])
def _copy_slabs(  # type: ignore[no-untyped-def]
    source, target, count, source_start, target_start, slabs, row_bytes, ELEMENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    for slab in range(0, slabs):
        words = (tl.load(count + slab).to(tl.int64) * row_bytes + 15) // 16 * 4
        begin, end = tl.load(source_start + slab), tl.load(target_start + slab)
        if (begin >= 0) & (end >= 0):
            read = source + tl.multiple_of(begin * ELEMENT // 4, 64)
            write = target + tl.multiple_of(end * ELEMENT // 4, 64)
            for block in range(tl.program_id(0), tl.cdiv(words, BLOCK), tl.num_programs(0)):
                word = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
                tl.store(write + word, tl.load(read + word, mask=word < words), mask=word < words)


def copy_slabs(states: HiddenStates, out: HiddenStates) -> None:
    """Copy the valid rows of a matrix in an arena to a reservation of the same sizes in another one."""
    assert states.start is not None and out.start is not None and states.count is not None
    element = states.data.element_size()
    source, target = (data.view(torch.uint8).view(torch.int32) for data in (states.data, out.data))
    _copy_slabs[(PROGRAMS,)](
        source, target, states.count, states.start, out.start, states.start.shape[0], states.width * element,
        ELEMENT=element, BLOCK=4096, num_warps=4,
    )  # fmt: skip
