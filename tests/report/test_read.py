"""Reading run directories: what counts after a resume, and errors that say what and where."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from carpool.report.read import read_run
from carpool.report.record_types import Train
from tests.report.runs import Shape, side_lines, train_lines, write_lines, write_run

SMALL = Shape(steps=12, sampled=64)


def _train(step: int, loss: float) -> dict[str, object]:
    return {"kind": "train", "step": step, "loss": loss}


def _run(path: Path, lines: list[dict[str, object]]) -> Path:
    write_run(path, SMALL, finished=False)
    write_lines(path, lines)
    return path


def test_everything_written_is_read(tmp_path: Path) -> None:
    shape = Shape(steps=40, sampled=64)
    run = read_run(write_run(tmp_path, shape))
    assert [t.step for t in run.train] == list(range(1, 41))
    assert run.train[6] == Train.model_validate(train_lines(shape)[12])
    assert [(e.step, e.tokens) for e in run.evals] == [(20, 65536), (40, 65536)]
    assert [s.step for s in run.samples] == [20, 40] == [c.step for c in run.checkpoints]
    assert {p.transport: p.step_ms for p in run.probes} == {"dedup": [361, 355, 358], "alltoall": [452, 449, 447]}
    last = next(line for line in train_lines(shape)[::-1] if line["kind"] == "layers")
    assert run.last_layers is not None and run.last_layers.load == last["load"]
    assert run.layers[-1].imbalance_L == pytest.approx([max(x) * 16 / sum(x) for x in last["load"]])
    assert run.summary is not None and run.summary.steps == 40
    assert run.notes == []


EVAL: dict[str, object] = {"kind": "eval", "step": 4, "loss": 3.0}
OLD = {"kind": "layers", "step": 9, "load": [[9, 9]], "copies": [9.0], "traffic_rows": [[9]]}
NEW = {"kind": "layers", "step": 5, "load": [[1, 3]], "copies": [1.0], "traffic_rows": [[0]]}


@pytest.mark.parametrize(
    ("first", "second", "end", "evals"),
    [
        ([], [_train(s, 1.0) for s in range(5, 11)], 10, []),
        # The second attempt is at step 6: nothing of the first one's steps 7 to 9 is shown, of whatever kind.
        ([EVAL, {**EVAL, "step": 8, "loss": 99.0}, OLD], [_train(5, 1.0), NEW, _train(6, 1.0)], 6, [(4, 3.0)]),
        # Lines of the new attempt that were written before its training line.
        ([], [{**EVAL, "step": 5, "loss": 2.0}, _train(5, 1.0)], 5, [(5, 2.0)]),
        # Of equal kind and step the last line counts.
        ([EVAL, {**EVAL, "loss": 2.0}], [_train(5, 1.0)], 5, [(4, 2.0)]),
    ],
    ids=["repeated", "stale", "early", "twice"],
)
def test_a_resume_supersedes_what_it_repeats(
    tmp_path: Path, first: list[dict[str, object]], second: list[dict[str, object]], end: int, evals: list[object]
) -> None:
    lines = sorted([*(_train(s, 9.0) for s in range(1, 10)), *first], key=lambda line: int(str(line["step"])))
    run = read_run(_run(tmp_path, lines + second))
    assert [(t.step, t.loss) for t in run.train] == [(s, 9.0 if s < 5 else 1.0) for s in range(1, end + 1)]
    assert [(e.step, e.loss) for e in run.evals] == evals and "lines" in run.notes[0]
    assert [d.imbalance_L for d in run.layers] == ([[1.5]] if NEW in second else [])


def test_kinds_and_values(tmp_path: Path) -> None:
    lines = [_train(1, 5.0)]
    lines += [{"kind": "probe", "step": 1, "transport": t, "step_ms": [1.0]} for t in ("dedup", "alltoall")]
    lines += [{"kind": "sample", "step": 1, "prompt": p, "text": p} for p in ("def ", "class ")]
    run = read_run(_run(tmp_path, lines))
    assert [p.transport for p in run.probes] == ["dedup", "alltoall"]
    assert [s.prompt for s in run.samples] == ["def ", "class "]
    nothing = dict.fromkeys(train_lines(SMALL, last=1)[0])
    lines = [{**nothing, "kind": "train", "step": 1}, _train(2, math.nan)]
    run = read_run(_run(tmp_path, lines))
    assert run.train[0] == Train(step=1)
    assert run.train[1].loss is not None and math.isnan(run.train[1].loss)
    lines = [{**_train(1, 5.0), "new": {"x": 1}}, {"kind": "novel", "step": 1, "what": "?"}]
    assert [t.loss for t in read_run(_run(tmp_path, lines)).train] == [5.0]


@pytest.mark.parametrize("cut", [0, 1, 5, 40])
def test_a_cut_last_line_is_left_out(tmp_path: Path, cut: int) -> None:
    write_run(tmp_path, SMALL, finished=False)
    metrics = tmp_path / "metrics.jsonl"
    write_lines(tmp_path, [_train(s, 5.0) for s in range(1, 4)])
    with metrics.open("a") as file:
        line = json.dumps(_train(4, 5.0))
        file.write(line[: len(line) - cut])
    run = read_run(tmp_path)
    assert [t.step for t in run.train] == [1, 2, 3, 4][: 3 if cut else 4]
    assert not cut or ("line 4" in run.notes[0] and "cut off" in run.notes[0])


def test_a_summary_older_than_the_last_step_is_not_used(tmp_path: Path) -> None:
    shape = Shape(steps=20, sampled=64)
    write_run(tmp_path, shape, sides=False)
    write_lines(tmp_path, train_lines(shape) + train_lines(shape, first=21, last=25))
    run = read_run(tmp_path)
    assert run.summary is None
    assert "step 20" in run.notes[0]


def _message(run: Path) -> str:
    with pytest.raises(ValueError) as caught:
        read_run(run)
    return str(caught.value)


def test_folders_that_are_no_run_or_have_no_step(tmp_path: Path) -> None:
    assert "is not a folder" in _message(tmp_path / "nope")
    assert "has no run.json" in _message(tmp_path)
    write_run(tmp_path / "a", SMALL)
    assert f"did you mean one of {tmp_path / 'a'}" in _message(tmp_path)
    write_run(tmp_path, SMALL)
    write_lines(tmp_path, [line for line in side_lines(SMALL) if line["kind"] == "eval"])
    assert "no training step" in _message(tmp_path)
    (tmp_path / "metrics.jsonl").write_text("")
    assert "no training step" in _message(tmp_path)
    (tmp_path / "metrics.jsonl").unlink()
    assert "recorded no step yet" in _message(tmp_path)


def test_damage_in_the_middle_names_the_line(tmp_path: Path) -> None:
    write_run(tmp_path, SMALL)
    metrics = tmp_path / "metrics.jsonl"
    lines = metrics.read_text().splitlines(keepends=True)
    metrics.write_text("".join([*lines[:3], lines[3][:30] + "\n", *lines[4:]]))
    assert "metrics.jsonl, line 4 is not JSON" in _message(tmp_path)
    metrics.write_text(lines[0] + "[1, 2]\n")
    assert 'line 2 has no "kind"' in _message(tmp_path)
    metrics.write_bytes(lines[0].encode() + b"\xff\xfe{}\n" + lines[1].encode())
    assert "line 2 is not JSON" in _message(tmp_path)


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ({"kind": "train", "step": 1, "loss": "low"}, "loss: .*number.*'low'"),
        ({"kind": "train", "loss": 1.0}, "step: Field required"),
        ({"kind": "train", "step": 1, "ms": {"dispatch": {"p50": []}}}, "ms.dispatch.p50"),
        ({"kind": "layers", "step": 1, "load": [[1, 2], [1]]}, "load names"),
        ({"kind": "layers", "step": 1, "traffic_rows": [[1, 2], [1]]}, "not square"),
    ],
)
def test_wrong_fields_name_line_and_field(tmp_path: Path, line: dict[str, object], told: str) -> None:
    with pytest.raises(ValueError, match=rf"metrics.jsonl, line 2: .*{told}"):
        read_run(_run(tmp_path, [_train(1, 5.0), line]))


@pytest.mark.parametrize("name", ["run.json", "summary.json"])
def test_damaged_or_foreign_files(tmp_path: Path, name: str) -> None:
    write_run(tmp_path, SMALL)
    (tmp_path / name).write_text('{"steps": ')
    assert f"{name} is damaged" in _message(tmp_path)
    (tmp_path / name).write_text("[]")
    assert "list where an object is expected" in _message(tmp_path)
    (tmp_path / name).write_text(json.dumps({"lossy_reasons": 7}))
    assert "lossy_reasons" in _message(tmp_path)
