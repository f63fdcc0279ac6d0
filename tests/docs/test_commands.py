"""Every command in the docs is one that exists: `carpool ...`, `python -m benchmarks.X`, `python -m tools.X`.

Blocks of commands and commands within sentences: the command, its options and its settings are parsed, nothing runs. In
docs/log.md, which is dated, a command that is gone may be named as a file, with the commit that still has it.
"""

from __future__ import annotations

import importlib
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

from carpool.cli import app
from carpool.recipes import names, path_of
from carpool.train.config import load_config
from tests.bench.started import options_of

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").glob("*.md")),
    ROOT / "docs/traces/README.md",
]
COMMAND = re.compile(r"(^|\s)(carpool\s+[a-z]|-m\s+(benchmarks|tools)\.|benchmarks\.\w+\s+--)")
# What looks like a command and is none.
NO_COMMANDS = {"carpool over alltoall"}
# Shown with the error that it ends with.
REFUSED = {"carpool train parallelism.num_ranks=8 parallelism.tp_size=2 parallelism.data_parallel=zero1 --dry-run"}
# What stands for a number or a path.
STAND_INS = {"N": "8", "TOKENS": "1M", "model.path=...": "model.path=models/a", "data.train=...": "data.train=a.jsonl"}


def _blocks(text: str) -> Iterator[str]:
    for language, block in re.findall(r"^```(bash|console)\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE):
        for line in block.replace("\\\n", " ").splitlines():
            if language == "bash" or line.startswith("$ "):
                yield line.removeprefix("$ ").partition(" #")[0].strip()
    for line in re.findall(r"^    ((?:python|torchrun|carpool) .*)$", text, flags=re.MULTILINE):
        yield line.partition(" #")[0].strip()


def _sentences(text: str) -> Iterator[str]:
    text = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    for span in re.findall(r"(?<!`)`([^`]+)`(?!`)", text):
        yield " ".join(span.split())


def _commands() -> list[tuple[str, str]]:
    found = dict.fromkeys(
        (page.relative_to(ROOT).as_posix(), line)
        for page in PAGES
        for line in (*_blocks(page.read_text()), *_sentences(page.read_text()))
        if COMMAND.search(line) and line not in NO_COMMANDS
    )
    return list(found)


def check_command(line: str) -> None:
    """AssertionError or ValueError for a command that cannot be given."""
    for part in re.split(r"&&|>|;", line):
        words = [STAND_INS.get(word, word) for word in shlex.split(part) if word != "..."]
        modules = [word for word in words if re.fullmatch(r"(benchmarks|tools)\.\w+", word)]
        for module in modules:
            _check_script(module, words[words.index(module) + 1 :])
        if "carpool" in words and (not modules or "--no-python" in words):
            _check_carpool(words[words.index("carpool") + 1 :])


def _check_carpool(arguments: list[str]) -> None:
    command, name = typer.main.get_command(app), "carpool"
    while hasattr(command, "commands"):
        if not arguments:
            return  # a sentence that names a group of commands
        name = arguments.pop(0)
        assert name in command.commands, f"there is no command {name!r}"
        command = command.commands[name]
    options = {option for parameter in command.params for option in parameter.opts}
    if not arguments or (len(arguments) == 1 and arguments[0] in options):
        return  # a sentence that names the command, or an option of it
    try:
        context = command.make_context(name, list(arguments))
    except Exception as error:  # typer's own copy of click raises: no such option, a value of another type
        raise AssertionError(str(error)) from error
    given = [*(context.params.get("overrides") or ()), *(context.params.get("settings") or ())]
    overrides = [word for word in given if isinstance(word, str) and "$" not in word and not word.endswith("=...")]
    config = context.params.get("config")
    if config and str(config) in names():  # a recipe
        config = path_of(str(config))
    if overrides or config:
        load_config(config if config and config.is_file() else None, overrides)


def _check_script(module: str, arguments: list[str]) -> None:
    assert (ROOT / f"{module.replace('.', '/')}.py").is_file(), f"there is no script {module}"
    importlib.import_module(module)
    if arguments:
        options_of(module, arguments)


@pytest.mark.parametrize(("page", "line"), _commands())
def test_command_is_taken(page: str, line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    try:
        check_command(line)
        assert line not in REFUSED, "the guide says that it is refused"
    except (AssertionError, ValueError) as error:
        if line in REFUSED and isinstance(error, ValueError):
            return
        pytest.fail(f"{page} names a command that cannot be given: {line}\n{error}", pytrace=False)


def test_there_are_commands() -> None:
    commands = _commands()
    assert len(commands) > 100
    for page in ("docs/measurements.md", "docs/log.md", "docs/traces/README.md"):
        assert any(name == page for name, _ in commands)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("carpool trian a.b=c", "trian"),
        ("carpool train --dry", "--dry"),
        ("carpool train training.max_stepps=3", "max_stepps"),
        ("python -m benchmarks.tiles --parts 2 4", "benchmarks.tiles"),
        ("torchrun --nproc-per-node 2 -m benchmarks.chunks --parts 2", "--parts"),
        ("python -m benchmarks.points --ranks many", "many"),
    ],
)
def test_refuses(line: str, why: str) -> None:
    with pytest.raises((AssertionError, ValueError)) as raised:
        check_command(line)
    assert why in str(raised.value)


SCRIPT = re.compile(r"\b(?:benchmarks|tools)[./]([a-z]\w*)\b(?!/)")


def missing_scripts(text: str) -> list[str]:
    """Scripts that are named and do not exist, in list items and paragraphs that name no commit."""
    found = []
    for paragraph in re.split(r"\n\n|\n(?=- |\| )", text):
        if re.search(r"\b(?=\w*\d)[0-9a-f]{7}(?:~\d)?\b", paragraph):
            continue
        named = SCRIPT.findall(" ".join(re.findall(r"`[^`]+`", paragraph)))
        found += [
            name for name in named if not any((ROOT / f"{a}/{name}.py").exists() for a in ("benchmarks", "tools"))
        ]
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_scripts_exist(page: Path) -> None:
    missing = missing_scripts(page.read_text())
    assert not missing, f"{page.name} names scripts that do not exist, and no commit that has them: {missing}"


def test_finds_missing_scripts() -> None:
    assert missing_scripts("`benchmarks/chunks.py`\n\n`-m benchmarks.tiles --x`") == ["tiles"]
    assert missing_scripts("- `benchmarks/tiles.py`, 312d016~1\n- `benchmarks/gone.py`") == ["gone"]


def test_measurements_name_no_lost_script() -> None:
    """The page says that commands stand beside its numbers: none of them may be gone."""
    text = " ".join((ROOT / "docs/measurements.md").read_text().split())
    assert not re.findall(r"not kept|has left|have left|was lost", text)
