"""The section [adapter]: train adapters of low rank beside a frozen model (peft's)."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from carpool.train.config.schema_base import Section, Texts

# Names of several modules at once; every other target is the name of modules, or the end of one.
GROUPS = ("attention", "shared", "experts", "router", "all-linear")


class AdapterSection(Section):
    """Which adapters are trained beside the frozen model. Written in peft's format, to the run's folder `adapter`."""

    kind: Literal["lora", "rslora", "dora"] | None = Field(
        default=None,
        description="lora (arXiv 2106.09685), rslora (2312.03732: alpha / the root of the rank) or dora (2402.09353; "
        "not of experts and routers, for which peft has none). none: the model itself is trained.",
    )
    path: str | None = Field(
        default=None,
        min_length=1,
        description="Start from this adapter: a folder as peft writes it, or that of a run that has trained one. Kind, "
        "rank, alpha, targets and modules_to_save are then its own. none: start anew.",
    )
    rank: int = Field(default=16, gt=0, description="Rank of each adapter, and of each expert's.")
    alpha: int = Field(default=32, gt=0, description="What an adapter adds is multiplied by alpha / rank.")
    dropout: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="Drop-out of what goes into adapters; peft has none for those of experts and routers.",
    )
    targets: Texts = Field(
        default=("attention", "experts"),
        description="What is adapted: attention, shared (dense and shared feed-forward layers, where peft can tell "
        "them from experts), experts, router, all-linear (all of these), or names as in peft's target_modules and "
        "target_parameters.",
    )
    base_dtype: Literal["nf4", "int8"] | None = Field(
        default=None,
        description="How the frozen experts are kept, as bitsandbytes defines it: nf4 (blocks of 64 values, 4.5 bits "
        "each; arXiv 2305.14314), int8 (rows, 8 bits). LOSSY. All other weights stay as model.dtype says. On several "
        "ranks each expert is on one of them, and parallelism.data_parallel is replicate. none: as model.dtype says.",
    )
    modules_to_save: Texts = Field(
        default=(),
        description="Modules that are trained themselves, and saved with the adapter, such as lm_head: ends of names, "
        "but none with routed experts. On several ranks this needs parallelism.data_parallel = zero1.",
    )

    @property
    def adapts_experts(self) -> bool:
        """Whether routed experts are adapted, also where an adapter names their weights: mlp.experts.gate_up_proj."""
        return any(one in ("experts", "all-linear") or "experts" in one.split(".")[:-1] for one in self.targets)

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
