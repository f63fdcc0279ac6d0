"""A file's name says which file is meant: it occurs once in carpool/."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

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
