"""Models to train: from a checkpoint folder, or from a configuration with random weights, sharded over all ranks.

A checkpoint folder is Transformers' own business: `from_pretrained(..., distributed_config=...)` reads only the rank's
own experts. This module and `carpool.hf.weight_files` add the refusals: no pickles, no code that comes with a
checkpoint, no weights missing.

A configuration is built on the meta device, sharded by the same `maybe_distribute_model`, and filled with the values
that `carpool.hf.initial_weights` draws, which are the same for any number of ranks.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import logging
import math
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers import initialization as init
from transformers.core_model_loading import build_glob_alternation
from transformers.distributed import DistributedConfig
from transformers.distributed.checkpoint import is_sharded_checkpoint
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from carpool.experts.quantised import Kind
from carpool.hf.config_keys import check_keys, suggestion
from carpool.hf.conversions import merges_experts, unshardable
from carpool.hf.dense import sharded_as
from carpool.hf.expert_parallel import rides
from carpool.hf.initial_weights import fill, set_tensor
from carpool.hf.meshes import sharded_over
from carpool.hf.narrow import is_narrow, narrow_experts
from carpool.hf.original_layout import OriginalLayout, OriginalWeights
from carpool.hf.quantised_base import check_can_be_quantised, quantised_while_loading
from carpool.hf.sequence_parallel import sequence_plan, shard_sequences
from carpool.hf.sizes import check_sizes, impossible_sizes
from carpool.hf.slices import SlicedExperts
from carpool.hf.stages import Part, kept_parts
from carpool.hf.stored_experts import read_without_experts
from carpool.hf.tensor_parallel import check_tensor_parallel, own_styles
from carpool.hf.uneven import uneven_plan
from carpool.hf.weight_files import check_weight_files, stored_weights
from carpool.parallel import fsdp
from carpool.parallel.degrees import chunks
from carpool.parallel.meshes import Meshes

logger = logging.getLogger(__name__)


def make_config(model_type: str, keys: dict[str, Any]) -> PreTrainedConfig:
    """The configuration of a Transformers model type, for a model from scratch.

    Args:
        model_type: as in `config.json`, for example "olmoe" or "qwen3_moe".
        keys: values by the keys of a `config.json`, as published; those of a sub-configuration as a dictionary. Keys
            that are known to mean nothing to Transformers are taken as they are, and one warning names them.

    Raises:
        ValueError: for a model type that Transformers does not have, a key that nothing reads (with the nearest one
            that something does), or a value that the configuration refuses or that cannot be meant
            (`carpool.hf.sizes`). The message has a line for each of them.
    """
    if model_type not in CONFIG_MAPPING or model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        known = sorted(name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if name in CONFIG_MAPPING)
        code = " Its file brings its own code (auto_map), which Carpool never runs." if "auto_map" in keys else ""
        raise ValueError(
            f"Transformers has no causal language model of type {model_type!r}{suggestion(model_type, known)}{code}"
        )
    config_class = CONFIG_MAPPING[model_type]
    used, inert, wrong = check_keys(config_class, keys, model_type)
    try:
        config = config_class(**used)
        wrong += impossible_sizes(config)
    except Exception as error:  # each configuration validates in its own way, and with its own exception
        wrong.append(f"the {model_type} configuration refuses {used}: {error}")
    if wrong:
        raise ValueError("\n".join(wrong))
    if inert and not (dist.is_initialized() and dist.get_rank()):
        quantised = "; the model is not quantised" if "quantization_config" in inert else ""
        logger.warning(
            "these keys mean nothing to a %s model from scratch and are ignored: %s%s",
            model_type,
            ", ".join(inert),
            quantised,
        )
    return config


def build_model(
    config_or_path: PreTrainedConfig | str | os.PathLike[str],
    *,
    distributed_config: DistributedConfig | None,
    dtype: torch.dtype,
    seed: int,
    attn_implementation: str | None = None,
    experts_implementation: str | None = None,
    dense: str | None = None,
    device: torch.device | None = None,
    read_experts: bool = True,
    base_dtype: Kind | None = None,
    meshes: Meshes | None = None,
    sequence_parallel: bool = False,
    parts: Sequence[Part] = (),
    slices: int = 1,
) -> PreTrainedModel:
    """A mixture-of-experts language model in training mode, sharded as `distributed_config` says.

    Every rank calls it. Parameters come out as Transformers shards them: DTensors over (dp_replicate, fsdp, tp), those
    of experts over (dp_replicate, efsdp, ep). Without a distributed configuration, or with all sizes 1, the model is an
    ordinary one on this process's accelerator (the CPU if there is none).

    Args:
        config_or_path: a folder as `save_pretrained` writes it (config.json and safetensors), or a configuration,
            whose model gets random weights.
        distributed_config: sizes of the mesh and the `ep_implementation`.
        dtype: of the parameters, but for those that the model itself insists on keeping in float32.
        seed: of the random weights; they are the same for any number of ranks.
        attn_implementation, experts_implementation: as in Transformers; None takes its default.
        dense: "fsdp", after which `carpool.hf.dense.keep_experts` comes before the first backward; or "replicate",
            which leaves FSDP's hooks away, and `carpool.hf.dense.replicate_dense` comes before the first forward. None:
            FSDP shards all, as Transformers has it.
        device: of a model on one process; None: its accelerator.
        read_experts: of a folder. False, on one process: parameters of experts have no memory (device "meta").
        base_dtype: experts of a folder are kept in "nf4" or "int8", to be frozen (`carpool.hf.quantised_base`). With
            several ranks, each expert is on one of them, and `dense` is "replicate". None: as they are.
        meshes: of the run. The model is then sharded over the ranks of one stage of its pipeline, of which
            `distributed_config` has the sizes. None: over all ranks, on meshes that Transformers makes.
        sequence_parallel: divide tokens over tensor-parallel ranks (`carpool.hf.sequence_parallel`), whose shard then
            sums gradients once a step.
        parts: of this rank, of a model that is cut into stages (`carpool.hf.stages`); what other ranks have is never
            filled. None: the whole model.
        slices: of each expert, on as many neighbouring ranks of the `ep_size` (carpool/hf/slices.py). Of a folder, each
            rank then reads everything, one tensor at a time.

    Raises:
        ValueError: if the folder or the configuration is not usable, is no mixture of experts, or does not fit the
            requested parallelism. The message says what to change.
    """
    wanted = {"attn_implementation": attn_implementation, "experts_implementation": experts_implementation}
    kwargs = {name: value for name, value in wanted.items() if value is not None}
    path = None if isinstance(config_or_path, PreTrainedConfig) else Path(config_or_path)
    config = read_config(path) if path is not None else copy.deepcopy(cast(PreTrainedConfig, config_or_path))
    check_sizes(config)
    if path is not None and is_narrow(config):
        raise ValueError(f"{path} is a model whose rows are projected (travel_size): resume the run that trains it")
    _check_ranks(distributed_config, meshes)
    blueprint = _on_meta(config, dtype, kwargs)
    _check_experts(blueprint, distributed_config, slices)
    sliced = None
    if slices > 1:
        numbers = experts_modules(blueprint, distributed_config)
        sliced = SlicedExperts(blueprint, numbers, _size(distributed_config, "ep"), slices)
    if distributed_config is not None and _size(distributed_config, "tp") > 1 and distributed_config.tp_plan != {}:
        own = distributed_config.tp_plan if isinstance(distributed_config.tp_plan, dict) else {}
        plan = blueprint.tp_plan
        own = (sequence_plan(blueprint) if sequence_parallel else own_styles(plan, blueprint.ep_plan or {})) | own
        check_tensor_parallel(blueprint, blueprint.tp_plan | own)
        distributed_config = dataclasses.replace(distributed_config, tp_plan=own or None)
    if any(number % _size(distributed_config, "ep") for number in experts_modules(blueprint).values()) and slices == 1:
        assert distributed_config is not None
        own = uneven_plan(blueprint.ep_plan) | (distributed_config.ep_plan or {})
        distributed_config = dataclasses.replace(distributed_config, ep_plan=own)
    if base_dtype is not None:
        for name in experts_modules(blueprint, distributed_config):
            check_can_be_quantised(name, blueprint.get_submodule(name), base_dtype)
    if dense != "replicate":
        _check_tied(blueprint, distributed_config)
    with sharded_as(dense), sharded_over(meshes), kept_parts(parts):
        if path is not None and sliced is None:
            _check_shardable(path, blueprint, distributed_config)
            if read_experts:
                with quantised_while_loading(base_dtype):
                    model = _load(path, blueprint, distributed_config, dtype, device or _device(), kwargs)
            else:
                model = _on_meta(config, dtype, kwargs)
                modules = list(experts_modules(model))
                _check_loaded(path, blueprint, read_without_experts(path, model, modules, dtype, device or _device()))
        else:
            model_class = type(blueprint)
            distributed_config, _, mesh_manager = model_class.prepare_distribute_model(distributed_config)
            model = _on_meta(config, dtype, kwargs)
            if sliced is not None:
                sliced.apply(model)
            model = model_class.maybe_distribute_model(model, distributed_config, mesh_manager)
            offload = distributed_config is not None and distributed_config.fsdp_cpu_offload
            stored = None if path is None else _reader(path, blueprint)
            fill(model, blueprint, seed, device or _device(), offload, stored, None if sliced is None else sliced.rows)
            if path is not None and (path / "generation_config.json").is_file():
                model.generation_config = GenerationConfig.from_pretrained(path, local_files_only=True)
    if dtype == torch.float16:
        fsdp.reduce_in_float32(model)
    if meshes is not None and parts:
        for layer in rides(model).values():
            layer.row_group = meshes.stage_group()
    if sequence_parallel:
        shard_sequences(model, {part.layers.start for part in parts} or {0})
    return model.train()


def experts_modules(model: PreTrainedModel, distributed_config: DistributedConfig | None = None) -> dict[str, int]:
    """The modules that expert parallelism dispatches to, by name, with the number of experts in each (of this rank,
    once the model is sharded). Empty if the model has no such module."""
    override = distributed_config.ep_plan if distributed_config is not None else None
    plan = model._expand_parallel_plan((model.ep_plan or {}) | (override or {}))
    modules = (name for name, style in plan.items() if style == "ep_dispatch_experts")
    return {name: int(cast(Any, model.get_submodule(name)).num_experts) for name in modules}


# --------------------------------------------------------------------------------------------------------- refusals


def read_config(folder: Path) -> PreTrainedConfig:
    """The configuration of a checkpoint folder.

    Raises:
        ValueError: the folder is no checkpoint, or not one that is safe and complete enough to read.
    """
    if not folder.is_dir():
        raise ValueError(f"there is no checkpoint folder {folder}")
    if not (folder / "config.json").is_file():
        hint = " (it holds an adapter; merge it into its base model first)" if any(folder.glob("adapter_*")) else ""
        raise ValueError(f"{folder} has no config.json, so it is not a Transformers checkpoint{hint}")
    try:
        raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        model_type = raw.get("model_type")
    except (ValueError, AttributeError) as error:
        raise ValueError(f"{folder / 'config.json'} is not a JSON object: {error}") from error
    if model_type not in CONFIG_MAPPING:
        code = " It brings its own code (auto_map), which Carpool never runs." if "auto_map" in raw else ""
        raise ValueError(
            f"{folder / 'config.json'} has model_type {model_type!r}, which the installed Transformers does not have"
            f"{suggestion(str(model_type), CONFIG_MAPPING)}.{code}"
        )
    if raw.get("quantization_config"):
        method = raw["quantization_config"].get("quant_method", "unknown method")
        raise ValueError(
            f"the weights in {folder} are quantised ({method}), and quantised weights cannot be trained; "
            "save the model dequantised first (`model.dequantize()`)"
        )
    check_weight_files(folder, raw)
    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # each configuration validates in its own way, and with its own exception
        raise ValueError(f"the {model_type} configuration refuses {folder / 'config.json'}: {error}") from error


def _check_ranks(distributed_config: DistributedConfig | None, meshes: Meshes | None) -> None:
    if distributed_config is None:
        return
    sizes = {name: _size(distributed_config, name) for name in ("pp", "dp_replicate", "fsdp", "tp")}
    needed = math.prod(sizes.values())
    world = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
    if meshes is not None:
        world = meshes.degrees.stage_size
    if (ep_size := _size(distributed_config, "ep")) > world:
        raise ValueError(f"ep_size is {ep_size}, but only {world} ranks run; start more of them or lower it")
    if needed != world:
        product = " x ".join(f"{name}_size {size}" for name, size in sizes.items())
        raise ValueError(f"the parallelism is for {needed} ranks ({product}), but {world} run; make the numbers equal")


def _size(distributed_config: DistributedConfig | None, axis: str) -> int:
    return 1 if distributed_config is None else int(getattr(distributed_config, f"{axis}_size") or 1)


def _check_experts(blueprint: PreTrainedModel, distributed_config: DistributedConfig | None, slices: int = 1) -> None:
    name = type(blueprint).__name__
    experts = experts_modules(blueprint, distributed_config)
    if not experts:
        raise ValueError(
            f"{name} ({blueprint.config.model_type}) is not a mixture of experts that Carpool can train: "
            "it has no module with an expert-parallel plan"
        )
    ep_size, over = divmod(_size(distributed_config, "ep"), slices)
    if over:
        raise ValueError(f"{slices} slices of each expert do not divide the {ep_size * slices + over} ranks of experts")
    whole = ep_size == math.prod(_size(distributed_config, axis) for axis in ("fsdp", "tp"))
    for module, num_experts in experts.items():
        if num_experts % ep_size and not (whole and slices == 1 and min(chunks(num_experts, ep_size)) > 0):
            divisors = [n for n in range(1, num_experts + 1) if num_experts % n == 0]
            raise ValueError(
                f"ep_size {ep_size} does not divide the {num_experts} experts of {name}'s {module}; "
                f"it can be one of {', '.join(map(str, divisors))}"
            )


def _check_tied(blueprint: PreTrainedModel, distributed_config: DistributedConfig | None) -> None:
    """Refuse a tied weight that tensor parallelism divides in one of its places only, and what FSDP would train wrongly
    without an error: it pads uneven shards, and keeps two of a tied weight, of which the optimizer updates one."""
    ranks = _size(distributed_config, "fsdp")
    divided = blueprint._expand_parallel_plan(blueprint.tp_plan) if _size(distributed_config, "tp") > 1 else {}
    for name, other in (blueprint.all_tied_weights_keys or {}).items():
        if (name.rpartition(".")[0] in divided) != (other.rpartition(".")[0] in divided):
            raise ValueError(
                f"{name} and {other} are one weight, which the tensor-parallel plan of {type(blueprint).__name__} "
                "divides in one of these places only: use tp_size=1, or do not tie "
                "(model.config.tie_word_embeddings=false)"
            )
    for name in sorted(set((blueprint.all_tied_weights_keys or {}).values())):
        if (rows := blueprint.get_parameter(name).shape[0]) % ranks:
            raise ValueError(
                f"{name} is tied, and FSDP cannot shard its {rows} rows evenly over {ranks} ranks: make the vocabulary "
                f"a multiple of fsdp_size (model.config.vocab_size={-(-rows // ranks) * ranks}), do not tie "
                "(model.config.tie_word_embeddings=false), or keep it whole (parallelism.dense=replicate)"
            )


def _check_shardable(folder: Path, blueprint: PreTrainedModel, distributed_config: DistributedConfig | None) -> None:
    """Refuse what transformers would load wrongly, partly without an error; see `carpool.hf.conversions`."""
    sharded = any(_size(distributed_config, axis) > 1 for axis in ("dp_replicate", "fsdp", "tp"))
    if sharded and not is_sharded_checkpoint(str(folder)) and (names := unshardable(blueprint)):
        raise ValueError(
            f"Transformers cannot shard the checkpoints of {type(blueprint).__name__} while it reads them: "
            f"{', '.join(names[:2])}{', ...' if len(names) > 2 else ''} would come out wrong; train it from scratch "
            "or on one process"
        )
    ep = _size(distributed_config, "ep")
    shards = _size(distributed_config, "fsdp") * _size(distributed_config, "tp") // ep
    for name, number in experts_modules(blueprint).items():
        own = -(-number // ep)
        if min(chunks(own, shards)) == 0 and merges_experts(blueprint) and not is_sharded_checkpoint(str(folder)):
            raise ValueError(
                f"FSDP would divide the {own} experts that {name} has on a rank (ep_size = {ep}) over {shards} ranks, "
                "and Transformers cannot read a checkpoint on those that get none: raise parallelism.ep_size, or shard "
                "over fewer ranks (parallelism.dp_replicate_size)"
            )


# ---------------------------------------------------------------------------------------------------- from a folder


def _load(
    folder: Path,
    blueprint: PreTrainedModel,
    distributed_config: DistributedConfig | None,
    dtype: torch.dtype,
    device: torch.device,
    kwargs: dict[str, str],
) -> PreTrainedModel:
    sharded = any(_size(distributed_config, axis) > 1 for axis in ("pp", "dp_replicate", "fsdp", "tp"))
    try:
        model, info = cast(Any, AutoModelForCausalLM).from_pretrained(
            folder,
            dtype=dtype,
            distributed_config=distributed_config,
            device_map=None if sharded or device.type == "cpu" else {"": device},
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are in `info` then, and refused below with their names
            **kwargs,
        )
    except RuntimeError as error:
        raise ValueError(_misfit(folder, blueprint, str(error))) from error
    _check_loaded(folder, blueprint, info)
    return model


def _reader(folder: Path, blueprint: PreTrainedModel) -> Callable[[str], torch.Tensor | None]:
    """Of a tensor's name in the model, the tensor that the folder's files hold; None of one that no file holds."""
    stored = stored_weights(folder)
    layout = OriginalLayout(blueprint, None, stored)
    weights = OriginalWeights(blueprint, folder, stored, layout)
    held = {name for group in layout.groups for name in group.inputs}

    def read(name: str) -> torch.Tensor | None:
        if name not in held:
            return None
        tensor = weights.read(name)
        if tensor.shape != (want := blueprint.get_parameter_or_buffer(name).shape):
            raise ValueError(_misfit(folder, blueprint, f"{name} has shape {tuple(tensor.shape)}, not {tuple(want)}"))
        return tensor

    return read


def _check_loaded(folder: Path, blueprint: PreTrainedModel, info: dict[str, Any]) -> None:
    """Raise ValueError if weights had other shapes, or were not there."""
    if wrong := sorted(name for name, *_ in info["mismatched_keys"]):
        raise ValueError(_misfit(folder, blueprint, f"{', '.join(wrong[:3])} have other shapes"))
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


def _misfit(folder: Path, blueprint: PreTrainedModel, why: str) -> str:
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


# ------------------------------------------------------------------------------------------- from a configuration


def _device() -> torch.device:
    """Where this process computes; Transformers' meshes choose the same way (and leave Apple's GPUs aside)."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or accelerator.type == "mps":
        return torch.device("cpu")
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


def _on_meta(config: PreTrainedConfig, dtype: torch.dtype, kwargs: dict[str, str]) -> PreTrainedModel:
    """The whole model without values, its tied weights not yet tied, in the dtypes that it will have."""
    with torch.device("meta"), init.no_tie_weights(), init.meta_device_safe_creation_ops():
        model = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=dtype, trust_remote_code=False, **kwargs)
        narrow_experts(model, experts_modules(model))
    if dtype_plan := model._get_dtype_plan(dtype):
        in_float32, _, _ = build_glob_alternation(list(dtype_plan))
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if in_float32.search(name) and tensor.is_floating_point():
                set_tensor(model, name, tensor.to(torch.float32))
    return model
