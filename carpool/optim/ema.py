"""An exponential moving average (EMA) of the trained weights, which often generalises better than the last weights.

    average = WeightAverage(optimizer, decay=0.999)
    optimizer.step()
    average.update(step)                     # a = d * a + (1 - d) * w,   d = min(decay, (1 + step) / (10 + step))
    with average.shown(model): evaluate()    # the model computes with the average

The decay grows with the step, as in TensorFlow and diffusers, so that an average does not consist of initial weights
for its first thousands of steps: 0.18 at step 1, 0.99 from step 890 on. It depends on the step alone.

The average is float32, also of bfloat16 weights: with 1 - d = 0.001 a bfloat16 sum would stay where it is. Where the
optimizer has float32 masters of bfloat16 weights, these are averaged. Each rank averages what its optimizer updates,
element by element, so that nothing is communicated, and shards, moved experts and checkpoints are those of optimizer
state: the class is a PyTorch optimizer with one tensor of state for each parameter.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from carpool.optim.adamw import placed
from carpool.optim.adamw_reference import join
from carpool.optim.update import local
from carpool.parallel import fsdp
from carpool.parallel.replicated import replicated

_KEY = "average"
# Elements whose masters are in memory at once.
_PIECE = 1 << 24


def decay_at(step: int, decay: float) -> float:
    """The decay of step 1, 2, ..."""
    return min(decay, (1 + step) / (10 + step))


class WeightAverage(torch.optim.Optimizer):
    """The average of all parameters of an optimizer, beside it.

    Args:
        optimizer: has its parameters, with their first values, on the device.
        decay: of a late step, above 0 and below 1."""

    def __init__(self, optimizer: torch.optim.Optimizer, decay: float) -> None:
        self.optimizer, self.decay = optimizer, decay
        super().__init__([p for group in optimizer.param_groups for p in group["params"]], {})
        for parameter in self._parameters():
            zeros = torch.zeros_like(local(parameter), dtype=torch.float32)
            self.state[parameter] = {_KEY: placed(zeros, _KEY, parameter)}
        self.begin()

    def _parameters(self) -> list[torch.Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        """Not an optimizer that updates anything."""
        raise NotImplementedError("an average has update(step)")

    @torch.no_grad()
    def begin(self) -> None:
        """Begin with the weights as they are."""
        self._move(1.0)

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Take in the weights after this step of the optimizer: 1, 2, ..."""
        self._move(1 - decay_at(step, self.decay))

    def _move(self, share: float) -> None:
        """Move the averages this share of the way to the weights."""
        averages, weights = [], []
        for parameter in self._parameters():
            average, weight = local(self.state[parameter][_KEY]), local(parameter)
            if weight.dtype == torch.float32:
                averages.append(average)
                weights.append(weight)
                continue
            low = self.optimizer.state.get(parameter, {}).get("low_bits")
            for some, part, bits in _pieces(average, weight, None if low is None else local(low)):
                some.lerp_(part.float() if bits is None else join(part, bits), share)
        if averages:
            torch._foreach_lerp_(averages, weights, share)

    @contextmanager
    def shown(self, model: nn.Module) -> Iterator[None]:
        """Inside, the model has the averages, rounded to the dtypes of its weights; afterwards its weights, bit by bit.
        The averages may not be saved inside. All ranks together, between two steps. After an error inside the model
        keeps them: ranks that have not raised it would wait for one another."""

        def write() -> None:
            fsdp.reshard(model)
            exchange()
            if (kept := replicated(model)) is not None:
                kept.write()

        before: dict[torch.Tensor, torch.Tensor] = {}

        @torch.no_grad()
        def exchange() -> None:
            for parameter in self._parameters():
                weight, average = local(parameter), local(self.state[parameter][_KEY])
                if weight.dtype == average.dtype:  # without more memory than one tensor's
                    there = weight.clone()
                    weight.copy_(average)
                    average.copy_(there)
                elif parameter in before:
                    weight.copy_(before.pop(parameter))
                else:
                    before[parameter] = weight.clone()
                    weight.copy_(average)

        write()
        yield
        write()


def _pieces(
    average: torch.Tensor, weight: torch.Tensor, low: torch.Tensor | None
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]]:
    """Views of all three, of some elements each."""
    if not (average.is_contiguous() and weight.is_contiguous() and (low is None or low.is_contiguous())):
        yield average, weight, low
        return
    flat = [one if one is None else one.view(-1) for one in (average, weight, low)]
    for start in range(0, average.numel(), _PIECE):
        some, part, bits = (one if one is None else one[start : start + _PIECE] for one in flat)
        assert some is not None and part is not None
        yield some, part, bits
