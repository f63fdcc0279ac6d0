"""What a plug-in package may add to `carpool train`: a section of settings, and what it does in a run.

A transport, a codec, an expert computation, an optimizer or a solver enters through the registry of its kind
(`carpool.plugins`). An `Extension` is for what has no registry. It brings a section of its own:

    class NoiseSection(Section):
        scale: Annotated[float, Excludes("moe.random_second", "both are random")] = Field(default=0.0, ge=0)
        \"\"\"Standard deviation of the noise that is added to each router.\"\"\"

    class Noise(Extension):
        name, section, help = "noise", NoiseSection, "Noise in routers. Off by default."

        def prepare_layers(self, plan, model, layers):
            ...                                             # self.settings.scale

    carpool.train.extensions.register(Noise)

Then `carpool train noise.scale=0.1` works as for any other section: `--help-config` lists it, unknown keys are refused
with the nearest one, `config.toml` records it, and a resumed run must have the same. `CARPOOL_PLUGINS` names a module
that registers one; a package has an entry point in the group "carpool.extensions", whose name is that of the section:

    [project.entry-points."carpool.extensions"]
    noise = "my_package.noise:Noise"

While all settings of its section have their defaults, an extension does nothing: none of its methods is called. In
use, they are called in this order, on all ranks alike:

    check                 settings of a configuration, before anything is read
    change_model          the model's configuration, before a model is built from scratch. What a configuration cannot
                          say is an architecture change (`architecture`), which is applied to the model without values
    check_plan            the plan, before anything is loaded; a dry run ends after it
    check_data            how examples become sequences, once the data are known
    device_bytes          for the estimate of memory
    prepare_layers        the model is there, layers have no transport and no buffers yet
    prepare_run           layers, objective and optimizer are there, no step is captured as a graph yet
    restore               the run is built, and goes on from a checkpoint or begins
    describe              what a run prints before its first step
    before_step, after_step
    finish                the run came to its end

One object gets the calls from `prepare_layers` on, so that it may remember what it made. Those before it are made to
objects of their own, and must not change them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from carpool.plugins import Registry
from carpool.train.config.schema_base import Section

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

    from carpool.hf.seam.expert_rides import ExpertRides
    from carpool.train.build.assemble import Built
    from carpool.train.config.schema import Config
    from carpool.train.plan.estimate import MemoryEstimate
    from carpool.train.plan.resolve import Plan
    from carpool.train.run.loop import Run

__all__ = ["EXTENSIONS", "Extension", "extensions_in_use", "register"]


class Extension:
    """A section of settings, and what it does in a run.

    Attributes:
        name: of the section.
        section: its class. Every key has a default and a description, and the defaults together mean "off".
        help: what the section is about, in one sentence.
        architecture: the settings that an architecture change of the same name reads; empty: there is none
            (`carpool.hf.architecture_changes`).
        changes_checkpoints: that is of models of checkpoints, too.
        settings: the section of this run.
    """

    name: ClassVar[str]
    section: ClassVar[type[Section]]
    help: ClassVar[str]
    architecture: ClassVar[Sequence[str]] = ()
    changes_checkpoints: ClassVar[bool] = False

    def __init__(self, settings: Any) -> None:
        self.settings = settings

    def architecture_settings(self) -> dict[str, Any]:
        """The settings that the architecture change reads; empty if all have their defaults, which change nothing."""
        found, off = ({key: getattr(one, key) for key in self.architecture} for one in (self.settings, self.section()))
        return {} if found == off else found

    def check(self, config: Config) -> None:
        """Raise ValueError if these settings contradict others."""

    def change_model(self, model_config: PreTrainedConfig) -> None:
        """Change the configuration of a model that is built from scratch."""

    def check_plan(self, plan: Plan) -> None:
        """Raise ValueError for what this model, machine or division into ranks cannot have."""

    def check_data(self, plan: Plan, packed: bool) -> None:
        """Raise ValueError for what sequences cannot have. `packed`: whether each holds several examples."""

    def device_bytes(self, estimate: MemoryEstimate) -> int:
        """Bytes of device memory that a rank needs for it."""
        return 0

    def prepare_layers(self, plan: Plan, model: PreTrainedModel, layers: list[ExpertRides]) -> None:
        """Change the MoE layers before their transport is chosen and their buffers are made."""

    def prepare_run(self, plan: Plan, built: Built) -> None:
        """Change what was built, such as the objective. A reason in `built.no_graphs` keeps steps out of CUDA graphs;
        all ranks must give the same."""

    def describe(self) -> str:
        """The line that a run prints about it; "": none."""
        return ""

    def restore(self, run: Run, checkpoint: Path | None) -> dict[str, Any] | None:
        """Called before a run loads its checkpoint, if it goes on from one. Puts a later state into the run, as
        `carpool.train.run.rollback.load_state` does, and returns what that does; None: it has none. All ranks call it,
        before anything is recorded."""
        return None

    def before_step(self, run: Run) -> None:
        """Called before the batches of a step are read. Weights are left alone: they may still be copied."""

    def after_step(self, run: Run) -> None:
        """Called when a step's update has been made."""

    def finish(self, run: Run) -> None:
        """Called when the run came to its end, after its last checkpoint."""


def _check(name: str, cls: type[Extension]) -> None:
    section = getattr(cls, "section", None)
    if not name.isidentifier() or not getattr(cls, "help", ""):
        raise ValueError(f"extension {name!r} ({cls.__name__}) needs name, an identifier, and help, one sentence")
    if not (isinstance(section, type) and issubclass(section, Section)):
        raise ValueError(f"extension {name!r} ({cls.__name__}): its section must be a subclass of Section")
    for key, field in section.model_fields.items():
        if field.is_required() or not field.description:
            raise ValueError(f"extension {name!r}: {name}.{key} needs a default and a description")
    if missing := [key for key in cls.architecture if key not in section.model_fields]:
        raise ValueError(f"extension {name!r}: its architecture reads {name}.{missing[0]}, which its section lacks")


EXTENSIONS: Registry[type[Extension]] = Registry("extension", "carpool.extensions", {}, _check, Extension)
register = EXTENSIONS.register


def extensions_in_use(config: Config) -> list[Extension]:
    """An object of each extension of which a setting differs from its default."""
    found = [(cls, getattr(config, name, None)) for name, cls in EXTENSIONS.items()]
    return [cls(settings) for cls, settings in found if settings is not None and settings != cls.section()]
