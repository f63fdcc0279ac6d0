"""Layouts of a whole model, and their files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from carpool.layout import ExpertLayout
from carpool.layout.layouts import Layouts

PLAIN = ExpertLayout.contiguous(4, 2)
OTHER = ExpertLayout(((0, 2), (1, 3))).with_replicas([(0, 1)])


def test_one_layout_per_layer(tmp_path: Path) -> None:
    layouts = Layouts({"a.experts": PLAIN, "b.experts": OTHER}, {"solver": "search"})
    assert layouts["b.experts"] is OTHER and list(layouts) == ["a.experts", "b.experts"] and layouts.num_ranks == 2
    assert "c" not in layouts and layouts.get("c") is None and layouts.same is None
    layouts.save(tmp_path / "l.json")
    again = Layouts.load(tmp_path / "l.json")
    assert again == layouts and hash(again) == hash(layouts) and again.about == {"solver": "search"}
    assert set(json.loads((tmp_path / "l.json").read_text())) == {"layers", "about"}
    changed = layouts.with_layers({"a.experts": OTHER})
    assert changed != layouts and changed["a.experts"] == OTHER and layouts["a.experts"] == PLAIN


def test_one_layout_for_all_layers(tmp_path: Path) -> None:
    OTHER.save(tmp_path / "one.json")
    layouts = Layouts.load(tmp_path / "one.json")
    assert layouts == Layouts(OTHER) and layouts["anything"] == OTHER == layouts.same and "x" in layouts
    assert len(layouts) == 0 and layouts.num_ranks == 2
    layouts.save(tmp_path / "two.json")
    assert ExpertLayout.load(tmp_path / "two.json") == OTHER


def test_an_unknown_layer_is_named_with_the_file(tmp_path: Path) -> None:
    Layouts({"model.layers.0.mlp.experts": PLAIN}).save(tmp_path / "l.json")
    message = r"l\.json: no layout for layer 'model.layers.1.mlp.experts'.*'model.layers.0.mlp.experts'"
    with pytest.raises(ValueError, match=message):
        Layouts.load(tmp_path / "l.json")["model.layers.1.mlp.experts"]


def test_layers_share_their_ranks() -> None:
    with pytest.raises(ValueError, match="a has 2 and b has 4"):
        Layouts({"a": PLAIN, "b": ExpertLayout.contiguous(4, 4)})
    with pytest.raises(ValueError, match="at least one layer"):
        Layouts({})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "not an expert layout"),
        ("[1]", "not an expert layout"),
        ("{}", "not an expert layout"),
        ('{"layers": []}', "must map names"),
        ('{"layers": {}}', "at least one layer"),
        ('{"layers": {"x": {"homes": [[0], [0]]}}}', "layer x: .*exactly once"),
        ('{"layers": {"x": {"slots": [[0]]}}}', "layer x is not an expert layout"),
        ('{"layers": {"x": [[0]]}}', "layer x is not an expert layout"),
        ('{"layers": {"x": {"homes": [[0]]}, "y": {"homes": [[0], [1]]}}}', "x has 1 and y has 2"),
        ('{"homes": [[0, 1], [1]]}', "exactly once"),
        ('{"homes": [[0, "a"]]}', "not an expert layout"),
        ('{"homes": [[0]], "layers": {}}', "both"),
        ('{"homes": [[0]], "about": 3}', '"about" must be an object'),
    ],
)
def test_a_corrupt_file_is_named(content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "l.json").write_text(content)
    with pytest.raises(ValueError, match=message) as error:
        Layouts.load(tmp_path / "l.json")
    assert "l.json" in str(error.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cannot read .*nowhere\.json"):
        Layouts.load(tmp_path / "nowhere.json")
