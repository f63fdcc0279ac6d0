"""`carpool bench layer` on four gloo ranks: contenders against one definition, bytes, and failures of some ranks."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from typer.testing import CliRunner

from carpool.bench import contest as agreement
from carpool.bench.bench_settings import LayerSettings
from carpool.bench.contest import OUT_OF_MEMORY, attempt_together, measure_on_rank
from carpool.bench.moe import layer_contest as layer
from carpool.bench.moe.layer_contest import LayerBenchmark
from carpool.bench.options import LayerShape as Shape
from carpool.bench.routings import make_routings
from carpool.cli import app
from carpool.experts import EXPERTS, ReferenceExperts
from carpool.layout import ExpertLayout
from carpool.train.config import load_config
from tests.ranks import WORLD_SIZE, Ranks, mesh

CPU = torch.device("cpu")
SMALL = Shape(19, 40, 24, 8, 3)
WAYS = ("alltoall", "dedup", "hierarchical")
THEIRS = "transformers all_to_all + grouped_mm"


def _whole(folder: str) -> None:
    mesh((WORLD_SIZE,), ("ep",))  # which says that there are two nodes
    settings = LayerSettings(
        shapes=(SMALL, Shape(7, 16, 8, 4, 2, "gpt_oss")), repetitions=2, iterations=1, experts=("grouped",), out=folder,
    ).resolve(cuda=False, num_ranks=4)  # fmt: skip
    with mock.patch.object(layer, "between_ranks", lambda: ("nvlink", *WAYS)):  # others would show no more
        given = json.loads(json.dumps(settings.to_json()))
        measure_on_rank(
            load_config(None, []), "carpool.bench.moe.layer_contest:BENCHMARK", given, "carpool bench layer"
        )


@pytest.fixture(scope="module")
def run(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """One rank's part of the command on every rank: what was written, and where."""
    folder = tmp_path_factory.mktemp("layer")
    ranks(_whole, str(folder))
    return json.loads((folder / "layer.json").read_text()), folder


def test_every_contender_is_measured(run: tuple[dict[str, Any], Path]):
    result, folder = run
    assert [case["shape"]["tokens"] for case in result["cases"]] == [19, 7], "in the order in which they were asked for"
    for case in result["cases"]:
        assert (case["num_ranks"], case["baseline"]) == (4, THEIRS)
        rows = {row["label"]: row for row in case["rows"]}
        assert list(rows) == [f"{way} + grouped" for way in ("nvlink", *WAYS)] + [THEIRS]
        assert "CUDA" in rows.pop("nvlink + grouped")["unavailable"]
        for row in rows.values():
            assert row["unavailable"] is None
            assert 0 < row["error"] < 0.7
            assert list(row["sections"]) == ["forward", "forward_backward"]
            for factor, times in zip((1, 3), row["sections"].values(), strict=True):
                assert len(times["ms"]) == 2
                assert times["tflops"] == pytest.approx(factor * case["flops"] / times["ms_median"] / 1e9)
            both = (one["sections"]["forward_backward"]["ms_median"] for one in (rows[THEIRS], row))
            assert row["ratio"] == pytest.approx(next(both) / next(both))
            assert row["saved_bytes"] > 0 and row["peak_bytes"] is None
    assert (folder / "layer.png").read_bytes().startswith(b"\x89PNG")


def _spare(folder: str) -> None:
    settings = LayerSettings(
        shapes=(Shape(64, 16, 24, 16, 4),), repetitions=1, iterations=1, experts=("grouped",), transports=("dedup",),
        routings=("zipf",), zipf_exponent=1.2, spare_slots=("0", "2"), dtype="float32", out=folder, json_only=True,
    ).resolve(cuda=False, num_ranks=4)  # fmt: skip
    measure_on_rank(load_config(None, []), "carpool.bench.moe.layer_contest:BENCHMARK", settings.to_json(), "test")


def test_spare_slots_stand_beside_forced_balance(ranks: Ranks, tmp_path: Path) -> None:
    ranks(_spare, str(tmp_path))
    case, even = json.loads((tmp_path / "layer.json").read_text())["cases"]
    assert (case["routing"], even["routing"]) == ("zipf", "even")
    none, two = case["modelled"]
    assert none["before"] == none["after"] == two["before"] > 1.4 and two["after"] < 1.05 < two["replicas"]
    assert two["of_forced"] < none["of_forced"]
    rows = {row["label"]: row for row in case["rows"]}
    assert rows["dedup + grouped, 2 spare slots"]["load"] == pytest.approx(two["after"])
    assert all(row["of_forced"] > 0 and row["error"] < 0.7 for row in rows.values())
    forced = {row["label"]: row["sections"]["forward_backward"]["ms_median"] for row in even["rows"]}
    for label, row in rows.items():
        ratio = row["sections"]["forward_backward"]["ms_median"] / forced[label.partition(",")[0]]
        assert row["of_forced"] == pytest.approx(ratio)


def test_a_trace_is_modelled_without_ranks(tmp_path: Path) -> None:
    trace = str(Path(__file__).parents[2] / "docs/traces/e64-noaux-1615.npz")
    command = ["bench", "layer", "--model", "olmoe", "--tokens", "4096", "--routing", trace, "--spare-slots", "0,4"]
    found = CliRunner().invoke(app, [*command, "--modelled", "H200", "--out", str(tmp_path)])
    assert found.exit_code == 0 and "modelled: H200" in found.output, found.output
    none, four = json.loads((tmp_path / "layer.json").read_text())["cases"][0]["modelled"]
    assert none["after"] > 1.5 and four["after"] <= 1.1 and four["ms"] < none["ms"]
    for wrong, why in ((["--model", "mixtral-8x7b"], "has 8 of 64 experts"), (["--spare-slots", "x"], "no number of")):
        found = CliRunner().invoke(app, [*command, *wrong, "--modelled", "H200", "--out", str(tmp_path)])
        assert found.exit_code and why in found.output, found.output


def test_bytes_are_those_of_the_routing(run: tuple[dict[str, Any], Path]):
    layout = ExpertLayout.contiguous(8, 4)
    for case in run[0]["cases"][:1]:
        choices = visits = 0
        for source, routing in enumerate(make_routings(case["routing"], 19, 3, layout)):
            for chosen in routing.expert_TK.tolist():
                elsewhere = [expert // 2 for expert in chosen if expert // 2 != source]
                choices, visits = choices + len(elsewhere), visits + len(set(elsewhere))
        sent = {row["label"]: row["remote_bytes"] for row in case["rows"]}
        row = 40 * 2
        assert sent[THEIRS] == 4 * choices * row // 4
        plan = 16 * 12  # two counts from each rank to each other
        assert sent["alltoall + grouped"] == (choices * (4 * row + 8 + 4) + plan) // 4
        assert sent["dedup + grouped"] == (visits * (4 * row + 3 * (8 + 4)) + plan) // 4


# -- on ranks ------------------------------------------------------------------------------------------------------


class Greedy(ReferenceExperts):
    def forward(self, *args: Any) -> Any:
        torch.empty(1 << 50, dtype=torch.uint8)
        return super().forward(*args)


class Forgetful(ReferenceExperts):
    """The gradients of one rank's parameters are lost."""

    def backward(self, *args: Any) -> Any:
        dweight_RJ, finish = super().backward(*args)

        def forgetful() -> Any:
            gradients = finish()
            if dist.get_rank() == 2:
                gradients.up_SFH.zero_()
            return gradients

        return dweight_RJ, forgetful


def _with(experts: type, transports: tuple[str, ...]) -> list[str | None] | str:
    """The reasons of the rows if `experts` join in, or what ended the benchmark."""
    settings = LayerSettings(shapes=(SMALL,), transports=transports, repetitions=1, iterations=1, routings=("hot",))
    EXPERTS._things["new"] = experts
    try:
        (case,) = LayerBenchmark(settings.resolve(cuda=False, num_ranks=4), CPU).measure_all()
    except (RuntimeError, ValueError) as error:
        return str(error)
    finally:
        del EXPERTS._things["new"]
    return [row.unavailable for row in case.rows if row.experts in ("new", "grouped", "grouped_mm")]


def test_who_cannot_run_and_who_is_wrong(ranks: Ranks):
    assert ranks(_with, Greedy, ("dedup",)) == [[None, OUT_OF_MEMORY, None]] * 4
    found = ranks(_with, Forgetful, ("dedup",))
    assert all("dedup + new gives a wrong answer" in text for text in found), "on every rank"
    found = ranks(_with, ReferenceExperts, ("nvlink",))
    assert all("nvlink + grouped cannot run here: there is no CUDA device" in text for text in found)


def _attempts() -> list[str | None]:
    rank, said, store = dist.get_rank(), [], distributed_c10d._get_default_store()

    def fail(error: Exception | None) -> None:
        if error is not None:
            raise error

    def attempt(error: Exception | None, theirs: bool = False) -> None:
        try:
            said.append(attempt_together(lambda: fail(error), dist.group.WORLD, CPU, theirs))
        except RuntimeError as raised:
            said.append(f"RuntimeError: {raised}")

    attempt(None)
    attempt(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"))
    attempt(ValueError("too wide\nby far"))
    attempt(RuntimeError("strides must be multiples of 16"), theirs=True)
    attempt(RuntimeError("an index is out of bounds"))
    attempt(torch.OutOfMemoryError("out of memory") if rank == 2 else None)
    agreement.PATIENCE_FAILED = datetime.timedelta(seconds=0.3)
    if rank == 1:
        attempt(torch.OutOfMemoryError("out of memory"))
        store.set("rank 1 went on", "")
    else:
        store.wait(["rank 1 went on"])  # as if in a collective that it never joins
        attempt(None)
    agreement.PATIENCE_FAILED = datetime.timedelta(seconds=60)
    return said


def test_ranks_agree_on_what_failed(ranks: Ranks):
    for rank, said in enumerate(ranks(_attempts)):
        assert said[:4] == [None, OUT_OF_MEMORY, "too wide", "strides must be multiples of 16"]
        assert said[4] == "RuntimeError: an index is out of bounds"
        assert "failed on some ranks only (rank 0: done; rank 1: done; rank 2: out of memory; rank 3" in str(said[5])
        assert ("other ranks did not come back" if rank == 1 else "failed on some ranks only") in str(said[6])
