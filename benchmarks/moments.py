"""Loss curves of AdamW with moments in fewer bits, against float32's: the same model, batches and steps.

    python -m benchmarks.moments --steps 500 --work work --out moments.json

Trains the demo's model on one rank (`carpool train`, AdamW of `carpool.optim`), once for each contender. The
first one, float32 throughout, runs a second time with another seed of the initial weights and of the order of the data,
which says what a difference means.

    loss         mean over the last 50 steps, and held out after the last one
    furthest     largest difference from the first contender's training loss, in means of 50 steps
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.script import make_parser, show, write_results

SPAN = 50
# By name: settings of `carpool train`.
CONTENDERS = {
    "float32": ["training.optimizer=one-pass"],
    "float32, another seed": ["training.optimizer=one-pass", "training.seed=1"],
    "float32, moments int8": ["training.optimizer_state_dtype=int8"],
    "bfloat16": ["model.dtype=bfloat16"],
    "bfloat16, moments int8": ["model.dtype=bfloat16", "training.optimizer_state_dtype=int8"],
}
# What each is beside, and nothing else happens in it.
ALONE = [
    "parallelism.num_ranks=1",
    "training.save_pretrained=false",
    "training.save_steps=none",
    "training.eval_steps=none",
]


def losses(folder: Path, settings: list[str], steps: int) -> tuple[list[float], float]:
    """Of each step, and held out after the last one. A run that is there already is read."""
    command = [sys.executable, "-m", "carpool", "train", *settings, f"training.output_dir={folder}"]
    command += [f"training.max_steps={steps}", *ALONE]
    if not (folder / "summary.json").exists():
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    train = [line["loss"] for line in lines if line["kind"] == "train"]
    return train, [line["loss"] for line in lines if line["kind"] == "eval"][-1]


def means(curve: list[float]) -> list[float]:
    return [sum(curve[i : i + SPAN]) / len(curve[i : i + SPAN]) for i in range(0, len(curve), SPAN)]


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--work", type=Path, required=True, help="folder for the runs")
    args = parser.parse_args()
    results: list[dict[str, Any]] = []
    for number, (name, settings) in enumerate(CONTENDERS.items()):
        curve, held_out = losses(args.work / f"moments-{number}", settings, args.steps)
        first = results[0]["loss"] if results else means(curve)
        furthest = max(abs(a - b) for a, b in zip(means(curve), first, strict=True))
        results.append({"name": name, "loss": means(curve), "held_out": held_out, "furthest": furthest})
    show(
        f"the demo's model, {args.steps} steps, one rank",
        ["", "loss", "held out", "furthest"],
        [[r["name"], f"{r['loss'][-1]:.4f}", f"{r['held_out']:.4f}", f"{r['furthest']:.4f}"] for r in results],
    )
    write_results(args, torch.device("cpu"), results=results)


if __name__ == "__main__":
    main()
