"""The pictures of where experts live: what moved, and which layouts are drawn."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from carpool.report.homes import PICTURES, pictures
from carpool.report.page import render
from carpool.report.read import Run, read_run
from tests.report.runs import Shape, run_info, train_lines, write_lines, write_run

SHAPE = Shape(steps=30, ranks=2, layers=2, experts=4, chosen=2, sampled=32)
START: dict[str, Any] = {"kind": "layout", "step": 0, "homes": [[0, 1], [2, 3]]}
MOVED: dict[str, Any] = {
    "kind": "layout",
    "step": 10,
    "layers": {
        "model.layers.0.mlp.experts": {"homes": [[0, 2], [1, 3]]},
        "model.layers.1.mlp.experts": {"homes": [[0, 1], [2, 3]]},
    },
}


def _run(path: Path, *layouts: dict[str, Any]) -> Run:
    write_lines(write_run(path, SHAPE, finished=False, sides=False), [*train_lines(SHAPE), *layouts])
    (path / "run.json").write_text(json.dumps(run_info(SHAPE)))
    return read_run(path)


def _picture(text: str) -> ElementTree.Element:
    return ElementTree.fromstring(text[text.index("<svg") :])


def _cells(svg: ElementTree.Element, kind: str) -> list[tuple[float, float]]:
    """Upper left corners of the cells of a kind."""
    paths = [one.attrib["d"] for one in svg.iter("path") if one.get("class") == kind]
    return [(float(x), float(y)) for d in paths for x, y in re.findall(r"M([\d.]+) ([\d.]+)", d)]


def test_what_moved(tmp_path: Path) -> None:
    (first, start), (second, moved) = pictures(_run(tmp_path, START, MOVED))
    assert (first, second) == ("At the start", "From step 11")
    svg = _picture(start)
    assert len(_cells(svg, "home")) == 8 and not _cells(svg, "moved")
    svg = _picture(moved)
    hover = json.loads(svg.attrib["data-hover"])
    assert hover["rows"] == ["layer 0", "layer 1"]
    assert hover["columns"] == ["rank 0", "rank 0", "rank 1", "rank 1"]
    assert hover["text"] == [
        *("expert 0", "expert 2, from rank 1", "expert 1, from rank 0", "expert 3"),
        *("expert 0", "expert 1", "expert 2", "expert 3"),
    ]
    lefts, top = hover["x"], hover["y"]
    corners = _cells(svg, "moved")
    for (x, y), (column, row) in zip(corners, [(1, 0), (2, 0)], strict=True):
        assert 0 <= x - lefts[column] < 3 and 0 <= y - top - row * hover["h"] < 3
    assert [text.text for text in svg.iter("text") if text.get("class") == "cell"] == list("02130123")
    # Both pictures have the same places, so that they can be compared.
    assert json.loads(_picture(start).attrib["data-hover"])["x"] == lefts


def test_only_layouts_that_differ_are_drawn_and_few(tmp_path: Path) -> None:
    again = {**MOVED, "step": 20}  # a restart writes the layout again
    assert [title for title, _ in pictures(_run(tmp_path, START, MOVED, again))] == ["At the start", "From step 11"]
    more = {"kind": "layout", "step": 20, "homes": [[0], [1], [2], [3]]}
    ((title, picture),) = pictures(_run(tmp_path, START, MOVED, more))
    assert title == "At the start"
    assert json.loads(_picture(picture).attrib["data-hover"])["columns"] == [f"rank {i}" for i in range(4)]
    layouts = [START, *({**(MOVED if i % 2 else START), "step": 2 * i} for i in range(1, 10))]
    titles = [title for title, _ in pictures(_run(tmp_path, *layouts))]
    assert len(titles) == PICTURES and titles[0] == "At the start" and titles[-1] == "From step 19"


def test_old_runs_and_single_ranks_have_no_picture(tmp_path: Path) -> None:
    assert pictures(_run(tmp_path / "old")) == []
    one = {"kind": "layout", "step": 0, "homes": [[0, 1, 2, 3]]}
    assert pictures(_run(tmp_path / "one", one)) == []
    assert "Where experts live" not in render(_run(tmp_path / "old"))
    assert "Where experts live" in render(_run(tmp_path / "new", START))
