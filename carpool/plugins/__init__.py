"""What others may add to Carpool, and how it is found: one registry for each kind of thing.

It imports nothing else of Carpool, so that packages which need no accelerator can use it. A registry is a mapping from
names to things. Whoever lists names, checks a name or makes a thing reads the registry and nothing else.

    TRANSPORTS = Registry("transport", "carpool.transports", {"dedup": Dedup, "gather": Gather})
    TRANSPORTS["dedup"]            the class
    sorted(TRANSPORTS)             every known name, those of plug-ins included

There are three ways to add something from outside the package:

    in a script         carpool.transport.register(Relay)
    in one file         CARPOOL_PLUGINS=relay carpool train ...     imports relay.py, which calls `register` as above
    in a package        an entry point in its pyproject.toml:

        [project.entry-points."carpool.transports"]
        relay = "my_package.relay:Relay"

An entry point is imported when its name is looked up, so one that cannot be imported harms only those who ask for it.
Modules in CARPOOL_PLUGINS are imported, in all processes, before the first look into any registry.

The registries: `carpool.transport.TRANSPORTS` ("carpool.transports"), `carpool.ride.schedule.SCHEDULES`
("carpool.schedules"), `carpool.replicas.slot_planners.SLOT_PLANNERS` ("carpool.slot_planners"),
`carpool.experts.EXPERTS` ("carpool.experts"), `carpool.optim.OPTIMIZERS` ("carpool.optimizers"),
`carpool.train.lr_schedules.LR_SCHEDULES` ("carpool.lr_schedules"),
`carpool.families.FAMILIES` ("carpool.families"), `carpool.metrics.metric.METRICS` ("carpool.metrics"),
`carpool.memory.TIERS` ("carpool.tiers"), `carpool.memory.next_experts.PREDICTORS` ("carpool.predictors", of experts in
host memory), `carpool.placement.solvers.SOLVERS` ("carpool.solvers"), `carpool.train.data.formats.FORMATS`
("carpool.data_formats"), `carpool.train.data.readers.READERS` ("carpool.data_readers"),
`carpool.train.records.metrics_writer.TRACKERS` ("carpool.trackers") and
`carpool.hf.architecture_changes.ARCHITECTURE_CHANGES` ("carpool.architecture_changes"). A package that takes plug-ins
makes its own. What has none of these enters as an extension, with a section of settings of its own:
`carpool.train.extensions.EXTENSIONS` ("carpool.extensions"). Two groups of entry points are not registries:
"carpool.recipes" (`carpool.recipes`), and "carpool.commands", functions of Typer: `"recipes.race" = "my_package:race"`
is `carpool recipes race`.

`carpool train` gives a transport, a schedule, an expert computation and an optimizer the options that they name, and
refuses others: moe.transport_options, moe.schedule_options, moe.expert_options and training.optimizer_options.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Generic, TypeVar

from carpool.plugins.nearest import did_you_mean

__all__ = ["PLUGINS", "Registry", "unknown"]

PLUGINS = "CARPOOL_PLUGINS"

T = TypeVar("T")
S = TypeVar("S")


class Registry(Mapping[str, T], Generic[T]):
    """Things of one kind by name. Iteration gives the built-in names first, then those of plug-ins.

    Args:
        kind: what one is called in errors, such as "transport".
        group: the entry points' group.
        check: raises ValueError if a thing from outside lacks what its kind must have. Called with name and thing.
        base: things are subclasses of this, whose attribute `name` is what they are called.
    """

    def __init__(
        self,
        kind: str,
        group: str,
        built_in: Mapping[str, T],
        check: Callable[[str, T], None] | None = None,
        base: type | None = None,
    ) -> None:
        self.kind, self.group = kind, group
        self._things: dict[str, T] = dict(built_in)
        self._check, self._base = check, base
        self._found: dict[str, EntryPoint] | None = None

    def register(self, thing: S, name: str = "") -> S:
        """Add a thing under `name`, by default its attribute `name`. Returns it, so it can decorate a class.

        Raises:
            ValueError: another thing has this name; or it is no subclass of `base`; or what `check` says.
        """
        added: Any = thing
        name = name or getattr(thing, "name", "") or getattr(thing, "__name__", "")
        if self._things.get(name, added) is not thing:
            raise ValueError(f"{self.kind} {name!r} is registered already, as {self._things[name]!r}; use another name")
        if (base := self._base) is not None:
            if not (isinstance(thing, type) and issubclass(thing, base)):
                expected = f"{base.__module__}.{base.__name__}"
                raise ValueError(f"{self.kind} {name!r} must be a subclass of {expected}, not {thing!r}")
            if (own := getattr(thing, "name", None)) != name:
                raise ValueError(f"{self.kind} {name!r}: its class has the name {own!r}; give both the same name")
        if self._check is not None:
            self._check(name, added)
        self._things[name] = added
        return thing

    def __getitem__(self, name: str) -> T:
        """The thing of that name.

        Raises:
            KeyError: there is none. Whoever asks for a user says which names there are.
            ImportError: it is a plug-in's, which cannot be imported.
        """
        found = self._outside()
        if name not in self._things and name in found:
            entry = found[name]
            try:
                thing = entry.load()
            except Exception as error:
                where = entry.dist.name if entry.dist is not None else "an installed package"
                raise ImportError(
                    f"{self.kind} {name!r} of {where} ({entry.value}) cannot be imported: {error}; mend or uninstall it"
                ) from error
            self.register(thing, name)
        return self._things[name]

    def __contains__(self, name: object) -> bool:
        return name in self._outside() or name in self._things

    def __iter__(self) -> Iterator[str]:
        found = self._outside()
        yield from self._things
        yield from sorted(name for name in found if name not in self._things)

    def __len__(self) -> int:
        return len(set(self._outside()) | set(self._things))

    def _outside(self) -> dict[str, EntryPoint]:
        """Entry points by name, looked for once; after the modules that the environment names have been imported."""
        _import_named()
        if self._found is None:
            self._found = {entry.name: entry for entry in entry_points(group=self.group)}
        return self._found


def _import_named() -> None:
    for name in filter(None, (part.strip() for part in os.environ.get(PLUGINS, "").split(","))):
        try:
            import_module(name)
        except ImportError as error:
            raise ImportError(
                f"{PLUGINS} names the module {name!r}, which cannot be imported: {error}; put its folder on PYTHONPATH"
            ) from error


def unknown(registry: Registry[Any], name: str, *also: str) -> str:
    """The sentence for a name that nobody has registered. `also`: names with a meaning of their own, such as "auto"."""
    known = [*also, *registry]
    return f"{registry.kind}={name!r} is not known; use one of {', '.join(known)}{did_you_mean(name, known)}"
