"""Whether a run fits into the memory of its devices: what is saved for the backward under a budget, and what to change
if it does not fit.

What is saved (see `carpool.planner.decisions.chosen` for when it is chosen):

    memory.budget   a run that starts                                             a run that is resumed
    none            as memory.expert_inputs and the like say; what they leave open is saved
    a size          what they leave open: what fits and costs least               as recorded in run.json

A run measures what each policy costs (`carpool.train.build.policy_times`) and records it. A dry run, which has no
ranks, takes it from the planner's model of a step (`carpool.planner.decisions.rules`).

Advice if a run does not fit, cheapest first:

    free              the loss in chunks
    lossy, no time    parameters in bfloat16 (with float32 masters); moments of the optimizer in fewer bits; gradients
                      that are consumed in the backward, which costs nothing where none are clipped
    lossy, some time  frozen weights under adapters in 8 or 4 bits
    little time       pre-activations of experts are computed again; then attention and norms
    smaller products  smaller micro-batches, more of them
    copies            the optimizer's state in host memory
    much time         rides and experts again
    other results     shorter sequences

Each line of advice counts all those before it. What saves less than 1 % is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from carpool.planner.candidate import POLICIES
from carpool.planner.decisions.chosen import Chosen, Decisions, Kind, Record
from carpool.planner.decisions.rules import Policies, choose_policies, measured_milliseconds, modelled_milliseconds
from carpool.planner.machine.hardware import Hardware
from carpool.planner.model.shape import ModelShape
from carpool.train.blueprint import planned_attention
from carpool.train.config.schema import Config
from carpool.train.plan.estimate import MemoryEstimate

if TYPE_CHECKING:
    from carpool.train.plan.resolve import Plan

GiB = 2**30
# A run is refused if it would need this much more than there is: estimates are wrong by less.
CLEARLY = 1.15
LEAST_SAVING = 0.01
# Cards, in GB, that have a file of settings in examples/one_gpu.
ONE_GPU = (24, 48, 80)


@dataclass(frozen=True)
class Change:
    """Settings that need less memory: as the user writes them, the bytes at the peak with them, and their price."""

    settings: str
    total: int
    price: str


def describe_fit(plan: Plan, name: str) -> list[str]:
    """A verdict, and advice if it is a bad one: lines of text. `name`: of a rank's memory, such as "79 GiB"."""
    needed, memory = plan.needs["total"], plan.memory
    if needed <= memory:
        return [f"fits in {name} ({needed / GiB:,.1f} GiB at the peak)"]
    lines = [f"does not fit in {name}: {needed / GiB:,.1f} GiB at the peak. In the order of what it costs:"]
    for change in advise(plan):
        verdict = "fits" if change.total <= memory else "not enough"
        lines.append(f"  {change.settings:<58} {change.total / GiB:8,.1f} GiB, {verdict}: {change.price}")
    if len(lines) == 1:
        lines.append("  a smaller model, or more ranks")
    adapter, training = plan.config.adapter, plan.config.training
    # What these files have in common, so that a run that began with one is not sent there.
    taken = adapter.is_used and (adapter.dtype, training.optimizer_state_dtype) == ("bfloat16", "int8")
    one = plan.config.parallelism.num_ranks in (None, 1)
    if one and not taken and (file := settings_for(memory)) is not None:
        lines.append(f"  --config {file} has settings of adapters for one such GPU")
    return lines


def settings_for(memory: int) -> str | None:
    """The file of settings with which adapters of a model of 30 billion parameters fit into a GPU with so many bytes;
    None: there is none."""
    fit = [size for size in ONE_GPU if 0.98 * size * 10**9 <= memory]
    return f"examples/one_gpu/{max(fit)}gb.toml" if fit else None


def advise(plan: Plan) -> Iterator[Change]:
    """Changes, each on top of those before it, until it fits."""
    estimate, total, memory = plan.estimate, plan.needs["total"], plan.memory
    for settings, changed, price in _changes(estimate.config, estimate.degrees.world_size):
        smaller = estimate.changed(changed(estimate.config))
        now = _total(plan, smaller)
        if now > (1 - LEAST_SAVING) * total:
            continue
        estimate, total = smaller, now
        yield Change(settings, total, price)
        if total <= memory:
            return
    if total > memory:
        # Of several sequences in a micro-batch, each takes too little for shorter ones to help.
        several = estimate.config.training.per_device_train_batch_size > 1
        yield from [_more_ranks(total)] if several else _shorter(plan, estimate)


def _changes(config: Config, ranks: int) -> Iterator[tuple[str, Callable[[Config], Config], str]]:
    """As `_change`, from the cheapest on."""
    training, memory = config.training, config.memory
    optimizer = training.ablest_optimizer()
    if training.loss_chunk_size is not None:
        yield _change("training", "nothing", loss_chunk_size=None)
    if config.model.stored_dtype == "float32":
        masters = "gradients, parameters and moments are rounded, without masters"
        if "low_bits" in optimizer.state_bytes("bfloat16", optimizer.moments[0]):
            masters = "gradients are rounded; masters stay float32"
        yield _change("model", masters, dtype="bfloat16")
    if training.optimizer_offload == "none":
        for moments in optimizer.moments[1:]:
            if training.optimizer_state_dtype in ("float32", "bfloat16") and moments != training.optimizer_state_dtype:
                yield _change("training", "lossy, no time", optimizer_state_dtype=moments)
    adapter, moe, stays = config.adapter, config.moe, config.placement.every is None
    if adapter.is_used and adapter.dtype == "float32" and "low_bits" in optimizer.state_bytes("bfloat16", "float32"):
        yield _change("adapter", "gradients are rounded; masters stay float32", dtype="bfloat16")
    # Where micro-batches can be smaller, gradients of several are added.
    numbers = training.per_device_train_batch_size, training.gradient_accumulation_steps, config.parallelism.pp_size
    homes = stays and moe.in_order and not (adapter.is_used and ranks > 1)
    consumed: dict[str, Any] = {"optimizer_in_backward": True}
    consumed |= {"grad_clipping": "delayed"} if training.max_grad_norm else {}
    price = "clipped by the norm of the step before" if training.max_grad_norm else "nothing"
    consumable = not training.optimizer_in_backward and optimizer.in_backward and homes
    if consumable and numbers == (1, 1, 1):
        yield _change("training", price, **consumed)
    if adapter.is_used and moe.in_order and moe.experts != "fp8" and memory.experts == "device":
        for base in ("int8", "nf4"):
            if adapter.base_dtype is None or (adapter.base_dtype, base) == ("int8", "nf4"):
                yield _change("adapter", "lossy; weights are dequantised for each product", base_dtype=base)
    if memory.policies["expert_activations"] == "save" and config.moe.experts in ("auto", "grouped"):
        yield _change("memory", "one of the experts' products again", expert_activations="recompute")
    if memory.layer_activations != "recompute":
        yield _change("memory", "attention and norms again", layer_activations="recompute")
    size, steps = training.per_device_train_batch_size, training.gradient_accumulation_steps
    while size > 1 and not training.optimizer_in_backward:
        size, steps = -(-size // 2), steps * 2
        sizes = {"per_device_train_batch_size": size, "gradient_accumulation_steps": steps}
        yield _change("training", "smaller products", **sizes)
    if stays and "host" in optimizer.places and training.optimizer_offload == "none":
        yield _change("training", "copies, hidden in steps of many tokens; host memory", optimizer_offload="host")
    if memory.moe_outputs != "recompute" and "offload" not in (memory.expert_inputs, memory.expert_activations):
        yield _change("memory", "rides and experts again", moe_outputs="recompute")
    if not adapter.is_used:
        return
    if training.loss_chunk_size is None:
        yield _change("training", "smaller products of the loss", loss_chunk_size=512)
    if consumable and numbers[0] == 1 and numbers[1] > 1:
        yield _change("training", f"a step is one sequence; {price}", gradient_accumulation_steps=1, **consumed)
    if training.cuda_graphs != "off":
        yield _change("training", "the host launches each kernel", cuda_graphs="off")


def _change(section: str, price: str, **values: Any) -> tuple[str, Callable[[Config], Config], str]:
    """(settings of a section as the user writes them, what makes them, their price)."""
    written = " ".join(f"{section}.{key}={str(value).lower()}" for key, value in values.items())
    return written, lambda config: config.changed(section, **values), price


def _total(plan: Plan, estimate: MemoryEstimate) -> int:
    """Bytes of a rank at the peak, with other settings."""
    return estimate(plan.transport.answer, plan.data_parallel.answer)["total"]


def _shorter(plan: Plan, estimate: MemoryEstimate) -> Iterator[Change]:
    length = estimate.length
    while length > 1024:
        length //= 2
        smaller = estimate.changed(estimate.config.changed("data", sequence_length=length))
        total = _total(plan, smaller)
        if total <= plan.memory:
            yield Change(f"data.sequence_length={length}", total, "longer texts are cut")
            return
    yield _more_ranks(_total(plan, estimate))


def _more_ranks(total: int) -> Change:
    return Change("parallelism.num_ranks=...", total, "more GPUs, or a smaller model")


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
    if config.moe.experts not in ("auto", "grouped") and given["expert_activations"] is None:
        given["expert_activations"] = "save"
    return given


def choose_memory(
    estimate: MemoryEstimate,
    transport: str,
    hardware: Hardware,
    decisions: Decisions,
    measure_times: Callable[[], Times] | None = None,
    per_node: int = 1,
) -> Chosen[Policies]:
    """Choose. All ranks together. Raises ValueError if no policies fit into the budget.

    Args:
        estimate: of the run as it is configured.
        measure_times: what each policy costs, the same on all ranks. None: costs are modelled.
        per_node: ranks of a node."""
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
        # If all is saved, nothing costs anything.
        asked = any(policies[item] != "save" for item, given in open_items(config).items() if given is None)
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
    """(policies that fit into the budget and cost least, why). Raises ValueError if none fit.

    Args:
        milliseconds: that policies add to a micro-batch; how: these are known."""
    config, budget = estimate.config, estimate.config.memory.budget_bytes
    assert budget is not None
    data_parallel = _assumed_data_parallel(config)

    def preferred(policies: Policies) -> bool:
        if config.training.cuda_graphs != "on":
            return True
        one = estimate.changed(config.changed("memory", **policies)).candidate(transport, data_parallel)
        return (one.eager or one.why_eager_by_plan) is None

    def total(policies: Policies) -> int:
        return estimate.changed(config.changed("memory", **policies))(transport, data_parallel)["total"]

    return choose_policies(budget, open_items(config), total, milliseconds, how, preferred)


def _modelled(
    estimate: MemoryEstimate, transport: str, hardware: Hardware, per_node: int
) -> Callable[[Mapping[str, str]], float]:
    """What policies add to a micro-batch, by the planner's model of a step. Of a model whose sizes cannot be read: how
    many items are not saved."""
    config, model = estimate.config, estimate.model
    try:
        attention = planned_attention(config, estimate.degrees, model, estimate.cuda)
        shape = ModelShape.read(model.config.to_dict(), attention)
    except ValueError:
        return lambda policies: float(sum(policy != "save" for policy in policies.values()))
    candidate = replace(
        estimate.candidate(transport, _assumed_data_parallel(config)),
        experts="fp8" if config.moe.experts == "fp8" else "grouped",
    )
    return modelled_milliseconds(shape, hardware, candidate, per_node)


def _assumed_data_parallel(config: Config) -> str:
    """The layout of non-expert parameters that is assumed while it is not decided."""
    return "zero1" if config.parallelism.data_parallel == "zero1" else "fsdp"
