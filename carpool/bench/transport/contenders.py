"""Who takes part: one contender is a transport with its options. And what each must send, from the definition."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.distributed as dist

from carpool.bench.transport.settings import Settings, Shape, has_ctas
from carpool.layout import ExpertLayout
from carpool.layout.topology import Topology
from carpool.placement.volume import predict
from carpool.routing import Routing
from carpool.transport import (
    Codecs,
    NVLinkOptions,
    Transport,
    TransportOptions,
    between_ranks,
    find_transport,
    make_transport,
)
from carpool.transport.codecs import PLAIN

FP8_OUT = Codecs(dispatch="fp8")


@dataclass(frozen=True)
class Contender:
    """Attributes:
    transport: the name of the transport.
    ctas: thread blocks of its kernels; None: not ours to choose (NCCL and gloo decide).
    fp8: rows travel out to experts as FP8. Lossy.
    """

    transport: str
    ctas: int | None = None
    fp8: bool = False

    @property
    def label(self) -> str:
        about = ["fp8"] * self.fp8 + ([] if self.ctas is None else [f"{self.ctas} CTAs"])
        return f"{self.transport} ({', '.join(about)})" if about else self.transport

    @property
    def codecs(self) -> Codecs:
        return FP8_OUT if self.fp8 else PLAIN


def list_contenders(settings: Settings) -> list[Contender]:
    """One for each transport; where thread blocks are ours to choose, one for each number. One more where rows can
    travel as FP8, if that is asked for."""
    found = []
    for name in settings.transports or between_ranks():
        found += [Contender(name, ctas) for ctas in (settings.ctas if has_ctas(name) else (None,))]
        if settings.fp8 and find_transport(name).why_no_codecs(FP8_OUT) is None:
            found.append(replace(found[-1], fp8=True))
    return list(dict.fromkeys(found))


def why_unavailable(name: str, group: dist.ProcessGroup | None, shape: Shape, dtype: torch.dtype) -> str | None:
    """Why transport `name` cannot run here, or None. Collective over the group."""
    way = find_transport(name)
    return way.why_no_rows(shape.hidden, dtype.itemsize) or way.why_not(group)


def build(contender: Contender, group: dist.ProcessGroup | None, layout: ExpertLayout, tokens: int) -> Transport:
    """The transport itself, with buffers for `tokens` tokens per rank where it has any."""
    options = TransportOptions(codecs=contender.codecs)
    if contender.ctas is not None:
        options = NVLinkOptions(
            dispatch_ctas=contender.ctas, combine_ctas=contender.ctas, max_tokens=tokens, codecs=contender.codecs
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
    """For each verb of `carpool.metrics.counters.VERBS` but the plan: (W, W) bytes from rank [i] to [j], 0 to itself.

    As FP8 a row is a packet of codes and scales, on the way out of the forward only.
    """
    experts, options = [routing.expert_TK for routing in routings], TransportOptions(codecs=contender.codecs)
    volume = predict(
        contender.transport, experts, layout, hidden=hidden, element_size=element_size,
        options=find_transport(contender.transport).own_options(options), topology=topology,
    )  # fmt: skip
    bytes_WW = {verb: matrix.copy() for verb, matrix in volume.bytes_WW.items() if verb != "plan"}
    for matrix in bytes_WW.values():
        np.fill_diagonal(matrix, 0)
    return bytes_WW


def busiest(bytes_WW: np.ndarray) -> int:
    """Bytes through the link of the rank that has most to do. Links carry both directions at once."""
    return int(max(bytes_WW.sum(0).max(), bytes_WW.sum(1).max()))
