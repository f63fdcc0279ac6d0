"""Choices that a run makes for itself: decided or measured once, recorded, and taken again.

    a run that starts      decide (a rule, or what the user asked for)  ->  measure, if the rule says so  ->  run.json
    a run that is resumed  run.json, if the choice was made for the same shape; otherwise as a run that starts

Times differ from one measurement to the next, and ways to compute differ in the last bits of their results. So a
resumed run takes what its record says, and is bitwise equal to one that was never stopped. A *shape* is all that the
choice depends on: device, dtype, sizes, number of ranks. If any of it has changed, the choice is made anew, and the
record says why: "by the shape, chosen anew: device was NVIDIA H100, is NVIDIA H200".

One rank reads records and decides, because files and devices may look different to the others; all ranks measure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

Answer = TypeVar("Answer")
Way = TypeVar("Way")
Record = Mapping[str, Any]

LEAST_GAIN = 0.02  # of a measured time; less is in its noise


@dataclass(frozen=True)
class Chosen(Generic[Answer]):
    """What was chosen.

    Attributes:
        shape: for what.
        how: "default" (by a rule), "measured" or "given" (the user asked for it).
        why: the same for a person.
        times: what was measured, by way; None if nothing was.
    """

    answer: Answer
    shape: Mapping[str, Any]
    how: str
    why: str
    times: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Kind(Generic[Answer]):
    """One kind of choice, as run.json has it.

    Attributes:
        key: in the section `decisions` of run.json.
        write, read: the answer as plain JSON values, and from a record. `read` raises ValueError, KeyError or TypeError
            for what it does not understand, such as a record of another version.
        times: the name under which times are recorded, which is their unit."""

    key: str
    write: Callable[[Answer], dict[str, Any]]
    read: Callable[[Record], Answer]
    times: str = "milliseconds"

    def record(self, chosen: Chosen[Answer]) -> dict[str, Any]:
        """As in run.json."""
        found = {**self.write(chosen.answer), "how": chosen.how, "why": chosen.why, "shape": dict(chosen.shape)}
        return found if chosen.times is None else {**found, self.times: chosen.times}

    def recall(self, record: Record | None, shape: Mapping[str, Any]) -> tuple[Chosen[Answer] | None, str]:
        """(What a run has recorded, ""), or (None, why that cannot be used); (None, "") if it has recorded nothing."""
        if not record or "shape" not in record:
            return None, ""
        before = record["shape"] if isinstance(record["shape"], Mapping) else {}
        if changed := [
            f"{key} was {before.get(key)}, is {shape[key]}" for key in shape if before.get(key) != shape[key]
        ]:
            return None, f", chosen anew: {', '.join(changed)}"
        try:
            answer = self.read(record)
        except (ValueError, KeyError, TypeError) as error:
            return None, f", chosen anew: of what was recorded, {error}"
        how = str(record.get("how", "recorded"))
        return Chosen(answer, shape, how, f"as recorded in this run ({how})", record.get(self.times)), ""


class Decisions:
    """What one run has chosen, in order: one section of run.json, one table of the report. All ranks call it alike.

    Args:
        recorded: the records of the run that is resumed, by the key of their kind; None: there are none. Called on
            rank 0.
        from_rank_0: calls a function on rank 0 and returns its result, or raises its error, on all."""

    def __init__(
        self,
        recorded: Callable[[], Record | None] = lambda: None,
        from_rank_0: Callable[[Callable[[], Any]], Any] = lambda make: make(),
    ) -> None:
        self._recorded, self._from_rank_0 = recorded, from_rank_0
        self._made: dict[str, tuple[Kind[Any], Chosen[Any]]] = {}

    def choose(
        self,
        kind: Kind[Answer],
        shape: Mapping[str, Any],
        decide: Callable[[Chosen[Answer] | None, str], tuple[Chosen[Answer], bool]],
        measure: Callable[[Chosen[Answer]], Chosen[Answer]] | None = None,
    ) -> Chosen[Answer]:
        """Choose, the same on all ranks. All ranks call it together.

        Args:
            decide: (what was recorded, or None; why a record could not be used) -> (the choice, whether it is still to
                be measured). Called on rank 0.
            measure: what to use instead of a choice that is to be measured. Called on all ranks.
        """

        def on_rank_0() -> tuple[Chosen[Answer], bool]:
            return decide(*kind.recall((self._recorded() or {}).get(kind.key), shape))

        chosen, to_measure = self._from_rank_0(on_rank_0)
        return self.add(kind, measure(chosen) if to_measure and measure is not None else chosen)

    def add(self, kind: Kind[Answer], chosen: Chosen[Answer]) -> Chosen[Answer]:
        """Note a choice, in the place of an earlier one of its kind."""
        self._made[kind.key] = kind, chosen
        return chosen

    def record(self) -> dict[str, dict[str, Any]]:
        """As in run.json, under `decisions`."""
        return {key: kind.record(chosen) for key, (kind, chosen) in self._made.items()}


def fastest(times: Mapping[Way, float]) -> Way:
    """The fastest, where each must be `LEAST_GAIN` faster than the best before it: list those that cost more last."""
    ways = iter(times)
    best = next(ways)
    for way in ways:
        if times[way] < times[best] * (1 - LEAST_GAIN):
            best = way
    return best
