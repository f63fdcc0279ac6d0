"""What every benchmark begins with, and what it leaves behind."""

from __future__ import annotations

import json
import os
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from carpool.train.run.environment import environment


def join_group() -> torch.device:
    """Join the process group that torchrun has prepared; the device of this rank."""
    if not torch.cuda.is_available():
        dist.init_process_group("gloo")
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    return device


def write_results(args: Namespace | Mapping[str, Any], device: torch.device, **found: Any) -> None:
    """What was found, with settings and environment, as JSON in `args.out`; nothing if nobody asked, or on other ranks.

    Args:
        args: the settings; those that are paths say where files are, not what was done, and are left out.
        found: what the file says beside them.
    """
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    settings = dict(vars(args) if isinstance(args, Namespace) else args)
    out: Path | None = settings.get("out")
    if rank != 0 or out is None:
        return
    settings = {name: value for name, value in settings.items() if not isinstance(value, Path) and name != "out"}
    told = {"settings": settings, "environment": environment(device, world), **found}
    out.write_text(json.dumps(told, indent=1) + "\n")
