"""What the scripts here begin with and leave behind. `carpool bench` has commands and results of its own."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from carpool.bench.result_files import print_table, terminal
from carpool.hf import rides
from carpool.hf.seam.expert_rides import buffers_of_rides
from carpool.metrics.host import environment


def make_parser(doc: str | None) -> argparse.ArgumentParser:
    """A script's options: its docstring is the help, and every script has `--out`."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=None, help="JSON file")
    return parser


def join_group() -> torch.device:
    """Join the process group that torchrun has prepared; the device of this rank."""
    if not torch.cuda.is_available():
        dist.init_process_group("gloo")
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    return device


def check_arenas(model: nn.Module) -> None:
    """RuntimeError if a ride's backward found no room in the arena: what was timed is then no whole step."""
    for buffers in buffers_of_rides(rides(model).values()):
        if needed := buffers.arena_overflow():
            raise RuntimeError(f"the arena was too small: {needed / 2**30:.1f} GiB were needed; raise --arena-gib")


def show(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table, on rank 0."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        print_table(terminal(150), title, columns, rows)


def write_results(args: argparse.Namespace | Mapping[str, Any], device: torch.device, **found: Any) -> None:
    """What was found, with settings and environment, as JSON in `args.out`; nothing if nobody asked, or on other ranks.

    Args:
        args: the settings; those that are paths say where files are, not what was done, and are left out.
        found: what the file says beside them.
    """
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    settings = dict(vars(args) if isinstance(args, argparse.Namespace) else args)
    out: Path | None = settings.get("out")
    if rank != 0 or out is None:
        return
    settings = {name: value for name, value in settings.items() if not isinstance(value, Path) and name != "out"}
    told = {"settings": settings, "environment": environment(device, world), **found}
    out.write_text(json.dumps(told, indent=1) + "\n")
