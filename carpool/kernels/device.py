"""On what a tensor is computed: by kernels or by plain PyTorch, and on how many multiprocessors of a GPU.

While rides run beside it, a computation may not use all multiprocessors. A persistent kernel starts one program on each
multiprocessor and gives each an equal share of the work. If a ride's kernel holds 8 of them, 8 programs wait until
others have ended, and the computation takes twice as long. So beside rides it leaves them theirs:

    with reserved(8):
        ...             # our kernels and PyTorch's matrix products start on 124 of 132
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
