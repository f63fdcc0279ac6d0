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

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

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
