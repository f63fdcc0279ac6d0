"""Recipes of the kind "memory": each mechanism changes what travels between the device and host memory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import tomli_w
import torch

from carpool.hf.expert_parallel import rides
from carpool.hf.host_experts import keep_experts_in_host_memory
from carpool.memory.optimizer import AdamW
from carpool.parallel.consumed import ConsumedGradients
from carpool.recipes import load, names, read
from carpool.recipes.mechanisms import find
from carpool.train.config import Config, load_config
from carpool.train.run.step import make_optimizer
from tests.memory.test_host_experts import LAYERS, loss_of, model_of

# What makes a system that system; a recipe may not lose any of it.
SYSTEMS = {
    "zero-offload": {"host:optimizer-state"},
    "es-moe": {"host:experts", "host:optimizer-state", "gradients:consumed"},
}
REFUSED = {
    "zero-infinity": {"host:dense-parameters", "disk:parameters"},
    "moe-infinity": {"prefetch:activation-matrix", "cache:experts"},
    "aptmoe": {"cpu:experts", "prefetch:popularity", "parallel:pipeline"},
    "moesys": {"disk:experts", "cache:hit-frequency"},
}


class Travelled(NamedTuple):
    """Of one step: bytes of state in and out, of experts in and out, and the experts' gradients that were there at the
    end of the backward."""

    state: tuple[int, int]
    experts: tuple[int, int]
    gradients: int


def step(config: Config) -> Travelled:
    """A step of a tiny model with a configuration's tiers, on one process."""
    model = model_of()
    optimizer = make_optimizer(model, config.training)
    assert isinstance(optimizer, AdamW)
    away = keep_experts_in_host_memory(model) if config.memory.experts == "host" else None
    consumed = ConsumedGradients(model, optimizer, away) if config.training.gradients == "consumed" else None
    loss = loss_of(model, 0)
    if consumed is not None:
        consumed.begin(torch.isfinite(loss))
    loss.backward()
    experts = [p for own in rides(model).values() for p in own.experts.parameters()]
    left = sum(p.grad is not None for p in experts)
    if consumed is not None:
        consumed.finish()
    else:
        optimizer.step()
    return Travelled(optimizer.streamed_bytes, (0, 0) if away is None else (away.bytes_in, away.bytes_out), left)


def without(recipe_settings: Mapping[str, Mapping[str, Any]], setting: str, path: Path) -> Config:
    """A recipe's configuration with one setting at its default, and what must follow."""
    section, key = setting.split(".")
    changed = {name: dict(values) for name, values in recipe_settings.items()}
    del changed[section][key]
    path.write_text(tomli_w.dumps(changed))
    return load_config(path, [])


def test_they_are_there_and_of_these_parts() -> None:
    assert set(names("memory")) >= set(SYSTEMS) | set(REFUSED)
    for name, parts in SYSTEMS.items():
        assert parts <= set(load(name).mechanisms)
    for name, missing in REFUSED.items():
        assert set(read(name).missing) == missing


@pytest.mark.parametrize(
    ("name", "mechanism"), [(name, one) for name, parts in SYSTEMS.items() for one in sorted(parts)]
)
def test_a_mechanism_changes_what_travels(
    name: str, mechanism: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("carpool.parallel.consumed.LEAST_ELEMENTS", 1)
    recipe, one = load(name), find(mechanism)
    assert one is not None
    whole = step(load_config(recipe.path, []))
    if mechanism == "host:optimizer-state":
        lacking = step(without(recipe.settings, one.setting, tmp_path / "mine.toml"))
        assert whole.state[0] == whole.state[1] > 0 and lacking.state == (0, 0)
    elif mechanism == "host:experts":
        lacking = step(without(recipe.settings, one.setting, tmp_path / "mine.toml"))
        layer = sum(p.numel() * 2 for p in next(iter(rides(model_of()).values())).experts.parameters())
        assert whole.experts == ((2 * LAYERS - 1) * layer, LAYERS * layer) and lacking.experts == (0, 0)
    else:
        # Gradients that are kept cannot be combined with experts in host memory that are trained.
        settings = {name: values for name, values in recipe.settings.items() if name != "memory"}
        lacking = step(without(settings, one.setting, tmp_path / "mine.toml"))
        assert whole.gradients == 0 and lacking.gradients == 2 * LAYERS
