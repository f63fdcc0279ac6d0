"""Recipes of the kind "memory": each mechanism changes what travels between the device and host memory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import tomli_w
import torch
from carpool.memory.activation_matrix import ActivationMatrices

from carpool.experts.host_experts import HostExperts
from carpool.hf.held_experts import keep_experts_in_host_memory
from carpool.hf.seam.expert_rides import rides
from carpool.memory.expert_cache import ExpertCache
from carpool.memory.next_experts import NextExperts
from carpool.optim import AdamW
from carpool.optim.in_backward import ConsumedGradients
from carpool.recipes import names
from carpool.train.build.assemble import loading_of, make_optimizer
from carpool.train.config import Config, load_config
from carpool_systems.mechanisms import find, load
from tests.memory.test_host_experts import LAYERS, batch, loss_of, model_of

# What makes a system that system; a recipe may not lose any of it.
SYSTEMS = {
    "zero-offload": {"host:optimizer-state"},
    "es-moe": {"host:experts", "host:optimizer-state", "gradients:consumed"},
    "zero-infinity": {"disk:experts", "disk:optimizer-state", "gradients:consumed"},
    "moe-infinity": {"host:experts"},
    "aptmoe": {"host:experts", "prefetch:popularity", "cpu:experts", "gradients:consumed"},
    "moesys": {"disk:experts", "cache:trained-experts", "gradients:consumed"},
}


class Travelled(NamedTuple):
    """Of one step: bytes of state in and out, of experts in and out, of state and experts that were written to disk,
    the experts' gradients that were there at the end of the backward, and the experts that the CPU computed."""

    state: tuple[int, int]
    experts: tuple[int, int]
    written: tuple[int, int]
    gradients: int
    computed: int


def step(config: Config, folder: Path) -> Travelled:
    """A step of a tiny model with a configuration's tiers, on one process."""
    model = model_of()
    optimizer = make_optimizer(model, config.training, folder if config.training.optimizer_offload == "disk" else None)
    assert isinstance(optimizer, AdamW)
    away, where = None, config.memory.experts
    if where != "device":
        # As if it had been measured.
        few = 2 if config.memory.cpu_expert_tokens else 0
        options = loading_of(config.memory, few)
        away = keep_experts_in_host_memory(model, folder=folder if where == "disk" else None, **options)
    consumed = ConsumedGradients(model, optimizer, away) if config.training.optimizer_in_backward else None
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
    written = optimizer.disk_bytes[1], 0 if away is None else away.disk_bytes[1]
    moved = (0, 0) if away is None else (away.bytes_in, away.bytes_out)
    computed = 0 if away is None else sum(len(away.few_of(number)) for number in range(LAYERS))
    return Travelled(optimizer.streamed_bytes, moved, written, left, computed)


def without(recipe_settings: Mapping[str, Mapping[str, Any]], setting: str, path: Path, drop: str = "") -> Config:
    """A recipe's configuration with one setting at its default, and what must follow; or another one, too."""
    section, key = setting.split(".")
    changed = {name: dict(values) for name, values in recipe_settings.items()}
    del changed[section][key]
    if setting == "memory.experts":  # what is about it
        changed["memory"] = {}
    if drop:
        changed[drop.split(".")[0]].pop(drop.split(".")[1])
    path.write_text(tomli_w.dumps(changed))
    return load_config(path, [])


def test_they_are_there_and_of_these_parts() -> None:
    assert set(names("memory")) >= set(SYSTEMS)
    for name, parts in SYSTEMS.items():
        assert parts <= set(load(name).mechanisms)


# Each mechanism in the first recipe that has it. That the others choose and use it is checked when they are loaded.
ONCE = {one: name for name, parts in reversed(SYSTEMS.items()) for one in sorted(parts)}


@pytest.mark.parametrize(("name", "mechanism"), [(name, one) for one, name in ONCE.items()])
def test_a_mechanism_changes_what_travels(
    name: str, mechanism: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("carpool.optim.in_backward.LEAST_ELEMENTS", 1)
    recipe, one = load(name), find(mechanism)
    assert one is not None
    config = load_config(recipe.path, [])
    layer = sum(p.numel() * 2 for p in next(iter(rides(model_of()).values())).experts.parameters())
    if mechanism == "cache:trained-experts":
        config = load_config(recipe.path, [f"memory.expert_host_memory={layer + 1}B"])
    whole = step(config, tmp_path)
    if mechanism == "prefetch:popularity":
        changed = without(recipe.settings, one.setting, tmp_path / "mine.toml", drop="memory.cpu_expert_tokens")
        lacking = step(changed, tmp_path)
        # The first batch: nothing is popular yet, and what the CPU computes comes for its update alone.
        assert whole.experts[0] < lacking.experts[0] == (2 * LAYERS - 1) * layer
    elif mechanism == "cpu:experts":
        lacking = step(without(recipe.settings, one.setting, tmp_path / "mine.toml"), tmp_path)
        assert whole.computed > 0 == lacking.computed
    elif mechanism == "cache:trained-experts":
        lacking = step(without(recipe.settings, one.setting, tmp_path / "mine.toml"), tmp_path)
        assert whole.experts == lacking.experts and whole.written[1] == (LAYERS - 1) * layer < lacking.written[1]
    elif mechanism.endswith(":optimizer-state"):
        lacking = step(without(recipe.settings, one.setting, tmp_path / "mine.toml"), tmp_path)
        assert whole.written[0] == whole.state[1] * mechanism.startswith("disk")
        assert whole.state[0] == whole.state[1] > 0 and lacking.state == (0, 0)
    elif mechanism.endswith(":experts"):
        lacking = step(without(recipe.settings, one.setting, tmp_path / "mine.toml"), tmp_path)
        kept = "expert_host_memory" in recipe.settings["memory"]
        assert kept or whole.written[1] == whole.experts[1] * mechanism.startswith("disk")
        popular = "expert_loading" in recipe.settings["memory"]
        assert popular or whole.experts[0] == (2 * LAYERS - 1) * layer
        assert whole.experts[1] == LAYERS * layer and lacking.experts == (0, 0)
    else:
        # Gradients that are kept cannot be combined with experts in host memory that are trained.
        settings = {name: values for name, values in recipe.settings.items() if name != "memory"}
        lacking = step(without(settings, one.setting, tmp_path / "mine.toml"), tmp_path)
        assert whole.gradients == 0 and lacking.gradients == 2 * LAYERS


def test_no_training_run_has_what_moe_infinity_is_made_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = load("moe-infinity")
    assert set(recipe.without_setting) == {"prefetch:activation-matrix", "cache:experts"}
    assert all("generate" in where for where in recipe.without_setting.values())
    made: list[type] = []
    for cls, name in ((ActivationMatrices, "__init__"), (ExpertCache, "put")):
        own = getattr(cls, name)

        def called(*args: Any, own: Any = own, cls: type = cls, **more: Any) -> Any:
            made.append(cls)
            return own(*args, **more)

        monkeypatch.setattr(cls, name, called)
    layer = sum(p.numel() * 2 for p in next(iter(rides(model_of()).values())).experts.parameters())
    assert step(load_config(recipe.path, []), tmp_path).experts == ((2 * LAYERS - 1) * layer, LAYERS * layer)
    assert made == [], "whole layers came, in order"
    test_what_generation_alone_has("cache:experts")
    assert set(made) == {ActivationMatrices, ExpertCache}


@pytest.mark.parametrize("mechanism", ["prefetch:activation-matrix", "cache:experts"])
def test_what_generation_alone_has(mechanism: str) -> None:
    """What it changes of what is fetched."""

    def came(predictor: type[ActivationMatrices] | type[NextExperts], room: int) -> tuple[list[list[int]], HostExperts]:
        asked = []

        class Asked(predictor):  # type: ignore[misc, valid-type]
            def likely(self, *arguments: Any) -> list[int]:
                asked.append(super().likely(*arguments))
                return asked[-1]

        model = model_of().eval()
        away = keep_experts_in_host_memory(model, predictor=Asked, cache_bytes=room)
        for number in (0, 1):
            away.begin()
            with torch.no_grad():
                model.generate(batch(number)[:1], max_new_tokens=5, do_sample=False, pad_token_id=0)
        return asked, away

    matrix, plain = came(ActivationMatrices, 0)
    if mechanism == "prefetch:activation-matrix":
        # The first text has nothing that it resembles.
        assert plain.hits.foretold > 0 and not any(matrix[: len(matrix) // 2]) and any(matrix)
        assert came(NextExperts, 0)[0] != matrix
    else:
        _, kept = came(ActivationMatrices, 2**20)
        assert kept.bytes_in < plain.bytes_in and kept.hits.kept > 0 == plain.hits.kept
