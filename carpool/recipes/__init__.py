"""How did system X do it? One TOML file per published system: a choice of what the rooms offer, nothing else.

    [recipe]
    system = "MindSpeed"                              what it is called
    source = "..."                                    where it is described
    note = "..."                                      what of it this is, and what not
    kind = "placement"                                what it is about: "placement", "routing" or "schedule"
    mechanisms = ["policy:lpt_cv", "predictor:ema"]   what makes it that system (mechanisms.py)
    missing = []                                      what would, too, and this version lacks

    [placement]                                       settings of `carpool train`, by section
    every = 50
    policy = "lpt_cv"

A recipe is worth nothing if a part of the system is silently missing. So `load` refuses a recipe that names something
as missing, or one of whose mechanisms this version lacks or the run would not use. `carpool train --config` takes a
recipe's name or file; `carpool recipes compare` (compare.py) replays a trace under several.

A recipe from outside the package is a TOML file in a folder that the environment names,
CARPOOL_RECIPES=FOLDER[:FOLDER]. Its name is that of the file, as for the others.

Importing this module, and `read`, need neither PyTorch nor the schema of the configuration.
"""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

__all__ = ["FOLDERS", "Kind", "Recipe", "load", "names", "path_of", "read"]

FOLDERS = "CARPOOL_RECIPES"
Kind = Literal["placement", "routing", "schedule"]


@dataclass(frozen=True)
class Recipe:
    """What a recipe's file says.

    Attributes:
        name: of the file.
        path: of the file.
        system, source, note, kind: see the module's docstring.
        mechanisms: KIND:NAME of each.
        missing: KIND:NAME of each mechanism that this version lacks.
        settings: by section and key.
    """

    name: str
    path: Path
    system: str
    source: str
    note: str
    mechanisms: tuple[str, ...]
    settings: Mapping[str, Mapping[str, Any]]
    missing: tuple[str, ...] = ()
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
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ValueError(
        f"there is no recipe {name!r}{hint} Recipes: {', '.join(sorted(known))}; or give the path of a .toml"
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
    if unknown := set(head) - {"system", "source", "note", "kind", "mechanisms", "missing"}:
        raise ValueError(f"recipe {name}: [recipe] has no {', '.join(sorted(unknown))}")
    kind = head.get("kind", "placement")
    if kind not in get_args(Kind):
        raise ValueError(f"recipe {name}: kind = {kind!r}: expected one of {', '.join(get_args(Kind))}")
    for key in ("mechanisms", "missing"):
        if not all(isinstance(one, str) and ":" in one for one in head.get(key, [])):
            raise ValueError(f"recipe {name}: {key} = {head[key]!r}: expected a list of KIND:NAME")
    return Recipe(
        name,
        path,
        head["system"],
        head["source"],
        head.get("note", ""),
        tuple(head["mechanisms"]),
        data,
        tuple(head.get("missing", ())),
        kind,
    )


def load(name: str) -> Recipe:
    """A recipe that this version can follow, by name or from the path of a TOML file.

    Raises:
        ValueError: there is none, it is no recipe, something of it is missing here, its settings are none that
            `carpool train` takes, or a run with them would not use one of its mechanisms; says which."""
    from carpool.recipes.mechanisms import check  # the schema of the configuration takes seconds to import

    recipe = read(name)
    check(recipe)
    return recipe


def _paths() -> dict[str, Path]:
    """The files of all recipes by name: those of the package, and those of the folders that the environment names."""
    folders = [Path(folder) for folder in os.environ.get(FOLDERS, "").split(os.pathsep) if folder]
    if absent := [str(folder) for folder in folders if not folder.is_dir()]:
        raise ValueError(f"{FOLDERS} names {', '.join(absent)}, which is no folder")
    found: dict[str, Path] = {}
    for folder in (Path(__file__).parent, *folders):
        for path in sorted(folder.glob("*.toml")):
            if path.stem in found:
                raise ValueError(f"two recipes are called {path.stem}: {found[path.stem]} and {path}; rename one")
            found[path.stem] = path
    return found
