"""Options of transports. `TransportOptions` are common to all. A transport with further options derives a class:

    @dataclass(frozen=True)
    class RelayOptions(TransportOptions):
        hops: int = 2

    @register
    class Relay(Transport):
        name = "relay"
        options_class = RelayOptions

        def __init__(self, group, slots_per_rank, options: RelayOptions):
            super().__init__(group, slots_per_rank)
            self.hops = options.hops

They are set by `MoE(..., transport="relay", transport_options=RelayOptions(hops=3))`, or by
`carpool train moe.transport=relay moe.transport_options.hops=3`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from carpool.transport.codecs import PLAIN, Codecs

if TYPE_CHECKING:
    import torch.distributed as dist

    from carpool.ride.schedule import Schedule


class RunSizes(NamedTuple):
    """Sizes of a training run from which transports derive options.

    Attributes:
        max_tokens: tokens of the largest rank in a micro-batch.
        sequence_tokens: a rank's share of one sequence. Buffers hold at least as many.
        timeout_seconds: how long a rank may wait for another.
        balance_limit: the load of a rank, over the mean, that spare slots keep to. None: there is none.
    """

    max_tokens: int
    sequence_tokens: int
    timeout_seconds: float
    balance_limit: float | None = None


@dataclass(frozen=True)
class TransportOptions:
    """See the module's docstring.

    Attributes:
        max_tokens: tokens of the largest rank, for buffers of a fixed size; None: unknown.
        codecs: how hidden states are encoded (`carpool.transport.codecs`). Exact by default.
    """

    max_tokens: int | None = None
    codecs: Codecs = PLAIN

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any], sizes: RunSizes, codecs: Codecs = PLAIN) -> Self:
        """The options of a training run. `settings`: from the configuration, by name.

        Raises:
            ValueError: an invalid value."""
        return cls(max_tokens=sizes.max_tokens, codecs=codecs, **settings)

    @property
    def lossy_reasons(self) -> list[str]:
        """How these options change the model's function, for logs and reports."""
        return self.codecs.lossy_reasons

    def settled(
        self, group: dist.ProcessGroup | None, top_k: int, hidden: int, own_forward: bool = False
    ) -> tuple[Self, str]:
        """(These options with "auto" resolved for the ranks of a group, a sentence for the log). Collective over the
        group.

        Args:
            top_k, hidden: K and H.
            own_forward: experts run a model's own forward."""
        return self, ""

    def under(self, schedule: Schedule, resend: bool = False) -> Self:
        """These options, changed as a schedule needs. `resend`: tokens are sent again in the backward.

        Raises:
            ValueError: the options and the schedule are incompatible."""
        return self
