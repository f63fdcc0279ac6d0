"""Transformers' Trainer, and what is built on it (TRL), with checkpoints of sharded models.

Trainer itself refuses to train a sharded model unless it saves no optimizer: it would gather the model on rank 0, and
knows of no way to save a sharded optimizer. Here each rank writes its own part (`carpool.train.checkpoints.manager`):

    trainer = CarpoolTrainer(model, TrainingArguments(save_steps=100, ...), train_dataset=data)
    trainer.train(resume_from_checkpoint=True)

    class Tuner(ShardedCheckpoints, SFTTrainer): ...        # TRL's, or any other

A folder `checkpoint-100` then holds `checkpoints/step-00000100` beside Trainer's own files. `carpool export` makes a
model folder of it. For a model that is not sharded, everything is Trainer's own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn
from transformers import Trainer

from carpool.parallel.ranks import rank, together
from carpool.train.checkpoints.checkpoint_files import CheckpointError
from carpool.train.checkpoints.manager import CheckpointManager
from carpool.train.checkpoints.reading import load
from carpool.train.checkpoints.run_source import SOURCE, keep_source


class ShardedCheckpoints:
    """Comes before a Trainer class in the list of bases; see the module's docstring.

    The scheduler's state travels as JSON. Random generators are Trainer's own: they come back on the same number of
    ranks.

    Raises:
        CheckpointWriteError: while training, on all ranks, if one could not write.
        CheckpointError: on resuming, if the checkpoint is not whole, or of another model. Nothing has changed then.
    """

    model: Any
    args: Any
    state: Any
    optimizer: Any
    lr_scheduler: Any
    processing_class: Any
    is_distributed_loading_by_transformers: bool

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        arguments: Any = kwargs.get("args", args[1] if len(args) > 1 else None)
        if arguments is None or arguments.save_only_model:
            super().__init__(*args, **kwargs)
            return
        # Trainer's constructor refuses sharded models whose optimizer is to be saved.
        arguments.save_only_model = True
        try:
            super().__init__(*args, **kwargs)
        finally:
            arguments.save_only_model = False

    def _sharded(self) -> bool:
        return self.is_distributed_loading_by_transformers

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        if _internal_call and self._sharded() and not self.args.save_only_model:
            return  # with the optimizer, below
        super().save_model(output_dir, _internal_call)  # type: ignore[misc]

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if not self._sharded():
            super()._save_optimizer_and_scheduler(output_dir)  # type: ignore[misc]
            return
        folder, model = Path(output_dir), self.model
        state = {"scheduler": self.lr_scheduler.state_dict()}
        checkpoints = CheckpointManager(folder, save_total_limit=1)
        checkpoints.save(self.state.global_step, model, _inner(self.optimizer), state)
        with together(OSError, f"{folder / SOURCE} was not written: "):
            if rank() == 0:
                self._keep_source(folder)

    def _keep_source(self, folder: Path) -> None:
        """For `carpool export`."""
        name = self.model.config.name_or_path
        weights = Path(name) if name and any(Path(name).glob("*.safetensors")) else None
        keep_source(folder, weights, str(weights) if weights is not None and self.processing_class is None else None)
        if self.processing_class is not None:
            self.processing_class.save_pretrained(folder / SOURCE)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        if not self._sharded():
            super()._load_from_checkpoint(resume_from_checkpoint, model)  # type: ignore[misc]
            return
        _newest(resume_from_checkpoint)  # it is read with the optimizer, which is not there yet

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or not self._sharded():
            super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]
            return
        state = self._load(checkpoint, _inner(self.optimizer))
        self.lr_scheduler.load_state_dict(state["scheduler"])
        # A scheduler sets the rate of the next step when it steps, not when it is loaded.
        for group, rate in zip(self.optimizer.param_groups, self.lr_scheduler.get_last_lr(), strict=True):
            group["lr"] = rate

    def _load_best_model(self) -> None:
        if not self._sharded() or self.args.save_only_model:
            super()._load_best_model()  # type: ignore[misc]
            return
        self._load(self.state.best_model_checkpoint, None)

    def _load(self, checkpoint: str, optimizer: Any) -> dict[str, Any]:
        return load(_newest(checkpoint), self.model, optimizer, restore_rng=False)


class CarpoolTrainer(ShardedCheckpoints, Trainer):
    """Transformers' Trainer, which saves and resumes sharded models; see the module's docstring."""


def _inner(optimizer: Any) -> Any:
    """The optimizer that Accelerate has wrapped."""
    return getattr(optimizer, "optimizer", optimizer)


def _newest(folder: str) -> Path:
    latest = CheckpointManager(folder).latest()
    if latest is None:
        raise CheckpointError(
            f"{folder} holds no whole checkpoint of a sharded model; resume from another, or, if it holds a model "
            "(save_only_model), load that with from_pretrained and start anew"
        )
    return latest
