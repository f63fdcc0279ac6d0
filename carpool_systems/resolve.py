"""What a run under a recipe is: its whole configuration, and the settings in it that do something.

Many settings mean nothing unless another one is made (`carpool.train.config.declarations`): `placement.solver` is read
by the policy "migrate" alone, and no key of [placement] is read where experts never move. `in_effect` leaves those out
and writes the others in one way. Two recipes for which it gives the same are the same run.
"""

from __future__ import annotations

from typing import Any

from carpool.recipes import Recipe
from carpool.train.config import Config, load_config

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
    settings = config.flat()
    for name, value in settings.items():
        if not config.declared.has_effect(settings, name):
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
