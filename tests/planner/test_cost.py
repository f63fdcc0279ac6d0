"""The cost model by hand, and the profiles of hardware."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from carpool.layout import ExpertLayout
from carpool.layout.topology import Topology
from carpool.planner.machine.cost import CostModel, slot_costs
from carpool.planner.machine.hardware import CPU, DEFAULT, HARDWARE, Hardware, LinkRate, find_hardware, hardware_of
from carpool.replicas.slot_costs import LARGEST, Costs
from carpool.transport import find_transport
from carpool.transport.volume import uniform_ranks_per_token


@pytest.mark.parametrize(("experts", "top_k", "ranks"), [(6, 2, 3), (6, 3, 2), (7, 3, 3), (4, 4, 2), (5, 1, 5)])
def test_uniform_copies_are_the_mean_over_all_choices(experts: int, top_k: int, ranks: int) -> None:
    rank_of = [rank for rank, _ in ExpertLayout.contiguous(experts, ranks).home_of]
    choices = list(itertools.combinations(range(experts), top_k))
    visits = [len({rank_of[expert] for expert in chosen}) for chosen in choices]
    assert uniform_ranks_per_token(experts, top_k, ranks) == pytest.approx(np.mean(visits))


def test_uniform_copies_draw_without_replacement() -> None:
    assert round(uniform_ranks_per_token(64, 8, 4), 2) == 3.66  # with replacement it would be 3.60
    assert uniform_ranks_per_token(16, 4, 1) == 1


def test_links_of_different_kinds_work_at_the_same_time() -> None:
    hardware = replace(DEFAULT, nvlink=LinkRate(100.0, 1.0), node=LinkRate(50.0, 2.0), network=LinkRate(10.0, 3.0))
    cost = CostModel(hidden=1, element_size=1, hardware=hardware)
    rows_WW = np.array([[9, 300, 20, 0], [0, 9, 0, 0], [0, 0, 9, 0], [0, 0, 0, 9]])
    assert cost.ride_seconds(rows_WW, Topology.even(4, 2)) == 4 * max(1 + 300 / 100, 3 + 20 / 10)
    assert cost.ride_seconds(rows_WW, Topology.even(4, 2, nvlink=False)) == 4 * max(2 + 300 / 50, 3 + 20 / 10)
    assert cost.ride_seconds(rows_WW, Topology.even(4, 4)) == 4 * (3 + 320 / 10)
    assert cost.transfer_seconds(rows_WW, Topology.even(4)) == 1 + 320 / 100
    assert cost.transfer_seconds(np.zeros((4, 4)), Topology.even(4)) == 0
    assert cost.ride_seconds(np.ones((1, 1)), Topology.even(1)) == 0
    assert (cost.network_weight(Topology.even(4, 2)), cost.network_weight(Topology.even(4))) == (10, 1)


def test_costs_of_spare_slots() -> None:
    hardware = replace(DEFAULT, nvlink=LinkRate(100.0, 1.0), network=LinkRate(10.0, 3.0), flops=1000.0)
    # A choice takes 2 s: sixteenths of that.
    assert slot_costs(hardware, Topology.even(4), 2000, 300, 5000) == Costs(24, 400)
    assert slot_costs(hardware, Topology.even(4, 2), 2000, 300, 5000) == Costs(240, 4000)
    assert slot_costs(hardware, Topology.even(4), 1e-9, 300, 5000) == Costs(LARGEST["trip"], LARGEST["fetch"])


def test_hops_are_one_after_the_other_and_a_shared_port_carries_its_node() -> None:
    hardware = replace(DEFAULT, nvlink=LinkRate(100.0, 1.0), network=LinkRate(10.0, 3.0))
    rows_WW, topology = np.array([[9, 300, 20, 0], [0, 9, 0, 0], [0, 0, 9, 0], [0, 0, 0, 9]]), Topology.even(4, 2)
    hops = CostModel(hidden=1, element_size=1, hardware=hardware, transport="hierarchical")
    assert hops.ride_seconds(rows_WW, topology) == 4 * ((1 + 300 / 100) + (3 + 20 / 10))
    shared = replace(hops, hardware=replace(hardware, shared_network=True))
    # Rank 1 sends nothing, and the port sends 20 bytes at twice the rate of each of the two.
    assert shared.link_seconds(rows_WW, topology) == {"nvlink": 1 + 300 / 100, "network": 3 + 20 / 20}
    # Alone it is as fast as that one way, and half as fast each way if it receives as much.
    alone = replace(shared, hardware=replace(shared.hardware, network_alone=LinkRate(10.0, 3.0)))
    assert alone.link_seconds(rows_WW, topology)["network"] == 3 + 20 / 20
    rows_WW[2, 0] = 20
    assert shared.link_seconds(rows_WW, topology)["network"] == 3 + 20 / 20
    assert alone.link_seconds(rows_WW, topology)["network"] == 3 + 20 / 10


def test_a_volume_is_timed_verb_by_verb() -> None:
    """Token 0 of rank 0 goes to ranks 2 and 3: two rows over the network, or one, and one on to rank 3."""
    hardware = replace(DEFAULT, nvlink=LinkRate(100.0, 1.0), network=LinkRate(10.0, 3.0))
    topology, rank_TK = Topology.even(4, 2), [np.array([[2, 3]])] + [np.zeros((0, 2), int)] * 3
    for name, network, nvlink in (("dedup", 2, 0), ("hierarchical", 1, 1)):
        volume = find_transport(name).volume(rank_TK, topology, 2, 10, 4)
        seconds = CostModel(hardware=hardware, transport=name).volume_seconds(volume, topology)
        row = 10 * 4
        assert seconds["combine_backward"] == 3 + network * row / 10 + (1 + row / 100 if nvlink else 0), name
        assert seconds["dispatch"] == 3 + network * (row + 16) / 10 + (1 + (row + 16) / 100 if nvlink else 0), name


def test_hops_over_the_same_kind_of_link_are_timed_one_by_one() -> None:
    """Rank 1's row for rank 3 goes up to its leader, across, and down from the other leader."""
    hardware = replace(DEFAULT, nvlink=LinkRate(100.0, 1.0), network=LinkRate(10.0, 3.0))
    topology, rank_TK = Topology.even(4, 2), [np.zeros((0, 1), int)] * 4
    rank_TK[1] = np.array([[3]])
    volume = find_transport("1d").volume(rank_TK, topology, 1, 10, 4)
    assert len(volume.hops) == 3
    seconds = CostModel(hardware=hardware, transport="1d").volume_seconds(volume, topology)
    assert seconds["combine"] == (1 + 40 / 100) + (3 + 40 / 10) + (1 + 40 / 100)


def test_hardware_by_name_and_from_a_file(tmp_path: Path) -> None:
    assert find_hardware("h100") is HARDWARE["H100"] and find_hardware("CPU") is CPU
    measured = replace(CPU, name="mine", host=LinkRate(5e9, 1e-6), disk=LinkRate(1e8, 1e-3), shared_network=True)
    path = tmp_path / "hardware.json"
    path.write_text(json.dumps({"hardware": measured.to_dict(), "links": []}))
    assert find_hardware(str(path)) == measured and measured.host_link.bytes_per_second == 5e9
    with pytest.raises(ValueError, match="hardware 'H1000' is not known; did you mean H100"):
        find_hardware("H1000")
    with pytest.raises(ValueError, match="No such file"):
        find_hardware(str(tmp_path / "other.json"))
    path.write_text("{}")
    with pytest.raises(ValueError, match="'carpool doctor --measure'"):
        find_hardware(str(path))


def test_profiles_by_device_name() -> None:
    h200, h100 = hardware_of("NVIDIA H200"), hardware_of("NVIDIA H100 80GB HBM3")
    assert h200.source.startswith("measured") and h100.source.startswith("datasheet of H100")
    assert h100.rate("nvlink") == h200.rate("nvlink") and h100.peak_flops == h200.peak_flops == 989e12
    for name in ("NVIDIA H100 PCIe", "NVIDIA H100 NVL", "NVIDIA A100-PCIE-40GB", "NVIDIA A100 80GB PCIe"):
        assert hardware_of(name).nvlink is None and hardware_of(name).source.startswith("datasheet"), name
    for name in ("NVIDIA GH200 480GB", "NVIDIA GB300", "NVIDIA H20"):
        assert hardware_of(name).source.startswith("assumed") and hardware_of(name).peak_flops is None, name
    assert hardware_of("NVIDIA A100-SXM4-80GB").flops < h200.flops < hardware_of("NVIDIA B200").flops
    assert hardware_of("cpu") is CPU and CPU.rate("nvlink") == CPU.node
    assert hardware_of("NVIDIA GB200").name == "GB200" and hardware_of("NVIDIA B200").name == "B200"
    other = hardware_of("Voodoo 2")
    assert other.source == "assumed: no rates are known for Voodoo 2" and other.peak_flops is None


def test_profiles_are_plain_json() -> None:
    for profile in HARDWARE.values():
        assert Hardware.from_dict(json.loads(json.dumps(profile.to_dict()))) == profile


def test_the_planner_needs_no_pytorch() -> None:
    heavy = "{'torch', 'transformers', 'triton'} & {*sys.modules}"
    code = f"import sys, carpool.planner.machine.cost, carpool.planner.machine.hardware; print(sorted({heavy}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
