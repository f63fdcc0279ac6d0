"""Choices of a run: made once, recorded, taken again, and made anew when what they depend on has changed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from carpool.planner.decisions.chosen import Chosen, Decisions, Kind, fastest

KIND: Kind[int] = Kind("width", lambda answer: {"tiles": answer}, lambda record: int(record["tiles"]), "microseconds")
SHAPE = {"device": "NVIDIA H200", "rows": 512}


def chosen(record: Mapping[str, Any] | None, shape: Mapping[str, Any] = SHAPE, measured: int = 8) -> Chosen[int]:
    """As a run with a rule that says 4, and that it is to be measured."""
    decisions = Decisions(lambda: None if record is None else {"width": record})

    def decide(kept: Chosen[int] | None, note: str) -> tuple[Chosen[int], bool]:
        return (kept, False) if kept else (Chosen(4, shape, "default", "by the rule" + note), True)

    def measure(fallback: Chosen[int]) -> Chosen[int]:
        return Chosen(measured, fallback.shape, "measured", fallback.why, {"8": 1.5})

    found = decisions.choose(KIND, shape, decide, measure)
    assert decisions.record() == {"width": KIND.record(found)}
    return found


def test_what_was_measured_is_taken_again() -> None:
    first = chosen(None)
    record = json.loads(json.dumps(KIND.record(first)))
    assert record == {
        "tiles": 8, "how": "measured", "why": "by the rule", "shape": SHAPE, "microseconds": {"8": 1.5},
    }  # fmt: skip
    again = chosen(record, measured=16)
    assert (again.answer, again.how, again.times) == (8, "measured", {"8": 1.5})
    assert again.why == "as recorded in this run (measured)"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"shape": {**SHAPE, "rows": 64}}, "chosen anew: rows was 64, is 512"),
        ({"shape": None}, "chosen anew: device was None"),
        ({"tiles": "many"}, "chosen anew: of what was recorded, invalid literal"),
    ],
)
def test_what_cannot_be_taken_again_is_chosen_anew_and_says_why(change: dict[str, Any], says: str) -> None:
    found = chosen({**KIND.record(chosen(None)), **change}, measured=16)
    assert found.answer == 16 and says in found.why


def test_a_record_without_a_choice_is_none() -> None:
    assert KIND.recall({"name": "grouped"}, SHAPE) == (None, "") == KIND.recall(None, SHAPE)


def test_a_runs_decisions_are_one_record() -> None:
    decisions, other = Decisions(), Kind[str]("way", lambda name: {"name": name}, lambda record: str(record["name"]))
    decisions.add(KIND, Chosen(4, SHAPE, "default", "by the rule"))
    decisions.add(other, Chosen("dedup", {}, "given", "asked for"))
    decisions.add(KIND, Chosen(8, SHAPE, "default", "by the rule; with a note"))
    assert [(key, one["how"], one["why"]) for key, one in decisions.record().items()] == [
        ("width", "default", "by the rule; with a note"), ("way", "given", "asked for"),
    ]  # fmt: skip
    asked = []

    def from_rank_0(make: Any) -> Any:
        asked.append(1)
        return make()

    again = Decisions(decisions.record, from_rank_0)
    assert again.choose(other, {}, lambda kept, note: (kept or Chosen("x", {}, "", note), False)).answer == "dedup"
    assert asked == [1], "one rank reads and decides"


def test_what_costs_more_must_be_clearly_faster() -> None:
    assert fastest({"a": 10.0, "b": 9.9, "c": 9.5, "d": 9.4}) == "c"
