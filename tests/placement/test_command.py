"""`carpool place`, `trace` and `recipes` with Carpool's base dependencies alone."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from carpool.layout.layouts import Layouts
from tests.placement.synthetic import topics

# What extras install, and what others may bring along.
ABSENT = ("matplotlib", "transformers", "tokenizers", "safetensors", "mtkahypar", "packaging", "peft", "datasets",
          "pyarrow", "pandas", "scipy")  # fmt: skip


def carpool(folder: Path, *commands: str) -> subprocess.CompletedProcess[str]:
    """Commands, one after another in one process, in an environment without `ABSENT`."""
    program = f"""
import sys
from importlib.machinery import PathFinder

class Present(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in {ABSENT!r} else super().find_spec(name, path, target)

sys.meta_path = [Present if finder is PathFinder else finder for finder in sys.meta_path]
from carpool.cli import app
for command in {commands!r}:
    if code := app(command.split(), standalone_mode=False):
        sys.exit(code)
"""
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=240, cwd=folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds a small trace."""
    path = tmp_path_factory.mktemp("base")
    topics(16, 4, 512).save(path / "trace.npz")
    return path


def test_place_and_recipes(folder: Path) -> None:
    done = carpool(
        folder,
        "place trace.npz --ranks 4 --out placed",
        "place trace.npz --ranks 4 --nodes 2 --solvers lpt --transport hierarchical --out two",
        "recipes list",
        "recipes show lina",
        "recipes compare --trace trace.npz --parts 2 --recipes mindspeed,occult",
    )
    assert done.returncode == 0, done.stderr
    assert "no figure: it needs matplotlib" in done.stdout and "hypergraph is not available" in done.stdout
    assert all(layout.num_ranks == 4 for layout in Layouts.load(folder / "placed" / "layouts.json").values())
    assert {row["solver"] for row in json.loads((folder / "placed" / "place.json").read_text())["rows"]} >= {"search"}
    assert "transport dedup: one row per token" in done.stdout
    costs = [json.loads((folder / name / "place.json").read_text())["settings"]["cost"] for name in ("placed", "two")]
    assert [cost["transport"] for cost in costs] == ["dedup", "hierarchical"]
    assert not (folder / "placed" / "place.png").exists()
    for text in ("Switch Transformer", 'schedule = "chunks"', "wrote runs/recipes/recipes.json"):
        assert text in done.stdout, text


def test_a_trace_needs_transformers_and_says_so(folder: Path) -> None:
    done = carpool(folder, "trace model")
    assert done.returncode == 1 and "transformers" in done.stderr and "Traceback" not in done.stderr
