"""The experts of a checkpoint folder, read one by one from its safetensors files, which are mapped and never loaded.

Most checkpoints have matrices of their own for each expert, where the model has one tensor for a layer:

    model.layers.0.mlp.experts.gate_up_proj[5]    experts.5.gate_proj.weight, experts.5.up_proj.weight

Transformers knows how such a tensor is made (`WeightConverter`). What it does with the matrices of all experts it does
here with those of one, and the first dimension is then 1. A checkpoint that stacks experts as the model does is read
row by row.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import GenerationConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, dot_natural_key, rename_source_key
from transformers.modeling_utils import LoadStateDictConfig

from carpool.hf.weights.weight_files import conversions_of, stored_weights


def read_without_experts(
    folder: Path, model: PreTrainedModel, modules: Sequence[str], dtype: torch.dtype, device: torch.device
) -> dict[str, Any]:
    """Read a checkpoint folder into a model on the meta device, as `from_pretrained` does, but for its experts modules,
    which stay there. (With these two devices in a device_map, `from_pretrained` itself hands the model to Accelerate.)
    Returns what `from_pretrained` says of missing keys and mismatched shapes."""
    config = LoadStateDictConfig(
        pretrained_model_name_or_path=str(folder),
        ignore_mismatched_sizes=True,
        device_map={"": device, **dict.fromkeys(modules, "meta")},
        dtype=dtype,
        dtype_plan=model._get_dtype_plan(dtype),
        weight_mapping=get_model_conversion_mapping(model),
    )
    files = [str(folder / name) for name in sorted({stored.file for stored in stored_weights(folder).values()})]
    info, _ = model._load_pretrained_model(model, None, files, config)
    found: dict[str, Any] = model._finalize_model_loading(model, config, info).to_dict()
    if (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)
    return found


class _Parameter:
    """One stacked parameter of a layer's experts, by its name in the model. `converter`: makes it; None: its file has
    it. `sources`: of each pattern of the converter, the tensors that match, in order. `first`: the rank's first
    expert."""

    def __init__(
        self,
        name: str,
        model: PreTrainedModel,
        converter: WeightConverter | None,
        sources: dict[str, list[tuple[str, torch.Tensor]]],
        first: int,
    ) -> None:
        self.name, self._model, self._converter, self._sources, self._first = name, model, converter, sources, first

    def row(self, expert: int, meta: bool = False) -> torch.Tensor:
        """The parameter of one expert. `meta`: its shape alone."""
        expert += self._first
        converter = copy.deepcopy(self._converter)
        for pattern, found in self._sources.items():
            name, tensor = found[0 if len(found) == 1 else expert]
            if len(found) == 1:
                tensor = tensor[expert : expert + 1]
            if meta:
                tensor = tensor.to("meta")
            if converter is None:
                return tensor[0]
            converter.add_tensor(self.name, name, pattern, tensor)
        assert converter is not None
        made: Any = converter.convert(self.name, model=self._model, config=self._model.config)[self.name]
        return (made[0] if isinstance(made, list) else made)[0]  # type: ignore[no-any-return]


class StoredExperts:
    """The experts of a model in the files of its checkpoint: a `carpool.memory.read_experts.ExpertFiles`.

    Args:
        folder: of the checkpoint, which was checked (`read_config`).
        model: without adapters, and whole; its experts need no values.
        modules: the names of its experts modules, in the order of the forward.
        first: the rank's first expert.

    Raises:
        ValueError: a file was cut off, or one expert's parameters cannot be told apart there.
    """

    def __init__(self, folder: Path, model: PreTrainedModel, modules: Sequence[str], first: int = 0) -> None:
        renamings, converters = conversions_of(model)
        of_pattern = {pattern: one for one in converters for pattern in one.source_patterns}
        expected = model.state_dict()
        wanted = [
            [f"{module}.{name}" for name, _ in model.get_submodule(module).named_parameters()] for module in modules
        ]
        names = {name for layer in wanted for name in layer}
        files: dict[str, Any] = {}
        sources: dict[str, dict[str | None, list[tuple[str, torch.Tensor]]]] = {}
        for source, stored in sorted(stored_weights(folder).items(), key=lambda item: dot_natural_key(item[0])):
            target, pattern = rename_source_key(source, renamings, converters, model.base_model_prefix, expected)
            if target not in names:
                continue
            if stored.file not in files:
                files[stored.file] = safe_open(folder / stored.file, framework="pt")
            # Its memory is that of the file.
            tensor = files[stored.file].get_tensor(source)
            sources.setdefault(target, {}).setdefault(pattern, []).append((source, tensor))
        self._layers: list[list[_Parameter]] = []
        for layer in wanted:
            self._layers.append([])
            for name in layer:
                found = sources.get(name, {})
                converter = None if None in found else of_pattern[next(iter(found))] if found else None
                parameter = _Parameter(name, model, converter, {str(k): v for k, v in found.items()}, first)
                shape = None
                # Whatever Transformers' operations say to matrices that are not what they expect.
                with suppress(Exception):
                    shape = parameter.row(expected[name].shape[0] - 1 - first, meta=True).shape
                if shape != expected[name].shape[1:]:
                    raise ValueError(
                        f"{folder} does not hold the rows of {name} expert by expert, so experts cannot be read from "
                        "disk one by one; keep them in host memory"
                    )
                self._layers[-1].append(parameter)

    def read(self, layer: int, expert: int, into: Sequence[torch.Tensor]) -> None:
        """Copy an expert's parameters to memory, in the order of its module's. Threads may call it."""
        for parameter, memory in zip(self._layers[layer], into, strict=True):
            memory.copy_(parameter.row(expert))
