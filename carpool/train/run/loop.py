"""The main job: a `Config` in, a run directory out. Runs in every rank, inside an initialised process group.

    set up      data -> model (FSDP x EP) -> optimizer -> resume
    each step   batch -> loss and gradients -> all rows had a place? -> global norm -> finite? -> AdamW -> metrics
    now and then  held-out loss and a sample; a checkpoint
    at the end  held-out loss, checkpoint, comparison with another transport, the block that a person can quote

Whatever decides what happens next (is the loss finite, does a checkpoint exist) is known to all ranks alike.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from transformers.utils.logging import disable_progress_bar

from carpool.hf.compiled import eagerly
from carpool.hf.expert_parallel import buffers_of_rides
from carpool.hf.layouts import is_logical, logical_order, slots_kept
from carpool.hf.metrics import RideRecord
from carpool.parallel.clip import clip_grad_norm
from carpool.report import text_block
from carpool.report.schema import Train
from carpool.report.steps import summarise_steps
from carpool.train.checkpoints.manager import export_pretrained
from carpool.train.config.schema import Config
from carpool.train.data.loader import TokenMean, count_targets
from carpool.train.run.determinism import determinism
from carpool.train.run.diagnose import NonFiniteError, explain
from carpool.train.run.environment import peak_memory
from carpool.train.run.files import SUMMARY, replace_text
from carpool.train.run.probe import compare, summarise
from carpool.train.run.room import (
    make_room,
    random_state,
    restore_random_state,
)
from carpool.train.run.sample import sample
from carpool.train.run.setup import Setup
from carpool.train.run.step import Batch, Losses, learning_rate

T = TypeVar("T")
log = logging.getLogger("carpool")


def train(config: Config, *, compare: str | None = None, command: str = "carpool train") -> None:
    """Train as `config` says, from the start or from a checkpoint.

    Args:
        compare: at the end, compare step times with this transport.
        command: what the user typed, for the record.

    Raises:
        ValueError: a configuration, data or checkpoint that cannot be used; nothing has been written then.
        NonFiniteError: the loss or its gradient is NaN or infinite; the last checkpoint is untouched.
    """
    # transformers' own progress bars, one per rank, would write over the run's.
    disable_progress_bar()
    with determinism(config.training.full_determinism):
        run = _Run(config, compare, command)
        try:
            run.loop()
            run.finish()
        except Exception as error:
            run.record_failure(error)
            raise
        finally:
            run.close()


class _Run(Setup):
    """The steps of a run."""

    # -- the loop ---------------------------------------------------------------------------------------------

    def loop(self) -> None:
        training = self.config.training
        if training.eval_on_start and self.start == 0:
            self.evaluate()
        self.metrics.reset()
        begin = time.perf_counter()
        while self.step < self.last_step:
            self.step += 1
            for group in self.optimizer.param_groups:
                group["lr"] = learning_rate(self.step, training)
            losses, norm = self.update()
            rode = self.metrics.collect(self.device)
            now = time.perf_counter()
            self._record_step(asdict(losses), norm, rode, 1e3 * (now - begin))
            self.placement.after_step(self.step, rode)
            if training.eval_steps and self.step % training.eval_steps == 0 and self.step < self.last_step:
                self.evaluate()
            if training.save_steps and self.step % training.save_steps == 0:
                self.save()
            self.metrics.reset()
            begin = time.perf_counter()

    def update(self) -> tuple[Losses, float]:
        """The optimizer's step on the next batches: their losses, and the norm of the gradient."""
        batches = [self._to_device(batch) for batch in next(self.loader)]
        losses = self._with_room(partial(self._gradients, batches))
        max_norm = self.config.training.max_grad_norm or math.inf
        norm = clip_grad_norm(self.model.parameters(), max_norm).item()
        # The device has been waited for: a ride that lacked a rank is known now, and what it gave is worth nothing.
        self._check_rides()
        if not (math.isfinite(losses.loss) and math.isfinite(norm)):
            self._stop_not_finite(losses.loss, norm, batches)
        with torch.profiler.record_function("carpool::optimizer"):
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        return losses, norm

    def evaluate(self) -> None:
        """Held-out loss and a sample of text."""
        training = self.config.training
        if len(self.eval_loader):
            mean = TokenMean()
            self.model.eval()
            with torch.no_grad(), self._slots_kept():
                for batch in self.eval_loader:
                    batch = self._to_device(batch)
                    targets = count_targets(batch["labels"])
                    ce, _ = self._with_room(partial(self.objective.forward, batch))
                    mean.add(ce / max(1, targets), targets)
            self.model.train()
            self._check_rides()
            loss, tokens = mean.value(self._sum_over_ranks)
            tokens //= self.degrees.tp
            self.recorder.write("eval", self.step, loss=loss, tokens=tokens)
            if self.losses["first_eval_loss"] is None:
                self.losses["first_eval_loss"] = loss
            self.losses["final_eval_loss"] = loss
            self.display.say(f"step {self.step}: held-out loss {loss:.4f} over {tokens:,} tokens")
        if training.sample_prompt is not None:
            with eagerly(), self.objective.cast(self.device):
                text = sample(
                    self.model,
                    self.tokenizer,
                    training.sample_prompt,
                    max_new_tokens=training.sample_tokens,
                    seed=training.seed,
                    context=self.config.data.sequence_length,
                )
            self.recorder.write("sample", self.step, prompt=training.sample_prompt, text=text)

    def save(self) -> None:
        state = {"totals": self.totals, "losses": self.losses, "loader": self.loader.state_dict()}
        state["placement"] = self.placement.state()
        to_logical = None if is_logical(self.model) else partial(logical_order, self.model)
        saved = self.checkpoints.save(
            self.step,
            self.model,
            self.optimizer,
            state,
            to_logical=to_logical,
            write_files=self.placement.write_files,
        )
        path = str(saved.path.relative_to(self.folder))
        self.recorder.write("checkpoint", self.step, path=path, bytes=saved.bytes, seconds=saved.seconds)
        self.display.say(f"step {self.step}: checkpoint {saved.path}")

    def finish(self) -> None:
        """What comes after the last step."""
        training = self.config.training
        self.placement.finish(self.step)
        self.evaluate()
        if not training.save_steps or self.step % training.save_steps:
            self.save()
        if training.save_pretrained and self.step == training.max_steps:
            to_logical = None if is_logical(self.model) else partial(logical_order, self.model)
            exported = export_pretrained(self.model, self.folder / "model", to_logical=to_logical)
            self.display.say(f"model for transformers: {exported}")
        comparison = self._compare()
        self.display.close()
        summary = self._summary(comparison)
        if self.main:
            replace_text(self.folder / SUMMARY, json.dumps(summary, indent=1) + "\n")
            self.display.say("")
            self.display.say(text_block(summary, self.info, self.step_records))
            self.display.say(f"\nrun directory: {self.folder}   report: carpool report {self.folder}")

    def record_failure(self, error: Exception) -> None:
        """Why the run ends here, for its report."""
        with suppress(OSError):  # the disk itself may be what failed
            self.recorder.write("stopped", self.step, why=str(error) or type(error).__name__)

    def close(self) -> None:
        self.placement.close()
        self.watchdog.stop()
        self.display.close()
        self.recorder.close()

    # -- parts ------------------------------------------------------------------------------------------------

    def _slots_kept(self) -> AbstractContextManager[None]:
        return slots_kept(self.model, self.config.moe.fp8_hold_weights, self.config.placement.prefetch)

    def _gradients(self, batches: Sequence[Batch]) -> Losses:
        """Of one step. Slots are kept inside of what may be repeated: no gradient outlives a repetition."""
        with self._slots_kept():
            return self.objective.backward(batches)

    def _with_room(self, compute: Callable[[], T]) -> T:
        """What `compute` returns once all rows had a place in the transport's buffers: until then these grow, and it
        is repeated from the same random state."""
        buffers = buffers_of_rides(self.rides)
        if not buffers:
            return compute()
        before, mark = random_state(self.device), self.placement.mark()
        while True:
            result = compute()
            room = make_room(buffers, self.most_tokens, self.device)
            if room is None:
                return result
            self.model.zero_grad(set_to_none=True)
            restore_random_state(before, self.device)
            self.metrics.reset()
            self.placement.rewind(mark)
            self.recorder.write("repeat", self.step, **room._asdict())
            kept = f", {room.arena_bytes / 2**20:,.0f} MiB for the backward" if room.arena_bytes else ""
            self.display.say(
                f"step {self.step}: more rows than buffers hold: now {room.capacity:,} a slab{kept}, and once more"
            )

    def _check_rides(self) -> None:
        """Raise RankMissingError if a ride since the last call lacked a rank. Looks at host memory."""
        for buffers in buffers_of_rides(self.rides):
            buffers.check()

    def _record_step(self, losses: dict[str, Any], norm: float, rode: RideRecord, step_ms: float) -> None:
        training = self.config.training
        per_second = losses["tokens"] / step_ms * 1e3
        used = self.flops * per_second / self.world / self.peak if self.peak else None
        again = 1.0
        if training.gradient_checkpointing:
            kept = training.checkpoint_rides == "keep"
            own = self.size.active - (self.size.total - self.size.experts)
            again += (1 - own / self.size.active if kept else 1) / 3
        self.totals["tokens"] += losses["tokens"]
        for key in ("bytes_remote", "bytes_remote_alltoall"):
            self.totals[key] += rode.record[key]
        record = {
            **losses,
            "learning_rate": learning_rate(self.step, training),
            "grad_norm": norm,
            "tokens_seen": self.totals["tokens"],
            "step_ms": step_ms,
            "tokens_per_second": per_second,
            "mfu": used,
            "hfu": used * again if used is not None else None,
            **rode.record,
            "memory_peak_bytes": int(self._max_over_ranks(peak_memory(self.device) - self.memory_before)),
        }
        self.losses["final_loss"] = losses["loss"]
        self.step_records.append({"step": self.step, **record})
        if self.step % training.logging_steps == 0 or self.step in (self.start + 1, self.last_step):
            self.recorder.write("train", self.step, **record)
            self.recorder.write(
                "layers", self.step, load=rode.load_LE, copies=rode.copies_L, traffic_rows=rode.traffic_WW
            )
            self.display.step(self.step, record)

    def _compare(self) -> dict[str, Any] | None:
        if self.compare_with is None:
            return None
        layer = self.rides[0]
        ours = layer.transport.name if layer.transport is not None else layer.requested
        batches = [self._to_device(batch) for batch in next(self.loader)]
        self.display.say(f"comparing {ours} with {self.compare_with} in interleaved probe steps")
        result = compare(
            self.model,
            (ours, self.compare_with),
            lambda: self.objective.backward(batches),
            self.metrics,
            self.config.training.compare_repetitions,
            self.device,
            self.options,
        )
        for name, values in result.items():
            self.recorder.write("probe", self.step, transport=name, **values)
        return summarise(result, ours, self.compare_with)

    def _summary(self, comparison: dict[str, Any] | None) -> dict[str, Any]:
        return {
            "steps": self.step,
            **self.totals,
            **self.losses,
            **summarise_steps([Train.model_validate(r) for r in self.step_records], {self.start + 1}),
            "num_experts_per_tok": self.top_k,
            "compare": comparison,
            "exact": self.info["exact"],
            "lossy_reasons": self.info["lossy_reasons"],
            "buffer_bytes": sum(buffers.size for buffers in buffers_of_rides(self.rides)),
        }

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

    def _to_device(self, batch: Batch) -> Batch:
        return {name: value.to(self.device, non_blocking=True) for name, value in batch.items()}

    def _sum_over_ranks(self, sums: torch.Tensor) -> None:
        total = sums.to(self.device)
        dist.all_reduce(total)
        sums.copy_(total.cpu())

    def _max_over_ranks(self, value: float) -> float:
        number = torch.tensor([float(value)], dtype=torch.float64, device=self.device)
        dist.all_reduce(number, op=dist.ReduceOp.MAX)
        return float(number.item())
