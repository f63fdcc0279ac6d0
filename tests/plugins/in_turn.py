"""A schedule outside the package, in one file: chunks ride one after the other, and nothing travels beside anything.

    in-turn=3    D0 E0 C0    D1 E1 C1    D2 E2 C2        D: dispatch, E: experts, C: combine

With `last_first` the forward begins with the last chunk. The backward goes the other way round."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from carpool.experts import ExpertWeights
from carpool.ride.chunks import PLAIN
from carpool.ride.schedule import Schedule, ScheduleKind, register
from carpool.ride.setup import RideSetup, SavedActivations
from carpool.transport import Pending, Transport

Gradients = ExpertWeights | Callable[[], ExpertWeights] | None


@dataclass(frozen=True)
class InTurnOrder:
    chunks: int
    last_first: bool

    def start(
        self,
        x_TH: torch.Tensor,
        weight_TK: torch.Tensor,
        slot_TK: torch.Tensor,
        weights: ExpertWeights,
        setup: RideSetup,
    ) -> list[tuple[torch.Tensor, ...]]:
        return list(zip(*(tensor.tensor_split(self.chunks) for tensor in (x_TH, weight_TK, slot_TK)), strict=True))

    def forward(
        self, started: list[tuple[torch.Tensor, ...]], weights: ExpertWeights, setup: RideSetup, backward: bool
    ) -> tuple[torch.Tensor, tuple[SavedActivations, ...] | None]:
        y_C: list[Any] = [None] * self.chunks
        activations: list[SavedActivations] = []
        for chunk in self._order():
            ride = PLAIN.start(*started[chunk], weights, setup)
            y_C[chunk], saved = PLAIN.forward(ride, weights, setup, backward)
            activations += saved or ()
        return torch.cat(y_C), tuple(activations) if backward else None

    def backward(
        self,
        dy_TH: torch.Tensor,
        weights: ExpertWeights,
        activations: tuple[SavedActivations, ...],
        setup: RideSetup,
        needs_dweights: bool,
    ) -> tuple[Pending, Gradients]:
        dy_C, found, total = dy_TH.tensor_split(self.chunks), {}, None
        for chunk, saved in zip(reversed(self._order()), reversed(activations), strict=True):
            coming, dweights = PLAIN.backward(dy_C[chunk], weights, (saved,), setup, needs_dweights)
            found[chunk] = coming.wait()
            if isinstance(dweights, ExpertWeights):
                pairs = zip(total or dweights, dweights, strict=True)
                total = ExpertWeights._make(a if total is None or a is None else a + b for a, b in pairs)
        dx_C, dweight_C = zip(*(found[chunk] for chunk in range(self.chunks)), strict=True)
        return Pending(lambda: (torch.cat(dx_C), torch.cat(dweight_C))), total

    def _order(self) -> list[int]:
        return list(range(self.chunks))[:: -1 if self.last_first else 1]


@register
class InTurn(ScheduleKind):
    name = "in-turn"
    default_chunks = 3
    beside = False
    options: ClassVar[Mapping[str, Any]] = {"last_first": bool}

    @classmethod
    def order(cls, schedule: Schedule, transport: Transport, device: torch.device) -> InTurnOrder:
        return InTurnOrder(schedule.chunks, schedule.options.get("last_first", False))

    @classmethod
    def rides_under_way(cls, schedule: Schedule) -> int:
        return 1
