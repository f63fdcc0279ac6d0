"""An extension in one file outside the package: a model with more layers than its configuration says."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from carpool.train.config.schema_base import Section
from carpool.train.extensions import Extension, register


class DeeperSection(Section):
    layers: int = Field(0, ge=0, description="Layers that are added to the model's.")
    device_bytes: int = Field(0, ge=0, description="Bytes that are added to the estimate of memory.")


@register
class Deeper(Extension):
    name, section, help = "deeper", DeeperSection, "A model with more layers. Off by default."

    def check(self, config: Any) -> None:
        if config.model.path is not None:
            raise ValueError("deeper.layers needs a model from scratch: leave model.path out")

    def change_model(self, model_config: Any) -> None:
        model_config.num_hidden_layers += self.settings.layers

    def check_plan(self, plan: Any) -> None:
        if plan.blueprint.model.config.num_hidden_layers > 4:
            raise ValueError(f"deeper.layers = {self.settings.layers}: the model may have 4 layers at most")

    def device_bytes(self, estimate: Any) -> int:
        return self.settings.device_bytes

    def prepare_layers(self, plan: Any, model: Any, layers: list[Any]) -> None:
        self.called = [f"{len(layers)} layers"]

    def prepare_run(self, plan: Any, built: Any) -> None:
        self.called.append(type(built.objective).__name__)

    def before_step(self, run: Any) -> None:
        self.called.append("before")

    def after_step(self, run: Any) -> None:
        run.records.write("deeper", run.step, called=self.called)
        self.called = []
