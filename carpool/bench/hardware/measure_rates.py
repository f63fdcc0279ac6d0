"""Rates of one device: computation, memory, copies to and from the host, disk. All ranks at once, the slowest counts.

Ranks of one machine share its memory, its disk and on a CPU its cores, so a rank alone would find more than it has when
all of them work.
"""

from __future__ import annotations

import contextlib
import os
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from carpool.bench.hardware.measure_links import Fit, fit, seconds_of
from carpool.bench.timing import begin_together
from carpool.experts import ExpertFunction, ExpertWeights, make_activation, make_experts
from carpool.experts.pairs import grouped_mm
from carpool.hf.documents import fastest_attention
from carpool.metrics.counters import LayerStats
from carpool.metrics.host import slowest
from carpool.optim import AdamW
from carpool.planner.machine.hardware import Work, fit_work
from carpool.ride.function import ride
from carpool.ride.setup import RideSetup
from carpool.routing import Routing
from carpool.transport.local import Local

MIB = 2**20


class Sizes(NamedTuple):
    """Of what is computed: enough to fill the device, few enough to be done soon."""

    experts: int
    hidden: int
    expert_hidden: int
    tokens_per_expert: int
    elements: int


GPU, CPU = Sizes(16, 2048, 1024, 4096, 256 * MIB), Sizes(4, 256, 128, 256, 4 * MIB)


def measure_rates(device: torch.device) -> tuple[float, float]:
    """(FLOP/s of grouped products with many tokens for each expert, bytes per second of an elementwise operation). All
    ranks together."""
    cuda = device.type == "cuda"
    sizes, dtype = (GPU, torch.bfloat16) if cuda else (CPU, torch.float32)
    options: dict[str, Any] = {"dtype": dtype, "device": device}
    x_PH = torch.randn(sizes.experts * sizes.tokens_per_expert, sizes.hidden, **options)
    weight_SHF = torch.randn(sizes.experts, sizes.hidden, sizes.expert_hidden, **options)
    offsets_S = torch.arange(1, sizes.experts + 1, device=device, dtype=torch.int32) * sizes.tokens_per_expert
    flops = 2 * x_PH.numel() * sizes.expert_hidden / seconds_of(lambda: grouped_mm(x_PH, weight_SHF, offsets_S), device)
    x_N = torch.randn(sizes.elements, **options)
    y_N = torch.empty_like(x_N)
    return flops, 2 * x_N.nbytes / seconds_of(lambda: torch.add(x_N, 1, out=y_N), device)


def measure_launch(device: torch.device, launches: int = 200) -> float:
    """Seconds."""
    one = torch.zeros(1, device=device)

    def launch() -> None:
        for _ in range(launches):
            one.add_(1)

    return seconds_of(launch, device) / launches


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


# Repetitions between two looks at the clock, and such rounds; cycles of a delay, about 30 ms.
REPEATED, ROUNDS, DELAY_CYCLES = 4, 7, 60_000_000
Point = tuple[float, float, float]


@dataclass(frozen=True)
class WorkSizes:
    """What is computed.

    Attributes:
        products: (m, n, k).
        experts: (T, H, F, E, K); all E are here.
        attention: (sequences, their length, heads, heads of keys, size of queries and keys, of values).
        rows: (rows, elements of one) of what is read and written elementwise.
        parameters: of an optimizer's update.
    """

    products: tuple[tuple[int, int, int], ...]
    experts: tuple[tuple[int, int, int, int, int], ...]
    attention: tuple[tuple[int, int, int, int, int, int], ...]
    rows: tuple[int, ...]
    parameters: tuple[int, ...]


GPU_KERNELS = WorkSizes(
    products=(
        (8192, 128, 2048), (8192, 512, 2048), (8192, 4096, 2048), (8192, 2048, 4096), (4096, 2048, 2048),
        (8192, 1536, 7168), (8192, 16384, 1536), (4096, 18432, 7168), (2048, 151936, 2048), (4096, 7168, 16384),
    ),
    experts=(
        (1024, 2048, 768, 64, 8), (4096, 2048, 768, 64, 8), (8192, 2048, 768, 64, 8), (8192, 2048, 1024, 32, 8),
        (4096, 4096, 1536, 32, 8), (4096, 7168, 2048, 16, 8), (8192, 2880, 2880, 16, 4),
    ),
    attention=(
        (8, 1024, 32, 4, 128, 128), (2, 4096, 32, 4, 128, 128), (4, 4096, 16, 16, 128, 128),
        (1, 16384, 32, 4, 128, 128),
        (2, 4096, 64, 8, 64, 64), (8, 1024, 64, 8, 64, 64), (1, 4096, 128, 128, 192, 128), (4, 1024, 64, 64, 192, 128),
    ),
    rows=(2**20, 2**23, 2**26),
    parameters=(2**24, 2**28),
)  # fmt: skip
CPU_KERNELS = WorkSizes(
    products=((256, 128, 256), (512, 512, 512)),
    experts=((64, 128, 64, 8, 2), (256, 128, 64, 8, 2), (256, 256, 128, 8, 2)),
    attention=((1, 128, 4, 4, 128, 128), (1, 256, 4, 2, 128, 128)),
    rows=(2**16, 2**20),
    parameters=(2**18, 2**20),
)  # fmt: skip


def measure_work(device: torch.device) -> dict[str, Work]:
    """Kinds of kernels, each at several sizes, and the sum of terms that fits them.

    Products, attention and experts are those that training runs: PyTorch's library, the attention that
    `carpool.hf.documents` prefers, and a ride of grouped experts that goes nowhere. The device is kept busy until the
    host has asked for all of a round, so that launching costs nothing, as in a step that is captured. All ranks
    together.
    """
    cuda = device.type == "cuda"
    sizes, dtype = (GPU_KERNELS, torch.bfloat16) if cuda else (CPU_KERNELS, torch.float32)
    points: dict[str, list[Point]] = {}

    def add(kind: str, flops: float, moved: float, once: Callable[[], object], less: float = 0.0) -> float:
        """Seconds, of which `less` are of something else that is done as well."""
        seconds = _seconds(once, device)
        seconds = max(seconds - less, 0.1 * seconds)
        points.setdefault(kind, []).append((flops, moved, seconds))
        return seconds

    for m, n, k in sizes.products:
        a_MK, b_KN = torch.randn(m, k, device=device, dtype=dtype), torch.randn(k, n, device=device, dtype=dtype)
        moved = (m * k + k * n + m * n) * dtype.itemsize
        add("dense", 2 * m * n * k, moved, lambda a=a_MK, b=b_KN: a @ b)  # type: ignore[misc]
        del a_MK, b_KN
    for batch, length, heads, key_heads, head_size, value_size in sizes.attention:
        _add_attention(add, (batch, length, heads, key_heads, head_size, value_size), device, dtype)
    for tokens, hidden, width, experts, top_k in sizes.experts:
        _add_experts(add, (tokens, hidden, width, experts, top_k), device, dtype)
    for rows in sizes.rows:
        x_N = torch.randn(rows * 4, device=device, dtype=dtype)
        y_N = torch.empty_like(x_N)
        moved = 2 * x_N.numel() * dtype.itemsize
        add("elementwise", 0, moved, lambda x=x_N, y=y_N: torch.add(x, 1, out=y))  # type: ignore[misc]
    for parameters in sizes.parameters:
        _add_optimizer(add, parameters, device, dtype)
    found = {kind: fit_work(of) for kind, of in points.items()}
    found["launch"] = Work(latency=measure_launch(device), source="measured")
    found["host ride"] = Work(latency=_host_ride(device, dtype), source="measured")
    return found


def _seconds(once: Callable[[], object], device: torch.device) -> float:
    """Of the device: it is kept busy until the host has asked for all of it. On a CPU both are one."""

    def several() -> None:
        for _ in range(REPEATED):
            once()

    if device.type != "cuda":
        return seconds_of(several, device) / REPEATED
    found = []
    for number in range(2 + ROUNDS):
        begin_together(device, dist.group.WORLD, DELAY_CYCLES)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        several()
        end.record()
        torch.cuda.synchronize(device)
        if number >= 2:
            found.append(begin.elapsed_time(end) / 1e3 / REPEATED)
    return slowest([statistics.median(found)], device)[0]


class _Add(Protocol):
    def __call__(
        self, kind: str, flops: float, moved: float, once: Callable[[], object], less: float = 0.0
    ) -> float: ...


def _add_attention(add: _Add, shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> None:
    batch, length, heads, key_heads, head_size, value_size = shape

    def make(number: int, size: int) -> torch.Tensor:
        return torch.randn(batch, number, length, size, device=device, dtype=dtype, requires_grad=True)

    q, k, v = make(heads, head_size), make(key_heads, head_size), make(key_heads, value_size)

    def forward() -> torch.Tensor:
        with fastest_attention(device):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=heads != key_heads)

    out = forward()
    dout = torch.randn_like(out)

    def both() -> None:
        torch.autograd.grad(forward(), (q, k, v), dout)

    # A query sees half of the keys; two products of the mean of both sizes, and five in the backward.
    flops = 4 * batch * heads * length**2 / 2 * (head_size + value_size) / 2
    size = str(head_size)
    less = add(f"attention {size}", flops, 0, forward)
    add(f"attention {size} backward", 2.5 * flops, 0, both, less)


def _add_experts(add: _Add, shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> None:
    tokens, hidden, width, experts, top_k = shape
    run, x_TH, leaves = _ride_of(shape, device, dtype)
    dy_TH = torch.randn_like(x_TH)
    pairs, weights = tokens * top_k, experts * 3 * hidden * width
    flops = 6 * pairs * hidden * width

    def both() -> None:
        torch.autograd.grad(run(), leaves, dy_TH)

    less = add("experts", flops, (pairs * (2 * hidden + 3 * width) + weights) * dtype.itemsize, run)
    moved = (pairs * (4 * hidden + 8 * width) + 3 * weights) * dtype.itemsize
    add("experts backward", 2 * flops, moved, both, less)


def _ride_of(
    shape: tuple[int, ...], device: torch.device, dtype: torch.dtype
) -> tuple[Callable[[], torch.Tensor], torch.Tensor, list[torch.Tensor]]:
    """(an MoE layer's ride from tokens to their sums, its tokens, what wants gradients)."""
    tokens, hidden, width, experts, top_k = shape
    generator = torch.Generator(device).manual_seed(0)
    score_TE = torch.rand(tokens, experts, device=device, generator=generator)
    weight_TK, expert_TK = score_TE.topk(top_k)
    routing = Routing(expert_TK.int(), weight_TK.float().requires_grad_())
    x_TH = torch.randn(tokens, hidden, device=device, dtype=dtype, requires_grad=True)
    up = torch.randn(experts, 2 * width, hidden, device=device, dtype=dtype, requires_grad=True)
    down = torch.randn(experts, hidden, width, device=device, dtype=dtype, requires_grad=True)
    weights = ExpertWeights(up, down)
    setup = RideSetup(
        Local(None, experts),
        make_experts("grouped", ExpertFunction(make_activation("silu", gated=True))),
        LayerStats(experts, 1, 0),
    )

    def run() -> torch.Tensor:
        return ride(x_TH, routing, routing.expert_TK, weights, setup)[0]

    assert routing.weight_TK is not None
    return run, x_TH, [x_TH, routing.weight_TK, up, down]


def _add_optimizer(add: _Add, parameters: int, device: torch.device, dtype: torch.dtype) -> None:
    parameter = nn.Parameter(torch.zeros(parameters // 1024, 1024, device=device, dtype=dtype))
    parameter.grad = torch.zeros_like(parameter)
    optimizer = AdamW([parameter], moments="bfloat16")
    factor = torch.ones((), device=device)
    # Parameter, its low bits and two moments are read and written, its gradient read.
    low_bits = 4 if dtype == torch.bfloat16 else 0
    moved = parameters * (3 * dtype.itemsize + low_bits + 8)
    add("optimizer", 0, moved, lambda: optimizer.step(factor=factor))


def _host_ride(device: torch.device, dtype: torch.dtype) -> float:
    """Of few tokens, so that the device waits for the host."""
    run, x_TH, leaves = _ride_of((16, 128, 128, 8, 2), device, dtype)
    dy_TH = torch.ones_like(x_TH)
    return seconds_of(lambda: torch.autograd.grad(run(), leaves, dy_TH), device)
