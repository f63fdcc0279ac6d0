"""Which axes of parallelism go together, and with which settings: the one place that refuses what does not.

A rule names the axes and settings that do not go together, and why. A refusal says them and the nearest combination
that works, which is found by asking the rules again: an axis is given up (its ranks go to FSDP, those of etp to ep), or
a setting is changed.

    cp 2, tp 2, parallelism.data_parallel = "zero1"
    -> "parallelism.tp_size = 2 with parallelism.data_parallel = 'zero1': ... The nearest combination that works:
        parallelism.data_parallel = 'fsdp'"
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from carpool.parallel.schedules import PAIRED

# Ranks by axis of `carpool.parallel.degrees`; an axis that is not there is 1 or not known yet.
Sizes = Mapping[str, int]
# Values by the key of the configuration, such as "moe.transport"; a key that is not there has its default.
Settings = Mapping[str, Any]


@dataclass(frozen=True)
class Rule:
    """What does not go together.

    Attributes:
        axes: that are more than 1 where the rule applies; each alone makes it apply no more.
        why: half a sentence.
        instead: values with which it does not apply, of settings and sizes that the rule is about besides the axes; by
            key. A function gives the value for the sizes.
        applies: whether the settings are such. The axes are looked at already.
    """

    axes: tuple[str, ...]
    why: str
    instead: Mapping[str, Any] = field(default_factory=dict)
    applies: Callable[[Sizes, Settings], bool] = lambda sizes, settings: True

    def refuses(self, sizes: Sizes, settings: Settings) -> bool:
        """Whether the combination is one of those that the rule is about."""
        return self.is_about(sizes) and self.applies(sizes, settings)

    def is_about(self, sizes: Sizes) -> bool:
        """Whether its axes are more than 1."""
        return all(sizes.get(axis, 1) > 1 for axis in self.axes)


def _is_other(key: str, value: Any) -> Callable[[Sizes, Settings], bool]:
    """Whether a setting is there and has another value."""
    return lambda sizes, settings: settings.get(key, value) != value


def _is_narrow(sizes: Sizes, settings: Settings) -> bool:
    return settings.get("model.travel_size") is not None


RULES = (
    *(
        Rule((axis,), why, {"model.travel_size": None}, _is_narrow)
        for axis, why in (
            ("tp", "gradients of projections would be of a part of the tokens"),
            ("pp", "projections are not cut into stages"),
            ("etp", "experts in slices are made of whole ones of the model's own size"),
        )
    ),
    Rule(
        (),
        "adapters go with a checkpoint, and rows are projected in models from scratch",
        {"adapter.kind": None},
        lambda sizes, settings: _is_narrow(sizes, settings) and settings.get("adapter.kind") is not None,
    ),
    Rule(
        ("tp",),
        "adapters would be divided as the tensor-parallel layers beside them are",
        {"adapter.kind": None},
        lambda sizes, settings: settings.get("adapter.kind") is not None,
    ),
    Rule(
        ("etp",),
        "experts that are cut into slices have no adapters",
        {"adapter.kind": None},
        lambda sizes, settings: settings.get("adapter.kind") is not None,
    ),
    Rule(
        ("etp",),
        "a token visits every slice of its experts, wherever they are",
        {"moe.limit_ranks": None, "moe.limit_nodes": None},
        lambda sizes, settings: any(settings.get(f"moe.limit_{of}") is not None for of in ("ranks", "nodes")),
    ),
    Rule(
        ("etp",),
        "blocks of int8 moments are not those of whole experts, which checkpoints have",
        {"training.optimizer_state_dtype": "bfloat16"},
        lambda sizes, settings: settings.get("training.optimizer_state_dtype") == "int8",
    ),
    Rule(
        ("etp",),
        "experts come from there one by one, and their slices are not stored so",
        {"memory.experts": "device"},
        lambda sizes, settings: settings.get("memory.experts", "device") != "device",
    ),
    Rule(
        ("etp",),
        "the optimizer's state in checkpoints has whole experts, and would travel between GPUs",
        {"training.optimizer_offload": "none"},
        lambda sizes, settings: settings.get("training.optimizer_offload", "none") != "none",
    ),
    Rule(
        ("etp",),
        "solvers and policies move whole experts, not slices",
        {"placement.policy": "degree"},
        lambda sizes, settings: (
            settings.get("placement.every") is not None and settings.get("placement.policy") != "degree"
        ),
    ),
    Rule(
        ("pp",),
        f"stages do not run two forwards at the same time, but a forward and a backward, in the pairs of "
        f"{' or '.join(PAIRED)}",
        {"parallelism.pp_schedule": "DualPipeV", "moe.schedule": "none"},
        lambda sizes, settings: (
            settings.get("moe.schedule") == "two-batch" and settings.get("parallelism.pp_schedule") not in PAIRED
        ),
    ),
    Rule(
        ("pp",),
        "how long rides of a stage take is not timed, and tiles are not tried with stages",
        {"moe.schedule": "none"},
        lambda sizes, settings: settings.get("moe.schedule", "none") not in ("none", "chunks", "two-batch"),
    ),
    Rule(
        ("pp",),
        "experts outside of the device are updated in the backward of one micro-batch, and stages have several: in "
        "host memory they must be frozen (training.freeze=experts)",
        {"memory.experts": "device"},
        lambda sizes, settings: (
            settings.get("memory.experts", "device") == "disk"
            or (settings.get("memory.experts", "device") == "host" and settings.get("training.freeze") != "experts")
        ),
    ),
    *(
        Rule(("pp",), why, {key: instead}, _is_other(key, instead))
        for key, instead, why in (
            (
                "training.optimizer_in_backward",
                False,
                "gradients of several micro-batches are added, and one backward consumes them",
            ),
            ("training.optimizer_offload", "none", "state outside of the device is not known by stages"),
            ("memory.budget", None, "policies are chosen for one micro-batch at a time"),
            ("moe.layout", "contiguous", "files of layouts are not read stage by stage"),
            ("placement.every", None, "layers of other stages cannot be moved"),
            ("adapter.kind", None, "adapters are not cut into stages"),
            ("training.torch_compile", False, "compiled layers are not tried with stages"),
        )
    ),
    Rule(
        ("cp",),
        "ring attention has no masks, and packed examples need them",
        {"parallelism.cp_attention": "ulysses"},
        lambda sizes, settings: (
            settings.get("parallelism.cp_attention") == "ring" and settings.get("data.packing") == "examples"
        ),
    ),
    Rule(
        ("tp",),
        "whole non-expert parameters are on each rank, and tensor parallelism divides them",
        {"parallelism.data_parallel": "fsdp"},
        lambda sizes, settings: settings.get("parallelism.data_parallel") == "zero1",
    ),
    Rule(
        ("tp",),
        "experts that are on every rank would be divided as dense layers are, which no transport knows",
        {"parallelism.ep_size": lambda sizes: sizes["tp"]},
        lambda sizes, settings: sizes.get("ep", 0) * sizes.get("etp", 1) == 1,
    ),
)


def refusal(sizes: Sizes, settings: Settings, among: Sequence[Rule] | None = None) -> Rule | None:
    """The first rule that refuses a combination, or None if it works.

    Args:
        among: who asks often about the same sizes gives `rules_of` them. None: all."""
    return next((rule for rule in (RULES if among is None else among) if rule.refuses(sizes, settings)), None)


def rules_of(sizes: Sizes) -> list[Rule]:
    """Those whose axes are more than 1."""
    return [rule for rule in RULES if rule.is_about(sizes)]


def check_supported(sizes: Sizes, settings: Settings) -> None:
    """Raise a ValueError that names the axes, the settings and the nearest combination that works, if one does not."""
    rule = refusal(sizes, settings)
    if rule is None:
        return
    known = {**{_key(axis): size for axis, size in sizes.items()}, **settings}
    named = {key: known.get(key) for key in (*map(_key, rule.axes), *rule.instead)}
    given = [f"{key} = {_written(value)}" for key, value in named.items() if value is not None]
    nearest = _nearest(sizes, settings)
    changes = ", ".join(f"{key} = {_written(value)}" for key, value in nearest.items())
    raise ValueError(f"{' with '.join(given)}: {rule.why}. The nearest combination that works: {changes}")


def _written(value: Any) -> str:
    """As a configuration writes it."""
    return str(value).lower() if isinstance(value, bool) else repr("none" if value is None else value)


def _nearest(sizes: Sizes, settings: Settings) -> dict[str, Any]:
    """What to change, by key: one setting or axis if that is enough, otherwise one after the other."""
    changed: dict[str, Any] = {}
    while (rule := refusal(sizes, settings)) is not None:
        ways: list[tuple[Sizes, Settings, dict[str, Any]]]
        ways = [_with(sizes, settings, key, value) for key, value in rule.instead.items()]
        ways += [_without(sizes, axis, settings) for axis in rule.axes]
        best = next((way for way in ways if refusal(way[0], way[1]) is None), ways[0])
        sizes, settings = best[0], best[1]
        changed |= best[2]
    return changed


def _key(axis: str) -> str:
    return f"parallelism.{axis}_size"


def _with(sizes: Sizes, settings: Settings, key: str, value: Any) -> tuple[Sizes, Settings, dict[str, Any]]:
    """Sizes and settings with another value; and what that changes."""
    value = value(sizes) if callable(value) else value
    axis = next((axis for axis in sizes if _key(axis) == key), None)
    if axis is None:
        return sizes, {**settings, key: value}, {key: value}
    return {**sizes, axis: value}, settings, {key: value}


def _without(sizes: Sizes, axis: str, settings: Settings) -> tuple[Sizes, Settings, dict[str, Any]]:
    """Sizes with an axis of 1, whose ranks go to another axis; and what that changes."""
    to = "ep" if axis == "etp" else "fsdp"
    fewer = {**sizes, axis: 1}
    changed = {_key(axis): 1}
    if to in sizes:
        fewer[to] = sizes[to] * sizes[axis]
        changed[_key(to)] = fewer[to]
    return fewer, settings, changed
