"""The layer as a user meets it: the snippet, seeds, state, replay, checkpointing, counters, errors."""

from __future__ import annotations

import contextlib
import gc
import io
import logging
import math
import weakref
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import carpool
from carpool import ActivationPolicies, ExpertLayout, Routing
from carpool.activations.whole_layers import SavedRides
from carpool.experts import Choices, GroupedExperts
from carpool.placement import predict
from carpool.transport import Codecs, Pending, TransportOptions, between_ranks
from tests.layouts import EXPERTS, LAYOUTS, layout_of
from tests.ranks import WORLD_SIZE, Ranks, mesh, on_ranks
from tests.reference import Spec, router_scores

H, F, K = 20, 12, 3
SIZES = (7, 0, 11, 4)  # tokens of each rank
GRIDS = [(ep, layout) for ep in (4, 2, 1) for layout in LAYOUTS]


def build(ep: int = 4, layout: str = "contiguous", **options: Any) -> carpool.MoE:
    grid = mesh((WORLD_SIZE // ep, ep), ("edp", "ep"))
    options = {"layout": layout_of(layout, ep), "ep_mesh": grid["ep"], "edp_mesh": grid["edp"]} | options
    return carpool.MoE(H, F, EXPERTS, K, **options)


def tokens(seed: int = 0) -> torch.Tensor:
    """This rank's tokens."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(sum(SIZES), H, generator=generator).split(SIZES)[dist.get_rank()]


def all_tokens(seed: int = 0) -> torch.Tensor:
    return torch.randn(sum(SIZES), H, generator=torch.Generator().manual_seed(seed))


# -- the contract with the user -------------------------------------------------------------------------------------


def snippet() -> str:
    torch.manual_seed(0)
    x = torch.randn(2, 9, 256)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("ep",))
        moe = carpool.MoE(
            hidden_size=256, intermediate_size=512, num_experts=16, num_experts_per_tok=4, ep_mesh=mesh["ep"]
        )
        y = moe(x)
        (y.square().mean() + moe.aux_loss).backward()
        print(moe.stats())
        recorded = moe.routing
        assert torch.equal(moe(x, routing=recorded), y)
    assert y.shape == x.shape and all(p.grad is not None and p.grad.isfinite().all() for p in moe.parameters())
    return printed.getvalue()


def test_the_snippet_works_as_written(ranks: Ranks) -> None:
    for text in ranks(snippet):
        assert text.startswith("18 tokens, ") and "copies each (of 4 experts)" in text
        for part in ("went to other ranks", "dispatch", "combine_backward", "load max/mean", "0 choices dropped"):
            assert part in text


def test_it_also_works_alone() -> None:
    moe = carpool.MoE(H, F, EXPERTS, K)
    x = torch.randn(5, H)
    y = moe(x)
    y.sum().backward()
    carpool.reduce_gradients(moe, None)  # its gradients are those of the mean
    stats = moe.stats()
    assert (stats.tokens, stats.copies_per_token, stats.rows_remote) == (5, 1.0, 0)
    assert "5 rows stayed, 0 went to other ranks; load" in str(stats)
    assert sum(stats.load_E) == 5 * K and moe.core.stats.traffic.remote(moe.core.stats.traffic.bytes) == 0
    assert set(moe.core.stats.meter.milliseconds()) == {"dispatch", "experts", "combine"}
    assert repr(moe).startswith("MoE(\n  layout=contiguous, transport=local, experts=grouped")


def test_any_shape_of_input() -> None:
    moe = carpool.MoE(H, F, EXPERTS, K, shared_intermediate_size=8)
    x = torch.randn(6, H)
    y = moe(x)
    torch.testing.assert_close(moe(x.view(2, 3, H)), y.view(2, 3, H))
    torch.testing.assert_close(moe(x[4]), y[4])
    torch.testing.assert_close(moe(x.t().contiguous().t()), y)
    assert moe(x[:0].view(2, 0, H)).shape == (2, 0, H)
    with torch.no_grad():
        assert torch.equal(moe(x), y)
    assert moe.double()(x.double()).dtype == torch.float64


def test_auto_says_in_the_log_what_it_chose(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="carpool"):
        moe = carpool.MoE(H, F, EXPERTS, K)
        assert moe.transport.name == "local" and "transport local: one rank has all experts" in caplog.text
        caplog.clear()
        moe.set_transport("gather")
        assert moe.transport.name == "gather" and not caplog.text
        caplog.clear()
        # No codec of rows that do not travel: the ride is as it would be between ranks.
        carpool.MoE(H, F, EXPERTS, 1, transport_options=TransportOptions(codecs=Codecs(dispatch="bf16")))
        assert "transport alltoall: with one expert per token" in caplog.text
        assert "not local: it does not encode hidden states" in caplog.text
        assert "not nvlink: one rank has nobody" in caplog.text


@pytest.mark.parametrize("frozen", ["router", "experts", "x", "all but x"])
def test_frozen_parts_change_nothing_for_the_others(frozen: str) -> None:
    def gradients(freeze: bool) -> dict[str, torch.Tensor | None]:
        torch.manual_seed(0)
        moe = carpool.MoE(H, F, EXPERTS, K, bias=True, shared_intermediate_size=8)
        x = torch.randn(6, H, requires_grad=True)
        if freeze:
            x.requires_grad_(frozen != "x")
            moe.router.requires_grad_(frozen not in ("router", "all but x"))
            for parameter in moe.expert_parameters():
                parameter.requires_grad_(frozen not in ("experts", "all but x"))
            moe.shared.requires_grad_(frozen != "all but x")
        moe(x).square().sum().backward()
        return {"x": x.grad} | {n: p.grad for n, p in moe.named_parameters()}

    whole, partial = gradients(False), gradients(True)
    assert any(g is None for g in partial.values()) and any(g is not None for g in partial.values())
    for name, gradient in partial.items():
        assert gradient is None or torch.equal(gradient, whole[name]), name


@pytest.mark.parametrize("wanted", ["experts", "x", "all"])
def test_a_ride_comes_to_its_end_whatever_gradients_are_wanted(wanted: str) -> None:
    """Something computes beside it, so the end of its backward is a node of its own, which autograd may leave out."""

    torch.manual_seed(0)
    moe = carpool.MoE(H, F, EXPERTS, K, shared_intermediate_size=8, schedule=carpool.Schedule("chunks", 2))
    x = torch.randn(6, H, requires_grad=True)
    leaves = {"experts": list(moe.expert_parameters()), "x": [x], "all": [x, *moe.parameters()]}
    everything = dict(zip(leaves["all"], torch.autograd.grad(moe(x).square().sum(), leaves["all"]), strict=True))
    transport: Any = moe.core.transport
    combine, ended = transport.combine_gradients, []

    def watched(*args: Any) -> Any:
        pending = combine(*args)
        return Pending(lambda: (ended.append(1), pending.wait())[1])

    transport.combine_gradients = watched
    for gradient, leaf in zip(torch.autograd.grad(moe(x).square().sum(), leaves[wanted]), leaves[wanted], strict=True):
        assert torch.equal(gradient, everything[leaf])
    assert ended == [1, 1], "one for each chunk"


@pytest.mark.parametrize("experts", ["grouped", "reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_computes_in_its_dtype_and_routes_in_float32(dtype: torch.dtype, experts: str) -> None:
    """Forward and backward: autocast itself does not see a backward, which would then run in another dtype."""
    torch.manual_seed(0)
    moe = carpool.MoE(H, F, EXPERTS, K, experts=experts, shared_intermediate_size=8)
    x = torch.randn(6, H).bfloat16().to(dtype).requires_grad_()  # inside a model, bf16 comes from the layer before
    projection = torch.randn(6, H)
    inputs = [x, *moe.parameters()]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = moe(x)
    cast = torch.autograd.grad((y * projection).sum(), inputs)
    cast_routing = moe.routing
    wide = x.detach().float().requires_grad_()
    y_wide = moe(wide)
    plain = torch.autograd.grad((y_wide * projection).sum(), [wide, *moe.parameters()])
    assert y.dtype == torch.bfloat16 and [g.dtype for g in cast] == [t.dtype for t in inputs]
    assert torch.equal(cast_routing.expert_TK, moe.routing.expert_TK)
    assert torch.equal(cast_routing.weight_TK, moe.routing.weight_TK)
    for a, b in zip([y, *cast], [y_wide, *plain], strict=True):
        assert (a.float() - b).abs().max() <= 2e-2 * b.abs().max()


# -- seeds and state ------------------------------------------------------------------------------------------------


def logical_models(seeds: list[int]) -> list[dict[str, torch.Tensor]]:
    models = []
    for ep, layout in GRIDS:
        torch.manual_seed(seeds[dist.get_rank()])
        moe = build(ep, layout, bias=True, shared_intermediate_size=8, router={"bias_update_rate": 0.1})
        models.append({name: t.numpy() for name, t in moe.logical_state_dict().items()})
    return models


def test_the_same_seed_gives_the_same_model_on_any_ranks_and_layout(ranks: Ranks) -> None:
    results = ranks(logical_models, [5] * WORLD_SIZE)
    first = results[0][0]
    assert set(first) == {
        *("router.weight", "router.bias_E", "shared.up.weight", "shared.down.weight"),
        *("up_proj", "down_proj", "up_bias", "down_bias"),
    }
    assert first["up_proj"].shape == (EXPERTS, 2 * F, H) and first["down_proj"].std() > 0.1
    assert len({row.tobytes() for row in first["up_proj"]}) == EXPERTS, "experts start different"
    for models in results:
        for grid, model in zip(GRIDS, models, strict=True):
            for name, value in model.items():
                assert value.tobytes() == first[name].tobytes(), f"{name} of {grid}"


def test_what_ranks_hold_together_starts_equal_even_with_different_seeds(ranks: Ranks) -> None:
    results = ranks(logical_models, [1, 2, 3, 4])
    for models in results[1:]:
        for grid, model, first in zip(GRIDS, models, results[0], strict=True):
            for name, value in model.items():
                assert value.tobytes() == first[name].tobytes(), f"{name} of {grid}"


@on_ranks()
def test_state_travels_between_layouts() -> None:
    torch.manual_seed(0)
    options: dict[str, Any] = {"bias": True, "shared_intermediate_size": 8, "router": {"bias_update_rate": 0.1}}
    source = build(4, "permuted", **options)
    with torch.no_grad():
        source.router.bias_E.normal_()
        dist.broadcast(source.router.bias_E, 0)
        for parameter in (source.up_bias, source.down_bias):
            parameter.normal_()
    state, x = source.logical_state_dict(), tokens()
    y = source(x)
    for ep, layout in GRIDS:
        moe = build(ep, layout, **options)
        moe.load_logical_state_dict(state)
        again = moe.logical_state_dict()
        assert set(again) == set(state), (ep, layout)
        for name, value in state.items():
            assert torch.equal(again[name], value), (name, ep, layout)
        torch.testing.assert_close(moe(x), y, rtol=1e-5, atol=1e-5)


def test_a_foreign_state_is_refused() -> None:
    moe = carpool.MoE(H, F, EXPERTS, K)
    state = moe.logical_state_dict()
    for other, message in [
        (carpool.MoE(H, F, EXPERTS + 2, K).logical_state_dict(), f"up_proj.*{EXPERTS + 2} experts.*{EXPERTS}"),
        (carpool.MoE(H, F, EXPERTS - 2, K).logical_state_dict(), f"up_proj.*{EXPERTS - 2} experts.*{EXPERTS}"),
        (carpool.MoE(H, F + 1, EXPERTS, K).logical_state_dict(), "size mismatch for up_proj"),
        ({k: v for k, v in state.items() if k != "down_proj"}, "Missing key.*down_proj"),
        (state | {"extra": torch.zeros(1)}, "Unexpected key.*extra"),
    ]:
        with pytest.raises((ValueError, RuntimeError), match=f"(?s){message}"):
            moe.load_logical_state_dict(other)


# -- replay ---------------------------------------------------------------------------------------------------------


def test_a_recording_replays_bit_for_bit_and_choices_train_the_router() -> None:
    moe = carpool.MoE(H, F, EXPERTS, K, router={"aux_loss_coef": 0.1})
    x = torch.randn(9, H)
    y = moe(x)
    assert moe.aux_loss.item() > 0
    expected = torch.autograd.grad(y.square().sum() + moe.aux_loss, list(moe.parameters()))
    recorded = moe.routing
    assert recorded is not None and not recorded.weight_TK.requires_grad

    assert torch.equal(moe(x, routing=recorded), y) and moe.aux_loss.item() == 0
    moe(x, routing=recorded).square().sum().backward()
    assert moe.router.weight.grad is None, "recorded weights are constants"

    again = moe(x, routing=Routing(recorded.expert_TK, None))
    assert torch.equal(again, y)
    got = torch.autograd.grad(again.square().sum() + moe.aux_loss, list(moe.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True)) and got[0].abs().max() > 0

    other = Routing(recorded.expert_TK.roll(1, 0), None)
    assert not torch.allclose(moe(x, routing=other), y)
    assert torch.equal(moe.routing.expert_TK, other.expert_TK)


def test_a_recording_may_have_another_number_of_choices() -> None:
    moe = carpool.MoE(H, F, EXPERTS, K)
    x = torch.randn(4, H)
    one = torch.tensor([[1], [5], [-1], [0]], dtype=torch.int32)
    y = moe(x, routing=Routing(one, torch.ones(4, 1)))
    assert y[2].eq(0).all() and y[0].ne(0).any()


# -- checkpointing and balance --------------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", [name for name in between_ranks() if name != "nvlink"])
@pytest.mark.parametrize("layout", ["contiguous", "permuted"])
@on_ranks()
def test_activation_checkpointing_changes_nothing_and_counts_tokens_once(layout: str, transport: str) -> None:
    ways: dict[str, dict[str, Any]] = {
        "with reentry": {"use_reentrant": True},
        "without": {"use_reentrant": False},
        "rides kept": {"use_reentrant": False, "context_fn": carpool.keep_rides},
    }

    def run(how: str | None) -> tuple[list[torch.Tensor], Any, Any, float]:
        torch.manual_seed(0)
        router = {"aux_loss_coef": 0.1, "z_loss_coef": 0.1, "bias_update_rate": 0.1, "capacity_factor": 0.9}
        moe = build(2, layout, transport=transport, router=router, shared_intermediate_size=8)
        x = tokens().clone().requires_grad_()
        outer = torch.nn.Linear(H, H)  # so that the checkpointed input needs a gradient, as inside a model

        def layer(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return moe(x), moe.aux_loss

        y, aux = layer(outer(x)) if how is None else checkpoint(layer, outer(x), **ways[how])
        dropped = moe.stats().dropped
        (y.square().sum() + aux).backward()
        stats = moe.stats()
        assert stats.dropped == dropped, how
        moe.update_bias()
        gradients = [x.grad, *(p.grad for p in (*outer.parameters(), *moe.parameters()))]
        return [y.detach(), *gradients, moe.router.bias_E], stats, moe.core.stats, float(aux.detach())

    plain, stats, counter, aux = run(None)
    for how in ways:
        values, again, counted, aux_again = run(how)
        for i, (a, b) in enumerate(zip(values, plain, strict=True)):
            assert torch.equal(a, b), (i, how)
        assert (again.load_E, again.tokens, aux_again) == (stats.load_E, stats.tokens, aux), how
        assert again.copies_per_token == stats.copies_per_token and torch.equal(counted.entropy, counter.entropy), how
        times = 1 if how == "rides kept" else 2  # rides are counted as often as rows travel
        assert again.rows_dispatched == times * stats.rows_dispatched, how
        assert again.tokens_dispatched == times * stats.tokens, how


def kept(layer: Any, x: torch.Tensor) -> torch.Tensor:
    return checkpoint(layer, x, use_reentrant=False, context_fn=carpool.keep_rides)


def test_kept_rides_are_taken_once_and_let_go() -> None:
    moe = carpool.MoE(H, F, EXPERTS, K)
    taken: list[weakref.ref[Any]] = []
    forward = moe.experts.forward

    def once(*args: Any) -> tuple[Any, ...]:
        saved = forward(*args)
        taken.append(weakref.ref(saved[0]))
        return saved

    x = torch.randn(5, H, requires_grad=True)
    with mock.patch.object(moe.experts, "forward", once):
        y = kept(lambda x: moe(moe(x)), x)
        gc.collect()
        assert len(taken) == 2 and all(tensor() is not None for tensor in taken), "kept until the backward"
        y.sum().backward(retain_graph=True)
        first = [p.grad.clone() for p in moe.parameters()]
        y.sum().backward()
    assert len(taken) == 2, "experts computed nothing again"
    for parameter, gradient in zip(moe.parameters(), first, strict=True):
        assert torch.equal(parameter.grad, 2 * gradient)
    del y
    gc.collect()
    assert all(tensor() is None for tensor in taken)


def test_kept_rides_notice_a_region_that_is_another_the_second_time() -> None:
    moe, x = carpool.MoE(H, F, EXPERTS, K), torch.randn(5, H, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"changed in place .*write y = y \+ z"):
        kept(lambda x: moe(x).add_(1).square(), x).sum().backward()
    rides = SavedRides()
    rides.start(again=False)
    rides.ride(lambda: (x, "kept"))
    rides.start(again=True)
    assert rides.ride(lambda: (x + 1, "other"))[1] == "kept"
    with pytest.raises(RuntimeError, match="took 1 rides in the forward and more"):
        rides.ride(lambda: (x, "more"))


@pytest.mark.parametrize("reentrant", [True, False])
def test_the_balance_loss_read_outside_a_checkpoint(reentrant: bool) -> None:
    """As the layer's docstring has it."""
    moe = carpool.MoE(H, F, EXPERTS, K, router={"aux_loss_coef": 0.1})
    x = torch.randn(5, H, requires_grad=True)
    moe(x)
    (expected,) = torch.autograd.grad(moe.aux_loss, moe.router.weight)
    checkpoint(moe, x, use_reentrant=reentrant)
    assert moe.aux_loss.requires_grad is not reentrant
    if not reentrant:
        (got,) = torch.autograd.grad(moe.aux_loss, moe.router.weight)
        assert torch.equal(got, expected)


def bias_after(recompute: bool) -> list[list[float]]:
    """Bias of this rank after each of three steps with two micro-batches and an evaluation, on two copies of EP 2."""
    torch.manual_seed(0)
    moe = build(2, router={"bias_update_rate": 0.05, "score": "sigmoid"})
    history = []
    for step in range(3):
        for micro in range(2):
            x = tokens(10 * step + micro).clone().requires_grad_()
            (checkpoint(moe, x, use_reentrant=False) if recompute else moe(x)).sum().backward()
        moe.eval()
        moe(tokens(99))
        moe.train()
        moe.update_bias()
        history.append(moe.router.bias_E.tolist())
    return [*history, moe.router.weight.tolist()]


@pytest.mark.parametrize("recompute", [False, True])
def test_bias_updates_equal_the_rule_on_the_whole_batch(recompute: bool, ranks: Ranks) -> None:
    results = ranks(bias_after, recompute)
    weight = torch.tensor(results[0].pop(), dtype=torch.float64)
    bias = torch.zeros(EXPERTS)
    for step in range(3):
        load = torch.zeros(EXPERTS)
        for micro in range(2):
            scores = router_scores(Spec(score="sigmoid"), all_tokens(10 * step + micro).double() @ weight.t())
            load += torch.bincount((scores + bias).topk(K).indices.flatten(), minlength=EXPERTS)
        assert load.sum() == 2 * K * sum(SIZES)
        bias += 0.05 * torch.sign(load.mean() - load)
        for rank in range(WORLD_SIZE):
            torch.testing.assert_close(torch.tensor(results[rank][step]), bias, msg=f"rank {rank}, step {step}")


# -- counters -------------------------------------------------------------------------------------------------------


def counters() -> dict[str, Any]:
    torch.manual_seed(0)
    moe = build(4, router={"capacity_factor": 0.5, "normalize": False})
    x = tokens()
    seen, entropy = [], 0.0
    for _ in range(2):
        moe(x).sum().backward()
        seen.append(moe.routing.expert_TK)
        share = moe.routing.weight_TK / moe.routing.weight_TK.sum(1, keepdim=True).clamp(min=1e-20)
        entropy += -sum(s * math.log(s) for s in share.flatten().tolist() if s > 0)
    stats, counter = moe.stats(reset=True), moe.core.stats
    after = moe.stats()
    assert (after.tokens, after.rows_dispatched, after.dropped, sum(after.load_E)) == (0, 0, 0, 0)
    assert counter.entropy.item() == 0 and not any(counter.traffic.baseline.values())
    return {"seen": [e.tolist() for e in seen], "stats": stats, "entropy": entropy, "size": len(x)}


def test_counters_of_several_forwards_add_up(ranks: Ranks) -> None:
    results = ranks(counters)
    volume = predict("dedup", [torch.tensor(r["seen"][0]).view(-1, K) for r in results], layout_of("contiguous", 4),
                     hidden=H, element_size=4)  # fmt: skip
    for rank, result in enumerate(results):
        stats, kept = result["stats"], [e for rows in result["seen"] for row in rows for e in row if e >= 0]
        assert stats.tokens == 2 * result["size"]
        assert stats.load_E == tuple(kept.count(e) for e in range(EXPERTS))
        assert stats.dropped == 2 * K * result["size"] - len(kept)
        assert stats.rows_dispatched == 2 * volume.rows_WW[rank].sum()
        assert stats.copies_per_token == (stats.rows_dispatched / stats.tokens if stats.tokens else 0.0)
        assert str(stats).startswith(f"{stats.tokens} tokens") and f"{stats.dropped} choices dropped" in str(stats)


def test_entropy_counts_choices_that_exist() -> None:
    moe = carpool.MoE(H, F, EXPERTS, K)
    expert_TK = torch.tensor([[0, 1, -1], [2, -1, -1], [-1, -1, -1], [3, 4, 5]], dtype=torch.int32)
    moe(torch.randn(4, H), routing=Routing(expert_TK, torch.full((4, 3), 0.7)))
    assert moe.core.stats.entropy.item() == pytest.approx(math.log(2) + math.log(3), rel=1e-6)


# -- gradients of a model around the layer --------------------------------------------------------------------------


@on_ranks()
def test_reduce_gradients_tells_dense_from_expert() -> None:
    """On a model: dense mean over all ranks, unused parameters, frozen ones."""
    rank, grid = dist.get_rank(), mesh((2, 2), ("edp", "ep"))
    torch.manual_seed(0)
    model = torch.nn.ModuleDict({"dense": torch.nn.Linear(H, H), "moe": build(2), "unused": torch.nn.Linear(2, 2)})
    model["frozen"] = torch.nn.Linear(2, 2).requires_grad_(False)
    model["dense"].weight.grad = torch.full((H, H), float(rank))
    for parameter in model["moe"].expert_parameters():
        parameter.grad = torch.full_like(parameter, float(10**rank))
    carpool.reduce_gradients(model, grid["ep"], grid["edp"])
    assert (model["dense"].weight.grad == 1.5).all()
    copies = 101.0 if rank % 2 == 0 else 1010.0
    assert all((p.grad == copies / 4).all() for p in model["moe"].expert_parameters())
    assert model["unused"].weight.grad is not None and not model["unused"].weight.grad.any()
    assert model["frozen"].weight.grad is None


# -- errors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layout": ExpertLayout.contiguous(8, 1)}, "layout is for 8 experts on 1 ranks, the layer has 12 experts"),
        ({"layout": ExpertLayout.contiguous(12, 2)}, "12 experts on 2 ranks, .* ep_mesh 1 ranks"),
        ({"num_experts_per_tok": 13}, "num_experts_per_tok=13 must be between 1 and 12"),
        ({"transport": "pigeon"}, "transport='pigeon' is not known; use one of auto, nvlink, alltoall, dedup"),
        (
            {"transport": "nvlink", "max_tokens": 9},
            "'nvlink' cannot be used here: there is no CUDA device; use 'auto' or",
        ),
        ({"experts": "magic"}, "experts='magic' is not known; use one of auto, grouped, reference"),
        ({"activation": "tanh"}, "activation='tanh' is not known; use one of silu"),
        ({"router": {"score": "tanh"}}, "score='tanh' is not known"),
        ({"num_experts": 0}, "0 experts"),
        ({"hidden_size": 0}, "hidden_size=0"),
        ({"intermediate_size": -3}, "intermediate_size=-3"),
        ({"shared_intermediate_size": -1}, "shared_intermediate_size=-1"),
        ({"router": {"aux_loss_coef": math.nan}}, "aux_loss_coef=nan must be 0"),
        ({"dtype": torch.int8}, "dtype=torch.int8 cannot be trained in"),
        ({"hidden_size": 16.0}, "hidden_size=16.0 must be int"),
        ({"num_experts": True}, "num_experts=True must be int"),
        ({"layout": "contiguous"}, r"layout='contiguous' must be carpool.layout.expert_layout.ExpertLayout or None"),
        ({"transport_options": 3}, "transport_options=3 must be carpool.transport.options.TransportOptions or None"),
        ({"gated": "no"}, "gated='no' must be bool"),
        ({"router": "softmax"}, "router='softmax' must be dict or None"),
        ({"device": 3.5}, "device=3.5 must be torch.device or str or None"),
    ],
)
def test_impossible_layers_are_refused(options: dict[str, Any], message: str) -> None:
    sizes = {"hidden_size": H, "intermediate_size": F, "num_experts": EXPERTS, "num_experts_per_tok": K}
    with pytest.raises((ValueError, TypeError), match=message):
        carpool.MoE(**(sizes | options))


@on_ranks()
def test_meshes_that_do_not_fit_are_refused() -> None:
    grid = mesh((2, 2), ("edp", "ep"))
    for options, message in (
        ({"ep_mesh": grid}, r"^ep_mesh has 2 dimensions; pass one, such as mesh\["),
        ({"ep_mesh": grid["ep"], "edp_mesh": grid}, "^edp_mesh has 2 dimensions"),
        (
            {"ep_mesh": mesh((WORLD_SIZE,), ("ep",)), "num_experts": 3},
            "^3 experts cannot be spread over 4 ranks",
        ),
        (
            {"ep_mesh": grid["ep"], "layout": ExpertLayout.contiguous(EXPERTS, 4)},
            "^the layout is for 12 experts on 4 ranks, the layer has 12 experts and ep_mesh 2 ranks$",
        ),
    ):
        sizes = {"hidden_size": H, "intermediate_size": F, "num_experts": EXPERTS, "num_experts_per_tok": K}
        with pytest.raises(ValueError, match=message):
            carpool.MoE(**(sizes | options))


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.randn(3, H + 1), rf"hidden size is {H}, but x has shape \(3, {H + 1}\)"),
        (torch.tensor(1.0), rf"hidden size is {H}, but x has shape \(\)"),
        (torch.randn(3, H).bfloat16(), "x is torch.bfloat16, the layer's parameters are torch.float32"),
        (torch.randn(3, H, device="meta"), "x is on meta, the layer's parameters are on cpu"),
        (torch.randn(3, H).to_sparse(), "x is torch.sparse_coo; the layer takes strided tensors"),
        (torch.randn(3, H).numpy(), rf"x is a ndarray, not a tensor of shape \(..., {H}\)"),
    ],
)
def test_input_that_does_not_fit_is_refused(x: Any, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        carpool.MoE(H, F, EXPERTS, K)(x)


def test_a_recording_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match=r"shape \(2, 3\), but the layer got 4 tokens"):
        carpool.MoE(H, F, EXPERTS, K)(torch.randn(4, H), routing=Routing(torch.zeros(2, 3, dtype=torch.int32), None))
    with pytest.raises(TypeError, match=r"routing is a Tensor, not a carpool.Routing"):
        carpool.MoE(H, F, EXPERTS, K)(torch.randn(4, H), routing=torch.zeros(4, K))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="ep_mesh is 'ep', not a DeviceMesh"):
        carpool.reduce_gradients(carpool.MoE(H, F, EXPERTS, K), "ep")  # type: ignore[arg-type]


# -- what experts keep, and their stages ------------------------------------------------------------------------------


def test_options_of_experts() -> None:
    choices = Choices(up="flat")
    moe = carpool.MoE(H, F, EXPERTS, K, expert_choices=choices)
    assert isinstance(moe.experts, GroupedExperts)
    assert (moe.experts.choices, moe.experts.recompute) == (choices, False)
    x = torch.randn(5, H)
    torch.manual_seed(0)
    moe.reset_parameters()
    expected = moe(x)
    torch.manual_seed(0)
    assert torch.equal(carpool.MoE(H, F, EXPERTS, K)(x), expected), "on a CPU there is one way"
    for name, options in (
        ("reference", {"activation_policies": ActivationPolicies(expert_activations="recompute")}),
        ("fp8", {"expert_choices": choices}),
    ):
        with pytest.raises(ValueError, match=f"experts='{name}' has no option"):
            carpool.MoE(H, F, EXPERTS, K, experts=name, **options)
