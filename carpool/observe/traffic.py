"""Rows and bytes that a layer's rides send, counted by verb and by the rank that they go to.

Counting is always on, because it is cheap: transports know on the host how many rows they send, or count them in their
kernels. Nothing here synchronises with the device until somebody asks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

VERBS = ("plan", "dispatch", "combine", "dispatch_backward", "combine_backward")


class Traffic:
    """Rows and bytes that this rank sent, per verb and destination rank. Recomputed rides count: they do travel.

    Attributes:
        rows, bytes: per verb, a list over destination ranks, this rank included.
        baseline: per verb, the bytes to and from other ranks that one row per (token, expert) would have taken for
            this rank's tokens.
    """

    def __init__(self, num_ranks: int, rank: int) -> None:
        self.num_ranks, self.rank = num_ranks, rank
        self._tallies: dict[tuple[str, int, int], torch.Tensor] = {}
        self.reset()

    def reset(self) -> None:
        self._rows: dict[str, list[int]] = {verb: [0] * self.num_ranks for verb in VERBS}
        self._bytes: dict[str, list[int]] = {verb: [0] * self.num_ranks for verb in VERBS}
        self._baseline: dict[str, int] = dict.fromkeys(VERBS, 0)
        for tally in self._tallies.values():
            tally.zero_()

    @property
    def rows(self) -> dict[str, list[int]]:
        return self._read()._rows

    @property
    def bytes(self) -> dict[str, list[int]]:
        return self._read()._bytes

    @property
    def baseline(self) -> dict[str, int]:
        return self._read()._baseline

    def add(self, verb: str, rows_W: Sequence[int], row_bytes: int) -> None:
        """`rows_W[r]` rows of `row_bytes` bytes went to rank r. Rows to oneself are counted as local."""
        for rank, n in enumerate(rows_W):
            self._rows[verb][rank] += n
            self._bytes[verb][rank] += n * row_bytes

    def add_baseline(self, verb: str, choices_W: Sequence[int], row_bytes: int) -> None:
        """This rank's tokens have `choices_W[r]` choices on rank r, each of which would have been a row."""
        self._baseline[verb] += (sum(choices_W) - choices_W[self.rank]) * row_bytes

    def tally(self, verb: str, row_bytes: int, baseline_bytes: int, device: torch.device) -> torch.Tensor:
        """Where kernels count what the host does not know: (2, W) int64 on the device, rows of `row_bytes` bytes to
        each rank, and choices of this rank's tokens on each rank (a row of `baseline_bytes` each). Kernels add to it;
        it is read when somebody asks, and the same tensor each time, so that a CUDA graph may hold it."""
        key = (verb, row_bytes, baseline_bytes)
        if key not in self._tallies:
            self._tallies[key] = torch.zeros(2, self.num_ranks, dtype=torch.int64, device=device)
        return self._tallies[key]

    def _read(self) -> Traffic:
        """Move what the kernels counted into the host's counters. Waits for the device."""
        self.read_all([self])
        return self

    @staticmethod
    def read_all(layers: Sequence[Traffic]) -> list[tuple[dict[str, list[int]], dict[str, list[int]], dict[str, int]]]:
        """(rows, bytes, baseline) of several layers. Reads the device once for all that their kernels counted."""
        places = [(traffic, key) for traffic in layers for key in traffic._tallies]
        if places:
            tallies = [traffic._tallies[key] for traffic, key in places]
            counted = torch.stack(tallies).tolist()
            for (traffic, (verb, row_bytes, baseline_bytes)), (rows, choices) in zip(places, counted, strict=True):
                traffic.add(verb, rows, row_bytes)
                traffic.add_baseline(verb, choices, baseline_bytes)
            torch._foreach_zero_(tallies)
        return [(traffic._rows, traffic._bytes, traffic._baseline) for traffic in layers]

    def remote(self, what: dict[str, list[int]], *verbs: str) -> int:
        return sum(sum(what[v]) - what[v][self.rank] for v in verbs or VERBS)
