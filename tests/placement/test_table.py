"""The comparison of solvers on a trace: its records, its table, its files."""

from __future__ import annotations

import builtins
import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from carpool.layout.layouts import Layouts
from carpool.layout.topology import Topology
from carpool.placement.objective import evaluate
from carpool.placement.table import Row, place, plot_coactivation, print_table
from tests.placement.synthetic import topics

TRACE = topics(24, 4, 3000, layers=2, length=8)


def test_place_judges_on_the_held_out_half_and_writes_the_best(tmp_path: Path) -> None:
    TRACE.save(tmp_path / "t.npz")
    seen: list[Row] = []
    result = place(
        tmp_path / "t.npz",
        ranks=4,
        nodes=2,
        solvers=("contiguous", "occult", "search"),
        extra_slots=1,
        out=tmp_path / "l.json",
        on_row=seen.append,
    )
    assert seen == result.rows and len(seen) == 6
    layouts = Layouts.load(tmp_path / "l.json")
    assert layouts == result.layouts and tuple(layouts) == TRACE.layers
    data = json.loads(json.dumps(result.to_dict()))
    assert data["settings"]["ranks"] == 4 and len(data["rows"]) == 6
    solved, held_out = TRACE.split()
    for name in TRACE.layers:
        rows = [row for row in result.rows if row.layer == name]
        (best,) = [row for row in rows if row.best]
        assert layouts.about["solver"][name] == best.solver
        there = evaluate(held_out.layer(name), layouts[name], topology=Topology.even(4, 2))
        here = evaluate(solved.layer(name), layouts[name], topology=Topology.even(4, 2))
        assert best.ranks_per_token == there.ranks_per_token and best.solved_ranks_per_token == here.ranks_per_token
        assert best.nodes == there.rows_nodes / there.tokens and best.load == there.load_ratio
        within = [row for row in rows if row.solved_load <= 1.1] or rows
        assert best.solved_layer_us == min(row.solved_layer_us for row in within)
    means = {row.solver: row for row in result.means()}
    ours = [row.ranks_per_token for row in result.rows if row.solver == "occult"]
    assert means["occult"].ranks_per_token == pytest.approx(sum(ours) / 2)
    assert set(means) == {"contiguous", "occult", "search", "best of each layer"}


def test_the_table_shows_every_solver(tmp_path: Path) -> None:
    result = place(TRACE, ranks=4, solvers=("contiguous", "lpt"), layers=TRACE.layers[:1])
    for every_layer in (False, True):
        console = Console(file=io.StringIO(), width=160)
        print_table(result, console, every_layer=every_layer)
        text = console.file.getvalue()  # type: ignore[attr-defined]
        assert "contiguous" in text and "lpt" in text and f"{result.rows[0].ranks_per_token:.3f}" in text
        assert (TRACE.layers[0] in text) == every_layer


def test_a_missing_package_is_reported_not_fatal(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **options: Any) -> Any:
        if name == "mtkahypar":
            raise ImportError("none")
        return real(name, *args, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    result = place(TRACE, ranks=4, solvers=("hypergraph", "lpt"), layers=TRACE.layers[:1])
    missing = result.rows[1]
    assert missing.solver == "hypergraph" and "pip install mtkahypar" in str(missing.unavailable)
    console = Console(file=io.StringIO(), width=160)
    print_table(result, console)
    assert "hypergraph is not available" in console.file.getvalue()  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="no solver is available"):
        place(TRACE, ranks=4, solvers=("hypergraph",))


def test_what_cannot_be_placed_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no solver 'serch'"):
        place(TRACE, ranks=4, solvers=("serch",))
    with pytest.raises(ValueError, match="cannot read the trace"):
        place(tmp_path / "none.npz", ranks=4)
    with pytest.raises(ValueError, match="no layer 'x'"):
        place(TRACE, ranks=4, layers=["x"])
    with pytest.raises(ValueError, match="divided evenly among 3 nodes"):
        place(TRACE, ranks=4, nodes=3)


def test_the_plot_is_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    result = place(TRACE, ranks=4, solvers=("occult",), layers=TRACE.layers[:1])
    plot_coactivation(TRACE.layer(0), result.layouts[TRACE.layers[0]], tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes()[:4] == b"\x89PNG"
