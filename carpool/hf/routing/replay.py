"""Routing replay: the routers of a Transformers model choose recorded experts, such as a rollout's in RL.

    recordings = {name: layer.routing for name, layer in carpool.hf.rides(model).items()}   # after a forward
    with carpool.hf.replay(model, recordings):                                              # on all ranks
        model(**batch).loss.backward()

The recorded experts replace the result of each router's top-k (carpool/hf/routing/router_answers.py). The router
computes their weights anew, with gradients. With `weights=True` the layer uses the recorded weights and ignores the
router. Routing limits and drops do not change recordings, to which they had been applied before.

A token whose recorded choices are all -1 was not recorded, so its router chooses. With `replay(...) as replayed`,
`replayed.differing()` returns the share of recorded tokens for which routers would have chosen other experts.

A balance loss reads the routers' logits. So it balances their present choices, and with them the next rollout; its
value and gradient equal those without a replay. `BiasBalance` and counters read the replayed choices.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from carpool.hf.routing.router_answers import AnsweredRouter
from carpool.hf.seam.expert_rides import ExpertRides, required_rides
from carpool.hf.seam.find_modules import find_router
from carpool.layer.checks import check_replay
from carpool.parallel.ranks import gather, together
from carpool.routing import Routing


@contextmanager
def replay(model: nn.Module, recordings: Mapping[str, Routing], *, weights: bool = False) -> Iterator[Replayed]:
    """Inside, the MoE layers of a model use recorded routing. Collective; each rank passes the routing of its tokens.

    Activation checkpointing recomputes layers in the backward, which must then run inside as well.

    Args:
        recordings: by the names of `carpool.hf.rides`. The routers of other layers choose, and so they do for a token
            whose recorded choices are all -1. Every forward inside must compute the recorded tokens.
        weights: use the recorded weights as well, where -1 means no expert. Otherwise routers compute the weights.

    Raises:
        ValueError: on all ranks, before any communication, if a recording of any rank does not fit; in the forward, for
            another number of tokens, another K, or a router without a top-k over experts, which needs `weights`.
    """
    layers = required_rides(model)
    equal_tokens = _check_on_all(layers, recordings, weights)
    recordings = {name: recordings[name] for name in layers if name in recordings}
    replays = {n: _LayerReplay(layers[n], find_router(model, n), r, weights) for n, r in recordings.items()}
    for number, layer in enumerate(replays.values()):
        layer.install(compare_ranks=number == 0 or not equal_tokens)
    try:
        yield Replayed(replays)
    finally:
        for layer in replays.values():
            layer.remove()


@dataclass(frozen=True)
class Differing:
    """The shares of recorded tokens, over all ranks, for which routers would have chosen other experts.

    Attributes:
        layers: the share of tokens for each layer.
        routers: the share of (token, layer) pairs over all layers.
        tokens: the share of tokens that differ in at least one layer."""

    layers: dict[str, float]
    routers: float
    tokens: float


@dataclass(frozen=True)
class Replayed:
    """The layers that `replay` replays, by name."""

    layers: dict[str, _LayerReplay]

    def differing(self) -> Differing:
        """Returns the shares of the last forward, also after the replay. Collective; waits for the device.

        Experts of equal scores do not differ. The routers' choices respect a limit on the routing."""
        compared = [layer.compared for layer in self.layers.values()]
        if not compared or None in compared:
            raise ValueError("no forward has been replayed, so there is nothing to compare")
        compared_L2T = torch.stack([torch.stack(pair) for pair in compared if pair is not None])
        counts_X2 = torch.cat([compared_L2T.sum(2), compared_L2T.any(0).sum(1).unsqueeze(0)])
        if dist.is_initialized():
            dist.all_reduce(counts_X2)
        counts = counts_X2.tolist()
        *layers, tokens = [differ / max(known, 1) for differ, known in counts]
        differ, known = map(sum, zip(*counts[:-1], strict=True))
        return Differing(dict(zip(self.layers, layers, strict=True)), differ / max(known, 1), tokens)


class _LayerReplay:
    """The recording of one layer, applied between its router's top-k and its dispatch."""

    def __init__(self, layer: ExpertRides, router: nn.Module | None, recording: Routing, weights: bool) -> None:
        self.layer, self.router, self.weights = layer, None if weights else router, weights
        self.recording = recording
        # (T,) bool of the last forward: tokens for which the router differs, and tokens that were recorded.
        self.compared: tuple[torch.Tensor, torch.Tensor] | None = None
        self._forward: Any = None
        self._replaced = False

    def install(self, compare_ranks: bool) -> None:
        """Begin the replay. With `compare_ranks`, ranks exchange their numbers of tokens, for which the host waits."""
        self.layer.replay, self.group = self, self.layer.group if compare_ranks else None
        if self.router is not None:
            self._forward = self.router.forward
            # The replay replaces a routing limit, which would change the top-k first.
            inner = self._forward.forward if isinstance(self._forward, AnsweredRouter) else self._forward
            self.router.forward = AnsweredRouter(inner, self.layer.num_experts, self._choose)

    def remove(self) -> None:
        """Restore the router and the layer."""
        if self.router is not None:
            self.router.forward = self._forward
        self.layer.replay = None

    def _choose(self, score_TE: torch.Tensor, share_TE: torch.Tensor, top_k: int) -> torch.Tensor:
        self._check(score_TE.shape[0])
        self._replaced = True
        recorded_TK = self.recording.expert_TK.to(score_TE.device).long()
        if recorded_TK.shape[1] != top_k:
            raise ValueError(f"{self.layer.name}: K = {recorded_TK.shape[1]} was recorded, but the router has {top_k}")
        limited = self.layer.limit is not None
        router_TK = self.layer.choose(score_TE, share_TE, top_k) if limited else score_TE.topk(top_k, dim=-1).indices
        known_T = recorded_TK[:, 0] >= 0
        expert_TK = torch.where(known_T.unsqueeze(1), recorded_TK, router_TK)
        replayed_TK, chosen_TK = (score_TE.gather(1, ids_TK).sort(1).values for ids_TK in (expert_TK, router_TK))
        self.compared = (replayed_TK != chosen_TK).any(1), known_T
        return expert_TK

    def _check(self, tokens: int) -> None:
        if self.group is not None:
            check_replay(self.recording, tokens, self.layer.num_experts, self.group)
        elif tokens != (recorded := len(self.recording.expert_TK)):
            raise ValueError(f"{self.layer.name}: {recorded} tokens were recorded, but the layer computes {tokens}")

    def before_ride(self, routing: Routing) -> Routing:
        """Returns the routing to dispatch: the recording, or the router's weights of the recorded choices."""
        if self.weights:
            self._check(routing.expert_TK.shape[0])
            recorded_TK = self.recording.expert_TK.to(routing.expert_TK.device)
            chosen_TK = (recorded_TK.unsqueeze(2) == routing.expert_TK.unsqueeze(1)).any(2) | (recorded_TK < 0)
            self.compared = ~chosen_TK.all(1), (recorded_TK >= 0).any(1)
            return self.recording
        replaced, self._replaced = self._replaced, False
        if not replaced:
            raise ValueError(
                f"the router of {self.layer.name} has no top-k over experts to replace, so it cannot weigh recorded "
                "choices: replay them with weights=True"
            )
        return routing


def _check_on_all(layers: dict[str, ExpertRides], recordings: Mapping[str, Routing], weights: bool) -> bool:
    """Check the recordings of all ranks before a forward. Returns whether all layers recorded equally many tokens."""
    _check(layers, recordings, weights)
    top_k = [(name, recording.expert_TK.shape[1]) for name, recording in sorted(recordings.items())]
    lengths = {len(recording.expert_TK) for recording in recordings.values()}
    of_ranks = gather((weights, top_k, len(lengths)))
    if other := next((rank for rank, values in enumerate(of_ranks) if values[:2] != of_ranks[0][:2]), 0):
        raise ValueError(f"all ranks must replay the same layers alike, but rank {other} differs from rank 0")
    return max(count for *_, count in of_ranks) <= 1


@together(ValueError, "")
def _check(layers: dict[str, ExpertRides], recordings: Mapping[str, Routing], weights: bool) -> None:
    if unknown := sorted(recordings.keys() - layers.keys()):
        raise ValueError(f"there is a recording for {unknown[0]!r}, but this model's layers are {', '.join(layers)}")
    for name, recording in recordings.items():
        layer = layers[name]
        if layer.replay is not None:
            raise ValueError(f"{name} is replayed already: leave one replay before another begins")
        if not isinstance(recording, Routing):
            raise ValueError(f"{name}: there is no recording, because no forward has run its experts")
        try:
            least = recording.check(len(recording.expert_TK), layer.num_experts)
        except ValueError as refused:
            raise ValueError(f"{name}: {refused}") from None
        if weights and recording.weight_TK is None:
            raise ValueError(
                f"{name}: the recording has no weights; leave weights=True out, and the router computes them"
            )
        if not weights and layer.token_slice[1] > 1:
            raise ValueError(f"{name}: under tensor parallelism a rank records a slice of the tokens; set weights=True")
        none_TK = recording.expert_TK < 0
        if least < 0 and not weights and (layer.drops or bool((none_TK.any(1) & ~none_TK.all(1)).any())):
            raise ValueError(f"{name}: some recorded choices are -1, none, which no router can weigh; set weights=True")
