"""Narrow rows: tokens are projected to fewer elements before they travel, and sums are projected back (BigMac).

    block    router(x_TH) -> choices;  descend(x_TH) -> rows of `size` travel -> experts -> ascend -> (T, H)

This is ANOTHER MODEL: its experts are matrices of size x F in the place of H x F, and each block has two projections
more. A configuration says so by `travel_size` (arXiv 2502.16927, section 3). Transformers builds the model without, and
knows nothing of it; here its experts are made anew. So such a model is trained from scratch, resumed, evaluated and
sampled by Carpool, and not exported. For the same number of parameters, make experts wider (moe_intermediate_size).
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from carpool.hf.seam.experts_module import PROJECTIONS

KEY = "travel_size"


def row_size(config: PreTrainedConfig) -> int:
    """Elements of a row that travels."""
    text: Any = config.get_text_config()
    return int(getattr(text, KEY, None) or text.hidden_size)


def is_narrow(config: PreTrainedConfig) -> bool:
    """Whether rows are projected before they travel."""
    return getattr(config.get_text_config(), KEY, None) is not None


def narrow_experts(model: PreTrainedModel, names: Iterable[str]) -> None:
    """Give a model whose configuration has a `travel_size` its narrow experts and their projections. Others stay.

    Args:
        model: just built, on the meta device.
        names: of its experts modules.

    Raises:
        ValueError: experts that cannot be made in another size.
    """
    if not is_narrow(model.config):
        return
    text: Any = model.config.get_text_config()
    size, hidden, narrow = row_size(model.config), text.hidden_size, copy.deepcopy(text)
    if size >= hidden:
        raise ValueError(
            f"model.travel_size = {size} makes no row smaller, for model.config.hidden_size is {hidden}: choose a "
            "smaller one, or leave it out"
        )
    narrow.hidden_size = size
    for name in names:
        path, _, key = name.rpartition(".")
        block, experts = model.get_submodule(path), model.get_submodule(name)
        place: Any = {"dtype": next(experts.parameters()).dtype, "device": "meta"}
        made = _made(type(experts), narrow, name).to(**place)
        before, after = ([p.shape for p in one.parameters()] for one in (experts, made))
        if len(before) != len(after) or any(size not in shape for shape in after if len(shape) == 3):
            raise ValueError(f"model.travel_size: the experts of {type(model).__name__} cannot have another size")
        block.descend = nn.Linear(hidden, size, bias=False, **place)
        block.ascend = nn.Linear(size, hidden, bias=False, **place)
        # Past nn.Module: they are the block's.
        object.__setattr__(made, PROJECTIONS, (block.descend, block.ascend))
        setattr(block, key, made)


def _made(cls: Any, config: PreTrainedConfig, name: str) -> nn.Module:
    try:
        made: nn.Module = cls(config)
    except Exception as error:  # each class takes what it likes
        raise ValueError(f"model.travel_size: {name} ({cls.__name__}) cannot be made anew: {error}") from error
    return made
