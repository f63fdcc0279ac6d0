"""Launching a Triton kernel in a fraction of the time.

`kernel[grid](...)` binds the arguments, says of each what the kernel may assume of it (dtype, alignment, a multiple of
16, the number 1), makes a text of all that and looks the compiled kernel up: 40 us of Python for a kernel of 40
arguments. A layer's forward and backward launch some thirty kernels, and a host that launches for longer than the
device computes is what a step then waits for.

    @quick
    @triton.jit
    def kernel(x, n, BLOCK: tl.constexpr): ...

    kernel[grid](x, n, BLOCK=64, num_warps=4)        as before

The same is said of each argument here, in one short tuple, and a compiled kernel that was launched with the same tuple
is launched again directly. What is not known yet goes Triton's way, as everything does in the interpreter. Arguments
come by position, constants by name.

`cdiv` and `power_of_2` are Triton's for the host's numbers: its own are made for kernels, and take 15 us to call here.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from triton.runtime.jit import JITFunction

INT32 = 2**31


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def power_of_2(n: int) -> int:
    """The least power of two that is at least n, and at least 1."""
    return 1 << max(0, n - 1).bit_length()


def _assumed(argument: Any) -> Any:
    """What a compiled kernel may assume of an argument. Finer than Triton's own, so that equal means equal there."""
    kind = type(argument)
    if kind is int:
        return argument == 1, argument % 16 == 0, -INT32 <= argument < INT32
    if kind is torch.Tensor or kind is torch.nn.Parameter:
        return argument.dtype, argument.data_ptr() % 16 == 0
    if kind is float or kind is bool or argument is None:
        return kind
    if kind.__name__ == "TensorDescriptor":  # Triton's, or Gluon's with a layout of its own
        how = (getattr(argument, name, None) for name in ("padding", "layout"))
        return kind, argument.base.dtype, tuple(argument.block_shape), *how
    return _Unknown


class _Unknown:
    """No statement about this argument: do not look it up."""


class Quick:
    """A kernel that remembers what it was compiled to; see the module's docstring. All else is the kernel's own."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self._known: dict[Any, tuple[Any, list[Any]]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.kernel, name)

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*arguments: Any, **constants: Any) -> None:
            assumed = tuple([_assumed(argument) for argument in arguments])
            key = torch.cuda.current_device(), assumed, tuple(constants.items())
            found = self._known.get(key)
            if found is not None:
                compiled, rest = found
                compiled[grid + (1,) * (3 - len(grid))](*arguments, *rest)
                return
            compiled = self.kernel[grid](*arguments, **constants)
            names = self.kernel.arg_names[len(arguments) :]
            # Not if a parameter has its default: that is for Triton to know.
            if compiled is not None and _Unknown not in assumed and all(name in constants for name in names):
                self._known[key] = compiled, [constants[name] for name in names]

        return launch


def quick(kernel: Any) -> Any:
    """Decorate a `triton.jit` function."""
    return Quick(kernel) if isinstance(kernel, JITFunction) and not triton.knobs.runtime.interpret else kernel
