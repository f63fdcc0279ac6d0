"""What FP8 experts cost in loss: the demo on the source code of the standard library, experts in bf16 and in FP8.

    python -m benchmarks.fp8_loss --out docs/measurements/fp8_loss.json --plot docs/measurements/fp8_loss.png

One process, one GPU (or the CPU, slowly). Initial weights, batches and learning rates are the same; everything outside
the experts computes in bf16 for both. The held-out loss is taken now and then, on the same sequences. `--set` changes
the demo's configuration as `carpool train` does; its defaults here are 600 steps of 8 sequences, as the demo's 4 ranks
see them together.

`--repeat` trains in bf16 once more from another seed of the weights' and the data's order: how far apart two runs are
that differ in nothing that matters.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import torch

from carpool.bench.script import make_parser, write_results
from carpool.hf import install, set_experts
from carpool.hf.build import build_model
from carpool.parallel.clip import clip_grad_norm
from carpool.train.config import load_config
from carpool.train.config.schema import Config
from carpool.train.data.corpus import prepare
from carpool.train.data.loader import EvalLoader, TokenMean, TrainLoader, count_targets
from carpool.train.data.tokenizer import load_tokenizer
from carpool.train.run.model import model_source, top_k_of
from carpool.train.run.step import Batch, Objective, learning_rate, make_optimizer

DEFAULTS = ["training.max_steps=600", "training.per_device_train_batch_size=8", "training.eval_steps=100"]


def train(config: Config, experts: str, device: torch.device) -> dict[str, Any]:
    """Losses of one run: of every step, and held out as (step, loss)."""
    training, data = config.training, config.data
    tokenizer = load_tokenizer(data.tokenizer, config.model.path, data.eos_token)
    corpus = prepare(data, tokenizer, build=True, barrier=lambda: None)
    share = {"sequence_length": data.sequence_length, "dp_rank": 0, "dp_size": 1}
    loader = iter(
        TrainLoader(
            corpus.train,
            fingerprint=corpus.fingerprint,
            batch_size=training.per_device_train_batch_size,
            accumulation=training.gradient_accumulation_steps,
            seed=training.seed,
            **share,
        )
    )
    held_out = EvalLoader(
        corpus.eval,
        batch_size=training.per_device_eval_batch_size,
        max_sequences=data.eval_max_sequences,
        pad_id=tokenizer.eos_id,
        **share,
    )
    model = build_model(
        model_source(config, tokenizer), distributed_config=None, dtype=torch.float32, seed=training.seed
    ).to(device)
    install(model)
    lossy = set_experts(model, experts)
    objective = Objective(
        model,
        top_k=top_k_of(model),
        aux_coef=getattr(model.config, "router_aux_loss_coef", 0.0) or 0.0,
        dp_size=1,
        autocast=torch.bfloat16,
    )
    optimizer = make_optimizer(model, training)

    def evaluate() -> float:
        mean = TokenMean()
        model.eval()
        with torch.no_grad():
            for batch in held_out:
                batch = to_device(batch, device)
                targets = count_targets(batch["labels"])
                mean.add(objective.forward(batch)[0] / max(1, targets), targets)
        model.train()
        return mean.value(lambda sums: None)[0]

    losses: list[float] = []
    evals: list[tuple[int, float]] = []
    for step in range(1, training.max_steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, training)
        losses.append(objective.backward([to_device(batch, device) for batch in next(loader)]).loss)
        clip_grad_norm(model.parameters(), training.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step == training.max_steps or (training.eval_steps and step % training.eval_steps == 0):
            evals.append((step, evaluate()))
            print(f"{experts}: step {step}: loss {losses[-1]:.4f}, held out {evals[-1][1]:.4f}", flush=True)
    return {"experts": experts, "seed": training.seed, "lossy_reasons": lossy, "loss": losses, "held_out": evals}


def to_device(batch: Batch, device: torch.device) -> Batch:
    return {name: value.to(device) for name, value in batch.items()}


def summary(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of each run: the mean loss of its last steps, what was held out, and by how much they exceed the first run's."""
    last = max(1, len(runs[0]["loss"]) // 10)
    means = [statistics.fmean(run["loss"][-last:]) for run in runs]
    held_out = [run["held_out"][-1][1] for run in runs]
    return [
        {
            "experts": run["experts"],
            "seed": run["seed"],
            "steps": len(run["loss"]),
            "loss": mean,
            "held_out": held,
            "loss_above_first": mean / means[0] - 1,
            "held_out_above_first": held / held_out[0] - 1,
        }
        for run, mean, held in zip(runs, means, held_out, strict=True)
    ]


def plot(runs: list[dict[str, Any]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    curve, difference = figure.subplots(1, 2)
    colors = ("#0072B2", "#D55E00", "#999999")  # of Okabe and Ito, told apart by colour-blind readers
    width = max(1, len(runs[0]["loss"]) // 30)

    def smooth(values: list[float]) -> tuple[list[int], list[float]]:
        ends = range(width, len(values) + 1)
        return list(ends), [statistics.fmean(values[end - width : end]) for end in ends]

    for run, color in zip(runs, colors, strict=False):
        name = f"{'bf16' if run['experts'] == 'auto' else run['experts']}, seed {run['seed']}"
        curve.plot(*smooth(run["loss"]), color=color, label=name)
        curve.plot(*zip(*run["held_out"], strict=True), "o", color=color, markersize=4)
        if run is not runs[0]:
            relative = [100 * (own / first - 1) for own, first in zip(run["loss"], runs[0]["loss"], strict=True)]
            difference.plot(*smooth(relative), color=color, label=f"{name} against the first")
    curve.set(xlabel="step", ylabel=f"loss (mean of {width} steps); dots: held out", title="Loss")
    difference.axhline(0, color="0.6", linewidth=0.8)
    difference.set(xlabel="step", ylabel="difference, %", title="Difference of loss")
    for axes in (curve, difference):
        axes.legend(fontsize="small")
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="as for carpool train")
    parser.add_argument("--repeat", action="store_true", help="also bf16 from another seed")
    parser.add_argument("--plot", type=Path, default=None, help="PNG; needs matplotlib")
    args = parser.parse_args()

    config = load_config(None, [*DEFAULTS, *args.set])
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    runs = [train(config, experts, device) for experts in ("auto", "fp8")]
    if args.repeat:
        other = config.training.model_copy(update={"seed": config.training.seed + 1})
        runs.append(train(config.model_copy(update={"training": other}), "auto", device))
    rows = summary(runs)
    print(f"\n{'experts':<10}{'seed':>5}{'loss':>10}{'held out':>10}{'loss, %':>10}{'held out, %':>13}")
    for row in rows:
        above = f"{100 * row['loss_above_first']:>+10.2f}{100 * row['held_out_above_first']:>+13.2f}"
        print(f"{row['experts']:<10}{row['seed']:>5}{row['loss']:>10.4f}{row['held_out']:>10.4f}{above}")
    write_results({**config.model_dump(mode="json"), "out": args.out}, device, summary=rows, runs=runs)
    if args.plot:
        plot(runs, args.plot)


if __name__ == "__main__":
    main()
