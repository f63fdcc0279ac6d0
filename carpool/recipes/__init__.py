"""How did system X do it? One TOML file per published system: a choice of what the rooms offer, nothing else.

    [recipe]
    system = "MindSpeed"                              what it is called
    source = "..."                                    where it is described
    note = "..."                                      what of it this is, and what not
    kind = "placement"                                where experts live; or "schedule": how rides are made and hidden
    mechanisms = ["policy:lpt_cv", "predictor:ema"]   what makes it that system (mechanisms.py)

    [placement]                                       settings of `carpool train`, by section
    every = 50
    policy = "lpt_cv"

A recipe is worth nothing if a part of the system is silently missing. So each mechanism must be one that this version
has, and must be what the settings choose; else the recipe refuses to load, naming what is missing. `carpool train
--config` takes the file; `compare` (replay.py) runs several of kind "placement" over one trace.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal, get_args

from carpool.recipes.mechanisms import MECHANISMS, missing

__all__ = ["Kind", "Recipe", "about", "load", "names", "path_of"]

Kind = Literal["placement", "schedule"]


@dataclass(frozen=True)
class Recipe:
    """A recipe that this version can follow.

    Attributes:
        name: of the file.
        system, source, note, kind: see the module's docstring.
        mechanisms: KIND:NAME of each.
        settings: by section and key.
    """

    name: str
    system: str
    source: str
    note: str
    mechanisms: tuple[str, ...]
    settings: Mapping[str, Mapping[str, Any]]
    kind: Kind = "placement"

    def get(self, section: str, key: str, default: Any = None) -> Any:
        return self.settings.get(section, {}).get(key, default)


def names(kind: Kind | None = None) -> list[str]:
    """Of all recipes that come with Carpool, or of one kind; those that refuse to load as well."""
    found = sorted(file.stem for file in path_of("").parent.glob("*.toml"))
    return [name for name in found if kind is None or about(name).kind == kind]


def path_of(name: str) -> Path:
    """The file of a recipe that comes with Carpool."""
    return Path(str(files(__package__))) / f"{name}.toml"


def load(name: str) -> Recipe:
    """A recipe by name, or from the path of a TOML file.

    Raises:
        ValueError: there is none, it is no recipe, or a mechanism of it is missing here; says which."""
    recipe = about(name)
    why = {mechanism: missing(mechanism) for mechanism in recipe.mechanisms}
    if any(why.values()):
        lacking = "; ".join(f"{mechanism} ({reason})" for mechanism, reason in why.items() if reason)
        raise ValueError(f"recipe {recipe.name}: this version cannot follow it, because it lacks {lacking}")
    return recipe


def about(name: str) -> Recipe:
    """What a recipe says, whether or not this version can follow it.

    Raises:
        ValueError: there is none, it is no recipe, or its settings do not choose what it says."""
    known, path = sorted(file.stem for file in path_of("").parent.glob("*.toml")), Path(name)
    if name in known:
        text = path_of(name).read_text()
    elif path.suffix == ".toml" and path.is_file():
        name, text = path.stem, path.read_text()
    else:
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"there is no recipe {name!r}{hint} Recipes: {', '.join(known)}; or give the path of a .toml")
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"recipe {name}: not TOML: {error}") from error
    head = data.pop("recipe", None)
    if not isinstance(head, dict) or not {"system", "source", "mechanisms"} <= set(head):
        raise ValueError(f"recipe {name}: a section [recipe] with system, source and mechanisms is missing")
    if unknown := set(head) - {"system", "source", "note", "kind", "mechanisms"}:
        raise ValueError(f"recipe {name}: [recipe] has no {', '.join(sorted(unknown))}")
    kind = head.get("kind", "placement")
    if kind not in get_args(Kind):
        raise ValueError(f"recipe {name}: kind = {kind!r}: expected one of {', '.join(get_args(Kind))}")
    for mechanism in head["mechanisms"]:
        _check(name, mechanism, data)
    return Recipe(name, head["system"], head["source"], head.get("note", ""), tuple(head["mechanisms"]), data, kind)


def _check(recipe: str, mechanism: str, settings: Mapping[str, Any]) -> None:
    """Raise ValueError for a mechanism that nobody knows, or that the settings do not choose."""
    if mechanism not in MECHANISMS:
        near = difflib.get_close_matches(mechanism, MECHANISMS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(MECHANISMS)}"
        raise ValueError(f"recipe {recipe}: there is no mechanism {mechanism!r}; {hint}")
    one = MECHANISMS[mechanism]
    if not one.chosen(settings):
        raise ValueError(f"recipe {recipe}: {mechanism} is of the system, but not what its {one.setting} chooses")
