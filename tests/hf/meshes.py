"""One set of process groups for each parallelism, however many models a test process builds.

Transformers makes eight process groups for every model, each with threads and sockets that live as long as the process.
The ranks of the test pool live through hundreds of models. Those of Carpool's own meshes are shared, too.
"""

from __future__ import annotations

import functools
from typing import Any

import transformers.distributed.mixin
from transformers.distributed import DistributedConfig
from transformers.distributed.utils import initialize_distributed_mesh

from carpool.parallel import meshes


@functools.cache
def _mesh(sizes: tuple[tuple[str, int], ...]) -> Any:
    return initialize_distributed_mesh(DistributedConfig.from_dict(dict(sizes)))


def reuse_meshes() -> None:
    """From now on, models of this process that ask for the same sizes share their meshes. Safe to call again."""
    names = ("pp_size", "dp_replicate_size", "fsdp_size", "tp_size", "ep_size")
    mixin: Any = transformers.distributed.mixin
    mixin.initialize_distributed_mesh = lambda config: _mesh(tuple((name, getattr(config, name)) for name in names))
    if not hasattr(meshes.make_group, "cache_clear"):
        meshes.make_group = functools.cache(meshes.make_group)
