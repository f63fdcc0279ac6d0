"""The section [adapter]: train adapters of low rank beside a frozen model (peft's)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from carpool.train.config.declarations import Excludes, Needs, Settings
from carpool.train.config.schema_base import Section, Texts, WholeNumbers
from carpool.train.config.schema_moe import rides_whole

# Names of several modules at once; every other target is the name of modules, or the end of one.
GROUPS = ("attention", "shared", "experts", "router", "all-linear")


def adapts_experts(targets: Sequence[str]) -> bool:
    """Whether routed experts are adapted, also where an adapter names their weights: mlp.experts.gate_up_proj."""
    return any(one in ("experts", "all-linear") or "experts" in one.split(".")[:-1] for one in targets)


def _adapts_experts(settings: Settings) -> bool:
    return settings.get("adapter.kind") is not None and adapts_experts(settings.get("adapter.targets", ("experts",)))


# Schedules whose experts begin before all tokens have come.
_PARTS = ("moe.schedule", lambda name: not rides_whole(name))


class AdapterSection(Section):
    """Which adapters are trained beside the frozen model. Written in peft's format, to the run's folder `adapter`."""

    needs: ClassVar = Needs("adapter.kind", "adapter.kind, for example lora: the model itself is trained")

    kind: Annotated[
        Literal["lora", "rslora", "dora"] | None,
        Needs(lambda settings: True),
        Excludes("parallelism.tp_size", "adapters would be divided as the tensor-parallel layers beside them are"),
        Excludes("parallelism.etp_size", "experts that are cut into slices have no adapters"),
        Excludes("parallelism.pp_size", "adapters are not cut into stages"),
        Excludes("training.freeze", "adapters freeze all of the model", instead={"training.freeze": None}),
        Excludes(
            "moe.experts=fp8",
            "experts in FP8 have no adapters: name other adapter.targets, or other experts",
            own=_adapts_experts,
            instead={"moe.experts": "grouped"},
        ),
        Excludes(
            _PARTS,
            "experts that begin early have no adapters: name other adapter.targets, or another schedule",
            own=_adapts_experts,
            instead={"moe.schedule": "chunks"},
        ),
    ] = None
    """lora (arXiv 2106.09685), rslora (2312.03732: alpha / the root of the rank) or dora (2402.09353; not of experts
    and routers, for which peft has none). none: the model itself is trained."""
    path: str | None = Field(default=None, min_length=1)
    """Start from this adapter: a folder as peft writes it, or that of a run that has trained one. What it adapts, and
    with which ranks, are then its own. none: start anew."""
    rank: int = Field(default=16, gt=0)
    """Rank of each adapter, and of each expert's."""
    alpha: int = Field(default=32, gt=0)
    """What an adapter adds is multiplied by alpha / rank."""
    rank_pattern: dict[str, Annotated[int, Field(gt=0)]] = Field(default_factory=dict)
    """Other ranks, as in peft: by ends of names of what is adapted, or regular expressions of them;
    {"experts.down_proj" = 8, 'layers\\.0\\..*' = 32}. The first that fits counts."""
    alpha_pattern: dict[str, Annotated[int, Field(gt=0)]] = Field(default_factory=dict)
    """Other alphas, in the same way."""
    layers_to_transform: WholeNumbers = ()
    """Adapt only these layers, counted from 0, as in peft; there it leaves target_parameters out, here experts and
    routers follow it. []: all of them."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Drop-out of what goes into adapters; peft has none for those of experts and routers."""
    targets: Texts = ("attention", "experts")
    """What is adapted: attention, shared (dense and shared feed-forward layers, where peft can tell them from
    experts), experts, router, all-linear (all of these), or names as in peft's target_modules and target_parameters."""
    base_dtype: Annotated[
        Literal["nf4", "mxfp4", "int8"] | None,
        Excludes(
            "moe.experts!=auto or grouped or reference or moe.layout or placement.every or memory.experts",
            "experts that are quantised stay on their GPU, in order, and grouped products dequantise them",
            own="adapter.kind and adapter.base_dtype",
            instead={
                "moe.experts": "auto",
                "moe.layout": "contiguous",
                "placement.every": None,
                "memory.experts": "device",
            },
        ),
        Excludes(
            _PARTS,
            "grouped products dequantise the experts, when all tokens have come",
            own="adapter.kind and adapter.base_dtype",
            instead={"moe.schedule": "none"},
        ),
    ] = None
    """How frozen matrices are stored: nf4 (blocks of 64 values, 4.13 bits each with their scales in 8 bits; arXiv
    2305.14314) or int8 (rows of a matrix, 8 bits), both as bitsandbytes defines them; mxfp4 (4.25 bits) of experts,
    beside nf4 of the others. LOSSY. Experts, linear layers, embeddings and the output layer; not routers, norms, biases
    and what is trained, and with dora only experts. On several ranks only experts, each of them on one rank, and
    parallelism.data_parallel is zero1. none: as model.dtype says. Experts that a checkpoint has in MXFP4 (gpt-oss) stay
    so in any case, which is exact; they need one rank."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of adapters and modules_to_save. bfloat16 takes half of the memory. The one-pass optimizer keeps the other 16
    bits, so that updates are those of float32."""
    modules_to_save: Texts = ()
    """Modules that are trained themselves, and saved with the adapter, such as lm_head: ends of names, but none with
    routed experts. On several ranks this needs parallelism.data_parallel = zero1."""
    trainable_token_indices: Annotated[
        WholeNumbers,
        Excludes(
            "adapter.base_dtype",
            "rows of an embedding in few bits are not trained",
            instead={"adapter.base_dtype": None},
        ),
    ] = ()
    """Tokens whose rows of the input embedding are trained themselves, as in peft: new ones, which the checkpoint must
    have rows for. Their rows of the output layer are trained with modules_to_save = lm_head."""

    @property
    def base_keep(self) -> tuple[str, ...] | None:
        """Ends of the names of modules that base_dtype leaves as they are; None: all but experts. peft's DoRA reads the
        weights beside it."""
        return None if self.kind == "dora" else self.modules_to_save

    @property
    def base(self) -> dict[str, Any]:
        """As `carpool.hf.build_model.build_model` takes it: how frozen matrices are kept, and which stay."""
        return {"base_dtype": self.base_dtype, "base_keep": self.base_keep}

    @property
    def is_used(self) -> bool:
        """Whether adapters are trained, and not the model."""
        return self.kind is not None

    @model_validator(mode="after")
    def _has_targets(self) -> Self:
        if not self.targets:
            raise ValueError(f"adapter.targets is empty: name some of {', '.join(GROUPS)}, or modules")
        parameters = {"experts", "router", "all-linear"} & set(self.targets)
        if parameters and self.kind == "dora":
            raise ValueError(
                f"adapter.kind = 'dora' has no adapters of {', '.join(sorted(parameters))} in peft: use 'lora' or "
                "'rslora', or other adapter.targets"
            )
        if parameters and self.kind is not None and self.dropout:
            raise ValueError(
                f"adapter.dropout: peft has none for adapters of {', '.join(sorted(parameters))}: set it to 0, or "
                "choose other adapter.targets"
            )
        return self
