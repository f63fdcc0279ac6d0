"""The main job: a `Config` in, a run directory out. Runs in every rank, inside an initialised process group.

    setup        data -> model (FSDP x EP) -> optimizer -> resume                        carpool/train/run/setup.py
    each step    batch -> loss and gradients -> all rows had a place? -> global norm     here
                 -> finite? -> AdamW -> numbers -> was anybody asked to stop?
    now and then held-out loss and a sample; a checkpoint                                evaluate.py, finish.py
    at the end   held-out loss, checkpoint, comparison with another transport, summary   finish.py

Whatever decides what happens next (is the loss finite, does a checkpoint exist, shall the run stop) is known to all
ranks alike.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from functools import partial
from typing import TypeVar

import torch
from transformers.utils.logging import disable_progress_bar

from carpool.hf.compiled import eagerly
from carpool.memory.optimizer import AdamW
from carpool.parallel.clip import clip_factor, clip_grad_norm, grad_norm
from carpool.parallel.replicated import replicated
from carpool.train.config.schema import Config
from carpool.train.launch.stopping import Stopped
from carpool.train.run.determinism import determinism
from carpool.train.run.diagnose import NonFiniteError, explain
from carpool.train.run.evaluate import evaluate
from carpool.train.run.finish import finish, leave, save
from carpool.train.run.numbers import record_step
from carpool.train.run.setup import Setup
from carpool.train.run.step import Batch, Losses, learning_rate

T = TypeVar("T")


def train(config: Config, *, compare: str | None = None, command: str = "carpool train") -> None:
    """Train as `config` says, from the start or from a checkpoint.

    Args:
        compare: at the end, compare step times with this transport.
        command: what the user typed, for the record.

    Raises:
        ValueError: a configuration, data or checkpoint that cannot be used; nothing has been written then.
        NonFiniteError: the loss or its gradient is NaN or infinite; the last checkpoint is untouched.
        Stopped: a rank got SIGTERM or SIGUSR1; there is a checkpoint of the last step.
        UnwrittenError: the run came to its end, but not all of it could be written.
    """
    # transformers' own progress bars, one per rank, would write over the run's.
    disable_progress_bar()
    with determinism(config.training.full_determinism):
        run = Run(config, compare, command)
        try:
            with run.stop:
                run.loop()
                finish(run)
        except Exception as error:
            # Why the run ends here, for its report.
            asked = error.signal if isinstance(error, Stopped) else None
            run.recorder.write("stopped", run.step, why=str(error) or type(error).__name__, signal=asked)
            raise
        finally:
            run.close()


class Run(Setup):
    """The steps of a run."""

    def loop(self) -> None:
        training = self.config.training
        if training.eval_on_start and self.start == 0:
            evaluate(self)
        self.metrics.reset()
        begin = time.perf_counter()
        while self.step < self.last_step:
            self.step += 1
            for group in self.optimizer.param_groups:
                group["lr"] = learning_rate(self.step, training)
            losses, norm = self.update()
            rode = self.metrics.collect(self.device)
            signum = record_step(self, losses, norm, rode, 1e3 * (time.perf_counter() - begin))
            self.placement.after_step(self.step, rode)
            if signum and self.step < self.last_step:
                leave(self, signum)
            if training.eval_steps and self.step % training.eval_steps == 0 and self.step < self.last_step:
                evaluate(self)
            if training.save_steps and self.step % training.save_steps == 0:
                save(self)
            self.metrics.reset()
            begin = time.perf_counter()

    def update(self) -> tuple[Losses, float]:
        """The optimizer's step on the next batches: their losses, and the norm of the gradient."""
        batches = [self.to_device(batch) for batch in next(self.loader)]
        losses = self.with_room(partial(self._gradients, batches))
        max_norm = self.config.training.max_grad_norm or math.inf
        kept = replicated(self.model)
        if kept is not None:
            kept.finish()
        # The one-pass optimizer clips in its step. PyTorch's needs a pass over the gradients before.
        one_pass = self.optimizer if isinstance(self.optimizer, AdamW) else None
        with torch.profiler.record_function("carpool::optimizer"):
            measured = grad_norm(self.parameters) if one_pass else clip_grad_norm(self.parameters, max_norm)
            norm = measured.item()
        # The device has been waited for: a ride that lacked a rank is known now, and what it gave is worth nothing.
        self.check_rides()
        if not (math.isfinite(losses.loss) and math.isfinite(norm)):
            self._stop_not_finite(losses.loss, norm, batches)
        with torch.profiler.record_function("carpool::optimizer"):
            if one_pass:
                one_pass.step(factor=clip_factor(measured, max_norm))
            else:
                self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            if self.bias is not None:
                self.bias.step()
            if kept is not None:
                kept.write()
        return losses, norm

    def _gradients(self, batches: Sequence[Batch]) -> Losses:
        """Of one step. Slots are kept inside of what may be repeated: no gradient outlives a repetition, and no load is
        counted twice."""
        if self.bias is not None:
            self.bias.forget()
        with self.slots_kept():
            return self.objective.backward(batches, self.loader.targets)

    def _stop_not_finite(self, loss: float, norm: float, batches: list[Batch]) -> None:
        def forward() -> None:
            for batch in batches:
                self.objective.forward(batch)

        with eagerly():
            where = explain(self.model, forward)
        latest = self.checkpoints.latest()
        good = f"the last good checkpoint is {latest}" if latest else "there is no checkpoint yet"
        raise NonFiniteError(
            f"step {self.step}: loss {loss:g}, gradient norm {norm:g}: {where}. No update was made; {good}. "
            "Lower training.learning_rate or training.max_grad_norm, or look at that layer's input"
        )
