"""Expert tensor parallelism of a transformers model: its experts are cut into slices before it is sharded.

transformers shards the stacked weights of experts by rows, one row an expert. With a row for each slice instead
(`carpool.experts.slices`), the same sharding gives each rank slices: its parameters, their gradients and what an
optimizer keeps of them live where they are computed. Rows lie in the order of `ExpertLayout.sliced`, so the ranks that
share an expert are next to each other.

    gate_up_proj of 2 experts, F = 4, in 2 slices over 4 ranks:  (2, 8, H)  ->  (4, 4, H)
    rows [expert 0 slice 0, expert 0 slice 1, expert 1 slice 0, expert 1 slice 1], one on each rank

States that leave the run have whole experts (`carpool.hf.seam.layouts`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from carpool.experts import ExpertFunction
from carpool.experts.slices import check_slices, cut
from carpool.hf.seam.experts_module import expert_function, fields_of
from carpool.layout import ExpertLayout


class SlicedExperts:
    """How whole parameters of a model's experts become rows of slices.

    Args:
        blueprint: the whole model; its parameters need no values.
        modules: the names of its experts modules, and the number of experts in each.
        ranks: W, over which experts are spread.
        slices: of each expert; divides W.

    Raises:
        ValueError: experts that cannot be cut so.
    """

    def __init__(self, blueprint: nn.Module, modules: Mapping[str, int], ranks: int, slices: int) -> None:
        self.modules, self.slices = list(modules), slices
        self._made_of: dict[str, tuple[str, ExpertFunction, list[int]]] = {}
        for name, number in modules.items():
            experts: Any = blueprint.get_submodule(name)
            function = expert_function(experts)
            inner = experts.down_proj.shape[1 if function.transposed else 2] if function is not None else 0
            check_slices(function, inner, slices, f"{type(experts).__name__} ({name})")
            assert function is not None
            order = [row for rank in ExpertLayout.sliced(number, ranks // slices, slices).homes for row in rank]
            for parameter, field in fields_of(experts).items():
                self._made_of[f"{name}.{parameter}"] = field, function, order

    def apply(self, model: nn.Module) -> None:
        """Cut the parameters of a model that is on the meta device, and not yet sharded."""
        for name in self.modules:
            experts: Any = model.get_submodule(name)
            for parameter, whole in list(experts._parameters.items()):
                rows = self.rows(f"{name}.{parameter}", whole.detach())
                experts._parameters[parameter] = nn.Parameter(rows, requires_grad=whole.requires_grad)
            experts.num_experts *= self.slices
            experts._carpool_slices = self.slices

    def rows(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """A parameter of the whole model as it lies in the sliced one, over all ranks."""
        if name not in self._made_of:
            return whole
        field, function, order = self._made_of[name]
        return cut(field, whole, self.slices, function)[order]
