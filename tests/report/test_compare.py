"""Two runs on one page: the first line, what is refused, and that the table's numbers are those of the files."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from carpool.cli import app
from carpool.report import write_comparison
from carpool.report.comparison import Side, conclude, differences, numbers
from carpool.report.read import read_run
from carpool.report.units import bytes_text, ms_text
from tests.report.runs import Shape, run_info, summary_of, train_lines, write_lines, write_run

SHAPE = Shape(steps=40, sampled=64)


def _write(
    path: Path,
    faster: float = 1.0,
    loss: float = 0.0,
    bytes_: float = 1.0,
    info: dict[str, Any] | None = None,
    **shape: int,
) -> Path:
    """A run like the other one, but so much faster, with so much added to its losses and so many times the bytes."""
    used = Shape(**{"steps": 40, "sampled": 64, **shape})
    lines = train_lines(used)
    for line in lines:
        if line["kind"] == "train":
            line["step_ms"] /= faster
            line["tokens_per_second"] *= faster
            line["loss"] += loss
            line["bytes_remote"] = int(line["bytes_remote"] * bytes_)
    write_lines(write_run(path, used, sides=False), lines)
    (path / "summary.json").write_text(json.dumps(summary_of(lines, used, compare=None)))
    (path / "config.toml").write_text("[training]\nmax_steps = 40\n")
    if info:
        (path / "run.json").write_text(json.dumps({**run_info(used), **info}))
    return path


def _side(path: Path) -> Side:
    run = read_run(path)
    assert run.summary is not None
    return Side(path.name, run, run.summary)


def test_the_first_line(tmp_path: Path) -> None:
    a = _side(_write(tmp_path / "a"))
    b = _side(_write(tmp_path / "b", faster=1.23, loss=-0.002, bytes_=0.8))
    said, refused = conclude(a, b)
    assert said == (
        "b is 1.23 × as fast per step as a; the loss of b at equal steps is 0.002 lower (mean of steps 36 to 40); "
        "b moves 20 % fewer bytes per token."
    )
    assert refused == []
    assert conclude(b, a)[0].startswith(
        "a is 0.81 × as fast per step as b; the loss of a at equal steps is 0.002 higher"
    )
    same, _ = conclude(a, _side(_write(tmp_path / "c")))
    assert "the losses of all 40 common steps are equal, bit by bit; both move as many bytes per token" in same


CPU = run_info(SHAPE)


@pytest.mark.parametrize(
    ("changes", "refused", "said"),
    [
        (
            {"info": {"environment": {"device": "NVIDIA H200"}}},
            "Step times are not compared: a ran on cpu, b on NVIDIA H200.",
            "the losses of all",
        ),
        (
            {"info": {"data": {**CPU["data"], "tokenizer": "gpt2"}}},
            "Losses are not compared: the tokenizer differs (bytes, gpt2).",
            "b is 1.00 × as fast",
        ),
        (
            {"info": {"data": {**CPU["data"], "source": "else"}}},
            "Losses are not compared: the data differs (Python standard library, else).",
            "b is 1.00 × as fast",
        ),
        (
            {"info": {"model": {**CPU["model"], "hidden_size": 256}}},
            "Bytes are not compared: the hidden size differs (128, 256).",
            "b is 1.00 × as fast",
        ),
        (
            {"tokens": 4096},
            "Times per step are not compared: a step of a has 8.19k tokens, one of b 4.10k.",
            "b handles 0.50 × the tokens per second of a",
        ),
    ],
)
def test_what_means_nothing_is_refused(changes: dict[str, Any], refused: str, said: str, tmp_path: Path) -> None:
    a, b = _side(_write(tmp_path / "a")), _side(_write(tmp_path / "b", **changes))
    told, why = conclude(a, b)
    assert refused in why
    assert said in told
    word = {"Step": "as fast", "Loss": "loss", "Byte": "bytes", "Time": "per step"}[refused[:4]]
    assert word not in told


def test_ratios_of_what_is_refused_are_dashes(tmp_path: Path) -> None:
    a = _side(_write(tmp_path / "a"))
    b = _side(_write(tmp_path / "b", info={"environment": {"device": "NVIDIA H200"}}))
    ratios = {row[0]: row[3] for row in numbers(a, b)}
    assert ratios["Step time"] == ratios["Tokens per second"] == ratios["Experts, per step"] == "–"
    assert ratios["Training loss at the end"] == "1.000"


def test_the_table_is_of_the_files(tmp_path: Path) -> None:
    paths = [_write(tmp_path / "a"), _write(tmp_path / "b", faster=1.5)]
    a, b = (json.loads((path / "summary.json").read_text()) for path in paths)
    rows = {row[0]: row[1:] for row in numbers(*(_side(path) for path in paths))}
    assert rows["Step time"] == [ms_text(a["step_ms_median"]), ms_text(b["step_ms_median"]), "0.667"]
    spent = [s["share"]["experts"] * s["step_ms_median"] for s in (a, b)]
    assert rows["Experts, per step"] == [*map(ms_text, spent), f"{spent[1] / spent[0]:.3f}"]
    assert rows["Training loss at the end"] == [f"{a['final_loss']:.4f}"] * 2 + ["1.000"]
    assert rows["Bytes between ranks, per token"][0] == bytes_text(a["bytes_remote"] / a["tokens"])
    a, b = _write(tmp_path / "a"), _write(tmp_path / "b")
    (a / "config.toml").write_text('[training]\nlearning_rate = 0.1\noutput_dir = "a"\n[moe]\nx = 1\n')
    (b / "config.toml").write_text('[training]\nlearning_rate = 0.2\noutput_dir = "b"\n[moe]\nx = 1\ny = "<b>"\n')
    page = write_comparison(a, b).read_text()
    table = page[page.index('id="config"') : page.index('id="environment"')]
    cells = re.findall(r"<t[dh](?: [^>]*)?>(.*?)</t[dh]>", table)
    assert cells == ["Key", "a", "b", "training.learning_rate", "0.1", "0.2", "moe.y", "–", "&lt;b&gt;"]
    assert differences({"a": "1"}, {"a": "1"}) == []


def test_the_page(tmp_path: Path) -> None:
    a, b = _write(tmp_path / "x" / "same"), _write(tmp_path / "y" / "same", faster=2.0)
    written = write_comparison(a, b)
    assert written == b / "compare.html"
    page = written.read_text()
    assert f"{b} is 2.00 × as fast per step as {a}" in page, "folders of one name are told apart by their paths"
    pictures = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    assert len(pictures) == 3, "loss, step time, copies; nobody recorded the load of ranks"
    for picture in pictures:
        root = ElementTree.fromstring(picture)
        hover = json.loads(root.attrib["data-hover"])
        assert [line["role"] for line in hover["lines"]] == ["loss", "other-run"]
    assert page.count("<b>Healthy.</b>") == 2
    assert write_comparison(a, b, tmp_path / "c.html") == tmp_path / "c.html"


def test_the_same_run_twice_is_an_error(tmp_path: Path) -> None:
    run = _write(tmp_path / "a")
    with pytest.raises(ValueError, match=r"are the same run: give two"):
        write_comparison(run, tmp_path / "." / "a")
    with pytest.raises(ValueError, match=r"has no run\.json"):
        write_comparison(run, tmp_path)


def test_the_command_reports_one_run_and_compares_two(tmp_path: Path) -> None:
    a, b = _write(tmp_path / "a"), _write(tmp_path / "b")
    for runs, said in (([a], "a/report.html"), ([a, b], "b/compare.html"), ([a, b, a], "3 runs were given")):
        result = CliRunner().invoke(app, ["report", *map(str, runs)])
        assert said in result.output.replace("\n", ""), result.output
        assert result.exit_code == (len(runs) == 3)
