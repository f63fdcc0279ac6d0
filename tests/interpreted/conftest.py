"""The interpreter, in less time: it replaces the functions of `triton.language` by its own at each launch, and at each
call of a function inside a kernel, which takes longer than most of our kernels. Here they are replaced once.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

if os.environ.get("TRITON_INTERPRET") == "1":
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

    interpreter._patch_lang = once(interpreter._patch_lang)
