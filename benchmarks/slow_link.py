"""Two "nodes" on one Linux machine, with a slow link between them: for what only a network shows.

    python benchmarks/slow_link.py --rate 800mbit -- -m benchmarks.chunks --transport dedup --shapes 2048,256,128,8,2

Makes two network namespaces that a pair of virtual interfaces joins, throttled by a token bucket in both directions,
and starts `torchrun` in each, with `--nproc-per-node` ranks of two nodes; what stands behind `--` is its program. Ranks
of one node reach each other through the loopback, those of different nodes through the link. Gloo works in threads of
its own, so a ride can hide behind computation on a CPU as well, as far as there are cores.

Needs root, iproute2, and a kernel with veth and tbf; removes what it made.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

NODES = ("carpool-node0", "carpool-node1")
ADDRESSES = ("10.211.0.1", "10.211.0.2")
LINKS = ("carpool-link0", "carpool-link1")


def run(command: str, check: bool = True) -> None:
    subprocess.run(command.split(), check=check, stderr=None if check else subprocess.DEVNULL)


@contextmanager
def nodes(rate: str, latency: str) -> Iterator[None]:
    """The namespaces and the link between them."""
    for name in NODES:
        run(f"ip netns delete {name}", check=False)
    try:
        for name in NODES:
            run(f"ip netns add {name}")
        run(f"ip link add {LINKS[0]} netns {NODES[0]} type veth peer name {LINKS[1]} netns {NODES[1]}")
        for name, address, link in zip(NODES, ADDRESSES, LINKS, strict=True):
            run(f"ip -n {name} address add {address}/24 dev {link}")
            run(f"ip -n {name} link set {link} up")
            run(f"ip -n {name} link set lo up")
            run(f"tc -n {name} qdisc add dev {link} root tbf rate {rate} burst 256kb latency {latency}")
        yield
    finally:
        for name in NODES:
            run(f"ip netns delete {name}", check=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", default="800mbit", help="of the link, each way, in the words of tc")
    parser.add_argument("--latency", default="400ms", help="longest wait in the bucket's queue, in the words of tc")
    parser.add_argument("--nproc-per-node", type=int, default=1)
    parser.add_argument("program", nargs=argparse.REMAINDER, help="-- and what torchrun is to run")
    args = parser.parse_args()
    program = args.program[1:] if args.program[:1] == ["--"] else args.program
    if not program:
        parser.error("say what to run: -- -m benchmarks.chunks --transport dedup")
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing or os.geteuid() != 0:
        parser.error(f"{' and '.join(missing)} of iproute2 not found" if missing else "network namespaces need root")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # which removes the namespaces
    with nodes(args.rate, args.latency):
        started = []
        for number, (name, link) in enumerate(zip(NODES, LINKS, strict=True)):
            command = ["ip", "netns", "exec", name, sys.executable, "-m", "torch.distributed.run"]
            command += ["--nnodes", "2", "--node-rank", str(number), "--nproc-per-node", str(args.nproc_per_node)]
            command += ["--master-addr", ADDRESSES[0], "--master-port", "29511", *program]
            environment = {**os.environ, "GLOO_SOCKET_IFNAME": link, "OMP_NUM_THREADS": "1"}
            started.append(subprocess.Popen(command, env=environment))
        codes = [process.wait() for process in started]
    sys.exit(max(codes))


if __name__ == "__main__":
    main()
