"""How did system X do it? One TOML file per published system: a choice of what the rooms offer, nothing else.

    [recipe]
    system = "MindSpeed"                              what it is called
    source = "..."                                    where it is described
    note = "..."                                      what of it this is, and what not
    mechanisms = ["policy:lpt_cv", "predictor:ema"]   what makes it that system: KIND:NAME

    [placement]                                       settings of `carpool train`, by section
    every = 50
    policy = "lpt_cv"

A recipe is worth nothing if a part of the system is silently missing. So each mechanism must be one that this version
has, by its own registries (`KINDS`), and must be what the settings choose; else the recipe refuses to load. `compare`
(replay.py) runs several over one trace.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from types import MappingProxyType
from typing import Any, get_args

from carpool.placement.forecast import PREDICTORS
from carpool.placement.policies import POLICIES
from carpool.placement.solvers import SOLVERS
from carpool.placement.volume import TRANSPORTS
from carpool.routing_limit_options import LimitBy

__all__ = ["KINDS", "Recipe", "load", "names", "path_of"]

# What this version has of each kind, and the setting (section, key) that chooses it.
KINDS: Mapping[str, tuple[Collection[str], tuple[str, str]]] = MappingProxyType(
    {
        "transport": (TRANSPORTS, ("moe", "transport")),
        "limit": (get_args(LimitBy), ("moe", "limit_by")),
        "solver": (SOLVERS, ("placement", "solver")),
        "policy": (("place", "migrate", *POLICIES), ("placement", "policy")),
        "predictor": (PREDICTORS, ("placement", "predictor")),
        "freeze": (("dense",), ("training", "freeze")),
        "prefetch": (("blockwise",), ("placement", "prefetch")),
    }
)
# Kinds of which there is one, so that the setting is true or false.
SWITCHES = frozenset({"prefetch"})


@dataclass(frozen=True)
class Recipe:
    """A recipe that this version can follow.

    Attributes:
        name: of the file.
        system, source, note: see the module's docstring.
        mechanisms: KIND:NAME of each.
        settings: by section and key.
    """

    name: str
    system: str
    source: str
    note: str
    mechanisms: tuple[str, ...]
    settings: Mapping[str, Mapping[str, Any]]

    def get(self, section: str, key: str, default: Any = None) -> Any:
        return self.settings.get(section, {}).get(key, default)


def names() -> list[str]:
    """Of all recipes that come with Carpool."""
    return sorted(file.stem for file in Path(str(files(__package__))).glob("*.toml"))


def path_of(name: str) -> Path:
    """The file of a recipe that comes with Carpool."""
    return Path(str(files(__package__))) / f"{name}.toml"


def load(name: str) -> Recipe:
    """A recipe by name, or from the path of a TOML file.

    Raises:
        ValueError: there is none, it is no recipe, or a mechanism of it is missing here; says which."""
    known = names()
    path = Path(name)
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
    about = data.pop("recipe", None)
    if not isinstance(about, dict) or not {"system", "source", "mechanisms"} <= set(about):
        raise ValueError(f"recipe {name}: a section [recipe] with system, source and mechanisms is missing")
    if unknown := set(about) - {"system", "source", "note", "mechanisms"}:
        raise ValueError(f"recipe {name}: [recipe] has no {', '.join(sorted(unknown))}")
    for mechanism in about["mechanisms"]:
        _check(name, mechanism, data)
    return Recipe(name, about["system"], about["source"], about.get("note", ""), tuple(about["mechanisms"]), data)


def _check(recipe: str, mechanism: str, settings: Mapping[str, Any]) -> None:
    kind, _, name = mechanism.partition(":")
    if kind not in KINDS:
        raise ValueError(f"recipe {recipe}: this version has no mechanism {mechanism!r}; it knows {', '.join(KINDS)}")
    have, (section, key) = KINDS[kind]
    if name not in have:
        raise ValueError(f"recipe {recipe}: this version has no {kind} {name!r}; it has {', '.join(have)}")
    chosen = settings.get(section, {}).get(key)
    if chosen != (True if kind in SWITCHES else name):
        raise ValueError(f"recipe {recipe}: {mechanism} is of the system, but {section}.{key} is {chosen!r}")
