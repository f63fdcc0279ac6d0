"""Many runs of the trainer, one after the other on the same ranks: what benchmarks of many settings share.

Each run is built, measured and given back. Results are written after each, because what comes next may end in an error.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.script import make_parser, write_results
from carpool.bench.model.model_contenders import free_memory
from carpool.bench.model.model_settings import STEPS_ALONE
from carpool.bench.options import find_ranks
from carpool.metrics.host import slowest
from carpool.train.build.policy_times import groups_before
from carpool.train.config import Config, load_config
from carpool.train.launch.failure import RankFailure
from carpool.train.launch.start import run as start_ranks

# In place of the sizes of published models.
TINY = [
    "model.config.hidden_size=64", "model.config.num_hidden_layers=3", "model.config.num_experts=8",
    "model.config.num_experts_per_tok=2", "model.config.intermediate_size=64", "model.config.num_attention_heads=4",
    "model.config.num_key_value_heads=2", "model.config.vocab_size=997", "data.sequence_length=128",
    "training.per_device_train_batch_size=4", "model.dtype=float32",
]  # fmt: skip
QWEN_TINY = ["model.config.moe_intermediate_size=64", "model.config.head_dim=16"]
MiB, GiB = 2**20, 2**30


def make_runs_parser(doc: str | None, what: str, seconds: float) -> argparse.ArgumentParser:
    """The options of a benchmark of many runs. `what`: the word for one of them; `seconds`: the default."""
    parser = make_parser(doc)
    parser.add_argument("--ranks", type=int, default=None, help="none: one for each GPU")
    parser.add_argument("--only", nargs="+", default=None, help=f"names of {what}s, or beginnings of them")
    parser.add_argument("--seconds", type=float, default=seconds, help=f"after which no further {what} begins")
    parser.add_argument("--tiny", action="store_true", help="tiny models on CPUs")
    parser.add_argument("--apart", action="store_true", help=f"each {what} in processes of its own")
    return parser


def start_runs(parser: argparse.ArgumentParser, least_ranks: Mapping[str, int], entry: str, key: str) -> None:
    """Start the ranks: each calls `entry(config, settings)` with the options, and with names of runs as "only".

    Args:
        least_ranks: by the name of a run; with fewer, it is left out.
        entry: "module:function".
        key: of the results in the JSON file."""
    args = parser.parse_args()
    device = "cpu" if args.tiny else "cuda"
    _, ranks = find_ranks(device, args.ranks)
    names = [name for name, least in least_ranks.items() if ranks >= least]
    if args.only is not None:
        names = [name for name in names if any(name.startswith(one) for one in args.only)]
        if not names:
            parser.error(f"--only {' '.join(args.only)}: nothing begins so; there are {', '.join(least_ranks)}")
    settings = {**vars(args), "only": names, "out": None if args.out is None else str(args.out.absolute())}
    with tempfile.TemporaryDirectory() as folder:
        here = [f"parallelism.num_ranks={ranks}", f"parallelism.device={device}"]
        config = load_config(None, [*here, f"training.output_dir={json.dumps(folder)}"])
        if args.apart:
            _start_apart(config, entry, settings, key, Path(folder))
        else:
            start_ranks(config, entry, settings=settings)


def _start_apart(config: Config, entry: str, settings: dict[str, Any], key: str, folder: Path) -> None:
    """One run after the other, each in processes of its own, which leave nothing to the next; one file of results."""
    began, all_of_them, one = time.perf_counter(), {}, folder / "one.json"
    for name in settings["only"]:
        if time.perf_counter() - began > settings["seconds"]:
            break
        one.unlink(missing_ok=True)
        why = ""
        try:
            start_ranks(config, entry, settings={**settings, "only": [name], "out": str(one)})
        except RankFailure as failure:
            why = str(failure).split("\n")[0]
        found = json.loads(one.read_text()) if one.is_file() else {"failed": {name: why}, key: []}
        before = all_of_them or {**found, key: [], "failed": {}}
        all_of_them = before | {
            "settings": {**found.get("settings", {}), "only": settings["only"]},
            key: before[key] + found[key],
            "failed": before["failed"] | found["failed"],
        }
        if settings["out"] is not None:
            Path(settings["out"]).write_text(json.dumps(all_of_them, indent=1) + "\n")


def config_of_run(name: str, given: list[str], tiny: bool, folder: Path) -> Config:
    """The configuration of one run on the ranks that there are, in a folder of its own.

    Raises:
        ValueError: one that cannot be."""
    own = folder / "".join(letter if letter.isalnum() else "-" for letter in name)
    here = [f"parallelism.num_ranks={dist.get_world_size()}", f"parallelism.device={'cpu' if tiny else 'cuda'}"]
    return load_config(None, [*STEPS_ALONE, "training.check_memory=false", *given, *here, f"training.output_dir={own}"])


def measure_runs(
    settings: dict[str, Any],
    device: torch.device,
    measure_one: Callable[[str], dict[str, Any]],
    line: Callable[[dict[str, Any]], str],
    key: str,
    **about: Any,
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Measure the runs that `settings` names, and write what was found; (results, why others failed). Collective.

    Args:
        measure_one: of a name; raises ValueError for what cannot be.
        line: of a result, for people.
        key, about: of the results in the JSON file, and what it says beside them."""
    began, main = time.perf_counter(), dist.get_rank() == 0
    found: list[dict[str, Any]] = []
    failed: dict[str, str] = {}
    leave_groups = groups_before(device)
    for name in settings["only"]:
        if slowest([time.perf_counter() - began], device)[0] > settings["seconds"]:
            failed[name] = f"not begun within {settings['seconds']} s"
            continue
        try:
            found.append(measure_one(name))
        except (ValueError, RuntimeError, torch.OutOfMemoryError) as error:
            if dist.get_world_size() > 1 and not isinstance(error, ValueError):
                raise  # other ranks may wait in a collective
            failed[name] = f"{type(error).__name__}: {error}".split("\n")[0]
        else:
            if main:
                print(f"{name}: {line(found[-1])}", flush=True)
        free_memory(device)
        leave_groups()
        out = settings["out"]
        write_results({**settings, "out": out and Path(out)}, device, **about, failed=failed, **{key: found})
    return found, failed
