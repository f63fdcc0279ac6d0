"""What tests/gpu/test_hierarchical_gpu.py runs: `torchrun --nproc-per-node 4 -m tests.gpu.hierarchical_worker MODE`.

    parity    two nodes of two ranks, rows of fixed size between them and nvlink inside: output and every gradient
              against a float64 reference, and twice the same bits; the all-to-alls in steps, too
    sync      forward and backward never wait for the device
    rows      fewer rows between nodes than tokens
    sequences sequences that move: the losses and gradients of those that stay
    slots     what several ranks of a node want crosses once: the same weights, and gradients but for rounding

Which ranks share a node is said (`tests.ranks.mesh`); how they are joined does not matter to what is computed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import carpool
from carpool.transport import TRANSPORTS, HierarchicalOptions
from carpool.transport.hierarchical import FixedSizeDedup, Hierarchical
from carpool.transport.nvlink import NVLink
from tests.gpu.ranks import run_mode
from tests.hf.test_sequence_moves import step
from tests.no_waits import no_waits
from tests.parallel.test_node_slots import SLOTS, filled
from tests.ranks import mesh
from tests.test_parity import Case, differences, run_cases

HIERARCHICAL = [
    Case("hierarchical", layout, 4, top_k=8, schedule=schedule, rows=rows, tokens=tokens)
    for layout, schedule, rows, tokens in [
        ("contiguous", "none", "save", "ragged"),
        ("permuted", "chunks 2", "save", "ragged"),
        ("uneven", "chunks 2 3", "resend", "empty_ranks"),
        ("permuted", "chunks 5", "offload", "ragged"),
    ]
]
HIERARCHICAL += [Case("hierarchical", "contiguous", 4, top_k=8, dtype=torch.bfloat16, schedule="chunks 2")]
# Rows of fixed size are too many for one expert of a token, and rows of 37 elements are not for nvlink.
HIERARCHICAL += [Case("hierarchical", "contiguous", 4, top_k=1), Case("hierarchical", "contiguous", 4, size=(37, 19))]
STEPWISE = [Case(name, "permuted", 4, spare=2, top_k=3, schedule="chunks 2") for name in ("1d", "2d", "2dh")]


def parity() -> tuple[bool, str]:
    cases, found = HIERARCHICAL + STEPWISE, []
    once, twice = run_cases(cases), run_cases(cases)
    for case, one, other in zip(cases, once, twice, strict=True):
        assert case.transport in TRANSPORTS
        same = np.array_equal(one["y"], other["y"]) and all(
            np.array_equal(gradient, other["gradients"][name]) for name, gradient in one["gradients"].items()
        )
        every: list[dict[str, object]] = [{} for _ in range(dist.get_world_size())]
        dist.all_gather_object(every, one)
        wrong = differences(case, every)  # type: ignore[arg-type]
        found += [f"{case}: {wrong}"] if wrong else []
        found += [] if same else [f"{case}: other bits the second time"]
    return not found, f"{len(cases)} cases: {found}"


def slots() -> tuple[bool, str]:
    wrong = []
    for name, held in SLOTS.items():
        (slots, gradient), (same, close), *_ = filled(name)
        real = torch.tensor([e != -1 for e in held[dist.get_rank()]])
        if not torch.equal(slots[real], same[real]) or not torch.allclose(gradient, close):
            wrong.append(name)
    every: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(every, wrong)
    return not any(every), f"{len(SLOTS)} layouts: {every}"


def sequences() -> tuple[bool, str]:
    (stay, *_), (move, _, moved) = step("hierarchical", None), step("hierarchical", 1)
    if stay is None or move is None:
        return moved > 0, ""
    close = all(torch.allclose(move[2][name], gradient, rtol=1e-3, atol=1e-5) for name, gradient in stay[2].items())
    return close and abs(
        stay[0] - move[0]
    ) < 1e-4 and moved > 0, f"{moved} sequences moved, losses {stay[0]}, {move[0]}"


def layer(tokens: int, **options: Any) -> carpool.MoE:
    return carpool.MoE(
        64, 48, 16, 8, ep_mesh=mesh((dist.get_world_size(),), ("ep",))["ep"], transport="hierarchical",
        transport_options=HierarchicalOptions(tokens, first_hop="fixed", **options), device="cuda",
        dtype=torch.bfloat16,
    )  # fmt: skip


def sync() -> tuple[bool, str]:
    tokens = 200
    moe = layer(tokens, step_tokens=tokens)
    x = torch.randn(tokens, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    for _ in range(2):  # buffers are made and kernels compiled
        moe(x).square().sum().backward()
    transport = moe.transport
    assert isinstance(transport, Hierarchical)
    both = isinstance(transport.between, FixedSizeDedup) and isinstance(transport.inside, NVLink)
    torch.cuda.synchronize()
    with no_waits():
        moe(x).square().sum().backward()
    return both and transport.graphable, f"no wait for the device, {moe.core.why}"


def rows() -> tuple[bool, str]:
    """As many rows between nodes as are needed give the bits of one for each token; fewer are noticed."""
    tokens, rank = 200, dist.get_rank()
    generator = torch.Generator().manual_seed(rank)
    expert_TK = torch.rand(tokens, 16, generator=generator).argsort(1)[:, :8].int()
    # Every other token stays on its node.
    expert_TK[::2] = torch.where(expert_TK[::2] // 8 == rank // 2, expert_TK[::2], -1)
    x = torch.randn(tokens, 64, generator=generator).to("cuda", torch.bfloat16).requires_grad_()
    found = []
    for capacity in (tokens, tokens // 2, tokens // 2 - 1):
        torch.manual_seed(0)
        moe, needed = layer(tokens, capacity=capacity), None
        weight_TK = torch.full((tokens, 8), 0.125, device="cuda")
        y = moe(x, routing=carpool.Routing(expert_TK.cuda(), weight_TK))
        (dx,) = torch.autograd.grad(y.float().square().sum(), x)
        try:
            carpool.transport.check_overflow(moe.transport)
        except carpool.transport.BufferOverflowError as error:
            needed = error.needed
        found.append((y, dx, needed))
    (y, dx, _), (same_y, same_dx, enough), (nan, _, needed) = found
    same = torch.equal(y, same_y) and torch.equal(dx, same_dx) and enough is None
    return same and needed == tokens // 2 and bool(nan.isnan().all()), f"same bits: {same}, {needed} rows were needed"


if __name__ == "__main__":
    run_mode({"parity": parity, "sync": sync, "rows": rows, "slots": slots, "sequences": sequences})
