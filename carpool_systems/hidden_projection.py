"""Hidden states are projected to fewer elements before dispatch, and MoE outputs are projected back (BigMac).

    router(x_TH) -> choices;    descend(x_TH) -> x_TD dispatched -> experts -> y_TD combined -> ascend(y_TD) -> y_TH

This is another model: its experts are matrices of D x F in the place of H x F, and each block has two projections more
(arXiv 2502.16927, section 3). Transformers constructs the model without them; here its experts are made anew. So such a
model is trained from scratch, resumed, evaluated and sampled by Carpool, and not exported. For the same number of
parameters, make experts wider (moe_intermediate_size).

    hidden_projection.size=512                                      of `carpool train`
    add_change(config, "hidden_projection", {"size": 512})          of a configuration for `build_model`
    carpool_systems.projected_moe.ProjectedMoE                      the layer
"""

from __future__ import annotations

import copy
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from carpool.hf.architecture_changes import ArchitectureChange
from carpool.hf.seam.experts_module import project_tokens
from carpool.hf.seam.find_modules import experts_modules


class ProjectHidden(ArchitectureChange):
    """See the module's docstring. Setting: size, D."""

    not_in_transformers = "it has no projections around experts (hidden_projection.size)"

    def describe(self) -> str:
        size = self.settings["size"]
        return f"ANOTHER MODEL: hidden states are projected to {size} elements before dispatch (hidden_projection.size)"

    def dispatched_size(self, size: int) -> int:
        return int(self.settings["size"])

    def apply(self, model: PreTrainedModel) -> None:
        text: Any = model.config.get_text_config()
        size, hidden, narrow = self.settings["size"], text.hidden_size, copy.deepcopy(text)
        if size >= hidden:
            raise ValueError(
                f"hidden_projection.size = {size} makes no hidden state smaller, for model.config.hidden_size is "
                f"{hidden}: choose a smaller one, or leave it out"
            )
        narrow.hidden_size = size
        for name in experts_modules(model):
            path, _, key = name.rpartition(".")
            block, experts = model.get_submodule(path), model.get_submodule(name)
            place: Any = {"dtype": next(experts.parameters()).dtype, "device": "meta"}
            made = _made(type(experts), narrow, name).to(**place)
            before, after = ([p.shape for p in one.parameters()] for one in (experts, made))
            if len(before) != len(after) or any(size not in shape for shape in after if len(shape) == 3):
                raise ValueError(f"hidden_projection.size: the experts of {type(model).__name__} have one size alone")
            block.descend = nn.Linear(hidden, size, bias=False, **place)
            block.ascend = nn.Linear(size, hidden, bias=False, **place)
            project_tokens(made, block.descend, block.ascend)
            setattr(block, key, made)


def _made(cls: Any, config: PreTrainedConfig, name: str) -> nn.Module:
    try:
        made: nn.Module = cls(config)
    except Exception as error:  # each class takes what it likes
        raise ValueError(f"hidden_projection.size: {name} ({cls.__name__}) cannot be made anew: {error}") from error
    return made
