"""The docs say what is: links lead somewhere, settings and names exist, quoted messages are in the code, shown outputs
are what commands print, and measurements name no machine."""

from __future__ import annotations

import ast
import importlib
import json
import re
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.script import write_results
from carpool.bench.result_files import Result, publish
from tools.docs_outputs import (
    BEFORE,
    NO_EXAMPLE,
    NOT_RUN,
    PREDICTS,
    Example,
    compare,
    difference,
    examples,
    pages,
    renewed,
    run,
    unexplained,
)
from tools.docs_pages import on_page_markdown

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
GUIDES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted(DOCS.glob("*.md")),
    *sorted(DOCS.glob("reference/*.md")),
]
# The log and the measurements tell of the past, in whose settings and names they may speak.
OF_TODAY = [path for path in GUIDES if path.name not in ("log.md", "measurements.md")]


def _anchors(text: str) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    return {re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()) for heading in headings}


@pytest.mark.parametrize("path", GUIDES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(path: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", path.read_text()):
        if link.startswith(("http:", "https:")):
            continue
        file, _, anchor = link.partition("#")
        target = (path.parent / file).resolve() if file else path
        assert target.exists(), f"{path.name} links to {link}"
        if DOCS in path.parents:
            assert DOCS in target.parents, f"{path.name} links to {link}, which is not part of the site"
        if anchor and target.suffix == ".md":
            assert anchor in _anchors(target.read_text()), f"{path.name} links to {link}"


def test_every_page_is_in_the_navigation() -> None:
    pages = set(re.findall(r": ([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), flags=re.MULTILINE))
    assert pages == {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}


@pytest.mark.parametrize("path", OF_TODAY, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_settings_exist(path: Path) -> None:
    from carpool.train.config import describe

    known = {name for name, *_ in describe()}
    sections = "|".join(sorted({name.split(".")[0] for name in known}))
    for fence in re.findall(r"```bash\n(.*?)```|`([^`\n]+)`", path.read_text(), flags=re.DOTALL):
        for key in re.findall(rf"(?<![\w./-])((?:{sections})\.[a-z][\w.]*)(?![\w(/])", " ".join(fence)):
            fits = key in known or key.startswith(("model.config.", "data.sources."))
            is_file = re.search(r"\.(json|toml|md|py|npz|html)$", key) is not None
            is_code = key.startswith(("model.", "moe.")) and f"`{key}(" in path.read_text()
            assert fits or is_file or is_code or key in ("moe.aux_loss", "moe.routing"), f"{path.name} names {key}"


@pytest.mark.parametrize("path", OF_TODAY, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_files_exist(path: Path) -> None:
    for file in re.findall(r"`((?:carpool|benchmarks|tests|tools|examples|docs)/[\w/.-]*\w/?)`", path.read_text()):
        assert (ROOT / file).exists(), f"{path.name} names {file}"


@pytest.mark.parametrize("path", OF_TODAY, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_snippets_import_what_is_there(path: Path) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", path.read_text(), flags=re.DOTALL | re.MULTILINE)
    for node in (node for block in blocks for node in ast.walk(ast.parse(block))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("carpool"):
            module = importlib.import_module(str(node.module))
            assert not [one.name for one in node.names if not hasattr(module, one.name)], ast.unparse(node)
        elif isinstance(node, ast.Import):
            for one in node.names:
                if one.name.startswith("carpool"):
                    importlib.import_module(one.name)


def test_reference_names_what_is_there() -> None:
    for path in DOCS.glob("reference/*.md"):
        for name in re.findall(r"^::: (\S+)", path.read_text(), flags=re.MULTILINE):
            module, _, last = name.rpartition(".")
            file = ROOT / (name.replace(".", "/") + ".py")
            if file.exists() or (ROOT / name.replace(".", "/") / "__init__.py").exists():
                continue
            file = ROOT / (module.replace(".", "/") + ".py")
            file = file if file.exists() else ROOT / module.replace(".", "/") / "__init__.py"
            defined = set()
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.FunctionDef | ast.ClassDef):
                    defined.add(node.name)
                elif isinstance(node, ast.ImportFrom):
                    defined |= {alias.name for alias in node.names}
            assert last in defined, f"{path.name} names {name}"


@pytest.mark.parametrize("module", ["carpool", "carpool.hf"])
def test_reference_has_every_public_name(module: str) -> None:
    names = set(importlib.import_module(module).__all__) - {"__version__"}
    page = on_page_markdown((DOCS / "reference" / f"{module.rpartition('.')[2]}.md").read_text())
    assert names == set(re.findall(rf"^::: {re.escape(module)}\.(\w+)$", page, flags=re.MULTILINE))


def test_messages_are_in_the_code() -> None:
    said: list[str] = []
    for path in (ROOT / "carpool").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                said.append(node.value)
    messages = re.findall(r"^\| `([^`]+)` \|", (DOCS / "troubleshooting.md").read_text(), flags=re.MULTILINE)
    assert len(messages) > 30
    for message in messages:
        for piece in filter(None, (piece.strip() for piece in message.split("…"))):
            assert message == "USDT:" or any(piece in text for text in said), f"no message says {piece!r}"


def test_committed_measurements_are_small() -> None:
    """What the tables show, not every repetition."""
    files = list((DOCS / "measurements").rglob("*"))
    assert sum(file.stat().st_size for file in files) < 1_000_000
    for file in DOCS.glob("measurements/*.json"):
        text = file.read_text()
        json.loads(text)
        assert len(text.splitlines()) < 2_000, f"{file.name}: leave out single repetitions"


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


ALL = [example for page in pages() for example in examples(page)]
RUN = [example for example in ALL if not example.named(NOT_RUN)]


@pytest.mark.parametrize(
    "example",
    [pytest.param(one, id=one.name, marks=[] if one.predicts else [pytest.mark.slow]) for one in RUN],
)
def test_prints_what_is_shown(example: Example) -> None:
    if found := example.difference():
        pytest.fail(
            f"docs/{example.name} shows other output than its command prints:\n\n{example.commands}\n{found}\n\n"
            f"- is the guide, + what is printed. If the new output is right, write it into the guide with\n"
            f"python -m tools.docs_outputs --only {example.name} --write",
            pytrace=False,
        )


def test_tables_name_examples() -> None:
    assert len(RUN) > 15 and sum(example.predicts for example in RUN) >= 6
    for table in (BEFORE, PREDICTS, NOT_RUN):
        for key in table:
            assert any(example.named([key]) for example in ALL), f"no example of {key[0]} has {key[1]!r}"


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_every_output_has_its_command(page: Path) -> None:
    found = list(unexplained(page))
    assert not found, (
        f"{page.name} shows output that follows no block of commands: {found}. Put its command into a ```bash block "
        "before it, or name it in NO_EXAMPLE of tools/docs_outputs.py with the reason"
    )


def test_finds_outputs_without_commands(tmp_path: Path) -> None:
    page = tmp_path / "a.md"
    page.write_text(
        "```bash\nls\n```\n\n```\nx\n```\n\n```\ny\nz\n```\n\n```console\n$ ls\nx\n```\n\n```python\n1\n```\n"
    )
    assert list(unexplained(page)) == ["y"]


def test_outputs_without_commands_are_there() -> None:
    texts = {page.name: page.read_text() for page in pages()}
    for page, begin in NO_EXAMPLE:
        assert re.search(rf"^```\n\s*{re.escape(begin)}", texts[page], flags=re.MULTILINE), f"{page} shows no {begin!r}"


def test_rounding_is_of_the_machine() -> None:
    """Also which tensor differs most, where no tensor differs by more than rounding."""
    shown = "differ by at most 2.4e-07 (model.a, expert 2, gate); logits by 5.0e-07"
    assert difference(shown, "differ by at most 1.2e-07 (model.b, expert 4, up); logits by 5.2e-07", True) is None
    assert difference(shown, "differ by at most 1.2e-07; logits of another kind by 5.2e-07", True) == "other words"
    assert difference(shown, "differ by at most 2.4e-03 (model.a, expert 2, gate); logits by 5.0e-07", True) is not None


SHOWN = "parameters   1,000.0 MiB\n...\nstep 1  loss 2.50  189 ms\n"


@pytest.mark.parametrize(
    ("printed", "found"),
    [
        ("a line\nparameters 1,000.0 MiB\nanother\nstep 1  loss 2.51  7 ms\n", ""),
        ("parameters 1,030.0 MiB\nstep 1  loss 2.50  189 ms\n", "1,000.0 in the guide, 1,030.0 printed"),
        ("parameters 1,000.0 GiB\nstep 1  loss 2.50  189 ms\n", "other words"),
        ("step 1  loss 2.50  189 ms\nparameters 1,000.0 MiB\n", "nothing like it is printed"),
        ("parameters 1,000.0 MiB\nstep 1  loss 3.50  189 ms\n", "2.50 in the guide, 3.50 printed"),
    ],
)
def test_compares(printed: str, found: str) -> None:
    told = compare(SHOWN, printed, measured=True)
    assert found in told and bool(told) == bool(found)


def test_times_of_predictions_count() -> None:
    assert "189 in the guide, 7 printed" in compare(SHOWN, SHOWN.replace("189", "7"), measured=False)


def test_renews() -> None:
    assert renewed(SHOWN, "x\nparameters 2.0 MiB\nstep 1  loss 2.50  7 ms\n") == (
        "parameters 2.0 MiB\n...\nstep 1  loss 2.50  7 ms\n"
    )


def test_runs_in_a_folder_of_its_own() -> None:
    assert run("ls; cat x", before="echo 3 > x").split() == ["LICENSE", "docs", "examples", "x", "3"]
    with pytest.raises(RuntimeError, match="ended with 1"):
        run("true", before="false")
