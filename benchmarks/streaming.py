"""What streaming from host memory costs a step: GB/s of the copies, and the share of them that is hidden.

    python -m benchmarks.streaming --layers 24 --hidden 4096 --out streaming.json
    python -m benchmarks.streaming --layers 3 --hidden 64 --tokens 32 --steps 2          # CPU: to see that it works

A stack of square bfloat16 layers, one matrix product each, is trained with gradients that are consumed in the backward,
at several numbers of tokens in a step. Three ways follow each other in turns, `--rounds` times:

    device     state on the device
    consumed   state in host memory, each parameter updated in the backward
    after      state in host memory, all parameters updated after the backward, as with clipping

    GB/s       bytes of state in and out, by the time that the optimizer's step takes alone
    hidden     1 - (step - step with state on the device) / time of the optimizer's step alone
    foretold   tokens from which `carpool.planner.step.lengths` says that all is hidden in the backward
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks.script import make_parser, show, write_results
from carpool.bench.timing import in_turns
from carpool.metrics.host import device_name, timed
from carpool.optim import AdamW
from carpool.optim.in_backward import ConsumedGradients
from carpool.planner.machine.hardware import hardware_of
from carpool.planner.step.lengths import break_even_tokens

WAYS = ("device", "consumed", "after")
WARMUP = 2


def seconds(work: Callable[[], object], steps: int, device: torch.device) -> float:
    """Median of a step, with all copies done."""
    found = []
    for _ in range(WARMUP + steps):
        found.append(1e-3 * timed(work, device).ms)
    return statistics.median(found[WARMUP:])


class Stack:
    """Layers and what trains them. `way`: of `WAYS`."""

    def __init__(self, way: str, args: Any, device: torch.device) -> None:
        torch.manual_seed(0)
        layers = [nn.Linear(args.hidden, args.hidden, bias=False) for _ in range(args.layers)]
        self.model = nn.Sequential(*layers).to(device, torch.bfloat16)
        self.optimizer = AdamW(self.model.parameters(), moments=args.moments, offload=way != "device")
        self.consumed = None if way == "after" else ConsumedGradients(self.model, self.optimizer)
        self._fine = torch.ones((), dtype=torch.bool, device=device)

    def step(self, x_TH: torch.Tensor) -> None:
        loss = self.model(x_TH).square().mean()
        if self.consumed is None:
            loss.backward()
            self.update()
            self.model.zero_grad(set_to_none=True)
        else:
            self.consumed.begin(self._fine)
            loss.backward()
            self.consumed.finish()

    def update(self) -> None:
        """The optimizer's step alone."""
        for parameter in self.model.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        self.optimizer.step()


def measure(way: str, args: Any, tokens: int, device: torch.device) -> dict[str, float]:
    """Seconds of a step, and of its update alone; bytes that an update moves."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    stack = Stack(way, args, device)
    x_TH = torch.randn(tokens, args.hidden, device=device, dtype=torch.bfloat16)
    found = {"step": seconds(lambda: stack.step(x_TH), args.steps, device)}
    before = sum(stack.optimizer.streamed_bytes)
    found["update"] = seconds(stack.update, args.steps, device)
    found["bytes"] = (sum(stack.optimizer.streamed_bytes) - before) / (args.steps + WARMUP)
    return found


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 32768, 65536], help="of a step")
    parser.add_argument("--moments", choices=["float32", "bfloat16", "int8"], default="int8")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    ways = {(tokens, way): partial(measure, way, args, tokens, device) for tokens in args.tokens for way in WAYS}
    found = in_turns(ways, args.rounds)
    results, rows = [], []
    for tokens in args.tokens:
        plain = statistics.median(one["step"] for one in found[tokens, "device"])
        for way in WAYS[1:]:
            step, update, size = (
                statistics.median(one[key] for one in found[tokens, way]) for key in ("step", "update", "bytes")
            )
            result = {"tokens": tokens, "way": way, "step": step, "device_step": plain, "update": update}
            result |= {"bytes_per_second": size / update, "hidden": 1 - (step - plain) / update}
            results.append(result)
            numbers = f"{1e3 * plain:.1f}", f"{1e3 * step:.1f}", f"{1e3 * update:.1f}", f"{size / update / 1e9:.1f}"
            rows.append([f"{tokens:,}", way, *numbers, f"{result['hidden']:.0%}"])
    parameters = args.layers * args.hidden**2
    # What a step's copies carry in one direction.
    state = statistics.median(one["bytes"] for one in found[args.tokens[0], "consumed"]) / 2
    tokens = break_even_tokens(state, 6 * parameters, hardware_of(device_name(device)))
    title = (
        f"{parameters / 1e6:,.0f} M parameters, moments in {args.moments}; foretold: hidden from {tokens:,.0f} tokens"
    )
    columns = ["tokens", "", "ms, state on device", "ms", "update alone", "GB/s", "hidden"]
    show(title, columns, rows)
    write_results(args, device, parameters=parameters, foretold_tokens=tokens, results=results)


if __name__ == "__main__":
    main()
