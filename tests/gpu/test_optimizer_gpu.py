"""The optimizer's kernel on a GPU: equal to plain PyTorch there, without waiting for the host, in a CUDA graph, and
fast."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from unittest import mock

import pytest
import torch

from carpool.memory.optimizer import AdamW, update
from carpool.memory.optimizer.moments import DTYPES
from tests.optimizer_problem import gradients, groups, masters, parameters, train

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("moments", list(DTYPES))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_equals_plain_pytorch(dtype: torch.dtype, moments: str) -> None:
    """State bit by bit; weights to the last bit of an update."""
    ended = []
    for kernel in (False, True):
        found = parameters(dtype, "cuda")
        optimizer = AdamW(groups(found), lr=1e-2, moments=moments)
        with mock.patch.object(update, "on_gpu", lambda _, kernel=kernel: kernel):
            train(optimizer, found, factor=torch.tensor(0.7, device="cuda"), zero_grads=True)
        assert all(p.grad is None or not p.grad.any() for p in found)
        ended.append((masters(optimizer, found), [optimizer.state[p] for p in found]))
    (plain, plain_state), (ours, state) = ended
    for p, q, one, other in zip(ours, plain, state, plain_state, strict=True):
        torch.testing.assert_close(p, q, rtol=2e-7, atol=3e-9)
        for name in one.keys() - {"low_bits"}:
            assert torch.equal(one[name], other[name]), name


def test_addresses_that_are_no_multiples_of_16() -> None:
    ended = []
    for shift in (0, 1):
        memory = torch.randn(4, 100_001, generator=torch.Generator().manual_seed(0)).cuda()
        p = torch.nn.Parameter(torch.empty(100_001, device="cuda")[shift:][:100_000].copy_(memory[0, :100_000]))
        optimizer = AdamW([p], lr=0.1)
        for grad in memory[1:]:
            p.grad = torch.empty(100_001, device="cuda")[shift:][:100_000].copy_(grad[:100_000])
            optimizer.step()
        ended.append(p.detach().clone())
    assert torch.equal(*ended)


def test_nothing_waits_for_the_host() -> None:
    found = parameters(torch.bfloat16, "cuda")
    optimizer = AdamW(groups(found), lr=1e-2)
    train(optimizer, found, 1)
    grads = [[grad.bfloat16() for grad in gradients(step, "cuda")] for step in (1, 2)]
    factor = torch.tensor(0.5, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        for of_step in grads:
            for p, grad in zip(found, of_step, strict=True):
                p.grad = grad
            optimizer.param_groups[0]["lr"] *= 0.5
            optimizer.step(factor=factor)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_captured_in_a_graph() -> None:
    """Replays count steps, read the learning rate and the factor anew, and zero the gradients."""
    ended = []
    for graphed in (False, True):
        found = parameters(torch.float32, "cuda")
        rate, factor = torch.tensor(1e-2, device="cuda"), torch.tensor(1.0, device="cuda")
        optimizer = AdamW(found, lr=rate, moments="bfloat16")
        for p in found:
            p.grad = torch.zeros_like(p)
        graph = torch.cuda.CUDAGraph()
        for step in range(5):
            for p, grad in zip(found, gradients(step, "cuda"), strict=True):
                assert p.grad is not None
                p.grad.copy_(grad)
            rate.fill_(1e-2 / (step + 1))
            factor.fill_(0.3 * (step + 1))
            if graphed and step == 1:
                with torch.cuda.graph(graph):
                    optimizer.step(factor=factor, zero_grads=True)
            if graphed and step >= 1:
                graph.replay()
            else:
                optimizer.step(factor=factor, zero_grads=True)
        ended.append([p.detach().clone() for p in found])
        assert all(not p.grad.any() for p in found if p.grad is not None)
        assert optimizer.state[found[0]]["step"] == 5
    assert all(torch.equal(p, q) for p, q in zip(*ended, strict=True))


def test_new_gradients_are_refused_in_a_capture() -> None:
    found = parameters(torch.float32, "cuda")
    optimizer = AdamW(found, lr=torch.tensor(1e-2, device="cuda"))
    train_once = [torch.ones_like(p) for p in found]
    for p, grad in zip(found, train_once, strict=True):
        p.grad = grad
    optimizer.step()
    with pytest.raises(RuntimeError, match="take a step before the capture"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        for p, grad in zip(found, train_once, strict=True):
            p.grad = grad + 1
        optimizer.step()


def test_as_fast_as_torch_fused() -> None:
    """200 M parameters in 300 tensors. benchmarks/optimizer.py has the sizes of a model."""
    sizes = [(1024, 2048)] * 95 + [(2048,)] * 205

    def median_ms(make: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]) -> float:
        found = [torch.nn.Parameter(torch.randn(size, device="cuda")) for size in sizes]
        for p in found:
            p.grad = torch.randn_like(p)
        optimizer, times = make(found), []
        for _ in range(20):
            events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            torch.cuda._sleep(20_000_000)  # the host is ahead
            events[0].record()
            optimizer.step()
            events[1].record()
            torch.cuda.synchronize()
            times.append(events[0].elapsed_time(events[1]))
        return statistics.median(times[5:])

    ours, fused = median_ms(AdamW), median_ms(lambda found: torch.optim.AdamW(found, fused=True))
    print(f"one pass {ours:.2f} ms, torch fused {fused:.2f} ms")
    assert ours <= 1.1 * fused
