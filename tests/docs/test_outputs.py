"""What the guides show of a command's output is what the command prints.

`python -m tools.docs_outputs --only PAGE:LINE --write` writes the output of an example anew.
"""

from __future__ import annotations

import pytest

from tools.docs_outputs import BEFORE, NOT_RUN, PREDICTS, Example, compare, examples, pages, renewed, run

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
