"""Recipes: complete or refused, and each of their mechanisms does something on real routing."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any, get_args

import pytest
import tomli_w
from typer.testing import CliRunner

from carpool.cli import app
from carpool.placement.trace import Trace
from carpool.recipes import Recipe, names, read
from carpool.train.config import load_config
from carpool.train.config.schema import config_type
from carpool_systems.compare import Axis, chosen, compare, ways
from carpool_systems.mechanisms import load
from carpool_systems.resolve import in_effect, resolve

TRACE = Path(__file__).parents[2] / "docs/traces/e64-noaux-1615.npz"


@pytest.fixture(scope="module")
def trace() -> Trace:
    """Two layers of a real trace."""
    whole = Trace.load(TRACE)
    return replace(whole, expert_LTK=whole.expert_LTK[3:5], layers=whole.layers[3:5], weight_LTK=None)


def with_setting(recipe: Recipe, folder: Path, section: str, key: str, value: Any) -> Recipe:
    """A recipe in a file of its own, with one setting changed, or without it (None)."""
    changed = {**recipe.settings.get(section, {}), key: value}
    kept = {k: v for k, v in changed.items() if v is not None}
    head = {"system": recipe.system, "source": recipe.source, "mechanisms": [], "kind": recipe.kind}
    path = folder / f"{recipe.name} {key}.toml"
    path.write_text(tomli_w.dumps({"recipe": head, **recipe.settings, section: kept}))
    return read(str(path))


@pytest.mark.parametrize("name", names())
def test_a_recipe_loads_unless_it_says_what_is_missing(name: str) -> None:
    recipe = read(name)
    if not recipe.missing:
        assert load(name) == recipe
        return
    with pytest.raises(ValueError, match=f"recipe {name}: this version cannot follow it, because it lacks") as refused:
        load(name)
    assert all(mechanism in str(refused.value) for mechanism in recipe.missing)
    with pytest.raises(ValueError, match="is a recipe that this version cannot follow"):
        load_config(recipe.path, [])


def test_recipes_have_other_settings_and_mechanisms(tmp_path: Path) -> None:
    # Recipes that differ only in what their authors say of them would print the same numbers under two names.
    runs = {"no recipe": in_effect(config_type()())}
    parts = [frozenset([*read(name).mechanisms, *read(name).missing]) for name in names()]
    assert len(set(parts)) == len(parts), "each is another choice of mechanisms, not of numbers"
    runs |= {name: in_effect(resolve(read(name))) for name in names() if not read(name).missing}
    assert not [(a, b) for a, b in combinations(runs, 2) if runs[a] == runs[b]]
    # The experts' default and its name are one, and a solver means nothing where no policy asks it.
    path = tmp_path / "mine.toml"
    for of, more in (
        ("fastmoe", "\n[placement]\nsolver = 'eplb'"),
        ("lina", "\nbackward_chunks = 2\nexperts = 'grouped'"),
    ):
        path.write_text(read(of).path.read_text() + more)
        assert in_effect(resolve(read(str(path)))) == in_effect(resolve(read(of)))


def test_the_list_says_what_cannot_be_followed() -> None:
    listed = CliRunner().invoke(app, ["recipes", "list"])
    assert listed.exit_code == 0
    assert all(f"\n{name} " in f"\n{listed.output}" for name in names())
    for name, lacks in (("carpool", False), ("switch-finetune", True)):
        recipe = read(name)
        assert bool(recipe.missing) == lacks
        shown = CliRunner().invoke(app, ["recipes", "show", name])
        assert shown.exit_code == lacks and (lacks or shown.output == recipe.path.read_text())
    assert "REFUSED: this version lacks dropout:experts" in listed.output


def test_the_command_line_answers_without_pytorch() -> None:
    """Importing PyTorch takes seconds, and nobody should wait for it to read a page of text."""
    asked = ["--help", "place --help", "recipes list", "recipes show lina", "recipes show lin", "train --help-config"]
    asked += ["train training.max_stps=3", "train training.max_steps=many", "train moe.chunks=2", "train model.path=no"]
    program = f"""
import contextlib, sys
from carpool.cli import app
for asked in {asked!r}:
    with contextlib.suppress(SystemExit):
        app(asked.split(), standalone_mode=False)
    print("heavy:", asked, {{"torch", "numpy", "transformers"}} & set(sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=240)
    told = [line for line in done.stdout.splitlines() if line.startswith("heavy: ")]
    assert told == [f"heavy: {one} set()" for one in asked], done.stdout + done.stderr


def test_what_is_wrong_is_said(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="did you mean 'occult'"):
        load("ocult")
    path, head = tmp_path / "mine.toml", "[recipe]\nsystem='a'\nsource='b'\n"
    for text, message in {
        "[recipe": "recipe mine: not TOML",
        "[moe]\ntransport = 'dedup'": r"section \[recipe\] .* is missing",
        head + "mechanisms=['magic:x']": "no mechanism 'magic:x'; known are schedule:chunks",
        head + "mechanisms=['schedule:chunk']": "did you mean schedule:chunks?",
        head + "mechanisms=['lpt']": "expected a list of KIND:NAME",
        head + "mechanisms=[]\nmissing=['transport:dedup']": "transport:dedup is not missing any more",
        head + "mechanisms=[]\nmissing=['magic:x']": "cannot follow it, because it lacks magic:x",
        head + "mechanisms=[]\nyear=2023": r"\[recipe\] has no year",
        head + "mechanisms=[]\nsmall=1": "small = 1: expected a table",
        head + "mechanisms=[]\nkind='c'": "kind = 'c': expected one of placement, routing, schedule, memory, transport",
    }.items():
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            load(str(path))


def test_no_two_rows_are_the_same(trace: Trace) -> None:
    """One thing varies, and whatever does the same to it shares a row."""
    trace = replace(trace, expert_LTK=trace.expert_LTK[:1], layers=trace.layers[:1])
    for axis in get_args(Axis):
        recipes, refused = chosen(axis)
        assert {recipe.name for recipe in recipes} | set(refused) == set(names())
        found = compare(axis, recipes, trace, ranks=4, parts=3)
        assert len(found) > 1
        assert not [(a.name, b.name) for a, b in combinations(found, 2) if a.same_as(b)]
        if axis == "placement":
            assert all(one.rows <= 4 for one in found), "one row per rank at most, whatever a recipe's own transport"
        if axis == "transport":
            assert [one.name for one in found] == ["alltoall", "dedup and nvlink"]


@pytest.mark.parametrize(
    ("axis", "name", "why"),
    [
        ("placement", "lina", "its experts stay in order"),
        ("placement", "switch", "its router has another top-k, or drops"),
        ("transport", "gshard", "its router has another top-k, or drops"),
        ("placement", "occult-pruned", "it limits the routing, too"),
        ("transport", "eplb", "it leaves the transport to the machine"),
        ("routing", "mindspeed", "it leaves the routing as it is"),
        ("placement", "switch-finetune", "this version"),
        ("transport", "hybrid-ep", "its rows take several hops"),
        ("transport", "netmoe", "its sequences move between layers"),
        ("transport", "bigmac", "it is another model"),
    ],
)
def test_what_a_replay_cannot_tell_is_refused(axis: Axis, name: str, why: str, trace: Trace) -> None:
    assert why in chosen(axis)[1][name]
    with pytest.raises(ValueError, match=f"{name}.*: {why}"):
        chosen(axis, [name])
    if not read(name).missing:
        with pytest.raises(ValueError, match=f"{name} cannot be compared by {axis}: {why}"):
            compare(axis, [load(name)], trace, ranks=4)


def test_recipes_that_do_the_same_share_a_row(tmp_path: Path) -> None:
    again = with_setting(load("occult"), tmp_path, "moe", "transport", "alltoall")
    assert list(ways("placement", [load("occult"), again])) == ["experts in order", "occult, occult transport"]
    recipes = [load(name) for name in ("fastmoe", "lina", "occult")]
    found = ways("transport", recipes, placement=load("occult"))
    assert list(found) == ["alltoall", "dedup"]
    assert all(way.placement == resolve(load("occult")).placement for way in found.values())


def test_a_comparison_by_command(trace: Trace, tmp_path: Path) -> None:
    file, out = tmp_path / "trace.npz", tmp_path / "out"
    trace.subset(trace.sequence_T < trace.sequence_T[0] + 8).save(file)
    asked = ["recipes", "compare", "--trace", str(file), "--parts", "3", "--out", str(out)]
    done = CliRunner().invoke(app, [*asked, "--transport", "alltoall"])
    assert done.exit_code == 0, done.output
    assert "placement varies; in all rows: transport alltoall, routing as recorded" in done.output
    assert re.search(r"\blina(, [\w-]+)*: its experts stay in order", " ".join(done.output.split()))
    written = json.loads((out / "recipes.json").read_text())
    assert {row["rows"] for row in written["rows"]} == {8.0}, "one row for each of 8 choices"
    assert written["settings"]["vary"] == "placement" and "lina" in written["refused"]
    for wrong, why in (
        (["--vary", "transport", "--transport", "dedup"], "lets it differ"),
        (["--recipes", "lina"], "lina cannot be compared by placement"),
        (["--transport", "pigeon"], "'pigeon'"),
    ):
        refused = CliRunner().invoke(app, [*asked, *wrong])
        assert refused.exit_code == 1 and why in refused.output, refused.output


def test_replaying_is_deterministic_and_parts_are_checked(trace: Trace) -> None:
    first, second = (compare("placement", [load("smartmoe")], trace, ranks=4, parts=3) for _ in range(2))
    assert all(one.same_as(other) for one, other in zip(first, second, strict=True))
    with pytest.raises(ValueError, match="the trace has 32 sequences"):
        compare("placement", [load("smartmoe")], trace, ranks=4, parts=33)
    plain, pruned = compare("routing", [load("occult-pruned")], trace, ranks=4, parts=3, placement=load("occult"))
    assert pruned.rows <= 2 < plain.rows and pruned.lossy and not plain.lossy


@pytest.mark.parametrize("name", [name for name in names() if not read(name).missing])
def test_a_run_can_be_trained_with_it(name: str, tmp_path: Path) -> None:
    recipe = load(name)
    if placed := recipe.get("placement", "policy") == "place":
        with pytest.raises(ValueError, match=r"the file moe.layout puts them.*--solvers occult.*moe.layout = .FILE"):
            load_config(recipe.path, [])
    config = load_config(recipe.path, [f"moe.layout={tmp_path}/layouts.json"] if placed else [])
    for section, settings in recipe.settings.items():
        for key, value in settings.items():
            found = getattr(getattr(config, section), key)
            assert value.items() <= found.items() if isinstance(value, dict) else found == value
