"""Styles in the place of those of transformers' tensor-parallel plans that add up wrongly, or send too often.

With tp_size > 1 each rank of a tensor-parallel group has some of the attention heads. Norms of queries and keys over
one head (`q_norm`, `k_norm`) have one weight for all heads, and each rank gets the gradient of its own heads.

  - A plan that adds these up (`replicated_with_grad_allreduce`) does so with what the parameter has gathered so far.
    Without FSDP, which empties it after each backward, the sum of a second micro-batch counts the first one again.
    Here it is added up before it accumulates.
  - The sum that ends a row-parallel layer (`rowwise`) is sent again by a layer that is computed again. Here that takes
    the first one.

What no style mends is refused (`carpool.hf.seam.refusals`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from transformers.distributed.parallel_utils import ALL_PARALLEL_STYLES
from transformers.distributed.tensor_parallel import RowwiseParallel, TensorParallelLayer

from carpool.parallel.sequence import sum_over


class _SummedGradient(TensorParallelLayer):
    """A whole parameter of which each rank has the gradient of its heads: summed in each backward, before it is added
    to those of earlier ones."""

    def install_forward(self, module: nn.Module, mesh: Any) -> nn.Module:
        own, group, hooked = module.forward, mesh.get_group(), dict[str, nn.Parameter]()

        def summed(gradient: torch.Tensor) -> torch.Tensor:
            gradient = gradient.clone()
            dist.all_reduce(gradient, group=group)
            return gradient

        def forward(*args: Any, **kwargs: Any) -> Any:
            # Not before: parameters are replaced when weights are loaded, and by FSDP.
            if torch.is_grad_enabled():
                for name, parameter in module.named_parameters(recurse=False):
                    if parameter.requires_grad and hooked.get(name) is not parameter:
                        parameter.register_hook(summed)
                        hooked[name] = parameter
            return own(*args, **kwargs)

        module.forward = forward  # type: ignore[method-assign]
        return module


class _KeptSum(RowwiseParallel):
    """transformers' `rowwise`, whose sum over ranks a layer that is computed again takes from the first time
    (`carpool.parallel.sequence`)."""

    def should_use_local_tensors(self, module: nn.Module) -> bool:
        return True

    def transform_inputs_pre_forward(self, module: Any, args: Any, kwargs: Any, mesh: Any) -> Any:
        return args, kwargs

    def transform_output_post_forward(self, module: Any, output: Any, mesh: Any) -> Any:
        y, bias = sum_over(output, mesh.get_group()), module._parameters.get("bias")
        return y if bias is None else y + (bias.to_local() if isinstance(bias, DTensor) else bias)


ALL_PARALLEL_STYLES.register("carpool_summed_gradient", _SummedGradient())
ALL_PARALLEL_STYLES.register("carpool_kept_sum", _KeptSum())


def own_styles(plan: dict[str, str], experts: Iterable[str]) -> dict[str, str]:
    """Rules in the place of those of a tensor-parallel plan that add gradients up wrongly, or that send again what a
    layer's first forward sent. `experts`: rules of the expert-parallel plan, which go first."""
    ours = {"replicated_with_grad_allreduce": "carpool_summed_gradient", "rowwise": "carpool_kept_sum"}
    prefixes = tuple(experts)
    return {rule: ours[style] for rule, style in plan.items() if style in ours and not rule.startswith(prefixes)}
