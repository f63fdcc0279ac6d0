"""`ep_implementation="carpool"`: transformers' registry of expert-parallel implementations, and models without any.

transformers builds one `EPImplementation` for each experts module when it applies a model's expert-parallel plan, and
then calls it in place of the module's forward, with this rank's tokens and the router's choices. A model on one rank
has no such plan: `install` does the same for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel
from transformers.distributed.expert_parallel import EPImplementation, EPImplementationInterface

from carpool.activations import ActivationPolicies, Offloader
from carpool.experts import Choices
from carpool.hf.seam.expert_rides import ExpertRides, Forward, required_rides, rides
from carpool.hf.seam.shared import overlap_shared_experts
from carpool.parallel.sequence import gather_tokens, own_tokens, split_tokens
from carpool.ride.balanced import SpareSlotOptions
from carpool.ride.schedule import Schedule
from carpool.transport import TRANSPORTS, TransportOptions


class CarpoolEP(EPImplementation):
    """transformers' adapter: built for each experts module when a model's expert-parallel plan is applied."""

    requested = "auto"

    def __init__(self, experts: nn.Module, ep_mesh: DeviceMesh, tp_mesh: DeviceMesh) -> None:
        super().__init__(experts, ep_mesh, tp_mesh)
        self.rides = ExpertRides(experts, self.experts_forward, ep_mesh.get_group(), self.requested)
        self.rides.token_slice = (tp_mesh.get_local_rank(), tp_mesh.size())

    def __call__(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        if self.rides.token_slice[1] == 1:
            return self.rides.forward(hidden_states, top_k_index, top_k_weights)
        # The ranks of a tensor-parallel group hold the same tokens: each takes its slice, or they would ride and be
        # computed tp times and the router's gradient counted tp times: duplicate token dropping (DeepSpeed-TED, arXiv
        # 2303.06318, section 4.2).
        group, tokens = self.tp_mesh.get_group(), hidden_states.shape[0]
        x_RH, index_RK = split_tokens(hidden_states, group), own_tokens(top_k_index, group)
        y_RH = self.rides.forward(x_RH, index_RK, split_tokens(top_k_weights, group))
        return gather_tokens(y_RH, tokens, group, partial=False)


def install(model: PreTrainedModel) -> None:
    """Give every experts module of a model that runs without expert parallelism (ep_size = 1) its `ExpertRides`.

    Nothing travels then, but the experts' computation and all counters are Carpool's. A no-op for modules that
    have theirs already."""
    for name, style in model._expand_parallel_plan(model.ep_plan or {}).items():
        experts = model.get_submodule(name) if style == "ep_dispatch_experts" else None
        if experts is not None and not hasattr(experts, "_carpool_rides"):
            experts.forward = _local_forward(ExpertRides(experts, experts.forward, None, "auto"))


def _local_forward(own: ExpertRides) -> Forward:
    return lambda hidden_states, top_k_index, top_k_weights: own.forward(hidden_states, top_k_index, top_k_weights).to(
        hidden_states.dtype
    )


def register() -> None:
    """Add "carpool" and one "carpool-TRANSPORT" for each transport to transformers' registry."""
    EPImplementationInterface.register("carpool", CarpoolEP)
    for name in TRANSPORTS:
        variant = type(f"CarpoolEP_{name}", (CarpoolEP,), {"requested": name})
        EPImplementationInterface.register(f"carpool-{name}", variant)


# ---------------------------------------------------------------------------------------------------------------------
# What can be set for all MoE layers of a model, on all ranks alike, between two steps.


def set_transport(
    model: nn.Module, name: str, *, max_tokens: int | None = None, options: TransportOptions | None = None
) -> None:
    """Change how tokens travel in all MoE layers of a model. Call on all ranks, between steps.

    Args:
        name: "auto", or a name in `carpool.transport.TRANSPORTS`.
        max_tokens: the most tokens that any rank will ever have in a forward. Given this, "auto" picks "nvlink" where
            it can be used. Its buffers have a fixed size; without it, that of the first forward, rounded up to a power
            of two. Tokens beyond make the sums NaN, and `CarpoolCallback` then raises before the optimizer's step.
        options: of the transport, such as `carpool.transport.NVLinkOptions`. Neither given: as before.
    """
    layers = required_rides(model)
    if max_tokens is not None:
        options = replace(options or TransportOptions(), max_tokens=max_tokens)
    for own in layers.values():
        own.set_transport(name, options)


def set_activation_policies(model: nn.Module, policies: ActivationPolicies) -> None:
    """Change what the backwards of all MoE layers of a model save, and where (carpool/activations/__init__.py). Call on
    all ranks, between steps. ValueError: the experts cannot."""
    offloader = Offloader() if policies.offloads else None
    for own in required_rides(model).values():
        own.set_activation_policies(policies, offloader)


def set_experts(model: nn.Module, name: str, *, choices: Choices | None = None, **others: Any) -> list[str]:
    """Change how the experts of all MoE layers of a model are computed: "auto", or a name in `carpool.experts.EXPERTS`.

    Args:
        choices: of "grouped", the kernel of each product (`carpool.experts.Choices`). None: by the shape.
        others: options of a plug-in's.

    Returns:
        What that changes of the model's function, for logs: nothing but for "fp8", which is LOSSY. ValueError: an
        unknown name, experts that it cannot compute, or an option that they do not have.
    """
    layers = required_rides(model)
    for own in layers.values():
        own.set_experts(name, choices, **others)
    return list(dict.fromkeys(why for own in layers.values() for why in getattr(own.compute, "lossy_reasons", ())))


@contextmanager
def transport(model: nn.Module, name: str, options: TransportOptions | None = None) -> Iterator[None]:
    """Use another transport inside a `with`, then go back to what was there."""
    before = {own: (own.requested, own.options) for own in rides(model).values()}
    set_transport(model, name, options=options)
    try:
        yield
    finally:
        for own, (requested, old) in before.items():
            own.options = old
            own.set_transport(requested)


def set_spare_slots(model: nn.Module, options: int | SpareSlotOptions) -> None:
    """Balance all MoE layers of a model by replicas in spare slots (carpool/ride/balanced.py): so many on each rank, or
    as the options say; 0: no longer. On all ranks, between steps.

    Raises ValueError if a layer cannot have spare slots."""
    for own in required_rides(model).values():
        own.set_spare_slots(SpareSlotOptions.of(options))


def set_schedule(model: nn.Module, schedule: Schedule) -> None:
    """Change what runs beside what in all MoE layers of a model (carpool/ride/schedule.py), shared experts included:
    with any schedule but "none" they compute beside the ride. On all ranks, between steps."""
    for own in required_rides(model).values():
        own.set_schedule(schedule)
    overlap_shared_experts(model, schedule.name != "none")
