"""The `nvlink` transport on real GPUs: tests/gpu/nvlink_worker.py on every one of them, up to four, or four on one."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from functools import partial

import pytest

from tests.gpu.ranks import RANKS, ROOT, SHARED, check_mode, needs, rank_environment, torchrun
from tests.ranks import free_port

# A rank gives up after 3 s; the rest is for starting the kernel and looking.
PATIENCE, SLACK = 3, 5

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(560)]


check = partial(check_mode, "tests.gpu.nvlink_worker")


@needs(2)
def test_random_rides_bit_by_bit() -> None:
    # Ranks that share a GPU have it in turns.
    cases = 1000 if SHARED else 10000
    line = check("stress", str(cases), seconds=400)
    found = re.search(rf"(\d+) cases on {RANKS} ranks in [\d.]+ s, 0 mismatches", line)
    assert found and int(found[1]) >= cases, line


@needs(3)
def test_two_ranks_bit_by_bit() -> None:
    assert "600 cases on 2 ranks" in check("stress", "600", ranks=2, seconds=300)


@needs(1)
def test_one_rank_bit_by_bit() -> None:
    assert "600 cases on 1 ranks" in check("stress", "600", ranks=1, seconds=300)


@needs(2)
def test_the_layer_never_waits_for_the_device_and_is_the_same_each_time() -> None:
    check("sync")


@needs(2)
def test_backward_needs_nothing_from_the_buffers() -> None:
    check("leases")


@needs(2)
def test_a_cuda_graph_of_plan_dispatch_and_combine() -> None:
    check("graph")


@needs(2)
def test_fp8_loses_half_a_step_at_most() -> None:
    check("fp8")


@needs(2)
def test_an_overflow_is_known_to_all_and_mended_by_growing() -> None:
    check("overflow")


@needs(2)
@pytest.mark.parametrize("how", ["kill", "stop"])
def test_a_missing_rank_is_named_in_time(how: str) -> None:
    """Plain processes: torchrun would end the others as soon as one dies."""
    shared = {"WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.gpu.nvlink_worker", "missing", how],
            cwd=ROOT,
            env=os.environ | shared | rank_environment(rank),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(RANKS)
    ]
    told, deadline = {}, time.monotonic() + 150
    try:
        for rank, process in enumerate(processes):
            if rank != 1:
                told[rank], _ = process.communicate(timeout=max(1.0, deadline - time.monotonic()))
        ended = processes[1].poll()
    finally:
        for process in processes:
            process.kill()  # also ends a process that is stopped
            process.wait(timeout=30)
    assert ended == (-signal.SIGKILL if how == "kill" else None)
    for rank, out in told.items():
        line = re.search(rf"^rank {rank}: RankMissingError ranks \[1\] after ([\d.]+) s: (.*)$", out, re.MULTILINE)
        assert line, out[-3000:]
        print(line[0])
        assert PATIENCE - 0.5 <= float(line[1]) <= PATIENCE + SLACK, line[0]
        assert re.match(r"rank 1 did not arrive at \w+ within 3 s", line[2]), line[0]


@needs(4)
def test_parity_matrix_over_nvlink() -> None:
    out = torchrun(4, "tests.gpu.worker", "nvlink", seconds=520)
    assert " 0 differ from the reference, 0 differ between two runs" in out
