"""Whether the weights in a checkpoint folder are those that its config.json asks for, and how they are not."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from carpool.hf.weights.files import stored_weights
from carpool.hf.weights.original_layout import OriginalLayout


def check_loaded(folder: Path, blueprint: PreTrainedModel, info: dict[str, Any]) -> None:
    """Raise ValueError if weights had other shapes, or were not there."""
    if wrong := sorted(name for name, *_ in info["mismatched_keys"]):
        raise ValueError(misfit(folder, blueprint, f"{', '.join(wrong[:3])} have other shapes"))
    if missing := sorted(info["missing_keys"]):
        raise ValueError(
            f"{folder} lacks {len(missing)} of the weights of {type(blueprint).__name__}: {', '.join(missing[:4])}"
            f"{', ...' if len(missing) > 4 else ''}; training would start from random values there"
        )


_MISFIT = "the weights in {} do not fit its config.json: {}"


def check_weights(folder: Path, blueprint: PreTrainedModel) -> None:
    """Raise ValueError if the weights in a checkpoint folder are not what its config.json says, by their names and
    shapes. Reads the heads of the files alone.

    Args:
        blueprint: the model on the meta device."""
    if why := _why_misfit(folder, blueprint):
        raise ValueError(_MISFIT.format(folder, why))


def misfit(folder: Path, blueprint: PreTrainedModel, why: str) -> str:
    """How weights do not fit, by name, shape and file of the first that is wrong or is not there; otherwise `why`."""
    return _MISFIT.format(folder, _why_misfit(folder, blueprint) or why)


def _why_misfit(folder: Path, blueprint: PreTrainedModel) -> str | None:
    """Shapes are those of the files: of a sharded model, Transformers knows a rank's."""
    stored = stored_weights(folder)
    layout = OriginalLayout(blueprint, None, stored)
    expected = {name: entry.shape for file in layout.files.values() for name, entry in file.items()}
    if wrong := [name for name, one in stored.items() if expected.get(name, one.shape) != one.shape]:
        one = stored[wrong[0]]
        return (
            f"{wrong[0]} in {one.file} has shape {one.shape}, and the configuration asks for {expected[wrong[0]]}"
            f"{_and_others(wrong)}"
        )
    needless = blueprint._keys_to_ignore_on_load_missing or ()
    missing = [name for name in expected.keys() - stored.keys() if not any(re.search(one, name) for one in needless)]
    if missing:
        return f"{min(missing)} is in none of the files{_and_others(missing)}"
    return None


def _and_others(names: list[str]) -> str:
    return f"; nor are {len(names) - 1} others right" if len(names) > 1 else ""
