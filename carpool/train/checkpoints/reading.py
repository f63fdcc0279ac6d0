"""Reading a checkpoint into a model and an optimizer, sharded in any way.

Sizes, names, shapes and the state of the random generators are all checked before the first weight is overwritten, and
checksums, too, unless a run begins with it: then each rank sums its share of the files while all read theirs. Nothing
is ever unpickled.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from carpool.hf.seam.moved_experts import is_logical, logical_like, physical_order
from carpool.optim.adamw_reference import can_be_blocks
from carpool.optim.ema import WeightAverage
from carpool.parallel.ranks import gather, one_process_is_fine, patiently, rank, together, world
from carpool.parallel.replicated import sharded_parameters
from carpool.train.checkpoints.checkpoint_files import (
    AVERAGE,
    MODEL,
    OPTIMIZER,
    STATE_FILE,
    CheckpointError,
    check_files,
    read_state,
    stored_tensors,
)
from carpool.train.checkpoints.state_tensors import (
    Tensors,
    as_rectangles,
    assign,
    average_tensors,
    check_rng_state,
    copy_back,
    model_tensors,
    optimizer_tensors,
    set_rng_state,
)

logger = logging.getLogger(__name__)


def load(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    average: WeightAverage | None = None,
    averaged: bool = False,
    restore_rng: bool = True,
    sums_first: bool = True,
) -> dict[str, Any]:
    """Puts a checkpoint into a model and an optimizer, sharded in any way. Every rank calls it. Tensors are read
    straight into the model's memory, unless experts have moved: then a second copy exists for a while.

    Args:
        path: the folder of one checkpoint, `.../checkpoints/step-00000100`.
        optimizer: None leaves the optimizer's state in the checkpoint.
        average: of the trained weights; it begins with the weights if the checkpoint has no average.
        averaged: the model gets averaged weights, where the checkpoint has any.
        restore_rng: put the random generators back, which is possible on the same number of ranks alone.
        sums_first: check the content of all files before anything is overwritten. False: while they are read, which
            takes less time; weights may be those of a damaged file when it raises.

    Returns:
        The `state` that was saved, and its "step".

    Raises:
        CheckpointError: the same on all ranks, if the checkpoint is absent, foreign, damaged, or of another model.
            Nothing has been overwritten then, with `sums_first`.
    """
    folder = Path(path)
    content: dict[str, Any] = {}
    with together(CheckpointError, ""):
        content = read_state(folder)
        mine = sorted(content["files"])[rank() :: world()]
        check_files(folder, content["files"], mine=mine if sums_first else [])
        if restore_rng and content["world_size"] == world():
            try:
                check_rng_state(content["ranks"][rank()]["rng"])
            except ValueError as error:
                raise CheckpointError(f"{folder / STATE_FILE}: {error}; use an older checkpoint") from error
    parts = {MODEL: model_tensors(model)}
    if optimizer is not None:
        parts[OPTIMIZER] = optimizer_tensors(model, optimizer)
    has_average = any(name.startswith(f"{AVERAGE}/") for name in content["files"])
    if average is not None and has_average:
        parts[AVERAGE] = average_tensors(model, average)
    elif averaged and has_average:
        there = stored_tensors(folder / AVERAGE)
        parts[AVERAGE] = {name: tensor for name, tensor in parts[MODEL].items() if name in there}
    # The stages of a pipeline have tensors of their own.
    everywhere = {part: set().union(*gather(sorted(tensors))) for part, tensors in parts.items()}
    zero: Tensors = {}
    with together(CheckpointError, ""):
        for part, tensors in parts.items():
            is_there = any(name.startswith(f"{part}/") for name in content["files"])
            stored = stored_tensors(folder / part) if is_there else {}
            if part == OPTIMIZER and stored:
                zero = _zero_if_absent(folder, stored, tensors, optimizer)
                tensors = parts[part] = {name: tensor for name, tensor in tensors.items() if name not in zero}
            wanted = tensors if is_logical(model) else logical_like(model, tensors, meta=True)
            _check_tensors(folder, part, stored, wanted, everywhere[part])
            _note_conversions(folder, stored, wanted)
    with ThreadPoolExecutor(1) as beside:
        sums = None if sums_first else beside.submit(check_files, folder, content["files"], mine)
        with sharded_parameters(model, write=True):
            for part, tensors in parts.items():
                _read(folder / part, tensors, model)
        with together(CheckpointError, ""), patiently() if sums is not None else nullcontext():
            if sums is not None:
                sums.result()
    for tensor in zero.values():
        tensor.zero_()
    if average is not None and not has_average:
        average.begin()
    if restore_rng:
        if content["world_size"] == world():
            set_rng_state(content["ranks"][rank()]["rng"])
        elif rank() == 0:
            logger.info("%s is of %d ranks: random generators are not restored", folder, content["world_size"])
    return {**content["state"], "step": content["step"]}


def check_model(path: Path, model: nn.Module) -> None:
    """Refuse a checkpoint of another model, by the names and shapes of its tensors. Reads no values.

    Args:
        model: may be on the meta device, and has no adapters.

    Raises:
        CheckpointError: that."""
    wanted = model_tensors(model)
    _check_tensors(path, MODEL, stored_tensors(path / MODEL), wanted, set(wanted))


def check_optimizer(path: Path, masters: bool, int8: bool) -> None:
    """Refuse a checkpoint of an optimizer of another kind. Reads no values.

    Args:
        masters: this run keeps float32 masters of bfloat16 parameters.
        int8: and moments of 8 bits, where they can be blocks.

    Raises:
        CheckpointError: masters that this run would lose, or 8-bit moments on one side only."""
    if (path / OPTIMIZER).is_dir():
        stored = stored_tensors(path / OPTIMIZER)
        moments = [tensor.size for name, tensor in stored.items() if name.endswith(".exp_avg")]
        _check_optimizer(path, stored, masters, int8 and any(can_be_blocks(size) for size in moments))


def _low_bits(names: Iterable[str]) -> set[str]:
    return {name for name in names if name.endswith(".low_bits")}


def _codes(names: Iterable[str]) -> bool:
    return any(name.endswith("_scale") for name in names)


def _zero_if_absent(
    folder: Path, stored: dict[str, TensorStorageMetadata], wanted: Tensors, optimizer: torch.optim.Optimizer | None
) -> Tensors:
    """State that the checkpoint lacks and that is zero then (`carpool.optim.base`), such as the low bits of masters:
    without them the masters are the weights.

    Raises:
        CheckpointError: as `check_optimizer`."""
    _check_optimizer(folder, stored, bool(_low_bits(wanted)), _codes(wanted))
    there = {name.rsplit(".", 1)[-1] for name in stored}
    absent: frozenset[str] = getattr(optimizer, "zero_if_absent", frozenset()) - there
    return {name: tensor for name, tensor in wanted.items() if name.rsplit(".", 1)[-1] in absent}


def _check_optimizer(folder: Path, stored: Iterable[str], masters: bool, codes: bool) -> None:
    if _low_bits(stored) and not masters:
        raise CheckpointError(
            f"the checkpoint {folder} has float32 masters of bfloat16 parameters, which this run does not keep; set "
            'model.dtype="bfloat16", and training.optimizer="auto" or "one-pass"'
        )
    if _codes(stored) != codes:
        has, lacks = ("this run", "the checkpoint") if codes else ("the checkpoint", "this run")
        raise CheckpointError(
            f"{has} keeps the optimizer's moments in int8, and {lacks} does not ({folder}); give this run the "
            "training.optimizer_state_dtype of the checkpoint's"
        )


def _check_tensors(
    folder: Path, part: str, stored: dict[str, TensorStorageMetadata], wanted: Tensors, everywhere: set[str]
) -> None:
    """Every name on both sides, and every shape. `everywhere`: the names that some rank wants, each maybe others'."""
    for missing, text in (
        (sorted(wanted.keys() - stored.keys()), f"the checkpoint {folder} lacks"),
        (sorted(stored.keys() - everywhere), f"the checkpoint {folder} is of another {part}, which also has"),
    ):
        if missing:
            more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
            what = "the model's configuration" if part == MODEL else "training.freeze, or the optimizer,"
            raise CheckpointError(f"{text} {', '.join(missing[:3])}{more}; was {what} changed?")
    for name, tensor in wanted.items():
        if stored[name].size != tensor.shape:
            raise CheckpointError(
                f"{name} has shape {tuple(stored[name].size)} in the checkpoint {folder}, but {tuple(tensor.shape)} in "
                "the model; was the model's configuration changed?"
            )


def _note_conversions(folder: Path, stored: dict[str, TensorStorageMetadata], wanted: Tensors) -> None:
    recast = [name for name, tensor in wanted.items() if stored[name].properties.dtype != tensor.dtype]
    if recast and rank() == 0:
        name = recast[0]
        logger.warning(
            "%d tensors of %s are converted, such as %s from %s to %s",
            *(len(recast), folder, name, stored[name].properties.dtype, wanted[name].dtype),
        )


def _read(folder: Path, tensors: Tensors, model: nn.Module) -> None:
    if not tensors:
        return
    logical = tensors if is_logical(model) else logical_like(model, tensors)
    rectangles = as_rectangles(logical)
    reader = HuggingFaceStorageReader(str(folder))
    with one_process_is_fine():
        dcp.load(dict(rectangles), storage_reader=reader, no_dist=not dist.is_initialized())
    copy_back(rectangles, logical)
    if logical is not tensors:
        assign(tensors, physical_order(model, logical))
