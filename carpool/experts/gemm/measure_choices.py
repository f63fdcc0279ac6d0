"""Times every implementation of every product of `GroupedExperts` on this device, and picks the fastest
(choices.py)."""

from __future__ import annotations

import logging
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch

from carpool.activations import Arena, HiddenStates
from carpool.experts.base import Activation, ExpertFunction, ExpertWeights
from carpool.experts.gemm.choices import LIBRARY, STAGES, WAYS, Choices
from carpool.experts.gemm.grouped_products import GroupedProducts
from carpool.experts.pairs import gather_rows, sort_pairs

DELAY_CYCLES = 1_000_000  # about half a millisecond

log = logging.getLogger("carpool")


@dataclass(frozen=True)
class Measured:
    """The result of `measure_choices`.

    Attributes:
        choices: the fastest.
        microseconds: of each product, by implementation; those that cannot run on this device are missing.
        gather: microseconds to gather dy, which the library's dact and ddown need, once.
    """

    choices: Choices
    microseconds: dict[str, dict[str, float]]
    gather: float


def measure_choices(
    rows: int,
    hidden: int,
    inner: int,
    slots: int,
    slots_per_row: int,
    function: ExpertFunction,
    device: torch.device,
    *,
    bias: bool = False,
    use_arena: bool = True,
    repeats: int = 7,
    adapter_rank: int = 0,
) -> Measured:
    """Time every implementation of every product in bf16 on random tokens and balanced random routing, and pick the
    fastest.

    The host waits for the device, and memory for about one forward and backward is allocated.

    Args:
        rows, slots, slots_per_row: number of tokens, number of slots, and slots that each token chooses.
        hidden, inner: H, F.
        bias: whether the experts have biases.
        use_arena: whether the pre-activation is saved in an arena, as with transports whose counts the host does not
            know.
        adapter_rank: of adapters on both matrices, whose shares are computed in the products. 0: there are none.

    Raises:
        ValueError: the device is not a GPU, or sizes do not fit.
    """
    if device.type != "cuda":
        raise ValueError(f"stages are chosen by measurement on a GPU, not on {device}; on a CPU there is one way")
    if not 0 < slots_per_row <= slots:
        raise ValueError(f"slots_per_row={slots_per_row} must be between 1 and slots={slots}")
    problem = _Problem(rows, hidden, inner, slots, slots_per_row, function, device, bias, use_arena, adapter_rank)
    microseconds = {stage: _times(problem.calls(stage), repeats) for stage in STAGES}
    gather = _times({"": lambda: gather_rows(problem.dy, problem.pairs, torch.bfloat16)}, repeats)[""]
    return Measured(pick(microseconds, gather, adapter_rank > 0), microseconds, gather)


def pick(microseconds: dict[str, dict[str, float]], gather: float, frozen: bool = False) -> Choices:
    """The fastest implementations; of equally fast ones, the first. `frozen`: the gradients of up and down are not
    computed, as with adapters."""
    best = {stage: min(times, key=times.__getitem__) for stage, times in microseconds.items()}
    dact, ddown = microseconds["dact"], microseconds["ddown"]
    if frozen:
        best["dact"] = min(dact, key=lambda way: dact[way] + gather * (way == LIBRARY))
        return Choices(**best)
    best["dact"], best["ddown"] = min(
        product(dact, ddown), key=lambda ways: dact[ways[0]] + ddown[ways[1]] + gather * (LIBRARY in ways)
    )
    return Choices(**best)


class _Problem:
    """Inputs of all products."""

    def __init__(
        self, rows: int, hidden: int, inner: int, slots: int, slots_per_row: int, function: ExpertFunction,
        device: torch.device, bias: bool, use_arena: bool, adapter_rank: int,
    ) -> None:  # fmt: skip
        generator = torch.Generator(device).manual_seed(0)

        def draw(*shape: int, scale: float = 1.0) -> torch.Tensor:
            return scale * torch.randn(*shape, generator=generator, device=device, dtype=torch.bfloat16)

        activation = function.activation
        width = inner * (2 if not isinstance(activation, Activation) or activation.gated else 1)
        up, down = draw(slots, width, hidden, scale=hidden**-0.5), draw(slots, hidden, inner, scale=inner**-0.5)
        if function.transposed:
            up, down = up.transpose(1, 2).contiguous(), down.transpose(1, 2).contiguous()
        biases = (draw(slots, width), draw(slots, hidden)) if bias else (None, None)
        factors: list[torch.Tensor] = []
        if rank := adapter_rank:
            shapes = (rank, hidden), (width, rank), (rank, inner), (hidden, rank)
            factors = [draw(slots, *shape, scale=shape[1] ** -0.5) for shape in shapes]
        self.weights = ExpertWeights(up, down, *biases, *factors)
        scores = torch.rand(rows, slots, generator=generator, device=device)
        slot_RJ = scores.topk(slots_per_row, 1).indices.int()
        num_pairs = slot_RJ.numel()
        self.function, self.pairs = function, sort_pairs(slot_RJ, slots, num_pairs)
        self.x, self.dy = HiddenStates.of(draw(rows, hidden)), HiddenStates.of(draw(rows, hidden))
        self.weight_RJ = torch.rand(slot_RJ.shape, generator=generator, device=device)
        self.arena, self.h = None, HiddenStates.of(draw(num_pairs, width))
        if use_arena:
            # Memory for h twice: saved by `up`, and read by `dact`.
            self.arena = Arena(4 * num_pairs * width + 2**16, device)
            h = self.arena.reserve(width, torch.bfloat16, self.pairs.count_1)
            assert h.start is not None
            h.data[int(h.start) :][: num_pairs * width] = self.h.data.flatten()
            self.h = h
        self.a, self.dh = draw(num_pairs, inner), draw(num_pairs, width)

    def calls(self, stage: str) -> dict[str, Callable[[], Any]]:
        return {way: self._call(stage, way) for way in WAYS}

    def _call(self, stage: str, way: str) -> Callable[[], Any]:
        stages = GroupedProducts(self.function, self.weights, self.pairs, Choices.all(way))
        return {
            "up": lambda: stages.up(self.x, self.arena, True),
            "down": lambda: stages.down(self.a),
            "dact": lambda: stages.dact(self.h, self.dy, self.weight_RJ, True),
            "dx": lambda: stages.dx(self.dh),
            "dup": lambda: stages.dup(self.dh, self.x),
            "ddown": lambda: stages.ddown(self.dy, self.a),
        }[stage]


def _times(calls: dict[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """Median microseconds of each call, in turns; without those that fail, unless it is the library's."""
    spans: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {}
    for way, call in calls.items():
        try:
            call()
            torch.cuda.synchronize()
            spans[way] = []
        except Exception as error:
            if way in ("", LIBRARY):
                raise
            log.warning("%s cannot be used here: %s", way, error)
    for _ in range(repeats):
        for way, found in spans.items():
            # While the device is busy with this, the host gets ahead.
            torch.cuda._sleep(DELAY_CYCLES)
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            calls[way]()
            end.record()
            found.append((begin, end))
        torch.cuda.synchronize()
    return {way: 1e3 * statistics.median(a.elapsed_time(b) for a, b in found) for way, found in spans.items()}
