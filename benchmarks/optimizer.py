"""How long an optimizer's step takes, clipping included: PyTorch's AdamW, Carpool's, torchao's and bitsandbytes'.

    python -m benchmarks.optimizer --layers 12 --out optimizer.json
    python -m benchmarks.optimizer --layers 1 --scale 16 --steps 2                   # CPU: to see that it works

Parameters have the sizes of what one of four ranks holds of Qwen3-30B-A3B (128 experts, all ranks share all
parameters): `--layers` of its 48, with embeddings and output layer. All 48 in float32 take 122 GB. A step measures the
norm of all gradients, clips and updates. Contenders follow each other in turns, `--rounds` times, each with fresh
memory and two steps of warm-up.

    ms           median over all steps of all rounds
    host         until the host has asked for the step
    GB           that the update has to read and write once: weight, gradient, state; and the gradient once more for the
                 norm. Whoever passes over gradients again moves more
    of a copy    GB / ms, as a share of what `copy_` of 1 GiB reaches on this device in the same run
"""

from __future__ import annotations

import gc
import importlib.util
import math
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from typing import Any

import torch

from benchmarks.script import make_parser, show, write_results
from carpool.bench.timing import in_turns, medians
from carpool.metrics.host import Took, timed
from carpool.optim import AdamW
from carpool.optim.clip import clip_factor, clip_grad_norm, grad_norm

WARMUP, MAX_NORM = 2, 1.0
Step = Callable[[], None]


def shapes(layers: int, scale: int) -> Iterator[tuple[int, ...]]:
    """Of one rank's shards. `scale` divides all widths."""
    hidden, inner, heads, vocab, ranks = 2048 // scale, 768 // scale, 4096 // scale, 151_936 // scale, 4
    yield from [(vocab // ranks, hidden), (vocab // ranks, hidden), (hidden // ranks,)]
    for _ in range(layers):
        yield from [(128 // ranks, 2 * inner, hidden), (128 // ranks, hidden, inner), (128 // ranks, hidden)]
        yield from [(heads // ranks, hidden), (512 // scale // ranks, hidden), (512 // scale // ranks, hidden)]
        yield from [(hidden // ranks, heads), (hidden // ranks,), (hidden // ranks,), (32,), (32,)]


def torch_step(parameters: list[torch.nn.Parameter], **how: Any) -> Step:
    optimizer = torch.optim.AdamW(parameters, **how)

    def step() -> None:
        clip_grad_norm(parameters, MAX_NORM)
        optimizer.step()

    return step


def our_step(parameters: list[torch.nn.Parameter], **how: Any) -> Step:
    optimizer = AdamW(parameters, **how)

    def step() -> None:
        optimizer.step(factor=clip_factor(grad_norm(parameters), MAX_NORM))

    return step


def library_step(parameters: list[torch.nn.Parameter], name: str) -> Step:
    """An optimizer with 8-bit moments of another library."""
    if name == "torchao":
        from torchao.optim import AdamW8bit
    else:
        from bitsandbytes.optim import AdamW8bit
    optimizer = AdamW8bit(parameters)

    def step() -> None:
        clip_grad_norm(parameters, MAX_NORM)
        optimizer.step()

    return step


# By name: dtype of the parameters, bytes of a parameter's state, and what makes a step of them.
CONTENDERS: dict[str, tuple[torch.dtype, float, Callable[..., Step], dict[str, Any]]] = {
    "torch fused, float32": (torch.float32, 8, torch_step, {"fused": True}),
    "torch foreach, float32": (torch.float32, 8, torch_step, {"foreach": True}),
    "Carpool, float32": (torch.float32, 8, our_step, {}),
    "torch fused, bfloat16, no masters": (torch.bfloat16, 4, torch_step, {"fused": True}),
    "Carpool, bfloat16": (torch.bfloat16, 10, our_step, {}),
    "Carpool, bfloat16, moments bfloat16": (torch.bfloat16, 6, our_step, {"moments": "bfloat16"}),
    "Carpool, bfloat16, moments int8": (torch.bfloat16, 4 + 1 / 32, our_step, {"moments": "int8"}),
    "torchao, bfloat16, moments int8, no masters": (torch.bfloat16, 2 + 1 / 32, library_step, {"name": "torchao"}),
    "bitsandbytes, bfloat16, moments int8, no masters": (
        torch.bfloat16, 2 + 1 / 32, library_step, {"name": "bitsandbytes"},
    ),
}  # fmt: skip


def measure(name: str, sizes: list[tuple[int, ...]], steps: int, device: torch.device) -> list[Took]:
    """Of each step."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    dtype, _, make, how = CONTENDERS[name]
    torch.manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(size, device=device, dtype=dtype) * 0.02) for size in sizes]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    step = make(parameters, **how)
    return [timed(step, device) for _ in range(WARMUP + steps)][WARMUP:]


def copy_rate(device: torch.device) -> float:
    """Bytes per second, read and written."""
    source = torch.zeros(2**30 if device.type == "cuda" else 2**26, dtype=torch.uint8, device=device)
    target, times = torch.empty_like(source), []
    for _ in range(12):
        times.append(1e-3 * timed(lambda: target.copy_(source), device).ms)
    return 2 * source.numel() / statistics.median(times)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--layers", type=int, default=12, help="of 48 (default 12: 2.1 B parameters)")
    parser.add_argument("--scale", type=int, default=1, help="divides all widths")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help="contenders whose names contain this")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    sizes = list(shapes(args.layers, args.scale))
    numel = sum(map(math.prod, sizes))
    names = [
        name
        for name, (_, _, _, how) in CONTENDERS.items()
        if args.only in name and ("name" not in how or importlib.util.find_spec(how["name"]) is not None)
    ]
    rate = copy_rate(device)
    found = in_turns({name: partial(measure, name, sizes, args.steps, device) for name in names}, args.rounds)
    results = []
    for name in names:
        dtype, state, _, _ = CONTENDERS[name]
        size = torch.empty(0, dtype=dtype).element_size()
        moved = numel * (2 * size + 2 * size + 2 * state)  # the gradient is read twice and not written
        ms, host = medians(chain(*found[name]))
        results.append({"name": name, "ms": ms, "host_ms": host, "bytes": moved, "of_copy": moved / (ms / 1e3) / rate})
    show(
        f"a step of {numel / 1e9:.2f} B parameters in {len(sizes)} tensors; a copy: {rate / 1e9:,.0f} GB/s",
        ["", "ms", "host", "GB", "of a copy"],
        [
            [r["name"], f"{r['ms']:.2f}", f"{r['host_ms']:.2f}", f"{r['bytes'] / 1e9:.1f}", f"{r['of_copy']:.0%}"]
            for r in results
        ],
    )
    write_results(args, device, parameters=numel, copy_bytes_per_second=rate, results=results)


if __name__ == "__main__":
    main()
