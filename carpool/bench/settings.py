"""What `carpool bench transport` was asked for, checked before any rank is started."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from carpool.bench.routings import ROUTINGS, check_skew
from carpool.layout import ExpertLayout
from carpool.transport import TRANSPORTS
from carpool.transport.nvlink.buffers import MAX_CTAS

DTYPES = ("bfloat16", "float16", "float32")
CTAS = (8, 16)
# In the order of the table. `nvlink` is listed even where it cannot run: its row says why.
KNOWN = tuple(dict.fromkeys(("nvlink", *reversed(TRANSPORTS))))


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
        try:
            shape = cls(*(int(part) for part in text.split(",")))
        except (TypeError, ValueError):
            raise ValueError(
                f"--shape {text} is not understood; give tokens per rank, hidden size, experts, experts per token, "
                "such as --shape 4096,7168,256,8"
            ) from None
        if small := [name for name, value in asdict(shape).items() if value < 1]:
            raise ValueError(f"--shape {text}: {', '.join(small).replace('_', '-')} must be at least 1")
        if shape.top_k > shape.experts:
            raise ValueError(f"--shape {text}: a token cannot choose {shape.top_k} of {shape.experts} experts")
        return shape

    def __str__(self) -> str:
        return f"T {self.tokens}, H {self.hidden}, E {self.experts}, K {self.top_k}"


GPU_SHAPES = (Shape(4096, 7168, 256, 8), Shape(8192, 2048, 64, 8), Shape(8192, 4096, 128, 8))
# For a laptop. 32 experts, so that every routing is possible on four ranks.
CPU_SHAPES = (Shape(1024, 256, 32, 4),)


@dataclass(frozen=True)
class Settings:
    """See the options of `carpool bench transport`.

    Attributes:
        shapes: empty: `GPU_SHAPES` or `CPU_SHAPES`, by the device.
        transports: empty: all of `KNOWN`, of which those that cannot run here get a row that says why.
        ctas: thread blocks of the `nvlink` transport, one contender for each. Empty: `CTAS`.
    """

    ranks: int | None = None
    device: str = "auto"
    shapes: tuple[Shape, ...] = ()
    transports: tuple[str, ...] = ()
    dtype: str = "bfloat16"
    routings: tuple[str, ...] = ("uniform",)
    zipf_exponent: float = 1.0
    ctas: tuple[int, ...] = ()
    repetitions: int = 15
    seed: int = 0
    backward: bool = False
    decode: bool = False
    fp8: bool = False
    out: str = "runs/bench/transport"
    json_only: bool = False

    def __post_init__(self) -> None:
        for name in self.transports:
            _one_of("--transports", name, KNOWN)
        _one_of("--dtype", self.dtype, DTYPES)
        _one_of("--device", self.device, ("auto", "cpu", "cuda"))
        for name in self.routings:
            _one_of("--routing", name, (*ROUTINGS, "all"))
        if self.repetitions < 1:
            raise ValueError(f"--repetitions {self.repetitions} must be at least 1")
        if self.ranks is not None and self.ranks < 1:
            raise ValueError(f"--ranks {self.ranks} must be at least 1")
        if self.zipf_exponent < 0:
            raise ValueError(f"--zipf-exponent {self.zipf_exponent:g} must be 0 (uniform) or more")
        for option, given in (("--ctas", self.ctas), ("--fp8", self.fp8)):
            if given and self.transports and "nvlink" not in self.transports:
                raise ValueError(f"{option} is for transport nvlink, which --transports leaves out; add it")
        for ctas in self.ctas:
            if not 1 <= ctas <= MAX_CTAS:
                raise ValueError(f"--ctas {ctas} must be 1..{MAX_CTAS}")

    def resolve(self, *, cuda: bool, num_ranks: int) -> Settings:
        """With every default filled in, and checked against the number of ranks.

        Raises:
            ValueError: fewer experts than ranks, or a routing that they cannot have.
        """
        shapes = tuple(dict.fromkeys(self.shapes)) or (GPU_SHAPES if cuda else CPU_SHAPES)
        routings = ROUTINGS if "all" in self.routings else tuple(dict.fromkeys(self.routings))
        for shape in shapes:
            if shape.experts < num_ranks:
                raise ValueError(
                    f"{shape.experts} experts ({shape}) cannot be spread over {num_ranks} ranks: each needs at least "
                    "one; use more experts or fewer --ranks"
                )
            if "skewed" in routings:
                check_skew(shape.top_k, ExpertLayout.contiguous(shape.experts, num_ranks))
        ctas = tuple(dict.fromkeys(self.ctas))
        if "nvlink" in (self.transports or KNOWN):
            ctas = ctas or CTAS
        return replace(self, ranks=num_ranks, shapes=shapes, routings=routings, ctas=ctas)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Settings:
        """What `to_json` gave."""
        lists = {name: tuple(value) for name, value in values.items() if isinstance(value, list | tuple)}
        shapes = tuple(Shape(**shape) for shape in values["shapes"])
        return cls(**{**values, **lists, "shapes": shapes})


def split(text: str | None) -> tuple[str, ...]:
    """("a", "b") from "a,b"; of None nothing."""
    return tuple(dict.fromkeys(part.strip() for part in text.split(","))) if text is not None else ()


def find_ranks(settings: Settings) -> tuple[bool, int]:
    """(on GPUs, how many ranks) of this run, whoever starts them.

    Raises:
        ValueError: no GPU, more ranks than GPUs, or another number than the launcher's.
    """
    import torch

    from carpool.train.config import load_config
    from carpool.train.launch import find_world, local_ranks, use_cuda

    if settings.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda, but PyTorch finds no GPU here; see `carpool doctor`")
    config = load_config(None, [f"parallelism.device={settings.device}"])
    cuda, asked, world = use_cuda(config), settings.ranks, find_world(os.environ)
    if world is not None:
        if asked not in (None, world.world_size):
            raise ValueError(f"--ranks {asked}, but {world.started_by} started {world.world_size}; leave --ranks out")
        return cuda, world.world_size
    if cuda and asked is not None and asked > torch.cuda.device_count():
        raise ValueError(
            f"--ranks {asked}, but this machine has {torch.cuda.device_count()} GPUs; lower it, or use --device cpu"
        )
    return cuda, local_ranks(config) if asked is None else asked


def _one_of(option: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        raise ValueError(f"{option}: {value!r} is not known; use {', '.join(known[:-1])} or {known[-1]}")
