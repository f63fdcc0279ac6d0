"""What the workers here begin and end with."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist


def run_mode(modes: Mapping[str, Callable[..., tuple[bool, str]]]) -> None:
    """Join the group that torchrun has prepared, run the mode that the command line names, and say how it went.

    Args:
        modes: each gets the further arguments as text, and tells whether all was right on this rank, and what it saw.
    """
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    mode, *arguments = sys.argv[1:]
    right, text = modes[mode](*arguments)
    wrong = torch.tensor([0 if right else 1], device=device)
    dist.all_reduce(wrong)
    if not right:
        print(f"rank {dist.get_rank()}: {text}", flush=True)
    if dist.get_rank() == 0:
        print(f"{mode}: {text}, {'ok' if not wrong.item() else f'WRONG on {wrong.item()} ranks'}", flush=True)
    dist.destroy_process_group()
    sys.exit(1 if wrong.item() else 0)
