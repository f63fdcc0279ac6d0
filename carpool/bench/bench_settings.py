"""What each benchmark can be asked: the settings of `carpool bench transport`, `experts`, `layer` and `generate`.

The fields are the command's options (`carpool.bench.options.asked`). What a command cannot do is refused here, before
anything is measured: what needs no ranks when settings are made, the rest in `resolve`, which fills in the defaults.
Those of `carpool bench model` are in `carpool.bench.model.model_settings`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import MISSING, dataclass, replace
from typing import Any, ClassVar, Self

from carpool.bench.options import (
    DTYPES,
    EXPERT_ROUTINGS,
    LAYER_SHAPES_CPU,
    LAYER_SHAPES_GPU,
    RIDE_SHAPES_CPU,
    RIDE_SHAPES_GPU,
    ROUTINGS,
    LayerShape,
    RankOptions,
    RideShape,
    ShapeOptions,
    asked,
    check_contenders,
    list_shapes,
    one_of,
)
from carpool.train.config.published import read_keys

CTAS = (8, 16)
# Transformers' implementations of experts: by grouped products, and the loop over experts in the model's file.
THEIR_EXPERTS = ("grouped_mm", "eager")
# FP8 experts whose quantised weights are held, as in the micro-batches of a step.
HELD = "fp8-held"
GENERATE_CONTENDERS = ("carpool", "carpool-eager", "transformers")
LAYERS_HELP = "Only the first of its layers."
TRANSPORTS_HELP = "Default: all that can run here."
EXPERTS_HELP = (
    "Carpool's experts: grouped, reference, fp8 (lossy), and, in bench experts, fp8-held. Default: all but the "
    "reference."
)
EXPERT_ROUTING_HELP = "uniform, zipf, hot (one expert is everybody's choice), several with commas, or all."


def has_ctas(transport: str) -> bool:
    """Whether one chooses the thread blocks of its kernels."""
    from carpool.transport import find_transport

    return hasattr(find_transport(transport).options_class, "dispatch_ctas")


def _check_transports(names: Iterable[str]) -> None:
    from carpool.transport import between_ranks

    for name in names:
        one_of("--transports", name, between_ranks())


def known_experts() -> tuple[str, ...]:
    """Names of all of Carpool's, those that are lossy last."""
    from carpool.experts import EXPERTS, exact_experts

    return tuple(sorted(EXPERTS, key=lambda name: name not in exact_experts()))


def fast_experts() -> tuple[str, ...]:
    """All of Carpool's but those that define the answer and are not meant to be fast."""
    return tuple(name for name in known_experts() if name != "reference")


@dataclass(frozen=True, kw_only=True)
class TransportSettings(ShapeOptions, RankOptions):
    """Of `carpool bench transport`.

    Attributes:
        shapes: empty: `RIDE_SHAPES_GPU` or `RIDE_SHAPES_CPU`, by the device.
        transports: empty: all of `TRANSPORTS`, of which those that cannot run here get a row that says why.
        ctas: thread blocks of the `nvlink` transport, one contender for each. Empty: `CTAS`.
    """

    ROUTINGS: ClassVar[tuple[str, ...]] = ROUTINGS
    SHAPE: ClassVar[type[RideShape]] = RideShape

    shapes: tuple[RideShape, ...] = asked(
        "--shape",
        "Tokens per rank, hidden size, experts, experts per token; may be repeated. Default on GPUs: 4096,7168,256,8 "
        "and 8192,2048,64,8 and 8192,4096,128,8; on CPU 1024,256,32,4.",
        (),
        kind=list[str],
        metavar="T,H,E,K",
    )
    transports: tuple[str, ...] = asked("--transports", TRANSPORTS_HELP, (), kind=str, metavar="NAME,...")
    ctas: tuple[int, ...] = asked(
        "--ctas", "Thread blocks of the nvlink transport; may be repeated. Default: 8 and 16.", (), kind=list[int]
    )
    fp8: bool = asked("--fp8", "Also with hidden states as FP8 on the way out, where a transport can (lossy).", False)
    backward: bool = asked("--backward", "Also the rides of the backward.", False)
    decode: bool = asked("--decode", "Also 128 tokens per rank, as a CUDA graph where that is possible.", False)
    out: str = asked(
        "--out", "Folder for transport.json and transport.png, which are overwritten.", "runs/bench/transport"
    )

    def __post_init__(self) -> None:
        from carpool.kernels import MAX_CTAS
        from carpool.transport import TRANSPORTS

        super().__post_init__()
        _check_transports(self.transports)
        with_ctas = [name for name in TRANSPORTS if has_ctas(name)]
        if self.ctas and self.transports and not set(with_ctas) & set(self.transports):
            raise ValueError(f"--ctas is for transport {with_ctas[0]}, which --transports leaves out; add it")
        for ctas in self.ctas:
            if not 1 <= ctas <= MAX_CTAS:
                raise ValueError(f"--ctas {ctas} must be 1..{MAX_CTAS}")

    @classmethod
    def parse_shapes(cls, given: dict[str, Any]) -> tuple[RideShape, ...]:
        return tuple(RideShape.parse(text) for text in given["shapes"])

    def resolve(self, *, cuda: bool, num_ranks: int) -> Self:
        """With every default filled in, and checked against the number of ranks.

        Raises:
            ValueError: fewer experts than ranks, or a routing that they cannot have.
        """
        from carpool.bench.routings import check_skew
        from carpool.layout import ExpertLayout
        from carpool.transport import between_ranks

        shapes = self.resolved_shapes(RIDE_SHAPES_GPU if cuda else RIDE_SHAPES_CPU)
        for shape in shapes:
            if shape.experts < num_ranks:
                raise ValueError(
                    f"{shape.experts} experts ({shape}) cannot be spread over {num_ranks} ranks: each needs at least "
                    "one; use more experts or fewer --ranks"
                )
            if "skewed" in self.all_routings:
                check_skew(shape.top_k, ExpertLayout.contiguous(shape.experts, num_ranks))
        ctas = tuple(dict.fromkeys(self.ctas))
        if any(map(has_ctas, self.transports or between_ranks())):
            ctas = ctas or CTAS
        return replace(self, ranks=num_ranks, shapes=shapes, routings=self.all_routings, ctas=ctas)


@dataclass(frozen=True, kw_only=True)
class _LayerShapeOptions(ShapeOptions):
    """Shapes of MoE layers, and experts by name. The command has options of its own for shapes: `SHAPE_OPTIONS`."""

    ROUTINGS: ClassVar[tuple[str, ...]] = EXPERT_ROUTINGS
    SHAPE: ClassVar[type[LayerShape]] = LayerShape
    SHAPE_OPTIONS: ClassVar[dict[str, Any]] = {
        "model": asked(
            "--model",
            "A model's sizes and experts: olmoe, qwen3-30b-a3b, mixtral-8x7b, deepseek-v3, gpt-oss-120b; may be "
            "repeated.",
            (),
            kind=list[str],
        ),
        "tokens": asked("--tokens", "Tokens per rank of --model.", 8192, kind=int),
        "activation": asked(
            "--activation",
            "What experts of --shape compute: swiglu (default), gpt-oss (clamped, biases), relu2 (no gate).",
            None,
            kind=str,
        ),
    }

    shapes: tuple[LayerShape, ...] = asked(
        "--shape",
        "Tokens per rank, hidden size, expert hidden size, experts, experts per token; may be repeated. Default on "
        "CPU: 128,64,48,16,4; on GPUs 8192,2048,1024,64,8 and others.",
        (),
        kind=list[str],
        metavar="T,H,F,E,K",
    )
    experts: tuple[str, ...] = asked("--experts", EXPERTS_HELP, (), kind=str, metavar="NAME,...")
    routings: tuple[str, ...] = asked("--routing", EXPERT_ROUTING_HELP, ("uniform",), kind=str)

    @classmethod
    def parse_shapes(cls, given: dict[str, Any]) -> tuple[LayerShape, ...]:
        return list_shapes(given["shapes"], given["model"] or (), given["tokens"], given["activation"])


@dataclass(frozen=True, kw_only=True)
class ExpertsSettings(_LayerShapeOptions):
    """Of `carpool bench experts`.

    Attributes:
        shapes: empty: `LAYER_SHAPES_GPU` or `LAYER_SHAPES_CPU`, by the device.
        experts: of Carpool. Empty: `fast_experts` and `HELD`; those that cannot run here get a row that says why.
        against: of transformers. Empty: all.
    """

    against: tuple[str, ...] = asked(
        "--against", "Of transformers: grouped_mm, eager. Default: both.", (), kind=str, metavar="NAME,..."
    )
    out: str = asked("--out", "Folder for experts.json and experts.png, which are overwritten.", "runs/bench/experts")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self.experts:
            one_of("--experts", name, (*known_experts(), HELD))
        for name in self.against:
            one_of("--against", name, THEIR_EXPERTS)

    def resolve(self, *, cuda: bool) -> ExpertsSettings:
        """With every default filled in."""
        shapes = self.resolved_shapes(LAYER_SHAPES_GPU if cuda else LAYER_SHAPES_CPU)
        return replace(self, shapes=shapes, routings=self.all_routings, against=self.against or THEIR_EXPERTS)


@dataclass(frozen=True, kw_only=True)
class LayerSettings(_LayerShapeOptions, RankOptions):
    """Of `carpool bench layer`.

    Attributes:
        shapes: empty: the first two of `LAYER_SHAPES_GPU`, or `LAYER_SHAPES_CPU`.
        transports: empty: all of `TRANSPORTS`, of which those that cannot run here get a row that says why.
        iterations: back to back in one repetition.
    """

    TRACES: ClassVar[bool] = True

    routings: tuple[str, ...] = asked(
        "--routing", f"{EXPERT_ROUTING_HELP} Or FILE.npz, a trace.", ("uniform",), kind=str
    )
    spare_slots: tuple[str, ...] = asked(
        "--spare-slots",
        "Numbers of spare slots of a rank (moe.spare_slots) to compare, beside forced balance: 0,1,2,4.",
        (),
        kind=str,
        metavar="N,...",
    )
    modelled: str = asked(
        "--modelled", "Start no ranks: model --spare-slots on this GPU, such as H200, with --ranks of a node.", ""
    )
    transports: tuple[str, ...] = asked("--transports", TRANSPORTS_HELP, (), kind=str, metavar="NAME,...")
    iterations: int = asked("--iterations", "Layers back to back in one repetition.", 5)
    captured: bool = asked(
        "--captured", "On GPUs, as CUDA graphs, as steps of training are, over transports that allow it.", False
    )
    out: str = asked("--out", "Folder for layer.json and layer.png, which are overwritten.", "runs/bench/layer")

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_transports(self.transports)
        for name in self.experts:
            one_of("--experts", name, known_experts())
        if self.iterations < 1:
            raise ValueError(f"--iterations {self.iterations} must be at least 1")
        if wrong := [text for text in self.spare_slots if not text.isdecimal()]:
            raise ValueError(f"--spare-slots {wrong[0]} is no number of slots; give some, such as 0,1,2,4")
        if self.modelled and not self.spare_slots:
            raise ValueError(f"--modelled {self.modelled} is of --spare-slots; give some, such as 0,1,2,4")

    @property
    def slots(self) -> tuple[int, ...]:
        """Numbers of spare slots that are compared; empty: none are."""
        return tuple(map(int, self.spare_slots))

    def resolve(self, *, cuda: bool, num_ranks: int) -> Self:
        """With every default filled in, and checked against the number of ranks. With spare slots, forced balance is
        measured too.

        Raises:
            ValueError: experts that cannot be spread evenly, which is how transformers spreads them.
        """
        shapes = self.resolved_shapes(LAYER_SHAPES_GPU[:2] if cuda else LAYER_SHAPES_CPU)
        for shape in shapes:
            if shape.experts % num_ranks:
                raise ValueError(
                    f"{shape.experts} experts ({shape}) do not divide evenly among {num_ranks} ranks; use another "
                    "number of experts or of --ranks"
                )
        routings = tuple(dict.fromkeys((*self.all_routings, *(("even",) if self.slots else ()))))
        return replace(self, ranks=num_ranks, shapes=shapes, routings=routings)


@dataclass(frozen=True, kw_only=True)
class GenerateSettings(RankOptions):
    """Of `carpool bench generate`.

    Raises:
        ValueError: a model or contender that is not known, or a number that cannot be."""

    model: str = asked("--model", "qwen3-30b-a3b, olmoe-1b-7b or another published one, or a config.json.", MISSING)
    layers: int | None = asked("--layers", LAYERS_HELP, None)
    batch: int | None = asked("--batch", "Prompts of a rank. Default: 64 on GPUs, 4 on a CPU.", None, min=1)
    prompt: int | None = asked("--prompt", "Tokens of a prompt. Default: 256 on GPUs, 32 on a CPU.", None, min=1)
    new_tokens: int = asked("--new-tokens", "Tokens to add to each prompt.", 32)
    routing: str = asked(
        "--routing", "balanced (choices are forced) or learned (routers of random weights choose).", "balanced"
    )
    contenders: tuple[str, ...] = asked(
        "--contenders",
        "Some of carpool, carpool-eager, transformers.",
        GENERATE_CONTENDERS,
        kind=str,
        metavar="NAME,...",
    )
    dtype: str | None = asked("--dtype", "Default: bfloat16 on GPUs, float32 on a CPU.", None)
    rounds: int = asked("--rounds", "Rounds, in which contenders take turns.", 3, min=1)
    out: str = asked("--out", "Folder for generate.json, which is overwritten.", "runs/bench/generate")

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("--routing", self.routing, ("balanced", "learned"))
        check_contenders(self.contenders, GENERATE_CONTENDERS)
        if self.dtype is not None:
            one_of("--dtype", self.dtype, DTYPES)
        if self.new_tokens < 2:
            raise ValueError(f"--new-tokens {self.new_tokens} must be at least 2: the first is of the prefill")
        read_keys(self.model)

    def resolve(self, *, cuda: bool, num_ranks: int) -> Self:
        return replace(
            self,
            ranks=num_ranks,
            device="cuda" if cuda else "cpu",
            batch=self.batch or (64 if cuda else 4),
            prompt=self.prompt or (256 if cuda else 32),
            dtype=self.dtype or ("bfloat16" if cuda else "float32"),
        )
