"""What all benchmarks can be asked: device, ranks, dtype, routing, repetitions; checked before they start.

A benchmark's settings are a dataclass. `asked` says of a field by which option the command takes it, and
`carpool.cli.bench` makes the options from that.
"""

from __future__ import annotations

import math
import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, Self

from carpool.families import family
from carpool.plugins.nearest import did_you_mean

DTYPES = ("bfloat16", "float16", "float32")
# Kinds of routing (`carpool.bench.routings`). Transports are measured with the first: ranks are what matters; experts
# with the second.
ROUTINGS = ("uniform", "zipf", "skewed")
EXPERT_ROUTINGS = ("uniform", "zipf", "hot")


def asked(option: str, help: str, default: Any, *, kind: Any = None, **more: Any) -> Any:
    """A field that a command has an option for.

    Args:
        kind: of the option's value, where it is not the field's own type: str for a list with commas, list[...] for an
            option that may be repeated.
        more: further arguments of `typer.Option`.
    """
    return field(default=default, metadata={"option": option, "help": help, "kind": kind, "more": more})


@dataclass(frozen=True, kw_only=True)
class Options:
    """What every benchmark can be asked. Settings are these and its own; see the options of the commands."""

    device: str = asked("--device", "auto (cuda if there is a GPU, otherwise cpu), cpu or cuda.", "auto")
    seed: int = asked("--seed", "Of weights, hidden states and routing.", 0, min=0)
    out: str = ""
    json_only: bool = asked("--json-only", "Write the JSON file; no table, no figure.", False)

    def __post_init__(self) -> None:
        one_of("--device", self.device, ("auto", "cpu", "cuda"))

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Self:
        """What `to_json` gave."""
        given: dict[str, Any] = {name: tuple(it) if isinstance(it, list) else it for name, it in values.items()}
        return cls(**given)


@dataclass(frozen=True, kw_only=True)
class RankOptions(Options, ABC):
    """Those of a benchmark over ranks. `ranks`: None: one for each GPU, or 4 on a CPU."""

    ranks: int | None = asked("--ranks", "Ranks on this machine. Default: one per GPU, or 4 on CPU.", None)

    @abstractmethod
    def resolve(self, *, cuda: bool, num_ranks: int) -> Self:
        """With every default filled in. ValueError: what so many ranks cannot do."""


@dataclass(frozen=True, kw_only=True)
class ShapeOptions(Options):
    """Those of a benchmark of shapes and routings.

    Attributes:
        shapes: empty: the benchmark's own, by the device.
        ROUTINGS: the kinds of routing that this benchmark has.
        SHAPE: the class of its shapes.
        TRACES: a routing may also be the file of a trace, or forced balance ("even").
    """

    ROUTINGS: ClassVar[tuple[str, ...]] = ()
    SHAPE: ClassVar[type[Any]]
    TRACES: ClassVar[bool] = False

    shapes: tuple[Any, ...] = ()
    routings: tuple[str, ...] = asked("--routing", "uniform, zipf, skewed, or all.", ("uniform",), kind=str)
    zipf_exponent: float = asked("--zipf-exponent", "How unequal zipf is.", 1.0)
    dtype: str = asked("--dtype", "bfloat16, float16 or float32.", "bfloat16")
    repetitions: int = asked("--repetitions", "Timed repetitions of everything.", 15)

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("--dtype", self.dtype, DTYPES)
        for name in self.routings:
            if not (self.TRACES and name.endswith(".npz")):
                one_of("--routing", name, (*self.ROUTINGS, "all", *(("even",) if self.TRACES else ())))
        if self.repetitions < 1:
            raise ValueError(f"--repetitions {self.repetitions} must be at least 1")
        if not 0 <= self.zipf_exponent < math.inf:
            raise ValueError(f"--zipf-exponent {self.zipf_exponent:g} must be 0 (uniform) or a positive number")
        if self.zipf_exponent != 1 and "zipf" not in self.all_routings:
            raise ValueError(f"--zipf-exponent {self.zipf_exponent:g} changes nothing without --routing zipf")

    def resolved_shapes(self, defaults: Sequence[Any]) -> tuple[Any, ...]:
        """Each shape once; the defaults if none was asked for."""
        return tuple(dict.fromkeys(self.shapes)) or tuple(defaults)

    @property
    def all_routings(self) -> tuple[str, ...]:
        """Each kind once, "all" resolved."""
        return self.ROUTINGS if "all" in self.routings else tuple(dict.fromkeys(self.routings))

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Self:
        return super().from_json({**values, "shapes": [cls.SHAPE(**shape) for shape in values["shapes"]]})


def split(text: str | None) -> tuple[str, ...]:
    """("a", "b") from "a,b"; of None nothing."""
    return tuple(dict.fromkeys(part.strip() for part in text.split(","))) if text is not None else ()


def check_contenders(names: Sequence[str], known: Sequence[str]) -> None:
    """ValueError unless --contenders names some, and only known ones."""
    for name in names:
        one_of("--contenders", name, known)
    if not names:
        raise ValueError(f"--contenders is empty; name some of {', '.join(known)}")


def one_of(option: str, value: str, known: Sequence[str]) -> None:
    """ValueError, with the nearest known name, unless `value` is known."""
    if value not in known:
        listed = f"{', '.join(known[:-1])} or {known[-1]}" if len(known) > 1 else known[0]
        raise ValueError(f"{option}: {value!r} is not known; use {listed}{did_you_mean(value, known)}")


def parse_sizes(text: str, names: Sequence[str], example: str) -> list[int]:
    """[1, 2, 3] from "1,2,3": as many positive integers as there are `names`.

    Raises:
        ValueError: saying what `--shape` has to look like.
    """
    try:
        sizes = [int(part) for part in text.split(",")]
    except ValueError:
        sizes = []
    if len(sizes) != len(names):
        raise ValueError(
            f"--shape {text} is not understood; give {', '.join(names)}, such as --shape {example}"
        ) from None
    if small := [name for name, size in zip(names, sizes, strict=True) if size < 1]:
        raise ValueError(f"--shape {text}: {', '.join(small)} must be at least 1")
    return sizes


def check_experts(what: str, top_k: int, experts: int) -> None:
    if top_k > experts:
        raise ValueError(f"{what}: a token cannot choose {top_k} of {experts} experts")


def find_device(device: str) -> bool:
    """Whether the benchmark runs on a GPU. ValueError if it is to and there is none."""
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda, but PyTorch finds no GPU here; see `carpool doctor`")
    return device != "cpu" and torch.cuda.is_available()


def find_ranks(device: str, asked: int | None) -> tuple[bool, int]:
    """(on GPUs, how many ranks) of this run, whoever starts them.

    Args:
        device: "auto", "cpu" or "cuda".
        asked: --ranks, or None.

    Raises:
        ValueError: no GPU, more ranks than GPUs, or another number than the launcher's.
    """
    import torch

    from carpool.parallel.world import find_world
    from carpool.train.config import load_config
    from carpool.train.launch.start import local_ranks

    if asked is not None and asked < 1:
        raise ValueError(f"--ranks {asked} must be at least 1")
    cuda, world = find_device(device), find_world(os.environ)
    if world is not None:
        if asked not in (None, world.world_size):
            raise ValueError(f"--ranks {asked}, but {world.started_by} started {world.world_size}; leave --ranks out")
        return cuda, world.world_size
    if cuda and asked is not None and asked > torch.cuda.device_count():
        raise ValueError(
            f"--ranks {asked}, but this machine has {torch.cuda.device_count()} GPUs; lower it, or use --device cpu"
        )
    if asked is not None:
        return cuda, asked
    return cuda, local_ranks(load_config(None, [f"parallelism.device={device}"]))


FAMILY_OF = {"swiglu": "qwen3_moe", "gpt-oss": "gpt_oss", "relu2": "nemotron_h"}


@dataclass(frozen=True)
class RideShape:
    """Tokens per rank, hidden size, experts of all ranks, experts per token."""

    tokens: int
    hidden: int
    experts: int
    top_k: int

    @classmethod
    def parse(cls, text: str) -> RideShape:
        """From "4096,7168,256,8"; ValueError if that is no shape."""
        names = ("tokens", "hidden", "experts", "top-k")
        shape = cls(*parse_sizes(text, names, "4096,7168,256,8"))
        check_experts(f"--shape {text}", shape.top_k, shape.experts)
        return shape

    def __str__(self) -> str:
        return f"T {self.tokens}, H {self.hidden}, E {self.experts}, K {self.top_k}"


@dataclass(frozen=True)
class LayerShape:
    """Of an MoE layer: tokens (of each rank), hidden size, the experts' hidden size, experts (of all ranks), and
    experts per token.

    Attributes:
        family: what the experts compute, named after the class of transformers that computes it. Models have their own;
            shapes that are given by number have `FAMILY_OF[activation]`.
        model: the model whose sizes these are; "" if none.
    """

    tokens: int
    hidden: int
    inner: int
    experts: int
    top_k: int
    family: str = "qwen3_moe"
    model: str = ""

    @classmethod
    def parse(cls, text: str, activation: str = "swiglu") -> LayerShape:
        """From "8192,2048,1024,64,8"; ValueError if that is no shape."""
        one_of("--activation", activation, tuple(FAMILY_OF))
        names = ("tokens", "hidden", "expert hidden", "experts", "top-k")
        tokens, hidden, inner, experts, top_k = parse_sizes(text, names, "8192,2048,1024,64,8")
        shape = cls(tokens, hidden, inner, experts, top_k, FAMILY_OF[activation])
        check_experts(f"--shape {text}", shape.top_k, shape.experts)
        return shape

    @classmethod
    def of_model(cls, name: str, tokens: int) -> LayerShape:
        """The sizes of a model's MoE layers."""
        one_of("--model", name, tuple(MODELS))
        if tokens < 1:
            raise ValueError(f"--tokens {tokens} must be at least 1")
        family, hidden, inner, experts, top_k = MODELS[name]
        return cls(tokens, hidden, inner, experts, top_k, family, name)

    @property
    def gated(self) -> bool:
        return family(self.family).gated

    @property
    def flops(self) -> int:
        """Operations of the forward of one rank's tokens: those of the mathematics, two for each multiplication.

        A token visits K experts, each of which multiplies it by an up projection (H x F, for gated experts H x 2F) and
        a down projection (F x H):

            gated    2 T K (2 H F + F H) = 6 T K H F        not gated    2 T K (H F + F H) = 4 T K H F

        The backward takes twice as many, a product for the gradient of each factor. What is computed a second time, to
        save less, is not counted again.
        """
        return (6 if self.gated else 4) * self.tokens * self.top_k * self.hidden * self.inner

    def __str__(self) -> str:
        sizes = f"T {self.tokens}, H {self.hidden}, F {self.inner}, E {self.experts}, K {self.top_k}"
        activation = next((name for name, family in FAMILY_OF.items() if family == self.family), "")
        what = self.model or ("" if activation == "swiglu" else activation)
        return f"{what}: {sizes}" if what else sizes


# Family, H, F, E, K, from the configuration that was published with the weights.
MODELS: dict[str, tuple[str, int, int, int, int]] = {
    "olmoe": ("olmoe", 2048, 1024, 64, 8),  # allenai/OLMoE-1B-7B-0924
    "qwen3-30b-a3b": ("qwen3_moe", 2048, 768, 128, 8),  # Qwen/Qwen3-30B-A3B
    "mixtral-8x7b": ("mixtral", 4096, 14336, 8, 2),  # mistralai/Mixtral-8x7B-v0.1
    "deepseek-v3": ("deepseek_v3", 7168, 2048, 256, 8),  # deepseek-ai/DeepSeek-V3, routed experts only
    "gpt-oss-120b": ("gpt_oss", 2880, 2880, 128, 4),  # openai/gpt-oss-120b
}


RIDE_SHAPES_GPU = (RideShape(4096, 7168, 256, 8), RideShape(8192, 2048, 64, 8), RideShape(8192, 4096, 128, 8))
# For a laptop. 32 experts, so that every routing is possible on four ranks.
RIDE_SHAPES_CPU = (RideShape(1024, 256, 32, 4),)
LAYER_SHAPES_GPU = (
    LayerShape(8192, 2048, 1024, 64, 8),
    LayerShape(8192, 2048, 768, 128, 8),
    LayerShape(32768, 4096, 1024, 128, 8),
    LayerShape(24576, 1536, 256, 128, 8),
)
LAYER_SHAPES_CPU = (LayerShape(128, 64, 48, 16, 4),)  # seconds on a laptop


def list_shapes(
    shapes: Sequence[str], models: Sequence[str], tokens: int, activation: str | None
) -> tuple[LayerShape, ...]:
    """The shapes that the options --shape, --model, --tokens and --activation name.

    Raises:
        ValueError: an unknown name, or sizes that are none.
    """
    if activation is not None and not shapes:
        raise ValueError("--activation is what the experts of --shape compute; models have their own. Give a --shape")
    given = tuple(LayerShape.parse(text, activation or "swiglu") for text in shapes)
    return given + tuple(LayerShape.of_model(name, tokens) for name in models)
