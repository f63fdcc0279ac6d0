"""The two kinds of layer that `carpool bench layer` runs: Carpool's, and transformers' own expert parallelism.

Both are called with nothing, on the inputs of a `Case`, and say what they sent and how much memory their buffers take.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from transformers.distributed.expert_parallel import AllToAllEP

from carpool.activations import Arena
from carpool.bench.moe.answers import Case
from carpool.bench.moe.modules import use
from carpool.hf import CarpoolEP
from carpool.hf.seam.rides import buffers_of_rides
from carpool.transport import NVLinkOptions, check_overflow


class Layer(ABC):
    """A contender at work on this rank's tokens."""

    @abstractmethod
    def __call__(self) -> torch.Tensor:
        """Its output for the case's tokens, differentiable."""

    @property
    def arena(self) -> Arena | None:
        """Where it keeps rows, if not in tensors."""
        return None

    @property
    def buffer_bytes(self) -> int:
        """What it has allocated once, for all layers."""
        return 0

    def reset(self) -> None:
        """Count from zero."""
        return

    def check(self) -> None:
        """Raise if rows had no place."""
        return

    @abstractmethod
    def remote_bytes(self) -> int:
        """What this rank sent to others in a forward and backward since `reset`."""


class TheirLayer(Layer):
    def __init__(self, layer: AllToAllEP, case: Case, implementation: str) -> None:
        self.layer, self.case, self.implementation = layer, case, implementation

    def __call__(self) -> torch.Tensor:
        use(self.case.module, self.implementation)
        y_TH: torch.Tensor = self.layer(self.case.x_TH, self.case.index_TK, self.case.weight_TK)
        return y_TH

    def remote_bytes(self) -> int:
        """A row for each choice of an expert elsewhere, and for each that came from elsewhere: out, back, and the same
        for gradients. Between two ranks as much goes one way as comes the other way later, so that over all ranks
        each choice makes four rows."""
        case, local = self.case, self.case.module.num_experts
        elsewhere = int((case.index_TK // local != case.rank).sum())
        return 4 * elsewhere * case.x_TH.shape[1] * case.x_TH.element_size()


class OurLayer(Layer):
    """Carpool behind transformers' seam, with a transport and experts by name.

    Raises:
        ValueError: experts that Carpool does not know, or that these cannot compute.
    """

    def __init__(
        self, layer: CarpoolEP, case: Case, transport: str, experts: str, options: NVLinkOptions | None
    ) -> None:
        self.layer, self.case, self.rides = layer, case, layer.rides
        self.rides.set_transport(transport, options)
        self.rides.set_experts(experts)
        if self.rides.compute is None:
            raise ValueError(f"{type(case.module).__name__} computes what Carpool's experts do not know")

    def __call__(self) -> torch.Tensor:
        return self.layer(self.case.x_TH, self.case.index_TK, self.case.weight_TK)

    @property
    def arena(self) -> Arena | None:
        return None if self.rides.transport is None else self.rides.transport.arena

    @property
    def buffer_bytes(self) -> int:
        return sum(buffers.size for buffers in buffers_of_rides([self.rides]))

    def reset(self) -> None:
        self.rides.stats.reset()

    def check(self) -> None:
        check_overflow(self.rides.transport)
        for buffers in buffers_of_rides([self.rides]):
            if needed := buffers.arena_overflow():
                raise RuntimeError(f"the arena was too small: {needed} bytes were needed of {buffers.size}")

    def remote_bytes(self) -> int:
        traffic = self.rides.stats.traffic
        return traffic.remote(traffic.bytes)


def arena_bytes(case: Case) -> int:
    """Enough for what one layer keeps on the rank that most rows come to: the rows, and the experts' pre-activations;
    twice that, for what experts may keep besides. The same on all ranks."""
    local, ranks = case.module.num_experts, len(case.routings)
    expert_X = torch.cat([routing.expert_TK.flatten() for routing in case.routings]).long()
    pairs = int(torch.bincount(expert_X // local, minlength=ranks).max())
    up, hidden = getattr(case.module, case.names[0]), case.x_TH.shape[1]
    width = up.shape[1] * up.shape[2] // hidden
    rows = ranks * case.x_TH.shape[0]
    return 2 * (pairs * width + rows * hidden) * up.element_size() + (64 << 20)
