"""What tests/gpu/test_spare_slots_gpu.py runs on every GPU: `torchrun -m tests.gpu.spare_slots_worker MODE`.

    collectives    layers whose replicas go through peer memory: bit by bit those over PyTorch's collectives, and close
                   to layers without spare slots; the host never waits for the device
    graph          forward and backward of two layers in a CUDA graph, replayed with other inputs: bit by bit as eager
    leases         spare slots are overwritten between forward and backward, which fetches them again

Rank 0 prints one line, `MODE: ...`, with "ok" if all ranks found everything right; else the exit code is 1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from carpool.replicas.slot_plan import Costs
from carpool.ride.balanced import SpareSlotOptions
from carpool.transport.nvlink import NVLink
from tests.gpu.nvlink_worker import differing, layers, train
from tests.gpu.ranks import run_mode
from tests.no_waits import no_waits

LAYERS = 2
# bf16 sums in another order: of a token's ranks, and of an expert's tokens.
CLOSE = 0.05


def balanced() -> tuple[Any, list[tuple[torch.Tensor, torch.Tensor]]]:
    """Layers in which replicas bring every rank to the mean, whatever they cost."""
    model, inputs = layers(LAYERS)
    for layer in model:
        layer.set_spare_slots(SpareSlotOptions(2, limit=1.0, costs=Costs(limit=1000)))
    return model, inputs


def loads(model: Any) -> tuple[bool, str]:
    """Whether replicas were fetched in every layer, and balanced it."""
    found = [layer.core.spare.load() for layer in model]
    text = ", ".join(f"{one.before:.2f} -> {one.after:.2f} by {one.replicas:.1f} replicas" for one in found)
    return all(one.replicas > 0 and one.after < one.before for one in found), text


def collectives() -> tuple[bool, str]:
    plain, inputs = layers(LAYERS)
    without = train(plain, *inputs[0])
    with mock.patch.object(NVLink, "slot_links", lambda *_: None):
        model, inputs = balanced()
        want = train(model, *inputs[0])
    model, inputs = balanced()
    for _ in range(2):  # memory is made and kernels are compiled
        train(model, *inputs[1])
    torch.cuda.synchronize()
    with no_waits():
        got = train(model, *inputs[0])
    unequal = differing(got, want)
    far = [
        name
        for name, value in without.items()
        if float((got[name].float() - value.float()).norm()) > CLOSE * float(value.float().norm()) + 1e-6
    ]
    right, text = loads(model)
    return right and not unequal and not far, f"{text}; unlike collectives: {unequal}, far from none: {far}"


def graph() -> tuple[bool, str]:
    model, inputs = balanced()
    x, dy = (one.detach().clone() for one in inputs[0])
    x.requires_grad_()

    def step() -> dict[str, torch.Tensor]:
        model.zero_grad(set_to_none=True)
        x.grad = None
        y = model(x)
        ((y * dy).sum() + sum(layer.aux_loss for layer in model)).backward()
        return {name: p.grad for name, p in model.named_parameters()} | {"x": x.grad, "y": y.detach()}

    beside = torch.cuda.Stream()
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(beside)
    torch.cuda.synchronize()
    dist.barrier()
    captured = torch.cuda.CUDAGraph()
    # Other threads (NCCL's watchdog) may look at events meanwhile.
    with torch.cuda.graph(captured, capture_error_mode="thread_local"):
        held = step()
    wrong: list[str] = []
    for number in range(8):
        generator = torch.Generator(x.device).manual_seed(1000 * number + dist.get_rank())
        with torch.no_grad():
            x.copy_(torch.randn(x.shape, generator=generator, device=x.device))
            dy.copy_(torch.randn(dy.shape, generator=generator, device=x.device))
        captured.replay()
        got = {name: value.clone() for name, value in held.items()}
        wrong += differing(got, {name: value.clone() for name, value in step().items()})
    right, text = loads(model)
    return right and not wrong, f"8 replays, unlike eager: {wrong}; {text}"


def leases() -> tuple[bool, str]:
    model, inputs = balanced()
    train(model, *inputs[0])
    want = train(model, *inputs[0])
    shared = model[0].transport.buffers.shared
    overwritten = 0

    def overwrite() -> None:
        nonlocal overwritten
        torch.cuda.synchronize()
        dist.barrier()  # nobody is still reading what others wrote
        for (what, *_), several in shared.items():
            for one in several if what == "fetch" else ():
                # Signals, before the slots, count on from use to use.
                start = 2 * model[0].core.spare.links._came_at
                one.bytes[start:].fill_(0)
                overwritten += one.bytes.numel() - start
        torch.cuda.synchronize()
        dist.barrier()

    unequal = differing(train(model, *inputs[0], between=overwrite), want)
    return not unequal and overwritten > 0, f"{overwritten} bytes overwritten before the backward, unequal: {unequal}"


MODES: dict[str, Callable[..., tuple[bool, str]]] = {fn.__name__: fn for fn in (collectives, graph, leases)}


if __name__ == "__main__":
    run_mode(MODES)
