"""The planner names no transport, and plans with those from outside by what their classes say."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path

import pytest

import carpool.planner
from carpool.parallel.degrees import Degrees
from carpool.placement.policies import POLICIES
from carpool.placement.solvers import SOLVERS
from carpool.planner.candidate import Candidate
from carpool.planner.machine.hardware import HARDWARE, LinkRate
from carpool.planner.model.routes import Routes
from carpool.planner.search.plan import plan
from carpool.planner.search.space import PLANNERS, Space, read_constraints
from carpool.planner.simulator.simulate import step_on
from carpool.planner.step.lengths import Lengths
from carpool.planner.step.peak import memory_of
from carpool.planner.transports import planned_transports, usable_transports
from carpool.transport import TRANSPORTS
from tests.planner.step_problem import shape
from tests.plugins.node_rows import NodeRows, Streamed

QWEN = shape("qwen3-30b-a3b")
H100 = HARDWARE["H100"]
TWO_NODES = Degrees(1, 16, 1, 16)
pytestmark = pytest.mark.usefixtures("outside_transports")


def test_no_file_of_the_planner_names_what_is_registered() -> None:
    """Strings but docstrings. A kind of link has the name of a transport, and stands once."""
    names = {*TRANSPORTS, *PLANNERS, *POLICIES, *SOLVERS} - {"random"}
    found = []
    for path in sorted(Path(carpool.planner.__path__[0]).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in names:
                found.append((path.name, node.value))
    assert found == [("hardware.py", "nvlink")]


def test_defaults_come_from_the_registry() -> None:
    assert (
        planned_transports() == ("streamed", "nvlink", "hierarchical", "node-rows", "dedup")
        and "alltoall" not in planned_transports()
    )
    assert Candidate(TWO_NODES, 4096, 1).transport == "nvlink"
    assert Space().transports == planned_transports()
    only = read_constraints(Space(), ["transport=node-rows,alltoall"])
    assert set(only.transports) == {"node-rows", "alltoall"}
    with pytest.raises(ValueError, match="did you mean node-rows"):
        read_constraints(Space(), ["transport=node-row"])


@pytest.mark.parametrize(
    ("degrees", "hardware", "per_node", "usable"),
    [
        (Degrees(1, 16), "H100", 8, ["local"]),
        (Degrees(1, 16, 1, 8), "H100", 8, ["nvlink", "alltoall"]),
        (Degrees(1, 16, 1, 8), "A100 PCIe", 8, ["alltoall", "dedup"]),
        (TWO_NODES, "H100", 8, ["alltoall", "dedup", "hierarchical", "node-rows", "streamed"]),
        (TWO_NODES, "A100 PCIe", 8, ["alltoall", "dedup", "hierarchical", "node-rows"]),
        # One rank on each of several nodes has nobody to pass rows on to.
        (TWO_NODES, "A100 PCIe", 1, ["alltoall", "dedup"]),
    ],
)
def test_where_it_is_usable_its_class_says(degrees: Degrees, hardware: str, per_node: int, usable: list[str]) -> None:
    among = ("nvlink", "alltoall", "dedup", "hierarchical", "node-rows", "streamed")
    assert usable_transports(degrees, per_node, HARDWARE[hardware], among) == usable


def test_what_it_sends_costs_and_keeps_its_class_says() -> None:
    counted, streamed = (Candidate(TWO_NODES, 4096, 2, transport=way.name) for way in (NodeRows, Streamed))
    two_hops, one_hop = (replace(counted, transport=name) for name in ("hierarchical", "dedup"))
    rows = {one.transport: Routes().rows(one.transport, QWEN.choice, 16, 8) for one in (counted, two_hops, one_hop)}
    assert rows["node-rows"] == rows["hierarchical"] and rows["node-rows"].between < rows["dedup"].between / 3

    def ride(one: Candidate, hardware: object = H100) -> float:
        piece = Lengths(QWEN, hardware, one, 8).ride("dispatch", "dispatch", "dispatch")  # type: ignore[arg-type]
        assert piece is not None
        return piece.seconds

    # Both hops are under way at once; and kernels that wait for nobody pack nothing.
    assert ride(streamed) < ride(counted) < ride(two_hops)
    pushed = replace(H100, push=LinkRate(H100.rate("node").bytes_per_second / 10, 1e-6))
    assert ride(streamed, pushed) > 2 * ride(streamed) and ride(counted, pushed) == ride(counted)
    assert counted.waits and counted.why_eager == "transport node-rows waits for the host"
    assert not streamed.waits and streamed.captured
    buffers = memory_of(QWEN, streamed).parts["transport"]
    assert buffers == 2 * 16 * 8192 * 2 * QWEN.hidden != memory_of(QWEN, counted).parts["transport"]
    assert step_on(QWEN, H100, counted, 8, 32).spread.one_row_for == "node"
    assert counted.settings()["moe"]["transport"] == "node-rows"


def test_a_search_takes_it_where_it_is_the_best() -> None:
    small = replace(QWEN, layers=QWEN.layers[:4])
    space = read_constraints(Space(), ["ep=16", "pp=1", "tp=1", "cp=1", "schedule=none", "micro_batch=2"])
    found = plan(small, H100, gpus=16, tokens=2**17, sequence_length=4096, space=space)
    assert found.plans[0].candidate.transport == "streamed"
