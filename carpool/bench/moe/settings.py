"""What `carpool bench experts` and `carpool bench layer` were asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Self

from carpool.bench.moe.modules import IMPLEMENTATIONS
from carpool.bench.moe.shapes import Shape
from carpool.bench.options import RankOptions, ShapeOptions, one_of
from carpool.bench.routings import EXPERT_ROUTINGS
from carpool.experts import EXPERTS, exact_experts
from carpool.transport import between_ranks

GPU_SHAPES = (
    Shape(8192, 2048, 1024, 64, 8),
    Shape(8192, 2048, 768, 128, 8),
    Shape(32768, 4096, 1024, 128, 8),
    Shape(24576, 1536, 256, 128, 8),
)
# For a laptop: seconds.
CPU_SHAPES = (Shape(128, 64, 48, 16, 4),)


# FP8 experts whose quantised weights are held, as in the micro-batches of a step.
HELD = "fp8-held"


def known_experts() -> tuple[str, ...]:
    """Names of all of Carpool's, those that are lossy last."""
    return tuple(sorted(EXPERTS, key=lambda name: name not in exact_experts()))


def fast_experts() -> tuple[str, ...]:
    """All of Carpool's but those that define the answer and are not meant to be fast."""
    return tuple(name for name in known_experts() if name != "reference")


@dataclass(frozen=True, kw_only=True)
class Settings(ShapeOptions):
    """See the options of `carpool bench experts`.

    Attributes:
        shapes: empty: `GPU_SHAPES` or `CPU_SHAPES`, by the device.
        experts: of Carpool. Empty: `fast_experts` and `HELD`; those that cannot run here get a row that says why.
        against: of transformers. Empty: all.
    """

    ROUTINGS: ClassVar[tuple[str, ...]] = EXPERT_ROUTINGS
    SHAPE: ClassVar[type[Shape]] = Shape

    experts: tuple[str, ...] = ()
    against: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self.experts:
            one_of("--experts", name, (*known_experts(), HELD))
        for name in self.against:
            one_of("--against", name, IMPLEMENTATIONS)

    def resolve(self, *, cuda: bool) -> Settings:
        """With every default filled in."""
        shapes = tuple(dict.fromkeys(self.shapes)) or (GPU_SHAPES if cuda else CPU_SHAPES)
        return replace(self, shapes=shapes, routings=self.all_routings, against=self.against or IMPLEMENTATIONS)


@dataclass(frozen=True, kw_only=True)
class LayerSettings(ShapeOptions, RankOptions):
    """See the options of `carpool bench layer`.

    Attributes:
        shapes: empty: the first two of `GPU_SHAPES`, or `CPU_SHAPES`.
        transports: empty: all of `TRANSPORTS`, of which those that cannot run here get a row that says why.
        iterations: back to back in one repetition.
    """

    ROUTINGS: ClassVar[tuple[str, ...]] = EXPERT_ROUTINGS
    SHAPE: ClassVar[type[Shape]] = Shape

    transports: tuple[str, ...] = ()
    experts: tuple[str, ...] = ()
    iterations: int = 5

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self.transports:
            one_of("--transports", name, between_ranks())
        for name in self.experts:
            one_of("--experts", name, known_experts())
        if self.iterations < 1:
            raise ValueError(f"--iterations {self.iterations} must be at least 1")

    def resolve(self, *, cuda: bool, num_ranks: int) -> Self:
        """With every default filled in, and checked against the number of ranks.

        Raises:
            ValueError: experts that cannot be spread evenly, which is how transformers spreads them.
        """
        shapes = tuple(dict.fromkeys(self.shapes)) or (GPU_SHAPES[:2] if cuda else CPU_SHAPES)
        for shape in shapes:
            if shape.experts % num_ranks:
                raise ValueError(
                    f"{shape.experts} experts ({shape}) do not divide evenly among {num_ranks} ranks; use another "
                    "number of experts or of --ranks"
                )
        return replace(self, ranks=num_ranks, shapes=shapes, routings=self.all_routings)


def lossy_reasons(experts: str) -> tuple[str, ...]:
    """What experts change of a model's function, beyond rounding."""
    return tuple(getattr(EXPERTS.get(experts.removesuffix("-held")), "lossy_reasons", ()))


def list_shapes(shapes: Sequence[str], models: Sequence[str], tokens: int, activation: str | None) -> tuple[Shape, ...]:
    """The shapes that the options --shape, --model, --tokens and --activation name.

    Raises:
        ValueError: an unknown name, or sizes that are none.
    """
    if activation is not None and not shapes:
        raise ValueError("--activation is what the experts of --shape compute; models have their own. Give a --shape")
    given = tuple(Shape.parse(text, activation or "swiglu") for text in shapes)
    return given + tuple(Shape.of_model(name, tokens) for name in models)
