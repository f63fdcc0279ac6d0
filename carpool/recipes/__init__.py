"""How did system X do it? One TOML file per published system: a choice of what the rooms offer, nothing else.

    [recipe]
    system = "MindSpeed"                              what it is called
    source = "..."                                    where it is described
    note = "..."                                      what of it this is, and what not
    kind = "placement"                                or "routing", "schedule", "memory", "transport", "mesh"
    mechanisms = ["policy:lpt_cv", "predictor:ema"]   what makes it that system (mechanisms.py), chosen by settings
    missing = []                                      what would, too, and this version lacks

    [recipe.without_setting]                          what would, too, and no setting of a recipe chooses
    "cache:experts" = "in generation alone"           where it is at work

    [placement]                                       settings of `carpool train`, by section
    every = 50
    policy = "lpt_cv"

A recipe is worth nothing if a part of the system is silently missing. So `load` refuses a recipe that names something
as missing, or one of whose mechanisms this version lacks or whose setting has no effect; what runs do is shown by
tests. `carpool train --config` takes a recipe's name or file; `carpool recipes compare` replays a trace under several.

A recipe from outside the package is a TOML file in a folder that the environment names,
CARPOOL_RECIPES=FOLDER[:FOLDER]. Its name is that of the file, as for the others.

Importing this module, and `read`, need neither PyTorch nor the schema of the configuration.
"""

from __future__ import annotations

from carpool.recipes.files import FOLDERS, Kind, Recipe, names, path_of, read

__all__ = ["FOLDERS", "Kind", "Recipe", "load", "names", "path_of", "read"]


def load(name: str) -> Recipe:
    """A recipe that this version can follow, by name or from the path of a TOML file.

    Raises:
        ValueError: there is none, it is no recipe, something of it is missing here, its settings are none that
            `carpool train` takes, or one that chooses a mechanism has no effect; says which."""
    from carpool.recipes.mechanisms import check  # the schema of the configuration takes seconds to import

    recipe = read(name)
    check(recipe)
    return recipe
