"""`carpool bench model` and `generate`: contenders that do the same work on two gloo ranks, forced choices, room, and
rooflines."""

from __future__ import annotations

import dataclasses
import json
import re
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, PreTrainedModel

from carpool.bench import bench_generate as generate
from carpool.bench.bench_settings import GENERATE_CONTENDERS, GenerateSettings
from carpool.bench.contest import measure_on_rank
from carpool.bench.model.model_contenders import check_routing, recorded_choices, route
from carpool.bench.model.model_contest import ModelBenchmark, check_room, groups_that_fit, time_steps
from carpool.bench.model.model_results import (
    Case,
    KindRow,
    Row,
    Sizes,
    StepTimes,
    Times,
    Work,
    roofline_ms,
    show,
    work_of,
)
from carpool.bench.model.model_settings import ModelSettings as Settings
from carpool.bench.timing import host_times
from carpool.hf.context_parallel import _interface
from carpool.hf.routing.router_answers import balanced_choices, force_choices
from carpool.hf.seam.find_modules import experts_modules
from carpool.layout.topology import Topology
from carpool.parallel.degrees import Degrees
from carpool.placement.trace import Trace
from carpool.planner.machine.hardware import CPU, HARDWARE
from carpool.profile.kinds import IDLE, KINDS
from carpool.train.blueprint import ModelSize, Trained, flops_per_token, meta_model, model_config, model_size
from carpool.train.config import load_config
from tests.bench.commands import printed, result_of
from tests.hf.meshes import reuse_meshes
from tests.hf.tiny_models import discover, tiny_config
from tests.ranks import Ranks

TINY = {
    "model_type": "qwen3_moe", "hidden_size": 32, "intermediate_size": 32, "moe_intermediate_size": 16,
    "num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "num_experts": 8,
    "num_experts_per_tok": 3, "norm_topk_prob": True, "vocab_size": 331, "max_position_embeddings": 64,
    "router_aux_loss_coef": 0.01,
}  # fmt: skip
MiB = 2**20


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model") / "config.json"
    path.write_text(json.dumps(TINY))
    return str(path)


# -- choices -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("tokens", "experts", "top_k"), [(64, 8, 3), (37, 8, 3), (5, 8, 8), (199, 12, 5), (1, 4, 1)])
def test_balanced_choices(tokens: int, experts: int, top_k: int):
    expert_TK = balanced_choices(tokens, experts, top_k, seed=7)
    assert expert_TK.shape == (tokens, top_k) and expert_TK.dtype == torch.int64
    assert all(len(set(row)) == top_k for row in expert_TK.tolist())
    counts = torch.bincount(expert_TK.flatten(), minlength=experts)
    assert int(counts.max() - counts.min()) <= (0 if tokens * top_k % experts == 0 else 1)
    assert torch.equal(expert_TK, balanced_choices(tokens, experts, top_k, seed=7))
    if tokens > 1 and top_k < experts:
        assert not torch.equal(expert_TK, balanced_choices(tokens, experts, top_k, seed=8))
        assert len({tuple(sorted(row)) for row in expert_TK.tolist()}) > min(tokens, experts) // 2


def test_balanced_choices_are_spread_over_ranks_like_random_ones():
    # 8 of 64 experts on 4 ranks: 3.66 ranks for a token whose choices are uniform; consecutive experts would visit 1.3.
    rank_TK = torch.cat([balanced_choices(4096, 64, 8, seed=layer) for layer in range(8)]) // 16
    visited = (rank_TK[:, :, None] == torch.arange(4)).any(1).sum(1).float().mean()
    assert float(visited) == pytest.approx(3.66, abs=0.04)


def build(**changes: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(model_config({**TINY, **changes}))


def test_forced_choices_have_the_routers_own_weights():
    model, ids = build(), torch.arange(40).reshape(2, 20)
    name = "model.layers.1.mlp.experts"
    experts, seen = model.get_submodule(name), []
    experts.register_forward_pre_hook(lambda _, args: seen.append(args))
    model(ids)
    forced_TK = balanced_choices(64, 8, 3, seed=0)
    force_choices(model, {name: forced_TK}, 8)
    model(ids).logits.sum().backward()
    (x_TH, _, _), (same_TH, expert_TK, weight_TK) = seen
    torch.testing.assert_close(same_TH, x_TH)  # nothing before that layer has changed
    assert torch.equal(expert_TK, forced_TK[:40])
    router = model.get_submodule("model.layers.1.mlp.gate")
    probability_TE = (x_TH @ router.weight.T).softmax(-1)
    want_TK = probability_TE.gather(1, forced_TK[:40])
    torch.testing.assert_close(weight_TK, want_TK / want_TK.sum(-1, keepdim=True))
    assert router.weight.grad is not None and bool(router.weight.grad.any())
    assert "forced_TK" not in router.state_dict()


def test_compiled_layers_with_forced_choices_share_one_graph(monkeypatch: pytest.MonkeyPatch):
    """Also where another model of the process has parts of sequences (`carpool.hf.context_parallel`), and changed
    attention."""
    monkeypatch.setattr(AttentionInterface, "get_interface", _interface)
    model, ids, graphs = build(num_hidden_layers=12), torch.arange(40).reshape(2, 20), []
    choices = {f"model.layers.{i}.mlp.experts": balanced_choices(40, 8, 3, seed=i) for i in range(12)}
    force_choices(model, choices, 8)
    eager = model(ids, use_cache=False).logits
    torch.compiler.reset()

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph

    for layer in model.model.layers:
        layer.forward = torch.compile(layer.forward, backend=backend)
    compiled = model(ids, use_cache=False).logits
    torch.testing.assert_close(compiled, eager)
    assert len(graphs) == 1, len(graphs)


def test_what_cannot_be_forced():
    model = build()
    with pytest.raises(ValueError, match=r"router of model\.layers\.0\.self_attn\.q_proj is not known"):
        force_choices(model, {"model.layers.0.self_attn.q_proj": torch.zeros(4, 3, dtype=torch.int64)}, 8)
    counts = {f"model.layers.{i}.mlp.experts": 8 - i for i in range(3)}
    with pytest.raises(ValueError, match="different numbers of experts; use learned"):
        route(model, counts, 3, 16, "balanced", 0, 1)


def make_trace(top_k: int = 3, sequences: int = 4) -> Trace:
    expert_LTK = np.random.default_rng(0).permuted(np.tile(np.arange(8), (2, 5 * sequences, 1)), axis=-1)[..., :top_k]
    return Trace(
        expert_LTK.astype(np.uint8), np.repeat(np.arange(sequences), 5).astype(np.int32), ("a", "b"), {"num_experts": 8}
    )


def test_recorded_choices():
    trace = make_trace()
    # Rank 1 of 2 has the sequences 1 and 3, ten tokens; layer 2 of the model is the first of the trace again.
    found = recorded_choices(trace, 2, 13, 8, 3, 1, 2)
    want = torch.from_numpy(trace.expert_LTK[0].astype(np.int64))
    assert torch.equal(found, torch.cat([want[5:10], want[15:20], want[5:8]]))
    with pytest.raises(ValueError, match="chooses 3 of 8 experts, and the model 2 of 8"):
        recorded_choices(trace, 0, 13, 8, 2, 0, 2)
    with pytest.raises(ValueError, match=r"fewer sequences than there are ranks \(5\)"):
        recorded_choices(trace, 0, 13, 8, 3, 4, 5)


def test_choices_that_cannot_be_forced_are_refused_before_anything_is_built(tmp_path: Path):
    make_trace().save(tmp_path / "trace.npz")
    for routing in ("learned", "balanced", str(tmp_path / "trace.npz")):
        check_routing({"a": 8, "b": 8, "c": 8}, 3, routing, 4)
    with pytest.raises(ValueError, match="chooses 3 of 8 experts, and the model 3 of 16"):
        check_routing({"a": 16}, 3, str(tmp_path / "trace.npz"), 4)
    with pytest.raises(ValueError, match="different numbers of experts; use learned"):
        check_routing({"a": 8, "b": 4}, 3, "balanced", 4)
    check_routing({"a": 8, "b": 4}, 3, "learned", 4)


# -- room and roofline ---------------------------------------------------------------------------------------------


def estimate(stays: int, passes: int) -> dict[str, int]:
    parts = {"parameters": stays // 2, "optimizer": stays // 2, "gradients": passes // 2, "activations": passes // 2}
    return {**parts, "transport": 0, "total": stays + passes}


def test_contenders_that_fit_together_take_turns():
    sizes = {"a": estimate(30, 20), "b": estimate(30, 10), "c": estimate(30, 20), "d": estimate(90, 20)}
    assert groups_that_fit(sizes, 200) == [["a", "b", "c"], ["d"]]  # 3 * 30 + 20 of 184; with d 200
    assert groups_that_fit(sizes, 90) == [["a", "b"], ["c"], ["d"]]
    assert check_room({"a": estimate(30 * MiB, 20 * MiB)}, 60 * MiB) == []
    (told,) = check_room({"a": estimate(30 * MiB, 20 * MiB)}, 50 * MiB)
    assert "a may run out of memory" in told
    with pytest.raises(ValueError, match=r"a does not fit: a rank would hold .* lower --layers"):
        check_room({"a": estimate(30 * MiB, 20 * MiB)}, 39 * MiB)


SIZES = Sizes(
    model=ModelSize(total=1000, experts=800, active=400, multiplied=350, attention=64),
    trained=Trained(1000),
    degrees=Degrees(fsdp=4, ep=4),
    tokens=10, sequence=16, hidden=8, vocabulary=50, layers=3, moe_layers=2, num_experts=4, top_k=4,
    number_bytes=2, parameter_bytes=4,
)  # fmt: skip


def test_a_roofline_is_what_the_configuration_needs():
    work = work_of(SIZES)
    assert work["experts"] == Work(flops=6 * 10 * 200)
    assert work["dense"] == Work(flops=6 * 10 * 150)
    assert work["attention"] == Work(flops=10 * 6 * 16 * 64)
    adapted = dataclasses.replace(SIZES, trained=Trained(60, 200, 150, 30, 20))
    assert work_of(adapted)["experts"] == Work(flops=10 * (4 * 200 + 6 * 30))
    assert work_of(adapted)["dense"] == Work(flops=10 * (4 * 150 + 6 * 20))
    assert work_of(adapted)["optimizer"] == Work(memory_bytes=8 * 60 / 4 * 4)
    assert work["loss"] == Work(memory_bytes=2 * 10 * 50 * 2)
    assert work["optimizer"] == Work(memory_bytes=8 * (1000 / 4) * 4)
    assert work["elementwise"] == Work(memory_bytes=16 * 10 * 8 * 2 * 3)
    # All of 4 experts on 4 ranks: 3 rows leave for each token, in 2 layers, out and back, and again for gradients.
    assert work["rides"].sent_bytes == pytest.approx(4 * 10 * 3 * 8 * 2 * 2)
    assert work["communication"].sent_bytes == pytest.approx(2 * 200 * 3 / 4 * 4)
    host, h100 = Topology.even(4), HARDWARE["H100"]
    assert h100.memory is not None and h100.nvlink is not None
    assert roofline_ms(Work(flops=2e12), h100, host, 1e15) == pytest.approx(2.0)
    assert roofline_ms(Work(memory_bytes=h100.memory), h100, host, 1e15) == pytest.approx(1000.0)
    sent = Work(sent_bytes=h100.network.bytes_per_second)
    assert roofline_ms(sent, h100, Topology.even(4, 2), 1e15) == pytest.approx(1000.0)
    assert roofline_ms(sent, h100, host, 1e15) == pytest.approx(1e3 * sent.sent_bytes / h100.nvlink.bytes_per_second)
    assert roofline_ms(sent, CPU, host, None) is None


def test_tables_say_what_is_slow_and_what_differs(tmp_path: Path):
    def row(label: str, ms: float) -> Row:
        kinds = [KindRow(kind, ms / 10, ms / 10) for kind in (*KINDS, IDLE)]
        return Row(
            label, 0, what="as it ran", loss=5.7, grad_norm=1.0, first_step_seconds=3.0, mfu=0.25,
            times=Times.of([StepTimes(ms, 2.0, 70.0), StepTimes(ms + 8, 4.0, 80.0)]),
            tokens_per_second=1234.0, tflops=99.0, kinds=kinds,
            profiled_ms=ms, on_device=True,
        )  # fmt: skip

    case = Case(
        "tiny", "TinyForCausalLM", 1000, 400, 3, 4, 10, 16, "learned", 100, 1e15, "", {"experts": 2.0},
        [["carpool"], ["transformers"]], rows=[row("carpool", 100.0), row("transformers", 200.0), Row("third", 0)],
    )  # fmt: skip
    case.rows[2].unavailable = "out of memory"
    case.different = ["transformers: loss of the first step is 6, and 5.7 of carpool"]
    case.compare()
    assert case.rows[1].ratio == pytest.approx(104 / 204)
    text = printed(show, result_of([case], rounds=2, steps=5), 200)
    assert re.search(r"carpool +1,234 +104\.0 +3\.0 +75\.0 +25\.0% +99", text)
    assert re.search(r"experts +2\.0 +10\.0 +10% +5\.0x +20\.0 +10% +10\.0x", text)
    for said in (
        "third: is not available: out of memory", "NOT THE SAME COMPUTATION: transformers: loss",
        "NOT INTERLEAVED, because the models do not fit into memory together: carpool; then transformers",
        "Routing of random weights: skewed",
    ):  # fmt: skip
        assert said in " ".join(text.split())


def test_what_the_host_times_is_known():
    tensor, slow = torch.ones(2), 0.02
    original = torch.cuda.synchronize
    torch.cuda.synchronize = lambda *_: time.sleep(slow)  # type: ignore[assignment]
    try:
        with host_times() as seconds:
            torch.cuda.synchronize()
            assert tensor.tolist() == [1.0, 1.0] and tensor[0].item() == 1.0
            with pytest.raises(RuntimeError):
                tensor.item()  # two values
    finally:
        torch.cuda.synchronize = original
    assert len(seconds.waits) == 4 and slow <= sum(seconds.waits) < 200 * slow and not seconds.launches
    assert torch.Tensor.item is type(tensor).__base__.item  # and nothing is left behind


def test_the_host_of_graphs_does_not_count_launches_that_wait(alone: None, monkeypatch: pytest.MonkeyPatch):
    """A launch returns when the graph before is done, unless the host has waited for that."""
    now, done = [0.0], [0.0]

    def replay(_: object) -> None:
        now[0] = max(now[0], done[0]) + 1.0
        done[0] = now[0] + 20.0

    def wait(_: object) -> None:
        now[0] = max(now[0], done[0])

    class Captured:
        def take_step(self) -> None:
            for _ in range(5):
                torch.cuda.CUDAGraph.replay(None)  # type: ignore[arg-type]

    stream = object.__new__(torch.cuda.Stream)
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", replay)
    monkeypatch.setattr(torch.cuda.Stream, "synchronize", wait)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    times = time_steps(Captured(), 3, torch.device("cpu"))  # type: ignore[arg-type]
    # 15 launches, all but the first of which wait; then 5, of which the first waits for what was there.
    assert times.ms == pytest.approx(1e3 * (15 + 14 * 20) / 3) and times.host_ms == pytest.approx(1e3 * (5 + 20))
    assert times.host_waits_ms == pytest.approx(times.ms - times.host_ms)
    assert torch.cuda.CUDAGraph.replay is replay


# -- on ranks ------------------------------------------------------------------------------------------------------


def _measure(settings: Settings, num_ranks: int = 2) -> dict[str, Any]:
    case = ModelBenchmark(settings.resolve(cuda=False, num_ranks=num_ranks), torch.device("cpu"), "test").measure()
    return dataclasses.asdict(case)


def test_contenders_with_settings_of_their_own(tiny: str):
    name = "carpool-compiled+moe.schedule=chunks+moe.chunks=4+parallelism.data_parallel=fsdp"
    settings = Settings(model=tiny, contenders=("carpool", name), overrides=("moe.schedule=two-batch",))
    plain, own = (settings.config_of(one) for one in settings.contenders)
    assert (plain.moe.schedule, plain.training.torch_compile) == ("two-batch", "off")
    assert (own.moe.schedule, own.moe.chunks, own.training.torch_compile) == ("chunks", 4, "on")
    assert (plain.parallelism.data_parallel, own.parallelism.data_parallel) == ("auto", "fsdp")
    assert plain.training.output_dir != own.training.output_dir


@pytest.fixture
def alone() -> Iterator[None]:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


ADAPTED = ("adapter.kind=lora", "adapter.rank=4")


@pytest.mark.usefixtures("alone")
def test_adapters_beside_those_of_peft(tiny: str, tmp_path: Path):
    """Random weights, the same for both."""
    settings = Settings(
        model=tiny, layers=2, device="cpu", sequence=16, batch=2, steps=1, rounds=1, json_only=True,
        contenders=("carpool", "transformers"), overrides=ADAPTED, out=str(tmp_path),
    )  # fmt: skip
    case = _measure(settings, 1)
    ours, theirs = case["rows"]
    assert case["different"] == [] and theirs["loss"] == pytest.approx(ours["loss"], rel=1e-5)
    assert theirs["grad_norm"] == pytest.approx(ours["grad_norm"], rel=1e-3) and "peft" in theirs["what"]
    model = meta_model(model_config({"from": tiny, "num_hidden_layers": 2}))
    size = model_size(model, experts_modules(model), 3)
    attention, experts = 4 * (32 + 32 + 32 + 16 + 32 + 16 + 32 + 32), 3 * 4 * (32 + 32 + 16 + 32)
    whole = flops_per_token(size, 16)
    assert case["flops_per_token"] == whole - 2 * size.multiplied + 6 * 2 * (attention + experts)


def test_peft_on_several_ranks_is_refused(two_ranks: Ranks, tiny: str, tmp_path: Path):
    settings = Settings(
        model=tiny, layers=1, device="cpu", sequence=16, batch=1, steps=1, rounds=1, json_only=True,
        contenders=("carpool", "transformers"), overrides=ADAPTED, out=str(tmp_path),
    )  # fmt: skip
    ours, theirs = two_ranks(_measure, settings)[0]["rows"]
    assert ours["unavailable"] is None and "use one rank" in theirs["unavailable"]


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_contenders_do_the_same_work(two_ranks: Ranks, tiny: str, tmp_path: Path, compiled: bool):
    settings = Settings(
        model=tiny, layers=2, device="cpu", sequence=16, batch=2, accumulation=2, steps=1, rounds=1,
        contenders=("carpool", "carpool-compiled+moe.schedule=none" if compiled else "transformers"), out=str(tmp_path),
        json_only=True,
        overrides=("training.torch_compile_backend=eager", "moe.schedule=two-batch"),
    )  # fmt: skip
    (tmp_path / "carpool").mkdir()
    (tmp_path / "carpool" / "metrics.jsonl").write_text("{}\n")  # of an earlier benchmark
    case = two_ranks(_measure, settings)[0]
    assert case["groups"] == [list(settings.contenders)] and case["different"] == [] and case["warnings"] == []
    assert (case["layers"], case["tokens"], case["num_ranks"]) == (2, 64, 2)
    ours, theirs = case["rows"]
    for row in (ours, theirs):
        assert row["unavailable"] is None and row["times"]["ms"] > 0
        assert sum(kind["ms"] for kind in row["kinds"]) == pytest.approx(row["profiled_ms"])
        assert {kind["kind"] for kind in row["kinds"] if kind["ms"] > 0} >= {
            "dense", "attention", "loss", "optimizer", "elementwise", "rides", "communication",
        }  # fmt: skip
    assert theirs["loss"] == pytest.approx(ours["loss"], rel=1e-5)
    assert theirs["grad_norm"] == pytest.approx(ours["grad_norm"], rel=1e-3)
    # 2 micro-batches of 32 tokens with 3 of 8 experts: 24 for each.
    assert ours["load"] == 1.0 and (compiled or theirs["load"] is None)
    assert "transport dedup" in ours["what"] and ours["what"].endswith("no CUDA graphs (there is no GPU)")
    assert ("layers compiled" if compiled else "all_to_all") in theirs["what"]


def test_routers_of_each_stage_are_forced(two_ranks: Ranks, tiny: str, tmp_path: Path) -> None:
    settings = Settings(
        model=tiny, layers=2, device="cpu", sequence=16, batch=2, accumulation=2, steps=1, rounds=1,
        contenders=("carpool",), out=str(tmp_path), json_only=True, overrides=("parallelism.pp_size=2",),
    )  # fmt: skip
    (row,) = two_ranks(_measure, settings)[0]["rows"]
    assert (row["unavailable"], row["load"]) == (None, 1.0)


def _generate(folder: str) -> list[list[str]]:
    """All contenders in turns; then the groups of a memory that holds one model."""
    reuse_meshes()
    settings = GenerateSettings(
        model=f"{folder}/config.json", batch=3, prompt=5, new_tokens=4, rounds=2, out=folder
    ).resolve(cuda=False, num_ranks=2)
    given = json.loads(json.dumps(settings.to_json()))
    measure_on_rank(load_config(None, []), "carpool.bench.bench_generate:BENCHMARK", given, "carpool bench generate")
    once = replace(settings, contenders=("transformers", "carpool-eager", "carpool"), rounds=1)
    with patch.object(generate, "rank_memory", lambda *_: max(generate._needs(once, _config(folder)).values())):
        (case,) = generate.measure(once, torch.device("cpu"), "")
    assert all(row.same_tokens == 1.0 and len(row.decode_ms) == 1 for row in case.rows)
    return case.groups


def _config(folder: str) -> Any:
    return AutoConfig.from_pretrained(folder)


def test_all_contenders_make_the_same_tokens(two_ranks: Ranks, tmp_path: Path) -> None:
    tiny_config(discover()["qwen3_moe"]).save_pretrained(tmp_path)
    for groups in two_ranks(_generate, str(tmp_path)):
        assert groups == [["transformers"], ["carpool-eager", "carpool"]]
    (case,) = json.loads((tmp_path / "generate.json").read_text())["cases"]
    assert (case["num_ranks"], case["batch"], case["prompt"], case["new_tokens"]) == (2, 3, 5, 4)
    rows: dict[str, Any] = {row["label"]: row for row in case["rows"]}
    assert list(rows) == list(GENERATE_CONTENDERS) and case["groups"] == [list(GENERATE_CONTENDERS)]
    for row in rows.values():
        assert row["same_tokens"] == 1.0
        assert len(row["prefill_ms"]) == len(row["decode_ms"]) == 2 and min(row["prefill_ms"] + row["decode_ms"]) > 0
    assert rows["carpool"]["decoding"] == "eager: there is no GPU"


def test_rates_are_of_all_ranks() -> None:
    row = generate.Row("carpool", "eager", [50.0, 100.0, 200.0], [2.0, 4.0, 8.0])
    case = generate.Case("A", 1, 4, 8, 16, 3, [["carpool"]], [row])
    assert case.prefill_rate(row) == 4 * 8 * 16 / 0.1
    assert case.decode_rate(row) == 4 * 8 / 0.004


def test_models_that_do_not_fit_together() -> None:
    needs = {"carpool": 60, "transformers": 40}
    assert generate.groups_that_fit(needs, 110) == [["carpool", "transformers"]]
    assert generate.groups_that_fit(needs, 105) == [["carpool"], ["transformers"]]
    with pytest.raises(ValueError, match=r"carpool does not fit: .* lower --layers"):
        generate.groups_that_fit(needs, 59)
