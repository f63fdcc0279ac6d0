"""Writes docs/reference/plans.md: the best plan of each published model on 8, 64 and 1,024 GPUs, and why it is.

    python -m tools.plans_table [MODEL ...]

It does what `carpool plan` does, for experts that are spread over ranks and for experts that are not: some minutes for
each model. With models it prints their rows alone.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from carpool.planner.machine.hardware import find_hardware
from carpool.planner.model.shape import ModelShape
from carpool.planner.search.plan import Plan, plan
from carpool.planner.search.space import Space
from carpool.planner.search.why import bounded_by, longer_than
from carpool.train.config.declarations import declared
from carpool.train.config.published import published_models, read_keys
from carpool.train.config.schema import config_type

DOCS = Path(__file__).parents[1] / "docs" / "reference" / "plans.md"
HARDWARE, PER_NODE, SEQUENCE = "H100", 8, 4096
# GPUs, and tokens of a step.
SIZES = {8: 2**19, 64: 2**22, 1024: 2**24}
COLUMNS = ("model", "GPUs", "fastest", "step, s", "MFU", "GiB", "the step goes to", "the best of the other kind")

INTRODUCTION = """\
# Plans of published models

`python -m tools.plans_table` writes this page from what `carpool plan` predicts. Nothing here was measured.
Layers that are computed again under FSDP are taken as compiled: this needs PyTorch 2.13, and has not run on GPUs.
For each
model and number of {hardware} GPUs, {per_node} a node, it has the fastest plan, and how much longer the best one of the
other kind takes: with experts spread over ranks (`ep` above 1), or with all experts on every rank (`ep1`). Differences
are seconds of a step, by what is exposed; *the host* is among them wherever it is one of the four largest. Steps have
{tokens} tokens, sequences of {sequence:,} tokens; moments are float32, choices of experts uniform. `carpool plan` says
more of each: what changes the answer, and what memory forbids.

"""


def spaces() -> dict[bool, Space]:
    """What may vary where experts are spread over ranks, and where they are not."""
    shared = {"excluded": declared(config_type()).why_refused}
    every = tuple(2**power for power in range(1, 11))
    return {True: Space(ep=every, **shared), False: Space(ep=(1,), **shared)}  # type: ignore[arg-type]


def best_of_each(model: str, gpus: int) -> list[Plan]:
    """The fastest plan with spread experts, and without, the fastest first; those that fit."""
    shape, hardware = ModelShape.read(read_keys(model)), find_hardware(HARDWARE)
    numbers = {"gpus": gpus, "tokens": SIZES[gpus], "sequence_length": SEQUENCE, "per_node": PER_NODE, "best": 1}
    found = [one for space in spaces().values() for one in plan(shape, hardware, **numbers, space=space).plans]  # type: ignore[arg-type]
    return sorted(found, key=lambda one: one.prediction.seconds.middle)


def rows_of(model: str, sizes: Sequence[int] = tuple(SIZES)) -> Iterator[list[str]]:
    for gpus in sizes:
        if not (found := best_of_each(model, gpus)):
            yield [model, f"{gpus:,}", "none fits", *[""] * 5]
            continue
        first, *others = found
        assert first.prediction.mfu is not None
        yield [
            model, f"{gpus:,}", first.candidate.label, f"{first.prediction.seconds.middle:.3g}",
            f"{100 * first.prediction.mfu.middle:.1f} %", f"{first.memory.total / 2**30:.1f}", bounded_by(first),
            longer_than(first, others[0]) if others else "none fits",
        ]  # fmt: skip


def line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def main() -> None:
    models = sys.argv[1:] or [name for name in published_models() if not name.endswith("-cut")]
    lines = [line(COLUMNS), line(["---"] * len(COLUMNS))]
    for name in models:
        for row in rows_of(name):
            lines.append(line(row))
            print(lines[-1], flush=True)
    if not sys.argv[1:]:
        tokens = ", ".join(f"2^{math.log2(one):.0f} on {gpus:,} GPUs" for gpus, one in SIZES.items())
        about = INTRODUCTION.format(hardware=HARDWARE, per_node=PER_NODE, tokens=tokens, sequence=SEQUENCE)
        DOCS.write_text(about + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
