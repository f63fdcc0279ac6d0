"""What profilers call the layers of a model: "layers.3" for "model.layers.3.mlp.experts"."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from carpool.hf.expert_parallel import rides


def name_layers(model: nn.Module) -> None:
    """Let profilers show the model's Carpool layers by their names (`carpool.observe.meter.Meter`)."""
    layers = rides(model)
    for name, own in zip(short_names(list(layers)), layers.values(), strict=True):
        own.stats.meter.layer = name


def list_number(name: str) -> int | None:
    """The part of a module's dotted name that is its number in the first list of modules; None: it is in no list."""
    return next((i for i, part in enumerate(name.split(".")) if part.isdigit()), None)


def short_names(names: Sequence[str]) -> list[str]:
    """Of modules: their list and number in it, if that tells them apart."""
    short = []
    for name in names:
        parts, number = name.split("."), list_number(name)
        short.append(name if number is None else ".".join(parts[max(0, number - 1) : number + 1]))
    return short if len(set(short)) == len(names) else list(names)
