"""The docs say what is: links lead somewhere, settings and names exist, quoted messages are in the code."""

from __future__ import annotations

import ast
import importlib
import json
import re
from pathlib import Path

import pytest

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
            fits = key in known or key.startswith("model.config.")
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
