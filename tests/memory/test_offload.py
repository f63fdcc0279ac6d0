"""The optimizer's state in host memory, in tiles (the bits of state on the device, in one step and in parts), and
memory of files: what is read ahead is what was written, and a full disk is said before anything begins."""

from __future__ import annotations

import copy
import ctypes
import gc
import os
from pathlib import Path
from typing import NoReturn
from unittest import mock

import pytest
import torch

from carpool.activations import host_memory as host
from carpool.optim import AdamW
from carpool.optim import offloaded_state as streamed
from carpool.optim.offloaded_state import Slab, cut
from carpool_systems.disk import Staging, check_disk, mapped_zeros
from tests.optimizer_problem import SHAPES, gradients, groups, masters, parameters, train

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


@pytest.mark.parametrize("moments", MOMENTS)
def test_a_state_goes_from_the_device_to_the_host_and_back(moments: str) -> None:
    found = parameters(torch.bfloat16)
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


def test_host_memory_that_cannot_be_locked_is_said() -> None:
    refusing = mock.Mock(return_value=mock.Mock(cudaHostRegister=lambda *_: 2))
    message = r"CUDA cannot lock 0.0 GiB of host memory \(error 2\): raise the limit"
    with mock.patch.object(torch.cuda, "cudart", refusing), pytest.raises(RuntimeError, match=message):
        host.host_zeros((10,), torch.float32, torch.device("cuda"))


def test_host_memory_that_does_not_suffice_is_refused() -> None:
    host.check_host_memory(10 * 2**30, "moments", ranks=4, free=50 * 2**30)
    with pytest.raises(ValueError, match=r"moments of 5 ranks .* need 50.0 GiB of host memory, and 50.0 GiB are free"):
        host.check_host_memory(10 * 2**30, "moments", ranks=5, free=50 * 2**30)


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
    """There and back over five layers, as a forward and a backward, more than there are buffers, and what was
    read ahead is written to."""
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
