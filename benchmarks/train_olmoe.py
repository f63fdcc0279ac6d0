"""A whole training step of OLMoE's configuration: Carpool's transports against transformers' own expert parallelism.

    torchrun --nproc-per-node 4 -m benchmarks.train_olmoe --out train_olmoe.json

One model, built once: each experts module has transformers' `all_to_all` and Carpool's rides side by side, and takes
the one or the other as its forward. So weights, data, optimizer and everything outside the experts are the same,
and the contenders alternate step by step. A step is forward, backward and fused AdamW, in bf16, with sdpa. With
`--compile`, every contender runs twice: as it is, and with each decoder layer's forward compiled.

Defaults: the OLMoE configuration of transformers (H 2048, F 2048, E 64, K 8) cut to 6 layers, 2 x 4096 tokens per rank,
FSDP over all ranks with EP over all ranks. Milliseconds are of the slowest rank, median over steps; "host" is how long
its host took to ask for the step's work.
"""

from __future__ import annotations

import statistics
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import OlmoeConfig
from transformers.distributed import DistributedConfig
from transformers.distributed.expert_parallel import EPImplementationInterface
from transformers.distributed.parallel_utils import ALL_PARALLEL_STYLES

from carpool.bench.script import check_arenas, join_group, make_parser, write_results
from carpool.bench.timing import rounds, timed_step
from carpool.hf import CarpoolEP, rides
from carpool.hf.build import build_model, experts_modules
from carpool.hf.expert_parallel import buffers_of_rides
from carpool.train.run.environment import environment
from carpool.train.run.flops import flops_per_token, model_size, peak_flops
from carpool.transport import NVLinkOptions

THEIRS = "transformers all_to_all"
COMPILED = ", compiled"
WARMUP = 2


class Ours(CarpoolEP):
    """Carpool's, which leaves word of its meshes, so that theirs can be put beside it."""

    def __init__(self, experts: nn.Module, ep_mesh: DeviceMesh, tp_mesh: DeviceMesh) -> None:
        super().__init__(experts, ep_mesh, tp_mesh)
        experts.meshes = ep_mesh, tp_mesh


Forwards = dict[nn.Module, Any]


def both_forwards(model: nn.Module) -> tuple[Forwards, Forwards]:
    """(Carpool's, transformers') forward of each experts module."""
    ours, theirs = {}, {}
    for own in rides(model).values():
        experts, (ep_mesh, tp_mesh) = own.experts, own.experts.meshes
        ours[experts], experts.forward = experts.forward, own.experts_forward
        style = ALL_PARALLEL_STYLES["ep_dispatch_experts"]
        style.install_forward(experts, ep_mesh, tp_mesh=tp_mesh, ep_implementation="all_to_all")
        theirs[experts] = experts.forward
    return ours, theirs


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--intermediate", type=int, default=2048)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--batch", type=int, default=2, help="sequences per rank")
    parser.add_argument("--sequence", type=int, default=4096)
    parser.add_argument("--vocab", type=int, default=50304)
    parser.add_argument("--steps", type=int, default=15, help="timed steps of each contender")
    parser.add_argument("--transports", nargs="+", default=["dedup", "alltoall"])
    parser.add_argument("--arena-gib", type=float, default=8.0, help="nvlink: memory for what layers keep")
    parser.add_argument("--compile", action="store_true", help="run every contender with compiled layers, too")
    parser.add_argument("--profile", action="store_true", help="print the kernels of one step of the first transport")
    args = parser.parse_args()

    device = join_group()
    world, rank = dist.get_world_size(), dist.get_rank()

    EPImplementationInterface.register("ours", Ours)
    config = OlmoeConfig(
        num_hidden_layers=args.layers,
        hidden_size=args.hidden,
        intermediate_size=args.intermediate,
        num_experts=args.experts,
        num_experts_per_tok=args.top_k,
        vocab_size=args.vocab,
        max_position_embeddings=max(4096, args.sequence),
    )
    model = build_model(
        config,
        distributed_config=DistributedConfig(fsdp_size=world, ep_size=world, ep_implementation="ours"),
        dtype=torch.bfloat16,
        seed=0,
        attn_implementation="sdpa",
    )
    groups: dict[Any, list[nn.Parameter]] = {}
    for parameter in model.parameters():
        groups.setdefault(parameter.device_mesh, []).append(parameter)
    optimizer = torch.optim.AdamW([{"params": p} for p in groups.values()], lr=1e-5, fused=True)
    counts = {name: number * world for name, number in experts_modules(model).items()}
    size = model_size(model, counts, args.top_k)
    torch.manual_seed(rank)
    batches = [torch.randint(args.vocab, (args.batch, args.sequence), device=device) for _ in range(4)]

    ours, theirs = both_forwards(model)
    layers = model.model.layers
    eager = [layer.forward for layer in layers]
    compiled = [torch.compile(forward) for forward in eager] if args.compile else eager

    def step(name: str, batch: torch.Tensor) -> None:
        for layer, forward in zip(layers, compiled if name.endswith(COMPILED) else eager, strict=True):
            layer.forward = forward
        for experts, forward in (theirs if name.startswith(THEIRS) else ours).items():
            experts.forward = forward
        loss = model(input_ids=batch, labels=batch, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    contenders = [*args.transports, THEIRS]
    if args.compile:
        contenders += [name + COMPILED for name in contenders]
    options = NVLinkOptions(max_tokens=args.batch * args.sequence, arena_bytes=int(args.arena_gib * 2**30))
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
    for i, order in rounds(contenders, args.steps, WARMUP):
        for name in order:
            for own in rides(model).values():
                own.stats.reset()
                transport = name.removesuffix(COMPILED)
                if transport != THEIRS and own.requested != transport:
                    own.set_transport(transport, options)
            ms = timed_step(lambda name=name, i=i: step(name, batches[i % len(batches)]), device)
            if i >= 0:
                times[name].append(ms)
            tokens = [own.stats.tokens for own in rides(model).values()]
            if tokens != [0 if name.startswith(THEIRS) else args.batch * args.sequence] * args.layers:
                raise RuntimeError(f"{name} ran the other one's layers: Carpool's saw {tokens} tokens")
            if i == 0 and any(tokens) and rank == 0:
                layer = next(iter(rides(model).values()))
                print(f"{name}: first layer of rank 0: {layer.stats.summary()}", flush=True)
    check_arenas(model)
    for buffers in buffers_of_rides(rides(model).values()):
        if rank == 0 and buffers.arena is not None:
            print(f"buffers: {buffers.size / 2**30:.2f} GiB; arena used: {int(buffers.arena.needed) / 2**30:.2f} GiB")
    if args.profile:
        profile(lambda: step(args.transports[0], batches[0]), rank)

    if rank == 0:
        report(args, times, size, world, device)
    dist.destroy_process_group()


def profile(step: Any, rank: int) -> None:
    kinds = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        kinds.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=kinds) as recorded:
        step()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    if rank == 0:
        key = "self_cuda_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
        print(recorded.key_averages().table(sort_by=key, row_limit=25, max_name_column_width=60))


def report(args: Any, times: dict[str, list[tuple[float, float]]], size: Any, world: int, device: torch.device) -> None:
    tokens = args.batch * args.sequence
    flops = flops_per_token(size, args.sequence)
    peak, source = peak_flops(device, None)
    median = {
        name: [statistics.median(column) for column in zip(*values, strict=True)] for name, values in times.items()
    }
    theirs = min(ms for name, (ms, _) in median.items() if name.startswith(THEIRS))
    rows = []
    print(f"\n{size.total:,} parameters, {size.active:,} active; {world} x {environment(device, world)['device']}")
    print(f"{'contender':<36}{'ms/step':>9}{'host':>8}{'tokens/s/rank':>15}{'TFLOP/s':>9}{'MFU':>8}{'speed-up':>10}")
    for name, (ms, host) in median.items():
        rate = tokens / ms * 1e3
        mfu = flops * rate / peak if peak else None
        all_ms = [done for done, _ in times[name]]
        measured = {"ms": ms, "host_ms": host, "all_ms": all_ms, "tokens_per_second_per_rank": rate, "mfu": mfu}
        rows.append({"contender": name, **measured})
        shown = f"{100 * mfu:.1f}%" if mfu else "-"
        print(
            f"{name:<36}{ms:>9.1f}{host:>8.1f}{rate:>15,.0f}{flops * rate / 1e12:>9.1f}{shown:>8}{theirs / ms:>9.2f}x"
        )
    write_results(args, device, peak_source=source, flops_per_token=flops, results=rows)


if __name__ == "__main__":
    main()
