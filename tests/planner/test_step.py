"""Predicted steps: against measured ones, and how they move with what they are made of."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.planner import Compared, compare, order_agreement
from carpool.hf.pipeline_stages import cut_model
from carpool.parallel.degrees import Degrees
from carpool.placement.trace import Trace
from carpool.planner.candidate import KEEP, Candidate, Spare
from carpool.planner.machine.hardware import HARDWARE, LinkRate
from carpool.planner.model.routes import Choice, Routes
from carpool.planner.model.shape import ModelShape
from carpool.planner.search.why import bounded_by
from carpool.planner.step.events import Graph, execute, exposed_of
from carpool.planner.step.graph import StepClock, step_graph
from carpool.planner.step.lengths import HOST_ACTION, Lengths, break_even_tokens, stream_seconds
from carpool.planner.step.peak import memory_of
from carpool.planner.step.prediction import Prediction, predict, step_seconds
from carpool.transport import find_transport
from tests.planner.step_problem import shape

H200 = HARDWARE["H200"]
DOCS = Path(__file__).parents[2] / "docs"
TWO = Degrees(1, 2, 1, 2)
ALONE = Candidate(
    Degrees(1, 1, 1, 1), 4096, 8, transport="local", moments="int8", optimizer_in_backward=True, eager="asked for"
)


def graph_of(found: Prediction) -> Graph:
    return step_graph(found.clock.lengths)


QWEN15 = {
    "model_type": "qwen2_moe", "hidden_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 16,
    "intermediate_size": 5632, "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632,
    "num_experts": 60, "num_experts_per_tok": 4, "vocab_size": 151936,
}  # fmt: skip
DEEPSEEK_V2_LITE = {
    "model_type": "deepseek_v2", "hidden_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 16,
    "kv_lora_rank": 512, "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "intermediate_size": 10944, "moe_intermediate_size": 1408, "n_routed_experts": 64, "n_shared_experts": 2,
    "num_experts_per_tok": 6, "first_k_dense_replace": 1, "vocab_size": 102400,
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "layers", "candidate", "milliseconds"),
    [
        # docs/measurements.md, "Whole training steps of real configurations".
        ("qwen3-30b-a3b", 12, Candidate(TWO, 4096, 2, moments="bfloat16"), 163.2),
        ("olmoe-1b-7b", 16, Candidate(TWO, 4096, 4, moments="bfloat16"), 296.3),
        # docs/measurements/streaming.json, commit f9b7807: copies of state beside the backward, and no copies.
        ("qwen3-30b-a3b", 12, replace(ALONE, optimizer_offload="host"), 1074.7),
        ("qwen3-30b-a3b", 12, ALONE, 524.7),
    ],
)
def test_steps_of_two_h200(name: str, layers: int, candidate: Candidate, milliseconds: float) -> None:
    seconds = predict(shape(name, layers), H200, candidate, 8).seconds
    assert seconds.low < milliseconds / 1e3 < seconds.high
    assert seconds.middle == pytest.approx(milliseconds / 1e3, rel=0.08)


def test_measured_points_are_predicted() -> None:
    """docs/planner.md, "Is it right?". Points under FSDP were measured when it copied experts that one rank has."""
    points = json.loads((DOCS / "measurements" / "points.json").read_text())["points"]
    found = compare([one for one in points if one["dense"] != "fsdp"], H200, 8)
    assert len(found) == 22 and sum(one.inside for one in found) >= 21
    assert median(abs(one.error) for one in found) < 0.03


@pytest.mark.parametrize(
    ("keys", "layers", "milliseconds"),
    [(QWEN15, 4, 83.1), (QWEN15, 8, 135.2), (QWEN15, 16, 238.7), (DEEPSEEK_V2_LITE, 9, 135.3)],
)
def test_steps_of_an_h100_that_no_rate_was_fitted_to(keys: dict[str, Any], layers: int, milliseconds: float) -> None:
    """docs/measurements.md, "Parts of a step". The update's rate was measured alone."""
    model = ModelShape.read({**keys, "num_hidden_layers": layers})
    candidate = replace(ALONE, micro_batch=2, compiled=True, eager=None, max_grad_norm=0.0)
    seconds = predict(model, HARDWARE["H100"], candidate, 8).seconds
    assert seconds.middle == pytest.approx(milliseconds / 1e3, rel=0.03)


def test_the_steps_parts_are_the_profiled_ones() -> None:
    """docs/measurements.md: kinds of kernels of the compiled step of 167 ms, in ms. Norms take less since then."""
    graph = graph_of(predict(shape("qwen3-30b-a3b", 12), H200, Candidate(TWO, 4096, 2, moments="bfloat16"), 8))
    found: Counter[str] = Counter()
    for event in graph.events:
        found[event.kind] += 1e3 * event.seconds
    profiled = {"experts": 42.6, "dense": 35.4, "attention": 24.8, "elementwise": 12.3, "loss": 3.6}
    for kind, milliseconds in profiled.items():
        assert found[kind] == pytest.approx(milliseconds, rel=0.1), kind
    assert found["dispatch"] + found["combine"] == pytest.approx(12.3, rel=0.15)


@pytest.mark.parametrize("transport", ["nvlink", "alltoall"])
def test_rows_are_those_that_transports_expect(transport: str) -> None:
    for ranks in (2, 8):
        rows = Routes().rows(transport, Choice(128, 8), ranks, ranks)
        copies = find_transport(transport).ranks_per_token(128, 8, ranks)
        assert rows.arrive == pytest.approx(copies) and rows.inside == pytest.approx(copies * (ranks - 1) / ranks)
    inside, between, arrive = Routes().rows("hierarchical", Choice(128, 8), 16, 8)
    assert between == pytest.approx(1, abs=0.01) and inside == pytest.approx(arrive * 7 / 8)


def test_a_trace_counts_what_tokens_chose() -> None:
    same_TK = np.tile([[0, 1, 2, 3]], (100, 1))
    routes = Routes((same_TK,), "all tokens choose the first rank's")
    assert routes.rows("dedup", Choice(16, 4), 4, 4) == pytest.approx((0.75, 0.0, 1.0))
    assert routes.fullest(16, 4) == 4.0 and Routes().fullest(16, 4) == 1.0


def test_what_hides_is_not_exposed() -> None:
    """Two batches hide rides over a slow link behind computation; gathers run a layer ahead."""
    slow = replace(H200, nvlink=LinkRate(60e9, 2e-5))
    model, ranks = shape("mixtral-8x7b", 4), Degrees(1, 4, 1, 4)
    one, two = (
        predict(model, slow, Candidate(ranks, 4096, 2, 2, schedule=schedule, eager="asked for", policies=KEEP), 8)
        for schedule in ("none", "two-batch")
    )
    rides = sum(event.seconds for event in graph_of(one).events if event.kind in ("dispatch", "combine"))
    assert one.exposed["dispatch"] + one.exposed["combine"] == pytest.approx(rides)
    assert two.exposed["dispatch"] + two.exposed["combine"] < 0.5 * rides and two.seconds.middle < one.seconds.middle
    fsdp = predict(model, H200, Candidate(ranks, 4096, 16, data_parallel="fsdp"), 8)
    gathers = sum(event.seconds for event in graph_of(fsdp).events if event.kind == "all-gather")
    assert fsdp.exposed.get("all-gather", 0.0) < 0.5 * gathers


def test_equal_parts_of_a_step_come_in_one_order() -> None:
    """Dispatches and combines differ by rounding alone."""
    for dispatch, combine in ((1.0, 1.0 + 1e-15), (1.0 + 1e-15, 1.0)):
        plan: Any = SimpleNamespace(prediction=SimpleNamespace(exposed={"combine": combine, "dispatch": dispatch}))
        assert bounded_by(plan) == "dispatches 50 %, combines 50 %"


def test_order_is_of_pairs_that_differ() -> None:
    def point(name: str, measured: float, predicted: float) -> Compared:
        found = predict(shape("mixtral-8x7b", 1), H200, Candidate(TWO, 64, 1), 8)
        return Compared(name, measured, replace(found, seconds=found.seconds._replace(middle=predicted)), None, 0)

    points = [point("held/a, 1", 1.0, 1.0), point("held/a, 2", 1.02, 0.9), point("held/a, 3", 1.2, 0.95),
              point("held/b, 1", 9.0, 0.1)]  # fmt: skip
    assert order_agreement(points) == (1, 2)


def test_a_token_of_limited_routing_visits_fewer_nodes() -> None:
    """Against drawn choices: 4 of 8 groups of 4 experts, then 3 of the 16 experts there."""
    rng = np.random.default_rng(0)
    groups_TG = np.argsort(rng.random((20_000, 8)), axis=1)[:, :4]
    open_TE = (groups_TG[:, :, None] * 4 + np.arange(4)).reshape(-1, 16)
    expert_TK = np.take_along_axis(open_TE, np.argsort(rng.random(open_TE.shape), axis=1)[:, :3], axis=1)
    for parts in (2, 4, 8, 16, 32):
        seen_TP = (expert_TK[:, :, None] * parts // 32 == np.arange(parts)).any(1)
        limited = Routes().reached(Choice(32, 3, 8, 4), parts)
        assert limited == pytest.approx(seen_TP.mean(), rel=0.02)
        assert limited < Routes().reached(Choice(32, 3), parts) + 1e-9


@pytest.mark.usefixtures("outside_transports")
def test_rows_in_fp8_take_half_the_time_on_the_links() -> None:
    candidate = Candidate(Degrees(1, 16, 1, 16), 4096, 4, transport="node-rows")
    one, two = (
        Lengths(shape("qwen3-30b-a3b", 2), HARDWARE["H100"], replace(candidate, codecs=codecs), 8)
        for codecs in ({}, {"dispatch": "fp8"})
    )
    rides = [each.ride("dispatch", "dispatch", "dispatch") for each in (one, two)]
    assert rides[0] is not None and rides[1] is not None
    assert 0.5 < rides[1].seconds / rides[0].seconds < 0.75
    assert one.ride("combine", "combine", "combine") == two.ride("combine", "combine", "combine")


def test_chunks_of_the_backward_are_its_own_and_carry_all_that_it_sends() -> None:
    base = Candidate(Degrees(1, 16, 1, 16), 4096, 2, transport="hierarchical", schedule="chunks", chunks=2)

    def dispatches(**changed: Any) -> tuple[Counter[str], float]:
        events = graph_of(predict(shape("qwen3-30b-a3b", 1), HARDWARE["H100"], replace(base, **changed), 8)).events
        found = [event for event in events if event.kind == "dispatch"]
        return Counter(event.phase for event in found), sum(e.seconds for e in found if e.phase == "backward")

    assert dispatches()[0] == {"forward": 2, "backward": 2}
    assert dispatches(backward_chunks=3)[0] == {"forward": 2, "backward": 3}
    resent = dispatches(policies={**KEEP, "expert_inputs": "resend"})
    assert resent[0] == {"forward": 2, "backward": 2} and resent[1] > 1.7 * dispatches()[1]


def test_captured_stages_start_without_asking_for_layers() -> None:
    """The host: PyTorch's runtime, 2 stages and 4 micro-batches, forward and backward."""
    candidate = Candidate(Degrees(1, 1, 1, 1, pp=2), 4096, 1, 4, transport="local")
    model = shape("mixtral-8x7b", 4)
    eager, captured = (predict(model, H200, replace(candidate, eager=why), 8) for why in ("asked for", None))
    assert not eager.candidate.captured and captured.candidate.captured
    hosts = [[one for one in graph_of(found).events if one.stream == "host"] for found in (eager, captured)]
    assert len(hosts[1]) == 2 * 4 * 2 and {one.seconds for one in hosts[1]} == {HOST_ACTION}
    assert len(hosts[0]) == 2 * 4 * 2 + 4 * 4 * 2 and captured.seconds.middle <= eager.seconds.middle


def test_layers_that_are_not_alike_are_all_counted() -> None:
    every = shape("gpt-oss-20b", 48)
    # Of three kinds of layer in turn, every sixth is another one.
    layers = tuple(replace(one, heads=16 if i % 6 == 5 else 64) for i, one in enumerate(every.layers))
    model, candidate = replace(every, layers=layers), Candidate(Degrees(1, 8, 1, 8), 4096, 1)
    whole = predict(model, H200, candidate, 8).seconds.middle
    assert step_seconds(model, H200, candidate, 8) == pytest.approx(whole, rel=1e-6)
    candidate = Candidate(
        Degrees(1, 8, 1, 2), 4096, 4, 3, data_parallel="zero1", policies={**KEEP, "expert_activations": "offload"},
        optimizer_offload="host", moments="float32",
    )  # fmt: skip
    model = shape("qwen3-30b-a3b", 48)
    whole = predict(model, HARDWARE["H100"], candidate, 8).seconds.middle
    assert step_seconds(model, HARDWARE["H100"], candidate, 8) == pytest.approx(whole, rel=1e-6)


def test_experts_that_fsdp_copies_take_time() -> None:
    """Read and written before each pass, and gradients three times in float32: 36 bytes of a parameter."""
    model, copied = shape("mixtral-8x7b", 1), replace(TWO, dp_replicate=2)
    here, there = (
        Lengths(model, H200, Candidate(degrees, 4096, 1, data_parallel="fsdp", eager="asked for"), 8)
        for degrees in (copied, TWO)
    )
    copies = [
        one
        for one in (
            *here.forward(model.layers[0]),
            *here.backward(model.layers[0]),
            *here.reductions(0, here.experts_of_layer),
        )
        if one.name.startswith("copied")
    ]
    moved = (sum(one.seconds - one.fixed for one in copies)) * (H200.kernel("elementwise").bytes_per_second or 0)
    assert moved == pytest.approx(36 * here.experts_of_layer, rel=0.01)
    assert not any(one.name.startswith("copied") for one in there.forward(model.layers[0]))


def test_collectives_over_many_ranks() -> None:
    slow = replace(HARDWARE["H100"], network=LinkRate(1e9, 0.0))
    crossed, near = (
        Lengths(shape("mixtral-8x7b", 1), slow, Candidate(Degrees(1, 6, 1, 2), 4096, 1), per_node).collective(
            "reduce", "reduction", 1e9, "fsdp"
        )
        for per_node in (4, 8)
    )
    assert crossed is not None and near is not None
    assert crossed.seconds == pytest.approx(0.5 / 4, rel=1e-3) and near.seconds < 0.01
    small, large = (
        Lengths(shape("mixtral-8x7b", 1), HARDWARE["H100"], Candidate(Degrees(fsdp=ranks), 4096, 1), 8).collective(
            "all-gather", "all-gather", 1e6, "fsdp"
        )
        for ranks in (512, 16384)
    )
    assert small is not None and large is not None
    # 14 us from a node to the next, 3.4 us from a GPU to the next.
    assert large.fixed - small.fixed == pytest.approx((2048 - 64) * 14e-6 + (16384 - 512 - 1984) * 3.4e-6)
    assert large.seconds > 20 * small.seconds > 0.02
    # Copies of the model add up by trees.
    of_copies = Candidate(Degrees(dp_replicate=2048, fsdp=8), 4096, 1)
    pieces = [*Lengths(shape("mixtral-8x7b", 1), HARDWARE["H100"], of_copies, 8).reductions(1e6, 0.0)]
    (copies,) = (piece for piece in pieces if piece.name == "copies")
    assert copies.fixed - 30e-6 == pytest.approx(2 * 11 * 14e-6)


def test_float32_moves_twice_the_bytes_and_multiplies_without_tensor_cores() -> None:
    one = Candidate(Degrees(fsdp=8, ep=8), 4096, 2, stored=4, computed=2, transport="dedup", data_parallel="fsdp")
    h100, model = HARDWARE["H100"], shape("qwen3-30b-a3b", 2)
    half, whole = (Lengths(model, h100, replace(one, computed=size), 8) for size in (2, 4))
    layer = model.layers[0]
    pieces = [{p.name: p for p in [*of.forward(layer), *of.gathers(layer)]} for of in (half, whole)]
    ratio = {name: pieces[1][name].seconds / pieces[0][name].seconds for name in pieces[1]}
    assert ratio["attention"] == pytest.approx(989 / 67, rel=0.03) and ratio["experts"] > 8
    for name in ("norms", "dispatch", "all-gather"):
        assert 1.5 < ratio[name] < 2.05, name
    assert pieces[1]["experts"].high == 1.6, "no kernel was measured in float32"
    assert replace(one, computed=4).settings()["training"]["bf16"] is False
    # CPUs are measured in float32.
    cpu = [Lengths(model, HARDWARE["cpu"], replace(one, computed=size), 8)._attention(layer, False) for size in (2, 4)]
    assert cpu[0] == cpu[1]


@pytest.mark.parametrize(
    "more",
    [
        {"degrees": Degrees(1, 8, 1, 8), "accumulation": 4, "transport": "dedup", "schedule": "two-batch"},
        {"degrees": Degrees(1, 8, 1, 8), "micro_batch": 2, "schedule": "two-batch", "data_parallel": "fsdp"},
        {"degrees": Degrees(2, 4, 1, 4), "accumulation": 3, "data_parallel": "fsdp", "optimizer_offload": "host"},
        {
            "degrees": Degrees(1, 8, 1, 8),
            "schedule": "chunks",
            "chunks": 3,
            "policies": {**KEEP, "expert_inputs": "resend"},
        },
        {"degrees": Degrees(1, 4, 1, 4, pp=2), "accumulation": 5, "transport": "dedup", "data_parallel": "fsdp"},
        {"degrees": Degrees(1, 2, 1, 2, pp=4), "accumulation": 8, "pipeline": "InterleavedZeroBubble"},
        {"degrees": Degrees(1, 4, 1, 4, pp=2), "accumulation": 6, "pipeline": "DualPipeV", "schedule": "two-batch"},
    ],
)
def test_a_clock_gives_the_sums_of_the_graph(more: dict[str, Any]) -> None:
    given: dict[str, Any] = {"sequence_length": 4096, "micro_batch": 1, "compiled": False, **more}
    exactly = partial(pytest.approx, rel=1e-12)
    shapes = shape("deepseek-v3-cut", 9), shape("qwen3-30b-a3b", 9)
    for model in shapes:
        lengths = Lengths(model, HARDWARE["H100"], Candidate(**given), 4)
        clock, number = StepClock(lengths), lengths.candidate.accumulation
        graph = step_graph(lengths)
        run = execute(graph)
        busiest = run.end_SR.max(1).argmax().item()
        watched = clock.run(number, 9, watched=busiest)
        assert exposed_of(watched.spans, watched.step) == pytest.approx(run.exposed_seconds(busiest))
        assert watched.busiest == busiest and watched.step == exactly(run.step)
        assert clock.seconds(number, 9, "low") == exactly(execute(graph, seconds=lambda event: event.low).step)
        assert clock.seconds(number, 9, "high") == exactly(execute(graph, seconds=lambda event: event.high).step)
        # Of fewer, from what is made already.
        assert clock.seconds(2 * (number // 2) or 1, 4) == StepClock(lengths).seconds(2 * (number // 2) or 1, 4)


def test_points_of_one_gpu_are_predicted() -> None:
    """docs/planner.md, "Is it right?": steps, but for an eager one and one whose machine had a faster link to its
    host; memory of all."""
    points = json.loads((DOCS / "measurements" / "points_one.json").read_text())["points"]
    found = compare(points, H200, 8)
    known = [abs(one.error) for one in found if not one.name.endswith(("state in host memory", "6 layers, eager"))]
    assert len(found) == 17 and len(known) == 15 and max(known) < 0.12 and median(known) < 0.04
    memory = [abs(one.memory_error) for one in found if one.memory_error is not None]
    assert len(memory) == 17 and max(memory) < 0.05 and median(memory) < 0.02


def test_points_of_stages_are_predicted() -> None:
    """docs/measurements.md, "A stage beside the same layers". Stages have layers as a run cuts them: memory tells."""
    for file, number, worst in (("points_stages.json", 6, 0.13), ("points_stages_4.json", 7, 0.08)):
        found = compare(json.loads((DOCS / "measurements" / file).read_text())["points"], H200, 8)
        # Pairs of interleaved stages take longer than on paper, for an unknown reason.
        known = [one for one in found if "Interleaved1F1B, pairs" not in one.name]
        assert len(found) == number and len(known) == 6 and max(abs(one.error) for one in known) < worst
        memory = [abs(one.memory_error) for one in found if one.memory_error is not None]
        assert len(memory) >= 1 and max(memory) < 0.08
    pairs = next(one for one in found if "DualPipeV, pairs" in one.name)
    assert abs(pairs.error) < 0.02  # products leave rides their multiprocessors


@pytest.mark.parametrize("number", [2, 4, 8])
def test_stages_are_those_of_a_run(number: int) -> None:
    with torch.device("meta"):
        blueprint = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3_moe"))
    found = ModelShape.read(blueprint.config.to_dict()).stages(number)
    assert found == [part.layers for part in cut_model(blueprint, number)]
    assert len(found[-1]) < len(found[0])  # it has the output layer


@pytest.mark.parametrize(("layers", "back"), [(2, 0), (6, 4)])
def test_only_what_has_left_the_device_comes_back(layers: int, back: int) -> None:
    """The last two layers' offloaded tensors are still there when the backward begins."""
    candidate = Candidate(
        Degrees(1, 1, 1, 1), 4096, 2, transport="local", policies={**KEEP, "expert_activations": "offload"}
    )
    graph = step_graph(Lengths(shape("mixtral-8x7b", layers), H200, candidate, 1))
    copies = [event.phase for event in graph.events if event.name.endswith("::copies")]
    assert (copies.count("forward"), copies.count("backward")) == (layers, back)


def test_copies_of_state_are_hidden_from_so_many_tokens_on() -> None:
    state, per_token = 30.5e9 * (2 + 2 * (1 + 4 / 256)), 6 * 3.3e9
    seconds = stream_seconds(state, H200)
    assert seconds == pytest.approx(3.05, abs=0.05)
    tokens = break_even_tokens(state, per_token, H200)
    assert tokens == pytest.approx(114_000, rel=0.01)
    # By definition: two thirds of the step's operations last as long as the copies.
    assert tokens * per_token * 2 / 3 / H200.flops == pytest.approx(seconds)
    assert break_even_tokens(0, 1e9, H200) == 0


def test_spare_slots_even_out_experts_and_cost_fetches() -> None:
    """Of a trace by its plans; without one up to moe.balance_limit, with all slots in use."""
    trace = Trace.load(DOCS / "traces" / "e64-noaux-1615.npz")
    olmoe, candidate = shape("olmoe-1b-7b"), Candidate(Degrees(1, 8, 1, 8), 4096, 2, transport="nvlink")
    spare = replace(candidate, spare=Spare(2))
    recorded = Routes.of(trace, "noaux", olmoe.num_experts, olmoe.top_k)
    load, moved = recorded.balanced(64, 8, 2, 1.1)
    assert recorded.fullest(64, 8) > 1.4 and 1 <= load < 1.1 and 0 < moved < 8
    assert Routes().balanced(64, 8, 2, 1.1) == (1.1, 2.0) and Routes().balanced(64, 1, 2, 1.1) == (1.0, 0.0)

    def pieces(one: Candidate, routes: Routes) -> dict[str, float]:
        lengths = Lengths(olmoe, H200, one, 8, routes)
        layer = olmoe.layers[0]
        return {p.name: p.seconds for p in (*lengths.forward(layer), *lengths.backward(layer))}

    plain, even, uniform = (pieces(*of) for of in ((candidate, recorded), (spare, recorded), (spare, Routes())))
    assert even["experts"] < 0.75 * plain["experts"] and even["dispatch"] != plain["dispatch"]
    assert uniform["experts"] > pieces(candidate, Routes())["experts"]
    saved = pieces(replace(spare, spare=Spare(2, saved=True)), recorded)
    assert saved["gradients to experts"] < even["gradients to experts"] and saved["dispatch"] == even["dispatch"]
    assert predict(olmoe, H200, spare, 8, recorded).seconds < predict(olmoe, H200, candidate, 8, recorded).seconds
    without, fetched, kept = (
        memory_of(olmoe, replace(candidate, spare=one)).total for one in (Spare(), Spare(2), Spare(2, saved=True))
    )
    each = 2 * olmoe.expert_parameters * 2
    assert 3 * each <= fetched - without < 3.2 * each and kept - fetched > len(olmoe.layers) * each
    assert spare.settings()["moe"]["spare_slots"] == 2 and "2 spare slots" in spare.label
