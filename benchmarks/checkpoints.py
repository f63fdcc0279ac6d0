"""How long does training wait for checkpoints that are written beside it (`training.async_save`)?

    python -m benchmarks.checkpoints --ranks 1 --out checkpoints.json      # 8 layers of Qwen3-30B-A3B's shape, one GPU
    python -m benchmarks.checkpoints --ranks 2 --tiny                      # the same on CPUs, tiny

Each setting is a run of the trainer. After steps without a checkpoint it writes `--saves` of them, one after the other,
and goes on training until each is whole; each is then deleted.

    waited     seconds that training waited: it begins the save, and waits for the copy before the next update
    copied     until the state was in host memory; written: until the checkpoint had its name
    step       ms without a checkpoint, and while one is copied and written
    share      waited, of the time from a save's beginning until it was whole: the most that it can cost, where each
               checkpoint follows the one before at once; and of `--interval` seconds between checkpoints

Before, host memory is reserved and page-locked beside steps, as a run does after its first: for so long, and the steps
meanwhile. Predicted is the whole model: as many bytes as it has
parameters for, copied at the measured rate, over as many GPUs as `--predict` says.
"""

from __future__ import annotations

import shutil
import statistics
import time
from typing import Any

import torch.distributed as dist
from rich.console import Console

from benchmarks.peaks import CONSUMED
from benchmarks.runs import QWEN_TINY, TINY, GiB, config_of_run, make_runs_parser, measure_runs, start_runs
from carpool.bench.model.model_contenders import CarpoolContender, random_corpus
from carpool.bench.result_files import print_table
from carpool.metrics.host import slowest
from carpool.train.blueprint import Blueprint
from carpool.train.config import Config
from carpool.train.data.tokenizer import tokenizer_of
from carpool.train.launch.machine import rank_device
from carpool.train.run.finish import save

QWEN = [
    "model.config=qwen3-30b-a3b", "model.config.num_hidden_layers=8", "model.dtype=bfloat16",
    "data.sequence_length=4096", "training.per_device_train_batch_size=2", "training.optimizer=one-pass",
    "training.optimizer_state_dtype=int8",
]  # fmt: skip
LAYERS = 48
SETTINGS: dict[str, list[str]] = {
    "consumed and captured": [*QWEN, *CONSUMED],
    "clipped": [*QWEN],
    "state in host memory": [*QWEN, *CONSUMED, "training.optimizer_offload=host"],
}


def measure_all(config: Config, settings: dict[str, Any]) -> None:
    """On a rank: all runs that `settings` names."""
    folder, device = config.training.folder, rank_device()

    def one(name: str) -> dict[str, Any]:
        more = [*TINY, *QWEN_TINY] if settings["tiny"] else []
        return _measure(config_of_run(name, [*SETTINGS[name], *more], settings["tiny"], folder), name, settings)

    def line(found: dict[str, Any]) -> str:
        last = found["saves"][-1]
        return f"{found['bytes'] / GiB:.2f} GiB, waited {last['waited']:.3f} s, whole after {last['written']:.1f} s"

    found, failed = measure_runs(settings, device, one, line, "results")
    if found and dist.get_rank() == 0:
        _show(found, failed, settings["interval"])


def _measure(config: Config, name: str, settings: dict[str, Any]) -> dict[str, Any]:
    on = config.training.model_copy(update={"async_save": "on"})
    contender = CarpoolContender(config.model_copy(update={"training": on}), "balanced", "benchmark", random_corpus)
    run, saves = contender.run, []
    _steps(contender, 4)  # captured after two
    run.checkpoints.prepare(run.built.model, run.built.optimizer)
    begin, beside = time.perf_counter(), []
    while slowest([float(run.checkpoints.preparing)], run.built.device) != [0.0]:
        beside += _steps(contender, 1)
    reserved = {"seconds": time.perf_counter() - begin, "step_ms": statistics.median(beside) if beside else None}
    reserved["slowest_ms"] = max(beside) if beside else None
    plain = _steps(contender, settings["steps"])
    for _ in range(settings["saves"]):
        begin = time.perf_counter()
        if save(run, wait=False) is not None:
            raise RuntimeError("host memory has no room for a copy of the state")
        pending, beside = run.checkpoints.pending, []
        if pending is None:
            raise RuntimeError(f"no checkpoint was begun: {run.records.unwritten}")
        while slowest([0.0 if pending.done else 1.0], run.built.device) != [0.0]:
            beside += _steps(contender, 1)
        between, saved = time.perf_counter() - begin, run.checkpoints.collect()
        assert saved is not None and saved.copied is not None
        saves.append({
            "waited": saved.seconds, "copied": saved.copied, "written": saved.written, "between": between,
            "steps": len(beside), "step_ms": statistics.median(beside), "share": saved.seconds / between,
            "share_of_interval": saved.seconds / settings["interval"],
        })  # fmt: skip
        size = saved.bytes
        if run.main:
            shutil.rmtree(saved.path)
    whole = Blueprint.of_config(_with_layers(config, LAYERS), tokenizer_of(config)).size.total
    own, ranks, last = run.plan.blueprint.size.total, run.plan.machine.ranks, saves[-1]
    of_whole = size * whole / own
    copy = last["copied"] * of_whole / size * ranks / settings["predict"]
    contender.close()
    return {
        "setting": name, "bytes": size, "plain_ms": statistics.median(plain), "reserved": reserved, "saves": saves,
        "predicted": {
            "layers": LAYERS, "gpus": settings["predict"], "bytes": of_whole, "copied": copy,
            "host_bytes_per_gpu": of_whole / settings["predict"], "share_of_interval": copy / settings["interval"],
        },
    }  # fmt: skip


def _steps(contender: CarpoolContender, count: int) -> list[float]:
    """Milliseconds of each."""
    found = []
    for _ in range(count):
        begin = time.perf_counter()
        contender.take_step()
        found.append(1e3 * (time.perf_counter() - begin))
    return found


def _with_layers(config: Config, layers: int) -> Config:
    sizes = {**config.model.config, "num_hidden_layers": layers} if isinstance(config.model.config, dict) else None
    return config.model_copy(update={"model": config.model.model_copy(update={"config": sizes or config.model.config})})


def _show(found: list[dict[str, Any]], failed: dict[str, str], interval: float) -> None:
    console = Console(width=150)
    columns = ["", "GiB", "waited s", "copied s", "written s", "step ms", "beside", "share", f"of {interval:g} s"]
    rows = [
        [f"{one['setting']}, save {number}", f"{one['bytes'] / GiB:.2f}", f"{it['waited']:.3f}", f"{it['copied']:.3f}",
         f"{it['written']:.2f}", f"{one['plain_ms']:.1f}", f"{it['step_ms']:.1f}", f"{100 * it['share']:.2f} %",
         f"{100 * it['share_of_interval']:.2f} %"]
        for one in found
        for number, it in enumerate(one["saves"], 1)
    ]  # fmt: skip
    print_table(console, "checkpoints beside training", columns, rows)
    for one in found:
        memory = one["reserved"]
        steps = ""
        if memory["step_ms"]:
            steps = f"; steps meanwhile {memory['step_ms']:.1f} ms, {memory['slowest_ms']:.1f} at most"
        console.print(f"{one['setting']}: host memory reserved in {memory['seconds']:.1f} s{steps}", highlight=False)
    for one in found:
        whole = one["predicted"]
        console.print(
            f"{one['setting']}, predicted of {whole['layers']} layers on {whole['gpus']} GPUs: "
            f"{whole['bytes'] / GiB:,.1f} GiB, {whole['host_bytes_per_gpu'] / GiB:.1f} GiB of host memory a GPU, "
            f"copied in {whole['copied']:.2f} s: {100 * whole['share_of_interval']:.2f} % of {interval:g} s at most",
            highlight=False,
        )
    for setting, why in failed.items():
        console.print(f"{setting}: {why}", highlight=False)


def main() -> None:
    parser = make_runs_parser(__doc__, "setting", seconds=400)
    parser.add_argument("--steps", type=int, default=6, help="without a checkpoint")
    parser.add_argument("--saves", type=int, default=2, help="checkpoints of each setting")
    parser.add_argument("--interval", type=float, default=60.0, help="seconds between checkpoints, for the last column")
    parser.add_argument("--predict", type=int, default=8, help="GPUs that the whole model is predicted for")
    start_runs(parser, dict.fromkeys(SETTINGS, 1), "benchmarks.checkpoints:measure_all", key="results")


if __name__ == "__main__":
    main()
