"""The optimizer in plain PyTorch: against PyTorch's own and float64; masters, moments in fewer bits, states; its state
in host memory, in tiles, and memory of files, of which a full disk is told before anything begins."""

from __future__ import annotations

import copy
import ctypes
import gc
import math
import os
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

import pytest
import torch
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from carpool.activations import host_memory as host
from carpool.optim import AdamW
from carpool.optim import offloaded_state as streamed
from carpool.optim.adamw_reference import dequantise, dynamic_map, join, quantise, round_stochastically, split
from carpool.optim.clip import clip_factor, clip_grad_norm, grad_norm
from carpool.optim.offloaded_state import Slab, cut
from carpool_systems.disk import Staging, check_disk, mapped_zeros
from tests.optimizer_problem import SHAPES, gradients, groups, masters, muon, parameters, train
from tests.ranks import WORLD_SIZE, Ranks, mesh

STATE = ("exp_avg", "exp_avg_sq", "step")


def _trained(cls: Any, dtype: torch.dtype, steps: int = 4, **how: Any) -> tuple[Any, list[torch.nn.Parameter]]:
    found = parameters(dtype)
    optimizer = cls(groups(found), lr=1e-2, weight_decay=0.01, **how)
    train(optimizer, found, steps)
    return optimizer, found


def test_it_is_adamw() -> None:
    exact, truth = _trained(torch.optim.AdamW, torch.float64, foreach=False)
    ours, found = _trained(AdamW, torch.float32)
    fused, theirs = _trained(torch.optim.AdamW, torch.float32, fused=True)
    for p, q, right in zip(found, theirs, truth, strict=True):
        torch.testing.assert_close(p.double(), right.double(), rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)
        for name in STATE:
            torch.testing.assert_close(ours.state[p][name], fused.state[q][name], rtol=1e-6, atol=1e-7)
            torch.testing.assert_close(
                ours.state[p][name].double(), exact.state[right][name].double(), rtol=1e-6, atol=1e-7
            )


def test_a_bfloat16_weight_and_its_low_bits_are_any_float32() -> None:
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (100_003,), generator=generator).int()
    ties = (torch.arange(-(2**15), 2**15, 37, dtype=torch.int32) << 16) + 0x8000
    special = torch.tensor([0.0, -0.0, math.inf, -math.inf, 3.4e38, -3.4e38, 1e-45, 1.0]).view(torch.int32)
    values = torch.cat([bits, ties, special]).view(torch.float32)
    weight, low = split(values)
    number = ~values.isnan()
    assert torch.equal(join(weight, low)[number].view(torch.int32), values[number].view(torch.int32))
    assert weight[~number].isnan().all() and join(weight, low)[~number].isnan().all()
    tie = (values.view(torch.int32) & 0xFFFF) == 0x8000
    assert tie.sum() > 1000 and torch.equal(weight[number & ~tie], values[number & ~tie].bfloat16())
    distance = (weight.double() - values.double()).abs()
    nearest = (values.bfloat16().double() - values.double()).abs()
    at = number & tie & values.isfinite() & weight.isfinite() & values.bfloat16().isfinite()
    assert torch.equal(distance[at], nearest[at])


def test_masters_are_those_of_float32_training() -> None:
    """With gradients that are bfloat16 either way, bfloat16 weights are the roundings of what float32 training
    gives."""
    ours, found = _trained(AdamW, torch.bfloat16)
    exact = [torch.nn.Parameter(p.detach().float()) for p in parameters(torch.bfloat16)]
    optimizer = AdamW(groups(exact), lr=1e-2, weight_decay=0.01)
    for step in range(4):
        for i, (p, grad) in enumerate(zip(exact, gradients(step), strict=True)):
            p.grad = None if i == 2 and step == 1 else grad.bfloat16().float()
        for group in optimizer.param_groups:
            group["lr"] *= 0.9
        optimizer.step()
    for p, q, master in zip(found, exact, masters(ours, found), strict=True):
        assert torch.equal(master, q) and torch.equal(p, split(q.detach())[0])
    plain, theirs = _trained(torch.optim.AdamW, torch.bfloat16, foreach=False)
    wrong = [(p.float() - q).abs().max() for p, q in zip(theirs, exact, strict=True) if q.numel()]
    assert plain and max(wrong) > 4e-3, "without masters the weights are others"


def test_the_maps_are_those_of_bitsandbytes() -> None:
    signed, unsigned = dynamic_map(True), dynamic_map(False)
    assert len(signed) == len(unsigned) == 256 and (signed.diff() > 0).all() and (unsigned.diff() > 0).all()
    # The first and last few of `bitsandbytes.functional.create_dynamic_map`.
    torch.testing.assert_close(signed[:2], torch.tensor([-0.9929687, -0.9789063]))
    torch.testing.assert_close(signed[126:130], torch.tensor([-5.5e-7, 0.0, 5.5e-7, 3.25e-6]))
    torch.testing.assert_close(unsigned[:4], torch.tensor([0.0, 3.25e-7, 7.75e-7, 2.125e-6]))
    torch.testing.assert_close(unsigned[-2:], torch.tensor([0.9964844, 1.0]))


@pytest.mark.parametrize("shape", [(3, 512), (5, 300), (2, 7, 255), (0, 256), (4, 1)])
@pytest.mark.parametrize("signed", [True, False])
def test_a_code_is_the_nearest_and_blocks_stay_in_rows(shape: tuple[int, ...], signed: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(shape, generator=generator) * 10.0 ** torch.randint(-5, 5, shape, generator=generator)
    values = values if signed else values.abs()
    codes, scale = quantise(values, signed)
    assert codes.shape == values.shape and scale.shape == (*shape[:-1], -(-shape[-1] // 256))
    got = dequantise(codes, scale, signed)
    each = scale.repeat_interleave(256, dim=-1)[..., : shape[-1]]
    options = (dynamic_map(signed) * each.unsqueeze(-1) - values.unsqueeze(-1)).abs()
    # The smallest positive value of the second moment is kept, and not the nearer 0.
    nearest = options[..., 1:].amin(-1) if not signed else options.amin(-1)
    torch.testing.assert_close(
        (got - values).abs(), nearest, rtol=1e-4, atol=1e-7 * float(each.max() if each.numel() else 0)
    )
    assert signed or (got > 0).all()
    for row in range(shape[0]):
        alone, its_scale = quantise(values[row : row + 1], signed)
        assert torch.equal(alone[0], codes[row]) and torch.equal(its_scale[0], scale[row])


def test_a_block_of_zeros_stays_zero() -> None:
    for signed in (True, False):
        codes, scale = quantise(torch.zeros(2, 300), signed)
        assert not dequantise(codes, scale, signed).any()


@pytest.mark.parametrize("signed", [True, False])
def test_a_block_whose_largest_has_no_inverse_is_zero(signed: bool) -> None:
    """A moment of an expert that nobody chooses decays until float32 has no more exponents."""
    values = torch.zeros(1, 256)
    values[0, :2] = torch.tensor([1e-39, -3e-40 if signed else 3e-40])
    assert not dequantise(*quantise(values, signed), signed).any()
    # As of one that has an inverse.
    values[0, 0] = 2e-38
    got = dequantise(*quantise(values, signed), signed)
    assert got[0, 0] == values[0, 0] and not got[0, 2:].any()


def test_rounding_is_right_on_average() -> None:
    from carpool.optim.adamw_reference import noise

    values = torch.full((200_000,), 1.0) + 0.3 * 2**-7
    means = [
        round_stochastically(values, noise(len(values), step, 3, values.device)).double().mean() for step in (1, 2)
    ]
    assert means[0] != means[1] and all(abs(m - values[0]) < 2e-5 for m in means)

    def after(cls: Any) -> float:
        p = torch.nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
        optimizer = cls([p], lr=1e-4, weight_decay=0.0)
        for _ in range(100):
            p.grad = torch.ones_like(p)
            optimizer.step()
        return float(p.detach())

    assert after(torch.optim.AdamW) == 1.0 and after(AdamW) == pytest.approx(0.99, abs=0.003)


def test_a_second_moment_in_bfloat16_decays() -> None:
    """Rounded to nearest it would stay: 0.999 of it is nearest to itself."""
    p = torch.nn.Parameter(torch.ones(4096))
    optimizer = AdamW([p], moments="bfloat16", lr=0.0)
    for step in range(300):
        p.grad = torch.ones_like(p) if step == 0 else torch.zeros_like(p)
        optimizer.step()
    v = optimizer.state[p]["exp_avg_sq"]
    assert v.dtype == torch.bfloat16 and torch.tensor(0.999).bfloat16() * v[0] == v[0]
    assert float(v.double().mean()) == pytest.approx(1e-3 * 0.999**299, rel=0.01)


@pytest.mark.parametrize("moments", ["bfloat16", "int8"])
def test_lossy_moments_are_near(moments: str) -> None:
    _, right = _trained(AdamW, torch.float32)
    ours, found = _trained(AdamW, torch.float32, moments=moments)
    lossy = 0
    for p, q, start in zip(found, right, parameters(torch.float32), strict=True):
        dtype = ours.state[p]["exp_avg"].dtype
        lossy += dtype != torch.float32
        assert (moments == "bfloat16") == (dtype == torch.bfloat16) or p.numel() < 4096 or dtype == torch.uint8
        moved = (q - start).abs()
        assert p.numel() == 0 or (p - q).abs().median() <= 0.02 * moved.median()
    assert lossy >= 4


def test_a_factor_clips_as_a_pass_over_the_gradients_does() -> None:
    ended = []
    for in_step in (True, False):
        found = parameters(torch.float32)
        optimizer = AdamW(found)
        for step in range(3):
            for p, grad in zip(found, gradients(step), strict=True):
                p.grad = grad * 40
            if in_step:
                norm = grad_norm(found)
                optimizer.step(factor=clip_factor(norm, 1.0))
            else:
                norm = clip_grad_norm(found, 1.0)
                optimizer.step()
            assert norm > 100
        ended.append(found)
    assert all(torch.equal(p, q) for p, q in zip(*ended, strict=True))


def test_a_norm_that_is_not_finite_updates_nothing() -> None:
    optimizer, found = _trained(AdamW, torch.float32)
    before = copy.deepcopy([(p.detach(), optimizer.state[p]) for p in found])
    found[0].grad = torch.full_like(found[0], math.inf)
    optimizer.step(factor=clip_factor(grad_norm(found), math.inf))
    for p, (old, state) in zip(found, before, strict=True):
        assert torch.equal(p, old) and all(torch.equal(optimizer.state[p][k], state[k]) for k in state)


@pytest.mark.parametrize("moments", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_state_of_torch_goes_on(dtype: torch.dtype, moments: str) -> None:
    theirs, found = _trained(torch.optim.AdamW, dtype, fused=True)
    other = [torch.nn.Parameter(p.detach().clone()) for p in found]
    ours = AdamW(groups(other), moments=moments)
    ours.load_state_dict(theirs.state_dict())
    assert [g["lr"] for g in ours.param_groups] == [g["lr"] for g in theirs.param_groups]
    train(theirs, found, 2, first=4)
    train(ours, other, 2, first=4)
    for p, q in zip(found, other, strict=True):
        assert ours.state[q]["step"] == theirs.state[p]["step"]
        bound = 1e-6 if dtype == torch.float32 and moments == "float32" else 0.05
        torch.testing.assert_close(p, q, rtol=bound, atol=bound * 0.1)


def test_a_learning_rate_in_a_tensor_stays_in_it() -> None:
    found = parameters(torch.float32)
    rate = torch.tensor(1e-2)
    ours = AdamW(found, lr=rate)
    other, plain = parameters(torch.float32), 1e-2
    theirs = AdamW(other, lr=plain)
    for step in range(3):
        for p, q, grad in zip(found, other, gradients(step), strict=True):
            p.grad, q.grad = grad, grad
        rate.mul_(0.5)
        theirs.param_groups[0]["lr"] = float(rate)
        ours.step()
        theirs.step()
    assert all(torch.equal(p, q) for p, q in zip(found, other, strict=True))
    ours.load_state_dict(AdamW(found, lr=7.0).state_dict())
    assert ours.param_groups[0]["lr"] is rate and rate == 7


def test_what_a_scheduler_has_added_is_loaded() -> None:
    optimizer, found = AdamW(parameters(torch.float32), lr=1e-2), parameters(torch.float32)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 0.5)
    ours, theirs = AdamW(found), torch.optim.AdamW(found)
    for one in (ours, theirs):
        one.load_state_dict(optimizer.state_dict())
        torch.optim.lr_scheduler.LambdaLR(one, lambda _: 0.5)
    assert ours.param_groups[0]["lr"] == theirs.param_groups[0]["lr"] == 5e-3


@pytest.mark.parametrize("make", [lambda found: AdamW(groups(found)), muon])
def test_a_copy_trains_as_the_original(make: Any) -> None:
    found = parameters(torch.float32)
    optimizer = make(found)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 0.5)
    train(optimizer, found)
    again, other = copy.deepcopy((optimizer, found))
    train(optimizer, found, first=4)
    train(again, other, first=4)
    assert all(torch.equal(p, q) for p, q in zip(found, other, strict=True))
    with pytest.raises(TypeError, match="load state_dict"):
        copy.deepcopy(AdamW(found, offload=True))


def test_states_convert() -> None:
    for source in ("float32", "bfloat16", "int8"):
        optimizer, found = _trained(AdamW, torch.float32, moments=source)
        for target in ("float32", "bfloat16", "int8"):
            other = [torch.nn.Parameter(p.detach().clone()) for p in found]
            resumed = AdamW(groups(other), moments=target)
            resumed.load_state_dict(optimizer.state_dict())
            for p, q in zip(found, other, strict=True):
                a, b = _moment(optimizer.state[p]), _moment(resumed.state[q])
                torch.testing.assert_close(
                    a, b, rtol=0.04 if source != target else 0, atol=0.01 * float(a.abs().max() if a.numel() else 0)
                )


def _moment(state: dict[str, torch.Tensor]) -> torch.Tensor:
    m = state["exp_avg"]
    return dequantise(m, state["exp_avg_scale"], True) if m.dtype == torch.uint8 else m.float()


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match=r"float16 with strides .* torch.optim.AdamW"):
        AdamW([torch.nn.Parameter(torch.ones(3, dtype=torch.float16))])
    with pytest.raises(ValueError, match="contiguous"):
        AdamW([torch.nn.Parameter(torch.ones(3, 4).T)])
    with pytest.raises(ValueError, match="'int4' is not known"):
        AdamW([torch.nn.Parameter(torch.ones(3))], moments="int4")
    masters_of = AdamW([torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))])
    ours = AdamW([torch.nn.Parameter(torch.ones(3))])
    with pytest.raises(ValueError, match="low_bits"):
        ours.load_state_dict(masters_of.state_dict())
    with pytest.raises(ValueError, match="other groups"):
        ours.load_state_dict(AdamW([torch.nn.Parameter(torch.ones(3)) for _ in range(2)]).state_dict())


def _part(tensor: torch.Tensor, like: DTensor) -> torch.Tensor:
    """What this rank holds of a tensor that is the same everywhere."""
    return distribute_tensor(tensor.detach(), like.device_mesh, like.placements, src_data_rank=None).to_local()


def _sharded(dtype: torch.dtype, moments: str) -> list[str]:
    """Where shards of DTensors differ from the parts of what is updated whole."""
    whole, sharded = parameters(dtype), []
    for p in whole:
        placed = distribute_tensor(p.detach(), mesh((WORLD_SIZE,), ("fsdp",)), [Shard(0)], src_data_rank=None)
        sharded.append(torch.nn.Parameter(placed))
    ours, theirs = [AdamW(groups(found), lr=1e-2, moments=moments) for found in (sharded, whole)]
    for step in range(3):
        for p, q, grad in zip(whole, sharded, gradients(step), strict=True):
            p.grad = grad.to(dtype)
            # As tensor parallelism does it with embeddings: the gradient of a shard is whole.
            placements = [Replicate()] if q is sharded[0] else q.placements
            q.grad = distribute_tensor(p.grad, q.device_mesh, placements, src_data_rank=None)
        ours.step()
        theirs.step()
    wrong = []
    for shape, p, q in zip(SHAPES, whole, sharded, strict=True):
        if moments != "bfloat16":  # whose random bits are those of the place in the shard
            wrong += [] if torch.equal(_part(p, q), q.to_local()) else [f"{shape}"]
        for name, value in theirs.state[p].items():
            other = ours.state[q][name]
            same = other.shape == value.shape and other.dtype == value.dtype
            if name == "step":
                same = same and torch.equal(other, value)
            elif moments != "bfloat16":
                same = same and torch.equal(other.to_local(), _part(value, q))
            wrong += [] if same else [f"{name} of {shape}"]
    return wrong


@pytest.mark.parametrize("moments", ["float32", "bfloat16", "int8"])
def test_shards_are_updated_as_the_whole(ranks: Ranks, moments: str) -> None:
    assert ranks(_sharded, torch.bfloat16, moments) == [[]] * WORLD_SIZE


DTYPES = [torch.float32, torch.bfloat16]
MOMENTS = ["float32", "bfloat16", "int8"]


def assert_same(ours: AdamW, found: list[torch.nn.Parameter], theirs: AdamW, right: list[torch.nn.Parameter]) -> None:
    for p, q in zip(found, right, strict=True):
        assert torch.equal(p, q)
        assert ours.state[p].keys() == theirs.state[q].keys()
        for name, value in ours.state[p].items():
            assert torch.equal(value, theirs.state[q][name]), name


@pytest.mark.parametrize("tile_bytes", [3000, 40_000, 2**26])
@pytest.mark.parametrize("moments", MOMENTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_tiles_have_the_bits_of_the_whole(dtype: torch.dtype, moments: str, tile_bytes: int, tmp_path: Path) -> None:
    ended = []
    with mock.patch.object(streamed, "TILE_BYTES", tile_bytes):
        for offload, folder in ((True, tmp_path), (True, None), (False, None)):
            found = parameters(dtype)
            optimizer = AdamW(
                groups(found), lr=1e-2, weight_decay=0.01, moments=moments, offload=offload, folder=folder
            )
            train(optimizer, found, factor=torch.tensor(0.7), zero_grads=True)
            assert all(p.grad is None or not p.grad.any() for p in found)
            optimizer.synchronize()
            before = copy.deepcopy(masters(optimizer, found))
            optimizer.step(factor=torch.tensor(torch.nan))
            optimizer.synchronize()
            assert all(torch.equal(p, q) for p, q in zip(masters(optimizer, found), before, strict=True))
            ended.append((optimizer, found))
    (disk, written), (ours, found), (theirs, right) = ended
    disk.synchronize()
    assert disk.disk_bytes[0] >= disk.streamed_bytes[0] and disk.disk_bytes[1] == disk.streamed_bytes[1] > 0
    assert ours.disk_bytes == (0, 0)
    assert_same(disk, written, theirs, right)
    assert_same(ours, found, theirs, right)


@pytest.mark.parametrize("offload", [False, True])
def test_a_step_in_parts_is_a_step(offload: bool) -> None:
    """In the order of a backward; a parameter without a gradient has taken no step."""
    right = parameters(torch.bfloat16)
    theirs = AdamW(groups(right), lr=1e-2, moments="bfloat16")
    train(theirs, right, 3)
    found = parameters(torch.bfloat16)
    ours = AdamW(groups(found), lr=1e-2, moments="bfloat16", offload=offload)
    factor = torch.tensor(1.0)
    for step in range(3):
        for group in ours.param_groups:
            group["lr"] *= 0.9
        ours.begin(factor)
        for i in reversed(range(len(found))):
            if i == 2 and step == 1:
                continue
            found[i].grad = gradients(step)[i].to(torch.bfloat16)
            ours.update([found[i]], factor)
            found[i].grad = None
        ours.finish(factor)
    assert_same(ours, found, theirs, right)
    assert ours.state[found[2]]["step"] == 2 and ours.state[found[0]]["step"] == 3


def test_a_step_in_parts_whose_factor_is_nan_is_none() -> None:
    found = parameters(torch.float32)
    optimizer = AdamW(found, offload=True)
    nothing = torch.tensor(torch.nan)
    optimizer.begin(nothing)
    found[0].grad = torch.ones_like(found[0])
    optimizer.update([found[0]], nothing)
    optimizer.finish(nothing)
    assert torch.equal(found[0], parameters(torch.float32)[0])
    assert all(optimizer.state[p]["step"] == 0 for p in found)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("moments", MOMENTS)
def test_a_state_goes_from_the_device_to_the_host_and_back(moments: str, dtype: torch.dtype) -> None:
    found = parameters(dtype)
    optimizer = AdamW(groups(found), lr=1e-2, moments=moments)
    train(optimizer, found, 2)
    for offload in (True, False):
        other = [torch.nn.Parameter(p.detach().clone()) for p in found]
        moved = AdamW(groups(other), moments=moments, offload=offload)
        moved.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        train(optimizer, found, 1, first=2)
        train(moved, other, 1, first=2)
        assert_same(moved, other, optimizer, found)
        optimizer, found = moved, other


@pytest.mark.parametrize("moments", [torch.float32, torch.uint8])
@pytest.mark.parametrize("tile_bytes", [1, 5000, 10**9])
def test_tiles_cover_each_block_once(moments: torch.dtype, tile_bytes: int) -> None:
    shapes = [torch.Size(shape) for shape in SHAPES if moments == torch.float32 or len(shape) > 1]
    slab = Slab(shapes, True, moments, torch.device("cpu"))
    tiles = list(cut([(slab, i) for i in range(len(shapes))], range(len(shapes)), tile_bytes))
    seen: dict[int, list[int]] = {}
    for tile in tiles:
        for segment in tile.segments:
            seen.setdefault(segment.number, []).extend(range(segment.start, segment.end))
            assert segment.start % (segment.place.width if moments == torch.uint8 else 256) == 0
            size = (segment.end - segment.start) * slab.bytes_per_element
            assert len(tile.segments) == 1 or size <= tile_bytes
    assert {i: list(range(shape.numel())) for i, shape in enumerate(shapes) if shape.numel()} == seen
    assert (len(tiles) == 1) == (tile_bytes == 10**9)


def test_memory_is_registered_at_its_size_and_forgotten_before_it_goes() -> None:
    calls = []

    class Cuda:
        def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
            calls.append((address, size))
            return 0

        def cudaHostUnregister(self, address: int) -> None:
            calls.append((address, ctypes.string_at(address + 10, 2)))

    with mock.patch.object(torch.cuda, "cudart", Cuda):
        memory = host.host_zeros((100, 1001), torch.bfloat16, torch.device("cuda"))
    assert memory.shape == (100, 1001) and not memory.any()
    address = memory.data_ptr()
    part = memory.view(-1)[5:7].fill_(1)
    del memory
    gc.collect()
    assert calls == [(address, 200_200)]
    del part
    gc.collect()
    assert calls[1:] == [(address, b"\x80\x3f")]


def test_host_memory_that_does_not_suffice_is_refused() -> None:
    host.check_host_memory(10 * 2**30, "moments", ranks=4, free=50 * 2**30)
    with pytest.raises(ValueError, match=r"moments of 5 ranks .* need 50.0 GiB of host memory, and 50.0 GiB are free"):
        host.check_host_memory(10 * 2**30, "moments", ranks=5, free=50 * 2**30)
    refusing = mock.Mock(return_value=mock.Mock(cudaHostRegister=lambda *_: 2))
    message = r"CUDA cannot lock 0.0 GiB of host memory \(error 2\): raise the limit"
    with mock.patch.object(torch.cuda, "cudart", refusing), pytest.raises(RuntimeError, match=message):
        host.host_zeros((10,), torch.float32, torch.device("cuda"))


def test_a_container_may_have_less_than_its_machine(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 100 kB\nMemAvailable:     8000 kB\n")
    for name, text in {
        "memory.max": "3000000",
        "memory.current": "1500000",
        "memory.stat": "inactive_file 500000",
    }.items():
        (tmp_path / name).write_text(text)
    with mock.patch.object(host, "_MEMINFO", tmp_path / "meminfo"):
        with mock.patch.object(host, "_CGROUP", tmp_path):
            assert host.free_host_memory() == 2_000_000
        with mock.patch.object(host, "_CGROUP", tmp_path / "none"):
            assert host.free_host_memory() == 8_192_000
    with mock.patch.object(host, "_MEMINFO", tmp_path / "none"), mock.patch.object(host, "_CGROUP", tmp_path / "none"):
        assert host.free_host_memory() is None


def test_a_capture_counts_what_each_replay_copies(tmp_path: Path) -> None:
    """What is copied in a capture counts when it is replayed. (What it computes: tests/gpu/test_optimizer_gpu.py.)"""
    found = parameters(torch.bfloat16)
    optimizer = AdamW(groups(found), lr=1e-2, offload=True)

    def step() -> None:
        optimizer.begin()
        for parameter, grad in zip(found, gradients(0), strict=True):
            parameter.grad = grad.to(torch.bfloat16)
        optimizer.update(found)

    step()
    optimizer.finish()
    once = optimizer.streamed_bytes
    optimizer.prepare()
    with optimizer.record():
        step()
    assert optimizer.streamed_bytes == once and once[0] == once[1] > 0
    for times in (2, 3):
        optimizer.replayed(found)
        assert optimizer.streamed_bytes == (times * once[0], times * once[1])
    on_disk = AdamW(parameters(torch.bfloat16), offload=True, folder=tmp_path)
    with pytest.raises(ValueError, match="state from files cannot be captured"), on_disk.record():
        pass


def test_staging_gives_what_was_written(tmp_path: Path) -> None:
    """There and back over five layers, as a forward and a backward, more than there are buffers; and what was read
    ahead is written to."""
    layers = [[mapped_zeros(tmp_path, (3, 5 + i), torch.bfloat16), mapped_zeros(tmp_path, (7,), torch.float32)]
              for i in range(5)]  # fmt: skip
    assert not list(tmp_path.iterdir())
    staging, right = Staging(torch.device("cpu")), torch.zeros(5)
    for step in range(3):
        for number in (0, 1, 2, 3, 4, 3, 2, 1):
            values = staging.take(number, layers[number])
            assert [value.shape for value in values] == [(3, 5 + number), (7,)]
            assert all(value.eq(right[number]).all() for value in values), (step, number)
            if (step + number) % 2:
                for value in values:
                    value += 1
                right[number] += 1
                staging.give(number, None)
            else:
                staging.release(number, None)
        # Layer 0 has been read ahead.
        for part in (0, 1):
            staging.put((0, part), [layers[0][part]])[0].fill_(9)
            staging.give((0, part), None)
        right[0] = 9
    staging.flush()
    assert all(part.eq(right[i]).all() for i, layer in enumerate(layers) for part in layer)
    # Each was read ahead from the second step on, and little was read in vain.
    read = sum(part.nbytes for number in (0, 1, 2, 3, 4, 3, 2, 1) for part in layers[number])
    assert 3 * read <= staging.bytes_read <= 4 * read


def test_a_full_disk_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"need 1048576.0 GiB on disk, and .* left: free some space, or name another"):
        check_disk(2**49, "state", tmp_path, 2)

    def full(*_: object) -> NoReturn:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ValueError, match=r"no file of 0.0 GiB can be made in .* \(No space left on device\): free"):
        mapped_zeros(tmp_path, (4, 4), torch.float32)
    assert not list(tmp_path.iterdir())
