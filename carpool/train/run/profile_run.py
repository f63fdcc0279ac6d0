"""`carpool profile`: some steps of a run, the last of them under PyTorch's profiler, on every rank.

    RUN/profile/rank0.json.gz ...   each rank's Chrome trace, as PyTorch writes it
    RUN/profile/trace.json.gz       all of them in one, a process for each rank: open it in Perfetto (ui.perfetto.dev)
    RUN/profile/profile.json        what `carpool.profile` makes of them
    RUN/profile/run.json, ...       what ran, as `carpool train` says it
    RUN/profile.html                the page

The steps are the trainer's own: data, forward, backward, clipping, AdamW, and what is counted. They change nothing: the
learning rate is 0, nothing is evaluated or saved, and a run in RUN is left as it is.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, record_function
from transformers.utils.logging import disable_progress_bar

from carpool.metrics.host import synchronize
from carpool.parallel.ranks import gather
from carpool.profile.numbers import Profile, RankNumbers, measure, save_profile
from carpool.profile.rank_trace import STEP, load, merge, read
from carpool.report import write_profile
from carpool.train.checkpoints.manager import CheckpointManager
from carpool.train.checkpoints.resume import check_goes_on, checkpoint_to_resume, read_run_state
from carpool.train.config import Config
from carpool.train.plan.start_checks import check_start
from carpool.train.records.run_folder import CONFIG, DECISIONS, INFO, LAYOUT, METRICS
from carpool.train.run.loop import Run, update
from carpool.train.run.run import start_run

PROFILE = "profile"


def check_profile(config: Config, fixed: Collection[str]) -> None:
    """Raise ValueError for what the ranks of this machine would refuse before their first step
    (`carpool.train.plan.start_checks`). The run in the folder stays as it is, whatever it is."""
    folder = config.training.folder
    config = _as_profiled(config, folder, folder / PROFILE)
    resume = config.training.resume_from_checkpoint
    if resume is not None:
        check_goes_on(Path(resume), read_run_state(Path(resume)), config)
    # What an earlier profile has left in the folder goes.
    check_start(config, fixed, None if resume is None else Path(resume))


def profile(
    config: Config,
    *,
    steps: int = 5,
    compare: str | None = None,
    command: str = "carpool profile",
    fixed: Collection[str] = (),
) -> None:
    """Run `steps` steps as `config` says and record the last. In every rank, inside an initialised process group.

    Args:
        fixed: settings that the user has said, by SECTION.KEY; a plan leaves them.
        compare: folder of a run that has a profile, to be shown on the same page.
        command: what the user typed, for the record.

    Raises:
        ValueError: a configuration that cannot be used, or a profiler that sees nothing of the GPU.
    """
    if steps < 2:
        raise ValueError(f"--steps {steps} must be 2 or more: one to warm up, and one that is recorded")
    disable_progress_bar()
    _check_profiler()
    folder = config.training.folder
    recorded = folder / PROFILE
    if dist.get_rank() == 0:
        recorded.mkdir(parents=True, exist_ok=True)
        old = [METRICS, INFO, CONFIG, LAYOUT, "profile.json", "trace.json.gz"]
        for path in [*(recorded / name for name in old), *recorded.glob("rank*.json.gz")]:
            path.unlink(missing_ok=True)
    dist.barrier()
    run = start_run(_as_profiled(config, folder, recorded), None, command, fixed)
    try:
        own, plain_ms = _record(run, steps, recorded)
        everyone = gather((own.model_dump(), plain_ms))
        if run.main:
            run.records.display.close()
            ranks = [RankNumbers.model_validate(numbers) for numbers, _ in everyone]
            plain = max((ms for _, ms in everyone if ms is not None), default=None)
            found = Profile(
                about=_about(run.records.info), on_device=run.built.device.type == "cuda", plain_ms=plain, ranks=ranks
            )
            _write(run, found, folder, compare)
        dist.barrier()
    finally:
        run.close()


def _check_profiler() -> None:
    if dist.get_backend() == "nccl" and ProfilerActivity.CUDA not in torch.profiler.supported_activities():
        raise ValueError(
            "this build of PyTorch cannot record what runs on a GPU (torch.profiler has no CUDA activity); install one "
            "with CUPTI, or profile on the CPU with parallelism.device=cpu"
        )


def _as_profiled(config: Config, folder: Path, recorded: Path) -> Config:
    """The configuration of the steps: the run's own, in a folder of its own, which changes no weight."""
    training = config.training
    resume = training.resume_from_checkpoint
    if resume in ("last", "auto"):
        found = checkpoint_to_resume(resume, folder, CheckpointManager(folder, None))
        resume = None if found is None else str(found)
    changed = {
        "output_dir": str(recorded), "resume_from_checkpoint": resume, "learning_rate": 0.0, "report_to": (),
        "stop_at_step": None, "push_to_hub": False,
    }  # fmt: skip
    if resume is not None:
        # A run that has ended may be profiled, too.
        length = "max_steps" if training.max_steps is not None else "num_train_epochs"
        changed[length] = getattr(training, length) + 1
    return config.changed("training", **changed)


def _record(run: Run, steps: int, recorded: Path) -> tuple[RankNumbers, float | None]:
    """Run the steps, write this rank's trace, and measure it. Also the milliseconds of the last step of which the
    profiler saw nothing; None if there is none besides the very first."""
    cuda = run.built.device.type == "cuda"
    options: dict[str, Any] = {}
    if run.built.schedule.answer.name == "two-batch":
        # The thread of the second half is older than the profiler, which would not see it.
        options["experimental_config"] = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    rank, plain_ms = run.plan.machine.rank, None
    path = recorded / f"rank{rank}.json.gz"
    run.records.say(f"profiling: {steps - 1} steps to warm up, and one that is recorded")
    with torch.profiler.profile(
        activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])],
        schedule=torch.profiler.schedule(wait=steps - 2, warmup=1, active=1, repeat=1),
        on_trace_ready=lambda done: done.export_chrome_trace(str(path)),
        **options,
    ) as profiler:
        for number in range(steps):
            # All begin together, or the first rides would wait for whoever was late before the step.
            dist.barrier()
            synchronize(run.built.device)
            begin = time.perf_counter()
            with record_function(STEP):
                update(run)
                synchronize(run.built.device)
            if 0 < number < steps - 2:
                plain_ms = 1e3 * (time.perf_counter() - begin)
            profiler.step()
    found = read(load(path))
    if cuda and not found.on_device:
        raise ValueError(
            f"PyTorch's profiler saw no kernel on the GPU of rank {rank}: another profiler (nsys, ncu, dcgm) may "
            "hold it, or this user may not use it (the driver's NVreg_RestrictProfilingToAdminUsers)"
        )
    return measure(found, rank), plain_ms


def _write(run: Run, found: Profile, folder: Path, compare: str | None) -> None:
    recorded, say, ranks = folder / PROFILE, run.records.say, run.plan.machine.ranks
    save_profile(found, recorded / "profile.json")
    files = {rank: recorded / f"rank{rank}.json.gz" for rank in range(ranks)}
    if missing := [rank for rank, path in files.items() if not path.is_file()]:
        say(f"traces of ranks {missing} are on other machines, and not in trace.json.gz")
    merge({rank: path for rank, path in files.items() if path.is_file()}, recorded / "trace.json.gz")
    page = write_profile(folder, Path(compare) if compare is not None else None)
    mean = found.mean()
    say(
        f"step {mean.step:.2f} ms (mean of {ranks} ranks, under the profiler): rides {mean.ride:.2f} ms, exposed "
        f"{mean.exposed:.2f} ms = {100 * mean.exposed / mean.step:.1f} %; other communication exposed "
        f"{mean.other_exposed:.2f} ms; idle {mean.idle:.2f} ms"
    )
    say(f"page: {page}   trace for ui.perfetto.dev: {recorded / 'trace.json.gz'}")


def _about(info: Mapping[str, Any]) -> dict[str, str]:
    """What ran, for the page."""
    model, parallelism, schedule = info["model"], info["parallelism"], info[DECISIONS]["schedule"]
    sizes = ", ".join(f"{key} {parallelism[key]}" for key in ("world_size", "fsdp_size", "tp_size", "ep_size"))
    return {
        "command": info["command"],
        "model": f"{model['architecture']}, {len(model['moe_layers'])} MoE layers, {model['num_experts']} experts, "
        f"top-{model['num_experts_per_tok']}, hidden {model['hidden_size']}",
        "ranks": sizes,
        "device": str(info["environment"].get("device", "")),
        "transport": info["transport"]["name"],
        "schedule": f"{schedule['name']}, chunks {schedule['chunks']}",
        "recorded": info["started"],
    }
