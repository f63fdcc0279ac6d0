"""How the rows of a run travel (see `carpool.planner.decisions.chosen` for when it is chosen).

moe.transport       a run that starts                              a run that is resumed
auto                by the rule of `choose_transport`, of those    as recorded in run.json, if the ranks can still
                    that every rank can use; on several nodes      use the same ones
                    by `carpool.planner.decisions.transport`
any other           that one                                       that one
"""

from __future__ import annotations

import torch

from carpool.hf.seam.rides import ExpertRides
from carpool.parallel.degrees import Degrees
from carpool.planner.decisions.chosen import Chosen, Decisions, Kind
from carpool.planner.decisions.transport import automatic_transport
from carpool.planner.machine.hardware import Hardware, hardware_of
from carpool.train.blueprint import Blueprint
from carpool.train.config.schema import Config
from carpool.train.launch.machine import Machine, device_name
from carpool.train.launch.ranks import gather
from carpool.train.steps.room import most_tokens, transport_options
from carpool.transport import (
    TRANSPORTS,
    TransportOptions,
    check_topology,
    check_transport,
    choose_transport,
    topology_of,
    unfit_transports,
    why_not_nodes,
)

TRANSPORT_KIND: Kind[str] = Kind("transport", lambda name: {"name": name}, lambda record: str(record["name"]))


def choose_way(
    wanted: str,
    layer: ExpertRides,
    top_k: int,
    hidden: int,
    options: TransportOptions,
    device: torch.device,
    decisions: Decisions,
    *,
    element_size: int = 2,
    hardware: Hardware | None = None,
) -> Chosen[str]:
    """Choose a transport for all layers. All ranks together.

    Args:
        wanted: `moe.transport`.
        layer: any of the run.
        hidden: H.
        options: what means something to any transport.
        element_size: bytes of an element of a row.
        hardware: rates of the machine; None: of the device.
        decisions: of the run.

    Raises:
        ValueError: an unknown transport.
    """
    unfit: dict[str, str] | None = None
    several_nodes = False
    if wanted == "auto":
        # Expert-parallel groups may be on different hosts; all take the same way.
        reasons = gather(unfit_transports(layer.group, hidden, options, own_forward=layer.compute is None))
        unfit = {name: reason for of_rank in reversed(reasons) for name, reason in of_rank.items()}
        several_nodes = layer.group is not None and not any(gather(why_not_nodes(layer.group)))
    machine = hardware or hardware_of(device_name(device))
    shape = {
        "requested": wanted,
        "device": device_name(device),
        "ranks": layer.num_ranks,
        "top_k": top_k,
        "hidden": hidden,
        "unfit": sorted(unfit or ()),
    }

    def decide(kept: Chosen[str] | None, note: str) -> tuple[Chosen[str], bool]:
        if wanted != "auto":
            name, why = choose_transport(wanted, layer.num_ranks, top_k)
            return Chosen(name, shape, "given", why), False
        name, why = automatic_transport(
            layer.num_ranks, top_k, unfit, topology_of(layer.group) if several_nodes else None, hidden=hidden,
            element_size=element_size, tokens=options.max_tokens, hardware=machine,
            limited=several_nodes and layer.limit is not None,
        )  # fmt: skip
        return kept or Chosen(name, shape, "default", why + note), False

    return decisions.choose(TRANSPORT_KIND, shape, decide)


def likely_transport(config: Config, degrees: Degrees, blueprint: Blueprint, machine: Machine) -> tuple[str, str]:
    """What the ranks will choose, and why, as far as this process can tell without them."""
    moe, hardware, here = config.moe, machine.hardware, machine.here
    group, hidden = machine.topology.of(degrees.ranks_along(0, "ep", "etp")), blueprint.row_size
    if moe.transport != "auto":
        if here:
            check_transport(moe.transport, None)
        check_topology(moe.transport, group)
        return choose_transport(moe.transport, degrees.expert_ranks, blueprint.top_k)
    unfit: dict[str, str] | None = None
    if machine.cuda and degrees.expert_ranks > 1:
        reasons = {
            cls.name: cls.why_not_on(group)
            or (None if here or hardware.nvlink is not None else f"{hardware.name} has no NVLink")
            or cls.why_not_automatic(transport_options(config, degrees, cls.name))
            or cls.why_no_rows(hidden, 2)
            or (cls.why_not(None) if here else None)
            for cls in (TRANSPORTS[one] for one in TRANSPORTS)
            if cls.automatic and not cls.anywhere
        }
        unfit = {one: reason for one, reason in reasons.items() if reason is not None}
    half = config.training.computes_in_bf16(machine.cuda) or config.model.dtype in ("bfloat16", "float16")
    return automatic_transport(
        degrees.expert_ranks, blueprint.top_k, unfit, group, hidden=hidden, element_size=2 if half else 4,
        tokens=most_tokens(config, degrees), hardware=hardware, limited=moe.limits(group).active(group.num_ranks),
    )  # fmt: skip
