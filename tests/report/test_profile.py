"""The page of a profile: every rank's lanes, the numbers of profile.json, two runs to one scale; errors that help."""

from __future__ import annotations

import html
import io
import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from rich.console import Console

from carpool.planner.simulator.goodput import Failures
from carpool.planner.simulator.simulate import Simulation, simulate
from carpool.profile.numbers import Profile, measure, save_profile
from carpool.profile.rank_trace import read
from carpool.report import write_comparison, write_report
from carpool.report.charts import draw_lanes
from carpool.report.profile_page import fold, profile_path, write_profile
from carpool.report.simulation import explanation, failure_rows, headline, print_simulation, write_simulation
from tests.planner.step_problem import build
from tests.profile.traces import two_streams
from tests.report.runs import Shape, write_run
from tests.report.test_page import Page


def recorded(folder: Path, slower: float = 1.0, on_device: bool = True) -> Path:
    """A run's folder with a profile of two ranks; the second is `slower`."""
    trace = two_streams()
    for event in trace["traceEvents"]:
        for key in ("ts", "dur"):
            if key in event:
                event[key] *= slower
    ranks = [measure(read(trace), rank) for rank in (0, 1)]
    about = {"command": "carpool profile <b>&", "transport": "nvlink"}
    profile_path(folder).parent.mkdir(parents=True)
    save_profile(Profile(about=about, on_device=on_device, plain_ms=0.9, ranks=ranks), profile_path(folder))
    return folder


def test_page_of_one_run(tmp_path):
    written = write_profile(recorded(tmp_path / "run"))
    assert written == tmp_path / "run" / "profile.html"
    page = written.read_text()
    cells = Page(page).cells
    assert page.count("stream 7: computation") == page.count("stream 20: rides") == 2
    assert {"rank 0", "rank 1", "mean"} <= set(cells)
    assert cells.count("230 µs (23 %)") == 3, "exposed rides of both ranks and their mean"
    assert ["layers.0", "forward", "220 µs", "130 µs", "59 %", "13 %", "20.0 µs", "200 µs"] in [
        cells[i : i + 8] for i in range(len(cells))
    ]
    assert "layers.0, forward, dispatch, chunk 1, 100 µs from 0.10 ms" in page
    assert "carpool profile &lt;b&gt;&amp;" in page and "<b>&" not in page
    assert "900 µs without the profiler" in page
    assert "on a CPU" not in page
    assert not re.search(r"(?:src|href)=|url\(", page) and page.count("<script") == 1, "it needs nothing else"
    assert "Exposed rides took 23 % of a step of 1.00 ms; 28 % of the rides were hidden." in page
    assert page.index("<svg") < page.index("In numbers") < page.index("<table"), "the lanes come first"
    page = write_profile(recorded(tmp_path / "cpu", on_device=False)).read_text()
    assert "Recorded on a CPU" in page and "nothing runs beside anything" in page


def test_two_runs_have_one_scale(tmp_path):
    after, before = recorded(tmp_path / "after"), recorded(tmp_path / "before", slower=2.0)
    output = tmp_path / "both.html"
    assert write_profile(after, before, output) == output
    page = output.read_text()
    cells = Page(page).cells
    assert page.index(f"Before: {before}") < page.index(f"After: {after}")
    rows = [cells[i : i + 5] for i in range(len(cells))]
    assert ["Rides, exposed", "460 µs", "230 µs", "-230 µs", "0.50"] in rows
    assert ["layers.0", "forward", "260 µs", "130 µs", "-130 µs"] in rows
    assert ["Rides, exposed, % of the step", "23 %", "23 %", "+0.0 points", "–"] in rows
    widths = [float(width) for width in re.findall(r'class="idle" x="256" y="4" width="([\d.]+)"', page)]
    assert widths == [1000.0, 500.0]


def test_a_lane_shows_what_ran_where():
    numbers = measure(read(two_streams()), 0)
    svg = ElementTree.fromstring(draw_lanes(Profile(on_device=True, ranks=[numbers]), 1.0, "run"))
    shown = [
        (rect.get("class"), float(rect.get("x") or 0) - 256, float(rect.get("width") or 0)) for rect in svg.iter("rect")
    ]
    assert [one for one in shown if one[0] in ("dispatch", "combine")] == [
        ("dispatch", 100.0, 100.0),
        ("combine", 380.0, 120.0),
        ("dispatch", 600.0, 100.0),
    ]
    assert len([one for one in shown if one[0] == "idle"]) == 3
    assert [text.text for text in svg.iter("text") if text.get("text-anchor") == "middle"][:3] == ["0", "0.1", "0.2"]


def test_the_run_s_report_tells_it(tmp_path):
    run = write_run(tmp_path / "run", Shape(steps=3, sampled=16), sides=False)
    assert 'id="profile"' not in write_report(run).read_text()
    page = write_report(recorded(run)).read_text()
    assert "230 µs of 320 µs of rides were exposed, 23 % of a step of 1.00 ms" in page
    assert 'href="profile.html"' not in page, "it was not written"
    assert '<a href="report.html">' in write_profile(run).read_text()
    assert '<a href="profile.html">Lane by lane</a>' in write_report(run).read_text()


def test_errors_help(tmp_path, found: Simulation):
    run = recorded(tmp_path / "run")
    with pytest.raises(ValueError, match="has no profile"):
        write_profile(tmp_path)
    with pytest.raises(ValueError, match="has no profile"):
        write_profile(run, before=tmp_path)
    with pytest.raises(ValueError, match="is a folder; name a file"):
        write_profile(run, output=tmp_path)
    with pytest.raises(ValueError, match="does not exist; name a file"):
        write_profile(run, output=tmp_path / "no" / "page.html")
    profile_path(run).write_text("{}")
    with pytest.raises(ValueError, match="is damaged"):
        write_profile(run)
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="name another folder with --out"):
        write_simulation(found, tmp_path / "file", ABOUT)


ABOUT = {"Plan": "<b>&plan.toml", "Hardware": "H200: measured"}


@pytest.fixture(scope="module")
def found() -> Simulation:
    return simulate(build, 16, failures=Failures(36000.0, 60.0, 300.0))


def test_page_and_files(found: Simulation, tmp_path: Path) -> None:
    page = write_simulation(found, tmp_path / "new", ABOUT).read_text()
    folder = tmp_path / "new"
    assert sorted(path.name for path in folder.rglob("*") if path.is_file()) == [
        "profile.html", "profile.json", "simulation.html", "simulation.json", "trace.json.gz",
    ]  # fmt: skip
    assert "&lt;b&gt;&amp;plan.toml" in page and "<b>&plan" not in page and "None" not in page
    cells = Page(page).cells
    assert "one rank computes at 0.9 of the others' speed" in cells and "H200: measured" in cells
    pictures = [page[at : page.index("</svg>", at) + 6] for at in range(len(page)) if page.startswith("<svg", at)]
    assert len(pictures) == 3
    for picture in pictures:
        ElementTree.fromstring(picture)
    record = json.loads((folder / "simulation.json").read_text())
    assert record["gpus"] == 16 and record["about"] == ABOUT
    assert record["step_seconds"] == pytest.approx(found.sizes[-1].drawn)
    both = write_profile(recorded(tmp_path / "run"), folder, tmp_path / "both.html").read_text()
    assert "The first step is simulated" in both


def test_without_failures_and_with_one_size(tmp_path: Path) -> None:
    page = write_simulation(simulate(build, 16, sizes=[]), tmp_path, ABOUT).read_text()
    assert "Goodput" not in page and "One size was simulated." in page
    assert json.loads((tmp_path / "simulation.json").read_text())["failures"] is None


def test_the_verdict_comes_first_in_words(found: Simulation, tmp_path: Path) -> None:
    failures = found.failures or pytest.fail("no failures")
    page = write_simulation(found, tmp_path, ABOUT, "Ask for a plan.").read_text()
    step, advice, time = explanation(found, "Ask for a plan.")
    said = [page.index(one) for one in (headline(found), step, advice, time, "<h2>Scaling</h2>")]
    assert said == sorted(said)
    assert "; each does " in headline(found) and "each does" not in headline(simulate(build, 16, sizes=[]))
    # What waits for data is not called idle.
    waiting = sum(found.exposed[kind] for kind in ("dispatch", "combine", "reduction"))
    assert found.communication == pytest.approx(waiting / found.sizes[-1].drawn) and waiting > 0
    assert "Exposed communication" in page and "Idle" not in page
    # The three shares are all of the time, and drawn failures agree.
    shares = [float(one) for one in re.findall(r"([\d.]+) %", time)]
    assert len(shares) == 3 and sum(shares) == pytest.approx(100, abs=1.1)
    assert shares[0] == pytest.approx(100 * failures.sampled_goodput(failures.daly)[0], abs=1.5)
    assert len(explanation(found)) == 2
    told = io.StringIO()
    print_simulation(found, Console(file=told, width=160))
    text = told.getvalue()
    assert text.startswith("16 GPUs take ") and "What goes wrong, at 16 GPUs" in text
    assert ["Failures a day", "2.4"] in failure_rows(found.failures or pytest.fail("no failures"))
    page = write_simulation(found, tmp_path, ABOUT).read_text()
    picture = page[page.index('id="scaling"') : page.index("</figure>", page.index('id="scaling"'))]
    assert "both axes logarithmic" in picture and f"ideal: the step of {found.sizes[0].gpus} GPUs" in picture
    lines = {
        one["name"]: one for one in json.loads(html.unescape(picture.split('data-hover="')[1].split('"')[0]))["lines"]
    }
    (ideal,) = (one for name, one in lines.items() if name.startswith("ideal"))
    assert set(ideal["y"]) == {lines["drawn"]["y"][0]}, "the step of the first size, at each size"


def test_wide_tables_scroll_on_narrow_screens(found: Simulation, tmp_path: Path) -> None:
    write_simulation(found, tmp_path / "simulated", ABOUT)
    pages = [tmp_path / "simulated" / "simulation.html", tmp_path / "simulated" / "profile.html"]
    pages += [write_report(write_run(tmp_path / name)) for name in ("a", "b")]
    pages.append(write_comparison(tmp_path / "a", tmp_path / "b"))
    for page in pages:
        text = page.read_text()
        style, body = text.split("</style>", 1)
        assert ".wide, .scroll { overflow-x: auto; }" in style
        tables = re.findall(r"(<div class=\"(?:wide|scroll)[^>]*>\s*)?<table[^>]*>(.*?)</tr>", body, flags=re.DOTALL)
        wide = [(before, row) for before, row in tables if row.count("<th") + row.count("<td") > 2]
        assert wide and all(before for before, _ in wide), f"{page.name} has a table that does not scroll"


def test_layers_that_are_equal_share_a_row(found: Simulation, tmp_path: Path) -> None:
    rows = [[f"layers.{i}", way, "1 ms", "2 ms"] for i in range(96) for way in ("forward", "backward")]
    rows.append(["layers.96", "forward", "3 ms", "2 ms"])
    assert fold(rows) == [
        ["layers.0 … layers.95 (96 layers)", "forward", "1 ms", "2 ms"],
        ["layers.0 … layers.95 (96 layers)", "backward", "1 ms", "2 ms"],
        ["layers.96", "forward", "3 ms", "2 ms"],
    ]
    write_simulation(found, tmp_path, ABOUT)
    page = (tmp_path / "profile.html").read_text()
    # Of a simulated step all that is no work is a wait for communication, which is exposed.
    assert "Exposed rides" in page and "<dt>Nothing ran</dt>" not in page
