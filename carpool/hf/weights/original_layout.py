"""A model's weights as its published checkpoint has them: names, shapes, dtypes, files; one group of tensors at a time.

Transformers changes weights while it loads them: 128 matrices `experts.5.up_proj` of Qwen3 become one tensor of a
layer. `save_pretrained` changes them back with the whole model in memory. But each change is of few tensors, which are
found beforehand, without any values:

    in the model                               in the files
    model.norm.weight                          model.norm.weight
    model.layers.0.mlp.experts.gate_up_proj    model.layers.0.mlp.experts.0.gate_proj.weight, ... (256 of them)

So an export needs memory for the largest group; one whose tensors are in two files is read twice. `OriginalWeights`
goes the other way.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import reduce
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    apply_converters,
    convert_and_load_state_dict_in_model,
    rename_source_key,
    revert_weight_conversion,
)
from transformers.modeling_utils import LoadStateDictConfig
from transformers.utils.logging import disable_progress_bar

from carpool.hf.architecture_changes import changes_in_files
from carpool.hf.multi_token import layer_keys, repeated_weights
from carpool.hf.weights.mxfp4_files import BLOCKS, SCALES, pack, packed_names, packed_shape, unpack, unpacked_names
from carpool.hf.weights.weight_files import Entry, Stored, split_by_size, stored_weights, write_index, write_tensor_file


class Group(NamedTuple):
    """Tensors that are converted together: names in the model, and what comes out."""

    inputs: tuple[str, ...]
    outputs: dict[str, Entry]


class OriginalLayout:
    """What the files of a model's weights will hold.

    Args:
        model: on the meta device.
        tensors: names in the model, dtypes and shapes of what is to be written. None: all; a tied weight comes once.
        source: the weights of the checkpoint that the model was loaded from: names, files and dtypes will be the same.
            Empty: names as Transformers publishes them, dtypes as in `tensors`.
        shard_bytes: the most that a file holds, if not all names are in `source`.
        packed: names in the model of what the files hold in MXFP4 (`carpool.hf.weights.mxfp4_files`).

    Attributes:
        files: names, dtypes and shapes of what each file holds.
        tensors: names in the model, dtypes and shapes.
        left_out: names in `source` that the model does not have.
        groups: which tensors are converted together.
        repeated: names in the files of weights that are there once more, and the other one's name there.
        changes: of the model's architecture, whose parameters the files have.
        architecture, dtype: the model's class, and what most bytes are of, as a config.json has them.
        config_keys: what else a config.json must say.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tensors: Mapping[str, Entry] | None,
        source: Mapping[str, Stored],
        shard_bytes: int = 5 * 10**9,
        packed: Collection[str] = (),
    ) -> None:
        if tensors is None:
            # Of a tied weight the first name, as in `named_parameters`.
            tied = {name for name, _ in model.named_parameters(remove_duplicate=False)}
            tied -= {name for name, _ in model.named_parameters()}
            state = {name: value for name, value in model.state_dict().items() if name not in tied}
            tensors = {name: Entry(value.dtype, tuple(value.shape)) for name, value in state.items()}
        self._model, self.tensors, self.packed = model, dict(tensors), frozenset(packed)
        if source:
            # As `from_pretrained` does it: the conversions that the names in the files call for.
            model._weight_conversions = _conversions(model, source)
        ignored = model._keys_to_ignore_on_save or ()
        self.groups = [
            _packed_group(inputs[0], tensors[inputs[0]]) if inputs[0] in packed else _group(model, inputs, tensors)
            for inputs in _inputs(model, [n for n in tensors if n not in ignored])
        ]
        self.repeated = {}
        for name, original in repeated_weights(model).items():
            for group in self.groups:
                if group.inputs == (original,):
                    self.repeated[name], group.outputs[name] = next(iter(group.outputs.items()))
        entries = {
            name: Entry(source[name].dtype, entry.shape) if name in source else entry
            for group in self.groups
            for name, entry in group.outputs.items()
        }
        self.architecture, self.config_keys = type(model).__name__, layer_keys(model)
        self.changes = changes_in_files(model.config)
        sizes: dict[torch.dtype, int] = {}
        for entry in entries.values():
            sizes[entry.dtype] = sizes.get(entry.dtype, 0) + entry.bytes
        self.dtype = str(max(sizes, key=lambda dtype: sizes[dtype])).removeprefix("torch.")
        self.left_out = sorted(unpacked_names(source) - unpacked_names(entries))
        self.files: dict[str, dict[str, Entry]] = {}
        if entries.keys() <= source.keys():
            for name, entry in entries.items():
                self.files.setdefault(source[name].file, {})[name] = entry
            self.files = dict(sorted(self.files.items()))
        else:
            self.files = split_by_size(entries, shard_bytes)

    @property
    def bytes(self) -> int:
        return sum(entry.bytes for entries in self.files.values() for entry in entries.values())

    def write(
        self,
        folder: Path,
        read: Callable[[str], torch.Tensor],
        files: list[str] | None = None,
        written: Callable[[int], None] = lambda _: None,
    ) -> None:
        """Writes the files, or some of them, into a folder.

        Args:
            read: the values of a tensor, whole, by its name in the model.
            written: is called with the bytes of each tensor once it is written.
        """
        for file in self.files if files is None else files:
            entries = self.files[file]
            write_tensor_file(folder / file, entries, self._values(entries, read), written)

    def write_index(self, folder: Path) -> None:
        """The index of all files; see `carpool.hf.weights.weight_files`."""
        write_index(folder, self.files)

    def _values(
        self, entries: Mapping[str, Entry], read: Callable[[str], torch.Tensor]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        for group in self.groups:
            if wanted := [name for name in group.outputs if name in entries]:
                tensors = {name: read(name) for name in group.inputs}
                if (name := group.inputs[0]) in self.packed:
                    values = dict(zip(group.outputs, pack(tensors[name]), strict=True))
                else:
                    values = revert_weight_conversion(self._model, tensors)
                values |= {name: values[self.repeated[name]] for name in wanted if name in self.repeated}
                yield from ((name, values.pop(name)) for name in wanted)


class OriginalWeights:
    """The tensors of a model, which is on the meta device, read from files that have their original layout. `stored`:
    what is in them. Those of the latest group are held."""

    def __init__(
        self, model: PreTrainedModel, folder: Path, stored: Mapping[str, Stored], layout: OriginalLayout
    ) -> None:
        # Tensors are put into it, and taken out again.
        self._model, self._folder, self.stored = copy.deepcopy(model), folder, stored
        self._groups, self._packed = {name: group for group in layout.groups for name in group.inputs}, layout.packed
        self._repeated = layout.repeated
        self._latest: dict[str, torch.Tensor] = {}

    def read(self, name: str) -> torch.Tensor:
        """A tensor by its name in the model. Whoever reads it may change it, and reads it once.

        Raises:
            ValueError: the files lack what it is made of."""
        if name not in self._latest:
            self._latest = {}
            self._latest = self.load(self._groups[name])
        return self._latest.pop(name)

    def load(self, group: Group) -> dict[str, torch.Tensor]:
        """A group's tensors by their names in the model, from whichever files: as `from_pretrained`, by the same code.

        Raises:
            ValueError: the files lack what they are made of, or repeat it with other values."""
        repeated = [name for name in group.outputs if name in self._repeated and name in self.stored]
        outputs = [name for name in group.outputs if name not in self._repeated]
        if missing := sorted(set(outputs) - self.stored.keys()):
            raise ValueError(f"{self._folder} lacks {missing[0]}, of which {group.inputs[0]} is made")
        # Opened once: each opening maps the whole file.
        files = dict.fromkeys(self.stored[name].file for name in (*outputs, *repeated))
        opened = {file: safe_open(self._folder / file, framework="pt") for file in files}
        tensors = {name: opened[self.stored[name].file].get_tensor(name) for name in outputs}
        for name in repeated:
            if not torch.equal(opened[self.stored[name].file].get_tensor(name), tensors[self._repeated[name]]):
                raise ValueError(f"{name} in {self._folder} should repeat {self._repeated[name]}, and differs from it")
        if (name := group.inputs[0]) in self._packed:
            return {name: unpack(*tensors.values())}
        dtype = reduce(torch.promote_types, (tensor.dtype for tensor in tensors.values()))
        if dtype.is_floating_point:
            self._model.to(dtype)  # of which Transformers makes what it loads
        mapping = get_model_conversion_mapping(self._model)
        config = LoadStateDictConfig(device_map={"": torch.device("cpu")}, dtype=dtype, weight_mapping=mapping)
        disable_progress_bar()  # it would be one for each group
        convert_and_load_state_dict_in_model(self._model, tensors, config)
        found = {name: self._model.get_parameter_or_buffer(name).detach() for name in group.inputs}
        self._model.to("meta")
        if lost := [name for name, tensor in found.items() if tensor.is_meta]:
            raise ValueError(f"{lost[0]} has another shape, or is not there")
        return found


def _conversions(model: PreTrainedModel, names: Mapping[str, Any]) -> list[Any]:
    mapping = get_model_conversion_mapping(model)
    renamings = [one for one in mapping if isinstance(one, WeightRenaming)]
    converters = [one for one in mapping if isinstance(one, WeightConverter)]
    expected = model.state_dict()
    for name in names:
        rename_source_key(name, renamings, converters, model.base_model_prefix, expected)
    return [one for one in mapping if one.was_used()]


def _inputs(model: PreTrainedModel, names: list[str]) -> list[tuple[str, ...]]:
    """Names of tensors that must be converted together."""
    conversions = getattr(model, "_weight_conversions", None)
    if conversions is None:
        conversions = get_model_conversion_mapping(model, add_legacy=False)
    back = [one.reverse_transform() for one in reversed(conversions)]
    converters = [one for one in back if isinstance(one, WeightConverter)]
    together: dict[str, list[str]] = {}
    for name in names:
        target, pattern = apply_converters(name, converters)
        together.setdefault(name if pattern is None else target, []).append(name)
    return [tuple(inputs) for inputs in together.values()]


def _packed_group(name: str, entry: Entry) -> Group:
    shape = packed_shape(entry.shape)
    outputs = {f"{name}{BLOCKS}": Entry(torch.uint8, shape), f"{name}{SCALES}": Entry(torch.uint8, shape[:-1])}
    return Group((name,), outputs)


def _group(model: PreTrainedModel, inputs: tuple[str, ...], tensors: Mapping[str, Entry]) -> Group:
    shapes = {name: torch.empty(tensors[name].shape, dtype=tensors[name].dtype, device="meta") for name in inputs}
    values = revert_weight_conversion(model, shapes)
    return Group(inputs, {name: Entry(value.dtype, tuple(value.shape)) for name, value in values.items()})


# ---------------------------------------------------------------------------------------------------------------------
# Whether the weights in a checkpoint folder are those that its config.json asks for, and how they are not.


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
# Numbers of these are a model's only with scales beside them.
_WITHOUT_SCALES = (torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)


def check_weights(folder: Path, blueprint: PreTrainedModel) -> None:
    """Raise ValueError if the weights in a checkpoint folder are not what its config.json says, by their names, shapes
    and dtypes. Reads the heads of the files alone.

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
    layout = OriginalLayout(blueprint, None, stored, packed=packed_names(stored))
    expected = {name: entry.shape for file in layout.files.values() for name, entry in file.items()}
    if wrong := [name for name, one in stored.items() if expected.get(name, one.shape) != one.shape]:
        one = stored[wrong[0]]
        return (
            f"{wrong[0]} in {one.file} has shape {one.shape}, and the configuration asks for {expected[wrong[0]]}"
            f"{_and_others(wrong)}"
        )
    if quantised := [name for name in expected.keys() & stored.keys() if stored[name].dtype in _WITHOUT_SCALES]:
        one = stored[min(quantised)]
        return (
            f"{min(quantised)} in {one.file} is {str(one.dtype).removeprefix('torch.')}, of which config.json says "
            f"nothing (quantization_config); save the model in bfloat16{_and_others(quantised)}"
        )
    needless = blueprint._keys_to_ignore_on_load_missing or ()
    # In a model that is not yet tied, both names of a tied weight are there.
    absent = expected.keys() - stored.keys() - layout.repeated.keys() - (blueprint.all_tied_weights_keys or {}).keys()
    missing = [name for name in absent if not any(re.search(one, name) for one in needless)]
    if missing:
        return f"{min(missing)} is in none of the files{_and_others(missing)}"
    return None


def _and_others(names: list[str]) -> str:
    return f"; nor are {len(names) - 1} others right" if len(names) > 1 else ""
