"""The parity matrix over meshes: loss, balance loss, norm and every gradient of a step equal one process's.

Cases are those of tests/meshes/cases.py: on 2 and 4 ranks a few in every run of the tests, all of 4 and 8 ranks among
the slow ones. Many cases run in one call of the pool. Each deliberate mistake of tests/meshes/breakages.py must be
noticed.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from carpool.parallel.degrees import Degrees
from tests.meshes.breakages import BREAKAGES, FSDP, TP
from tests.meshes.cases import AXES, FACTORS, Case, cases, meshes
from tests.meshes.parity import measure
from tests.ranks import Ranks

RANKS_IMPORT = ("tests.meshes.parity",)
CP = Degrees(cp=2, ep=2)
# Of float32, on models of two layers.
BOUND = 1e-5
FEW = [
    Case(FSDP, family="qwen3_moe", layout="permuted", spare=2, packing="examples", dense="zero1", rows="resend"),
    Case(TP, family="qwen3_moe", schedule="two-batch", micro_batches=2, hidden="recompute", balance="layer"),
    Case(FSDP, schedule="chunks", recompute="recompute", hidden="offload"),
    Case(CP, family="gpt_oss", packing="examples", dense="zero1"),
    Case(CP, attention="ring", recompute="with rides"),
    Case(CP, family="mixtral", schedule="two-batch", micro_batches=2, packing="off", balance="none"),
    Case(Degrees(pp=2), transport="local", micro_batches=2, packing="off", balance="layer"),
    Case(
        Degrees(pp=2), family="gpt_oss", transport="local", schedule="two-batch", pipeline="DualPipeV", micro_batches=4,
        packing="examples",
    ),
]  # fmt: skip
# Multi-token prediction layers.
FURTHER = [
    Case(FSDP, family="deepseek_v3", depth=2, packing="examples", dense="zero1", micro_batches=2, balance="sequence"),
    Case(CP, family="deepseek_v3", depth=2, packing="examples", balance="sequence"),
    Case(Degrees(pp=2), family="glm4_moe", depth=1, transport="local", micro_batches=2, packing="off", balance="none",
         recompute="recompute"),
]  # fmt: skip
FURTHER_OF_FOUR = [
    Case(Degrees(pp=2, fsdp=2, ep=2), family="deepseek_v3", depth=2, packing="examples", micro_batches=4,
         pipeline="ZBVZeroBubble", recompute="offload", balance="sequence", priority=True),
    Case(Degrees(pp=2, cp=2, ep=2), family="glm4_moe", depth=2, packing="examples", micro_batches=2, balance="none"),
    Case(Degrees(pp=2, fsdp=2, ep=2), family="glm4_moe", depth=1, micro_batches=4, dense="zero1",
         schedule="two-batch", pipeline="DualPipeV", balance="none"),
    Case(Degrees(fsdp=4, ep=2), family="glm4_moe", depth=1, dense="zero1", layout="permuted", balance="none"),
]  # fmt: skip
# Experts of several expert-parallel groups, whole on each of their ranks.
SHARED = [
    Case(Degrees(fsdp=4, ep=2), dense="zero1", family="gpt_oss", layout="permuted", micro_batches=2),
    Case(Degrees(fsdp=2, cp=2, ep=2), dense="zero1", family="qwen3_moe", layout="permuted", recompute="recompute"),
    Case(Degrees(dp_replicate=2, fsdp=2, ep=2), dense="zero1", schedule="two-batch", micro_batches=2),
    Case(Degrees(fsdp=4, etp=2), dense="zero1"),
]  # fmt: skip
# Losses of routers where sequences are divided, in stages, and beside what computes layers again.
ROUTERS = [
    Case(FSDP, packing="examples", dense="zero1", micro_batches=2, balance="sequence"),
    Case(FSDP, family="deepseek_v3", packing="off", recompute="recompute", balance="sequence"),
    Case(TP, family="qwen3_moe", packing="examples", recompute="recompute", micro_batches=2, balance="sequence"),
    Case(TP, sequence="off", micro_batches=4, balance="step"),
    Case(CP, family="mixtral", attention="ring", balance="sequence"),
    Case(CP, family="deepseek_v3", packing="examples", micro_batches=2, balance="sequence"),
    Case(Degrees(pp=2), transport="local", micro_batches=4, packing="off", recompute="recompute", balance="sequence"),
    Case(Degrees(pp=2), transport="local", pipeline="DualPipeV", micro_batches=4, balance="step"),
]  # fmt: skip
ROUTERS_OF_FOUR = [
    Case(Degrees(cp=2, tp=2, ep=4), micro_batches=2, balance="sequence"),
    Case(Degrees(pp=2, tp=2, ep=2), micro_batches=2, packing="examples", balance="sequence"),
    Case(Degrees(fsdp=4, ep=4), transport="alltoall", micro_batches=2, balance="step"),
    Case(Degrees(pp=2, cp=2, ep=2), family="deepseek_v3", micro_batches=2, balance="sequence"),
]
# Rides before reductions, and layers whose activations go to host memory, in stages.
STAGES = [
    Case(mesh, family="qwen3_moe" if schedule == "ZBVZeroBubble" else "olmoe", recompute="offload", micro_batches=4,
         pipeline=schedule, priority=mesh.fsdp > 1)
    for mesh in (Degrees(pp=2, fsdp=2, ep=2), Degrees(pp=2, tp=2, ep=2))
    for schedule in ("1F1B", "ZBVZeroBubble")
]  # fmt: skip
QUICK = ("copies_not_added", "parts_of_sequences_as_sequences", "fsdp_adds", "fsdp_averages", "travelling_rows_added",
         "shared_experts_of_own_tokens")  # fmt: skip


@pytest.fixture(scope="module")
def eight_ranks() -> Iterator[Ranks]:
    pool = Ranks(RANKS_IMPORT, world_size=8)
    yield pool
    pool.stop()


def _check(pool: Ranks, some: list[Case], folder: Path) -> None:
    """All errors of all cases at once, those of a case by what they are of."""
    found = {}
    for case, errors in zip(some, pool(measure, some, str(folder), timeout=1200.0)[0], strict=True):
        if isinstance(errors, str):
            found[str(case)] = errors
        elif wrong := {name: f"{error:.1e}" for name, error in errors.items() if error >= BOUND}:
            found[str(case)] = str(wrong)
    assert not found, "\n".join(f"{case}: {what}" for case, what in found.items())


def test_a_few(two_ranks: Ranks, tmp_path: Path) -> None:
    _check(two_ranks, FEW, tmp_path)


def test_experts_that_several_groups_hold(ranks: Ranks, tmp_path: Path) -> None:
    _check(ranks, SHARED, tmp_path)


def test_losses_of_routers(two_ranks: Ranks, ranks: Ranks, tmp_path: Path) -> None:
    _check(two_ranks, ROUTERS, tmp_path / "two")
    _check(ranks, ROUTERS_OF_FOUR, tmp_path / "four")


def test_further_tokens(two_ranks: Ranks, tmp_path: Path) -> None:
    _check(two_ranks, FURTHER, tmp_path)


@pytest.mark.slow
def test_further_tokens_on_four_ranks(ranks: Ranks, tmp_path: Path) -> None:
    _check(ranks, FURTHER_OF_FOUR, tmp_path)


@pytest.mark.slow
def test_stages_of_two_ranks(ranks: Ranks, tmp_path: Path) -> None:
    _check(ranks, STAGES, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [*meshes(4), *meshes(8)], ids=str)
def test_all(mesh: Degrees, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    pool = request.getfixturevalue("ranks" if mesh.world_size == 4 else "eight_ranks")
    _check(pool, [case for case in cases(mesh.world_size) if case.mesh == mesh], tmp_path)


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in BREAKAGES])
def test_a_mistake_is_noticed(name: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    broken = BREAKAGES[name]
    pool = request.getfixturevalue("two_ranks" if broken.case.mesh.world_size == 2 else "ranks")
    errors = pool(measure, [broken.case], str(tmp_path), name)[0][0]
    assert isinstance(errors, dict), errors
    wrong = [what for what, error in errors.items() if error >= 100 * BOUND]
    assert [what for what in wrong if broken.wrong in what], errors
    assert not [what for what in wrong if broken.right in what.split(".")[0] or broken.right in what], wrong


@pytest.mark.slow
def test_the_matrix_is_large_complete_and_deterministic() -> None:
    every = [*cases(4), *cases(8)]
    assert 500 <= len(every) == len(set(every)) and not any(case.refused for case in every)
    assert cases.__wrapped__(4) == cases(4)
    assert {case.mesh for case in every} == {*meshes(4), *meshes(8)}
    for axis in AXES:
        assert any(case.mesh.size(axis) > 1 for case in every), axis
    for name, values in FACTORS.items():
        assert {getattr(case, name) for case in every} == set(values), name
    met = {pair for case in every for pair in itertools.combinations([(n, getattr(case, n)) for n in FACTORS], 2)}
    assert (("transport", "hierarchical"), ("schedule", "two-batch")) in met
    assert (("dense", "zero1"), ("rows", "offload")) in met
    assert Degrees(fsdp=2, tp=2, ep=4) in meshes(4)
