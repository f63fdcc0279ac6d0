"""The section [memory]: what is kept for the backward, and where; where experts are."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from carpool.memory.policies import KeptPolicies
from carpool.train.config.schema_base import Section


class MemorySection(Section):
    """What is kept for the backward, item by item, and where experts are. Every policy gives the same bits."""

    rows: Literal["keep", "resend", "offload"] = Field(
        default="keep",
        description="The rows that arrived at a rank's experts. keep: in the memory of the device. resend: they travel "
        "a second time in the backward, which takes time on the links and a second buffer of nvlink. offload: they are "
        "copied to host memory beside the computation, and come back ahead of their layer's backward.",
    )
    hidden: Literal["keep", "recompute", "offload"] = Field(
        default="keep",
        description="The pre-activations of grouped experts, one for each choice of a token. recompute: the backward "
        "computes them again from the rows, one more matrix product. keep, offload: as for rows.",
    )

    experts: Literal["device", "host"] = Field(
        default="device",
        description="host: experts' parameters are in host memory, and come to the GPU layer by layer, ahead of use, "
        'in forward and backward. To train them takes training.gradients = "consumed".',
    )

    @property
    def kept(self) -> KeptPolicies:
        """What rides do."""
        return KeptPolicies(self.rows, self.hidden)
