"""The sections [moe], [codec] and [nvlink]: how tokens are routed, how they ride, and how experts compute."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self, get_type_hints

from pydantic import BeforeValidator, Field, model_validator

from carpool.parallel.schedules import PAIRED
from carpool.plugins.nearest import did_you_mean
from carpool.ride.schedule import MAX_CHUNKS, SCHEDULES, Schedule
from carpool.train.config.declarations import Excludes, Needs, Was
from carpool.train.config.schema_base import NONE_IS_A_WORD, Section, check_options, listed_options, registered

if TYPE_CHECKING:
    from carpool.layout.topology import Topology
    from carpool.ride.balanced import SpareSlotOptions
    from carpool.routing import DropOptions
    from carpool.routing.limit import LimitOptions
    from carpool.transport.codecs import Codecs


def _stages(value: Any) -> Any:
    """One of `STAGE_WORDS`, or a table of known stages and ways."""

    def refuse(what: str, wrong: Any, known: Sequence[str], expected: str) -> ValueError:
        return ValueError(f"{what}: expected {expected}{did_you_mean(str(wrong), known)}")

    key = "moe.expert_kernels"
    if not isinstance(value, Mapping):
        if value in STAGE_WORDS:
            return value
        raise refuse(f"{key} = {value!r}", value, STAGE_WORDS, 'default, measure, or a table such as {up = "flat"}')
    from carpool.experts.gemm.choices import STAGES, WAYS

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


def _options_of_transport(name: str) -> tuple[str, dict[str, Any]]:
    """What errors say of a transport, and the types of its own options by name."""
    from carpool.transport import TRANSPORTS, TransportOptions

    if name == "auto":
        return "moe.transport = 'auto' may become any transport: name the one whose options these are", {}
    if name == "nvlink":
        return "the options of transport 'nvlink' are the section [nvlink]", {}
    cls = TRANSPORTS[name].options_class
    # What other settings say: numbers of tokens, and the section [nvlink] of a transport that has it inside.
    shared = {field.name for field in fields(TransportOptions)} | {"nvlink", "step_tokens"}
    known = {} if cls is None else {key: kind for key, kind in get_type_hints(cls).items() if key not in shared}
    return f"transport {name!r} has {listed_options(known)}", known


def _options_of_experts(name: str) -> tuple[str, dict[str, Any]]:
    """The same of an expert computation. Two options have settings of their own."""
    from carpool.experts import EXPERTS

    names = getattr(EXPERTS.get(name), "options", ())
    known = {key: Any for key in names if key not in ("choices", "recompute")}
    return f"experts {name!r} have {listed_options(known)}", known


_CHUNKED = Needs(
    ("moe.schedule", lambda name: name in SCHEDULES and SCHEDULES[name].default_chunks is not None),
    "moe.schedule=chunks or tiles",
)
_BACKWARD = Needs(
    ("moe.schedule", lambda name: name in SCHEDULES and SCHEDULES[name].backward_chunks), "moe.schedule=chunks"
)
_PAIRED = " or ".join(PAIRED)
_WHOLE = Excludes("parallelism.etp_size", "a token visits every slice of its experts, wherever they are")


def rides_whole(schedule: str) -> bool:
    """See `carpool.ride.schedule.ScheduleKind.whole`."""
    return schedule == "auto" or SCHEDULES[schedule].whole


class MoeSection(Section):
    """How tokens are routed and sent, and how experts compute."""

    transport: Annotated[str, registered("moe.transport", "carpool.transport.TRANSPORTS", "auto")] = "auto"
    """How tokens travel between ranks. auto: nvlink where every rank can use it, else dedup (alltoall with one
    expert per token), on several nodes hierarchical where the model of costs says that it pays; the log says why.
    nvlink: one hidden state per (token, rank), written by kernels into the memory of the other GPUs of this host.
    dedup: the same over any network. hierarchical: inter-node one hidden state per (token, node), passed on there by
    nvlink or dedup. alltoall: one per (token, expert). gather: every rank gets every token."""
    transport_options: dict[str, Any] = Field(default_factory=dict)
    """Options of the transport that moe.transport names. Those of nvlink are in the section [nvlink]. Of
    hierarchical: first_hop = auto, fixed (equally many tokens to each other node, as many as steps need) or counted;
    inside = auto, nvlink or dedup; node_rows, the inter-node sends that a token needs, if that was measured;
    capacity, the tokens to each other node of the first steps, by default all."""
    experts: Annotated[str, registered("moe.experts", "carpool.experts.EXPERTS", "auto")] = "auto"
    """How experts are computed. auto: grouped matrix products, or the model's own forward where only that knows how.
    grouped: as auto, but refused where it cannot be. reference: a plain loop over experts, for comparison. fp8:
    LOSSY, in FP8 with one scale for 1 x 128 of hidden states and 128 x 128 of weights, accumulated in float32."""
    expert_kernels: Annotated[
        Stages, Was("moe.expert_stages"), Needs("moe.experts=auto or grouped", "moe.experts=grouped or auto")
    ] = "default"
    """Which kernel computes each product of grouped experts (up, down, dact, dx, dup, ddown): PyTorch's library, or
    a fused kernel with the tiling wide, flat or square. default: by the sizes. measure: all are timed before the
    first step, on GPUs in bfloat16. A table such as {up = "flat"}: these, and the rest by the sizes. A resumed run
    keeps what run.json records, except for what a table names. With moe.spare_slots fused kernels take the library's
    place, unless the library computes all products."""
    expert_options: dict[str, Any] = Field(default_factory=dict)
    """Options of an expert computation from outside the package, which moe.experts names."""
    fp8_cache_weights: Annotated[bool, Was("moe.fp8_hold_weights"), Needs("moe.experts=fp8")] = False
    """For experts = fp8: weights are quantised once per step instead of in every pass of every micro-batch. Faster,
    and takes as much memory as the weights in bfloat16."""
    schedule: Annotated[
        str,
        NONE_IS_A_WORD,
        registered("moe.schedule", "carpool.ride.schedule.SCHEDULES", "auto"),
        Excludes(
            "parallelism.pp_size",
            f"stages do not run two forwards at the same time, but a forward and a backward, in the pairs of {_PAIRED}",
            own=f"moe.schedule=two-batch and parallelism.pp_schedule!={_PAIRED}",
            instead={"parallelism.pp_schedule": "DualPipeV", "moe.schedule": "none"},
        ),
        Excludes(
            "parallelism.pp_size",
            "how long rides of a stage take is not timed, and tiles are not tried with stages",
            own="moe.schedule!=none or chunks or two-batch",
        ),
    ] = "none"
    """What runs at the same time. none: one thing after the other. chunks: tokens ride in chunks, and experts
    compute on one chunk while another rides. two-batch: two micro-batches, or the halves of a step's only one, run
    half a layer apart: one's attention beside the other's ride; in a pipeline (DualPipeV, Interleaved1F1B) the
    forward of one and the backward of another. tiles (a plug-in): with nvlink, experts begin on rows that have
    arrived while others still ride. auto: none, chunks or tiles, whichever is fastest when timed before the first
    step; run.json records it and a resumed run keeps it. On a CPU auto means none."""
    schedule_options: dict[str, Any] = Field(default_factory=dict)
    """Options of a schedule from outside the package, which moe.schedule names."""
    chunks: Annotated[int | None, _CHUNKED] = Field(default=None, ge=1, le=MAX_CHUNKS)
    """For schedule = chunks or tiles: the number of chunks. With 1, only a weight gradient is overlapped with an
    exchange. none: 2, or 4 of tiles."""
    backward_chunks: Annotated[int | None, _BACKWARD] = Field(default=None, ge=1, le=MAX_CHUNKS)
    """For schedule = chunks: the number of chunks in the backward. none: as many as in the forward."""
    priority: bool = False
    """FSDP's reductions of gradients leave the links to the exchanges of the backward: they begin when an exchange
    has brought its gradients."""
    layout: Annotated[str, Excludes("parallelism.pp_size", "files of layouts are not read stage by stage")] = (
        "contiguous"
    )
    """Which rank holds which expert: contiguous (in order), or the path of a JSON file with one layout for all
    layers or one for each, as `carpool place` writes it."""
    spare_slots: Annotated[
        int,
        Excludes("moe.limit_ranks or moe.limit_nodes", "replicas serve tokens on further ranks"),
        Excludes("memory.experts", "experts in host memory are loaded layer by layer"),
        Excludes("parallelism.etp_size", "replicas are of whole experts"),
        Excludes("moe.experts=fp8", "its experts are quantised once a step, and replicas arrive in each ride"),
    ] = Field(default=0, ge=0)
    """Spare slots of each rank. In each micro-batch and layer they hold replicas of experts that have many tokens, so
    that all ranks compute equally much; gradients go home, and the sums are the same. 0: none."""
    spare_plan: Annotated[
        str, registered("moe.spare_plan", "carpool.replicas.slot_planners.SLOT_PLANNERS"), Needs("moe.spare_slots")
    ] = "balance"
    """Which experts spare slots hold. balance: those that bring every rank to the mean, if fetching them pays. node:
    the same inside each node. Plug-ins do what published systems do: shadow (FasterMoE), subset (Prophet), fetch
    (Janus), all (Tutel), needed (Hecate, LAER-MoE), and by earlier loads eplb (DeepSeek-V3), expand_shrink (FlexMoE)
    and symi."""
    spare_options: Annotated[dict[str, Any], Needs("moe.spare_slots")] = Field(default_factory=dict)
    """Options of a plan from outside the package, which moe.spare_plan names."""
    balance_limit: Annotated[float | None, Needs("moe.spare_slots")] = Field(default=1.1, ge=1)
    """The load of a rank, over the mean, that spare slots keep to where they suffice, whatever fetching costs, so that
    memory has a bound. none: only time counts."""
    spare_weights: Annotated[Literal["fetch", "save"], Needs("moe.spare_slots")] = "fetch"
    """The parameters of replicas in the backward. fetch: fetched a second time. save: saved from the forward, which
    takes memory in every layer."""
    router_aux_loss_coef: float | None = Field(default=None, ge=0)
    """Weight of the load-balancing loss. 0: no such loss. none: as the model's configuration says; a checkpoint
    whose output_router_logits is false is fine-tuned without, as by Transformers' Trainer."""
    balance_scope: Annotated[
        Literal["model", "layer"],
        Was("moe.balance"),
        Needs("moe.router_aux_loss_coef!=0", "moe.router_aux_loss_coef above 0"),
    ] = "model"
    """What the load-balancing loss balances. model: the tokens of all layers together, as transformers does; one
    layer may then be uneven if another makes up for it. layer: each layer by itself, as in the papers."""
    balance_batch: Annotated[
        Literal["micro", "global"],
        Needs("moe.router_aux_loss_coef!=0", "moe.router_aux_loss_coef above 0"),
        Excludes(
            "moe.schedule=two-batch",
            "two micro-batches at a time have no order in which their choices are counted",
            own="moe.balance_batch=global",
        ),
    ] = "micro"
    """Whose choices the load-balancing loss counts. micro: those of a micro-batch on all ranks. global: those of the
    step so far, of all micro-batches too (global-batch balance, as Qwen), so that experts may specialise."""
    router_z_loss_coef: float = Field(default=0.0, ge=0)
    """Weight of the router z-loss (ST-MoE), which keeps router logits small. ST-MoE takes 0.001. Each MoE layer
    adds its own."""
    sequence_aux_loss_coef: float = Field(default=0.0, ge=0)
    """Weight of the sequence-wise balance loss of DeepSeek-V3, which takes 0.0001 beside moe.bias_update_rate. Each MoE
    layer adds its own; a sequence has data.sequence_length tokens."""
    bias_update_rate: float | None = Field(default=None, ge=0)
    """Balance without a loss: how far the bias of each expert moves per step against the load of the whole batch, in
    models whose routers have one (DeepSeek-V3 and relatives). 0: biases stay as they are. none: 0.001, as
    DeepSeek-V3, for such a model from scratch; 0 for a checkpoint (model.path)."""
    limit_ranks: Annotated[int | None, _WHOLE] = Field(default=None, gt=0)
    """LOSSY. The experts of a token may be on at most this many ranks, so it is sent to at most this many. none: no
    limit."""
    limit_nodes: Annotated[int | None, _WHOLE] = Field(default=None, gt=0)
    """LOSSY. The experts of a token may be on at most this many nodes. With limit_ranks: on at most that many ranks
    of these nodes. none: no limit."""
    limit_by: Annotated[Literal["score", "groups"], Needs("moe.limit_ranks or moe.limit_nodes")] = "score"
    """For limit_ranks and limit_nodes: which ranks a token keeps, and which experts it gets there. score: the ranks
    with the largest sum of its routing weights, and its best experts there. groups: as DeepSeek, the ranks whose
    best two experts have the largest sum."""
    capacity_factor: float | None = Field(default=None, gt=0)
    """LOSSY. An expert serves at most this many times its even share of the choices in a micro-batch of a rank;
    choices beyond that are dropped, counted and shown. Switch Transformer takes 1.25. none: nothing is dropped."""
    first_choices_first: Annotated[bool, Needs("moe.capacity_factor")] = False
    """For capacity_factor: every token's best choice is served before any second choice, as in GShard. false: one
    token after the other."""
    random_second: bool = False
    """LOSSY. With two experts per token, the second one is dropped at random while training, more often the smaller
    its weight, as in GShard."""
    router_float32: bool = False
    """Routers compute their logits in float32, whatever dtype the model computes in. Set it if routing is unstable
    in bfloat16."""

    @property
    def in_order(self) -> bool:
        """Whether experts are on ranks in their order at the start."""
        return self.layout == "contiguous"

    @property
    def two_batch(self) -> bool:
        """Whether two batches run at the same time."""
        return self.schedule == "two-batch"

    def asked_schedule(self) -> Schedule | None:
        """The schedule that is asked for; None: "auto".

        Raises:
            ValueError: numbers of chunks that make no sense together."""
        if self.schedule == "auto":
            return None
        kind = SCHEDULES[self.schedule]
        chunks = 1 if kind.default_chunks is None else self.chunks or kind.default_chunks
        backward = self.backward_chunks if kind.backward_chunks else None
        return Schedule(self.schedule, chunks, backward, self.schedule_options)

    @property
    def spare(self) -> SpareSlotOptions | None:
        """Spare slots as layers take them; None: there are none."""
        from carpool.ride.balanced import SpareSlotOptions

        if not self.spare_slots:
            return None
        return SpareSlotOptions(
            self.spare_slots, self.balance_limit, self.spare_plan, self.spare_weights == "save",
            options=self.spare_options,
        )  # fmt: skip

    @property
    def drops(self) -> DropOptions:
        """Which choices are dropped."""
        from carpool.routing import DropOptions

        return DropOptions(self.capacity_factor, self.first_choices_first, self.random_second)

    def limits(self, topology: Topology) -> LimitOptions:
        """What the routing of an expert-parallel group is limited to. `topology`: of the group's ranks."""
        from carpool.routing.limit import LimitOptions

        return LimitOptions(
            limit_ranks=self.limit_ranks,
            limit_nodes=self.limit_nodes,
            limit_by=self.limit_by,
            topology=topology,
        )

    @model_validator(mode="after")
    def _have_options(self) -> Self:
        if self.schedule_options:
            known = {} if self.schedule == "auto" else SCHEDULES[self.schedule].options
            told = f"schedule {self.schedule!r} has {listed_options(known)}"
            check_options("moe.schedule_options", self.schedule_options, told, known)
        self.asked_schedule()
        if self.spare_options:
            from carpool.replicas.slot_planners import SLOT_PLANNERS

            known = SLOT_PLANNERS[self.spare_plan].options
            told = f"plan {self.spare_plan!r} has {listed_options(known)}"
            check_options("moe.spare_options", self.spare_options, told, known)
            SLOT_PLANNERS[self.spare_plan](**self.spare_options)
        if self.transport_options:
            check_options("moe.transport_options", self.transport_options, *_options_of_transport(self.transport))
        if self.expert_options:
            check_options("moe.expert_options", self.expert_options, *_options_of_experts(self.experts))
        return self


Coded = Literal["none", "bf16", "fp8"]
CodecName = Annotated[Coded, NONE_IS_A_WORD]


class CodecSection(Section):
    """In which format hidden states are sent (carpool/transport/codecs.py). The defaults are exact."""

    dispatch: CodecName = "none"
    """Hidden states on their way to experts. none: as the model computes them. bf16: LOSSY for float32, which loses
    16 bits. fp8: LOSSY, e4m3 with one scale for 128 columns, as DeepSeek-V3 sends them."""
    combine: CodecName = "none"
    """MoE outputs on their way back. Not fp8 over nvlink."""
    dispatch_backward: CodecName = "none"
    """Gradients of hidden states on their way back. Not fp8 over nvlink."""
    combine_backward: CodecName = "none"
    """Gradients of MoE outputs on their way to experts."""
    inter_node: Annotated[
        Literal["all", "nodes"],
        Was("codec.hop"),
        Needs(
            "codec.dispatch or codec.combine or codec.dispatch_backward or codec.combine_backward",
            "a codec: codec.dispatch, combine, dispatch_backward or combine_backward",
        ),
    ] = "all"
    """What is encoded. nodes: for moe.transport = hierarchical, inter-node sends alone. all: all that leaves its
    rank."""
    merge: Annotated[str, NONE_IS_A_WORD, registered("codec.merge", "carpool.transport.codecs.MERGES", "none")] = "none"
    """Which tokens for the same expert of another rank travel as one: a plug-in. LOSSY. lsh: those of equal hashes,
    as their mean; each gets back what it differs from it (LSH-MoE). condense: those that are similar to the first of
    them, which travels (LUFFY)."""
    merge_options: Annotated[
        dict[str, Any],
        Was("codec.merge_hashes", option="hashes", default=2),
        Was("codec.merge_width", option="width", default=16),
        Was("codec.merge_similarity", option="similarity", default=0.9),
        Needs("codec.merge"),
    ] = Field(default_factory=dict)
    """Options of codec.merge. Of lsh: hashes, how many must agree (2; more of them merge less), and width, how many
    projections a hash chooses from (16). Of condense: similarity, the least cosine (0.9)."""

    @model_validator(mode="after")
    def _have_options(self) -> Self:
        if self.merge != "none":
            from carpool.transport.codecs import MERGES

            known = MERGES[self.merge].options
            check_options(
                "codec.merge_options", self.merge_options, f"merge {self.merge!r} has {listed_options(known)}", known
            )
            _ = self.codecs
        return self

    @property
    def codecs(self) -> Codecs:
        """As transports take them."""
        from carpool.transport.codecs import Codecs

        return Codecs(**self.model_dump())


class NvlinkSection(Section):
    """How the transport nvlink works; for the others it means nothing. The defaults are exact and were measured."""

    needs: ClassVar = Needs("moe.transport=auto or nvlink or hierarchical", "moe.transport=nvlink")

    dispatch_ctas: int = Field(default=16, gt=0, le=64)
    """Thread blocks of a dispatch, each of which takes one multiprocessor from the computation beside it. 16 is
    fastest alone; 8 leaves more to the computation."""
    combine_ctas: int = Field(default=16, gt=0, le=64)
    """The same for a combine."""
    capacity: float | None = Field(default=None, gt=0, le=1)
    """Capacity of a rank's buffer for each other rank, as a share of that rank's tokens. If a step needs more, the
    buffers grow and the step is repeated: nothing is lost. Lower it to save memory. none: 1, which always suffices."""
    leases: int = Field(default=2, gt=0)
    """The most buffers that there may be. Each is made when that many exchanges are under way at the same time."""
