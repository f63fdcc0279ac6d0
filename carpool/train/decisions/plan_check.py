"""How right a run's plan was: what its first steps measure, beside what was predicted.

Three kinds of time are told apart:

    rides      what of dispatch and combine is exposed
    experts    what experts compute
    rest       everything else

Measured over predicted is a factor for each. With these factors the times of the next best plans are corrected, and the
run says if one of them would then be faster. It goes on as it is: a run is the same when it is resumed.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from carpool.train.decisions.plan import Planned

# Steps that are not measured, because they compile, capture and find their room; and those that are.
SKIPPED, MEASURED = 3, 7
# A plan must be so much faster, after correction, to be named.
WORTH = 0.03


def measured_beside(plan: Planned, steps: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """What the first steps say of a plan, as plain values: None until there are enough.

    Args:
        steps: records of the steps of this process, from the first one on."""
    taken, counted = plan.taken, steps[SKIPPED : SKIPPED + MEASURED]
    if len(counted) < MEASURED:
        return None
    step = statistics.median(one["step_ms"] for one in counted)
    found: dict[str, Any] = {
        "step_ms": step,
        "memory_bytes": max(one["memory_peak_bytes"] for one in counted),
        "exposed_share": None,
        "factors": {},
        "others_ms": {},
    }
    parts = [one.get("ms") or {} for one in counted]
    if all({"dispatch", "experts", "combine"} <= set(one) for one in parts):
        rides = statistics.median(one["dispatch"]["total"] + one["combine"]["total"] for one in parts)
        experts = statistics.median(one["experts"]["total"] for one in parts)
        measured = {"rides": rides, "experts": experts, "rest": step - rides - experts}
        found["exposed_share"] = rides / step
        found["factors"] = {
            kind: measured[kind] / own for kind, own in taken.kinds_ms.items() if own > 0 and measured[kind] > 0
        }
    else:
        found["factors"] = dict.fromkeys(taken.kinds_ms, step / taken.step_ms[1])
    for other in plan.others:
        found["others_ms"][other.label] = sum(
            found["factors"].get(kind, 1.0) * ms for kind, ms in other.kinds_ms.items()
        )
    return found


def describe(plan: Planned, measured: Mapping[str, Any]) -> list[str]:
    """Predicted beside measured, for the log."""
    taken, step = plan.taken, measured["step_ms"]
    low, likely, high = taken.step_ms
    share = measured["exposed_share"]
    lines = [
        f"plan: a step takes {step:,.1f} ms, and {likely:,.1f} ({low:,.0f} to {high:,.0f}) were predicted; memory "
        f"{measured['memory_bytes'] / 2**30:.2f} GiB, predicted {taken.tensor_bytes / 2**30:.2f}"
        + ("" if share is None else f"; exposed rides {share:.0%}, predicted {taken.exposed_share:.0%}")
    ]
    others = measured["others_ms"]
    if others and (best := min(others, key=others.__getitem__)) and others[best] < (1 - WORTH) * step:
        settings = next(one.settings for one in plan.others if one.label == best)
        changed = [f"{key}={value}" for key, value in settings.items() if value != taken.settings.get(key)]
        lines.append(
            f"plan: corrected by what was measured, {best} would take {others[best]:,.1f} ms: a new run with "
            f"{' '.join(changed)} would show it"
        )
    return lines
