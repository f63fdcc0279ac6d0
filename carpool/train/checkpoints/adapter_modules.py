"""peft's modules of an adapter, beside a model without values: each has its weight and its adapter while it works.

What a module notes then goes as well, so that it works again: peft skips one that says it is merged, with no error.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from carpool.train.model.source import meta_model

NAME = "default"


class AdapterModules:
    """The modules of an adapter, by the names of the model's tensors that they change.

    Args:
        base: the folder of the model.
        adapter: the folder of the adapter.

    Attributes:
        layers: modules of peft that add something to a tensor.
        replaced: keys, in the adapter's file, of what stands in for a tensor (modules_to_save).

    Raises:
        ValueError: the adapter has values that the model has no place for, or lacks some, or changes a tied tensor.
    """

    def __init__(self, base: Path, adapter: Path) -> None:
        from peft import PeftConfig, get_peft_model, get_peft_model_state_dict
        from peft.tuners.lora import LoraLayer
        from peft.utils import ModulesToSaveWrapper

        self.base, self.folder, path = base, adapter, adapter / "adapter_model.safetensors"
        self._file = safe_open(path, framework="pt")
        model = meta_model(base)
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        with torch.device("meta"), warnings.catch_warnings():
            # peft reads an attribute that Transformers calls deprecated.
            warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
            adapted = get_peft_model(model, PeftConfig.from_pretrained(str(adapter)), NAME, low_cpu_mem_usage=True)
        parameters: dict[str, Any] = dict(adapted.eval().named_parameters())
        kept = get_peft_model_state_dict(adapted, state_dict=parameters, adapter_name=NAME, save_embedding_layers=False)
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
        self.layers: dict[str, Any] = {}
        self.replaced: dict[str, str] = {}
        for module in adapted.modules():
            if isinstance(module, LoraLayer):
                self.layers[names[id(module.get_base_layer()._parameters[_weight_name(module)])]] = module
            elif isinstance(module, ModulesToSaveWrapper):
                trained = dict(module.modules_to_save[NAME].named_parameters())
                for name, parameter in module.original_module.named_parameters():
                    self.replaced[names[id(parameter)]] = self._keys[id(trained[name])]
        for pair in (model.all_tied_weights_keys or {}).items():
            if {*pair} & (self.layers.keys() | self.replaced.keys()):
                raise ValueError(
                    f"{path} changes one of {' and '.join(pair)}, which are one tensor of {base}: a merged model would "
                    "change both; use base and adapter with peft, unmerged"
                )

    def read(self, key: str) -> torch.Tensor:
        """A tensor of the adapter's file."""
        found: torch.Tensor = self._file.get_tensor(key)
        return found

    @contextmanager
    def filled(self, name: str, weight: nn.Parameter) -> Iterator[Any]:
        """Inside, the module that changes the tensor of that name has its adapter and this weight, which it may change. A
        linear layer has no bias then."""
        module = self.layers[name]
        layer = module.get_base_layer()
        added = [
            (owner, key, parameter)
            for path, owner in module.named_modules()
            if not f"{path}.".startswith("base_layer.")
            for key, parameter in owner._parameters.items()
            if parameter is not None
        ]
        before = [*added, *((layer, key, parameter) for key, parameter in layer._parameters.items())]
        for owner, key, parameter in added:
            owner._parameters[key] = nn.Parameter(self.read(self._keys[id(parameter)]), requires_grad=False)
        layer._parameters[_weight_name(module)] = weight
        if isinstance(layer, nn.Linear):
            layer._parameters["bias"] = None
        try:
            yield module
        finally:
            for owner, key, parameter in before:
                owner._parameters[key] = parameter
            module.merged_adapters.clear()
            module._caches.clear()


def _weight_name(module: Any) -> str:
    return str(getattr(module, "parameter_name", "weight"))
