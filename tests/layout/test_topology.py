"""Which ranks share a node: what launchers say, what the configuration says, and ranks that contradict each other."""

from __future__ import annotations

import os
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from carpool.layout.topology import Topology, Whereabouts, agree, whereabouts
from carpool.train.config.schema import ParallelismSection
from carpool.train.run.topology import find_machine
from tests.ranks import Ranks

TWO_NODES = Topology((0, 0, 1, 1), (0, 0, 1, 1))


def test_links_between_ranks() -> None:
    assert [TWO_NODES.link(1, other) for other in range(4)] == ["nvlink", "self", "network", "network"]
    without = Topology.even(4, 2, nvlink=False)
    assert [without.link(1, other) for other in range(4)] == ["node", "self", "network", "network"]
    rack = Topology((0, 0, 1, 1), (0, 0, 0, 0))  # an NVLink domain of several nodes
    assert rack.link(0, 3) == "nvlink" and rack.num_nodes == 2
    assert {link: int(pairs_WW.sum()) for link, pairs_WW in without.pairs.items()} == {"node": 4, "network": 8}
    assert set(TWO_NODES.pairs) == {"nvlink", "network"} and not Topology.even(1).pairs


def test_a_group_of_ranks_is_numbered_anew() -> None:
    assert TWO_NODES.of([2, 3]) == Topology((0, 0), (0, 0)) and TWO_NODES.of([1, 2]) == Topology((0, 1), (0, 1))
    assert Topology.from_dict(TWO_NODES.to_dict()) == TWO_NODES


@pytest.mark.parametrize("node_of", [(0, 0, 0, 1), (0, 1, 0, 1), (0, 1, 1, 0)])
def test_who_needs_even_nodes_is_told_how_they_are(node_of: tuple[int, ...]) -> None:
    assert TWO_NODES.even_nodes() == 2
    with pytest.raises(ValueError, match="equally many consecutive ranks on each node, but by given its nodes hold"):
        Topology(node_of, node_of).even_nodes()


def test_what_cannot_be_divided_is_refused() -> None:
    with pytest.raises(ValueError, match="4 ranks cannot be divided evenly among 3 nodes"):
        Topology.even(4, 3)
    with pytest.raises(ValueError, match="ranks_per_node = 3 does not divide the 4 ranks"):
        ParallelismSection(ranks_per_node=3, num_ranks=4)


@pytest.mark.parametrize(
    ("envs", "node_of", "source"),
    [
        ([{"GROUP_RANK": str(rank // 2), "LOCAL_WORLD_SIZE": "2"} for rank in range(4)], (0, 0, 1, 1), "GROUP_RANK"),
        ([{"SLURM_NODEID": node} for node in "0122"], (0, 1, 2, 2), "SLURM_NODEID"),
        ([{"LOCAL_WORLD_SIZE": "4"}] * 4, (0, 0, 0, 0), "the hosts' names"),
        # As Accelerate leaves it behind in processes of one host.
        ([{"LOCAL_WORLD_SIZE": "1"}] * 4, (0, 0, 0, 0), "the hosts' names"),
    ],
)
def test_as_launchers_say(envs: list[dict[str, str]], node_of: tuple[int, ...], source: str) -> None:
    found = agree([whereabouts(env, rank, "host") for rank, env in enumerate(envs)])
    assert (found.node_of, found.source) == (node_of, source)


def test_hosts_tell_nodes_apart_where_no_launcher_does() -> None:
    found = agree([whereabouts({}, rank, host, nvlink=True) for rank, host in enumerate(("a", "a", "b", "a"))])
    assert found.node_of == found.nvlink_of == (0, 0, 1, 0)


def test_the_configuration_overrides_the_launcher() -> None:
    env = {"GROUP_RANK": "0", "LOCAL_WORLD_SIZE": "4"}
    found = agree([whereabouts(env, rank, "host", ranks_per_node=2) for rank in range(4)])
    assert (found.node_of, found.nvlink_of) == ((0, 0, 1, 1), (0, 1, 2, 3))
    assert found.source == "parallelism.ranks_per_node = 2"


def test_ranks_that_contradict_each_other_are_named() -> None:
    reports = [Whereabouts("number 0", "GROUP_RANK", 2), Whereabouts("number 0", "GROUP_RANK", 2)]
    with pytest.raises(
        ValueError, match=r"ranks 2 do not agree .* rank 2 was told that 2 ranks share its node, but 1 "
    ):
        agree([*reports, Whereabouts("number 1", "GROUP_RANK", 2)])
    with pytest.raises(ValueError, match=r"ranks 0, 1 by GROUP_RANK; ranks 2 by parallelism.ranks_per_node = 1"):
        agree([*reports, whereabouts({}, 2, "host", ranks_per_node=1)])


def _told_otherwise() -> str:
    """Rank 2 was started with another number of ranks on its node."""
    env = {"GROUP_RANK": "0", "LOCAL_WORLD_SIZE": "3" if dist.get_rank() == 2 else "4"}
    with mock.patch.dict(os.environ, env):
        try:
            find_machine(ParallelismSection(), torch.device("cpu"))
        except ValueError as error:
            return str(error)
    return ""


def test_all_ranks_say_the_same_error(ranks: Ranks) -> None:
    said = ranks(_told_otherwise)
    assert len(set(said)) == 1 and "ranks 2 do not agree with the others" in said[0]
