"""Carpool's numbers in the logs of transformers' Trainer, and of whatever is built on it (TRL).

    trainer = Trainer(model, args, train_dataset=data)
    CarpoolCallback.add_to(trainer)

Each of the Trainer's log lines then also has ranks per token, rows and bytes that left their rank, what one row per
(token, expert) would have moved, expert load, idle experts, and milliseconds in dispatch, experts and combine.
`callbacks=[CarpoolCallback()]` works too, but puts the callback behind the trackers (TensorBoard and the like), which
then do not see its numbers; `trainer.state.log_history` does.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState

from carpool.hf.ride_metrics import RideMetrics
from carpool.hf.seam.expert_rides import rides
from carpool.plugins.flat import flat
from carpool.transport import check_overflow


class CarpoolCallback(TrainerCallback):
    """Adds `carpool/...` entries to every log of a Trainer whose model has Carpool layers.

    Collecting is collective, so all ranks must have the callback, which is how a Trainer uses it anyway. Numbers cover
    the steps since the last log, and training alone: not evaluations.

    Raises:
        ValueError: at the start of training, for a model without Carpool layers.
        BufferOverflowError: before an optimizer step, if a batch had more tokens than the buffers of transport "nvlink"
            hold: its gradients are NaN. See `carpool.hf.set_transport`, which takes the largest number.
        RankMissingError: there as well, if a rank did not arrive at one of its verbs.
    """

    def __init__(self) -> None:
        self._metrics: RideMetrics | None = None
        self._pending: dict[str, float] = {}
        self._steps = 0

    @classmethod
    def add_to(cls, trainer: Trainer) -> CarpoolCallback:
        """Add one to a Trainer, behind what decides when to log and before what reports it."""
        callback = cls()
        trainer.callback_handler.callbacks.insert(1, callback)
        return callback

    def on_train_begin(self, args: Any, state: Any, control: Any, model: nn.Module | None = None, **_: Any) -> None:
        if model is None or not rides(model):
            raise ValueError(
                'this model has no Carpool layers: load it with DistributedConfig(..., ep_implementation="carpool") '
                "and ep_size > 1, or call carpool.hf.install(model)"
            )
        self._metrics = RideMetrics(model)
        self._metrics.reset()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        layers = self._metrics.layers if self._metrics is not None else []
        for transport in {id(getattr(own.transport, "buffers", None)): own.transport for own in layers}.values():
            check_overflow(transport)

    def on_step_end(self, args: Any, state: Any, control: TrainerControl, **_: Any) -> None:
        self._steps += 1
        self._collect(control)

    def on_epoch_end(self, args: Any, state: Any, control: TrainerControl, **_: Any) -> None:
        self._collect(control)

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._forget_evaluation()

    def on_predict(self, args: Any, state: Any, control: Any, metrics: Any, **_: Any) -> None:
        self._forget_evaluation()

    def on_log(
        self, args: Any, state: TrainerState, control: Any, logs: dict[str, float] | None = None, **_: Any
    ) -> None:
        if logs is not None and self._pending and "loss" in logs:
            logs.update(self._pending)
            # The Trainer has put its own copy into the history already.
            if state.log_history and state.log_history[-1].get("step") == state.global_step:
                state.log_history[-1].update(self._pending)
            self._pending = {}

    def _collect(self, control: TrainerControl) -> None:
        """When a log is due, on every rank: they all get here, while only some write logs. Before an evaluation, what
        was counted so far is set aside, because the evaluation's forwards count as well."""
        if self._metrics is None or not self._steps:
            return
        cuda = torch.cuda.is_available()
        device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
        if control.should_log:
            record = self._metrics.collect(device, self._steps).record
            self._pending = {f"carpool/{name}": value for name, value in flat(record, "/").items()}
            self._steps = 0
        elif control.should_evaluate:
            self._metrics.set_aside(device)

    def _forget_evaluation(self) -> None:
        if self._metrics is not None:
            self._metrics.forget_current()
