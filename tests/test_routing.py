"""Who serves a token: selection, weights, balance, capacity, replay. Statistics over ranks are in test_moe.py."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from carpool import Router, Routing
from carpool.routing import DropOptions
from tests.reference import Spec, router_scores, select

T, H, E = 37, 20, 12


def make(top_k: int = 3, seed: int = 0, **options: Any) -> tuple[Router, torch.Tensor]:
    """A router with random weights, and tokens."""
    generator = torch.Generator().manual_seed(seed)
    router = Router(H, E, top_k, **options)
    with torch.no_grad():
        router.weight.copy_(torch.randn(E, H, generator=generator) / math.sqrt(H))
    return router, torch.randn(T, H, generator=generator)


def spec_of(router: Router) -> Spec:
    return Spec(
        hidden=H,
        experts=E,
        top_k=router.top_k,
        score=router.score,
        normalize=router.normalize,
        scaling=router.scaling_factor,
        num_groups=router.num_groups,
        topk_groups=router.topk_groups,
        aux=router.aux_loss_coef,
        z=router.z_loss_coef,
    )


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize(("groups", "topk_groups"), [(0, 0), (3, 1), (3, 2), (4, 2), (6, 3), (12, 5), (2, 2)], ids=str)
def test_selection_and_weights_equal_brute_force(score: str, normalize: bool, groups: int, topk_groups: int) -> None:
    options = {"score": score, "normalize": normalize, "num_groups": groups, "topk_groups": topk_groups}
    router, x = make(top_k=4, scaling_factor=2.5, bias_update_rate=0.1, **options)
    router.bias_E.copy_(torch.linspace(-0.2, 0.2, E).roll(5))
    routing = router(x)
    scores_TE = router_scores(spec_of(router), x.double() @ router.weight.double().t())
    expert_TK, _ = select(spec_of(router), scores_TE, router.bias_E)
    assert routing.expert_TK.dtype == torch.int32 and routing.weight_TK.dtype == torch.float32
    assert torch.equal(routing.expert_TK.long(), expert_TK)
    # The bias selects and does not weigh.
    weight_TK = scores_TE.gather(1, expert_TK)
    weight_TK = 2.5 * (weight_TK / weight_TK.sum(1, keepdim=True) if normalize else weight_TK)
    torch.testing.assert_close(routing.weight_TK.double(), weight_TK, rtol=1e-5, atol=1e-6)
    if groups:
        visited = [len({e // (E // groups) for e in row}) for row in routing.expert_TK.tolist()]
        assert max(visited) <= topk_groups


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("bias", [False, True])
def test_of_equal_scores_the_lower_expert_wins(score: str, bias: bool) -> None:
    options = {"score": score, "bias_update_rate": 0.1 * bias}
    router, x = make(top_k=4, **options)
    assert router(0 * x).expert_TK.tolist() == [[0, 1, 2, 3]] * T
    router.weight.data[[2, 5, 7]] = x[0]
    assert router(x[:1]).expert_TK[0, :3].tolist() == [2, 5, 7]
    grouped, _ = make(top_k=4, num_groups=6, topk_groups=3, **options)
    grouped.weight.data.zero_()
    assert grouped(x).expert_TK.tolist() == [[0, 1, 2, 3]] * T
    grouped.weight.data[8:] = x[0]
    assert grouped(x[:1]).expert_TK.tolist() == [[8, 9, 10, 11]]


def test_no_tokens_at_all() -> None:
    router, _ = make(aux_loss_coef=1.0, z_loss_coef=1.0, capacity_factor=1.0)
    routing = router(torch.zeros(0, H))
    assert routing.expert_TK.shape == (0, 3) and router.aux_loss.item() == 0.0 and router.dropped.item() == 0


def test_bf16_tokens_are_routed_in_float32_also_under_autocast() -> None:
    router, x = make(top_k=2)
    plain = router(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        again = router(x)
    assert torch.equal(plain.weight_TK, again.weight_TK) and torch.equal(plain.expert_TK, again.expert_TK)
    rounded, x = make(top_k=2, dtype=torch.bfloat16)
    x = x.bfloat16()
    wide, _ = make(top_k=2)
    wide.load_state_dict({k: v.float() for k, v in rounded.state_dict().items()})
    assert torch.equal(rounded(x).weight_TK, wide(x.float()).weight_TK)


# -- balance --------------------------------------------------------------------------------------------------------


def test_bias_moves_against_the_load_and_forgets_it() -> None:
    router, x = make(bias_update_rate=0.01)
    load = torch.bincount(router(x).expert_TK.flatten(), minlength=E)
    load += torch.bincount(router(x[:5]).expert_TK.flatten(), minlength=E)
    router.update_bias()
    expected = 0.01 * torch.sign(load.float().mean() - load.float())
    assert torch.equal(router.bias_E, expected)
    assert router.load_E.sum().item() == 0
    before = router.bias_E.clone()
    router.update_bias()
    assert torch.equal(router.bias_E, before), "without tokens nothing is out of balance"


def test_the_bias_keeps_float32_when_the_model_is_cast() -> None:
    router, _ = make(bias_update_rate=0.001)
    router.bias_E += 0.5 + 1e-3
    router.bfloat16()
    assert router.weight.dtype == torch.bfloat16 and router.bias_E.dtype == torch.float32
    assert torch.equal(router.bias_E, torch.full((E,), 0.501)) and "bias_E" in router.state_dict()
    router.to("meta")
    assert router.bias_E.device.type == "meta"


def test_a_router_without_bias_says_so() -> None:
    with pytest.raises(ValueError, match="construct it with bias_update_rate > 0"):
        make()[0].update_bias()


# -- capacity -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("factor", [0.25, 0.5, 1.0, 1.5, 100.0])
@pytest.mark.parametrize("top_k", [1, 3, 8])
@pytest.mark.parametrize("first_choices_first", [False, True])
def test_capacity_keeps_the_first_of_each_expert_and_counts_the_rest(
    factor: float, top_k: int, first_choices_first: bool
) -> None:
    plain, x = make(top_k=top_k)
    router, _ = make(top_k=top_k, capacity_factor=factor, first_choices_first=first_choices_first)
    wanted, got = plain(x), router(x)
    capacity = math.ceil(factor * T * top_k / E)
    seen, dropped = [0] * E, 0
    order = [(t, k) for t in range(T) for k in range(top_k)]
    if first_choices_first:
        order.sort(key=lambda place: place[1])
    for t, k in order:
        e = int(wanted.expert_TK[t, k])
        seen[e] += 1
        if seen[e] > capacity:
            dropped += 1
            assert got.expert_TK[t, k] == -1 and got.weight_TK[t, k] == 0
        else:
            assert got.expert_TK[t, k] == e and got.weight_TK[t, k] == wanted.weight_TK[t, k]
    assert router.dropped.item() == dropped
    assert (dropped > 0) if factor <= 0.5 else (dropped == 0) if factor == 100.0 else True
    router(x)
    assert router.dropped.item() == 2 * dropped
    router.reset_counts()
    assert router.dropped.item() == 0


def test_drops_outlive_an_update_of_the_bias() -> None:
    router, x = make(capacity_factor=0.5, bias_update_rate=0.01)
    router(x)
    dropped = router.dropped.item()
    router.update_bias()
    assert router.dropped.item() == dropped > 0


def test_capacity_and_replayed_holes() -> None:
    router, x = make(top_k=2, capacity_factor=0.5)
    expert_TK = torch.full((T, 2), -1, dtype=torch.int32)
    expert_TK[:, 0] = 4
    routing = router(x, expert_TK)
    capacity = math.ceil(0.5 * T * 2 / E)
    assert (routing.expert_TK[:, 0] == 4).sum() == capacity and (routing.expert_TK[:capacity, 0] == 4).all()
    assert router.dropped.item() == T - capacity


def test_second_choices_are_kept_in_proportion_to_their_weight_while_training() -> None:
    router, x = make(top_k=2, random_second=True)
    plain, _ = make(top_k=2)
    wanted, times = plain(x), 400
    torch.manual_seed(0)
    kept_T = sum((router(x).expert_TK[:, 1] >= 0).double() for _ in range(times)) / times
    share_T = (2 * wanted.weight_TK[:, 1] / wanted.weight_TK.sum(1)).double()
    assert 0 < share_T.min() < 0.5 and share_T.max() > 0.9
    # Five standard deviations of a mean of 400 draws.
    assert (kept_T - share_T).abs().max() < 5 * 0.5 / math.sqrt(times)
    assert router.dropped.item() == pytest.approx(times * (1 - share_T).sum().item(), rel=0.05)
    torch.manual_seed(1)
    first = router(x)
    torch.manual_seed(1)
    assert torch.equal(first.expert_TK, router(x).expert_TK)
    assert torch.equal(first.expert_TK[:, 0], wanted.expert_TK[:, 0])
    assert torch.equal(first.weight_TK, wanted.weight_TK.masked_fill(first.expert_TK < 0, 0.0))
    assert torch.equal(router.eval()(x).expert_TK, wanted.expert_TK)


def test_a_second_choice_that_is_not_taken_leaves_its_place_to_others() -> None:
    drops = DropOptions(capacity_factor=1.25, first_choices_first=True, random_second=True)
    # Two places of expert 1. Second choices of weight 0 never take one; those of weight 1/2 always do.
    expert_TK = torch.tensor([[0, 1], [2, 1], [3, 1], [4, 1]], dtype=torch.int32)
    weight_TK = torch.tensor([[1.0, 0.0], [0.5, 0.5], [1.0, 0.0], [0.5, 0.5]])
    left, dropped = drops.drop(Routing(expert_TK, weight_TK), num_experts=5, training=True)
    assert left.expert_TK[:, 1].tolist() == [-1, 1, -1, 1] and dropped.item() == 2
    left, dropped = drops.drop(Routing(expert_TK, weight_TK), num_experts=5, training=False)
    assert left.expert_TK[:, 1].tolist() == [1, 1, -1, -1] and dropped.item() == 2


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputation_draws_the_same_second_choices(reentrant: bool) -> None:
    router, x = make(top_k=2, random_second=True)
    x.requires_grad_()
    drawn: list[torch.Tensor] = []

    def weights(x: torch.Tensor) -> torch.Tensor:
        routing = router(x)
        drawn.append(routing.expert_TK)
        return routing.weight_TK

    with set_checkpoint_early_stop(False):
        checkpoint(weights, x, use_reentrant=reentrant).square().sum().backward()
    assert len(drawn) == 2 and torch.equal(*drawn) and (drawn[0] < 0).any()


def test_what_is_dropped_is_called_lossy() -> None:
    assert not DropOptions().lossy_reasons and not DropOptions().active
    both = DropOptions(capacity_factor=1.25, random_second=True)
    assert both.active and both.lossy_reasons == [
        "choices beyond 1.25 times an expert's even share are dropped",
        "second choices are dropped at random",
    ]


# -- errors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_experts_per_tok": 0}, "num_experts_per_tok=0 must be between 1 and 12"),
        ({"num_experts_per_tok": 13}, "num_experts_per_tok=13 must be between 1 and 12"),
        ({"score": "tanh"}, "score='tanh' is not known; use 'softmax' or 'sigmoid'"),
        ({"num_groups": 5, "topk_groups": 2}, "num_groups=5 must divide num_experts=12"),
        ({"num_groups": 4, "topk_groups": 0}, "topk_groups=0 must be between 1 and num_groups=4"),
        ({"num_groups": 4, "topk_groups": 5}, "topk_groups=5 must be between 1 and num_groups=4"),
        ({"num_groups": 6, "topk_groups": 1}, "1 groups of 2 experts hold fewer than 3 experts per token"),
        ({"topk_groups": 2}, "topk_groups=2.*num_groups"),
        ({"capacity_factor": 0.0}, "capacity_factor=0.0 must be positive"),
        ({"first_choices_first": True}, "who fills a capacity, but capacity_factor is None"),
        ({"random_second": True}, "second choices of two, but a token has 3"),
    ],
)
def test_impossible_routers_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Router(H, E, **({"num_experts_per_tok": 3} | options))


def experts(*rows: list[int]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int32)


@pytest.mark.parametrize(
    ("routing", "message"),
    [
        (Routing(experts([0, 1]), None), r"shape \(1, 2\), but the layer got 2 tokens"),
        (Routing(experts([0, 1])[0], None), r"shape \(2,\), but the layer got 2 tokens"),
        (Routing(experts([0, 1], [2, 3]).long(), None), "must be int32, not torch.int64; use .int()"),
        (Routing(experts([0, 1], [2, 3]), torch.ones(2, 3)), r"weight_TK has shape \(2, 3\), expert_TK has \(2, 2\)"),
        (Routing(experts([0, 1], [2, 12]), None), r"ids from 0 to 12; experts are 0\.\.11, and -1 means none"),
        (Routing(experts([0, 1], [2, -2]), None), "ids from -2 to 2"),
        (Routing(experts([0, 1], [3, 3]), None), "names an expert twice for one token; add the two weights"),
    ],
)
def test_a_recording_that_does_not_fit_is_refused(routing: Routing, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        routing.check(2, E)


def test_recordings_that_fit() -> None:
    Routing(experts([0, 1], [-1, -1]), torch.ones(2, 2)).check(2, E)
    Routing(torch.zeros(0, 3, dtype=torch.int32), None).check(0, E)
    weight = torch.rand(2, 2, requires_grad=True)
    recorded = Routing(experts([0, 1], [2, 3]), weight * 2).detach()
    assert not recorded.weight_TK.requires_grad and Routing(recorded.expert_TK, None).detach().weight_TK is None


def test_capacity_is_of_the_tokens_that_choose() -> None:
    """Padding, which chooses nothing, does not make room for the choices of others."""
    expert_TK = torch.tensor([[0, 1], [0, 2], [0, 1], [0, 3]], dtype=torch.int32)
    options = DropOptions(capacity_factor=1.5)
    alone, dropped = options.drop(Routing(expert_TK, torch.rand(4, 2)), 4, False)
    padded = torch.cat([expert_TK, torch.full((5, 2), -1, dtype=torch.int32)])
    found, also_dropped = options.drop(Routing(padded, torch.rand(9, 2)), 4, False)
    assert torch.equal(found.expert_TK[:4], alone.expert_TK) and (found.expert_TK[4:] == -1).all()
    assert dropped == also_dropped == 1
