"""What a layer refuses in its first forward: what would train wrongly around it, without an error.

Parameters that were added after the model was sharded, and that nobody averages over the ranks. And tensor-parallel
plans that do not go together with the model, which runs and dry runs check before there is one. Each rank of a group
has some of the attention heads; refused is

  - if the ranks do not divide a layer's heads (of queries, keys and values): shapes would not fit;
  - if the plan shards an output projection alone, or an embedding that has a norm in it, which needs whole sums;
  - a norm of queries or keys over one head (`q_norm`, `k_norm`), if the plan does not add up the gradients that each
    rank has of its own heads, as that of GLM-4.5 (`use_qk_norm`);
  - `clip_qkv` of OLMoE, which clamps the gathered queries in place: PyTorch refuses the backward of that.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from carpool.parallel import fsdp
from carpool.parallel.replicated import replicated


def known_to_fsdp(states: Iterable[Any]) -> set[tuple[int, str]]:
    """The parameters that FSDP has sharded: id of the module and name there."""
    sharded = (one for state in states for group in fsdp.groups(state) for one in fsdp.parameters_of(group))
    return {(id(module), name) for module, name in sharded}


def check_adapters(experts: nn.Module) -> None:
    """Raise ValueError if the model around an FSDP-sharded module trains parameters that FSDP does not know.

    To be called inside a forward pass, where FSDP knows which of its modules is the root.
    """
    states = list(fsdp.states_in_forward(experts))
    known = known_to_fsdp(states)
    for state in states:
        for root in fsdp.root_modules(state):
            known |= kept.places if (kept := replicated(root)) is not None else set()
    unknown = [
        f"{prefix}.{name}"
        for state in states
        for root in fsdp.root_modules(state)
        for prefix, module in root.named_modules()
        for name, parameter in module.named_parameters(recurse=False)
        if parameter.requires_grad and (id(module), name) not in known and not hasattr(parameter, "_carpool_average")
    ]
    if unknown:
        raise ValueError(
            f"{len(unknown)} trainable parameters were added after the model was sharded ({', '.join(unknown[:2])}, "
            "...), so their gradients would not be averaged over the ranks; call "
            "carpool.hf.synchronize_adapters(model) on all ranks after adding them"
        )


# The projection in a plan, and the norm of what it computes.
NORMS = (("q_proj", "q_norm"), ("k_proj", "k_norm"), ("q_proj", "query_layernorm"), ("k_proj", "key_layernorm"))
# Of projections into heads: what these are, and where attention says their size.
HEADS = {
    **dict.fromkeys(("q_proj", "q_b_proj"), ("attention heads", "qk_head_dim")),
    "k_proj": ("key-value heads", "qk_head_dim"),
    "v_proj": ("key-value heads", "v_head_dim"),
    "kv_b_proj": ("attention heads", "qk_nope_head_dim"),
}


def check_tensor_parallel(model: Any, plan: dict[str, str], ranks: int) -> None:
    """Raise ValueError if a model cannot be trained by a tensor-parallel plan.

    Args:
        model: a model of transformers, whole or sharded.
        plan: the style of each module by name or pattern, such as `model.tp_plan`.
        ranks: of a tensor-parallel group.
    """
    if not plan:
        raise ValueError(f"tp_size = {ranks}, but Transformers has no tensor-parallel plan for {type(model).__name__}")
    styles = model._expand_parallel_plan(plan)
    instead = "use tp_size=1 (fsdp_size and ep_size divide the memory as well)"
    for name, module in model.named_modules():
        children = dict(module.named_children())
        _check_heads(model, name, module, styles, ranks)
        own = {child: style for child in children if (style := styles.get(f"{name}.{child}")) is not None}
        wrong = None
        if own.get("o_proj") in ("rowwise", "carpool_rowwise") and not any("colwise" in one for one in own.values()):
            wrong = f"{name}.o_proj, and nothing before it in that {type(module).__name__}, so that shapes do not fit"
        elif styles.get(name) == "embedding_rowwise" and children:
            wrong = f"{name} by words, whose {min(children)} would see the sum of one rank alone"
        if wrong is not None:
            raise ValueError(f"the tensor-parallel plan of {type(model).__name__} shards {wrong}; {instead}")
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


def _check_heads(model: Any, name: str, attention: nn.Module, styles: dict[str, str], ranks: int) -> None:
    """Raise ValueError if the ranks do not divide the heads that a plan shards."""
    for child, (what, key) in HEADS.items():
        weight = getattr(getattr(attention, child, None), "weight", None)
        if weight is None or styles.get(f"{name}.{child}") not in ("colwise", "carpool_colwise"):
            continue
        size = getattr(attention, key, getattr(attention, "head_dim", None)) or weight.shape[0]
        # Keys and values of latent attention come from one projection.
        heads, rest = divmod(weight.shape[0], size + (attention.v_head_dim if child == "kv_b_proj" else 0))
        if not rest and heads % ranks:
            fits = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
            raise ValueError(
                f"tp_size = {ranks} does not divide the {heads} {what} of {type(model).__name__}'s {name}, which are "
                f"whole on a rank: here tp_size can be {fits} (fsdp_size and ep_size divide the memory as well)"
            )


def check_tensor_parallel_around(experts: nn.Module) -> None:
    """As `check_tensor_parallel`, for the sharded model around an experts module, inside a forward."""
    for state in fsdp.states_in_forward(experts):
        for root in fsdp.root_modules(state):
            if plan := getattr(root, "tp_plan", None):
                config: Any = root.config
                check_tensor_parallel(root, plan, config.distributed_config.tp_size)
