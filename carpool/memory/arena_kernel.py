"""The CUDA side of `Arena.reserve`: one program, so that a reservation is one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from carpool.kernels.quick import power_of_2, quick


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
    """(begin, start): where the reservation begins, in bytes, and its slabs, in elements. `from_here`: the pointer, or
    where it is to be moved back to."""
    slabs = count.shape[0]
    begin, start = torch.empty_like(pointer), pointer.new_empty(slabs)
    _reserve[(1,)](
        pointer, peak, count, from_here, begin, start, slabs, row_bytes, capacity,
        ELEMENT=element, ALIGNMENT=alignment, PAD=power_of_2(slabs), num_warps=1,
    )  # fmt: skip
    return begin, start
