"""Writes the files of a rank beside training, in a process that has nothing but Python's standard library.

    python shard_writer.py          what to write comes as one line of JSON to standard input

    {"parent": 4711, "memory": 9, "files": {"/.../shard-00001.safetensors": [0, 123456], ...}}
    -> {"records": {"/.../shard-00001.safetensors": {"bytes": 123456, "sha256": "..."}}}
    or {"error": [28, "No space left on device", "/.../shard-00001.safetensors"]}

`memory` is a file descriptor of shared memory, in which the content of each file is laid out already
(`carpool.train.checkpoints.host_copy`). So the process starts in a few hundredths of a second, holds no second copy,
needs no process group, and takes none of the trainer's interpreter lock. It ends with the rank that started it.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import sys
from collections.abc import Iterable, Iterator
from typing import Any

BLOCK = 1 << 24
# Flushed at once: a file that does not grow for long is written by nobody.
_FLUSH = 1 << 30


def write_file(path: str, blocks: Iterable[memoryview]) -> dict[str, Any]:
    """Writes a file and flushes it to the disk; its size and SHA-256, as in `state.json`.

    Raises:
        OSError: with the path.
    """
    digest, size = hashlib.sha256(), 0
    try:
        with open(path, "wb", buffering=0) as stream:
            for block in blocks:
                digest.update(block)
                if size // _FLUSH != (size := size + len(block)) // _FLUSH:
                    os.fsync(stream.fileno())
                while len(block):
                    block = block[stream.write(block) :]
            os.fsync(stream.fileno())
    except OSError as error:
        raise OSError(error.errno, error.strerror, path) from error
    return {"bytes": size, "sha256": digest.hexdigest()}


def _blocks(memory: memoryview, start: int, size: int, parent: int) -> Iterator[memoryview]:
    for first in range(start, start + size, BLOCK):
        if os.getppid() != parent:  # the rank is gone, and nobody would make a checkpoint of this
            os._exit(1)
        yield memory[first : min(first + BLOCK, start + size)]


def main() -> None:
    """Do what standard input says; the answer goes to standard output."""
    job = json.loads(sys.stdin.readline())
    os.nice(5)
    memory = memoryview(mmap.mmap(job["memory"], 0, access=mmap.ACCESS_READ))
    try:
        made = {
            path: write_file(path, _blocks(memory, start, size, job["parent"]))
            for path, (start, size) in job["files"].items()
        }
        answer: dict[str, Any] = {"records": made}
    except OSError as error:
        answer = {"error": [error.errno, error.strerror, error.filename]}
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
