"""One rank of tests/gpu/test_dense_gpu.py: whole non-expert parameters on a GPU, nothing waits for the host."""

from __future__ import annotations

import torch
import torch.distributed as dist

from carpool.parallel.replicated import Replicated, sharded_parameters
from tests.gpu.ranks import run_mode
from tests.parallel.test_replicated import make_net, shard_net


def steps() -> tuple[bool, str]:
    """Three steps of two micro-batches; from the second on, no call may wait for the device."""
    rank, world = dist.get_rank(), dist.get_world_size()
    alone, ours = make_net().cuda(), shard_net(make_net().cuda())
    kept = Replicated(ours, bucket_bytes=1000)
    with sharded_parameters(ours):
        optimizer = torch.optim.AdamW(ours.parameters(), lr=0.1, capturable=True)
    # Of the same kind: a step that is a float32 tensor makes corrections of the moments that differ by 1e-5.
    theirs = torch.optim.AdamW(alone.parameters(), lr=0.1, capturable=True)
    batches = torch.randn(3, 2, world, 3, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).cuda()
    for step in range(3):
        torch.cuda.set_sync_debug_mode("error" if step else "default")
        for micro in range(2):
            kept.begin(micro == 0, micro == 1)
            ours(batches[step, micro, rank]).backward()
        kept.finish()
        optimizer.step()
        optimizer.zero_grad()
        kept.write()
        torch.cuda.set_sync_debug_mode("default")
        for micro in range(2):
            alone(batches[step, micro].flatten(0, 1)).backward()
        theirs.step()
        theirs.zero_grad()
    errors = [(a - b).abs().max() for a, b in zip(ours.parameters(), alone.parameters(), strict=True)]
    worst = float(torch.stack(errors).max().detach())
    return worst < 1e-9, f"largest error {worst:.1e}"


if __name__ == "__main__":
    run_mode({"steps": steps})
