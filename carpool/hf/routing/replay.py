"""Recorded choices, replayed by the routers of a transformers model: reinforcement learning replays its sampler's.

    recordings = {name: own.routing for name, own in carpool.hf.rides(model).items()}       # after a forward
    with carpool.hf.replay(model, recordings):                                              # on all ranks
        model(**batch).loss.backward()

Each router's top-k is answered with the recorded experts (carpool/hf/routing/router_answers.py), so their weights are
what the router makes of them now, with gradients. With `weights=True` recorded weights are used, and the router is not
asked. Limits and drops leave recordings alone: what was recorded had been limited and dropped.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from carpool.hf.routing.router_answers import AnsweredRouter
from carpool.hf.seam.expert_rides import ExpertRides, required_rides
from carpool.hf.seam.find_modules import find_router
from carpool.layer.checks import check_replay
from carpool.routing import Routing


@contextmanager
def replay(model: nn.Module, recordings: Mapping[str, Routing], *, weights: bool = False) -> Iterator[None]:
    """Inside, the MoE layers of a model choose as recorded. All ranks together, each with what its tokens chose.

    Args:
        recordings: by the names of `carpool.hf.rides`; other layers choose for themselves. Every forward inside must be
            of the recorded tokens.
        weights: use the recorded weights as well; without, the routers weigh the choices.

    Raises:
        ValueError: on all ranks alike, before anything is sent, if a recording of any rank does not fit; in the forward
            another number of tokens, or a router without a top-k over experts, whose recordings need weights.
    """
    layers = required_rides(model)
    found = {name: find_router(model, name) for name in layers}
    _agree_on_all(layers, recordings, weights)
    replays = [_LayerReplay(layers[name], found[name], recordings[name], weights) for name in recordings]
    for one in replays:
        one.install()
    try:
        yield
    finally:
        for one in replays:
            one.remove()


class _LayerReplay:
    """The recording of one layer, between its router's top-k and its ride."""

    def __init__(self, own: ExpertRides, router: nn.Module | None, recording: Routing, weights: bool) -> None:
        self.own, self.router, self.weights = own, None if weights else router, weights
        self.recording = recording
        self._forward: Any = None
        self._answered = False

    def install(self) -> None:
        """From now on."""
        self.own.replay = self
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
        check_replay(self.recording, score_TE.shape[0], self.own.num_experts, self.own.group)
        self._answered = True
        return self.recording.expert_TK.to(score_TE.device).long()

    def before_ride(self, routing: Routing) -> Routing:
        """What rides: the recording, or what the router has made of its choices."""
        if self.weights:
            check_replay(self.recording, routing.expert_TK.shape[0], self.own.num_experts, self.own.group)
            return self.recording
        answered, self._answered = self._answered, False
        if not answered:
            raise ValueError(
                f"the router of {self.own.name} has no top-k over experts that could be answered, so it cannot weigh "
                "recorded choices: replay them with weights=True"
            )
        return routing


def _agree_on_all(layers: dict[str, ExpertRides], recordings: Mapping[str, Routing], weights: bool) -> None:
    """Check on all ranks what can be known before a forward."""
    error = _error(layers, recordings, weights)
    told: list[Any] = [(error, sorted(recordings), weights)]
    if dist.is_initialized():
        told = [None] * dist.get_world_size()
        dist.all_gather_object(told, (error, sorted(recordings), weights))
    for rank, (text, names, _) in enumerate(told):
        if text is not None:
            raise ValueError(text if error is not None else f"rank {rank} cannot replay its recordings: {text}")
        if (names, told[rank][2]) != (told[0][1], told[0][2]):
            raise ValueError(f"all ranks must replay the same layers alike, but rank {rank} has others than rank 0")


def _error(layers: dict[str, ExpertRides], recordings: Mapping[str, Routing], weights: bool) -> str | None:
    if unknown := sorted(recordings.keys() - layers.keys()):
        return f"there is a recording for {unknown[0]!r}, but this model's layers are {', '.join(layers)}"
    for name, recording in recordings.items():
        own = layers[name]
        try:
            recording.check(len(recording.expert_TK), own.num_experts)
        except ValueError as refused:
            return f"{name}: {refused}"
        if weights and recording.weight_TK is None:
            return f"{name}: the recording has no weights; leave weights=True out, and the router makes some"
        if not weights and own.token_slice[1] > 1:
            return f"{name}: under tensor parallelism a rank records a slice of the tokens: replay with weights=True"
        if not weights and bool((recording.expert_TK < 0).any()):
            return f"{name}: some recorded choices are -1, none, which no router can weigh: replay with weights=True"
    return None


# ---------------------------------------------------------------------------------------------------------------------
# The choices of a rollout: which experts served each token in `model.generate`.
#
#     with carpool.hf.record_rollout(model) as rollout:               # on all ranks
#         ids_BL = model.generate(**prompts)
#     with carpool.hf.replay(model, rollout.routings(ids_BL.shape[1])):
#         model(input_ids=ids_BL, ...).loss.backward()
#
# A router that has moved, or that rounds otherwise in a batch than token by token, chooses other experts, and the
# likelihood ratio of reinforcement learning compares two models; replayed choices make it one (routing replay, arXiv
# 2507.18071; of rollouts, arXiv 2510.11370). The choices of the prompts' forward and of the decode steps are put in the
# order of one forward over whole sequences.


class Rollout:
    """What was chosen in the forwards of one generation. `record_rollout` makes it."""

    def __init__(self, model: nn.Module) -> None:
        self._layers = required_rides(model)
        self._chosen: dict[str, list[torch.Tensor]] = {name: [] for name in self._layers}

    def _after_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        ids_BL = kwargs.get("input_ids", args[0] if args else None)
        if ids_BL is None:
            raise ValueError("a rollout is recorded of input_ids; generate from tokens, not from inputs_embeds")
        for name, own in self._layers.items():
            assert own.routing is not None
            self._chosen[name].append(own.routing.expert_TK.reshape(*ids_BL.shape, -1))

    def choices(self, name: str, length: int) -> torch.Tensor:
        """The choices of a layer, (B, length, K) int32, for sequences of `length` tokens, padding included.

        The last token of a text was never read, so nothing was chosen for it: it takes the choices of the one before.
        What it computes reaches no prediction of the text.

        Raises:
            ValueError: fewer tokens than that were read, or several generations were recorded."""
        chosen = self._chosen[name]
        if len({len(one_BLK) for one_BLK in chosen}) > 1 or any(one_BLK.shape[1] > 1 for one_BLK in chosen[1:]):
            raise ValueError("a rollout holds one generation: record each for itself, and with use_cache=True")
        read = sum(one_BLK.shape[1] for one_BLK in chosen)
        if not read or length > read + 1:
            raise ValueError(f"the rollout read {read} tokens of each sequence, so {length} cannot be replayed")
        chosen_BLK = torch.cat([*chosen, chosen[-1][:, -1:]], 1)
        return chosen_BLK[:, :length]

    def routings(self, length: int) -> dict[str, Routing]:
        """What `carpool.hf.replay` takes, for a forward over whole sequences of `length` tokens. Raises ValueError as
        `choices`."""
        return {name: Routing(self.choices(name, length).flatten(0, 1), None) for name in self._layers}


@contextmanager
def record_rollout(model: nn.Module) -> Iterator[Rollout]:
    """Record the choices of one `model.generate` inside. All ranks together; each has those of its own sequences. Not
    with decode steps in CUDA graphs, which nothing can look into. ValueError: a model without layers of Carpool."""
    rollout = Rollout(model)
    handle = model.register_forward_hook(rollout._after_forward, with_kwargs=True)
    try:
        yield rollout
    finally:
        handle.remove()
