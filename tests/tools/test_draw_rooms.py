"""Tools: the picture of packages sees every import that can run and refuses circles, file names occur once, and random
weights have the shapes of published checkpoints."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tools.draw_rooms import (
    arrows,
    file_circles,
    folder_circles,
    imports,
    problems,
    strangers,
)
from tools.random_checkpoint import SHARD_GB, plan, write

SOURCE = """
from typing import TYPE_CHECKING
import carpool.layout
from carpool import moe
from carpool.ride.function import ride
if TYPE_CHECKING:
    from carpool.hf import rides
def later():
    from carpool.train.run import loop
"""


def test_every_import_that_runs_counts() -> None:
    assert list(imports(SOURCE)) == ["carpool.layout", "carpool.moe", "carpool.ride.function", "carpool.train.run"]


def test_arrows_up_and_circles_are_refused(tmp_path: Path) -> None:
    files = {
        "layout/a.py": "from carpool.hf import b",
        "hf/b.py": "from carpool.layout import a",
        "routing/c.py": "from carpool.transport import d",
        "transport/d.py": "from carpool.routing import c",
        "attic/e.py": "from carpool.layout import a",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    wrong = problems(arrows(tmp_path), frozenset({("cli/gone.py", "hf")}))
    assert wrong == [
        "the room 'attic' has no place in ORDER",
        "layout imports hf, which is above it: layout/a.py",
        "a circle: hf -> layout -> hf",
        "a circle: routing -> transport -> routing",
        "the exception ('cli/gone.py', 'hf') is not needed any more: delete it",
    ]
    found = {("layout", "hf"): ["layout/a.py"], ("hf", "layout"): ["hf/b.py"]}
    assert problems(found, frozenset({("layout/a.py", "hf")})) == []


def test_no_room_below_the_layer_imports_transformers(tmp_path: Path) -> None:
    for name in ("hf/a.py", "ride/b.py"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text("def later():\n    from transformers.trainer import Trainer")
    assert strangers(tmp_path) == ["ride/b.py imports transformers.trainer"]


def test_plug_ins_of_published_systems_are_imported_by_nobody(tmp_path: Path) -> None:
    (tmp_path / "cli").mkdir()
    (tmp_path / "cli" / "a.py").write_text("def later():\n    from carpool_systems.planners import ALPA")
    assert strangers(tmp_path) == ["cli/a.py imports carpool_systems.planners"]


def test_circles_of_files_are_refused(tmp_path: Path) -> None:
    files = {
        "ride/__init__.py": "from carpool.ride.a import go",
        "ride/a.py": "from carpool.ride import b",
        "ride/b.py": "def later():\n    from carpool.ride.a import go",
    }
    (tmp_path / "ride").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert file_circles(tmp_path) == ["a circle: ride/a.py -> ride/b.py -> ride/a.py"]


def test_circles_of_folders_in_a_room_are_refused(tmp_path: Path) -> None:
    files = {
        "train/run/loop.py": "from carpool.train.steps.graphs import capture\nfrom carpool.train.shared import name",
        "train/steps/graphs.py": "",
        "train/steps/room/rows.py": "def later():\n    from carpool.train.run import state",
        "train/run/state.py": "",
        "train/shared.py": "from carpool.train.run import state",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert file_circles(tmp_path) == []
    assert folder_circles(tmp_path) == ["a circle of folders: train/run -> train/steps -> train/run"]


PACKAGE = Path(__file__).parents[2] / "carpool"
SEVERAL = {"__init__.py", "__main__.py", "base.py", "options.py", "kernel.py"}
"""Names that say what a file is of its folder."""


def repeated(names: list[str]) -> set[str]:
    return {name for name, count in Counter(names).items() if count > 1} - SEVERAL


def test_file_names_occur_once() -> None:
    found = repeated([path.name for path in PACKAGE.rglob("*.py")])
    assert not found, "rename what is new"


def test_what_is_found() -> None:
    assert repeated(["plan.py", "plan.py", "base.py", "base.py", "x.py"]) == {"plan.py"}


# total_size, number of tensors and files of the published model.safetensors.index.json.
PUBLISHED = {"qwen3-30b-a3b": (61_064_245_248, 18_867, 16), "olmoe-1b-7b": (13_838_323_712, 3_219, 3)}


@pytest.mark.parametrize("name", ["olmoe-1b-7b", pytest.param("qwen3-30b-a3b", marks=pytest.mark.slow)])
def test_sizes_and_files_are_the_published_ones(name: str) -> None:
    config, layout = plan(name, None, SHARD_GB[name])
    tensors = {name: entry for file in layout.files.values() for name, entry in file.items()}
    assert (layout.bytes, len(tensors), len(layout.files)) == PUBLISHED[name]
    assert {entry.dtype for entry in tensors.values()} == {torch.bfloat16}
    last = f"model.layers.{config.num_hidden_layers - 1}.mlp.experts.{config.num_experts - 1}.down_proj.weight"
    assert tensors[last].shape == (
        config.hidden_size,
        getattr(config, "moe_intermediate_size", config.intermediate_size),
    )


def test_a_cut_loads_and_depends_on_the_seed_alone(tmp_path: Path) -> None:
    sizes = {
        "hidden_size": 32,
        "moe_intermediate_size": 16,
        "num_experts": 4,
        "vocab_size": 64,
        "head_dim": 8,
        "num_experts_per_tok": 2,
    }
    for folder, seed in (("a", 0), ("b", 0), ("c", 1)):
        config, layout = plan({"from": "qwen3-30b-a3b", **sizes}, 2, 2e-5)
        write(tmp_path / folder, config, layout, seed, lambda _: None)
    names = {path.name for path in (tmp_path / "a").iterdir()}
    assert names == {"config.json", "model.safetensors.index.json", *layout.files}
    weights = {folder: load_file(tmp_path / folder / next(iter(layout.files))) for folder in "abc"}
    assert all(torch.equal(weights["b"][name], value) for name, value in weights["a"].items())
    assert not all(torch.equal(weights["c"][name], value) for name, value in weights["a"].items())
    loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "a", dtype="auto", output_loading_info=True)
    model, info = loaded
    assert not info["missing_keys"] and not info["unexpected_keys"] and model.dtype == torch.bfloat16
    assert model.model.norm.weight.eq(1).all() and 0.018 < model.lm_head.weight.float().std() < 0.022
    assert json.loads((tmp_path / "a" / "config.json").read_text())["num_hidden_layers"] == 2
    with pytest.raises(FileExistsError, match="is not empty"):
        write(tmp_path / "a", config, layout, 0, lambda _: None)
