"""How much longer are steps with snapshots of every step (`snapshots.window`), and with copies of experts?

    python -m benchmarks.snapshots --ranks 1 --out snapshots.json      # Qwen3-30B-A3B's shape, 8 layers and 1, one GPU
    python -m benchmarks.snapshots --ranks 2 --tiny                    # the same on CPUs, tiny

One run takes all steps: without, with windows of W steps, with copies (`copies.fewest=2`), without again, and so on in
`--rounds` rounds. In each, first as many steps as there are files, which are made and locked then; of the steps after
that, the median, of milliseconds and of the processors' time of a rank, which other processes of the machine disturb
less. A ratio is of two medians of one round; the table has the middle of rounds, and the least and the most. Several
ranks are a node each: every snapshot and copy is sent to another one, too. A window whose files have no room in
/dev/shm is left out, and its row says how much it needs.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch.distributed as dist
from rich.console import Console

from benchmarks.checkpoints import QWEN
from benchmarks.peaks import CONSUMED
from benchmarks.runs import QWEN_TINY, TINY, config_of_run, make_runs_parser, measure_runs, start_runs
from carpool.bench.model.model_contenders import CarpoolContender, random_corpus
from carpool.bench.result_files import print_table
from carpool.metrics.host import slowest
from carpool.train.checkpoints.memory_files import MemoryFiles
from carpool.train.config import Config
from carpool.train.launch.machine import rank_device
from carpool.train.run.loop import Run, record
from carpool_systems.expert_copies import Copies
from carpool_systems.extensions import CopiesSection, ExpertCopies, Snapshots
from carpool_systems.sparse_snapshots import SparseSnapshots

_KEPT = ["parallelism.ranks_per_node=1", "snapshots.window=1"]
SETTINGS: dict[str, list[str]] = {
    "8 layers": [*QWEN, *CONSUMED, *_KEPT],
    "1 layer": [*QWEN, *CONSUMED, *_KEPT, "model.config.num_hidden_layers=1"],
}
COPIES, RATIOS = "copies", ("ratios", "cpu")


def measure_all(config: Config, settings: dict[str, Any]) -> None:
    """On a rank: all runs that `settings` names."""
    folder, device = config.training.folder, rank_device()

    def one(name: str) -> dict[str, Any]:
        more = [*TINY, *QWEN_TINY, f"model.config.num_hidden_layers={name.split()[0]}"] if settings["tiny"] else []
        return _measure(config_of_run(name, [*SETTINGS[name], *more], settings["tiny"], folder), name, settings)

    found, _ = measure_runs(settings, device, one, lambda its: f"a step takes {its['plain_ms']:.1f} ms", "results")
    if dist.get_rank() == 0:
        for its in found:
            _show(its)


def _measure(config: Config, name: str, settings: dict[str, Any]) -> dict[str, Any]:
    contender = CarpoolContender(config, "balanced", "benchmark", random_corpus)
    run, plain = contender.run, list[list[float]]()
    kinds: list[int | str] = [*settings["windows"], *([COPIES] if dist.get_world_size() > 1 else [])]
    rows: dict[str, dict[str, Any]] = {
        str(kind): {"ratios": [], "cpu": [], "ms": [], "bytes": 0, "why": ""} for kind in kinds
    }
    _steps(contender, 4)  # captured after two
    for _ in range(settings["rounds"]):
        run.built.extensions[:] = []
        _steps(contender, 2)
        plain.append(_steps(contender, settings["steps"]))
        for kind in kinds:
            row = rows[str(kind)]
            if row["why"]:
                continue
            kept = _begin(run, kind)
            try:
                _steps(contender, 2 * (kind if isinstance(kind, int) else 1) + 3)
                (ms, cpu), (plain_ms, plain_cpu) = _steps(contender, settings["steps"]), plain[-1]
                row["ms"].append(ms)
                row["ratios"].append(ms / plain_ms)
                row["cpu"].append(cpu / plain_cpu)
                row["bytes"] = _bytes(run, kept)
            except ValueError as error:  # no room, on all ranks alike
                row["why"] = str(error)
            _end(run, kept)
    contender.close()
    return {"setting": name, "plain_ms": statistics.median(ms for ms, _ in plain), "rows": rows}


def _begin(run: Run, kind: int | str) -> SparseSnapshots | Copies:
    """Let the next steps be kept."""
    record(run)
    if isinstance(kind, int):
        snapshots = Snapshots(None)
        snapshots.taken = SparseSnapshots(run, kind)
        run.built.extensions[:] = [snapshots]
        return snapshots.taken
    copies = ExpertCopies(CopiesSection(fewest=2))
    copies.kept = Copies(run, 2, 0, 1)
    run.built.extensions[:] = [copies]
    return copies.kept


def _end(run: Run, kept: SparseSnapshots | Copies) -> None:
    kept.clean(everything=True)
    run.built.extensions[:] = []
    run.checkpoints.copying.clear()


def _bytes(run: Run, kept: SparseSnapshots | Copies) -> int:
    """In /dev/shm, of this host."""
    kept.beside.wait()
    home = MemoryFiles(run.folder, run.built.device, "").home
    return sum(path.stat().st_size for path in home.rglob("*.safetensors"))


def _steps(contender: CarpoolContender, count: int) -> list[float]:
    """The median of steps, in milliseconds and in those of a rank's processor; of the slowest rank."""
    found = []
    for _ in range(count):
        begin, cpu = time.perf_counter(), time.process_time()
        contender.take_step()
        found.append((1e3 * (time.perf_counter() - begin), 1e3 * (time.process_time() - cpu)))
    medians = [statistics.median(one) for one in zip(*found, strict=True)]
    return slowest(medians, contender.run.built.device)


def _show(its: dict[str, Any]) -> None:
    columns = [f"{its['setting']}: kept", "step ms", "of a step without", "of its processor time", "GB in /dev/shm"]
    table = [["nothing", f"{its['plain_ms']:.1f}", "1", "1", ""]]
    for kind, row in its["rows"].items():
        name = "copies, 2 of each expert" if kind == COPIES else f"snapshots, windows of {kind}"
        if row["why"]:
            table.append([name, row["why"], "", "", ""])
            continue
        middles = [f"{statistics.median(row[key]):.3f} ({min(row[key]):.3f} to {max(row[key]):.3f})" for key in RATIOS]
        table.append([name, f"{statistics.median(row['ms']):.1f}", *middles, f"{row['bytes'] / 1e9:.2f}"])
    print_table(Console(width=150), "steps of which the state is kept", columns, table)


def main() -> None:
    parser = make_runs_parser(__doc__, "setting", seconds=400)
    parser.add_argument("--windows", type=int, nargs="+", default=[1, 2, 4, 8], help="steps of a window")
    parser.add_argument("--steps", type=int, default=12, help="that are timed in each round")
    parser.add_argument("--rounds", type=int, default=5)
    start_runs(parser, dict.fromkeys(SETTINGS, 1), "benchmarks.snapshots:measure_all", key="results")


if __name__ == "__main__":
    main()
