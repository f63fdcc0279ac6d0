"""The interpreter, in less time, with the same results.

It replaces the functions of `triton.language` by its own at each launch, and at each call of a function inside a
kernel, which takes longer than most of our kernels. Here they are replaced once. And it works out types and shapes
anew for each operation, which takes longer than the operation. Here what was found once is kept (`remember_types`).
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


def pytest_pycollect_makemodule(module_path: Path) -> None:
    """Without the interpreter no file of this folder is even imported; tests/test_interpreted.py runs them then."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip(
            "needs TRITON_INTERPRET=1; tests/conftest.py sets it where there is no GPU", allow_module_level=True
        )


if os.environ.get("TRITON_INTERPRET") == "1":
    import triton
    from triton import language as tl
    from triton.language import core
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter

    def once(patch: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Of each module, whose functions share their globals."""
        patched: set[int] = set()

        def patch_once(function: Any) -> Any:
            if id(function.__globals__) not in patched:
                patched.add(id(function.__globals__))
                patch(function)
            return interpreter._LangPatchScope()  # nothing to restore

        return patch_once

    def remember_types() -> None:
        """Replace what Triton computes from types alone by a look-up. What is new to it goes Triton's way."""
        theirs_block, theirs_tensor = core.block_type.__init__, core.tensor.__init__
        theirs_check = TritonSemantic.binary_op_type_checking_impl
        theirs_computation = TritonSemantic.computation_type_impl
        theirs_broadcast, theirs_cast = TritonSemantic.broadcast_impl_value, TritonSemantic.cast
        theirs_np_dtype, theirs_equal = interpreter._get_np_dtype, core.dtype.__eq__

        @functools.cache
        def block_shape(*shape: int) -> dict[str, Any]:
            block = object.__new__(core.block_type)
            theirs_block(block, tl.int32, list(shape))
            tensor = object.__new__(core.tensor)
            theirs_tensor(tensor, None, block)
            return {"shape": block.shape, "numel": block.numel, "of_tensors": (tensor.numel, tensor.shape)}

        @functools.cache
        def block_name(shape: tuple[int, ...], element: str) -> str:
            return f"<{list(shape)}, {element}>"

        def block_init(self: Any, element_ty: Any, shape: Any) -> None:
            plain = tuple([int(core._unwrap_if_constexpr(size)) for size in shape])
            self.__dict__.update(block_shape(*plain))
            self.element_ty, self.name = element_ty, block_name(plain, element_ty.name)

        scalar = object.__new__(core.tensor)
        theirs_tensor(scalar, None, tl.int32)

        def tensor_init(self: Any, handle: Any, type: Any) -> None:
            self.handle, self.type, self.dtype = handle, type, type.scalar
            self.numel, self.shape = type.of_tensors if type.is_block() else (scalar.numel, scalar.shape)

        def check(
            self: Any, lhs: Any, rhs: Any, allow_lhs_ptr: bool = False, allow_rhs_ptr: bool = False,
            arithmetic_check: bool = True, div_or_mod: bool = False,
        ) -> Any:  # fmt: skip
            tensors = isinstance(lhs, core.tensor) and isinstance(rhs, core.tensor)
            same = tensors and lhs.type.name == rhs.type.name and not lhs.dtype.is_ptr()
            if same and not (div_or_mod and lhs.dtype.is_floating()):
                return lhs, rhs
            return theirs_check(self, lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)

        computation: dict[Any, Any] = {}

        def computation_type(self: Any, a: Any, a_is_scalar: bool, b: Any, b_is_scalar: bool, div_or_mod: bool) -> Any:
            key = a.name, a_is_scalar, b.name, b_is_scalar, div_or_mod
            if key not in computation:
                computation[key] = theirs_computation(self, a, a_is_scalar, b, b_is_scalar, div_or_mod)
            return computation[key]

        def broadcast(self: Any, lhs: Any, rhs: Any) -> Any:
            return (lhs, rhs) if lhs.shape is rhs.shape else theirs_broadcast(self, lhs, rhs)

        def cast(self: Any, value: Any, dtype: Any, fp_downcast_rounding: Any = None) -> Any:
            return value if value.dtype is dtype else theirs_cast(self, value, dtype, fp_downcast_rounding)

        np_dtypes: dict[str, Any] = {}

        def np_dtype(dtype: Any) -> Any:
            if dtype.name not in np_dtypes:
                np_dtypes[dtype.name] = theirs_np_dtype(dtype)
            return np_dtypes[dtype.name]

        core.block_type.__init__, core.tensor.__init__ = block_init, tensor_init
        core.dtype.__eq__ = lambda self, other: self is other or theirs_equal(self, other)
        TritonSemantic.binary_op_type_checking_impl = check
        TritonSemantic.computation_type_impl = computation_type
        TritonSemantic.broadcast_impl_value, TritonSemantic.cast = broadcast, cast
        interpreter._get_np_dtype = np_dtype
        # It computes each sum in int64 as well, and then asserts nothing, because that is for `debug` alone.
        builder = interpreter.interpreter_builder
        assert not builder.options.debug
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)

    interpreter._patch_lang = once(interpreter._patch_lang)
    if [int(n) for n in triton.__version__.split(".")[:2]] >= [3, 9]:  # earlier ones are built otherwise
        remember_types()
