"""The section [placement]: where experts live while a run goes on."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, Field

from carpool.train.config.declarations import Excludes, Needs
from carpool.train.config.schema_base import Section, registered

# Policies that ask a solver.
SOLVING = ("migrate", "place")
_EVERY = Needs("placement.every")


# Policies that were, by the plans of spare slots that took their places.
_PLANS = {name: name for name in ("shadow", "subset", "expand_shrink", "fetch", "eplb")} | {"degree": "all"}


def _is_no_plan(policy: str) -> str:
    """Refuse what policies were called that are plans of spare slots now."""
    if policy in _PLANS:
        raise ValueError(
            f"replicas follow each micro-batch now: instead of placement.policy = {policy!r} and placement.replicas, "
            f"set moe.spare_plan = {_PLANS[policy]!r} and moe.spare_slots"
        )
    return policy


class PlacementSection(Section):
    """Moving experts, while a run goes on, to where their tokens are. Exact: only the order of sums changes."""

    needs: ClassVar = Needs("placement.every and placement.policy=migrate")

    every: Annotated[
        int | None,
        _EVERY,
        Excludes("parallelism.pp_size", "layers of other stages cannot be moved"),
        Excludes("parallelism.etp_size", "solvers and policies move whole experts, not slices"),
    ] = Field(default=None, gt=0)
    """Steps between two looks at where experts should live. none: they stay where moe.layout puts them."""
    policy: Annotated[
        str,
        AfterValidator(_is_no_plan),
        registered("placement.policy", "carpool.placement.policies.POLICIES", *SOLVING),
        Needs("placement.every or placement.policy=place", "placement.every"),
        Excludes(
            "placement.every",
            "experts stay where the file puts them",
            own="placement.policy=place",
            instead={"placement.every": None},
        ),
        Excludes(
            "moe.layout=contiguous",
            "experts stay where the file moe.layout puts them, which `carpool place TRACE --ranks N --solvers "
            "{placement.solver}` writes",
            own="placement.policy=place",
            instead={"moe.layout": "FILE"},
        ),
    ] = "migrate"
    """What decides where experts go. migrate: they go where the solver says, if the cost model says that moving pays.
    place: experts stay where the file moe.layout puts them, which `carpool place --solvers SOLVER` wrote. Others are
    plug-ins: they look at the predicted load alone, and are followed at once. Those of published systems are lpt_cv
    (MindSpeed) and pick (SmartMoE)."""
    solver: Annotated[
        str,
        registered("placement.solver", "carpool.placement.solvers.solver_names", "search"),
        Needs(
            "placement.every or placement.policy=place and placement.policy=migrate or place",
            "placement.every and placement.policy=migrate",
        ),
    ] = "search"
    """For policy = migrate: the solver, as `carpool place` names them (search, eplb, lpt, ...)."""
    predictor: Annotated[Literal["last", "ema"], _EVERY] = "ema"
    """How the load of the next steps is predicted. last: as in the last step. ema: a moving average."""
    load_limit: float = Field(default=1.1, gt=1)
    """The most that any rank may have to compute, as a multiple of the mean over ranks."""
    hysteresis: float = Field(default=2.0, ge=0)
    """By the cost model, a move must save this many times what it costs in the next 500 steps, and this many times
    half a percent of a layer's time. Raise it if experts move to and fro. 0: any gain will do."""
    tokens: int = Field(default=16384, gt=0)
    """Of how many of the newest tokens, over all ranks, the solver gets the choices."""
    lag: int = Field(default=1, gt=0)
    """Steps that the solver has before its answer is used. Training waits if the answer is late, so that runs stay
    reproducible."""
    background: bool = True
    """The solver runs in a process beside training, on a CPU of rank 0's machine. false: training waits for it. The
    result is the same."""
