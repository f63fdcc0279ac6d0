"""Adapters of experts: one for each expert, held where the expert is, computed in the ride's grouped products.

peft adapts the stacked weights of E experts with two matrices and, in every forward, adds their product to all of the
weights (`peft.tuners.lora.ParamWrapper`). Its wrappers and names stay; the two parameters become stacks as weights are:

    peft    lora_A.weight   (E * Q, in)     row e * Q + q      is row q of expert e's a
            lora_B.weight   (out, Q * E)    column q * E + e   is column q of expert e's b; not column e * Q + q
    here    lora_A.weight   (E, Q, in)      sharded as experts are: a rank has those of its own experts, in their order
            lora_B.weight   (E, out, Q)
            forward         x a_s, then b_s, beside the products with the weights (`carpool.experts.ExpertWeights`)

`state_dict()` and `load_state_dict()` speak peft's layout, with experts in logical order; both are collective.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from carpool.hf.seam.expert_rides import ExpertRides
from carpool.hf.seam.experts_module import weight_names
from carpool.hf.seam.moved_experts import places, states_lie

# Of `ExpertWeights`: a and b of up, a and b of down.
Factors = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]


class ExpertAdapters:
    """The adapters of one layer's experts. `wrappers`: peft's, by the name of the parameter that they adapt."""

    def __init__(self, own: ExpertRides) -> None:
        self.own, self.wrappers = own, dict[str, Any]()

    def add(self, wrapper: Any, adapter: str, model: Any) -> None:
        """Take over what peft has injected. All ranks together. ValueError: it cannot be computed here."""
        own, name = self.own, wrapper.parameter_name
        if own.compute is None or own.function is None:
            raise ValueError(
                f"adapters of {own.name}.{name} cannot be computed: the layer runs the model's own forward; choose "
                "other targets (attention, shared experts)"
            )
        if name not in weight_names(own.experts)[:2]:
            raise ValueError(f"{own.name}.{name} is a bias, which has no adapter of low rank; leave it out")
        self.wrappers[name] = wrapper
        wrapper.forward = _only_base(wrapper)
        wrapper.get_delta_weight = partial(_delta, wrapper, own.function.transposed)
        for linear, is_b in ((wrapper.lora_A[adapter], False), (wrapper.lora_B[adapter], True)):
            stack = Stack(own, is_b, _mesh(model, own))
            linear.weight = nn.Parameter(stack.take(linear.weight), requires_grad=linear.weight.requires_grad)
            linear._carpool_stack = stack
            linear.register_state_dict_post_hook(_to_peft)
            linear.register_load_state_dict_pre_hook(_from_peft)

    def factors(self) -> Factors:
        """Of the adapters that are active now, with their scaling; the ranks of several add up."""
        up, down = weight_names(self.own.experts)[:2]
        dtype = getattr(self.own.experts, up).dtype
        return *_factors(self.wrappers.get(up), dtype), *_factors(self.wrappers.get(down), dtype)

    def parameters(self) -> Iterator[nn.Parameter]:
        """All of them; each has a row for each expert."""
        for wrapper in self.wrappers.values():
            for linears in (wrapper.lora_A, wrapper.lora_B):
                yield from (linear.weight for linear in linears.values())


class Stack:
    """The layout of one parameter, a or b, here and in peft's files. `mesh`: over which experts are sharded, the last
    axis by experts; None: this rank has all."""

    def __init__(self, own: ExpertRides, is_b: bool, mesh: Any) -> None:
        self.own, self.is_b, self.mesh = own, is_b, mesh

    def to_peft(self, stack: torch.Tensor) -> torch.Tensor:
        """The whole parameter in peft's layout. Collective."""
        whole = full(stack)
        homes = places(self.own.layout)
        if homes != sorted(homes):
            logical = torch.empty_like(whole)
            logical[homes] = whole
            whole = logical
        return whole.permute(1, 2, 0).flatten(1).contiguous() if self.is_b else whole.flatten(0, 1)

    def from_peft(self, whole: torch.Tensor) -> torch.Tensor:
        """What this rank holds of a parameter in peft's layout."""
        experts = self.own.num_experts
        if self.is_b:
            stack = whole.unflatten(1, (-1, experts)).permute(2, 0, 1)
        else:
            stack = whole.unflatten(0, (experts, -1))
        rows = stack[list(self.own.layout.homes[self.own.rank])].contiguous()
        if self.mesh is None:
            return rows
        placements = [*(Replicate() for _ in self.mesh.mesh_dim_names[:-1]), Shard(0)]
        stride = (stack.shape[1] * stack.shape[2], stack.shape[2], 1)
        return DTensor.from_local(rows, self.mesh, placements, run_check=False, shape=stack.shape, stride=stride)

    @torch.no_grad()
    def take(self, whole: torch.Tensor) -> torch.Tensor:
        """As `from_peft`, of a parameter that peft has just made: the values of the first rank."""
        if whole.is_meta:  # its values come later
            whole = torch.empty_like(whole, device=next(self.own.experts.parameters()).device)
        elif self.mesh is not None:
            whole = whole.detach().clone()
            dist.broadcast(whole, 0)
        return self.from_peft(whole.detach())


def take_over(model: nn.Module, adapter: str) -> None:
    """Take over what peft has injected into the experts of a model with Carpool's layers. All ranks together.
    ValueError: an adapter cannot be computed here."""
    for module in list(model.modules()):
        wrapper: Any = module
        if not hasattr(wrapper, "parameter_name") or adapter not in getattr(wrapper, "lora_A", ()):
            continue
        own: ExpertRides | None = getattr(wrapper.get_base_layer(), "_carpool_rides", None)
        if own is None:
            wrapper.forward = _added(wrapper)
            continue
        if own.adapters is None:
            own.adapters = ExpertAdapters(own)
        assert isinstance(own.adapters, ExpertAdapters)
        own.adapters.add(wrapper, adapter, model)


def is_expert_adapter(module: nn.Module) -> bool:
    """Whether the module's weight is a stack of adapters of experts, sharded over ranks."""
    stack: Stack | None = getattr(module, "_carpool_stack", None)
    return stack is not None and stack.mesh is not None


def full(tensor: torch.Tensor) -> torch.Tensor:
    """All of it, detached. Collective for a DTensor."""
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _factors(wrapper: Any, dtype: torch.dtype) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """a and b, with the scaling, in the dtype that they are multiplied in: cast and scaled in one pass if compiled."""
    if wrapper is None or not (active := active_names(wrapper)):
        return None, None
    a = [_local(wrapper.lora_A[name].weight).to(dtype) for name in active]
    b = [(_local(wrapper.lora_B[name].weight) * wrapper.scaling[name]).to(dtype) for name in active]
    a_SQI, b_SOQ = (a[0], b[0]) if len(active) == 1 else (torch.cat(a, 1), torch.cat(b, 2))
    if a_SQI.is_cuda and (missing := -a_SQI.shape[1] % 8):
        # Grouped products want rows of a multiple of 16 bytes.
        a_SQI, b_SOQ = F.pad(a_SQI, (0, 0, 0, missing)), F.pad(b_SOQ, (0, missing))
    return a_SQI, b_SOQ


def active_names(wrapper: Any) -> list[str]:
    """Names of the adapters that add something now."""
    if wrapper.disable_adapters or wrapper.merged:
        return []
    return [name for name in wrapper.active_adapters if name in wrapper.lora_A]


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


# Functions with closures: torch.compile takes a partial for another one in each layer, and compiles each layer anew.


def _only_base(wrapper: Any) -> Callable[..., Any]:
    """In place of the wrapper's forward, which adds a b to all weights: the ride takes the adapters along."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        return wrapper.base_layer(*args, **kwargs)

    return forward


def _added(wrapper: Any) -> Callable[..., Any]:
    """In place of the forward of a wrapper around a small parameter, a router's: the same sum. peft's way writes to the
    parameter, and where non-expert parameters share one buffer, autograd takes that for a change of all of them."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        module, name = wrapper.get_base_layer(), wrapper.parameter_name
        deltas = [wrapper.get_delta_weight(adapter) for adapter in active_names(wrapper)]
        if not deltas:
            return wrapper.base_layer(*args, **kwargs)
        # Found before the module's parameter of that name.
        module.__dict__[name] = sum(deltas, start=wrapper.get_param())
        try:
            return wrapper.base_layer(*args, **kwargs)
        finally:
            del module.__dict__[name]

    return forward


def _delta(wrapper: Any, transposed: bool, adapter: str, *_: Any, **__: Any) -> torch.Tensor:
    """What the adapter adds to the weights, in their shape: for peft's merging, in one process."""
    delta = wrapper.lora_B[adapter].weight @ wrapper.lora_A[adapter].weight * wrapper.scaling[adapter]
    base = wrapper.get_param()
    return (delta.transpose(1, 2) if transposed else delta).to(base.device, base.dtype)


def _mesh(model: Any, own: ExpertRides) -> Any:
    """Of the experts of a sharded model: axes over which they are copied, and the one that divides them."""
    if own.num_ranks == 1:
        return None
    copied = model.config.distributed_config.dp_replicate_size > 1
    return model._mesh_manager.get_mesh(("dp_replicate", "efsdp", "ep") if copied else ("efsdp", "ep"))


def _to_peft(linear: Any, state: dict[str, Any], prefix: str, _: Any) -> None:
    if not states_lie():
        state[f"{prefix}weight"] = linear._carpool_stack.to_peft(state[f"{prefix}weight"])


def _from_peft(linear: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
    key = f"{prefix}weight"
    if key in state and not states_lie():
        here = linear.weight
        state[key] = linear._carpool_stack.from_peft(state[key].to(here.device, here.dtype))
