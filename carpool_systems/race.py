"""`carpool recipes race`: training steps of one model under several recipes, in turns in one run.

    carpool recipes race --recipes fastmoe,lancet,hetumoe --ranks 2

    fastmoe, hetumoe over alltoall    one row: over the same transport nothing is left of what makes HetuMoE differ
    lancet                            its transport is the race's
    hetumoe                           its transport is its point, so it runs over its own, too
    transformers                      no recipe: the library's own expert parallelism

The contest is that of `carpool bench model`: the same weights, tokens, ranks and rounds. One thing more is the same for
all: the transport, which is the baseline's ("alltoall") unless `--transport` says otherwise. A recipe that names
another one runs twice, over its own and over the race's, so that nobody takes the transport's gain for the schedule's.

Everything that a recipe says is in effect, but for what would change the weights: their initial size, and their dtype,
which is one for all. Recipes that place experts look at the routing while they warm up, and then as often as they say.

What a recipe does to the model's function is said (LOSSY). All others must have the same loss and gradient norm in
their first step; a difference is shown in red.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from carpool.bench.contest import RankBenchmark, start_ranks
from carpool.bench.model.model_contest import PLOT, measure
from carpool.bench.model.model_results import Case, Row
from carpool.bench.model.model_settings import CustomContender, ModelSettings
from carpool.bench.options import find_ranks
from carpool.bench.result_files import Result, print_table, terminal
from carpool.recipes import Recipe
from carpool.train.config.schema_base import toml_value
from carpool_systems.mechanisms import load
from carpool_systems.resolve import in_effect

BASELINE = "alltoall"
# Settings by which a recipe computes something else, and what `Run` itself does not name as lossy.
FUNCTION = (
    "model.num_experts_per_tok", "model.config.norm_topk_prob", "moe.router_aux_loss_coef", "moe.balance_scope",
    "training.freeze",
)  # fmt: skip
# What publishes a way to train MoE layers, by the package that brings it, and a file in it that says so.
LIBRARIES = {
    "DeepEP": ("deep_ep", ""), "Hybrid-EP": ("deep_ep", "hybrid_ep_buffer.py"), "Megatron-Core": ("megatron", "core"),
    "Tutel": ("tutel", ""),
}  # fmt: skip


@dataclass
class Field:
    """Who races.

    Attributes:
        own: by the name of its row.
        dtype: of all parameters, if a recipe needs another than the machine's usual one.
        left_out: why a row is not there, by its name.
    """

    own: dict[str, CustomContender] = field(default_factory=dict)
    dtype: str | None = None
    left_out: dict[str, str] = field(default_factory=dict)


def race(
    settings: ModelSettings, names: Sequence[str], transport: str = BASELINE, *, debug: bool = False, command: str = ""
) -> None:
    """Start the ranks (or be one), race, and show and write the results.

    Args:
        settings: with what is raced beside the recipes as `contenders`.
        names: of recipes, or paths of TOML files.
        transport: of all rows.

    Raises:
        ValueError: a recipe that cannot be followed or raced, or settings that do not fit this machine.
        carpool.train.launch.failure.RankFailure: a rank failed.
    """
    cuda, num_ranks = find_ranks(settings.device, settings.ranks)
    settings = settings.resolve(cuda=cuda, num_ranks=num_ranks)
    recipes = [load(name) for name in names]
    found = find_field(settings, recipes, transport)
    for name, why in found.left_out.items():
        print(f"left out: {name}: {why}")
    dtype = () if found.dtype is None else (f"model.dtype={found.dtype}",)
    settings = replace(
        settings,
        own=found.own,
        contenders=tuple(dict.fromkeys([*found.own, *settings.contenders])),
        overrides=(*dtype, *settings.overrides),
    )
    settings.check_set()
    start_ranks(settings, "carpool_systems.race:BENCHMARK", debug=debug, command=command)


def find_field(settings: ModelSettings, recipes: Sequence[Recipe], transport: str = BASELINE) -> Field:
    """The rows of a race; recipes that come to the same run share one.

    Args:
        settings: the rest of the configuration.
        transport: of all rows.

    Raises:
        ValueError: a recipe whose experts are placed by a file that it does not name, or none that can be raced."""
    found, runs = Field(), dict[str, dict[str, Any]]()
    plain = settings.config_of(None)
    base = in_effect(plain)
    for recipe in recipes:
        found.dtype = recipe.get("model", "dtype") or found.dtype
        if recipe.get("placement", "policy") == "place" and recipe.get("moe", "layout") is None:
            raise ValueError(
                f"{recipe.name} cannot be raced as it is: it places experts by a file. Make one (carpool trace, then "
                f"carpool place), write `carpool recipes show {recipe.name}` to a file, add layout = PATH to its "
                "[moe], and race that file"
            )
        if recipe.get("hidden_projection", "size") is not None:
            found.left_out[recipe.name] = (
                "it is another model, whose experts have other shapes (hidden_projection.size)"
            )
            continue
        own = recipe.get("moe", "transport")
        ways = {recipe.name: own or transport}
        if own not in (None, transport):
            ways[f"{recipe.name} over {transport}"] = transport
        for name, way in ways.items():
            overrides = tuple(_overrides(recipe, way))
            try:
                alone = replace(settings, own={name: CustomContender(overrides)}, contenders=(name,), out="")
                config = alone.config_of(name)
            except ValueError as error:
                found.left_out[name] = str(error).splitlines()[0]
                continue
            effective = in_effect(config)
            del effective["training.output_dir"]
            if twin := next((other for other, run in runs.items() if run == effective), None):
                # The name of a row is its key: rows are few.
                both = f"{twin}, {name}"
                found.own = {both if key == twin else key: one for key, one in found.own.items()}
                runs = {both if key == twin else key: run for key, run in runs.items()}
                continue
            runs[name] = effective
            changes = [f"{key} = {effective[key]}" for key in FUNCTION if effective.get(key) != base.get(key)]
            found.own[name] = CustomContender(overrides, tuple(changes))
    if not found.own:
        told = "; ".join(f"{name}: {why}" for name, why in found.left_out.items())
        raise ValueError(f"no recipe can be raced: {told}")
    return found


def _overrides(recipe: Recipe, transport: str) -> list[str]:
    """A recipe's settings over a transport, but for what would give it other weights."""
    settings: dict[str, dict[str, Any]] = {section: dict(keys) for section, keys in recipe.settings.items()}
    settings.setdefault("moe", {})["transport"] = transport
    model = settings.get("model", {})
    model.pop("dtype", None)
    config = {key: value for key, value in model.pop("config", {}).items() if key != "initializer_range"}
    if recipe.get("placement", "policy", "migrate") == "migrate" and recipe.get("placement", "every") is not None:
        # The first answer is used while it warms up.
        settings["placement"].setdefault("lag", 1)
    flat = {f"{section}.{key}": value for section, keys in settings.items() for key, value in keys.items()}
    flat |= {f"model.config.{key}": value for key, value in config.items()}
    return [f"{key}={toml_value(value)}" for key, value in flat.items()]


def show(result: Result, console: Console | None = None) -> None:
    """Print the table, and what each row was."""
    console = console or terminal(150)
    case: Case = result.cases[0]
    title = (
        f"{case.model} ({case.layers} layers, {case.parameters / 1e6:,.1f} M parameters), {case.num_ranks} ranks, "
        f"{case.tokens:,} tokens a rank and step, {case.routing} routing"
    )
    print_table(console, title, *table(case))
    for row in case.rows:
        text = f"is not available: {row.unavailable}" if row.unavailable else row.what
        if row.changes:
            text += f". LOSSY, or another function: {'; '.join(row.changes)}"
        console.print(f"{row.label}: {text}", highlight=False, markup=False)
    for text in case.different:
        console.print(f"NOT THE SAME COMPUTATION: {text}", style="bold red", highlight=False, markup=False)
    settings = result.settings
    console.print(
        f"\nms: median of {settings['rounds']} rounds of {settings['steps']} steps, smallest and largest; speed: times "
        "that of the first row; rides, exposed: of one step under the profiler, and of these what nothing ran beside; "
        "sent: by rides and expert replicas in a step of all ranks; same: loss and gradient norm of the first step "
        f"beside those of the first exact row.\n{libraries()}\n{result.where}",
        highlight=False, markup=False,
    )  # fmt: skip


def table(case: Case) -> tuple[list[str], list[list[str]]]:
    """Headings and rows."""
    headings = ["recipe", "step\nms", "speed", "rides\nms", "exposed\nms", "sent\nMB", "peak\nGiB", "loss", "same"]
    base = next((row for row in case.rows if row.loss is not None and not row.changes), None)
    rows = []
    for row in case.rows:
        if row.times is None:
            rows.append([_stacked(row), "not\navailable"])
            continue
        rides = next(one for one in row.kinds if one.kind == "rides")
        rows.append([
            _stacked(row),
            f"{row.times.ms:.1f}\n[dim]{min(row.times.rounds):.4g}-{max(row.times.rounds):.4g}[/]",
            f"{row.ratio:.2f}x",
            f"{rides.busy_ms:.1f}",
            f"{rides.ms:.1f}",
            "-" if row.bytes_remote is None else f"{row.bytes_remote / 1e6:.2f}",
            "-" if row.peak_bytes is None else f"{row.peak_bytes / 2**30:.1f}",
            f"{row.loss:.5f}",
            sameness(row, base, case.different),
        ])  # fmt: skip
    return headings, rows


def _stacked(row: Row) -> str:
    return escape(row.label).replace(", ", "\n")


def sameness(row: Row, base: Row | None, different: Sequence[str]) -> str:
    """What a row's first step says of its function: "bitwise", by how much loss or norm differ, "LOSSY" or "NO"."""
    if row.changes or base is None or row.loss is None or row.grad_norm is None:
        return "LOSSY"
    if any(text.startswith(f"{row.label}: ") for text in different):
        return "NO"
    assert base.loss is not None and base.grad_norm is not None
    off = max(abs(row.loss / base.loss - 1), abs(row.grad_norm / base.grad_norm - 1))
    return "bitwise" if off == 0 else f"{off:.0e}"


def libraries(packages: Mapping[str, tuple[str, str]] = LIBRARIES) -> str:
    """Which published libraries are not in a race, and why."""
    there = [name for name, (package, file) in packages.items() if _is_installed(package, file)]
    absent = [name for name in packages if name not in there]
    said = [f"Not raced: {', '.join(absent)} (not installed)."] if absent else []
    if there:
        said.append(
            f"Not raced: {', '.join(there)} (installed, but no training step of a model of Transformers: a plug-in "
            "transport of it is raced by a recipe that names it)."
        )
    return " ".join(said)


def _is_installed(package: str, file: str) -> bool:
    """Whether a package is there, and a file or folder in it, without importing it: that may need a GPU."""
    spec = find_spec(package)
    return spec is not None and any((Path(one) / file).exists() for one in spec.submodule_search_locations or ())


BENCHMARK = RankBenchmark("race", ModelSettings, measure, show, PLOT)

__all__ = ["BASELINE", "BENCHMARK", "Field", "find_field", "libraries", "race", "sameness", "show", "table"]
