"""What `carpool bench model` can be asked, and the training configuration of each contender."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from carpool.bench.bench_settings import LAYERS_HELP
from carpool.bench.options import RankOptions, asked, check_contenders
from carpool.plugins.nearest import did_you_mean
from carpool.train.config import Config, load_config
from carpool.train.config.published import read_keys
from carpool.train.config.schema import DEMO_MODEL
from carpool.train.config.schema_base import toml_value

MODEL_CONTENDERS = ("carpool", "carpool-compiled", "transformers", "transformers-compiled")
MODEL_ROUTINGS = ("balanced", "learned")
# Settings that all contenders share, which compute the same steps over the same ranks; and the exception.
_SHARED = (
    "model.", "data.", "parallelism.", "training.per_device", "training.gradient_accumulation", "training.seed",
    "training.resume", "training.output",
)  # fmt: skip
_NOT_SHARED = ("parallelism.data_parallel",)
# Settings for which the command has options of its own.
_HAVE_OPTIONS = {"parallelism.num_ranks": "--ranks", "parallelism.device": "--device", "training.output_dir": "--out"}
# Sections that Transformers' contenders never read.
_OF_CARPOOL = ("moe.", "codec.", "nvlink.", "memory.", "placement.")
# The model of `carpool train` without arguments.
DEMO = "demo"
# Nothing but steps, and as many as are asked for.
STEPS_ALONE = (
    "training.max_steps=1000000000",
    "training.torch_compile=off",
    "training.warmup_steps=0",
    "training.learning_rate=1e-5",
    "training.eval_on_start=false",
    "training.eval_steps=none",
    "training.save_steps=none",
    "training.report_to=none",
    "training.per_device_eval_batch_size=1",
    "data.tokenizer=bytes",
)


@dataclass(frozen=True)
class CustomContender:
    """A contender that is the trainer with settings of its own.

    Attributes:
        overrides: `section.key=value` of the training configuration.
        changes: what of the model's function it changes; empty: its losses must be those of the others.
    """

    overrides: tuple[str, ...]
    changes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ModelSettings(RankOptions):
    """See the options of the command.

    Raises:
        ValueError: a model, routing or contender that is not known, or a number that cannot be.

    Attributes:
        overrides: `section.key=value` of the training configuration, of all contenders.
        own: contenders of other names than `MODEL_CONTENDERS` has.
        steps: that a contender takes back to back in a round.
    """

    model: str = asked(
        "--model",
        "qwen3-30b-a3b, olmoe-1b-7b, gpt-oss-20b, deepseek-v3-cut or another published configuration, or a "
        "config.json.",
        MISSING,
    )
    layers: int | None = asked("--layers", LAYERS_HELP, None)
    sequence: int = asked("--sequence", "Tokens in one sequence.", 4096)
    batch: int = asked("--batch", "Sequences of a rank in a micro-batch.", 2)
    accumulation: int = asked("--accumulation", "Micro-batches in a step.", 1)
    routing: str = asked(
        "--routing",
        "balanced (choices are forced, equally many for each expert), learned (the routers choose), or the .npz file "
        "of a trace.",
        "balanced",
    )
    contenders: tuple[str, ...] = asked(
        "--contenders",
        "Some of carpool, carpool-compiled, transformers, transformers-compiled. Carpool's may have settings of their "
        "own: carpool-compiled+moe.schedule=two-batch.",
        MODEL_CONTENDERS,
        kind=str,
        metavar="NAME,...",
    )
    steps: int = asked("--steps", "Steps back to back in a round.", 5)
    rounds: int = asked("--rounds", "Rounds, in which contenders take turns.", 3)
    overrides: tuple[str, ...] = asked(
        "--set",
        "Any setting of `carpool train`, such as moe.schedule=chunks or model.dtype=float32; may be repeated.",
        (),
        kind=list[str],
        metavar="SECTION.KEY=VALUE",
    )
    out: str = asked("--out", "Folder for model.json and model.png, which are overwritten.", "runs/bench/model")
    own: Mapping[str, CustomContender] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_contenders([self._name(one) for one in self.contenders], (*MODEL_CONTENDERS, *self.own))
        counts = {
            "--layers": self.layers, "--sequence": self.sequence, "--batch": self.batch,
            "--accumulation": self.accumulation, "--steps": self.steps, "--rounds": self.rounds,
        }  # fmt: skip
        for option, count in counts.items():
            if count is not None and count < 1:
                raise ValueError(f"{option} {count} must be at least 1")
        there = (DEMO_MODEL["config"] if self.model == DEMO else read_keys(self.model)).get("num_hidden_layers")
        if self.layers is not None and isinstance(there, int) and self.layers > there:
            raise ValueError(f"--layers {self.layers}: {self.model} has {there}")
        if self.routing not in MODEL_ROUTINGS and not Path(self.routing).is_file():
            hint = did_you_mean(self.routing, MODEL_ROUTINGS)
            raise ValueError(
                f"--routing {self.routing} is no file of a trace, and not {' or '.join(MODEL_ROUTINGS)}{hint}"
            )
        for key in (override.partition("=")[0].strip() for override in self.overrides):
            if key.startswith("data.") and key != "data.sequence_length":
                raise ValueError(f"--set {key}: tokens are drawn at random here, so leave it out")
            if key in _HAVE_OPTIONS:
                raise ValueError(f"--set {key}: say so with {_HAVE_OPTIONS[key]}")
            if key == "training.resume_from_checkpoint":
                raise ValueError(f"--set {key}: weights are random here, so leave it out")
        for name in self.contenders:
            for key in (override.partition("=")[0] for override in self._extra_overrides(name)):
                if self.is_theirs(name):
                    raise ValueError(f"--contenders {name}: {key} is a setting of carpool alone")
                if key.startswith(_SHARED) and key not in _NOT_SHARED:
                    raise ValueError(f"--contenders {name}: {key} is the same for all contenders; use --set")
            config = self.config_of(name)
            for key in (override.partition("=")[0].strip() for override in self._extra_overrides(name)):
                if (why := config.declared.why_idle(config.flat(), key)) is not None:
                    raise ValueError(f"--contenders {name}: {key} {why}")
        if not self.own:
            self.check_set()

    def check_set(self) -> None:
        """Refuse what is set for all contenders and does something in none. A race asks when all of its rows are known.

        Raises:
            ValueError: that."""
        configs = [self.config_of(name) for name in self.contenders if not self.is_theirs(name)]
        for key in (override.partition("=")[0].strip() for override in self.overrides):
            idle = [config.declared.why_idle(config.flat(), key) for config in configs if key.startswith(_OF_CARPOOL)]
            if idle and all(idle):
                raise ValueError(f"--set {key} {idle[0]}")

    def resolve(self, *, cuda: bool, num_ranks: int) -> Self:
        return replace(self, ranks=num_ranks, device="cuda" if cuda else "cpu")

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Self:
        own = {
            name: CustomContender(tuple(one["overrides"]), tuple(one["changes"]))
            for name, one in values.get("own", {}).items()
        }
        return super().from_json({**values, "own": own})

    def is_theirs(self, contender: str) -> bool:
        """Whether it is transformers', not the trainer."""
        return contender not in self.own and contender.startswith("transformers")

    def changes(self, contender: str) -> tuple[str, ...]:
        """What of the model's function it says to change."""
        return self.own[contender].changes if contender in self.own else ()

    def config_of(self, contender: str | None) -> Config:
        """The training configuration of a contender; None: what all have in common.

        Raises:
            ValueError: a model, or an override, that cannot be.
        """
        own: tuple[str, ...] = ()
        more: tuple[str, ...] = ()
        if contender is not None and contender in self.own:
            own = self.own[contender].overrides
        elif contender is not None:
            own = ("training.torch_compile=true",) if self._name(contender).endswith("-compiled") else ()
            more = self._extra_overrides(contender)
        return load_config(None, [*self._base(), *own, *self.overrides, *more, *self._place(contender)])

    def _name(self, contender: str) -> str:
        """One of `MODEL_CONTENDERS` or of `own`."""
        return contender if contender in self.own else contender.partition("+")[0]

    def _extra_overrides(self, contender: str) -> tuple[str, ...]:
        """The settings that it has after its name."""
        return () if contender in self.own else tuple(contender.split("+")[1:])

    def _base(self) -> Iterable[str]:
        yield from STEPS_ALONE
        if self.model != DEMO:
            yield f"model.config={toml_value(self.model)}"
        if self.layers is not None:
            yield f"model.config.num_hidden_layers={self.layers}"
        if self.device == "cuda":
            yield "model.dtype=bfloat16"
            if not self.own:
                # As transformers' contenders do: all update alike. With masters a parameter takes 6 bytes more.
                yield "training.optimizer=torch"
        yield f"data.sequence_length={self.sequence}"
        yield f"training.per_device_train_batch_size={self.batch}"
        yield f"training.gradient_accumulation_steps={self.accumulation}"
        yield f"training.seed={self.seed}"

    def _place(self, contender: str | None) -> Iterable[str]:
        if self.ranks is not None:
            yield f"parallelism.num_ranks={self.ranks}"
        yield f"parallelism.device={self.device}"
        yield f"training.output_dir={json.dumps(str(Path(self.out) / (contender or '').replace(' ', '-')))}"
