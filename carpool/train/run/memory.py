"""What is kept for the backward of a run, for a budget (see `carpool.planner.chosen` for when it is chosen).

    memory.budget   a run that starts                                             a run that is resumed
    none            what memory.rows and the like say; what they leave open is kept
    a size          what they leave open: what fits and costs least               as recorded in run.json

Costs are modelled by the rates of the hardware (`carpool.planner.policies`). On a GPU two of them are measured: of a
matrix product as experts have them, and of copies to host memory.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from carpool.hf.sizes import head_sizes
from carpool.planner.chosen import Chosen, Kind, Record, choose
from carpool.planner.hardware import Hardware, LinkRate
from carpool.planner.kept import POLICIES, LayerSizes
from carpool.planner.policies import Policies, choose_policies, policies_milliseconds
from carpool.train.checkpoints.ranks import from_rank_0, gather
from carpool.train.config.schema import Config
from carpool.train.run.estimate import MemoryEstimate
from carpool.train.run.files import read_record
from carpool.transport import find_transport

COPIED = 256 * 2**20  # bytes of a measured copy
REPETITIONS = 5


def _read(record: Record) -> Policies:
    policies = {item: str(record[item]) for item in POLICIES}
    if unknown := [item for item, policy in policies.items() if policy not in POLICIES[item]]:
        raise ValueError(f"{unknown[0]} = {policies[unknown[0]]!r} is not known")
    return policies


MEMORY_KIND: Kind[Policies] = Kind("memory", dict, _read, times="rates")


def decide_memory(estimate: MemoryEstimate, transport: str, hardware: Hardware) -> tuple[Policies, str]:
    """(policies, why) for the estimate's own configuration, in one process and without a record.

    Raises:
        ValueError: no policies fit into the budget."""
    config, budget = estimate.config, estimate.config.memory.budget_bytes
    if budget is None:
        return config.memory.policies, "without memory.budget, what is not said is kept"
    dense = "replicate" if config.parallelism.dense == "replicate" else "fsdp"
    sizes, tokens = layer_sizes(estimate, transport), estimate.degrees.tokens_per_rank(estimate.tokens)
    given = {item: getattr(config.memory, item) for item in POLICIES}
    if config.moe.experts not in ("auto", "grouped") and given["hidden"] is None:
        given["hidden"] = "keep"
    if config.training.torch_compile and given["dense"] is None and given["sums"] != "recompute":
        # Layers that are computed again are not compiled.
        given["dense"] = "keep"
    return choose_policies(
        budget,
        given,
        lambda policies: estimate.changed(with_policies(config, policies))(transport, dense)["total"],
        lambda policies: policies_milliseconds(sizes, tokens, policies, hardware),
    )


def choose_memory(
    estimate: MemoryEstimate,
    transport: str,
    hardware: Hardware,
    device: torch.device,
    folders: Sequence[Path] = (),
) -> Chosen[Policies]:
    """Choose. All ranks together.

    Args:
        estimate: of the run as it is configured.
        folders: of a run that is resumed; the first that has a record counts.

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
            return Chosen(*_given(config, shape)), False
        if kept is not None:
            return kept, False
        policies, why = decide_memory(estimate, transport, hardware)
        return Chosen(policies, shape, "default", why + note), device.type == "cuda"

    def measure(fallback: Chosen[Policies]) -> Chosen[Policies]:
        # The slowest rank's, the same on all.
        flops, host = (min(rates) for rates in zip(*gather(measured_rates(estimate, device)), strict=True))
        link = LinkRate(host, hardware.host_link.latency)
        policies, why = decide_memory(estimate, transport, replace(hardware, flops=flops, host=link))
        rates = {"flops": flops, "host_bytes_per_second": host}
        return Chosen(policies, fallback.shape, "measured", f"{why}, by measured rates", rates)

    return choose(
        MEMORY_KIND,
        shape,
        recorded=lambda: read_record(folders, MEMORY_KIND.key),
        decide=decide,
        measure=measure,
        from_rank_0=from_rank_0,
    )


def _given(config: Config, shape: dict[str, Any]) -> tuple[Policies, dict[str, Any], str, str]:
    return config.memory.policies, shape, "given", "asked for"


def with_policies(config: Config, policies: Policies) -> Config:
    """The configuration of a run under these policies."""
    return config.model_copy(update={"memory": config.memory.model_copy(update=policies)})


def layer_sizes(estimate: MemoryEstimate, transport: str) -> LayerSizes:
    """Of the model, for `carpool.planner`."""
    text = estimate.model.config.get_text_config()
    heads = getattr(text, "num_attention_heads", 0)
    copies = find_transport(transport).copies_per_token(estimate.num_experts, estimate.top_k, estimate.degrees.ep)
    return LayerSizes(
        text.num_hidden_layers, estimate.moe_layers, estimate.hidden, estimate.width, estimate.top_k, heads,
        getattr(text, "num_key_value_heads", None) or heads, max(head_sizes(text)), estimate.computed, copies,
    )  # fmt: skip


def measured_rates(estimate: MemoryEstimate, device: torch.device) -> tuple[float, float]:
    """(operations per second of a product of the experts' size, bytes per second to host memory and back), of a GPU."""
    rows = min(8192, estimate.tokens * estimate.top_k)
    x = torch.randn(rows, estimate.hidden, device=device, dtype=torch.bfloat16)
    weight = torch.randn(estimate.hidden, 2 * estimate.width, device=device, dtype=torch.bfloat16)
    seconds = _seconds(lambda: x @ weight, device)
    here = torch.empty(COPIED, dtype=torch.uint8, device=device)
    there = torch.empty(COPIED, dtype=torch.uint8, pin_memory=True)

    def there_and_back() -> None:
        there.copy_(here, non_blocking=True)
        here.copy_(there, non_blocking=True)

    return 4 * rows * estimate.hidden * estimate.width / seconds, 2 * COPIED / _seconds(there_and_back, device)


def _seconds(work: Any, device: torch.device) -> float:
    """The least of several."""
    times = []
    for _ in range(REPETITIONS):
        torch.cuda.synchronize(device)
        begin = time.perf_counter()
        work()
        torch.cuda.synchronize(device)
        times.append(time.perf_counter() - begin)
    return min(times)
