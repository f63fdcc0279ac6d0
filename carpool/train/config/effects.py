"""When a setting does something: many mean nothing unless another one is made.

    [moe]
    limit_by = "groups"      says which ranks a token keeps, and nothing limits it
    ->  moe.limit_by = 'groups' (in olmoe.toml) changes nothing without moe.limit_ranks or moe.limit_nodes: ...

One table, `EFFECTS`: `check_effects` refuses what a user has set in vain. What a run has recorded is taken as it is,
and so is what a file says and the command line puts out of effect: `--config olmoe.toml placement.every=none` turns off
all of the file's [placement].
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from carpool.ride.schedule import SCHEDULES
from carpool.train.config.schema import Config, keys
from carpool.train.config.schema_base import toml_value

if TYPE_CHECKING:
    from carpool.train.config.load import Resolved


class Effect(NamedTuple):
    """Of a setting, or of every setting of a section that has no entry of its own.

    Attributes:
        when: it does something.
        needs: that in words, as the user says it; "{key} changes nothing without {needs}".
    """

    when: Callable[[Config], bool]
    needs: str


def _plans(config: Config) -> bool:
    return not config.parallelism.plan is config.memory.plan is None


def _moves(config: Config) -> bool:
    return config.placement.every is not None


def _solves(config: Config) -> bool:
    return _moves(config) and config.placement.policy == "migrate"


def _copies(config: Config) -> bool:
    return _moves(config) and config.placement.replicas > 0 and config.placement.uses_replicas


def _limits(config: Config) -> bool:
    return config.moe.limit_ranks is not None or config.moe.limit_nodes is not None


def _holds_out(config: Config) -> bool:
    return config.data.eval is not None or config.data.eval_fraction > 0


def _encodes(config: Config) -> bool:
    codec = config.codec
    return {codec.dispatch, codec.combine, codec.dispatch_backward, codec.combine_backward} != {"none"}


def _comes(config: Config) -> bool:
    return config.memory.experts != "device"


def _comes_if_chosen(config: Config) -> bool:
    return _comes(config) and config.memory.expert_loading == "popular"


def _recomputes(config: Config) -> bool:
    memory = config.memory
    chosen = memory.layer_activations is None and (memory.budget is not None or _plans(config))
    return memory.layer_activations == "recompute" or chosen


_EVERY, _MIGRATES = Effect(_moves, "placement.every"), "placement.every and placement.policy=migrate"
_COPIES = Effect(_copies, "placement.every, and placement.replicas of a policy that has copies")
_EVALUATES = Effect(_holds_out, "held-out data: data.eval, or data.eval_fraction above 0")

# By SECTION.KEY, or by section. What is not here always does something.
EFFECTS: Mapping[str, Effect] = MappingProxyType({
    "data.eval_fraction": Effect(
        lambda config: config.data.eval is None or not config.data.eval_fraction, "data.eval=none"
    ),
    "data.eval_max_sequences": _EVALUATES,
    "data.prompt_field": Effect(
        lambda config: config.data.format in (None, "prompt"), "rows that are prompts (data.format)"
    ),
    "data.completion_field": Effect(
        lambda config: config.data.format in (None, "prompt"), "rows that are prompts (data.format)"
    ),
    "data.messages_field": Effect(
        lambda config: config.data.format in (None, "messages"), "rows that are conversations (data.format)"
    ),
    "data.text_field": Effect(
        lambda config: config.data.format in (None, "text"), "rows that are plain text (data.format)"
    ),
    **dict.fromkeys(
        ("data.chat_template", "data.chat_template_kwargs", "data.turns"),
        Effect(lambda config: config.data.format != "text", "conversations or prompts, and these rows are plain text"),
    ),
    **dict.fromkeys(
        ("data.pad_to", "data.group_by_length"), Effect(lambda config: config.data.packing == "off", "data.packing=off")
    ),
    "data.too_long": Effect(
        lambda config: (config.data.packing or ("stream" if config.data.format == "text" else None)) != "stream",
        "examples that stay apart (data.packing=examples or off); documents that follow each other are cut anyway",
    ),
    "adapter": Effect(
        lambda config: config.adapter.kind is not None, "adapter.kind, for example lora: the model itself is trained"
    ),
    "adapter.kind": Effect(lambda config: True, ""),
    "training.min_lr_ratio": Effect(
        lambda config: config.training.lr_scheduler_type != "constant", "training.lr_scheduler_type=cosine or linear"
    ),
    "training.per_device_eval_batch_size": _EVALUATES,
    "training.eval_steps": Effect(
        lambda config: _holds_out(config) or config.training.sample_prompt is not None,
        "held-out data (data.eval, data.eval_fraction) or training.sample_prompt",
    ),
    "training.sample_prompt": Effect(
        lambda config: config.parallelism.pp_size == 1, "parallelism.pp_size=1 (stages write no samples)"
    ),
    "training.stop_at_step": Effect(
        lambda config: (
            config.training.max_steps is None
            or config.training.stop_at_step is None
            or config.training.stop_at_step <= config.training.max_steps
        ),
        "a training.max_steps of as many steps at least",
    ),
    "training.sample_tokens": Effect(
        lambda config: config.training.sample_prompt is not None, "training.sample_prompt"
    ),
    "training.torch_compile_backend": Effect(
        lambda config: config.training.torch_compile, "training.torch_compile=true"
    ),
    "training.grad_clipping": Effect(
        lambda config: config.training.optimizer_in_backward and config.training.max_grad_norm > 0,
        'training.optimizer_in_backward=true, whose norm is not known when they are used, and a training.max_grad_norm',
    ),
    "parallelism.sequence_parallel": Effect(
        lambda config: config.parallelism.tp_size > 1 or _plans(config), "parallelism.tp_size"
    ),
    "parallelism.cp_attention": Effect(
        lambda config: config.parallelism.cp_size > 1 or _plans(config), "parallelism.cp_size"
    ),
    "parallelism.pp_schedule": Effect(
        lambda config: config.parallelism.pp_size > 1 or _plans(config), "parallelism.pp_size"
    ),
    "nvlink": Effect(
        lambda config: config.moe.transport in ("auto", "nvlink", "hierarchical"), "moe.transport=nvlink"
    ),
    "moe.expert_kernels": Effect(
        lambda config: config.moe.experts in ("auto", "grouped"), "moe.experts=grouped or auto"
    ),
    "moe.fp8_cache_weights": Effect(lambda config: config.moe.experts == "fp8", "moe.experts=fp8"),
    "moe.chunks": Effect(
        lambda config: config.moe.schedule in SCHEDULES and SCHEDULES[config.moe.schedule].default_chunks is not None,
        "moe.schedule=chunks or tiles",
    ),
    "moe.backward_chunks": Effect(
        lambda config: config.moe.schedule in SCHEDULES and SCHEDULES[config.moe.schedule].backward_chunks,
        "moe.schedule=chunks",
    ),
    "moe.balance_scope": Effect(
        lambda config: config.moe.router_aux_loss_coef != 0, "moe.router_aux_loss_coef above 0"
    ),
    "moe.limit_by": Effect(_limits, "moe.limit_ranks or moe.limit_nodes"),
    "moe.first_choices_first": Effect(
        lambda config: config.moe.capacity_factor is not None, "moe.capacity_factor"
    ),
    "codec.inter_node": Effect(_encodes, "a codec: codec.dispatch, combine, dispatch_backward or combine_backward"),
    "codec.merge_options": Effect(lambda config: config.codec.merge != "none", "codec.merge"),
    "memory.moe_outputs": Effect(_recomputes, "layers that are computed again: memory.layer_activations=recompute"),
    "memory.expert_loading": Effect(_comes, "experts that come: memory.experts=host or disk"),
    "memory.cpu_expert_tokens": Effect(
        lambda config: _comes_if_chosen(config) and config.memory.experts == "host",
        "experts in host memory that need not come: memory.experts=host and memory.expert_loading=popular",
    ),
    "memory.expert_device_memory": Effect(
        _comes_if_chosen, "experts that come if they are chosen: memory.experts=host or disk, and "
        "memory.expert_loading=popular",
    ),
    "memory.expert_host_memory": Effect(
        lambda config: config.memory.experts == "disk", "experts on disk: memory.experts=disk"
    ),
    "memory.disk_folder": Effect(
        lambda config: "disk" in (config.memory.experts, config.training.optimizer_offload) or _plans(config),
        "memory.experts=disk or training.optimizer_offload=disk",
    ),
    "placement": Effect(_solves, _MIGRATES),
    "placement.every": _EVERY,
    "placement.policy": Effect(
        lambda config: _moves(config) or config.placement.policy == "place", "placement.every"
    ),
    "placement.solver": Effect(
        lambda config: _solves(config) or config.placement.policy == "place", _MIGRATES
    ),
    "placement.predictor": _EVERY,
    "placement.replicas": _COPIES,
    "placement.prefetch": Effect(
        lambda config: _copies(config) or config.moe.layout != "contiguous", "copies of experts: placement.replicas"
    ),
})  # fmt: skip


def has_effect(config: Config, name: str) -> bool:
    """Whether the setting SECTION.KEY does something in a run of this configuration."""
    effect = _effect(name)
    return effect is None or effect.when(config)


def check_effects(resolved: Resolved, form: str | None = None, compare: str | None = None) -> None:
    """Refuse what a user has set to something else than its default, and what changes nothing where it is set: in the
    file by itself, or on the command line over it.

    Args:
        form: what the rows of the data are, as `data.format` names it; None: not known.
        compare: a transport beside that of the run.

    Raises:
        ValueError: that, with key, value, place and what it would need."""
    config = resolved.config
    if form is not None:
        config = _changed(config, {("data", "format"): form})
    # Of the file's own data the format is not known.
    of_file = _changed(resolved.config if ("data", "train") in resolved.replaced else config, resolved.replaced)
    for section, _, key in keys():
        name, place = f"{section}.{key}", resolved.places.get((section, key))
        if place is None or section == compare or (why := why_idle(config, name)) is None:
            continue
        if not resolved.is_asked_now((section, key)) and (resolved.recorded or _had_effect(of_file, name)):
            continue
        value = getattr(getattr(config, section), key)
        shown = toml_value(value) if isinstance(value, bool) else repr(value)
        raise ValueError(f"{name} = {shown} ({place}) {why}; set that, too, or leave {name} out")


def why_idle(config: Config, name: str) -> str | None:
    """What the setting SECTION.KEY would need to do something, in words; None: it does something, or is its default."""
    effect, (section, _, key) = _effect(name), name.partition(".")
    if not key or effect is None or effect.when(config):
        return None
    table = getattr(config, section)
    default = type(table).model_fields[key].get_default(call_default_factory=True)
    # none says that something is off.
    return None if getattr(table, key) in (None, default) else f"changes nothing without {effect.needs}"


def _changed(config: Config, values: Mapping[tuple[str, str], Any]) -> Config:
    sections: dict[str, dict[str, Any]] = {}
    for (section, key), value in values.items():
        sections.setdefault(section, {})[key] = value
    update = {section: getattr(config, section).model_copy(update=of) for section, of in sections.items()}
    return config.model_copy(update=update)


def _had_effect(of_file: Config, name: str) -> bool:
    try:
        return has_effect(of_file, name)
    except TypeError:  # values that the command line replaces have not been checked
        return False


def _effect(name: str) -> Effect | None:
    return EFFECTS.get(name, EFFECTS.get(name.partition(".")[0]))
