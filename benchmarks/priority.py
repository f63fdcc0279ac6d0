"""Rides before reductions: what that is worth in a stack of decoder layers.

    torchrun --nproc-per-node 4 -m benchmarks.priority --model olmoe --out priority.json
    torchrun ... -m benchmarks.priority --transport dedup             # rides over NCCL
    NCCL_HOSTID=node$((RANK / 2)) ...                                 # and these over a slow link: two "nodes"

The stack of `benchmarks.overlap`, as `carpool train` shards it: FSDP2 over all ranks with EP over all ranks, parameters
and reductions in float32, computation in bfloat16. Contenders take turns step by step, for each schedule:

    as ever          FSDP reduces a layer's gradients at its end, beside the next ride's dispatch
    held             beside the next ride's experts (carpool/ride/priority.py)

Milliseconds are of the slowest rank, median over steps.

    step       forward and backward, until all gradients are reduced
    dispatch   of gradients, in the backward: from asking until the computation has it, less what the host put between;
    combine    the same. Means over layers. With schedule none, a ride over nvlink is in the computation's stream, and
               these are its own length: what a reduction beside it costs is seen here
    host       how long the host took to ask for the step

Before anything is timed, gradients of all parameters are compared with those as ever.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from benchmarks.overlap import make_stack, make_stack_parser
from benchmarks.script import check_arenas, join_group, show, write_results
from carpool.bench.timing import in_turns, medians
from carpool.hf import rides, set_schedule, set_transport
from carpool.metrics.host import slowest, timed
from carpool.ride.priority import RidesFirst
from carpool.ride.schedule import Schedule
from carpool.transport import NVLinkOptions

SCHEDULES = {"none": Schedule(), **{f"chunks={r}": Schedule("chunks", r) for r in (1, 2, 4)}}
COLUMNS = ("step", "dispatch", "combine", "host")


def ways(model: torch.nn.Module) -> dict[str, RidesFirst | None]:
    return {"as ever": None, "held": RidesFirst(model, rides(model))}


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {name: (g.to_local() if isinstance(g, DTensor) else g).clone() for name, g in found.items()}


def compare(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> str:
    if ours.keys() != theirs.keys():
        raise RuntimeError(f"gradients of other parameters: {sorted(ours.keys() ^ theirs.keys())[:3]}")
    equal = sum(torch.equal(ours[name], g) for name, g in theirs.items())
    worst = max(float((ours[n] - g).abs().max() / g.abs().max().clamp(min=1e-20)) for n, g in theirs.items() if len(g))
    return f"{equal} of {len(theirs)} gradients have the same bits, the others are off by {worst:.1e} at most"


def backward_rides(model: torch.nn.Module, device: torch.device) -> tuple[float, float]:
    """Milliseconds of a dispatch and of a combine of gradients: mean over layers, of the slowest rank."""
    sums = [0.0, 0.0]
    layers = rides(model).values()
    for own in layers:
        spans = own.stats.meter.milliseconds()
        for number, name in enumerate(("dispatch", "combine")):
            forward_and_backward = spans[name]
            assert len(forward_and_backward) == 2
            sums[number] += forward_and_backward[1] / len(layers)
    dispatch, combine = slowest(sums, device)
    return dispatch, combine


def main() -> None:
    parser = make_stack_parser(__doc__)
    parser.add_argument("--schedules", choices=SCHEDULES, nargs="+", default=["none", "chunks=1"])
    args = parser.parse_args()

    device = join_group()
    rank = dist.get_rank()
    model, x, dy = make_stack(args, device, mixed=True)
    options = NVLinkOptions(max_tokens=args.batch * args.sequence, arena_bytes=int(args.arena_gib * 2**30))
    set_transport(model, args.transport, options=options)

    def step(first: AbstractContextManager[Any] | None) -> None:
        with first or nullcontext():
            model(inputs_embeds=x, use_cache=False).logits.backward(dy)

    def clear() -> None:
        x.grad = None
        model.zero_grad(set_to_none=True)
        for own in rides(model).values():
            own.stats.reset()

    def once(first: AbstractContextManager[Any] | None) -> tuple[float, ...]:
        clear()
        took = timed(partial(step, first), device)
        return took.ms, *backward_rides(model, device), took.host_ms

    report: list[dict[str, Any]] = []
    contenders = ways(model)
    for schedule in args.schedules:
        set_schedule(model, SCHEDULES[schedule])
        plain: dict[str, torch.Tensor] = {}
        for name, first in contenders.items():
            for _ in range(2):
                clear()
                step(first)
            ours = gradients(model)
            plain = plain or ours
            if rank == 0 and first is not None:
                print(f"{schedule}, {name}: {compare(ours, plain)}", flush=True)
        times = in_turns({name: partial(once, first) for name, first in contenders.items()}, args.steps)
        for name, values in times.items():
            median = dict(zip(COLUMNS, medians(values), strict=True))
            gain = medians(times["as ever"])[0] / median["step"]
            report.append({"schedule": schedule, "way": name, **median, "gain": gain, "all": values})
    check_arenas(model)
    title = f"{args.model}, {args.layers} layers, {args.batch} x {args.sequence} tokens a rank, {args.transport}"
    cells = [
        [f"{row['schedule']}, {row['way']}", *(f"{row[name]:.2f}" for name in COLUMNS), f"{row['gain']:.3f}x"]
        for row in report
    ]
    show(title, ["schedule, way", *COLUMNS, "gain"], cells)
    write_results(args, device, results=report)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
