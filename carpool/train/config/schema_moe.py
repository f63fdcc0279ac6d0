"""The sections about the MoE layers themselves: how tokens ride, and where experts live."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from carpool.experts.choices import STAGES, WAYS
from carpool.layout.topology import Topology
from carpool.placement.solvers import solver_names
from carpool.routing import DropOptions
from carpool.routing.limit import LimitOptions
from carpool.schedule import MAX_CHUNKS, Schedule
from carpool.train.config.schema_base import Section, nearest


def _stages(value: Any) -> Any:
    """One of `STAGE_WORDS`, or a table of known stages and ways."""

    def refuse(what: str, wrong: Any, known: Sequence[str], expected: str) -> ValueError:
        close = nearest(str(wrong), known)
        return ValueError(f"{what}: expected {expected}{f' (did you mean {close}?)' if close else ''}")

    key = "moe.expert_stages"
    if not isinstance(value, Mapping):
        if value in STAGE_WORDS:
            return value
        raise refuse(f"{key} = {value!r}", value, STAGE_WORDS, 'default, measure, or a table such as {up = "flat"}')
    if not value:
        raise ValueError(f"{key} names no stage: leave it out, or name some of {', '.join(STAGES)}")
    for stage, way in value.items():
        if stage not in STAGES:
            raise refuse(f"{key} has no stage {stage!r}", stage, STAGES, f"one of {', '.join(STAGES)}")
        if way not in WAYS:
            raise refuse(f"{key}.{stage} = {way!r}", way, WAYS, f"one of {', '.join(WAYS)}")
    return value


STAGE_WORDS = ("default", "measure")
Stages = Annotated[Literal["default", "measure"] | dict[str, str], BeforeValidator(_stages)]


def _known_transport(name: str) -> str:
    """Names are the registry's, plug-ins' included."""
    from carpool.transport import TRANSPORTS

    return _known("transport", name, ("auto", *TRANSPORTS))


def _known(key: str, name: str, names: Sequence[str]) -> str:
    if name in names:
        return name
    close = nearest(name, names)
    raise ValueError(
        f"moe.{key} = {name!r}: expected one of {', '.join(names)}" + (f"; did you mean {close}?" if close else "")
    )


def _known_experts(name: str) -> str:
    from carpool.experts import EXPERTS

    return _known("experts", name, ("auto", *EXPERTS))


TransportName = Annotated[str, AfterValidator(_known_transport)]
ExpertsName = Annotated[str, AfterValidator(_known_experts)]

# On the command line, "none" is no value.
ScheduleName = Annotated[
    Literal["auto", "none", "chunks", "two-batch", "tiles"],
    BeforeValidator(lambda value: "none" if value is None else value),
]
# Unless a number is given.
DEFAULT_CHUNKS = {"chunks": 2, "tiles": 4}


class MoeSection(Section):
    """How tokens ride to their experts."""

    transport: TransportName = Field(
        default="auto",
        description="nvlink: one row per (token, rank), written into the memory of the other GPUs of this host; dedup: "
        "the same rows over any network; alltoall: one per (token, expert); gather: every rank sees every token. auto "
        "picks nvlink where it can, else dedup, and logs why.",
    )
    experts: ExpertsName = Field(
        default="auto",
        description="How experts are computed. auto: grouped, or a model's own forward where only that knows how; "
        "reference: a plain loop. fp8: LOSSY. In FP8 with a scale for 1 x 128 of rows and 128 x 128 of weights, sums "
        "in float32; with nvlink.forward_fp8 on the rows as they travelled.",
    )
    expert_stages: Stages = Field(
        default="default",
        description="How grouped experts compute each stage (up, down, dact, dx, dup, ddown): library, or the tiling "
        "of a fused kernel (wide, flat, square). default: by the shape; measure: all are timed before the first step, "
        'on GPUs in bfloat16; a table such as {up = "flat"}: these, and the rest by the shape. What was chosen is in '
        "run.json, and a resumed run uses it again, but for what a table names.",
    )
    recompute_experts: bool = Field(
        default=False,
        description="Grouped experts keep no pre-activation and compute it again in the backward: less memory, one "
        "more product, the same bits.",
    )
    fp8_hold_weights: bool = Field(
        default=False,
        description="experts = fp8: weights are quantised once per step, not in every pass of every micro-batch. Takes "
        "as much memory as the weights in bfloat16.",
    )
    schedule: ScheduleName = Field(
        default="none",
        description="What runs beside what. none: everything in turn; chunks: tokens ride in chunks, one beside the "
        "experts' work on another; two-batch: two halves of a micro-batch run half a layer apart, attention of one "
        "beside the ride of the other; tiles: over nvlink, experts begin on rows that have arrived, and their sums "
        "leave part by part, in one ride. auto: none, chunks or tiles, whichever is fastest on these GPUs, timed at "
        "the beginning and recorded in run.json, where a resumed run finds it; on a CPU none.",
    )
    chunks: int | None = Field(
        default=None,
        ge=1,
        le=MAX_CHUNKS,
        description="schedule = chunks or tiles: in how many pieces. 1 chunk: only a weight gradient runs beside a "
        "ride. none: 2 chunks, or tiles in 4 parts.",
    )
    backward_chunks: int | None = Field(
        default=None, ge=1, le=MAX_CHUNKS, description="schedule = chunks: how many in the backward. none: as many."
    )
    priority: bool = Field(
        default=False,
        description="FSDP's reductions of gradients keep off the links while rides of the backward need them: they "
        "begin when a ride has brought its gradients; with moe.piece_mib also in pieces.",
    )
    piece_mib: float | None = Field(
        default=None,
        ge=1 / 1024,
        description="priority: MiB of gradients that are reduced at once, between two looks at whether a ride is under "
        "way. On GPUs the order of sums may depend on it: equal to rounding. none: uncut, the same bits as without.",
    )
    delay_dense: bool = Field(
        default=False,
        description="Weight gradients of linear layers beside experts (attention's, shared experts') are computed "
        "while the gradients of the next layer's ride travel, not at once. The same bits.",
    )
    layout: str = Field(
        default="contiguous",
        description="Which rank holds which expert: contiguous, or the path of a JSON file with a layout for all "
        "layers, or one for each.",
    )
    router_aux_loss_coef: float | None = Field(
        default=None,
        ge=0,
        description="Weight of the balance loss; 0 turns it off. none: as the model's configuration says.",
    )
    balance: Literal["model", "layer"] = Field(
        default="model",
        description="What the balance loss balances. model: all layers' tokens together, as transformers does, so that "
        "one layer may be uneven in the other's favour; layer: each layer by itself, as in the papers.",
    )
    bias_update_rate: float | None = Field(
        default=None,
        ge=0,
        description="Balance without a loss: how far the bias of each expert moves per step against the load of the "
        "whole batch, in models whose routers have one (DeepSeek-V3 and relatives). 0: biases stay as they are. none: "
        "0.001, as DeepSeek-V3, for such a model from scratch; 0 for a checkpoint (model.path).",
    )
    limit_ranks: int | None = Field(
        default=None,
        gt=0,
        description="LOSSY. Each token's experts are on at most so many ranks: it has no more copies. none: no limit.",
    )
    limit_nodes: int | None = Field(
        default=None, gt=0, description="LOSSY. The same for nodes; with limit_ranks, of these. none: no limit."
    )
    limit_by: Literal["score", "similarity", "groups"] = Field(
        default="score",
        description="Which ranks a token keeps, and what it gets there. score: those that hold most of the weight of "
        "its choices, and its best experts there; similarity: the same ranks, and in place of each choice that is not "
        "there the most similar expert, by the routers' rows as the run starts; groups: DeepSeek's, those with the "
        "best two experts.",
    )
    topology_cap: float | None = Field(
        default=None,
        ge=0,
        le=1,
        description="LOSSY. At most this share of the choices leaves its node, the best ones; in place of the others "
        "come the best experts inside. FasterMoE takes 0.14. none: no cap.",
    )
    capacity_factor: float | None = Field(
        default=None,
        gt=0,
        description="LOSSY. An expert takes at most so many times its even share of the choices of a rank's tokens in "
        "a micro-batch; the others are dropped. Switch Transformer takes 1.25. none: nothing is dropped.",
    )
    first_choices_first: bool = Field(
        default=False,
        description="Of capacity_factor: all tokens' best choices are served before any second ones, as in GShard. "
        "false: token after token.",
    )
    random_second: bool = Field(
        default=False,
        description="LOSSY. With two experts a token, the second one is dropped at random while training, the less of "
        "the weight it has, as in GShard.",
    )
    router_float32: bool = Field(
        default=False, description="Routers make their logits in float32, whatever dtype the model computes in."
    )

    def asked_schedule(self) -> Schedule | None:
        """The schedule that is asked for; None: "auto".

        Raises:
            ValueError: numbers of chunks that make no sense together."""
        if self.schedule == "auto":
            return None
        return Schedule(self.schedule, self.chunks or DEFAULT_CHUNKS.get(self.schedule, 1), self.backward_chunks)

    @property
    def drops(self) -> DropOptions:
        """Which choices are dropped."""
        return DropOptions(self.capacity_factor, self.first_choices_first, self.random_second)

    def limits(self, topology: Topology) -> LimitOptions:
        """What the routing of an expert-parallel group is limited to. `topology`: of the group's ranks.

        Raises:
            ValueError: a limit by node, and nodes with unequally many ranks."""
        by_node = self.limit_nodes is not None or self.topology_cap is not None
        return LimitOptions(
            limit_ranks=self.limit_ranks,
            limit_nodes=self.limit_nodes,
            limit_by=self.limit_by,
            topology_cap=self.topology_cap,
            num_nodes=topology.even_nodes() if by_node else 1,
        )

    @model_validator(mode="after")
    def _have_options(self) -> Self:
        if self.topology_cap is not None and (self.limit_ranks or self.limit_nodes):
            raise ValueError(
                "moe.topology_cap and moe.limit_ranks or moe.limit_nodes contradict each other: give one of them"
            )
        if self.first_choices_first and self.capacity_factor is None:
            raise ValueError("moe.first_choices_first is of moe.capacity_factor, and that is none: set it")
        for key, of in (("chunks", ("chunks", "tiles")), ("backward_chunks", ("chunks",))):
            if getattr(self, key) is not None and self.schedule not in of:
                raise ValueError(
                    f"moe.{key} is of moe.schedule = {' or '.join(map(repr, of))}, and that is {self.schedule!r}: "
                    "leave one of them out"
                )
        self.asked_schedule()
        if self.fp8_hold_weights and self.experts != "fp8":
            raise ValueError(
                f"moe.fp8_hold_weights is of FP8 experts, and moe.experts = {self.experts!r}: leave one of them out"
            )
        if self.experts not in ("auto", "grouped"):
            for key, unset in (("expert_stages", "default"), ("recompute_experts", False)):
                if getattr(self, key) != unset:
                    raise ValueError(
                        f"moe.{key} is of grouped experts, and moe.experts = {self.experts!r}: leave one of them out"
                    )
        return self


class NvlinkSection(Section):
    """How the transport nvlink works; for the others it means nothing. The defaults are exact and were measured."""

    dispatch_ctas: int = Field(
        default=16, gt=0, le=64, description="Thread blocks of a dispatch: SMs that it takes from the computation."
    )
    combine_ctas: int = Field(default=16, gt=0, le=64, description="The same, of a combine.")
    capacity: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="Rows that a rank has room for from each other rank, as a share of that one's tokens. If a step "
        "needs more, the buffers grow and the step is repeated: nothing is lost. none: 1, which always suffices.",
    )
    forward_fp8: bool = Field(
        default=False, description="LOSSY. Rows travel to experts as FP8 with a scale for 128 columns: half the bytes."
    )
    backward_fp8: bool = Field(default=False, description="LOSSY. The same for the gradients of what comes back.")
    keep: Literal["copy", "again"] = Field(
        default="copy",
        description="What a layer's backward does about the rows that arrived: copy keeps them; again sends them a "
        "second time, which takes time on the links, a second lease, and no memory.",
    )
    leases: int = Field(
        default=2, gt=0, description="Buffers at most; each is made when that many rides are under way at a time."
    )


class PlacementSection(Section):
    """Moving experts, while a run goes on, to where their tokens are. Exact: only the order of sums changes."""

    every: int | None = Field(
        default=None,
        gt=0,
        description="Steps between two looks at where experts should live. none: they stay where moe.layout puts them.",
    )
    policy: Literal["place", "migrate", "shadow", "subset", "expand_shrink", "eplb", "lpt_cv", "pick"] = Field(
        default="migrate",
        description="place: experts stay where the file moe.layout puts them. migrate: homes and replicas go where the "
        "solver says, if that pays. The others look at the predicted load alone and are used at once: shadow "
        "(FasterMoE) copies the busiest experts to all ranks, subset (Prophet) to some; expand_shrink (FlexMoE) "
        "changes the copies that there are; eplb (DeepSeek-V3) moves homes and fills all room with copies; lpt_cv "
        "(MindSpeed) and pick (SmartMoE) move homes.",
    )
    solver: str = Field(
        default="search", description="Solver of policy migrate: search, eplb, lpt, ... as `carpool place` names them."
    )
    replicas: int = Field(default=0, ge=0, description="Slots on each rank beside its homes, for copies of experts.")
    prefetch: bool = Field(
        default=True,
        description="Copies are filled while the layers before theirs compute, and no backward waits for their "
        "gradients. The same bits. false: each layer waits for both.",
    )
    predictor: Literal["last", "ema", "ridge"] = Field(
        default="ema",
        description="Load of the next steps: that of the last one, a moving average, or a regression on the last 64.",
    )
    load_limit: float = Field(
        default=1.1, gt=1, description="The most that any rank may have to compute, as a multiple of the mean."
    )
    horizon: int = Field(
        default=500, gt=0, description="Steps, of those that are left, for which a layout is trusted to stay good."
    )
    hysteresis: float = Field(
        default=2.0, ge=0, description="How many times what a move costs it must save over these steps, by the model."
    )
    least_gain: float = Field(
        default=0.01, ge=0, lt=1, description="Share of a layer's modelled time that a move must save at least."
    )
    tokens: int = Field(
        default=16384, gt=0, description="Newest tokens, over all ranks, whose choices the solver is given."
    )
    lag: int = Field(
        default=1,
        gt=0,
        description="Steps that the solver has, on a CPU of the main rank, before its answer is used, and waited for.",
    )
    background: bool = Field(
        default=True, description="Solve in a process beside training. false: training waits; the same result."
    )

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.solver not in (known := solver_names()):
            close = nearest(self.solver, known)
            raise ValueError(
                f"placement.solver = {self.solver!r}: expected one of {', '.join(known)}"
                + (f" (did you mean {close}?)" if close else "")
            )
        if self.policy == "place" and self.every is not None:
            raise ValueError("placement.policy = 'place' leaves experts where they are: leave placement.every out")
        if self.policy in ("shadow", "subset", "expand_shrink", "eplb") and not self.replicas:
            raise ValueError(
                f"placement.policy = {self.policy!r} needs placement.replicas: room for copies on each rank"
            )
        return self
