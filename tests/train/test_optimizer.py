"""Which optimizer a run gets, what it says of it, and what it is predicted to take."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from carpool.optim import AdamW
from carpool.optim.adamw import TorchAdamW
from carpool.train.build.assemble import make_optimizer
from carpool.train.config import load_config
from carpool.train.plan.estimate import state_bytes


def _model(dtype: str) -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(512, 128), torch.nn.LayerNorm(128)).to(getattr(torch, dtype))


@pytest.mark.parametrize(
    ("dtype", "optimizer", "moments", "cls", "lossy"),
    [
        ("float32", "auto", "float32", TorchAdamW, ""),
        ("float16", "auto", "float32", TorchAdamW, ""),
        ("float32", "auto", "int8", AdamW, "moments are kept in int8"),
        ("float32", "one-pass", "float32", AdamW, ""),
        ("bfloat16", "auto", "float32", AdamW, ""),
        ("bfloat16", "auto", "bfloat16", AdamW, "moments are kept in bfloat16"),
        ("bfloat16", "auto", "int8", AdamW, "moments are kept in int8"),
        ("bfloat16", "torch", "float32", TorchAdamW, "without masters"),
    ],
)
def test_who_updates_and_what_it_keeps(dtype: str, optimizer: str, moments: str, cls: Any, lossy: str) -> None:
    settings = [f"model.dtype={dtype}", f"training.optimizer={optimizer}", f"training.optimizer_state_dtype={moments}"]
    config = load_config(None, settings)
    model = _model(dtype)
    made = make_optimizer(model, config.training)
    assert type(made) is cls and [group["weight_decay"] for group in made.param_groups] == [0.1, 0.0]
    said, reasons = made.describe()
    assert len(reasons) == bool(lossy) and all(lossy in reason for reason in reasons)
    assert said["masters"] == (dtype == "bfloat16" and cls is AdamW)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    made.step()
    weight = model[0].weight  # type: ignore[index]
    kept = sum(value.nbytes for name, value in made.state[weight].items() if name != "step")
    assert kept / weight.numel() == state_bytes(config)


def test_torch_keeps_no_other_moments() -> None:
    message = "training.optimizer_state_dtype = 'int8' needs the one-pass optimizer"
    with pytest.raises(ValueError, match=re.escape(message)):
        load_config(None, ["training.optimizer=torch", "training.optimizer_state_dtype=int8"])
