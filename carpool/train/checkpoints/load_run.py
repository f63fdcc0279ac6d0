"""A run's newest checkpoint in this one process, on whatever device it has."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import PreTrainedModel

from carpool.hf import install
from carpool.hf.building.model import build_model
from carpool.train.checkpoints.manager import CheckpointManager
from carpool.train.checkpoints.reading import load
from carpool.train.config import load_config
from carpool.train.config.schema import Config
from carpool.train.data.tokenizer import Tokenizer, load_tokenizer
from carpool.train.model.source import model_source


def load_run(run: Path) -> tuple[PreTrainedModel, Tokenizer, Config]:
    """The model of a run's newest checkpoint, and what it was trained with.

    Raises:
        ValueError: `run` is no run directory, has trained an adapter, or has no checkpoint yet.
    """
    if not (run / "config.toml").exists():
        raise ValueError(f"{run} is not a run directory: it has no config.toml; name the training.output_dir of a run")
    config = load_config(run / "config.toml")
    if config.adapter.kind is not None:
        raise ValueError(f"{run} has trained an adapter, not a model: name what `carpool merge {run} --out DIR` writes")
    # Not training.output_dir: the run may have been moved since.
    latest = CheckpointManager(run).latest()
    if latest is None:
        raise ValueError(f"{run} has no checkpoint yet: let it train on, or lower training.save_steps")
    tokenizer = load_tokenizer(config.data.tokenizer, config.model.path, config.data.eos_token)
    model = build_model(
        model_source(config, tokenizer),
        distributed_config=None,
        dtype=getattr(torch, config.model.dtype or "float32"),
        seed=config.training.seed,
        attn_implementation=config.model.attn_implementation,
        experts_implementation=config.model.experts_implementation,
    )
    install(model)
    load(latest, model, restore_rng=False)
    return model, tokenizer, config
