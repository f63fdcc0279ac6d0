"""Whether recorded choices can be replayed: all ranks find out together, before anything is sent.

Rows travel with K ids each, so ranks with other K would misread each other's, and one that refuses while the others
send would leave them waiting.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from carpool.routing import Routing


def check_replay(recording: Routing, num_tokens: int, num_experts: int, group: dist.ProcessGroup | None) -> None:
    """Check a recording on all ranks of the group. Collective; waits for the device.

    Raises:
        ValueError: on all ranks, if the recording of any does not fit its tokens, or they have different K."""
    error: ValueError | None = None
    try:
        recording.check(num_tokens, num_experts)
    except ValueError as refused:
        error = refused
    if group is not None:
        found = _all_found(error is not None, recording.expert_TK, group)
        if error is None and (bad := [rank for rank, (refuses, _) in enumerate(found) if refuses]):
            error = ValueError(f"the routing of rank {bad[0]} of the expert-parallel group does not fit its tokens")
        different = sorted({top_k for _, top_k in found})
        if error is None and len(different) > 1:
            error = ValueError(f"all ranks must replay as many choices per token, but they have K = {different}")
    if error is not None:
        raise error


def _all_found(refuses: bool, expert_TK: torch.Tensor, group: dist.ProcessGroup) -> list[list[int]]:
    """[refuses, K] of each rank."""
    top_k = expert_TK.shape[1] if expert_TK.dim() == 2 else -1
    mine = torch.tensor([int(refuses), top_k], device=expert_TK.device)
    found = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(found, mine, group=group)
    return torch.stack(found).tolist()
