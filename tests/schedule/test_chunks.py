"""What a ride in chunks asks of its transport: each part of the tokens travels once each way, and never more parts are
under way than a transport was told to have leases for."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from carpool.experts import ExpertFunction, ExpertWeights, GroupedExperts, make_activation
from carpool.metrics.counters import LayerStats
from carpool.ride.function import ride
from carpool.ride.schedule import Schedule
from carpool.ride.setup import RideSetup
from carpool.routing import Routing
from carpool.transport import NVLinkOptions, Pending
from carpool.transport.dedup import Dedup

TOKENS, HIDDEN, SLOTS, TOP_K = 37, 8, 4, 2
EXPERTS = GroupedExperts(ExpertFunction(make_activation("silu", gated=True)))
PAIRS = [(1, None), (2, None), (8, None), (1, 2), (2, 1), (1, 4), (2, 4), (4, 2), (4, 8), (8, 4), (2, 3)]


class Watched(Dedup):
    """Counts the verbs of each route, and how many dispatches were ever without their combine."""

    def __init__(self) -> None:
        super().__init__(None, SLOTS)
        self.asked: Counter[tuple[str, int]] = Counter()
        self.numbers: dict[int, int] = {}
        self.under_way = self.most = 0

    def _asked(self, verb: str, route: Any, change: int) -> None:
        self.asked[verb, self.numbers.setdefault(id(route), len(self.numbers))] += 1
        self.under_way += change
        self.most = max(self.most, self.under_way)

    def dispatch(self, x_TH: torch.Tensor, route: Any) -> Pending:
        self._asked("dispatch", route, 1)
        return super().dispatch(x_TH, route)

    def dispatch_gradients(self, dy_TH: torch.Tensor, route: Any) -> Pending:
        self._asked("dispatch_gradients", route, 1)
        return super().dispatch_gradients(dy_TH, route)

    def combine(self, route: Any, partial_RH: torch.Tensor) -> Pending:
        self._asked("combine", route, -1)
        return super().combine(route, partial_RH)

    def combine_gradients(self, route: Any, *gradients: torch.Tensor) -> Pending:
        self._asked("combine_gradients", route, -1)
        return super().combine_gradients(route, *gradients)


@pytest.mark.parametrize(("chunks", "backward_chunks"), PAIRS)
def test_each_piece_travels_once_and_finds_a_lease(chunks: int, backward_chunks: int | None) -> None:
    generator = torch.Generator().manual_seed(0)
    schedule, transport = Schedule("chunks", chunks, backward_chunks), Watched()
    x_TH = torch.randn(TOKENS, HIDDEN, generator=generator).requires_grad_()
    slot_TK = torch.rand(TOKENS, SLOTS, generator=generator).argsort(1)[:, :TOP_K].int()
    weight_TK = torch.rand(TOKENS, TOP_K, generator=generator)
    up = torch.randn(SLOTS, 2 * HIDDEN, HIDDEN, generator=generator).requires_grad_()
    weights = ExpertWeights(up, torch.randn(SLOTS, HIDDEN, HIDDEN, generator=generator).requires_grad_())
    order = schedule.order(transport, x_TH.device)
    setup = RideSetup(transport, EXPERTS, LayerStats(SLOTS, 1, 0), order)
    y_TH, _ = ride(x_TH, Routing(slot_TK, weight_TK), slot_TK, weights, setup)
    y_TH.backward(torch.ones_like(y_TH))
    verbs = "dispatch", "combine", "dispatch_gradients", "combine_gradients"
    assert transport.asked == Counter({(verb, part): 1 for verb in verbs for part in range(schedule.pieces)})
    assert transport.under_way == 0
    assert transport.most <= NVLinkOptions().under(schedule).num_leases
