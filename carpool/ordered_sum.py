"""Sums of rows in a fixed order, so that two runs are bitwise equal."""

from __future__ import annotations

import torch


def ordered_sum(values_NH: torch.Tensor, index_N: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Sum the rows of `values_NH` that share an index, in order of their position.

    Args:
        values_NH: (N, H), any floating type; float64 is summed in float64, all else in float32.
        index_N: (N,) integer, the output row of each value row, 0 <= index < num_rows.

    Returns:
        (num_rows, H) float32 (or float64); rows that nobody names are zero.

    Example: values [[1.], [2.], [4.]], index [1, 0, 1], num_rows 3  ->  [[2.], [5.], [0.]]

    On the CPU `index_add_` walks the rows in order. On CUDA it uses float atomics, whose order changes from run
    to run; there a stable sort and one thread per (row, column) fix it.
    """
    dtype = torch.float64 if values_NH.dtype == torch.float64 else torch.float32
    if values_NH.device.type != "cuda" or values_NH.shape[0] == 0 or num_rows == 0:
        out = torch.zeros(num_rows, values_NH.shape[1], dtype=dtype, device=values_NH.device)
        return out.index_add_(0, index_N, values_NH.to(dtype))
    order_N = torch.argsort(index_N, stable=True)
    lengths = torch.zeros(num_rows, dtype=torch.int64, device=index_N.device)
    lengths.scatter_add_(0, index_N.long(), torch.ones_like(index_N, dtype=torch.int64))
    return torch.segment_reduce(values_NH.to(dtype)[order_N], "sum", lengths=lengths, axis=0, unsafe=True, initial=0.0)
