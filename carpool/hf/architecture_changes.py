"""What a plug-in changes in a model of Transformers: modules, parameters and sizes that no configuration can express.

    class Gain(ArchitectureChange):
        not_in_transformers = "its expert layers have a gain"

        def apply(self, model):                 # on the meta device: without values
            for name in experts_modules(model):
                block = model.get_submodule(name.rpartition(".")[0])
                ...                             # self.settings["initial"]

        def describe(self):
            return "ANOTHER MODEL: each expert layer has a gain (gain.initial)"

    [project.entry-points."carpool.architecture_changes"]
    gain = "my_package.gain:Gain"

The model's configuration records which changes it has, and config.json of each checkpoint with it:

    "carpool_changes": {"gain": {"initial": 1.0}}

Whatever constructs the model from that configuration applies them again: a run, its resumption, an evaluation,
`carpool generate`. Models from scratch can be changed; of checkpoints, which Transformers loads into classes of its
own, those whose extension says so (`changes_checkpoints`).

`carpool train` takes the settings from the section of an `Extension` of the same name (`carpool.train.extensions`),
whose attribute `architecture` lists them. Elsewhere `add_change` adds a change to a configuration.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

from transformers import PreTrainedConfig, PreTrainedModel
from transformers.distributed.mixin import DistributedMixin

from carpool.plugins import Registry

__all__ = ["ARCHITECTURE_CHANGES", "ArchitectureChange", "add_change", "change_architecture", "changes_of"]

KEY = "carpool_changes"
# By name, the settings of changes.
Changes = Mapping[str, Mapping[str, Any]]


class ArchitectureChange:
    """A change of a model's architecture.

    Attributes:
        not_in_transformers: why Transformers cannot load such a model, in half a sentence: it is not exported. Empty:
            Transformers' own class has the same parameters and computes the same, and takes the place of the changed
            model in exports.
        in_files: exports have its parameters all the same, beside those of Transformers' class, which ignores them.
        settings: values by name, as the configuration records them: what JSON can hold.
    """

    not_in_transformers: ClassVar[str] = ""
    in_files: ClassVar[bool] = False

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self.settings = settings

    def apply(self, model: PreTrainedModel) -> None:
        """Change a model that was just constructed on the meta device. New parameters are in modules of PyTorch, whose
        values are drawn as those of the model's own.

        Raises:
            ValueError: a model that cannot be changed so."""
        raise NotImplementedError

    def describe(self) -> str:
        """The line about it that a run prints."""
        raise NotImplementedError

    def absent(self, model: PreTrainedModel, stored: Collection[str]) -> list[str]:
        """Of a changed model of a checkpoint with weights of these names: how the names of tensors begin that it has
        not, and that get random values."""
        return []

    def dispatched_size(self, size: int) -> int:
        """Elements of a hidden state that is dispatched, which has `size` without this change."""
        return size


def _check(name: str, cls: type[ArchitectureChange]) -> None:
    if not (isinstance(cls, type) and issubclass(cls, ArchitectureChange)):
        raise ValueError(f"architecture change {name!r} ({cls!r}) must be a subclass of ArchitectureChange")
    if missing := [one for one in ("apply", "describe") if getattr(cls, one) is getattr(ArchitectureChange, one)]:
        raise ValueError(f"architecture change {name!r} ({cls.__name__}) does not implement {', '.join(missing)}")


ARCHITECTURE_CHANGES: Registry[type[ArchitectureChange]] = Registry(
    "architecture change", "carpool.architecture_changes", {}, _check
)


def add_change(config: PreTrainedConfig, name: str, settings: Mapping[str, Any]) -> None:
    """Record in a configuration that its models have the change of that name. Raises ValueError if there is none."""
    text: Any = config.get_text_config()
    setattr(text, KEY, {**(getattr(text, KEY, None) or {}), name: dict(settings)})
    changes_of(config)


def changes_of(config: PreTrainedConfig) -> list[ArchitectureChange]:
    """The changes that models of a configuration have, in the order in which they are applied.

    Raises:
        ValueError: one of a plug-in that is not here."""
    found: Mapping[str, Mapping[str, Any]] = getattr(config.get_text_config(), KEY, None) or {}
    if missing := sorted(found.keys() - set(ARCHITECTURE_CHANGES)):
        raise ValueError(
            f"the plug-in {missing[0]!r} has changed the architecture of this model, and is not here: install its "
            "package, or name its module in CARPOOL_PLUGINS"
        )
    return [ARCHITECTURE_CHANGES[name](settings) for name, settings in found.items()]


def change_architecture(model: PreTrainedModel) -> None:
    """Apply the changes that the configuration of a model records, which was just constructed on the meta device."""
    for change in changes_of(model.config):
        change.apply(model)


def change_checkpoint(model: PreTrainedModel, changes: Changes, stored: Collection[str]) -> None:
    """Apply these to the model of a checkpoint, which is on the meta device. `stored`: the names of its weights."""
    for name, settings in changes.items():
        add_change(model.config, name, settings)
    change_architecture(model)
    if starts := _absent(model, stored):
        patterns = (f"^{re.escape(start)}" for start in starts)
        model._keys_to_ignore_on_load_missing = [*(model._keys_to_ignore_on_load_missing or ()), *patterns]


def absent_tensors(model: PreTrainedModel, stored: Collection[str]) -> list[str]:
    """Tensors of a changed model of a checkpoint that the checkpoint, with weights of these names, has not."""
    return [name for name in model.state_dict() if name.startswith(_absent(model, stored))]


def _absent(model: PreTrainedModel, stored: Collection[str]) -> tuple[str, ...]:
    return tuple(start for one in changes_of(model.config) for start in one.absent(model, stored))


@contextmanager
def changed_while_loading(changes: Changes, stored: Collection[str]) -> Iterator[None]:
    """Inside, the model that Transformers loads is changed before it is sharded and weights are read."""
    before = vars(DistributedMixin)["maybe_distribute_model"]

    def change_first(cls: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        change_checkpoint(model, changes, stored)
        return before.__func__(cls, model, *args, **kwargs)

    DistributedMixin.maybe_distribute_model = classmethod(change_first)
    try:
        yield
    finally:
        DistributedMixin.maybe_distribute_model = before


def row_size(config: PreTrainedConfig) -> int:
    """Elements of a hidden state that is dispatched."""
    text: Any = config.get_text_config()
    size = int(text.hidden_size)
    for change in changes_of(config):
        size = change.dispatched_size(size)
    return size


def why_not_in_transformers(config: PreTrainedConfig) -> str:
    """Why Transformers cannot load models of a configuration; "" if it can."""
    return "; ".join(why for change in changes_of(config) if (why := change.not_in_transformers))


def changes_in_files(config: PreTrainedConfig) -> Changes:
    """The changes whose parameters exports of a configuration's models have."""
    found: Changes = getattr(config.get_text_config(), KEY, None) or {}
    return {name: settings for name, settings in found.items() if ARCHITECTURE_CHANGES[name].in_files}


def without_changes(config: dict[str, Any]) -> None:
    """Drop the changes from the keys of a config.json."""
    for keys in (config, *config.values()):
        if isinstance(keys, dict):
            keys.pop(KEY, None)
