"""Memory of files: what is read ahead is what was written, and a full disk is said before anything begins."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NoReturn

import pytest
import torch

from carpool_systems.disk import Staging, check_disk, mapped_zeros


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
