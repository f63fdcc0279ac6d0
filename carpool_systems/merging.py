"""Similar rows for the same expert travel as one. LOSSY.

    6 rows for expert 5, far away     lsh: two buckets of 4 and 2     2 rows travel, the mean of each bucket
                                      condense: four are alike        3 rows travel, the first of the four among them

| name       | rows are merged if                          | what travels | what a merged row gets back      |
|------------|---------------------------------------------|--------------|----------------------------------|
| `lsh`      | their hashes are equal                      | their mean   | the mean's output + (row - mean) |
| `condense` | their cosine with the first is large enough | the first    | the first's output               |

A hash is cross-polytope: a random projection to `width` numbers, of which the one with the largest absolute value
and its sign are kept. `hashes` of them must all agree, so more of them merge less. The projection is the same in
all steps and on all ranks. LSH-MoE rotates instead, which costs H x H products a row.

`condense` compares a row with those of the same expert among its `WINDOW` neighbours. LUFFY lowers its threshold as the
loss falls; here it stays.

Rows of a token's K experts are merged each for itself, so a token takes K rows before merging, as with `alltoall`, and
not one for each rank, as with `dedup`. Rows for experts of their own rank stay as they are.

    choices (token, expert)     groups of them     one row with one choice for each group rides     each choice takes
    its group's output, weighted where the token is

What rides is exact: the gradients are those of the function that is computed, means and all.

Sources: LSH-MoE (arXiv 2411.08446), LUFFY's token condensation.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F

from carpool.metrics.counters import LayerStats, Traffic
from carpool.ride.setup import RideSetup
from carpool.routing import Routing
from carpool.transport.codecs import Merge

# Rows that are compared with each other at once, which takes WINDOW x WINDOW numbers.
WINDOW = 1024


class _Merger(Merge):
    """Merges choices of one expert that are alike.

    Attributes:
        residual: whether a merged row gets back what it differs from what travelled.
    """

    residual: ClassVar[bool] = False

    @abstractmethod
    def alike(self, x_NH: torch.Tensor, slot_N: torch.Tensor) -> torch.Tensor:
        """(N,) int64: equal numbers for rows of one slot that are merged."""

    @abstractmethod
    def merged(self, rows_NH: torch.Tensor, group_N: torch.Tensor, number: int) -> torch.Tensor:
        """(number, H): what travels of each group. Differentiable."""

    @torch.no_grad()
    def groups(self, x_NH: torch.Tensor, slot_N: torch.Tensor) -> tuple[torch.Tensor, int]:
        """Waits for the device.

        Args:
            slot_N: global slots. Only rows for the same one are merged.

        Returns:
            group_N int64, and how many groups there are. Each has a row."""
        key_N2 = torch.stack([slot_N.long(), self.alike(x_NH, slot_N)], dim=1)
        groups, group_N = torch.unique(key_N2, dim=0, return_inverse=True)
        return group_N, groups.shape[0]

    # How many groups there are depends on values.
    @torch._disable_dynamo
    def ride(
        self,
        x_TH: torch.Tensor,
        routing: Routing,
        slot_TK: torch.Tensor,
        setup: RideSetup,
        ride_tokens: Callable[[torch.Tensor, Routing, torch.Tensor, RideSetup], tuple[torch.Tensor, Any]],
    ) -> tuple[torch.Tensor, Any]:
        transport, stats = setup.transport, setup.stats
        assert routing.weight_TK is not None
        (num_tokens, top_k), own = slot_TK.shape, transport.rank
        stats.count(routing.expert_TK, routing.weight_TK)
        routing = routing.of_slices(top_k // max(1, routing.expert_TK.shape[1]))
        weight_TK = routing.weight_TK
        assert weight_TK is not None
        stats.tokens_dispatched += num_tokens
        choice_N = (slot_TK.reshape(-1) >= 0).nonzero().squeeze(1)
        token_N, slot_N = choice_N // max(1, top_k), slot_TK.reshape(-1)[choice_N]
        rank_N = slot_N // transport.slots_per_rank
        leaves_N = rank_N != own
        rows_NH = x_TH[token_N]
        away_M, here_M = leaves_N.nonzero().squeeze(1), (~leaves_N).nonzero().squeeze(1)
        group_M, number = self.groups(rows_NH[away_M], slot_N[away_M])
        x_CH = torch.cat([self.merged(rows_NH[away_M], group_M, number), rows_NH[here_M]])
        group_N = torch.empty_like(choice_N)
        group_N[away_M] = group_M
        group_N[here_M] = number + torch.arange(len(here_M), device=group_N.device)

        def of_group(of_TK: torch.Tensor) -> torch.Tensor:
            # All of a group have the same slot, and the same expert.
            of_C = of_TK.new_empty(x_CH.shape[0], 1)
            of_C[group_N, 0] = of_TK.reshape(-1)[choice_N]
            return of_C

        choices_W = torch.bincount(rank_N.long(), minlength=transport.num_ranks).tolist()
        counted = replace(setup, stats=_MergedStats(stats, choices_W))
        ones = Routing(of_group(routing.expert_TK), weight_TK.new_ones(x_CH.shape[0], 1))
        y_CH, made = ride_tokens(x_CH, ones, of_group(slot_TK), counted)
        y_NH = y_CH[group_N].float()
        if self.residual:
            y_NH = y_NH + (rows_NH - x_CH[group_N]).float()
        y_NH = y_NH * weight_TK.reshape(-1, 1)[choice_N]
        y_PH = y_NH.new_zeros(num_tokens * top_k, x_TH.shape[1]).index_copy(0, choice_N, y_NH)
        return y_PH.view(num_tokens, top_k, x_TH.shape[1]).sum(1).to(y_CH.dtype), made


class LSH(_Merger):
    """Rows whose hashes are all equal."""

    name = "lsh"
    options: ClassVar[Mapping[str, Any]] = {"hashes": int, "width": int}
    residual = True

    def __init__(self, hashes: int = 2, width: int = 16) -> None:
        if hashes < 1 or width < 1 or (2 * width) ** hashes > 2**62:
            raise ValueError(
                f"codec merge_options: hashes={hashes} and width={width} must be at least 1, and (2 * width) ** hashes "
                "at most 2**62"
            )
        self.hashes, self.width = hashes, width
        self._projections: dict[tuple[int, torch.device], torch.Tensor] = {}

    def alike(self, x_NH: torch.Tensor, slot_N: torch.Tensor) -> torch.Tensor:
        """(N,) int64: the hashes of a row as one number."""
        hashes, width = self.hashes, self.width
        key = (x_NH.shape[1], x_NH.device)
        if key not in self._projections:
            drawn = torch.randn(x_NH.shape[1], hashes * width, generator=torch.Generator().manual_seed(0))
            self._projections[key] = drawn.to(x_NH.device)
        projected = (x_NH.float() @ self._projections[key]).view(-1, hashes, width)
        most = projected.abs().argmax(2)
        code = 2 * most + (projected.gather(2, most[:, :, None])[:, :, 0] > 0)
        base = (2 * width) ** torch.arange(hashes, device=x_NH.device)
        return (code * base).sum(1)

    def merged(self, rows_NH: torch.Tensor, group_N: torch.Tensor, number: int) -> torch.Tensor:
        sum_CH = rows_NH.new_zeros(number, rows_NH.shape[1], dtype=torch.float32)
        # Not `index_add`, whose order of additions differs from call to call on CUDA.
        sum_CH = sum_CH.index_put((group_N,), rows_NH.float(), accumulate=True)
        return (sum_CH / torch.bincount(group_N, minlength=number)[:, None]).to(rows_NH.dtype)


class Condense(_Merger):
    """Rows that are similar to the first of them."""

    name = "condense"
    options: ClassVar[Mapping[str, Any]] = {"similarity": float}

    def __init__(self, similarity: float = 0.9) -> None:
        if not 0 < similarity <= 1:
            raise ValueError(f"codec merge_options: similarity={similarity} must be above 0 and at most 1")
        self.similarity = similarity

    def alike(self, x_NH: torch.Tensor, slot_N: torch.Tensor) -> torch.Tensor:
        """(N,) int64: the number of the row that travels for this one; its own if it travels itself."""
        order_N = torch.argsort(slot_N, stable=True)
        first_N = torch.empty_like(order_N)
        if not len(order_N):
            return first_N
        for window in order_N.split(WINDOW):
            unit = F.normalize(x_NH[window].float(), dim=1)
            alike = unit @ unit.t() >= self.similarity
            alike &= slot_N[window][:, None] == slot_N[window]
            own = torch.arange(len(window), device=x_NH.device)
            alike = torch.tril(alike).fill_diagonal_(True)
            first = alike.int().argmax(1)
            # One that is alike to a row which does not travel itself is on its own: the two might be too far apart.
            first_N[window] = window[torch.where(first[first] == first, first, own)]
        return first_N

    def merged(self, rows_NH: torch.Tensor, group_N: torch.Tensor, number: int) -> torch.Tensor:
        first_C = torch.full((number,), len(group_N), device=group_N.device)
        first_C.scatter_reduce_(0, group_N, torch.arange(len(group_N), device=group_N.device), "amin")
        return rows_NH[first_C]


class _MergedTraffic(Traffic):
    """Counts what rides in a layer's counts, beside the baseline of all choices that there were."""

    def __init__(self, layer: Traffic, choices_W: Sequence[int]) -> None:
        self.num_ranks, self.rank = layer.num_ranks, layer.rank
        self._layer, self._choices_W = layer, choices_W

    def add(
        self, verb: str, rows_W: Sequence[int], row_bytes: int, choices_W: Sequence[int] = (), baseline_bytes: int = 0
    ) -> None:
        self._layer.add(verb, rows_W, row_bytes, self._choices_W if choices_W else (), baseline_bytes)

    def tally(
        self, verb: str, row_bytes: int, baseline_bytes: int, device: torch.device, ranks: tuple[int, ...] | None = None
    ) -> torch.Tensor:
        """The layer's, in which choices of merged rows take no bytes. Asked for once by each verb of a ride."""
        if baseline_bytes:
            self._layer.add(verb, (), 0, self._choices_W, baseline_bytes)
        return self._layer.tally(verb, row_bytes, 0, device, ranks)


class _MergedStats(LayerStats):
    """Tokens are counted before they are merged."""

    def __init__(self, layer: LayerStats, choices_W: Sequence[int]) -> None:
        self.traffic, self.meter, self.tokens_dispatched = _MergedTraffic(layer.traffic, choices_W), layer.meter, 0

    def count(self, expert_TK: torch.Tensor, weight_TK: torch.Tensor) -> None:
        pass
