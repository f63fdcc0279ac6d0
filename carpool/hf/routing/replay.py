"""Recorded choices, replayed by the routers of a transformers model: reinforcement learning replays its sampler's.

    recordings = {name: own.routing for name, own in carpool.hf.rides(model).items()}       # after a forward
    with carpool.hf.replay(model, recordings):                                              # on all ranks
        model(**batch).loss.backward()

Each router's top-k is answered with the recorded experts (carpool/hf/routing/router_answers.py), so their weights are
what the router makes of them now, with gradients. With `weights=True` recorded weights are used, and the router is not
asked. Limits and drops leave recordings alone: what was recorded had been limited and dropped.

A token whose recorded choices are all -1 was not recorded: its router chooses. With `replay(...) as replayed`,
`replayed.differing()` says for how many of the others routers would have chosen otherwise; the forward compares them on
the device.

A balance loss sees the routers' logits. So it balances what routers choose now, and with them the next rollout, not
what is replayed; its value and its gradient by the logits are those without a replay. `BiasBalance` and counters see
what rides, the recorded choices.
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
    """Inside, the MoE layers of a model choose as recorded. All ranks together, each with what its tokens chose.

    Activation checkpointing computes layers again in the backward, which must then be inside, too.

    Args:
        recordings: by the names of `carpool.hf.rides`; other layers choose for themselves, and so does a token whose
            recorded choices are all -1. Every forward inside must be of the recorded tokens.
        weights: use the recorded weights as well, and -1 means no expert; without, the routers weigh the choices.

    Raises:
        ValueError: on all ranks alike, before anything is sent, if a recording of any rank does not fit; in the forward
            another number of tokens, another K, or a router without a top-k over experts, which needs `weights`.
    """
    layers = required_rides(model)
    alike = _agree_on_all(layers, recordings, weights)
    recordings = {name: recordings[name] for name in layers if name in recordings}
    replays = {n: _LayerReplay(layers[n], find_router(model, n), one, weights) for n, one in recordings.items()}
    for number, one in enumerate(replays.values()):
        one.install(together=number == 0 or not alike)
    try:
        yield Replayed(replays)
    finally:
        for one in replays.values():
            one.remove()


@dataclass(frozen=True)
class Differing:
    """Where routers would have chosen other experts than recorded, in shares of what was recorded on all ranks.

    Attributes:
        layers: for each layer, of its tokens.
        routers: of the choices of all layers together.
        tokens: of the tokens, those that differ in at least one layer."""

    layers: dict[str, float]
    routers: float
    tokens: float


@dataclass(frozen=True)
class Replayed:
    """The layers that `replay` replays, by name."""

    layers: dict[str, _LayerReplay]

    def differing(self) -> Differing:
        """Of the last forward, also after the replay. Collective; waits for the device.

        Experts of equal scores do not differ. With a limit on the routing, a router would have chosen within it."""
        found = [one.compared for one in self.layers.values()]
        if not found or None in found:
            raise ValueError("no forward has been replayed, so there is nothing to compare")
        compared_L2T = torch.stack([torch.stack(one) for one in found if one is not None])
        counts_X2 = torch.cat([compared_L2T.sum(2), compared_L2T.any(0).sum(1).unsqueeze(0)])
        if dist.is_initialized():
            dist.all_reduce(counts_X2)
        counts = counts_X2.tolist()
        *layers, tokens = [differ / max(known, 1) for differ, known in counts]
        differ, known = map(sum, zip(*counts[:-1], strict=True))
        return Differing(dict(zip(self.layers, layers, strict=True)), differ / max(known, 1), tokens)


class _LayerReplay:
    """The recording of one layer, between its router's top-k and its ride."""

    def __init__(self, own: ExpertRides, router: nn.Module | None, recording: Routing, weights: bool) -> None:
        self.own, self.router, self.weights = own, None if weights else router, weights
        self.recording = recording
        # (T,) bool of the last forward: tokens that would have chosen otherwise, and those that were recorded.
        self.compared: tuple[torch.Tensor, torch.Tensor] | None = None
        self._forward: Any = None
        self._answered = False

    def install(self, together: bool) -> None:
        """From now on. `together`: ranks tell each other whether their tokens are as many, for which the host waits."""
        self.own.replay, self.group = self, self.own.group if together else None
        if self.router is not None:
            self._forward = self.router.forward
            # Not within a limit, which would answer first.
            inner = self._forward.forward if isinstance(self._forward, AnsweredRouter) else self._forward
            self.router.forward = AnsweredRouter(inner, self.own.num_experts, self._choose)

    def remove(self) -> None:
        """Leave the router and the layer as they were."""
        if self.router is not None:
            self.router.forward = self._forward
        self.own.replay = None

    def _choose(self, score_TE: torch.Tensor, share_TE: torch.Tensor, top_k: int) -> torch.Tensor:
        self._check(score_TE.shape[0])
        self._answered = True
        recorded_TK = self.recording.expert_TK.to(score_TE.device).long()
        if recorded_TK.shape[1] != top_k:
            raise ValueError(f"{self.own.name}: {recorded_TK.shape[1]} choices of a token were recorded, not {top_k}")
        limited = self.own.limit is not None
        own_TK = self.own.choose(score_TE, share_TE, top_k) if limited else score_TE.topk(top_k, dim=-1).indices
        known_T = recorded_TK[:, 0] >= 0
        expert_TK = torch.where(known_T.unsqueeze(1), recorded_TK, own_TK)
        score_TK, own_score_TK = (score_TE.gather(1, one_TK).sort(1).values for one_TK in (expert_TK, own_TK))
        self.compared = (score_TK != own_score_TK).any(1), known_T
        return expert_TK

    def _check(self, tokens: int) -> None:
        if self.group is not None:
            check_replay(self.recording, tokens, self.own.num_experts, self.group)
        elif tokens != (recorded := len(self.recording.expert_TK)):
            raise ValueError(f"{self.own.name}: {recorded} tokens were recorded, but the layer got {tokens}")

    def before_ride(self, routing: Routing) -> Routing:
        """What rides: the recording, or what the router has made of its choices."""
        if self.weights:
            self._check(routing.expert_TK.shape[0])
            recorded_TK = self.recording.expert_TK.to(routing.expert_TK.device)
            chosen_TK = (recorded_TK.unsqueeze(2) == routing.expert_TK.unsqueeze(1)).any(2) | (recorded_TK < 0)
            self.compared = ~chosen_TK.all(1), (recorded_TK >= 0).any(1)
            return self.recording
        answered, self._answered = self._answered, False
        if not answered:
            raise ValueError(
                f"the router of {self.own.name} has no top-k over experts that could be answered, so it cannot weigh "
                "recorded choices: replay them with weights=True"
            )
        return routing


def _agree_on_all(layers: dict[str, ExpertRides], recordings: Mapping[str, Routing], weights: bool) -> bool:
    """Check on all ranks what can be known before a forward. True: layers have recorded equally many tokens."""
    _check(layers, recordings, weights)
    top_k = [(name, one.expert_TK.shape[1]) for name, one in sorted(recordings.items())]
    told = gather((weights, top_k, len({len(one.expert_TK) for one in recordings.values()})))
    if other := next((rank for rank, theirs in enumerate(told) if theirs[:2] != told[0][:2]), 0):
        raise ValueError(f"all ranks must replay the same layers alike, but rank {other} has others than rank 0")
    return max(lengths for *_, lengths in told) <= 1


@together(ValueError, "")
def _check(layers: dict[str, ExpertRides], recordings: Mapping[str, Routing], weights: bool) -> None:
    if unknown := sorted(recordings.keys() - layers.keys()):
        raise ValueError(f"there is a recording for {unknown[0]!r}, but this model's layers are {', '.join(layers)}")
    for name, recording in recordings.items():
        own = layers[name]
        if own.replay is not None:
            raise ValueError(f"{name} is replayed already: leave one replay before another begins")
        if not isinstance(recording, Routing):
            raise ValueError(f"{name}: there is no recording; its experts were in no forward")
        try:
            least = recording.check(len(recording.expert_TK), own.num_experts)
        except ValueError as refused:
            raise ValueError(f"{name}: {refused}") from None
        if weights and recording.weight_TK is None:
            raise ValueError(f"{name}: the recording has no weights; leave weights=True out, and the router makes some")
        if not weights and own.token_slice[1] > 1:
            raise ValueError(f"{name}: under tensor parallelism a rank records a slice of the tokens; set weights=True")
        none_TK = recording.expert_TK < 0
        if least < 0 and not weights and (own.drops or bool((none_TK.any(1) & ~none_TK.all(1)).any())):
            raise ValueError(f"{name}: some recorded choices are -1, none, which no router can weigh; set weights=True")
