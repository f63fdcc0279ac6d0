"""How fast parameters come into spare slots, and gradients go home.

    torchrun --nproc-per-node 4 -m benchmarks.slot_fetch --out slot_fetch.json
    torchrun --nproc-per-node 2 -m benchmarks.slot_fetch --shapes 64,32,16,1 --transport dedup      # on CPUs

For each --shapes H,F,E,S (hidden, expert hidden, experts, spare slots of a rank), with all slots filled:

    ring    from the next ranks' experts, so each rank sends as much as it receives
    hot     all from rank 0, as when one rank has what everybody needs: its links are what counts

    fetch   parameters of S experts come to each rank, forward or backward
    home    gradients of S experts go home from each rank, and are added there

GB/s are bytes that the busiest rank sends or receives, over the median time of the slowest rank.
"""

from __future__ import annotations

import statistics
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import carpool
from benchmarks.script import join_group, make_parser, show, write_results
from carpool.bench.options import parse_sizes
from carpool.bench.timing import Clock, rounds
from carpool.replicas.slot_plan import SlotPlan
from carpool.ride.balanced import SpareSlotOptions

SHAPES = ("2048,768,128,2", "2048,1024,64,2", "4096,1408,128,2")
WARMUP = 3


def filled(way: str, experts: int, ranks: int, spare: int) -> torch.Tensor:
    """(W, S) int32, the expert in each slot. Homes are experts in order, as many on each rank."""
    each = experts // ranks
    slot_S = torch.arange(spare)
    if way == "ring":
        return torch.stack([((rank + 1 + slot_S) % ranks * each + slot_S) % experts for rank in range(ranks)]).int()
    return torch.stack([slot_S if rank else torch.full_like(slot_S, -1) for rank in range(ranks)]).int()


def busiest(expert_WS: torch.Tensor, each: int) -> int:
    """Experts that the busiest rank sends to others or receives; none may be on its own rank already."""
    ranks = len(expert_WS)
    received_W = (expert_WS >= 0).sum(1)
    sent_W = torch.bincount(expert_WS[expert_WS >= 0].long() // each, minlength=ranks)
    return int(torch.maximum(received_W, sent_W).max())


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--shapes", nargs="+", default=SHAPES, metavar="H,F,E,S")
    parser.add_argument("--transport", default="auto", help="of a layer; nvlink on GPUs that can")
    parser.add_argument("--repetitions", type=int, default=21)
    args = parser.parse_args()
    device = join_group()
    ranks = dist.get_world_size()
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    mesh = init_device_mesh(device.type, (ranks,), mesh_dim_names=("ep",))
    found: list[dict[str, Any]] = []
    for shape in args.shapes:
        hidden, inner, experts, spare = parse_sizes(shape, ("H", "F", "E", "S"), SHAPES[0])
        if experts % ranks or experts // ranks < spare:
            parser.error(
                f"--shapes {shape}: {ranks} ranks cannot have {experts // ranks} of {experts} experts each, and "
                f"{spare} spare slots for them"
            )
        moe = carpool.MoE(
            hidden, inner, experts, 2, ep_mesh=mesh, transport=args.transport, max_tokens=64,
            spare_slots=SpareSlotOptions(spare, limit=1.0), device=device, dtype=dtype,
        )  # fmt: skip
        moe(torch.randn(64, hidden, device=device, dtype=dtype)).sum().backward()  # buffers are made
        links = moe.core.spare.links  # type: ignore[union-attr]
        homes = [moe.up_proj.detach(), moe.down_proj.detach()]
        bytes_of_one = sum(one[0].nbytes for one in homes)
        for way in ("ring", "hot"):
            expert_WS = filled(way, experts, ranks, spare)
            load_W = torch.ones(ranks, dtype=torch.int64, device=device)
            plan = SlotPlan(expert_WS.to(device), torch.where(expert_WS < 0, 0, 1).int().to(device), load_W)
            clock, most = Clock(device, dist.group.WORLD, 2_000_000), busiest(expert_WS, experts // ranks)
            for number, _ in rounds([way], args.repetitions, WARMUP):
                clock.keep = number >= 0
                handle = links.take(plan)
                with clock.section(way, "fetch"):
                    coming = links.fetch(homes, handle)
                    slots = coming.wait()
                    coming.release()
                dhomes, dslots = [torch.zeros_like(one) for one in homes], [torch.ones_like(one) for one in slots]
                with clock.section(way, "home"):
                    dhomes = links.send_home(dhomes, dslots, handle)
            check(expert_WS, homes, slots, dhomes)
            times = clock.slowest()
            for verb in ("fetch", "home"):
                us = statistics.median(times[way, verb])
                found.append({
                    "label": f"{verb} {way} {shape}", "transport": moe.transport.name, "experts": most,
                    "bytes": most * bytes_of_one, "us_median": us, "gb_per_s": most * bytes_of_one / us / 1e3,
                })  # fmt: skip
    title = f"Experts into spare slots, {ranks} ranks"
    columns = ["verb, plan, H,F,E,S", "transport", "MB of the busiest rank", "us", "GB/s"]
    numbers = [(row["bytes"] / 1e6, row["us_median"], row["gb_per_s"]) for row in found]
    texts = [[row["label"], row["transport"]] for row in found]
    show(title, columns, [[*text, *(f"{one:,.1f}" for one in own)] for text, own in zip(texts, numbers, strict=True)])
    write_results(args, device, results=found)
    dist.destroy_process_group()


def check(
    expert_WS: torch.Tensor, homes: list[torch.Tensor], slots: list[torch.Tensor], dhomes: list[torch.Tensor]
) -> None:
    """RuntimeError unless slots have the parameters of their experts, and homes a gradient of 1 from each slot."""
    rank, each = dist.get_rank(), len(homes[0])
    for home, slot, dhome in zip(homes, slots, dhomes, strict=True):
        every = [torch.empty_like(home) for _ in expert_WS]
        dist.all_gather(every, home.contiguous())
        for place, expert in enumerate(expert_WS[rank].tolist()):
            if expert >= 0 and not torch.equal(slot[place], every[expert // each][expert % each]):
                raise RuntimeError(f"slot {place} of rank {rank} does not have the parameters of expert {expert}")
        for row in range(each):
            if not bool((dhome[row] == int((expert_WS == rank * each + row).sum())).all()):
                raise RuntimeError(f"expert {rank * each + row} did not get the gradients of its slots")


if __name__ == "__main__":
    main()
