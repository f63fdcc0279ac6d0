"""Sums over layers that nobody waits for: equal to what each layer says of itself."""

from __future__ import annotations

import torch

from carpool.metrics.counters import HostCounts, LayerStats, Traffic
from carpool.metrics.host import ToHost, to_device

RANKS, RANK = 3, 1
CPU = torch.device("cpu")


def layers() -> list[Traffic]:
    """What the host and kernels have counted, in one layer the host alone, in one nothing."""
    generator = torch.Generator().manual_seed(0)
    found = [Traffic(RANKS, RANK) for _ in range(4)]
    for number, one in enumerate(found[:3]):
        one.add("dispatch", [5, 7 + number, 11], 64)
        one.add("plan", [1, 2, 3], 4)
        one.add("combine", (), 0, [9, 8, 7], 128)
        for verb in ("dispatch", "combine", "plan") if number != 1 else ():
            for row_bytes in (32, 48):
                tally = one.tally(verb, row_bytes, row_bytes + 8, CPU)
                tally += torch.randint(100, tally.shape, generator=generator)
    return found


def test_totals_are_those_of_each_layer() -> None:
    totals_LC = Traffic.totals(layers(), CPU, far=[0, 2])
    assert totals_LC[0, -1] > 0
    assert totals_LC.shape == (4, RANKS + 4) and totals_LC.dtype == torch.float64
    for one, (*rows, remote, sent, baseline, crossed) in zip(layers(), totals_LC.tolist(), strict=True):
        # These move what kernels counted to the host, so they come second.
        assert rows == one.rows["dispatch"]
        assert remote == one.remote(one.rows, "dispatch") and sent == one.remote(one.bytes)
        assert baseline == sum(one.baseline.values()) + one.remote(one.bytes, "plan")
        assert crossed == sum(sizes[0] + sizes[2] for sizes in one.bytes.values())


def test_totals_of_the_host_alone() -> None:
    one = Traffic(RANKS, RANK)
    one.add("combine", [1, 2, 3], 10)
    assert Traffic.totals([one], CPU).tolist() == [[0, 0, 0, 0, 40, 0, 0]]
    assert Traffic.totals([one], CPU, far=[2]).tolist() == [[0, 0, 0, 0, 40, 0, 30]]


def test_a_count_that_begins_in_inference_mode_goes_on() -> None:
    one = Traffic(RANKS, RANK)
    with torch.inference_mode():
        one.tally("dispatch", 32, 40, CPU)
    one.tally("dispatch", 32, 40, CPU).add_(1)
    assert one.rows["dispatch"] == [1, 1, 1]


def test_numbers_that_travel() -> None:
    there = to_device([[1, True], [2.5, 2**40]], CPU)
    assert there.dtype == torch.float64
    back = ToHost(there)
    assert back.arrived() and back.read().tolist() == [[1.0, 1.0], [2.5, float(2**40)]]


def test_what_the_host_counts_can_be_counted_once_more() -> None:
    stats, expert_TK = LayerStats(4, 1, 0), torch.tensor([[0, 1], [2, 3], [0, 3]])
    weight_TK = torch.full((3, 2), 0.5)
    stats.count(expert_TK, weight_TK)
    stats.traffic.add("dispatch", [3], 10)
    before = stats.exchange(HostCounts())
    stats.count(expert_TK, weight_TK)
    stats.traffic.add("dispatch", [2], 10)
    with stats.meter.span("dispatch", CPU):
        pass
    captured = stats.exchange(before)
    assert (stats.tokens, captured.tokens) == (3, 3)
    for _ in range(2):
        stats.add(captured)
    assert stats.tokens == 9
    assert stats.traffic.rows["dispatch"] == [3 + 2 * 2] and stats.traffic.bytes["dispatch"] == [70]
    assert len(stats.meter.milliseconds()["dispatch"]) == 2
