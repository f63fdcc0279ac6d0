"""The frozen weights that an adapter was trained beside: with adapter.base_dtype these are not what the files hold.

    files                 W
    the run               x dequantise(quantise(W)) + x a b
    merged                dequantise(quantise(W)) + b a, rounded once to the files' dtype
    merged into W         W + b a, which differs from the run by all that quantising changed

Dequantised weights are read in float32. `load_trained` loads base and adapter by the code that trains, so it does not
depend on what `Base` reads, and a merge compares the two.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel

from carpool.experts.base import stand_in
from carpool.experts.quantised import Kind, dequantise, quantise
from carpool.hf import install
from carpool.hf.build_model import build_model
from carpool.hf.seam.experts_module import base_of, weight_names
from carpool.hf.seam.find_modules import experts_modules
from carpool.hf.weights.original_layout import OriginalWeights
from carpool.train.config import load_config
from carpool.train.lora import attach_adapter


class Base:
    """The tensors of a base model, by their names there, as its files have them or as a run has trained beside them.

    Args:
        weights: the base's files.
        model: the base on the meta device.
        kind: how the run stored the experts; None: the tensors are the files'.
        dtype: of the run's weights, before they were quantised.

    Attributes:
        quantised: names of the tensors that were stored so."""

    def __init__(self, weights: OriginalWeights, model: PreTrainedModel, kind: Kind | None, dtype: torch.dtype) -> None:
        self._weights, self.stored, self.kind, self.dtype = weights, weights.stored, kind, dtype
        names = experts_modules(model) if kind is not None else {}
        self.quantised = frozenset(
            f"{name}.{weight}" for name in names for weight in weight_names(model.get_submodule(name))[:2]
        )

    def read(self, name: str) -> torch.Tensor:
        """A tensor, which whoever reads it may change, once. One that was quantised comes in float32."""
        value = self._weights.read(name)
        if self.kind is None or name not in self.quantised:
            return value
        return dequantise(*quantise(value.to(self.dtype), self.kind), torch.float32)


def trained_base(weights: OriginalWeights, model: PreTrainedModel, run: Path) -> Base:
    """The base of a run's adapter, as the run has trained beside it."""
    if not (run / "config.toml").is_file():
        return Base(weights, model, None, torch.float32)
    config = load_config(run / "config.toml")
    return Base(weights, model, config.adapter.base_dtype, getattr(torch, config.model.stored_dtype))


@torch.no_grad()
def load_trained(base: Path, adapter: Path, trained: Base) -> PreTrainedModel:
    """Base and adapter as the run computes them, its experts quantised, but all in float32. On this process's CPU."""
    model = build_model(
        base, distributed_config=None, dtype=trained.dtype, seed=0, device=torch.device("cpu"), base_dtype=trained.kind
    )
    stands_in = {(id(module), name) for module in model.modules() for name in base_of(module)}
    for module in model.modules():
        for name, value in module._parameters.items():
            if value is not None:
                whole = (id(module), name) not in stands_in
                wide = value.float() if whole else stand_in(value.shape, torch.float32, value.device)
                module._parameters[name] = nn.Parameter(wide, requires_grad=False)
        for name, value in module._buffers.items():
            if value is not None and value.is_floating_point():
                module._buffers[name] = value.float()
    install(model)
    attach_adapter(model, adapter)
    return model.eval()
