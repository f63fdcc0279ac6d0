"""`ep_implementation="carpool"`: transformers' registry of expert-parallel implementations, and models without any.

transformers builds one `EPImplementation` for each experts module when it applies a model's expert-parallel plan, and
then calls it in place of the module's forward, with this rank's tokens and the router's choices. A model on one rank
has no such plan: `install` does the same for it.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel
from transformers.distributed.expert_parallel import EPImplementation, EPImplementationInterface

from carpool.hf.seam.rides import ExpertRides, Forward
from carpool.parallel.sequence import gather_rows, own_rows, split_rows
from carpool.transport import TRANSPORTS


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
        x_RH, index_RK = split_rows(hidden_states, group), own_rows(top_k_index, group)
        y_RH = self.rides.forward(x_RH, index_RK, split_rows(top_k_weights, group))
        return gather_rows(y_RH, tokens, group, partial=False)


def install(model: PreTrainedModel) -> None:
    """Give every experts module of a model that runs without expert parallelism (ep_size = 1) its `ExpertRides`.

    Nothing travels then, but the experts' computation and all counters are Carpool's. A no-op for modules that
    have theirs already."""
    for name, style in model._expand_parallel_plan(model.ep_plan or {}).items():
        experts = model.get_submodule(name) if style == "ep_dispatch_experts" else None
        if experts is not None and not hasattr(experts, "_carpool_rides"):
            experts.forward = _local_forward(ExpertRides(experts, experts.forward, None, "auto"))


def _local_forward(own: ExpertRides) -> Forward:
    def forward(hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        return own.forward(hidden_states, top_k_index, top_k_weights).to(hidden_states.dtype)

    return forward


def register() -> None:
    """Add "carpool" and one "carpool-TRANSPORT" for each transport to transformers' registry."""
    EPImplementationInterface.register("carpool", CarpoolEP)
    for name in TRANSPORTS:
        variant = type(f"CarpoolEP_{name}", (CarpoolEP,), {"requested": name})
        EPImplementationInterface.register(f"carpool-{name}", variant)
