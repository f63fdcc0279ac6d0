"""Experts in host memory: the bits of experts on the device, two layers of them at a time, and honest bytes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from carpool.experts.host_experts import HostExperts, host_experts
from carpool.hf import install
from carpool.hf.build_model import build_model
from carpool.hf.held_experts import keep_experts_in_host_memory
from carpool.hf.seam.expert_rides import rides
from carpool.hf.weights.model_config import make_config
from carpool.memory.expert_cache import ExpertCache, expert_bytes
from carpool.memory.next_experts import NextExperts, Predictor
from carpool.optim import AdamW
from carpool.optim.in_backward import ConsumedGradients
from carpool.parallel.replicated import sharded_parameters
from carpool.ride.schedule import Schedule
from carpool_systems.cpu_experts import compute_few_on_cpu
from carpool_systems.predictors import ActivationMatrices, Popularity

LAYERS = 4
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "vocab_size": 50,
}


class Watched(HostExperts):
    """Counts the layers that are on the device."""

    most = 0

    def _fetch(self, number: int, rows: Any = None, keep: bool = False) -> None:
        here = self._layers[number].here
        super()._fetch(number, rows, keep)
        if not here and rows is not None:  # what was not asked for is never read
            for weight in self._layers[number].weights:
                for row in set(range(SIZES["num_experts"])) - set(rows):
                    weight.here[row].fill_(torch.nan)
        held = sum(bool(layer.weights[0].device.untyped_storage().nbytes()) for layer in self._layers)
        assert [layer.here for layer in self._layers].count(True) == held
        self.most = max(self.most, held)


def model_of(checkpointing: bool = False) -> Any:
    model = build_model(make_config("olmoe", SIZES), distributed_config=None, dtype=torch.bfloat16, seed=0)
    install(model)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def batch(step: int) -> torch.Tensor:
    return torch.randint(0, 50, (2, 9), generator=torch.Generator().manual_seed(step))


def loss_of(model: Any, step: int) -> torch.Tensor:
    found: torch.Tensor = model(input_ids=batch(step), labels=batch(step)).loss
    return found


def values(model: Any) -> dict[str, torch.Tensor]:
    with sharded_parameters(model):
        return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize(("checkpointing", "disk"), [(False, False), (True, False), (False, True)])
def test_training_has_the_same_bits(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, checkpointing: bool, disk: bool
) -> None:
    monkeypatch.setattr("carpool.hf.held_experts.HostExperts", Watched)
    monkeypatch.setattr("carpool.optim.in_backward.LEAST_ELEMENTS", 1)
    ended = []
    for host in (False, True):
        model = model_of(checkpointing)
        folder = tmp_path if host and disk else None
        optimizer = AdamW(model.parameters(), lr=1e-2, offload=host, folder=folder)
        away = keep_experts_in_host_memory(model, folder=folder) if host else None
        consumed = ConsumedGradients(model, optimizer, away)
        losses = []
        for step in range(3):
            loss = loss_of(model, step)
            consumed.begin(torch.isfinite(loss))
            loss.backward()
            consumed.finish()
            losses.append(loss.item())
        with torch.no_grad():
            losses.append(loss_of(model, 9).item())
        ended.append((losses, values(model)))
    assert ended[0][0] == ended[1][0]
    assert all(torch.equal(value, ended[1][1][name]) for name, value in ended[0][1].items())
    assert isinstance(away, Watched) and away.most == 2
    # Of three steps and an evaluation: each layer in twice, but the last one, and the first one, once; out once.
    layer = sum(p.numel() * 2 for p in next(iter(rides(model).values())).experts.parameters())
    assert away.bytes_out == 3 * LAYERS * layer
    first, others, evaluation = (LAYERS + LAYERS - 1) * layer, 2 * (2 * LAYERS - 2) * layer, (LAYERS - 1) * layer
    assert away.bytes_in == first + others + evaluation
    if disk:
        # What was read ahead, and updated before it was wanted, is read again.
        read, written = away.disk_bytes
        assert written == away.bytes_out and away.bytes_in <= read < 1.5 * away.bytes_in
        assert optimizer.disk_bytes[1] == optimizer.streamed_bytes[1] > 0
    assert not list(tmp_path.iterdir())


def test_values_can_be_read_and_changed() -> None:
    right, model = model_of(), model_of()
    away = keep_experts_in_host_memory(model)
    assert host_experts(model) is away
    before = {name: p.detach().clone() for name, p in right.named_parameters()}
    shown = values(model)
    assert all(torch.equal(shown[name], value) for name, value in before.items())
    loss_of(model, 0).backward()
    model.zero_grad()
    for changed in (right, model):
        with sharded_parameters(changed, write=True), sharded_parameters(changed), torch.no_grad():
            for p in changed.parameters():
                p.mul_(1.5)
    with torch.no_grad():
        assert torch.equal(loss_of(model, 1), loss_of(right, 1))
    right, model = model_of(), model_of()
    loss_of(right, 0).backward()
    away = keep_experts_in_host_memory(model)
    loss_of(model, 0).backward()
    for (name, p), q in zip(model.named_parameters(), right.parameters(), strict=True):
        assert p.grad is not None and q.grad is not None and torch.equal(p.grad, q.grad), name
    assert [layer.here for layer in away._layers] == [True] + [False] * (LAYERS - 1)


def test_a_generation_brings_each_layer_in_once_a_token() -> None:
    right, model = model_of(), model_of()
    away = keep_experts_in_host_memory(model)
    with torch.no_grad():
        first = model.eval().generate(batch(0)[:1], max_new_tokens=5, do_sample=False, pad_token_id=0)
        other = right.eval().generate(batch(0)[:1], max_new_tokens=5, do_sample=False, pad_token_id=0)
    assert torch.equal(first, other)
    layer = sum(p.numel() * 2 for p in next(iter(rides(model).values())).experts.parameters())
    assert away.bytes_in == 5 * LAYERS * layer and away.bytes_out == 0


def test_a_generation_brings_in_what_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("carpool.hf.held_experts.HostExperts", Watched)
    right, model = model_of(), model_of()
    away = keep_experts_in_host_memory(model, predictor=NextExperts)
    for prompt in (0, 1):
        with torch.no_grad():
            first = model.eval().generate(batch(prompt)[:1], max_new_tokens=12, do_sample=False, pad_token_id=0)
            other = right.eval().generate(batch(prompt)[:1], max_new_tokens=12, do_sample=False, pad_token_id=0)
        assert torch.equal(first, other)
    layer = sum(p.numel() * 2 for p in next(iter(rides(model).values())).experts.parameters())
    # A token chooses 2 of 6 experts, and at most as many are brought in for nothing.
    assert 2 * 11 * LAYERS * layer / 3 <= away.bytes_in < 2 * (LAYERS + 11 * LAYERS * 2 / 3) * layer
    assert isinstance(away, Watched) and away.most <= 2 and away.hits.kept == 0
    assert 0.15 * away.hits.chosen < away.hits.foretold < away.hits.chosen


@pytest.mark.parametrize("predictor", [NextExperts, ActivationMatrices])
def test_what_stays_on_the_device_does_not_come_again(
    monkeypatch: pytest.MonkeyPatch, predictor: Callable[[int, int], Predictor]
) -> None:
    monkeypatch.setattr("carpool.hf.held_experts.HostExperts", Watched)
    right, came, hits = model_of().eval(), [], []
    one = expert_bytes(list(next(iter(rides(right).values())).experts.parameters()))
    made = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    texts = [right.generate(batch(prompt)[:1], **made) for prompt in (0, 1)]
    for room in (0, 9, LAYERS * 6):
        model = model_of().eval()
        away = keep_experts_in_host_memory(model, predictor=predictor, cache_bytes=room * one + one // 2)
        for prompt, text in enumerate(texts):
            away.begin()
            with torch.no_grad():
                assert torch.equal(model.generate(batch(prompt)[:1], **made), text)
        came.append(away.bytes_in)
        hits.append(away.hits)
        assert away.hits.chosen == 2 * 5 * LAYERS * 2
    # With room for all, each expert comes with both prompts at most, and once more to stay.
    assert came[0] > came[1] > came[2] and came[2] <= 3 * LAYERS * 6 * one
    assert hits[0].kept == 0 < hits[1].kept < hits[2].kept


def test_what_predictors_foretell() -> None:
    seen = NextExperts(3, 10)
    assert seen.likely(0, {3: 1}) == []
    for first, second in (([3, 5], [1, 4]), ([3, 6], [1, 2])):
        seen.saw(0, dict.fromkeys(first, 1))
        seen.saw(1, dict.fromkeys(second, 1))
    assert seen.likely(0, {3: 1, 6: 1}) == [1, 2] and seen.likely(0, {5: 1}) == [1] and seen.likely(1, {1: 1}) == []
    # What this text chose counts more than what another one did.
    seen.begin()
    seen.saw(0, {9: 1})
    found = seen.priority()[0]
    assert found[9] == found[3] == 2 * found[5] == 1 / 3 and found[0] == 0
    seen = ActivationMatrices(2, 4)
    assert seen.likely(0, {1: 1}) == []
    for first, second in (({0: 9, 1: 1, 2: 2}, {1: 7, 3: 5}), ({1: 4, 3: 8}, {0: 6, 1: 6})):
        seen.begin()
        seen.saw(0, first)
        seen.saw(1, second)
    seen.begin()
    seen.saw(0, {0: 3, 2: 1})
    assert seen.likely(0, {0: 1, 2: 1}) == [1, 3] and seen.likely(0, {0: 1}) == [1]
    seen.saw(0, {3: 99})
    assert seen.likely(0, {3: 1, 0: 1, 2: 1}) == [0, 1]
    # The first layers stay, and in a layer what this text chooses.
    seen.saw(1, {2: 5})
    found = seen.priority()
    assert found[0, 3] > found[1, 2] > found[0, 0] > found[0, 1] > found[1, 0]
    seen = Popularity(2, 4, few=1)
    assert seen.likely(0, {}) == []
    for batch_ in ({0: 8, 1: 2}, {0: 6, 2: 4}):
        seen.saw(1, batch_)
    # 7, 1, 2 and 0 tokens are expected; the CPU computes those with one.
    assert seen.likely(0, {3: 1}) == [0, 2]
    assert seen.priority()[1].tolist() == [0.7, 0.1, 0.2, 0.0]
    one = [torch.zeros(4, 256, dtype=torch.uint8)]
    cache = ExpertCache([one, one], 256, torch.device("cpu"))
    assert cache.put(1, 2, seen.priority(), only_lower=True) is not None
    assert cache.put(1, 1, seen.priority(), only_lower=True) is None
    assert cache.put(1, 0, seen.priority(), only_lower=True) is not None and cache.held(1) == {0}


def test_a_cache_of_experts_gives_up_the_least_wanted() -> None:
    layer = [torch.zeros(4, 3, 5), torch.zeros(4, 7, dtype=torch.bfloat16)]
    one = expert_bytes(layer)
    cache = ExpertCache([layer, layer], 3 * one + one - 1, torch.device("cpu"))
    assert cache.slots == 3 and ExpertCache([layer, layer], 99 * one, torch.device("cpu")).slots == 8
    for at, (number, expert) in enumerate([(0, 1), (0, 2), (1, 3)]):
        views = cache.put(number, expert)
        assert views is not None and [view.shape for view in views] == [(3, 5), (7,)]
        for view in views:
            view.fill_(at)
    priority = torch.tensor([[0, 5, 1, 0], [0, 0, 0, 9]]).double().numpy()
    assert cache.put(1, 0, priority, stay=[0, 1]) is None
    assert cache.put(1, 0, priority) is not None and cache.held(0) == {1} and cache.held(1) == {0, 3}
    assert cache.put(1, 1) is not None and cache.held(0) == set()  # the first that came
    kept = cache.find(1, 3)
    assert kept is not None and kept[0].eq(2).all() and kept[1].eq(2).all() and cache.find(0, 1) is None


def test_experts_that_cannot_be_away(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of()
    first, second = list(rides(model).values())[:2]
    second.experts.down_proj = first.experts.down_proj
    with pytest.raises(ValueError, match=r"experts of two layers share memory"):
        keep_experts_in_host_memory(model)
    model = model_of()
    for own in rides(model).values():
        own.set_schedule(Schedule("tiles", 2))
        monkeypatch.setattr(own, "transport", mock.Mock(rides_in_parts=True))
    away = keep_experts_in_host_memory(model, predictor=Popularity)
    with pytest.raises(ValueError, match=r"those of moe.schedule = 'tiles' arrive in parts"):
        compute_few_on_cpu(model, away, 1)


def cpu_expert_tokens(step: int) -> torch.Tensor:
    """Some experts are not chosen."""
    return torch.randint(0, 50, (1, 3), generator=torch.Generator().manual_seed(step))


def train(model: Any, away: HostExperts | None, steps: int = 3) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses, and values after some steps. Experts that train are updated in the backward."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = AdamW(trained, lr=1e-2)
    consumed = ConsumedGradients(model, optimizer, away)
    losses = []
    for step in range(steps):
        loss = model(input_ids=cpu_expert_tokens(step), labels=cpu_expert_tokens(step)).loss
        consumed.begin(torch.isfinite(loss))
        loss.backward()
        consumed.finish()
        losses.append(loss.item())
    return losses, values(model)


@pytest.mark.parametrize(("frozen", "checkpointing", "cached"), [(False, True, 0), (True, False, 5)])
def test_in_training_those_come_that_are_chosen(
    monkeypatch: pytest.MonkeyPatch, frozen: bool, checkpointing: bool, cached: int
) -> None:
    monkeypatch.setattr("carpool.hf.held_experts.HostExperts", Watched)
    monkeypatch.setattr("carpool.optim.in_backward.LEAST_ELEMENTS", 1)
    ended, bytes_in = [], []
    for predictor in (None, Popularity):
        model = model_of(checkpointing)
        experts = [p for own in rides(model).values() for p in own.experts.parameters()]
        for p in experts:
            p.requires_grad_(not frozen)
        one = expert_bytes(experts[:2])
        away = keep_experts_in_host_memory(model, predictor=predictor, cache_bytes=cached * one * bool(predictor))
        ended.append(train(model, away))
        bytes_in.append(away.bytes_in)
        assert isinstance(away, Watched) and away.most <= 2
    right = model_of(checkpointing)
    for own in rides(right).values():
        own.experts.requires_grad_(not frozen)
    ended.append(train(right, None))
    assert ended[0][0] == ended[1][0] == ended[2][0]
    assert all(torch.equal(value, ended[1][1][name]) for name, value in ended[2][1].items())
    # Of six experts three tokens choose 4 on the mean; what was chosen before comes, too.
    assert bytes_in[1] < (0.9 if frozen else 1) * bytes_in[0]
    if cached:
        again = model_of(checkpointing)
        for own in rides(again).values():
            own.experts.requires_grad_(False)
        without = keep_experts_in_host_memory(again, predictor=Popularity)
        train(again, without)
        assert bytes_in[1] < 0.9 * without.bytes_in


@pytest.mark.parametrize("frozen", [True, False])
def test_the_cpu_computes_experts_with_few_tokens(monkeypatch: pytest.MonkeyPatch, frozen: bool) -> None:
    monkeypatch.setattr("carpool.hf.held_experts.HostExperts", Watched)
    found, came = [], []
    for few in (None, 0, 2, 2):
        model = model_of()
        for own in rides(model).values():
            own.experts.requires_grad_(not frozen)
        away = None
        if few is not None:
            away = keep_experts_in_host_memory(model, predictor=Popularity)
            came.append((away, compute_few_on_cpu(model, away, few)))
        loss = loss_of(model, 0)
        loss.backward()
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        found.append({"loss": loss.detach(), **gradients})
    right, loaded, ours, again = found
    for name, value in right.items():
        assert torch.equal(loaded[name], value) and torch.equal(ours[name], again[name])
        assert (ours[name] - value).float().norm() <= 0.02 * value.float().norm()
    assert any(not torch.equal(ours[name], value) for name, value in right.items())
    # What the CPU computes does not come, unless it is trained: then its update is on the device.
    (whole, nobody), (less, stays), _ = came
    assert nobody is None and stays is not None and any(stays.of.values())
    assert less.bytes_in < whole.bytes_in if frozen else less.bytes_in <= whole.bytes_in


@pytest.mark.parametrize("host_layers", [0, 1, 3, 9])
def test_layers_that_host_memory_takes_are_not_on_disk(tmp_path: Path, host_layers: int) -> None:
    model = model_of()
    layer = sum(p.nbytes for p in next(iter(rides(model).values())).experts.parameters())
    away = keep_experts_in_host_memory(model, folder=tmp_path, host_bytes=host_layers * layer + layer // 2)
    with torch.no_grad():
        assert torch.equal(loss_of(model, 0), loss_of(model_of(), 0))
    assert away.disk_bytes[0] == max(0, LAYERS - host_layers) * layer
    assert [one.staging is None for one in away._layers].count(True) == min(LAYERS, host_layers)


class Files:
    """Experts on disk: their values, in memory."""

    def __init__(self, model: Any) -> None:
        self.values = [[p.detach().clone() for p in own.experts.parameters()] for own in rides(model).values()]

    def read(self, layer: int, expert: int, into: Any) -> None:
        for value, memory in zip(self.values[layer], into, strict=True):
            memory.copy_(value[expert])


def test_host_memory_keeps_the_popular_ones_of_those_on_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("carpool.hf.held_experts.HostExperts", Watched)
    read, ended = [], []
    for layers in (None, 2, LAYERS):
        model = model_of()
        for own in rides(model).values():
            own.experts.requires_grad_(False)
        away = None
        if layers is not None:
            one = expert_bytes(list(next(iter(rides(model).values())).experts.parameters()))
            room = layers * SIZES["num_experts"] * one
            away = keep_experts_in_host_memory(model, predictor=Popularity, files=Files(model), host_bytes=room)
        ended.append(train(model, away, 3)[0])
        read.append(0 if away is None else away.disk_bytes[0])
    assert ended[0] == ended[1] == ended[2]
    # With room for all, each is read once.
    assert read[1] > read[2] <= LAYERS * SIZES["num_experts"] * one
