"""What a run under a recipe is: its whole configuration, and the settings in it that do something.

Many settings mean nothing unless another one is made: `placement.solver` is read by the policy "migrate" alone, and no
key of [placement] is read where experts never move. `in_effect` leaves those out and writes the others in one way, so
that two recipes are the same run exactly if it gives the same for both, and a mechanism is used exactly if its setting
is left.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from carpool.recipes.files import Recipe
from carpool.train.config import Config, load_config
from carpool.train.config.schema import keys

__all__ = ["in_effect", "resolve"]


def resolve(recipe: Recipe) -> Config:
    """The configuration of `carpool train --config RECIPE`.

    Raises:
        ValueError: settings that `carpool train` does not take."""
    # A placement that was solved before is in a file that each run names for itself.
    placed = recipe.get("placement", "policy") == "place"
    return load_config(recipe.path, ["moe.layout=layouts.json"] if placed else [])


def in_effect(config: Config) -> dict[str, Any]:
    """The settings that do something, by SECTION.KEY; those of `model.config` by model.config.KEY."""
    schedule = config.moe.asked_schedule()
    found: dict[str, Any] = {}
    for section, _, key in keys():
        name, value = f"{section}.{key}", getattr(getattr(config, section), key)
        if not _WHEN.get(name, _WHEN.get(section, _true))(config):
            continue
        if name == "model.config":
            found |= {f"{name}.{one}": each for one, each in value.items()}
            continue
        if name == "moe.experts" and value == "auto":
            value = "grouped"
        elif schedule is not None and name == "moe.chunks":
            value = schedule.chunks
        elif schedule is not None and name == "moe.backward_chunks":
            value = schedule.backward_chunks or schedule.chunks
        found[name] = value
    return found


def _true(config: Config) -> bool:
    return True


def _moves(config: Config) -> bool:
    return config.placement.every is not None


def _solves(config: Config) -> bool:
    return _moves(config) and config.placement.policy == "migrate"


def _copies(config: Config) -> bool:
    return _moves(config) and config.placement.replicas > 0 and config.placement.policy not in ("lpt_cv", "pick")


def _limits(config: Config) -> bool:
    moe = config.moe
    return not (moe.limit_ranks is moe.limit_nodes is None)


# When a setting, or every setting of a section, does something. What is not here always does.
_WHEN: Mapping[str, Callable[[Config], bool]] = MappingProxyType({
    "parallelism.cp_attention": lambda config: config.parallelism.cp_size > 1,
    "parallelism.sequence_parallel": lambda config: config.parallelism.tp_size > 1,
    "nvlink": lambda config: config.moe.transport in ("auto", "nvlink"),
    "moe.chunks": lambda config: config.moe.schedule in ("chunks", "tiles"),
    "moe.backward_chunks": lambda config: config.moe.schedule == "chunks",
    "codec.merge_hashes": lambda config: config.codec.merge == "lsh",
    "codec.merge_width": lambda config: config.codec.merge == "lsh",
    "codec.merge_similarity": lambda config: config.codec.merge == "condense",
    "moe.limit_by": _limits,
    "moe.first_choices_first": lambda config: config.moe.capacity_factor is not None,
    "placement": _solves,
    "placement.every": _moves,
    "placement.policy": lambda config: _moves(config) or config.placement.policy == "place",
    "placement.solver": lambda config: _solves(config) or config.placement.policy == "place",
    "placement.predictor": _moves,
    "placement.replicas": _copies,
    "placement.prefetch": _copies,
})  # fmt: skip
