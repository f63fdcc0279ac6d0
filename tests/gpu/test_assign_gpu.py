"""The kernel of `assign` on a GPU: equal to plain PyTorch there and on the CPU, and captured in a CUDA graph. What
choices name is counted, and gradients of replicas are added up, as on the CPU."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist

from carpool import assign
from carpool.layout import expert_layout as layout_module
from carpool.replicas.slot_plan import count_choices
from carpool.replicas.slots import SlotFiller
from tests.assign_problem import CASES, Case, problem
from tests.no_waits import no_waits

pytestmark = pytest.mark.gpu

LARGE = [Case(64, 4, 8, tokens=8192), Case(256, 32, 8, tokens=5000, uneven=True), Case(128, 8, 6, tokens=20001)]


@pytest.mark.parametrize("case", CASES + LARGE, ids=str)
def test_the_kernel_equals_plain_pytorch(case: Case) -> None:
    expert_TK, layout = problem(case)
    want, there_TK = assign(expert_TK, layout), expert_TK.cuda()
    with mock.patch.object(layout_module, "on_gpu", lambda _: False):
        plain = assign(there_TK, layout)  # and the table is there
    with no_waits():
        got = assign(there_TK, layout)
    assert got.dtype == torch.int32 and torch.equal(got, plain)
    assert torch.equal(got.cpu(), want)


def test_captured_in_a_graph() -> None:
    case = Case(64, 4, 8, tokens=1003)
    expert_TK, layout = problem(case)
    there_TK = expert_TK.cuda()
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        assign(there_TK, layout)
    stream.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        slot_TK = assign(there_TK, layout)
    for seed in (1, 2):
        other_TK, _ = problem(case, seed)
        there_TK.copy_(other_TK)
        graph.replay()
        assert torch.equal(slot_TK.cpu(), assign(other_TK, layout))


@pytest.mark.parametrize("case", LARGE, ids=str)
def test_choices_are_counted(case: Case) -> None:
    expert_TK, _ = problem(case)
    here, there = (count_choices(one, case.experts) for one in (expert_TK, expert_TK.cuda()))
    assert torch.equal(there.cpu(), here)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_replicas_are_added_as_on_the_cpu(dtype: torch.dtype) -> None:
    homes = [range(first, first + 16) for first in range(0, 64, 16)]
    slots = [[*homes[rank], *homes[rank - 1], *homes[rank - 2]] for rank in range(4)]
    with mock.patch.object(dist, "get_rank", return_value=0):
        filler = SlotFiller(homes, slots, None)  # type: ignore[arg-type]
    indices = filler.indices(torch.device("cpu"))
    back = torch.randn(sum(filler.send), 37, 199).to(dtype)
    own = torch.randn(len(indices.summed_slots), 37, 199).to(dtype)
    assert len(indices.order_N) > len(indices.summed_rows) >= 4
    assert torch.equal(filler.add_up(back.cuda(), own.cuda()).cpu(), filler.add_up(back, own))
