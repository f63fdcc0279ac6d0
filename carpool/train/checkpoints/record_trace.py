"""`carpool trace`: the routing of any checkpoint on any text, in this one process.

    text  ->  tokens (cached, as for training)  ->  whole sequences, evenly spread over them  ->  forwards  ->  Trace

The model is a checkpoint folder of transformers, or the folder of a run of `carpool train`, of which the newest
checkpoint is taken and, unless others are named, the run's own text and sequence length. Every token of the chosen
sequences is recorded, so that neighbours stay together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from carpool.hf import install
from carpool.hf.build_model import build_model
from carpool.hf.trace_recorder import TraceRecorder
from carpool.placement.trace import Trace
from carpool.train.blueprint import checkpoint_changes, model_source
from carpool.train.checkpoints.manager import CheckpointManager
from carpool.train.checkpoints.reading import load
from carpool.train.config import load_config
from carpool.train.config.schema import Config, DataSection
from carpool.train.data.corpus import prepare
from carpool.train.data.tokenizer import Tokenizer, load_tokenizer, tokenizer_of


def record(
    model: str | Path,
    data: Sequence[str] = (),
    *,
    tokens: int = 8192,
    sequence_length: int | None = None,
    tokenizer: str | None = None,
    eos_token: str | None = None,
    text_field: str = "text",
    max_bytes: int | None = 64 << 20,
    dtype: torch.dtype | None = None,
    weights: bool = False,
    layers: Sequence[str] | None = None,
    cache_dir: str | None = None,
    **about: Any,
) -> Trace:
    """Record which experts a model's tokens choose.

    Args:
        model: a checkpoint folder (config.json and safetensors), or the folder of a run.
        data: files, folders, globs or "stdlib", as `data.train`. Empty: those of the run, or "stdlib".
        tokens: how many tokens, in whole sequences.
        sequence_length: of the forwards. None: that of the run, or 512.
        tokenizer, eos_token, text_field: as in `[data]`. None: those of the run or of the checkpoint folder.
        max_bytes: stop reading text after this many bytes.
        dtype: of the parameters. None: bfloat16 on a GPU, float32 on a CPU; of a run, as it was trained.
        weights: also record routing weights.
        layers: names of the experts modules. None: all.
        about: further entries of the trace's `meta`.

    Raises:
        ValueError: a model, text or tokenizer that cannot be used, or less text than one sequence.
    """
    path = Path(model)
    settings: dict[str, Any] = {"eval": None, "eval_fraction": 0.0, "max_bytes": max_bytes, "cache_dir": cache_dir}
    own: Tokenizer
    folder: str | None = str(path)
    if (path / "config.toml").is_file():
        loaded, own, config = load_run(path)
        # Of a mixture, the text of its first source.
        settings = config.data.train_sets()[0].data.model_dump() | settings | ({"train": tuple(data)} if data else {})
        folder = config.model.path
        sequence_length = sequence_length or config.data.sequence_length
        if tokenizer is not None:
            raise ValueError(f"{path} is a run, which has its own tokenizer; leave the tokenizer out")
    else:
        own = load_tokenizer(tokenizer, str(path), eos_token)
        settings |= {"train": tuple(data) or ("stdlib",), "text_field": text_field}
        dtype = dtype or (torch.bfloat16 if torch.cuda.is_available() else torch.float32)
        loaded = build_model(path, distributed_config=None, dtype=dtype, seed=0)
    seen = getattr(loaded.config.get_text_config(), "max_position_embeddings", None) or math.inf
    length = sequence_length or int(min(512, seen))
    if length > seen:
        raise ValueError(f"sequence_length = {length:,} is more than the {seen:,} tokens that {path} sees; lower it")
    if (vocabulary := loaded.config.get_text_config().vocab_size) < own.vocab_size:
        raise ValueError(
            f"the tokenizer ({own.name}) has {own.vocab_size} tokens, but {path} was trained with {vocabulary}; name "
            "its own tokenizer"
        )
    corpus = prepare(DataSection(**settings), own, folder)
    rows_NL = sequences(corpus.train, length, -(-tokens // length))
    device = next(loaded.parameters()).device
    recorder = TraceRecorder(
        loaded.eval(), len(rows_NL) * length, stretch=length, weights=weights, evaluation=True, layers=layers
    )
    with recorder, torch.no_grad():
        # A forward records one sequence, so it has one.
        for row_L in rows_NL:
            loaded(input_ids=torch.from_numpy(row_L[None]).to(device), use_cache=False)
        origin = {"checkpoint": str(path), "model_type": loaded.config.model_type, "data": corpus.source}
        return recorder.trace(**origin, sequence_length=length, **about)


def load_run(run: Path) -> tuple[PreTrainedModel, Tokenizer, Config]:
    """The model of a run's newest checkpoint, in this one process on whatever device it has, and what it was trained
    with.

    Raises:
        ValueError: `run` is no run directory, has trained an adapter, or has no checkpoint yet.
    """
    if not (run / "config.toml").exists():
        raise ValueError(f"{run} is not a run directory: it has no config.toml; name the training.output_dir of a run")
    config = load_config(run / "config.toml")
    if config.adapter.is_used:
        raise ValueError(f"{run} has trained an adapter, not a model: name what `carpool merge {run} --out DIR` writes")
    # Not training.output_dir: the run may have been moved since.
    latest = CheckpointManager(run).latest()
    if latest is None:
        raise ValueError(f"{run} has no checkpoint yet: let it train on, or lower training.save_steps")
    tokenizer = tokenizer_of(config)
    model = build_model(
        model_source(config, tokenizer),
        distributed_config=None,
        dtype=getattr(torch, config.model.stored_dtype),
        seed=config.training.seed,
        attn_implementation=config.model.attn_implementation,
        experts_implementation=config.model.experts_implementation,
        changes=checkpoint_changes(config),
    )
    install(model)
    load(latest, model, restore_rng=False, averaged=True)
    return model, tokenizer, config


def sequences(tokens: Any, length: int, count: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """At most `count` whole sequences, evenly spread over an array of tokens.

    Raises ValueError if there is not one."""
    available = len(tokens) // length
    if not available:
        raise ValueError(f"the text has {len(tokens)} tokens, fewer than one sequence of {length}; name more text")
    count = min(count, available)
    starts = [i * available // count * length for i in range(count)]
    return np.stack([np.asarray(tokens[start : start + length]).astype(np.int64) for start in starts])
