"""The optimizer's kernel in Triton's interpreter against the plain version: state bit by bit, weights to the last bit
of an update (PyTorch's square root on CPUs is not always rounded to nearest)."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import triton
import triton.language as tl

from carpool.optim import AdamW, update
from carpool.optim import muon as matrices
from carpool.optim import offloaded_state as streamed
from carpool.optim.adamw_reference import DTYPES, LEAST_SCALE, dynamic_map, quantise, thresholds
from carpool.optim.kernel import SIGNED_BOUNDS, UNSIGNED_BOUNDS, _code
from tests.interpreter_rounding import rounding_as_on_a_gpu
from tests.optimizer_problem import groups, masters, muon, parameters, train


@pytest.mark.parametrize("moments", list(DTYPES))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_equals_plain_pytorch(dtype: torch.dtype, moments: str) -> None:
    ended = []
    for kernel in (False, True):
        found = parameters(dtype)
        optimizer = AdamW(groups(found), lr=1e-2, weight_decay=0.01, moments=moments)
        with mock.patch.object(update, "on_gpu", lambda _, kernel=kernel: kernel):
            train(optimizer, found, factor=torch.tensor(0.7), zero_grads=True)
            before = [p.detach().clone() for p in found]
            optimizer.step(factor=torch.tensor(torch.nan))
        assert all(torch.equal(p, old) for p, old in zip(found, before, strict=True)), "NaN: nothing is updated"
        assert all(p.grad is None or not p.grad.any() for p in found)
        ended.append((masters(optimizer, found), [optimizer.state[p] for p in found]))
    (plain, plain_state), (ours, state) = ended
    assert not torch.equal(ours[0], parameters(dtype)[0].detach())
    for p, q, one, other in zip(ours, plain, state, plain_state, strict=True):
        torch.testing.assert_close(p, q, rtol=3e-7, atol=3e-9)
        assert one.keys() == other.keys()
        for name in one.keys() - {"low_bits"}:
            assert torch.equal(one[name], other[name]), name


@pytest.mark.parametrize("moments", ["float32", "bfloat16"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_muons_kernels_equal_plain_pytorch(dtype: torch.dtype, moments: str) -> None:
    """Bit by bit, with Newton–Schulz in bfloat16; a factor that is NaN changes nothing."""
    ended = []
    for kernel in (False, True):
        found = parameters(dtype)
        optimizer = muon(found, moments=moments, nesterov=moments == "float32")
        with rounding_as_on_a_gpu(), mock.patch.object(matrices, "on_gpu", lambda _, kernel=kernel: kernel):
            train(optimizer, found, factor=torch.tensor(0.7), zero_grads=True)
            before = [p.detach().clone() for p in found]
            optimizer.step(factor=torch.tensor(torch.nan))
        assert all(torch.equal(p, old) for p, old in zip(found, before, strict=True))
        assert all(p.grad is None or not p.grad.any() for p in found)
        ended.append((found, [optimizer.state[p] for p in found]))
    for ours, plain in zip(ended[1][0], ended[0][0], strict=True):
        assert torch.equal(ours, plain)
    for ours, plain in zip(ended[1][1], ended[0][1], strict=True):
        assert ours.keys() == plain.keys() and all(torch.equal(ours[name], plain[name]) for name in ours)


def test_blocks_become_zero_as_in_plain_pytorch() -> None:
    ended = []
    for kernel in (False, True):
        parameter = torch.nn.Parameter(torch.ones(2, 2100))
        optimizer = AdamW([parameter], moments="int8")
        with mock.patch.object(update, "on_gpu", lambda _, kernel=kernel: kernel):
            for step in range(2):
                # Squares of the first have no inverse.
                sizes = torch.tensor([[1e-19], [1e-9]])
                parameter.grad = sizes * torch.randn(2, 2100, generator=torch.Generator().manual_seed(step))
                optimizer.step()
        ended.append(optimizer.state[parameter])
    for name, plain in ended[0].items():
        assert torch.equal(plain, ended[1][name]), name
    assert 0 < ended[0]["exp_avg_sq_scale"][0].max() < LEAST_SCALE <= ended[0]["exp_avg_sq_scale"][1].min()


@triton.jit
def _codes(values, codes, BOUNDS: tl.constexpr, SIGNED: tl.constexpr, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(codes + at, _code(tl.load(values + at), BOUNDS, SIGNED))


@pytest.mark.parametrize("signed", [True, False])
def test_codes_are_those_of_plain_pytorch_everywhere(signed: bool) -> None:
    """At every bound, value and power of ten, just beside them, and between. A code is the nearest."""
    values = dynamic_map(signed)
    bounds = (values[:-1] + values[1:]) / 2
    special = torch.cat([bounds, values, thresholds(signed), 10.0 ** -torch.arange(12.0), torch.zeros(1)])
    near = [special, special.nextafter(torch.tensor(2.0)), special.nextafter(torch.tensor(-2.0))]
    found = torch.cat([*near, 10 ** (-9 * torch.rand(3000, generator=torch.Generator().manual_seed(0)))])
    found = torch.cat([found, -found]).clamp(-1, 1) if signed else found.clamp(0, 1)
    found = torch.nn.functional.pad(found, (0, -len(found) % 255)).view(-1, 255)
    # Each block's largest is 1.
    blocks = torch.nn.functional.pad(found, (1, 0), value=1.0)
    values_B = torch.nn.functional.pad(blocks.flatten(), (0, -blocks.numel() % 1024))
    codes = torch.zeros(len(values_B), dtype=torch.int32)
    ends = SIGNED_BOUNDS if signed else UNSIGNED_BOUNDS
    _codes[(len(values_B) // 1024,)](values_B, codes, BOUNDS=ends, SIGNED=signed, SIZE=1024)
    nearest = torch.bucketize(values_B, bounds, right=True).int()
    if not signed:
        # What is not 0 does not become 0.
        codes, nearest = (torch.where(values_B > 0, code, 0) for code in (codes, nearest.clamp(min=1)))
    assert len(codes.unique()) == 256
    between = (values_B.unsqueeze(-1) - bounds).abs().amin(-1) < 1e-6 * values_B.abs()
    assert torch.equal(codes[~between], nearest[~between]) and (codes - nearest).abs().max() <= 1
    theirs, _ = quantise(blocks, signed)
    ours = codes[: blocks.numel()].view(blocks.shape)
    assert torch.equal(ours, theirs.int())


@pytest.mark.parametrize("moments", ["bfloat16", "int8"])
def test_tiles_have_the_bits_of_the_whole(moments: str) -> None:
    """The kernel is told of a buffer as if it held the whole state."""
    ended = []
    on_gpu = [mock.patch.object(module, "on_gpu", lambda _: True) for module in (update, streamed)]
    with on_gpu[0], on_gpu[1], mock.patch.object(streamed, "TILE_BYTES", 20_000):
        for offload in (True, False):
            found = parameters(torch.bfloat16)
            optimizer = AdamW(groups(found), lr=1e-2, moments=moments, offload=offload)
            train(optimizer, found, 2)
            ended.append((found, [optimizer.state[p] for p in found]))
    (ours, state), (whole, whole_state) = ended
    for p, q, one, other in zip(ours, whole, state, whole_state, strict=True):
        assert torch.equal(p, q) and one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)
