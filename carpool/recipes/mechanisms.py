"""What published systems are made of, whether this version has it, and whether a run would use it.

A mechanism is called KIND:NAME, such as "transport:alltoall". A recipe's mechanism must pass three tests (`check`):

    chosen     the recipe itself sets the key that chooses it
    there      `carpool train` knows that key and takes that value, and what does the work can be imported
    in effect  a run with the recipe's settings uses it (`resolve.py`): a solver, say, is used by one policy alone

    "schedule:chunks"     chosen by moe.schedule = "chunks"; there, since moe.schedule takes "chunks"
    "dropout:experts"     would be chosen by moe.expert_dropout = 0.4; not there, since there is no such key

A mechanism that is not there may stand in a recipe's `missing` alone, and one that is there may not.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, get_args

from pydantic import TypeAdapter, ValidationError

from carpool.experts import EXPERTS
from carpool.placement.solvers import solver_names
from carpool.plugins.nearest import nearest
from carpool.recipes.files import Recipe
from carpool.recipes.resolve import in_effect, resolve
from carpool.train.config.schema import keys
from carpool.transport import TRANSPORTS

__all__ = ["KINDS", "SWITCHES", "Mechanism", "check", "find"]


@dataclass(frozen=True)
class Mechanism:
    """One thing that a system does.

    Attributes:
        setting: SECTION.KEY that chooses it; "": nothing has to, it is at work wherever there is something for it.
        value: what the setting is then, or might be.
        fits: whether a value of the setting chooses it. None: `value` alone does.
        code: MODULE, or MODULE:NAME, that does the work. "": whatever reads the setting.
    """

    setting: str
    value: Any = True
    fits: Callable[[Any], bool] | None = None
    code: str = ""

    def chosen(self, settings: Mapping[str, Any]) -> bool:
        """Whether settings, by section and key, choose it."""
        return not self.setting or self._fits(_found(settings, self.setting))

    def used(self, effective: Mapping[str, Any]) -> bool:
        """Whether a run uses it whose settings in effect are these, by SECTION.KEY."""
        return not self.setting or self._fits(effective.get(self.setting))

    def _fits(self, value: Any) -> bool:
        return bool(value is not None and (value == self.value if self.fits is None else self.fits(value)))

    def missing(self) -> str | None:
        """Why this version does not have it, or None."""
        if self.setting and (why := _refused(self.setting, self.value)):
            return why
        return _lost(self.code)


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


# What is switched on by a setting of its own, or is always at work.
SWITCHES: Mapping[str, Mechanism] = MappingProxyType({
    "prefetch:blockwise": Mechanism("placement.prefetch"),
    "top-k:1": Mechanism("model.num_experts_per_tok", 1),
    "top-k:2": Mechanism("model.num_experts_per_tok", 2),
    "balance:aux": Mechanism("moe.router_aux_loss_coef", 0.01, _positive),
    "capacity:drop": Mechanism("moe.capacity_factor", 1.25, _positive, "carpool.routing:DropOptions"),
    "capacity:first-choices-first": Mechanism("moe.first_choices_first", code="carpool.routing:DropOptions"),
    "second:random": Mechanism("moe.random_second", code="carpool.routing:DropOptions"),
    "router:float32": Mechanism("moe.router_float32", code="carpool.routing:router_logits"),
    "init:small": Mechanism("model.config.initializer_range", 0.02, _positive),
    "dropout:experts": Mechanism("moe.expert_dropout", 0.4, _positive),
    "chunks:several": Mechanism("moe.chunks", 2, _several),
    "chunks:backward": Mechanism("moe.backward_chunks", 2, _positive),
    "delayed:experts": Mechanism("", code="carpool.ride.plain:PlainOrder"),
    "beside:shared-experts": Mechanism("", code="carpool.ride.function:_Start"),
    "priority:rides": Mechanism("moe.priority", code="carpool.schedule.priority:RidesFirst"),
    "split:multiprocessors": Mechanism("nvlink.dispatch_ctas", 16, _positive, "carpool.kernels.processors:reserved"),
    "host:optimizer-state": Mechanism("training.optimizer_state", "host", code="carpool.memory.optimizer:AdamW"),
    "host:experts": Mechanism("memory.experts", "host", code="carpool.memory.host_experts:HostExperts"),
    "disk:optimizer-state": Mechanism("training.optimizer_state", "disk", code="carpool.memory.disk:Staging"),
    "disk:experts": Mechanism("memory.experts", "disk", code="carpool.memory.disk:Staging"),
    "prefetch:activation-matrix": Mechanism("", code="carpool.memory.activation_matrix:ActivationMatrices"),
    "prefetch:popularity": Mechanism("memory.expert_loading", "popular", code="carpool.memory.popularity:Popularity"),
    "cpu:experts": Mechanism(
        "memory.few_tokens", "auto", lambda few: few == "auto" or _positive(few), "carpool.experts.on_host:FewOnHost"
    ),
    "cache:trained-experts": Mechanism("memory.experts_host_memory", "50GiB", lambda size: size is not None),
    "cache:experts": Mechanism("", code="carpool.memory.expert_cache:ExpertCache"),
    "gradients:consumed": Mechanism(
        "training.gradients", "consumed", code="carpool.parallel.consumed:ConsumedGradients"
    ),
    "kept:rows-resent": Mechanism("memory.rows", "resend", code="carpool.ride.plain:start_backward"),
    "kept:hidden-recomputed": Mechanism("memory.hidden", "recompute", code="carpool.experts:GroupedExperts"),
    "kept:hidden-offloaded": Mechanism("memory.hidden", "offload", code="carpool.memory:Offloader"),
    "kept:dense-recomputed": Mechanism("memory.dense", "recompute", code="carpool.memory.recompute:keep_rides"),
    "kept:activation-recomputed": Mechanism("", code="carpool.experts.pairs:activate_backward"),
    "kept:collectives": Mechanism("", code="carpool.parallel.sequence:sum_over"),
    "parallel:pipeline": Mechanism("parallelism.pp_size", 2, _several, "carpool.parallel.pipeline:Pipeline"),
    "pairs:overlapped": Mechanism(
        "moe.schedule", "two-batch", code="carpool.schedule.forward_backward:ForwardBesideBackward"
    ),
    "weight-gradients:apart": Mechanism("", code="carpool.schedule.split:SplitBackward"),
    "parallel:tensor": Mechanism("parallelism.tp_size", 2, _several),
    "parallel:context": Mechanism("parallelism.cp_size", 2, _several, "carpool.parallel.context:Cut"),
    "folded:experts": Mechanism("parallelism.ep_size", 4, _several, "carpool.parallel.meshes:Meshes"),
    "tokens:whole-between-blocks": Mechanism("parallelism.sequence_parallel", "off"),
    "tokens:divided-between-blocks": Mechanism(
        "parallelism.sequence_parallel", "on", code="carpool.hf.axes.sequence_parallel:shard_sequences"
    ),
    "speeds:measured": Mechanism("parallelism.rank_speeds", "measured", code="carpool.parallel.speeds:shares"),
    "attention:ulysses": Mechanism("parallelism.cp_attention", "ulysses", code="carpool.parallel.context:to_heads"),
    "dropped:duplicates": Mechanism("", code="carpool.hf.seam.implementation:CarpoolEP"),
    "moments:bfloat16": Mechanism("training.optimizer_moments", "bfloat16", code="carpool.memory.optimizer:AdamW"),
    "spread:node": Mechanism("parallelism.ep_size", 8, _positive, "carpool.parallel.degrees:Degrees"),
    "sliced:experts": Mechanism("parallelism.etp_size", 2, _several, "carpool.hf.axes.slices:SlicedExperts"),
    "dense:sharded": Mechanism("parallelism.dense", "fsdp"),
    "rows:projected": Mechanism("model.travel_size", 64, _positive, "carpool.hf.building.narrow:narrow_experts"),
    "sequences:move": Mechanism("moe.move_sequences", 1, _positive, "carpool.hf.axes.sequence_moves:MovingSequences"),
    "combine:bf16": Mechanism("codec.combine", "bf16", code="carpool.transport.codecs.bf16:BF16"),
    "dispatch:fp8": Mechanism("codec.dispatch", "fp8", code="carpool.transport.codecs.fp8:FP8"),
    "kernels:triton": Mechanism("", code="carpool.transport.nvlink.dispatch_kernel"),
})  # fmt: skip


def find(mechanism: str) -> Mechanism | None:
    """The mechanism of that name, or None if nobody has built anything of the kind."""
    if mechanism in SWITCHES:
        return SWITCHES[mechanism]
    kind, _, name = mechanism.partition(":")
    return Mechanism(KINDS[kind], name) if kind in KINDS else None


def check(recipe: Recipe) -> None:
    """Raise ValueError, naming recipe and mechanism, if this version cannot follow a recipe, or if the recipe is
    wrong about itself."""
    for mechanism in recipe.missing:
        if (known := find(mechanism)) is not None and known.missing() is None:
            raise ValueError(
                f"recipe {recipe.name}: {mechanism} is not missing any more: choose it, and name it as a mechanism"
            )
    recipe.check_complete()
    lacking = []
    for mechanism in recipe.mechanisms:
        one = find(mechanism)
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
    effective = in_effect(resolve(recipe))
    for mechanism in recipe.mechanisms:
        one = find(mechanism)
        assert one is not None
        if not one.used(effective):
            raise ValueError(
                f"recipe {recipe.name}: a run with its settings does not use {mechanism}: something else turns "
                f"{one.setting} off"
            )


def _hint(mechanism: str) -> str:
    near = nearest(mechanism, SWITCHES)
    known = (*SWITCHES, *(f"{kind}:NAME" for kind in KINDS))
    return f"did you mean {near}?" if near else f"known are {', '.join(known)}"


def _found(settings: Mapping[str, Any], setting: str) -> Any:
    found: Any = settings
    for part in setting.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    return found


def _refused(setting: str, value: Any) -> str | None:
    """Why `carpool train` does not take a setting, or None if it does."""
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


def _lost(code: str) -> str | None:
    """Why code is not there, or None if it is."""
    module, _, name = code.partition(":")
    if not module:
        return None
    if importlib.util.find_spec(module) is None:
        return f"there is no {module}"
    # Importing is left out where no name is asked for: kernels need Triton. Nothing here may need transformers.
    if name and not hasattr(importlib.import_module(module), name):
        return f"there is no {name} in {module}"
    return None
