"""A solver, a policy and a recipe from outside the package, each in one file, are known to all commands."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from carpool.cli import app
from carpool.layout import ExpertLayout
from carpool.layout.topology import Topology
from carpool.placement.solvers import SOLVERS, Problem, register, solve
from carpool.recipes import FOLDERS, names, path_of, read
from tests.placement.synthetic import layer, topics

SOLVER = """
import numpy as np
from carpool.placement.solvers import register

@register
def backwards(problem):
    return problem.layout(np.repeat(np.arange(problem.num_ranks), problem.fill_W)[::-1])
"""
RECIPE = """
[recipe]
system = "Backwards"
source = "a plug-in"
mechanisms = ["policy:migrate", "solver:backwards"]

[placement]
every = 10
policy = "migrate"
solver = "backwards"
"""

POLICY = """
from carpool.layout import ExpertLayout
from carpool.placement.policies import POLICIES, Policy

def deal(load_E, layout, model, history_SE):
    ranks = layout.num_ranks
    return ExpertLayout(tuple(tuple(range(rank, layout.num_experts, ranks)) for rank in range(ranks)))

POLICIES.register(Policy(deal), "deal")
"""
DEALING = """
[recipe]
system = "Dealing"
source = "a plug-in"
mechanisms = ["policy:deal"]

[placement]
every = 10
policy = "deal"
"""


def carpool(folder: Path, *commands: str, plugin: str = "backwards") -> list[str]:
    """The output of each command, in one process that knows the plug-in."""
    program = f"""
import sys
from carpool.cli import app
for command in {commands!r}:
    if code := app(command.split(), standalone_mode=False):
        sys.exit(code)
    print("=====")
"""
    known = {"CARPOOL_PLUGINS": plugin, FOLDERS: str(folder / "recipes"), "COLUMNS": "200"}
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, **known, "PYTHONPATH": path},
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.split("=====\n")


def test_commands_know_them(tmp_path: Path) -> None:
    (tmp_path / "backwards.py").write_text(SOLVER)
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "reverse.toml").write_text(RECIPE)
    topics(16, 4, 256).save(tmp_path / "trace.npz")
    listed, shown, *_ = carpool(
        tmp_path,
        "recipes list",
        "recipes show reverse",
        "place trace.npz --ranks 2 --out placed --solvers backwards,backwards+search",
        "recipes compare --trace trace.npz --parts 2 --recipes reverse --out compared",
    )
    assert "reverse" in listed and "Backwards (a plug-in)" in listed
    assert shown == RECIPE
    rows = json.loads((tmp_path / "placed" / "place.json").read_text())["rows"]
    assert [row["solver"] for row in rows] == ["backwards", "backwards+search"] and rows[0]["ranks_per_token"] > 0
    compared = json.loads((tmp_path / "compared" / "recipes.json").read_text())["rows"]
    assert [row["name"] for row in compared] == ["experts in order", "reverse"]


def test_a_policy_decides_where_experts_go(tmp_path: Path) -> None:
    (tmp_path / "dealing.py").write_text(POLICY)
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "dealing.toml").write_text(DEALING)
    topics(16, 4, 256).save(tmp_path / "trace.npz")
    listed, *_ = carpool(
        tmp_path,
        "recipes list",
        "recipes compare --trace trace.npz --parts 3 --recipes dealing --out compared",
        plugin="dealing",
    )
    assert "policy:deal" in listed
    rows = {row["name"]: row for row in json.loads((tmp_path / "compared" / "recipes.json").read_text())["rows"]}
    # From contiguous homes each of 4 ranks keeps one of its 4 experts; after that nothing moves: 12 in 2 looks.
    assert rows["experts in order"]["moved"] == 0 and rows["dealing"]["moved"] == 6
    settings = ["parallelism.num_ranks=2", "placement.every=10", "placement.policy=deal"]
    refused = CliRunner().invoke(app, ["train", "--dry-run", *settings])
    assert refused.exit_code == 1 and "placement.policy = 'deal'" in refused.stderr, "its policy is not there"


def test_recipes_of_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.toml").write_text(RECIPE)
    monkeypatch.setenv(FOLDERS, str(tmp_path))
    assert "mine" in names("placement") and read("mine").system == "Backwards"
    assert path_of("mine") == tmp_path / "mine.toml"
    refused = CliRunner().invoke(app, ["train", "--config", "mine", "--dry-run"])
    assert refused.exit_code == 1 and "placement.solver = 'backwards'" in refused.stderr, "its solver is not there"
    (tmp_path / "occult.toml").write_text(RECIPE)
    with pytest.raises(ValueError, match="two recipes are called occult"):
        names()
    monkeypatch.setenv(FOLDERS, str(tmp_path / "nowhere"))
    with pytest.raises(ValueError, match=f"{FOLDERS} names .*nowhere, which is no folder"):
        names()


@pytest.mark.parametrize(
    ("layout", "why"),
    [
        (None, "must return an ExpertLayout, not a NoneType"),
        (ExpertLayout.contiguous(8, 4), "found a layout of 8 experts on 4 ranks, not of 16 on 4"),
        (ExpertLayout(((0, 1, 2, 3, 4), (5, 6, 7), tuple(range(8, 12)), tuple(range(12, 16)))), "own .4, 4, 4, 4. at"),
    ],
)
def test_a_layout_that_does_not_fit_is_refused(layout: ExpertLayout, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(problem: Problem) -> ExpertLayout:
        return layout

    monkeypatch.setattr(SOLVERS, "_things", {**SOLVERS._things})
    register(wrong)
    with pytest.raises(ValueError, match=f"solver 'wrong' .*{why}"):
        solve("wrong", layer(16, 4, 64), Topology.even(4))


def test_a_solver_must_be_a_function_of_a_usable_name() -> None:
    for thing, name in (("text", "mine"), (solve, "mine+search"), (solve, "a,b")):
        with pytest.raises(ValueError, match="must be a function, and its name without"):
            register(thing, name)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="solver 'lpt' is registered already"):
        register(lambda problem: problem.layout(problem.capacity_W), "lpt")
