"""The rank and world size of this process, from the environment variables of its launcher.

torchrun sets the variables that PyTorch reads. Those of Slurm are converted:

    SLURM_PROCID=5  SLURM_STEP_NUM_TASKS=8  SLURM_LOCALID=1  SLURM_STEP_NODELIST="gpu[07-08]"  SLURM_JOB_ID=4711
    ->  RANK=5  WORLD_SIZE=8  LOCAL_RANK=1  MASTER_ADDR=gpu07  MASTER_PORT=19711
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields


@dataclass(frozen=True)
class World:
    """The place of this process among the ranks that a launcher started."""

    rank: int
    world_size: int
    local_rank: int
    master_addr: str
    master_port: int
    started_by: str

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank {self.rank} of {self.world_size} ranks: ranks count from 0 to their number less 1")
        if not 0 <= self.local_rank < self.world_size:
            raise ValueError(f"local rank {self.local_rank} of {self.world_size} ranks in all")
        if not 0 < self.master_port < 2**16:
            raise ValueError(f"port {self.master_port} (MASTER_PORT): ports are 1 to {2**16 - 1}")

    def environment(self) -> dict[str, str]:
        """The variables that `torch.distributed` reads."""
        return {field.name.upper(): str(getattr(self, field.name)) for field in fields(self)[:-1]}


def find_world(env: Mapping[str, str]) -> World | None:
    """The world of this process; None if no launcher started it as one of several ranks.

    Raises:
        ValueError: variables that contradict each other or are not numbers.
    """
    try:
        if "RANK" in env and "WORLD_SIZE" in env:
            return World(
                rank=_number(env, "RANK"),
                world_size=_number(env, "WORLD_SIZE"),
                local_rank=_number(env, "LOCAL_RANK", 0),
                master_addr=env.get("MASTER_ADDR", "127.0.0.1"),
                master_port=_number(env, "MASTER_PORT", 29500),
                started_by="torchrun",
            )
        if "RANK" in env:
            raise ValueError(f"RANK={env['RANK']} is set, but WORLD_SIZE is not: set both, or neither")
        tasks = _number(env, "SLURM_STEP_NUM_TASKS", _number(env, "SLURM_NTASKS", 1))
        # A batch script also has SLURM_PROCID, but only processes started by srun have a step. Without one this process
        # is alone, and would wait forever for other ranks.
        in_step = "SLURM_STEP_ID" in env or "SLURM_STEPID" in env
        if "SLURM_PROCID" in env and tasks > 1 and in_step:
            nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST") or "127.0.0.1"
            job = _number(env, "SLURM_JOB_ID", 0)
            return World(
                rank=_number(env, "SLURM_PROCID"),
                world_size=tasks,
                local_rank=_number(env, "SLURM_LOCALID", 0),
                master_addr=env.get("MASTER_ADDR") or first_host(nodes),
                # Derived from the job id: the same on all ranks, and different for two jobs on one node.
                master_port=_number(env, "MASTER_PORT", 15000 + job % 15000),
                started_by="slurm",
            )
    except ValueError as error:
        raise ValueError(f"cannot read the launcher's environment variables: {error}") from None
    return None


def _number(env: Mapping[str, str], name: str, default: int = 0) -> int:
    try:
        return int(env[name]) if name in env else default
    except ValueError:
        raise ValueError(f"{name}={env[name]!r} is no number") from None


def first_host(nodelist: str) -> str:
    """The first host of Slurm's notation: "gpu[07-09,12],login1" gives "gpu07"."""
    first = re.match(r"(?:\[[^\]]*\]|[^,\[])*", nodelist.strip())
    assert first is not None  # the pattern also matches the empty string
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first[0])
