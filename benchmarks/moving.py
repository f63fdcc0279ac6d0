"""Placement while training, on a trained model: are losses those of a run that stays, and do forecasts come true?

    python -m benchmarks.texts --work work
    carpool train --config work/train.toml training.output_dir=work/e64
    torchrun --nproc-per-node 4 -m benchmarks.moving --work work --name e64 --out moving.json

`carpool train` goes on with the model on one kind of text (`--text`), the same batches in every run:

    stays                experts in order, all the time
    moves                every `--every` steps a look at the routing, and `--lag` steps later experts move
    resumed              as "moves", but stopped in the middle, between a move and the next look, and resumed

A run is too short for a move to pay for itself, which `placement.hysteresis = 0` ignores: any gain in a layer's
modelled time is taken.

What must hold, and is printed as PASS or FAIL:

    losses      those of "stays" up to rounding: sums have another order, and training amplifies the difference
    resumed     losses, layouts and moves bitwise those of "moves"
    bytes       between ranks, a token's, all layers, as counted from a move to the next (or to the end): within
                `--tolerance` of what was foretold for the new layouts; and from the first move to the second fewer
                than "stays" sends for the same batches

Forecasts are of tokens that the solver did not see, half of the newest ones; what is measured is later text.

All runs are deterministic (`training.full_determinism`): without, the backward of PyTorch's fused attention adds on
GPUs in the order in which blocks finish, equal runs differ from the second step on, and "resumed" says nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist

from benchmarks.script import join_group, make_parser, write_results
from benchmarks.texts import KINDS, data_of, say
from carpool.placement.solvers import solver_names
from carpool.train.config import load_config
from carpool.train.run.run import train

Lines = list[dict[str, Any]]
RUNS = ("stays", "moves", "resumed")
# Largest relative difference of a step's loss that is taken for rounding and what training makes of it.
ROUNDING = {"float32": 1e-4, "bfloat16": 2e-2}


def settings(args: argparse.Namespace) -> list[str]:
    """What all runs have in common, in the words of `carpool train`."""
    return [
        f"model.path={args.work / args.name / 'model'}",
        "training.full_determinism=true",
        *(f"data.{key}={json.dumps(value)}" for key, value in data_of(args.work, args.text).items()),
        f"data.sequence_length={args.length}",
        f"training.per_device_train_batch_size={args.batch}",
        f"training.learning_rate={args.learning_rate}",
        "training.lr_scheduler_type=constant",
        f"training.max_steps={args.steps}",
        f"training.bf16={str(args.precision == 'bfloat16').lower()}",
        f"training.seed={args.seed}",
        "training.save_steps=none",
        "training.save_total_limit=1",
        "training.save_pretrained=false",
        "training.eval_steps=none",
        "training.eval_on_start=false",
        "training.sample_prompt=none",
        f"moe.transport={args.transport}",
    ]


def placed(args: argparse.Namespace) -> list[str]:
    """What a run that moves experts has beside."""
    return [
        f"placement.every={args.every}",
        f"placement.lag={args.lag}",
        f"placement.solver={args.solver}",
        "placement.hysteresis=0",
    ]


def run(name: str, args: argparse.Namespace, root: Path) -> dict[str, Any]:
    """Train; what its folder says afterwards. All ranks."""
    folder, began = root / name.replace(", ", "-"), time.perf_counter()
    common = [*settings(args), f"training.output_dir={folder}"]
    # A checkpoint is part of what must be equal: the trace of the next look is gathered for it.
    halves = [*placed(args), f"training.save_steps={args.stop_at}"]
    if name == "stays":
        parts = [common]
    elif name == "moves":
        parts = [[*common, *halves]]
    else:
        first = [*common, *halves, f"training.stop_at_step={args.stop_at}"]
        parts = [first, [*common, *halves, "training.resume_from_checkpoint=last"]]
    for overrides in parts:
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
            train(load_config(None, overrides), command="benchmarks/moving.py")
    dist.barrier()
    if dist.get_rank():
        return {}
    lines: Lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    layout = folder / "layout.json"
    found = {
        "run": name,
        "seconds": time.perf_counter() - began,
        "transport": json.loads((folder / "run.json").read_text()).get("transport"),
        "steps": {line["step"]: line for line in lines if line["kind"] == "train"},
        "looks": [line for line in lines if line["kind"] == "placement"],
        "layouts": json.loads(layout.read_text()) if layout.is_file() else None,
    }
    shutil.rmtree(folder)  # checkpoints are large
    return found


# ---------------------------------------------------------------------------------------------------------- results


def summary(found: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    """Numbers of a run, moves with what was foretold and measured among them."""
    steps = found["steps"]
    tail = [steps[number] for number in sorted(steps) if number > args.steps // 2]
    looks = found["looks"]
    measured = {look["since"]: look["measured"] for look in looks if look["event"] == "measured"}
    moves = [{**look, "measured": measured.get(look["step"])} for look in looks if look["event"] == "moved"]
    tokens = args.batch * args.length * dist.get_world_size()
    return {
        "run": found["run"],
        "seconds": found["seconds"],
        "transport": found["transport"],
        "step_ms": statistics.median(step["step_ms"] for step in tail),
        "rows_remote_per_token": statistics.fmean(step["rows_remote_per_token"] for step in tail),
        "bytes_remote_per_token": statistics.fmean(step["bytes_remote"] for step in tail) / tokens,
        "rank_load": statistics.fmean(step["rank_load_max_over_mean"] for step in tail),
        "moves": moves,
        "kept": [look for look in looks if look["event"] == "kept"],
        "loss": [steps[number]["loss"] for number in sorted(steps)],
        "bytes_remote": [steps[number]["bytes_remote"] for number in sorted(steps)],
    }


def show(own: dict[str, Any]) -> None:
    say(
        f"{own['run']}: {own['seconds']:.0f} s; of the second half: step {own['step_ms']:.1f} ms, remote rows per "
        f"token {own['rows_remote_per_token']:.3f}, bytes per token {own['bytes_remote_per_token']:.0f}, load of the "
        f"fullest rank {own['rank_load']:.3f}"
    )
    for move in own["moves"]:
        before, foretold, measured = move["before"], move["predicted"], move["measured"] or {}
        changes = (
            f"{what} {number(before[what])} -> {number(foretold[what])}, measured {number(measured.get(what))}"
            for what in ("rows", "bytes", "load")
        )
        say(
            f"  step {move['step']}: {move['experts']} experts of {move['layers']} layers, "
            f"{move['bytes'] / 1e6:.1f} MB in {1e3 * move['seconds']:.1f} ms, solved in {move['solve_seconds']:.2f} s; "
            + "; ".join(changes)
        )
    for look in own["kept"]:
        say(f"  step {look['step']}: kept: {look['why']}")


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}" if value >= 100 else f"{value:.3f}"


def fall(before: float | None, after: float | None) -> str:
    return f"{1 - after / before:.1%}" if before and after else "-"


def judge(results: dict[str, dict[str, Any]], args: argparse.Namespace) -> list[dict[str, Any]]:
    """The promises that can be looked at with the runs that there are."""
    verdicts = []

    def verdict(passed: bool, what: str) -> None:
        verdicts.append({"passed": passed, "what": what})

    stays, moves, resumed = (results.get(name) for name in ("stays", "moves", "resumed"))
    for own in results.values():
        if own is stays or own is resumed:
            continue
        if not own["moves"]:
            verdict(False, f"{own['run']}: nothing has moved, so nothing is shown")
            continue
        if stays is not None:
            pairs = zip(own["loss"], stays["loss"], strict=True)
            off = [abs(ours / theirs - 1) for ours, theirs in pairs]
            first = own["moves"][0]["step"]
            verdict(
                max(off) <= ROUNDING[args.precision],
                f"{own['run']}: losses as without, in {args.precision}: worst relative difference {max(off):.1e} "
                f"({max(off[:first]):.1e} up to the first move, {max(off[first : first + 5]):.1e} in the 5 steps after "
                f"it; allowed {ROUNDING[args.precision]:.0e})",
            )
            # Until the next move, where there is one: what the first one was foretold to do.
            until = own["moves"][1]["step"] if len(own["moves"]) > 1 else None
            ours, theirs = (sum(one["bytes_remote"][first:until]) for one in (own, stays))
            change = fall(own["moves"][0]["before"]["bytes"], own["moves"][0]["predicted"]["bytes"])
            verdict(
                ours < theirs,
                f"{own['run']}: {fall(theirs, ours)} fewer bytes than 'stays' after the move of step {first}, "
                f"foretold {change}",
            )
        known = [m for m in own["moves"] if m["measured"] and m["predicted"]["bytes"]]
        for move in known:
            before, foretold, measured = (move[part]["bytes"] for part in ("before", "predicted", "measured"))
            verdict(
                abs(measured / foretold - 1) <= args.tolerance,
                f"{own['run']}: bytes after step {move['step']} as foretold: {measured:.0f} a token, foretold "
                f"{foretold:.0f} ({measured / foretold - 1:+.1%}), {fall(before, foretold)} less than before",
            )
    if resumed is not None and moves is not None:
        same = {
            "losses": resumed["loss"] == moves["loss"],
            "layouts": resumed["layouts"] == moves["layouts"],
            "moves": [decided(move) for move in resumed["moves"]] == [decided(move) for move in moves["moves"]],
        }
        told = ", ".join(f"{what} {'equal' if equal else 'DIFFERENT'}" for what, equal in same.items())
        pairs = zip(resumed["loss"], moves["loss"], strict=True)
        # Runs that differ before the stop are not deterministic, whatever resuming does.
        unequal = next((step for step, (ours, theirs) in enumerate(pairs, 1) if ours != theirs), None)
        since = "" if unequal is None else f"; losses differ from step {unequal} on"
        verdict(all(same.values()), f"resumed after step {args.stop_at}: {told}, bit for bit{since}")
    return verdicts


def decided(move: dict[str, Any]) -> dict[str, Any]:
    """Of a move, what does not depend on the clock, or on when a run was stopped."""
    return {key: value for key, value in move.items() if key not in ("time", "seconds", "solve_seconds", "measured")}


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--work", type=Path, required=True, help="folder of benchmarks/texts.py")
    parser.add_argument("--name", default="e64", help="a run of carpool train in it")
    parser.add_argument("--text", choices=KINDS, default="prose", help="what to train on")
    parser.add_argument("--precision", choices=tuple(ROUNDING), default="float32")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--every", type=int, default=20, help="steps between two looks")
    parser.add_argument("--lag", type=int, default=4, help="steps that the solver has")
    parser.add_argument("--solver", default="search", choices=solver_names())
    parser.add_argument("--batch", type=int, default=8, help="sequences of a rank and step")
    parser.add_argument("--length", type=int, default=512, help="tokens of a sequence")
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--transport", default="auto")
    parser.add_argument("--tolerance", type=float, default=0.05, help="of forecasts of bytes")
    parser.add_argument("--runs", nargs="+", default=list(RUNS), choices=RUNS)
    parser.add_argument("--scratch", type=Path, default=None, help="folder for runs and their checkpoints, emptied")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    # Behind the first move and before the second look, whose trace the checkpoint then has to hold.
    args.stop_at = args.every + args.lag + max(1, (args.every - args.lag) // 2)
    if not args.stop_at < args.steps:
        parser.error(f"--steps {args.steps} must be more than {args.stop_at}, where the resumed run is stopped")

    device = join_group()
    main_rank = dist.get_rank() == 0
    root = [Path(tempfile.mkdtemp(dir=args.scratch)) if main_rank else None]
    dist.broadcast_object_list(root, src=0)
    assert root[0] is not None
    results: dict[str, dict[str, Any]] = {}
    for name in args.runs:
        found = run(name, args, root[0])
        if main_rank:
            results[name] = {**summary(found, args), "layouts": found["layouts"]}
            show(results[name])
    if main_rank:
        verdicts = judge(results, args)
        for verdict in verdicts:
            say(f"{'PASS' if verdict['passed'] else 'FAIL'} {verdict['what']}")
        shutil.rmtree(root[0])
        runs = [{key: value for key, value in own.items() if key != "layouts"} for own in results.values()]
        write_results(args, device, verdicts=verdicts, results=runs)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
