"""What transformers' tensor-parallel plans cannot do, partly without an error: refused before anything is trained.

With tp_size > 1 each rank of a tensor-parallel group has some of the attention heads. Three things go wrong there:

  - Norms of queries and keys over one head (`q_norm`, `k_norm`) have one weight for all heads. Each rank gets the
    gradient of its own heads; the plan has to add them up. Some plans forget that, for example that of GLM-4.5
    (`use_qk_norm`): the loss is right, the gradient of the norm is that of a part of the heads.
  - Where the plan does add them up (`replicated_with_grad_allreduce`), it does so with what the parameter has gathered
    so far. Without FSDP, which empties it after each backward, the sum of a second micro-batch counts the first one
    again. `own_styles` puts a style in its place that adds up before it accumulates.
  - `clip_qkv` of OLMoE clamps the gathered queries in place, and PyTorch refuses the backward of that.
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

from carpool.parallel import fsdp
from carpool.parallel.sequence import sum_over

# The projection in a plan, and the norm of what it computes.
NORMS = (("q_proj", "q_norm"), ("k_proj", "k_norm"), ("q_proj", "query_layernorm"), ("k_proj", "key_layernorm"))


def check_tensor_parallel(model: Any, plan: dict[str, str]) -> None:
    """Raise ValueError if a model cannot be trained by a tensor-parallel plan.

    Args:
        model: a model of transformers, whole or sharded.
        plan: the style of each module by name or pattern, such as `model.tp_plan`.
    """
    styles = model._expand_parallel_plan(plan)
    instead = "use tp_size=1 (fsdp_size and ep_size divide the memory as well)"
    for name, module in model.named_modules():
        children = dict(module.named_children())
        clip = getattr(getattr(module, "config", None), "clip_qkv", None)
        if clip is not None and styles.get(f"{name}.q_proj") == "colwise_gather_output":
            raise ValueError(
                f"clip_qkv={clip:g} of {type(model).__name__} cannot be used with tensor parallelism: Transformers "
                f"clamps {name}'s gathered queries in place, which has no gradient; {instead}"
            )
        for projection, norm in NORMS:
            has_weight = norm in children and any(True for _ in children[norm].parameters())
            if has_weight and styles.get(f"{name}.{projection}") == "colwise" and f"{name}.{norm}" not in styles:
                raise ValueError(
                    f"the tensor-parallel plan of {type(model).__name__} does not add up the ranks' gradients of "
                    f"{name}.{norm}, so its gradient would be wrong; {instead}, or add the rule "
                    f"'replicated_with_grad_allreduce' for it to `tp_plan`"
                )


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


def check_tensor_parallel_around(experts: nn.Module) -> None:
    """As `check_tensor_parallel`, for the sharded model around an experts module, inside a forward."""
    for state in fsdp.states_in_forward(experts):
        for root in fsdp.root_modules(state):
            if plan := getattr(root, "tp_plan", None):
                check_tensor_parallel(root, plan)
