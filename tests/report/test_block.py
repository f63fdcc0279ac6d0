"""The first line of a report, what makes a run healthy, and the quotable block: units, words, and what it says when
something was not measured."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from carpool.report import text_block
from carpool.report.headline import summarise
from carpool.report.health import OVERFITTED, UNEVEN, headline, judge
from carpool.report.page import render
from carpool.report.read import Run, read_run
from carpool.report.record_types import Eval, RunInfo, Stopped, Summary, Train
from carpool.report.units import bytes_text, count_text, ms_text, percent_text, plain_text
from tests.report.runs import Shape, run_info, side_lines, train_lines, write_lines, write_run

SHAPE = Shape(steps=40, sampled=64)

SUMMARY = {
    "steps": 200,
    "tokens": 1_638_400,
    "final_loss": 1.9,
    "final_eval_loss": 2.1,
    "first_eval_loss": 5.55,
    "bytes_remote": 1_234_000_000,
    "bytes_remote_alltoall": 1_851_000_000,
    "copies_per_token": 2.904,
    "num_experts_per_tok": 4,
    "step_ms_median": 412.0,
    "compare": {"transport": "alltoall", "step_ms": 530.0, "ours_step_ms": 410.0, "ratio": 530 / 410, "repetitions": 5},
    "ride_share": 0.23,
    "share": {"dispatch": 0.12, "experts": 0.5, "combine": 0.11, "rest": 0.27},
    "exact": True,
    "lossy_reasons": [],
    "tokens_per_second_median": 19_883.0,
    "mfu_median": None,
}

BLOCK = """\
Carpool: OlmoeForCausalLM, 200 steps, 1.64M tokens, 4 ranks, cpu, transport dedup
  step time          412 ms  median of the steps after warm-up, without evaluations and checkpoints;
                     19.9k tokens/s
  waiting for rides  23 %  of the step: dispatch 12 %, combine 11 %
  bytes moved        1.23 GB  between ranks, forward and backward; one send per (token, expert)
                     would have moved 1.85 GB, 1.50× as much
  ranks per token    2.90 of 4  one for each rank that the token visits, its own included; one send
                     per expert makes 4
  held-out loss      5.550 → 2.100  training loss 1.900 at the end
  alltoall takes     1.29× as long  forward and backward alone, measured in this run, interleaved, 5
                     repetitions
  EXACT              the model's own function: no token was dropped, no payload compressed"""


def _line(block: str, label: str) -> str:
    """One entry of the block with its continuation lines, as one line."""
    lines = block.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(f"  {label}"))
    end = next((i for i in range(start + 1, len(lines)) if not lines[i].startswith("     ")), len(lines))
    return " ".join(" ".join(lines[start:end]).split())


def _flat(table: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, dict):
            flat.update(_flat(value, f"{key}."))
        else:
            flat[prefix + key] = pytest.approx(value) if isinstance(value, float) else value
    return flat


def test_the_whole_block() -> None:
    assert text_block(SUMMARY, run_info(SHAPE)) == BLOCK
    for data in ({"learned_tokens": 755}, {"sources": {"chats": {"learned_tokens": 755}}}):
        assert "200 steps, 1.64M learned tokens, 4 ranks" in text_block(SUMMARY, run_info(SHAPE, data=data))
    # Those of the comparison lack the optimizer: beside the step's they would contradict it.
    block = text_block(SUMMARY, run_info(SHAPE))
    assert re.findall(r"[\d.]+ m?s\b", block) == ["412 ms"]
    block = text_block({**SUMMARY, "lossy_reasons": ["a reason of some length"] * 20}, run_info(SHAPE))
    assert max(map(len, block.splitlines())) <= 100
    assert block.replace("\n", "").isprintable()


def test_lossy_and_slower_are_told_as_they_are() -> None:
    reasons = ["capacity factor 1.0 drops tokens", "FP8 payload"]
    told = _line(text_block({**SUMMARY, "exact": False, "lossy_reasons": reasons}, run_info(SHAPE)), "LOSSY")
    assert all(reason in told for reason in reasons)
    assert "EXACT" not in text_block({**SUMMARY, "exact": False}, run_info(SHAPE))
    # A reason wins over a flag that was forgotten.
    assert "LOSSY" in text_block({**SUMMARY, "exact": True, "lossy_reasons": reasons}, run_info(SHAPE))
    compare = {"transport": "alltoall", "step_ms": 380.0, "ours_step_ms": 400.0, "ratio": 0.95, "repetitions": 5}
    told = _line(text_block({**SUMMARY, "compare": compare}, run_info(SHAPE)), "alltoall takes")
    assert "0.95× as long so it was the faster one" in told


def test_what_is_not_known_or_no_number() -> None:
    block = text_block({**SUMMARY, "compare": None, "final_eval_loss": None, "first_eval_loss": None}, run_info(SHAPE))
    assert "412 ms median of the steps" in _line(block, "step time") and "as long" not in block
    assert "– not measured; training loss 1.900 at the end" in _line(block, "held-out loss")
    block = text_block({**SUMMARY, "first_eval_loss": 2.1}, run_info(SHAPE))  # of a single evaluation
    assert "held-out loss 2.100 training loss" in _line(block, "held-out loss")
    block = text_block({}, {})
    assert "UNKNOWN" in block and "not recorded" in block
    assert "None" not in block and "nan" not in block.lower()
    block = text_block({**SUMMARY, "mfu_median": 0.2137, "final_loss": math.nan}, run_info(SHAPE))
    assert "MFU 21 %" in _line(block, "step time")
    assert "training loss NaN" in _line(block, "held-out loss")
    with pytest.raises(ValueError, match=r"bytes_remote: .*'many'"):
        text_block({**SUMMARY, "bytes_remote": "many"}, run_info(SHAPE))


def test_bytes_between_ranks_and_nodes() -> None:
    block = text_block({**SUMMARY, "bytes_remote": 0, "bytes_remote_alltoall": 0}, run_info(SHAPE))
    assert "0 B between ranks: every expert lives where its tokens are" in _line(block, "bytes moved")
    line = _line(text_block({**SUMMARY, "bytes_network": 300_000_000}, run_info(SHAPE)), "bytes moved")
    assert (
        "1.23 GB 300 MB of them between nodes, of training steps' rides alone: gradients, parameters and evaluation"
        in line
    )


def test_a_run_without_summary_is_summarised_alike(tmp_path: Path) -> None:
    """What the report computes for a run still going equals, at the end, what the trainer's formulas give."""
    run = read_run(write_run(tmp_path, SHAPE))
    written = json.loads((tmp_path / "summary.json").read_text())
    computed = summarise(run).model_dump()
    # Only runs that keep their best model write these.
    assert computed.pop("best_step") is None and computed.pop("best_eval_loss") is None
    assert _flat(computed) == _flat(written)
    # With training.logging_steps = 8 most steps have no line of their own.
    run.train = run.train[7::8]
    assert summarise(run).bytes_remote == written["bytes_remote"]


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        (bytes_text(0), "0 B"),
        (bytes_text(999), "999 B"),
        (bytes_text(1000), "1.00 kB"),
        (count_text(999.7), "1.00k"),
        (bytes_text(12_345_678), "12.3 MB"),
        (bytes_text(999_999), "1.00 MB"),
        (bytes_text(123_456_789_012), "123 GB"),
        (bytes_text(None), "–"),
        (count_text(950), "950"),
        (count_text(1_638_400), "1.64M"),
        (count_text(99_960), "100k"),
        (count_text(2.5e9), "2.50B"),
        (ms_text(0.412), "412 µs"),
        (ms_text(412), "412 ms"),
        (ms_text(1234), "1.23 s"),
        (ms_text(180_000), "3.0 min"),
        (ms_text(math.nan), "NaN ms"),
        (percent_text(0.0423), "4.2 %"),
        (percent_text(0.9999), "100 %"),
        (plain_text(-math.inf), "-∞"),
        (plain_text(2.0, 3), "2.000"),
    ],
)
def test_units(told: str, expected: str) -> None:
    assert told == expected


HEALTHY = {
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
    known = Summary.model_validate({**HEALTHY, **dict(summary)})
    held = [Eval(step=20 * i, loss=loss) for i, loss in enumerate([5.0, 2.2] if evals is None else evals)]
    train = [Train.model_validate(step) for step in steps]
    state, word, rest = headline(judge(known, info, train, held, **how), known, info)
    return state, f"{word} {rest}"


def test_a_healthy_run_and_a_short_one() -> None:
    assert _said(_steps(), planned=40) == ("good", f"Healthy. {RIDES}")
    state, line = _said(_steps()[:5], evals=[], summary=NO_EVALS)
    assert state == "unknown" and line.startswith("Too early to say: 5 steps cannot show whether the loss falls.")


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
        lines.append({"kind": "layout", "step": 40, "homes": [[0], [1]]})
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
