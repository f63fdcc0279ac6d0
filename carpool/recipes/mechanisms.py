"""What published systems are made of, and whether this version has it.

A mechanism is called KIND:NAME, such as "transport:alltoall". It is there if this version can be told to use it, which
is asked and not remembered:

    setting    the key that chooses it is one of `carpool train`, and takes the value
    code       what does the work can be found

and a recipe has it if its settings say so (`chosen`). So a recipe may be written before its last mechanism: until then
it refuses, and `missing` says what it waits for.

    "schedule:chunks"     moe.schedule takes "chunks"               chosen by moe.schedule = "chunks"
    "priority:rides"      there is no key moe.priority: missing     would be chosen by moe.priority = true
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from pydantic import TypeAdapter, ValidationError

from carpool.placement.forecast import PREDICTORS
from carpool.placement.policies import POLICIES
from carpool.placement.solvers import SOLVERS
from carpool.train.config.schema import keys

__all__ = ["MECHANISMS", "Mechanism", "missing"]


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
        """Whether a recipe's settings, by section and key, choose it."""
        return not self.setting or self._fits(_found(settings, self.setting))

    def _fits(self, value: Any) -> bool:
        return bool(value is not None and (value == self.value if self.fits is None else self.fits(value)))

    def missing(self) -> str | None:
        """Why this version does not have it, or None."""
        if self.setting and (why := _refused(self.setting, self.value)):
            return why
        return _lost(self.code)


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
    try:
        TypeAdapter(field.rebuild_annotation()).validate_python(value)
    except ValidationError:
        return f"{section}.{key} takes no {value!r}"
    return None


def _lost(code: str) -> str | None:
    """Why code is not there, or None if it is."""
    module, _, name = code.partition(":")
    if not module:
        return None
    if importlib.util.find_spec(module) is None:
        return f"there is no {module}"
    # Only what is asked for by name is imported: kernels need Triton. Nothing here may need transformers.
    if name and not hasattr(importlib.import_module(module), name):
        return f"there is no {name} in {module}"
    return None


def _each(kind: str, setting: str, names: Collection[str], code: str = "") -> dict[str, Mechanism]:
    return {f"{kind}:{name}": Mechanism(setting, name, code=code) for name in names}


def _positive(value: Any) -> bool:
    return isinstance(value, int | float) and value > 0


MECHANISMS: Mapping[str, Mechanism] = MappingProxyType({
    # How rows travel, and how experts are computed.
    **_each("transport", "moe.transport", ("gather", "alltoall", "dedup", "hierarchical", "nvlink")),
    **_each("experts", "moe.experts", ("grouped", "reference", "fp8")),
    # Where experts live.
    **_each("solver", "placement.solver", tuple(SOLVERS)),
    **_each("policy", "placement.policy", ("place", "migrate", *POLICIES)),
    **_each("predictor", "placement.predictor", tuple(PREDICTORS)),
    "prefetch:blockwise": Mechanism("placement.prefetch"),
    # Who serves a token.
    **_each("limit", "moe.limit_by", ("score", "similarity", "groups")),
    "top-k:1": Mechanism("model.num_experts_per_tok", 1),
    "top-k:2": Mechanism("model.num_experts_per_tok", 2),
    "balance:aux": Mechanism("moe.router_aux_loss_coef", 0.01, _positive),
    "capacity:drop": Mechanism("moe.capacity_factor", 1.25, _positive, "carpool.routing:DropOptions"),
    "capacity:first-choices-first": Mechanism("moe.first_choices_first", code="carpool.routing:DropOptions"),
    "second:random": Mechanism("moe.random_second", code="carpool.routing:DropOptions"),
    "router:float32": Mechanism("moe.router_float32", code="carpool.routing:router_logits"),
    "dropout:experts": Mechanism("moe.expert_dropout", 0.4, _positive),
    "init:small": Mechanism("model.config.initializer_range", 0.02, _positive),
    "freeze:dense": Mechanism("training.freeze", "dense"),
    # When each piece runs.
    **_each("schedule", "moe.schedule", ("auto", "none", "chunks", "two-batch", "tiles")),
    "chunks:several": Mechanism("moe.chunks", 2, lambda value: isinstance(value, int) and value > 1),
    "chunks:backward": Mechanism("moe.backward_chunks", 2, _positive),
    "delayed:experts": Mechanism("", code="carpool.schedule.chunks:ride_backward"),
    "delayed:dense": Mechanism("moe.delay_dense", code="carpool.schedule.delayed:Delayed"),
    "beside:shared-experts": Mechanism("", code="carpool.ride.function:_Depart"),
    "priority:rides": Mechanism("moe.priority", code="carpool.schedule.priority:RidesFirst"),
    "priority:pieces": Mechanism("moe.piece_mib", 8.0, _positive, "carpool.schedule.priority:RidesFirst"),
    "split:multiprocessors": Mechanism("nvlink.dispatch_ctas", 16, _positive, "carpool.kernels.processors:reserved"),
    "kernels:triton": Mechanism("", code="carpool.transport.nvlink.dispatch_kernel"),
})  # fmt: skip


def missing(mechanism: str) -> str | None:
    """Why this version does not have a mechanism, or None if it has."""
    return MECHANISMS[mechanism].missing()
