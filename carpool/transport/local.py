"""One rank holds all experts: nothing is sent, and experts read the layer's input in place.

    tokens      x_0 x_1 x_2        the layer's input, not a copy
    slots       [1, 0] [1, -]...   the router's choices
    partial     y_0 y_1 y_2        the MoE outputs

The host never waits, so CUDA graphs can contain such layers. Only the device knows the number of choices: at most one
for each token and column.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from carpool.activations import Arrivals, HiddenStates
from carpool.layout.topology import Topology
from carpool.metrics.counters import Traffic
from carpool.transport.base import CHOICE_BYTES, GRADIENT_BYTES, Pending, Route, Transport
from carpool.transport.volume import Counts


@dataclass(kw_only=True)
class LocalRoute(Route):
    slot_TK: torch.Tensor
    weight_TK: torch.Tensor


class Local(Transport):
    """For one rank; J = K. Each token counts as one send to the own rank, whatever it chose."""

    name = "local"
    anywhere = False
    alone = combines_in_place = True
    one_send_per_rank = True
    graphable = True

    @classmethod
    def why_not(cls, group: dist.ProcessGroup | None) -> str | None:
        return _why_not_among(1 if group is None else dist.get_world_size(group))

    @classmethod
    def why_not_on(cls, topology: Topology) -> str | None:
        return _why_not_among(topology.num_ranks)

    @classmethod
    def tokens_sent(cls, rank_TK: Sequence[Counts], topology: Topology) -> Counts:
        return np.diag([len(one) for one in rank_TK])

    @classmethod
    def ranks_per_token(cls, num_experts: int, top_k: int, num_ranks: int) -> float:
        return 1.0

    def plan(self, slot_TK: torch.Tensor, weight_TK: torch.Tensor, traffic: Traffic) -> LocalRoute:
        num_tokens, top_k = slot_TK.shape
        return LocalRoute(
            num_tokens=num_tokens,
            top_k=top_k,
            num_rows=num_tokens,
            choices_per_send=top_k,
            num_pairs=slot_TK.numel(),
            choices_W=(slot_TK.numel(),),
            traffic=traffic,
            slot_TK=slot_TK.int(),
            weight_TK=torch.where(slot_TK >= 0, weight_TK.float(), 0.0),
        )

    def dispatch(self, x_TH: torch.Tensor, route: LocalRoute) -> Pending:
        route.count("out", [route.num_rows], x_TH, CHOICE_BYTES)
        return Pending(lambda: Arrivals(_at_home(x_TH), route.slot_TK, route.weight_TK, route.num_pairs))

    def dispatch_gradients(self, dy_TH: torch.Tensor, route: LocalRoute) -> Pending:
        route.backward = True
        route.count("out", [route.num_rows], dy_TH, 0)
        return Pending(lambda: _at_home(dy_TH))

    def combine(self, route: LocalRoute, partial_RH: torch.Tensor) -> Pending:
        route.count("back", [route.num_rows], partial_RH, 0)
        return Pending(lambda: partial_RH)

    def combine_gradients(self, route: LocalRoute, dx_RH: torch.Tensor, dweight_RJ: torch.Tensor) -> Pending:
        route.count("back", [route.num_rows], dx_RH, GRADIENT_BYTES)
        return Pending(lambda: (dx_RH, dweight_RJ))


def _at_home(x_TH: torch.Tensor) -> HiddenStates:
    """The layer's input as `home`: autograd saves it anyway, so there is nothing to offload."""
    x_TH = x_TH.contiguous()
    return HiddenStates(x_TH.new_empty(0, x_TH.shape[1]), x_TH.shape[1], home=x_TH)


def _why_not_among(ranks: int) -> str | None:
    return None if ranks == 1 else f"its rows stay where they are, and experts are on {ranks} ranks"
