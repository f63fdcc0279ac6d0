"""The numbers of a step: for metrics.jsonl, for the terminal, and for the summary at the end."""

from __future__ import annotations

from dataclasses import asdict

import torch
import torch.distributed as dist

from carpool.hf.metrics import RideRecord
from carpool.train.run.environment import peak_memory
from carpool.train.run.state import RunState
from carpool.train.run.step import Losses, learning_rate


def record_step(run: RunState, losses: Losses, norm: float, rode: RideRecord, step_ms: float) -> int:
    """Record the step that has just been done. Collective.

    Returns:
        The signal that asked a rank to stop, the same on all ranks; 0 if none did.
    """
    training = run.config.training
    per_second = losses.tokens / step_ms * 1e3
    used = run.flops * per_second / run.world / run.peak if run.peak else None
    memory, signum = _most_over_ranks(peak_memory(run.device) - run.memory_before, run.stop.signum, run.device)
    run.totals["tokens"] += losses.tokens
    for key in ("bytes_remote", "bytes_remote_alltoall"):
        run.totals[key] += rode.record[key]
    record = {
        **asdict(losses),
        "learning_rate": learning_rate(run.step, training),
        "grad_norm": norm,
        "tokens_seen": run.totals["tokens"],
        "step_ms": step_ms,
        "tokens_per_second": per_second,
        "mfu": used,
        "hfu": used * _computed_again(run) if used is not None else None,
        **rode.record,
        "memory_peak_bytes": memory,
    }
    run.losses["final_loss"] = losses.loss
    run.step_records.append({"step": run.step, **record})
    if run.step % training.logging_steps == 0 or run.step in (run.start + 1, run.last_step):
        run.recorder.write("train", run.step, **record)
        run.recorder.write(
            "layers",
            run.step,
            load=rode.load_LE,
            copies=rode.copies_L,
            traffic_rows=rode.traffic_WW,
            rank_load=rode.rank_load_W,
            rank_ms=rode.rank_ms,
        )
        run.display.step(run.step, record)
    return signum


def _computed_again(run: RunState) -> float:
    """What is computed, recomputation included, over what a step needs: a forward is a third of it."""
    training = run.config.training
    if not training.gradient_checkpointing:
        return 1.0
    rest = run.size.active - (run.size.total - run.size.experts)
    return 1 + (1 - rest / run.size.active if training.checkpoint_rides == "keep" else 1) / 3


def _most_over_ranks(memory: int, signum: int, device: torch.device) -> tuple[int, int]:
    """The maximum of each over ranks. Asking all ranks whether one shall stop thus costs no reduction of its own."""
    most = torch.tensor([memory, signum], dtype=torch.float64, device=device)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    memory, signum = most.long().tolist()
    return memory, signum
