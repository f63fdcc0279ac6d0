"""The tool that draws the rooms sees every import that can run, and refuses circles and imports of rooms above."""

from __future__ import annotations

import re
from pathlib import Path

from tools.draw_rooms import (
    EXCEPTIONS,
    PICTURE,
    arrows,
    draw,
    file_circles,
    folder_circles,
    imports,
    problems,
    strangers,
)

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


def test_the_rooms_are_in_order() -> None:
    assert problems(arrows()) + file_circles() + folder_circles() + strangers() == []
    assert not EXCEPTIONS


def test_the_committed_picture_is_of_these_rooms() -> None:
    rooms = {room for pair in arrows() for room in pair}
    assert set(re.findall(r">(\w+)</text>", PICTURE.read_text())) == rooms, "run python -m tools.draw_rooms"


def test_the_picture_has_every_room() -> None:
    found = arrows()
    picture = draw(found)
    for room in {room for pair in found for room in pair}:
        assert f">{room}</text>" in picture
