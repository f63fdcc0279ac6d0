"""What profilers call the layers of a model: "layers.3" for "model.layers.3.mlp.experts"."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from carpool.hf.expert_parallel import rides


def name_layers(model: nn.Module) -> None:
    """Let profilers show the model's Carpool layers by their names (`carpool.stats.Meter`)."""
    layers = rides(model)
    for name, own in zip(short_names(list(layers)), layers.values(), strict=True):
        own.stats.meter.layer = name


def short_names(names: Sequence[str]) -> list[str]:
    """Of modules: their list and number in it, if that tells them apart."""
    short = []
    for name in names:
        parts = name.split(".")
        number = next((i for i, part in enumerate(parts) if part.isdigit()), None)
        short.append(name if number is None else ".".join(parts[max(0, number - 1) : number + 1]))
    return short if len(set(short)) == len(names) else list(names)
