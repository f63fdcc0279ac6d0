"""The main job: a `Config` in, a run directory out. Runs in every rank, inside an initialised process group.

    setup        data -> model (FSDP x EP) -> optimizer -> resume                        carpool/train/run/setup.py
    each step    batch -> loss, gradients, their norm -> all rows had a place?           here
                 -> finite? -> AdamW -> numbers of the step before -> was anybody asked to stop?
    now and then held-out loss and a sample; a checkpoint                                evaluate.py, finish.py
    at the end   held-out loss, checkpoint, comparison with another transport, summary   finish.py

Whatever decides what happens next (is the loss finite, does a checkpoint exist, shall the run stop) is known to all
ranks alike.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from functools import partial
from typing import TypeVar

import torch
from transformers.utils.logging import disable_progress_bar

from carpool.hf.compute.compiled import eagerly
from carpool.hf.observe.metrics import LaterRecord
from carpool.hf.seam.rides import rooms_of_rides
from carpool.optim import AdamW
from carpool.optim.clip import clip_factor, clip_grad_norm, grad_norm
from carpool.parallel.replicated import replicated
from carpool.train.config.schema import Config
from carpool.train.launch.stopping import STOP_SIGNALS, Stopped
from carpool.train.run.evaluate import evaluate
from carpool.train.run.finish import finish, leave, save
from carpool.train.run.numbers import StepNumbers, record_step, start_numbers, step_numbers
from carpool.train.run.setup import Setup
from carpool.train.steps.diagnose import NonFiniteError, determinism, explain
from carpool.train.steps.objective import Batch, Losses
from carpool.train.steps.optimizer import learning_rate

T = TypeVar("T")


def train(
    config: Config, *, compare: str | None = None, command: str = "carpool train", fixed: Collection[str] = ()
) -> None:
    """Train as `config` says, from the start or from a checkpoint.

    Args:
        compare: at the end, compare step times with this transport.
        command: what the user typed, for the record.
        fixed: settings that the user has said, by SECTION.KEY.

    Raises:
        ValueError: a configuration, data or checkpoint that cannot be used; nothing has been written then.
        NonFiniteError: the loss or its gradient is NaN or infinite; the last checkpoint is untouched.
        Stopped: a rank got SIGTERM or SIGUSR1; there is a checkpoint of the last step.
        UnwrittenError: the run came to its end, but not all of it could be written.
    """
    # transformers' own progress bars, one per rank, would write over the run's.
    disable_progress_bar()
    with determinism(config.training.full_determinism):
        run = Run(config, compare, command, fixed)
        try:
            with run.stop:
                run.loop()
                finish(run)
        except Exception as error:
            with suppress(Exception):  # a lost device has no numbers
                run.record(wait=False)
            # Why the run ends here, for its report.
            asked = error.signal if isinstance(error, Stopped) else None
            finite = False if isinstance(error, NonFiniteError) else None
            run.recorder.write("stopped", run.step, why=str(error) or type(error).__name__, signal=asked, finite=finite)
            raise
        finally:
            run.close()


class Run(Setup):
    """The steps of a run.

    Attributes:
        unrecorded: the step that was done last; None: its numbers are recorded.
        rode: the rides of the latest step, on their way to the host.
    """

    unrecorded: StepNumbers | None = None
    rode: LaterRecord

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
            losses, norm, signum = self.update()
            self.unrecorded = step_numbers(self, losses, norm, self.rode, begin)
            begin = time.perf_counter()
            last = self.step == self.last_step
            evaluates = training.eval_steps is not None and self.step % training.eval_steps == 0 and not last
            saves = training.save_steps is not None and self.step % training.save_steps == 0
            pauses = signum or evaluates or saves or self.placement.decides(self.step)
            if pauses or last:
                self.record()
            self.placement.after_step(self.step)
            if signum and not last:
                leave(self, signum)
            if evaluates:
                evaluate(self)
            if saves:
                save(self)
            if pauses:
                self.metrics.reset()
                begin = time.perf_counter()

    def record(self, wait: bool = True) -> None:
        """Record the step that was done last, if it is not recorded yet. `wait`: until its numbers are there."""
        numbers, self.unrecorded = self.unrecorded, None
        if numbers is not None and (wait or numbers.rode.arrived()):
            record_step(self, numbers)

    def update(self) -> tuple[Losses, float, int]:
        """The optimizer's step on the next batches: their losses, the norm of the gradient, and the signal that asked a
        rank to stop, 0 if none did. The same on all ranks. The step before is recorded meanwhile."""
        batches = [self.to_device(batch) for batch in next(self.data.train)]
        means, measured = self.with_room(partial(self._launch, batches))
        self.fit_room()
        # Here alone the host waits for the device, and what follows depends on it.
        *found, norm = torch.cat([means, measured.to(means).view(1)]).tolist()
        losses, asked = self.objective.losses(found, self.data.train.targets), found[2:]
        # A ride that lacked a rank is known now, and what it gave is worth nothing.
        self.check_rides()
        if not (math.isfinite(losses.loss) and math.isfinite(norm)):
            self._stop_not_finite(losses.loss, norm, batches)
        with torch.profiler.record_function("carpool::optimizer"):
            if self.consumed is not None:
                pass  # updated in the backward
            elif isinstance(self.optimizer, AdamW):
                self.optimizer.step(factor=clip_factor(measured, self._max_norm()))
            else:
                self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            if self.bias is not None:
                self.bias.step()
            if (kept := replicated(self.model)) is not None:
                kept.write()
        signum = max((signum for signum, ranks in zip(STOP_SIGNALS, asked, strict=True) if ranks), default=0)
        return losses, norm, signum

    def _launch(self, batches: Sequence[Batch]) -> tuple[torch.Tensor, torch.Tensor]:
        """As `_gradients`. Then the device has work, and the host does what would else keep it waiting."""
        found = self._gradients(batches)
        self.record()
        self.rode = start_numbers(self)
        return found

    def _gradients(self, batches: Sequence[Batch]) -> tuple[torch.Tensor, torch.Tensor]:
        """Of one step, on the device: means of the losses with how many ranks each signal asked to stop, and the norm.
        Slots are kept inside of what may be repeated: no gradient outlives a repetition, and no load is counted
        twice."""
        if self.bias is not None:
            self.bias.forget()
        asked = [float(self.stop.signum == signum) for signum in STOP_SIGNALS]
        consume = None if self.consumed is None else self._consume
        with self.slots_kept():
            means = self.objective.accumulate(batches, self.data.train.targets, asked, consume)
        if (kept := replicated(self.model)) is not None:
            kept.finish()
        with torch.profiler.record_function("carpool::optimizer"):
            if self.consumed is not None:
                return means, self.consumed.finish()
            # The one-pass optimizer clips in its step. PyTorch's needs a pass over the gradients before.
            if isinstance(self.optimizer, AdamW):
                return means, grad_norm(self.parameters, self.degrees.stage_size)
            return means, clip_grad_norm(self.parameters, self._max_norm(), self.degrees.stage_size)

    def _consume(self, loss: torch.Tensor) -> None:
        """Gradients that come from now on are used at once, unless rows had no place or the loss is not finite."""
        assert self.consumed is not None
        fine = torch.isfinite(loss)
        for room in rooms_of_rides(self.rides):
            fine &= ~room.overflowed().to(fine.device)
        self.consumed.begin(fine)

    def _max_norm(self) -> float:
        return self.config.training.max_grad_norm or math.inf

    def _stop_not_finite(self, loss: float, norm: float, batches: list[Batch]) -> None:
        def forward() -> None:
            for batch in batches:
                self.objective.forward(batch)

        with eagerly():
            where = explain(self.model, forward)
        latest = self.checkpoints.latest()
        made = "No update was made"
        if self.consumed is not None and math.isfinite(loss):
            made = "Gradients were consumed, so that parameters of this step may be wrong"
        good = f"the last good checkpoint is {latest}" if latest else "there is no checkpoint yet"
        raise NonFiniteError(
            f"step {self.step}: loss {loss:g}, gradient norm {norm:g}: {where}. {made}; {good}. "
            "Lower training.learning_rate or training.max_grad_norm, or look at that layer's input"
        )
