"""What the benchmarks share: how one over ranks begins, in the command and in each rank; its cases, which are every
shape with every routing; a row for each contender; and how a contender fails.

A contender may run out of memory, on some ranks or on all. A rank to which that happens in the middle of a layer never
joins the collectives in which the others wait. So ranks meet in the store that started them, where nobody waits for a
device (`attempt_together`): if all failed, at the same collective, the next contender can go on; if some did, nothing
can be trusted any more, and the run ends with a message.
"""

from __future__ import annotations

import datetime
import gc
import importlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from rich.console import Console
from torch.distributed import distributed_c10d

from carpool.bench.options import RankOptions, ShapeOptions, find_ranks
from carpool.bench.result_files import Result, now, publish
from carpool.bench.routings import make_routings
from carpool.layout import ExpertLayout
from carpool.routing import Routing
from carpool.train.config import Config, load_config
from carpool.train.launch.start import run


class RankBenchmark(NamedTuple):
    """What one benchmark over ranks is.

    Attributes:
        name: of its files.
        measure: makes the cases, from settings, the rank's device and the command. All ranks call it together.
        plot: as of `carpool.bench.result_files.publish`.
    """

    name: str
    settings: type[RankOptions]
    measure: Callable[[Any, torch.device, str], Sequence[Any]]
    show: Callable[[Result], None]
    plot: str | None = None


def start_ranks(settings: RankOptions, benchmark: str, *, debug: bool, command: str) -> None:
    """Start the ranks (or be one, under torchrun or Slurm), measure, and show and write the results.

    Args:
        benchmark: "module:NAME" of a `RankBenchmark`, which the ranks alone import.
        command: what the user typed, for the record.

    Raises:
        ValueError: settings that do not fit this machine, or contenders asked for by name that cannot run here.
        OSError: the folder cannot be written.
        carpool.train.launch.failure.RankFailure: a rank failed.
    """
    cuda, num_ranks = find_ranks(settings.device, settings.ranks)
    settings = settings.resolve(cuda=cuda, num_ranks=num_ranks)
    Path(settings.out).mkdir(parents=True, exist_ok=True)
    options = [f"parallelism.num_ranks={num_ranks}", f"parallelism.device={'cuda' if cuda else 'cpu'}"]
    config = load_config(None, [*options, f"training.output_dir={json.dumps(settings.out)}"])
    entry = "carpool.bench.contest:measure_on_rank"
    run(config, entry, debug=debug, benchmark=benchmark, settings=settings.to_json(), command=command)


def measure_on_rank(config: Config, benchmark: str, settings: dict[str, Any], command: str) -> None:
    """One rank's part of a benchmark; the process group is there."""
    from carpool.train.launch.machine import rank_device

    module, _, name = benchmark.partition(":")
    own: RankBenchmark = getattr(importlib.import_module(module), name)
    started, device = now(), rank_device()
    cases = own.measure(own.settings.from_json(settings), device, command)
    if dist.get_rank() == 0:
        result = Result.of(started, command, settings, device, dist.get_world_size(), cases)
        publish(result, own.name, own.show, own.plot)


R = TypeVar("R")


@dataclass(kw_only=True)
class Row:
    """One contender of a case.

    Attributes:
        lossy: what changes the answer beyond rounding.
        unavailable: why it could not run; then all else is empty.
        error: the largest error, as a share of what is allowed.
        sections: times by what was timed.
    """

    label: str
    lossy: tuple[str, ...] = ()
    unavailable: str | None = None
    error: float | None = None
    sections: dict[str, Any] = field(default_factory=dict)


def measure_cases(settings: ShapeOptions, measure: Callable[[Any, str], R]) -> list[R]:
    """Measure every shape with every routing; the results in the order of the settings.

    Buffers of `nvlink` grow and never shrink: small shapes come first, so that each has buffers of its size."""
    results = {
        (shape, kind): measure(shape, kind)
        for shape in sorted(settings.shapes, key=lambda shape: shape.tokens)
        for kind in settings.routings
    }
    return [results[shape, kind] for shape in settings.shapes for kind in settings.routings]


def draw_routings(settings: ShapeOptions, shape: Any, kind: str, num_ranks: int) -> tuple[ExpertLayout, list[Routing]]:
    """Experts in order, and the routing of each rank's tokens. `shape` has tokens, experts and top_k."""
    layout, exponent = ExpertLayout.contiguous(shape.experts, num_ranks), settings.zipf_exponent
    return layout, make_routings(kind, shape.tokens, shape.top_k, layout, seed=settings.seed, zipf_exponent=exponent)


def draw_rows(
    tokens: int, hidden: int, dtype: torch.dtype, device: torch.device, seed: int, rank: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """x_TH and dy_TH: normal random numbers, other ones on each rank."""
    generator = torch.Generator(device).manual_seed(7919 * (seed + 1) + rank)
    x_TH, dy_TH = torch.randn(2, tokens, hidden, generator=generator, device=device).to(dtype)
    return x_TH, dy_TH


def print_remarks(console: Console, rows: Sequence[Row]) -> None:
    """Below a table: who could not run and why, and who is lossy."""
    for row in rows:
        if row.unavailable:
            console.print(f"{row.label} is not available: {row.unavailable}\n", highlight=False, markup=False)
        if row.lossy:
            console.print(f"{row.label} is lossy: {', '.join(row.lossy)}\n", highlight=False, markup=False)


OUT_OF_MEMORY = "out of memory"
# How long a rank waits for the others: one that has failed, and one that has not (they may be compiling).
PATIENCE_FAILED, PATIENCE = datetime.timedelta(seconds=60), datetime.timedelta(seconds=600)


def attempt_together(
    what: Callable[[], object], group: dist.ProcessGroup | None, device: torch.device, theirs: bool = False
) -> str | None:
    """Call `what` on all ranks; why it cannot be done, or None if it was. Collective.

    Args:
        group: in which `what` communicates; all ranks. None: this process alone.
        theirs: see `why_not`.

    Raises:
        RuntimeError: it failed on some ranks only.
        Exception: whatever else `what` raised.
    """
    why = None
    try:
        what()
    except Exception as error:
        why = why_not(error, theirs)
        if why is None:
            raise
    if why:  # only here, where the error no longer holds the tensors of its frames
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    if group is None or dist.get_world_size() == 1:
        return why
    rank, others = dist.get_rank(), range(dist.get_world_size())
    store = distributed_c10d._get_default_store()
    number = store.add(f"bench/attempts/{rank}", 1)
    done = group._get_sequence_number_for_group() if why else 0  # type: ignore[attr-defined]
    store.set(f"bench/{number}/{rank}", f"{done} {why or ''}")
    try:
        store.wait([f"bench/{number}/{other}" for other in others], PATIENCE_FAILED if why else PATIENCE)
    except RuntimeError:
        raise RuntimeError(
            f"rank {rank}: {why or 'done'}, and other ranks did not come back; ask for less, or leave it out"
        ) from None
    said = [store.get(f"bench/{number}/{other}").decode().split(" ", 1) for other in others]
    places, reasons = ({text[part] for text in said} for part in (0, 1))
    if len(places) > 1 or ("" in reasons and len(reasons) > 1):
        failed = [f"rank {other}: {reason or 'done'}" for other, (_, reason) in enumerate(said)]
        raise RuntimeError(f"it failed on some ranks only ({'; '.join(failed)}); ask for less, or leave it out")
    return why


def why_not(error: Exception, theirs: bool) -> str | None:
    """One line for the table if a contender could not run, or None if the error is something else: a bug.

    `theirs`: it is transformers', where PyTorch says that a size is not to its liking; Carpool's say so themselves."""
    text = str(error)
    full = any(part in text.lower() for part in (OUT_OF_MEMORY, "can't allocate memory", "not enough memory"))
    if isinstance(error, torch.OutOfMemoryError) or (isinstance(error, MemoryError | RuntimeError) and full):
        return OUT_OF_MEMORY
    kinds = (ValueError, NotImplementedError, ImportError, *((RuntimeError,) if theirs else ()))
    if isinstance(error, kinds) and not isinstance(error, torch.AcceleratorError):
        return (text.strip() or type(error).__name__).splitlines()[0]
    return None
