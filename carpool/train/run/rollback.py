"""Steps that went wrong, and ranks that are slow.

A loss or a gradient that is no number, or a loss that jumps (`training.spike_factor`), takes the run back to its newest
checkpoint. It goes on there with the batches that were to come (as PaLM did, arXiv 2204.02311): those since the
checkpoint are left out.

    step         1 .. 50      51 .. 57     then    51 ..              checkpoint of step 50; step 57 is no number
    batches      1 .. 50      51 .. 57             58 ..

A step lasts equally long on all ranks, because they wait for each other. What a rank does while it waits for nobody
tells them apart: the step less its exchanges of tokens, in which the others wait for the slowest (`Stragglers`).
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from carpool.parallel.ranks import from_rank_0
from carpool.train.checkpoints.reading import load
from carpool.train.run.best_model import Best
from carpool.train.run.finish import collect
from carpool.train.steps.diagnose import WrongStepError

if TYPE_CHECKING:
    from carpool.train.run.loop import Run

# Losses with which one is compared, and how many there must be.
_WINDOW, _ENOUGH = 32, 8
# A rank is slow that works so much longer than the rank in the middle.
_SLOW = 1.3


class Spikes:
    """Losses of the latest steps, and what is a spike among them. `factor`: over their median."""

    def __init__(self, factor: float) -> None:
        self._factor, self._losses = factor, deque[float](maxlen=_WINDOW)

    def add(self, loss: float) -> str | None:
        """What is wrong with a loss; None: nothing, and later ones are compared with it, too."""
        if len(self._losses) >= _ENOUGH:
            median = statistics.median(self._losses)
            if loss > self._factor * median:
                return f"loss {loss:.4g} is {loss / median:.2f} times the median of the last {len(self._losses)} steps"
        self._losses.append(loss)
        return None


class Stragglers:
    """Ranks that were slower than others for many steps.

    Args:
        steps: how many; None: nobody is named.
    """

    def __init__(self, steps: int | None, node_of: Sequence[int]) -> None:
        self._node_of, self._named = node_of, set[int]()
        self._ratios: deque[list[float]] | None = None if steps is None else deque(maxlen=steps)

    def add(self, work_ms: Sequence[float]) -> dict[str, Any] | None:
        """Of one step, what each rank worked: fields of a record about a rank that is slow and was not named before."""
        if self._ratios is None or min(work_ms) <= 0:
            return None
        middle = sorted(work_ms)[(len(work_ms) - 1) // 2]
        self._ratios.append([one / middle for one in work_ms])
        if len(self._ratios) < (self._ratios.maxlen or 0):
            return None
        usual = [statistics.median(of_steps) for of_steps in zip(*self._ratios, strict=True)]
        slow = {rank for rank, ratio in enumerate(usual) if ratio > _SLOW}
        new, self._named = slow - self._named, slow
        if not new:
            return None
        rank = max(new, key=usual.__getitem__)
        return {"rank": rank, "node": self._node_of[rank], "ratio": usual[rank], "steps": len(self._ratios)}


def load_state(run: Run, checkpoint: Path) -> dict[str, Any]:
    """Put a checkpoint into a run, but for the position in the data; its `state`. Collective."""
    built = run.built
    run.checkpoints.settle()
    state = load(checkpoint, built.model, built.optimizer, average=built.average, sums_first=False)
    restore_state(run, state)
    run.incomplete = False
    return state


def restore_state(run: Run, state: dict[str, Any]) -> None:
    """Go on from what `carpool.train.run.finish.run_state` gave, with its "step", but for the position in the data."""
    run.step, run.totals, run.losses = state["step"], state["totals"], state["losses"]
    run.best = Best(**(state.get("best") or {}))
    if run.built.consumed is not None and state.get("norm") is not None:
        run.built.consumed.norm.fill_(state["norm"])


def roll_back(run: Run, error: WrongStepError) -> None:
    """Go back to the newest checkpoint, and leave out the batches since. Collective. Raises the error where there is
    none, or where this has been done too often since a checkpoint was written."""
    collect(run)
    checkpoint = from_rank_0(run.checkpoints.latest)
    if checkpoint != run.rolled_back_to:
        run.rollbacks, run.rolled_back_to = 0, checkpoint
    if run.rollbacks >= run.config.training.max_rollbacks or checkpoint is None:
        raise error
    run.rollbacks += 1
    wrong = run.step
    run.built.optimizer.zero_grad(set_to_none=True)
    load_state(run, checkpoint)
    run.built.metrics.reset()
    run.unrecorded = None
    run.records.steps[:] = [one for one in run.records.steps if one["step"] <= run.step]
    run.records.write("rollback", run.step, wrong=wrong, why=str(error))
    run.records.say(
        f"{error}. ROLLED BACK to {checkpoint}; the batches of steps {run.step + 1} to {wrong} are left "
        f"out ({run.rollbacks} of training.max_rollbacks = {run.config.training.max_rollbacks})"
    )
