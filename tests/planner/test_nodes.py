"""Whether two hops pay, and that "auto" takes what the model says."""

from __future__ import annotations

import pytest
from torch.distributed.device_mesh import init_device_mesh

import carpool
from carpool.layout.topology import Topology
from carpool.planner.machine.hardware import hardware_of
from carpool.planner.transports import way_between_nodes
from carpool.transport import set_topology
from tests.ranks import WORLD_SIZE, Ranks

H200 = hardware_of("NVIDIA H200")


def way(num_ranks: int, nodes: int, top_k: int, tokens: int | None = 8192) -> tuple[str, str]:
    topology = Topology.even(num_ranks, nodes)
    name = "alltoall" if top_k == 1 else "dedup"
    sizes = {"top_k": top_k, "hidden": 2048, "element_size": 2, "tokens": tokens}
    return way_between_nodes(name, "fewest rows", topology, **sizes, hardware=H200, limited=False)  # type: ignore[arg-type]


def test_two_hops_pay_where_many_ranks_of_a_node_want_a_token() -> None:
    name, why = way(16, 2, 8)
    # Between nodes 8192 rows in place of 3.2 times as many; inside 7 * 2 * 0.403 rows for each token.
    between, inside = 8192 * 4096 * (1 - 0.5**8) / 50e9 + 30e-6, 8192 * 4096 * 14 * (1 - (15 / 16) ** 8) / 320e9 + 12e-6
    assert name == "hierarchical" and f"a ride takes {1e3 * (between + inside):.3g} ms in two hops" in why
    flat = 8192 * 4096 * 8 * (1 - (15 / 16) ** 8) / 50e9 + 30e-6
    assert f"and {1e3 * flat:.3g} ms with dedup, on H200" in why
    assert way(16, 2, 1)[0] == "alltoall" and way(16, 2, 2)[0] == way(2, 2, 8)[0] == "dedup"
    assert "not hierarchical: a ride would take" in way(16, 2, 2)[1]
    assert way(16, 1, 8) == way(16, 2, 8, tokens=None) == ("dedup", "fewest rows")
    dealt = Topology((0, 1, 0, 1), (0, 1, 0, 1))
    sizes = {"top_k": 8, "hidden": 64, "element_size": 2, "tokens": 8}
    kept, why = way_between_nodes("dedup", "fewest rows", dealt, **sizes, hardware=H200, limited=False)  # type: ignore[arg-type]
    assert kept == "dedup" and "equally many consecutive ranks" in why


def automatic(top_k: int, most: int | None) -> str:
    ep_mesh = init_device_mesh("cpu", (WORLD_SIZE,), mesh_dim_names=("slow_between_nodes",))
    set_topology(ep_mesh.get_group(), Topology.even(WORLD_SIZE, 2))
    moe = carpool.MoE(2048, 8, 16, top_k, ep_mesh=ep_mesh, max_tokens=most)
    moe.core.prepare(top_k, 2048, moe.up_proj.device)
    return f"{moe.transport.name}: {moe.core.why}"  # type: ignore[union-attr]


def test_auto_takes_what_the_model_says(ranks: Ranks) -> None:
    pays, unsaid = ranks(automatic, 8, 8192)[0], ranks(automatic, 8, None)[0]
    assert pays.startswith("hierarchical: a ride takes ") and "inter-node a fixed number of tokens" in pays
    assert unsaid.startswith("dedup: ")


@pytest.mark.parametrize("top_k", [1, 2])
def test_few_experts_of_a_token_take_one_hop(top_k: int) -> None:
    assert way(4, 2, top_k)[0] != "hierarchical"


def test_limited_routing_keeps_one_hop() -> None:
    topology, sizes = Topology.even(16, 2), {"top_k": 8, "hidden": 2048, "element_size": 2, "tokens": 8192}
    found = {
        limited: way_between_nodes("dedup", "why", topology, **sizes, hardware=H200, limited=limited)  # type: ignore[arg-type]
        for limited in (False, True)
    }
    assert found[False][0] == "hierarchical"
    assert found[True][0] == "dedup" and "routing is limited" in found[True][1]
