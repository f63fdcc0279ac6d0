"""The numbers of a step: for metrics.jsonl, for the terminal, and for the summary at the end.

Those of step n are recorded while step n+1 computes, so that nothing waits for them:

    the host      launches step n+1   records step n, starts numbers of n+1   waits for the norm of n+1   launches n+2
    the device              computes step n+1 ....................................................
"""

from __future__ import annotations

import time
from dataclasses import asdict

from carpool.hf.observe.metrics import LaterRecord
from carpool.train.plan.auto_plan import MEASURED, SKIPPED
from carpool.train.records.environment import peak_memory
from carpool.train.run.run import Run, StepNumbers
from carpool.train.run.run_records import record_plan
from carpool.train.steps.objective import Losses
from carpool.train.steps.optimizer import learning_rate


def start_numbers(run: Run) -> LaterRecord:
    """The numbers of the rides of the step that is being computed, and its peak of memory up to here. Collective; waits
    for the end of its rides if they are timed."""
    device = run.built.device
    return run.built.metrics.start(device, beside=(peak_memory(device) - run.memory_before,))


def step_numbers(run: Run, losses: Losses, norm: float, rode: LaterRecord, begin: float) -> StepNumbers:
    """The numbers of the step that was just done, which began at `begin` (`time.perf_counter`)."""
    return StepNumbers(run.step, run.data.train.tokens, losses, norm, rode, 1e3 * (time.perf_counter() - begin))


def record_step(run: Run, numbers: StepNumbers) -> None:
    """Record them. Waits until they are there."""
    training, records, info = run.config.training, run.records, run.records.info
    step, tokens, losses, norm, later, step_ms = numbers
    rode = later.read()
    run.placement.count(rode)
    per_second = tokens / step_ms * 1e3
    flops, peak = info["predicted"]["flops_per_token"], info["peak_flops"]
    used = flops * per_second / run.plan.machine.ranks / peak if peak else None
    run.totals["tokens"] += losses.tokens
    for key in ("bytes_remote", "bytes_remote_alltoall", "bytes_network"):
        if key in rode.record:
            run.totals[key] = run.totals.get(key, 0) + rode.record[key]
    record = {
        **asdict(losses),
        "learning_rate": learning_rate(step, training),
        "grad_norm": norm,
        "tokens_seen": run.totals["tokens"],
        "bytes_remote_seen": run.totals["bytes_remote"],
        "bytes_remote_alltoall_seen": run.totals["bytes_remote_alltoall"],
        **({"bytes_network_seen": run.totals["bytes_network"]} if "bytes_network" in run.totals else {}),
        "step_ms": step_ms,
        "tokens_per_second": per_second,
        "mfu": used,
        "hfu": used * _computed_again(run) if used is not None else None,
        **rode.record,
        "memory_peak_bytes": int(rode.most[0]),
    }
    run.losses["final_loss"] = losses.loss
    records.steps.append({"step": step, **record})
    if step % training.logging_steps == 0 or step in (run.start + 1, run.last_step):
        records.write("train", step, **record)
        records.write(
            "layers",
            step,
            load=rode.load_LE,
            copies=rode.copies_L,
            traffic_rows=rode.traffic_WW,
            rank_load=rode.rank_load_W,
            rank_ms=rode.rank_ms,
        )
        records.display.step(step, record)
    if run.plan.searched is not None and len(records.steps) == SKIPPED + MEASURED:
        record_plan(records, run.plan.searched.answer)


def _computed_again(run: Run) -> float:
    """What is computed, recomputation included, over what a step needs: a forward is a third of it."""
    memory = run.config.memory
    if memory.dense != "recompute":
        return 1.0
    size = run.plan.blueprint.size
    rest = size.active - (size.total - size.experts)
    return 1 + (1 - rest / size.active if memory.sums != "recompute" else 1) / 3
