"""Rates of one device: computation, memory, copies to and from the host, disk. All ranks at once, the slowest counts.

Ranks of one machine share its memory, its disk and on a CPU its cores, so a rank alone would find more than it has when
all of them work.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from carpool.bench.hardware.measure_links import Fit, fit, seconds_of
from carpool.experts.gemm.grouped import grouped_mm

MIB = 2**20


@dataclass(frozen=True)
class Rate:
    """Attributes:
    name: of what was measured.
    value: per second, or seconds.
    unit: "FLOP/s", "bytes/s" or "s".
    detail: sizes.
    """

    name: str
    value: float
    unit: str
    detail: str


@dataclass(frozen=True)
class Sizes:
    """Of what is computed: enough to fill the device, few enough to be done soon."""

    dense: int
    experts: int
    hidden: int
    expert_hidden: int
    rows_per_expert: tuple[int, ...]
    elements: int
    heads: int
    tokens: int
    parameters: int


GPU = Sizes(8192, 16, 2048, 1024, (64, 256, 1024, 4096), 256 * MIB, 16, 4096, 64 * MIB)
CPU = Sizes(512, 4, 256, 128, (16, 64, 256), 4 * MIB, 4, 256, 2 * MIB)


def measure_rates(device: torch.device) -> list[Rate]:
    """The rates of computation and of memory, one after the other. All ranks together."""
    cuda = device.type == "cuda"
    sizes, options = (GPU, {"dtype": torch.bfloat16}) if cuda else (CPU, {"dtype": torch.float32})
    options["device"] = device  # type: ignore[assignment]
    found = [_dense(sizes.dense, options)]
    found += [_grouped(sizes, rows, options) for rows in sizes.rows_per_expert]
    found += [_elementwise(sizes.elements, options), _attention(sizes.tokens, sizes.heads, options)]
    launch = Rate("launch", measure_launch(device), "s", "an operation on one element, one after the other")
    return [*found, _optimizer(sizes.parameters, device), launch, _host_memory(device)]


def _dense(n: int, options: dict[str, Any]) -> Rate:
    a_NN, b_NN = (torch.randn(n, n, **options) for _ in range(2))
    took = seconds_of(lambda: a_NN @ b_NN, options["device"])
    return Rate("dense products", 2 * n**3 / took, "FLOP/s", f"{n} x {n} x {n}, {options['dtype']}")


def _grouped(sizes: Sizes, rows: int, options: dict[str, Any]) -> Rate:
    x_PH = torch.randn(sizes.experts * rows, sizes.hidden, **options)
    weight_SHF = torch.randn(sizes.experts, sizes.hidden, sizes.expert_hidden, **options)
    offsets_S = torch.arange(1, sizes.experts + 1, device=x_PH.device, dtype=torch.int32) * rows
    took = seconds_of(lambda: grouped_mm(x_PH, weight_SHF, offsets_S), x_PH.device)
    detail = f"{rows} rows each for {sizes.experts} experts, {sizes.hidden} x {sizes.expert_hidden}"
    return Rate("grouped products", 2 * x_PH.numel() * sizes.expert_hidden / took, "FLOP/s", detail)


def _elementwise(elements: int, options: dict[str, Any]) -> Rate:
    x_N = torch.randn(elements, **options)
    y_N, moved = torch.empty_like(x_N), 2 * x_N.numel() * x_N.element_size()
    took = seconds_of(lambda: torch.add(x_N, 1, out=y_N), x_N.device)
    return Rate("elementwise", moved / took, "bytes/s", f"{moved // MIB} MiB read and written")


def _attention(tokens: int, heads: int, options: dict[str, Any], head_size: int = 128) -> Rate:
    q, k, v = (torch.randn(1, heads, tokens, head_size, **options) for _ in range(3))
    took = seconds_of(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True), q.device)
    detail = f"causal, {tokens} tokens, {heads} heads of {head_size}; half of the square counted"
    return Rate("attention", 2 * heads * tokens**2 * head_size / took, "FLOP/s", detail)


def _optimizer(parameters: int, device: torch.device) -> Rate:
    parameter = nn.Parameter(torch.zeros(parameters, device=device))
    parameter.grad = torch.zeros_like(parameter)
    optimizer = torch.optim.AdamW([parameter], fused=True)
    # Parameter, gradient and two moments are read; all but the gradient are written.
    return Rate(
        "optimizer", 7 * 4 * parameters / seconds_of(optimizer.step, device), "bytes/s", "AdamW, fused, float32"
    )


def measure_launch(device: torch.device, launches: int = 200) -> float:
    """Seconds."""
    one = torch.zeros(1, device=device)

    def launch() -> None:
        for _ in range(launches):
            one.add_(1)

    return seconds_of(launch, device) / launches


def _host_memory(device: torch.device) -> Rate:
    here = torch.zeros(64 * MIB, dtype=torch.uint8)
    there = torch.empty_like(here)
    return Rate("host memory", 2 * here.numel() / seconds_of(lambda: there.copy_(here), device), "bytes/s", "a copy")


def measure_copies(device: torch.device) -> list[Fit]:
    """To the device and back, by copy engines from pinned memory; nothing on a CPU. All ranks together."""
    if device.type != "cuda":
        return []
    fits = []
    largest = 256 * MIB
    host = torch.zeros(largest, dtype=torch.uint8, pin_memory=True)
    own = torch.zeros(largest, dtype=torch.uint8, device=device)
    for name, target, source in (("to device", own, host), ("to host", host, own)):
        points = []
        for size in (MIB // 16, MIB, 16 * MIB, largest):

            def once(size: int = size, target: torch.Tensor = target, source: torch.Tensor = source) -> None:
                target[:size].copy_(source[:size], non_blocking=True)

            points.append((size, seconds_of(once, device)))
        fits.append(fit(name, points))
    return fits


def measure_disk(folder: Path, device: torch.device) -> list[Fit]:
    """Files of the folder where results are written: written and flushed, and read without the page cache where the
    system forgets it when asked. All ranks together, each with a file of its own."""
    path = folder / f".measure-{os.getpid()}"
    writes, reads = [], []
    try:
        for size in (MIB, 8 * MIB, 32 * MIB):
            data = os.urandom(size)  # not zeros, which some file systems do not write
            writes.append((size, seconds_of(lambda data=data: _write(path, data), device)))  # type: ignore[misc]
            reads.append((size, seconds_of(lambda: _read(path), device)))
    finally:
        with contextlib.suppress(OSError):
            path.unlink()
    return [fit("disk, write", writes), fit("disk, read", reads)]


def _write(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _read(path: Path) -> None:
    with path.open("rb", buffering=0) as file:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        while file.read(MIB):
            pass
