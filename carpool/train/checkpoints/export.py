"""A trained model for everybody else: a folder that plain Transformers loads."""

from __future__ import annotations

import errno
import os
import secrets
import shutil
from pathlib import Path
from typing import Any

from carpool.train.checkpoints.files import CheckpointWriteError, flush_file, flush_folder, put_in_place
from carpool.train.checkpoints.ranks import rank, together
from carpool.train.checkpoints.shards import Hook, Tensors, full_tensor, model_tensors


def export_pretrained(model: Any, path: str | os.PathLike[str], *, to_logical: Hook | None = None) -> Path:
    """Writes a plain Transformers checkpoint: `AutoModelForCausalLM.from_pretrained(path)` loads it on one process.

    Every rank calls it. Rank 0 gathers the model in its memory, one tensor after the other, and writes it; the folder
    appears when it is complete. An earlier export under that path is replaced, anything else is not.

    Raises:
        CheckpointWriteError: on all ranks, if rank 0 could not write.
    """
    final = Path(path)
    tensors = model_tensors(model)
    full: Tensors = {}
    for name, tensor in (tensors if to_logical is None else to_logical(tensors)).items():
        whole = full_tensor(tensor)
        if rank() == 0:
            full[name] = whole.detach().cpu()
    temporary = final.with_name(f".tmp-{final.name}-{secrets.token_hex(4)}")
    with together(CheckpointWriteError, f"{final} was not written: "):
        if rank() == 0:
            try:
                _export(model, full, temporary, final)
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
    return final


def _export(model: Any, full: Tensors, temporary: Path, final: Path) -> None:
    if final.exists() and (not final.is_dir() or (any(final.iterdir()) and not (final / "config.json").is_file())):
        raise FileExistsError(errno.EEXIST, "there is something else than an exported model", str(final))
    temporary.mkdir(parents=True)
    # With its distributed configuration in sight, save_pretrained would gather again, on all ranks.
    distributed_config = model.config.__dict__.pop("distributed_config", None)
    try:
        model.save_pretrained(temporary, state_dict=full)
    finally:
        if distributed_config is not None:
            model.config.distributed_config = distributed_config
    for file in temporary.iterdir():
        flush_file(file)
    flush_folder(temporary)
    put_in_place(temporary, final)
