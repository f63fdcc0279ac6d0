"""Counters of one layer: tokens, load per expert, entropy, with the layer's `Traffic` and `Meter`.

The load is one integer scatter. Nothing here synchronises with the device until somebody asks (`summary`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from carpool.observe.meter import Meter, Spans
from carpool.observe.recompute import in_recompute, new_counter
from carpool.observe.traffic import VERBS, HostTraffic, Traffic


@dataclass(frozen=True)
class HostCounts:
    """What a layer counts on the host: see `LayerStats`, `Meter` for the spans, and `Traffic`; None: no traffic."""

    tokens: int = 0
    tokens_dispatched: int = 0
    spans: Spans = field(default_factory=dict)
    traffic: HostTraffic | None = None


class LayerStats:
    """Counters of one layer on one rank, since the last `reset`."""

    def __init__(self, num_experts: int, num_ranks: int, rank: int) -> None:
        self.traffic = Traffic(num_ranks, rank)
        self.meter = Meter()
        self.num_experts = num_experts
        self._load_E: torch.Tensor | None = None
        self._entropy: torch.Tensor | None = None
        self.tokens = self.tokens_dispatched = 0
        self.top_k = 0

    @torch.no_grad()
    def count(self, expert_TK: torch.Tensor, weight_TK: torch.Tensor) -> None:
        """Count the tokens and the load of one forward; a recomputed one is not counted. (If its rows travel again, the
        ride adds them to `tokens_dispatched` and to the traffic again.)"""
        if in_recompute():
            return
        if self._load_E is None or self._entropy is None:
            self._load_E = new_counter((self.num_experts + 1,), torch.int64, expert_TK.device)
            self._entropy = new_counter((), torch.float64, expert_TK.device)
        weight_TK = weight_TK.masked_fill(expert_TK < 0, 0.0)
        share_TK = weight_TK / weight_TK.sum(1, keepdim=True).clamp(min=1e-20)
        self._entropy -= torch.special.xlogy(share_TK, share_TK).sum()
        # -1 ("no expert") goes to the last place, which nobody reads: no host synchronisation to filter it out.
        index = torch.where(expert_TK < 0, self.num_experts, expert_TK).reshape(-1).long()
        self._load_E.scatter_add_(0, index, torch.ones_like(index))
        self.tokens += expert_TK.shape[0]
        self.top_k = expert_TK.shape[1]

    @property
    def load_E(self) -> torch.Tensor:
        """(E,) int64: choices of each expert by this rank's tokens."""
        if self._load_E is None:
            return torch.zeros(self.num_experts, dtype=torch.int64)
        return self._load_E[:-1]

    @property
    def entropy(self) -> torch.Tensor:
        """Sum over this rank's tokens of the entropy of their K weights, in nats: 0 if one expert has all of the
        weight, ln K if all have the same."""
        return torch.zeros((), dtype=torch.float64) if self._entropy is None else self._entropy

    def exchange(self, counts: HostCounts) -> HostCounts:
        """Put `counts` in the place of what was counted on the host since the last reset, which is returned."""
        spans, traffic = self.meter.exchange(counts.spans), self.traffic.exchange(counts.traffic)
        before = HostCounts(self.tokens, self.tokens_dispatched, spans, traffic)
        self.tokens, self.tokens_dispatched = counts.tokens, counts.tokens_dispatched
        return before

    def add(self, counts: HostCounts) -> None:
        """Count on the host what a CUDA graph repeats: what it counts on the device it counts by itself."""
        self.tokens += counts.tokens
        self.tokens_dispatched += counts.tokens_dispatched
        self.meter.add(counts.spans)
        if counts.traffic is not None:
            self.traffic.repeat(counts.traffic)

    def summary(self) -> RideStats:
        traffic = self.traffic
        return RideStats(
            tokens=self.tokens,
            tokens_dispatched=self.tokens_dispatched,
            num_experts_per_tok=self.top_k,
            rows_dispatched=sum(traffic.rows["dispatch"]),
            rows_remote=traffic.remote(traffic.rows, "dispatch"),
            bytes_local={verb: traffic.bytes[verb][traffic.rank] for verb in VERBS},
            bytes_remote={verb: traffic.remote(traffic.bytes, verb) for verb in VERBS},
            load_E=tuple(self.load_E.tolist()),
        )

    def reset(self) -> None:
        self.traffic.reset()
        self.meter.milliseconds(reset=True)
        if self._load_E is not None and self._entropy is not None:
            self._load_E.zero_()
            self._entropy.zero_()
        self.tokens = self.tokens_dispatched = 0


@dataclass(frozen=True)
class RideStats:
    """What one rank's tokens did in one layer. Rows to the own rank are copies, but not remote.

    Activation checkpointing sends a token's rows twice: `tokens` counts it once, `tokens_dispatched`, rows and bytes
    twice."""

    tokens: int
    tokens_dispatched: int
    num_experts_per_tok: int
    rows_dispatched: int
    rows_remote: int
    bytes_local: dict[str, int]
    bytes_remote: dict[str, int]
    load_E: tuple[int, ...] = field(repr=False)
    dropped: int = 0

    @property
    def rows_local(self) -> int:
        """Rows that stayed on their own rank."""
        return self.rows_dispatched - self.rows_remote

    @property
    def copies_per_token(self) -> float:
        """Rows dispatched per token, the copy that stays on the own rank included."""
        return self.rows_dispatched / self.tokens_dispatched if self.tokens_dispatched else 0.0

    def __str__(self) -> str:
        mean = sum(self.load_E) / max(1, len(self.load_E))
        sizes = ", ".join(f"{verb} {size} B" for verb, size in self.bytes_remote.items() if size)
        return (
            f"{self.tokens} tokens, {self.copies_per_token:.2f} copies each (of {self.num_experts_per_tok} experts), "
            f"{self.rows_local} rows stayed, {self.rows_remote} went to other ranks"
            f"{f': {sizes}' if sizes else ''}; "
            f"load max/mean {max(self.load_E, default=0) / mean if mean else 0.0:.2f}, "
            f"{sum(n == 0 for n in self.load_E)} experts idle, {self.dropped} choices dropped"
        )
