"""Rounding in Triton's interpreter as a GPU rounds, for tests that compare codes of FP8."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter


@contextmanager
def rounding_as_on_a_gpu() -> Iterator[None]:
    """On the way to FP8 the interpreter loses the carry into the exponent (31.1 becomes 16); to bf16 it cuts off."""
    theirs = interpreter._convert_float

    def convert(data: np.ndarray, source: tl.dtype, target: tl.dtype, rounding: object) -> np.ndarray:
        narrow = {tl.float8e4nv: (torch.float8_e4m3fn, torch.uint8), tl.bfloat16: (torch.bfloat16, torch.int16)}
        if source != tl.float32 or target not in narrow:
            return theirs(data, source, target, rounding)
        dtype, bits = narrow[target]
        rounded = torch.from_numpy(np.ascontiguousarray(data)).to(dtype).view(bits).numpy()
        return rounded.view(f"uint{8 * rounded.itemsize}")

    with mock.patch.object(interpreter, "_convert_float", convert):
        yield
