"""Fine-tuning on one GPU: five published models, each by LoRA, by QLoRA, and as a whole with its state streamed.

    python -m benchmarks.one_gpu --minutes 10                          # all rows that fit into ten minutes
    python -m benchmarks.one_gpu --only "OLMoE" "Qwen3-30B-A3B, QLoRA"  # of those whose names begin so
    python -m benchmarks.one_gpu --list                                # the command of each row; no GPU

A row is one command of `carpool bench model`, in a process of its own: random weights in the published sizes, balanced
routing, one sequence of 4,096 tokens a step, clipping on. Speed is of steps, memory is what PyTorch's allocator had
reserved, graphs' pools included. A model that clearly does not fit by the planner's prediction, or that fails where it
hardly does, is measured with the layers that fit, and says what all would need: tokens/s are then of these layers.

    OUT/one_gpu.json    what each command wrote, with hardware, versions and commit
    OUT/one_gpu.md      the table
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.pending import Measurement, measure, shell, where
from carpool.bench.model.model_settings import ModelSettings
from carpool.train.config.published import read_keys
from carpool.train.launch.machine import imagine_machine
from carpool.train.plan.memory_fit import CLEARLY
from carpool.train.plan.start_checks import foresee

MODELS = {
    "Qwen3-30B-A3B": "qwen3-30b-a3b", "gpt-oss-20b": "gpt-oss-20b", "GLM-4.5-Air": "glm-4.5-air",
    "OLMoE-1B-7B": "olmoe-1b-7b", "DeepSeek-V2-Lite": "deepseek-v2-lite",
}  # fmt: skip
BENCH = "-m carpool bench model --ranks 1 --sequence 4096 --batch 1 --steps 4 --rounds 2 --out {out}"
BENCH += " --contenders carpool-compiled --set training.max_grad_norm=1"
LORA = "--set adapter.kind=lora --set adapter.rank=16"
STREAMED = (
    "--set training.optimizer=one-pass --set training.optimizer_state_dtype=int8 --set training.optimizer_offload=host "
    "--set training.optimizer_in_backward=true --set training.grad_clipping=delayed"
)
METHODS = {
    "LoRA": (LORA, "float32"),
    "QLoRA": (f"{LORA} --set adapter.base_dtype=nf4", "float32"),
    "full": (STREAMED, "int8, in host memory"),
}
# Of the memory, what layers may fill where not all of them fit.
FILL = 0.8


def rows() -> list[Measurement]:
    return [
        Measurement(f"{title}, {method}", "the table", 1, 90, f"{BENCH} --model {model} {settings}")
        for title, model in MODELS.items()
        for method, (settings, _) in METHODS.items()
    ]


def memory_of(one: Measurement, gpu: str | None = None) -> tuple[float, float]:
    """Bytes that a row is predicted to need, and those that there are. gpu: of another machine, such as "h200"."""
    words, contender = one.words(1, "OUT"), "carpool-compiled"
    given = tuple(value for option, value in pairwise(words) if option == "--set")
    settings = ModelSettings(
        model=words[words.index("--model") + 1], sequence=4096, batch=1, contenders=(contender,), overrides=given
    )
    config = settings.resolve(cuda=True, num_ranks=1).config_of(contender)
    plan = foresee(config, [], imagine_machine(config, gpu), None)
    return plan.needs["total"], plan.memory


def ran_out(found: dict[str, Any]) -> bool:
    """Whether a row has no number because memory did not suffice, as far as one can tell."""
    cases = found.get("written", {}).get("model.json", {}).get("cases", ())
    return found["status"] == "failed" or any(row["unavailable"] for case in cases for row in case["rows"])


def with_fewer_layers(one: Measurement, needs: float, has: float) -> Measurement:
    """The same row with the layers that fit."""
    layers = read_keys(MODELS[one.name.rpartition(", ")[0]])["num_hidden_layers"]
    return dataclasses.replace(one, command=f"{one.command} --layers {max(1, int(FILL * layers * has / needs))}")


def cells(found: dict[str, Any]) -> list[str]:
    """A row of the table."""
    title, _, method = found["name"].rpartition(", ")
    cells = [title, method, METHODS[method][1]]
    needs = f"; all layers need {found['needs']:.0f} GiB" if "needs" in found else ""
    if found["status"] != "measured":
        last = (found.get("error") or [""])[-1].strip()
        return [*cells, "-", "-", "-", "-", f"{found['status']}: {last}{needs}"]
    (written,) = (one for name, one in found["written"].items() if name == "model.json")
    (case,), (row,) = written["cases"], written["cases"][0]["rows"]
    if row["unavailable"]:
        return [*cells, "-", "-", "-", "-", row["unavailable"]]
    return [
        *cells, f"{row['tokens_per_second']:,.0f}", f"{row['reserved_bytes'] / 2**30:.1f}",
        f"{row['predicted_bytes'] / 2**30:.1f}", "-" if row["mfu"] is None else f"{row['mfu']:.1%}",
        f"{case['layers']} layers{needs}",
    ]  # fmt: skip


def markdown(report: dict[str, Any]) -> str:
    where = report["environment"]
    heads = ["model", "trained by", "moments", "tokens/s", "reserved GiB", "predicted GiB", "MFU", "of"]
    lines = [f"{where['device']}, torch {where['torch']}, commit {where['commit']}", ""]
    lines += [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    lines += [f"| {' | '.join(cells(one))} |" for one in report["results"]]
    return "\n".join([*lines, "", *(f"- {one['name']}: `{one['command']}`" for one in report["results"])]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30, help="after which no row begins")
    parser.add_argument("--only", nargs="+", default=[""], metavar="NAME", help="beginnings of rows' names")
    parser.add_argument("--list", action="store_true", help="print the commands; nothing is measured")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="for all rows")
    parser.add_argument("--out", type=Path, default=Path("runs/one_gpu"))
    args = parser.parse_args()
    more = "".join(f" --set {one}" for one in args.set)
    chosen = [dataclasses.replace(one, command=f"{one.command}{more}") for one in rows()]
    chosen = [one for one in chosen if one.name.startswith(tuple(args.only))]
    if not chosen:
        parser.error(f"--only {' '.join(args.only)}: no such row; --list shows them")
    if args.list:
        for one in chosen:
            print(f"{one.name}\n    {shell(one, 1, 'OUT')}")
        return
    end, results = time.monotonic() + 60 * args.minutes, []
    args.out.mkdir(parents=True, exist_ok=True)
    for one in chosen:
        if (left := end - time.monotonic()) <= 0:
            break
        needs, has = memory_of(one)
        found = measure(one, 1, left) if needs <= CLEARLY * has else None
        if found is None or (ran_out(found) and needs > FILL * has):
            fewer = with_fewer_layers(one, needs, has)
            found = {**measure(fewer, 1, max(1.0, end - time.monotonic())), "needs": needs / 2**30}
        results.append({"name": one.name, **found})
        report = {"environment": where(), "results": results}
        (args.out / "one_gpu.json").write_text(json.dumps(report, indent=1) + "\n")
        (args.out / "one_gpu.md").write_text(markdown(report))
        print(" | ".join(cells(results[-1])), flush=True)


if __name__ == "__main__":
    main()
