"""How much of a step's communication was exposed: what profile.json says, in milliseconds.

Every moment of a rank's step is exactly one of these, so that they add up to the step:

    computation       a kernel computes, whatever else is under way
    exposed           a ride is under way, and nothing computes
    other_exposed     other communication is under way, and neither a ride nor computation
    idle              nothing runs on the accelerator

`ride` and `other` are how long there was such communication at all, hidden or not. A ride's kernel also waits for the
ranks that it hears from: what the slowest of them makes the others wait is exposed, too. On a CPU nothing runs beside
anything that a trace could tell, so all of a ride is exposed, and the rest of the step is computation.

A layer's exposed rides are those of its kernels; where rides of two layers, or chunks, are exposed together, each
counts them, so layers may add up to more than the step.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from carpool.profile.rank_trace import COMPUTATION, KINDS, OTHER, RIDES, Piece, Recorded, Span, length, subtract, union

COLUMNS = 2000
"""Of a lane's picture; each shows what took most of it."""
LEAST_SHARE = 0.25
"""A column of which less than this is busy stays blank."""
SHOWN_AS = {**dict.fromkeys(RIDES, "rides"), **dict.fromkeys(COMPUTATION, "computation"), OTHER: "other communication"}


class Numbers(BaseModel):
    """Base: immutable, and tolerant of fields that another version wrote."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class Times(Numbers):
    """Milliseconds of one rank's step, see the module's docstring."""

    step: float
    computation: float
    ride: float
    exposed: float
    other: float
    other_exposed: float
    idle: float


class LayerTimes(Numbers):
    """Milliseconds of one layer in one direction: its rides, what was exposed of them, what they had to pack, and its
    experts."""

    layer: str
    direction: str
    ride: float
    exposed: float
    packing: float
    experts: float


class Lane(Numbers):
    """A stream, or a thread of the host: (start, end, kind, label), in milliseconds from the start of the step."""

    name: str
    runs: list[tuple[float, float, str, str]]


class RankNumbers(Numbers):
    """What one rank recorded."""

    rank: int
    times: Times
    layers: list[LayerTimes]
    lanes: list[Lane]


class Profile(Numbers):
    """profile.json. `about`: what ran, for a person; `on_device`: lanes are streams; `plain_ms`: a step without the
    profiler, on the slowest rank; `simulated`: nothing ran."""

    about: dict[str, str] = Field(default_factory=dict)
    on_device: bool
    plain_ms: float | None = None
    simulated: bool = False
    ranks: list[RankNumbers] = Field(min_length=1)

    def mean(self) -> Times:
        """Over ranks."""
        return Times(**_mean(one.times.model_dump() for one in self.ranks))

    def layers(self) -> list[LayerTimes]:
        """Of each layer and direction, the mean over ranks, in order of appearance."""
        found: dict[tuple[str, str], list[LayerTimes]] = {}
        for one in self.ranks:
            for layer in one.layers:
                found.setdefault((layer.layer, layer.direction), []).append(layer)
        return [
            LayerTimes(
                layer=name, direction=way, **_mean(one.model_dump(exclude={"layer", "direction"}) for one in group)
            )
            for (name, way), group in found.items()
        ]


def load_profile(path: Path) -> Profile:
    """Read profile.json.

    Raises:
        ValueError: there is none, or it is damaged."""
    if not path.is_file():
        raise ValueError(
            f"{path.parent.parent} has no profile ({path} does not exist): record one with `carpool profile "
            f"training.output_dir={path.parent.parent}` and the run's other settings"
        )
    try:
        return Profile.model_validate_json(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, ValidationError) as error:
        reason = error.errors()[0]["msg"] if isinstance(error, ValidationError) else str(error)
        raise ValueError(f"{path} is damaged ({reason}): record the profile again") from None


def save_profile(profile: Profile, path: Path) -> None:
    path.write_text(json.dumps(profile.model_dump(), separators=(",", ":")) + "\n", encoding="utf-8")


def measure(recorded: Recorded, rank: int) -> RankNumbers:
    """The numbers of one rank's trace."""
    pieces = recorded.pieces
    computation = _of(pieces, COMPUTATION)
    ride, other = _of(pieces, RIDES), _of(pieces, (OTHER,))
    if not recorded.on_device:
        # Threads take turns, and which of them computes meanwhile the ranges do not say.
        computation = subtract([recorded.step], union(ride + other))
    exposed = subtract(ride, computation)
    other_exposed = subtract(other, union(computation + ride))
    idle = subtract([recorded.step], union(computation + ride + other))
    times = Times(
        step=_ms([recorded.step]),
        computation=_ms(computation),
        ride=_ms(ride),
        exposed=_ms(exposed),
        other=_ms(other),
        other_exposed=_ms(other_exposed),
        idle=_ms(idle),
    )
    by_layer: dict[tuple[str, str], list[Piece]] = {}
    for piece in pieces:
        if piece.label is not None:
            by_layer.setdefault((piece.label.layer, piece.label.direction), []).append(piece)
    layers = [
        LayerTimes(
            layer=layer,
            direction=direction,
            ride=_ms(_of(own, RIDES)),
            exposed=_ms(subtract(_of(own, RIDES), computation)),
            packing=_ms(_of(own, ("packing",))),
            experts=_ms(_of(own, ("experts",))),
        )
        for (layer, direction), own in by_layer.items()
    ]
    by_lane: dict[str, list[Piece]] = defaultdict(list)
    for piece in pieces:
        by_lane[piece.lane].append(piece)
    lanes = [_lane(name, own, recorded.step) for name, own in sorted(by_lane.items(), key=lambda one: _order(one[0]))]
    return RankNumbers(rank=rank, times=times, layers=layers, lanes=lanes)


def _lane(name: str, pieces: Sequence[Piece], step: Span) -> Lane:
    """A lane in columns: neighbours that show the same become one run."""
    width = (step[1] - step[0]) / COLUMNS
    busy: list[dict[tuple[str, str], float]] = [{} for _ in range(COLUMNS)]
    took: dict[str, int] = dict.fromkeys(KINDS, 0)
    for piece in pieces:
        took[piece.kind] += piece.end - piece.start
        key = piece.kind, str(piece.label) if piece.label is not None else ""
        start, end = piece.start - step[0], piece.end - step[0]
        for column in range(int(start / width), min(COLUMNS - 1, int(end / width)) + 1):
            share = (min(end, (column + 1) * width) - max(start, column * width)) / width
            if share > 0:
                busy[column][key] = busy[column].get(key, 0.0) + share
    shown = [max(shares, key=shares.__getitem__) if sum(shares.values()) >= LEAST_SHARE else None for shares in busy]
    runs, column = [], 0
    for what, same in groupby(shown):
        start, column = column, column + len(list(same))
        if what is not None:
            runs.append((round(start * width / 1e6, 4), round(column * width / 1e6, 4), *what))
    return Lane(name=f"{name}: {SHOWN_AS[max(took, key=took.__getitem__)]}", runs=runs)


def _of(pieces: Iterable[Piece], kinds: Sequence[str]) -> list[Span]:
    return union((piece.start, piece.end) for piece in pieces if piece.kind in kinds)


def _ms(spans: list[Span]) -> float:
    return length(spans) / 1e6


def _order(lane: str) -> tuple[int, str]:
    """Streams by their number, not as text."""
    number = lane.rpartition(" ")[2]
    return (int(number) if number.isdigit() else -1), lane


def _mean(tables: Iterable[dict[str, float]]) -> dict[str, float]:
    rows = list(tables)
    return {key: sum(row[key] for row in rows) / len(rows) for key in rows[0]}
