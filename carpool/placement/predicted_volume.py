"""The communication volume of a routing under a layout, computed from the definition: nothing is sent or measured.

A batch's routing is a *hypergraph*: experts are its vertices, and a token is a hyperedge, the set of experts that it
chose. A layout cuts the vertices into one part for each rank; the number of parts that an edge touches is its
*connectivity*, written λ. Each transport's class defines the number of sends (`Transport.volume`): λ per token with one
send per rank, K with one per choice, W with one to every rank. With sliced experts K counts every slice. So to place
experts well is to partition a hypergraph into parts of given sizes with a small sum of (λ - 1), the metric that
partitioners call km1.

    4 experts on 2 ranks, [0, 1 | 2, 3]; rank 0 holds tokens {0, 1}, {1, 2}, {1, 2}, rank 1 holds token {0, 3}

                  rank 0 sends to (0, 1)         rank 1 sends to (0, 1)
        dedup     3, 2                           1, 1             λ = 1, 2, 2 | 2, in sum 7
        alltoall  4, 2                           1, 1             K = 2 for each of 4 tokens

    With experts [1, 2 | 0, 3] instead, λ is 2, 1, 1 | 1, in sum 5: tokens that chose 1 and 2 are sent once.

A hidden state has H elements, encoded by its verb's codec. With it are sent, in the dispatch, a slot and a weight for
each of the choices that it may serve, and in the backward of the dispatch the weights' gradients:

    verb                from, to                     bytes per send
    dispatch            token's rank -> expert's     H * element + 8 * choices
    combine             expert's rank -> token's     H * element
    combine_backward    token's rank -> expert's     H * element                     (gradients of MoE outputs)
    dispatch_backward   expert's rank -> token's     H * element + 4 * choices       (gradients of tokens)
    plan                all -> all                   how many tokens (and choices) will arrive
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from carpool.layout import ExpertLayout, assign
from carpool.layout.topology import Topology
from carpool.metrics.counters import VERBS
from carpool.transport import TRANSPORTS, find_transport
from carpool.transport.base import CHOICE_BYTES, GRADIENT_BYTES
from carpool.transport.options import TransportOptions
from carpool.transport.volume import Counts, Volume

__all__ = ["CHOICE_BYTES", "GRADIENT_BYTES", "TRANSPORTS", "VERBS", "Counts", "Volume", "predict"]


def predict(
    transport: str,
    routings: Sequence[torch.Tensor | npt.NDArray[np.integer]],
    layout: ExpertLayout,
    *,
    hidden: int,
    element_size: int,
    options: Any = None,
    topology: Topology | None = None,
) -> Volume:
    """Sends and bytes of `transport` for these routings under this layout.

    Args:
        transport: a key of `carpool.transport.TRANSPORTS`.
        routings: for each rank, expert_TK: (T, K) logical expert ids of its tokens, -1: none. T may differ.
        layout: where the experts are.
        hidden: H, elements of a hidden state.
        element_size: bytes of an element (2 for bfloat16).
        options: of the transport, if they change the volume (`TransportOptions(codecs=Codecs(dispatch="fp8"))`).
        topology: of the layout's ranks; None: one node. The volume of `hierarchical` depends on it.

    Raises:
        ValueError: an unknown transport, options of another one, a routing for each rank missing, expert ids out of
            range, unequal K.
    """
    way = find_transport(transport)
    if way.options_class and type(options) is TransportOptions:
        options = way.own_options(options)
    if options is not None and not (way.options_class and isinstance(options, way.options_class)):
        raise ValueError(f"transport={transport!r} has no options of type {type(options).__name__}; leave them out")
    chosen = [torch.as_tensor(expert_TK).cpu().int() for expert_TK in routings]
    top_k = _check(chosen, layout)
    rank_TK = [_ranks_visited(expert_TK, layout) for expert_TK in chosen]
    return way.volume(rank_TK, topology or Topology.even(layout.num_ranks), top_k, hidden, element_size, options)


def _ranks_visited(expert_TK: torch.Tensor, layout: ExpertLayout) -> Counts:
    """(T, K) the rank that serves each choice, -1: none; with sliced experts, each slice of each choice."""
    slot_TK = assign(expert_TK, layout).numpy().astype(np.int64)
    return np.where(slot_TK < 0, -1, slot_TK // layout.slots_per_rank)


def _check(chosen: Sequence[torch.Tensor], layout: ExpertLayout) -> int:
    """The choices of a token, each slice of an expert counted, or ValueError."""
    if len(chosen) != layout.num_ranks:
        raise ValueError(f"the layout has {layout.num_ranks} ranks, but there are routings of {len(chosen)}")
    for rank, expert_TK in enumerate(chosen):
        if expert_TK.dim() != 2 or expert_TK.shape[1] != chosen[0].shape[-1]:
            shapes = [tuple(e.shape) for e in chosen]
            raise ValueError(f"routings must be (T, K) with the same K on all ranks; their shapes are {shapes}")
        if expert_TK.numel() and not -1 <= int(expert_TK.min()) <= int(expert_TK.max()) < layout.num_experts:
            raise ValueError(
                f"the routing of rank {rank} names experts {int(expert_TK.min())} to {int(expert_TK.max())}; "
                f"the layout has experts 0..{layout.num_experts - 1} (-1 means none)"
            )
    return int(chosen[0].shape[1]) * layout.slices
