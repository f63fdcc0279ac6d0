"""A group of fewer ranks than the settings are of: its mesh, and its share of the same steps.

The settings of an elastic run describe the full group. A smaller group keeps the sequences of each optimizer step, and
with them the order of the data (`carpool.train.data.loader`); it divides them anew. The largest number of ranks that
satisfies these rules computes, and further ranks are idle until the group changes:

    tp, cp, pp, etp      as they are said: they divide the ranks
    dp_replicate         the largest number, at most as many as were said, that divides the rest
    ep                   as said, where it divides the ranks of a replica; else derived as if it had not been said
    micro-batches        the fewest, at least as many as were said, in which no rank has more sequences than
                         per_device_train_batch_size; where half of the ranks cannot, the fewest with more sequences

Shares may be unequal: the loss is a sum over tokens, divided by all tokens of the step. With parallelism.plan they are
equal, and the planner chooses whatever it may choose, for the ranks that are there.

    16 sequences, 4 ranks with 4 each  ->  3 ranks: 2 micro-batches of 8 sequences; ranks have 3, 3 and 2 of each
    4 sequences, 4 ranks with 1 each   ->  3 ranks: 3 do not divide 4; 2 ranks, 2 micro-batches, and an idle rank
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from carpool.train.config import Config

# Of ranks: how many the full group has, and when theirs was complete.
FULL, FORMED = "CARPOOL_ELASTIC_RANKS", "CARPOOL_GROUP_FORMED"
_DONE, _LEFT = "carpool/run-done", "carpool/idle-left"
_IDLE_SECONDS, _FAREWELL_SECONDS = 0.5, 5.0
# Of a rank of which nothing was heard.
LOST_SECONDS = 15.0
# A rank of the group before may still hold the run's folder, or its disk be full.
_FOLDER_SECONDS = 60.0


class RegroupError(RuntimeError):
    """The ranks leave, and a new group goes on from another checkpoint."""


def check_groups(config: Config, full: int, fewest: int, step: int) -> None:
    """Raise ValueError if a group of an elastic run could not go on: of `fewest` ranks, `step` more, ... or `full`."""
    config.parallelism.check_ranks(full)
    for section, key, fits in (
        ("parallelism", "rank_speeds", config.parallelism.rank_speeds in (None, "measured")),
        ("moe", "layout", config.moe.layout == "contiguous"),
    ):
        if not fits:
            raise ValueError(f"{section}.{key} is of one number of ranks, and --elastic changes it; leave it out")
    for ranks in range(fewest, full, step):
        regrouped(config, full, ranks)


def regrouped(config: Config, full: int, ranks: int) -> tuple[Config, int]:
    """(The settings of a group of `ranks`, how many of them compute), where `config` describes `full` ranks.

    Raises:
        ValueError: no number of these ranks can take the steps of the full group."""
    if ranks == full:
        return config, full
    sequences = config.flat()["training.gradient_accumulation_steps"] * sum(_sizes(config, full))
    why = None
    # First as little memory as before, on half of the ranks at least.
    tries = [(used, True) for used in range(ranks, (ranks - 1) // 2, -1)]
    for used, small in [*tries, *((used, False) for used in range(ranks, 0, -1))]:
        try:
            return _divided(config, used, sequences, small), used
        except ValueError as error:
            why = error
    raise ValueError(
        f"{ranks} of {full} ranks cannot go on with steps of {sequences} sequences ({why}): let --elastic begin with "
        "more agents"
    )


def _sizes(config: Config, ranks: int) -> tuple[int, ...]:
    """Sequences in a micro-batch of each data-parallel rank."""
    # Experts do not matter to data-parallel ranks.
    section = config.parallelism.model_copy(update={"ep_size": None})
    return config.batch_sizes(section.resolve(ranks, 1))


def _divided(config: Config, used: int, sequences: int, small: bool) -> Config:
    """The settings with a mesh of exactly so many ranks. `small`: in micro-batches that need no more memory."""
    section, dumped = config.parallelism, config.model_dump()
    fixed = section.tp_size * section.cp_size * section.pp_size
    if used % fixed:
        raise ValueError(f"tp_size * cp_size * pp_size = {fixed} does not divide {used} ranks")
    dp = used // fixed
    copies = next(one for one in range(section.dp_replicate_size, 0, -1) if dp % one == 0)
    keeps_ep = used // section.pp_size // copies % ((section.ep_size or 1) * section.etp_size) == 0
    keeps_nodes = used % (section.ranks_per_node or 1) == 0
    dumped["parallelism"] |= {"fsdp_size": None, "num_ranks": None, "dp_replicate_size": copies}
    dumped["parallelism"] |= ({} if keeps_ep else {"ep_size": None}) | ({} if keeps_nodes else {"ranks_per_node": None})
    batch = dumped["training"]
    most, fewest = batch["per_device_train_batch_size"], batch["gradient_accumulation_steps"]
    equal = section.plan is not None or config.memory.plan is not None
    why: ValueError | None = None
    for count in range(fewest, sequences // dp + 1):
        total, rest = divmod(sequences, count)
        each = -(-total // dp)
        if rest or (small and each > most) or (equal and total % dp):
            continue
        batch |= {"gradient_accumulation_steps": count, "per_device_train_batch_size": each}
        batch["micro_batch_sequences"] = total if total % dp else None
        try:
            made = type(config).model_validate(dumped)
            made.parallelism.check_ranks(used)
            return made
        except ValueError as error:
            why = why or error
    raise why or ValueError(f"{sequences} sequences of a step cannot be divided over {dp} data-parallel ranks")


@dataclass(frozen=True)
class Group:
    """The ranks of an elastic run that are there; of them, `used` compute. `full`: those of the settings."""

    rank: int
    ranks: int
    used: int
    full: int

    @property
    def idle(self) -> bool:
        """Whether this rank waits for another group."""
        return self.rank >= self.used

    def wait(self) -> None:
        """On an idle rank: until the run of the others has ended. Raises ConnectionError if it broke."""
        print(
            f"rank {self.rank} is idle: {self.used} of {self.ranks} ranks take the steps of {self.full}, and more "
            "would not divide them",
            file=sys.stderr, flush=True,
        )  # fmt: skip
        try:
            store = _store()
            while not store.check([_DONE]):
                time.sleep(_IDLE_SECONDS)
            store.add(_LEFT, 1)
        except RuntimeError as error:
            raise ConnectionError(f"rank 0 has left: {error}") from error

    def release(self) -> None:
        """When the run has come to its end: rank 0 lets idle ranks leave."""
        if self.rank or self.used == self.ranks:
            return
        store = _store()
        store.set(_DONE, "1")
        end = time.monotonic() + _FAREWELL_SECONDS
        while store.add(_LEFT, 0) < self.ranks - self.used and time.monotonic() < end:
            time.sleep(_IDLE_SECONDS / 5)


def recovery_times(folder: Path) -> dict[str, float] | None:
    """In a rank of an elastic run that has imported what it needs: the wall clock's times of the last record of the
    group before, of the new group, and now. None where there was no group before, or no elastic run."""
    from carpool.train.records.run_folder import METRICS

    if FORMED not in os.environ or not (folder / METRICS).exists():
        return None
    last = (folder / METRICS).stat().st_mtime
    return {"last": last, "regroup": float(os.environ[FORMED]), "imports": time.time()}


def _store() -> Any:
    """That of the group, where rank 0 is."""
    import torch.distributed as dist

    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return dist.TCPStore(address, port, is_master=False, timeout=timedelta(minutes=10), wait_for_workers=False)


def enter_group(config: Config) -> tuple[Config, Group | None]:
    """In a rank, before it joins a process group: the settings and the group, where the run is elastic; else
    `(config, None)`. The environment then describes the ranks that compute."""
    full = int(os.environ.get(FULL, "0"))
    if not full:
        return config, None
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    config, used = regrouped(config, full, ranks)
    # Agents count restarts by themselves, and the roll call needs one number.
    os.environ.update(WORLD_SIZE=str(used), TORCHELASTIC_RESTART_COUNT="0")
    if used < ranks:
        # The last node has fewer ranks that compute than its agent says.
        os.environ.pop("LOCAL_WORLD_SIZE", None)
    if rank == 0:
        _wait_for_folder(config.training.folder)
    return config, Group(rank, ranks, used, full)


def _wait_for_folder(folder: Path) -> None:
    """Until no rank of the group before holds it, and the disk takes files again."""
    from carpool.train.records.run_folder import METRICS, check_idle, why_not_writable

    end = time.monotonic() + _FOLDER_SECONDS
    while True:
        try:
            check_idle(folder)
            if (folder / METRICS).exists() and (why := why_not_writable(folder)):
                raise ValueError(f"{folder}: {why}")
            return
        except ValueError as error:
            if time.monotonic() > end:
                raise RegroupError(str(error)) from error
            time.sleep(_IDLE_SECONDS)
