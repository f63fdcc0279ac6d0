"""A training step around its micro-batches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from carpool.train.steps import training_objective as objective
from carpool.train.steps.training_objective import Objective
from tests.hf.tiny_models import discover, tiny_batch, tiny_model


def test_a_backward_has_the_attention_of_its_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers that are computed again in the backward must take the kernels that they took before."""
    inside: list[bool] = []
    seen: list[int] = []

    @contextmanager
    def fastest(device: torch.device) -> Iterator[None]:
        inside.append(True)
        yield
        inside.pop()

    monkeypatch.setattr(objective, "fastest_attention", fastest)
    model: Any = tiny_model(discover()["olmoe"]).train()
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: seen.append(len(inside)))
    batch = tiny_batch(model)
    batch["labels"] = batch["input_ids"]
    Objective(model, top_k=2, aux_coef=0.0, dp_size=1, autocast=None).backward([batch])
    assert seen and min(seen) == 1 and not inside
