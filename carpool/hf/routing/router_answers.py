"""Answering the top-k of a transformers router, whatever else that router does.

A router of transformers makes logits, scores of them, a top-k, and weights of the chosen scores, each model in its own
way. While the router's forward runs, a `TorchFunctionMode` answers `topk(score_TE, K)` with other choices, and the
router goes on with those as with any others: weights and their gradients are the model's own.

    forward of OLMoE's router     F.linear -> logits    softmax -> prob_TE    topk(prob_TE, K) -> (values, experts)
                                                        seen as the share     answered by `choose(score, share, K)`

Where scores are logits (gpt-oss), their softmax is the share. Routers without such a top-k (hash routing, Phi-MoE's
sampler) are not answered.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from carpool.hf.seam.find_modules import find_router

TOPK = (torch.topk, torch.Tensor.topk)
_SCORES = (
    torch.softmax, torch.nn.functional.softmax, torch.Tensor.softmax, torch.sigmoid, torch.nn.functional.sigmoid,
    torch.Tensor.sigmoid, torch.nn.functional.softplus,
)  # fmt: skip
# (score_TE, share_TE, K) -> expert_TK, int64; both inputs float32 and without a graph.
Choose = Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]


class AnsweredRouter:
    """Stands for a router's forward. `forward` is the one that it stands for."""

    def __init__(self, forward: Callable[..., Any], num_experts: int, choose: Choose) -> None:
        self.forward, self.num_experts, self.choose = forward, num_experts, choose

    @torch._disable_dynamo
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with _TopK(self.num_experts, self.choose):
            return self.forward(*args, **kwargs)


class _TopK(TorchFunctionMode):
    """Answers the top-k over experts; see the module's docstring."""

    def __init__(self, num_experts: int, choose: Choose) -> None:
        super().__init__()
        self.num_experts, self.choose = num_experts, choose
        self.share_TE: torch.Tensor | None = None

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in TOPK:
            score_TE: torch.Tensor = args[0] if args else kwargs["input"]
            if score_TE.dim() == 2 and score_TE.shape[1] == self.num_experts:
                top_k = args[1] if len(args) > 1 else kwargs["k"]
                with torch.no_grad():
                    if self.share_TE is None or self.share_TE.shape != score_TE.shape:
                        share_TE = seen_TE = score_TE.float().softmax(-1)
                    else:
                        share_TE, seen_TE = self.share_TE.float(), score_TE.float()
                    expert_TK = self.choose(seen_TE, share_TE, int(top_k))
                return torch.return_types.topk((score_TE.gather(1, expert_TK), expert_TK))
        result = func(*args, **kwargs)
        if func in _SCORES and result.dim() == 2 and result.shape[1] == self.num_experts:
            self.share_TE = result.detach()
        return result


# ---------------------------------------------------------------------------------------------------------------------
# Choices that are forced upon routers, for benchmarks: the same whoever computes the layer.
#
#     force_choices(model, {"model.layers.0.mlp.experts": expert_TK, ...})
#
# The router's product is computed and differentiated as ever; only which experts serve a token is given, as in
# Megatron-LM (`--moe-router-force-load-balancing`). It works with and without Carpool's rides, and compiles without a
# graph break.


def force_choices(model: nn.Module, choices: Mapping[str, torch.Tensor], num_experts: int) -> None:
    """Let routers choose as given from now on.

    Args:
        choices: by the name of the experts module, expert_TK (T, K), int64, on the model's device. A forward of fewer
            tokens takes the first of them.

    Raises:
        ValueError: a layer whose router is not known, or whose top-k something else answers.
    """
    routers = {name: find_router(model, name) for name in choices}
    for name, router in routers.items():
        if router is None:
            raise ValueError(f"the router of {name} is not known, so its choices cannot be forced; let it choose")
        if isinstance(router.forward, AnsweredRouter):
            raise ValueError(f"a limit or a replay answers the router of {name}; turn it off, or force nothing")
    for name, router in routers.items():
        assert router is not None
        # A class and a buffer, not an object of each layer: compiled layers then share their graphs.
        router.register_buffer("forced_TK", choices[name], persistent=False)
        found: Any = router
        found.forced_experts, found.forced_inner = num_experts, router.__dict__.pop("forward", None)
        found.__class__ = _forced_class(found.__class__)


@functools.cache
def _forced_class(router: Any) -> Any:
    """The class of a router whose choices are forced; of the same name, by which routers are known."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _Answer(self.forced_TK, self.forced_experts):
            inner = self.forced_inner
            return router.forward(self, *args, **kwargs) if inner is None else inner(*args, **kwargs)

    return type(router.__name__, (router,), {"forward": forward, "__module__": router.__module__})


class _Answer(TorchFunctionMode):
    def __init__(self, expert_TK: torch.Tensor, num_experts: int) -> None:
        super().__init__()
        self.expert_TK, self.num_experts = expert_TK, num_experts

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in TOPK:
            score_TE: torch.Tensor = args[0] if args else kwargs["input"]
            if score_TE.dim() == 2 and score_TE.shape[1] == self.num_experts:
                expert_TK = self.expert_TK[: score_TE.shape[0]]
                return torch.return_types.topk((score_TE.gather(1, expert_TK), expert_TK))
        return func(*args, **kwargs)


def balanced_choices(tokens: int, num_experts: int, top_k: int, seed: int) -> torch.Tensor:
    """Choices that give every expert equally many tokens, and differ from token to token.

    Each E tokens take one random set of K experts, shifted around the circle of experts by 0, ..., E-1 in random order:
    each expert is chosen K times. Tokens that are left over take consecutive experts of a random order.

        E = 4, K = 2, set {0, 1}:      tokens 0 1 2 3 choose {2, 3} {0, 1} {3, 0} {1, 2}

    Returns:
        expert_TK (T, K) int64, on the CPU, distinct in each row; counts of experts differ by one at most.
    """
    generator = torch.Generator().manual_seed(seed)
    blocks, rest = divmod(tokens, num_experts)
    set_BK = torch.rand(blocks, num_experts, generator=generator).argsort(1)[:, :top_k]
    shift_BE = torch.rand(blocks, num_experts, generator=generator).argsort(1)
    whole_TK = ((set_BK[:, None, :] + shift_BE[:, :, None]) % num_experts).flatten(0, 1)
    order_E = torch.randperm(num_experts, generator=generator)
    rest_TK = order_E[torch.arange(rest * top_k).view(rest, top_k) % num_experts]
    return torch.cat([whole_TK, rest_TK])
