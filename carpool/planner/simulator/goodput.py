"""Failures: how often to write a checkpoint, and how much of the time is left for training.

N GPUs, each of which fails once in M hours, fail together once in M / N. A failure costs the work since the last
checkpoint, and the time to start again; a checkpoint costs the time for which training waits. So there is a best
interval between checkpoints:

    16,384 GPUs that fail once in 50,676 hours each        M = 3.1 hours, 7.8 failures a day
    a checkpoint C = 60 s, a restart R = 600 s             Young: sqrt(2 C M) = 19 minutes
    goodput there                                          0.85

Failures are independent (a Poisson process), and also strike while a checkpoint is written, or the run restarts. Then
the goodput of an interval T is exactly T / (M e^(R/M) (e^((T+C)/M) - 1)) (Daly, A higher order estimate of the optimum
checkpoint interval for restart dumps, 2006). Young's and Daly's intervals approximate where it is largest."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

DAY, HOUR = 86400.0, 3600.0
# Llama 3 (arXiv 2407.21783, section 3.3.4): 419 unexpected interruptions in 54 days on 16,384 H100s.
GPU_MTBF_HOURS = 54 * 24 * 16384 / 419
# A run for whose checkpoint and restart failures leave time once in e^5 attempts gets less than 1 % done.
HOPELESS = 5.0
GPU_MTBF_SOURCE = (
    "measured by others (Llama 3, arXiv 2407.21783: 419 unexpected interruptions of 16,384 H100s in 54 days)"
)


@dataclass(frozen=True)
class Failures:
    """What fails, and what that costs.

    Attributes:
        mtbf: seconds between failures of the whole run.
        checkpoint: seconds for which training waits for a checkpoint.
        restart: seconds from a failure until training goes on.
    """

    mtbf: float
    checkpoint: float
    restart: float

    def __post_init__(self) -> None:
        if not (0 < self.mtbf < math.inf and 0 < self.checkpoint < math.inf and 0 <= self.restart < math.inf):
            raise ValueError(
                f"times between failures and of a checkpoint must be positive, and that of a restart not negative, "
                f"and finite; they are {self.mtbf:g}, {self.checkpoint:g} and {self.restart:g} s"
            )

    @classmethod
    def of_gpus(cls, gpus: int, gpu_mtbf_hours: float, checkpoint: float, restart: float) -> Failures:
        """Of a run on so many GPUs, any of which stops it.

        Raises:
            ValueError: hardly anything would be trained between failures."""
        found = cls(gpu_mtbf_hours * HOUR / gpus, checkpoint, restart)
        if checkpoint + restart > HOPELESS * found.mtbf:
            raise ValueError(
                f"one of {gpus:,} GPUs fails every {found.mtbf:.3g} s, but a checkpoint takes {checkpoint:g} s and a "
                f"restart {restart:g} s: nothing would be trained. Take fewer GPUs, GPUs that fail less often "
                "(--mtbf-hours), or shorter checkpoints and restarts"
            )
        return found

    @property
    def per_day(self) -> float:
        """Expected failures of 24 hours."""
        return DAY / self.mtbf

    @property
    def young(self) -> float:
        """Seconds of work between checkpoints (Young, 1974)."""
        return math.sqrt(2 * self.checkpoint * self.mtbf)

    @property
    def daly(self) -> float:
        """The same (Daly, 2006), which also holds where checkpoints are not short beside the MTBF."""
        share = self.checkpoint / (2 * self.mtbf)
        if share >= 1:
            return self.mtbf
        return self.young * (1 + math.sqrt(share) / 3 + share / 9) - self.checkpoint

    def goodput(self, interval: float) -> float:
        """The share of the time in which work is done that is not lost, if a checkpoint follows each `interval` s of
        work."""
        exponent = (interval + self.checkpoint) / self.mtbf
        restarts = self.restart / self.mtbf
        if exponent + restarts > 700:
            return 0.0
        return interval / (self.mtbf * math.exp(restarts) * math.expm1(exponent))

    def sampled_goodput(self, interval: float, checkpoints: int = 20_000, seed: int = 0) -> tuple[float, float]:
        """The same by drawing failures, and its standard error: a run until it has written so many checkpoints."""
        rng = np.random.default_rng(seed)
        took = np.zeros(checkpoints)
        going = np.arange(checkpoints)
        while len(going):
            until = rng.exponential(self.mtbf, len(going))
            took[going] += np.minimum(until, interval + self.checkpoint)
            going = going[until < interval + self.checkpoint]
            restarting = going
            while len(restarting):
                until = rng.exponential(self.mtbf, len(restarting))
                took[restarting] += np.minimum(until, self.restart)
                restarting = restarting[until < self.restart]
        found = interval / took.mean()
        return float(found), float(found * took.std() / took.mean() / math.sqrt(checkpoints))

    def record(self) -> dict[str, Any]:
        best = self.daly
        sampled, error = self.sampled_goodput(best)
        return {
            **asdict(self),
            "failures_per_day": self.per_day,
            "young_interval": self.young,
            "daly_interval": best,
            "goodput": self.goodput(best),
            "goodput_young": self.goodput(self.young),
            "goodput_sampled": sampled,
            "goodput_sampled_error": error,
        }
