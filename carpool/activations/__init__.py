"""What is saved for the backward pass, and where.

A ride keeps two items for its backward, and each has policies:

    rows      the tokens that arrived                               save, resend, offload
    hidden    the experts' pre-activations, one for each pair       save, recompute, offload

    save        they stay in the memory of the device
    recompute   the up projection is computed again, from the rows
    resend      the rows are dispatched again in the backward (MPipeMoE's re-communication, IPDPS 2023)
    offload     they are copied to host memory beside the computation, and come back ahead of the layer's backward

All of them give the same bits. The activated rows are no item: experts compute them again from the pre-activations in
any case (`carpool.experts.gemm.grouped`). Routes, orders of pairs and routing weights are small, and are always kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from carpool.activations.arena import Arena
from carpool.activations.arrivals import Arrivals, Ready, Rows
from carpool.activations.offload import Away, Offloader

__all__ = ["KEEP", "ActivationPolicies", "Arena", "Arrivals", "Away", "Offloader", "Ready", "Rows"]

RowsPolicy = Literal["save", "resend", "offload"]
HiddenPolicy = Literal["save", "recompute", "offload"]


@dataclass(frozen=True)
class ActivationPolicies:
    """See the module's docstring.

    Raises:
        ValueError: a policy that the item does not have.

    Example: ActivationPolicies(rows="resend", hidden="recompute")
    """

    rows: RowsPolicy = "save"
    hidden: HiddenPolicy = "save"

    def __post_init__(self) -> None:
        for name, policies in (("rows", RowsPolicy), ("hidden", HiddenPolicy)):
            if (policy := getattr(self, name)) not in get_args(policies):
                raise ValueError(f"{name}={policy!r} is not known; use one of {', '.join(get_args(policies))}")

    @property
    def offloads(self) -> bool:
        return "offload" in (self.rows, self.hidden)


KEEP = ActivationPolicies()
