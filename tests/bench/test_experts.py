"""`carpool bench experts`: the whole command on the CPU, what it refuses, what it will not time, and its numbers."""

from __future__ import annotations

import json
import re
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import DeepseekV3Config, GptOssConfig, MixtralConfig, OlmoeConfig, Qwen3MoeConfig

from carpool.bench.bench_settings import ExpertsSettings as Settings
from carpool.bench.bench_settings import LayerSettings
from carpool.bench.moe.module_answers import Case, check, make_module, measure, use
from carpool.bench.moe.moe_contest import ExpertsBenchmark, carpool_experts, forward_backward, their_experts
from carpool.bench.moe.moe_results import CaseResult, ContenderResult, Times, show
from carpool.bench.options import LAYER_SHAPES_CPU as CPU_SHAPES
from carpool.bench.options import LAYER_SHAPES_GPU as GPU_SHAPES
from carpool.bench.options import MODELS, list_shapes
from carpool.bench.options import LayerShape as Shape
from carpool.bench.plots import write_experts
from carpool.bench.timing import percentile
from carpool.experts import EXPERTS, ReferenceExperts
from tests.bench.commands import bench, lines_of, printed, result_of

CPU = torch.device("cpu")
SMALL = Shape(37, 40, 24, 8, 3)
SECTIONS = ["forward", "backward", "forward_backward"]


def make_case(shape: Shape, dtype: torch.dtype = torch.bfloat16, routing: str = "uniform") -> Case:
    settings = Settings(shapes=(shape,), dtype=str(dtype).removeprefix("torch.")).resolve(cuda=False)
    return ExpertsBenchmark(settings, CPU)._case(shape, routing)


def measure_small(**options: Any) -> CaseResult:
    settings = Settings(shapes=(SMALL,), repetitions=1, **options).resolve(cuda=False)
    (case,) = ExpertsBenchmark(settings, CPU).measure_all()
    return case


# -- the command ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str, Path]:
    """The command on two shapes: what it wrote, what it printed, and the folder."""
    folder = tmp_path_factory.mktemp("bench") / "new" / "folder"
    shapes = ["--shape", "37,40,24,8,3", "--activation", "gpt-oss", "--routing", "uniform,hot", "--repetitions", "3"]
    done = bench("experts", "--device", "cpu", *shapes, "--experts", "grouped,reference", "--out", str(folder))
    assert done.exit_code == 0, done.output
    return json.loads((folder / "experts.json").read_text()), done.stdout, folder


def test_every_contender_is_measured(run: tuple[dict[str, Any], str, Path]):
    result, _, _ = run
    assert [case["routing"] for case in result["cases"]] == ["uniform", "hot"]
    for case in result["cases"]:
        assert case["flops"] == 6 * 37 * 3 * 40 * 24
        assert (case["peak_flops"], case["baseline"]) == (None, "transformers grouped_mm")
        rows = {row["label"]: row for row in case["rows"]}
        assert list(rows) == ["carpool grouped", "carpool reference", "transformers grouped_mm", "transformers eager"]
        for row in rows.values():
            assert row["unavailable"] is None and row["lossy"] == []
            assert 0 < row["error"] <= 1
            assert list(row["sections"]) == SECTIONS
            for factor, times in zip((1, 2, 3), row["sections"].values(), strict=True):
                assert len(times["ms"]) == 3 and times["host_ms"] > 0
                assert min(times["ms"]) <= times["ms_p10"] <= times["ms_median"] <= times["ms_p90"] <= max(times["ms"])
                assert times["tflops"] == pytest.approx(factor * case["flops"] / times["ms_median"] / 1e9)
            both = (one["sections"]["forward_backward"]["ms_median"] for one in (rows[case["baseline"]], row))
            assert row["ratio"] == pytest.approx(next(both) / next(both))
            assert row["peak_bytes"] is None and row["saved_bytes"] > 0
        assert rows["carpool grouped"]["saved_bytes"] < rows["transformers grouped_mm"]["saved_bytes"]


def test_where_and_how_it_ran_is_shown(run: tuple[dict[str, Any], str, Path]):
    result, shown, folder = run
    assert result["environment"]["torch"] == torch.__version__ and result["environment"]["transformers"]
    assert result["settings"]["experts"] == ["grouped", "reference"]
    assert result["cases"][0]["shape"]["family"] == "gpt_oss"
    assert (folder / "experts.png").read_bytes().startswith(b"\x89PNG")
    assert "gpt-oss: T 37, H 40, F 24, E 8, K 3, bfloat16, hot routing" in shown
    assert len(re.findall(r"^ *carpool grouped +\d", shown, re.MULTILINE)) == 2
    assert re.search(r"^ *transformers grouped_mm .* 1\.00x ", shown, re.MULTILINE)
    assert re.search(r"^wrote .*experts.json, .*experts.png$", shown, re.MULTILINE)


def test_json_alone(tmp_path: Path):
    args = ("--shape", "9,16,8,4,2", "--activation", "relu2", "--dtype", "float32", "--repetitions", "1", "--json-only")
    done = bench(
        "experts", "--device", "cpu", *args, "--experts", "grouped", "--against", "eager", "--out", str(tmp_path)
    )
    assert done.exit_code == 0, done.output
    assert done.stdout == f"wrote {tmp_path}/experts.json\n"
    assert [file.name for file in tmp_path.iterdir()] == ["experts.json"]
    (case,) = json.loads((tmp_path / "experts.json").read_text())["cases"]
    assert case["flops"] == 4 * 9 * 2 * 16 * 8, "relu2 has no gate"
    assert [row["ratio"] for row in case["rows"]] == [None, None], "there is no baseline"


# -- who cannot run, and who is wrong ------------------------------------------------------------------------------


class Greedy(ReferenceExperts):
    """Wants more memory than there is, really."""

    name = "greedy"

    def forward(self, *args: Any) -> Any:
        torch.empty(1 << 50, dtype=torch.uint8)
        return super().forward(*args)


class Picky(ReferenceExperts):
    name = "picky"

    def __init__(self, function: Any) -> None:
        raise ValueError("there is no such GPU here")


class Louder(ReferenceExperts):
    """Sums that are 2 % too large."""

    name = "louder"

    def forward(self, arrivals: Any, weights: Any, partial_RH: torch.Tensor, *rest: Any) -> Any:
        saved = super().forward(arrivals, weights, partial_RH, *rest)
        partial_RH *= 1.02
        return saved


class Buggy(ReferenceExperts):
    name = "buggy"

    def forward(self, *args: Any) -> Any:
        raise RuntimeError("an index is out of bounds")


def test_who_cannot_run_gets_a_row_that_says_why(monkeypatch: pytest.MonkeyPatch):
    for cls in (Greedy, Picky):
        monkeypatch.setitem(EXPERTS._things, cls.name, cls)
    case = measure_small(against=("eager",))
    why = {row.label: row.unavailable for row in case.rows}
    assert why["carpool greedy"] == "out of memory"
    assert why["carpool picky"] == "there is no such GPU here"
    assert why["carpool grouped"] is None and why["transformers eager"] is None
    assert [list(row.sections) for row in case.rows if row.unavailable] == [[], []]
    shown = printed(show, result_of([case], dtype="bfloat16", repetitions=1))
    assert "carpool greedy is not available: out of memory" in shown
    assert measure_small(experts=("greedy",), against=("eager",)).rows[0].unavailable == "out of memory"
    with pytest.raises(ValueError, match="carpool picky cannot run here: there is no such GPU here; change --experts"):
        measure_small(experts=("picky",))


def test_too_little_memory_for_the_weights(monkeypatch: pytest.MonkeyPatch):
    settings = Settings(shapes=(Shape(1, 1 << 22, 1 << 22, 1 << 6, 1), SMALL), repetitions=1, experts=("grouped",))
    huge, small = ExpertsBenchmark(settings.resolve(cuda=False), CPU).measure_all()
    assert {row.unavailable for row in huge.rows} == {"out of memory for the weights and rows alone"}
    assert {row.unavailable for row in small.rows} == {None}, "the next shape is measured"


def test_a_wrong_answer_is_not_timed(monkeypatch: pytest.MonkeyPatch):
    for cls in (Louder, Buggy):
        monkeypatch.setitem(EXPERTS._things, cls.name, cls)
    with pytest.raises(RuntimeError, match="carpool louder gives a wrong answer"):
        measure_small(experts=("louder",))
    with pytest.raises(RuntimeError, match="out of bounds"):
        measure_small(experts=("buggy",))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("family", ["olmoe", "mixtral", "deepseek_v3", "gpt_oss", "nemotron_h"])
def test_all_contenders_are_right(family: str, dtype: torch.dtype):
    shape = Shape(37, 40, 24, 8, 3, family)
    case = make_case(shape, dtype, "hot")
    for name, make in (("grouped", carpool_experts), ("grouped_mm", their_experts), ("eager", their_experts)):
        error = check(name, *forward_backward(make(name, case, ExitStack()), case), case)
        assert 0 < error < 0.7, name


def _answers(case: Case) -> tuple[torch.Tensor, list[torch.Tensor]]:
    use(case.module, "eager")
    forward = their_experts("eager", case, ExitStack())
    y_TH, gradients = forward_backward(forward, case)
    return y_TH, list(gradients)


@pytest.mark.parametrize("which", ["y", "x", "weight", "up", "down", "up bias", "down bias"])
def test_whatever_is_wrong_is_found(which: str):
    case = make_case(Shape(199, 40, 24, 8, 3, "gpt_oss"))
    number = ["y", "x", "weight", "up", "down", "up bias", "down bias"].index(which)

    def refused(change: Any) -> bool:
        y_TH, gradients = _answers(case)
        tensors = [y_TH, *gradients]
        change(tensors[number])
        try:
            check("it", tensors[0], tensors[1:], case)
        except RuntimeError as error:
            assert "it gives a wrong answer: its largest error is" in str(error)
            return True
        return False

    assert not refused(lambda tensor: None)
    assert refused(lambda tensor: tensor.mul_(0)), "a gradient that is lost"
    assert refused(lambda tensor: tensor[0].neg_()), "one row, or one expert"
    assert refused(lambda tensor: tensor.view(-1)[0].fill_(torch.nan))
    if "bias" not in which:
        assert refused(lambda tensor: tensor.mul_(1.02))


def test_an_expert_that_nobody_chose_has_no_gradient():
    case = make_case(Shape(2, 40, 24, 8, 1))
    y_TH, gradients = _answers(case)
    idle = next(expert for expert in range(8) if not (case.index_TK == expert).any())
    check("it", y_TH, gradients, case)
    gradients[2][idle, 0, 0] = 1e-6
    with pytest.raises(RuntimeError, match="wrong answer"):
        check("it", y_TH, gradients, case)


# -- numbers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "nemotron_h"])
def test_operations_are_those_of_the_products(family: str):
    shape = Shape(37, 40, 24, 8, 3, family)
    case = make_case(shape, torch.float32)
    forward = their_experts("eager", case, ExitStack())
    with FlopCounterMode(display=False) as counted:
        forward()
    assert counted.get_total_flops() == shape.flops
    with FlopCounterMode(display=False) as counted:
        forward().backward(case.dy_TH)
    assert counted.get_total_flops() == 3 * shape.flops


def test_what_is_kept_is_counted():
    case = make_case(SMALL)
    pairs = 37 * 3
    saved, peak = measure(carpool_experts("reference", case, ExitStack()), case.leaves, case.dy_TH)
    assert peak is None
    assert saved == pairs * (4 + 4), "a slot and a weight for each choice; rows and parameters were there before"
    grouped, _ = measure(carpool_experts("grouped", case, ExitStack()), case.leaves, case.dy_TH)
    pre_activation = pairs * 2 * 24 * 2
    assert pre_activation < grouped < pre_activation + 60 * pairs + 1000
    theirs, _ = measure(their_experts("grouped_mm", case, ExitStack()), case.leaves, case.dy_TH)
    assert theirs > pairs * (40 + 2 * 24 + 24 + 40) * 2, "gathered rows, pre-activation, activation, output"


@pytest.mark.gpu
def test_on_a_gpu():
    shape = Shape(2048, 256, 256, 8, 4)
    settings = Settings(shapes=(shape,), repetitions=2, routings=("hot",), experts=("grouped",)).resolve(cuda=True)
    (case,) = ExpertsBenchmark(settings, torch.device("cuda", 0)).measure_all()
    pre_activation, weights = 2048 * 4 * 2 * 256 * 2, 8 * 3 * 256 * 256 * 2
    ours, theirs, _ = case.rows
    for row in case.rows:
        assert row.unavailable is None and row.saved_bytes is not None and row.peak_bytes is not None
        # Gradients of the parameters come while what was saved goes.
        assert row.peak_bytes > row.saved_bytes + weights // 2
        for times in row.sections.values():
            assert times.ms_median > 0 and (times.share_of_peak is None or times.share_of_peak < 1)
    assert pre_activation <= ours.saved_bytes < 1.3 * pre_activation
    assert theirs.saved_bytes > 2 * ours.saved_bytes


def test_models_have_the_sizes_that_were_published():
    configs = {
        "qwen3-30b-a3b": Qwen3MoeConfig(),
        "mixtral-8x7b": MixtralConfig(),
        "deepseek-v3": DeepseekV3Config(),
        "gpt-oss-120b": GptOssConfig(),
        "olmoe": OlmoeConfig(intermediate_size=1024),  # what was published differs from the class's default
    }
    assert set(configs) == set(MODELS)
    for name, config in configs.items():
        shape = Shape.of_model(name, 100)
        inner = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
        experts = getattr(config, "num_local_experts", None) or config.num_experts
        sizes = (config.hidden_size, inner, experts, config.num_experts_per_tok)
        assert (shape.hidden, shape.inner, shape.experts, shape.top_k) == sizes, name
        assert str(shape).startswith(f"{name}: T 100, H ")
        small = make_module(Shape(1, 16, 8, 4, 2, shape.family), 4, CPU, torch.bfloat16, 0)
        assert type(small).__module__.endswith(f"modeling_{shape.family}")
        assert {p.dtype for p in small.parameters()} == {torch.bfloat16}
        assert all(float(p.detach().float().std()) > 0.1 for p in small.parameters())


def test_settings_fill_in_what_was_left_out():
    assert Settings().resolve(cuda=True).shapes == GPU_SHAPES
    everything = Settings(routings=("all",)).resolve(cuda=False)
    assert (everything.shapes, everything.routings) == (CPU_SHAPES, ("uniform", "zipf", "hot"))
    assert everything.against == ("grouped_mm", "eager")
    assert Settings.from_json(json.loads(json.dumps(everything.to_json()))) == everything
    assert LayerSettings().resolve(cuda=True, num_ranks=4).shapes == GPU_SHAPES[:2]
    shapes = list_shapes(["1,2,3,4,2"], ["olmoe"], 7, "relu2")
    assert shapes == (Shape(1, 2, 3, 4, 2, "nemotron_h"), Shape(7, 2048, 1024, 64, 8, "olmoe", "olmoe"))


def test_percentiles():
    assert percentile([2.0, 1.0], 10) == pytest.approx(1.1)
    assert percentile([5.0], 90) == 5.0
    assert percentile([3.0, 1.0, 2.0], 50) == 2.0
    times = Times.of([2.0, 4.0, 3.0], 0.5, 600_000_000_000, 1e15)
    assert (times.ms_median, times.ms_p10, times.ms_p90) == (3.0, 2.2, pytest.approx(3.8))
    assert (times.tflops, times.share_of_peak) == (200.0, 0.2)
    assert Times.of([1.0], 1.0, 1, None).share_of_peak is None


def test_how_a_gpu_is_shown(tmp_path: Path):
    shape = Shape.of_model("olmoe", 8192)

    def row(label: str, ms: float, saved: int) -> ContenderResult:
        sections = {
            name: Times.of([n * ms, n * ms * 1.1, n * ms * 0.9], 1.0, n * shape.flops, 989e12)
            for n, name in zip((1, 2, 3), SECTIONS, strict=True)
        }
        found = ContenderResult(label=label, experts=label, error=0.25, sections=sections)
        found.saved_bytes, found.peak_bytes = saved << 20, (3 * saved) << 20
        found.lossy = ("experts compute in FP8",) if "fp8" in label else ()
        return found

    missing = ContenderResult(label="x", experts="x", unavailable="why")
    rows = [row("carpool fp8", 1.5, 250), row("transformers grouped_mm", 4.5, 1058), missing]
    case = CaseResult(shape, "zipf", 1, shape.flops, 989e12, "transformers grouped_mm", rows)
    case.compare()
    result = result_of([case], dtype="bfloat16", repetitions=3)
    lines = lines_of(printed(show, result))
    assert "carpool fp8 1.5 3 4.5 550 / 550 / 550 56% 3.00x 250 750 0.25" in lines
    assert "1.38-1.62 2.76-3.24 4.14-4.86" in lines, "10th to 90th percentile"
    assert "transformers grouped_mm 4.5 9 13.5 183 / 183 / 183 19% 1.00x 1058 3174 0.25" in lines
    assert "carpool fp8 is lossy: experts compute in FP8" in lines
    assert "x is not available: why" in lines
    write_experts(result, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 10_000
