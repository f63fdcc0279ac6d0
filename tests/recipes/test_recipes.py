"""Recipes: complete or refused, and each of their mechanisms does something on real routing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import carpool.recipes.mechanisms
from carpool.cli import app
from carpool.layout import ExpertLayout
from carpool.moe import MoE, slots_kept
from carpool.placement.trace import Trace
from carpool.recipes import Recipe, about, load, names, path_of
from carpool.recipes.mechanisms import MECHANISMS, Mechanism, missing
from carpool.recipes.replay import Outcome, compare
from tests.ranks import mesh

TRACE = Path(__file__).parents[2] / "docs/traces/e64-noaux-1615.npz"
# What makes a system that system; a recipe may not lose any of it.
SYSTEMS = {
    "occult": {"transport:dedup", "policy:place", "solver:occult"},
    "occult-pruned": {"transport:dedup", "policy:place", "solver:occult", "limit:score", "freeze:dense"},
    "eplb": {"policy:migrate", "solver:eplb", "predictor:ema"},
    "fastermoe-shadow": {"transport:alltoall", "policy:shadow", "predictor:last"},
    "prophet": {"transport:alltoall", "policy:subset", "predictor:last", "prefetch:blockwise"},
    "smartmoe": {"transport:alltoall", "policy:pick", "predictor:ema"},
    "flexmoe": {"transport:alltoall", "policy:expand_shrink", "predictor:last"},
    "mindspeed": {"transport:alltoall", "policy:lpt_cv", "predictor:ema"},
}
WITHOUT: Mapping[str, tuple[str, str, Any]] = {
    "solver": ("placement", "solver", "contiguous"),
    "policy": ("placement", "policy", None),
    "limit": ("moe", "limit_ranks", None),
}


@pytest.fixture(scope="module")
def trace() -> Trace:
    """Two layers of a real trace."""
    whole = Trace.load(TRACE)
    return replace(whole, expert_LTK=whole.expert_LTK[3:5], layers=whole.layers[3:5], weight_LTK=None)


def with_setting(recipe: Recipe, section: str, key: str, value: Any) -> Recipe:
    changed = {**recipe.settings.get(section, {}), key: value}
    kept = {k: v for k, v in changed.items() if v is not None}
    return replace(recipe, settings={**recipe.settings, section: kept})


def measured(outcome: Outcome) -> tuple[float, ...]:
    return outcome.rows, outcome.remote, outcome.load, outcome.replicas, outcome.moved


def test_the_recipes_are_there_and_of_these_parts() -> None:
    assert set(SYSTEMS) == set(names("placement")) - {"carpool"}
    for name in names():
        recipe = about(name)
        assert recipe.system and recipe.source and recipe.mechanisms
        assert SYSTEMS.get(name, set()) <= set(recipe.mechanisms)


@pytest.mark.parametrize("name", names())
def test_a_recipe_loads_if_nothing_is_missing(name: str) -> None:
    lacking = [mechanism for mechanism in about(name).mechanisms if missing(mechanism)]
    if not lacking:
        assert load(name) == about(name)
        return
    with pytest.raises(ValueError, match=f"recipe {name}: this version cannot follow it") as refused:
        load(name)
    for mechanism in lacking:
        assert f"{mechanism} ({missing(mechanism)})" in str(refused.value)


@pytest.mark.parametrize("name", names())
def test_a_recipe_refuses_if_a_mechanism_is_missing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for mechanism in about(name).mechanisms:
        gone = replace(MECHANISMS[mechanism], setting="", code="carpool.nowhere")
        with monkeypatch.context() as patch:
            patch.setattr(carpool.recipes.mechanisms, "MECHANISMS", {**MECHANISMS, mechanism: gone})
            with pytest.raises(ValueError, match=rf"lacks .*{mechanism} \(there is no carpool.nowhere\)"):
                load(name)


@pytest.mark.parametrize("name", names())
def test_a_recipe_refuses_if_its_settings_do_not_choose_a_mechanism(name: str, tmp_path: Path) -> None:
    path, text = tmp_path / "mine.toml", path_of(name).read_text()
    for mechanism in about(name).mechanisms:
        if not (setting := MECHANISMS[mechanism].setting):
            continue
        key = setting.rpartition(".")[2]
        path.write_text("\n".join(line for line in text.splitlines() if not line.startswith(f"{key} =")))
        with pytest.raises(ValueError, match=f"{mechanism} is of the system, but not what its {setting} chooses"):
            about(str(path))


def test_the_list_says_what_cannot_be_followed() -> None:
    listed = CliRunner().invoke(app, ["recipes", "list"])
    assert listed.exit_code == 0
    for name in names():
        refused = any(missing(mechanism) for mechanism in about(name).mechanisms)
        assert f"\n{name} " in f"\n{listed.output}" and (f"REFUSED: recipe {name}:" in listed.output) == refused
        shown = CliRunner().invoke(app, ["recipes", "show", name])
        assert shown.exit_code == refused and (refused or shown.output == path_of(name).read_text())


def test_what_is_missing_is_looked_up() -> None:
    for there in (
        Mechanism("moe.transport", "dedup"),
        Mechanism("model.config.hidden_size", 8),
        Mechanism("", code="carpool.routing:Router"),
        Mechanism("", code="carpool.transport.nvlink.dispatch_kernel"),
    ):
        assert there.missing() is None
    for gone, why in {
        Mechanism("moe.magic"): "there is no setting moe.magic",
        Mechanism("magic.transport"): "there is no setting magic.transport",
        Mechanism("moe.transport", "carrier-pigeon"): "moe.transport takes no 'carrier-pigeon'",
        Mechanism("moe.chunks", 0): "moe.chunks takes no 0",
        Mechanism("", code="carpool.magic"): "there is no carpool.magic",
        Mechanism("moe.chunks", 2, code="carpool.routing:Magic"): "there is no Magic in carpool.routing",
    }.items():
        assert gone.missing() == why


def test_what_is_wrong_is_said(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="did you mean 'occult'"):
        load("ocult")
    path = tmp_path / "mine.toml"
    for text, message in {
        "[recipe": "recipe mine: not TOML",
        "[moe]\ntransport = 'dedup'": r"section \[recipe\] .* is missing",
        "[recipe]\nsystem='a'\nsource='b'\nmechanisms=['magic:x']": "no mechanism 'magic:x'; known are transport",
        "[recipe]\nsystem='a'\nsource='b'\nmechanisms=['solver:lpd']": "did you mean solver:lpt?",
        "[recipe]\nsystem='a'\nsource='b'\nmechanisms=['solver:lpt']": "not what its placement.solver chooses",
        "[recipe]\nsystem='a'\nsource='b'\nmechanisms=[]\nyear=2023": r"\[recipe\] has no year",
        "[recipe]\nsystem='a'\nsource='b'\nmechanisms=[]\nkind='c'": "kind = 'c': expected one of placement, schedule",
    }.items():
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            load(str(path))


def waited_for_less(prefetch: bool) -> int:
    """Bytes of replicas that were under way before their layer asked for them, in two layers on four ranks."""
    layout = ExpertLayout.contiguous(8, 4).with_replicas([(0, 1), (5, 3)])
    layers = torch.nn.Sequential(*(MoE(8, 8, 8, 2, ep_mesh=mesh((4,), ("ep",)), layout=layout) for _ in range(2)))
    with slots_kept(layers, prefetch):
        layers(torch.ones(3, 8))
    return sum(layer.filler.bytes_ahead for layer in layers)


@pytest.mark.parametrize("name", SYSTEMS)
def test_each_mechanism_changes_bytes_load_or_layout(name: str, trace: Trace, request: pytest.FixtureRequest) -> None:
    recipe = load(name)
    changed: list[Recipe] = []
    for mechanism in recipe.mechanisms:
        kind, _, what = mechanism.partition(":")
        if kind == "freeze":
            continue  # no routing tells: tests/train/test_limit.py
        if kind == "prefetch":  # no routing tells either
            ranks, chosen = request.getfixturevalue("ranks"), recipe.get("placement", "prefetch")
            assert sum(ranks(waited_for_less, chosen)) > 0 == sum(ranks(waited_for_less, not chosen))
            continue
        if kind == "transport":
            other = ("moe", "transport", "dedup" if what == "alltoall" else "alltoall")
        elif kind == "predictor":
            other = ("placement", "predictor", "last" if what == "ema" else "ema")
        else:
            other = WITHOUT[kind]
        changed.append(replace(with_setting(recipe, *other), name=f"without {mechanism}"))
    _, whole, *without = compare([recipe, *changed], trace, ranks=4, nodes=2, parts=6)
    for one in without:
        assert measured(one) != measured(whole), one.recipe


def test_replaying_is_deterministic_and_parts_are_checked(trace: Trace) -> None:
    first, second = (compare([load("flexmoe")], trace, ranks=4, parts=3) for _ in range(2))
    assert [measured(one) for one in first] == [measured(one) for one in second]
    with pytest.raises(ValueError, match="the trace has 32 sequences"):
        compare([load("flexmoe")], trace, ranks=4, parts=33)


def test_a_limit_is_kept_and_called_lossy(trace: Trace) -> None:
    plain, pruned = compare([load("occult-pruned")], trace, ranks=4, parts=3)
    assert pruned.rows <= 2 < plain.rows and pruned.lossy and not plain.lossy


@pytest.mark.parametrize("name", names())
def test_a_run_can_be_trained_with_it(name: str, tmp_path: Path) -> None:
    from carpool.train.config import load_config

    if any(missing(mechanism) for mechanism in about(name).mechanisms):
        with pytest.raises(ValueError, match=r"unknown key|expected one of"):
            load_config(path_of(name), [])
        return
    recipe = load(name)
    if placed := recipe.get("placement", "policy") == "place":
        with pytest.raises(ValueError, match=r"needs a layout: moe.layout=FILE.*--solvers occult"):
            load_config(path_of(name), [])
    config = load_config(path_of(name), [f"moe.layout={tmp_path}/layouts.json"] if placed else [])
    for section, settings in recipe.settings.items():
        for key, value in settings.items():
            found = getattr(getattr(config, section), key)
            assert value.items() <= found.items() if isinstance(value, dict) else found == value
