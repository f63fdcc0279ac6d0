"""What is kept for the backward of a run, for a budget (see `carpool.planner.chosen` for when it is chosen).

    memory.budget   a run that starts                                             a run that is resumed
    none            what memory.rows and the like say; what they leave open is kept
    a size          what they leave open: what fits and costs least               as recorded in run.json

What each policy costs is measured (`carpool.train.run.kept_times`), recorded, and not measured again by a run that is
resumed. A dry run, which has no ranks, models it by the rates of the hardware (`carpool.planner.policies`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from carpool.hf.sizes import head_sizes
from carpool.planner.chosen import Chosen, Decisions, Kind, Record
from carpool.planner.hardware import Hardware
from carpool.planner.kept import POLICIES, LayerSizes
from carpool.planner.policies import Policies, choose_policies, measured_milliseconds, policies_milliseconds
from carpool.train.config.schema import Config
from carpool.train.run.estimate import MemoryEstimate
from carpool.train.run.kept_times import Times
from carpool.transport import find_transport


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
) -> Chosen[Policies]:
    """Choose. All ranks together.

    Args:
        estimate: of the run as it is configured.
        decisions: of the run.
        measure_times: what each policy costs, the same on all ranks. None: costs are modelled.

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
        policies, why = _fitting(estimate, transport, hardware, None)
        # If all is kept, nothing costs anything.
        asked = any(policies[item] != "keep" for item, given in open_items(config).items() if given is None)
        return Chosen(policies, shape, "default", why + note), asked and measure_times is not None

    def measure(fallback: Chosen[Policies]) -> Chosen[Policies]:
        assert measure_times is not None
        times = measure_times()
        policies, why = _fitting(estimate, transport, hardware, times)
        return Chosen(policies, fallback.shape, "measured", why, times)

    return decisions.choose(MEMORY_KIND, shape, decide, measure)


def _fitting(estimate: MemoryEstimate, transport: str, hardware: Hardware, times: Times | None) -> tuple[Policies, str]:
    """(policies that fit into the budget and cost least, why). Costs are `times`; None: modelled by the hardware's
    rates.

    Raises:
        ValueError: no policies fit into the budget."""
    config, budget = estimate.config, estimate.config.memory.budget_bytes
    assert budget is not None
    dense = "replicate" if config.parallelism.dense == "replicate" else "fsdp"
    sizes, tokens = layer_sizes(estimate, transport), estimate.degrees.tokens_per_rank(estimate.tokens)

    def milliseconds(policies: Policies) -> float:
        if times is not None:
            return measured_milliseconds(times, policies)
        return policies_milliseconds(sizes, tokens, policies, hardware)

    return choose_policies(
        budget,
        open_items(config),
        lambda policies: estimate.changed(with_policies(config, policies))(transport, dense)["total"],
        milliseconds,
        "modelled" if times is None else "measured",
    )


def with_policies(config: Config, policies: Policies) -> Config:
    """The configuration of a run under these policies."""
    return config.model_copy(update={"memory": config.memory.model_copy(update=policies)})


def layer_sizes(estimate: MemoryEstimate, transport: str) -> LayerSizes:
    """Of the model, for `carpool.planner`."""
    text = estimate.model.config.get_text_config()
    heads = getattr(text, "num_attention_heads", 0)
    degrees = estimate.degrees
    copies = degrees.etp * find_transport(transport).copies_per_token(estimate.num_experts, estimate.top_k, degrees.ep)
    return LayerSizes(
        text.num_hidden_layers, estimate.moe_layers, estimate.hidden,
        estimate.width // degrees.etp, estimate.top_k * degrees.etp, heads,
        getattr(text, "num_key_value_heads", None) or heads, max(head_sizes(text)), estimate.computed, copies,
    )  # fmt: skip
