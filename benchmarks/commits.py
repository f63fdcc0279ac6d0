"""Is this tree as fast as another one? The same benchmarks from both, in turns, on one machine in one run.

    git worktree add /tmp/old COMMIT
    python -m benchmarks.commits --old /tmp/old --out commits.json

Four benchmarks: transports, experts and layers as `carpool bench` measures them, and steps of OLMoE's shape, 6 layers,
by `carpool train`. Each runs as processes of its own, in the order old, new, new, old (`--rounds 2`), so that a machine
that warms up or slows down favours neither. Of each time the best of a tree's runs counts. The ratio is old / new: 1.02
means that this tree takes 2 % less time. Rows of transformers' own layers are the same code in both trees, so their
ratio shows the noise.

Times that only one of the trees has (a renamed row, a new contender) are listed, and not compared.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from carpool.train.run.environment import environment

NEW = Path(__file__).resolve().parents[1]
# Device times decide; host times are shown, because a step can wait for the host.
DEVICE_KEYS, HOST_KEYS = ("us_median", "ms_median", "ms"), ("host_us", "host_ms")
IDENTITY = ("label", "contender", "name", "routing", "mode", "shape")


# The sizes of OLMoE-1B-7B with 6 of its 16 layers, by keys that every commit takes.
OLMOE = [
    "model.model_type=olmoe", *(
        f"model.config.{key}={value}"
        for key, value in {
            "hidden_size": 2048, "intermediate_size": 1024, "num_hidden_layers": 6, "num_attention_heads": 16,
            "num_key_value_heads": 16, "num_experts": 64, "num_experts_per_tok": 8,
        }.items()
    ),
]  # fmt: skip
# Steps of a run that count, and those before.
STEPS, WARM_UP = 15, 5


def benchmark_commands(ranks: int, quick: bool, brief: bool = False) -> dict[str, list[str]]:
    """The arguments of Python for each benchmark, without the one that says where its JSON goes."""
    bench = ["-m", "carpool.cli", "bench"]
    if quick:
        small = ["--shape", "64,64,64,8,2", "--repetitions", "2", "--json-only"]
        sizes = ["training.max_steps=1000", "training.eval_on_start=false", "training.per_device_train_batch_size=1"]
        return {
            "layer": [*bench, "layer", "--device", "cpu", "--dtype", "float32", "--ranks", str(ranks), *small],
            "train": ["-m", "carpool.cli", "train", f"parallelism.num_ranks={ranks}", *sizes],
        }
    shapes: tuple[str, ...] = ("4096,7168,256,8", "8192,2048,64,8", "16384,2048,128,8", "1000,2880,128,4")
    experts: tuple[str, ...] = ("8192,2048,1024,64,8", "8192,2048,768,128,8", "16384,2880,2880,32,4")
    layers = experts[:2]
    if brief:
        shapes, experts, layers = shapes[1:2], experts[:1], experts[:1]
    return {
        "transport": [
            *bench, "transport", "--ranks", str(ranks), "--ctas", "16", "--backward", "--repetitions", "15",
            "--json-only", *(part for shape in shapes for part in ("--shape", shape)),
        ],
        "experts": [
            *bench, "experts", "--against", "grouped_mm", "--experts", "grouped", "--repetitions", "9", "--json-only",
            *(part for shape in experts for part in ("--shape", shape)),
        ],
        "layer": [
            *bench, "layer", "--ranks", str(ranks), "--transports", "nvlink,dedup", "--repetitions", "9",
            "--json-only", *(part for shape in layers for part in ("--shape", shape)),
        ],
        "train": [
            "-m", "carpool.cli", "train", f"parallelism.num_ranks={ranks}", *OLMOE,
            "training.max_steps=1000", "training.eval_steps=none", "training.eval_on_start=false",
            "training.sample_prompt=none", "training.save_steps=none", "training.save_pretrained=false",
            "data.sequence_length=4096", "training.per_device_train_batch_size=2", "moe.transport=nvlink",
        ],
    }  # fmt: skip


def times_of(found: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], float]]:
    """((where it stands, key), value) of each time in a benchmark's JSON.

    Example: {"results": [{"contender": "nvlink", "ms": 3.0}]} -> (("results", "nvlink", "ms"), 3.0)
    """
    if isinstance(found, dict):
        for key, value in found.items():
            if key in (*DEVICE_KEYS, *HOST_KEYS) and isinstance(value, int | float):
                yield (*path, key), float(value)
            elif isinstance(value, dict | list) and key not in ("settings", "environment", "shape", "kinds"):
                yield from times_of(value, (*path, key))
    elif isinstance(found, list):
        for number, value in enumerate(found):
            if isinstance(value, dict):
                yield from times_of(value, (*path, _identity(value) or str(number)))


def _identity(row: dict[str, Any]) -> str:
    parts = [row[key] for key in IDENTITY if row.get(key) not in (None, "")]
    return " ".join(
        ",".join(str(size) for size in part.values() if isinstance(size, int)) if isinstance(part, dict) else str(part)
        for part in parts
    )


def run_once(tree: Path, arguments: list[str], seconds: float) -> dict[tuple[str, ...], float]:
    """The times of one run of a benchmark from a tree.

    Raises:
        RuntimeError: it failed; with the end of what it said.
        subprocess.TimeoutExpired: it took too long."""
    path = os.pathsep.join(filter(None, [str(tree), os.environ.get("PYTHONPATH")]))
    trains = "train" in arguments
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+") as said:
        out = [f"training.output_dir={folder}/run"] if trains else ["--out", folder]
        process = subprocess.Popen(
            [sys.executable, *arguments, *out], cwd=tree, env={**os.environ, "PYTHONPATH": path}, stdout=said,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            if trains:
                if (found := _step_ms(process, Path(folder, "run", "metrics.jsonl"), seconds)) is not None:
                    return {("carpool train", "ms"): found}
            elif process.wait(seconds) == 0:
                results = sorted(Path(folder).glob("*.json"))
                return {key: value for result in results for key, value in times_of(json.loads(result.read_text()))}
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        said.seek(0)
        raise RuntimeError(f"{' '.join(arguments)} from {tree} ended with {process.returncode}:\n{said.read()[-3000:]}")


def _step_ms(process: subprocess.Popen[bytes], metrics: Path, seconds: float) -> float | None:
    """The median step of a run, as soon as enough are written: what is left is a checkpoint of many gigabytes. None:
    the run has ended before."""
    deadline = time.monotonic() + seconds
    while True:
        ended = process.poll() is not None
        whole_lines = metrics.read_text().split("\n")[:-1] if metrics.exists() else []
        steps = [record["step_ms"] for record in map(json.loads, whole_lines) if record["kind"] == "train"]
        if len(steps) >= WARM_UP + STEPS:
            return float(statistics.median(steps[WARM_UP:]))
        if ended:
            return None
        if time.monotonic() > deadline:
            raise subprocess.TimeoutExpired(process.args, seconds)
        time.sleep(0.2)


def order_of_trees(old: Path, rounds: int) -> list[Path]:
    """Which tree runs when: old, new, new, old, old, new, ..."""
    return [tree for number in range(rounds) for tree in ((old, NEW) if number % 2 == 0 else (NEW, old))]


def compare(old: dict[tuple[str, ...], float], new: dict[tuple[str, ...], float]) -> list[dict[str, Any]]:
    """A row for each time that both have."""
    return [
        {"what": " / ".join(key), "old": old[key], "new": new[key], "ratio": old[key] / new[key]}
        for key in old
        if key in new and old[key] > 0 and new[key] > 0
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--old", type=Path, required=True, help="a checkout of the other commit")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--only", nargs="+", default=None, help="some of: transport, experts, layer, train")
    parser.add_argument("--rounds", type=int, default=2, help="runs of each benchmark from each tree")
    parser.add_argument("--brief", action="store_true", help="one shape of each, and no compiled layers")
    parser.add_argument("--quick", action="store_true", help="two tiny benchmarks on the CPU, to see that it works")
    parser.add_argument("--seconds", type=float, default=240, help="limit of one run of one benchmark")
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    if not (args.old / "carpool" / "__init__.py").is_file():
        parser.error(f"--old {args.old} is no checkout of this project: there is no carpool/__init__.py in it")
    commands = benchmark_commands(args.ranks, args.quick, args.brief)
    if unknown := [name for name in args.only or () if name not in commands]:
        parser.error(f"--only {' '.join(unknown)} is not known; use some of: {', '.join(commands)}")

    rows: list[dict[str, Any]] = []
    failed: list[str] = []
    for name in args.only or commands:
        best: dict[Path, dict[tuple[str, ...], float]] = {args.old: {}, NEW: {}}
        begin = time.perf_counter()
        for tree in order_of_trees(args.old, args.rounds):
            try:
                times = run_once(tree, commands[name], args.seconds)
            except (RuntimeError, subprocess.TimeoutExpired) as error:
                failed.append(f"{name}: {error}")
                print(f"{name}: {error}", file=sys.stderr, flush=True)
                break
            best[tree] = {key: min(value, best[tree].get(key, math.inf)) for key, value in times.items()}
        for key in sorted(best[args.old].keys() ^ best[NEW].keys()):
            print(f"{name}: only one tree has {' / '.join(key)}")
        found = [{"benchmark": name, **row} for row in compare(best[args.old], best[NEW])]
        rows += found
        print(f"{name}: {len(found)} times, {time.perf_counter() - begin:.0f} s", flush=True)
        for row in found:
            print(f"  {row['old']:10.3f} {row['new']:10.3f} {row['ratio']:6.3f}  {row['what']}", flush=True)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if args.out is not None:
        told = {"environment": environment(device, args.ranks), "failed": failed, "rows": rows}
        args.out.write_text(json.dumps(told, indent=1) + "\n")
    judged = [row for row in rows if row["what"].rsplit(" / ", 1)[-1] in DEVICE_KEYS]
    slower = [row for row in judged if row["ratio"] < 0.99]
    print(f"{len(judged)} times on the device: {len(slower)} more than 1 % slower than before")
    if failed:
        raise SystemExit(f"{len(failed)} benchmarks did not run")


if __name__ == "__main__":
    main()
