"""Whether the ranks of a group can use the `nvlink` transport, and if not, why.

It takes Triton and CUDA on every rank, a group whose backend is nccl, one host, and GPUs that reach each other's
memory. Each rank looks at what is its own, then all tell each other, so that every rank gets the same answer:

    why_not(group)      None                                      they can
                        "its ranks are on 2 hosts (a, b)"         a reason, to be shown to whoever asked for it
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


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
    """The first reason of any rank, or what their hosts and links say."""
    import socket

    index = torch.cuda.current_device() if reason is None else -1
    mine = (reason, socket.gethostname(), index)
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, mine, group=group)
    for theirs, _, _ in everyone:
        if theirs is not None:
            return str(theirs)
    hosts = {host for _, host, _ in everyone}
    if len(hosts) > 1:
        return f"its ranks are on {len(hosts)} hosts ({', '.join(sorted(hosts))})"
    apart = [(index, other) for _, _, other in everyone
             if other != index and not torch.cuda.can_device_access_peer(index, other)]  # fmt: skip
    reached: list[Any] = [None] * len(everyone)
    dist.all_gather_object(reached, apart, group=group)
    for pairs in reached:
        if pairs:
            return f"GPU {pairs[0][0]} cannot reach the memory of GPU {pairs[0][1]}"
    return None
