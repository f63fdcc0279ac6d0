"""Experts that the expert-parallel ranks do not divide: the last rank has fewer.

transformers refuses them (`grouped_gemm`). DTensor shards any number of rows, in parts of ceil(E / W); with this style
in the place of transformers' the parameters are sharded so, and the layout of a layer follows (`ExpertLayout.chunked`):

    10 experts on 4 ranks: 3, 3, 3, 1

So checkpoints, exports, norms and moves, which ask the DTensor for its rows, need to know nothing.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor
from transformers.distributed.expert_parallel import MoEParamShard
from transformers.distributed.parallel_utils import ALL_PARALLEL_STYLES

from carpool.parallel.degrees import chunks


class _UnevenExperts(MoEParamShard):
    def shard_param(self, module: Any, param: str, mesh: DeviceMesh) -> None:
        whole = module._parameters.get(param)
        if whole is None:
            return
        rows = distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None)
        module._parameters[param] = nn.Parameter(rows, requires_grad=whole.requires_grad)
        module._carpool_num_experts = whole.shape[0]
        module.num_experts = chunks(whole.shape[0], mesh.size())[mesh.get_local_rank()]
        module._is_expert_parallel = True


ALL_PARALLEL_STYLES.register("carpool_uneven_experts", _UnevenExperts(Shard(0), shards_expert_dim=True))


def uneven_plan(plan: dict[str, str]) -> dict[str, str]:
    """Rules in the place of those of an expert-parallel plan that want equally many experts on every rank."""
    return {rule: "carpool_uneven_experts" for rule, style in plan.items() if style == "grouped_gemm"}
