"""What is saved for the backward pass, and where.

A ride saves two kinds of activations for its backward, and each has policies:

    expert_inputs         the tokens that arrived at this rank                       save, resend, offload
    expert_activations    the experts' pre-activations, one per (token, expert)      save, recompute, offload

    save        they stay in the memory of the device
    recompute   the up projection is computed again from the expert inputs
    resend      the tokens are dispatched again in the backward (MPipeMoE's re-communication, IPDPS 2023)
    offload     they are copied to host memory during the computation, and prefetched before the layer's backward

All policies give the same bits. The outputs of the activation function have no policy, because experts always compute
them again from the pre-activations (`carpool.experts.gemm.grouped`). Routes, orders of pairs and routing weights are
small and always saved.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from carpool.activations.arena import Arena
from carpool.activations.arrivals import Arrivals, HiddenStates, Ready
from carpool.activations.offload import Offloaded, Offloader

__all__ = ["SAVE_ALL", "ActivationPolicies", "Arena", "Arrivals", "HiddenStates", "Offloaded", "Offloader", "Ready"]

InputsPolicy = Literal["save", "resend", "offload"]
ActivationsPolicy = Literal["save", "recompute", "offload"]


@dataclass(frozen=True)
class ActivationPolicies:
    """The policies of one MoE layer, or of all of them; see the module's docstring.

    Attributes:
        expert_inputs: for the (R, H) tokens that arrived at this rank.
        expert_activations: for the (P, F) or (P, 2 F) pre-activations of the experts.

    Raises:
        ValueError: a policy that these activations do not have.

    Example: ActivationPolicies(expert_inputs="resend", expert_activations="recompute")
    """

    expert_inputs: InputsPolicy = "save"
    expert_activations: ActivationsPolicy = "save"

    def __post_init__(self) -> None:
        for name, policies in (("expert_inputs", InputsPolicy), ("expert_activations", ActivationsPolicy)):
            if (policy := getattr(self, name)) not in get_args(policies):
                raise ValueError(f"{name}={policy!r} is not known; use one of {', '.join(get_args(policies))}")

    @property
    def offloads(self) -> bool:
        return "offload" in (self.expert_inputs, self.expert_activations)


SAVE_ALL = ActivationPolicies()
