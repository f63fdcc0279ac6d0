"""Which step of a run is best by its held-out loss, when to stop for want of a better one, and when pauses are due.

    evaluation   1     2     3     4     5                 training.early_stopping_patience = 2
    loss         3.1   2.8   2.9   2.7   2.75   2.71
    best         1     2     2     4     4      4          a checkpoint of each is written (load_best_model_at_end)
    waited       0     0     1     0     1      2          the run ends

What is best so far goes into checkpoints, so that a resumed run stops where the other one would have.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from carpool.plugins.nearest import did_you_mean
from carpool.train.config.schema import TrainingSection


@dataclass
class Best:
    """The best step so far.

    Attributes:
        step, loss: of it; None: there was no evaluation.
        waited, than: evaluations since the loss was lower by the threshold, and that loss.
        evaluated: the last step that counts; one step is evaluated twice where a run ends."""

    step: int | None = None
    loss: float | None = None
    waited: int = 0
    than: float | None = None
    evaluated: int | None = None

    def add(self, step: int, loss: float, threshold: float) -> bool:
        """Whether this step is the best so far. A loss that is no number is not."""
        if self.evaluated == step:
            return self.step == step
        self.evaluated = step
        lower = not math.isnan(loss) and (self.than is None or loss < self.than - threshold)
        self.waited, self.than = (0, loss) if lower else (self.waited + 1, self.than)
        if math.isnan(loss) or (self.loss is not None and loss >= self.loss):
            return False
        self.step, self.loss = step, loss
        return True

    def patience_is_over(self, training: TrainingSection) -> bool:
        """Whether the run is to end."""
        return training.early_stopping_patience is not None and self.waited >= training.early_stopping_patience


def metric(training: TrainingSection, mean: float, sets: Mapping[str, float]) -> float:
    """The held-out loss by which models are compared. `mean`: over all sets; `sets`: of each, if there are several."""
    return mean if training.metric_for_best_model is None else sets.get(training.metric_for_best_model, mean)


def check_metric(training: TrainingSection, sets: Collection[str]) -> None:
    """Raise ValueError for a metric of a held-out set that there is not."""
    name = training.metric_for_best_model
    if name is not None and name not in sets:
        raise ValueError(
            f"training.metric_for_best_model = {name!r}: expected the name of a held-out set, {', '.join(sets)}"
            f"{did_you_mean(name, sets)}"
        )


def due_times(strategy: str, every: int | None, step: int, last: int, steps_per_epoch: float) -> int:
    """How often that is after this step, the time at the end of the run included."""
    period = {"epoch": steps_per_epoch, "steps": every}.get(strategy)
    return math.ceil(last / period - 1e-9) - math.floor(step / period + 1e-9) if period else 1


def is_due(strategy: str, every: int | None, step: int, steps_per_epoch: float) -> bool:
    """Whether something that happens by this strategy does after this step. An epoch ends within a step, after it."""
    if strategy == "epoch":
        # With 9/7 steps in an epoch, nine steps are 6.999... epochs in floating point.
        return math.floor(step / steps_per_epoch + 1e-9) > math.floor((step - 1) / steps_per_epoch + 1e-9)
    return strategy == "steps" and every is not None and step % every == 0
