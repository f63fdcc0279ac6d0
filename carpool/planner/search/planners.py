"""Other planners as policies of the search: what would they choose, by the same model of costs?

    restrict    what the planner can choose among, of what Carpool can run
    refine      what it decides by a formula of its own, once degrees and micro-batch are given
    order       its own objective, where that is not the predicted step: the candidates, the best first

What a planner chooses is predicted as Carpool's own plan is, so that two plans differ in what was chosen and in nothing
else. Transports are those of the search, unless a planner is made of its own.

    plan(shape, hardware, ..., system=PLANNERS[name])          carpool plan --policy NAME --policy OTHER

`PLANNERS` is a registry for plug-ins: entry points of the group "carpool.planners" (`carpool.plugins`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from carpool.parallel.degrees import Degrees
from carpool.planner.configuration.candidate import Candidate
from carpool.planner.model.shape import ModelShape
from carpool.planner.search.constraints import constrained
from carpool.planner.search.space import Space
from carpool.planner.step.lengths import Lengths
from carpool.plugins import Registry

LengthsOf = Callable[[Candidate], Lengths]


@dataclass(frozen=True)
class Planner:
    """Another planner; see the module's docstring.

    Attributes:
        source: the paper, and where in it.
        chooses: for people, what it does otherwise than Carpool's search.
        space: values of fields of `Space` that it chooses among; others stay as they are.
        allowed: of a model, GPUs and degrees: why it would not have them; None: it may.
        moves: it goes through the space by moves (`carpool.planner.search.moves`).
    """

    source: str
    chooses: str
    space: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    allowed: Callable[[ModelShape, Degrees], str | None] | None = None
    refine: Callable[[Candidate, Lengths], Candidate] | None = None
    order: Callable[[Sequence[Candidate], LengthsOf], list[Candidate]] | None = None
    moves: bool = False

    def restrict(self, space: Space, model: ModelShape) -> Space:
        """The part of a space that it chooses among.

        Raises:
            ValueError: nothing is left of it."""
        found = constrained(space, self.space)
        if (rule := self.allowed) is None:
            return found
        own = rule
        return replace(found, allowed=lambda degrees: space.allowed(degrees) or own(model, degrees))


PLANNERS: Registry[Planner] = Registry("planner", "carpool.planners", {})
# `carpool plan --moves`.
MOVES = Planner("Liu et al., EuroSys 2024 (Aceso)", "moves away from the bottleneck, one after the other", moves=True)
