"""A forward and a backward of tiny models as one tensor-parallel rank of several has them, in one process.

PyTorch's "fake" process group does nothing in its collectives: numbers are wrong, shapes are those of a real run. So a
plan that does not go together with the sizes of a model fails here as it would on ranks, in a fraction of a second.
The process group is the process's own: `outcomes` is for a process that does nothing else, as

    python -m tests.hf.fake_ranks 2,1 4,4    tensor-parallel ranks, key-value heads -> for each a JSON object by folder
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import PreTrainedConfig
from transformers.distributed import DistributedConfig

from carpool.hf.build_model import check_parallelism
from carpool.hf.tensor_parallel import own_styles
from tests.hf import parity
from tests.hf.tiny_models import discover, tiny_batch, tiny_config

PASSED, REFUSED = "passed", "refused"


def _set_key_heads(config: Any, number: int) -> None:
    """At most so many, also in configurations inside. Latent attention has as many as it has heads."""
    if not getattr(config, "kv_lora_rank", None):
        for key in ("num_key_value_heads", "swa_num_key_value_heads", "num_global_key_value_heads"):
            if getattr(config, key, None) is not None:
                setattr(config, key, min(number, getattr(config, key)))
    for name in getattr(config, "sub_configs", {}) or {}:
        if isinstance(inner := getattr(config, name, None), PreTrainedConfig):
            _set_key_heads(inner, number)


def outcome(folder: str, tp: int, key_heads: int) -> str:
    """ "passed", "refused: why", or how it failed inside."""
    architecture = discover()[folder]
    config = tiny_config(architecture)
    _set_key_heads(config, key_heads)
    model_class = architecture.model_class
    with torch.device("meta"):
        blueprint = model_class(config)
    asked = DistributedConfig(tp_size=tp, fsdp_size=1, ep_size=1)
    try:
        check_parallelism(blueprint, asked)
    except ValueError as error:
        return f"{REFUSED}: {error}"
    asked.tp_plan = own_styles(blueprint.tp_plan, blueprint.ep_plan or {}) or None
    try:
        asked, _, meshes = model_class.prepare_distribute_model(asked)
        with torch.device("meta"):
            model = model_class(config)
        model = model_class.maybe_distribute_model(model, asked, meshes)
        model.to_empty(device="cpu")
        with torch.no_grad():
            for tensor in (*model.parameters(), *model.buffers()):
                own = tensor.to_local() if isinstance(tensor, DTensor) else tensor
                own.fill_(0.01 if own.is_floating_point() else 0)
        output = model.train()(**tiny_batch(model))
        output.logits.float().sum().backward()
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return PASSED


def outcomes(tp: int, key_heads: int) -> dict[str, str]:
    """Of every model that Carpool trains."""
    parity.quiet()
    dist.init_process_group("fake", rank=0, world_size=tp, store=FakeStore())
    folders = sorted(discover().keys() - parity.EXCEPTIONS.keys())
    found = {folder: outcome(folder, tp, key_heads) for folder in folders}
    dist.destroy_process_group()
    return found


if __name__ == "__main__":
    print(json.dumps([outcomes(*map(int, pair.split(","))) for pair in sys.argv[1:]]))
