"""The state of a layer whose experts are spread over ranks: in logical order, or refused.

Rows of stacked parameters lie in the order of the layout's homes. A plain `state_dict()` has them as they lie, so it
fits no other layout: it names its order, unless that is the contiguous one, and `load_state_dict` refuses another.
`logical_state_dict` has all experts in logical order, and loads anywhere.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from carpool.layout import ExpertLayout

# Parameters of experts, and the fields of `ExpertWeights` that they are.
PARAMETERS = {
    "up_proj": "up_SFH", "down_proj": "down_SHF", "up_bias": "up_bias_SF", "down_bias": "down_bias_SH",
}  # fmt: skip
# The entry of a state dict that says in which order its experts lie, rank after rank.
ORDER = "expert_order"


def home_order(layout: ExpertLayout) -> torch.Tensor | None:
    """(2, E) int32: rank and row of each expert's (or slice's) home; None for the contiguous layout."""
    if layout.slices == 1 and layout.homes == ExpertLayout.contiguous(layout.num_experts, layout.num_ranks).homes:
        return None
    return torch.tensor(layout.home_of, dtype=torch.int32).t().contiguous()


def order_error(state: dict[str, Any], prefix: str, layout: ExpertLayout) -> str | None:
    """Why a plain state dict must not be loaded under `layout`; None if it may. Takes the order out of `state`."""
    saved, own = state.pop(prefix + ORDER, None), home_order(layout)
    if (saved is None and own is None) or (saved is not None and own is not None and torch.equal(saved.cpu(), own)):
        return None
    return (
        "the experts of this state lie in the order of another layout than the layer's; save logical_state_dict() and "
        "load it with load_logical_state_dict(), which fit any layout"
    )


def gather_homes(home: torch.Tensor, layout: ExpertLayout, group: dist.ProcessGroup | None) -> torch.Tensor:
    """All experts' (or slices') rows in logical order, on every rank. Collective.

    Example: homes [[2, 0], [1]], rows [[c, a], [b]]  ->  [a, b, c]
    """
    most = max(len(rank) for rank in layout.homes)
    padded = home.new_zeros(most, *home.shape[1:])
    padded[: home.shape[0]] = home
    parts = [padded]
    if group is not None:
        parts = [torch.empty_like(padded) for _ in layout.homes]
        dist.all_gather(parts, padded, group=group)
    return torch.stack([parts[rank][row] for rank, row in layout.home_of])
