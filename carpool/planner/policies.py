"""Which policies to take for a memory budget: those that fit and cost least time.

    all combinations of what is open      rows x hidden x dense x sums, at most 36
    bytes of each                         the estimate of the run under it
    milliseconds of each                  measured, or modelled by the rates of the hardware

What a policy costs depends on the others, because what is offloaded shares one link, and because the copies hide behind
what is computed. So combinations are compared, and not items by milliseconds per byte. Of those that take equally long,
the one with fewer bytes on the device is taken.

A run measures what each policy of each item costs before it chooses, and adds these costs (`measured_milliseconds`,
`carpool.train.run.kept_times`). Whoever cannot run anything models them by the rates of the hardware.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import product

from carpool.planner.hardware import Hardware
from carpool.planner.kept import POLICIES, LayerSizes, kept_bytes

Policies = dict[str, str]
MiB = 2**20


def combinations(given: Mapping[str, str | None]) -> list[Policies]:
    """All policies that agree with what is given; None: open. The cheapest to compute come first."""
    items = list(POLICIES)
    found = []
    for one in product(*((given[item],) if given.get(item) else POLICIES[item] for item in items)):
        policies: Policies = dict(zip(items, map(str, one), strict=True))
        repeats = policies["sums"] == "recompute"
        if repeats and (policies["dense"] != "recompute" or "offload" in (policies["rows"], policies["hidden"])):
            continue
        found.append(policies)
    return found


def policies_milliseconds(sizes: LayerSizes, tokens: int, policies: Mapping[str, str], hardware: Hardware) -> float:
    """What policies add to a micro-batch's forward and backward on one rank.

    Args:
        tokens: of a rank in a micro-batch."""
    attention = 4 * tokens * sizes.hidden * (sizes.heads + sizes.key_heads) * sizes.head_size / hardware.flops
    product = 2 * tokens * sizes.top_k * sizes.hidden * sizes.expert_hidden / hardware.flops
    link = hardware.rate("nvlink")
    ride = link.latency + sizes.copies * tokens * sizes.hidden * sizes.element_size / link.bytes_per_second
    one_layer = LayerSizes(**{**vars(sizes), "layers": 1, "moe_layers": 1})
    layer = kept_bytes(one_layer, tokens)
    traffic = hardware.memory or 1e12
    seconds = 0.0
    if policies["hidden"] == "recompute":
        seconds += sizes.moe_layers * 2 * product
    if policies["rows"] == "resend":
        seconds += sizes.moe_layers * ride
    if policies["dense"] == "recompute":
        # Norms and the like read and write what the layer keeps.
        seconds += sizes.layers * (attention + 2 * layer["dense"] / traffic)
        if policies["sums"] == "recompute":
            seconds += sizes.moe_layers * (3 * product + 2 * ride)
    away = sum(layer[item] for item in ("rows", "hidden", "dense") if policies[item] == "offload")
    if away:
        forward, copies = attention + 3 * product + 2 * ride, away / hardware.host_link.bytes_per_second
        exposed = max(0.0, copies - forward) + max(0.0, copies - 2 * forward)
        seconds += sizes.layers * (exposed + 2 * away / traffic)
    return 1e3 * seconds


def measured_milliseconds(times: Mapping[str, Mapping[str, float]], policies: Mapping[str, str]) -> float:
    """What policies add to a micro-batch: the sum of what each adds by itself.

    Args:
        times: milliseconds by item and policy; 0 for those that are missing, about which there is no question.

    Example: {"rows": {"resend": 3.0}}, {"rows": "resend", "hidden": "keep"} -> 3.0"""
    return sum(times.get(item, {}).get(policy, 0.0) for item, policy in policies.items())


def choose_policies(
    budget: int,
    given: Mapping[str, str | None],
    total_bytes: Callable[[Policies], int],
    milliseconds: Callable[[Policies], float],
    how: str = "modelled",
) -> tuple[Policies, str]:
    """(the policies that fit into a budget and cost least, why).

    Args:
        budget: bytes of a rank's device.
        given: policies that the user has chosen, by item; None: open.
        total_bytes: of a rank under some policies.
        milliseconds: that they add to a micro-batch.
        how: these are known, for people.

    Raises:
        ValueError: none fits. Says the smallest budget for which one does."""
    every = [(total_bytes(one), milliseconds(one), one) for one in combinations(given)]
    fitting = [one for one in every if one[0] <= budget]
    if not fitting:
        least, _, policies = min(every, key=lambda one: one[0])
        shown = " ".join(f"memory.{item}={policy}" for item, policy in policies.items())
        # Rounded up, so that it is enough.
        raise ValueError(
            f"memory.budget = {budget // MiB:,} MiB is not enough under any policies; the smallest that is: "
            f"memory.budget={-(-least // MiB)}MiB, which takes {shown}"
        )
    size, cost, policies = min(fitting, key=lambda one: (round(one[1], 6), one[0]))
    why = f"{size // MiB:,} of {budget // MiB:,} MiB, for {cost:.1f} ms more in a micro-batch ({how})"
    return policies, why
