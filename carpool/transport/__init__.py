"""How rows travel: one file per way.

| name       | rows per token, there and back       | what it is for                                        |
|------------|--------------------------------------|-------------------------------------------------------|
| `gather`   | one to every rank                    | the oracle; K larger than W                           |
| `alltoall` | one per expert                       | the baseline that others use                          |
| `dedup`    | one per rank that holds an expert    | the default where there is no NVLink                  |
| `nvlink`   | one per rank that holds an expert    | GPUs of one host: kernels write into peers' memory    |

The first three run over `torch.distributed`, on any device and backend. `nvlink` has buffers of a fixed size, so "auto"
picks it only where somebody has said how many tokens a rank may have (`NVLinkOptions.max_tokens`). `base.py` has the
contract.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch.distributed as dist

from carpool.transport.alltoall import AllToAll
from carpool.transport.base import Arrivals, Pending, Route, Transport
from carpool.transport.dedup import Dedup
from carpool.transport.gather import Gather
from carpool.transport.nvlink import BufferOverflowError, NVLink, NVLinkOptions, why_not

__all__ = [
    "TRANSPORTS",
    "Arrivals",
    "NVLinkOptions",
    "Pending",
    "Route",
    "Transport",
    "check_overflow",
    "check_transport",
    "choose_transport",
    "make_transport",
    "resolve_transport",
    "why_not_nvlink",
]

TRANSPORTS: dict[str, type[Any]] = {cls.name: cls for cls in (Gather, AllToAll, Dedup, NVLink)}


def choose_transport(name: str, num_ranks: int, top_k: int, no_nvlink: str | None = "") -> tuple[str, str]:
    """Resolve "auto". Looks at no device.

    Args:
        num_ranks, top_k: W and K.
        no_nvlink: why `nvlink` is not to be picked (`why_not_nvlink`), "" if nobody has looked; None: it can be.

    Returns:
        (name, why): a key of `TRANSPORTS` and a sentence for the log.

    Raises:
        ValueError: an unknown name.
    """
    if name != "auto":
        if name not in TRANSPORTS:
            raise ValueError(f"transport={name!r} is not known; use 'auto' or one of {', '.join(TRANSPORTS)}")
        return name, "asked for"
    fewer = f"one row per token for each rank that holds any of its {top_k} experts, not one for each expert"
    if no_nvlink is None:
        return "nvlink", f"the {num_ranks} GPUs reach each other's memory; {fewer}"
    unused = f"; not nvlink: {no_nvlink}" if no_nvlink else ""
    if top_k == 1:
        why = "with one expert per token there is one row per token either way, and its plan is shorter"
        return "alltoall", why + unused
    return "dedup", fewer + unused


def why_not_nvlink(group: dist.ProcessGroup | None, hidden: int, options: NVLinkOptions | None) -> str | None:
    """Why "auto" does not pick `nvlink` for rows of `hidden` elements, or None if it does. All ranks of the group
    together, with equal arguments."""
    if group is None:
        return "one rank has nobody to send to"
    if options is None or options.max_tokens is None:
        return "nobody said how many tokens a rank may have (max_tokens)"
    if hidden % 8:
        return f"rows travel in pieces of 16 bytes, and {hidden} is no multiple of 8"
    return _unreachable(group)


def check_transport(name: str, group: dist.ProcessGroup | None) -> None:
    """Raise ValueError if a transport is unknown, or is asked for by name and cannot be used by the ranks of a group.
    Collective over the group for "nvlink"."""
    choose_transport(name, 1, 1)
    if name == "nvlink" and (reason := _unreachable(group)):
        raise ValueError(f"transport 'nvlink' cannot be used here: {reason}; use 'auto' or 'dedup'")


def resolve_transport(
    name: str, group: dist.ProcessGroup | None, top_k: int, hidden: int, options: NVLinkOptions | None
) -> tuple[str, str]:
    """`choose_transport` for the ranks of a group, which is looked at. All its ranks together, with equal arguments."""
    check_transport(name, group)
    unfit = why_not_nvlink(group, hidden, options) if name == "auto" else ""
    return choose_transport(name, dist.get_world_size(group) if group is not None else 1, top_k, unfit)


def make_transport(
    name: str, group: dist.ProcessGroup | None, slots_per_rank: int, options: NVLinkOptions | None = None
) -> Transport:
    """Construct the transport `name` (a key of `TRANSPORTS`) for a process group. `options` are for "nvlink"."""
    if name == "nvlink":
        return NVLink(group, slots_per_rank, options)
    made: Transport = TRANSPORTS[name](group, slots_per_rank)
    return made


def check_overflow(transport: Transport | None) -> None:
    """Look whether all rows had a place since the buffers were made; only `nvlink` has any. Waits for the device.

    Raises:
        RankMissingError: a rank did not arrive at a verb.
        BufferOverflowError: more tokens than the buffers were made for: the sums are NaN. All ranks of a group alike.
    """
    if not isinstance(transport, NVLink):
        return
    buffers = transport.buffers
    buffers.check()
    if needed := buffers.overflow():
        raise BufferOverflowError(
            f"rows had no place: the buffers of transport 'nvlink' hold {buffers.capacity} tokens of a rank, and "
            f"{needed} were needed. The outputs and gradients since then are NaN. State the largest number of tokens "
            f"that a rank will have, max_tokens={needed} or more, or use transport 'dedup', which has no such limit",
            needed,
        )


# What the ranks of a group have found out together is a fact of that group, as its buffers are; it goes when that goes.
_FOUND: weakref.WeakKeyDictionary[dist.ProcessGroup, str | None] = weakref.WeakKeyDictionary()


def _unreachable(group: dist.ProcessGroup | None) -> str | None:
    """`nvlink.why_not`, asked once per group: it is collective."""
    if group is None:
        return why_not(None)
    if group not in _FOUND:
        _FOUND[group] = why_not(group)
    return _FOUND[group]
