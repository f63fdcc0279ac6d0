"""What transformers' tensor-parallel plans cannot do, partly without an error: refused before anything is trained.

With tp_size > 1 each rank of a tensor-parallel group has some of the attention heads. Three things go wrong there:

  - Norms of queries and keys over one head (`q_norm`, `k_norm`) have one weight for all heads. Each rank gets the
    gradient of its own heads; the plan has to add them up. Some plans forget that, for example that of GLM-4.5
    (`use_qk_norm`): the loss is right, the gradient of the norm is that of a part of the heads.
  - Where the plan does add them up (`replicated_with_grad_allreduce`), it does so with what the parameter has gathered
    so far. Without FSDP, which empties it after each backward, the sum of a second micro-batch counts the first one
    again. `right_sums` puts a style in its place that adds up before it accumulates.
  - `clip_qkv` of OLMoE clamps the gathered queries in place, and PyTorch refuses the backward of that.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers.distributed.parallel_utils import ALL_PARALLEL_STYLES
from transformers.distributed.tensor_parallel import TensorParallelLayer

from carpool.parallel import fsdp

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


ALL_PARALLEL_STYLES.register("carpool_summed_gradient", _SummedGradient())


def right_sums(plan: dict[str, str]) -> dict[str, str]:
    """The rules of a tensor-parallel plan that add gradients up wrongly, and the style that does it right."""
    wrong = "replicated_with_grad_allreduce"
    return {rule: "carpool_summed_gradient" for rule, style in plan.items() if style == wrong}


def check_tensor_parallel_around(experts: nn.Module) -> None:
    """As `check_tensor_parallel`, for the sharded model around an experts module, inside a forward."""
    for state in fsdp.states_in_forward(experts):
        for root in fsdp.root_modules(state):
            if plan := getattr(root, "tp_plan", None):
                check_tensor_parallel(root, plan)
