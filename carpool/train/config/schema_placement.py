"""The section [placement]: where experts live while a run goes on."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from carpool.plugins.nearest import nearest
from carpool.train.config.schema_base import Section, known_name


def _check_solver(name: str) -> None:
    from carpool.placement.solvers import solver_names

    if name not in (known := solver_names()):
        close = nearest(name, known)
        raise ValueError(
            f"placement.solver = {name!r}: expected one of {', '.join(known)}"
            + (f" (did you mean {close}?)" if close else "")
        )


# Policies that ask a solver.
SOLVING = ("migrate", "place")


def _known_policy(name: str) -> str:
    """Names are the registry's, plug-ins' included."""
    if name in SOLVING:  # without PyTorch, which the registry needs
        return name
    from carpool.placement.policies import POLICIES

    return known_name("placement.policy", name, (*SOLVING, *sorted(POLICIES)))


PolicyName = Annotated[str, AfterValidator(_known_policy)]


class PlacementSection(Section):
    """Moving experts, while a run goes on, to where their tokens are. Exact: only the order of sums changes."""

    every: int | None = Field(
        default=None,
        gt=0,
        description="Steps between two looks at where experts should live. none: they stay where moe.layout puts them.",
    )
    policy: PolicyName = Field(
        default="migrate",
        description="What decides where experts go. migrate: homes and replicas go where the solver says, if the "
        "cost model says that moving pays. place: experts stay where the file moe.layout puts them, which `carpool "
        "place --solvers SOLVER` wrote. Others are plug-ins: they look at the predicted load alone, and are followed "
        "at once. Those of published systems are shadow (FasterMoE), subset (Prophet), expand_shrink (FlexMoE), eplb "
        "(DeepSeek-V3), lpt_cv (MindSpeed), pick (SmartMoE), fetch (Janus) and degree (Tutel).",
    )
    solver: str = Field(
        default="search",
        description="For policy = migrate: the solver, as `carpool place` names them (search, eplb, lpt, ...).",
    )
    replicas: int = Field(
        default=0, ge=0, description="Room on each rank for copies of experts, beside the experts that live there."
    )
    prefetch: bool = Field(
        default=True,
        description="Copies are filled while earlier layers compute, and the backward does not wait for their "
        "gradients. false: each layer waits for both. The bits are the same.",
    )
    predictor: Literal["last", "ema"] = Field(
        default="ema",
        description="How the load of the next steps is predicted. last: as in the last step. ema: a moving average.",
    )
    load_limit: float = Field(
        default=1.1,
        gt=1,
        description="The most that any rank may have to compute, as a multiple of the mean over ranks.",
    )
    hysteresis: float = Field(
        default=2.0,
        ge=0,
        description="By the cost model, a move must save this many times what it costs in the next 500 steps, and this "
        "many times half a percent of a layer's time. Raise it if experts move to and fro. 0: any gain will do.",
    )
    tokens: int = Field(
        default=16384,
        gt=0,
        description="How many of the newest tokens, over all ranks, the solver is given the choices of.",
    )
    lag: int = Field(
        default=1,
        gt=0,
        description="Steps that the solver has before its answer is used. Training waits if the answer is late, "
        "so that runs stay reproducible.",
    )
    background: bool = Field(
        default=True,
        description="The solver runs in a process beside training, on a CPU of rank 0's machine. false: training "
        "waits for it. The result is the same.",
    )

    @property
    def uses_replicas(self) -> bool:
        """Whether the policy fills slots with replicas."""
        if self.policy in SOLVING:
            return True
        from carpool.placement.policies import POLICIES

        return POLICIES[self.policy].replicas

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.solver != type(self).model_fields["solver"].default:
            _check_solver(self.solver)
        if self.policy == "place" and self.every is not None:
            raise ValueError("placement.policy = 'place' leaves experts where they are: leave placement.every out")
        if self.policy not in SOLVING and self.uses_replicas and not self.replicas:
            raise ValueError(
                f"placement.policy = {self.policy!r} needs placement.replicas: slots on each rank for replicas"
            )
        return self
