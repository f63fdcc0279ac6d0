"""What a simulation writes: a page, numbers, a profile that can be compared, tables for a terminal."""

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
from carpool.report import write_comparison, write_report
from carpool.report.profile_page import fold, write_profile
from carpool.report.simulation import explanation, failure_rows, headline, print_simulation, write_simulation
from tests.planner.step_problem import build
from tests.report.runs import write_run
from tests.report.test_profile import Text, recorded

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
    cells = Text(page).cells
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


def test_what_cannot_be_written(found: Simulation, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="name another folder with --out"):
        write_simulation(found, tmp_path / "file", ABOUT)


def test_tables_for_a_terminal(found: Simulation) -> None:
    told = io.StringIO()
    print_simulation(found, Console(file=told, width=160))
    text = told.getvalue()
    assert text.startswith("16 GPUs take ") and "What goes wrong, at 16 GPUs" in text
    assert ["Failures a day", "2.4"] in failure_rows(found.failures or pytest.fail("no failures"))


def test_scaling_has_an_ideal_line_and_logarithmic_axes(found: Simulation, tmp_path: Path) -> None:
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
