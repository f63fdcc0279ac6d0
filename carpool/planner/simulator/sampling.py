"""What each rank of a large run has to carry and to compute: drawn from a trace's sequences, or from uniform routing.

A trace is of a few thousand tokens, a step of a large run has millions. Tokens of one text choose alike, so what is
drawn is a *sequence* of the trace, with all its tokens and in all layers at once: each rank draws, for each
micro-batch, as many sequences as fill it. Of a sequence two numbers for each rank of an expert-parallel group are
enough, and they add up: how many choices fall on that rank, and how many of its tokens travel there.

    a trace of 256 sequences, ranks of 8,192 tokens:    each rank draws 128 of the 256, with replacement
    experts of rank 3 compute                           the choices that fall on rank 3, of the sequences of its group
    rank 3 sends                                        the rows of its own sequences to ranks of other nodes

A model with more layers than the trace takes the nearest by depth, turned by a rank for each layer, so that not the
same ranks are busy in all of them. Experts lie on ranks in order. Everything is relative to balanced ranks under
uniform routing (1.0), because that is what the lengths of an event graph stand for."""

from __future__ import annotations

from dataclasses import dataclass
from math import comb
from typing import TYPE_CHECKING, Literal

import numpy as np

from carpool.planner.model.routes import check_trace
from carpool.planner.step.events import Array, Group

if TYPE_CHECKING:
    from carpool.placement.trace import Trace

UNIFORM_SEQUENCES, UNIFORM_LENGTH, UNIFORM_LAYERS = 64, 64, 4


@dataclass(frozen=True)
class Spread:
    """Over what the tokens of a stage spread.

    Attributes:
        ranks: of the stage.
        group: of the ranks over which a layer's experts are spread.
        num_experts, top_k: of the model.
        tokens: that a rank routes in a micro-batch.
        ranks_per_node: consecutive ranks that share a node.
        even: spare slots keep ranks at what lengths stand for, whatever is drawn.
        one_row_for: what a transport sends one row to: each "rank", each "expert" or each "node" that a token needs.
    """

    ranks: int
    group: Group
    num_experts: int
    top_k: int
    tokens: int
    ranks_per_node: int
    one_row_for: Literal["rank", "expert", "node"] = "rank"
    even: bool = False

    @property
    def places(self) -> int:
        """Of a group: nodes if it spans several, otherwise ranks. What travels inside a place does not count."""
        nodes = self.group.size * self.group.stride // self.ranks_per_node
        return nodes if nodes > 1 and self.group.size % nodes == 0 else self.group.size

    @property
    def visits(self) -> float:
        """Rows that a token sends to one rank, if its experts are chosen uniformly."""
        if self.one_row_for == "expert":
            return self.top_k / self.group.size
        parts = self.group.size if self.one_row_for == "rank" else self.places
        others = self.num_experts - self.num_experts // parts
        return (1 - comb(others, self.top_k) / comb(self.num_experts, self.top_k)) * parts / self.group.size


class SampledRouting:
    """Loads and rows of all ranks, relative to balanced ones.

    Args:
        spread: over what.
        trace: of the same number of experts and choices; None: uniform routing.
        layers: of the model that have experts.
        stretch: by how much deviations from 1.0 are stretched; 0: balanced.

    Raises:
        ValueError: the trace is of another model, or its experts cannot be divided among the ranks."""

    def __init__(
        self, spread: Spread, trace: Trace | None = None, *, layers: int, seed: int = 0, stretch: float = 1.0
    ) -> None:
        if trace is not None:
            check_trace(trace, spread.num_experts, spread.top_k)
        if spread.num_experts % spread.group.size:
            raise ValueError(f"{spread.num_experts} experts cannot be divided among {spread.group.size} ranks")
        self.spread, self.layers, self.stretch = spread, layers, stretch
        self._seed = seed
        self._pairs, self._rows, self._length = _statistics(spread, trace, seed)
        self._kept: dict[tuple[int, int], tuple[Array, Array]] = {}
        self._turned: dict[tuple[int, int], tuple[Array, Array]] = {}

    def load_R(self, layer: int, micro_batch: int = 0) -> Array:
        """(ranks,) how much the experts of each rank compute in a layer, the `layer`-th that has experts."""
        return self._of(layer, micro_batch)[0]

    def rows_R(self, layer: int, micro_batch: int = 0) -> Array:
        """(ranks,) the rows that each rank sends or receives between places, whichever are more."""
        return self._of(layer, micro_batch)[1]

    def imbalance(self) -> float:
        """The fullest rank's load by the mean, of the first micro-batch, the mean over layers and groups."""
        fullest = [self._grid(self.load_R(layer)).max(1).mean() for layer in range(self.layers)]
        return float(np.mean(fullest))

    def _grid(self, of_R: Array) -> Array:
        """(ranks,) as (outer, members of the group, inner)."""
        size, stride = self.spread.group
        return of_R.reshape(-1, size, stride)

    def _of(self, layer: int, micro_batch: int) -> tuple[Array, Array]:
        if (layer, micro_batch) in self._turned:
            return self._turned[layer, micro_batch]
        recorded = layer * len(self._pairs) // self.layers
        turned = []
        if (recorded, micro_batch) not in self._kept:
            counts_RS = self._counts(micro_batch)
            self._kept |= {(one, micro_batch): self._drawn(one, counts_RS) for one in range(len(self._pairs))}
        for of_R in self._kept[recorded, micro_batch]:
            grid = np.roll(self._grid(of_R), layer, axis=1)
            turned.append(1 + self.stretch * (grid.reshape(-1) - 1))
        return self._turned.setdefault((layer, micro_batch), (turned[0], turned[1]))

    def _drawn(self, recorded: int, counts_RS: Array) -> tuple[Array, Array]:
        """Loads and rows of a layer of the trace, for sequences that each rank has drawn."""
        size, stride = self.spread.group
        draws = max(1, round(self.spread.tokens / self._length))
        # (groups, members, sequences): the members of a group are `stride` apart.
        members = counts_RS.reshape(-1, size, stride, counts_RS.shape[1]).swapaxes(1, 2)
        counts_GWS = members.reshape(-1, size, counts_RS.shape[1])
        pairs_SW, rows_SW = self._pairs[recorded], self._rows[recorded]
        load_GW = counts_GWS.sum(1) @ pairs_SW
        places = self.spread.places
        inside = size // places
        at_GPiS = counts_GWS.reshape(len(counts_GWS), places, inside, -1)
        own_PS = rows_SW.reshape(-1, places, inside).sum(2).T
        sent_GW = (counts_GWS @ rows_SW.sum(1)) - np.einsum("gpis,ps->gpi", at_GPiS, own_PS).reshape(-1, size)
        kept_GW = np.einsum("gps,psi->gpi", at_GPiS.sum(2), rows_SW.T.reshape(places, inside, -1).swapaxes(1, 2))
        received_GW = counts_GWS.sum(1) @ rows_SW - kept_GW.reshape(-1, size)
        tokens = draws * self._length
        load_GW = load_GW / (tokens * self.spread.top_k)
        remote = tokens * self.spread.visits * (size - inside)
        rows_GW = np.maximum(sent_GW, received_GW) / remote if remote else np.ones_like(load_GW)

        def by_rank(of_GW: Array) -> Array:
            return of_GW.reshape(-1, stride, size).swapaxes(1, 2).reshape(-1)

        return by_rank(load_GW), by_rank(rows_GW)

    def _counts(self, micro_batch: int) -> Array:
        """(ranks, sequences) float32: how often each rank has drawn each sequence."""
        sequences = self._pairs.shape[1]
        draws = max(1, round(self.spread.tokens / self._length))
        rng = np.random.default_rng((self._seed, micro_batch))
        counts_RS = rng.multinomial(draws, np.full(sequences, 1 / sequences), size=self.spread.ranks)
        return counts_RS.astype(np.float32)


def _statistics(spread: Spread, trace: Trace | None, seed: int) -> tuple[Array, Array, float]:
    """((L, S, W) choices of each sequence that fall on each rank, (L, S, W) rows there, tokens of a sequence)."""
    if trace is None:
        rng = np.random.default_rng(seed)
        shape = UNIFORM_LAYERS, UNIFORM_SEQUENCES * UNIFORM_LENGTH, spread.num_experts
        expert_LTK = np.argpartition(rng.random(shape, dtype=np.float32), spread.top_k, axis=2)[..., : spread.top_k]
        number_T = np.repeat(np.arange(UNIFORM_SEQUENCES), UNIFORM_LENGTH)
    else:
        expert_LTK = trace.expert_LTK
        number_T = np.concatenate([[0], np.cumsum(np.diff(trace.sequence_T) != 0)])
    size, sequences = spread.group.size, int(number_T[-1]) + 1
    rank_LTK = expert_LTK.astype(np.int64) // (spread.num_experts // size)
    pairs_LSW = _counted(rank_LTK, number_T, sequences, size)
    if spread.one_row_for == "expert":
        rows_LSW = pairs_LSW
    else:
        # Between nodes, a row to a node is divided evenly among its ranks, one of which takes it in.
        of_place = 1 if spread.one_row_for == "rank" else size // spread.places
        place_LTK = np.sort(rank_LTK // of_place, axis=2)
        first_LTK = np.concatenate([np.full_like(place_LTK[..., :1], True), np.diff(place_LTK, axis=2) > 0], axis=2)
        places_LSP = _counted(place_LTK, number_T, sequences, size // of_place, first_LTK)
        rows_LSW = np.repeat(places_LSP / of_place, of_place, axis=2)
    length = len(number_T) / sequences
    if trace is None:
        # Few tokens are drawn, so their mean is off by chance; which ranks it favours would stay the same.
        pairs_LSW = pairs_LSW + length * spread.top_k / size - pairs_LSW.mean(1, keepdims=True)
        rows_LSW = rows_LSW + length * spread.visits - rows_LSW.mean(1, keepdims=True)
    return pairs_LSW.astype(np.float32), rows_LSW.astype(np.float32), length


def _counted(at_LTK: Array, number_T: Array, sequences: int, places: int, weight_LTK: Array | None = None) -> Array:
    """(L, sequences, places): how many choices of each sequence fall on each place."""
    found = []
    for layer, at_TK in enumerate(at_LTK):
        cell = (number_T[:, None] * places + at_TK).ravel()
        weight = None if weight_LTK is None else weight_LTK[layer].ravel()
        found.append(np.bincount(cell, weight, sequences * places).reshape(sequences, places))
    return np.stack(found)
