"""Gluon's asynchronous copies under one name each: Triton 3.9 renamed them, and Carpool runs with both.

load_rows    from addresses to shared memory (cp.async)
load_tile    from a tensor map to shared memory (TMA)
store_tile   from shared memory to a tensor map (TMA)
reinterpret  shared memory, seen in another shape
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import tma

if hasattr(tma, "async_load"):
    load_rows, load_tile, store_tile = async_copy.async_load, tma.async_load, tma.async_store
else:
    load_rows = async_copy.async_copy_global_to_shared
    load_tile, store_tile = tma.async_copy_global_to_shared, tma.async_copy_shared_to_global

if hasattr(gl.shared_memory_descriptor, "reinterpret"):

    @gluon.jit
    def reinterpret(memory, dtype: gl.constexpr, shape: gl.constexpr, layout: gl.constexpr):  # type: ignore[no-untyped-def]
        return memory.reinterpret(dtype, shape, layout)
else:

    @gluon.jit
    def reinterpret(memory, dtype: gl.constexpr, shape: gl.constexpr, layout: gl.constexpr):  # type: ignore[no-untyped-def]
        return memory._reinterpret(dtype, shape, layout)
