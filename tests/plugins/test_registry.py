"""Registries of plug-ins: what a script, a module that the environment names, and an entry point add."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from carpool.plugins import PLUGINS, Registry, unknown


class Walk:
    name = "walk"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def made() -> Registry[object]:
    return Registry("way", "carpool.tests.ways", {"walk": Walk})


def install(folder: Path, entries: str) -> None:
    info = folder / "outside-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: outside\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[carpool.tests.ways]\n{entries}\n")


def test_registered_by_a_script() -> None:
    ways = made()

    @ways.register
    class Swim:
        name = "swim"

    assert list(ways) == ["walk", "swim"] and ways["swim"] is Swim and len(ways) == 2
    ways.register(Swim)
    with pytest.raises(ValueError, match="way 'walk' is registered already"):
        ways.register(Swim, "walk")
    with pytest.raises(KeyError):
        ways["fly"]
    assert unknown(ways, "fly", "auto") == "way='fly' is not known; use one of auto, walk, swim"


def test_what_the_kind_lacks() -> None:
    def check(name: str, thing: object) -> None:
        if not hasattr(thing, "legs"):
            raise ValueError(f"way {name!r} has no attribute 'legs'")

    ways: Registry[object] = Registry("way", "carpool.tests.ways", {}, check)
    with pytest.raises(ValueError, match="no attribute 'legs'"):
        ways.register(Walk)
    assert "walk" not in ways

    walks: Registry[type[Walk]] = Registry("way", "carpool.tests.ways", {}, base=Walk)
    with pytest.raises(ValueError, match=r"way 'int' must be a subclass of .*\.Walk, not <class 'int'>"):
        walks.register(int)
    with pytest.raises(ValueError, match="way 'stroll': its class has the name 'walk'; give both the same name"):
        walks.register(Walk, "stroll")
    assert walks.register(Walk) is Walk and list(walks) == ["walk"]


def test_entry_points_are_imported_when_asked_for(folder: Path) -> None:
    (folder / "outside_good.py").write_text("class Ride:\n    name = 'ride'\n")
    (folder / "outside_bad.py").write_text("import no_such_module\n")
    install(folder, "ride = outside_good:Ride\nbroken = outside_bad:Broken")
    ways = made()
    assert list(ways) == ["walk", "broken", "ride"] and "ride" in ways and len(ways) == 3
    assert "outside_good" not in sys.modules and "outside_bad" not in sys.modules
    assert ways["ride"].__name__ == "Ride"  # type: ignore[attr-defined]
    with pytest.raises(
        ImportError, match=r"way 'broken' of outside .outside_bad:Broken. cannot be imported: No module"
    ):
        ways["broken"]


def test_modules_that_the_environment_names(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "outside_named.py").write_text("from pathlib import Path\nPath(__file__ + '.log').open('a').write('x')\n")
    log = folder / "outside_named.py.log"
    monkeypatch.setenv(PLUGINS, "outside_named, ")
    assert "walk" in made() and "walk" in made() and log.read_text() == "x"
    monkeypatch.setenv(PLUGINS, "outside_missing")
    with pytest.raises(ImportError, match=r"CARPOOL_PLUGINS names the module 'outside_missing'.*PYTHONPATH"):
        list(made())
