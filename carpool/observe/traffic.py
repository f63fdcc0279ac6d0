"""Rows and bytes that a layer's rides send, counted by verb and by the rank that they go to.

Counting is always on, because it is cheap: transports know on the host how many rows they send, or count them in their
kernels. Nothing here synchronises with the device until somebody asks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from carpool.observe.to_host import to_device

# What rides send.
VERBS = ("plan", "dispatch", "combine", "dispatch_backward", "combine_backward")
# Whole sequences that move before a layer, and their gradients (`carpool.transport.sequences`).
MOVES = ("sequences", "sequences_backward")


class HostTraffic(NamedTuple):
    """What the host knows of a traffic, by verb: as `Traffic.rows`, `bytes` and `baseline`."""

    rows: dict[str, list[int]]
    bytes: dict[str, list[int]]
    baseline: dict[str, int]


class Traffic:
    """Rows and bytes that this rank sent, per verb and destination rank. Recomputed rides count: they do travel. Of
    sequences that move, each is a row.

    Attributes:
        rows, bytes: per verb, a list over destination ranks, this rank included.
        baseline: per verb, the bytes to and from other ranks that one row per (token, expert) would have taken for
            this rank's tokens.
    """

    def __init__(self, num_ranks: int, rank: int) -> None:
        self.num_ranks, self.rank = num_ranks, rank
        self._tallies: dict[tuple[str, int, int, tuple[int, ...] | None], torch.Tensor] = {}
        self.reset()

    def reset(self) -> None:
        self._rows, self._bytes, self._baseline = _zeros(self.num_ranks)
        for tally in self._tallies.values():
            tally.zero_()

    def exchange(self, counts: HostTraffic | None = None) -> HostTraffic:
        """Put `counts` (None: zeros) in the place of what the host has counted, which is returned."""
        before = HostTraffic(self._rows, self._bytes, self._baseline)
        self._rows, self._bytes, self._baseline = counts or _zeros(self.num_ranks)
        return before

    def repeat(self, counts: HostTraffic) -> None:
        """Count once more what was counted before."""
        for verb in (*VERBS, *MOVES):
            for rank in range(self.num_ranks):
                self._rows[verb][rank] += counts.rows[verb][rank]
                self._bytes[verb][rank] += counts.bytes[verb][rank]
        for verb in VERBS:
            self._baseline[verb] += counts.baseline[verb]

    @property
    def rows(self) -> dict[str, list[int]]:
        return self._read()._rows

    @property
    def bytes(self) -> dict[str, list[int]]:
        return self._read()._bytes

    @property
    def baseline(self) -> dict[str, int]:
        return self._read()._baseline

    def add(
        self, verb: str, rows_W: Sequence[int], row_bytes: int, choices_W: Sequence[int] = (), baseline_bytes: int = 0
    ) -> None:
        """`rows_W[r]` rows of `row_bytes` bytes went to rank r. Rows to oneself are counted as local.

        Args:
            choices_W: choices of this rank's tokens on each rank, each of which would have been a row of
                `baseline_bytes`."""
        rows, sizes = self._rows[verb], self._bytes[verb]
        for rank, n in enumerate(rows_W):
            rows[rank] += n
            sizes[rank] += n * row_bytes
        if choices_W:
            self._baseline[verb] += (sum(choices_W) - choices_W[self.rank]) * baseline_bytes

    def tally(
        self, verb: str, row_bytes: int, baseline_bytes: int, device: torch.device, ranks: tuple[int, ...] | None = None
    ) -> torch.Tensor:
        """Where kernels count what the host does not know: (2, W) int64 on the device, rows of `row_bytes` bytes to
        each rank, and choices of this rank's tokens on each rank (a row of `baseline_bytes` each). Kernels add to it;
        it is read when somebody asks, and the same tensor each time, so that a CUDA graph may hold it. Rows of 0 bytes
        are none.

        Args:
            ranks: those that a column each is of; None: all."""
        key = (verb, row_bytes, baseline_bytes, ranks)
        if key not in self._tallies:
            number = self.num_ranks if ranks is None else len(ranks)
            self._tallies[key] = torch.zeros(2, number, dtype=torch.int64, device=device)
        return self._tallies[key]

    def _read(self) -> Traffic:
        """Move what the kernels counted into the host's counters. Waits for the device."""
        for key, tally in self._tallies.items():
            verb, row_bytes, baseline_bytes, _ = key
            rows, choices = self._by_rank(key[3], tally).tolist()
            self.add(verb, rows, row_bytes, choices, baseline_bytes)
            tally.zero_()
        return self

    def _by_rank(self, ranks: tuple[int, ...] | None, tally: torch.Tensor) -> torch.Tensor:
        """(2, W) of a tally."""
        if ranks is None:
            return tally
        column = to_device(ranks, tally.device).long()
        return tally.new_zeros(2, self.num_ranks).index_copy_(1, column, tally)

    @staticmethod
    def totals(layers: Sequence[Traffic], device: torch.device, far: Sequence[int] = ()) -> torch.Tensor:
        """What several layers counted, without waiting for the device.

        Args:
            far: the ranks of other nodes.

        Returns:
            (L, W + 4) float64: rows dispatched to each rank; and to other ranks rows dispatched, bytes, and the bytes
            that one row per (token, expert) would have taken, plans included; bytes to ranks that are far."""
        on_host = []
        for one in layers:
            plan = one.remote(one._bytes, "plan")
            baseline = sum(one._baseline.values()) + plan
            crossed = sum(sizes[rank] for sizes in one._bytes.values() for rank in far)
            own = [one.remote(one._rows, "dispatch"), one.remote(one._bytes), baseline, crossed]
            on_host.append([*one._rows["dispatch"], *own])
        total = to_device(on_host, device)
        places = [(number, one.rank, key) for number, one in enumerate(layers) for key in one._tallies]
        if not places:
            return total
        about = [
            (layer, rank, verb == "dispatch", verb == "plan", row_bytes, baseline_bytes)
            for layer, rank, (verb, row_bytes, baseline_bytes, _) in places
        ]
        layer_N, rank_N, dispatch_N, plan_N, row_N, baseline_N = to_device(about, device).unbind(1)
        tallies = [layers[number]._by_rank(key[3], layers[number]._tallies[key]) for number, _, key in places]
        counted_N2W = torch.stack(tallies).double()
        own_N2 = counted_N2W.gather(2, rank_N.long().view(-1, 1, 1).expand(-1, 2, 1)).squeeze(2)
        rows_N, choices_N = (counted_N2W.sum(2) - own_N2).unbind(1)
        far_N = counted_N2W[:, 0] @ to_device([float(r in far) for r in range(layers[0].num_ranks)], device)
        rest = [rows_N * dispatch_N, rows_N * row_N, choices_N * baseline_N + rows_N * row_N * plan_N, far_N * row_N]
        rows_NW = counted_N2W[:, 0] * dispatch_N.unsqueeze(1)
        return total.index_add_(0, layer_N.long(), torch.cat([rows_NW, torch.stack(rest, 1)], 1))

    def remote(self, what: dict[str, list[int]], *verbs: str) -> int:
        return sum(sum(what[v]) - what[v][self.rank] for v in verbs or what)


def _zeros(num_ranks: int) -> HostTraffic:
    rows, sizes = ({verb: [0] * num_ranks for verb in (*VERBS, *MOVES)} for _ in range(2))
    return HostTraffic(rows, sizes, dict.fromkeys(VERBS, 0))
