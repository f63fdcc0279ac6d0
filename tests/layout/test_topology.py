"""Which ranks share a node: what launchers say, what the configuration says, and ranks that contradict each other."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from carpool.layout.topology import Topology, Whereabouts, agree, whereabouts
from carpool.train.config.schema import ParallelismSection
from carpool.train.launch.machine import find_machine
from carpool.transport import check_topology
from carpool.transport.nodes import fabric_of
from tests.ranks import Ranks

TWO_NODES = Topology((0, 0, 1, 1), (0, 0, 1, 1))


def test_links_between_ranks() -> None:
    assert [TWO_NODES.link(1, other) for other in range(4)] == ["nvlink", "self", "network", "network"]
    without = Topology.even(4, 2, nvlink=False)
    assert [without.link(1, other) for other in range(4)] == ["node", "self", "network", "network"]
    rack = Topology((0, 0, 1, 1), (0, 0, 0, 0))  # an NVLink domain of several nodes
    assert rack.link(0, 3) == "nvlink" and rack.num_nodes == 2
    assert (rack.ranks_of(1), rack.node_size(0)) == ([2, 3], 2)
    assert {link: int(pairs_WW.sum()) for link, pairs_WW in without.pairs.items()} == {"node": 4, "network": 8}
    assert set(TWO_NODES.pairs) == {"nvlink", "network"} and not Topology.even(1).pairs


def test_ranks_have_a_number_in_their_node() -> None:
    assert Topology.even(6, 3).number_of == (0, 1) * 3
    assert Topology((0, 1, 0, 1, 1), (0, 1, 0, 1, 1)).number_of == (0, 0, 1, 1, 2)


def test_a_group_of_ranks_is_numbered_anew() -> None:
    assert TWO_NODES.of([2, 3]) == Topology((0, 0), (0, 0)) and TWO_NODES.of([1, 2]) == Topology((0, 1), (0, 1))
    assert Topology.from_dict(TWO_NODES.to_dict()) == TWO_NODES


def test_memory_of_peers_is_reached_in_a_node_and_in_an_nvlink_domain() -> None:
    for reached in (Topology.even(4), Topology.even(4, nvlink=False), Topology((0, 0, 1, 1), (0, 0, 0, 0))):
        assert reached.why_no_peer_memory() is None
        check_topology("nvlink", reached)
    # As a dry run asks, which has no ranks.
    with pytest.raises(ValueError, match="'nvlink' cannot be used here: by given rank 0 shares neither a node nor"):
        check_topology("nvlink", TWO_NODES)
    assert TWO_NODES.why_no_peer_memory() == (
        "by given rank 0 shares neither a node nor an NVLink domain with ranks 2, 3"
    )
    # Ranks 1 and 2 are joined, but not by way of rank 0.
    assert "rank 1" in str(Topology((0, 0, 1), (0, 1, 0)).why_no_peer_memory())


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


def test_a_fabric_joins_nodes() -> None:
    """Two racks of two nodes, and a node whose GPUs name no fabric."""
    fabrics = ["a, clique 0", "a, clique 0", "b, clique 0", "b, clique 0", None]
    found = agree([whereabouts({}, r, f"host {r}", nvlink=True, fabric=one) for r, one in enumerate(fabrics)])
    assert (found.node_of, found.nvlink_of) == ((0, 1, 2, 3, 4), (0, 0, 1, 1, 2))


_NVML = """
#include <string.h>
typedef struct { unsigned char cluster[16]; int status; unsigned clique; unsigned char state; } info_t;
int nvmlInit_v2(void) { return 0; }
int nvmlDeviceGetHandleByUUID(const char *name, void **handle) {
  *handle = (void *)name;
  return strncmp(name, "GPU-", 4);
}
int nvmlDeviceGetGpuFabricInfo(void *handle, info_t *info) {
  const char *name = (const char *)handle;
  memset(info, 0, sizeof *info);
  info->cluster[1] = name[4] == 'r' ? 171 : 0; info->clique = 7; info->state = name[5] == '3' ? 3 : 1;
  return 0;
}
"""


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_the_driver_names_the_fabric(tmp_path: Path) -> None:
    """A driver that puts GPU "r3" into a rack, "n3" into a fabric of its node alone, and has not done with "r1"."""
    (tmp_path / "nvml.c").write_text(_NVML)
    library = str(tmp_path / "nvml.so")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, str(tmp_path / "nvml.c")], check=True)

    def fabric(uuid: str, path: str = library) -> str | None:
        with mock.patch("torch.cuda.get_device_properties", lambda device: SimpleNamespace(uuid=uuid)):
            return fabric_of(torch.device("cuda", 0), path)

    assert fabric("r3") == f"fabric 00ab{'00' * 14}, clique 7"
    assert fabric("n3") is fabric("r1") is fabric("r3", "libnot-there.so") is None


def test_hosts_that_are_said_to_be_one_node_are_named() -> None:
    with pytest.raises(ValueError, match=r"ranks 0 and 2 share a node by .*, but their hosts are a and b"):
        agree([whereabouts({}, rank, host, ranks_per_node=4) for rank, host in enumerate("aabb")])


def test_the_configuration_overrides_the_launcher() -> None:
    env = {"GROUP_RANK": "0", "LOCAL_WORLD_SIZE": "4"}
    found = agree([whereabouts(env, rank, "host", ranks_per_node=2) for rank in range(4)])
    assert (found.node_of, found.nvlink_of) == ((0, 0, 1, 1), (0, 1, 2, 3))
    assert found.source == "parallelism.ranks_per_node = 2"
    # As errors name a place.
    assert str(whereabouts(env, 3, "gpu07")) == "node 0 (gpu07)" and str(whereabouts({}, 3, "gpu07")) == "host gpu07"
    assert str(whereabouts(env, 3, "gpu07", ranks_per_node=2)) == "node 1 (gpu07)"


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
