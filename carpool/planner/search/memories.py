"""How many bytes candidates of a search need: what they have in common is counted once.

    memories.total(candidate, most)      as `carpool.planner.memory.peak.memory_of`, exact up to `most`

Most candidates differ in what they keep and in where the optimizer's state is. The sizes of their ranks are the same.
"""

from __future__ import annotations

from typing import Any

from carpool.planner.configuration.candidate import Candidate
from carpool.planner.memory.peak import peak_of
from carpool.planner.memory.sizes import RankSizes, sizes_of
from carpool.planner.search.space import Problem


class Memories:
    """See the module's docstring."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.sizes: dict[Any, RankSizes] = {}

    def total(self, candidate: Candidate, most: float = float("inf")) -> float:
        """Bytes of the fullest stage. If they are more than `most`, those of the first stage of which this is true."""
        found = 0.0
        for stage in sorted({0, candidate.degrees.pp - 1}):
            found = max(found, peak_of(self._sizes(candidate, stage), candidate, stage).total)
            if found > most:
                break
        return found

    def _sizes(self, one: Candidate, stage: int) -> RankSizes:
        key = (
            stage, one.degrees, one.pipeline, one.micro_batch, one.sequence_length, one.transport, one.layers_compiled,
            one.divides_tokens, one.moments, one.optimizer, one.stored, one.computed,
        )  # fmt: skip
        if key not in self.sizes:
            self.sizes[key] = sizes_of(self.problem.model, one, stage, self.problem.routes)
        return self.sizes[key]
