"""Whether the ranks of a group can use the `nvlink` transport, and if not, why.

It takes Triton and CUDA on every rank, a group whose backend is nccl, and GPUs that reach each other's memory: those of
a node or of an NVLink domain (`Topology.why_no_peer_memory`). Each rank looks at what is its own, then all tell each
other, so that every rank gets the same answer:

    why_not(group)      None                                      they can
                        "GPU 0 cannot reach the memory of GPU 1"  a reason, to be shown to whoever asked for it
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from carpool.transport.nodes import topology_of


def why_not(group: dist.ProcessGroup | None) -> str | None:
    """Why the ranks of a group cannot use this transport, or None if they can. Collective over the group."""
    reason = None
    try:
        import triton  # noqa: F401
    except ImportError:
        reason = "Triton is not installed"
    if not torch.cuda.is_available():
        reason = "there is no CUDA device"
    if group is None:
        return reason
    if reason is None and dist.get_backend(group) != "nccl":
        reason = f"the process group's backend is {dist.get_backend(group)}, not nccl"
    return _agree_why_not(group, reason)


def _agree_why_not(group: dist.ProcessGroup, reason: str | None) -> str | None:
    """The first reason of any rank, or what their topology and devices say."""
    index = torch.cuda.current_device() if reason is None else -1
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, (reason, index), group=group)
    for theirs, _ in everyone:
        if theirs is not None:
            return str(theirs)
    try:
        topology = topology_of(group)
    except ValueError as error:
        return str(error)
    if (far := topology.why_no_peer_memory()) is not None:
        return far
    beside = topology.ranks_of(topology.node_of[dist.get_rank(group)])
    apart = [(index, other) for rank, (_, other) in enumerate(everyone)
             if rank in beside and other != index and not torch.cuda.can_device_access_peer(index, other)]  # fmt: skip
    reached: list[Any] = [None] * len(everyone)
    dist.all_gather_object(reached, apart, group=group)
    for pairs in reached:
        if pairs:
            return f"GPU {pairs[0][0]} cannot reach the memory of GPU {pairs[0][1]}"
    return None
