"""Compile Carpool's Triton kernels for a card that is not there, and say what they need of it.

    python -m tools.compile_kernels --target sm_89 [--target sm_86 ...] [--quick] [--few]

Carpool's own code runs as it would on one such card: with tensors without memory, on a device with the card's
capability and shared memory. What it launches is compiled, with the tiles that it chose, and not launched. So this
finds what a user of the card would find: a kernel that wants more shared memory than there is, a way that only Hopper
has, an instruction that the card lacks. For each kernel: the most shared memory of a program, and with ptxas (not
`--quick`) registers of a thread and bytes that were spilled. `--few` compiles, of kernels that take long, one launch
with the same tiles and arguments, and leaves out those that differ in flags and a model's sizes alone.

Exit status 1: a kernel does not compile, wants more shared memory than a program may have, or was not reached.
"""

from __future__ import annotations

import argparse
import importlib
import pkgutil
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
import triton
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from triton._C.libtriton import llvm
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import compiler
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime import driver
from triton.runtime.jit import JITFunction, MockTensor

import carpool
from carpool.activations import Arena, Arrivals, HiddenStates
from carpool.activations.arena_kernels import copy_slabs
from carpool.experts import GroupedExperts, make_activation, quantised
from carpool.experts.base import Activation, ExpertFunction, ExpertWeights
from carpool.experts.gemm.choices import Choices
from carpool.kernels.quick import Quick

KIB = 1024
# Capability, KiB of shared memory that a program may have, multiprocessors.
CARDS = {
    "sm_80": ((8, 0), 163, 108),
    "sm_86": ((8, 6), 99, 82),
    "sm_89": ((8, 9), 99, 128),
    "sm_90": ((9, 0), 227, 132),
    "sm_120": ((12, 0), 99, 170),
}
# Kernels that one GPU never launches: peers of one host write into each other's memory.
ELSEWHERE = ("carpool.transport.nvlink", "carpool.experts.pair_kernels._sum_part")
BF16 = torch.bfloat16
# Kernels that take long to compile, and the constants that decide how large their tiles are.
LONG = ("carpool.experts.gemm.", "carpool.experts.fp8.gemm_kernels.", "carpool.experts.sort_kernel.")
TILES = ("BM", "BN", "BK", "BQ", "STEP", "BLOCK", "num_warps", "num_stages")


class Compiled(NamedTuple):
    """Of one kernel, as it was launched once.

    Attributes:
        name: module and function.
        how: warps and stages.
        shared: bytes that a program takes.
        registers, spilled: of a thread; None without ptxas.
        hopper: whether it has instructions that only Hopper has.
        error: why it does not compile, or None."""

    name: str
    how: str
    shared: int
    registers: int | None = None
    spilled: int | None = None
    hopper: bool = False
    error: str | None = None


class _Driver:
    """What Triton asks a driver for before it compiles."""

    def __init__(self, target: GPUTarget) -> None:
        self.target = target

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class _Unoptimised:
    """LLVM, whose passes take a fifth of the time."""

    def __getattr__(self, name: str) -> Any:
        return getattr(llvm, name)

    def optimize_module(self, *_: Any, **__: Any) -> None:
        pass


def _item(tensor: torch.Tensor, index: Any) -> torch.Tensor:
    """Slices of a tensor without memory, for which PyTorch's own wants CUDA."""
    dim = 0
    for at in index if isinstance(index, tuple) else (index,):
        if at is None:
            tensor, dim = tensor.unsqueeze(dim), dim + 1
        elif isinstance(at, int):
            tensor = torch.ops.aten.select.int(tensor, dim, at)
        else:
            tensor = torch.ops.aten.slice.Tensor(tensor, dim, at.start, at.stop, at.step or 1)
            dim += 1
    return tensor


@contextmanager
def card(target: str, found: list[Compiled], quick: bool, few: bool = False) -> Iterator[None]:
    """Inside, tensors have no memory and lie on such a card, and what is launched is compiled into `found`."""
    capability, kib, processors = CARDS[target]
    properties = SimpleNamespace(
        major=capability[0],
        minor=capability[1],
        multi_processor_count=processors,
        shared_memory_per_block_optin=kib * KIB,
    )
    seen: set[tuple[object, ...]] = set()

    def launcher(kernel: JITFunction, grid: Any) -> Callable[..., None]:
        def compile_it(*arguments: Any, **constants: Any) -> None:
            given = [MockTensor(one.dtype) if isinstance(one, torch.Tensor) else one for one in arguments]
            name = f"{kernel.fn.__module__}.{kernel.fn.__qualname__}"
            dtypes = tuple(getattr(one, "dtype", None) for one in arguments)
            alike = (name, dtypes, *(constants.get(tile) for tile in TILES))
            if few and name.startswith(LONG) and alike in seen:
                return
            seen.add(alike)
            how = f"{constants.get('num_warps', 4)} warps, {constants.get('num_stages', 'default')} stages"
            try:
                compiled = kernel.run(*given, grid=grid, warmup=True, **constants)
            except Exception as error:
                found.append(Compiled(name, how, 0, error=str(error).strip().splitlines()[-1]))
                return
            text = compiled.asm["ptx"]
            hopper = any(word in text for word in ("wgmma", "tcgen05", "setmaxnreg"))
            registers, spilled = (None, None) if quick else _resources(compiled.asm["cubin"])
            found.append(Compiled(name, how, compiled.metadata.shared, registers, spilled, hopper))

        return compile_it

    with ExitStack() as patches:
        enter = patches.enter_context
        cache = enter(tempfile.TemporaryDirectory())
        fake = _Driver(GPUTarget("cuda", capability[0] * 10 + capability[1], 32))
        enter(mock.patch.object(driver, "_active", fake))
        enter(mock.patch.object(triton.knobs.cache, "dir", cache))
        for name, value in {
            "get_device_properties": lambda _=None: properties,
            "get_device_capability": lambda _=None: capability,
            "current_device": lambda: 0,
            "is_available": lambda: True,
        }.items():
            enter(mock.patch.object(torch.cuda, name, value))
        enter(mock.patch.object(JITFunction, "__getitem__", launcher))
        enter(mock.patch.object(FakeTensor, "data_ptr", lambda _: 0))
        enter(mock.patch.object(FakeTensor, "__getitem__", _item))
        # Made of numbers on the host.
        enter(mock.patch.object(quantised, "tables_of", lambda *_: torch.empty(1024)))
        if quick:
            enter(mock.patch.object(CUDABackend, "make_cubin", lambda *_: b""))
            # Neither shared memory nor what a card lacks depends on how LLVM optimises.
            enter(mock.patch.object(compiler, "llvm", _Unoptimised()))
        enter(FakeTensorMode())
        enter(torch.device("cuda"))
        yield


def _resources(cubin: bytes) -> tuple[int, int]:
    """(registers, bytes spilled) of a thread."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", text).groups()  # type: ignore[union-attr]
    return int(registers), int(stack)


# -- what is launched -----------------------------------------------------------------------------------------------


def experts(
    hidden: int, inner: int, slots: int, top_k: int, *, activation: Activation | None = None, bias: bool = False,
    transposed: bool = False, rank: int = 0, kind: str = "", fp8: bool = False, use_arena: bool = False,
    tokens: int = 4096, dtype: torch.dtype = BF16, choices: Choices | None = None,
) -> None:  # fmt: skip
    """Forward and backward of a layer's experts."""
    from carpool.experts.fp8.fp8_experts import FP8Experts

    function = ExpertFunction(activation or make_activation("silu", True), transposed)
    width = inner * (2 if function.activation.gated else 1)  # type: ignore[attr-defined]

    def empty(*shape: int, of: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(*shape, dtype=of)

    shapes = ((slots, width, hidden), (slots, hidden, inner))
    if transposed:
        shapes = ((slots, hidden, width), (slots, inner, hidden))
    weights = [empty(*shape) for shape in shapes]
    biases = [empty(slots, width), empty(slots, hidden)] if bias else [None, None]
    factors: list[torch.Tensor | None] = [None] * 4
    if rank:
        thin = (rank, hidden), (width, rank), (rank, inner), (hidden, rank)
        factors = [empty(slots, *shape) for shape in thin]
    codes: list[torch.Tensor] = []
    for a, b, c in shapes if kind else ():
        if kind == "int8":
            codes += [empty(a, b, c, of=torch.int8), empty(a, b, 1, of=torch.float32)]
            continue
        blocks = c // quantised.BLOCK[kind]
        scale = (a, b, blocks) if kind == "mxfp4" else (a, quantised._statistics(b * blocks)[1])
        codes += [empty(a, b, c // 2, of=torch.uint8), empty(*scale, of=torch.uint8)]
    held = ExpertWeights.of([*weights, *biases, *factors, *codes])
    computation: Any = FP8Experts(function) if fp8 else GroupedExperts(function, choices)
    rows, dy = HiddenStates.of(empty(tokens, hidden)), HiddenStates.of(empty(tokens, hidden))
    slot, weight = torch.empty(tokens, top_k, dtype=torch.int32), torch.empty(tokens, top_k)
    arena = Arena(2**30, torch.device("cuda")) if use_arena else None
    arrivals = Arrivals(rows, slot, weight, tokens * top_k)
    saved = computation.forward(arrivals.readable(fp8, dtype), held, empty(tokens, hidden), arena)
    x = rows.packed() if fp8 else rows
    _, finish = computation.backward(
        saved, x, held, dy, empty(tokens, hidden), not (rank or kind or (fp8 and dtype != BF16))
    )
    if finish is not None:
        finish()


def optimizer(moments: torch.dtype, weight: torch.dtype) -> None:
    from carpool.optim import kernel

    long: Any = {"dtype": torch.int64}
    kernel.launch(
        torch.empty(8, kernel.COLUMNS, **long), torch.empty(8, **long), torch.empty(64, 2, dtype=torch.int32),
        torch.empty(8, 7), torch.empty(8), torch.empty(1), torch.empty(512), torch.empty(64),
        bfloat16_weight=weight == BF16, bfloat16_grad=weight == BF16, moments=moments, zero_grads=False,
    )  # fmt: skip


def muon(moments: torch.dtype, weight: torch.dtype) -> None:
    from carpool.optim import muon_kernel

    size, numbers = (4, 768, 2048), torch.empty(4)
    value, update = torch.empty(size, dtype=weight), torch.empty(size, dtype=BF16)
    muon_kernel.take_gradient(value, torch.empty(size, dtype=moments), update, numbers, True)
    low_bits = torch.empty(size, dtype=torch.int16) if weight == BF16 else None
    muon_kernel.change(value, low_bits, update, numbers, 9.0)


def router(num_experts: int, top_k: int, **rule: Any) -> None:
    from carpool.routing import kernel, logits
    from carpool.routing.routing import Rule

    context: Any = SimpleNamespace()
    context.save_for_backward = lambda *kept: setattr(context, "saved_tensors", kept)
    context.mark_non_differentiable = context.set_materialize_grads = lambda *_: None
    values = torch.empty(4096, num_experts)
    bias = torch.empty(num_experts) if "num_groups" in rule else None
    kernel._Route.forward(context, values, bias, None, Rule(top_k, aux_loss_coef=0.1, z_loss_coef=0.1, **rule), ())
    kernel._Route.backward(context, None, torch.empty(4096, top_k), torch.empty(()), None)
    logits.split(values)


def the_rest() -> None:
    """Kernels of one launch each."""
    from carpool.experts.pairs import gather_rows, sort_pairs
    from carpool.kernels import cross_entropy_kernel, ordered_sum_kernel
    from carpool.layout import assign_kernel
    from carpool.replicas import slot_plan_kernel
    from carpool.replicas.slot_costs import Costs

    long: Any = {"dtype": torch.int64}
    logits = torch.empty(512, 151936, dtype=BF16)
    cross_entropy_kernel.launch(logits, torch.empty(512, **long), torch.empty(512), -100, True)
    values, order = torch.empty(4096, 2048, dtype=BF16), torch.empty(4096, **long)
    ordered_sum_kernel.launch(values, order, torch.empty(1025, **long), None, torch.empty(1024, 2048))
    pairs = sort_pairs(torch.empty(4096, 8, dtype=torch.int32), 128, 32768)
    gather_rows(HiddenStates.of(values), pairs, BF16)
    arenas = [Arena(2**30, torch.device("cuda")) for _ in range(2)]
    copy_slabs(*(arena.reserve(2048, BF16, torch.empty(1, dtype=torch.int32)) for arena in arenas))
    choices = torch.empty(4096, 8, dtype=torch.int32)
    assign_kernel.count_slots(
        assign_kernel.look_up(choices, torch.empty(128, dtype=torch.int32), 1), torch.empty(129, **long)
    )
    home_E, costs = torch.empty(512, **long), Costs(4, 100, 1100)
    for ranks, spare, node_W in ((8, 4, None), (64, 8, torch.empty(64, **long))):
        load_WE = torch.empty(ranks, 512, dtype=torch.int32)
        plan = slot_plan_kernel.plan(load_WE, home_E, spare, costs, node_W)
        names = None if node_W is None else torch.empty(1024, dtype=torch.int32)
        slot_plan_kernel.serve(choices, load_WE, home_E, *plan[:2], 0, names)
        slot_plan_kernel.add_counts(torch.empty(7, **long), load_WE, home_E, plan[0], plan[2], 0, 1100)


def packets() -> None:
    """HiddenStates that travel in FP8."""
    from carpool.kernels import packet_kernel

    packed = packet_kernel.launch_quantise(torch.empty(4096, 2048, dtype=BF16), 2048 + 64)
    packet_kernel.launch_dequantise(packed, torch.empty(1, dtype=torch.int32), 4096, 2048, BF16)


def problems(capability: tuple[int, int], all_shapes: bool) -> dict[str, Callable[[], None]]:
    """What a card with this capability may be asked for. F = 1408 and 2880 are no multiples of 256."""
    gpt_oss = Activation("silu", gated=True, interleaved=True, limit=7.0, alpha=1.702, up_shift=1.0)
    some: dict[str, Callable[[], None]] = {
        "experts, F 1408": lambda: experts(2048, 1408, 64, 6, use_arena=True),
        "experts of gpt-oss": lambda: experts(2880, 2880, 32, 4, activation=gpt_oss, bias=True, transposed=True),
        "adapters of rank 16": lambda: experts(2048, 768, 128, 8, rank=16),
        "nf4": lambda: experts(2048, 768, 128, 8, rank=16, kind="nf4"),
        "int8": lambda: experts(2048, 768, 128, 8, kind="int8"),
        "mxfp4": lambda: experts(2880, 2880, 32, 4, kind="mxfp4"),
        "library's products": lambda: experts(2048, 768, 128, 8, rank=256, choices=Choices()),
        "AdamW, 8 bits": lambda: optimizer(torch.uint8, BF16),
        "AdamW, bf16": lambda: optimizer(BF16, BF16),
        "AdamW, float32": lambda: optimizer(torch.float32, torch.float32),
        "Muon, bf16": lambda: muon(BF16, BF16),
        "Muon, float32": lambda: muon(torch.float32, torch.float32),
        "router": lambda: router(128, 8),
        "router with groups": lambda: router(256, 8, score="sigmoid", num_groups=8, topk_groups=4),
        "one launch each": the_rest,
    }
    if all_shapes:
        for rank in (64, 128, 256):
            some[f"adapters of rank {rank}, F 1408"] = partial(experts, 2048, 1408, 64, 6, rank=rank)
        some["few rows of each expert"] = lambda: experts(4096, 1408, 128, 8, tokens=512)
        some["transposed"] = lambda: experts(2048, 768, 128, 8, transposed=True)
        some["without a gate"] = lambda: experts(2048, 1024, 64, 8, activation=Activation("relu2"))
    if capability >= (8, 9):
        some["experts in FP8"] = lambda: experts(2048, 768, 128, 8, fp8=True)
        some["experts in FP8, float32"] = lambda: experts(2048, 768, 128, 8, fp8=True, dtype=torch.float32)
        some["packets"] = packets
    return some


# -- what is said ---------------------------------------------------------------------------------------------------


def all_kernels() -> set[str]:
    """Those of Carpool that are launched, by module and function."""
    names = set()
    for module in pkgutil.walk_packages(carpool.__path__, "carpool."):
        source = importlib.util.find_spec(module.name)
        if source is None or source.origin is None or not source.origin.endswith(".py"):
            continue
        if "@quick" not in Path(source.origin).read_text():
            continue
        found = importlib.import_module(module.name)
        for name, value in vars(found).items():
            if isinstance(value, Quick) and value.kernel.fn.__module__ == module.name:
                names.add(f"{module.name}.{name}")
    return names


def compile_for(target: str, quick: bool, few: bool = False) -> tuple[list[Compiled], list[str]]:
    """What was compiled, and what is wrong with it."""
    capability, kib, _ = CARDS[target]
    found: list[Compiled] = []
    wanted = {name for name in all_kernels() if not name.startswith(ELSEWHERE)}
    with card(target, found, quick, few):
        for name, launch in problems(capability, not quick).items():
            before, begin = len(found), time.monotonic()
            launch()
            took = f"{len(found) - before} launches, {time.monotonic() - begin:.0f} s"
            print(f"{target}: {name}: {took}", file=sys.stderr, flush=True)
    wrong = []
    for one in dict.fromkeys(found):
        if one.error:
            wrong.append(f"{one.name} ({one.how}) does not compile: {one.error}")
        if one.shared > kib * KIB:
            wrong.append(f"{one.name} ({one.how}) wants {one.shared} bytes of shared memory of {kib * KIB}")
        if capability[0] != 9 and (one.hopper or "hopper" in one.name):
            wrong.append(f"{one.name} ({one.how}) is for Hopper")
    lacking = wanted - {one.name for one in found}
    if capability[0] != 9:
        lacking = {name for name in lacking if "hopper" not in name}
    if capability < (8, 9):
        lacking = {name for name in lacking if "fp8" not in name and "packet" not in name}
    wrong += [f"{name} was not reached" for name in sorted(lacking)]
    return found, wrong


def table(found: list[Compiled]) -> list[str]:
    """A line for each kernel: the most of each number."""
    lines = []
    for name in sorted({one.name for one in found}):
        of = [one for one in found if one.name == name]
        most = max(of, key=lambda one: one.shared)
        line = f"{name.removeprefix('carpool.'):50} {most.shared / KIB:6.1f} KiB  {most.how:24}"
        if most.registers is not None:
            registers, spilled = (max(getattr(one, name) or 0 for one in of) for name in ("registers", "spilled"))
            line += f" {registers:4} registers, {spilled} bytes spilled"
        lines.append(line.rstrip())
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", action="append", choices=list(CARDS), required=True)
    parser.add_argument("--quick", action="store_true", help="up to PTX, without ptxas, and fewer shapes")
    parser.add_argument("--few", action="store_true", help="of kernels that take long, one launch with the same tiles")
    options = parser.parse_args()
    failed = False
    for target in options.target:
        found, wrong = compile_for(target, options.quick, options.few)
        kib = CARDS[target][1]
        print(f"{target}, {kib} KiB of shared memory for a program, {len(set(found))} compiled:")
        print("\n".join(f"  {line}" for line in [*table(found), *(f"WRONG: {line}" for line in wrong)]))
        failed |= bool(wrong)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
