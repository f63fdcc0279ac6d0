"""Which side computes a tensor (kernels or plain PyTorch), on how many multiprocessors, and sums in a fixed order.

While rides run beside it, a computation may not use all multiprocessors. A persistent kernel starts one program on each
multiprocessor and gives each an equal share of the work. If a ride's kernel holds 8 of them, 8 programs wait until
others have ended, and the computation takes twice as long. So beside rides it leaves them theirs:

    with reserved(8):
        ...             # our kernels and PyTorch's matrix products start on 124 of 132

**Sums.** Both ends of a ride add hidden states: an expert's rank adds the outputs of the experts that share an arrival,
a token's rank adds the partial sums that come back. `index_add_` adds in order on the CPU, but with float atomics on
CUDA, whose order changes from run to run. There a Triton kernel walks each output row's list of inputs in order, in
float32, and reads every input once, in its own dtype, weighted on the way. So two runs are bitwise equal:

    values (N = 3)  a b c     index [1, 0, 1]     ->  order [1 | 0 2], starts [0, 1, 3, 3]
    row 0: b        row 1: a + c        row 2: nothing, zero
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

_reserved: ContextVar[int] = ContextVar("carpool_reserved_processors", default=0)


def on_gpu(tensor: torch.Tensor) -> bool:
    """Whether Triton's kernels compute on this tensor: it is on a GPU, and Triton is installed."""
    return tensor.is_cuda and importlib.util.find_spec("triton") is not None


def processors(device: torch.device) -> int:
    """Multiprocessors of a CUDA device that the code that runs now may use."""
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return max(1, count - _reserved.get())


@contextmanager
def reserved(count: int) -> Iterator[None]:
    """Inside, kernels leave `count` multiprocessors to others. 0: nothing changes."""
    if count == 0:
        yield
        return
    token, before = _reserved.set(count), torch._C._get_sm_carveout_experimental()
    torch._C._set_sm_carveout_experimental(count)
    try:
        yield
    finally:
        _reserved.reset(token)
        torch._C._set_sm_carveout_experimental(before)


def ordered_sum(
    values_NH: torch.Tensor, index_N: torch.Tensor, num_rows: int, weight_N: torch.Tensor | None = None
) -> torch.Tensor:
    """Sum the rows of `values_NH` that share an index, in order of their position.

    Args:
        values_NH: (N, H), any floating type; float64 is summed in float64, all else in float32.
        index_N: (N,) integer, the output row of each value row, 0 <= index < num_rows.
        weight_N: (N,) factor of each row, or None.

    Returns:
        (num_rows, H) float32 (or float64); rows that nobody names are zero.

    Example: values [[1.], [2.], [4.]], index [1, 0, 1], num_rows 3  ->  [[2.], [5.], [0.]]
    """
    dtype = torch.float64 if values_NH.dtype == torch.float64 else torch.float32
    out_RH = torch.zeros(num_rows, values_NH.shape[1], dtype=dtype, device=values_NH.device)
    if values_NH.is_cuda:
        order_N, starts = ordered_lists(index_N, num_rows)
        # Imported here: Triton is not needed, and maybe not there, on a machine without a GPU.
        from carpool.kernels.ordered_sum_kernel import launch

        launch(values_NH.contiguous(), order_N, starts, weight_N, out_RH)
        return out_RH
    values_NH = values_NH.to(dtype)
    if weight_N is not None:
        values_NH = values_NH * weight_N.to(dtype).unsqueeze(1)
    return out_RH.index_add_(0, index_N, values_NH)


def ordered_lists(index_N: torch.Tensor, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """For each output row the list of its inputs in order: (order_N, starts) with `num_rows + 1` starts, both int64."""
    order_N = torch.argsort(index_N, stable=True)
    starts = torch.zeros(num_rows + 1, dtype=torch.int64, device=index_N.device)
    starts[1:].scatter_add_(0, index_N.long(), torch.ones_like(index_N, dtype=torch.int64))
    return order_N, starts.cumsum(0)
