"""What is kept for the backward of a run, for a budget (see `carpool.planner.decisions.chosen` for when it is chosen).

    memory.budget   a run that starts                                             a run that is resumed
    none            what memory.rows and the like say; what they leave open is kept
    a size          what they leave open: what fits and costs least               as recorded in run.json

What each policy costs is measured (`carpool.train.assembly.kept_times`), recorded, and not measured again by a run that
is resumed. A dry run, which has no ranks, takes it from the planner's model of a step
(`carpool.planner.decisions.policies`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from carpool.planner.configuration.candidate import POLICIES
from carpool.planner.decisions.chosen import Chosen, Decisions, Kind, Record
from carpool.planner.decisions.policies import Policies, choose_policies, measured_milliseconds, modelled_milliseconds
from carpool.planner.machine.hardware import Hardware
from carpool.planner.model.shape import ModelShape
from carpool.train.config.schema import Config
from carpool.train.estimate.memory import MemoryEstimate
from carpool.train.model.implementations import planned_attention

# Milliseconds by item and policy, of a micro-batch of all layers of the run.
Times = dict[str, dict[str, float]]


def _read(record: Record) -> Policies:
    policies = {item: str(record[item]) for item in POLICIES}
    if unknown := [item for item, policy in policies.items() if policy not in POLICIES[item]]:
        raise ValueError(f"{unknown[0]} = {policies[unknown[0]]!r} is not known")
    return policies


MEMORY_KIND: Kind[Policies] = Kind("memory", dict, _read)


def open_items(config: Config) -> dict[str, str | None]:
    """What is decided of each item already; None: what a budget decides."""
    given = {item: getattr(config.memory, item) for item in POLICIES}
    if config.moe.experts not in ("auto", "grouped") and given["hidden"] is None:
        given["hidden"] = "keep"
    return given


def choose_memory(
    estimate: MemoryEstimate,
    transport: str,
    hardware: Hardware,
    decisions: Decisions,
    measure_times: Callable[[], Times] | None = None,
    per_node: int = 1,
) -> Chosen[Policies]:
    """Choose. All ranks together.

    Args:
        estimate: of the run as it is configured.
        decisions: of the run.
        measure_times: what each policy costs, the same on all ranks. None: costs are modelled.
        per_node: ranks of a node.

    Raises:
        ValueError: no policies fit into the budget."""
    config = estimate.config
    shape: dict[str, Any] = {
        "budget": config.memory.budget,
        "given": {item: getattr(config.memory, item) for item in POLICIES},
        "device": hardware.name,
        "tokens": estimate.tokens,
        **estimate.degrees.record(),
    }

    def decide(kept: Chosen[Policies] | None, note: str) -> tuple[Chosen[Policies], bool]:
        if config.memory.budget is None:
            return Chosen(config.memory.policies, shape, "given", "as configured, for there is no memory.budget"), False
        if kept is not None:
            return kept, False
        # Whatever costs what: a budget that is too small is refused before anything is measured.
        policies, why = _fitting(estimate, transport, _modelled(estimate, transport, hardware, per_node), "modelled")
        # If all is kept, nothing costs anything.
        asked = any(policies[item] != "keep" for item, given in open_items(config).items() if given is None)
        return Chosen(policies, shape, "default", why + note), asked and measure_times is not None

    def measure(fallback: Chosen[Policies]) -> Chosen[Policies]:
        assert measure_times is not None
        times = measure_times()
        costs = partial(measured_milliseconds, times)
        policies, why = _fitting(estimate, transport, costs, "measured")
        return Chosen(policies, fallback.shape, "measured", why, times)

    return decisions.choose(MEMORY_KIND, shape, decide, measure)


def _fitting(
    estimate: MemoryEstimate, transport: str, milliseconds: Callable[[Policies], float], how: str
) -> tuple[Policies, str]:
    """(policies that fit into the budget and cost least, why).

    Args:
        milliseconds: that policies add to a micro-batch; how: these are known.

    Raises:
        ValueError: no policies fit into the budget."""
    config, budget = estimate.config, estimate.config.memory.budget_bytes
    assert budget is not None
    dense = _lies(config)

    def preferred(policies: Policies) -> bool:
        if config.training.cuda_graphs != "on":
            return True
        one = estimate.changed(with_policies(config, policies)).candidate(transport, dense)
        return (one.eager or one.why_eager_by_plan) is None

    return choose_policies(
        budget,
        open_items(config),
        lambda policies: estimate.changed(with_policies(config, policies))(transport, dense)["total"],
        milliseconds,
        how,
        preferred,
    )


def _modelled(
    estimate: MemoryEstimate, transport: str, hardware: Hardware, per_node: int
) -> Callable[[Mapping[str, str]], float]:
    """What policies add to a micro-batch, by the planner's model of a step. Of a model whose sizes cannot be read: how
    many items are not kept."""
    config, model = estimate.config, estimate.model
    try:
        attention = planned_attention(config, estimate.degrees, model, estimate.cuda)
        shape = ModelShape.read(model.config.to_dict(), attention)
    except ValueError:
        return lambda policies: float(sum(policy != "keep" for policy in policies.values()))
    candidate = replace(
        estimate.candidate(transport, _lies(config)),
        experts="fp8" if config.moe.experts == "fp8" else "grouped",
    )
    return modelled_milliseconds(shape, hardware, candidate, per_node)


def _lies(config: Config) -> str:
    """How dense parameters are taken to lie while that is not decided."""
    return "replicate" if config.parallelism.dense == "replicate" else "fsdp"


def with_policies(config: Config, policies: Policies) -> Config:
    """The configuration of a run under these policies."""
    return config.model_copy(update={"memory": config.memory.model_copy(update=policies)})
