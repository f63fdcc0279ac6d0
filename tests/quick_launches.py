"""Run by tests/test_compile_kernels.py in a process of its own, because it replaces Triton's driver by one without a
GPU.

Kernels are really compiled; what would have been launched is written down.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from carpool.kernels import quick as quick_module
from carpool.kernels.quick import Quick

launched: list[tuple[Any, ...]] = []


class Utils:
    def load_binary(self, name: str, binary: bytes, *_: Any) -> tuple[Any, ...]:
        return None, hash(binary), 16, 0, 1024

    def get_device_properties(self, _: int) -> dict[str, int]:
        return {"max_shared_mem": 2**17}


class Launcher:
    def __init__(self, *_: Any) -> None:
        pass

    def __call__(self, *given: Any) -> None:
        # Without what profilers are told, a new object each time.
        launched.append(tuple(g for g in given if type(g).__name__ != "LazyDict"))


class Driver:
    utils, launcher_cls = Utils(), Launcher

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _: int) -> int:
        return 7

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


@triton.jit(do_not_specialize=["free"])
def kernel(x, y, n, free, scale, BLOCK: tl.constexpr, ADD: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < n, other=0.0) * scale
    tl.store(y + at, value + free + 1 if ADD else value, mask=at < n)


def main() -> None:
    driver.set_active(Driver())
    torch.cuda.current_device = lambda: 0  # type: ignore[method-assign]
    fast, compiled = Quick(kernel), 0
    memory = torch.zeros(4096)
    tensors = [memory, memory[1:], memory[4:], memory.half(), memory.bfloat16()]
    calls = [
        ((x, memory, n, free, scale), {"BLOCK": block, "ADD": add, "num_warps": warps})
        for x in tensors
        for n in (1, 16, 17, 2**31 - 1, 2**31)
        for free in (1, 48)
        for scale, block, add, warps in ((0.5, 64, True, 4), (0.5, 64, False, 4), (2, 128, True, 8))
    ]
    for turn in range(2):
        for arguments, constants in calls:
            kernel[(3,)](*arguments, **constants)
            fast[(3,)](*arguments, **constants)
            plain, ours = launched[-2:]
            assert len(plain) == len(ours)
            for a, b in zip(plain, ours, strict=True):
                assert a is b or a == b, (turn, arguments[2:], constants, plain, ours)
        if turn == 0:
            compiled = len(fast._known)
    assert len(fast._known) == compiled > 20, "the second turn knows them all"
    lookups = []
    run = kernel.run
    kernel.run = lambda *a, **k: lookups.append(k) or run(*a, **k)
    fast[(3,)](*calls[0][0], **calls[0][1])
    assert not lookups, "a known kernel is launched without Triton's look-up"
    fast[(3,)](object.__new__(Pointer), *calls[0][0][1:], **calls[0][1])
    assert lookups and len(fast._known) == compiled, "what is no tensor and no number goes Triton's way"

    for a, b in ((0, 3), (1, 3), (3, 3), (4, 3), (7, 1)):
        assert quick_module.cdiv(a, b) == triton.cdiv(a, b)
    for n in range(1, 70):
        assert quick_module.power_of_2(n) == triton.next_power_of_2(n)
    print("ok", compiled)


class Pointer:
    dtype = torch.float32

    def data_ptr(self) -> int:
        return 4096


if __name__ == "__main__":
    main()
