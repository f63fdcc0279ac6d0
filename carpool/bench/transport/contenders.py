"""Who takes part: one contender is a transport with its options. And what each must send, from the definition."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from carpool.bench.transport.settings import Settings, Shape, has_ctas
from carpool.layout import ExpertLayout
from carpool.layout.topology import Topology
from carpool.placement.volume import predict
from carpool.routing import Routing
from carpool.transport import TRANSPORTS, NVLinkOptions, Transport, find_transport, make_transport


@dataclass(frozen=True)
class Contender:
    """Attributes:
    transport: the name of the transport.
    ctas: thread blocks of its kernels; None: not ours to choose (NCCL and gloo decide).
    fp8: rows travel out as FP8. Lossy.
    """

    transport: str
    ctas: int | None = None
    fp8: bool = False

    @property
    def label(self) -> str:
        if self.ctas is None:
            return self.transport
        return f"{self.transport} ({'fp8, ' if self.fp8 else ''}{self.ctas} CTAs)"


def list_contenders(settings: Settings) -> list[Contender]:
    """One for each transport; where thread blocks are ours to choose, one for each number, and one more for FP8."""
    found = []
    for name in settings.transports or tuple(TRANSPORTS):
        if not has_ctas(name):
            found.append(Contender(name))
            continue
        found += [Contender(name, ctas) for ctas in settings.ctas]
        if settings.fp8:
            found.append(Contender(name, settings.ctas[-1], fp8=True))
    return list(dict.fromkeys(found))


def why_unavailable(name: str, group: dist.ProcessGroup | None, shape: Shape, dtype: torch.dtype) -> str | None:
    """Why transport `name` cannot run here, or None. Collective over the group."""
    way = find_transport(name)
    return way.why_no_rows(shape.hidden, dtype.itemsize) or way.why_not(group)


def build(contender: Contender, group: dist.ProcessGroup | None, layout: ExpertLayout, tokens: int) -> Transport:
    """The transport itself, with buffers for `tokens` tokens per rank where it has any."""
    options = None
    if contender.ctas is not None:
        options = NVLinkOptions(
            dispatch_ctas=contender.ctas, combine_ctas=contender.ctas, max_tokens=tokens, forward_fp8=contender.fp8
        )
    return make_transport(contender.transport, group, layout.slots_per_rank, options)


def expected_bytes(
    contender: Contender,
    routings: Sequence[Routing],
    layout: ExpertLayout,
    hidden: int,
    element_size: int,
    topology: Topology | None = None,
) -> dict[str, np.ndarray]:
    """For each verb of `carpool.observe.traffic.VERBS` but the plan: (W, W) bytes from rank [i] to [j], 0 to itself.

    As FP8 a row is a packet of codes and scales, on the way out of the forward only.
    """
    experts, options = [routing.expert_TK for routing in routings], NVLinkOptions(forward_fp8=True)
    volume = predict(
        contender.transport, experts, layout, hidden=hidden, element_size=element_size,
        options=options if contender.fp8 else None, topology=topology,
    )  # fmt: skip
    bytes_WW = {verb: matrix.copy() for verb, matrix in volume.bytes_WW.items() if verb != "plan"}
    for matrix in bytes_WW.values():
        np.fill_diagonal(matrix, 0)
    return bytes_WW


def busiest(bytes_WW: np.ndarray) -> int:
    """Bytes through the link of the rank that has most to do. Links carry both directions at once."""
    return int(max(bytes_WW.sum(0).max(), bytes_WW.sum(1).max()))
