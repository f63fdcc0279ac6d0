"""LoRA of linear layers beside a model in 16 bits: its products are in 16 bits, too, and summed in float32.

peft keeps a and b in float32. Its forward casts every row to float32, multiplies there, on tensor cores of no GPU, and
casts what it has added back. For attention of Qwen3-30B-A3B that took as long as all products with the frozen weights
of the attention. Here, as for experts (`carpool.experts.gemm.adapter_kernels`):

    u_TQ = x a^T       a is rounded to the model's dtype, u is rounded
    y_TO + u (s b)^T   s b is rounded
    da, db             sums over tokens in float32, which are not rounded

Whatever is more than that stays peft's: drop-out, DoRA and other variants, biases, autocast, mixed batches.

Rows of an embedding that are trained themselves (trainable_token_indices) are looked up beside the others. In every
forward peft copies the embedding, with these in their places: 0.6 GB of Qwen3-30B-A3B.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

from carpool.hf.expert_adapters import active_names

NARROW = (torch.bfloat16, torch.float16)


def multiply_in_16_bits(model: nn.Module, adapter: str) -> None:
    """Compute this adapter of the model's linear layers as the module's docstring says."""
    from peft.tuners.lora.layer import Linear

    for module in model.modules():
        if type(module) is Linear and adapter in module.lora_A:
            # An attribute of the instance, which nn.Module's call finds before the class's.
            module.forward = _forward(module)  # type: ignore[method-assign]


def look_up_trained_rows(model: nn.Module) -> None:
    """Look up rows of embeddings that are trained as the module's docstring says."""
    from peft.tuners.trainable_tokens import TrainableTokensLayer

    for module in model.modules():
        if isinstance(module, TrainableTokensLayer) and isinstance(module.get_base_layer(), nn.Embedding):
            module.forward = _looked_up(module)  # type: ignore[method-assign]


def _looked_up(layer: Any) -> Callable[..., torch.Tensor]:
    # Before a step is captured as a CUDA graph, which copies nothing from the host.
    sorted_of: dict[str, Any] = {}

    def forward(token_T: torch.Tensor) -> torch.Tensor:
        y_TH: torch.Tensor = layer.base_layer(token_T)
        if layer.disable_adapters or layer.merged:
            return y_TH
        for name in layer.active_adapters:
            if name not in layer.trainable_tokens_delta:
                continue
            if name not in sorted_of:
                sorted_of[name] = torch.tensor(layer.token_indices[name], device=token_T.device).sort()
            trained_N, order_N = sorted_of[name]
            place_T = torch.searchsorted(trained_N, token_T).clamp_(max=len(trained_N) - 1)
            row_TH = F.embedding(order_N[place_T], layer.trainable_tokens_delta[name]).to(y_TH.dtype)
            if (scale := layer._get_embed_scale()) is not None:
                row_TH = row_TH * scale.to(row_TH.dtype)
            y_TH = torch.where((trained_N[place_T] == token_T).unsqueeze(-1), row_TH, y_TH)
        return y_TH

    return forward


def _forward(wrapper: Any) -> Callable[..., torch.Tensor]:
    # With a closure: see `expert_adapters._only_base`.
    def forward(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        names = active_names(wrapper)
        if not names or args or kwargs or not all(_is_plain(wrapper, name, x) for name in names):
            theirs: torch.Tensor = type(wrapper).forward(wrapper, x, *args, **kwargs)
            return theirs
        y: torch.Tensor = wrapper.base_layer(x)
        for name in names:
            a_QI, b_OQ = wrapper.lora_A[name].weight, wrapper.lora_B[name].weight
            y = y + _LowRank.apply(x, a_QI, b_OQ, wrapper.scaling[name])
        return y

    return forward


def _is_plain(wrapper: Any, name: str, x: torch.Tensor) -> bool:
    """Whether the adapter adds no more than x a^T b^T, in a model that computes in 16 bits."""
    a, b = wrapper.lora_A[name], wrapper.lora_B[name]
    plain = a.bias is b.bias is None and name not in getattr(wrapper, "lora_variant", ())
    dropout = not isinstance(wrapper.lora_dropout[name], nn.Identity) and wrapper.training
    narrow = x.dtype in NARROW and a.weight.dtype == torch.float32 and not torch.is_autocast_enabled(x.device.type)
    return plain and narrow and not dropout and not isinstance(a.weight, DTensor)


class _LowRank(torch.autograd.Function):
    """(..., I) -> (..., O), scale x a^T b^T; a (Q, I) and b (O, Q) are float32."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, a_QI: torch.Tensor, b_OQ: torch.Tensor, scale: float) -> torch.Tensor:
        x_TI = x.flatten(0, -2)
        u_TQ = x_TI @ a_QI.to(x.dtype).t()
        ctx.save_for_backward(x_TI, u_TQ, a_QI, b_OQ)
        ctx.scale = scale
        y_TO = u_TQ @ (b_OQ * scale).to(x.dtype).t()
        return y_TO.view(*x.shape[:-1], b_OQ.shape[0])

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x_TI, u_TQ, a_QI, b_OQ = ctx.saved_tensors
        dy_TO = dy.flatten(0, -2)
        du_TQ = dy_TO @ (b_OQ * ctx.scale).to(dy.dtype)
        da_QI = db_OQ = None
        if ctx.needs_input_grad[1]:
            da_QI = _product(du_TQ.t(), x_TI)
        if ctx.needs_input_grad[2]:
            db_OQ = _product(dy_TO.t(), u_TQ) * ctx.scale
        dx = du_TQ @ a_QI.to(dy.dtype) if ctx.needs_input_grad[0] else None
        return None if dx is None else dx.view(*dy.shape[:-1], a_QI.shape[1]), da_QI, db_OQ, None


def _product(a_MT: torch.Tensor, b_TN: torch.Tensor) -> torch.Tensor:
    """In float32, of 16 bits."""
    return torch.mm(a_MT, b_TN, out_dtype=torch.float32) if a_MT.is_cuda else a_MT.float() @ b_TN.float()
