"""The kernel of `assign` on a GPU: equal to plain PyTorch there and on the CPU, and captured in a CUDA graph. What
`SlotFiller` counts of its slots, and adds up for them."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from carpool import Routing, assign
from carpool.layout import expert_layout as layout_module
from carpool.replicas.slots import SlotFiller
from tests.assign_problem import CASES, Case, problem

pytestmark = pytest.mark.gpu

LARGE = [
    Case(64, 4, 8, 8, tokens=8192),
    Case(64, 4, 8, 8, tokens=8191, limited=True, source=2),
    Case(256, 32, 64, 8, tokens=8192, source=31),
    Case(256, 32, 64, 8, tokens=5000, uneven=True, limited=True),
    Case(128, 8, 0, 6, tokens=20001),
    # Four warps to a program, and more than the kernel takes.
    Case(160, 72, 300, 22, tokens=999, limited=True, source=70),
    Case(640, 300, 900, 16, tokens=99, source=70),
]


@pytest.mark.parametrize("case", CASES + LARGE, ids=str)
def test_the_kernel_equals_plain_pytorch(case: Case) -> None:
    expert_TK, layout, source, serving_TW = problem(case)
    want = assign(Routing(expert_TK, None, serving_TW), layout, source)
    routing = Routing(expert_TK.cuda(), None, None if serving_TW is None else serving_TW.cuda())
    with mock.patch.object(layout_module, "on_gpu", lambda _: False):
        plain = assign(routing, layout, source)  # and the tables are there
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = assign(routing, layout, source)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert got.dtype == torch.int32 and torch.equal(got, plain)
    assert torch.equal(got.cpu(), want)


@pytest.mark.parametrize("limited", [False, True])
def test_captured_in_a_graph(limited: bool) -> None:
    case = Case(64, 4, 12, 8, tokens=1003, limited=limited, source=1)
    expert_TK, layout, source, serving_TW = problem(case)
    serving = None if serving_TW is None else serving_TW.cuda()
    routing = Routing(expert_TK.cuda(), None, serving)
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        assign(routing, layout, source)
    stream.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        slot_TK = assign(routing, layout, source)
    for seed in (1, 2):
        other = problem(case, seed)
        routing.expert_TK.copy_(other.expert_TK)
        if serving is not None:
            assert other.serving_TW is not None
            serving.copy_(other.serving_TW)
        graph.replay()
        assert torch.equal(slot_TK.cpu(), assign(Routing(other.expert_TK, None, other.serving_TW), layout, source))


@pytest.mark.parametrize("case", [Case(64, 4, 8, 8, tokens=8192), Case(256, 32, 64, 8, tokens=5000, uneven=True)])
def test_what_slots_serve_is_counted(case: Case) -> None:
    expert_TK, layout, source, _ = problem(case)
    slot_TK = assign(Routing(expert_TK, None), layout, source)
    here, there = SlotFiller(layout, None), SlotFiller(layout, None)
    for _ in range(2):
        here.count(slot_TK)
        there.count(slot_TK.cuda())
    assert here.load_P is not None and there.load_P is not None
    assert torch.equal(there.load_P.cpu(), here.load_P)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_replicas_are_added_as_on_the_cpu(dtype: torch.dtype) -> None:
    filler = SlotFiller(problem(Case(64, 4, 160, 8)).layout, None)
    indices = filler.indices(torch.device("cpu"))
    back = torch.randn(sum(filler.send), 37, 199).to(dtype)
    own = torch.randn(len(indices.summed_slots), 37, 199).to(dtype)
    assert len(indices.order_N) > len(indices.summed_rows) >= 4
    assert torch.equal(filler.add_up(back.cuda(), own.cuda()).cpu(), filler.add_up(back, own))
