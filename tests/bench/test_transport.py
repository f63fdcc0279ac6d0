"""`carpool bench transport`: the whole command on four gloo ranks, what it refuses, and how its numbers are made."""

from __future__ import annotations

import io
import json
import os
import re
import sys
import time
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from typer.testing import CliRunner

from carpool import cli
from carpool.bench import contest as bench_ranks
from carpool.bench.bench_settings import TransportSettings as Settings
from carpool.bench.options import RIDE_SHAPES_CPU as CPU_SHAPES
from carpool.bench.options import RIDE_SHAPES_GPU as GPU_SHAPES
from carpool.bench.options import RideShape as Shape
from carpool.bench.options import split
from carpool.bench.plots import write_rides
from carpool.bench.routings import make_routings
from carpool.bench.timing import Clock, p99
from carpool.bench.transport import ride_contest as bench
from carpool.bench.transport import ride_contest as contenders
from carpool.bench.transport.ride_check import Case, check, forward_and_backward, oracle
from carpool.bench.transport.ride_contest import Contender, busiest, expected_bytes, list_contenders
from carpool.bench.transport.transport_results import CaseResult, ContenderResult, Times, show
from carpool.layout import ExpertLayout
from carpool.layout.topology import Topology
from carpool.metrics.counters import Traffic
from carpool.placement.predicted_volume import predict
from carpool.train.config import Config
from carpool.train.launch.start import local_ranks
from carpool.train.launch.worker import find_entry
from carpool.transport import Arrivals, Dedup, HiddenStates, Pending, make_transport
from tests.bench.commands import lines_of, printed, result_of
from tests.ranks import WORLD_SIZE, Ranks, mesh

GLOO = ("alltoall", "dedup", "gather")
WAYS = (*GLOO, "hierarchical", "2dh")
ROUTINGS = ("uniform", "skewed")
TOKENS, HIDDEN, EXPERTS, TOP_K, REPETITIONS = 37, 40, 32, 4, 2
SECTIONS = ("plan_dispatch", "dispatch", "combine", "dispatch_gradients", "combine_gradients")


def command(*args: str) -> list[str]:
    return ["bench", "transport", "--device", "cpu", *args]


def _one_rank(entry: str, config: Config, kwargs: str) -> str:
    """A rank's part, with arguments as they come to a process; what it printed."""
    mesh((WORLD_SIZE,), ("ep",))  # which says that there are two nodes
    with (
        mock.patch.dict(os.environ, COLUMNS="200", NO_COLOR="1"),
        mock.patch.object(contenders, "between_ranks", lambda: ("nvlink", *WAYS)),  # 1d and 2d would show no more
        redirect_stdout(io.StringIO()) as shown,
    ):
        find_entry(entry)(config, **json.loads(kwargs))
    return shown.getvalue()


@pytest.fixture(scope="module")
def run(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str, Path]:
    """The command with everything on, over ranks that run already: what it wrote, what it printed, and the folder."""
    folder = tmp_path_factory.mktemp("bench") / "new" / "folder"
    options = ["--routing", ",".join(ROUTINGS), "--repetitions", str(REPETITIONS), "--backward", "--decode", "--fp8"]
    options += ["--ctas", "4"]
    args = command("--ranks", "4", "--shape", f"{TOKENS},{HIDDEN},{EXPERTS},{TOP_K}", *options, "--out", str(folder))
    shown: list[str] = []

    def start(config: Config, entry: str, *, debug: bool, **kwargs: Any) -> None:
        assert local_ranks(config) == 4 and not debug
        shown.extend(ranks(_one_rank, entry, config, json.dumps(kwargs)))

    with mock.patch.object(bench_ranks, "run", start), mock.patch.object(sys, "argv", ["carpool", *args]):
        done = CliRunner().invoke(cli.app, args)
    assert done.exit_code == 0, f"{done.output}{done.exception}"
    assert shown[1:] == [""] * 3, "rank 0 alone speaks"
    return json.loads((folder / "transport.json").read_text()), shown[0], folder


def test_every_contender_is_measured(run: tuple[dict[str, Any], str, Path]):
    result, _, _ = run
    cases = result["cases"]
    assert [(c["mode"], c["routing"]) for c in cases] == [
        (mode, routing) for mode in ("train", "decode") for routing in ROUTINGS
    ]
    for case in cases:
        decode = case["mode"] == "decode"
        tokens = 128 if decode else TOKENS
        assert case["shape"] == {"tokens": tokens, "hidden": HIDDEN, "experts": EXPERTS, "top_k": TOP_K}
        assert case["ceiling"] is None, "there are no copy engines here"
        rows = {row["label"]: row for row in case["rows"]}
        # The oracle sends rows as they are.
        coded = [name for way in WAYS for name in (way, f"{way} (fp8)") if name != "gather (fp8)"]
        assert list(rows) == ["nvlink (4 CTAs)", "nvlink (fp8, 4 CTAs)", *coded]
        for label in list(rows)[:2]:
            nvlink = rows.pop(label)
            assert "CUDA" in nvlink["unavailable"]
            assert nvlink["sections"] == {}
        for row in rows.values():
            assert row["unavailable"] is None and not row["graph"]
            assert row["lossy"] == (["tokens to experts are sent as FP8"] if "fp8" in row["label"] else [])
            assert 0 < row["error"] <= 1
            assert tuple(row["sections"]) == (("decode",) if decode else SECTIONS)
            for times in row["sections"].values():
                assert len(times["us"]) == REPETITIONS
                assert all(us > 0 for us in times["us"])
                assert min(times["us"]) <= times["us_median"] <= times["us_p99"] == max(times["us"])
                assert times["host_us"] > 0
                assert times["share_of_ceiling"] is None
                if not decode:
                    assert times["gb_per_s"] == pytest.approx(times["bytes"] / times["us_median"] / 1000)


def test_bytes_are_those_of_the_routing(run: tuple[dict[str, Any], str, Path]):
    layout = ExpertLayout.contiguous(EXPERTS, 4)
    for case in run[0]["cases"][: len(ROUTINGS)]:
        experts = [r.expert_TK for r in make_routings(case["routing"], TOKENS, TOP_K, layout)]
        # Counted once more, token by token.
        visits_WW = np.zeros((4, 4), dtype=int)
        for source, expert_TK in enumerate(experts):
            for chosen in expert_TK.tolist():
                for rank in {expert // (EXPERTS // 4) for expert in chosen} - {source}:
                    visits_WW[source, rank] += 1
        rows = {row["transport"]: row for row in case["rows"] if not row["unavailable"] and not row["lossy"]}
        sent = rows["dedup"]["bytes_sent"]
        assert sent["dispatch"] == (visits_WW.sum(1) * (2 * HIDDEN + 8 * TOP_K)).tolist()
        assert sent["combine"] == (visits_WW.sum(0) * 2 * HIDDEN).tolist()
        most = max(visits_WW.sum(0).max(), visits_WW.sum(1).max())
        assert rows["dedup"]["sections"]["combine"]["bytes"] == most * 2 * HIDDEN
        for name, row in rows.items():
            assert row["bytes_sent"] == row["bytes_predicted"]
            volume = predict(name, experts, layout, hidden=HIDDEN, element_size=2, topology=Topology.even(4, 2))
            assert set(row["bytes_sent"]) == {"dispatch", "combine", "dispatch_backward", "combine_backward"}
            for verb, of_rank in row["bytes_sent"].items():
                assert sum(of_rank) == volume.bytes_remote(verb)
            busy = row["sections"]["plan_dispatch"]["bytes"]
            assert busy >= max(row["bytes_sent"]["dispatch"])
        if case["routing"] == "skewed":
            sections = rows["alltoall"]["sections"]
            assert sections["dispatch"]["bytes"] > max(rows["alltoall"]["bytes_sent"]["dispatch"]), (
                "the rank that everybody sends to is the busiest"
            )


def test_where_and_how_it_ran_is_written(run: tuple[dict[str, Any], str, Path]):
    result, shown, folder = run
    assert result["environment"]["torch"] == torch.__version__
    assert result["environment"]["device_count"] == 4
    assert "commit" in result["environment"]
    assert "bench transport --device cpu --ranks 4" in result["command"]
    assert result["settings"]["repetitions"] == REPETITIONS and result["settings"]["ctas"] == [4]
    assert (folder / "transport.png").read_bytes().startswith(b"\x89PNG")
    assert f"T {TOKENS}, H {HIDDEN}, E {EXPERTS}, K {TOP_K}, bfloat16, skewed routing, 4 ranks" in shown
    assert "nvlink (4 CTAs) is not available: there is no CUDA device" in shown
    assert len(re.findall(r"^ *dedup +- .*\d / \d", shown, re.MULTILINE)) == 6  # forward, backward, decode; 2 routings
    assert re.search(r"^wrote .*transport.json, .*transport.png$", shown, re.MULTILINE)


def test_settings_survive_the_way_to_the_ranks():
    given = Settings(shapes=(Shape(3, 4, 5, 2), Shape(3, 4, 5, 2)), transports=split("dedup, nvlink,dedup"), fp8=True)
    assert given.transports == ("dedup", "nvlink")
    settings = given.resolve(cuda=False, num_ranks=4)
    assert Settings.from_json(json.loads(json.dumps(settings.to_json()))) == settings
    assert (settings.shapes, settings.ctas, settings.ranks) == ((Shape(3, 4, 5, 2),), (8, 16), 4)
    assert Settings().resolve(cuda=True, num_ranks=4).shapes == GPU_SHAPES
    everything = Settings(routings=("all",)).resolve(cuda=False, num_ranks=4)
    assert (everything.shapes, everything.routings) == (CPU_SHAPES, ("uniform", "zipf", "skewed"))
    labels = [c.label for c in list_contenders(settings)]
    assert labels == ["dedup", "dedup (fp8)", "nvlink (8 CTAs)", "nvlink (16 CTAs)", "nvlink (fp8, 16 CTAs)"]


# -- on ranks ------------------------------------------------------------------------------------------------------


class Louder(Dedup):
    """Sums that are 2 % too large."""

    def combine(self, route: Any, partial_RH: torch.Tensor) -> Pending:
        pending = super().combine(route, partial_RH)
        return Pending(lambda: 1.02 * pending.wait())


class Astray(Dedup):
    """Rows come to the right rank, and to the wrong slot of it."""

    def plan(self, slot_TK: torch.Tensor, weight_TK: torch.Tensor, traffic: Traffic) -> Any:
        return super().plan(slot_TK ^ 1, weight_TK, traffic)


class Lost(Dedup):
    """A row that is not a number."""

    def combine(self, route: Any, partial_RH: torch.Tensor) -> Pending:
        pending = super().combine(route, partial_RH)
        return Pending(lambda: pending.wait().index_fill_(0, torch.tensor([0]), torch.nan))


class Forgetful(Dedup):
    """Gradients of weights are lost."""

    def combine_gradients(self, route: Any, dx_RH: torch.Tensor, dweight_RJ: torch.Tensor) -> Pending:
        return super().combine_gradients(route, dx_RH, torch.zeros_like(dweight_RJ))


class Quantised(Dedup):
    """Rows have been FP8 on their way, with a scale for each 128 columns."""

    def dispatch(self, x_TH: torch.Tensor, route: Any) -> Pending:
        pending = super().dispatch(x_TH, route)

        def finish() -> Arrivals:
            arrivals = pending.wait()
            x_RH = arrivals.tokens.data
            hidden = x_RH.shape[1]
            x_RGC = F.pad(x_RH.float(), (0, -hidden % 128)).unflatten(1, (-1, 128))
            scale_RG1 = x_RGC.abs().amax(2, keepdim=True).clamp(min=1e-30) / 448
            code_RGC = (x_RGC / scale_RG1).to(torch.float8_e4m3fn).float()
            rows_RH = (code_RGC * scale_RG1).flatten(1)[:, :hidden]
            return replace(arrivals, tokens=HiddenStates.of(rows_RH.to(x_RH.dtype)))

        return Pending(finish)


class Modest(Dedup):
    """Counts a row too few on its way back."""

    def combine(self, route: Any, partial_RH: torch.Tensor) -> Pending:
        route.traffic.add("combine", [-1] * self.num_ranks, 1)
        return super().combine(route, partial_RH)


def _errors(dtype: torch.dtype) -> dict[str, float | str]:
    """On each rank: the error of every transport, or what was said about it."""
    rank, group = dist.get_rank(), dist.group.WORLD
    layout = ExpertLayout.contiguous(8, 4)
    routings = make_routings("uniform", 19, 3, layout)
    case = Case.make(Shape(19, 200, 8, 3), layout, routings, rank, dtype, torch.device("cpu"), 0)
    want = oracle(case, group, rank)
    transports = {name: make_transport(name, group, 2) for name in GLOO}
    transports |= {cls.__name__: cls(group, 2) for cls in (Louder, Astray, Lost, Forgetful, Quantised)}
    found: dict[str, float | str] = {}
    for name, transport in transports.items():
        answers = forward_and_backward(transport, case, rank, Traffic(4, rank), backward=True)
        try:
            found[name] = check(name, answers, want, case, group, dtype)
        except RuntimeError as error:
            found[name] = str(error)
        if name == "Quantised":
            found["Quantised, as declared"] = check(name, answers, want, case, group, dtype, fp8=True)
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_wrong_answer_is_not_timed(ranks: Ranks, dtype: torch.dtype):
    everyone = ranks(_errors, dtype)
    for found in everyone:
        assert found == everyone[0], "all ranks decide alike"
        for name in GLOO:
            assert isinstance(found[name], float) and 0 < found[name] <= 1
        lossy = found["Quantised, as declared"]
        assert isinstance(lossy, float) and 0.5 < lossy <= 1, "the tolerance of FP8 is not wider than FP8 needs"
        for name in ("Louder", "Astray", "Lost", "Forgetful", "Quantised"):
            assert f"{name} gives a wrong answer" in str(found[name])


def _measure_with(transport: type, transports: tuple[str, ...]) -> str:
    """What the benchmark says if `transport` stands in for dedup."""
    settings = Settings(shapes=(Shape(8, 8, 8, 2),), transports=transports, repetitions=1)
    real = bench.build
    bench.build = lambda contender, group, layout, tokens: transport(group, layout.slots_per_rank)  # type: ignore
    try:
        bench.TransportBenchmark(settings.resolve(cuda=False, num_ranks=4), torch.device("cpu")).measure_all()
    except (RuntimeError, ValueError) as error:
        return str(error)
    finally:
        bench.build = real
    return ""


def test_the_benchmark_ends_if_something_is_wrong(ranks: Ranks):
    assert ranks(_measure_with, Dedup, ("dedup",)) == [""] * 4
    assert all("dedup gives a wrong answer" in text for text in ranks(_measure_with, Louder, ("dedup",)))
    counted = ranks(_measure_with, Modest, ("dedup",))
    assert all("dedup counted other bytes than predicted in combine: in 2 calls" in text for text in counted)
    asked = ranks(_measure_with, Dedup, ("nvlink",))
    assert all("transport nvlink cannot run here: there is no CUDA device" in text for text in asked)


def _timed() -> dict[tuple[str, str], list[float]]:
    clock = Clock(torch.device("cpu"), dist.group.WORLD)
    for i in range(3):
        clock.keep = i > 0
        with clock.section("a", "late"):
            time.sleep(0.2 if dist.get_rank() == 2 and i == 1 else 0.0)
    return clock.slowest()


def test_the_slowest_rank_counts(ranks: Ranks):
    everyone = ranks(_timed)
    assert all(times == everyone[0] for times in everyone)
    slow, fast = everyone[0]["a", "late"]
    assert slow >= 200_000 and fast > 0


# -- numbers -------------------------------------------------------------------------------------------------------


def test_percentiles():
    assert p99([3.0, 9.0, 1.0]) == 9.0
    assert p99([float(i) for i in range(99)]) == 98.0
    assert p99([float(i) for i in range(101)]) == 99.0
    times = Times.of([4.0, 2.0, 9.0], 8000, 4.0, 1.0)
    assert (times.us_median, times.us_p99, times.gb_per_s, times.share_of_ceiling) == (4.0, 9.0, 2.0, 0.5)
    silent = Times.of([1.0], 0, None, 1.0)
    assert (silent.gb_per_s, silent.share_of_ceiling) == (None, None)


def test_what_nvlink_has_to_send():
    """One rank-0 token with experts on both ranks, one token of rank 1 that stays at home."""
    layout = ExpertLayout.contiguous(4, 2)
    routings = make_routings("uniform", 1, 2, layout)
    for routing, experts in zip(routings, ([0, 2], [2, 3]), strict=True):
        routing.expert_TK[:] = torch.tensor([experts])
    plain = expected_bytes(Contender("nvlink", 8), routings, layout, 130, 2)
    assert plain["dispatch"].tolist() == [[0, 2 * 130 + 2 * 8], [0, 0]]
    assert plain["combine"].tolist() == [[0, 0], [2 * 130, 0]]
    assert plain["combine_backward"].tolist() == [[0, 2 * 130], [0, 0]]
    assert plain["dispatch_backward"].tolist() == [[0, 0], [2 * 130 + 2 * 4, 0]]
    fp8 = expected_bytes(Contender("nvlink", 8, fp8=True), routings, layout, 130, 2)
    assert fp8["dispatch"].tolist() == [[0, 144 + 2 * 8], [0, 0]], "132 bytes of codes, two scales, 16 bytes at a time"
    assert {verb: fp8[verb].tolist() for verb in fp8 if verb != "dispatch"} == {
        verb: plain[verb].tolist() for verb in plain if verb != "dispatch"
    }
    assert busiest(np.array([[0, 5, 1], [2, 0, 0], [9, 0, 0]])) == 11
    assert busiest(np.array([[0, 5, 7], [2, 0, 0], [1, 0, 0]])) == 12


def test_how_a_ceiling_is_shown(tmp_path: Path):
    def times(us: float) -> Times:
        return Times.of([us, us + 1, us - 1], 72_000_000, 360.0, 50.0)

    sections = {"plan_dispatch": times(400.0), "dispatch": times(250.0), "combine": times(800.0)}
    rows = [
        ContenderResult(
            label="nvlink (fp8, 8 CTAs)",
            transport="nvlink",
            ctas=8,
            lossy=("tokens are sent as FP8",),
            sections=sections,
        ),
        ContenderResult(label="dedup", transport="dedup", sections=sections),
    ]
    case = CaseResult(Shape(8192, 2048, 64, 8), "zipf", "train", 4, rows, times(200.0), 72_000_000)
    decoded = ContenderResult(label="nvlink", transport="nvlink", ctas=8, sections={"decode": times(60.0)}, graph=True)
    decode = CaseResult(Shape(128, 2048, 64, 8), "zipf", "decode", 4, [decoded])
    result = result_of([case, decode], dtype="bfloat16", repetitions=15, backward=False)
    lines = lines_of(printed(show, result, 120))
    assert "ceiling: copy engines, 360 GB/s (72.0 MB per rank in 200 us)" in lines
    assert "nvlink fp8 8 400 / 401 250 / 251 800 / 801 72.0 / 72.0 180 / 90 50% / 25%" in lines
    assert "dedup - 400 / 401 250 / 251 800 / 801 72.0 / 72.0 180 / 90 50% / 25%" in lines
    assert "nvlink 8 60 / 61 CUDA graph" in lines
    assert any("commit unknown" in line for line in lines)
    write_rides(result, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 10_000
