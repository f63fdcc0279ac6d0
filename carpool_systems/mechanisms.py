"""What published systems are made of, whether this version has it, and whether a recipe's settings choose it.

A mechanism is called KIND:NAME, such as "transport:alltoall". A recipe's mechanism must pass three tests (`check`):

    chosen     the recipe itself sets the key that chooses it
    there      `carpool train` knows that key and takes that value
    in effect  no other setting turns that key off (`resolve.py`): a solver, say, is used by one policy alone

    "schedule:chunks"     chosen by moe.schedule = "chunks"; there, since moe.schedule takes "chunks"
    "dropout:experts"     would be chosen by moe.expert_dropout = 0.4; not there, since there is no such key

A mechanism that is not there may stand in a recipe's `missing` alone, and one that is there may not. These tests see
settings, not runs: what ranks do under them is shown by tests/recipes. Of a mechanism that has no setting
(`WITHOUT_SETTING`) they see nothing: [recipe.without_setting] says where it is at work, perhaps in generation alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, get_args

from pydantic import TypeAdapter, ValidationError

from carpool.experts import EXPERTS
from carpool.parallel.schedules import SCHEDULES
from carpool.placement.policies import POLICIES
from carpool.placement.solvers import solver_names
from carpool.plugins.nearest import nearest
from carpool.recipes import Recipe, read
from carpool.train.config.schema import keys
from carpool.train.config.schema_placement import SOLVING
from carpool.transport import TRANSPORTS
from carpool_systems.resolve import in_effect, resolve

__all__ = ["KINDS", "SWITCHES", "WITHOUT_SETTING", "Mechanism", "check", "find", "load"]


@dataclass(frozen=True)
class Mechanism:
    """One thing that a system does.

    Attributes:
        setting: SECTION.KEY that chooses it.
        value: what the setting is then, or might be.
        fits: whether a value of the setting chooses it. None: `value` alone does.
    """

    setting: str
    value: Any = True
    fits: Callable[[Any], bool] | None = None

    def chosen(self, settings: Mapping[str, Any]) -> bool:
        """Whether settings, by section and key, choose it."""
        return self._fits(_found(settings, self.setting))

    def used(self, effective: Mapping[str, Any]) -> bool:
        """Whether settings that are all in effect, by SECTION.KEY, choose it."""
        return self._fits(effective.get(self.setting))

    def _fits(self, value: Any) -> bool:
        return bool(value is not None and (value == self.value if self.fits is None else self.fits(value)))

    def missing(self) -> str | None:
        """Why `carpool train` does not take the setting, or None if it does."""
        setting, value = self.setting, self.value
        section, key, *deeper = setting.split(".")
        field = next((cls.model_fields[name] for at, cls, name in keys() if (at, name) == (section, key)), None)
        if field is None:
            return f"there is no setting {section}.{key}"
        for part in reversed(deeper):
            value = {part: value}
        # The section checks a solver's name, not its field.
        lists: Mapping[str, Iterable[str]] = {
            KINDS["solver"]: solver_names(),
            KINDS["transport"]: TRANSPORTS,
            KINDS["experts"]: EXPERTS,
            KINDS["policy"]: (*SOLVING, *POLICIES),
        }
        known = tuple(lists.get(setting, get_args(field.annotation)))
        try:
            TypeAdapter(field.rebuild_annotation()).validate_python(value)
            if setting != KINDS["solver"] or value in known:
                return None
        except ValidationError:
            pass
        near = nearest(str(value), [one for one in known if isinstance(one, str)])
        return f"{section}.{key} takes no {value!r}" + (f"; did you mean {near!r}?" if near else "")


# The setting that chooses one way of a kind by its name, plug-ins' included.
KINDS: Mapping[str, str] = MappingProxyType({
    "transport": "moe.transport",
    "experts": "moe.experts",
    "schedule": "moe.schedule",
    "limit": "moe.limit_by",
    "policy": "placement.policy",
    "solver": "placement.solver",
    "predictor": "placement.predictor",
    "freeze": "training.freeze",
    "merge": "codec.merge",
    "pipeline": "parallelism.pp_schedule",
})  # fmt: skip


def _positive(value: Any) -> bool:
    return isinstance(value, int | float) and value > 0


def _several(value: Any) -> bool:
    return isinstance(value, int) and value > 1


_SPLITTING = tuple(name for name, kind in SCHEDULES.items() if kind.splits)

# What is switched on by a setting that is not the name of one way of a kind.
SWITCHES: Mapping[str, Mechanism] = MappingProxyType({
    "prefetch:blockwise": Mechanism("placement.prefetch"),
    "top-k:1": Mechanism("model.num_experts_per_tok", 1),
    "top-k:2": Mechanism("model.num_experts_per_tok", 2),
    "balance:aux": Mechanism("moe.router_aux_loss_coef", 0.01, _positive),
    "capacity:drop": Mechanism("moe.capacity_factor", 1.25, _positive),
    "capacity:first-choices-first": Mechanism("moe.first_choices_first"),
    "second:random": Mechanism("moe.random_second"),
    "router:float32": Mechanism("moe.router_float32"),
    "init:small": Mechanism("model.config.initializer_range", 0.02, _positive),
    "dropout:experts": Mechanism("moe.expert_dropout", 0.4, _positive),
    "chunks:several": Mechanism("moe.chunks", 2, _several),
    "chunks:backward": Mechanism("moe.backward_chunks", 2, _positive),
    "beside:shared-experts": Mechanism("moe.schedule", "chunks", lambda name: name != "none"),
    "priority:rides": Mechanism("moe.priority"),
    "split:multiprocessors": Mechanism("nvlink.dispatch_ctas", 16, _positive),
    "host:optimizer-state": Mechanism("training.optimizer_offload", "host"),
    "host:experts": Mechanism("memory.experts", "host"),
    "disk:optimizer-state": Mechanism("training.optimizer_offload", "disk"),
    "disk:experts": Mechanism("memory.experts", "disk"),
    "prefetch:popularity": Mechanism("memory.expert_loading", "popular"),
    "cpu:experts": Mechanism("memory.cpu_expert_tokens", "auto", lambda few: few == "auto" or _positive(few)),
    "cache:trained-experts": Mechanism("memory.expert_host_memory", "50GiB", lambda size: size is not None),
    "gradients:consumed": Mechanism("training.optimizer_in_backward", True),
    "kept:rows-resent": Mechanism("memory.expert_inputs", "resend"),
    "kept:hidden-recomputed": Mechanism("memory.expert_activations", "recompute"),
    "kept:hidden-offloaded": Mechanism("memory.expert_activations", "offload"),
    "kept:dense-recomputed": Mechanism("memory.layer_activations", "recompute"),
    "kept:activation-recomputed": Mechanism("moe.experts", "grouped", lambda name: name in ("grouped", "fp8")),
    "parallel:pipeline": Mechanism("parallelism.pp_size", 2, _several),
    "pairs:overlapped": Mechanism("moe.schedule", "two-batch"),
    "weight-gradients:apart": Mechanism("parallelism.pp_schedule", "DualPipeV", lambda name: name in _SPLITTING),
    "parallel:tensor": Mechanism("parallelism.tp_size", 2, _several),
    "parallel:context": Mechanism("parallelism.cp_size", 2, _several),
    "folded:experts": Mechanism("parallelism.ep_size", 4, _several),
    "tokens:whole-between-blocks": Mechanism("parallelism.sequence_parallel", "off"),
    "tokens:divided-between-blocks": Mechanism("parallelism.sequence_parallel", "on"),
    "speeds:measured": Mechanism("parallelism.rank_speeds", "measured"),
    "attention:ulysses": Mechanism("parallelism.cp_attention", "ulysses"),
    "dropped:duplicates": Mechanism("parallelism.tp_size", 2, _several),
    "moments:bfloat16": Mechanism("training.optimizer_state_dtype", "bfloat16"),
    "spread:node": Mechanism("parallelism.ep_size", 8, _positive),
    "sliced:experts": Mechanism("parallelism.etp_size", 2, _several),
    "dense:sharded": Mechanism("parallelism.data_parallel", "fsdp"),
    "rows:projected": Mechanism("model.travel_size", 64, _positive),
    "sequences:move": Mechanism("sequence_moves.every", 1, _positive),
    "combine:bf16": Mechanism("codec.combine", "bf16"),
    "dispatch:fp8": Mechanism("codec.dispatch", "fp8"),
    "kernels:triton": Mechanism("moe.transport", "nvlink"),
})  # fmt: skip

# What no setting of `carpool train` chooses; carpool/ride/plain.py, carpool/parallel/sequence.py, carpool/serve.
WITHOUT_SETTING = ("delayed:experts", "kept:collectives", "prefetch:activation-matrix", "cache:experts")


def find(mechanism: str) -> Mechanism | None:
    """The mechanism of that name, or None if nobody has built anything of the kind."""
    if mechanism in SWITCHES:
        return SWITCHES[mechanism]
    kind, _, name = mechanism.partition(":")
    return Mechanism(KINDS[kind], name) if kind in KINDS else None


def load(name: str) -> Recipe:
    """A recipe that this version can follow, by name or from the path of a TOML file.

    Raises:
        ValueError: there is none, it is no recipe, something of it is missing here, its settings are none that
            `carpool train` takes, or one that chooses a mechanism has no effect; says which."""
    recipe = read(name)
    check(recipe)
    return recipe


def check(recipe: Recipe) -> None:
    """Raise ValueError, naming recipe and mechanism, if this version cannot follow a recipe, or if the recipe is
    wrong about itself."""
    for mechanism in recipe.missing:
        if (known := find(mechanism)) is not None and known.missing() is None:
            raise ValueError(
                f"recipe {recipe.name}: {mechanism} is not missing any more: choose it, and name it as a mechanism"
            )
    recipe.check_complete()
    lacking, found = [], {mechanism: find(mechanism) for mechanism in recipe.mechanisms}
    for mechanism, one in found.items():
        if one is None:
            raise ValueError(f"recipe {recipe.name}: there is no mechanism {mechanism!r}; {_hint(mechanism)}")
        if why := one.missing():
            lacking.append(f"{mechanism} ({why})")
        elif not one.chosen(recipe.settings):
            raise ValueError(
                f"recipe {recipe.name}: {mechanism} is of the system, but not what its {one.setting} chooses"
            )
    if lacking:
        raise ValueError(f"recipe {recipe.name}: this version cannot follow it, because it lacks {'; '.join(lacking)}")
    for mechanism in recipe.without_setting:
        if mechanism not in WITHOUT_SETTING:
            raise ValueError(
                f"recipe {recipe.name}: [recipe.without_setting] takes {', '.join(WITHOUT_SETTING)}, not {mechanism!r}"
            )
    effective = in_effect(resolve(recipe))
    for mechanism, one in found.items():
        if one is not None and not one.used(effective):
            raise ValueError(
                f"recipe {recipe.name}: a run with its settings does not use {mechanism}: something else turns "
                f"{one.setting} off"
            )


def _hint(mechanism: str) -> str:
    if mechanism in WITHOUT_SETTING:
        return "no setting chooses it: say in [recipe.without_setting] where it is at work"
    near = nearest(mechanism, SWITCHES)
    known = (*SWITCHES, *(f"{kind}:NAME" for kind in KINDS))
    return f"did you mean {near}?" if near else f"known are {', '.join(known)}"


def _found(settings: Mapping[str, Any], setting: str) -> Any:
    found: Any = settings
    for part in setting.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    return found
