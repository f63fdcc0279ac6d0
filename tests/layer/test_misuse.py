"""What a user may do to a layer by mistake: it works, or ends in a sentence, on all ranks."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import carpool
from carpool import ExpertLayout, Routing
from carpool.routing import DropOptions
from tests.ranks import WORLD_SIZE, mesh, on_ranks

H, F, E, K = 8, 8, 8, 2
PERMUTED = ExpertLayout.permuted([1, 0, 3, 2, 5, 4, 7, 6], WORLD_SIZE)
ALONE = ExpertLayout.permuted([7, 6, 5, 4, 3, 2, 1, 0], 1)

WRONG = {"ep_mesh": "ep", "schedule": "chunks", "max_tokens": 0}


def build(**options: Any) -> carpool.MoE:
    torch.manual_seed(0)
    if "ep_mesh" not in options:
        options["ep_mesh"] = mesh((WORLD_SIZE,), ("ep",))
    return carpool.MoE(H, F, E, K, **options)


def message(run: Any, *args: Any, **kwargs: Any) -> str:
    try:
        run(*args, **kwargs)
    except (ValueError, TypeError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


# -- arguments --------------------------------------------------------------------------------------------------------


def test_arguments_that_are_something_else_are_named() -> None:
    said = {key: message(build, **{"ep_mesh": None, key: value}) for key, value in WRONG.items()}
    assert said["ep_mesh"].startswith("TypeError: ep_mesh is 'ep', not a DeviceMesh")
    assert said["schedule"].startswith("TypeError: schedule='chunks' must be carpool.ride.schedule.Schedule or None")
    assert said["max_tokens"].startswith("ValueError: max_tokens=0 must be at least 1")


# -- what starts on "meta" ------------------------------------------------------------------------------------------


def test_a_layer_that_starts_on_meta_is_what_it_would_have_been() -> None:
    options: dict[str, Any] = {"ep_mesh": None, "bias": True, "shared_intermediate_size": 8}
    router = {"bias_update_rate": 0.1, "capacity_factor": 2.0, "aux_loss_coef": 0.1}
    want = build(**options, router=router)
    torch.manual_seed(0)
    want.reset_parameters()
    moe = build(**options, router=router, device="meta").to_empty(device="cpu")
    for tensor in (*moe.parameters(), *moe.buffers()):
        tensor.data.fill_(77)  # what memory may hold
    torch.manual_seed(0)
    moe.reset_parameters()
    for name, value in (*want.named_parameters(), *want.named_buffers()):
        assert torch.equal(dict((*moe.named_parameters(), *moe.named_buffers()))[name], value), name
    x = torch.randn(5, H)
    assert torch.equal(moe(x), want(x)) and moe.stats().dropped == want.stats().dropped
    moe.update_bias()
    want.update_bias()
    assert torch.equal(moe.router.bias_E, want.router.bias_E) and moe.aux_loss.device.type == "cpu"


# -- layouts --------------------------------------------------------------------------------------------------------


@on_ranks()
def test_a_layout_between_forward_and_backward_is_refused() -> None:
    moe, x = build(), torch.randn(3, H)
    y = moe(x)
    assert "1 forward(s) wait for their backward" in message(moe.set_layout, PERMUTED)
    y.sum().backward()
    moe.zero_grad()
    assert not message(moe.set_layout, PERMUTED)
    moe(x)  # nobody holds its output: no backward can come
    with torch.no_grad():
        kept = moe(x)
    assert not message(moe.set_layout, ExpertLayout.contiguous(E, WORLD_SIZE)) and not kept.requires_grad


@on_ranks()
def test_a_backward_that_one_rank_waits_for_is_told_to_all() -> None:
    moe = build()
    kept = [moe(torch.randn(3, H))]
    if dist.get_rank():
        kept.clear()
    assert "rank 0: MoE: 1 forward(s) wait for their backward" in message(moe.set_layout, PERMUTED)


def test_a_plain_state_of_another_layout_is_refused() -> None:
    plain, permuted = build(ep_mesh=None), build(ep_mesh=None, layout=ALONE)
    for source, target in ((plain, permuted), (permuted, plain)):
        with pytest.raises(RuntimeError, match="in the order of another layout than the layer's; save logical_state"):
            target.load_state_dict(source.state_dict())
        with pytest.raises(RuntimeError, match="0: the experts of this state lie in the order of another layout"):
            torch.nn.Sequential(target).load_state_dict(torch.nn.Sequential(source).state_dict())
        target.load_logical_state_dict(source.logical_state_dict())
        target.load_state_dict(copy.deepcopy(target).state_dict())
    assert "expert_order" not in plain.state_dict() and "expert_order" not in permuted.logical_state_dict()
    x = torch.randn(5, H)
    assert torch.allclose(plain(x), permuted(x), atol=1e-6)


# -- modes ----------------------------------------------------------------------------------------------------------


def test_a_layer_whose_first_forward_is_in_inference_mode_can_train() -> None:
    moe = build(ep_mesh=None)
    moe.set_drops(DropOptions(capacity_factor=1.0))
    with torch.inference_mode():
        moe(torch.randn(5, H))
    before = moe.stats()
    moe(torch.randn(5, H)).sum().backward()
    after = moe.stats()
    assert moe.up_proj.grad is not None and (before.tokens, after.tokens) == (5, 10)
    assert sum(after.load_E) + after.dropped == 20 and after.dropped >= before.dropped


# -- copies, wrappers -----------------------------------------------------------------------------------------------


@on_ranks()
def test_a_copy_shares_the_group_and_nothing_else() -> None:
    moe, x = build(router={"aux_loss_coef": 0.1}, shared_intermediate_size=8), torch.randn(3, H)
    y = moe(x)
    y.sum().backward()
    twin = copy.deepcopy(moe)
    assert torch.equal(twin(x), y) and twin.core.group is moe.core.group
    with torch.no_grad():
        moe.down_proj.zero_()
        moe.shared.down.weight.zero_()
    assert torch.equal(twin(x), y) and not moe(x).any()
    assert "MoE cannot be pickled: its process group exists in these" in message(torch.save, moe, io.BytesIO())


def test_a_layer_of_one_rank_can_be_pickled() -> None:
    moe, x, file = (
        build(ep_mesh=None, transport="alltoall", shared_intermediate_size=8),
        torch.randn(5, H),
        io.BytesIO(),
    )
    y = moe(x)
    torch.save(moe, file)
    file.seek(0)
    again = torch.load(file, weights_only=False)
    assert torch.equal(again(x), y) and again.transport.name == "alltoall" and again.stats().tokens == 5


@on_ranks()
def test_ddp_around_spread_experts_is_refused() -> None:
    said = message(DistributedDataParallel(torch.nn.Sequential(build())), torch.randn(3, H))
    assert "DistributedDataParallel makes all parameters equal on all ranks, also" in said


@on_ranks()
def test_ddp_around_whole_layers_is_its_business() -> None:
    moe = build(ep_mesh=None)
    DistributedDataParallel(moe)(torch.randn(3, H)).sum().backward()
    assert moe.up_proj.grad is not None


# -- recordings -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("different", ["as many choices per token, but they have K = [1, 2, 3, 4]"] * 4),
        ("narrow", ["as many choices per token, but they have K = [1, 2]"] * 4),
        ("one rank", ["routing of rank 2", "routing of rank 2", "experts are 0..7", "routing of rank 2"]),
    ],
)
@on_ranks()
def test_recordings_that_do_not_fit_are_refused_by_all(kind: str, said: list[str]) -> None:
    moe, rank = build(), dist.get_rank()
    tokens = 0 if kind == "narrow" and rank == 1 else 3
    top_k = {"different": rank + 1, "narrow": 1 if rank == 1 else 2}.get(kind, 2)
    expert_TK = torch.arange(tokens * top_k).view(tokens, top_k).int() % E
    if kind == "one rank" and rank == 2:
        expert_TK[0, 0] = E
    got = message(moe, torch.randn(tokens, H), routing=Routing(expert_TK, None))
    assert got.startswith("ValueError") and said[rank] in got


@pytest.mark.parametrize("shape", [(0, 0), (3, 0)])
def test_a_recording_without_choices_is_refused(shape: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="has no choices"):
        build(ep_mesh=None)(torch.randn(shape[0], H), routing=Routing(torch.empty(shape, dtype=torch.int32), None))


# -- precision ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("experts", ["reference", "grouped"])
def test_double_routes_in_double(experts: str) -> None:
    """Only on their way to the experts weights are float32, as the contract of transports says."""
    moe, x = build(ep_mesh=None, experts=experts).double(), torch.randn(5, H, dtype=torch.float64)
    y = moe(x)
    weight_TK, expert_TK = (x @ moe.router.weight.t()).softmax(-1).topk(K)
    weight_TK = weight_TK / weight_TK.sum(1, keepdim=True)
    assert moe.routing is not None and moe.routing.weight_TK is not None
    assert torch.equal(moe.routing.expert_TK, expert_TK.int())
    assert (moe.routing.weight_TK - weight_TK).abs().max() < 1e-14
    want = torch.zeros_like(x)
    for t in range(5):
        for k in range(K):
            gate, up = (moe.up_proj[expert_TK[t, k]] @ x[t]).chunk(2)
            want[t] += weight_TK[t, k].float() * (
                moe.down_proj[expert_TK[t, k]] @ (torch.nn.functional.silu(gate) * up)
            )
    assert (y - want).abs().max() < 1e-12
    ours, theirs = (torch.autograd.grad(out.square().sum(), moe.router.weight) for out in (y, want))
    assert (ours[0] - theirs[0]).abs().max() < 1e-6
