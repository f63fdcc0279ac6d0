"""An architecture change in one file outside the package: sums of experts pass a module of each block."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field
from torch import nn

from carpool.hf.architecture_changes import ARCHITECTURE_CHANGES, ArchitectureChange
from carpool.hf.seam.experts_module import project_tokens
from carpool.hf.seam.find_modules import experts_modules
from carpool.train.config.schema_base import Section
from carpool.train.extensions import Extension, register


class GainSection(Section):
    kind: Literal["learned", "plain"] | None = Field(None, description="A learned matrix, or nothing.")
    note: str = Field("", description="Changes no model.")


@register
class Gain(Extension):
    name, section, help, architecture = "gain", GainSection, "A gain behind experts. Off by default.", ("kind",)


class GainChange(ArchitectureChange):
    def __init__(self, settings: Any) -> None:
        super().__init__(settings)
        self.learned = settings["kind"] == "learned"
        self.not_in_transformers = "it has no gains" if self.learned else ""

    def apply(self, model: Any) -> None:
        for name in experts_modules(model):
            block = model.get_submodule(name.rpartition(".")[0])
            hidden = model.config.hidden_size
            block.gain = nn.Linear(hidden, hidden, bias=False) if self.learned else nn.Identity()
            project_tokens(model.get_submodule(name), nn.Identity(), block.gain)

    def describe(self) -> str:
        return f"a {self.settings['kind']} gain behind experts (gain.kind)"


ARCHITECTURE_CHANGES.register(GainChange, "gain")
