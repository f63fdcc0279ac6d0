"""An adapter and the model that it was trained beside, made one model: a folder as that of the model.

peft merges: each weight becomes weight + scaling * b a, in the weight's dtype. So the merged model's outputs are those
of the two together up to that rounding. One process holds the whole model in host memory.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from carpool.hf.build import read_config
from carpool.hf.original_layout import OriginalLayout
from carpool.hf.tensor_file import Entry
from carpool.train.checkpoints.export import Exported, check_target, write_model
from carpool.train.checkpoints.source import read_source
from carpool.train.run.files import ADAPTER


def merge_adapter(
    run: Path,
    target: Path,
    *,
    base: Path | None = None,
    begin: Callable[[str, int], None] = lambda _, __: None,
    advance: Callable[[int], None] = lambda _: None,
) -> Exported:
    """Writes the model of a run that has trained an adapter, merged with its newest values, as a model folder.

    Args:
        run: the run's folder.
        target: the new folder.
        base: where the model is that the adapter was trained beside; None: where it was then.
        begin, advance: as of `carpool.train.checkpoints.export.export_checkpoint`.

    Raises:
        ValueError: the run has no adapter, or its model is not there.
        OSError: the target is in use, or cannot be written.
    """
    from peft import PeftModel

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
    begin("reading", 1)
    model = AutoModelForCausalLM.from_pretrained(base, dtype="auto", local_files_only=True, trust_remote_code=False)
    begin("merging", 1)
    with torch.no_grad():
        merged = PeftModel.from_pretrained(model, str(adapter)).merge_and_unload()
    # A weight that is tied is written once, under the name that the files have for it.
    tied = merged.all_tied_weights_keys or {}
    values = {name: value for name, value in merged.state_dict().items() if name not in tied}
    source = read_source(run)
    layout = OriginalLayout(
        merged, {name: Entry(value.dtype, tuple(value.shape)) for name, value in values.items()}, source.weights
    )
    return write_model(target, source, layout, values.__getitem__, base, begin=begin, advance=advance)
