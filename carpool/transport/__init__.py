"""How rows travel: one file per way.

| name       | rows per token, there and back       | what it is for                         |
|------------|--------------------------------------|----------------------------------------|
| `gather`   | one to every rank                    | the oracle; K larger than W            |
| `alltoall` | one per expert                       | the baseline that others use           |
| `dedup`    | one per rank that holds an expert    | the default                            |

All three run over `torch.distributed`, on any device and backend. `base.py` has the contract.
"""

from __future__ import annotations

import torch.distributed as dist

from carpool.transport.alltoall import AllToAll
from carpool.transport.base import Arrivals, Pending, Route, Transport
from carpool.transport.dedup import Dedup
from carpool.transport.gather import Gather

__all__ = ["TRANSPORTS", "Arrivals", "Pending", "Route", "Transport", "choose_transport", "make_transport"]

TRANSPORTS = {cls.name: cls for cls in (Gather, AllToAll, Dedup)}


def choose_transport(name: str, num_ranks: int, top_k: int) -> tuple[str, str]:
    """Resolve "auto".

    Returns:
        (name, why): a key of `TRANSPORTS` and a sentence for the log.

    Raises:
        ValueError: an unknown name.
    """
    if name != "auto":
        if name not in TRANSPORTS:
            raise ValueError(f"transport={name!r} is not known; use 'auto' or one of {', '.join(TRANSPORTS)}")
        return name, "asked for"
    if top_k == 1:
        return "alltoall", "with one expert per token there is one row per token either way, and its plan is shorter"
    # Expected distinct ranks of a token under uniform routing: what dedup sends before any placement.
    copies = num_ranks * (1 - (1 - 1 / num_ranks) ** top_k)
    return "dedup", f"about {copies:.2f} rows per token under uniform routing, where one row per expert sends {top_k}"


def make_transport(name: str, group: dist.ProcessGroup | None, slots_per_rank: int) -> Transport:
    """Construct the transport `name` (a key of `TRANSPORTS`) for a process group."""
    return TRANSPORTS[name](group, slots_per_rank)
