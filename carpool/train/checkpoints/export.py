"""A checkpoint of a run for everybody else: a folder that plain Transformers loads, as published checkpoints are.

Every file of weights is written by one rank, from the files of the checkpoint, whatever ranks wrote those. So one
process can export what eight GPUs trained, and holds no more than one layer's experts
(`carpool.hf.weights.original_layout`).

What was written is read back, and compared with what it should be. Transformers itself loads it, group by group
(`OriginalWeights.load`), so memory is needed for one layer's experts. A value that is rounded to the files' dtype is
off by at most its unit roundoff u = eps / 2, times the value: 2^-8 in bfloat16, 2^-24 in float32. Each value is
compared, since a mean would hide a small one that is wrong:

    trained 0.100, written 0.1001 in bfloat16      0.0001 <= 2^-8 * 0.100: right
    trained 0.100, written 0.102                   0.002 is more: wrong
"""

from __future__ import annotations

import errno
import json
import re
import secrets
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.filesize import decimal
from safetensors import safe_open
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from carpool.hf.architecture_changes import why_not_in_transformers, without_changes
from carpool.hf.weights.model_config import read_config
from carpool.hf.weights.original_layout import Group, OriginalLayout, OriginalWeights
from carpool.hf.weights.weight_files import Entry, stored_weights
from carpool.parallel.ranks import gather, rank, together, world
from carpool.train.blueprint import meta_model
from carpool.train.checkpoints.checkpoint_files import (
    AVERAGE,
    MODEL,
    CheckpointError,
    CheckpointWriteError,
    check_files,
    flush_file,
    flush_folder,
    put_in_place,
    read_state,
    remove_left,
    stored_parts,
)
from carpool.train.checkpoints.manager import CheckpointManager, checkpoint_name, step_of
from carpool.train.checkpoints.run_source import Source, copy_source, read_source
from carpool.train.config import load_config
from carpool.train.records.run_folder import ADAPTER, CONFIG

# Values that are compared at once.
_PIECE = 1 << 22
# Keys of configurations that say how a model is trained or stored, and not what it computes.
_OF_TRAINING = re.compile(
    r"drop|loss|coef|jitter|initializer|use_cache|dtype|version|path|^output_|token_id|architectures"
)


class ReadBack:
    """Compares a model folder with the tensors that were to be written.

    Args:
        folder, layout: of the model, and of its files.
        read: the values of a tensor, whole, by its name in the model."""

    def __init__(self, folder: Path, layout: OriginalLayout, read: Callable[[str], torch.Tensor]) -> None:
        self._written = OriginalWeights(meta_model(folder, layout.changes), folder, stored_weights(folder), layout)
        self._read = read

    def compare(self, group: Group) -> tuple[float, str]:
        """The largest difference of a group's tensors, relative to what should be there, and the name of the tensor.
        Raises ValueError if one is larger than by rounding to the dtype of the files, or a tensor is not there."""
        written, largest = self._written.load(group), (0.0, "")
        dtype = max((self._written.stored[name].dtype for name in group.outputs), key=unit_roundoff)
        for name in group.inputs:
            largest = max(largest, self._compare(name, written.pop(name), self._read(name), dtype))
        return largest

    def _compare(self, name: str, written: torch.Tensor, read: torch.Tensor, dtype: torch.dtype) -> tuple[float, str]:
        return check_values(name, written, read, 0.0 if read.dtype == dtype else unit_roundoff(dtype)), name

    def finish(self, largest: float, name: str) -> str:
        """Compares what else there is, once all groups are, and says in a sentence what it found. Raises ValueError."""
        how = f"rounded by up to {largest:.1e} ({name})" if largest else "bit by bit"
        return f"read back: it is what was to be written, {how}"


def unit_roundoff(dtype: torch.dtype) -> float:
    """By what share of it rounding to this dtype changes a value at most."""
    return torch.finfo(dtype).eps / 2 if dtype.is_floating_point else 0.0


def check_values(
    name: str, written: torch.Tensor, expected: torch.Tensor, roundoff: float, slack: float = 0.0
) -> float:
    """How large all differences are, relative to all values. Raises ValueError if a value is farther from the expected
    one than by `roundoff` times that, and `slack`."""
    written, expected = written.reshape(-1), expected.reshape(-1)
    if written.dtype == expected.dtype and torch.equal(written.view(torch.uint8), expected.view(torch.uint8)):
        return 0.0
    wrong, squares = 0, torch.zeros(2, dtype=torch.float64)
    for some, right in zip(written.split(_PIECE), expected.split(_PIECE), strict=True):
        right = right.float()
        difference = (some.float() - right).abs()
        # The last term is half the distance of the smallest numbers of float16.
        allowed = right.abs() * (roundoff * (1 + 2**-12)) + (slack + (2**-25 if roundoff else 0.0))
        # Not the other way around: NaN is never within.
        wrong += int((~(difference <= allowed)).sum())
        squares += torch.stack([difference.norm(), right.norm()]).double() ** 2
    relative = (squares[0] / squares[1].clamp_min(1e-60)).sqrt().item()
    if wrong:
        raise ValueError(
            f"{name} is wrong in {wrong:,} of {expected.numel():,} values, by {relative:.1%} of the whole: more than "
            "by rounding"
        )
    return relative


Parts = dict[str, tuple[TensorStorageMetadata, list[Path]]]


class Exported(NamedTuple):
    """Where the model is, the bytes of its weights, and names of weights that the source has and the model has not;
    a sentence about what was read back."""

    folder: Path
    bytes: int
    left_out: list[str]
    checked: str

    def __str__(self) -> str:
        text = f"{self.folder} ({decimal(self.bytes)} of weights)"
        if self.left_out:
            more = ", ..." if len(self.left_out) > 3 else ""
            text += (
                f"; {len(self.left_out)} weights of the source are not in it, because Transformers does not load them: "
                f"{', '.join(self.left_out[:3])}{more}"
            )
        return text


def find_checkpoint(run: Path, step: int | None) -> Path:
    """The checkpoint of a run after a step; None: its newest whole one.

    Raises:
        ValueError: there is none.
    """
    checkpoints = CheckpointManager(run)
    if step is None:
        if (latest := checkpoints.latest()) is None:
            raise ValueError(f"{run} has no whole checkpoint: let it train on, or lower training.save_steps")
        return latest
    steps = {found: path for path in sorted(checkpoints.folder.glob("step-*")) if (found := step_of(path)) is not None}
    if step not in steps:
        known = f"it has {', '.join(map(str, steps))}" if steps else "it has none"
        raise ValueError(f"{run} has no checkpoint of step {step}: {known}")
    return steps[step]


def best_checkpoint(run: Path) -> Path | None:
    """The checkpoint with the lowest held-out loss so far, of a run that keeps it (training.load_best_model_at_end);
    None: there is none."""
    latest = CheckpointManager(run).latest()
    with suppress(OSError, ValueError, LookupError, TypeError):
        if latest is not None and load_config(run / CONFIG).training.load_best_model_at_end:
            best = latest.with_name(checkpoint_name(read_state(latest)["state"]["best"]["step"]))
            return best if best.is_dir() else None
    return None


def has_average(checkpoint: Path) -> bool:
    """Whether a checkpoint has averaged weights."""
    return (checkpoint / AVERAGE).is_dir()


def export_checkpoint(
    run: Path,
    checkpoint: Path,
    target: Path,
    *,
    averaged: bool | None = None,
    replace: bool = False,
    begin: Callable[[str, int], None] = lambda _, __: None,
    advance: Callable[[int], None] = lambda _: None,
) -> Exported:
    """Writes a checkpoint of a run as a model folder. Every rank calls it, or one process alone.

    The folder appears when it is complete.

    Args:
        run: the run's folder, for what is kept of the source.
        checkpoint: the folder of one checkpoint.
        averaged: of the averaged weights (training.ema_decay), or of the last ones; None: averaged if there are any.
        replace: an earlier export under that path is replaced. Otherwise it must be empty, or not be there.
        begin: told what is done next, and of how many bytes on this rank.
        advance: told of bytes that are done.

    Raises:
        CheckpointError: a checkpoint that is incomplete, damaged, or of no model that can be built.
        CheckpointWriteError: the target is in use, or too small.
    """
    target = target.absolute()
    with together(CheckpointWriteError, ""):
        check_target(target, replace)
    with together(CheckpointError, ""):
        if averaged is None:
            averaged = has_average(checkpoint)
        source, layout, parts = _plan(run, checkpoint, begin, advance, averaged)
    return write_model(
        target, source, layout, lambda name: _read(parts, name), checkpoint / MODEL, begin=begin, advance=advance
    )


def export_average(
    checkpoints: Sequence[Path],
    target: Path,
    *,
    begin: Callable[[str, int], None] = lambda _, __: None,
    advance: Callable[[int], None] = lambda _: None,
) -> Exported:
    """As `export_checkpoint`, of the mean of several checkpoints' weights, which are computed in float32.

    Args:
        checkpoints: two at least, of the same model; the first one's run says what is copied of its source.

    Raises:
        CheckpointError, CheckpointWriteError: as `export_checkpoint`; or weights of another shape."""
    target = target.absolute()
    with together(CheckpointWriteError, ""):
        check_target(target, replace=False)
    with together(CheckpointError, ""):
        if len({path.resolve() for path in checkpoints}) < 2:
            raise CheckpointError(
                f"an average is of two checkpoints at least, and here is {checkpoints[0]} alone. Of a run "
                "the newest is taken; name others by their folders, RUN/checkpoints/step-..."
            )
        found = [_plan(path.absolute().parent.parent, path, begin, advance) for path in checkpoints]
        shapes = [{name: tuple(stored.size) for name, (stored, _) in parts.items()} for _, _, parts in found]
        for path, other in zip(checkpoints, shapes, strict=True):
            if wrong := sorted(
                name for name in other.keys() | shapes[0].keys() if other.get(name) != shapes[0].get(name)
            ):
                raise CheckpointError(f"{path} is of another model than {checkpoints[0]}: {wrong[0]} differs")
        configs = [_computed(read_config(path / MODEL).to_dict()) for path in checkpoints]
        for path, config in zip(checkpoints, configs, strict=True):
            if wrong := sorted(key for key in config | configs[0] if config.get(key) != configs[0].get(key)):
                raise CheckpointError(
                    f"{path} is of another model than {checkpoints[0]}: its configuration has {wrong[0]} = "
                    f"{config.get(wrong[0])!r}, and not {configs[0].get(wrong[0])!r}"
                )
    source, layout, _ = found[0]

    def mean(name: str) -> torch.Tensor:
        values = (_read(parts, name) for _, _, parts in found)
        total = next(values)
        if not total.is_floating_point():
            return total
        dtype, total = total.dtype, total.float()
        for value in values:
            total += value
        return (total / len(found)).to(dtype)

    return write_model(target, source, layout, mean, checkpoints[0] / MODEL, begin=begin, advance=advance)


def _computed(config: dict[str, Any]) -> dict[str, Any]:
    """What of a configuration changes what a trained model computes."""
    return {key: value for key, value in config.items() if not _OF_TRAINING.search(key)}


def write_model(
    target: Path,
    source: Source,
    layout: OriginalLayout,
    read: Callable[[str], torch.Tensor],
    configs: Path,
    check: Callable[[Path, OriginalLayout, Callable[[str], torch.Tensor]], ReadBack] = ReadBack,
    *,
    begin: Callable[[str, int], None] = lambda _, __: None,
    advance: Callable[[int], None] = lambda _: None,
) -> Exported:
    """Writes a model folder, as `export_checkpoint` does.

    Args:
        source: what is copied of the folder that the run began from.
        read: the values of a tensor, whole, by its name in the model.
        configs: where the configuration files of a run from scratch are.
        check: compares what was written with what should be there, before the folder has its name.
    """
    mine = list(layout.files)[rank() :: world()]
    with together(CheckpointWriteError, f"{target} was not written: "):
        check_space(target, layout.bytes)
    temporary = target.with_name(f".tmp-{target.name}-{gather(secrets.token_hex(4))[0]}")
    try:
        with together(CheckpointWriteError, f"{target} was not written: "):
            if rank() == 0:
                remove_left(target)
                temporary.mkdir(parents=True)
        with together(CheckpointWriteError, f"{target} was not written: "):
            begin("writing", sum(entry.bytes for file in mine for entry in layout.files[file].values()))
            layout.write(temporary, read, mine, advance)
            for file in mine:
                flush_file(temporary / file)
        with together(CheckpointWriteError, f"{target} was not written: "):
            if rank() == 0:
                layout.write_index(temporary)
                _write_rest(source, configs, layout, temporary)
                for path in temporary.rglob("*.*"):
                    if path.suffix != ".safetensors":
                        flush_file(path)
                flush_folder(temporary)
        with together(CheckpointWriteError, f"{target} was not written: "):
            groups, largest = layout.groups[rank() :: world()], (0.0, "")
            begin("reading back", sum(entry.bytes for group in groups for entry in group.outputs.values()))
            read_back = check(temporary, layout, read)
            for group in groups:
                largest = max(largest, read_back.compare(group))
                advance(sum(entry.bytes for entry in group.outputs.values()))
        largest, checked = max(gather(largest)), ""
        with together(CheckpointWriteError, f"{target} was not written: "):
            if rank() == 0:
                checked = read_back.finish(*largest)
                put_in_place(temporary, target)
                remove_left(target)
    finally:
        if rank() == 0:
            shutil.rmtree(temporary, ignore_errors=True)
    return Exported(target, layout.bytes, layout.left_out, checked)


def _plan(
    run: Path,
    checkpoint: Path,
    begin: Callable[[str, int], None],
    advance: Callable[[int], None],
    averaged: bool = False,
) -> tuple[Source, OriginalLayout, Parts]:
    if (run / ADAPTER).is_dir():
        raise CheckpointError(
            f"{run} has trained an adapter ({run / ADAPTER}), not a model; `carpool merge {run} --out DIR` makes a "
            "model of the two"
        )
    source = read_source(run)
    records = read_state(checkpoint)["files"]
    if averaged and not has_average(checkpoint):
        raise CheckpointError(f"{checkpoint} has no averaged weights: the run had no training.ema_decay")
    wanted = (f"{MODEL}/", f"{AVERAGE}/") if averaged else (f"{MODEL}/",)
    mine = sorted(name for name in records if name.startswith(wanted))[rank() :: world()]
    begin("checking", sum(records[name]["bytes"] for name in mine))
    check_files(checkpoint, records, mine, advance)
    if why := why_not_in_transformers(read_config(checkpoint / MODEL)):
        raise CheckpointError(
            f"{run} trains a model that Transformers cannot load: {why}. It cannot be exported; resume, evaluate or "
            "sample it with Carpool"
        )
    model = meta_model(checkpoint / MODEL)
    parts = stored_parts(checkpoint / MODEL)
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    tied = model.all_tied_weights_keys or {}
    if missing := sorted(expected.keys() - parts.keys() - tied.keys() - set(tied.values())):
        raise CheckpointError(
            f"{checkpoint} lacks {len(missing)} of the weights of {type(model).__name__}: {', '.join(missing[:3])}"
        )
    if wrong := sorted(name for name in parts if expected.get(name) != tuple(parts[name][0].size)):
        raise CheckpointError(
            f"{checkpoint} is not of the model that its {MODEL}/config.json describes: {wrong[0]} is "
            f"{tuple(parts[wrong[0]][0].size)} there, and {expected.get(wrong[0], 'unknown')} in {type(model).__name__}"
        )
    tensors = {name: Entry(parts[name][0].properties.dtype, expected[name]) for name in expected if name in parts}
    if averaged:
        parts |= stored_parts(checkpoint / AVERAGE)
    return source, OriginalLayout(model, tensors, source.weights), parts


def _read(parts: Parts, name: str) -> torch.Tensor:
    """A whole tensor, from the parts that ranks have written."""
    stored, files = parts[name]
    whole = torch.empty(stored.size, dtype=stored.properties.dtype)
    for chunk, path in zip(stored.chunks, files, strict=True):
        place = tuple(slice(start, start + size) for start, size in zip(chunk.offsets, chunk.sizes, strict=True))
        with safe_open(path, framework="pt") as file:
            whole[place].copy_(file.get_tensor(name))
    return whole


def check_target(target: Path, replace: bool) -> None:
    """Raise OSError unless a model can be written there."""
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return
    if not replace:
        raise FileExistsError(errno.EEXIST, "the folder is not empty; choose a new one", str(target))
    if not (target / "config.json").is_file():
        raise FileExistsError(errno.EEXIST, "there is something else than an exported model", str(target))


def check_space(target: Path, needed: int) -> None:
    """Raises OSError if `needed` bytes of weights do not fit on the disk of a folder that may not exist yet."""
    place = next(path for path in target.absolute().parents if path.exists())
    if (free := shutil.disk_usage(place).free) < needed:
        raise OSError(errno.ENOSPC, f"the model needs {decimal(needed)}, and {decimal(free)} are free", str(place))


def _write_rest(source: Source, configs: Path, layout: OriginalLayout, folder: Path) -> None:
    """Configurations and the tokenizer."""
    if not source.weights:
        for path in configs.glob("*.json"):
            shutil.copyfile(path, folder / path.name)
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        without_changes(config)  # which Transformers' class does without, or the model would not be exported
        # vLLM and others look for the class here; a model from scratch has never said it.
        config["architectures"] = [layout.architecture]
        config["dtype"] = layout.dtype
        (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    copy_source(source, folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if "quantization_config" in config or config | layout.config_keys != config:
        config.pop("quantization_config", None)  # of files that were unpacked
        config |= layout.config_keys
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
