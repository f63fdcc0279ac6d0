"""Experts that compute in FP8: the definition against float64 without FP8, and what they are told and keep.

The kernels are compared with the definition in tests/interpreted/test_fp8.py.
"""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import pytest
import torch

from carpool.activations import HiddenStates
from carpool.experts import (
    EXPERTS,
    ExpertFunction,
    ExpertWeights,
    FP8Experts,
    GroupedExperts,
    exact_experts,
    make_activation,
    make_experts,
)
from carpool.experts.fp8 import fp8_experts as fp8
from carpool.experts.fp8 import fp8_products as fp8_stages
from carpool.experts.pairs import sort_pairs
from carpool.kernels.packets import pack, packet_bytes, quantise, unpack, why_no_fp8
from carpool.metrics.counters import LayerStats
from carpool.ride.function import ride
from carpool.ride.setup import RideSetup
from carpool.routing import Routing
from carpool.transport import Arrivals, make_transport
from carpool.transport.nvlink.route import LeasedStates
from tests.experts_problem import ACTIVATIONS, PATTERNS, ExpertProblem

# Root mean squares of the error over those of the answer. Codes have 3 bits behind the point: of one rounding, uniform
# in an interval of a power of two, that is 2.6 %. A product of two rounded factors has 3.7 %, two in a row 5 to 6 %.
TOLERANCE = 0.09
# Where a pre-activation is rounded past a kink or a clamp, the slope there is another one.
KINKED = 0.45


# -- packets ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hidden", [1, 8, 37, 128, 200, 2048])
def test_packets_are_codes_and_scales(hidden: int) -> None:
    x = torch.randn(7, hidden, generator=torch.Generator().manual_seed(0)).bfloat16()
    x[2] = 0
    packets = pack(x)
    assert packets.shape == (7, packet_bytes(hidden)) and packets.shape[1] % 16 == 0
    code, scale = quantise(x)
    wide = unpack(packets, hidden)
    for group in range(scale.shape[1]):
        columns = slice(128 * group, 128 * group + 128)
        torch.testing.assert_close(scale[:, group], (x[:, columns].float().abs().amax(1) / 448).clamp(min=1e-30 / 448))
        torch.testing.assert_close(wide[:, columns], code[:, columns].float() * scale[:, group : group + 1])
        largest = x[:, columns].float().abs().amax(1)
        torch.testing.assert_close(wide[:, columns].abs().amax(1), largest)
    # Half of a step of 1/8 at the bottom of a power of two; below 2^-6 of a scale steps are all alike.
    allowed = x.float().abs() / 16 + scale.repeat_interleave(128, 1)[:, :hidden] * 2**-10
    assert ((wide - x.float()).abs() <= allowed).all()


@pytest.mark.parametrize("leased", [False, True], ids=["tensor", "lease"])
def test_rows_are_packed_with_those_at_home(leased: bool) -> None:
    x, home, came = torch.randn(9, 40), torch.randn(2, 40), torch.tensor([2, 0, 3])
    rows = HiddenStates(x, 40, home=home, home_row=9)
    if leased:
        rows = LeasedStates(x, 40, home=home, home_row=9, came_W=came, capacity=3)
    packed = rows.packed()
    assert type(packed) is type(rows) and packed.gaps == leased and packed.packed() is packed
    assert packed.data.dtype == torch.uint8 and packed.width == packet_bytes(40)
    want = unpack(pack(torch.cat([x, home])), 40)
    assert torch.equal(unpack(packed.contiguous(11), 40), want)


def test_rows_that_travelled_as_packets_stay_packets() -> None:
    x, home = pack(torch.randn(9, 40)), torch.randn(2, 40)
    rows = LeasedStates(
        x, x.shape[1], home=pack(home), home_row=9, came_W=torch.tensor([2, 0, 3]), capacity=3, wide_home=home
    )
    arrivals = Arrivals(rows, torch.zeros(11, 1, dtype=torch.int32), torch.ones(11, 1), 11)
    assert arrivals.readable(True, torch.float32) is arrivals


# -- the definition ---------------------------------------------------------------------------------------------------


def errors(problem: ExpertProblem, got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> dict[str, float]:
    found = {}
    assert set(got) == set(want)
    for name, tensor in got.items():
        picked = problem.wanted_R if name in ("partial", "dx") else slice(None)
        ours, theirs = tensor[picked].double(), want[name][picked].double()
        assert ours.shape == theirs.shape and ours.isfinite().all(), name
        found[name] = float((ours - theirs).norm()) / (float(theirs.norm()) or 1.0)
    return found


@pytest.mark.parametrize("sizes", [(200, 136), (120, 120), (256, 128)], ids=str)
@pytest.mark.parametrize("name", list(ACTIVATIONS))
def test_every_activation_is_near_float64_without_fp8(name: str, sizes: tuple[int, int]) -> None:
    i = list(ACTIVATIONS).index(name)
    kinked = name.startswith(("relu", "clamped", "gpt-oss")) and "relu2" not in name
    for bias, transposed in ((True, False), (False, True)):
        problem = ExpertProblem("random", *sizes, ACTIVATIONS[name], bias, torch.float32, transposed)
        got = problem.run(FP8Experts(problem.function), use_arena=(i + bias) % 2 == 0, all_rows=True)
        for key, error in errors(problem, got, problem.expected()).items():
            assert error <= (KINKED if kinked else TOLERANCE), f"{key}: {error:.3f}"
            # It is lossy: were it exact, FP8 would not have been used. (Sums of dy alone have seen none.)
            assert error > 1e-3 or key == "ddown_bias", key
        assert not got["partial"][~problem.wanted_R].any() and not got["dx"][~problem.wanted_R].any()


@pytest.mark.parametrize("pattern", PATTERNS)
def test_every_pattern_in_bf16_and_odd_sizes(pattern: str) -> None:
    for sizes in ((37, 19), (8, 4), (1, 1), (199, 37)):
        problem = ExpertProblem(pattern, *sizes, make_activation("silu", True), sizes[0] == 37, torch.bfloat16)
        got = problem.run(FP8Experts(problem.function), use_arena=False, all_rows=True)
        for key, error in errors(problem, got, problem.expected()).items():
            assert error <= 2 * TOLERANCE, f"{key}: {error:.3f}"  # few elements: root mean squares vary


def test_products_are_exact_where_codes_are() -> None:
    """Numbers that FP8 has, in every group one at its largest: then nothing is lost but by the order of sums."""
    generator = torch.Generator().manual_seed(0)
    problem = ExpertProblem("random", 200, 136, make_activation("relu", False), True, torch.float64)

    def representable(like: torch.Tensor) -> torch.Tensor:
        whole = torch.randint(-8, 9, like.shape, generator=generator).to(like.dtype)
        whole[..., ::40] = 448 / 2**5
        return whole

    problem.x_RH = torch.where(problem.wanted_R[:, None], representable(problem.x_RH), torch.nan)
    up = representable(problem.weights.up_SFH)
    packets = pack(problem.x_RH)
    wanted = problem.wanted_R
    assert torch.equal(unpack(packets, 200)[wanted].double(), problem.x_RH[wanted])
    columns = fp8_stages.Columns(1, 136, False)
    code, turned = fp8_stages.quantise_weight(up, columns, True, True)
    assert code is not None and turned is not None
    wide = code.code.double() * code.scale.repeat_interleave(128, 1).repeat_interleave(128, 2)
    assert torch.equal(wide[:, :136, :200], up) and not wide[:, 136:].any() and not wide[:, :, 200:].any()
    assert torch.equal(turned.code.view(torch.uint8), code.code.view(torch.uint8).transpose(1, 2))
    pairs = sort_pairs(problem.slot_RJ, len(up), int((problem.slot_RJ >= 0).sum()))
    got = fp8_stages.gathered_product(HiddenStates.of(packets), 200, code, pairs, 136, torch.float32)
    want = torch.einsum("pk,pnk->pn", problem.x_RH[pairs.row_P], up[pairs.slot_P.long()])
    torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=1e-3)


def test_columns_are_spread_and_gathered() -> None:
    values = torch.arange(2 * 12.0).view(2, 12)
    halves, twined = fp8_stages.Columns(2, 6, False), fp8_stages.Columns(2, 6, True)
    assert torch.equal(halves.spread(values)[:, 128:134], values[:, 6:])
    assert torch.equal(twined.spread(values)[:, 128:134], values[:, 1::2])
    for columns in (halves, twined, fp8_stages.Columns(1, 12, False)):
        assert torch.equal(columns.gather(columns.spread(values)), values)
        assert columns.spread(values).sum() == values.sum()


def test_gradients_of_weights_only_where_asked() -> None:
    problem = ExpertProblem("random", 40, 24, make_activation("silu", True), True, torch.float32)
    wanted = problem.wanted_R
    arrivals = Arrivals(HiddenStates.of(problem.x_RH), problem.slot_RJ, problem.weight_RJ, 10**6)
    experts = FP8Experts(problem.function)
    saved = experts.forward(arrivals, problem.weights, torch.empty_like(problem.x_RH))
    found = []
    for needed in (True, False):
        dx = torch.empty_like(problem.x_RH)
        x, dpartial = HiddenStates.of(problem.x_RH), HiddenStates.of(problem.dpartial_RH)
        dweight, finish = experts.backward(saved, x, problem.weights, dpartial, dx, needed)
        gradients = None if finish is None else finish()
        assert (gradients is not None) == needed
        found.append((dx[wanted], dweight))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def same_codes(experts: FP8Experts, weights: ExpertWeights, columns: fp8_stages.Columns) -> bool:
    """Whether what the experts would compute with now is what the weights are now."""
    want = fp8_stages.quantise_weight(weights.up_SFH.detach(), columns, True, True)
    assert want.straight is not None and want.turned is not None
    got = experts._straight("up", weights, True), experts._turned("up", weights)
    return all(
        torch.equal(ours.code.view(torch.uint8), theirs.code.view(torch.uint8))
        and torch.equal(ours.scale, theirs.scale)
        for ours, theirs in zip(got, (want.straight, want.turned), strict=True)
    )


def test_weights_that_do_not_change_are_quantised_once() -> None:
    problem = ExpertProblem("random", 40, 24, make_activation("silu", True), False, torch.float32)
    experts, weights, columns = FP8Experts(problem.function), problem.weights, fp8_stages.Columns(2, 24, False)
    arrivals = Arrivals(HiddenStates.of(problem.x_RH), problem.slot_RJ, problem.weight_RJ, 10**6)
    assert experts._turned("up", weights) is not experts._turned("up", weights)
    with mock.patch.object(fp8, "quantise_weight", wraps=fp8_stages.quantise_weight) as spy:
        with experts.weights_unchanged():
            for backward in (False, True, True):
                experts.forward(arrivals, weights, torch.empty_like(problem.x_RH), None, backward)
            # In the first two forwards, the second for the order of the backward.
            assert [call.args[2:] for call in spy.call_args_list] == [(True, False)] * 2 + [(False, True)] * 2
            with experts.weights_unchanged():  # as when whoever calls says so too
                first = experts._turned("up", weights)
            assert experts._turned("up", weights) is first and len(spy.call_args_list) == 4
            # A view of the same memory is the same weights, as when a DTensor gives its local part anew.
            view = weights._replace(up_SFH=weights.up_SFH.view_as(weights.up_SFH))
            assert experts._turned("up", view) is first
            assert experts._turned("up", weights._replace(up_SFH=weights.up_SFH.clone())) is not first
        assert same_codes(experts, weights, columns)
    with experts.weights_unchanged(), mock.patch.object(fp8, "quantise_weight", wraps=fp8.quantise_weight) as once:
        experts.forward(arrivals, weights, torch.empty_like(problem.x_RH))
        assert [call.args[2:] for call in once.call_args_list] == [(True, True)] * 2, "read once for both orders"


def write_in_place(up: torch.nn.Parameter) -> None:
    with torch.no_grad():
        up.mul_(2)


def write_by_an_optimizer(up: torch.nn.Parameter) -> None:
    up.grad = torch.ones_like(up)
    torch.optim.SGD([up], lr=0.5).step()


def write_by_load_state_dict(up: torch.nn.Parameter) -> None:
    module = torch.nn.Module()
    module.up = up
    module.load_state_dict({"up": torch.randn(up.shape, generator=torch.Generator().manual_seed(9))})


def write_through_data(up: torch.nn.Parameter) -> None:
    up.data.copy_(torch.randn(up.shape, generator=torch.Generator().manual_seed(9)))


def write_as_fsdp(up: torch.nn.Parameter) -> None:
    """An optimizer steps what is sharded; then new values are gathered into the old memory, which no version tells."""
    sharded = torch.nn.Parameter(torch.ones(1))
    write_by_an_optimizer(sharded)
    write_through_data(up)


WRITES = [write_in_place, write_by_an_optimizer, write_by_load_state_dict, write_through_data, write_as_fsdp]


@pytest.mark.parametrize("write", WRITES, ids=lambda write: write.__name__)
def test_held_codes_are_never_of_other_weights(write: Callable[[torch.nn.Parameter], None]) -> None:
    problem = ExpertProblem("random", 40, 24, make_activation("silu", True), False, torch.float32)
    up, columns = torch.nn.Parameter(problem.weights.up_SFH.clone()), fp8_stages.Columns(2, 24, False)
    experts, weights = FP8Experts(problem.function), problem.weights._replace(up_SFH=up)
    before = up.detach().clone()
    assert same_codes(experts, weights, columns)
    write(up)
    assert not torch.equal(up, before) and same_codes(experts, weights, columns), "nothing is held unless asked for"
    with experts.weights_unchanged():
        assert same_codes(experts, weights, columns)
        if write is not write_through_data:  # which nobody can notice: not doing it is what the caller promised
            write(up)
            assert same_codes(experts, weights, columns)
    for _ in range(2):
        write(up)
        with experts.weights_unchanged():
            assert same_codes(experts, weights, columns), "nothing outlives its scope"


def test_inference_tensors_are_computed_with_and_not_held() -> None:
    problem = ExpertProblem("random", 40, 24, make_activation("silu", True), False, torch.float32)
    experts, columns = FP8Experts(problem.function), fp8_stages.Columns(2, 24, False)
    with torch.inference_mode():
        weights = problem.weights._replace(up_SFH=problem.weights.up_SFH * 2)
        with experts.weights_unchanged():
            assert same_codes(experts, weights, columns)
            weights.up_SFH.mul_(2)
            assert same_codes(experts, weights, columns)


def test_transient_weights_are_not_taken_for_each_other() -> None:
    """As under autocast: a cast copy lives for one forward, and the next may lie in its place, at version 0 too."""
    problem = ExpertProblem("random", 40, 24, make_activation("silu", True), False, torch.float32)
    experts, columns = FP8Experts(problem.function), fp8_stages.Columns(2, 24, False)
    with experts.weights_unchanged():
        for factor in range(1, 6):
            cast = problem.weights._replace(up_SFH=problem.weights.up_SFH * factor)
            assert same_codes(experts, cast, columns)
            del cast


# -- in a ride --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", ["gather", "alltoall", "dedup"])
def test_a_ride_keeps_packets_and_is_near_one_without_fp8(transport: str) -> None:
    generator = torch.Generator().manual_seed(0)
    x, up, down = (torch.randn(*s, generator=generator) for s in ((50, 136), (4, 272, 136), (4, 136, 136)))
    up, down, dy = up / 136**0.5, down / 136**0.5, torch.randn(50, 136, generator=generator)
    slot = torch.rand(50, 4, generator=generator).argsort(1)[:, :2].int()
    weight = torch.rand(50, 2, generator=generator)
    function = ExpertFunction(make_activation("silu", True))
    results: list[list[torch.Tensor]] = []
    sizes = []
    for experts in (FP8Experts(function), FP8Experts(function), GroupedExperts(function)):
        leaves = [t.clone().requires_grad_() for t in (x, weight, up, down)]
        kept: list[torch.Tensor] = []

        def keep(tensor: torch.Tensor, kept: list[torch.Tensor] = kept) -> torch.Tensor:
            kept.append(tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            way = make_transport(transport, None, 4)
            weights = ExpertWeights(leaves[2], leaves[3])
            setup = RideSetup(way, experts, LayerStats(4, 1, 0))
            y, _ = ride(leaves[0], Routing(slot, leaves[1]), slot, weights, setup)
        y.backward(dy)
        results.append([y.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)])
        sizes.append({t.dtype for t in kept if t.dim() == 2 and t.shape[1] in (136, packet_bytes(136))})
    assert all(torch.equal(a, b) for a, b in zip(results[0], results[1], strict=True)), "the same twice"
    for got, want in zip(results[0], results[2], strict=True):
        assert 1e-3 < float((got - want).norm() / want.norm()) <= TOLERANCE
    assert torch.uint8 in sizes[0] and torch.float32 not in sizes[0] and torch.uint8 not in sizes[2]


def test_names_and_refusals() -> None:
    function = ExpertFunction(make_activation("silu", True))
    experts = make_experts("fp8", function)
    assert isinstance(experts, FP8Experts) and set(EXPERTS) - set(exact_experts()) == {"fp8"}
    assert experts.lossy_reasons == ("experts compute in FP8",)
    assert FP8Experts.__doc__ and fp8.__doc__ and "LOSSY" in fp8.__doc__
    with pytest.raises(ValueError, match=r"experts='fp8' computes activations that .*Activation describes"):
        make_experts("fp8", ExpertFunction(torch.nn.functional.softplus))


# -- in a model and its training --------------------------------------------------------------------------------------


def test_the_experts_of_a_model_are_selected_by_name() -> None:
    pytest.importorskip("transformers")
    from carpool.hf import install, rides, set_experts
    from carpool.hf.build_model import build_model
    from carpool.hf.seam.moved_experts import weights_unchanged
    from carpool.hf.weights.model_config import make_config

    small = {"hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    more = {"num_key_value_heads": 2, "num_experts": 4, "num_experts_per_tok": 2, "vocab_size": 50}
    tokens = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    model = build_model(
        make_config("olmoe", small | more | tokens), distributed_config=None, dtype=torch.float32, seed=0
    )
    with pytest.raises(ValueError, match="no Carpool layers"):
        set_experts(model, "fp8")
    install(model)
    ids = torch.arange(40).view(2, 20)
    exact = model(ids).logits.detach()
    assert set_experts(model, "fp8") == ["experts compute in FP8"]
    lossy = model(ids).logits.detach()
    assert 1e-5 < float((lossy - exact).norm() / exact.norm()) < TOLERANCE
    for quantised, times in ((False, 8), (True, 4)):  # up and down of two layers, in two passes
        spy = mock.patch.object(fp8, "quantise_weight", wraps=fp8.quantise_weight)
        with weights_unchanged(list(rides(model).values()) if quantised else []), torch.no_grad(), spy as done:
            assert all(torch.equal(model(ids).logits, lossy) for _ in range(2))
        assert done.call_count == times
    assert set_experts(model, "grouped") == [] and torch.equal(model(ids).logits, exact)
    with pytest.raises(ValueError, match="experts='fp4' is not known"):
        set_experts(model, "fp4")
    layer = next(iter(rides(model).values()))
    layer.function = layer.compute = None  # as of experts that only their own forward knows
    layer.set_experts("auto")
    with pytest.raises(ValueError, match=r"runs its own forward: experts='fp8' cannot replace it"):
        layer.set_experts("fp8")


def test_a_card_without_fp8_is_told_so() -> None:
    for number, (capability, why) in enumerate({(8, 6): "RTX 3090 has 8.6", (8, 9): "", (9, 0): ""}.items()):
        device = torch.device("cuda", 110 + number)
        with (
            mock.patch.object(torch.cuda, "get_device_capability", lambda _, found=capability: found),
            mock.patch.object(torch.cuda, "get_device_name", lambda _: "RTX 3090"),
        ):
            assert why_no_fp8(device).endswith(why) and bool(why_no_fp8(device)) == bool(why)
    assert why_no_fp8(torch.device("cpu")) == ""
