"""The adapter of a run: written as peft does, beside the checkpoints, and merged with its model, a folder as that of
the model.

peft merges: each weight becomes weight + scaling * b a, in the weight's dtype. So the merged model's outputs are those
of the two together up to that rounding. peft's own modules do it, but of a model without values
(`carpool.train.checkpoints.merge_check`). So memory is needed for the tensors that are converted together, one layer's
experts, and their adapters, however large the model is. A layer that lies in several files is merged once for each.
What was written is read back and compared before the folder has its name.
"""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from carpool.hf.config.source import read_config
from carpool.hf.finetune.adapters import adapter_tensors
from carpool.hf.weights.files import stored_weights
from carpool.hf.weights.original_layout import OriginalLayout, OriginalWeights
from carpool.train.blueprint import meta_model
from carpool.train.checkpoints.checkpoint_files import (
    CheckpointWriteError,
    flush_file,
    flush_folder,
    put_in_place,
    remove_left,
)
from carpool.train.checkpoints.export import Exported, check_target, write_model
from carpool.train.checkpoints.merge_check import NAME, AdapterModules, MergeCheck
from carpool.train.checkpoints.run_source import read_source
from carpool.train.launch.ranks import gather, rank, together
from carpool.train.records.run_folder import ADAPTER


def merge_adapter(
    run: Path,
    target: Path,
    *,
    base: Path | None = None,
    logits: bool = False,
    begin: Callable[[str, int], None] = lambda _, __: None,
    advance: Callable[[int], None] = lambda _: None,
) -> Exported:
    """Writes the model of a run that has trained an adapter, merged with its newest values, as a model folder.

    Args:
        run: the run's folder.
        target: the new folder.
        base: where the model is that the adapter was trained beside; None: where it was then.
        logits: compare logits of the whole model, too, if it fits in host memory.
        begin, advance: as of `carpool.train.checkpoints.export.export_checkpoint`.

    Raises:
        ValueError: the run has no adapter, or its model is not there.
        CheckpointWriteError: what was written is not the model plus the adapter. The folder is not there then.
        OSError: the target is in use, or cannot be written.
    """
    adapter, target = run / ADAPTER, target.absolute()
    if not (adapter / "adapter_config.json").is_file():
        raise ValueError(f"{run} has no adapter to merge: a run with adapter.kind writes one with each checkpoint")
    check_target(target, replace=False)
    if base is None:
        config = json.loads((adapter / "adapter_config.json").read_text(encoding="utf-8"))
        base = Path(str(config["base_model_name_or_path"]))
    if not (base / "config.json").is_file():
        raise ValueError(f"the model of {adapter} is not in {base} any more: say where it is (--base)")
    read_config(base)
    stored, source = stored_weights(base), read_source(run)
    layout = OriginalLayout(meta_model(base), None, source.weights)
    weights = OriginalWeights(meta_model(base), base, stored, layout)
    with warnings.catch_warnings():
        # peft reads an attribute that Transformers calls deprecated.
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
        modules = AdapterModules(base, adapter)
        read, check = partial(_merged, modules, weights), partial(MergeCheck, modules, weights, logits)
        return write_model(target, source, layout, read, base, check, begin=begin, advance=advance)


@torch.no_grad()
def _merged(modules: AdapterModules, weights: OriginalWeights, name: str) -> Any:
    """A tensor of the merged model, by its name there."""
    if name in modules.replaced:
        return modules.file.get_tensor(modules.replaced[name])
    if name not in modules.layers:
        return weights.read(name)
    # Mapped files are not written to.
    weight = nn.Parameter(weights.read(name).clone(), requires_grad=False)
    with modules.filled(name, weight) as module:
        module.merge(adapter_names=[NAME])
        if NAME not in module.merged_adapters:
            raise ValueError(f"peft merged nothing into {name}")
    return weight.data


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
                _write_adapter(model, tensors, temporary)
                put_in_place(temporary, folder)
                remove_left(folder)
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
    gather(None)
    return folder


def _write_adapter(model: Any, tensors: dict[str, torch.Tensor], folder: Path) -> None:
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
