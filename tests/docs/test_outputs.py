"""What the guides show of a command's output is what the command prints.

`python -m tools.docs_outputs --only PAGE:LINE --write` writes the output of an example anew.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

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
