"""Which checkpoint a run goes on from, and what `carpool train` keeps in one beside weights."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError

from carpool.report.record_types import explain
from carpool.train.checkpoints.checkpoint_files import STATE_FILE, CheckpointError, read_state
from carpool.train.checkpoints.manager import CheckpointManager
from carpool.train.checkpoints.reading import check_optimizer
from carpool.train.config.fine_tuning import base_of_run, has_trained_weights
from carpool.train.config.schema import Config, TrainingSection
from carpool.train.data.loader import check_order
from carpool.train.records.run_folder import SUMMARY, check_no_run, read_info


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True)


class Totals(_Strict):
    """Sums over all steps. `bytes_network`: over those on several nodes; None: there were none."""

    tokens: int = Field(ge=0)
    bytes_remote: int = Field(ge=0)
    bytes_remote_alltoall: int = Field(ge=0)
    bytes_network: int | None = Field(default=None, ge=0)


class Losses(_Strict):
    """For the summary. A held-out loss over no token is NaN."""

    final_loss: float | None
    first_eval_loss: float | None
    final_eval_loss: float | None


class Position(_Strict):
    """Of the loader in the data; it checks the rest of its state itself."""

    position: int = Field(ge=0)


class Answer(_Strict):
    """Of the placement's solver, not used yet."""

    layouts: dict[str, Any]
    why: str
    solver: str
    solve_seconds: float | None
    before: dict[str, Any]
    predicted: dict[str, Any]


class Pending(_Strict):
    asked: int = Field(ge=0)
    answer: Answer


class Moved(_Strict):
    """Where experts are by now (`carpool.train.moving.runtime.Placement.state`)."""

    moe_layout: str
    layouts: dict[str, Any] | None
    pending: Pending | None
    since: int | None
    measured: dict[str, FiniteFloat]


class BestStep(_Strict):
    """So far, by held-out loss (`carpool.train.run.best_model.Best`)."""

    step: int | None = Field(ge=0)
    loss: float | None
    waited: int = Field(ge=0)
    than: float | None
    evaluated: int | None


class RunState(_Strict):
    """`state` in the state.json of a run's checkpoint."""

    totals: Totals
    losses: Losses
    best: BestStep | None = None
    loader: Position
    placement: Moved


def read_run_state(checkpoint: Path) -> dict[str, Any]:
    """What a run's checkpoint says beside weights.

    Raises:
        CheckpointError: it is damaged, or no run's."""
    state: dict[str, Any] = read_state(checkpoint)["state"]
    try:
        RunState.model_validate(state)
    except ValidationError as error:
        raise CheckpointError(
            f"{checkpoint / STATE_FILE} is damaged (state.{explain(error)}); use an older checkpoint"
        ) from error
    return {**state, "placement": _homes_alone(state["placement"])}


def _homes_alone(placed: Any) -> Any:
    """Without the replicas that layouts had once: parameters are at home, and sums are the same without them."""
    if not isinstance(placed, dict):
        return placed
    return {key: _homes_alone(one) for key, one in placed.items() if not (key == "slots" and "homes" in placed)}


def check_goes_on(checkpoint: Path, state: Mapping[str, Any], config: Config) -> None:
    """Refuse settings with which a run cannot go on from its checkpoint. Reads neither weights nor data.

    Args:
        state: of the checkpoint, by `read_run_state`.

    Raises:
        ValueError: no step is left, the data would be in another order, or the optimizer is of another kind."""
    training, dtype = config.training, config.model.stored_dtype
    if training.max_steps is not None:
        check_steps_left(checkpoint, read_state(checkpoint)["step"], training)
    check_order(config, state["loader"])
    # Which parameters adapters have is not known here.
    if not config.adapter.is_used:
        kept = training.state_bytes(dtype)
        check_optimizer(checkpoint, "low_bits" in kept, training.optimizer_state_dtype == "int8")


def check_base(checkpoint: Path, config: Config, ranks: int) -> None:
    """Raise ValueError if a run would go on with an adapter that adds something else, or beside other frozen weights.
    With adapter.base_dtype one rank quantises layers that several leave as they are."""
    run, model, adapter = checkpoint.absolute().parent.parent, config.model.weights, config.adapter
    before = base_of_run(run, ("kind", "alpha", "alpha_pattern", "base_dtype")) if adapter.is_used else {}
    now = {key: getattr(adapter, key) for key in before}
    other = [f"adapter.{key} = {was!r}, and now it is {now[key]!r}" for key, was in before.items() if was != now[key]]
    if model is not None and has_trained_weights(run, model) is False:
        other.append(f"other weights than those in {model} now")
    if other:
        instead = f"put that back, or start a run from its adapter (adapter.path={run})"
        raise ValueError(f"{checkpoint} was trained with {other[0]}: {instead}")
    info = read_info(run)
    kind, keep = adapter.base["base_dtype"], adapter.base["base_keep"]
    if kind is None or keep is None or info is None:
        return
    then = info["parallelism"]["world_size"]
    if (then == 1) != (ranks == 1):
        what = "all layers" if then == 1 else "experts alone"
        raise ValueError(
            f"{checkpoint} was trained on {then} ranks, beside a base with {what} in {kind}, which "
            f"{ranks} ranks would not have: go on with {'one rank' if then == 1 else 'several ranks'} "
            "(parallelism.num_ranks), or start a run from its adapter (adapter.path)"
        )


def check_steps_left(checkpoint: Path, step: int, training: TrainingSection) -> None:
    """Raise ValueError if a run has no step left after that of its checkpoint, and came to its end."""
    last = min(training.steps, training.stop_at_step or training.steps)
    if step > last or (step == last and not _was_cut_short(checkpoint, training.folder, step)):
        raise ValueError(
            f"{checkpoint} is at step {step} already, and this run ends at step {last}: nothing to do; raise "
            "training.max_steps (or training.stop_at_step) to go on"
        )


def _was_cut_short(checkpoint: Path, folder: Path, step: int) -> bool:
    """Whether a run in this folder ended between its last checkpoint and its summary, which is written last: what is in
    between, such as the model for transformers, is then still to be done."""
    if checkpoint.absolute().parent.parent != folder.absolute():
        return False
    try:
        return bool(json.loads((folder / SUMMARY).read_text(encoding="utf-8"))["steps"] < step)
    except (OSError, ValueError, LookupError, TypeError):
        return True


def checkpoint_to_resume(wanted: str | None, folder: Path, checkpoints: CheckpointManager) -> Path | None:
    """The checkpoint that `training.resume_from_checkpoint` means; None for a run that starts.

    Raises:
        ValueError: "last" of none, or "auto" of damaged ones alone; or a start in a folder that already holds a run."""
    if wanted in ("last", "auto"):
        if (path := checkpoints.latest()) is not None:
            return path
        damaged = checkpoints.why_damaged()
        # A run that came to its end has saved one; whoever deleted it may want the rest of that folder.
        lost = bool(damaged) or (folder / SUMMARY).exists()
        if wanted == "auto" and not lost:
            return None
        why = "".join(f" ({text})" for text in damaged[-1:])
        raise ValueError(
            f"training.resume_from_checkpoint = {wanted!r}, but {folder} holds no checkpoint that can be read{why}; "
            + (
                "restore one, or delete that folder to begin with new weights"
                if lost
                else "check training.output_dir, or give training.resume_from_checkpoint=auto, which begins with new "
                "weights where none was saved"
            )
        )
    if wanted is None:
        check_no_run(folder)
        return None
    return Path(wanted)


def set_aside(checkpoint: Path) -> str:
    """Rename a damaged checkpoint, so that nobody takes it for one; the new name."""
    aside = checkpoint.with_name(f"damaged-{checkpoint.name}-{secrets.token_hex(4)}")
    checkpoint.rename(aside)
    return str(aside)
