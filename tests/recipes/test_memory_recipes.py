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
from carpool.memory.activation_matrix import ActivationMatrices
from carpool.memory.host_experts import HostExperts
from carpool.memory.next_experts import NextExperts
from carpool.memory.optimizer import AdamW
from carpool.parallel.consumed import ConsumedGradients
from carpool.recipes import load, names, read
from carpool.recipes.mechanisms import find
from carpool.train.config import Config, load_config
from carpool.train.run.step import make_optimizer
from tests.memory.test_host_experts import LAYERS, batch, loss_of, model_of

# What makes a system that system; a recipe may not lose any of it.
SYSTEMS = {
    "zero-offload": {"host:optimizer-state"},
    "es-moe": {"host:experts", "host:optimizer-state", "gradients:consumed"},
    "zero-infinity": {"disk:experts", "disk:optimizer-state", "gradients:consumed"},
    "moe-infinity": {"host:experts", "prefetch:activation-matrix", "cache:experts"},
}
REFUSED = {
    "aptmoe": {"cpu:experts", "prefetch:popularity", "parallel:pipeline-of-host-experts"},
    "moesys": {"cache:trained-experts", "gathered:dense-parameters"},
}


class Travelled(NamedTuple):
    """Of one step: bytes of state in and out, of experts in and out, of state and experts that were written to disk,
    and the experts' gradients that were there at the end of the backward."""

    state: tuple[int, int]
    experts: tuple[int, int]
    written: tuple[int, int]
    gradients: int


def step(config: Config, folder: Path) -> Travelled:
    """A step of a tiny model with a configuration's tiers, on one process."""
    model = model_of()
    optimizer = make_optimizer(model, config.training, folder if config.training.optimizer_state == "disk" else None)
    assert isinstance(optimizer, AdamW)
    away, where = None, config.memory.experts
    if where != "device":
        away = keep_experts_in_host_memory(model, folder=folder if where == "disk" else None)
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
    written = optimizer.disk_bytes[1], 0 if away is None else away.disk_bytes[1]
    moved = (0, 0) if away is None else (away.bytes_in, away.bytes_out)
    return Travelled(optimizer.streamed_bytes, moved, written, left)


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
    if not one.setting:
        check_serving(mechanism)
        return
    whole = step(load_config(recipe.path, []), tmp_path)
    if mechanism.endswith(":optimizer-state"):
        lacking = step(without(recipe.settings, one.setting, tmp_path / "mine.toml"), tmp_path)
        assert whole.written[0] == whole.state[1] * mechanism.startswith("disk")
        assert whole.state[0] == whole.state[1] > 0 and lacking.state == (0, 0)
    elif mechanism.endswith(":experts"):
        lacking = step(without(recipe.settings, one.setting, tmp_path / "mine.toml"), tmp_path)
        assert whole.written[1] == whole.experts[1] * mechanism.startswith("disk")
        layer = sum(p.numel() * 2 for p in next(iter(rides(model_of()).values())).experts.parameters())
        assert whole.experts == ((2 * LAYERS - 1) * layer, LAYERS * layer) and lacking.experts == (0, 0)
    else:
        # Gradients that are kept cannot be combined with experts in host memory that are trained.
        settings = {name: values for name, values in recipe.settings.items() if name != "memory"}
        lacking = step(without(settings, one.setting, tmp_path / "mine.toml"), tmp_path)
        assert whole.gradients == 0 and lacking.gradients == 2 * LAYERS


def check_serving(mechanism: str) -> None:
    """What a mechanism of generation changes of what is fetched."""

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
