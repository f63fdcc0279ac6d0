"""Which implementation each stage of `GroupedExperts` uses, and how that is decided.

    stage     library                                          fused
    up        gather x, grouped product, activation            one kernel: rows are read where they are
    down      grouped product                                  the same, in Triton
    dact      gather dy, grouped product, activation backward  one kernel; dA is never written
    dx        grouped product                                  the same, in Triton
    dup       gather x, grouped outer product                  one kernel
    ddown     grouped outer product of the dy gathered above   one kernel that reads dy where it is

A choice names one way for each stage: "library", or the tiling of the fused kernel (`gemm_tiles.TILINGS`):

    wide      128 x 256, one program on a multiprocessor
    flat      the same, and the next tile's loads begin before this tile's results are written
    square    128 x 128, two programs on a multiprocessor: one multiplies while the other writes

`measure_choices` times all of them for a shape, on the device at hand. Times differ from run to run, and so may the
choice, and with it the last bits of results: so whoever measures records `Choices.to_dict()` in the run and passes the
same on resume. Nothing is measured unless asked for: `default_choices` goes by the shape alone.

dact and ddown are chosen together: the library's sides of both need the gathered rows of dy, which are gathered once.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from itertools import product
from typing import Any

import torch

from carpool.experts.base import Activation, ExpertFunction, ExpertWeights
from carpool.experts.pairs import gather_rows, sort_pairs
from carpool.memory.arena import Arena, Rows

LIBRARY = "library"
WAYS = (LIBRARY, "wide", "flat", "square")
DELAY_CYCLES = 1_000_000  # about half a millisecond

log = logging.getLogger("carpool")


@dataclass(frozen=True)
class Choices:
    """The way of each stage; see the module's docstring. The default is the library's everywhere.

    Raises:
        ValueError: a way that does not exist.
    """

    up: str = LIBRARY
    down: str = LIBRARY
    dact: str = LIBRARY
    dx: str = LIBRARY
    dup: str = LIBRARY
    ddown: str = LIBRARY

    def __post_init__(self) -> None:
        for stage, way in asdict(self).items():
            if way not in WAYS:
                raise ValueError(f"{stage}={way!r} is no way to compute a stage; use one of {', '.join(WAYS)}")

    @classmethod
    def all(cls, way: str) -> Choices:
        """The same way for every stage."""
        return cls(**{stage: way for stage in STAGES})

    @classmethod
    def from_dict(cls, ways: Mapping[str, str]) -> Choices:
        """The inverse of `to_dict`; stages not named are the library's.

        Raises:
            ValueError: a stage that does not exist.
        """
        unknown = sorted(set(ways) - set(STAGES))
        if unknown:
            raise ValueError(f"no such stage: {', '.join(unknown)}; the stages are {', '.join(STAGES)}")
        return cls(**ways)

    def to_dict(self) -> dict[str, str]:
        return asdict(self)

    @property
    def any_fused(self) -> bool:
        return any(way != LIBRARY for way in asdict(self).values())


STAGES = tuple(field.name for field in fields(Choices))


def default_choices(device: torch.device, hidden: int, inner: int) -> Choices:
    """By the shape alone, as measured on one H200 (docs/measurements.md); `measure_choices` knows other shapes better.
    GPUs other than Hopper get the library's.

    Args:
        hidden, inner: H and F.
    """
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != 9:
        return Choices()
    # Rows gathered for the library are written and read again. That is little beside products of moderate H and large
    # F, and there the library's outer products, and its product before the activation's backward, are faster. At H 4096
    # both take the same time, and the fused side takes less memory.
    if hidden < 4096 and inner > 512:
        return Choices(up="flat", down="flat", dx="flat")
    return Choices(up="flat", down="flat", dact="flat", dx="flat", dup="wide", ddown="square")


@dataclass(frozen=True)
class Measured:
    """What `measure_choices` found.

    Attributes:
        choices: the fastest.
        microseconds: of each stage, by way; those that cannot run on this device are missing.
        gather: microseconds to gather the rows of dy, which the library's sides of dact and ddown need, once.
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
    ways: tuple[str, ...] = WAYS,
    repeats: int = 7,
    slot_RJ: torch.Tensor | None = None,
) -> Measured:
    """Time every way of every stage in bf16 on random rows and balanced random routing, and pick the fastest.

    The host waits for the device, and memory for about one forward and backward is taken.

    Args:
        rows, slots, slots_per_row: how many rows come, and how many of how many slots each wants.
        hidden, inner: H, F.
        bias: whether the experts have biases.
        use_arena: whether the pre-activation is kept in an arena, as transports that do not tell the host how much
            came want it.
        slot_RJ: a routing of one's own.

    Raises:
        ValueError: the device is no GPU; sizes that do not fit.
    """
    if device.type != "cuda":
        raise ValueError(f"stages are chosen by measurement on a GPU, not on {device}; on a CPU there is one way")
    if not 0 < slots_per_row <= slots:
        raise ValueError(f"slots_per_row={slots_per_row} must be between 1 and slots={slots}")
    problem = _Problem(rows, hidden, inner, slots, slots_per_row, function, device, bias, use_arena, slot_RJ)
    microseconds = {stage: _times(problem.calls(stage, ways), repeats) for stage in STAGES}
    gather = _times({"": lambda: gather_rows(problem.dy, problem.pairs, torch.bfloat16)}, repeats)[""]
    return Measured(pick(microseconds, gather), microseconds, gather)


def pick(microseconds: dict[str, dict[str, float]], gather: float) -> Choices:
    """The fastest ways. Of equally fast ones, those that come first."""
    best = {stage: min(times, key=times.__getitem__) for stage, times in microseconds.items()}
    dact, ddown = microseconds["dact"], microseconds["ddown"]
    best["dact"], best["ddown"] = min(
        product(dact, ddown), key=lambda ways: dact[ways[0]] + ddown[ways[1]] + gather * (LIBRARY in ways)
    )
    return Choices(**best)


class _Problem:
    """Inputs of all stages."""

    def __init__(
        self, rows: int, hidden: int, inner: int, slots: int, slots_per_row: int, function: ExpertFunction,
        device: torch.device, bias: bool, use_arena: bool, slot_RJ: torch.Tensor | None,
    ) -> None:  # fmt: skip
        generator = torch.Generator(device).manual_seed(0)

        def draw(*shape: int, scale: float = 1.0) -> torch.Tensor:
            return scale * torch.randn(*shape, generator=generator, device=device, dtype=torch.bfloat16)

        activation = function.activation
        width = inner * (2 if not isinstance(activation, Activation) or activation.gated else 1)
        up, down = draw(slots, width, hidden, scale=hidden**-0.5), draw(slots, hidden, inner, scale=inner**-0.5)
        if function.transposed:
            up, down = up.transpose(1, 2).contiguous(), down.transpose(1, 2).contiguous()
        self.weights = ExpertWeights(up, down, *((draw(slots, width), draw(slots, hidden)) if bias else (None, None)))
        if slot_RJ is None:
            scores = torch.rand(rows, slots, generator=generator, device=device)
            slot_RJ = scores.topk(slots_per_row, 1).indices.int()
        num_pairs = slot_RJ.numel()
        self.function, self.pairs = function, sort_pairs(slot_RJ, slots, num_pairs)
        self.x, self.dy = Rows.of(draw(rows, hidden)), Rows.of(draw(rows, hidden))
        self.weight_RJ = torch.rand(slot_RJ.shape, generator=generator, device=device)
        self.arena, self.h = None, Rows.of(draw(num_pairs, width))
        if use_arena:
            # Room for h twice: what `up` keeps, and what `dact` reads.
            self.arena = Arena(4 * num_pairs * width + 2**16, device)
            h = self.arena.reserve(width, torch.bfloat16, self.pairs.count_1)
            assert h.start is not None
            h.data[int(h.start) :][: num_pairs * width] = self.h.data.flatten()
            self.h = h
        self.a, self.dh = draw(num_pairs, inner), draw(num_pairs, width)

    def calls(self, stage: str, ways: tuple[str, ...]) -> dict[str, Callable[[], Any]]:
        return {way: self._call(stage, way) for way in ways}

    def _call(self, stage: str, way: str) -> Callable[[], Any]:
        from carpool.experts.stages import Stages

        stages = Stages(self.function, self.weights, self.pairs, Choices.all(way))
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
