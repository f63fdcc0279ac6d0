"""What a router decides: K expert ids and K weights for each token.

Whoever makes one, our `Router`, a model of Hugging Face or a recording, the rest of the layer treats alike.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Routing:
    """Which experts serve each token, and with which weight.

    Attributes:
        expert_TK: (T, K) int32, logical expert ids, -1 for none. A token names an expert at most once.
        weight_TK: (T, K) float32, or float64 of tokens that are; it travels as float32. None in a recording of choices
            only: the router then computes the weights.
        serving_TW: (T, W) bool, the ranks that may serve each token, of a routing that is limited to some
            (carpool/routing/limit.py). None: all.
    """

    expert_TK: torch.Tensor
    weight_TK: torch.Tensor | None
    serving_TW: torch.Tensor | None = None

    def detach(self) -> Routing:
        """The same routing as a recording, which `moe(x, routing=...)` replays on any layout."""
        return Routing(self.expert_TK, None if self.weight_TK is None else self.weight_TK.detach())

    def of_slices(self, slices: int) -> Routing:
        """The same choices once for each slice of an expert (`ExpertLayout.slices`), in the order of `assign`: slices
        have the weight of their expert, whose gradient is the sum of theirs."""
        if slices == 1:
            return self
        wide = [None if of_TK is None else _repeated(of_TK, slices) for of_TK in (self.expert_TK, self.weight_TK)]
        assert wide[0] is not None
        return Routing(wide[0], wide[1], self.serving_TW)

    def check(self, num_tokens: int, num_experts: int) -> None:
        """Raise ValueError if this cannot route `num_tokens` tokens to `num_experts` experts.

        Looks at values (a host synchronisation), so it is for recordings and other input of a user, not for the
        hot path."""
        shape = tuple(self.expert_TK.shape)
        if len(shape) != 2 or shape[0] != num_tokens:
            raise ValueError(f"routing.expert_TK has shape {shape}, but the layer got {num_tokens} tokens")
        if not shape[1]:
            raise ValueError(f"routing.expert_TK has shape {shape}: it has no choices; -1 means no expert")
        if self.expert_TK.dtype != torch.int32:
            raise ValueError(f"routing.expert_TK must be int32, not {self.expert_TK.dtype}; use .int()")
        if self.weight_TK is not None and tuple(self.weight_TK.shape) != shape:
            raise ValueError(f"routing.weight_TK has shape {tuple(self.weight_TK.shape)}, expert_TK has {shape}")
        if self.expert_TK.numel() and not -1 <= int(self.expert_TK.min()) <= int(self.expert_TK.max()) < num_experts:
            raise ValueError(
                f"routing.expert_TK holds ids from {int(self.expert_TK.min())} to {int(self.expert_TK.max())}; "
                f"experts are 0..{num_experts - 1}, and -1 means none"
            )
        sorted_TK = self.expert_TK.sort(dim=1).values
        if bool(((sorted_TK[:, 1:] == sorted_TK[:, :-1]) & (sorted_TK[:, 1:] >= 0)).any()):
            raise ValueError("routing.expert_TK names an expert twice for one token; add the two weights instead")


def _repeated(of_TK: torch.Tensor, times: int) -> torch.Tensor:
    """Example, 2 times: [[3, 5]]  ->  [[3, 3, 5, 5]]"""
    return of_TK.unsqueeze(2).expand(-1, -1, times).flatten(1)
