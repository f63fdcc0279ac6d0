"""Files of placement: routing traces, how they are split and what they measure; layouts of a whole model; and the
comparison of solvers on a trace."""

from __future__ import annotations

import builtins
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from carpool.layout import ExpertLayout
from carpool.layout.layouts import Layouts
from carpool.layout.topology import Topology
from carpool.placement.objective import evaluate
from carpool.placement.table import Row, place, plot_coactivation, print_table
from carpool.placement.trace import LayerTrace, Trace, concatenate
from tests.placement.synthetic import topics

EXPERTS = np.array([[[0, 1], [1, 2], [2, 0], [3, 1]], [[3, 2], [3, 1], [3, 0], [3, 2]]])
SEQUENCES = np.array([4, 4, 9, 1])


def small(**change: Any) -> Trace:
    values: dict[str, Any] = {
        "expert_LTK": EXPERTS,
        "sequence_T": SEQUENCES,
        "layers": ("a", "b"),
        "meta": {"num_experts": 4},
    }
    return Trace(**{**values, **change})


def test_a_trace_survives_its_file(tmp_path: Path) -> None:
    weights = np.random.default_rng(0).random(EXPERTS.shape)
    for extra in ({}, {"weight_LTK": weights}, {"token_T": np.array([5, 6, 7, 70000]), "weight_LTK": weights}):
        trace = small(meta={"num_experts": 4, "model": "x"}, **extra)
        trace.save(tmp_path / "t.npz")
        again = Trace.load(tmp_path / "t.npz")
        assert again.expert_LTK.dtype == np.uint8 and again.layers == ("a", "b") and again.meta == trace.meta
        np.testing.assert_array_equal(again.expert_LTK, EXPERTS)
        np.testing.assert_array_equal(again.sequence_T, SEQUENCES)
        if "weight_LTK" in extra:
            assert again.weight_LTK is not None and again.weight_LTK.dtype == np.float16
            np.testing.assert_allclose(again.weight_LTK, weights, atol=1e-3)
        else:
            assert again.weight_LTK is None
        assert (again.token_T is None) == ("token_T" not in extra)


def test_more_than_256_experts_take_two_bytes(tmp_path: Path) -> None:
    trace = Trace(np.array([[[299, 0]]]), np.array([0]), ("a",), {"num_experts": 300})
    trace.save(tmp_path / "t.npz")
    assert Trace.load(tmp_path / "t.npz").expert_LTK.dtype == np.uint16
    assert Trace.load(tmp_path / "t.npz").layer(0).expert_TK.tolist() == [[299, 0]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"expert_LTK": EXPERTS[0]}, r"must be \(L, T, K\) integers"),
        ({"expert_LTK": EXPERTS.astype(float)}, r"must be \(L, T, K\) integers"),
        ({"expert_LTK": EXPERTS[:, :0]}, "needs layers, tokens and choices"),
        ({"meta": {}}, "num_experts"),
        ({"meta": {"num_experts": 3}}, r"ids from 0 to 3, but experts are 0\.\.2"),
        ({"expert_LTK": EXPERTS - 1}, "ids from -1"),
        ({"expert_LTK": np.where(EXPERTS == 1, 0, EXPERTS)}, r"token 0 of layer 0 names an expert twice: \[0 0\]"),
        ({"layers": ("a",)}, "as many different names"),
        ({"layers": ("a", "a")}, "as many different names"),
        ({"sequence_T": SEQUENCES[:3]}, "sequence_T has the shape"),
        ({"token_T": SEQUENCES[:3]}, "token_T has the shape"),
        ({"weight_LTK": np.ones((2, 4, 3))}, "weight_LTK has the shape"),
        ({"sequence_T": np.array([0, 1, 0, 1])}, "consecutive"),
    ],
)
def test_an_impossible_trace_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        small(**change)


def test_a_corrupt_file_is_named(tmp_path: Path) -> None:
    path, whole = tmp_path / "t.npz", {"expert_LTK": EXPERTS, "sequence_T": SEQUENCES, "layers": ["a", "b"]}
    wrong: list[tuple[bytes | dict[str, Any], str]] = [
        (b"not a zip", r"t\.npz is not a routing trace"),
        (b"PK\x03\x04 broken", r"t\.npz is not a routing trace"),
        (b"", r"t\.npz is not a routing trace"),
        ({"expert_LTK": EXPERTS}, "lacks layers, meta, sequence_T"),
        (whole | {"meta": json.dumps([1])}, "meta must be an object"),
        (whole | {"meta": json.dumps({"num_experts": 2})}, r"t\.npz.*ids from 0 to 3"),
    ]
    for content, message in wrong:
        if isinstance(content, bytes):
            path.write_bytes(content)
        else:
            np.savez(path, **content)
        with pytest.raises(ValueError, match=message):
            Trace.load(path)
    with path.open("wb") as file:
        np.save(file, EXPERTS)
    with pytest.raises(ValueError, match=r"it is no .npz file"):
        Trace.load(path)
    with pytest.raises(ValueError, match=r"cannot read the trace .*nowhere"):
        Trace.load(tmp_path / "nowhere.npz")


def test_sequences_are_dealt_to_ranks_in_turn() -> None:
    assert small().source_T(2).tolist() == [0, 0, 1, 0] == small().layer(0).source_T(2).tolist()
    assert small().source_T(1).tolist() == [0] * 4
    with pytest.raises(ValueError, match="at least one rank"):
        small().source_T(0)


def test_split_keeps_sequences_whole() -> None:
    even, odd = small().split()
    assert even.sequence_T.tolist() == [4, 4, 1] and odd.sequence_T.tolist() == [9]
    assert odd.expert_LTK.tolist() == EXPERTS[:, 2:3].tolist() and even.num_sequences == 2
    assert concatenate([even, odd]).num_sequences == 3
    with pytest.raises(ValueError, match="3 sequences cannot be split into 4"):
        small().split(4)


def test_layers_by_name_and_number() -> None:
    assert small().layer("b").expert_TK.tolist() == small().layer(1).expert_TK.tolist() == EXPERTS[1].tolist()
    with pytest.raises(ValueError, match="no layer 'c'; it has a, b"):
        small().layer("c")
    with pytest.raises(ValueError, match=r"no layer 2; it has 0\.\.1"):
        small().layer(2)


def test_load_and_coactivation_count_tokens() -> None:
    layer = small().layer(0)
    assert layer.load_E.tolist() == [2, 3, 2, 1]
    assert layer.coactivation_EE.tolist() == [[2, 1, 1, 0], [1, 3, 1, 1], [1, 1, 2, 0], [0, 1, 0, 1]]


def test_specialisation_of_extremes() -> None:
    draw = np.random.default_rng(0)
    random = np.argsort(draw.random((30_000, 16)), axis=1)[:, :2]
    sequence_T = np.arange(30_000) // 100
    measures = LayerTrace(random, sequence_T, 16).specialisation()
    assert measures["load_entropy"] > 0.999 and measures["load_gini"] < 0.03 and measures["load_max_mean"] < 1.1
    # Without replacement the second choice is not the first: it tells log(16/15) of log 16.
    assert measures["choice_information"] == pytest.approx(np.log(16 / 15) / np.log(16), abs=2e-3)
    assert measures["neighbour_information"] == pytest.approx(0, abs=2e-3)

    first_T = draw.integers(0, 8, 300)[sequence_T]
    tied = np.stack([first_T, first_T + 8], axis=1)
    measures = LayerTrace(tied, sequence_T, 16).specialisation()
    assert measures["choice_information"] > 0.98 and measures["neighbour_information"] > 0.98

    one = np.tile([3, 5], (50, 1))
    measures = LayerTrace(one, np.zeros(50, int), 16).specialisation()
    assert measures["load_gini"] == pytest.approx(14 / 16) and measures["load_max_mean"] == 8
    assert measures["load_entropy"] == pytest.approx(np.log(2) / np.log(16)) and measures["choice_information"] == 0


PLAIN = ExpertLayout.contiguous(4, 2)
OTHER = ExpertLayout(((0, 2), (1, 3)))


def test_one_layout_per_layer(tmp_path: Path) -> None:
    layouts = Layouts({"a.experts": PLAIN, "b.experts": OTHER}, {"solver": "search"})
    assert layouts["b.experts"] is OTHER and list(layouts) == ["a.experts", "b.experts"] and layouts.num_ranks == 2
    assert "c" not in layouts and layouts.get("c") is None and layouts.same is None
    layouts.save(tmp_path / "l.json")
    again = Layouts.load(tmp_path / "l.json")
    assert again == layouts and hash(again) == hash(layouts) and again.about == {"solver": "search"}
    assert set(json.loads((tmp_path / "l.json").read_text())) == {"layers", "about"}
    changed = layouts.with_layers({"a.experts": OTHER})
    assert changed != layouts and changed["a.experts"] == OTHER and layouts["a.experts"] == PLAIN


def test_one_layout_for_all_layers(tmp_path: Path) -> None:
    OTHER.save(tmp_path / "one.json")
    layouts = Layouts.load(tmp_path / "one.json")
    assert layouts == Layouts(OTHER) and layouts["anything"] == OTHER == layouts.same and "x" in layouts
    assert len(layouts) == 0 and layouts.num_ranks == 2
    layouts.save(tmp_path / "two.json")
    assert ExpertLayout.load(tmp_path / "two.json") == OTHER


def test_an_unknown_layer_is_named_with_the_file(tmp_path: Path) -> None:
    Layouts({"model.layers.0.mlp.experts": PLAIN}).save(tmp_path / "l.json")
    message = r"l\.json: no layout for layer 'model.layers.1.mlp.experts'.*'model.layers.0.mlp.experts'"
    with pytest.raises(ValueError, match=message):
        Layouts.load(tmp_path / "l.json")["model.layers.1.mlp.experts"]


def test_layers_share_their_ranks() -> None:
    with pytest.raises(ValueError, match="a has 2 and b has 4"):
        Layouts({"a": PLAIN, "b": ExpertLayout.contiguous(4, 4)})
    with pytest.raises(ValueError, match="at least one layer"):
        Layouts({})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "not an expert layout"),
        ("[1]", "not an expert layout"),
        ("{}", "not an expert layout"),
        ('{"layers": []}', "must map names"),
        ('{"layers": {}}', "at least one layer"),
        ('{"layers": {"x": {"homes": [[0], [0]]}}}', "layer x: .*exactly once"),
        ('{"layers": {"x": {"slots": [[0]]}}}', "layer x is not an expert layout"),
        ('{"layers": {"x": [[0]]}}', "layer x is not an expert layout"),
        ('{"layers": {"x": {"homes": [[0]]}, "y": {"homes": [[0], [1]]}}}', "x has 1 and y has 2"),
        ('{"homes": [[0, 1], [1]]}', "exactly once"),
        ('{"homes": [[0, "a"]]}', "not an expert layout"),
        ('{"homes": [[0]], "layers": {}}', "both"),
        ('{"homes": [[0]], "about": 3}', '"about" must be an object'),
    ],
)
def test_a_corrupt_file_of_layouts_is_named(content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "l.json").write_text(content)
    with pytest.raises(ValueError, match=message) as error:
        Layouts.load(tmp_path / "l.json")
    assert "l.json" in str(error.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cannot read .*nowhere\.json"):
        Layouts.load(tmp_path / "nowhere.json")


TRACE = topics(24, 4, 3000, layers=2, length=8)


def test_place_judges_on_the_held_out_half_and_writes_the_best(tmp_path: Path) -> None:
    TRACE.save(tmp_path / "t.npz")
    seen: list[Row] = []
    result = place(
        tmp_path / "t.npz",
        ranks=4,
        nodes=2,
        solvers=("contiguous", "occult", "search"),
        on_row=seen.append,
    )
    assert seen == result.rows and len(seen) == 6
    result.layouts.save(tmp_path / "l.json")
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
