"""The state of all random generators of a process, as text.

Without it a resumed run draws other dropout masks than the run that was never interrupted. Each rank has its own.
"""

from __future__ import annotations

import base64
import random
from typing import Any

import numpy as np
import torch


def _encode(values: np.ndarray[Any, Any]) -> str:
    return base64.b64encode(values.tobytes()).decode("ascii")


def _decode(text: str, dtype: type[np.generic]) -> np.ndarray[Any, Any]:
    # A copy: what frombuffer gives cannot be written to, which torch complains about.
    return np.frombuffer(base64.b64decode(text), dtype=dtype).copy()


def rng_state() -> dict[str, Any]:
    """Python's, NumPy's, PyTorch's on the CPU and, where there is one, on this process's CUDA device."""
    version, words, gauss = random.getstate()
    numpy_state = np.random.get_state(legacy=False)
    assert isinstance(numpy_state, dict)
    generator = numpy_state["state"]
    state = {
        "python": {"version": version, "words": _encode(np.array(words, dtype=np.uint32)), "gauss": gauss},
        "numpy": {
            "kind": numpy_state["bit_generator"],
            "key": _encode(generator["key"]),
            "pos": int(generator["pos"]),
            "has_gauss": int(numpy_state["has_gauss"]),
            "gauss": float(numpy_state["gauss"]),
        },
        "torch": _encode(torch.get_rng_state().numpy()),
    }
    if torch.cuda.is_available():
        state["cuda"] = _encode(torch.cuda.get_rng_state().numpy())
    return state


def check_rng_state(state: dict[str, Any]) -> None:
    """Raises ValueError unless `set_rng_state` can put this back. Changes no generator."""
    try:
        python, numpy_state, torch_state = _decoded(state)
        random.Random().setstate(python)
        np.random.RandomState().set_state(numpy_state)
        torch.Generator().set_state(torch_state)
        _decode(state.get("cuda", ""), np.uint8)
    except Exception as error:  # each of them complains in its own way
        raise ValueError(f"the state of the random generators is damaged ({type(error).__name__}: {error})") from error


def set_rng_state(state: dict[str, Any]) -> None:
    """Puts back what `rng_state` gave; a CUDA state is ignored where there is no CUDA device."""
    python, numpy_state, torch_state = _decoded(state)
    random.setstate(python)
    np.random.set_state(numpy_state)
    torch.set_rng_state(torch_state)
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(torch.from_numpy(_decode(state["cuda"], np.uint8)))


def _decoded(state: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any], torch.Tensor]:
    """What Python's, NumPy's and PyTorch's generators take."""
    python, numpy_state = state["python"], state["numpy"]
    words = tuple(int(word) for word in _decode(python["words"], np.uint32))
    return (
        (python["version"], words, python["gauss"]),
        {
            "bit_generator": numpy_state["kind"],
            "state": {"key": _decode(numpy_state["key"], np.uint32), "pos": numpy_state["pos"]},
            "has_gauss": numpy_state["has_gauss"],
            "gauss": numpy_state["gauss"],
        },
        torch.from_numpy(_decode(state["torch"], np.uint8)),
    )
