"""The CUDA side of `copy_rows`: what is in one arena into another one, which may be in pinned host memory.

Rows of a slab lie one after the other, and begin at a multiple of 256 bytes. So a slab is a run of pieces of 16 bytes,
whatever the rows' dtype, and the last piece may take some of the padding with it. A small grid walks the pieces that
there are: a link to host memory is slower than a few multiprocessors, and the others compute meanwhile.

The copy engine would take no multiprocessor, but the host would have to know where rows begin and how many there are.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from carpool.kernels.quick import quick
from carpool.memory.rows import Rows

PROGRAMS = 8  # thread blocks; not tuned


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


def copy_slabs(rows: Rows, kept: Rows) -> None:
    """Copy the rows of an arena to a reservation of the same sizes in another one."""
    assert rows.start is not None and kept.start is not None and rows.count is not None
    element = rows.data.element_size()
    source, target = (data.view(torch.uint8).view(torch.int32) for data in (rows.data, kept.data))
    _copy_slabs[(PROGRAMS,)](
        source, target, rows.count, rows.start, kept.start, rows.start.shape[0], rows.width * element,
        ELEMENT=element, BLOCK=4096, num_warps=4,
    )  # fmt: skip
