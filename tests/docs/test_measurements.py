"""The JSON beside the docs holds what was measured, and nothing that only the machine of the measurement knows."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.script import write_results
from carpool.bench.result_files import Result, publish

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "docs").rglob("*.json"))
KEYS = {"output_dir", "out", "hostname", "user", "username", "pid", "cwd", "home", "tmp", "tmpdir"}
FOLDERS = ("/tmp", "/home", "/root", "/work", "/Users", "/var", "/mnt", "~/")


def of_one_machine(value: Any, where: str = "") -> Iterator[str]:
    """Each place in the values whose key or text names a host, a user, a process or an absolute folder."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if key in KEYS:
                yield f"{where}/{key}"
            yield from of_one_machine(inner, f"{where}/{key}")
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from of_one_machine(inner, f"{where}/{index}")
    elif isinstance(value, str) and any(
        word.partition("=")[2].startswith(FOLDERS) or word.startswith(FOLDERS) for word in value.split()
    ):
        yield f"{where}: {value}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_files_know_no_machine(path: Path) -> None:
    found = list(of_one_machine(json.loads(path.read_text())))
    assert not found, f"{path.relative_to(ROOT)} holds what only its machine knows; drop it: {found[:5]}"


def test_there_are_files() -> None:
    assert len(FILES) > 20


def test_what_is_found() -> None:
    told = {"a": [{"output_dir": "x"}, {"b": "carpool train --out=/tmp/x"}], "environment": {"hostname": "vm"}, "c": 1}
    assert [place.partition(":")[0] for place in of_one_machine(told)] == [
        "/a/0/output_dir", "/a/1/b", "/environment/hostname",
    ]  # fmt: skip


def test_scripts_write_no_machine(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    write_results(Namespace(out=out, work=tmp_path, steps=3), torch.device("cpu"), results=[])
    told = json.loads(out.read_text())
    assert told["settings"] == {"steps": 3} and told["environment"]["torch"] == torch.__version__
    assert not list(of_one_machine(told))


def test_commands_write_no_machine(tmp_path: Path) -> None:
    settings = {"out": str(tmp_path), "json_only": True, "ranks": 2}
    result = Result.of("now", "carpool bench", settings, torch.device("cpu"), 2, [])
    publish(result, "name", lambda result: None, None)
    told = json.loads((tmp_path / "name.json").read_text())
    assert told["settings"] == {"json_only": True, "ranks": 2}
    assert not list(of_one_machine(told)) and asdict(result)["settings"] == settings
