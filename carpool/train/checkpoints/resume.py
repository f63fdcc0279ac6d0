"""Which checkpoint a run goes on from."""

from __future__ import annotations

from pathlib import Path

from carpool.train.checkpoints.manager import CheckpointManager
from carpool.train.run.files import METRICS


def checkpoint_to_resume(wanted: str | None, folder: Path, checkpoints: CheckpointManager) -> Path | None:
    """The checkpoint that `training.resume_from_checkpoint` means; None for a run that starts.

    Raises:
        ValueError: "last" of none; or a start in a folder that already holds a run."""
    if wanted == "last":
        if (path := checkpoints.latest()) is None:
            raise ValueError(
                f"training.resume_from_checkpoint = 'last', but {folder} holds no checkpoint; check "
                "training.output_dir, or leave training.resume_from_checkpoint out to begin with new weights"
            )
        return path
    if wanted is None and (folder / METRICS).exists():
        raise ValueError(
            f"{folder} already holds a run: continue it with training.resume_from_checkpoint=last, or choose "
            "another training.output_dir (or delete that folder)"
        )
    return None if wanted is None else Path(wanted)
