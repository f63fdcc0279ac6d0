"""`carpool doctor --measure`: the fit, what predictions read of it, and a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from carpool.bench.hardware.measure_links import fit, slow_nodes
from carpool.bench.hardware.measure_machine import measure, measured_hardware
from carpool.planner.machine.hardware import CPU, HARDWARE, LinkRate, find_hardware
from carpool.train.config import load_config
from tests.ranks import Ranks

SIZES = (1000, 30_000, 1_000_000, 7_000_000)


def test_a_line_is_found() -> None:
    exact = fit("link", [(size, 2e-4 + size / 3e8) for size in SIZES])
    assert exact.rate.latency == pytest.approx(2e-4) and exact.rate.bytes_per_second == pytest.approx(3e8)
    assert exact.residual < 1e-9
    noisy = fit(
        "link", [(size, (2e-4 + size / 3e8) * f) for size, f in zip(SIZES, (1.1, 0.9, 1.05, 0.98), strict=True)]
    )
    assert noisy.rate.latency == pytest.approx(2e-4, rel=0.2)
    assert noisy.rate.bytes_per_second == pytest.approx(3e8, rel=0.05)
    assert 0.03 < noisy.residual < 0.2


def test_no_latency_is_negative() -> None:
    """Small messages that a buffer takes seem to be faster than the link."""
    buffered = fit("link", [(1000, 1e-7), (1_000_000, 0.9e-2), (10_000_000, 1e-1)])
    assert buffered.rate.latency == 0 and buffered.rate.bytes_per_second == pytest.approx(1e8, rel=0.05)


def test_a_slow_node_is_slow_on_both_sides() -> None:
    assert slow_nodes([9.0, 10.0, 11.0, 10.0]) == []
    assert slow_nodes([10.0, 1.0, 1.0, 10.0]) == [2]  # from 1 to 2, and from 2 to 3
    assert slow_nodes([10.0, 1.0, 10.0, 10.0]) == []  # one link, not a node
    assert slow_nodes([1.0, 10.0, 10.0, 1.0]) == [0]
    assert slow_nodes([1.0, 1.2, 10.0]) == [1] and slow_nodes([10.0, 9.0, 11.0]) == []  # two of three links are slow
    assert slow_nodes([1.0, 10.0]) == []


def test_what_is_not_measured_stays_as_it_is_known() -> None:
    fits = [fit(name, [(1000, 1e-3), (2000, 2e-3)]) for name in ("nvlink", "disk, write", "disk, read", "to host")]
    fits += [fit("to device", [(1000, 2e-3), (2000, 4e-3)])]
    known = HARDWARE["H100"]
    found = measured_hardware(known, "NVIDIA H100", fits, 5e12, 2e12, False, {})
    assert (found.flops, found.memory, found.peak_flops) == (5e12, 2e12, known.peak_flops)
    assert found.nvlink == LinkRate(pytest.approx(1e6), pytest.approx(0, abs=1e-9))
    assert found.network == known.network and found.source == f"measured; network: {known.source}"
    assert found.host is not None and found.host.bytes_per_second == pytest.approx(5e5)


def _measure(out: str) -> None:
    measure(load_config(None, ["parallelism.ranks_per_node=2"]), out)


@pytest.mark.slow
def test_four_ranks_on_two_nodes(ranks: Ranks, tmp_path: Path) -> None:
    ranks(_quick)
    ranks(_measure, str(tmp_path / "hardware.json"))
    found = json.loads((tmp_path / "hardware.json").read_text())
    assert [one["name"] for one in found["links"]] == [
        "node", "gathered", "network", "network, alone", "network, alone, both ways", "disk, write", "disk, read",
    ]  # fmt: skip
    assert found["topology"]["node_of"] == [0, 0, 1, 1]
    hardware = find_hardware(str(tmp_path / "hardware.json"))
    assert hardware.flops > 1e6 and hardware.memory is not None and hardware.memory > 1e6
    assert hardware.network.bytes_per_second > 1e6 and hardware.nvlink is None and hardware.peak_flops is None
    assert hardware.network_alone is not None and hardware.network_alone.bytes_per_second > 1e6
    assert {"dense", "experts backward", "attention 128", "optimizer"} < set(hardware.kernels)
    assert hardware.kernels["experts"].seconds(1e9, 1e6) > 0 and hardware.gathered is not None
    assert hardware.source == "measured" and hardware.flops != CPU.flops and not list(tmp_path.glob(".measure*"))


def _quick() -> None:
    """Few sizes and repetitions, in these ranks, which no other test measures in."""
    from carpool.bench.hardware import measure_links as links

    links.SIZES, links.EACH = (2**12, 2**20), 0.0


@pytest.mark.gpu
def test_on_gpus(tmp_path: Path) -> None:
    """`pytest -m gpu tests/bench/test_hardware.py`; on several GPUs links are measured, too."""
    from carpool.bench.hardware.measure_machine import measure_machine

    path = tmp_path / "hardware.json"
    measure_machine(path)
    found = find_hardware(str(path))
    assert json.loads(path.read_text())["seconds"] < 180
    # Any GPU that Carpool knows reaches these, and none ten times the datasheet of a B200.
    assert 5e13 < found.flops < 2e16 and found.memory is not None and 5e11 < found.memory < 8e13
    assert found.host is not None and found.host.bytes_per_second > 2e9
    if torch.cuda.device_count() > 1:
        assert found.source.startswith("measured")
