"""What a forward keeps for its backward, and what both take at most."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence

import torch

from carpool.activations import Arena


def measure(
    forward: Callable[[], torch.Tensor],
    leaves: Sequence[torch.Tensor],
    dy_TH: torch.Tensor,
    arena: Arena | None = None,
) -> tuple[int, int | None]:
    """(bytes kept between forward and backward, most bytes at one time); without input, weights, and dy, which are
    there before. What is kept is without the output too, which belongs to whoever called.

    On CUDA the allocator is asked, so whatever is kept counts, by whatever means; what lies in an arena, which is there
    before, is added. On CPU the tensors are counted that autograd saved, and the peak is not known (None).
    """
    if dy_TH.device.type != "cuda":
        return _count_saved(forward, leaves), None
    device = dy_TH.device
    gc.collect()
    if arena is not None:
        arena.reset_peak()
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    y_TH = forward()
    saved = torch.cuda.memory_allocated(device) - before - y_TH.untyped_storage().nbytes()
    gradients = torch.autograd.grad(y_TH, leaves, dy_TH)
    peak = torch.cuda.max_memory_allocated(device) - before
    del gradients
    in_arena = int(arena.needed.item()) if arena is not None else 0
    return saved + in_arena, peak + in_arena


def _count_saved(forward: Callable[[], torch.Tensor], leaves: Sequence[torch.Tensor]) -> int:
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage  # held, so that its address stays its own
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y_TH = forward()
    outside = {tensor.untyped_storage().data_ptr() for tensor in (*leaves, y_TH)}
    return sum(storage.nbytes() for address, storage in kept.items() if address not in outside)
