"""Transformers shards over the meshes of the run, not over meshes of its own.

Its own are of all ranks, one for each model, and know neither context- nor expert-tensor-parallel ranks; and it refuses
FSDP and expert parallelism beside a pipeline. Given the mesh of one stage, it shards that stage, and knows of no other.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers.distributed import DistributedConfig, mixin
from transformers.distributed import utils as transformers_meshes

from carpool.parallel.meshes import Meshes

MAKE = "initialize_distributed_mesh"


@contextmanager
def sharded_over(meshes: Meshes | None) -> Iterator[None]:
    """Inside, transformers distributes models over the stage of `meshes`. None: over meshes that it makes."""
    if meshes is None:
        yield
        return

    def stage(config: DistributedConfig) -> tuple[Any, Any]:
        bound = transformers_meshes._bind_local_device(meshes.device_type, int(os.environ.get("LOCAL_RANK", "0")))
        return bound, meshes.stage

    before = getattr(mixin, MAKE)
    setattr(mixin, MAKE, stage)
    try:
        yield
    finally:
        setattr(mixin, MAKE, before)
