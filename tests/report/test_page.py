"""The page itself, parsed: what it shows, that it needs nothing else, and that nothing from a run can act in it."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
import subprocess
import sys
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from carpool.report import figures, write_report
from carpool.report.charts import ROLES
from carpool.report.figures import POINTS, series, smoothed
from carpool.report.page import decision_rows, plan_rows
from carpool.report.read import read_run
from carpool.report.record_types import RunInfo, Train
from carpool.report.units import bytes_text, count_text, ms_text
from tests.report.runs import CONFIG, Shape, run_info, train_lines, write_lines, write_run

SHAPE = Shape(steps=40, sampled=64)
VOID = {"meta", "link", "br", "img", "hr", "input", "path", "use", "rect", "line", "circle"}
CARDS = ["loss", "gradient-norm", "rate", "balance", "speed", "parts", "copies", "copies-layer", "traffic"]
CARDS += ["load-time", "load-expert"]


class Page(HTMLParser):
    """Tags with attributes, visible text, cells of tables, and the text and the markup inside each element that has an
    id."""

    def __init__(self, page: Path | str) -> None:
        super().__init__()
        self.cells: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.open: list[tuple[str, str | None]] = []
        self.text_of: dict[str, str] = Counter()  # type: ignore[assignment]
        self.tags_of: dict[str, list[tuple[str, dict[str, str | None]]]] = {}
        self.source = page if isinstance(page, str) else page.read_text(encoding="utf-8")
        self.feed(self.source)
        self.close()
        self.text = " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        self.tags.append((tag, attributes))
        for _, name in self.open:
            if name:
                self.tags_of.setdefault(name, []).append((tag, attributes))
        if tag in ("td", "th"):
            self.cells.append("")
        if tag not in VOID:
            self.open.append((tag, attributes.get("id")))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open[-1][0] == tag, f"</{tag}> closes <{self.open[-1][0]}>"
            self.open.pop()

    def handle_data(self, data: str) -> None:
        if any(tag in ("style", "script") for tag, _ in self.open):
            return
        self.words.append(data)
        if self.open and self.open[-1][0] in ("td", "th"):
            self.cells[-1] += data
        for name in {name for _, name in self.open if name}:
            self.text_of[name] = self.text_of.get(name, "") + data + " "

    def shown(self, name: str) -> str:
        """The text inside the element with this id, white space collapsed."""
        return " ".join(str(self.text_of.get(name, "")).split())


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with everything in it, which nobody changes; its report is written."""
    path = write_run(tmp_path_factory.mktemp("runs") / "whole", SHAPE)
    info = run_info(SHAPE)
    info["history"].append({"started": "2026-11-21T10:00:00+00:00", "from_step": 20, "resumed_from": "checkpoints/x"})
    (path / "run.json").write_text(json.dumps(info))
    assert write_report(path) == path / "report.html"
    return path


@pytest.fixture(scope="module")
def page(run: Path) -> Page:
    return Page(run / "report.html")


def _report(path: Path, **info: Any) -> Page:
    if info:
        (path / "run.json").write_text(json.dumps(run_info(SHAPE, **info)))
    return Page(write_report(path))


def test_the_page_needs_no_network_and_no_foreign_script(page: Page) -> None:
    text = page.source.replace('"http://www.w3.org/2000/svg"', "")  # a name, which nothing fetches
    assert not re.search(r"https?://|//[a-z0-9.-]+\.[a-z]{2,}/", text)
    for tag, attributes in page.tags:
        assert tag not in {"link", "iframe", "object", "embed", "base", "img", "image", "style-src"}
        for name, value in attributes.items():
            assert not name.startswith("on"), f"{name} runs code"
            if name in {"src", "href", "xlink:href", "data", "srcset"}:
                assert (value or "").startswith("#")
        assert "url(" not in (attributes.get("style") or "")
    assert [tag for tag, _ in page.tags].count("style") == 1
    style = page.source[page.source.index("<style>") : page.source.index("</style>")]
    assert "@import" not in style and "url(" not in style
    assert [attributes for tag, attributes in page.tags if tag == "script"] == [{}]
    script = page.source[page.source.index("<script>") + len("<script>") : page.source.index("</script>")]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = next(a["content"] for tag, a in page.tags if a.get("http-equiv") == "Content-Security-Policy")
    assert policy == f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    assert "innerHTML" not in script and "eval" not in script, "what it shows is text"
    ids = Counter(attributes["id"] for _, attributes in page.tags if "id" in attributes)
    assert [name for name, count in ids.items() if count > 1] == []
    assert set(re.findall(r'href="#([^)"]+)', page.source)) <= set(ids)


def test_every_colour_is_defined_for_both_themes(page: Page) -> None:
    style = page.source[page.source.index("<style>") : page.source.index("</style>")]
    light, dark = style.split("@media screen and (prefers-color-scheme: dark)")
    for theme in (light[: light.index("}")], dark[: dark.index("}")]):
        defined = set(re.findall(r"--([a-z0-9-]+):", theme))
        assert set(ROLES) <= defined
        assert set(re.findall(r"var\(--([a-z0-9-]+)\)", page.source)) <= defined
    body = page.source[page.source.index("</style>") :]
    assert not re.search(r"(fill|stroke|color): ?#", body), "a colour that no theme can change"


def test_figures_are_there_well_formed_and_have_real_text(page: Page) -> None:
    for name in CARDS:
        figures = [attributes for tag, attributes in page.tags_of[name] if tag == "svg"]
        assert len(figures) == 1 and figures[0]["aria-label"], name
        assert sum(tag == "text" for tag, _ in page.tags_of[name]) >= 4, f"{name}: labels must be text"
    assert "step" in page.shown("loss") and "held out" in page.shown("loss")
    assert "MFU and HFU" not in page.text, "no accelerator, no MFU"
    found = re.findall(r"<svg.*?</svg>", page.source, re.DOTALL)
    assert len(found) >= len(CARDS)
    for text in found:
        for element in ElementTree.fromstring(text).iter():
            for key, value in element.attrib.items():
                assert "nan" not in value or key == "aria-label", f"{element.tag} {key}={value}"


def _hover(page: Page, name: str) -> dict[str, Any]:
    """What the pointer shows in a picture."""
    data = json.loads(next(a["data-hover"] for tag, a in page.tags_of[name] if tag == "svg") or "")
    if suffix := data.get("suffix"):
        data["text"] = [text + suffix for text in data["text"]]
    return data


def _line(page: Page, name: str, line: str = "") -> dict[str, Any]:
    return next(one for one in _hover(page, name)["lines"] if one["name"] == line)


def test_lines_show_what_the_file_says(page: Page, run: Path) -> None:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    train = [line for line in lines if line["kind"] == "train"]
    for name, line, key, text in (
        ("loss", "training, each step", "loss", "{:.4f}"),
        ("rate", "", "learning_rate", "{:.3g}"),
        ("balance", "", "aux_loss", "{:.4f}"),
        ("gradient-norm", "", "grad_norm", "{:.3g}"),
        ("copies", "measured", "copies_per_token", "{:.2f}"),
    ):
        drawn = _line(page, name, line)
        assert drawn["at"] == [str(t["step"]) for t in train]
        assert drawn["text"] == [text.format(t[key]) for t in train], name
        # Higher on the page is smaller y: places and values must be in the same, opposite order.
        order = [y for _, y in sorted(zip((t[key] for t in train), drawn["y"], strict=True))]
        assert order == sorted(order, reverse=True), name
    evals = [line for line in lines if line["kind"] == "eval"]
    held = _line(page, "loss", "held out")
    assert held["text"] == [f"{e['loss']:.4f}" for e in evals] and held["at"] == [str(e["step"]) for e in evals]
    assert sum(tag == "circle" for tag, _ in page.tags_of["loss"]) == len(evals), "evaluations are points"
    speed = _line(page, "speed", "each step")["text"]
    assert speed == [f"{ms_text(t['step_ms'])}, {t['tokens_per_second'] / 1000:.1f}k tokens/s" for t in train]


def test_grids_show_what_the_file_says(page: Page) -> None:
    last = next(line for line in train_lines(SHAPE)[::-1] if line["kind"] == "layers")
    shown = _hover(page, "load-expert")
    loads = [(n, n / (sum(row) / len(row))) for row in last["load"] for n in row]
    assert shown["text"] == [f"{count_text(n)} tokens, {ratio:.2f} × the mean" for n, ratio in loads]
    assert shown["rows"] == [f"layer {i}" for i in range(SHAPE.layers)] and shown["columns"][5] == "expert 5"
    dead = sum(row.count(0) for row in last["load"])
    crosses = [a["d"] for tag, a in page.tags_of["load-expert"] if a.get("class") == "cross"]
    assert sum((d or "").count("M") for d in crosses) == dead
    # A layer over time: the last column is the last step.
    over_time = _hover(page, "experts-1")
    assert over_time["columns"][-1] == "step 40" and over_time["rows"][3] == "expert 3"
    columns = len(over_time["columns"])
    assert over_time["text"][columns - 1 :: columns] == shown["text"][SHAPE.experts : 2 * SHAPE.experts]
    busiest = _hover(page, "load-time")["text"]
    assert busiest[columns - 1] == f"max/mean expert load {max(r for _, r in loads[: SHAPE.experts]):.2f}"
    copies = [line["copies"] for line in train_lines(SHAPE) if line["kind"] == "layers"][-4:]
    means = [sum(layer) / len(layer) for layer in zip(*copies, strict=True)]
    columns = _line(page, "copies-layer", "measured")
    assert columns["text"] == [f"{mean:.3f}" for mean in means] and columns["at"] == ["0", "1", "2", "3"]
    drawn = [a for tag, a in page.tags_of["copies-layer"] if tag == "rect"]
    heights = [float(a["height"] or 0) for a in drawn]
    assert heights == pytest.approx([heights[0] * mean / means[0] for mean in means], rel=0.01), "columns begin at zero"


def _deviation(told: str) -> float:
    return float(told.split(", ")[1].removesuffix(" %").replace("\u2212", "-"))


def test_ranks_are_told_as_deviation_from_their_mean(page: Page) -> None:
    last = next(line for line in train_lines(SHAPE)[::-1] if line["kind"] == "layers")
    for name, values, text in (
        ("rank-share", last["rank_load"], count_text),
        ("rank-experts", last["rank_ms"]["experts"], ms_text),
        ("rank-rides", last["rank_ms"]["rides"], ms_text),
    ):
        shown = _hover(page, name)
        columns = len(shown["columns"])
        assert shown["columns"][-1] == "step 40" and shown["rows"] == [f"rank {i}" for i in range(SHAPE.ranks)]
        mean = sum(values) / len(values)
        for told, value in zip(shown["text"][columns - 1 :: columns], values, strict=True):
            assert told.startswith(f"{text(value)}, ")
            assert _deviation(told) == pytest.approx(100 * (value / mean - 1), abs=0.51)


def test_traffic_is_told_as_deviation_from_the_mean(page: Page) -> None:
    rows = next(line for line in train_lines(SHAPE)[::-1] if line["kind"] == "layers")["traffic_rows"]
    ranks = range(len(rows))
    mean = sum(rows[i][j] for i in ranks for j in ranks if i != j) / (len(rows) * (len(rows) - 1))
    shown = _hover(page, "traffic")["text"]
    for i in ranks:
        for j in ranks:
            text = shown[len(rows) * i + j]
            assert text.startswith(f"{count_text(rows[i][j])} tokens")
            if i != j:
                assert _deviation(text) == pytest.approx(100 * (rows[i][j] / mean - 1), abs=0.051)
            else:
                assert text.endswith(" stay")
    assert f"Mean: {count_text(mean)} tokens per pair of ranks." in page.shown("traffic")


def test_the_block_on_top(page: Page, run: Path) -> None:
    summary = json.loads((run / "summary.json").read_text())
    assert "EXACT" in page.text and "LOSSY" not in page.text
    gigabytes = f"{summary['bytes_remote'] / 1e9:.2f} GB"
    would_be = f"{summary['bytes_remote_alltoall'] / 1e9:.2f} GB"
    more = summary["bytes_remote_alltoall"] / summary["bytes_remote"]
    assert gigabytes in page.text
    assert f"one send per (token, expert) would have moved {would_be}, {more:.2f}× as much" in page.text
    assert f"{summary['copies_per_token']:.2f} of 4" in page.text
    assert "alltoall takes 1.25× as long" in page.text
    assert f"step time {summary['step_ms_median']:.0f} ms median of the steps after warm-up" in page.text
    assert f"{100 * summary['ride_share']:.0f} % of the step" in page.text
    assert page.text.index("bytes moved") < page.text.index("Where the step goes") < page.text.index("Ranks per token")
    assert "bytes moved" in page.shown("quote") and "EXACT" in page.shown("quote")
    share = json.loads((run / "summary.json").read_text())["share"]
    widths = {}
    for tag, attributes in page.tags:
        match = re.fullmatch(r"flex: ([\d.]+) 0 0", attributes.get("style") or "")
        if tag == "span" and match:
            widths[attributes["class"]] = float(match.group(1))
    assert list(widths) == ["dispatch", "experts", "combine", "rest"]
    assert sum(widths.values()) == pytest.approx(100, abs=0.01)
    assert widths == pytest.approx({part: 100 * value for part, value in share.items()}, abs=0.01)


def test_predicted_is_drawn_apart_from_measured(page: Page) -> None:
    copies = {a.get("style"): a.get("class") for tag, a in page.tags_of["copies"] if tag == "path"}
    assert copies["stroke: var(--predicted)"] == "dash" and copies["stroke: var(--dispatch)"] == "line"
    style = page.source[page.source.index("<style>") : page.source.index("</style>")]
    assert re.search(r"svg path\.dash \{[^}]*stroke-dasharray", style)
    uniform = run_info(SHAPE)["predicted"]["copies_per_token_uniform"]
    assert f"predicted (uniform): {uniform:.2f}" in page.shown("copies")
    assert "K = 4" in page.shown("copies")


def test_memory_bars_have_the_lengths_of_their_numbers(page: Page) -> None:
    widths = re.findall(
        r'<tr class="([^"]+)"><th scope="row">([^<]+)</th><td>([^<]+)</td>.*?width: ([\d.]+)%', page.source
    )
    pieces = run_info(SHAPE)["predicted"]["memory_per_rank_bytes"]
    assert [name for kind, name, _, _ in widths if kind == "predicted"] == [name for name in pieces if name != "total"]
    most = 413e6
    for kind, name, told, width in widths:
        size = {"predicted in all": pieces["total"], "measured peak": most}.get(name) or pieces[name]
        assert told == bytes_text(size) and float(width) == pytest.approx(100 * size / most, abs=0.06)
        assert ("measured" in kind) == (name == "measured peak")


def test_what_is_recorded_in_part_is_told_as_far_as_it_goes(run: Path) -> None:
    info, read = run_info(SHAPE), read_run(run)
    sizes = {"parameters": 300e6, "context": 500e6, "fragments": 9e6, "total": 809e6}
    read.info = RunInfo.model_validate({**info, "predicted": {"memory_per_rank_bytes": sizes}})
    told = {name: (size, kind) for name, size, kind, _ in figures.memory(read)}
    assert told["predicted in all"][0] == 809e6 and told["predicted of tensors"] == (300e6, "predicted sum")
    assert told["measured peak of tensors"][1] == "measured sum"
    read = read_run(run)
    read.info = RunInfo.model_validate({"plan": {"predicted": {"memory_bytes": 2e9}, "measured": {"step_ms": 9.0}}})
    assert plan_rows(read)[:2] == [
        ("Step time", "– (– to –)", "9.00 ms", "–"), ("Memory of a rank", "2.00 GB", "–", "–"),
    ]  # fmt: skip


def test_what_ran_and_how_to_run_it_again(page: Page, run: Path) -> None:
    for expected in (
        "carpool train --compare alltoall training.max_steps=40",
        f"carpool train --config {run}/config.toml training.output_dir={run}-again",
        "0123456789abcdef0123456789abcdef01234567",
        "OlmoeForCausalLM",
        "9\u2009568\u2009000",
        "checkpoints/step-00000040",
        "38.4 MB",
        "2026-11-21T10:00:00+00:00",
        "Python standard library",
        "num_experts_per_tok = 4",
    ):
        assert " ".join(expected.split()) in page.text, expected
    assert " ".join(CONFIG.split()) in page.text
    assert "def _check(self, name): return self._map # step 40" in page.text
    rows = decision_rows(read_run(run))
    assert rows == [
        ("transport", "dedup", "default", "4 of 16 experts over 4 ranks: rides can be shared"),
        ("schedule", "name: chunks, chunks: 2", "measured", "measured, in milliseconds"),
    ]
    assert all(" ".join(row) in page.shown("decisions") for row in rows)


def test_what_a_run_contains_cannot_act(tmp_path: Path) -> None:
    evil = "</pre></details><script>alert(1)</script><img src=x onerror=alert(2)>\x00\x1b[31m\u202e\ud800 {{ 7 * 7 }}"
    lines = train_lines(SHAPE, last=2)
    lines += [{"kind": "sample", "step": 2, "prompt": "<b>", "text": "<b>" + evil}]
    lines += [{"kind": "checkpoint", "step": 2, "path": "<i>path", "bytes": 1, "seconds": None}]
    write_run(tmp_path / "<run>", SHAPE, finished=False)
    write_lines(tmp_path / "<run>", lines)
    (tmp_path / "<run>" / "config.toml").write_text('x = "</pre><script>"')
    names = [f'"><script>.{i}.x' for i in range(SHAPE.layers)]
    model = {"architecture": "<script>", "moe_layers": names, "num_experts_per_tok": 4}
    told = {"command": "carpool train '<script>&amp;'", "environment": {"<u>": "<s>&lt;"}, "model": model}
    page = _report(tmp_path / "<run>", **told)
    assert not {"img", "i", "u", "s"} & {tag for tag, a in page.tags if not a}, "markup from the run"
    assert [tag for tag, _ in page.tags].count("script") == 1, "the page's own"
    for shown in ("<script>alert(1)</script><img src=x onerror=alert(2)>", "<i>path", "'<script>&amp;'", "<s>&lt;"):
        assert shown in page.text
    assert "{{ 7 * 7 }}" in page.text
    assert not re.search(r"[\x00-\x08\x0b-\x1f\u202e\ud800]", page.source)


def test_runs_that_go_on_or_recorded_next_to_nothing(tmp_path: Path) -> None:
    write_run(tmp_path, Shape(steps=3, sampled=64), finished=False, sides=False)
    page = Page(write_report(tmp_path))
    assert "not finished, 3 of 120 steps so far" in page.text
    assert "The run wrote no samples." in page.text and "not measured; training loss" in page.text
    assert "held out" not in page.shown("loss")
    (little := tmp_path / "little").mkdir()
    (little / "run.json").write_text("{}")
    (little / "metrics.jsonl").write_text('{"kind": "train", "step": 1}\n')
    page = Page(write_report(little))
    for name in CARDS:
        assert "The run recorded" in page.shown(name), name
        assert "svg" not in {tag for tag, _ in page.tags_of[name]}
    assert "Where experts live" not in page.text
    assert "neither its command nor its configuration" in page.text
    assert "did not time the parts" in page.text
    assert "None" not in page.text.replace("None was written", "")


def test_a_run_of_an_earlier_version(tmp_path: Path) -> None:
    write_run(tmp_path, SHAPE)
    lines = train_lines(SHAPE)
    for line in lines:
        for key in ("rank_load", "rank_ms", "copies"):
            line.pop(key, None)
    write_lines(tmp_path, lines)
    page = Page(write_report(tmp_path))
    assert not {"rank-share", "rank-experts", "rank-rides"} & set(page.tags_of)
    assert "The run recorded no ranks per token by layer." in page.shown("copies-layer")
    assert "svg" in {tag for tag, _ in page.tags_of["load-expert"]}


def test_nan_is_shown_and_drawn_around(tmp_path: Path) -> None:
    write_run(tmp_path, SHAPE, finished=False)
    lines = train_lines(SHAPE)
    for line in lines[-20:]:
        if line["kind"] == "train":
            line.update(loss=math.nan, grad_norm=math.inf)
        else:
            line.update(load=[[0] * SHAPE.experts] * SHAPE.layers)
    write_lines(tmp_path, lines)
    page = Page(write_report(tmp_path))
    assert "Loss NaN" in page.text and "training loss NaN" in page.text
    assert "svg" in {tag for tag, _ in page.tags_of["loss"]}


def test_lossy_runs_say_so_on_top_and_accelerators_their_use(tmp_path: Path) -> None:
    write_run(tmp_path, SHAPE, finished=False, sides=False)
    page = _report(tmp_path, exact=False, lossy_reasons=["capacity factor 1.0 drops tokens", "FP8 payload"])
    assert page.text.index("LOSSY capacity factor 1.0 drops tokens; FP8 payload") < page.text.index("bytes moved")
    assert "EXACT" not in page.text
    page = Page(write_report(write_run(tmp_path, Shape(steps=6, sampled=64, gpu=True))))
    assert {"MFU", "HFU"} <= set(page.shown("utilisation").split())
    assert "NVIDIA H200" in page.text and "989T" in page.text


def test_large_and_small_shapes(tmp_path: Path) -> None:
    big = Shape(steps=10, ranks=16, layers=32, experts=128, chosen=8, sampled=64, tokens=64 * 16)
    path = write_report(write_run(tmp_path / "big", big, sides=False))
    assert path.stat().st_size < 2_000_000
    one = Page(write_report(write_run(tmp_path / "one", Shape(steps=1, ranks=1, layers=1, sampled=64), sides=False)))
    assert "0 B between ranks" in one.text and not {"traffic", "rank-load"} & set(one.tags_of)


def test_smoothing_and_thinning_take_means_of_neighbours() -> None:
    values = np.arange(100.0) ** 2
    values[50] = math.nan
    smooth, span = smoothed(values)
    assert span == 5
    assert smooth[0] == values[0] and smooth[99] == values[99] and smooth[1] == pytest.approx(values[:3].mean())
    assert smooth[30] == pytest.approx(values[28:33].mean())
    assert smooth[51] == pytest.approx(np.nanmean(values[49:54])) and math.isnan(smooth[50])
    train = [Train(step=s, loss=math.nan if s == 3 else float(s)) for s in range(1, 4 * POINTS + 1)]
    steps, values = series(train, lambda t: t.loss)
    assert len(steps) == POINTS
    assert steps[:2].tolist() == [2.5, 6.5] and steps[-1] == 4 * POINTS - 1.5
    assert values[1:].tolist() == steps[1:].tolist()
    assert values[0] == pytest.approx((1 + 2 + 4) / 3), "what is not a number is left out of the mean"


def test_outputs_and_packages_that_are_not_there(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="does not exist"):
        write_report(run, tmp_path / "nowhere" / "report.html")
    with pytest.raises(ValueError, match="is a folder"):
        write_report(run, tmp_path)
    old = tmp_path / "report.html"
    old.write_text("the old one")
    (tmp_path / ".report.html.part").mkdir()
    with pytest.raises(ValueError, match="cannot be written"):
        write_report(run, old)
    assert old.read_text() == "the old one"
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(ImportError, match=r"needs jinja2.*pip install jinja2"):
        write_report(run)


def test_the_room_needs_neither_torch_nor_transformers(run: Path, tmp_path: Path) -> None:
    """A report can be written where the run was merely copied to, and it is the same one, byte for byte.

    (The package's own front door does import torch; it is replaced here.)
    """
    room = Path(sys.modules["carpool.report"].__file__ or "").parent
    program = (
        "import sys, types, pathlib\n"
        "for name in ('torch', 'transformers', 'matplotlib'): sys.modules[name] = None\n"
        "front = sys.modules['carpool'] = types.ModuleType('carpool')\n"
        f"front.__path__ = [{str(room.parent)!r}]\n"
        "from carpool.report import write_report\n"
        f"write_report(pathlib.Path({str(run)!r}), pathlib.Path({str(tmp_path / 'r.html')!r}))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "r.html").read_bytes() == (run / "report.html").read_bytes()


def _looks(path: Path) -> Path:
    """A run that looked twice at its placement, and moved experts the first time."""
    before, after = {"rows": 2.5, "bytes": 4000.0, "load": 1.31}, {"rows": 2.0, "bytes": 3200.0, "load": 1.04}
    sizes = {"layers": 4, "experts": 9, "bytes": 12_000_000, "seconds": 0.25}
    moved = {"why": "saves 3.1 s of 40 s left", "solver": "search", "before": before, "predicted": after, **sizes}
    kept = {"why": "saves too little", "before": after, "predicted": after, "layers": 0, "experts": 0}
    looks: list[dict[str, Any]] = [
        {"kind": "placement", "step": 10, "event": "moved", "solve_seconds": 1.5, **moved},
        {"kind": "placement", "step": 20, "event": "kept", **kept},
        {"kind": "placement", "step": 40, "event": "measured", "since": 10, "measured": {**after, "rows": 2.07}},
    ]
    lines = train_lines(SHAPE)
    for line in lines:
        if line["kind"] == "train":
            line["rows_remote_per_token"] = 2.5 if line["step"] <= 10 else 2.07
            line["rank_load_max_over_mean"] = 1.3 if line["step"] <= 10 else 1.05
    write_run(path, SHAPE)
    write_lines(path, lines + looks)
    return path


def test_where_experts_went_is_told_and_drawn(tmp_path: Path, page: Page) -> None:
    looked = _report(_looks(tmp_path / "looked"))
    table = looked.shown("placement")
    for text in ("moved: saves 3.1 s of 40 s left", "12.0 MB", "250 ms", "1.50 s", "kept: saves too"):
        assert text in table, text
    assert "2.50 → 2.00, 2.07" in table
    assert "4.00 kB → 3.20 kB, 3.20 kB" in table and "1.31 → 1.04, 1.04" in table
    for name in ("remote-rows", "rank-load"):
        drawn = [(a.get("class"), a.get("style")) for tag, a in looked.tags_of[name] if tag in ("path", "line")]
        assert ("dash", "stroke: var(--predicted)") in drawn, name
        assert [style for _, style in drawn].count("stroke: var(--mark)") == 1, name
    assert "placement" not in page.tags_of and "remote-rows" not in page.tags_of, "a run that never looked"


def test_loads_of_ranks_with_spare_slots_are_drawn(tmp_path: Path, page: Page) -> None:
    lines = train_lines(SHAPE)
    for line in lines:
        if line["kind"] == "train":
            line |= {"rank_load_before": 1.83, "rank_load_after": 1.02}
            line["ms"]["fill"] = {"p50": 2.5, "p99": 3.0, "total": 20.0}
        else:
            line["spare"] = [{"before": 1.7 + layer / 10, "after": 1.03} for layer in range(SHAPE.layers)]
    write_run(tmp_path / "spare", SHAPE)
    write_lines(tmp_path / "spare", lines)
    spare = _report(tmp_path / "spare")
    assert "without spare slots" in spare.shown("rank-load") and "waits for replicas" in spare.shown("parts")
    assert "without spare slots" in spare.shown("rank-load-layer") and "rank-load-layer" not in page.tags_of
    assert "waits for replicas" not in page.shown("parts")


def test_what_carpool_place_wrote_is_linked(tmp_path: Path) -> None:
    folder = tmp_path / "my place"
    folder.mkdir()
    (folder / "place.png").write_bytes(b"")
    run = write_run(tmp_path / "runs" / "a", SHAPE)
    layout = {"kind": "permuted", "source": str(folder / "layouts.json")}
    page = _report(run, layout=layout)
    links = [attributes["href"] for tag, attributes in page.tags_of["solved"] if tag == "a"]
    assert links == ["../../my%20place/place.png"], "and not place.json, which is not there"
    (folder / "place.png").unlink()
    assert "solved" not in _report(run, layout=layout).tags_of
