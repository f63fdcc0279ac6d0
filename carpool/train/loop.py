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
import os
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from transformers.utils.logging import disable_progress_bar

from carpool.hf import install, rides, set_experts, set_transport
from carpool.hf.build import build_model
from carpool.hf.drops import drop_choices, route_in_float32
from carpool.hf.expert_parallel import ExpertRides, buffers_of_rides
from carpool.hf.freeze import freeze_dense
from carpool.hf.layouts import is_logical, logical_order, physical_order, set_layout, slots_kept
from carpool.hf.limit import limit_routing
from carpool.hf.metrics import RideMetrics, RideRecord
from carpool.hf.names import name_layers
from carpool.hf.shared import compute_shared_beside
from carpool.memory.recompute import keep_rides
from carpool.parallel.clip import clip_grad_norm
from carpool.report import text_block
from carpool.train.about import say_hello, write_run
from carpool.train.checkpoints.files import read_state
from carpool.train.checkpoints.manager import CheckpointManager, export_pretrained, load
from carpool.train.data import prepare
from carpool.train.determinism import determinism
from carpool.train.diagnose import NonFiniteError, explain
from carpool.train.display import Display
from carpool.train.environment import peak_memory
from carpool.train.flops import flops_per_token, model_size, peak_flops
from carpool.train.loader import EvalLoader, TokenMean, TrainLoader, count_targets
from carpool.train.model import distributed_config, expert_counts, meta_model, model_source, top_k_of
from carpool.train.moving.runtime import Placement, first_layouts
from carpool.train.moving.solve import facts_of
from carpool.train.probe import compare, summarise
from carpool.train.record import Recorder, check_trackers
from carpool.train.resume import checkpoint_to_resume
from carpool.train.room import (
    make_room,
    most_tokens,
    nvlink_options,
    random_state,
    restore_random_state,
)
from carpool.train.sample import sample
from carpool.train.schedules import choose_schedule, rides_first
from carpool.train.schema import Config
from carpool.train.stages import choose_stages
from carpool.train.step import Batch, Losses, Objective, learning_rate, make_optimizer
from carpool.train.summary import summarise_steps
from carpool.train.tokenizer import load_tokenizer
from carpool.train.watchdog import Watchdog
from carpool.transport import check_transport

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
        finally:
            run.close()


class _Run:
    """Everything that lives as long as a run."""

    def __init__(self, config: Config, compare_with: str | None, command: str) -> None:
        training, moe = config.training, config.moe
        self.config, self.compare_with = config, compare_with
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.main = self.rank == 0
        cuda = dist.get_backend() == "nccl"
        self.device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
        self.memory_before = peak_memory(self.device)
        self.folder = Path(training.output_dir)
        self.checkpoints = CheckpointManager(self.folder, training.save_total_limit)
        check_trackers(training.report_to)
        # As far as one rank can tell alone; together they look again when the model is there.
        for name in (moe.transport, compare_with or "auto"):
            check_transport(name, None)
        resume = checkpoint_to_resume(training.resume_from_checkpoint, self.folder, self.checkpoints)

        self.tokenizer = load_tokenizer(config.data.tokenizer, config.model.path, config.data.eos_token)
        self.corpus = prepare(
            config.data, self.tokenizer, build=int(os.environ.get("LOCAL_RANK", "0")) == 0, barrier=dist.barrier
        )
        source = model_source(config, self.tokenizer)
        blueprint = meta_model(source)
        # Not the sharded model's class, which FSDP renames.
        self.architecture = type(blueprint).__name__
        counts = expert_counts(blueprint)
        self.degrees = config.parallelism.resolve(self.world, min(counts.values()))
        self.bf16 = cuda if training.bf16 is None else training.bf16
        dp_rank = self.rank // self.degrees.tp_size
        share = {"sequence_length": config.data.sequence_length, "dp_rank": dp_rank, "dp_size": self.degrees.dp_size}
        self.loader = TrainLoader(
            self.corpus.train,
            fingerprint=self.corpus.fingerprint,
            batch_size=training.per_device_train_batch_size,
            accumulation=training.gradient_accumulation_steps,
            seed=training.seed,
            **share,
        )
        self.eval_loader = EvalLoader(
            self.corpus.eval,
            batch_size=training.per_device_eval_batch_size,
            max_sequences=config.data.eval_max_sequences,
            pad_id=self.tokenizer.eos_id,
            **share,
        )

        self.model = build_model(
            source,
            distributed_config=distributed_config(self.degrees, self.bf16),
            dtype=getattr(torch, config.model.dtype or "float32"),
            seed=training.seed,
            attn_implementation=config.model.attn_implementation,
            experts_implementation=config.model.experts_implementation,
        )
        install(self.model)
        if training.gradient_checkpointing:
            keep = {"context_fn": keep_rides} if training.checkpoint_rides == "keep" else {}
            self.model.gradient_checkpointing_enable({"use_reentrant": False, **keep})
        saved = read_state(resume)["state"] if resume is not None else {}
        layouts, self.layout_source = first_layouts(config, rides(self.model), saved)
        set_layout(self.model, layouts)
        if moe.router_float32:
            route_in_float32(self.model)
        # Before a checkpoint is loaded: similarities are of what the run started from, also when it goes on.
        self.limits_lossy = limit_routing(self.model, moe.limits(next(iter(rides(self.model).values())).num_ranks))
        self.limits_lossy += drop_choices(self.model, moe.drops, top_k_of(self.model))
        if training.freeze == "dense":
            freeze_dense(self.model)
        self.options, self.most_tokens = nvlink_options(config, self.degrees), most_tokens(config, self.degrees)
        set_transport(self.model, moe.transport, options=self.options)
        self.experts_lossy = set_experts(self.model, moe.experts, recompute=moe.recompute_experts)
        self.top_k = top_k_of(self.model)
        self.rides: list[ExpertRides] = list(rides(self.model).values())
        name_layers(self.model)
        if (asked := moe.asked_schedule()) is not None:
            # Before there are buffers: those of chunks are smaller.
            for own in self.rides:
                own.set_schedule(asked)
        for own in self.rides:
            own.prepare(self.top_k, self.model.config.get_text_config().hidden_size)
        if compare_with is not None:
            check_transport(compare_with, self.rides[0].group)
        measured: dict[str, Any] = {
            "tokens": -(-training.per_device_train_batch_size * config.data.sequence_length // self.degrees.tp_size),
            "top_k": self.top_k,
            "dtype": torch.bfloat16 if self.bf16 else self.model.dtype,
            "device": self.device,
            "folders": [resume.parent.parent, self.folder] if resume is not None else [],
        }
        self.stages = choose_stages(moe.expert_stages, self.rides, **measured)
        if self.stages is not None:
            set_experts(self.model, moe.experts, choices=self.stages.choices, recompute=moe.recompute_experts)
        hidden = self.model.config.get_text_config().hidden_size
        self.schedule = choose_schedule(moe.asked_schedule(), self.rides, hidden=hidden, **measured)
        compute_shared_beside(self.model, self.schedule.schedule.name != "none")
        for own in self.rides:
            own.prepare(self.top_k, hidden)
        self.watchdog = Watchdog(lambda: buffers_of_rides(self.rides))
        coef = moe.router_aux_loss_coef
        self.objective = Objective(
            self.model,
            top_k=self.top_k,
            aux_coef=getattr(self.model.config, "router_aux_loss_coef", 0.0) or 0.0 if coef is None else coef,
            dp_size=self.degrees.dp_size,
            autocast=torch.bfloat16 if self.bf16 and self.degrees.dp_size == 1 else None,
            balance_layers=moe.balance == "layer",
            two_batch=self.schedule.schedule.name == "two-batch",
            rides_first=rides_first(self.model, moe, self.degrees.fsdp_size),
        )
        self.optimizer = make_optimizer(self.model, training)
        self.metrics = RideMetrics(self.model)
        # Drop-out and the like differ between ranks with different data, and only between them.
        torch.manual_seed(training.seed + dp_rank)

        self.step = 0
        # Both go into checkpoints: a resumed run's summary is of the whole run.
        self.totals = {"tokens": 0, "bytes_remote": 0, "bytes_remote_alltoall": 0}
        self.losses: dict[str, float | None] = {"final_loss": None, "first_eval_loss": None, "final_eval_loss": None}
        if resume is not None:
            from_logical = None if is_logical(self.model) else partial(physical_order, self.model)
            state = load(resume, self.model, self.optimizer, from_logical=from_logical)
            self.step, self.totals, self.losses = state["step"], state["totals"], state["losses"]
            self.loader.load_state_dict(state["loader"])
        self.start = self.step
        self.last_step = min(training.max_steps, training.stop_at_step or training.max_steps)
        if self.step >= self.last_step:
            raise ValueError(
                f"{resume} is at step {self.step} already, and this run ends at step {self.last_step}: nothing to do; "
                "raise training.max_steps (or training.stop_at_step) to go on"
            )

        self.placement = Placement(
            config,
            self.model,
            self.optimizer,
            facts_of(self),
            self.folder,
            lambda text: self.display.say(text),
            lambda *args, **fields: self.recorder.write(*args, **fields),
            saved,
            resume,
        )
        self.size = model_size(self.model, counts, self.top_k)
        self.flops = flops_per_token(self.size, config.data.sequence_length)
        self.peak, self.peak_source = peak_flops(self.device, training.peak_flops)
        self.step_records: list[dict[str, Any]] = []

        if self.main:
            self.folder.mkdir(parents=True, exist_ok=True)
        dist.barrier()
        settings = config.model_dump(mode="json")
        self.recorder = Recorder(self.folder, self.main, training.report_to, settings, training.max_steps)
        self.display = Display(self.main, training.max_steps, self.step)
        self.info = write_run(self, command, resume)
        say_hello(self, resume)
        self.watchdog.start()

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
            tokens //= self.degrees.tp_size
            self.recorder.write("eval", self.step, loss=loss, tokens=tokens)
            if self.losses["first_eval_loss"] is None:
                self.losses["first_eval_loss"] = loss
            self.losses["final_eval_loss"] = loss
            self.display.say(f"step {self.step}: held-out loss {loss:.4f} over {tokens:,} tokens")
        if training.sample_prompt is not None:
            with self.objective.cast(self.device):
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
            (self.folder / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
            self.display.say("")
            self.display.say(text_block(summary, self.info))
            self.display.say(f"\nrun directory: {self.folder}   report: carpool report {self.folder}")

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
        self.step_records.append(record)
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
            **summarise_steps(self.step_records),
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
