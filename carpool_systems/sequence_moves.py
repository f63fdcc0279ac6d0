"""Sequences that move: before a decoder layer, each goes to the rank from which that layer costs least.

Tokens of one sequence choose similar experts. So a sequence is best computed near those experts, and that may be
another rank in each layer (NetMoE, ICLR 2025; LUFFY). Here whole sequences move between two decoder layers, and their
targets with them. What is computed for a sequence is the same on any rank, so losses and gradients are equal but for
the order of sums.

    decoder layer 2 | look ahead, assign, exchange | decoder layer 3 (attention, router, ride) | ...

  - **Look ahead.** Which experts layer 3 will choose is not known before its attention. Its router is asked about the
    hidden states as they come in, which differ little from what it will see. That decides only who moves.
  - **Assign.** For each sequence and rank: seconds that the rows of the layer's four rides need on their links, and of
    the move, forward and backward. All ranks see all costs, and find the same assignment of least cost, with as many
    sequences on each rank as before (`carpool_systems.sequences`). The host waits for the device here.
  - **Exchange.** One all-to-all. If none moves, nothing is sent.

A move is not counted for the layers that follow: on real traces sequences that are near one layer's experts are no
nearer than others to those of later layers (benchmarks/sequence_moves.py, --every 4). NetMoE sends the sums of layer 2
straight to the new rank. Here they come home first, so a move is paid by itself; it pays if a sequence saves more than
half a row a token.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

from carpool.families import family_of
from carpool.hf.seam.expert_rides import ExpertRides, required_rides
from carpool.hf.seam.find_modules import find_router, list_number
from carpool.layout.topology import Topology
from carpool.planner.machine.cost import RIDES
from carpool.planner.machine.hardware import Hardware
from carpool.transport import find_transport
from carpool_systems.sequences import Integers, SequenceMoves, assign_sequences

# A move goes forward, and its gradients back.
MOVES = 2
PICO = 1e12
Floats = npt.NDArray[np.float64]
# Newer torch has another name, and warns whoever uses the one that torch 2.11 knows.
_all_gather_into: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def check_moves(every: int, layers: int, ranks: int) -> None:
    """Raise ValueError if none of so many layers with experts, on so many expert-parallel ranks, could have moves."""
    if ranks == 1:
        raise ValueError(
            "sequence_moves.every moves sequences to where experts are, but each rank has all experts: raise "
            "parallelism.ep_size, or leave it out"
        )
    if layers <= every:
        raise ValueError(
            f"sequence_moves.every = {every}, but the model has {layers} layers with experts, so there is no "
            "layer before which sequences could move: choose a smaller number"
        )


class MovingSequences:
    """Lets the sequences of a model's batches move while it trains. All ranks construct and call it alike.

    Args:
        model: of transformers, with Carpool's layers.
        every: sequences may move before the layers with experts number every, 2 * every, ..., counted from 0.
        top_k: K.
        topology: of the ranks of an expert-parallel group.
        hardware: rates of links.

    Raises:
        ValueError: a model whose routers or norms are not found, or no layer before which sequences could move.
    """

    def __init__(self, model: nn.Module, every: int, top_k: int, topology: Topology, hardware: Hardware) -> None:
        layers = required_rides(model)
        self.target_BL: torch.Tensor | None = None
        check_moves(every, len(layers), topology.num_ranks)
        for number, (name, own) in enumerate(layers.items()):
            if number % every == 0 and number:
                layer = model.get_submodule(".".join(name.split(".")[: (list_number(name) or 0) + 1]))
                seam = _Seam(self, own, _Ahead(model, layer, name, own.num_experts, top_k), topology, hardware)
                layer.register_forward_pre_hook(seam, with_kwargs=True)

    @contextmanager
    def targets(self, target_BL: torch.Tensor) -> Iterator[None]:
        """Inside, sequences move in a forward, and `target_BL` becomes, in place, the targets of those that came."""
        self.target_BL = target_BL
        try:
            yield
        finally:
            self.target_BL = None


class _Ahead:
    """Guesses what a layer's router will choose, by the hidden states before its attention."""

    def __init__(self, model: nn.Module, layer: nn.Module, name: str, num_experts: int, top_k: int) -> None:
        router = find_router(model, name)
        norms = family_of(model).experts_norm
        norm = next((getattr(layer, one) for one in norms if hasattr(layer, one)), None)
        found = [] if router is None else [
            (module, key)
            for module in router.modules()
            for key, weight in module.named_parameters(recurse=False)
            if weight.dim() == 2 and weight.shape[0] == num_experts
        ]  # fmt: skip
        if norm is None or len(found) != 1:
            what = "norm before its experts" if norm is None else "router"
            raise ValueError(
                f"sequence_moves.every asks routers ahead, and {type(layer).__name__} has no {what} it knows"
            )
        self.norm, (self._module, self._key), self.top_k = norm, found[0], top_k

    def choices(self, hidden_BLH: torch.Tensor) -> torch.Tensor:
        """(B, L, K) expert ids."""
        weight_EH = getattr(self._module, self._key)
        if isinstance(weight_EH, DTensor):
            weight_EH = weight_EH.full_tensor()
        normed_BLH = self.norm(hidden_BLH)
        return F.linear(normed_BLH, weight_EH.to(normed_BLH.dtype)).topk(self.top_k, dim=-1).indices


class _Seam:
    """The hook of a decoder layer."""

    def __init__(
        self, moving: MovingSequences, own: ExpertRides, guess: _Ahead, topology: Topology, hardware: Hardware
    ) -> None:
        self.moving, self.own, self.guess = moving, own, guess
        self.topology, self.seconds_WW = topology, seconds_per_byte(topology, hardware)
        self._checked = False

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        target_BL, group = self.moving.target_BL, self.own.group
        if target_BL is None or group is None:
            return None
        if not self._checked:
            check_stays(module, args, kwargs)
            self._checked = True
        hidden_BLH = args[0] if args else kwargs["hidden_states"]
        to_WB = self._assign(hidden_BLH.detach(), group)
        if (to_WB == np.arange(len(to_WB))[:, None]).all():
            return None
        moves, traffic = SequenceMoves.of(to_WB, group, hidden_BLH.device), self.own.stats.traffic
        target_BL.copy_(moves.move(target_BL, traffic))
        moved_BLH = moves.move(hidden_BLH, traffic)
        return ((moved_BLH, *args[1:]), kwargs) if args else ((), {**kwargs, "hidden_states": moved_BLH})

    @torch.no_grad()
    def _assign(self, hidden_BLH: torch.Tensor, group: dist.ProcessGroup) -> Integers:
        """(W, B) the rank that each sequence goes to. Collective; waits for the device."""
        (batch, length, hidden), ranks = hidden_BLH.shape, self.own.num_ranks
        rank_E = torch.tensor([rank for rank, _ in self.own.layout.home_of], device=hidden_BLH.device)
        visits_BLW = F.one_hot(rank_E[self.guess.choices(hidden_BLH)], ranks).sum(2)
        assert self.own.transport is not None
        rows_BU = rows_of_sequences(visits_BLW, self.own.transport.name, self.topology)
        rows_NU = rows_BU.new_empty(ranks * batch, rows_BU.shape[1])
        _all_gather_into(rows_NU, rows_BU, group=group)
        ride_WU = RIDES * seconds_per_row(self.seconds_WW, self.own.transport.name, self.topology)
        home_N = np.arange(ranks).repeat(batch)
        seconds_NW = rows_NU.cpu().numpy() @ ride_WU.T + MOVES * length * self.seconds_WW[home_N]
        row_bytes = hidden * hidden_BLH.element_size()
        return assign_sequences(np.rint(PICO * row_bytes * seconds_NW).astype(np.int64), home_N).reshape(ranks, batch)


def check_stays(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise ValueError if a decoder layer is given tensors that may belong to sequences, besides their hidden states.
    Positions and masks of running text are the same for all."""
    named = dict(zip(inspect.signature(type(layer).forward).parameters, (layer, *args), strict=False)) | kwargs
    others = [name for name, value in named.items() if isinstance(value, torch.Tensor | list | dict) and name not in
              ("self", "hidden_states") and "position" not in name and "mask" not in name]  # fmt: skip
    if others:
        raise ValueError(
            f"sequence_moves.every: {type(layer).__name__} is given {', '.join(others)}, which may belong to sequences "
            "and would have to move with them: leave it out"
        )


def seconds_per_byte(topology: Topology, hardware: Hardware) -> Floats:
    """(W, W) of the link between two ranks; 0 from a rank to itself."""
    ranks = range(topology.num_ranks)
    links = [[topology.link(one, other) for other in ranks] for one in ranks]
    return np.array([[0.0 if at == "self" else 1 / hardware.rate(at).bytes_per_second for at in row] for row in links])


def rows_of_sequences(visits_BLW: torch.Tensor, transport: str, topology: Topology) -> torch.Tensor:
    """(B, U) rows of each sequence, by the ranks that they go to; with hops, by the ranks and then by the nodes.

    Args:
        visits_BLW: for each token, how many of its choices are on each rank."""
    way = find_transport(transport)
    if not (way.one_send_per_rank or way.one_send_per_node):
        return visits_BLW.sum(1)
    visits_BLW = visits_BLW.clamp(max=1)
    if not way.one_send_per_node:
        return visits_BLW.sum(1)
    node_W = torch.tensor(topology.node_of, device=visits_BLW.device)
    visits_BLN = torch.zeros_like(visits_BLW[..., : topology.num_nodes]).index_add_(2, node_W, visits_BLW).clamp(max=1)
    return torch.cat([visits_BLW.sum(1), visits_BLN.sum(1)], dim=1)


def seconds_per_row(seconds_WW: Floats, transport: str, topology: Topology) -> Floats:
    """(W, U) seconds per byte of the rows of `rows_of_sequences`, from each rank."""
    if not find_transport(transport).one_send_per_node:
        return seconds_WW
    # A row goes to the rank of its own rank's number in a node, and from there to others.
    ranks, per_node = np.arange(topology.num_ranks), topology.num_ranks // topology.even_nodes()
    nodes = np.arange(topology.num_nodes)
    rail_WW, rail_WN = (per_node * of + (ranks % per_node)[:, None] for of in (ranks // per_node, nodes))
    return np.concatenate([seconds_WW[rail_WW, ranks], seconds_WW[ranks[:, None], rail_WN]], axis=1)
