"""A schedule in one file outside the package: layers, settings and runs follow it as the package's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import carpool
from carpool.ride.schedule import Schedule, register
from carpool.train.config import load_config
from tests.plugins.outside import imported, train_with
from tests.ranks import Ranks, mesh
from tests.train.test_loop import TWO, losses, run


def _layer(schedule: Schedule) -> list[torch.Tensor]:
    """Output and gradients of a layer, and the messages that it sent."""
    torch.manual_seed(0)
    layer = carpool.MoE(16, 32, 8, 3, ep_mesh=mesh((2,), ("ep",)), transport="dedup", schedule=schedule)
    x_TH = torch.randn(11, 16, requires_grad=True)
    y_TH = layer(x_TH)
    y_TH.square().sum().backward()
    assert x_TH.grad is not None
    return [y_TH, x_TH.grad, *(p.grad for p in layer.parameters() if p.grad is not None)]


def followed() -> None:
    with imported("in_turn"):
        plain = _layer(Schedule())
        for options in ({}, {"last_first": True}):
            ours = _layer(Schedule("in-turn", 4, options=options))
            # To rounding: on some CPUs products of fewer rows add up in another order.
            for one, other in zip(ours, plain, strict=True):
                torch.testing.assert_close(one, other)


def test_a_layer_computes_the_same(two_ranks: Ranks) -> None:
    two_ranks(followed)


def test_a_run_follows_it(two_ranks: Ranks, tmp_path: Path, text: list[str]) -> None:
    settings = [*text, "training.max_steps=2", "training.save_steps=none", "training.eval_steps=none"]
    ours = ["moe.schedule=in-turn", "moe.chunks=2", "moe.schedule_options.last_first=true"]
    assert two_ranks(run, str(tmp_path / "plain"), [*TWO, *settings]) == [""] * 2
    assert two_ranks(train_with, "in_turn", str(tmp_path / "ours"), [*settings, *ours]) == [""] * 2
    plain, found = ({step: loss for step, (loss, _) in losses(tmp_path / name).items()} for name in ("plain", "ours"))
    assert found == pytest.approx(plain, rel=1e-5) and found


def test_settings_know_it(in_turn: Any) -> None:
    found = load_config(None, ["moe.schedule=in-turn", "moe.schedule_options.last_first=true"]).moe.asked_schedule()
    assert found == Schedule("in-turn", 3, options={"last_first": True}) and str(found) == "in-turn=3"
    with pytest.raises(ValueError, match=r"did you mean moe.schedule_options.last_first"):
        load_config(None, ["moe.schedule=in-turn", "moe.schedule_options.last_frist=true"])
    with pytest.raises(ValueError, match="no options"):
        load_config(None, ["moe.schedule=chunks", "moe.schedule_options.last_first=true"])
    with pytest.raises(ValueError, match="no option 'first'"):
        Schedule("in-turn", options={"first": True})
    with pytest.raises(ValueError, match="backward_chunks"):
        Schedule("in-turn", 2, 4)
    config = load_config(None, ["moe.schedule=in-turn", "moe.chunks=2"])
    assert config.declared.has_effect(config.flat(), "moe.chunks")
    assert not config.declared.has_effect(config.flat(), "moe.backward_chunks")


def test_what_a_schedule_must_have() -> None:
    with pytest.raises(ValueError, match=r"must be a subclass of carpool.ride.schedule.ScheduleKind"):
        register(type("Odd", (), {"name": "odd"}))
    with pytest.raises(ValueError, match="'in-turns' is not known; use one of none, chunks"):
        Schedule("in-turns")
    with pytest.raises(ValueError, match=r"moe.schedule = 'chunk'.*did you mean chunks"):
        load_config(None, ["moe.schedule=chunk"])
