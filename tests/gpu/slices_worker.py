"""One of two ranks of tests/gpu/test_expert_tensor_gpu.py: `torchrun --nproc-per-node 2 -m tests.gpu.slices_worker`.

Layers whose experts are cut into slices, over two GPUs, against the float64 reference of tests/reference.py: a batch of
two ranks, each transport of one node, with biases and a rank without tokens.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

import carpool
from carpool import ExpertLayout
from tests.gpu.ranks import run_mode
from tests.ranks import mesh
from tests.reference import Problem, Spec, draw_parameters, draw_tokens, rank_loss, solve

HOMES = ExpertLayout.sliced(12, 1, 2)
LAYOUTS = {"sliced": HOMES, "uneven": ExpertLayout((tuple(range(5, 24)), tuple(range(5))), slices=2)}


def worst(transport: str, layout: ExpertLayout, sizes: tuple[int, int], dtype: torch.dtype) -> float:
    """The largest error of outputs and gradients of this rank."""
    spec, rank = Spec(hidden=32, inner=32, bias=True), dist.get_rank()
    generator = torch.Generator().manual_seed(0)
    parameters = draw_parameters(spec, generator, dtype)
    x = [draw_tokens(spec, parameters, size, generator, dtype) for size in sizes]
    projection = [torch.randn(size, spec.hidden, generator=generator) for size in sizes]
    expected = solve(Problem(spec, parameters, x, projection))
    ep = mesh((2,), ("ep",))
    device = ep.device_type
    moe = carpool.MoE(
        spec.hidden, spec.inner, spec.experts, spec.top_k, ep_mesh=ep, layout=layout, transport=transport, bias=True,
        max_tokens=max(sizes), router={"normalize": True}, dtype=dtype,
    )  # fmt: skip
    moe.load_logical_state_dict(moe.logical_state_dict() | {n: p.to(device) for n, p in parameters.items()})
    mine = x[rank].to(device, copy=True).requires_grad_()
    y = moe(mine)
    rank_loss(y.float(), projection[rank].to(device)).backward()
    carpool.reduce_gradients(moe, ep)
    twin = carpool.MoE(
        spec.hidden, spec.inner, spec.experts, spec.top_k, ep_mesh=ep, layout=layout, bias=True, dtype=dtype
    )
    with torch.no_grad():
        for own, other in zip(twin.parameters(), moe.parameters(), strict=True):
            own.copy_(other.grad)
    found = {name: value.double().cpu() for name, value in twin.logical_state_dict().items()}
    found |= {f"x {rank}": mine.grad.double().cpu() / 2, "y": y.detach().double().cpu()}
    want = expected.gradients | {"y": expected.y[rank]}
    pairs = [(found[name], want[name]) for name in found if name in want and want[name].numel()]
    assert len(pairs) >= 5
    floor = 1e-2 * max(float(theirs.abs().max()) for _, theirs in pairs)
    return max(float((ours - theirs).abs().max()) / max(floor, float(theirs.abs().max())) for ours, theirs in pairs)


def parity() -> tuple[bool, str]:
    """Every transport, layout and dtype."""
    wrong, number = [], 0
    for dtype, bound in ((torch.float32, 1e-5), (torch.bfloat16, 4e-2)):
        for transport in ("gather", "alltoall", "dedup", "nvlink"):
            for name, layout in LAYOUTS.items():
                for sizes in ((9, 5), (0, 7)):
                    number += 1
                    if not (error := worst(transport, layout, sizes, dtype)) < bound:
                        wrong.append(f"{transport} {name} {sizes} {dtype}: {error:.1e}")
    return not wrong, f"{number} cases, {len(wrong)} differ from the reference {'; '.join(wrong)}"


if __name__ == "__main__":
    run_mode({"parity": parity})
