"""Where the experts of a model that answers are, and what of them stays on the GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

from carpool.experts.host_experts import HostExperts
from carpool.memory.activation_matrix import ActivationMatrices
from carpool.memory.next_experts import NextExperts, Predictor

Where = Literal["device", "host", "disk"]
# What foretells the experts of the next layer.
PREDICTORS: dict[str, Callable[[int, int], Predictor]] = {"pairs": NextExperts, "matrix": ActivationMatrices}


@dataclass(frozen=True)
class ExpertTier:
    """Where experts are.

    Attributes:
        where: on the device, in host memory, or in the checkpoint's files.
        memory: bytes of the device for experts that stay there once they came.
        host_memory: of experts on disk, bytes of host memory for those that were read.
        predictor: of `PREDICTORS`.

    Raises:
        ValueError: an unknown name, or memory for what is on the device anyway.
    """

    where: Where = "device"
    memory: int = 0
    host_memory: int = 0
    predictor: str = "pairs"

    def __post_init__(self) -> None:
        assert self.where in get_args(Where) and self.predictor in PREDICTORS
        if self.where == "device" and (self.memory or self.predictor != "pairs"):
            raise ValueError(
                "--experts-memory and --predictor are about experts that come to the GPU: add --experts host (or disk)"
            )
        if self.where != "disk" and self.host_memory:
            raise ValueError("--experts-host-memory is for experts on disk: add --experts disk")

    @property
    def away(self) -> bool:
        return self.where != "device"


ON_DEVICE = ExpertTier()


def what_came(experts: HostExperts) -> str:
    """What of the experts has travelled so far, in a line."""
    hits, text = experts.hits, f"experts: {experts.what_moved()}"
    if hits.chosen:
        kept, foretold = hits.kept / hits.chosen, hits.foretold / hits.chosen
        text += f"; of those that single tokens chose, {kept:.0%} were there, and {foretold:.0%} were foretold"
    return text
