"""A cluster on one machine: nodes have names, cables are slow and can be cut, and nothing is left behind."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tools.cluster import Cluster, why_not

ROOT = Path(__file__).parents[2]
MISSING = why_not()
pytestmark = pytest.mark.skipif(MISSING is not None, reason=f"no network namespaces here: {MISSING}")

MIB = 2**20
# Sends so many MiB, waits until they have come, and says how many seconds that took.
SEND = """
import socket, sys, time
began = time.perf_counter()
with socket.create_connection((sys.argv[1], 5000), timeout=10) as s:
    s.sendall(bytes(2**20 * int(sys.argv[2])))
    s.shutdown(socket.SHUT_WR)
    assert s.recv(8) == b"done"
print(time.perf_counter() - began)
"""
RECEIVE = """
import socket
with socket.create_server(("0.0.0.0", 5000)) as server:
    print(socket.gethostname(), flush=True)
    while True:
        with server.accept()[0] as s:
            while s.recv(2**20): pass
            s.sendall(b"done")
"""


def test_nodes_have_names_and_slow_cables_that_can_be_cut() -> None:
    with Cluster(2, "80mbit") as cluster:
        server = cluster.start(1, [sys.executable, "-c", RECEIVE], stdout=subprocess.PIPE, text=True)
        assert server.stdout is not None and server.stdout.readline() == "node1\n"

        def send(mib: int, node: int = 0, address: str = cluster.addresses[1]) -> float:
            sender = cluster.start(node, [sys.executable, "-c", SEND, address, str(mib)], stdout=subprocess.PIPE)
            return float(sender.communicate(timeout=30)[0])

        # Inside a node through its loopback, which nobody counts.
        quick = send(4, node=1)
        assert quick < 0.3 and cluster.sent_bytes(1) < 10_000
        # 4 MiB take 0.42 s at 80 Mbit/s.
        before = cluster.sent_bytes(0)
        assert 0.35 < send(4) < 2
        assert 4 * MIB < cluster.sent_bytes(0) - before < 1.1 * 4 * MIB
        cluster.throttle(0, "1gbit")
        cluster.throttle(1, "1gbit")
        assert send(4) < 0.35
        cluster.cut(1)
        stuck = cluster.start(0, [sys.executable, "-c", SEND, cluster.addresses[1], "1"], stderr=subprocess.DEVNULL)
        with pytest.raises(subprocess.TimeoutExpired):
            stuck.wait(0.5)
        names = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
        assert cluster._switch in names
    assert server.poll() is not None and stuck.poll() is not None
    assert cluster._switch not in subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout


# What a rank says of the cluster: by torchrun's word, and by the hosts' names where nobody says more.
WHERE = """
import os, sys, torch, torch.distributed as dist
from carpool.transport.nodes import find_topology
dist.init_process_group("gloo")
found = [find_topology(None)]
os.environ.pop("GROUP_RANK")
found.append(find_topology(None))
if dist.get_rank() == 0:
    print(*(f"{one.node_of} by {one.source}" for one in found), sep="; ")
dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.parametrize(("nodes", "ranks", "node_of"), [(2, 4, (0, 0, 1, 1)), (4, 4, (0, 1, 2, 3))])
def test_topology_is_right_in_it(nodes: int, ranks: int, node_of: tuple[int, ...], tmp_path: Path) -> None:
    (tmp_path / "where.py").write_text(WHERE)
    with Cluster(nodes) as cluster:
        agents = cluster.torchrun(
            [str(tmp_path / "where.py")], ranks, env={"PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, text=True
        )
        said = [agent.communicate(timeout=120)[0] for agent in agents]
    assert said[0].strip() == f"{node_of} by GROUP_RANK; {node_of} by the hosts' names"


@pytest.mark.slow
def test_bytes_between_nodes_are_the_pairs_of_token_and_node(tmp_path: Path) -> None:
    """`benchmarks.nodes` refuses what it counts otherwise; the interfaces have counted the same, and headers."""
    out = tmp_path / "nodes.json"
    command = [sys.executable, "-m", "benchmarks.nodes", "--tokens", "96", "--hidden", "1024", "--repetitions", "1"]
    subprocess.run([*command, "--out", str(out)], cwd=ROOT, check=True, capture_output=True, timeout=200)
    rows = {row["contender"]: row for row in json.loads(out.read_text())["rows"]}
    assert {"alltoall", "dedup", "hierarchical", "hierarchical, placed"} <= set(rows)
    for name in ("hierarchical", "hierarchical, placed"):
        assert rows[name]["rows_between_nodes"] == rows[name]["token_node_pairs"]
        # Two ways forward, two backward; choices and weights beside some, and counts.
        payload = 4 * 1024 * 4 * rows[name]["token_node_pairs"]
        assert payload < rows[name]["counted_bytes"] < 1.05 * payload
    for name in rows:
        assert rows[name]["counted_bytes"] < rows[name]["cable_bytes"] < 1.1 * rows[name]["counted_bytes"], name
    assert rows["hierarchical, placed"]["counted_bytes"] < rows["hierarchical"]["counted_bytes"]
