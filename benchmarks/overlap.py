"""How much of the ride is hidden: a stack of decoder layers, forward and backward, under each schedule.

    torchrun --nproc-per-node 4 -m benchmarks.overlap --model olmoe --out overlap.json
    torchrun ... -m benchmarks.overlap --model olmoe --transport dedup        # rides over NCCL, as between nodes

A stack of `--layers` layers with the sizes of OLMoE-1B-7B, Qwen3-30B-A3B, or DeepSeek-V3 cut to fit (fewer experts of
its size), untrained, FSDP over all ranks with EP over all ranks, bf16, sdpa, a head for 512 tokens; no embedding, no
optimizer. Contenders take turns step by step:

    none           the plain ride, on the computation's stream
    chunks=1       the same on a stream of its own: hides the backward's combine behind a weight gradient
    chunks=R       and the tokens in R chunks
    tiles=N        experts begin on rows that have arrived, in N parts (nvlink)
    two-batch      two halves of the batch half a layer apart
    nothing        no ride: each rank computes on its own tokens, as many pairs (not the model's function)
    in two         the plain ride on two halves one after the other, which is what two-batch computes
    nothing in two

Milliseconds are of the slowest rank, median over steps.

    exposed      what the ride adds to the step without one (of two-batch: without one and in two halves), of the step
    of perfect   max(computation, communication) / ms, where communication is what the plain ride adds; in halves the
                 same of "in two"
    host         how long the host took to ask for the step's work: where it is nearly all of the step, the GPU waits
                 for the host, and what is exposed says little (`--compile` compiles each layer, which takes less)

Rows of the ride without schedule are compared with the scheduled ones before anything is timed: outputs, and gradients
of the stack's input.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from transformers.distributed import DistributedConfig

from benchmarks.script import check_arenas, join_group, make_parser, show, write_results
from carpool.bench.timing import in_turns, medians
from carpool.hf import rides
from carpool.hf.build_model import build_model
from carpool.hf.weights.model_config import make_config
from carpool.metrics.counters import Traffic
from carpool.metrics.host import Took, timed
from carpool.ride.schedule import Schedule
from carpool.ride.two_batch import TwoBatch
from carpool.transport import NVLinkOptions
from carpool.transport.local import Local, LocalRoute

WARMUP = 2
VOCABULARY = {"vocab_size": 512, "bos_token_id": None, "pad_token_id": None, "eos_token_id": 0}
# Type and sizes.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "olmoe": ("olmoe", {"hidden_size": 2048, "intermediate_size": 1024, "num_attention_heads": 16,
                        "num_key_value_heads": 16, "num_experts": 64, "num_experts_per_tok": 8}),
    "qwen3": ("qwen3_moe", {"hidden_size": 2048, "moe_intermediate_size": 768, "intermediate_size": 6144,
                            "num_attention_heads": 32, "num_key_value_heads": 4, "num_experts": 128,
                            "num_experts_per_tok": 8, "decoder_sparse_step": 1, "head_dim": 128}),
    "deepseek": ("qwen3_moe", {"hidden_size": 7168, "moe_intermediate_size": 2048, "intermediate_size": 18432,
                               "num_attention_heads": 56, "num_key_value_heads": 8, "num_experts": 32,
                               "num_experts_per_tok": 8, "decoder_sparse_step": 1, "head_dim": 128}),
    "tiny": ("olmoe", {"hidden_size": 64, "intermediate_size": 32, "num_attention_heads": 4,
                       "num_key_value_heads": 4, "num_experts": 8, "num_experts_per_tok": 2}),
}  # fmt: skip


def make_stack_parser(doc: str | None) -> argparse.ArgumentParser:
    """The options of a benchmark of one of `MODELS`."""
    parser = make_parser(doc)
    parser.add_argument("--model", choices=MODELS, default="olmoe")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--batch", type=int, default=2, help="sequences per rank")
    parser.add_argument("--sequence", type=int, default=4096)
    parser.add_argument("--transport", default="nvlink")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--arena-gib", type=float, default=12.0)
    return parser


def make_stack(args: argparse.Namespace, device: torch.device, mixed: bool) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """The model, this rank's input, and the gradient of its output, to the precision of the device.

    Args:
        mixed: parameters and reductions in float32, as `carpool train` has them.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    kind, sizes = MODELS[args.model]
    sizes = {**sizes, **VOCABULARY, "num_hidden_layers": args.layers, "max_position_embeddings": args.sequence}
    config = make_config(kind, sizes)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    own = torch.float32 if mixed else dtype
    mesh = DistributedConfig(
        fsdp_size=world, ep_size=world, ep_implementation="carpool", fsdp_mixed_precision=own != dtype
    )
    model = build_model(config, distributed_config=mesh, dtype=own, seed=0, attn_implementation="sdpa")
    torch.manual_seed(1 + rank)
    shape = args.batch, args.sequence
    x = torch.randn(*shape, config.hidden_size, device=device, dtype=dtype).requires_grad_()
    return model, x, torch.randn(*shape, config.vocab_size, device=device, dtype=dtype) / 64


class Nothing(Local):
    """Each rank keeps its tokens; an expert of another rank is computed by the own one in the same place."""

    def __init__(self, slots_per_rank: int) -> None:
        self.slots_per_rank = slots_per_rank

    def plan(self, slot_TK: torch.Tensor, weight_TK: torch.Tensor, traffic: Traffic) -> LocalRoute:
        own_TK = torch.where(slot_TK < 0, slot_TK, slot_TK % self.slots_per_rank).int()
        # Nothing travels, so nothing is counted.
        return super().plan(own_TK, weight_TK, Traffic(1, 0))


@dataclass(frozen=True)
class Contender:
    transport: str
    schedule: Schedule = Schedule()  # noqa: RUF009  # frozen
    ctas: int = 16
    halves: bool = False


def contenders(args: argparse.Namespace) -> dict[str, Contender]:
    found = {"none": Contender(args.transport)}
    if args.transport == "nvlink":
        found["chunks=1"] = Contender(args.transport, Schedule("chunks"))
    for chunks in args.chunks:
        for ctas in args.ctas:
            name = f"chunks={chunks}" + (f", {ctas} CTAs" if len(args.ctas) > 1 else "")
            found[name] = Contender(args.transport, Schedule("chunks", chunks), ctas)
    if args.transport == "nvlink":
        found |= {f"tiles={n}": Contender(args.transport, Schedule("tiles", n), args.ctas[0]) for n in args.tiles}
    found["nothing"] = Contender("nothing")
    if args.batch >= 2:
        found["two-batch"] = Contender(args.transport, Schedule("two-batch"), args.ctas[0])
        found["in two"] = Contender(args.transport, halves=True)
        found["nothing in two"] = Contender("nothing", halves=True)
    return {name: found[name] for name in args.contenders or found}


def prepare(model: torch.nn.Module, contender: Contender, args: argparse.Namespace) -> None:
    """Let the model's layers ride as the contender does."""
    for own in rides(model).values():
        own.set_schedule(contender.schedule)
        if contender.transport == "nothing":
            own.transport = Nothing(own.layout.slots_per_rank)
            own.requested = "nothing"
            continue
        options = NVLinkOptions(
            max_tokens=args.batch * args.sequence,
            arena_bytes=int(args.arena_gib * 2**30),
            dispatch_ctas=contender.ctas,
            combine_ctas=contender.ctas,
        )
        if (own.requested, own.options) != (contender.transport, options):
            own.set_transport(contender.transport, options)


def main() -> None:
    parser = make_stack_parser(__doc__)
    parser.add_argument("--chunks", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--tiles", type=int, nargs="*", default=[4], help="parts of the tiles' rides")
    parser.add_argument("--ctas", type=int, nargs="+", default=[8], help="of scheduled rides over nvlink")
    parser.add_argument("--contenders", nargs="+", default=None, help="some of the above; default: all")
    parser.add_argument("--compile", action="store_true", help="compile each decoder layer")
    args = parser.parse_args()

    device = join_group()
    model, x, dy = make_stack(args, device, mixed=False)
    halves = [part.detach().requires_grad_() for part in x.tensor_split(2)]
    if args.compile:
        # One variant for each contender.
        torch._dynamo.config.recompile_limit = 64
        for layer in model.model.layers:
            layer.forward = torch.compile(layer.forward)
    two_batch = TwoBatch(model)

    def loss(x: torch.Tensor, dy: torch.Tensor, outputs: list[torch.Tensor]) -> torch.Tensor:
        y = model(inputs_embeds=x, use_cache=False).logits
        outputs.append(y.detach())
        return (y * dy).sum()

    def step(contender: Contender) -> tuple[torch.Tensor, torch.Tensor]:
        """The outputs, and the gradient of the input."""
        outputs: list[torch.Tensor] = []
        ways = [partial(loss, *part, outputs) for part in zip(halves, dy.tensor_split(2), strict=True)]
        if contender.schedule.name == "two-batch":
            own = next(iter(rides(model).values()))
            two_batch.backward(ways, own.transport.processors if own.transport is not None else 0)
        else:
            for way in ways if contender.halves else [partial(loss, x, dy, outputs)]:
                way().backward()
        inputs = halves if contender.halves or contender.schedule.name == "two-batch" else [x]
        return torch.cat(outputs), torch.cat([part.grad for part in inputs if part.grad is not None])

    def clear() -> None:
        for one in (x, *halves):
            one.grad = None
        model.zero_grad(set_to_none=True)

    def once(contender: Contender) -> Took:
        prepare(model, contender, args)
        clear()
        return timed(partial(step, contender), device)

    names = contenders(args)
    plain: tuple[torch.Tensor, torch.Tensor] | None = None
    for name, contender in names.items():
        once(contender)
        clear()
        answer = step(contender)
        plain = answer if plain is None else plain
        if dist.get_rank() == 0 and contender.transport != "nothing":
            worst = [float((a - b).abs().max() / b.abs().max()) for a, b in zip(answer, plain, strict=True)]
            print(f"{name}: output off by {worst[0]:.1e}, input gradient by {worst[1]:.1e}", flush=True)
    del plain, answer
    times = in_turns({name: partial(once, one) for name, one in names.items()}, args.steps, WARMUP)
    check_arenas(model)
    report(args, times, device)
    dist.destroy_process_group()


def report(args: argparse.Namespace, times: Mapping[str, Sequence[Took]], device: torch.device) -> None:
    median = {name: medians(values) for name, values in times.items()}
    rows, cells = [], []
    for name, (ms, host) in median.items():
        plain, bare = ("in two", "nothing in two") if "two" in name else ("none", "nothing")
        exposed = perfect = None
        if plain in median and bare in median:
            none, nothing = median[plain][0], median[bare][0]
            exposed, perfect = (ms - nothing) / ms, max(nothing, none - nothing) / ms
        against = median["none"][0] / ms if "none" in median else None
        shares = ("-" if share is None else f"{share:.1%}" for share in (exposed, perfect, against))
        cells.append([name, f"{ms:.2f}", f"{host:.2f}", *shares])
        row = {"schedule": name, "ms": ms, "host_ms": host, "exposed": exposed, "of_perfect": perfect}
        rows.append({**row, "all_ms": times[name]})
    title = f"{args.model}, {args.layers} layers, {args.batch} x {args.sequence} tokens a rank, {args.transport}"
    columns = ["schedule", "ms", "host", "exposed", "of perfect", "against none"]
    show(title + (", compiled" if args.compile else ""), columns, cells)
    write_results(args, device, results=rows)


if __name__ == "__main__":
    main()
