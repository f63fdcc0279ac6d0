"""What is computed on a row: every way against formulas in float64, on odd, empty and skewed inputs."""

from __future__ import annotations

from copy import copy
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from carpool.activations import Arena, HiddenStates
from carpool.experts import (
    ACTIVATIONS,
    Activation,
    ExpertFunction,
    ExpertWeights,
    exact_experts,
    make_activation,
    make_experts,
)
from carpool.experts.gemm.choices import STAGES, WAYS, Choices, default_choices
from carpool.experts.gemm.grouped import GroupedExperts
from carpool.experts.gemm.measure_choices import _Problem, measure_choices, pick
from carpool.experts.pairs import sort_pairs
from carpool.metrics.counters import LayerStats
from carpool.ride.function import ride
from carpool.ride.setup import RideSetup
from carpool.routing import Routing
from carpool.transport import Arrivals, make_transport
from carpool_systems.few_on_host import FewOnHost
from tests.experts_problem import ACTIVATIONS as DESCRIBED
from tests.experts_problem import NAMES, PATTERNS, ExpertProblem, draw_slots
from tests.reference import Spec, expert

# Largest |difference| over largest |reference| of a tensor.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 3e-6}
# Root-mean-square error in bf16, over that of plain PyTorch that rounds after every operation.
BF16_FACTOR = 1.0


def problem_of(pattern: str, spec: Spec, dtype: torch.dtype, transposed: bool = False, seed: int = 0) -> ExpertProblem:
    activation = make_activation(spec.activation, spec.gated)
    return ExpertProblem(pattern, spec.hidden, spec.inner, activation, spec.bias, dtype, transposed, seed=seed)


def formulas(problem: ExpertProblem, spec: Spec, dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    """The answer by formulas and autograd; in another dtype than float64 it is the path that nobody fused."""

    def turn(name: str, tensor: torch.Tensor) -> torch.Tensor:
        return (
            tensor.transpose(1, 2) if problem.function.transposed and name.endswith(("proj", "up", "down")) else tensor
        )

    named = zip(("up_proj", "down_proj", "up_bias", "down_bias"), problem.weights, strict=False)
    leaves = {n: turn(n, w).to(dtype, copy=True).requires_grad_() for n, w in named if w is not None}
    x = problem.x_RH.to(dtype, copy=True).requires_grad_()
    weight = problem.weight_RJ.to(dtype, copy=True).requires_grad_()
    partial = torch.zeros_like(x)
    for slot in range(len(leaves["up_proj"])):
        row, column = (problem.slot_RJ == slot).nonzero(as_tuple=True)
        out = expert(spec, leaves, slot, x[row]) * weight[row, column].unsqueeze(1)
        partial = partial + torch.zeros_like(x).index_put((row,), out, accumulate=True)
    inputs = [x, weight, *leaves.values()]
    if not partial.requires_grad:
        gradients = [torch.zeros_like(t) for t in inputs]
    else:
        gradients = list(torch.autograd.grad(partial, inputs, problem.dpartial_RH.to(dtype), materialize_grads=True))
    return {n: turn(n, t) for n, t in zip(NAMES, (partial.detach(), *gradients), strict=False)}


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("name", exact_experts())
def test_every_pattern_equals_the_formulas(name: str, pattern: str) -> None:
    sizes = [(37, 19), (32, 24), (8, 4), (5, 1)]
    for i, activation in enumerate(ACTIVATIONS):
        for gated in (True, False):
            for transposed in (True, False):
                for bias in (True, False):
                    hidden, inner = sizes[(i + gated + 2 * transposed + bias) % len(sizes)]
                    spec = Spec(hidden=hidden, inner=inner, activation=activation, gated=gated, bias=bias)
                    for dtype, tolerance in TOLERANCE.items():
                        problem = problem_of(pattern, spec, dtype, transposed, seed=i)
                        got = problem.run(make_experts(name, problem.function), False, all_rows=True)
                        problem.check(got, tolerance, True, want=formulas(problem, spec))


@pytest.mark.parametrize("name", exact_experts())
@pytest.mark.parametrize("sizes", [(64, 40), (37, 19)], ids=str)
def test_bf16_is_no_worse_than_a_path_that_nobody_fused(name: str, sizes: tuple[int, int]) -> None:
    """Against float64 on the same rounded inputs, beside plain PyTorch in bf16; averaged over draws and elements."""
    errors: dict[str, list[tuple[float, float]]] = {}
    for seed in range(12):
        spec = Spec(hidden=sizes[0], inner=sizes[1], bias=seed % 2 == 1)
        problem = problem_of("random", spec, torch.bfloat16, seed=seed)
        exact, plain = formulas(problem, spec), formulas(problem, spec, torch.bfloat16)
        for key, tensor in problem.run(make_experts(name, problem.function), False, all_rows=True).items():
            ours, theirs = ((t.double() - exact[key]).square().mean().item() for t in (tensor, plain[key]))
            errors.setdefault(key, []).append((ours, theirs))
    for key, squares in errors.items():
        ours, theirs = (sum(s[i] for s in squares) ** 0.5 for i in (0, 1))
        assert ours <= BF16_FACTOR * theirs, f"{key}: {ours / theirs:.2f} times the error of plain bf16"


@pytest.mark.parametrize("name", exact_experts())
def test_gradients_of_weights_only_where_asked(name: str) -> None:
    spec = Spec(hidden=20, inner=12, bias=True)
    problem = problem_of("full", spec, torch.float32)
    experts, x = make_experts(name, problem.function), HiddenStates.of(problem.x_RH)
    arrivals = Arrivals(x, problem.slot_RJ, problem.weight_RJ, problem.slot_RJ.numel())
    saved = experts.forward(arrivals, problem.weights, torch.empty_like(problem.x_RH))
    dx = torch.empty_like(problem.x_RH)
    dweight, gradients = experts.backward(saved, x, problem.weights, HiddenStates.of(problem.dpartial_RH), dx, False)
    want = formulas(problem, spec)
    torch.testing.assert_close(dx.double(), want["dx"], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(dweight.double(), want["dweight"], rtol=1e-4, atol=1e-5)
    if name == "grouped":
        assert gradients is None


@pytest.mark.parametrize("use_arena", [True, False], ids=["arena", "no arena"])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_bound_instead_of_a_count_and_garbage_in_rows_that_nobody_wants(pattern: str, use_arena: bool) -> None:
    for i, activation in enumerate(DESCRIBED.values()):
        hidden, inner = [(37, 19), (32, 24), (5, 1)][i % 3]
        dtype, tolerance = list(TOLERANCE.items())[i % 2]
        problem = ExpertProblem(pattern, hidden, inner, activation, i % 2 == 0, dtype, transposed=i % 4 < 2)
        got = problem.run(make_experts("grouped", problem.function), use_arena, all_rows=True)
        problem.check(got, tolerance, all_rows=True)


@pytest.mark.parametrize("name", ["grouped", "fp8"])
def test_several_layers_in_one_arena_look_unmodified_to_autograd(name: str) -> None:
    """What a layer keeps must not be refused because a later one wrote elsewhere in the same memory."""
    arena = Arena(10**6, torch.device("cpu"))
    problem = ExpertProblem("random", 32, 24, make_activation("silu", True), False, torch.float32)
    arrivals: Any = Arrivals(HiddenStates.of(problem.x_RH), problem.slot_RJ, problem.weight_RJ, 1000)
    experts: Any = make_experts(name, problem.function)
    _, h, *_ = experts.forward(arrivals, problem.weights, torch.empty_like(problem.x_RH), arena)
    version = h.data._version
    experts.forward(arrivals, problem.weights, torch.empty_like(problem.x_RH), arena)
    assert h.data._version == version


ADAPTED = [(3, 5), (8, 8), (4, 0), (0, 2)]


@pytest.mark.parametrize("ranks", ADAPTED, ids=str)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_adapters_of_frozen_and_of_trained_experts(pattern: str, ranks: tuple[int, int]) -> None:
    for i, activation in enumerate(list(DESCRIBED.values())[::4]):
        hidden, inner = [(37, 19), (32, 24), (5, 1)][i % 3]
        dtype, tolerance = list(TOLERANCE.items())[i % 2]
        problem = ExpertProblem(
            pattern, hidden, inner, activation, i % 2 == 0, dtype, i % 2 == 1, ranks=ranks, frozen=i % 3 < 2
        )
        got = problem.run(make_experts("grouped", problem.function, recompute=i == 2), i != 1, all_rows=True)
        assert ("dup" in got) != problem.frozen
        assert [name in got for name in ("dup_a", "dup_b", "ddown_a", "ddown_b")] == [
            ranks[j // 2] > 0 for j in range(4)
        ]
        problem.check(got, tolerance, all_rows=True)


@pytest.mark.parametrize("transposed", [False, True])
def test_an_adapter_adds_b_a_to_the_weights(transposed: bool) -> None:
    """The definition itself, against weights to which the products were added."""
    problem = ExpertProblem(
        "random", 37, 19, make_activation("silu", True), True, torch.float64, transposed, ranks=(3, 5), frozen=True
    )
    got, weights = problem.run(make_experts("reference", problem.function), False, all_rows=True), problem.weights
    deltas = [b @ a for a, b in ((weights.up_a_SQH, weights.up_b_SFQ), (weights.down_a_SQF, weights.down_b_SHQ))]
    up, down = (
        w + (delta.transpose(1, 2) if transposed else delta) for w, delta in zip(weights[:2], deltas, strict=True)
    )
    problem.weights, problem.frozen = ExpertWeights(up, down, *weights[2:4]), False
    merged = problem.run(make_experts("reference", problem.function), False, all_rows=True)
    for name in ("partial", "dx", "dweight"):
        torch.testing.assert_close(got[name], merged[name], rtol=1e-12, atol=1e-12)
    for a, b, da, db, dw in (
        (weights.up_a_SQH, weights.up_b_SFQ, got["dup_a"], got["dup_b"], merged["dup"]),
        (weights.down_a_SQF, weights.down_b_SHQ, got["ddown_a"], got["ddown_b"], merged["ddown"]),
    ):
        dw = dw.transpose(1, 2) if transposed else dw
        torch.testing.assert_close(da, b.transpose(1, 2) @ dw, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(db, dw @ a.transpose(1, 2), rtol=1e-12, atol=1e-12)


def test_experts_that_have_no_adapters_refuse_them() -> None:
    problem = ExpertProblem("full", 16, 8, make_activation("silu", True), False, torch.float32, ranks=(2, 2))
    way, experts = make_transport("dedup", None, 5), make_experts("fp8", problem.function)
    setup, routing = RideSetup(way, experts, LayerStats(5, 1, 0)), Routing(problem.slot_RJ, problem.weight_RJ)
    with pytest.raises(ValueError, match="experts='fp8' cannot compute adapters"):
        ride(problem.x_RH, routing, problem.slot_RJ, problem.weights, setup)


# -- pieces ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bound", ["exact", "one more", "far too many"])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_sort_pairs_orders_by_slot_then_by_row(pattern: str, bound: str) -> None:
    slot_RJ, slots = draw_slots(pattern, torch.Generator().manual_seed(0))
    flat = slot_RJ.flatten().tolist()
    expected = sorted((i for i, s in enumerate(flat) if s >= 0), key=lambda i: (flat[i], i))
    num_pairs = {"exact": len(expected), "one more": len(expected) + 1, "far too many": 1000}[bound]
    pairs = sort_pairs(slot_RJ, slots, num_pairs)
    tail = min(num_pairs, len(flat)) - len(expected)
    assert pairs.order_P.tolist() == expected + [0] * tail
    assert pairs.offsets_S.tolist() == [sum(0 <= s <= slot for s in flat) for slot in range(slots)]
    assert pairs.count_1.tolist() == [len(expected)]
    places = {entry: place for place, entry in enumerate(expected)}
    assert pairs.position_RJ.flatten().tolist() == [places.get(i, -1) for i in range(len(flat))]


def test_described_activations_are_their_formulas() -> None:
    h = torch.randn(5, 12, dtype=torch.float64)
    gate, up = h[:, ::2].clamp(max=0.8), h[:, 1::2].clamp(-0.8, 0.8)
    torch.testing.assert_close(DESCRIBED["gpt-oss"](h), gate / (1 + torch.exp(-1.702 * gate)) * (up + 1))
    gate, up = h[:, :6].clamp(max=0.5), h[:, 6:].clamp(-0.5, 0.5)
    torch.testing.assert_close(DESCRIBED["clamped"](h), gate / (1 + torch.exp(-gate)) * up)
    torch.testing.assert_close(DESCRIBED["relu2, interleaved"](h), h[:, ::2].clamp(min=0) ** 2 * h[:, 1::2])


def test_descriptions_that_mean_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match="of gated activations; pass gated=True"):
        Activation("silu", limit=7.0)
    with pytest.raises(ValueError, match=r"alpha=1\.702 is a factor in silu's sigmoid; gelu has none"):
        Activation("gelu", gated=True, alpha=1.702)


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match="activation='tanh' is not known; use one of silu, gelu"):
        make_activation("tanh", True)
    with pytest.raises(ValueError, match="experts='triton' is not known; use one of auto, grouped, reference, fp8"):
        make_experts("triton", ExpertFunction(F.silu))
    assert make_experts("auto", ExpertFunction(F.silu)).name == "grouped"


# -- choices --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("use_arena", [True, False], ids=["arena", "no arena"])
@pytest.mark.parametrize("pattern", ["random", "idle slots", "no pairs", "no rows", "no slots"])
def test_what_is_not_kept_is_computed_again(pattern: str, use_arena: bool) -> None:
    for name in ("SwiGLU", "gpt-oss"):
        problem = ExpertProblem(pattern, 37, 19, DESCRIBED[name], True, torch.float64)
        kept, again = (GroupedExperts(problem.function, recompute=recompute) for recompute in (False, True))
        want, got = (problem.run(experts, use_arena, all_rows=True) for experts in (kept, again))
        assert all(torch.equal(got[key], want[key]) for key in want)
    arrivals = Arrivals(HiddenStates.of(problem.x_RH), problem.slot_RJ, problem.weight_RJ, 1000)
    arena = Arena(10**5, torch.device("cpu"))
    saved = again.forward(arrivals, problem.weights, torch.empty_like(problem.x_RH), arena)
    assert saved[1] is None and not arena.needed.item()


def test_choices_survive_being_recorded() -> None:
    choices = Choices(up="flat", ddown="square")
    assert Choices.from_dict(choices.to_dict()) == choices and list(choices.to_dict()) == list(STAGES)
    assert Choices.from_dict({"dx": "wide"}) == Choices(dx="wide")


def test_choices_that_do_not_exist_are_refused() -> None:
    with pytest.raises(ValueError, match="up='fast' is no way to compute a stage; use one of library, wide"):
        Choices(up="fast")
    with pytest.raises(ValueError, match="no such stage: gate; the stages are up, down, dact"):
        Choices.from_dict({"gate": "wide"})


def test_the_fastest_ways_are_picked_and_dy_is_gathered_at_most_once() -> None:
    same = {way: 10.0 for way in WAYS}
    times = {stage: dict(same) for stage in STAGES} | {"up": {"library": 3.0, "flat": 2.0}}
    times["dact"] = {"library": 10.0, "wide": 12.0}
    times["ddown"] = {"library": 10.0, "square": 11.0}
    assert pick(times, 0.0) == Choices(up="flat")
    assert pick(times, 2.9) == Choices(up="flat"), "20 + 2.9 beats 23"
    assert pick(times, 3.1) == Choices(up="flat", dact="wide", ddown="square")
    times["ddown"]["square"] = 9.0
    assert pick(times, 0.5) == Choices(up="flat", ddown="square"), "one side alone needs the gathered rows too"
    # Beside adapters ddown is not computed: nobody shares what dact gathers.
    times["ddown"] = {"library": 1.0, "square": 11.0}
    assert pick(times, 2.5).dact == "library" and pick(times, 2.5, frozen=True).dact == "wide"


def test_what_is_measured_beside_adapters_computes_them() -> None:
    function = ExpertFunction(make_activation("silu", gated=True), transposed=True)
    problem = _Problem(9, 16, 24, 3, 2, function, torch.device("cpu"), True, False, adapter_rank=5)
    weights, pairs = problem.weights, problem.pairs
    calls = {stage: problem.calls(stage)["library"] for stage in STAGES}
    a_PF, _ = calls["up"]()
    rows = problem.x.data[pairs.order_P // 2].float()
    slot_P = torch.searchsorted(pairs.offsets_S, torch.arange(18, dtype=torch.int32), right=True)
    assert weights.up_a_SQH is not None and weights.up_b_SFQ is not None and weights.up_bias_SF is not None
    up_SHF = weights.up_SFH.float() + (weights.up_b_SFQ.float() @ weights.up_a_SQH.float()).transpose(1, 2)
    expected = torch.einsum("ph,phf->pf", rows, up_SHF[slot_P]) + weights.up_bias_SF[slot_P].float()
    torch.testing.assert_close(a_PF.float(), function.activation(expected), rtol=0.05, atol=0.05)
    assert all(calls[stage]() is not None for stage in STAGES)


def test_choices_by_device() -> None:
    cpu = torch.device("cpu")
    assert default_choices(cpu, 16) == Choices()
    ways = {
        (7, 5): "library",
        (8, 6): "square",
        (8, 9): "square",
        (9, 0): "flat",
        (10, 0): "library",
        (12, 0): "square",
    }
    for number, (capability, way) in enumerate(ways.items()):
        with mock.patch.object(torch.cuda, "get_device_capability", lambda _, found=capability: found):
            assert default_choices(torch.device("cuda", 100 + number), 4096) == Choices.all(way), capability
    with pytest.raises(ValueError, match="by measurement on a GPU, not on cpu"):
        measure_choices(8, 64, 32, 4, 2, ExpertFunction(make_activation("silu", True)), cpu)


# -- CUDA -----------------------------------------------------------------------------------------------------------


SWIGLU = make_activation("silu", gated=True)


@pytest.mark.parametrize(("frozen", "all_rows"), [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_some_slots_are_computed_where_their_weights_are(pattern: str, frozen: bool, all_rows: bool) -> None:
    ranks = (3, 5) if frozen else (0, 0)
    problem = ExpertProblem(pattern, 37, 19, SWIGLU, True, torch.float32, transposed=frozen, ranks=ranks, frozen=frozen)
    few = [slot for slot in (0, 3) if slot < problem.weights.up_SFH.shape[0]]
    asked = []

    def host(slot: int) -> ExpertWeights:
        asked.append(slot)
        return ExpertWeights.of(None if w is None else w[slot] for w in problem.weights[:4])

    there = copy(problem)
    if frozen:
        # Nothing of them has come.
        there.weights = ExpertWeights._make(None if w is None else w.clone() for w in problem.weights)
        for weight in there.weights[:4]:
            assert weight is not None
            weight[few] = torch.nan
    experts = FewOnHost(make_experts("grouped", problem.function), problem.function, lambda: few, host)
    got = there.run(experts, use_arena=True, all_rows=all_rows)
    problem.check(got, 1e-5, all_rows)
    again = there.run(experts, use_arena=True, all_rows=all_rows)
    assert all(torch.equal(value.nan_to_num(), again[name].nan_to_num()) for name, value in got.items())
    assert set(asked) == set(few) if pattern in ("random", "full", "one column") else set(asked) <= set(few)


def test_without_any_it_is_the_experts_beside() -> None:
    problem = ExpertProblem("random", 32, 24, SWIGLU, False, torch.float32)
    inner = make_experts("grouped", problem.function)
    beside = FewOnHost(inner, problem.function, list, lambda _: pytest.fail("nothing is asked for"))
    ours, theirs = (problem.run(experts, True, True) for experts in (beside, inner))
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())
