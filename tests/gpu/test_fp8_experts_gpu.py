"""FP8 experts on a GPU: the kernel for Hopper, which no interpreter runs, against the one that interpreted tests see.

Both add in the same order, so that no bit differs. PyTorch fills memory that nobody initialised with NaN here.
"""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from carpool.activations import HiddenStates
from carpool.experts import FP8Experts
from carpool.experts.fp8 import fp8_products as fp8_stages
from carpool.experts.fp8.fp8_products import Columns, Quantised
from carpool.experts.pairs import sort_pairs
from carpool.kernels import GROUP
from carpool.kernels.packets import FP8, pack
from tests.experts_problem import ACTIVATIONS, PATTERNS, ExpertProblem, draw_slots
from tests.gpu.ranks import NAN_IN_FRESH_MEMORY
from tests.gpu.test_experts_gpu import routed

pytestmark = NAN_IN_FRESH_MEMORY
TOLERANCE = 0.09  # as in tests/test_fp8_experts.py
KINKED = 0.45


def without_hopper() -> mock._patch[mock.Mock]:
    from carpool.experts.fp8 import fp8_hopper_kernels

    return mock.patch.object(fp8_hopper_kernels, "takes", return_value=False)


def codes(width: int, count: int, bound: int) -> Quantised:
    """Random ones, and NaN past the count."""
    generator = torch.Generator().manual_seed(width)
    code = torch.full((bound, width), 0x7F, dtype=torch.uint8).view(FP8)
    scale = torch.full((bound, width // GROUP), torch.nan)
    code[:count] = torch.randn(count, width, generator=generator).to(FP8)
    scale[:count] = torch.rand(count, width // GROUP, generator=generator)
    return Quantised(code.cuda(), scale.cuda())


@pytest.mark.parametrize("pattern", [*PATTERNS, "many", "skewed"])
def test_products_of_rows_in_order(pattern: str) -> None:
    if pattern in ("many", "skewed"):
        slot_RJ, slots = routed(3000, 3, 5, skewed=pattern == "skewed")
    else:
        slot_RJ, slots = draw_slots(pattern, torch.Generator().manual_seed(1))
    count = int((slot_RJ >= 0).sum())
    pairs = sort_pairs(slot_RJ.cuda(), slots, count + 333)
    for width, height, out in ((256, 128, 100), (128, 384, 384), (1024, 640, 600)):
        x = codes(width, count, len(pairs.order_P))
        weight = torch.randn(slots, height, width, generator=torch.Generator().manual_seed(2)).cuda()
        w = fp8_stages.quantise_weight(weight, Columns(1, height, False), True, False).straight
        assert w is not None
        for dtype in (torch.bfloat16, torch.float16):
            got = fp8_stages.product(x, w, pairs, out, dtype)
            with without_hopper():
                want = fp8_stages.product(x, w, pairs, out, dtype)
            assert torch.equal(got[:count], want[:count]) and got[:count].isfinite().all()
            assert got[count:].isnan().all(), "nothing past the count is written"


@pytest.mark.parametrize("hidden", [16, 208, 1024])
@pytest.mark.parametrize("home_row", [None, 0, 1000], ids=str)
def test_products_of_gathered_packets(hidden: int, home_row: int | None) -> None:
    slot_RJ, slots = routed(3000, 3, 5)
    count = int((slot_RJ >= 0).sum())
    pairs = sort_pairs(slot_RJ.cuda(), slots, count + 333)
    generator = torch.Generator().manual_seed(hidden)
    packets = pack(torch.randn(3000, hidden, generator=generator).bfloat16().cuda())
    data, home = packets, None
    if home_row is not None:
        data, home = packets[:home_row].clone(), packets[home_row:].clone()
        data = data if len(data) else packets.new_empty(1, packets.shape[1])
    rows = HiddenStates(data, packets.shape[1], home=home, home_row=home_row or 0)
    weight = torch.randn(slots, 384, hidden, generator=generator).cuda()
    w = fp8_stages.quantise_weight(weight, Columns(1, 384, False), True, False).straight
    assert w is not None
    got = fp8_stages.gathered_product(rows, hidden, w, pairs, 384, torch.bfloat16)
    with without_hopper():
        want = fp8_stages.gathered_product(rows, hidden, w, pairs, 384, torch.bfloat16)
    assert torch.equal(got[:count], want[:count]) and got[:count].isfinite().all()


@pytest.mark.parametrize("name", list(ACTIVATIONS))
def test_the_whole_computation(name: str) -> None:
    number = list(ACTIVATIONS).index(name)
    sizes = [(208, 136), (384, 256), (144, 392)][number % 3]
    pattern = routed(700, 3, 5, skewed=number % 4 == 1)
    problem = ExpertProblem(pattern, *sizes, ACTIVATIONS[name], number % 2 == 0, torch.bfloat16, number % 4 < 2)
    experts, expected = FP8Experts(problem.function), problem.expected()
    got, again = (problem.run(experts, number % 3 != 1, True, "cuda", may_wait=number == 0) for _ in range(2))
    with without_hopper():
        want = problem.run(experts, number % 3 == 1, True, "cuda", may_wait=True)
    kinked = name.startswith(("relu", "clamped", "gpt-oss")) and "relu2" not in name
    for key, tensor in got.items():
        rows = problem.wanted_R if key in ("partial", "dx") else slice(None)
        assert torch.equal(tensor[rows], want[key][rows]) and torch.equal(tensor[rows], again[key][rows]), key
        ours, theirs = tensor[rows].double(), expected[key][rows].double()
        assert float((ours - theirs).norm()) <= (KINKED if kinked else TOLERANCE) * float(theirs.norm()), key


def test_weights_held_give_the_same() -> None:
    problem = ExpertProblem(routed(700, 3, 5), 256, 128, ACTIVATIONS["SwiGLU"], False, torch.bfloat16)
    experts = FP8Experts(problem.function)
    anew = problem.run(experts, False, False, "cuda")
    with experts.weights_unchanged():
        held = problem.run(experts, False, False, "cuda")
    assert all(torch.equal(anew[name], held[name]) for name in ("dweight", "dup", "ddown"))
