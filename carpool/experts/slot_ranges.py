"""Weights of a rank's slots in two ranges: homes where their parameters are, and spare slots, which are fetched.

    slots    0 ... held - 1                  homes: the parameters themselves, no copy
             held ... first - 1              empty: another rank has more homes
             first ... first + number - 1    spare slots: replicas of this ride, on their way (`carpool.ride.balanced`)

Experts whose `computes_ranges` is True get `SlotRanges` in place of `ExpertWeights`: they compute homes first, and wait
for spare slots then. Their gradients of weights are `RangeGradients`. Other experts get `stacked`, a copy of both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from carpool.experts.base import ExpertWeights, stand_in


class RangeGradients(NamedTuple):
    """Gradients of the weights of homes, and of spare slots; fields without one are None in both."""

    homes: ExpertWeights
    spare: ExpertWeights


class SlotRanges:
    """See the module's docstring.

    Args:
        homes: (held, ...) each.
        first: where spare slots begin.
        number: of spare slots.
        fetched: waits for the weights of spare slots, and returns a tensor (number, ...) for each of `travelling`.
    """

    def __init__(
        self, homes: ExpertWeights, first: int, number: int, fetched: Callable[[], Sequence[torch.Tensor]]
    ) -> None:
        self.homes, self.first, self.number, self._fetched = homes, first, number, fetched
        # Not cached properties: threads, which rides of two micro-batches have, would share a lock while they wait.
        self._spare: ExpertWeights | None = None
        self._stacked: ExpertWeights | None = None

    @property
    def num_slots(self) -> int:
        return self.first + self.number

    @property
    def spare(self) -> ExpertWeights:
        """Those of spare slots. The first use lets the current stream wait for them."""
        if self._spare is None:
            arrived = dict(zip(travelling(self.homes), self._fetched(), strict=True))
            self._spare = self._of(self.number, arrived)
        return self._spare

    def stacked(self) -> ExpertWeights:
        """Those of all slots, copied into one tensor each; zero where a slot is empty."""
        if self._stacked is None:
            homes, spare = travelling(self.homes), travelling(self.spare)
            rows = {i: stack(home, self.first, spare[i]) for i, home in homes.items()}
            self._stacked = self._of(self.num_slots, rows)
        return self._stacked

    def release(self) -> None:
        """After the last product that reads them has been launched: delayed gradients of weights hold none."""
        self._spare = self._stacked = None
        self._fetched = _released

    def apart(self, dslots: ExpertWeights | RangeGradients) -> RangeGradients:
        """Gradients by range, from those of all slots: views."""
        if isinstance(dslots, RangeGradients):
            return dslots
        held, first = len(self.homes.up_SFH), self.first
        ranges = ([None if d is None else d[part] for d in dslots] for part in (slice(held), slice(first, None)))
        return RangeGradients(*map(ExpertWeights._make, ranges))

    def _of(self, slots: int, rows: dict[int, torch.Tensor]) -> ExpertWeights:
        return ExpertWeights._make(
            home
            if home is None
            else rows[i]
            if i in rows
            else stand_in((slots, *home.shape[1:]), home.dtype, home.device)
            for i, home in enumerate(self.homes)
        )


def _released() -> Sequence[torch.Tensor]:
    raise RuntimeError("the spare slots of this ride were released, and others may have them")


def travelling(weights: ExpertWeights) -> dict[int, torch.Tensor]:
    """What is fetched, by the number of its field. Of a quantised matrix, its codes and scales are."""
    return {i: w for i, w in enumerate(weights) if w is not None and not (weights.quantised and i < 2)}


def stack(home: torch.Tensor, first: int, spare: torch.Tensor) -> torch.Tensor:
    """(slots, ...) from (held, ...) and (number, ...), which begins at slot `first`."""
    empty = [home.new_zeros(first - len(home), *home.shape[1:])] if first > len(home) else []
    return torch.cat([home, *empty, spare])
