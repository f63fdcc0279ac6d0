"""How the tokens of a run travel: its transport, and what the settings say to it.

moe.transport       a run that starts                              a run that is resumed
auto                by the rule of `choose_transport`, of those    as recorded in run.json, if the ranks can still
                    that every rank can use; on several nodes      use the same ones
                    by `carpool.planner.transports`
any other           that one                                       that one

A plan has the transport that is expected, as far as one process can tell (`expected_transport`). The ranks choose by
the same rule, of what all of them can use (`choose_on_ranks`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from carpool.hf.seam.expert_rides import ExpertRides
from carpool.layout.topology import Topology
from carpool.metrics.host import device_name
from carpool.parallel.degrees import Degrees
from carpool.parallel.ranks import gather
from carpool.planner.decisions.chosen import Chosen, Kind
from carpool.planner.transports import automatic_transport, foreseen_unfit
from carpool.train.blueprint import Blueprint
from carpool.train.config.schema import Config
from carpool.train.launch.machine import Machine
from carpool.transport import (
    HierarchicalOptions,
    Transport,
    TransportOptions,
    check_topology,
    check_transport,
    choose_transport,
    find_transport,
    topology_of,
    unfit_transports,
    why_not_nodes,
)
from carpool.transport.options import RunSizes

if TYPE_CHECKING:
    from carpool.train.plan.resolve import Plan

TRANSPORT_KIND: Kind[str] = Kind("transport", lambda name: {"name": name}, lambda record: str(record["name"]))


def expected_transport(config: Config, degrees: Degrees, blueprint: Blueprint, machine: Machine) -> Chosen[str]:
    """What the ranks will choose, as far as this process can tell without them.

    Raises:
        ValueError: an unknown transport, or one that this machine or its nodes cannot have."""
    asked, here = config.moe.transport, machine.here
    group = machine.topology.of(degrees.ranks_along(0, "ep", "etp"))
    if asked != "auto":
        if here:
            check_transport(asked, None)
        check_topology(asked, group)
    unfit: dict[str, str] | None = None
    if asked == "auto" and machine.cuda and degrees.expert_ranks > 1:

        def why_not(cls: type[Transport]) -> str | None:
            options = transport_options(config, degrees, cls.name)
            return cls.why_not_automatic(options) or (cls.why_not(None) if here else None)

        unfit = foreseen_unfit(group, None if here else machine.hardware, blueprint.row_size, why_not)
    limited = config.moe.limits(group).active(group.num_ranks)
    return _by_rule(config, degrees, blueprint, machine, unfit, group, limited)


def choose_on_ranks(plan: Plan, layer: ExpertRides, own_forward: bool = False) -> tuple[Chosen[str], TransportOptions]:
    """The transport of all layers, and its options as the ranks can have them. All ranks together.

    Args:
        layer: any of the run.
        own_forward: some layer's experts run the model's own forward.

    Raises:
        ValueError: an unknown transport, or options that it cannot have."""
    config, machine, asked = plan.config, plan.machine, plan.config.moe.transport
    hidden, top_k = plan.blueprint.row_size, plan.blueprint.top_k
    codecs = config.codec.codecs.for_element_size(plan.dtype.itemsize)
    assert machine.device is not None, "ranks choose"
    unfit: dict[str, str] | None = None
    nodes: Topology | None = None
    if asked == "auto":
        # Expert-parallel groups may be on different hosts; all take the same way.
        options = TransportOptions(most_tokens(config, plan.degrees), codecs)
        reasons = gather(unfit_transports(layer.group, hidden, options, own_forward=layer.compute is None))
        unfit = {name: reason for of_rank in reversed(reasons) for name, reason in of_rank.items()}
        if layer.group is not None and not any(gather(why_not_nodes(layer.group))):
            nodes = topology_of(layer.group)
    shape = {
        "requested": asked, "device": device_name(machine.device), "ranks": layer.num_ranks, "top_k": top_k,
        "hidden": hidden, "unfit": sorted(unfit or ()),
    }  # fmt: skip

    def decide(recorded: Chosen[str] | None, note: str) -> tuple[Chosen[str], bool]:
        limited = nodes is not None and layer.limit is not None
        now = _by_rule(config, plan.degrees, plan.blueprint, machine, unfit, nodes, limited, shape=shape)
        return now if asked != "auto" else recorded or replace(now, why=now.why + note), False

    chosen = plan.decisions.choose(TRANSPORT_KIND, shape, decide)
    options = replace(transport_options(config, plan.degrees, chosen.answer), codecs=codecs)
    settled, note = options.settled(layer.group, top_k, hidden, own_forward)
    if note:
        chosen = plan.decisions.add(TRANSPORT_KIND, replace(chosen, why=f"{chosen.why}; {note}"))
    return chosen, settled


def _by_rule(
    config: Config,
    degrees: Degrees,
    blueprint: Blueprint,
    machine: Machine,
    unfit: Mapping[str, str] | None,
    nodes: Topology | None,
    limited: bool,
    shape: Mapping[str, object] | None = None,
) -> Chosen[str]:
    """What `moe.transport` becomes. `unfit`, `nodes`, `limited`: as of `automatic_transport`."""
    ranks, asked = degrees.expert_ranks, config.moe.transport
    if asked != "auto":
        name, why = choose_transport(asked, ranks, blueprint.top_k)
        return Chosen(name, shape or {}, "given", why)
    name, why = automatic_transport(
        ranks, blueprint.top_k, unfit, nodes, hidden=blueprint.row_size,
        element_size=computed_dtype(config, machine.cuda).itemsize, tokens=most_tokens(config, degrees),
        hardware=machine.hardware, limited=limited,
    )  # fmt: skip
    return Chosen(name, shape or {}, "default", why)


def computed_dtype(config: Config, cuda: bool) -> torch.dtype:
    """In which experts compute, and tokens travel before a codec."""
    name = "bfloat16" if config.training.computes_in_bf16(cuda) else config.model.stored_dtype
    found: torch.dtype = getattr(torch, name)
    return found


def most_tokens(config: Config, degrees: Degrees) -> int:
    """Tokens of a rank in the largest forward of a run, of training or evaluation. Ranks of a tensor-parallel group
    share theirs."""
    evaluated = config.training.eval_batch_size * config.data.sequence_length
    return max(_step_tokens(config, degrees), degrees.tokens_per_rank(evaluated))


def _step_tokens(config: Config, degrees: Degrees) -> int:
    """Of training alone."""
    largest = max(config.batch_sizes(degrees))
    return degrees.tokens_per_rank(largest * config.data.sequence_length)


def transport_options(config: Config, degrees: Degrees, name: str) -> TransportOptions:
    """What the configuration says to the transport of that name.

    Raises:
        ValueError: values that cannot be."""
    options_class, most = find_transport(name).options_class, most_tokens(config, degrees)
    codecs = config.codec.codecs
    if options_class is None:
        return TransportOptions(most, codecs)
    sequence_tokens = degrees.tokens_per_rank(config.data.sequence_length)
    limit = config.moe.balance_limit if config.moe.spare_slots else None
    sizes = RunSizes(most, sequence_tokens, float(config.parallelism.timeout_seconds), limit)
    options = options_class.from_settings(config.settings_of_transport(name), sizes, codecs)
    if isinstance(options, HierarchicalOptions):
        options = replace(options, step_tokens=_step_tokens(config, degrees))
    return options
