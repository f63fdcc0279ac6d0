"""Models to train: from a checkpoint folder, or from a configuration with random weights, sharded over all ranks.

A checkpoint folder is Transformers' own business: `from_pretrained(..., distributed_config=...)` reads only the rank's
own experts. This module and `carpool.hf.weights.files` add the refusals: no pickles, no code that comes with a
checkpoint, no weights missing.

A configuration is built on the meta device, sharded by the same `maybe_distribute_model`, and filled with the values
that `carpool.hf.weights.initial` draws, which are the same for any number of ranks.
"""

from __future__ import annotations

import copy
import dataclasses
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers import initialization as init
from transformers.core_model_loading import build_glob_alternation
from transformers.distributed import DistributedConfig

from carpool.experts.quantised import Kind
from carpool.hf.axes.dense import sharded_as
from carpool.hf.axes.meshes import sharded_over
from carpool.hf.axes.sequence_parallel import sequence_plan, shard_sequences
from carpool.hf.axes.slices import SlicedExperts
from carpool.hf.axes.stages import Part, kept_parts
from carpool.hf.axes.tensor_parallel import own_styles
from carpool.hf.axes.uneven import uneven_plan
from carpool.hf.building.checks import check_experts, check_parallelism, check_ranks, check_shardable, size_of
from carpool.hf.building.narrow import is_narrow, narrow_experts
from carpool.hf.config.sizes import check_sizes
from carpool.hf.config.source import read_config
from carpool.hf.finetune.quantised_base import check_can_be_quantised, quantised_while_loading
from carpool.hf.seam.layers import experts_modules
from carpool.hf.seam.rides import rides
from carpool.hf.weights.files import stored_weights
from carpool.hf.weights.fit import check_loaded, misfit
from carpool.hf.weights.initial import fill, set_tensor
from carpool.hf.weights.original_layout import OriginalLayout, OriginalWeights
from carpool.hf.weights.stored_experts import read_without_experts
from carpool.parallel import fsdp
from carpool.parallel.meshes import Meshes


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
        dense: "fsdp", after which `carpool.hf.axes.dense.keep_experts` comes before the first backward; or "zero1",
            which leaves FSDP's hooks away, and `carpool.hf.axes.dense.replicate_dense` comes before the first forward.
            None: FSDP shards all, as Transformers has it.
        device: of a model on one process; None: its accelerator.
        read_experts: of a folder. False, on one process: parameters of experts have no memory (device "meta").
        base_dtype: experts of a folder are kept in "nf4" or "int8", to be frozen
            (`carpool.hf.finetune.quantised_base`). With several ranks, each expert is on one of them, and `dense` is
            "zero1". None: as they are.
        meshes: of the run. The model is then sharded over the ranks of one stage of its pipeline, of which
            `distributed_config` has the sizes. None: over all ranks, on meshes that Transformers makes.
        sequence_parallel: divide tokens over tensor-parallel ranks (`carpool.hf.axes.sequence_parallel`), whose shard
            then sums gradients once a step.
        parts: of this rank, of a model that is cut into stages (`carpool.hf.axes.stages`); what other ranks have is
            never filled. None: the whole model.
        slices: of each expert, on as many neighbouring ranks of the `ep_size` (carpool/hf/axes/slices.py). Of a folder,
            each rank then reads everything, one tensor at a time.

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
    check_ranks(distributed_config, meshes)
    blueprint = _on_meta(config, dtype, kwargs)
    check_experts(blueprint, distributed_config, slices)
    check_parallelism(blueprint, distributed_config, dense, sequence_parallel)
    sliced = None
    if slices > 1:
        numbers = experts_modules(blueprint, distributed_config)
        sliced = SlicedExperts(blueprint, numbers, size_of(distributed_config, "ep"), slices)
    if distributed_config is not None and size_of(distributed_config, "tp") > 1 and distributed_config.tp_plan != {}:
        own = distributed_config.tp_plan if isinstance(distributed_config.tp_plan, dict) else {}
        plan = blueprint.tp_plan
        own = (sequence_plan(blueprint) if sequence_parallel else own_styles(plan, blueprint.ep_plan or {})) | own
        distributed_config = dataclasses.replace(distributed_config, tp_plan=own or None)
    if (
        any(number % size_of(distributed_config, "ep") for number in experts_modules(blueprint).values())
        and slices == 1
    ):
        assert distributed_config is not None
        own = uneven_plan(blueprint.ep_plan) | (distributed_config.ep_plan or {})
        distributed_config = dataclasses.replace(distributed_config, ep_plan=own)
    if base_dtype is not None:
        for name in experts_modules(blueprint, distributed_config):
            check_can_be_quantised(name, blueprint.get_submodule(name), base_dtype)
    with sharded_as(dense), sharded_over(meshes), kept_parts(parts):
        if path is not None and sliced is None:
            check_shardable(path, blueprint, distributed_config)
            if read_experts:
                with quantised_while_loading(base_dtype):
                    model = _load(path, blueprint, distributed_config, dtype, device or _device(), kwargs)
            else:
                model = _on_meta(config, dtype, kwargs)
                modules = list(experts_modules(model))
                check_loaded(path, blueprint, read_without_experts(path, model, modules, dtype, device or _device()))
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


def _load(
    folder: Path,
    blueprint: PreTrainedModel,
    distributed_config: DistributedConfig | None,
    dtype: torch.dtype,
    device: torch.device,
    kwargs: dict[str, str],
) -> PreTrainedModel:
    sharded = any(size_of(distributed_config, axis) > 1 for axis in ("pp", "dp_replicate", "fsdp", "tp"))
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
        raise ValueError(misfit(folder, blueprint, str(error))) from error
    check_loaded(folder, blueprint, info)
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
        try:
            return weights.read(name)
        except ValueError as error:
            raise ValueError(misfit(folder, blueprint, str(error))) from error

    return read


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
