"""The frozen weights that an adapter was trained beside: with adapter.base_dtype these are not what the files hold.

    files                 W
    the run               x dequantise(quantise(W)) + x a b
    merged                dequantise(quantise(W)) + b a, rounded once to the files' dtype
    merged into W         W + b a, which differs from the run by all that quantising changed

Dequantised weights are read in float32. `load_trained` loads base and adapter by the code that trains, so it does not
depend on what `Base` reads, and a merge compares the two.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from carpool.experts.base import stand_in
from carpool.experts.quantised import Kind, dequantise, quantise
from carpool.hf import install
from carpool.hf.build_model import build_model
from carpool.hf.quantised_base import layer_kind, quantisable_layers
from carpool.hf.seam.experts_module import base_of, weight_names
from carpool.hf.seam.find_modules import experts_modules
from carpool.hf.weights.mxfp4_files import packed_names
from carpool.hf.weights.original_layout import OriginalWeights
from carpool.train.config import load_config
from carpool.train.lora import attach_adapter
from carpool.train.records.run_folder import ADAPTER


class Base:
    """The tensors of a base model, by their names there, as its files have them or as a run has trained beside them.

    Args:
        weights: the base's files.
        model: the base on the meta device.
        kind: how the run stored frozen matrices; None: the tensors are the files'.
        dtype: of the run's weights, before they were quantised.
        keep: as of `carpool.hf.quantised_base.quantisable_layers`.

    Attributes:
        quantised: names of the tensors that were stored so."""

    def __init__(
        self,
        weights: OriginalWeights,
        model: PreTrainedModel,
        kind: Kind | None,
        dtype: torch.dtype,
        keep: Sequence[str] | None = (),
    ) -> None:
        self._weights, self.stored, self.kind, self.dtype, self.keep = weights, weights.stored, kind, dtype, keep
        self._kinds: dict[str, tuple[Kind, bool]] = {}
        if kind is not None:
            packed = packed_names(weights.stored)
            for name in experts_modules(model):
                experts: Any = model.get_submodule(name)
                turned = kind == "mxfp4" and experts.is_transposed
                names = {f"{name}.{weight}" for weight in weight_names(experts)[:2]}
                self._kinds |= dict.fromkeys(names - packed, (kind, turned))
            # Of a tied weight the first name is in the files.
            there, layers = dict(model.named_parameters()), quantisable_layers(model, kind, keep)
            self._kinds |= {f"{name}.weight": (layer_kind(kind), False) for name in layers if f"{name}.weight" in there}
        self.quantised = frozenset(self._kinds)

    def read(self, name: str) -> torch.Tensor:
        """A tensor, which whoever reads it may change, once. One that was quantised comes in float32."""
        value = self._weights.read(name)
        if name not in self._kinds:
            return value
        kind, turned = self._kinds[name]
        stack = value.to(self.dtype).view(-1, *value.shape[-2:])
        found = dequantise(*quantise(stack.transpose(1, 2) if turned else stack, kind), torch.float32)
        return (found.transpose(1, 2) if turned else found).reshape(value.shape)


def trained_base(weights: OriginalWeights, model: PreTrainedModel, run: Path) -> Base:
    """The base of a run's adapter, as the run has trained beside it."""
    if not (run / "config.toml").is_file():
        return Base(weights, model, None, torch.float32)
    config = load_config(run / "config.toml")
    return Base(weights, model, config.adapter.base_dtype, getattr(torch, config.model.stored_dtype), kept_in(run))


def recorded_base(adapter: Path) -> Path:
    """Where the model of an adapter was when it was trained. ValueError: its weights were random."""
    name = json.loads((adapter / "adapter_config.json").read_text(encoding="utf-8"))["base_model_name_or_path"]
    if name is None:
        raise ValueError(
            f"{adapter} was trained beside random weights (model.config), which nobody has: train it beside a "
            "checkpoint (model.path)"
        )
    return Path(str(name))


def kept_in(run: Path) -> tuple[str, ...] | None:
    """Ends of the names of modules that a run with adapter.base_dtype has left as they are; None: all but experts."""
    # On several ranks only experts are quantised.
    found = run / "run.json"
    ranks = json.loads(found.read_text(encoding="utf-8"))["parallelism"]["world_size"] if found.is_file() else 1
    peft = json.loads((run / ADAPTER / "adapter_config.json").read_text(encoding="utf-8"))
    return None if ranks > 1 or peft.get("use_dora") else tuple(peft.get("modules_to_save") or ())


@torch.no_grad()
def load_trained(base: Path, adapter: Path, trained: Base) -> PreTrainedModel:
    """Base and adapter as the run computes them, its experts quantised, but all in float32. On this process's CPU."""
    model = build_model(
        base, distributed_config=None, dtype=trained.dtype, seed=0, device=torch.device("cpu"), base_dtype=trained.kind,
        base_keep=trained.keep,
    )  # fmt: skip
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
