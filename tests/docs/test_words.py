"""Users read the field's words: in settings, help, guides, public names, errors and logs.

A pattern is a word of an earlier dialect where it is wrong; `allowed` are its proper meanings, such as the dense layers
of a model or the rows of a matrix.
"""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from carpool.train.config import describe

ROOT = Path(__file__).parents[2]
PACKAGES = (ROOT / "carpool", ROOT / "carpool_systems")
# What follows tells of the past, in its words.
HISTORY = ("log.md", "measurements.md")
GUIDES = [ROOT / "README.md", *(path for path in sorted((ROOT / "docs").rglob("*.md")) if path.name not in HISTORY)]


@dataclass(frozen=True)
class Word:
    """A pattern, what to write instead, and phrases that are right although the pattern is in them."""

    pattern: str
    instead: str
    allowed: str = "(?!)"

    def found(self, text: str) -> list[str]:
        """Where a text has it wrongly, with what stands around it."""
        proper = [range(*one.span()) for one in re.finditer(self.allowed, text, re.IGNORECASE)]
        wrong = re.finditer(self.pattern, text, re.IGNORECASE)
        places = [one.start() for one in wrong if not any(one.start() in span for span in proper)]
        return [f"{text[max(0, at - 40) : at + 40]!r}: write {self.instead}" for at in places]


WORDS = (
    Word(
        r"\bdense\b",
        "non-expert (parameters), or zero1",
        r"(\w+ )?dense(,| and| or)? (and |or )?(\w+[ -])?"
        r"(models?|(decoder )?layers?|MLPs?|MoE|feed-forward|famil\w+|blocks?)"
        r"|first_k_dense\w*|dense_\w+|dense 16-bit",
    ),
    Word(
        r"\brows? (that )?(travel|rides?|arrive|are sent|come back|in flight|to experts|from each rank)"
        r"|token's rows?\b|rows? (per|for each|of a|of each) \(?token|rows between nodes",
        "tokens, or hidden states",
    ),
    Word(r"\bsums (of experts|that come back|come back|travel)", "MoE outputs"),
    Word(r"\b(kept|keeps?) for the backward|what (is|layers|rides|a layer) (kept|keeps?)\b", "saved activations"),
    Word(
        r"\bcopies (per|of a|of each|for each) (token|row)|copies of (the )?(experts?|sharded|model)"
        r"|copies_per_token",
        "ranks per token, or replicas",
    ),
    Word(r"\b(expert )?stages of (grouped|an expert|experts)", "kernels"),
    Word(r"\brooms?\b", "capacity, headroom, or package", r"rooms\.svg|draw_rooms"),
    Word(r"gradients? (are |is )?consumed", "optimizer in backward"),
    Word(r"\bbetween nodes\b|\binside (a|one|the) node\b", "inter-node, intra-node"),
    Word(r"\bas (they|it) lies?\b|\blies? on (the )?(ranks?|GPUs?)", "layout, or placement"),
    Word(r"\b(is|are) told\b|\bknows of\b", "a plain verb with a subject"),
    Word(r"\bthe fullest\b", "the largest load"),
    Word(r"\bmuseum\b|\bhouse\b", "package, or plug-in package"),
)


def wrong_words(text: str) -> list[str]:
    """All that is wrong in a text, of one line or of many."""
    plain = re.sub(r"\s+", " ", text)
    return [one for word in WORDS for one in word.found(plain)]


def test_a_word_is_wrong_in_its_old_meaning_alone() -> None:
    assert not wrong_words("A dense model has rows of a matrix, and the first dense layers keep their rows.")
    assert len(wrong_words("The dense parameters, and rows that travel, have room.")) == 3


@pytest.mark.parametrize("path", GUIDES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_guides(path: Path) -> None:
    # Code and what a program printed are tested by themselves.
    text = re.sub(r"```.*?```|`[^`\n]*`", "", path.read_text(), flags=re.DOTALL)
    assert not (found := wrong_words(text)), "\n".join(found)


def test_settings_and_their_help() -> None:
    found = [f"{name}: {one}" for name, _, _, help_ in describe() for one in wrong_words(f"{name}. {help_}")]
    assert not found, "\n".join(found)


# Renaming these is left to who changes their packages: a reason for each.
NAMES = {"carpool.routing.sum_over": "a sum over ranks is what it is"}


def test_public_names() -> None:
    names = re.compile(r"(^|_)(dense|rows?|sums?|kept|copies|rooms?|owed|told|away)(_|$)", re.IGNORECASE)
    found = []
    for path in (file for package in PACKAGES for file in package.rglob("__init__.py")):
        module = importlib.import_module(".".join(path.parent.relative_to(ROOT).parts))
        for name in getattr(module, "__all__", ()):
            if names.search(re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name)):
                found.append(f"{module.__name__}.{name}")
    assert sorted({*found} - {*NAMES}) == []


def _messages(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and text of what a module raises, logs or prints."""
    for node in ast.walk(tree):
        is_call = isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute)
        name = getattr(node.func, "attr", getattr(node.func, "id", "")) if is_call else ""  # type: ignore[attr-defined]
        if isinstance(node, ast.Raise) or name in ("say", "print", "warn", "warning", "info", "error", "echo"):
            for one in ast.walk(node):
                if isinstance(one, ast.JoinedStr):
                    yield one.lineno, "".join(str(part.value) for part in one.values if isinstance(part, ast.Constant))
                elif isinstance(one, ast.Constant) and isinstance(one.value, str):
                    yield one.lineno, one.value


# Packages whose docstrings are in the field's words. Kernels may speak of the rows of their matrices.
PLAIN = ("activations", "experts", "layer", "parallel", "placement", "replicas", "ride", "transport")
# Left to who changes it now.
BEING_REWRITTEN = ("carpool/experts/quantised.py",)
# What is wrong in a docstring, beside the words above.
IN_DOCSTRINGS = (
    *WORDS,
    Word(r"\brows? (on|to|from|of) (each|other|every|a) (rank|node)s?\b|\brows travel", "tokens, or hidden states"),
    Word(r"\bwhat (is|was|a layer|layers|rides|experts) (kept|keeps?)\b|\bkept (rows|tokens)\b", "saved activations"),
    Word(r"\bsums back\b|\bsums (of|are) NaN\b|\bsums are NaN", "MoE outputs"),
    Word(r"\bcopies of (a |the )?(model|expert|shard|group)s?\b", "data-parallel replicas, or expert replicas"),
    Word(r"\b(whoever|who asked|nobody|somebody) ", "a subject that exists: the caller, the trainer, a kernel"),
    Word(r"\bdense (parameters?|experts?)\b", "non-expert parameters, shared experts"),
    Word(r"\b(is|are|be) asked for\b|\bhas been asked for\b", "requested, called, or launched"),
)


def _public_docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and text of the docstrings of a module and of its public classes, functions and methods."""
    nodes: list[ast.AST] = [tree]
    while nodes:
        node = nodes.pop()
        assert isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        if text := ast.get_docstring(node):
            yield getattr(node, "lineno", 1), text
        inner = (one for one in node.body if isinstance(one, ast.ClassDef | ast.FunctionDef))
        nodes += [] if isinstance(node, ast.FunctionDef) else [one for one in inner if not one.name.startswith("_")]


@pytest.mark.parametrize("package", PLAIN)
def test_docstrings(package: str) -> None:
    found = []
    paths = (path for path in sorted((ROOT / "carpool" / package).rglob("*.py")))
    for path in (one for one in paths if one.relative_to(ROOT).as_posix() not in BEING_REWRITTEN):
        for line, text in _public_docstrings(ast.parse(path.read_text())):
            wrong = [one for word in IN_DOCSTRINGS for one in word.found(re.sub(r"\s+", " ", text))]
            found += [f"{path.relative_to(ROOT)}:{line}: {one}" for one in wrong]
    assert not found, "\n".join(found)


def test_messages() -> None:
    found = set()
    for path in (file for package in PACKAGES for file in package.rglob("*.py")):
        for line, text in _messages(ast.parse(path.read_text())):
            found |= {f"{path.relative_to(ROOT)}:{line}: {one}" for one in wrong_words(text)}
    assert not found, "\n".join(sorted(found))
