"""Compare runs of train.py: speed, and the time to equal loss.

    python examples/nanochat_moe/compare.py runs/dense.json runs/moe.json --plot runs/loss.png

The first run is the reference. "to its loss" is the training time after which another run had the loss that the
reference had at its end, between two evaluations along a straight line. Both learning rates fall in the last half of
the same minutes, so a run that gets there early has not finished its decay.
"""

from __future__ import annotations

import argparse
import itertools
import json
from pathlib import Path
from typing import Any


def seconds_to(run: dict[str, Any], bits_per_byte: float) -> float | None:
    """Seconds of training until the validation loss is this low; None: it never is."""
    for before, after in itertools.pairwise(run["evaluations"]):
        if after["bits_per_byte"] <= bits_per_byte:
            share = (before["bits_per_byte"] - bits_per_byte) / (before["bits_per_byte"] - after["bits_per_byte"])
            return before["seconds"] + share * (after["seconds"] - before["seconds"])
    return None


def describe(run: dict[str, Any]) -> str:
    config = run["config"]
    if not config["experts"]:
        return "dense"
    shared = f" + {config['shared']}" if config["shared"] else ""
    return f"MoE, {config['experts']} experts, {config['top_k']}{shared} for each token"


def table(runs: list[dict[str, Any]]) -> str:
    """In Markdown, a row for each run."""
    reference = runs[0]["evaluations"][-1]["bits_per_byte"]
    lines = [
        "| MLPs | matrix parameters, active / all | tokens/s | MFU | peak memory | steps | tokens | bits per byte "
        "| to its loss |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for run in runs:
        seconds = seconds_to(run, reference)
        mfu = "" if run["mfu"] is None else f"{100 * run['mfu']:.1f} % ({100 * run['mfu_nanochat']:.1f})"
        memory = f"{run['peak_memory_gb']:.0f} GB" if "peak_memory_gb" in run else ""
        lines.append(
            f"| {describe(run)} | {run['active_parameters'] / 1e6:.0f} M / {run['parameters'] / 1e6:.0f} M "
            f"| {run['tokens_per_second']:,.0f} | {mfu} | {memory} | {len(run['steps'])} | {run['tokens'] / 1e6:.1f} M "
            f"| {run['evaluations'][-1]['bits_per_byte']:.4f} | {'never' if seconds is None else f'{seconds:.0f} s'} |"
        )
    first = runs[0]
    lines.append(
        f"\n{first['training_seconds']:.0f} s of training each on one {first['device']}, PyTorch {first['torch']}; MFU "
        "with causal attention at half, in brackets by nanochat's formula, which counts all of it."
    )
    return "\n".join(lines)


def plot(runs: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (by_time, by_tokens) = pyplot.subplots(1, 2, figsize=(10, 4), sharey=True)
    for run in runs:
        found = run["evaluations"][1:]
        loss = [one["bits_per_byte"] for one in found]
        by_time.plot([one["seconds"] for one in found], loss, marker=".", label=describe(run))
        by_tokens.plot([one["tokens"] / 1e6 for one in found], loss, marker=".")
    by_time.set(xlabel="seconds of training", ylabel="validation loss, bits per byte")
    by_tokens.set(xlabel="million tokens")
    by_time.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=150)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", help="JSON files of train.py; the first is the reference")
    parser.add_argument("--plot", type=Path, help="PNG to write; needs matplotlib")
    given = parser.parse_args(arguments)
    if lacking := [path for path in given.runs if not path.is_file()]:
        parser.error(f"there is no file {lacking[0]}: train.py writes it with its first evaluation")
    if given.plot and not given.plot.absolute().parent.is_dir():
        parser.error(f"--plot {given.plot}: there is no folder {given.plot.parent}")
    runs = []
    for path in given.runs:
        try:
            runs.append(json.loads(path.read_text()))
            table(runs[-1:])
        except (ValueError, LookupError, TypeError):
            parser.error(f"{path} is not what train.py writes: name a run's JSON file, after its first evaluation")
    print(table(runs))
    if given.plot:
        plot(runs, given.plot)


if __name__ == "__main__":
    main()
