"""How did system X do it? One TOML file per published system: a choice of settings and plug-ins, nothing else.

    [recipe]
    system = "MindSpeed"                              what it is called
    source = "..."                                    where it is described
    note = "..."                                      what of it this is, and what not
    kind = "placement"                                or "routing", "schedule", "memory", "transport", "mesh",
                                                      "reliability"
    mechanisms = ["policy:lpt_cv", "predictor:ema"]   what makes it that system, as a run shows it (`carpool_systems`)
    missing = []                                      what would, too, and this version lacks

    [recipe.small]                                    for `carpool recipes check`, which runs it on 4 ranks:
    "placement.every" = 1                             settings that let it act on a tiny model in 3 steps

    [placement]                                       settings of `carpool train`, by section
    every = 50
    policy = "lpt_cv"

A recipe is worth nothing if a part of the system is silently missing, so one that names something as missing is
refused. `carpool train --config` takes a recipe's name or file. `carpool_systems` brings most recipes, what else they
need, and commands that compare them.

Recipes from outside the package are TOML files in a folder that the environment names, CARPOOL_RECIPES=FOLDER[:FOLDER],
or beside a module that a package names by an entry point. A recipe's name is that of its file.

    [project.entry-points."carpool.recipes"]
    my_package = "my_package.recipes"

This module needs neither PyTorch nor the schema of the configuration.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Literal, get_args

from carpool.plugins.nearest import nearest

FOLDERS = "CARPOOL_RECIPES"
GROUP = "carpool.recipes"
Kind = Literal["placement", "routing", "schedule", "memory", "transport", "mesh", "reliability"]


@dataclass(frozen=True)
class Recipe:
    """What a recipe's file says.

    Attributes:
        system, source, note, kind: see the module's docstring.
        mechanisms: KIND:NAME of each.
        missing: KIND:NAME of each mechanism that this version lacks.
        small: settings that make it a run of a tiny model on 4 ranks, by SECTION.KEY, for `carpool recipes check`.
        generate: where experts are in a generation that shows mechanisms that no training run has.
        settings: by section and key.
    """

    name: str
    path: Path
    system: str
    source: str
    mechanisms: tuple[str, ...]
    settings: Mapping[str, Mapping[str, Any]]
    note: str = ""
    missing: tuple[str, ...] = ()
    small: Mapping[str, Any] = field(default_factory=dict)
    generate: Mapping[str, Any] = field(default_factory=dict)
    kind: Kind = "placement"

    def get(self, section: str, key: str, default: Any = None) -> Any:
        """A setting that the recipe makes, or `default`."""
        return self.settings.get(section, {}).get(key, default)

    def check_complete(self) -> None:
        """Raise ValueError if the recipe names something as missing."""
        if self.missing:
            raise ValueError(
                f"recipe {self.name}: this version cannot follow it, because it lacks {', '.join(self.missing)}"
            )


def names(kind: Kind | None = None) -> list[str]:
    """The names of all recipes, or of those of one kind; recipes that cannot be followed are among them."""
    return [name for name in sorted(_paths()) if kind is None or read(name).kind == kind]


def path_of(name: str) -> Path:
    """The file of a recipe, given its name or the path of a TOML file.

    Raises:
        ValueError: there is no such recipe."""
    known, path = _paths(), Path(name)
    if name in known:
        return known[name]
    if path.suffix == ".toml" and path.is_file():
        return path
    near = nearest(name, known, cutoff=0.4)
    hint = f" (did you mean {near!r}?)" if near else ""
    raise ValueError(
        f"there is no recipe {name!r}{hint}: recipes are {', '.join(sorted(known))}, or the path of a .toml file"
    )


def read(name: str) -> Recipe:
    """What a recipe says, by name or from the path of a TOML file, whether or not this version can follow it.

    Raises:
        ValueError: there is none, or its file is no recipe."""
    path = path_of(name)
    name = path.stem
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"recipe {name}: {path} cannot be read: {error.strerror or error}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"recipe {name}: not TOML: {error}") from error
    head = data.pop("recipe", None)
    if not isinstance(head, dict) or not {"system", "source", "mechanisms"} <= set(head):
        raise ValueError(f"recipe {name}: a section [recipe] with system, source and mechanisms is missing")
    if unknown := set(head) - {one.name for one in fields(Recipe)} | set(head) & {"name", "path", "settings"}:
        raise ValueError(f"recipe {name}: [recipe] has no {', '.join(sorted(unknown))}")
    if head.setdefault("kind", "placement") not in get_args(Kind):
        raise ValueError(f"recipe {name}: kind = {head['kind']!r}: expected one of {', '.join(get_args(Kind))}")
    for key in ("mechanisms", "missing"):
        if not all(isinstance(one, str) and ":" in one for one in head.setdefault(key, [])):
            raise ValueError(f"recipe {name}: {key} = {head[key]!r}: expected a list of KIND:NAME")
        head[key] = tuple(head[key])
    for key in ("small", "generate"):
        if not isinstance(head.setdefault(key, {}), dict):
            raise ValueError(f"recipe {name}: {key} = {head[key]!r}: expected a table [recipe.{key}]")
    return Recipe(name=name, path=path, settings=data, **head)


def _paths() -> dict[str, Path]:
    """The files of all recipes by name: Carpool's own, those of installed packages, and those of the folders that the
    environment names."""
    folders = [Path(folder) for folder in os.environ.get(FOLDERS, "").split(os.pathsep) if folder]
    if absent := [str(folder) for folder in folders if not folder.is_dir()]:
        raise ValueError(f"{FOLDERS} names {', '.join(absent)}, which is no folder")
    modules = dict.fromkeys(entry.value for entry in entry_points(group=GROUP))
    installed = [Path(str(import_module(module).__file__)).parent for module in modules]
    found: dict[str, Path] = {}
    for folder in (Path(__file__).parent, *installed, *folders):
        for path in sorted(folder.glob("*.toml")):
            if path.stem in found:
                raise ValueError(f"two recipes are called {path.stem}: {found[path.stem]} and {path}; rename one")
            found[path.stem] = path
    return found
