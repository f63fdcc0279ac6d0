"""The choices of a rollout: which experts served each token while `model.generate` made a text.

    with carpool.hf.record_rollout(model) as rollout:               # on all ranks
        ids_BL = model.generate(**prompts)
    with carpool.hf.replay(model, rollout.routings(ids_BL.shape[1])):
        model(input_ids=ids_BL, ...).loss.backward()

Reinforcement learning weighs what the model now says of a text against what it said when it wrote it. A router that has
moved, or that rounds otherwise in a batch than token by token, sends tokens to other experts, and the comparison is of
two models. Replayed choices make it of one (routing replay, arXiv 2507.18071; of rollouts, arXiv 2510.11370).

The forwards of a generation are one over the prompts and then one token of each sequence at a time. What they chose is
put in the order of one forward over whole sequences.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from carpool.hf.seam.rides import required_rides
from carpool.routing import Routing


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
    """Record the choices of one `model.generate` inside. All ranks together; each has those of its own sequences.

    Not with decode steps in CUDA graphs, which nothing can look into.

    Raises:
        ValueError: a model without layers of Carpool."""
    rollout = Rollout(model)
    handle = model.register_forward_hook(rollout._after_forward, with_kwargs=True)
    try:
        yield rollout
    finally:
        handle.remove()
