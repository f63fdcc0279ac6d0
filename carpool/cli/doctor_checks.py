"""What `carpool doctor` looks at: is this machine able to train, and if not, what is missing?

Green is as it should be, yellow can be lived with (the text says what is lost), red prevents training. The last checks
do what training does: two ranks are started and exchange rows of unequal number, over each way that there is.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

GREEN, YELLOW, RED = "green", "yellow", "red"
GIB = 2**30

_MINIMUM = {"torch": "2.11", "transformers": "5.23"}
_PYTHON = (3, 11)
_OPTIONAL = {
    "triton": "kernels on GPUs",
    "datasets": "Parquet files and Hugging Face dataset folders",
    "tensorboard": "report_to = tensorboard",
    "matplotlib": "the figures of carpool bench, carpool recipes race and carpool place",
    "jinja2": "pages: carpool report, profile, plan and simulate",
    "peft": "adapters (adapter.kind)",
}
_EXCHANGE_SECONDS = 90


@dataclass(frozen=True)
class Check:
    """One line: what was looked at, what was found, and how bad that is (`GREEN`, `YELLOW` or `RED`)."""

    color: str
    name: str
    text: str


def check_all() -> Iterator[Check]:
    """Every check, in the order in which one would put things right; yields each when it is done."""
    yield from _versions()
    import torch

    yield from _devices(torch)
    yield from _backends(torch)
    yield from _resources()
    yield _embedded_data()
    yield _exchange("cpu")
    if torch.cuda.device_count() > 1:
        yield _exchange("cuda")
    yield _nvlink(torch)


def _versions() -> Iterator[Check]:
    running = platform.python_version()
    fits = sys.version_info[:2] >= _PYTHON
    yield Check(GREEN if fits else RED, "python", running if fits else f"{running}, but 3.11 or newer is needed")
    for name, minimum in _MINIMUM.items():
        version = _installed(name)
        if version is None:
            yield Check(RED, name, f"not installed; {minimum} or newer is needed: pip install '{name}>={minimum}'")
        elif _release(version) < _release(minimum):
            yield Check(RED, name, f"{version}, but {minimum} or newer is needed: pip install -U {name}")
        else:
            yield Check(GREEN, name, version)
    for name, purpose in _OPTIONAL.items():
        version = _installed(name)
        yield Check(GREEN, name, version) if version else Check(YELLOW, name, f"not installed; needed for {purpose}")


def _release(version: str) -> tuple[int, ...]:
    """The numbers of a version: "2.11.0+cu130" gives (2, 11, 0), "5.23.0.dev1" gives (5, 23, 0)."""
    numbers = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(map(int, numbers[0].split("."))) if numbers else ()


def _installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _devices(torch: Any) -> Iterator[Check]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    yield Check(GREEN if cores > 1 else YELLOW, "cpu", f"{cores} cores{'' if cores > 1 else ': 4 ranks will be slow'}")
    count = torch.cuda.device_count()
    if not count:
        yield Check(YELLOW, "gpu", "none: ranks run on the CPU, in float32 over gloo")
        return
    for index in range(count):
        properties = torch.cuda.get_device_properties(index)
        yield Check(GREEN, f"gpu {index}", f"{properties.name}, {properties.total_memory / GIB:.0f} GiB")
    apart = [
        f"{i}-{j}" for i in range(count) for j in range(count) if i != j and not torch.cuda.can_device_access_peer(i, j)
    ]
    if apart:
        yield Check(YELLOW, "peer access", f"none between GPUs {', '.join(apart)}: rides go through host memory")
    elif count > 1:
        yield Check(GREEN, "peer access", f"between all {count} GPUs")


def _backends(torch: Any) -> Iterator[Check]:
    dist = torch.distributed
    gloo = dist.is_available() and dist.is_gloo_available()
    yield Check(GREEN, "gloo", "available") if gloo else Check(RED, "gloo", "this build of torch lacks it")
    if torch.cuda.is_available():
        nccl = dist.is_available() and dist.is_nccl_available()
        version = ".".join(map(str, torch.cuda.nccl.version())) if nccl else ""
        yield Check(GREEN, "nccl", version) if nccl else Check(RED, "nccl", "this build of torch lacks it")
    else:
        yield Check(GREEN, "nccl", "not needed without GPUs")


def _resources() -> Iterator[Check]:
    free = shutil.disk_usage(Path.cwd()).free / GIB
    text = f"{free:.1f} GiB free in {Path.cwd()}"
    if free < 0.5:
        yield Check(RED, "disk", f"{text}: too little for a checkpoint")
    else:
        yield Check(GREEN if free > 5 else YELLOW, "disk", text)
    memory = _available_memory()
    if memory is None:
        yield Check(YELLOW, "memory", "cannot be measured on this system")
        return
    text = f"{memory:.1f} GiB available"
    if memory < 1:
        yield Check(RED, "memory", f"{text}: the demo's four ranks need about 2")
    else:
        yield Check(GREEN if memory > 3 else YELLOW, "memory", text)


def _available_memory() -> float | None:
    """GiB that programs could take now; unlike free pages, this counts what caches would give back."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) / 2**20
    return None


def _embedded_data() -> Check:
    from carpool.train.data.sources import STDLIB, describe_sources, find_sources

    try:
        sources = find_sources([STDLIB], "data.train")
    except ValueError as error:
        return Check(YELLOW, "demo data", str(error))
    size = sum(Path(source.path).stat().st_size for source in sources) / 1e6
    return Check(GREEN, "demo data", f"{describe_sources([STDLIB])}, {len(sources)} files, {size:.1f} MB")


def _nvlink(torch: Any) -> Check:
    """Can kernels write into the memory of other GPUs, and what does it take?"""
    from carpool.transport.nvlink import why_not
    from carpool.transport.nvlink.buffers import Regions

    name, count = "nvlink transport", torch.cuda.device_count()
    pairs = [(i, j) for i in range(count) for j in range(count) if i != j]
    apart = [pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair)]
    reason = why_not(None) or ("there is one GPU" if count == 1 else None)
    if apart:
        reason = f"GPU {apart[0][0]} cannot reach the memory of GPU {apart[0][1]}"
    if reason:
        return Check(YELLOW, name, f"{reason}: transport auto uses dedup")
    found = _exchange("nvlink")
    if found.color != GREEN:
        return found
    tokens, hidden, top_k = 8192, 2048, 8
    size = Regions.of(count, tokens, tokens, 2 * hidden, top_k).total
    needs = f"buffers for {tokens} tokens x {hidden} in bf16: {size / 1e6:.0f} MB a lease"
    return Check(GREEN, name, f"{count} GPUs reach each other; {needs}")


def _exchange(way: str) -> Check:
    """Two ranks, started as training starts them, in a process of their own that can be stopped after a time.

    Args:
        way: "cpu", "cuda" or "nvlink".
    """
    name = {"cpu": "gloo exchange", "cuda": "nccl exchange", "nvlink": "nvlink transport"}[way]
    # Whatever launcher started this process, the two ranks are our own.
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE") and not k.startswith("SLURM_")}
    env["PYTHONPATH"] = os.pathsep.join(
        filter(None, [str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH")])
    )
    code = "import sys, carpool.cli.doctor_checks as d; d.start_exchange(sys.argv[1])"
    command = [sys.executable, "-P", "-c", code, way]
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=_EXCHANGE_SECONDS)
    except subprocess.TimeoutExpired:
        return Check(RED, name, f"two ranks did not exchange anything within {_EXCHANGE_SECONDS} s; is 'lo' up?")
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines() or [f"exit code {done.returncode}"]
        return Check(RED, name, lines[-1])
    return Check(GREEN, name, "two ranks exchanged rows")


def start_exchange(way: str) -> None:
    """Starts two ranks that exchange rows, over collectives on "cpu" or "cuda", or over "nvlink"; raises, or exits with
    a line that says how a rank failed."""
    from carpool.train.config import load_config
    from carpool.train.launch.failure import RankFailure
    from carpool.train.launch.start import run

    device = "cpu" if way == "cpu" else "cuda"
    settings = ["parallelism.num_ranks=2", "parallelism.timeout_seconds=60", f"parallelism.device={device}"]
    try:
        run(load_config(None, settings), ride if way == "nvlink" else exchange)
    except RankFailure as failure:
        # The lines after it are about a training run.
        raise SystemExit(str(failure).splitlines()[0]) from None


def exchange(config: Any) -> None:
    """One rank's part: rank r sends r + 1 rows to either rank, and looks at what comes."""
    import torch
    import torch.distributed as dist

    rank, device = dist.get_rank(), "cpu" if dist.get_backend() == "gloo" else "cuda"
    sent = torch.full((2 * (rank + 1), 8), float(rank), device=device)
    received = torch.empty(3, 8, device=device)
    dist.all_to_all_single(received, sent, output_split_sizes=[1, 2], input_split_sizes=[rank + 1, rank + 1])
    expected = torch.tensor([0.0, 1.0, 1.0], device=device)[:, None].expand(3, 8)
    if not torch.equal(received, expected):
        raise RuntimeError(f"rank {rank} received {received[:, 0].tolist()} instead of [0.0, 1.0, 1.0]")


def ride(config: Any) -> None:
    """One rank's part: rank r sends r + 1 rows to both ranks over transport nvlink and gets back twice what it sent."""
    import torch
    import torch.distributed as dist

    from carpool.metrics.counters import Traffic
    from carpool.transport import NVLinkOptions, make_transport

    rank, device = dist.get_rank(), torch.device("cuda", torch.cuda.current_device())
    options = NVLinkOptions(max_tokens=2, timeout_seconds=20.0)
    transport = make_transport("nvlink", dist.group.WORLD, 1, options)
    x_TH = torch.arange(8.0, device=device).repeat(rank + 1, 1) + 100 * (rank + 1)
    slot_TK = torch.tensor([[0, 1]], dtype=torch.int32, device=device).repeat(rank + 1, 1)
    route = transport.plan(slot_TK, torch.ones(rank + 1, 2, device=device), Traffic(2, rank))
    arrivals = transport.dispatch(x_TH, route).wait()
    partial_RH = route.new_partial(8, x_TH.dtype, device).copy_(arrivals.tokens.contiguous(route.num_rows))
    y_TH = transport.combine(route, partial_RH).wait()
    if not torch.equal(y_TH, 2 * x_TH):
        raise RuntimeError(f"rank {rank} got back {y_TH[:, 0].tolist()} instead of {(2 * x_TH[:, 0]).tolist()}")
    dist.barrier()
