"""The first line of a report: what makes a run healthy, what does not, and what is said about it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from carpool.report import text_block
from carpool.report.health import OVERFITTED, UNEVEN, headline, judge
from carpool.report.page import render
from carpool.report.read import Run, read_run
from carpool.report.record_types import Eval, RunInfo, Stopped, Summary, Train
from tests.report.runs import Shape, run_info, side_lines, train_lines, write_lines, write_run

SHAPE = Shape(steps=40, sampled=64)

SUMMARY = {
    "steps": 40,
    "final_loss": 2.0,
    "first_eval_loss": 5.0,
    "final_eval_loss": 2.2,
    "bytes_remote": 720,
    "bytes_remote_alltoall": 1000,
    "ride_share": 0.36,
}
RIDES = "36 % of the step waited for rides; 28 % fewer bytes than one send per expert."


def _steps(**changes: Any) -> list[dict[str, Any]]:
    """40 good steps with changes in all of them; a function gets the step."""
    steps = []
    for step in range(1, 41):
        good = {"step": step, "loss": 5 * math.exp(-step / 40), "grad_norm": 1.0, "tokens": 100}
        good |= {"dropped_tokens": 0, "rank_load_max_over_mean": 1.1, "dead_experts": 0}
        steps.append(good | {k: v(step) if callable(v) else v for k, v in changes.items()})
    return steps


def _said(
    steps: list[dict[str, Any]], evals: list[float] | None = None, ranks: int = 4, summary: Any = (), **how: Any
) -> tuple[str, str]:
    """The state, and the first line."""
    info = RunInfo.model_validate(run_info(SHAPE, parallelism={"world_size": ranks}))
    known = Summary.model_validate({**SUMMARY, **dict(summary)})
    held = [Eval(step=20 * i, loss=loss) for i, loss in enumerate([5.0, 2.2] if evals is None else evals)]
    train = [Train.model_validate(step) for step in steps]
    state, word, rest = headline(judge(known, info, train, held, **how), known, info)
    return state, f"{word} {rest}"


def test_a_healthy_run() -> None:
    assert _said(_steps(), planned=40) == ("good", f"Healthy. {RIDES}")


NO_EVALS = {"first_eval_loss": None, "final_eval_loss": None}


@pytest.mark.parametrize(
    ("changes", "how", "state", "said"),
    [
        ({}, {"finished": False, "planned": 60}, "look", "not finished, 40 of 60 steps so far"),
        ({}, {"planned": 60}, "look", "stopped early, 40 of 60 steps"),
        ({}, {"planned": 60, "stop_at": 40}, "good", ""),
        (
            {},
            {"finished": False, "stopped": Stopped(step=41, why="x", signal="SIGTERM")},
            "look",
            "SIGTERM ended it after a checkpoint of step 41",
        ),
        ({}, {"finished": False, "stopped": Stopped(step=41, why="x")}, "bad", "an error ended it in step 41: x."),
        ({"loss": lambda s: None if s == 7 else 3.0}, {}, "bad", "loss is no finite number in 1 step, first in step 7"),
        ({"grad_norm": lambda s: math.inf if s > 38 else 1.0}, {}, "bad", "norm is no finite number in 2 steps"),
        ({"grad_norm": None}, {}, "good", ""),
        ({"dropped_tokens": 4}, {}, "look", "160 choices of tokens, 0.2 % of all, were dropped"),
        ({"dropped_tokens": None}, {}, "good", ""),
        ({"rank_load_max_over_mean": UNEVEN}, {}, "good", ""),
        ({"rank_load_max_over_mean": UNEVEN + 0.02}, {}, "look", "the fullest rank computes 1.32 × the mean"),
        ({"rank_load_max_over_mean": lambda s: 3.0 if s < 30 else 1.0}, {}, "good", ""),
        ({"rank_load_max_over_mean": 9.0}, {"ranks": 1}, "good", ""),
        ({"dead_experts": 6}, {}, "good", ""),
        ({"dead_experts": 7}, {}, "look", "7 of 64 experts got no token in a step"),
        ({}, {"evals": [5.0, 2.0, 2.0 * OVERFITTED], "summary": {"final_eval_loss": 2.0 * OVERFITTED}}, "good", ""),
        ({}, {"evals": [5.0, 2.0, 2.2]}, "look", "the held-out loss rose again, from 2.000 at step 20 to 2.200"),
        (
            {},
            {"evals": [5.0, 5.5], "summary": {"final_eval_loss": 5.5}},
            "bad",
            "the held-out loss did not fall: from 5.000 to 5.500",
        ),
        ({}, {"evals": [], "summary": NO_EVALS}, "good", ""),
        (
            {"loss": lambda s: 2.0 + s / 40},
            {"evals": [], "summary": NO_EVALS},
            "bad",
            "the training loss rose from 2.075 to 2.950",
        ),
        (
            {"loss": lambda s: 2.0 + 0.1 * (s % 2)},
            {"evals": [], "summary": NO_EVALS},
            "look",
            "the training loss is flat",
        ),
    ],
)  # fmt: skip
def test_what_is_said(changes: dict[str, Any], how: dict[str, Any], state: str, said: str) -> None:
    found, line = _said(_steps(**changes), **how)
    assert found == state, line
    assert said in line
    words = {"good": "Healthy. ", "look": "Needs a look: ", "bad": "Not good: "}
    assert line.startswith(words[state])
    if state != "bad":
        assert line.endswith(RIDES if how.get("ranks") != 1 else "One rank: nothing travels.")


def test_a_short_run_is_not_called_healthy() -> None:
    state, line = _said(_steps()[:5], evals=[], summary=NO_EVALS)
    assert state == "unknown" and line.startswith("Too early to say: 5 steps cannot show whether the loss falls.")


@pytest.mark.parametrize(
    ("ours", "said"),
    [(1250, "25 % more bytes than"), (1000, "as many bytes as"), (1, "100 % fewer bytes"), (None, "36 % of the step")],
)  # fmt: skip
def test_bytes_are_told_as_they_are(ours: int | None, said: str) -> None:
    assert said in _said(_steps(), summary={"bytes_remote": ours})[1]


def _page(path: Path) -> tuple[Run, str]:
    run = read_run(path)
    return run, render(run)


def test_the_page_and_the_terminal_begin_with_it(tmp_path: Path) -> None:
    lines = train_lines(SHAPE) + side_lines(SHAPE)
    for line in lines:
        line.pop("dead_experts", None)
    write_lines(write_run(tmp_path, SHAPE), lines)
    (tmp_path / "config.toml").write_text("[training]\nmax_steps = 40\n")
    summary = json.loads((tmp_path / "summary.json").read_text())
    fewer = 100 * (1 - summary["bytes_remote"] / summary["bytes_remote_alltoall"])
    expected = (
        f"{100 * summary['ride_share']:.0f} % of the step waited for rides; "
        f"{fewer:.0f} % fewer bytes than one send per expert."
    )
    _, page = _page(tmp_path)
    body = page[page.index("<body>") :]
    assert body.index(f"<b>Healthy.</b> {expected}") < body.index("<h1>")
    train = [line for line in lines if line["kind"] == "train"]
    assert text_block(summary, run_info(SHAPE), train).startswith(f"Healthy. {expected}\nCarpool: ")


@pytest.mark.parametrize("again", [False, True])
def test_an_error_is_told_until_the_run_starts_again(again: bool, tmp_path: Path) -> None:
    write_run(tmp_path, SHAPE, finished=False)
    why = "step 41: loss nan: the first output that is not finite is that of <b>. Lower training.learning_rate"
    lines: list[dict[str, Any]] = [*train_lines(SHAPE), {"kind": "stopped", "step": 41, "why": why}]
    if again:
        lines.append({"kind": "layout", "step": 40, "homes": [[0], [1]], "slots": [[0], [1]]})
    write_lines(tmp_path, lines)
    run, page = _page(tmp_path)
    assert (run.stopped is None) == again
    assert ("an error ended it in step 41: step 41: loss nan: the first output" in page) != again
    assert ('that of &lt;b&gt;. <span class="muted">Lower training.learning_rate.</span>' in page) != again


def test_the_first_line_is_of_the_state_the_checks_have() -> None:
    everything: list[Callable[[], tuple[str, str]]] = [
        lambda: _said(_steps(dropped_tokens=1, loss=lambda s: math.nan)),
        lambda: _said(_steps(dropped_tokens=1, rank_load_max_over_mean=2.0)),
    ]
    (bad, first), (look, second) = (one() for one in everything)
    assert bad == "bad" and "dropped" not in first, "what is bad comes alone"
    assert look == "look" and "dropped; the fullest rank" in second
