"""An optimizer in one file outside the package trains, clips, saves, resumes and is predicted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from carpool.optim import OPTIMIZERS, OptimizerBase, register
from carpool.train.build.assemble import make_optimizer
from carpool.train.config import load_config
from carpool.train.plan.estimate import state_bytes
from tests.plugins.outside import train_with
from tests.ranks import Ranks
from tests.train.test_loop import losses, weights
from tests.train.test_memory import _estimate

CHOSEN = ["training.optimizer=heavy-ball", "training.optimizer_options.beta=0.8", "training.weight_decay=0"]


def _momentum(output: Path, step: int) -> torch.Tensor:
    state = {name: value for name, value in weights(output, step).items() if name.startswith("optimizer/")}
    assert all(name.endswith(".momentum") for name in state)
    return torch.cat([value.flatten() for value in state.values()])


def test_it_trains_saves_and_resumes(two_ranks: Ranks, tmp_path: Path, text: list[str]) -> None:
    """A run that is cut in two has the losses, weights and momentum of one that is not."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert two_ranks(train_with, "heavy_ball", str(whole), [*text, *CHOSEN]) == [""] * 2
    assert two_ranks(train_with, "heavy_ball", str(cut), [*text, *CHOSEN, "training.stop_at_step=3"]) == [""] * 2
    resume = ["training.resume_from_checkpoint=last"]
    assert two_ranks(train_with, "heavy_ball", str(cut), [*text, *CHOSEN, *resume]) == [""] * 2
    assert losses(cut) == losses(whole) and len(losses(whole)) == 6
    ours, theirs = weights(cut, 6), weights(whole, 6)
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    told = json.loads((whole / "run.json").read_text())
    assert told["optimizer"] == {"name": "heavy-ball", "masters": False, "moments": "float32", "state": "device"}


def test_its_gradients_are_clipped(two_ranks: Ranks, tmp_path: Path, text: list[str]) -> None:
    """After one step the momentum is the clipped gradient, of all ranks and experts together."""
    one = [
        *text,
        *CHOSEN,
        "training.max_steps=1",
        "training.save_steps=1",
        "training.eval_steps=none",
        "training.warmup_steps=0",
    ]
    assert two_ranks(train_with, "heavy_ball", str(tmp_path / "run"), [*one, "training.max_grad_norm=0.01"]) == [""] * 2
    assert losses(tmp_path / "run")[1][1] > 0.1
    assert _momentum(tmp_path / "run", 1).norm().item() == pytest.approx(0.01, rel=1e-3)


def test_its_memory_is_predicted(heavy_ball: Any) -> None:
    """It keeps 4 bytes for each of AdamW's 8, and what is predicted is what it keeps."""
    config, model = load_config(None, CHOSEN), torch.nn.Linear(64, 32)
    made = make_optimizer(model, config.training)
    model(torch.ones(64)).sum().backward()
    made.step()
    assert state_bytes(config) == made.state[model.weight]["momentum"].nbytes / model.weight.numel() == 4
    ours, adamw = (_estimate(chosen, 2)("dedup", "fsdp")["optimizer"] for chosen in (CHOSEN, []))
    assert ours == pytest.approx(adamw / 2) and ours > 0


def test_settings_that_it_does_not_have_are_refused(heavy_ball: Any) -> None:
    for settings, error in (
        (
            ["training.optimizer_state_dtype=int8"],
            "training.optimizer_state_dtype = 'int8' needs the one-pass optimizer",
        ),
        (["training.optimizer_offload=host"], "training.optimizer_offload = 'host' needs the one-pass optimizer"),
        (
            ["training.optimizer_in_backward=true", "training.max_grad_norm=0"],
            "training.optimizer_in_backward = true needs the one-",
        ),
        (["training.optimizer_options.bet=1"], "optimizer_options.bet: did you mean training.optimizer_options.beta"),
        (["training.optimizer_options.beta=high"], "training.optimizer_options.beta = 'high': .*valid number"),
    ):
        with pytest.raises(ValueError, match=error):
            load_config(None, [*CHOSEN, *settings])


def test_what_is_no_optimizer_is_refused() -> None:
    with pytest.raises(ValueError, match=r"training.optimizer = 'heavy-ball': expected one of auto, one-pass, torch"):
        load_config(None, CHOSEN)
    with pytest.raises(ValueError, match=r"optimizer 'forgetful' .* has no state_bytes"):
        register(type("Forgetful", (OptimizerBase, torch.optim.SGD), {"name": "forgetful"}))
    with pytest.raises(ValueError, match=r"optimizer 'SGD' must be a subclass of carpool.optim.base.OptimizerBase"):
        register(torch.optim.SGD)
    assert "forgetful" not in OPTIMIZERS and "SGD" not in OPTIMIZERS
