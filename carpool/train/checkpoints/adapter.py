"""The adapter of a run as peft writes it: a folder of the run beside its checkpoints."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch

from carpool.hf.finetune.adapters import adapter_tensors
from carpool.train.checkpoints.files import CheckpointWriteError, flush_file, flush_folder, put_in_place, remove_left
from carpool.train.launch.ranks import gather, rank, together


def save_adapter(model: Any, folder: Path) -> Path:
    """Write the adapter as peft does: `PeftModel.from_pretrained(base, folder)` reads it. Every rank calls it; rank 0
    writes, and the folder appears when it is complete, in place of an earlier one.

    Raises:
        CheckpointWriteError: on all ranks, if rank 0 could not write.
    """
    tensors = adapter_tensors(model)
    temporary = folder.with_name(f".tmp-{folder.name}")
    with together(CheckpointWriteError, f"{folder} was not written: "):
        if rank() == 0:
            try:
                _write(model, tensors, temporary)
                put_in_place(temporary, folder)
                remove_left(folder)
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
    gather(None)
    return folder


def _write(model: Any, tensors: dict[str, torch.Tensor], folder: Path) -> None:
    from peft import get_peft_model_state_dict
    from safetensors.torch import save_file

    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    name = model.active_adapters()[0]
    named = get_peft_model_state_dict(model, state_dict=tensors, adapter_name=name)
    whole = {f"base_model.model.{key}": tensor.detach().cpu().contiguous() for key, tensor in named.items()}
    save_file(whole, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = model.peft_config[name]
    config.inference_mode = True  # peft's own, for those who load it
    config.save_pretrained(folder)
    config.inference_mode = False
    for file in folder.iterdir():
        flush_file(file)
    flush_folder(folder)
