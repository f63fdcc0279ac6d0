"""How much recipes change of what travels, and when Tutel's and Janus's rules fetch experts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import carpool
from carpool import ExpertLayout
from carpool.layout.topology import Topology
from carpool.metrics.counters import VERBS
from carpool.parallel.degrees import Degrees
from carpool.placement import predict
from carpool.placement.objective import served_by
from carpool.placement.solvers import solve
from carpool.placement.trace import Trace
from carpool.planner.machine.cost import CostModel
from carpool.replicas.slot_costs import Costs
from carpool.ride.balanced import SpareSlotOptions
from carpool.transport import TRANSPORTS, HierarchicalOptions, TransportOptions
from carpool.transport.codecs import PLAIN, Codecs
from carpool_systems.mechanisms import load
from carpool_systems.resolve import resolve
from tests.ranks import WORLD_SIZE, Ranks, mesh

SYSTEMS = ("lsh-moe", "luffy", "deepseek-v3-dispatch")
# On several nodes; what each sends between and inside them.
HOPS = ("hetumoe", "deepspeed-moe", "tutel-2dh", "schemoe", "hybrid-ep", "deepep", "hiermoe")
H, E, K, TOKENS = 128, 8, 4, 48
TRACE = Path(__file__).parents[2] / "docs/traces/e64-1435.npz"


def sent(settings: list[tuple[str, Codecs]]) -> list[dict[str, int]]:
    """Bytes to other ranks by verb. Tokens are of a few kinds, as those of text are."""
    ep_mesh, found = mesh((1, WORLD_SIZE), ("edp", "ep"))["ep"], []
    for transport, codecs in settings:
        torch.manual_seed(0)
        options = TransportOptions(codecs=codecs)
        moe = carpool.MoE(H, 16, E, K, ep_mesh=ep_mesh, transport=transport, transport_options=options)
        x = torch.randn(6, H).repeat(TOKENS // 6, 1) + 0.01 * torch.randn(TOKENS, H)
        moe(x.requires_grad_()).sum().backward()
        found.append(dict(moe.stats().bytes_remote))
    return found


@pytest.mark.parametrize("name", HOPS)
def test_hops_change_what_travels_between_nodes(name: str) -> None:
    """Predicted rows, which tests/test_transports.py shows to be those that are counted."""
    generator = torch.Generator().manual_seed(0)
    routings = [torch.rand(TOKENS, 16, generator=generator).argsort(1)[:, :K] for _ in range(8)]
    layout, nodes = ExpertLayout.contiguous(16, 8), Topology.even(8, 2)
    far_WW = ~np.equal.outer(nodes.node_of, nodes.node_of)
    config = resolve(load(name))
    ours, flat = (
        predict(way, routings, layout, hidden=H, element_size=2, topology=nodes).rows_WW * far_WW
        for way in (config.moe.transport, "alltoall")
    )
    links = {"1d": 2, "2d": 8, "2dh": 8, "hierarchical": 8}[config.moe.transport]
    assert np.count_nonzero(flat) == 32 and np.count_nonzero(ours) == links, "fewer ranks talk to each other"
    if config.moe.transport in ("1d", "2d"):
        assert ours.sum() == flat.sum(), "one row per expert all the same"
    elif config.moe.transport == "2dh":
        assert ours.sum() > flat.sum() and all(len(set(of[of > 0])) == 1 for of in ours), "blocks of equal size"
    else:
        assert ours.sum() < flat.sum() / 2 and ours.max() <= TOKENS, "one row for a token and a node"


def test_deepep_sends_rows_in_half_the_bytes_and_sums_as_they_are() -> None:
    codecs = resolve(load("deepep")).codec.codecs
    generator = torch.Generator().manual_seed(0)
    routings = [torch.rand(TOKENS, 16, generator=generator).argsort(1)[:, :K] for _ in range(8)]
    ours, plain = (
        predict(
            "hierarchical", routings, ExpertLayout.contiguous(16, 8), hidden=2048, element_size=2,
            topology=Topology.even(8, 2), options=HierarchicalOptions(codecs=one),
        )
        for one in (codecs, PLAIN)
    )  # fmt: skip
    assert ours.bytes_remote("dispatch") < 0.53 * plain.bytes_remote("dispatch")
    assert all(ours.bytes_remote(verb) == plain.bytes_remote(verb) for verb in VERBS if verb != "dispatch")


def test_hiermoe_moves_experts_to_where_fewer_rows_cross() -> None:
    """Placed on one half of a recording, counted on the other; what a run's policy "migrate" asks for."""
    config, nodes = resolve(load("hiermoe")), Topology.even(8, 4)
    assert config.placement.policy == "migrate"
    solved, shown = (half.layer(4) for half in Trace.load(TRACE).split(2))
    cost = CostModel(transport=config.moe.transport)
    placed = solve(config.placement.solver, solved, nodes, cost=cost)
    source_T = shown.source_T(8)
    crossing = []
    for layout in (ExpertLayout.contiguous(shown.num_experts, 8), placed):
        rank_TK = served_by(shown, layout)
        rows_WW = TRANSPORTS[config.moe.transport].tokens_sent([rank_TK[source_T == rank] for rank in range(8)], nodes)
        crossing.append(rows_WW[nodes.pairs["network"]].sum())
    assert crossing[1] < 0.92 * crossing[0]


@pytest.fixture(scope="module")
def counted(ranks: Ranks) -> dict[tuple[str, Codecs], dict[str, int]]:
    asked: list[Any] = []
    for name in SYSTEMS:
        config = resolve(load(name))
        asked += [(config.moe.transport, config.codec.codecs), (config.moe.transport, PLAIN)]
    asked += [("dedup", resolve(load("deepseek-v3-dispatch")).codec.codecs), ("hierarchical", Codecs(combine="bf16"))]
    every = ranks(sent, asked)
    return {key: {verb: sum(one[i][verb] for one in every) for verb in every[0][i]} for i, key in enumerate(asked)}


@pytest.mark.parametrize("name", ["lsh-moe", "luffy"])
def test_merged_rows_are_fewer_on_every_way(name: str, counted: dict[tuple[str, Codecs], dict[str, int]]) -> None:
    config = resolve(load(name))
    ours, plain = counted["alltoall", config.codec.codecs], counted["alltoall", PLAIN]
    assert all(0 < ours[verb] < plain[verb] / 2 for verb in plain if verb != "plan")


def test_deepseek_sends_half_the_bytes_out_and_rows_of_two_bytes_back(
    counted: dict[tuple[str, Codecs], dict[str, int]],
) -> None:
    config = resolve(load("deepseek-v3-dispatch"))
    assert (config.moe.limit_nodes, config.moe.limit_by) == (4, "groups"), "shown in tests/test_routing_limit.py"
    codecs = config.codec.codecs
    ours, plain = counted["hierarchical", codecs], counted["hierarchical", PLAIN]
    rows = plain["combine"] // (4 * H)
    assert ours["dispatch"] == rows * (H + 16 + 8 * K) < plain["dispatch"] / 2
    assert ours["combine"] == rows * 2 * H == counted["hierarchical", replace(codecs, dispatch="none")]["combine"]
    assert ours["dispatch_backward"] == plain["dispatch_backward"], "gradients as they are"
    assert counted["dedup", codecs]["dispatch"] != ours["dispatch"], "nodes count"


def output_and_bytes(recipe: str, price: int) -> list[Any]:
    """Of a layer whose tokens travel, and of one to whose tokens all experts travel, if they cost this."""
    rank, ep_mesh, found = dist.get_rank(), mesh((1, WORLD_SIZE), ("edp", "ep"))["ep"], []
    moe_section = resolve(load(recipe)).moe
    fetch = SpareSlotOptions(E, plan=moe_section.spare_plan, costs=Costs(trip=100, fetch=price))
    for spare in (0, fetch):
        torch.manual_seed(0)
        moe = carpool.MoE(H, 16, E, K, ep_mesh=ep_mesh, transport=moe_section.transport, spare_slots=spare)
        y = moe(torch.randn(TOKENS, H, generator=torch.Generator().manual_seed(rank)))
        found += [y.detach(), dict(moe.stats().bytes_remote)]
    return found


@pytest.mark.parametrize("recipe", ["janus", "tutel"])
def test_experts_are_fetched_and_no_row_travels(recipe: str, ranks: Ranks) -> None:
    for price in (1, 2**30):
        for travelled, sent, stayed, then in ranks(output_and_bytes, recipe, price):
            torch.testing.assert_close(stayed, travelled)
            assert sent["dispatch"] > 0 and sent["combine"] > 0
            assert [then[verb] for verb in ("dispatch", "combine")] == (
                [0, 0] if price == 1 else [sent["dispatch"], sent["combine"]]
            )


def ranks_of_a_group(ep: int) -> list[int]:
    group = mesh((WORLD_SIZE // ep, ep), ("edp", "ep"))["ep"].get_group()
    return dist.get_process_group_ranks(group)


def test_experts_spread_over_a_node_keep_rows_inside_it(ranks: Ranks) -> None:
    """As the trainer divides ranks: expert-parallel ranks are consecutive."""
    assert resolve(load("ez-moe")).parallelism.ep_size == 8
    nodes = Topology.even(WORLD_SIZE, 2).node_of
    for ep, crosses in ((2, False), (4, True)):
        assert Degrees(dp_replicate=1, fsdp=WORLD_SIZE, tp=1, ep=ep).ep == ep
        for members in ranks(ranks_of_a_group, ep):
            assert (len({nodes[rank] for rank in members}) > 1) == crosses
