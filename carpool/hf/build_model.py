"""Models to train: from a checkpoint folder, or from a configuration with random weights, sharded over all ranks.

A checkpoint folder is Transformers' own business: `from_pretrained(..., distributed_config=...)` reads only the rank's
own experts. This module and `carpool.hf.weights.weight_files` add the refusals: no pickles, no code that comes with a
checkpoint, no weights missing.

A configuration is built on the meta device, sharded by the same `maybe_distribute_model`, and filled with the values
that `carpool.hf.weights.initial` draws, which are the same for any number of ranks.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import os
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers import initialization as init
from transformers.core_model_loading import build_glob_alternation
from transformers.distributed import DistributedConfig
from transformers.distributed.checkpoint import is_sharded_checkpoint

from carpool.experts.base import stand_in
from carpool.experts.quantised import Kind
from carpool.hf.architecture_changes import (
    Changes,
    absent_tensors,
    change_architecture,
    change_checkpoint,
    changed_while_loading,
    changes_of,
)
from carpool.hf.pipeline_stages import Part, kept_parts
from carpool.hf.quantised_base import (
    PackedExperts,
    QuantisedBase,
    check_can_be_quantised,
    quantised_while_loading,
    share_tied,
)
from carpool.hf.seam.expert_rides import rides
from carpool.hf.seam.find_modules import experts_modules
from carpool.hf.seam.refusals import check_tensor_parallel
from carpool.hf.sharding import SlicedExperts, sharded_as, sharded_over, uneven_plan
from carpool.hf.tensor_parallel import own_styles, sequence_plan, shard_sequences
from carpool.hf.weights.initial import fill, set_tensor
from carpool.hf.weights.model_config import check_sizes, read_config
from carpool.hf.weights.mxfp4_files import is_packed
from carpool.hf.weights.original_layout import OriginalLayout, OriginalWeights, check_loaded, misfit
from carpool.hf.weights.stored_experts import read_without_experts
from carpool.hf.weights.weight_files import merges_experts, stored_weights, unshardable
from carpool.parallel import fsdp
from carpool.parallel.degrees import chunks
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
    base_keep: Sequence[str] | None = (),
    meshes: Meshes | None = None,
    sequence_parallel: bool = False,
    parts: Sequence[Part] = (),
    slices: int = 1,
    changes: Changes | None = None,
) -> PreTrainedModel:
    """A mixture-of-experts language model in training mode, sharded as `distributed_config` says. All ranks together.

    Parameters come out as Transformers shards them: DTensors over (dp_replicate, fsdp, tp), those of experts over
    (dp_replicate, efsdp, ep). Without a distributed configuration, or with all sizes 1, the model is an ordinary one on
    this process's accelerator (the CPU if there is none).

    Args:
        config_or_path: a folder as `save_pretrained` writes it, or a configuration, whose model gets random weights.
        dtype: of the parameters, but for those that the model keeps in float32.
        seed: of the random weights; they are the same for any number of ranks.
        attn_implementation, experts_implementation: as in Transformers; None takes its default.
        dense: "fsdp", after which `keep_experts` comes before the first backward; or "zero1", after which
            `replicate_dense` comes before the first forward. None: FSDP shards everything.
        device: of a model on one process; None: its accelerator.
        read_experts: of a folder. False, on one process: parameters of experts stay on the device "meta".
        base_dtype: matrices are kept in "nf4", "mxfp4" or "int8", to be frozen (`carpool.hf.quantised_base`). With
            several ranks only those of experts are, each expert is on one of them, and `dense` is "zero1". None: as
            they are, also where a folder has experts in MXFP4, which one process can read.
        base_keep: ends of the names of modules that stay as they are, for they are trained. None: all but experts.
        meshes: of the run; the model is sharded over the ranks of one pipeline stage, of which `distributed_config` has
            the sizes. None: over all ranks, on meshes that Transformers makes.
        sequence_parallel: divide tokens over tensor-parallel ranks; the shard then sums gradients once a step.
        parts: this rank's pipeline stages; what other ranks have is never filled. Empty: the whole model.
        slices: of each expert, on as many neighbouring ranks (`carpool.hf.sharding`). Of a folder, each rank then reads
            everything, one tensor at a time.
        changes: of the architecture of a folder's model (`carpool.hf.architecture_changes`); a configuration has them.

    Raises:
        ValueError: the folder or the configuration is not usable, is no mixture of experts, or does not fit the
            requested parallelism. The message says what to change.
    """
    wanted = {"attn_implementation": attn_implementation, "experts_implementation": experts_implementation}
    kwargs = {name: value for name, value in wanted.items() if value is not None}
    path = None if isinstance(config_or_path, PreTrainedConfig) else Path(config_or_path)
    config = read_config(path) if path is not None else copy.deepcopy(cast(PreTrainedConfig, config_or_path))
    check_sizes(config)
    if path is not None and (made := changes_of(config)):
        raise ValueError(
            f"{path} is of a run that changes the architecture, and no model to load: resume the run. "
            f"{made[0].describe()}"
        )
    check_ranks(distributed_config, meshes)
    stored = {} if path is None or not changes else stored_weights(path)
    blueprint = _on_meta(config, dtype, kwargs, changes, stored)
    absent = absent_tensors(blueprint, stored) if changes else []
    if changes and distributed_config is None:
        distributed_config = DistributedConfig()  # without one Transformers asks nobody before it loads
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
    if slices == 1 and any(n % size_of(distributed_config, "ep") for n in experts_modules(blueprint).values()):
        assert distributed_config is not None
        own = uneven_plan(blueprint.ep_plan) | (distributed_config.ep_plan or {})
        distributed_config = dataclasses.replace(distributed_config, ep_plan=own)
    if base_dtype is not None:
        for name in experts_modules(blueprint, distributed_config):
            check_can_be_quantised(name, blueprint.get_submodule(name), base_dtype)
    packed = PackedExperts(path) if path is not None and is_packed(path) else None
    if packed is not None and any(size_of(distributed_config, axis) > 1 for axis in ("fsdp", "dp_replicate", "tp")):
        raise ValueError(
            f"the experts in {path} are in MXFP4, which one process can read: run on one GPU, or save the model "
            "dequantised (Mxfp4Config(dequantize=True) of Transformers)"
        )
    with sharded_as(dense), sharded_over(meshes), kept_parts(parts):
        if path is not None and sliced is None and packed is None:
            check_shardable(path, blueprint, distributed_config)
            if read_experts:
                changed = changed_while_loading(changes, stored) if changes else nullcontext()
                with quantised_while_loading(base_dtype, base_keep), changed:
                    model = _load(path, blueprint, distributed_config, dtype, device or _device(), kwargs)
            else:
                model = _on_meta(config, dtype, kwargs)
                modules = list(experts_modules(model))
                check_loaded(path, blueprint, read_without_experts(path, model, modules, dtype, device or _device()))
            if absent:
                fill(model, blueprint, seed, device or _device(), False, only=absent)
        else:
            model_class = type(blueprint)
            distributed_config, _, mesh_manager = model_class.prepare_distribute_model(distributed_config)
            model = _on_meta(config, dtype, kwargs)
            if sliced is not None:
                sliced.apply(model)
            model = model_class.maybe_distribute_model(model, distributed_config, mesh_manager)
            offload = distributed_config is not None and distributed_config.fsdp_cpu_offload
            target, lies = device or _device(), None if sliced is None else sliced.rows
            read = None if path is None else _reader(path, blueprint, packed, target, absent)
            take = QuantisedBase(base_dtype, base_keep, packed).take
            fill(model, blueprint, seed, target, offload, read, lies, take)
            share_tied(model)
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


def _reader(
    folder: Path,
    blueprint: PreTrainedModel,
    packed: PackedExperts | None,
    device: torch.device,
    absent: Collection[str],
) -> Callable[[str], torch.Tensor | None]:
    """Of a tensor's name in the model, the tensor that the folder's files hold; None of one that no file holds. For
    what `packed` has, something of its shape without memory."""
    stored = stored_weights(folder)
    layout = OriginalLayout(blueprint, None, stored)
    weights = OriginalWeights(blueprint, folder, stored, layout)
    held = {name for group in layout.groups for name in group.inputs}

    def read(name: str) -> torch.Tensor | None:
        if packed is not None and packed.has(name):
            parameter = blueprint.get_parameter(name)
            return stand_in(parameter.shape, parameter.dtype, device)
        if name not in held or name in absent:
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


def _on_meta(
    config: PreTrainedConfig,
    dtype: torch.dtype,
    kwargs: dict[str, str],
    changes: Changes | None = None,
    stored: Collection[str] = (),
) -> PreTrainedModel:
    """The whole model without values, its tied weights not yet tied, in the dtypes that it will have. `changes`: of the
    model of a checkpoint, with weights of these names."""
    with torch.device("meta"), init.no_tie_weights(), init.meta_device_safe_creation_ops():
        model = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=dtype, trust_remote_code=False, **kwargs)
        if changes:
            change_checkpoint(model, changes, stored)
        else:
            change_architecture(model)
    if dtype_plan := model._get_dtype_plan(dtype):
        in_float32, _, _ = build_glob_alternation(list(dtype_plan))
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if in_float32.search(name) and tensor.is_floating_point():
                set_tensor(model, name, tensor.to(torch.float32))
    return model


# ---------------------------------------------------------------------------------------------------------------------
# What cannot be built: sizes that do not fit each other or the ranks, and checkpoints that would be read wrongly.


def check_ranks(distributed_config: DistributedConfig | None, meshes: Meshes | None) -> None:
    """Refuse a parallelism for another number of ranks than there are."""
    if distributed_config is None:
        return
    sizes = {name: size_of(distributed_config, name) for name in ("pp", "dp_replicate", "fsdp", "tp")}
    needed = math.prod(sizes.values())
    world = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
    if meshes is not None:
        world = meshes.degrees.stage_size
    if (ep_size := size_of(distributed_config, "ep")) > world:
        raise ValueError(f"ep_size is {ep_size}, but only {world} ranks run; start more of them or lower it")
    if needed != world:
        product = " x ".join(f"{name}_size {size}" for name, size in sizes.items())
        raise ValueError(f"the parallelism is for {needed} ranks ({product}), but {world} run; make the numbers equal")


def size_of(distributed_config: DistributedConfig | None, axis: str) -> int:
    """Ranks along an axis ("fsdp", "tp", "ep", ...); 1 if it is not set."""
    return 1 if distributed_config is None else int(getattr(distributed_config, f"{axis}_size") or 1)


def check_experts(blueprint: PreTrainedModel, distributed_config: DistributedConfig | None, slices: int = 1) -> None:
    """Refuse a model without experts, and experts that the ranks do not divide."""
    name = type(blueprint).__name__
    experts = experts_modules(blueprint, distributed_config)
    if not experts:
        raise ValueError(
            f"{name} ({blueprint.config.model_type}) is not a mixture of experts that Carpool can train: "
            "it has no module with an expert-parallel plan"
        )
    ep_size, over = divmod(size_of(distributed_config, "ep"), slices)
    if over:
        raise ValueError(f"{slices} slices of each expert do not divide the {ep_size * slices + over} ranks of experts")
    whole = ep_size == math.prod(size_of(distributed_config, axis) for axis in ("fsdp", "tp"))
    for module, num_experts in experts.items():
        if num_experts % ep_size and not (whole and slices == 1 and min(chunks(num_experts, ep_size)) > 0):
            divisors = [n for n in range(1, num_experts + 1) if num_experts % n == 0]
            raise ValueError(
                f"ep_size {ep_size} does not divide the {num_experts} experts of {name}'s {module}; "
                f"it can be one of {', '.join(map(str, divisors))}"
            )


def check_parallelism(
    blueprint: PreTrainedModel,
    distributed_config: DistributedConfig | None,
    dense: str | None = None,
    sequence_parallel: bool = False,
) -> None:
    """Refuse a parallelism that this model cannot have: what a plan, a dry run and a run (`build_model`) ask alike."""
    ranks = size_of(distributed_config, "tp")
    if distributed_config is not None and ranks > 1 and distributed_config.tp_plan != {}:
        own = distributed_config.tp_plan if isinstance(distributed_config.tp_plan, dict) else {}
        plan = (blueprint.tp_plan or {}) | (sequence_plan(blueprint) if sequence_parallel else {}) | own
        check_tensor_parallel(blueprint, plan, ranks)
    if dense != "zero1":
        check_tied(blueprint, distributed_config)


def check_tied(blueprint: PreTrainedModel, distributed_config: DistributedConfig | None) -> None:
    """Refuse a tied weight that tensor parallelism divides in one of its places only, and what FSDP would train wrongly
    without an error: it pads uneven shards, and keeps two of a tied weight, of which the optimizer updates one."""
    ranks = size_of(distributed_config, "fsdp")
    divided = blueprint._expand_parallel_plan(blueprint.tp_plan) if size_of(distributed_config, "tp") > 1 else {}
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
                "(model.config.tie_word_embeddings=false), or keep it whole (parallelism.data_parallel=zero1)"
            )


def check_shardable(folder: Path, blueprint: PreTrainedModel, distributed_config: DistributedConfig | None) -> None:
    """Refuse what transformers would load wrongly, partly without an error; see `carpool.hf.weights.weight_files`."""
    sharded = any(size_of(distributed_config, axis) > 1 for axis in ("dp_replicate", "fsdp", "tp"))
    if sharded and not is_sharded_checkpoint(str(folder)) and (names := unshardable(blueprint)):
        raise ValueError(
            f"Transformers cannot shard the checkpoints of {type(blueprint).__name__} while it reads them: "
            f"{', '.join(names[:2])}{', ...' if len(names) > 2 else ''} would come out wrong; train it from scratch "
            "or on one process"
        )
    ep = size_of(distributed_config, "ep")
    shards = size_of(distributed_config, "fsdp") * size_of(distributed_config, "tp") // ep
    for name, number in experts_modules(blueprint).items():
        own = -(-number // ep)
        if min(chunks(own, shards)) == 0 and merges_experts(blueprint) and not is_sharded_checkpoint(str(folder)):
            raise ValueError(
                f"FSDP would divide the {own} experts that {name} has on a rank (ep_size = {ep}) over {shards} ranks, "
                "and Transformers cannot read a checkpoint on those that get none: raise parallelism.ep_size, or shard "
                "over fewer ranks (parallelism.dp_replicate_size)"
            )
