"""What every benchmark under torchrun begins with."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist


def join_group() -> torch.device:
    """Join the process group that torchrun has prepared; the device of this rank."""
    if not torch.cuda.is_available():
        dist.init_process_group("gloo")
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    return device
