"""What `carpool bench transport` was asked for."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Self

from carpool.bench.options import RankOptions, ShapeOptions, check_experts, one_of, parse_sizes
from carpool.bench.routings import ROUTINGS, check_skew
from carpool.kernels import MAX_CTAS
from carpool.layout import ExpertLayout
from carpool.transport import TRANSPORTS, between_ranks, find_transport

CTAS = (8, 16)


def has_ctas(transport: str) -> bool:
    """Whether one chooses the thread blocks of its kernels."""
    return hasattr(find_transport(transport).options_class, "dispatch_ctas")


@dataclass(frozen=True)
class Shape:
    """Tokens per rank, hidden size, experts of all ranks, experts per token."""

    tokens: int
    hidden: int
    experts: int
    top_k: int

    @classmethod
    def parse(cls, text: str) -> Shape:
        """From "4096,7168,256,8"; ValueError if that is no shape."""
        names = ("tokens", "hidden", "experts", "top-k")
        shape = cls(*parse_sizes(text, names, "4096,7168,256,8"))
        check_experts(f"--shape {text}", shape.top_k, shape.experts)
        return shape

    def __str__(self) -> str:
        return f"T {self.tokens}, H {self.hidden}, E {self.experts}, K {self.top_k}"


GPU_SHAPES = (Shape(4096, 7168, 256, 8), Shape(8192, 2048, 64, 8), Shape(8192, 4096, 128, 8))
# For a laptop. 32 experts, so that every routing is possible on four ranks.
CPU_SHAPES = (Shape(1024, 256, 32, 4),)


@dataclass(frozen=True, kw_only=True)
class Settings(ShapeOptions, RankOptions):
    """See the options of `carpool bench transport`.

    Attributes:
        shapes: empty: `GPU_SHAPES` or `CPU_SHAPES`, by the device.
        transports: empty: all of `TRANSPORTS`, of which those that cannot run here get a row that says why.
        ctas: thread blocks of the `nvlink` transport, one contender for each. Empty: `CTAS`.
    """

    ROUTINGS: ClassVar[tuple[str, ...]] = ROUTINGS
    SHAPE: ClassVar[type[Shape]] = Shape

    transports: tuple[str, ...] = ()
    ctas: tuple[int, ...] = ()
    backward: bool = False
    decode: bool = False
    fp8: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self.transports:
            one_of("--transports", name, between_ranks())
        with_ctas = [name for name in TRANSPORTS if has_ctas(name)]
        if self.ctas and self.transports and not set(with_ctas) & set(self.transports):
            raise ValueError(f"--ctas is for transport {with_ctas[0]}, which --transports leaves out; add it")
        for ctas in self.ctas:
            if not 1 <= ctas <= MAX_CTAS:
                raise ValueError(f"--ctas {ctas} must be 1..{MAX_CTAS}")

    def resolve(self, *, cuda: bool, num_ranks: int) -> Self:
        """With every default filled in, and checked against the number of ranks.

        Raises:
            ValueError: fewer experts than ranks, or a routing that they cannot have.
        """
        shapes = tuple(dict.fromkeys(self.shapes)) or (GPU_SHAPES if cuda else CPU_SHAPES)
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
