"""A cluster on one Linux machine: nodes that only a slow network joins, for what a single machine does not show.

    python -m tools.cluster --nodes 2 --ranks 4 --rate 1gbit -- -m benchmarks.chunks --shapes 2048,256,128,8,2

    node0 [rank 0, rank 1]  eth0 ---1 Gbit/s--- [ switch ] ---1 Gbit/s--- eth0  node1 [rank 2, rank 3]

Each node is a network namespace with a host's name of its own, and one interface, eth0. Ranks of a node reach each
other through its loopback, those of different nodes through the switch. Every cable is throttled in both directions
by a token bucket, and can be cut. `--ranks` are all; `torchrun` starts them, one agent on each node, and what stands
behind `--` is its program.

Nodes share processors and memory, which a real cluster does not. Gloo works in threads of its own, so a ride can hide
behind computation, as far as there are cores.

Needs root, iproute2, and a kernel with veth, bridge and tbf (`why_not`); removes what it made.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

DEVICE = "eth0"
_COUNT = itertools.count()
_BURST = "128kb"
# The longest wait in a bucket's queue: as much as TCP may have under way, so that nothing is dropped.
_QUEUE = "400ms"


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip() or done.returncode}")
    return done.stdout


def why_not() -> str | None:
    """Why this machine cannot have such a cluster, or None if it can."""
    missing = [tool for tool in ("ip", "tc", "unshare") if shutil.which(tool) is None]
    if missing:
        return f"{', '.join(missing)} not found (packages iproute2 and util-linux)"
    if os.geteuid() != 0:
        return "network namespaces need root"
    try:
        with Cluster(1):
            return None
    except RuntimeError as error:
        return f"the kernel or the container refuses: {error}"


class Cluster:
    """Namespaces and cables, from `with` to its end.

    Args:
        nodes: how many.
        rate: of each cable, each way, in the words of tc.
    """

    def __init__(self, nodes: int, rate: str = "1gbit") -> None:
        self.rate = rate
        name = f"carpool-{os.getpid()}-{next(_COUNT)}"
        self._switch, self._nodes = f"{name}-switch", [f"{name}-node{number}" for number in range(nodes)]
        self.addresses = [f"10.211.0.{number + 1}" for number in range(nodes)]
        self._started: list[subprocess.Popen[Any]] = []

    def __enter__(self) -> Self:
        try:
            self._make()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._remove()

    def _make(self) -> None:
        for name in (self._switch, *self._nodes):
            _run("ip", "netns", "add", name)
            _run("ip", "-n", name, "link", "set", "lo", "up")
        _run("ip", "-n", self._switch, "link", "add", "bridge", "type", "bridge")
        _run("ip", "-n", self._switch, "link", "set", "bridge", "up")
        for number, (name, address) in enumerate(zip(self._nodes, self.addresses, strict=True)):
            port = f"port{number}"
            peer = ("type", "veth", "peer", "name", port, "netns", self._switch)
            _run("ip", "link", "add", DEVICE, "netns", name, *peer)
            _run("ip", "-n", name, "address", "add", f"{address}/24", "dev", DEVICE)
            _run("ip", "-n", name, "link", "set", DEVICE, "up")
            _run("ip", "-n", self._switch, "link", "set", port, "master", "bridge", "up")
            self.throttle(number, self.rate)

    def _remove(self) -> None:
        for process in self._started:
            if process.poll() is None:
                process.kill()
                process.wait()
        for name in (*self._nodes, self._switch):
            subprocess.run(["ip", "netns", "delete", name], stderr=subprocess.DEVNULL)

    def throttle(self, node: int, rate: str) -> None:
        """Give the cable of a node another rate, each way."""
        for name, device in ((self._nodes[node], DEVICE), (self._switch, f"port{node}")):
            bucket = ("tbf", "rate", rate, "burst", _BURST, "latency", _QUEUE)
            _run("tc", "-n", name, "qdisc", "replace", "dev", device, "root", *bucket)

    def cut(self, node: int) -> None:
        """Pull the cable of a node out of the switch: what is sent there is lost, and nobody is told."""
        _run("ip", "-n", self._switch, "link", "set", f"port{node}", "down")

    def sent_bytes(self, node: int) -> int:
        """Bytes that a node has sent through its cable, with the headers of all packets."""
        told = json.loads(_run("ip", "-n", self._nodes[node], "-s", "-j", "link", "show", "dev", DEVICE))
        return int(told[0]["stats64"]["tx"]["bytes"])

    def start(
        self, node: int, command: Sequence[str], env: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[Any]:
        """Start a command on a node. `env`: on top of this process's; `options`: of `subprocess.Popen`."""
        named = 'echo "$0" > /proc/sys/kernel/hostname && exec "$@"'
        words = ["ip", "netns", "exec", self._nodes[node], "unshare", "--uts", "sh", "-c", named, f"node{node}"]
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": DEVICE, "OMP_NUM_THREADS": "1", **(env or {})}
        process = subprocess.Popen([*words, *command], env=environment, **options)
        self._started.append(process)
        return process

    def torchrun(self, program: Sequence[str], ranks: int, **options: Any) -> list[subprocess.Popen[Any]]:
        """Start `ranks` ranks in all of a program on the nodes; one agent for each node. `options`: of `start`.

        Raises:
            ValueError: the ranks cannot be divided so.
        """
        if ranks % len(self._nodes):
            raise ValueError(f"{ranks} ranks cannot be divided evenly among {len(self._nodes)} nodes")
        agent = [sys.executable, "-m", "torch.distributed.run", "--nnodes", str(len(self._nodes))]
        agent += ["--nproc-per-node", str(ranks // len(self._nodes)), "--master-addr", self.addresses[0]]
        agent += ["--master-port", "29511"]
        numbers = range(len(self._nodes))
        return [self.start(node, [*agent, "--node-rank", str(node), *program], **options) for node in numbers]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=4, help="of all nodes")
    parser.add_argument("--rate", default="1gbit", help="of each node's cable, each way, in the words of tc")
    parser.add_argument("program", nargs=argparse.REMAINDER, help="-- and what torchrun is to run")
    args = parser.parse_args()
    program = args.program[1:] if args.program[:1] == ["--"] else args.program
    if not program:
        parser.error("say what to run: -- -m benchmarks.chunks --transport dedup")
    if reason := why_not():
        parser.error(f"no cluster here: {reason}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # which removes the namespaces
    path = os.pathsep.join(filter(None, [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")]))
    with Cluster(args.nodes, args.rate) as cluster:
        codes = [agent.wait() for agent in cluster.torchrun(program, args.ranks, env={"PYTHONPATH": path})]
    sys.exit(max(codes))


if __name__ == "__main__":
    main()
