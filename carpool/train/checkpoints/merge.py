"""An adapter and the model that it was trained beside, made one model: a folder as that of the model.

peft merges: each weight becomes weight + scaling * b a, in the weight's dtype. So the merged model's outputs are those
of the two together up to that rounding. peft's own modules do it, but of a model without values: a module gets its
weight and its adapter when its weight is to be written, and gives both back. So memory is needed for the tensors that
are converted together, one layer's experts, and their adapters, however large the model is.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from carpool.hf.config.source import read_config
from carpool.hf.weights.files import stored_weights
from carpool.hf.weights.original_layout import OriginalLayout, OriginalWeights
from carpool.train.checkpoints.export import Exported, check_target, write_model
from carpool.train.checkpoints.source import read_source
from carpool.train.model.source import meta_model
from carpool.train.records.files import ADAPTER

_NAME = "default"


def merge_adapter(
    run: Path,
    target: Path,
    *,
    base: Path | None = None,
    begin: Callable[[str, int], None] = lambda _, __: None,
    advance: Callable[[int], None] = lambda _: None,
) -> Exported:
    """Writes the model of a run that has trained an adapter, merged with its newest values, as a model folder.

    Args:
        run: the run's folder.
        target: the new folder.
        base: where the model is that the adapter was trained beside; None: where it was then.
        begin, advance: as of `carpool.train.checkpoints.export.export_checkpoint`.

    Raises:
        ValueError: the run has no adapter, or its model is not there.
        OSError: the target is in use, or cannot be written.
    """
    adapter, target = run / ADAPTER, target.absolute()
    if not (adapter / "adapter_config.json").is_file():
        raise ValueError(f"{run} has no adapter to merge: a run with adapter.kind writes one with each checkpoint")
    check_target(target, replace=False)
    if base is None:
        config = json.loads((adapter / "adapter_config.json").read_text(encoding="utf-8"))
        base = Path(str(config["base_model_name_or_path"]))
    if not (base / "config.json").is_file():
        raise ValueError(f"the model of {adapter} is not in {base} any more: say where it is (--base)")
    read_config(base)
    stored, source = stored_weights(base), read_source(run)
    layout = OriginalLayout(meta_model(base), None, source.weights)
    merged = _Merged(base, OriginalWeights(meta_model(base), base, stored, layout), adapter)
    return write_model(target, source, layout, merged.read, base, begin=begin, advance=advance)


class _Merged:
    """Reads tensors of the merged model, by their names in the model.

    Args:
        base: the folder of the model.
        weights: of that model.
        adapter: the folder of the adapter.

    Raises:
        ValueError: the adapter has values that the model has no place for, or lacks some."""

    def __init__(self, base: Path, weights: OriginalWeights, adapter: Path) -> None:
        from peft import PeftConfig, get_peft_model, get_peft_model_state_dict
        from peft.tuners.lora import LoraLayer
        from peft.utils import ModulesToSaveWrapper

        path = adapter / "adapter_model.safetensors"
        self._weights, self._file = weights, safe_open(path, framework="pt")
        model = meta_model(base)
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        with torch.device("meta"), warnings.catch_warnings():
            # peft reads an attribute that Transformers calls deprecated.
            warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
            adapted = get_peft_model(model, PeftConfig.from_pretrained(str(adapter)), _NAME, low_cpu_mem_usage=True)
        parameters: dict[str, Any] = dict(adapted.named_parameters())
        kept = get_peft_model_state_dict(
            adapted, state_dict=parameters, adapter_name=_NAME, save_embedding_layers=False
        )
        # Keys of the adapter's file.
        self._keys = {id(parameter): key for key, parameter in kept.items()}
        if differ := sorted(set(kept) ^ set(self._file.keys())):
            raise ValueError(
                f"{path} is not an adapter of this model: {differ[0]} is in one of the two only; say which model "
                "it was trained beside (--base)"
            )
        for key, parameter in kept.items():
            if (stored := tuple(self._file.get_slice(key).get_shape())) != tuple(parameter.shape):
                raise ValueError(
                    f"{path} is not an adapter of this model: {key} is {stored} there, and beside {base} it would be "
                    f"{tuple(parameter.shape)}; say which model it was trained beside (--base)"
                )
        # By the name of what they change.
        self._layers: dict[str, Any] = {}
        self._replaced: dict[str, nn.Parameter] = {}
        for module in adapted.modules():
            if isinstance(module, LoraLayer):
                self._layers[names[id(_weight(module))]] = module
            elif isinstance(module, ModulesToSaveWrapper):
                trained = dict(module.modules_to_save[_NAME].named_parameters())
                for name, parameter in module.original_module.named_parameters():
                    self._replaced[names[id(parameter)]] = trained[name]

    def _of_adapter(self, parameter: nn.Parameter) -> torch.Tensor:
        found: torch.Tensor = self._file.get_tensor(self._keys[id(parameter)])
        return found

    @torch.no_grad()
    def read(self, name: str) -> torch.Tensor:
        """A tensor of the merged model."""
        if name in self._replaced:
            return self._of_adapter(self._replaced[name])
        values = self._weights.read(name)
        if name not in self._layers:
            return values
        module = self._layers[name]
        held = [
            (owner, key, parameter)
            for path, owner in module.named_modules()
            if not f"{path}.".startswith("base_layer.")
            for key, parameter in owner._parameters.items()
            if parameter is not None
        ]
        place, key = module.get_base_layer(), _weight_name(module)
        empty = place._parameters[key]
        # Mapped files are not written to.
        place._parameters[key] = nn.Parameter(values.clone(), requires_grad=False)
        del values
        for owner, own, parameter in held:
            owner._parameters[own] = nn.Parameter(self._of_adapter(parameter), requires_grad=False)
        module.merge(adapter_names=[_NAME])
        merged: torch.Tensor = place._parameters[key].data
        for owner, own, parameter in [*held, (place, key, empty)]:
            owner._parameters[own] = parameter
        return merged


def _weight_name(layer: Any) -> str:
    """What a layer of peft adapts of its base layer."""
    return str(getattr(layer, "parameter_name", "weight"))


def _weight(layer: Any) -> torch.Tensor:
    found: torch.Tensor = getattr(layer.get_base_layer(), _weight_name(layer))
    return found
