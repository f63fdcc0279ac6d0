"""What a release needs: files that are not Python are packed, and versions agree. `make package` builds and checks both
archives."""

from __future__ import annotations

import fnmatch
import re
import tomllib
from pathlib import Path

import carpool

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_every_file_of_the_package_is_packed() -> None:
    patterns = PROJECT["tool"]["setuptools"]["package-data"]["*"]
    files = [path for name in ("carpool", "carpool_systems") for path in (ROOT / name).rglob("*") if path.is_file()]
    others = [path for path in files if path.suffix not in (".py", ".pyc")]
    assert {"page.html.j2", "py.typed", "carpool.toml", "lancet.toml"} <= {path.name for path in others}
    for path in others:
        assert any(fnmatch.fnmatch(path.name, pattern) for pattern in patterns), f"package-data has no {path.name}"
        assert (path.parent / "__init__.py").is_file(), f"{path.parent} is no package, so {path.name} is not packed"


def test_versions_agree() -> None:
    version = PROJECT["project"]["version"]
    citation = re.search(r"^version: (\S+)$", (ROOT / "CITATION.cff").read_text(), flags=re.MULTILINE)
    assert citation is not None
    assert version == carpool.__version__ == citation[1]
    assert f"## [{version}]" in (ROOT / "CHANGELOG.md").read_text()


def test_what_an_extra_asks_for_is_pinned() -> None:
    pinned = {
        re.sub(r"[-_.]+", "-", line.split("==")[0]).lower()
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if "==" in line
    }
    extras = PROJECT["project"]["optional-dependencies"].values()
    for requirement in [*PROJECT["project"]["dependencies"], *(one for extra in extras for one in extra)]:
        name = re.match(r"[\w.-]+", requirement)
        assert name is not None
        assert re.sub(r"[-_.]+", "-", name[0]).lower() in pinned, f"constraints.txt does not pin {requirement}"
