"""What tests/gpu/test_nvlink_gpu.py runs on every GPU: `torchrun --nproc-per-node 4 -m tests.gpu.nvlink_worker MODE`.

    stress N      N random routings, every row, sum and gradient compared bit by bit (nvlink_rides.py)
    sync          the layer's forward and backward never wait for the device, and are the same each time
    leases        what backward needs is not in the buffers: they are overwritten after the forward
    graph         plan, dispatch and combine in a CUDA graph, replayed with other inputs
    fp8           what FP8 loses is half a step of e4m3, element by element
    overflow      slabs that are too small: all ranks know, sums are NaN, and right again once the buffers have grown
    missing HOW   rank 1 is killed, or stops, while the others wait for it: they raise and name it. Not under torchrun,
                  which would end the others at once: the test starts the processes

Rank 0 prints one line, `MODE: ...`, with "ok" if all ranks found everything right; else the exit code is 1.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import carpool
from carpool.metrics.counters import Traffic
from carpool.transport import Codecs, RankMissingError
from carpool.transport.nvlink import NVLink, NVLinkOptions
from tests.gpu.nvlink_rides import Mismatches, Ride, Shape, gradient_rows, rows_of, scale_rows, scaled
from tests.gpu.nvlink_stress import Cases, from_rank_0, stress, world
from tests.gpu.ranks import run_mode
from tests.no_waits import no_waits

FP8_GROUP = 128  # columns that share a scale

# -- the modes ------------------------------------------------------------------------------------------------------


def sync() -> tuple[bool, str]:
    moe, inputs = layers(1)
    train(moe, *inputs[0])  # buffers are made and kernels compiled
    want = train(moe, *inputs[0])
    train(moe, *inputs[1])  # buffers are full of something else now
    torch.cuda.synchronize()
    with no_waits():
        once = train(moe, *inputs[0])
    train(moe, *inputs[1])
    unequal = [name for again in (once, train(moe, *inputs[0])) for name in differing(again, want)]
    return not unequal, f"no wait for the device; {len(want)} tensors, unequal in reruns: {unequal}"


def leases() -> tuple[bool, str]:
    model, inputs = layers(2)
    train(model, *inputs[0])
    want = train(model, *inputs[0])
    buffers = model[0].transport.buffers
    overwritten = 0

    def overwrite() -> None:
        nonlocal overwritten
        torch.cuda.synchronize()
        dist.barrier()  # nobody is still reading what others wrote
        for lease in buffers._leases:
            # Signals, before the rows, count on from use to use.
            lease.bytes[lease.regions.tokens :].fill_(0xFF)
            overwritten += lease.bytes.numel() - lease.regions.tokens
        torch.cuda.synchronize()
        dist.barrier()

    unequal = differing(train(model, *inputs[0], between=overwrite), want)
    text = f"{overwritten} bytes of {len(buffers._leases)} leases overwritten before the backward, unequal: {unequal}"
    return not unequal and overwritten > 0, text


def graph() -> tuple[bool, str]:
    ranks, rank, device, group = world()
    shape = Shape(ranks, 7168, 8, 64, tokens=128)
    transport = NVLink(group, shape.slots, NVLinkOptions(max_tokens=shape.tokens))
    cases, traffic = Cases(shape, seed=0, full=True), Traffic(ranks, rank)
    first = cases.next()
    x_TH, slot_TK, weight_TK = (t[rank].clone() for t in (first.x_WTH, first.slot_WTK, first.weight_WTK))

    def ride() -> torch.Tensor:
        route = transport.plan(slot_TK, weight_TK, traffic)
        arrivals = transport.dispatch(x_TH, route).wait()
        partial_RH = route.new_partial(shape.hidden, shape.dtype, device)
        scale_rows(rows_of(arrivals, shape.dtype), arrivals.slot_RJ, arrivals.weight_RJ, rank, partial_RH)
        return transport.combine(route, partial_RH).wait()

    for _ in range(3):
        ride()
    torch.cuda.synchronize()
    dist.barrier()
    captured = torch.cuda.CUDAGraph()
    # Other threads (NCCL's watchdog) may look at events meanwhile.
    with torch.cuda.graph(captured, capture_error_mode="thread_local"):
        y_TH = ride()
    wrong = torch.zeros(2, dtype=torch.int64, device=device)
    for _ in range(20):
        case = cases.next()
        x_TH.copy_(case.x_WTH[rank])
        slot_TK.copy_(case.slot_WTK[rank])
        weight_TK.copy_(case.weight_WTK[rank])
        y_TH.fill_(torch.nan)
        captured.replay()
        wrong[0] += (y_TH != scaled(x_TH, slot_TK, weight_TK, shape)).sum()
        wrong[1] += (y_TH != ride()).sum()
    amiss, unequal = wrong.tolist()
    return amiss == unequal == 0, f"20 replays, {amiss} elements wrong, {unequal} unlike eager"


def fp8() -> tuple[bool, str]:
    ranks, rank, device, group = world()
    worst, lines = 0.0, []
    for hidden, dtype in ((1024, torch.bfloat16), (200, torch.bfloat16), (200, torch.float32)):
        shape = Shape(ranks, hidden, 4, 4, dtype, tokens=300)
        options = NVLinkOptions(max_tokens=shape.tokens, codecs=Codecs(dispatch="fp8", combine_backward="fp8"))
        transport, cases, traffic = NVLink(group, shape.slots, options), Cases(shape, seed=hidden), Traffic(ranks, rank)
        # Groups of columns of very different sizes, one of zeros, and sizes within a group down to subnormal codes.
        groups = -(-hidden // FP8_GROUP)
        size = torch.randint(-12, 13, (*cases.rows_WNH.shape[:2], groups), generator=cases.generator, device=device)
        spread = torch.randint(-16, 1, cases.rows_WNH.shape, generator=cases.generator, device=device)
        cases.rows_WNH *= torch.exp2(size.repeat_interleave(FP8_GROUP, 2)[..., :hidden] + spread.float()).to(dtype)
        cases.rows_WNH[:, ::7, :FP8_GROUP] = 0
        from_rank_0(cases.rows_WNH)
        case = cases.next()
        while min(case.sizes) < 2 or not bool((case.slot_WTK >= 0).any(2).any(1).all()):
            case = cases.next()
        found = Mismatches(device)
        ride = Ride(transport, shape, case, traffic, found)
        arrivals = ride.start().wait()
        errors = [step_error(ride, rows_of(arrivals, dtype), case.x_WTH)]
        partial_RH = ride.route.new_partial(hidden, dtype, device).zero_()
        transport.combine(ride.route, partial_RH).wait()
        gradients = transport.dispatch_gradients(ride.dy_TH, ride.route).wait()
        errors.append(step_error(ride, gradient_rows(gradients, ride.num_rows, dtype), case.dy_WTH))
        dx_RH = ride.route.new_partial(hidden, dtype, device).zero_()
        transport.combine_gradients(ride.route, dx_RH, arrivals.weight_RJ).wait()
        worst = max(worst, *(error for error, _ in errors))
        rows, size_sent = sum(traffic.rows["combine_backward"]), sum(traffic.bytes["combine_backward"])
        share = size_sent / max(1, rows * hidden * dtype.itemsize)
        lines.append(f"H {hidden} {str(dtype).removeprefix('torch.')}: {share:.3f} of the bytes, "
                     f"mean relative error {errors[0][1]:.4f} and {errors[1][1]:.4f}")  # fmt: skip
    text = "; ".join(lines) + f"; largest error {worst:.4f} of half a step"
    return worst <= 1.0, text


def step_error(ride: Ride, got_RH: torch.Tensor, want_WTH: torch.Tensor) -> tuple[float, float]:
    """(largest error of an element as a share of what is allowed, mean relative error) of the rows wanted here.

    Allowed is half the distance between neighbours in e4m3, whose largest number, 448, is the largest of a row's group
    of columns; and half a step of what the result is rounded to. Not a number counts as infinite. Rows that stay at
    home are exact."""
    landed_WT = ride.row_WT < ride.num_rows
    got_WTH = got_RH[ride.row_WT.clamp(max=ride.num_rows - 1)].float()
    want_WTH = torch.where(landed_WT[..., None], want_WTH.float(), 0.0)
    hidden = want_WTH.shape[2]
    padded = torch.nn.functional.pad(want_WTH, (0, -hidden % FP8_GROUP)).unflatten(2, (-1, FP8_GROUP))
    scale = (padded.abs().amax(3).clamp(min=1e-30) / 448).repeat_interleave(FP8_GROUP, 2)[..., :hidden]
    # Below 2^-6 the distance does not shrink any more. frexp gives a mantissa in [0.5, 1).
    binade = torch.frexp((want_WTH.abs() / scale).clamp(min=2**-6)).exponent - 1
    allowed = scale * torch.exp2(binade.float() - 4) * (1 + 1e-4)
    if got_RH.dtype == torch.bfloat16:
        allowed += got_WTH.abs() * 2**-8
    error = torch.where(landed_WT[..., None], (got_WTH - want_WTH).abs(), 0.0).nan_to_num(nan=torch.inf)
    relative = error.double().sum() / want_WTH.abs().double().sum().clamp(min=1e-30)
    return float((error / allowed).max()), float(relative)


def overflow() -> tuple[bool, str]:
    ranks, rank, device, group = world()
    sizes = (40, 100, 64, 7)[:ranks]
    needed, small = max(sizes), 64
    shape = Shape(ranks, 1024, 4, 4, tokens=needed)
    transport = NVLink(group, shape.slots, NVLinkOptions(max_tokens=small))
    cases, traffic = Cases(shape, seed=0), Traffic(ranks, rank)
    case = replace(cases.next(), sizes=sizes)
    slot_WTK = torch.arange(shape.top_k, device=device, dtype=torch.int32) * shape.slots % (ranks * shape.slots)
    slot_WTK = slot_WTK + torch.arange(shape.top_k, device=device, dtype=torch.int32) // ranks
    slot_WTK = slot_WTK.repeat(ranks, needed, 1)  # every token goes to every rank
    for other, size in enumerate(sizes):
        slot_WTK[other, size:] = -1
    case = replace(case, slot_WTK=slot_WTK)

    def whole(found: Mismatches) -> Ride:
        ride = Ride(transport, shape, case, traffic, found)
        for _ in range(4):
            ride.step()
        return ride

    before = transport.buffers.overflow()
    ride = whole(Mismatches(device))
    assert ride.y_TH is not None and ride.dx_TH is not None
    poisoned = bool(ride.y_TH.isnan().all()) and bool(ride.dx_TH.isnan().all())
    said = torch.tensor([transport.buffers.overflow()], device=device)
    everybody = [torch.empty_like(said) for _ in range(ranks)]
    dist.all_gather(everybody, said)
    all_said = [int(t) for t in everybody]
    transport.buffers.grow(int(said))
    found = Mismatches(device)
    whole(found)
    after = transport.buffers.overflow()
    right = before == 0 and poisoned and all_said == [needed] * ranks and not found.counts.any() and after == 0
    text = (
        f"before {before}, needed {all_said} (right: {needed}), all NaN: {poisoned}; grown: {found}, overflow {after}"
    )
    return bool(right), text


def missing(how: str) -> tuple[bool, str]:
    """Ends the process. The survivors' own lines are what the test reads; there is nobody left to agree with."""
    ranks, rank, device, group = world()
    shape = Shape(ranks, 1024, 4, 4, tokens=200)
    cases, traffic = Cases(shape, seed=0, full=True), Traffic(ranks, rank)

    def ride(transport: NVLink) -> None:
        case = cases.next()
        route = transport.plan(case.slot_WTK[rank], case.weight_WTK[rank], traffic)
        arrivals = transport.dispatch(case.x_WTH[rank], route).wait()
        partial_RH = route.new_partial(shape.hidden, shape.dtype, device)
        scale_rows(rows_of(arrivals, shape.dtype), arrivals.slot_RJ, arrivals.weight_RJ, rank, partial_RH)
        transport.combine(route, partial_RH).wait()

    ride(NVLink(group, shape.slots, NVLinkOptions(max_tokens=shape.tokens)))  # ranks may compile at different speeds
    torch.cuda.synchronize()
    impatient = NVLinkOptions(max_tokens=shape.tokens, timeout_seconds=3.0)
    transport = NVLink(dist.new_group(list(range(ranks))), shape.slots, impatient)
    for _ in range(2):
        ride(transport)
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda.synchronize()
    if rank == 1:
        time.sleep(1.0)  # the others wait inside the kernel by now
        os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGSTOP)
        time.sleep(600)
    begin = time.monotonic()
    try:
        for _ in range(2):
            ride(transport)
            torch.cuda.synchronize()
        print(f"rank {rank}: nothing raised", flush=True)
    except RankMissingError as error:
        seconds = time.monotonic() - begin
        print(f"rank {rank}: RankMissingError ranks {list(error.ranks)} after {seconds:.1f} s: {error}", flush=True)
    sys.stderr.flush()
    os._exit(0)


# -- a model --------------------------------------------------------------------------------------------------------


def layers(count: int) -> tuple[Any, list[tuple[torch.Tensor, torch.Tensor]]]:
    """(`count` MoE layers in bf16, two inputs with the gradients of their outputs); ranks have unequal tokens."""
    ranks, rank, device, _ = world()
    ep_mesh = init_device_mesh("cuda", (ranks,), mesh_dim_names=("ep",))["ep"] if ranks > 1 else None
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(
        carpool.MoE(
            256, 192, 8 * ranks, 4, ep_mesh=ep_mesh, transport="nvlink", shared_intermediate_size=64,
            router={"aux_loss_coef": 0.01}, device=device, dtype=torch.bfloat16,
        )
        for _ in range(count)
    ))  # fmt: skip
    generator = torch.Generator(device).manual_seed(100 + rank)
    rows = (2, 2, (300, 17, 512, 129)[rank], 256)
    numbers = torch.randn(rows, generator=generator, device=device).to(torch.bfloat16)
    return model, [(numbers[i, 0].clone().requires_grad_(), numbers[i, 1].clone()) for i in range(2)]


def train(
    model: Any, x: torch.Tensor, dy: torch.Tensor, between: Callable[[], None] = lambda: None
) -> dict[str, torch.Tensor]:
    """Output and all gradients of one forward and backward, with `between` called between them."""
    model.zero_grad(set_to_none=True)
    x.grad = None
    y = model(x)
    between()
    loss = (y * dy).sum()
    for layer in model:
        loss = loss + layer.aux_loss
    loss.backward()
    named = {name: p.grad for name, p in model.named_parameters()} | {"x": x.grad, "y": y.detach()}
    return {name: value.clone() for name, value in named.items()}


def differing(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> list[str]:
    """Names of what is not bitwise equal, or not a number."""
    return [name for name in want if not torch.equal(got[name], want[name]) or not bool(want[name].isfinite().all())]


MODES: dict[str, Callable[..., tuple[bool, str]]] = {
    "stress": lambda total: stress(int(total)),
    **{fn.__name__: fn for fn in (sync, leases, graph, fp8, overflow, missing)},
}


if __name__ == "__main__":
    run_mode(MODES)
