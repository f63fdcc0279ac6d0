"""The optimizer's kernel on a GPU: equal to plain PyTorch there, without waiting for the host, in a CUDA graph, and
fast."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from carpool.kernels.capture import capturing
from carpool.optim import AdamW, Moments, update
from carpool.optim import in_backward as consumed
from carpool.optim import muon as matrices
from carpool.optim import offloaded_state as streamed
from carpool.optim.adamw_reference import DTYPES
from tests.no_waits import no_waits
from tests.optimizer_problem import MATRICES, gradients, groups, masters, muon, parameters, train

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
        # With 8-bit moments an update's root and quotient are approximations.
        torch.testing.assert_close(
            p, q, rtol=1e-6 if moments == "int8" else 2e-7, atol=2e-7 if moments == "int8" else 3e-9
        )
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
    with no_waits():
        for of_step in grads:
            for p, grad in zip(found, of_step, strict=True):
                p.grad = grad
            optimizer.param_groups[0]["lr"] *= 0.5
            optimizer.step(factor=factor)


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_muon_in_a_graph_is_eager_muon(dtype: torch.dtype) -> None:
    """Bit by bit, and nothing waits for the host; replays read the learning rate and the factor anew. The kernels
    equal plain PyTorch."""
    ended = []
    for way in ("plain", "eager", "graph"):
        found = parameters(dtype, "cuda")
        rate, factor = torch.tensor(1e-2, device="cuda"), torch.tensor(1.0, device="cuda")
        optimizer, graph = muon(found, rate), torch.cuda.CUDAGraph()
        for p in found:
            p.grad = torch.zeros_like(p)
        for step in range(5):
            for p, grad in zip(found, gradients(step, "cuda"), strict=True):
                assert p.grad is not None
                p.grad.copy_(grad)
            rate.fill_(1e-2 / (step + 1))
            factor.fill_(0.3 * (step + 1))
            if way == "graph" and step == 1:
                with torch.cuda.graph(graph):
                    optimizer.step(factor=factor, zero_grads=True)
            if way == "graph" and step >= 1:
                graph.replay()
                continue
            torch.cuda.set_sync_debug_mode("error" if way == "eager" and step > 0 else "default")
            with mock.patch.object(matrices, "on_gpu", lambda _, way=way: way != "plain"):
                optimizer.step(factor=factor, zero_grads=True)
            torch.cuda.set_sync_debug_mode("default")
        assert all(not p.grad.any() for p in found if p.grad is not None)
        ended.append([p.detach().clone() for p in found])
    plain, eager, graphed = ended
    assert all(torch.equal(p, q) for p, q in zip(eager, graphed, strict=True))
    for number in MATRICES:
        assert torch.equal(plain[number], eager[number]), number


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


@pytest.mark.parametrize("moments", list(DTYPES))
@pytest.mark.parametrize("disk", [False, True])
def test_state_in_host_memory_has_the_same_bits(moments: str, disk: bool, tmp_path: Path) -> None:
    """Through small tiles, so that buffers are used again and again."""
    ended = []
    with mock.patch.object(streamed, "TILE_BYTES", 40_000):
        for offload in (True, False):
            found = parameters(torch.bfloat16, "cuda")
            folder = tmp_path if offload and disk else None
            optimizer = AdamW(groups(found), lr=1e-2, moments=moments, offload=offload, folder=folder)
            train(optimizer, found, 6)
            optimizer.synchronize()
            state = [{name: value.cpu() for name, value in optimizer.state[p].items()} for p in found]
            assert all(optimizer.state[p]["exp_avg"].is_pinned() != disk for p in found if offload and p.numel())
            ended.append((found, state))
    (ours, state), (right, whole) = ended
    for p, q, one, other in zip(ours, right, state, whole, strict=True):
        assert torch.equal(p, q) and all(torch.equal(one[name], other[name]) for name in other)


def test_copies_in_and_out_overlap() -> None:
    """64 M parameters: streaming takes little longer than its copies in one direction, and the host is not waited
    for."""
    p = torch.nn.Parameter(torch.randn(64, 2**20, device="cuda", dtype=torch.bfloat16))
    optimizer = AdamW([p], offload=True)
    p.grad = torch.randn_like(p)
    size = sum(value.nbytes for name, value in optimizer.state[p].items() if name != "step")
    memory = torch.empty(size, dtype=torch.uint8, pin_memory=True), torch.empty(size, dtype=torch.uint8, device="cuda")

    def milliseconds(work: Callable[[], object]) -> float:
        times = []
        for _ in range(6):
            torch.cuda.synchronize()
            events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            events[0].record()
            work()
            optimizer.synchronize()
            events[1].record()
            torch.cuda.synchronize()
            times.append(events[0].elapsed_time(events[1]))
        return statistics.median(times[2:])

    one_way = milliseconds(lambda: memory[1].copy_(memory[0], non_blocking=True))
    both = milliseconds(optimizer.step)
    print(f"{size / 1e9:.2f} GB: in alone {one_way:.1f} ms, in, update and out {both:.1f} ms")
    assert both < 1.7 * one_way


@pytest.mark.parametrize("offload", [False, True])
def test_gradients_consumed_in_a_backward(offload: bool) -> None:
    """The bits of a regular step; autograd's own streams do not get in the way."""
    ended = []
    for consume in (False, True):
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(12))).bfloat16().cuda()
        optimizer = AdamW(model.parameters(), lr=1e-2, moments="int8", offload=offload and consume)
        with mock.patch.object(consumed, "LEAST_ELEMENTS", 1):
            gradients = consumed.ConsumedGradients(model, optimizer) if consume else None
            for step in range(4):
                x = torch.randn(256, 1024, generator=torch.Generator().manual_seed(step)).bfloat16().cuda()
                loss = model(x).square().mean()
                if gradients is not None:
                    gradients.begin(torch.isfinite(loss))
                loss.backward()
                if gradients is not None:
                    gradients.finish()
                else:
                    optimizer.step(factor=torch.ones((), device="cuda"))
                    optimizer.zero_grad()
        ended.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(p, q) for p, q in zip(*ended, strict=True))


@pytest.mark.parametrize("offload", [False, True])
def test_a_capture_that_fails_in_a_backward_that_consumes(offload: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps after it are those of a run without it: no event of the capture is waited for, nothing was updated, and
    random numbers go on."""
    monkeypatch.setattr(streamed, "TILE_BYTES", 2**19)
    ended = []
    for fails in (False, True):
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(6))).bfloat16().cuda()
        optimizer = AdamW(model.parameters(), lr=1e-2, offload=offload)
        consuming = consumed.ConsumedGradients(model, optimizer, max_norm=1e-3)
        x = torch.randn(256, 1024, device="cuda", dtype=torch.bfloat16)

        def forward_and_backward(x: torch.Tensor = x, model: Any = model, consuming: Any = consuming) -> None:
            loss = model(x).square().mean()
            consuming.begin(torch.isfinite(loss))
            loss.backward()

        for number in range(3):
            if fails and number == 1:
                consuming.prepare()
                with (
                    pytest.raises(RuntimeError, match="given up"),
                    consuming.record(),
                    capturing(torch.cuda.CUDAGraph()),
                ):
                    forward_and_backward()
                    raise RuntimeError("given up")
                model.zero_grad()
                consuming.abandon()
            x.copy_(torch.randn_like(x))
            forward_and_backward()
            consuming.finish()
        ended.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(p, q) for p, q in zip(*ended, strict=True))


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("moments", ["float32", "int8"])
def test_gradients_consumed_in_a_captured_backward(
    moments: Moments, offload: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bits of eager steps, clipped by the norm of the step before, with rates that change and a loss that is not
    finite; eager steps between replays change no address that the graph reads. State in host memory comes and goes
    inside the graph, through buffers that are used again and again."""
    monkeypatch.setattr(streamed, "TILE_BYTES", 2**19)
    ended, travelled = [], list[tuple[int, int]]()
    for captured in (False, True):
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(6))).bfloat16().cuda()
        optimizer = AdamW(model.parameters(), moments=moments, offload=offload)
        gradients = consumed.ConsumedGradients(model, optimizer, max_norm=1e-3)
        x, graph = torch.empty(256, 1024, device="cuda", dtype=torch.bfloat16), torch.cuda.CUDAGraph()

        def step(x: torch.Tensor = x, model: Any = model, gradients: Any = gradients) -> None:
            loss = model(x).square().mean()
            gradients.begin(torch.isfinite(loss))
            loss.backward()
            gradients.drain()

        norms = []
        for number in range(8):
            optimizer.param_groups[0]["lr"] = 1e-2 / (1 + number)
            x.copy_(torch.randn(256, 1024, generator=torch.Generator().manual_seed(number)))
            if number == 5:
                x.fill_(torch.inf)
            if captured and number == 2:
                gradients.prepare()
                with gradients.record(), capturing(graph):
                    step()
                gradients.recorded()
            if captured and number not in (0, 1, 4):
                gradients.prepare()
                graph.replay()
                gradients.replayed()
            else:
                other = torch.empty(2**20 * (number + 1), device="cuda")
                step()
                del other
            norms.append(gradients.finish().item())
            assert all(p.grad is None for p in model.parameters())
        travelled.append(optimizer.streamed_bytes)
        ended.append((norms, [p.detach().clone() for p in model.parameters()], optimizer.state_dict()["state"]))
    (norms, weights, state), (theirs, others, other_state) = ended
    assert travelled[0] == travelled[1] and (travelled[0][0] > 0) == offload
    assert norms == pytest.approx(theirs, rel=1e-5, nan_ok=True)
    assert all(torch.equal(p, q) for p, q in zip(weights, others, strict=True))
    assert all(torch.equal(state[i][name], other_state[i][name]) for i in state for name in state[i])
