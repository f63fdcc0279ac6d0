"""Fills pages of the reference from the code when the docs are built: settings, commands, and public names.

mkdocs calls `on_page_markdown` for each page (mkdocs.yml, `hooks`); a page that holds `<!-- configuration -->` or
`<!-- commands -->` gets the list in its place, and one that holds `<!-- others of carpool.hf -->` the names of that
module's `__all__` that the page does not have yet.
"""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # mkdocs loads this file by its path

_CELL = str.maketrans({"|": "\\|", "\n": " ", "<": "&lt;"})


def configuration() -> str:
    """A table of settings for each section."""
    from carpool.train.config import describe

    lines: list[str] = []
    section = ""
    for name, kind, default, description in describe():
        if name.split(".")[0] != section:
            section = name.split(".")[0]
            lines += ["", f"## [{section}]", "", "| key | type | default | meaning |", "|---|---|---|---|"]
        cells = (f"`{name}`", kind.translate(_CELL), f"`{default}`".translate(_CELL), description.translate(_CELL))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def commands() -> str:
    """A heading for each command, with what it says of itself and of its options."""
    import typer

    from carpool.cli import app

    return "\n".join(_command("carpool", typer.main.get_command(app), 1))


def others(module: str, page: str) -> str:
    """mkdocstrings' directives for the public names of a module that a page lacks."""
    names = [name for name in importlib.import_module(module).__all__ if not name.startswith("__")]
    has = set(re.findall(rf"^::: {re.escape(module)}\.(\w+)", page, flags=re.MULTILINE))
    return "\n\n".join(f"::: {module}.{name}" for name in names if name not in has)


def _command(name: str, command: Any, level: int) -> list[str]:
    lines = ["", f"{'#' * level} {name}", "", (command.help or "").replace("<", "&lt;"), ""] if level > 1 else []
    options = [one for one in command.params if one.name != "help"]
    if level > 1 and options:
        lines += ["| argument or option | default | meaning |", "|---|---|---|"]
        lines += [f"| {' | '.join(_option(one))} |" for one in options]
    for below, one in getattr(command, "commands", {}).items():
        lines += _command(f"{name} {below}", one, level + 1)
    return lines


def _option(one: Any) -> tuple[str, str, str]:
    is_option = one.param_type_name == "option"
    name = one.opts[0] if is_option else (one.metavar or one.name.upper())
    default = "" if one.default in (None, False, ()) or callable(one.default) else f"`{one.default}`".translate(_CELL)
    return f"`{name}`".translate(_CELL), default, (one.help or "").translate(_CELL)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """The hook of mkdocs."""
    for mark, make in (("<!-- configuration -->", configuration), ("<!-- commands -->", commands)):
        if mark in markdown:
            markdown = markdown.replace(mark, make())
    return re.sub(r"<!-- others of ([\w.]+) -->", lambda mark: others(mark[1], markdown), markdown)
