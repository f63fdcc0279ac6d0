"""What a rank holds beside parameters and what layers keep: what is in use beside PyTorch's tensors, and what a layer
works with. `carpool.planner.memory.peak` says when it is there."""

from __future__ import annotations

MiB, GiB = 2**20, 2**30
# Of a GPU, beside PyTorch's tensors: CUDA's context and kernels, NCCL's first group and each further one, and the share
# of all tensors that the allocator cannot use.
CONTEXT_BYTES, NCCL_BYTES, NCCL_GROUP_BYTES, FRAGMENTS = GiB // 2, int(0.3 * GiB), int(0.2 * GiB), 0.03
# Components that a GPU has in use, and PyTorch does not count among its tensors.
BESIDE_TENSORS = ("context", "nccl", "fragments", "graphs")
# After an arena was too small, it gets this much of what was needed (`carpool.train.steps.capacity`).
ARENA_ROOM = 1.25
# Small tensors of int32 or float32 that a ride keeps for each row and choice: slots, weights, positions and orders.
INDEX_BYTES = 5 * 4


def beside_tensors(tensors: float, ranks: int, groups: int) -> dict[str, int]:
    """Bytes of a GPU that are in use beside PyTorch's tensors.

    Args:
        tensors: bytes of these.
        ranks: of the run.
        groups: kinds of process groups with more than one rank."""
    return {
        "context": CONTEXT_BYTES,
        "nccl": NCCL_BYTES + NCCL_GROUP_BYTES * max(0, groups - 1) if ranks > 1 else 0,
        "fragments": int(FRAGMENTS * tensors),
    }


def products_bytes(pairs: float, width: float, hidden: int, element: int) -> float:
    """Temporary tensors of a layer's experts in the backward: gradients of pre-activations (2 F a pair) and of
    activations, activations, and then dx in place of the second."""
    return pairs * (3 * width + max(width, hidden)) * element


def scores_bytes(tokens: float, heads: int, length: int, element: int) -> float:
    """Temporary tensors of attention that is not fused: two score matrices beside the one that is kept.

    Forward, `softmax` has its input and the scores without sinks or mask beside its result; backward, the gradients of
    its result and of its input are there at once.

    Args:
        tokens: of a rank; heads: of a rank; length: of a sequence."""
    return 2 * tokens * heads * length * element


def alone_bytes(layer: float, stored: int, reduced: int) -> tuple[float, float, float]:
    """What FSDP copies of one layer's experts where it has them (`carpool.hf.sharding`) and no other rank has the
    same ones to share them with: the parameters, to compute with them; gradients that wait for the next layer's;
    gradients at once, as they would be sent, divided, and as they would arrive (`foreach_reduce` of PyTorch 2.11 to
    2.13, in groups of one rank).

    Args:
        layer: parameters of a rank; stored, reduced: as of `gradient_buffers`."""
    return layer * stored, layer * reduced, 3 * layer * reduced


def gradient_buffers(whole: float, own: float, stored: int, reduced: int) -> float:
    """Bytes of gradients of parameters that are whole on each rank, which are there all the time: those of this rank,
    the sums of its shards, and these in the dtype of the shards (`carpool.parallel.flat`).

    Args:
        whole: parameters; own: those of them whose shards are this rank's.
        stored, reduced: bytes of an element of a parameter, and of a gradient as it is added up over ranks."""
    return whole * reduced + own * (reduced + (stored if stored != reduced else 0))
