"""Hidden states projected before dispatch (BigMac): the same on any number of ranks, and as short as said."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from carpool import ExpertLayout, MoE
from carpool.placement import predict
from carpool.transport.codecs import TOKEN_VERBS
from carpool_systems.projected_moe import ProjectedMoE
from tests.ranks import WORLD_SIZE, Ranks, mesh

H, SENT, F, E, K, T = 24, 8, 20, 8, 3, 7


def layer(ep_mesh: Any = None) -> ProjectedMoE:
    torch.manual_seed(0)
    return ProjectedMoE(H, F, E, K, projected_size=SENT, ep_mesh=ep_mesh, transport="dedup", shared_intermediate_size=4)


def tokens(rank: int) -> torch.Tensor:
    return torch.randn(T, H, generator=torch.Generator().manual_seed(rank)).requires_grad_()


def forward_and_backward() -> dict[str, Any]:
    rank, ep_mesh = dist.get_rank(), mesh((1, WORLD_SIZE), ("edp", "ep"))["ep"]
    moe, x = layer(ep_mesh), tokens(rank)
    y = moe(x)
    y.square().sum().backward()
    for projection in (moe.descend, moe.ascend):
        dist.all_reduce(projection.weight.grad)
    return {
        "y": y.detach(), "dx": x.grad, "dup": moe.up_proj.grad, "ddown": moe.down_proj.grad,
        "ddescend": moe.descend.weight.grad, "dascend": moe.ascend.weight.grad,
        "bytes": moe.core.stats.traffic.bytes, "expert_TK": moe.routing.expert_TK,
    }  # fmt: skip


def test_ranks_compute_what_one_process_does_and_send_short_rows(ranks: Ranks) -> None:
    found, one = ranks(forward_and_backward), layer()
    plain = MoE(SENT, F, E, K, transport="dedup")
    leaves = [tokens(rank) for rank in range(WORLD_SIZE)]
    for got, x in zip(found, leaves, strict=True):
        routing = one.router(x)
        sums = plain.core(one.descend(x), routing, one.home_weights(), training=True)[0]
        y = one.ascend(sums) + one.shared(x)
        torch.testing.assert_close(one(x), y, msg="descend, experts, ascend")
        y.square().sum().backward()
        torch.testing.assert_close(got["y"], y.detach(), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(got["dx"], x.grad, rtol=1e-4, atol=1e-5)
    want = {"dup": one.up_proj, "ddown": one.down_proj}
    for key, parameter in want.items():
        torch.testing.assert_close(torch.cat([got[key] for got in found]), parameter.grad, rtol=1e-4, atol=1e-4)
    for key, parameter in {"ddescend": one.descend.weight, "dascend": one.ascend.weight}.items():
        torch.testing.assert_close(found[0][key], parameter.grad, rtol=1e-4, atol=1e-4)

    routings = [got["expert_TK"] for got in found]
    volume = predict("dedup", routings, ExpertLayout.contiguous(E, WORLD_SIZE), hidden=SENT, element_size=4)
    for verb in TOKEN_VERBS:
        np.testing.assert_array_equal([got["bytes"][verb] for got in found], volume.bytes_WW[verb])


def test_sizes_are_checked_and_drawn_again() -> None:
    with pytest.raises(ValueError, match="projected_size=-1"):
        ProjectedMoE(H, F, E, K, projected_size=-1)
    moe = layer()
    with pytest.raises(ValueError, match=f"hidden size is {H}"):
        moe(torch.zeros(2, SENT))
    drawn, x_TH = [], tokens(0)
    for _ in range(2):
        torch.manual_seed(1)
        moe.reset_parameters()
        drawn.append([projection.weight.clone() for projection in (moe.descend, moe.ascend)])
        with torch.no_grad():
            moe.descend.weight.zero_()
            moe.ascend.weight.zero_()
    moe.reset_parameters()
    assert all(map(torch.equal, *drawn)) and all(weight.any() for weight in drawn[0])
    assert {"descend.weight", "ascend.weight"} <= set(moe.logical_state_dict())
    for twin in (copy.deepcopy(moe), pickle.loads(pickle.dumps(moe))):
        assert twin.core.projections == (twin.descend, twin.ascend) and twin.descend is not moe.descend
        assert torch.equal(twin(x_TH), moe(x_TH)) and moe(x_TH).any()
