"""The adapter of a run: from `[adapter]` to peft's configuration, and into the model.

frozen model -> peft injects the adapters -> Carpool takes over those of experts (`carpool.hf.expert_adapters`)
-> float32 or bfloat16 -> with whole non-expert parameters (parallelism.data_parallel = zero1) reduced with the other
buckets
"""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn
from transformers import PreTrainedModel

from carpool.experts import ExpertFunction
from carpool.families import family_of
from carpool.hf.adapters import (
    is_added,
    names_of_former_experts,
    names_without_adapters,
    patterns_of_parameters,
    share_adapters,
)
from carpool.hf.seam.expert_rides import rides
from carpool.hf.seam.experts_module import expert_function, weight_names
from carpool.hf.seam.find_modules import experts_modules, find_router
from carpool.hf.weights.weight_files import check_whole
from carpool.parallel.degrees import Degrees
from carpool.plugins.nearest import nearest
from carpool.train.blueprint import Blueprint, Trained
from carpool.train.config.schema import Config
from carpool.train.config.schema_adapter import GROUPS, AdapterSection

# peft's word for an adapter without linear layers.
NO_MODULES = "dummy-target-modules"
# Layers that are called after what mixes tokens in them.
_WHOLE_LAYERS = ("DecoderLayer", "AttentionLayer")


def add_adapter(
    model: PreTrainedModel, section: AdapterSection, seed: int, replicate: bool, start: Path | None = None
) -> int:
    """Freeze a model and put the adapters in. All ranks together, before non-expert parameters are made whole.

    Args:
        seed: of their first values, which are the same for any number of ranks.
        replicate: non-expert parameters will be whole (`carpool.hf.sharding.replicate_dense`), and so will adapters.
        start: the folder of the adapter to start from; None: start anew.

    Returns:
        Elements that are trained, over all ranks.

    Raises:
        ValueError: targets that the model does not have, or that cannot be adapted."""
    config = peft_config(model, section)
    if start is not None:
        attach_adapter(model, start, getattr(torch, section.dtype))
    else:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model.add_adapter(config)
        _set_dtype(model, getattr(torch, section.dtype))
    (config,) = model.peft_config.values()
    # A model with random weights is nowhere.
    config.base_model_name_or_path = str(Path(model.name_or_path).absolute()) if model.name_or_path else None
    if replicate:
        share_adapters(model)
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def peft_config(model: PreTrainedModel, section: AdapterSection, experts: bool = True) -> Any:
    """peft's configuration of a run's adapter. `experts`: with what is no linear layer: experts, and some routers.

    Raises:
        ValueError: what the model does not have, or what cannot be adapted."""
    from peft import LoraConfig

    modules, parameters = resolve_targets(model, section.targets, section.layers_to_transform)
    if section.path is None:  # peft passes over patterns that fit nothing
        check_patterns(model, section)
    check_tokens(model, section.trainable_token_indices)
    if not experts:
        parameters = []
    return LoraConfig(
        r=section.rank, lora_alpha=section.alpha, lora_dropout=section.dropout, task_type="CAUSAL_LM",
        use_rslora=section.kind == "rslora", use_dora=section.kind == "dora", rank_pattern=dict(section.rank_pattern),
        alpha_pattern=dict(section.alpha_pattern),
        target_modules=modules if modules or parameters else NO_MODULES, target_parameters=parameters or None,
        # Names of parameters are those of these layers alone.
        layers_to_transform=(list(section.layers_to_transform) or None) if modules else None,
        modules_to_save=resolve_saved(model, section.modules_to_save) or None,
        trainable_token_indices=list(section.trainable_token_indices) or None,
    )  # fmt: skip


def attach_adapter(
    model: PreTrainedModel, folder: Path, dtype: torch.dtype = torch.float32, name: str = "default"
) -> None:
    """Freeze a model and put in an adapter that peft, or a run, has written, in `dtype` and under that name. All ranks
    together, before non-expert parameters are made whole. Raises ValueError if it is not of this model."""
    from peft import PeftConfig, set_peft_model_state_dict

    check_whole(file := folder / "adapter_model.safetensors")
    config = PeftConfig.from_pretrained(str(folder))
    config.inference_mode = False  # as peft has it in files
    with warnings.catch_warnings():
        # Of several adapters, which are meant.
        warnings.filterwarnings("ignore", "Already found a `peft_config`", UserWarning)
        model.add_adapter(config, name)
    _set_dtype(model, dtype)
    values = load_file(file)
    values = {key.removeprefix("base_model.model."): value for key, value in values.items()}
    try:
        loaded: Any = set_peft_model_state_dict(model, values, name)
        lacks = [key for key in loaded.missing_keys if is_added(key) and f".{name}." in f"{key}."]
        wrong = [*loaded.unexpected_keys, *lacks]
    except (RuntimeError, KeyError) as error:
        raise ValueError(f"{folder} is not an adapter of this model: {error}") from None
    if wrong:
        raise ValueError(f"{folder} is not an adapter of this model: {len(wrong)} names differ, such as {wrong[0]}")


def _set_dtype(model: nn.Module, dtype: torch.dtype) -> None:
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.requires_grad and parameter.dtype != dtype:
                module._parameters[name] = nn.Parameter(parameter.detach().to(dtype))


def check_adapter(config: Config, degrees: Degrees, dense: str, bf16: bool) -> None:
    """Raise ValueError if modules that are trained themselves (`adapter.modules_to_save`), in float32, are sharded or
    would get tokens in another dtype, or if the ranks of a run cannot hold experts that are quantised
    (`adapter.base_dtype`): FSDP shards and casts parameters, of which these have none. `dense`: "fsdp" or "zero1"."""
    if config.adapter.modules_to_save and dense != "zero1" and degrees.world_size > 1:
        raise ValueError(
            "adapter.modules_to_save are copied, and FSDP has given each rank a part of them: set "
            "parallelism.data_parallel=zero1"
        )
    stored, own = config.model.dtype, config.adapter.dtype
    if config.adapter.modules_to_save and stored in ("bfloat16", "float16") and own != stored and not bf16:
        raise ValueError(
            f"adapter.modules_to_save are trained in {own}, and without training.bf16 a model of model.dtype = "
            f"{stored!r} computes in that alone: set training.bf16=true, or model.dtype=float32"
        )
    if config.adapter.base_dtype is None or degrees.world_size == 1:
        return
    why = None
    if degrees.efsdp > 1 or degrees.dp_replicate > 1:
        why = (
            f"each expert is on one rank then; set parallelism.ep_size={degrees.world_size}, and no copies of the model"
        )
    elif dense != "zero1":
        why = 'they are beside whole non-expert parameters; set parallelism.data_parallel="zero1"'
    elif bf16 and config.model.dtype != "bfloat16":
        why = 'FSDP casts experts that are stored in another dtype; set model.dtype="bfloat16"'
    if why is not None:
        raise ValueError(f"adapter.base_dtype = {config.adapter.base_dtype!r} cannot be used here: {why}")


def outline_adapter(model: PreTrainedModel, section: AdapterSection) -> dict[str, list[int]]:
    """Freeze a model on the meta device and give it the adapters of its layers outside experts, for estimates. Returns,
    for each layer whose experts are adapted, the parameters of each factor of one expert's, which the model does not
    get."""
    model.requires_grad_(False)
    config, found = peft_config(model, section, experts=False), dict[str, list[int]]()
    _, adapted = find_targets(model, section.targets, section.layers_to_transform)
    for layer in experts_modules(model):
        for name, weight in model.get_submodule(layer).named_parameters(layer):
            if name in adapted:
                found.setdefault(layer, []).extend(rank_of(section, name) * size for size in weight.shape[1:])
    if config.target_modules != NO_MODULES or config.modules_to_save or config.trainable_token_indices:
        with patterns_of_parameters():
            model.add_adapter(config)
    return found


def rank_of(section: AdapterSection, name: str) -> int:
    """Of the adapter of that module or parameter."""
    from peft.utils.other import get_pattern_key

    rank: int = section.rank_pattern.get(get_pattern_key(list(section.rank_pattern), name), section.rank)
    return rank


def trained_of(blueprint: Blueprint, config: Config) -> Trained:
    """What a run trains of its model, and of its adapters."""
    size, freeze = blueprint.size, config.training.freeze
    experts, other = size.visited, size.multiplied - size.visited
    if not config.adapter.is_used:
        frozen, held = {"experts": (experts, 0), "non_expert": (0, other)}.get(freeze or "", (0, 0)), 0
        if freeze is not None:
            held = size.experts if freeze == "experts" else size.total - size.experts
        return Trained(size.total - held, *frozen)
    model = copy.deepcopy(blueprint.model)
    one = {name: sum(sizes) for name, sizes in outline_adapter(model, config.adapter).items()}
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    adapters = sum(parameter.numel() for name, parameter in trained.items() if "lora_" in name)
    # Modules that are trained themselves; the rows of an embedding are looked up.
    embedding = model.get_input_embeddings()
    looked_up = {id(parameter) for parameter in embedding.parameters()}
    saved = sum(p.numel() for name, p in trained.items() if ".modules_to_save." in name and id(p) not in looked_up)
    everything = sum(p.numel() for p in trained.values())
    everything += sum(size * blueprint.expert_counts[name] for name, size in one.items())
    return Trained(everything, experts, other - saved, sum(one.values()) * blueprint.top_k, adapters)


def resolve_targets(
    model: PreTrainedModel, targets: tuple[str, ...], layers: Collection[int] = ()
) -> tuple[list[str], list[str]]:
    """(names of modules, names of parameters) that peft adapts, with `layers` as its `layers_to_transform`.

    Raises:
        ValueError: a target that the model does not have."""
    modules, parameters = find_targets(model, targets, layers)
    everything = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    # peft also adapts what is no linear layer, such as the convolution of a vision tower that has the same last name.
    # It looks at modules of these layers alone, but at parameters of all.
    there = [name for name, _ in model.named_modules() if not layers or layer_of(name) in layers]
    return _short(modules, there, 1), _short(parameters, everything, 3)


def layer_of(name: str) -> int | None:
    """The number of the layer that a module or parameter is in, as peft reads it: the first in its name."""
    match = re.match(r".*?\.[^.]*\.(\d+)\.", f"{name}.")
    return None if match is None else int(match[1])


def find_targets(
    model: PreTrainedModel, targets: tuple[str, ...], layers: Collection[int] = ()
) -> tuple[set[str], set[str]]:
    """As `resolve_targets`, with whole names."""
    everything = [name for name, _ in model.named_modules()]
    if missing := set(layers) - (known := {one for name in everything if (one := layer_of(name)) is not None}):
        raise ValueError(
            f"adapter.layers_to_transform: this model has no layer {min(missing)}; its layers are 0 to {max(known)}"
        )
    linear = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    head = model.get_output_embeddings()
    # Before layers ride, as in estimates, nobody has asked what they compute.
    experts = {name: (own.experts, own.function) for name, own in rides(model).items()}
    for name in () if experts else experts_modules(model):
        experts[name] = (one := model.get_submodule(name)), expert_function(one)
    routers = {name: router for name in experts if (router := find_router(model, name)) is not None}
    # peft takes these names for experts' of former releases of Transformers, also where it loads the adapter again.
    renamed = names_of_former_experts(model)
    refused = names_without_adapters(model)
    linear = {name for name in linear if name.rpartition(".")[2] not in renamed | refused}
    names = {id(module): name for name, module in model.named_modules()}
    modules: set[str] = set()
    parameters: set[str] = set()
    inside = {names[id(router)] for router in routers.values()}
    for target in targets:
        wanted = GROUPS[:-1] if target == "all-linear" else (target,)
        found: set[str] = set()
        before = len(parameters)
        for group in wanted:
            if group in ("attention", "shared"):
                found |= {
                    name
                    for name in linear
                    if model.get_submodule(name) is not head
                    and not any(f"{name}.".startswith(f"{router}.") for router in inside)
                    and _in_attention(model, name) == (group == "attention")
                }
            elif group == "experts":
                parameters |= {f"{name}.{weight}" for name, one in experts.items() for weight in _expert_weights(*one)}
            elif group == "router":
                for router in routers.values():
                    name = names[id(router)]
                    if type(router) is nn.Linear:  # a class of its own may answer more than a product
                        found.add(name)
                    elif isinstance(getattr(router, "weight", None), nn.Parameter):
                        parameters.add(f"{name}.weight")
                    else:
                        found |= {one for one in linear if one.startswith(f"{name}.")}
            else:
                found |= {name for name in linear if _is_named(name, group)}
                if not found:
                    parameters |= {name for name, _ in model.named_parameters() if _is_named(name, group)}
        nothing = not found and len(parameters) == before
        if nothing and target.rpartition(".")[2] in renamed:
            raise ValueError(
                f"adapter.targets: of this model, peft takes {target!r} for a part of the routed experts; adapt these "
                "by 'experts'"
            )
        if nothing and target.rpartition(".")[2] in refused:
            raise ValueError(f"adapter.targets: peft does not adapt {target!r} of models with Mamba: name others")
        if nothing and target not in GROUPS:
            raise ValueError(
                f"adapter.targets: this model has no linear layer {target!r}; give the end of a name, such as "
                f"{sorted(linear)[0].rpartition('.')[2]}, or one of {', '.join(GROUPS)}"
            )
        if nothing:
            raise ValueError(
                f"adapter.targets = {target}: this model has nothing of that to adapt"
                + (f" (peft takes {', '.join(sorted(renamed))} for parts of the routed experts)" if renamed else "")
            )
        modules |= found
    if layers:
        modules, parameters = ({name for name in one if layer_of(name) in layers} for one in (modules, parameters))
        if not modules and not parameters:
            raise ValueError(
                f"adapter.layers_to_transform: layers {', '.join(map(str, layers))} have nothing of adapter.targets = "
                f"{', '.join(targets)}"
            )
    return modules, parameters


def check_patterns(model: PreTrainedModel, section: AdapterSection) -> None:
    """Raise ValueError for a pattern of ranks or alphas that is none of anything that is adapted, which peft ignores,
    or one that never counts."""
    from peft.utils.other import get_pattern_key

    names: set[str] = set().union(*find_targets(model, section.targets, section.layers_to_transform))
    for key in ("rank_pattern", "alpha_pattern"):
        patterns: dict[str, int] = getattr(section, key)
        for pattern in patterns:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"adapter.{key}: {pattern!r} is no regular expression: {error}") from None
        met = {get_pattern_key(list(patterns), name) for name in names}
        if missing := [pattern for pattern in patterns if pattern not in met]:
            raise ValueError(
                f"adapter.{key}: {missing[0]!r} fits nothing that is adapted and that no pattern before it fits; "
                f"adapted are, for example, {', '.join(sorted(names)[:: max(1, len(names) // 3)][:3])}"
            )


def check_tokens(model: PreTrainedModel, tokens: Sequence[int]) -> None:
    """Raise ValueError for tokens that the model's embedding has no rows for, or which it shares with its output."""
    embedding = model.get_input_embeddings()
    if not tokens:
        return
    if twice := [token for token in tokens if list(tokens).count(token) > 1]:
        raise ValueError(f"adapter.trainable_token_indices: {twice[0]} is named twice, and has one row")
    if (largest := max(tokens)) >= (rows := embedding.num_embeddings):
        raise ValueError(
            f"adapter.trainable_token_indices: {largest} is no token of this model, whose embedding has {rows:,} rows: "
            "an adapter cannot add any; resize the checkpoint first (model.resize_token_embeddings of Transformers, "
            "then save_pretrained), and train beside that"
        )
    name = next(name for name, module in model.named_modules() if module is embedding)
    if any(f"{name}.weight" in pair for pair in (model.all_tied_weights_keys or {}).items()):
        raise ValueError(
            "adapter.trainable_token_indices: this model's embedding and output layer are one tensor, which rows that "
            "are trained in a copy would part; adapt layers (adapter.targets)"
        )


def resolve_saved(model: PreTrainedModel, names: Iterable[str]) -> list[str]:
    """What peft takes for the modules in `adapter.modules_to_save`, which are given by the ends of their names. peft
    compares letters: to it, "norm" is the end of "q_norm", too. Where that would be more, these are whole names.

    Raises:
        ValueError: a name that no module has, or of modules without parameters, with routed experts or tied weights."""
    everything, experts = dict(model.named_modules()), experts_modules(model)
    tied = {name: pair for pair in (model.all_tied_weights_keys or {}).items() for name in pair}
    saved: list[str] = []
    for name in names:
        found = [one for one in everything if one == name or one.endswith(f".{name}")]
        if not found:
            parts = [one.split(".") for one in everything]
            # As many parts as were given, or fewer: the last part alone is what people give.
            ends = {".".join(one[-size:]) for one in parts for size in range(1, 2 + name.count("."))}
            close = nearest(name, sorted(ends))
            raise ValueError(
                f"adapter.modules_to_save: this model has no module {name!r}"
                + (f"; did you mean {close}?" if close else "; give the end of a name, such as lm_head")
            )
        if inside := [one for one in experts for own in found if f"{one}.".startswith(f"{own}.")]:
            raise ValueError(
                f"adapter.modules_to_save: {name!r} has routed experts in it ({inside[0]}), which cannot be copied; "
                "name modules without them, and adapt experts by adapter.targets"
            )
        if not any(True for one in found for _ in everything[one].parameters()):
            raise ValueError(f"adapter.modules_to_save: {name!r} has no parameters that could be trained; leave it out")
        if pairs := [tied[key] for key in tied for own in found if key.startswith(f"{own}.")]:
            raise ValueError(
                f"adapter.modules_to_save: {name!r} has one of {' and '.join(pairs[0])}, which are one tensor of this "
                "model: what is trained in a copy of it could not be merged; adapt other layers (adapter.targets)"
            )
        more = any(one.endswith(name) and one not in found for one in everything)
        saved += found if more else [name]
    return saved


def _is_named(name: str, target: str) -> bool:
    """Whether a target of peft's means it: by its end, or as a pattern of the whole name."""
    try:
        return name == target or name.endswith(f".{target}") or re.fullmatch(target, name) is not None
    except re.error:
        return False


def _short(names: set[str], everything: Iterable[str], parts: int) -> list[str]:
    """The last parts of names, where these mean no others: what other programs look for in an adapter's files."""
    short: set[str] = set()
    for name in names:
        end = ".".join(name.split(".")[-parts:])
        same = {other for other in everything if other == end or other.endswith(f".{end}")}
        short |= {end} if same <= names else {name}
    return sorted(short)


def _in_attention(model: nn.Module, name: str) -> bool:
    """Whether a module is part of something that mixes tokens: by the classes of what is around it. A layer that is
    called after its attention (JambaAttentionDecoderLayer) has all else in it, too."""
    words, parts = family_of(model).mixers, name.split(".")
    around = (type(model.get_submodule(".".join(parts[:size]))).__name__ for size in range(1, len(parts)))
    return any(word in one for one in around if not one.endswith(_WHOLE_LAYERS) for word in words)


def _expert_weights(experts: nn.Module, function: ExpertFunction | None) -> tuple[str, ...]:
    if function is None:
        name = type(experts).__name__.removeprefix("FSDP")
        raise ValueError(
            f"adapter.targets: {name} runs the model's own forward, whose experts cannot be adapted; choose other "
            "targets"
        )
    return weight_names(experts)[:2]
