"""One contender at work: forward, backward, and what is said when it cannot."""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch

from carpool.bench.moe.answers import Case

Forward = Callable[[], torch.Tensor]
OUT_OF_MEMORY = "out of memory"


def forward_backward(forward: Forward, case: Case) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """The output and the gradients of `case.leaves`."""
    y_TH = forward()
    return y_TH.detach(), torch.autograd.grad(y_TH, case.leaves, case.dy_TH)


def is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, torch.OutOfMemoryError):
        return True
    text = str(error).lower()
    return isinstance(error, MemoryError | RuntimeError) and any(
        part in text for part in (OUT_OF_MEMORY, "can't allocate memory", "not enough memory")
    )


def why_not(error: Exception, theirs: bool) -> str | None:
    """One line for the table if a contender could not run, or None if the error is something else: a bug.

    `theirs`: it is transformers', where PyTorch says that a size is not to its liking; Carpool's say so themselves."""
    if is_out_of_memory(error):
        return OUT_OF_MEMORY
    kinds = (ValueError, NotImplementedError, ImportError, *((RuntimeError,) if theirs else ()))
    if isinstance(error, kinds) and not isinstance(error, torch.AcceleratorError):
        return (str(error).strip() or type(error).__name__).splitlines()[0]
    return None


def free(device: torch.device) -> None:
    """Give back what nobody holds any more, after something failed."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
