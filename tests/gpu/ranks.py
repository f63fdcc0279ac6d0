"""Ranks on GPUs: how tests start them, and what a worker begins and ends with.

A rank has a GPU of its own, if there are two or more. On the only GPU of a machine four ranks share it: each has a
while in turn, so that kernels of different ranks may wait for one another, and all but timings can be tested.
For that NCCL must believe that each rank is on a host of its own, and symmetric memory that sharing is meant.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[2]
GPUS = torch.cuda.device_count()
# Of tests of kernels that must not read memory that nobody initialised (tests/gpu/conftest.py).
NAN_IN_FRESH_MEMORY = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("nan_in_fresh_memory"),
    pytest.mark.filterwarnings("ignore:Deterministic behavior was enabled"),
    pytest.mark.filterwarnings("ignore:.*does not have a deterministic implementation"),
]
SHARED = GPUS == 1
RANKS = 4 if SHARED else min(4, GPUS)
ENVIRONMENT = {
    # NVLink multicast stays off: these tests need none of it, and not every machine's links do it well.
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "OMP_NUM_THREADS": "1",
    "PYTHONUNBUFFERED": "1",
}
if SHARED:
    ENVIRONMENT |= {"TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1", "NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": "lo"}


def needs(gpus: int) -> pytest.MarkDecorator:
    return pytest.mark.skipif(GPUS == 0 or (gpus > GPUS and not SHARED), reason=f"needs {gpus} GPUs, or 1 to share")


def rank_environment(rank: int) -> dict[str, str]:
    """Of one rank's process."""
    own = {"RANK": str(rank), "LOCAL_RANK": "0" if SHARED else str(rank)}
    return ENVIRONMENT | own | ({"NCCL_HOSTID": f"rank{rank}"} if SHARED else {})


def torchrun(ranks: int, module: str, *arguments: str, seconds: int) -> str:
    """What the ranks printed; all must have succeeded."""
    start = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    start += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]  # a free port
    if SHARED:
        alone = 'NCCL_HOSTID=rank$RANK LOCAL_RANK=0 exec "$@"'
        start += ["--no-python", "bash", "-c", alone, "rank", sys.executable]
    process = subprocess.Popen(
        [*start, "-m", module, *arguments],
        cwd=ROOT,
        env=os.environ | ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        out, errors = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.terminate()  # torchrun ends its ranks on that; they would survive its being killed
        out, errors = process.communicate(timeout=60)
        pytest.fail(f"{module} {arguments} took more than {seconds} s\n{out[-3000:]}{errors[-3000:]}")
    print(out)
    assert process.returncode == 0, out[-5000:] + errors[-5000:]
    return out


def check_mode(module: str, mode: str, *arguments: str, ranks: int = RANKS, seconds: int = 400) -> str:
    """What a worker that ends with `run_mode` says of a mode, which must be right on all ranks."""
    out = torchrun(ranks, module, mode, *arguments, seconds=seconds)
    lines = [line for line in out.splitlines() if line.startswith(f"{mode}: ")]
    assert len(lines) == 1 and lines[0].endswith(", ok"), out
    return lines[0]


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
