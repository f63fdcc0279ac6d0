"""`carpool bench`: transport, experts, layer, model, generate. Options are fields of settings classes."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from carpool.bench import bench_settings
from carpool.bench.model.model_settings import ModelSettings
from carpool.bench.options import Options, RankOptions, split
from carpool.cli.common import BENCH_PACKAGES, TRAIN_PACKAGES, Debug, RanksDebug, check_output, command, errors, require

bench = typer.Typer(help="Measure on this machine.", no_args_is_help=True)

_RANKS = "\n\n    It starts the ranks itself, unless torchrun or Slurm started it."
# By command: settings, what must be installed, "module:NAME" of what measures, and what the command says of itself.
_BENCHMARKS: dict[str, tuple[type[Options], tuple[str, ...], str, str]] = {
    "transport": (
        bench_settings.TransportSettings, (), "carpool.bench.transport.ride_contest:BENCHMARK",
        "Time how tokens travel: all transports, checked and interleaved, beside the ceiling of plain copies.",
    ),
    "experts": (
        bench_settings.ExpertsSettings, BENCH_PACKAGES, "carpool.bench.moe.moe_contest:benchmark",
        "Time what experts compute on one device, Carpool's beside transformers'; and what they save for the backward.",
    ),
    "layer": (
        bench_settings.LayerSettings, BENCH_PACKAGES, "carpool.bench.moe.layer_contest:BENCHMARK",
        "Time whole MoE layers over ranks: transports and experts of Carpool against transformers' expert parallelism.",
    ),
    "model": (
        ModelSettings, TRAIN_PACKAGES, "carpool.bench.model.model_contest:BENCHMARK",
        "Time whole training steps of a real configuration with random weights, and see where their time goes.",
    ),
    "generate": (
        bench_settings.GenerateSettings, TRAIN_PACKAGES, "carpool.bench.bench_generate:BENCHMARK",
        "Time prefill and decoding of a real configuration with random weights, beside Transformers' generate.",
    ),
}  # fmt: skip


def _parameters(settings: type[Options]) -> list[inspect.Parameter]:
    """The options of a command: the benchmark's own first, then what it shares with others."""
    types = get_type_hints(settings)
    found: dict[str, Any] = {one.name: one for one in dataclasses.fields(settings) if "option" in one.metadata}
    bases = [inspect.get_annotations(one) for one in settings.__mro__]
    names = sorted(found, key=lambda name: max(i for i, own in enumerate(bases) if name in own))
    if more := getattr(settings, "SHAPE_OPTIONS", {}):
        found |= more
        at = names.index("shapes") + 1
        names[at:at] = more
    parameters = []
    for name in names:
        asked, default = found[name].metadata, found[name].default
        kind = asked["kind"] or (Path if name == "out" else types[name])
        if isinstance(default, tuple):
            default = ",".join(default) or None  # of an option that may be repeated the default is empty
        elif default is dataclasses.MISSING:
            default = inspect.Parameter.empty
        if default is None and kind is asked["kind"]:
            kind = kind | None
        option = typer.Option(asked["option"], help=asked["help"], **asked["more"])
        parameters.append(_parameter(name, Annotated[kind, option], Path(default) if kind is Path else default))
    debug = RanksDebug if issubclass(settings, RankOptions) else Debug
    return [*parameters, _parameter("debug", debug, False)]


def _parameter(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=default)


def fill(settings: type[Any], given: dict[str, Any]) -> Any:
    """Settings from a command's arguments; where several are wanted, a text has them with commas."""
    check_output("--out", given["out"])
    values: dict[str, Any] = {"out": str(given["out"])}
    for field in dataclasses.fields(settings):
        if field.name in given and field.name != "out":
            value = given[field.name]
            if str(field.type).startswith("tuple"):
                value = split(value) if isinstance(value, str) else tuple(value or ())
            values[field.name] = value
    if hasattr(settings, "parse_shapes"):
        values["shapes"] = settings.parse_shapes({**given, "shapes": values["shapes"]})
    return settings(**values)


def _add(name: str, settings: type[Options], packages: tuple[str, ...], entry: str, text: str) -> None:
    """Make the command `carpool bench NAME`."""

    def run(**given: Any) -> None:
        debug = given.pop("debug")
        with errors(debug):
            require(packages)
            filled = fill(settings, given)
            if isinstance(filled, bench_settings.LayerSettings) and filled.modelled:
                from carpool.bench.moe.layer_contest import model_only

                model_only(filled, command())
            elif isinstance(filled, RankOptions):
                from carpool.bench.contest import start_ranks

                start_ranks(filled, entry, debug=debug, command=command())
            else:
                module, _, function = entry.partition(":")
                getattr(importlib.import_module(module), function)(filled, command=command())

    run.__doc__ = text + (_RANKS if issubclass(settings, RankOptions) else "")
    parameters = _parameters(settings)
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {one.name: one.annotation for one in parameters}
    bench.command(name)(run)


for _name, _benchmark in _BENCHMARKS.items():
    _add(_name, *_benchmark)
