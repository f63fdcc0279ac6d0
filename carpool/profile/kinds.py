"""Where the time of a step went, by kind of kernel: one rank's trace, of a Carpool model or of any other.

    experts         what experts compute: in our ranges of experts, or a grouped matrix product
    dense           other matrix products: attention's projections, dense layers, routers, the output head
    attention       scores, softmax and values
    loss            the cross-entropy over the vocabulary, without the head's product
    optimizer       the optimizer's step, and clipping
    elementwise     everything else that computes: norms, activations, residuals, rotary embeddings
    copies          memory that moves within the device, and between it and the host; casts
    rides           rows that travel to experts and back: our kernels, any all-to-all, and what packs rows
    communication   other communication: gathers and reductions of parameters and gradients
    idle            nothing runs

A kernel's kind follows from three things, in this order of trust: the range in which it was launched (`SECTIONS`), the
operator that launched it, its own name. Kernels of the backward are launched by autograd, outside of all ranges of the
forward. So an operator of the backward takes the range of the operator of the forward that it differentiates: the
profiler gives both the same sequence number. Compiled layers and CUDA graphs launch kernels without an operator, and
there the name decides alone: what a compiler fused into one kernel counts as elementwise.

Kernels run beside each other, on several streams. `busy` is how long there was a kernel of a kind at all, and `share`
divides the step: each moment belongs to the first kind in `KINDS` that runs then, so that shares add up to the step.
What is left of `rides` in `share` is what no computation hides.

A trace of a CPU has no kernels: then operators are what is counted, and idle is the time outside of all operators.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from carpool.profile.rank_trace import (
    EXPERTS,
    ON_DEVICE,
    OUR_RIDES,
    RIDES,
    Innermost,
    Span,
    argument,
    events_of,
    kernels_of,
    length,
    parse,
    place_of,
    span_of,
    subtract,
    union,
)

KINDS = (
    "experts", "dense", "attention", "loss", "optimizer", "elementwise", "copies", "rides", "communication",
)  # fmt: skip
IDLE = "idle"
LOSS, OPTIMIZER = "carpool::loss", "carpool::optimizer"
"""Names of ranges, beside those of a ride's pieces."""
SECTIONS = {LOSS: "loss", OPTIMIZER: "optimizer"}

# Kernels of ours by their names alone, as a replayed graph shows them.
OUR_EXPERTS = frozenset({
    "_up", "_up_tiles", "_plain", "_dact", "_dact_tiles", "_dact_pieces", "_outer", "_gather_rows", "_gather_wide",
    "_sum_pairs", "_sum_part", "_sum_shares", "_slot_sums", "_count", "_scan", "_scatter", "_row_addresses",
    "_tile_table", "_quantise_weight", "_activate_backward", "_dequantise", "_activation", "_activation_backward",
    "_gemm", "_inner", "_add",
})  # fmt: skip
OUR_PACKING = frozenset({
    "plan_kernel", "choices_kernel", "quantise_kernel", "dequantise_kernel", "_look_up", "_reserve", "_copy_slabs",
    "_plan", "_share", "_place", "_add_counts",
})  # fmt: skip
_ATTENTION = re.compile(r"flash|fmha|attention|sdpa", re.I)
_GROUPED = re.compile(r"grouped|GroupProblem", re.I)
_PRODUCT = re.compile(r"gemm|gemv|nvjet|cutlass|cublas|splitK|aten::(mm|bmm|addmm|baddbmm|mv|dot|linear|matmul)$", re.I)
_LOSS = re.compile(r"cross_entropy|nll_loss|log_softmax", re.I)
_OPTIMIZER = re.compile(r"multi_tensor_apply|adam|^_(take_gradient|change)$", re.I)
_COPY = re.compile(
    r"^Mem(cpy|set)|direct_copy|CatArray|chunk_cat|aten::(copy_|cat|_to_copy|zero_|clone)$|^fsdp::|split_with_sizes_copy",
    re.I,
)
_RIDE = re.compile(r"all_?to_?all|SendRecv", re.I)
_COMMUNICATION = re.compile(r"^nccl|^gloo|^c10d::|_c10d_functional|record_param_comms|^Memcpy PtoP", re.I)


@dataclass(frozen=True)
class TimeByKind:
    """One rank's step, in milliseconds.

    Attributes:
        step: from its start to its end, under the profiler.
        on_device: what is counted are kernels; otherwise operators of the host.
        busy: how long there was something of each kind at all.
        share: the step divided among the kinds and `IDLE`; adds up to `step`.
    """

    step: float
    on_device: bool
    busy: dict[str, float]
    share: dict[str, float]


def kind_of_kernel(name: str, operator: str, section: str | None) -> str:
    """The kind of a kernel.

    Args:
        operator: that launched it; "" if that is not known.
        section: the kind of the range in which it was launched, one of `KINDS`; None outside of all.

    Example: kind_of_kernel("nvjet_hsh_256x128", "aten::mm", None) == "dense"
    """
    both = f"{operator} {name}"
    if any(name.startswith(ride) for ride in OUR_RIDES) or name in OUR_PACKING:
        return "rides"
    if _COMMUNICATION.search(name) or _COMMUNICATION.search(operator):
        return "rides" if section == "rides" or _RIDE.search(both) else "communication"
    if section in ("optimizer", "experts", "rides"):
        return section
    if name in OUR_EXPERTS:
        return "experts"
    if _ATTENTION.search(both):
        return "attention"
    if _GROUPED.search(both):
        return "experts"
    if _PRODUCT.search(name) or _PRODUCT.search(operator):
        return "dense"
    if section == "loss" or _LOSS.search(both):
        return "loss"
    if _OPTIMIZER.search(both):
        return "optimizer"
    return "copies" if _COPY.search(name) or _COPY.search(operator) else "elementwise"


def time_by_kind(trace: dict[str, Any]) -> TimeByKind:
    """Read the last step of a trace (`carpool.profile.rank_trace.load`), recorded in the range `carpool::step`.

    Raises:
        ValueError: there is no such range."""
    events, range_of_step = events_of(trace)
    step = span_of(range_of_step)
    found: dict[str, list[Span]] = {kind: [] for kind in KINDS}
    on_device = any(event.get("cat") in ON_DEVICE for event in events)
    sections = _Sections(events)
    for (start, end), kind in (_kernels if on_device else _operators)(events, sections):
        if end > step[0] and start < step[1]:
            found[kind].append((max(start, step[0]), min(end, step[1])))
    busy = {kind: union(spans) for kind, spans in found.items()}
    share, taken = {}, list[Span]()
    for kind in KINDS:
        share[kind] = length(subtract(busy[kind], taken)) / 1e6
        taken = union(taken + busy[kind])
    share[IDLE] = length(subtract([step], taken)) / 1e6
    return TimeByKind(
        step=length([step]) / 1e6,
        on_device=on_device,
        busy={kind: length(spans) / 1e6 for kind, spans in busy.items()},
        share=share,
    )


def _section_of(name: str) -> str | None:
    """The kind that a range's name says, None if it says none."""
    label = parse(name)
    if label is not None:
        return "rides" if label.piece in RIDES else "experts" if label.piece in EXPERTS else None
    return SECTIONS.get(name)


class _Sections:
    """The section of a moment of a thread: of the innermost range there, or of the forward that is differentiated."""

    def __init__(self, events: list[dict[str, Any]]) -> None:
        ranges: dict[Any, list[tuple[Span, str]]] = {}
        shown: dict[Any, list[tuple[Span, str]]] = {}
        forward: dict[int, list[dict[str, Any]]] = {}
        backward = []
        for event in events:
            into = {"user_annotation": ranges, "gpu_user_annotation": shown}.get(event.get("cat", ""))
            if into is not None and (section := _section_of(event["name"])) is not None:
                into.setdefault(place_of(event), []).append((span_of(event), section))
            number = argument(event, "Sequence number") if event.get("cat") == "cpu_op" else None
            if number is not None:
                if argument(event, "Fwd thread id"):
                    backward.append((event, number))
                else:
                    forward.setdefault(number, []).append(event)
        self._own, self._shown, self._differentiated = Innermost(ranges), Innermost(shown), Innermost[str]({})
        differentiated: dict[Any, list[tuple[Span, str]]] = {}
        for event, number in backward:
            # A number may be used again by another thread: what is closest before the backward is meant.
            before = [one for one in forward.get(number, ()) if one["ts"] < event["ts"]]
            section = self.at(place_of(before[-1]), span_of(before[-1])[0]) if before else None
            if section is not None:
                differentiated.setdefault(place_of(event), []).append((span_of(event), section))
        self._differentiated = Innermost(differentiated)

    def at(self, place: Any, moment: int) -> str | None:
        """Of a thread."""
        return self._own.at(place, moment) or self._differentiated.at(place, moment)

    def on_stream(self, kernel: dict[str, Any]) -> str | None:
        """Of a kernel whose launch says nothing: of the range that is drawn over its stream."""
        return self._shown.at(place_of(kernel), sum(span_of(kernel)) // 2)


def _kernels(events: list[dict[str, Any]], sections: _Sections) -> Iterator[tuple[Span, str]]:
    """(when, kind) of all that ran on the device."""
    for event, launch, operator in kernels_of(events):
        found = (sections.at(place_of(cause), span_of(cause)[0]) for cause in (launch, operator) if cause is not None)
        section = next((one for one in found if one is not None), None) or sections.on_stream(event)
        yield span_of(event), kind_of_kernel(event["name"], operator["name"] if operator is not None else "", section)


def _operators(events: list[dict[str, Any]], sections: _Sections) -> Iterator[tuple[Span, str]]:
    """(when, kind) of what the host computed: of each moment, the innermost operator or range of a ride."""
    nested: dict[Any, list[tuple[Span, str]]] = {}
    for event in events:
        operator = event.get("cat") == "cpu_op" and not event["name"].startswith("autograd::engine")
        ride = event.get("cat") == "user_annotation" and _section_of(event["name"]) == "rides"
        if operator or ride:
            place, span = place_of(event), span_of(event)
            # Views and the like say nothing of what they are part of.
            kind = "rides" if ride else kind_of_kernel("", event["name"], sections.at(place, span[0]))
            nested.setdefault(place, []).append((span, kind))
    for found in Innermost(nested).places.values():
        yield from found
