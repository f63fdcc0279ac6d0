"""Every `carpool ...` command in the docs is one that the command line takes: command, options and settings exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import typer

from carpool.cli import app
from carpool.recipes import names, path_of
from carpool.train.config import load_config

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
OF_THE_PAST = ("log.md", "measurements.md")


def _commands() -> list[tuple[str, str]]:
    found = []
    for page in PAGES:
        if page.name in OF_THE_PAST:
            continue
        for block in re.findall(r"```bash\n(.*?)```", page.read_text(), flags=re.DOTALL):
            for line in block.replace("\\\n", " ").splitlines():
                if re.search(r"(^|\s)carpool\s", line.partition("#")[0]):
                    found.append((page.name, line.strip()))
    return found


@pytest.mark.parametrize(("page", "line"), _commands())
def test_command_is_taken(page: str, line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    for part in re.split(r"&&|>", line.partition("#")[0]):
        words = shlex.split(part)
        if "carpool" not in words:
            continue
        arguments = words[words.index("carpool") + 1 :]
        command, name = typer.main.get_command(app), "carpool"
        while hasattr(command, "commands"):
            name = arguments.pop(0)
            assert name in command.commands, f"{page}: there is no command {name!r}"
            command = command.commands[name]
        context = command.make_context(name, list(arguments))  # refuses options that do not exist
        overrides = [word for word in context.params.get("overrides") or () if "$" not in word]
        config = context.params.get("config")
        if config and str(config) in names():  # a recipe
            config = path_of(str(config))
        if overrides or config:
            load_config(config if config and config.is_file() else None, overrides)


def test_there_are_commands() -> None:
    assert len(_commands()) > 20
