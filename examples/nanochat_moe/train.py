"""Train the model of model.py for a given time, dense or with `carpool.MoE`, and record its loss by the clock.

    python examples/nanochat_moe/prepare.py FOLDER DATA
    python examples/nanochat_moe/train.py DATA runs/dense.json --minutes 8
    python examples/nanochat_moe/train.py DATA runs/moe.json --minutes 8 --experts 64 --top-k 8
    python examples/nanochat_moe/compare.py runs/dense.json runs/moe.json

Both variants read the same batches in the same order, from the same seed. They have the same optimizer (Muon for the
matrices of layers, each expert's by itself; AdamW for the rest) and nanochat's learning rates, which were tuned for its
dense models, but for one (`make_optimizer`). Parameters are bfloat16 with float32 masters, which `carpool.optim.Muon`
keeps.

The learning rate follows the clock, not the steps: it warms up in the first 10 % of the minutes, is constant, and falls
to a twentieth in the last half (warmup-stable-decay). So a variant whose steps take longer takes fewer of them, and its
schedule ends at the same time. The clock runs during steps. Compilation and evaluations are not counted.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from model import Config, Model

import carpool
from carpool.kernels.capture import Recorder
from carpool.optim import Muon
from carpool.optim.base import Matrices
from carpool.train.lr_schedules import warmup_stable_decay

WARM_UP, DECAY, MINIMUM = 0.1, 0.5, 0.05  # shares of the minutes, and of the peak learning rate
# nanochat's, for 524,288 tokens a step and a width of 768 (scripts/base_train.py, nanochat/gpt.py).
BATCH_OF_RATES, WIDTH_OF_RATES = 524_288, 768
PEAK_FLOPS = {"H100": 989e12, "H200": 989e12}  # dense bfloat16


def make_optimizer(model: Model, batch_tokens: int, weight_decay: float = 0.1) -> Muon:
    """Muon and AdamW. Each group has its peak as "peak"; rates grow with the square root of the batch.

    nanochat multiplies an orthogonal update of (rows, columns) by 0.02 max(1, rows / columns)^0.5, Carpool's Muon by
    0.2 lr max(rows, columns)^0.5. With lr = 0.1 / W^0.5 these are the same for matrices from W to at least W.

    The embedding's shares have a tenth of nanochat's rate. At that rate AdamW drove all of them in one direction, to
    2.8 within 80 steps, and layers no longer mattered: both variants then had the same loss (docs/log.md)."""
    width = model.config.width
    named = dict(model.named_parameters())
    matrices = {
        name: Matrices(stacked=weight.dim() == 3)
        for name, weight in named.items()
        if weight.dim() >= 2 and not name.endswith(("embedding.weight", "router.weight")) and name != "output.weight"
    }
    muon = Muon.groups([(name, named[name]) for name in matrices], weight_decay, matrices)[0]
    narrow = (width / WIDTH_OF_RATES) ** -0.5
    groups: list[dict[str, Any]] = [muon | {"peak": 0.1 / math.sqrt(width)}]

    def adamw(end: str, peak: float, betas: tuple[float, float], weight_decay: float = 0.0) -> None:
        found = [weight for name, weight in named.items() if name.endswith(end) and name not in matrices]
        if found:
            groups.append({"params": found, "peak": peak, "betas": betas, "eps": 1e-10, "weight_decay": weight_decay})

    adamw("output.weight", 0.008 * narrow, (0.8, 0.96), 0.01)
    adamw("value_embedding.weight", 0.15 * narrow, (0.8, 0.995), 0.01)
    embedding = [named["embedding.weight"]]
    groups.append({"params": embedding, "peak": 0.3 * narrow, "betas": (0.8, 0.995), "eps": 1e-10, "weight_decay": 0.0})
    adamw(".residual", 0.005, (0.8, 0.95))
    adamw(".embedding_share", 0.05, (0.96, 0.95))
    adamw("router.weight", 0.001, (0.9, 0.95))  # nanochat has none
    for group in groups:
        group["peak"] *= math.sqrt(batch_tokens / BATCH_OF_RATES)
        group["lr"] = group["peak"]
    assert sum(len(group["params"]) for group in groups) == len(named)
    return Muon(groups)


def share_of_peak(share: float) -> float:
    """The learning rate at a share of the minutes."""
    thousandths = min(1000, int(1000 * share) + 1)
    if thousandths <= 1000 * WARM_UP:
        return thousandths / (1000 * WARM_UP)
    return warmup_stable_decay(
        thousandths, int(1000 * WARM_UP), 1000, MINIMUM, num_decay_steps=DECAY, decay_type="linear"
    )


class Tokens:
    """Windows of tokens on a device; each window is visited once before any is visited again."""

    def __init__(self, path: Path, sequence: int, device: torch.device) -> None:
        self.tokens = torch.from_numpy(np.fromfile(path, dtype=np.uint16).astype(np.int32)).to(device)
        self.sequence, self.windows = sequence, (len(self.tokens) - 1) // sequence
        self.inside = torch.arange(sequence + 1, device=device)

    def batch(self, windows_B: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(tokens, the tokens that follow), (B, S) int64 each."""
        start_B1 = windows_B.to(self.tokens.device).unsqueeze(1) * self.sequence
        found = self.tokens[start_B1 + self.inside].long()
        return found[:, :-1].contiguous(), found[:, 1:].contiguous()

    def shuffled(self, windows_at_once: int, seed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Batches without end; a seed gives the same ones to everybody."""
        generator = torch.Generator().manual_seed(seed)
        order = torch.empty(0, dtype=torch.int64)
        while True:
            while len(order) < windows_at_once:
                order = torch.cat([order, torch.randperm(self.windows, generator=generator)])
            yield self.batch(order[:windows_at_once])
            order = order[windows_at_once:]


class Captured:
    """`work` of a micro-batch as a CUDA graph, which the host launches at once. An MoE layer is some hundred launches,
    and takes the host longer than the device unless micro-batches are large.

    Gradients must be there: the graph adds to them in place."""

    def __init__(
        self, work: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], tokens: torch.Tensor, target: torch.Tensor
    ) -> None:
        self.inputs, self.loss = (tokens.clone(), target.clone()), torch.zeros((), device=tokens.device)
        self.replay = Recorder().record(lambda: self.loss.copy_(work(*self.inputs)))

    def __call__(self, tokens: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """The loss, until the next call."""
        for static, given in zip(self.inputs, (tokens, target), strict=True):
            static.copy_(given)
        self.replay()
        return self.loss


class Clock:
    """Seconds of training."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.total, self.since = device, 0.0, 0.0

    def start(self) -> None:
        self._wait()
        self.since = time.perf_counter()

    def stop(self) -> float:
        """The seconds since `start`, which are added to the total."""
        self._wait()
        passed = time.perf_counter() - self.since
        self.total += passed
        return passed

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


@torch.no_grad()
def bits_per_byte(model: Model, tokens: Tokens, bytes_V: torch.Tensor, windows_at_once: int, most_tokens: int) -> float:
    """Of the first windows of the validation text. Targets without bytes (<|bos|>) are left out."""
    model.eval()
    nats = count = torch.zeros((), dtype=torch.float64, device=bytes_V.device)
    batches = max(1, min(tokens.windows, most_tokens // tokens.sequence) // windows_at_once)
    for first in range(0, batches * windows_at_once, windows_at_once):
        x, target = tokens.batch(torch.arange(first, first + windows_at_once) % tokens.windows)
        size_T = bytes_V[target.flatten()]
        nats = nats + (model(x, target) * (size_T > 0)).sum(dtype=torch.float64)
        count = count + size_T.sum()
    model.train()
    return float(nats / count) / math.log(2)


def compile_model(model: Model, how: str) -> None:
    """Compile in place, for fixed shapes.

    how: "model", all as one graph; "blocks", a graph for each kind of layer and one for the output layer, where routers
        cut the first; "around", the same, but `carpool.MoE` and its kernels run as they are, and only its shared expert
        is compiled; "none"."""
    if how == "model":
        model.compile(fullgraph=True, dynamic=False)
    elif how != "none":
        # Layers make their transport in their first forward, which the compiler would have to leave out.
        with torch.no_grad():
            model(*torch.zeros(2, 1, model.config.sequence, dtype=torch.int64, device=model.cos.device))
        for block in model.blocks:
            moe = block.mlp if isinstance(block.mlp, carpool.MoE) else None
            if how == "around" and moe is not None:
                if moe.shared is not None:
                    moe.shared.compile(dynamic=False, fullgraph=True)
                moe.forward = torch.compiler.disable(moe.forward)
            block.compile(dynamic=False, fullgraph=moe is None)
        model.losses = torch.compile(model.losses, dynamic=False, fullgraph=True)


def train(given: argparse.Namespace) -> dict[str, Any]:
    """Train; returns what is in the file that it writes again after every evaluation."""
    device = torch.device(given.device)
    data = json.loads((given.data / "data.json").read_text())
    config = Config(
        depth=given.depth, vocabulary=data["vocabulary"], sequence=given.sequence, experts=given.experts,
        top_k=given.top_k, shared=given.shared,
    )  # fmt: skip
    micro_tokens = given.device_batch * config.sequence
    accumulation = given.batch_tokens // micro_tokens
    if accumulation * micro_tokens != given.batch_tokens:
        raise SystemExit(
            f"--batch-tokens {given.batch_tokens} is no multiple of {micro_tokens} tokens of a micro-batch"
        )
    torch.manual_seed(given.seed)
    torch.set_float32_matmul_precision("high")
    if device.type == "cuda":
        torch.backends.cuda.enable_cudnn_sdp(given.attention == "cudnn")
        torch.backends.cuda.enable_flash_sdp(given.attention == "flash")
        torch.backends.cuda.enable_mem_efficient_sdp(False)
        torch.backends.cuda.enable_math_sdp(False)
    with torch.device(device):
        model = Model(config).narrow(torch.bfloat16 if device.type == "cuda" else torch.float32)
    moes = [block.mlp for block in model.blocks if isinstance(block.mlp, carpool.MoE)]
    if moes and given.compile == "model" and device.type == "cuda":
        raise SystemExit("--compile model: on a GPU routers are kernels outside of graphs; take around or blocks")
    compile_model(model, given.compile or ("around" if moes else "blocks"))
    optimizer = make_optimizer(model, given.batch_tokens)
    training = Tokens(given.data / "train.bin", config.sequence, device)
    validation = Tokens(given.data / "validation.bin", config.sequence, device)
    bytes_V = torch.tensor(data["bytes_of_token"], device=device)
    batches = training.shuffled(given.device_batch, given.seed)

    def evaluate() -> float:
        return bits_per_byte(model, validation, bytes_V, given.device_batch, given.evaluation_tokens)

    def forward_backward(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        loss = model(x, target).mean()
        (loss / accumulation).backward()
        return loss.detach()

    # Before the clock: compile everything, with an update whose factor is NaN and which therefore changes nothing.
    started, compute = time.perf_counter(), forward_backward
    example = training.batch(torch.arange(given.device_batch))
    for _ in range(2):
        forward_backward(*example)
    optimizer.step(factor=torch.full((), math.nan, device=device))
    optimizer.zero_grad(set_to_none=False)
    first = evaluate() if given.evaluations else math.nan
    if given.capture and device.type == "cuda":
        compute = Captured(forward_backward, *example)
    for moe in moes:
        moe.router.reset_counts()
        moe.stats(reset=True)
    gc.collect()
    gc.freeze()  # what a compiler leaves behind would be looked through again and again

    clock, budget, tokens = Clock(device), 60 * given.minutes, 0
    active, total = model.matrix_parameters()
    result: dict[str, Any] = {
        "config": asdict(config) | {"width": config.width},
        "settings": {name: value if not isinstance(value, Path) else value.name for name, value in vars(given).items()},
        "data": {name: data[name] for name in ("train", "validation")},
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "active_parameters": active,
        "parameters": total,
        "all_parameters": sum(p.numel() for p in model.parameters()),
        "seconds_to_compile": time.perf_counter() - started,
        "evaluations": [{"seconds": 0.0, "step": 0, "tokens": 0, "bits_per_byte": first}],
        "steps": [],
    }
    peak_flops = next((peak for name, peak in PEAK_FLOPS.items() if name in result["device"]), None)

    def write() -> None:
        steady = result["steps"][3:] or result["steps"]
        rate = given.batch_tokens * len(steady) / max(1e-9, sum(step["seconds"] for step in steady))
        result["tokens_per_second"] = rate if steady else 0.0
        for name, causal in (("mfu", True), ("mfu_nanochat", False)):
            result[name] = peak_flops and rate * model.flops_per_token(causal) / peak_flops
        result["training_seconds"], result["tokens"] = clock.total, tokens
        result["epochs"] = tokens / data["train"]["tokens"]
        if device.type == "cuda":
            result["peak_memory_gb"] = torch.cuda.max_memory_allocated(device) / 1e9
        if moes:
            loads = [torch.tensor(moe.stats().load_E, dtype=torch.float64) for moe in moes]
            result["worst_load"] = max(float(load.max() / load.mean()) for load in loads)  # max / mean
        given.out.parent.mkdir(parents=True, exist_ok=True)
        partial = given.out.with_suffix(".part")
        partial.write_text(json.dumps(result))
        partial.replace(given.out)

    write()
    try:
        while clock.total < budget and len(result["steps"]) < given.max_steps:
            rate = share_of_peak(clock.total / budget)
            for group in optimizer.param_groups:
                group["lr"] = group["peak"] * rate
            clock.start()
            loss = sum((compute(*next(batches)) for _ in range(accumulation)), torch.zeros((), device=device))
            optimizer.step(zero_grads=True)
            for moe in moes:
                moe.update_bias()
            seconds = clock.stop()
            tokens += given.batch_tokens
            result["steps"].append({"seconds": seconds, "loss": float(loss) / accumulation})
            if clock.total >= budget * len(result["evaluations"]) / max(1, given.evaluations):
                found = {"seconds": clock.total, "step": len(result["steps"]), "tokens": tokens}
                result["evaluations"].append(found | {"bits_per_byte": evaluate() if given.evaluations else None})
                write()
                print(
                    f"{given.out.stem}: {clock.total:6.1f} s  step {found['step']:4d}  "
                    f"loss {float(loss) / accumulation:.4f}  "
                    f"bits/byte {result['evaluations'][-1]['bits_per_byte'] or math.nan:.4f}  "
                    f"{result['tokens_per_second']:,.0f} tokens/s  MFU {100 * (result['mfu'] or 0):.1f} %",
                    flush=True,
                )
    except KeyboardInterrupt:
        result["interrupted"] = True
    finally:
        gc.unfreeze()
    write()
    return result


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="what prepare.py wrote")
    parser.add_argument("out", type=Path, help="JSON file to write")
    parser.add_argument("--minutes", type=float, default=10.0, help="of training")
    parser.add_argument("--max-steps", type=int, default=10**9)
    parser.add_argument("--depth", type=int, default=18)
    parser.add_argument("--sequence", type=int, default=2048)
    parser.add_argument("--experts", type=int, default=0, help="routed experts of a layer; 0: dense MLPs")
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--shared", type=int, default=1, help="shared experts of a layer")
    parser.add_argument("--batch-tokens", type=int, default=262_144, help="of a step")
    parser.add_argument("--device-batch", type=int, default=32, help="sequences of a micro-batch")
    parser.add_argument("--evaluations", type=int, default=20, help="in the whole time; 0: none")
    parser.add_argument("--evaluation-tokens", type=int, default=524_288)
    parser.add_argument(
        "--compile", choices=["model", "blocks", "around", "none"], help="default: blocks; around with experts"
    )
    parser.add_argument("--capture", action="store_true", help="micro-batches as CUDA graphs, which was not measured")
    parser.add_argument("--attention", choices=["cudnn", "flash"], default="cudnn")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seed", type=int, default=0)
    return parser


def main() -> None:
    parser = arguments()
    given = parser.parse_args()
    if lacking := [name for name in ("data.json", "train.bin", "validation.bin") if not (given.data / name).is_file()]:
        parser.error(f"{given.data} has no {lacking[0]}: write it by `prepare.py FOLDER {given.data}`")
    if given.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error("there is no GPU: add --device cpu --compile none, and sizes for a CPU (README.md)")
    train(given)


if __name__ == "__main__":
    main()
