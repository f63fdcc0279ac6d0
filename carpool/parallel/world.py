"""Who started this process, and which rank of how many is it? Read from the environment variables of the launcher.

torchrun sets what PyTorch reads. Slurm sets its own, from which the same is derived:

    SLURM_PROCID=5  SLURM_STEP_NUM_TASKS=8  SLURM_LOCALID=1  SLURM_STEP_NODELIST="gpu[07-08]"  SLURM_JOB_ID=4711
    ->  RANK=5  WORLD_SIZE=8  LOCAL_RANK=1  MASTER_ADDR=gpu07  MASTER_PORT=19711
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields


@dataclass(frozen=True)
class World:
    """This process's place among ranks that somebody else started."""

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
    """Who started this process as one rank of several? None: nobody did.

    Raises:
        ValueError: variables that contradict each other or are no numbers.
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
        # A batch script also has SLURM_PROCID, but only what srun started has a step: without it, this process is
        # alone and would wait forever for ranks that nobody starts.
        in_step = "SLURM_STEP_ID" in env or "SLURM_STEPID" in env
        if "SLURM_PROCID" in env and tasks > 1 and in_step:
            nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST") or "127.0.0.1"
            job = _number(env, "SLURM_JOB_ID", 0)
            return World(
                rank=_number(env, "SLURM_PROCID"),
                world_size=tasks,
                local_rank=_number(env, "SLURM_LOCALID", 0),
                master_addr=env.get("MASTER_ADDR") or first_host(nodes),
                # Derived from the job, so that all of its ranks agree and two jobs on one node do not.
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
    assert first is not None  # it matches nothing, too
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first[0])
