"""`carpool bench model`: how fast a whole training step of a real configuration is, and where its time goes.

    before        what each contender will take of memory is predicted; what cannot fit is refused
    each group    contenders whose models fit into memory together: built, warmed up, and then timed in turns
    each round    a contender takes some steps back to back, as training does; the order turns about
    at the end    each contender takes one more step under PyTorch's profiler (`carpool.profile.kinds`)

A round begins with all ranks together and nothing to do on the device, and ends when the device has done all; the time
of a step is that of the slowest rank, divided by the number of steps. "host" is how long the host works for it: without
what it waits for the device. Of steps that are CUDA graphs it is taken from one more step after each round, in which
the device is never behind (`carpool.bench.timing.host_times`).

Files: DIR/model.json, every round and where it ran; DIR/model.png; DIR/CONTENDER/, what the trainer says of its run.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function
from transformers.utils.logging import disable_progress_bar

from carpool.bench.contest import RankBenchmark, attempt_together
from carpool.bench.model.model_contenders import Contender, check_routing, free_memory, make_contender
from carpool.bench.model.model_results import Case, KindRow, Row, Sizes, StepTimes, Times, roofline_ms, show, work_of
from carpool.bench.model.model_settings import ModelSettings
from carpool.bench.timing import host_times, rounds
from carpool.metrics.host import slowest, synchronize
from carpool.parallel.ranks import gather
from carpool.planner.search.plan import USABLE
from carpool.profile.kinds import IDLE, KINDS, TimeByKind, time_by_kind
from carpool.profile.rank_trace import STEP, load
from carpool.train.blueprint import Blueprint, flops_per_token, peak_flops
from carpool.train.data.tokenizer import tokenizer_of
from carpool.train.launch.machine import find_machine
from carpool.train.lora import trained_of
from carpool.train.plan.estimate import Memory, MemoryEstimate
from carpool.train.plan.transport_choice import expected_transport
from carpool.train.steps.diagnose import determinism

# More than the eager steps before a capture (`carpool.train.plan.compile_and_capture`).
WARMUP = 4
# Contenders take the same first step; losses and norms that differ by more are of different computations. Transformers'
# balance loss is of each rank's own tokens, and bfloat16 rounds.
ALIKE = {"loss": 2e-5, "grad_norm": 1e-3}
CLOSE = {"loss": 0.02, "grad_norm": 0.02}
PLOT = "write_steps"


@dataclass
class _Running:
    """A contender at work.

    Attributes:
        own_bytes: what it keeps between steps, in PyTorch's memory.
    """

    contender: Contender
    own_bytes: int
    rounds: list[StepTimes] = field(default_factory=list)
    peak_bytes: int = 0
    reserved_bytes: int = 0


class ModelBenchmark:
    """Measures all contenders on the default process group; all ranks construct and call it alike."""

    def __init__(self, settings: ModelSettings, device: torch.device, command: str) -> None:
        self.settings, self.device, self.command = settings, device, command
        self.world, self.main = dist.get_world_size(), dist.get_rank() == 0
        self.configs = {name: settings.config_of(name) for name in settings.contenders}
        self.cannot: dict[str, str] = {}
        config = settings.config_of(None)
        tokenizer = tokenizer_of(config)
        self.blueprint = Blueprint.of_config(config, tokenizer)
        self.counts, self.size = self.blueprint.expert_counts, self.blueprint.size
        self.adapted, self.trained = config.adapter.is_used, trained_of(self.blueprint, config)
        check_routing(self.counts, self.blueprint.top_k, settings.routing, self.world)
        self.degrees = config.parallelism.resolve(self.world, min(self.counts.values()))
        self.machine = find_machine(config.parallelism, device)
        self.peak, self.peak_source = peak_flops(device, config.training.peak_flops)
        self.bf16 = config.training.computes_in_bf16(device.type == "cuda")
        training, self.length = config.training, config.data.sequence_length
        sequences = training.rank_sequences
        self.tokens = sequences * self.length * self.degrees.dp // self.world
        self.training, self.dtype = training, config.model.stored_dtype

    def measure(self) -> Case:
        """Everything."""
        # Of all ranks the least.
        memory, estimates = min(gather(self.machine.memory)), {}
        for name in self.configs:
            try:
                estimates[name] = self._estimate(name)
            except ValueError as error:
                if name not in self.settings.own:
                    raise
                self.cannot[name] = str(error).splitlines()[0]
        warnings = check_room(estimates, memory)
        groups = groups_that_fit(estimates, memory)
        case = self._case(groups, warnings, estimates)
        for name, estimate in estimates.items():
            self._say(f"{name}: {gib(estimate['total'])} of {gib(memory)} a rank are predicted")
        for text in warnings:
            self._say(f"warning: {text}")
        with determinism(self.training.full_determinism):
            for group in groups:
                self._measure_group([row for row in case.rows if row.label in group], case)
        case.compare()
        rounded = self.bf16 or self.dtype != "float32"
        case.different = _differences(
            case.rows,
            {row.label: CLOSE if rounded or self.settings.is_theirs(row.label) else ALIKE for row in case.rows},
        )
        return case

    def _estimate(self, name: str) -> Memory:
        way, config = "alltoall", self.configs[name]
        degrees = config.parallelism.resolve(self.world, min(self.counts.values()))
        if not self.settings.is_theirs(name):
            way = expected_transport(config, degrees, self.blueprint, self.machine).answer
        return MemoryEstimate(config, degrees, self.blueprint.model, self.machine.cuda)(way, "fsdp")

    def _case(self, groups: list[list[str]], warnings: list[str], estimates: dict[str, Memory]) -> Case:
        text = self.blueprint.model.config.get_text_config()
        sizes = Sizes(
            model=self.size,
            trained=self.trained,
            degrees=self.degrees,
            tokens=self.tokens,
            sequence=self.length,
            hidden=text.hidden_size,
            vocabulary=text.vocab_size,
            layers=text.num_hidden_layers,
            moe_layers=len(self.counts),
            num_experts=max(self.counts.values()),
            top_k=self.blueprint.top_k,
            number_bytes=2 if self.bf16 else 4,
            parameter_bytes=4 if self.adapted else {"bfloat16": 2, "float16": 2}.get(self.dtype, 4),
        )
        rooflines = {
            kind: roofline_ms(work, self.machine.hardware, self.machine.topology, self.peak)
            for kind, work in work_of(sizes).items()
        }
        rows = [
            Row(
                label=name,
                predicted_bytes=estimates[name]["total"] if name in estimates else 0,
                unavailable=self.cannot.get(name),
                changes=list(self.settings.changes(name)),
            )
            for name in self.configs
        ]
        return Case(
            model=Path(self.settings.model).stem if Path(self.settings.model).is_file() else self.settings.model,
            architecture=self.blueprint.architecture,
            parameters=self.size.total,
            active=self.size.active,
            layers=sizes.layers,
            num_ranks=self.world,
            tokens=self.tokens,
            sequence=self.length,
            routing=self.settings.routing,
            flops_per_token=flops_per_token(self.size, self.length, self.trained),
            peak_flops=self.peak,
            peak_source=self.peak_source,
            rooflines=rooflines,
            groups=groups,
            warnings=warnings,
            rows=rows,
        )

    def _measure_group(self, rows: list[Row], case: Case) -> None:
        running: dict[str, _Running] = {}
        try:
            for row in rows:
                self._say(f"{row.label}: building, and {WARMUP} steps to warm up")
                theirs, start = self.settings.is_theirs(row.label), partial(self._start, row, running)
                row.unavailable = attempt_together(start, dist.group.WORLD, self.device, theirs)
                if row.unavailable:
                    self._say(f"{row.label} cannot run: {row.unavailable}")
            for _, order in rounds(running, self.settings.rounds, 0):
                for name in order:
                    self._time(running[name])
            for row in rows:
                if row.label in running:
                    self._note(row, running[row.label], case)
        finally:
            for one in running.values():
                one.contender.close()
            running.clear()
            free_memory(self.device)

    def _start(self, row: Row, running: dict[str, _Running]) -> None:
        before = self._allocated()
        theirs, config = self.settings.is_theirs(row.label), self.configs[row.label]
        contender = make_contender(theirs, config, self.settings.routing, self.command)
        try:
            state = contender.state()
            row.what = state.what
            row.changes += state.lossy
            for number in range(WARMUP):
                begin = time.perf_counter()
                found = contender.take_step()
                synchronize(self.device)
                state = contender.state()
                if number == 0:
                    row.loss, row.grad_norm = found
                    row.first_step_seconds = time.perf_counter() - begin
            # A capture may have failed.
            row.what, row.captured, row.load = state.what, state.captured, state.load
        except BaseException:
            contender.close()
            raise
        running[row.label] = _Running(contender, self._allocated() - before)

    def _time(self, one: _Running) -> None:
        before = self._allocated()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        one.rounds.append(time_steps(one.contender, self.settings.steps, self.device))
        if self.device.type == "cuda":
            one.reserved_bytes = torch.cuda.max_memory_reserved(self.device)
            other = before - one.own_bytes
            peak = torch.cuda.max_memory_allocated(self.device) - other + one.contender.state().buffer_bytes
            one.peak_bytes = max(one.peak_bytes, peak)

    def _note(self, row: Row, one: _Running, case: Case) -> None:
        """The numbers of a contender, and its profile. Collective."""
        row.times = Times.of(one.rounds)
        row.bytes_remote = one.contender.state().bytes_remote
        rate = 1e3 * self.tokens / row.times.ms
        row.tokens_per_second = rate
        row.tflops = rate * case.flops_per_token / 1e12
        row.mfu = rate * case.flops_per_token / self.peak if self.peak else None
        if self.device.type == "cuda":
            row.peak_bytes = int(slowest([one.peak_bytes], self.device)[0])
            if [row.label] in case.groups:
                row.reserved_bytes = int(slowest([one.reserved_bytes], self.device)[0])
        found = self._profile(one.contender)
        everyone: list[Any] = [None] * self.world
        dist.all_gather_object(everyone, found)
        row.profiled_ms = sum(rank.step for rank in everyone) / self.world
        row.on_device = found.on_device
        for kind in (*KINDS, IDLE):
            share = sum(rank.share[kind] for rank in everyone) / self.world
            busy = sum(rank.busy.get(kind, share) for rank in everyone) / self.world
            row.kinds.append(KindRow(kind, share, busy))

    def _profile(self, contender: Contender) -> TimeByKind:
        """One step, recorded on this rank."""
        activities = [ProfilerActivity.CPU]
        if self.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        options: dict[str, Any] = {}
        if contender.config.moe.two_batch:
            options["experimental_config"] = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            # The profiler's own start takes time.
            with profile(
                activities=activities,
                schedule=torch.profiler.schedule(wait=0, warmup=2, active=1, repeat=1),
                on_trace_ready=lambda recorded: recorded.export_chrome_trace(str(path)),
                **options,
            ) as profiler:
                for _ in range(3):
                    dist.barrier()
                    with record_function(STEP):
                        contender.take_step()
                        synchronize(self.device)
                    profiler.step()
            return time_by_kind(load(path))

    def _allocated(self) -> int:
        return torch.cuda.memory_allocated(self.device) if self.device.type == "cuda" else 0

    def _say(self, text: str) -> None:
        if self.main and not self.settings.json_only:
            print(text, flush=True)


def time_steps(contender: Contender, steps: int, device: torch.device) -> StepTimes:
    """Of steps back to back, on the slowest rank. Collective."""
    dist.barrier()
    synchronize(device)
    begin = time.perf_counter()
    with host_times() as host:
        for _ in range(steps):
            contender.take_step()
    busy = (time.perf_counter() - begin) / steps
    synchronize(device)
    whole, works = (time.perf_counter() - begin) / steps, busy - sum(host.waits) / steps
    if host.launches:
        begin = time.perf_counter()
        with host_times(drained=True) as host:
            contender.take_step()
        works = time.perf_counter() - begin - sum(host.waits)
    return StepTimes(*(1e3 * one for one in slowest([whole, works, max(0.0, busy - works)], device)))


def _differences(rows: list[Row], alike: Mapping[str, Mapping[str, float]]) -> list[str]:
    """What differs in the first step of contenders, which all have the same weights, tokens and choices: but for those
    that say how they change the model's function."""
    told = []
    rows = [row for row in rows if row.loss is not None and not row.changes]
    with contextlib.suppress(StopIteration):
        base = next(iter(rows))
        for row in rows:
            for what, share in alike[row.label].items():
                one, other = getattr(base, what), getattr(row, what)
                if abs(one - other) > share * abs(one):
                    told.append(f"{row.label}: {what} of the first step is {other:.5g}, and {one:.5g} of {base.label}")
    return told


def measure(settings: ModelSettings, device: torch.device, command: str) -> list[Case]:
    """The one case. All ranks together."""
    disable_progress_bar()
    return [ModelBenchmark(settings, device, command).measure()]


BENCHMARK = RankBenchmark("model", ModelSettings, measure, show, PLOT)


CERTAIN = ("parameters", "gradients", "optimizer")
STAYS = ("parameters", "optimizer", "transport", "process")


def check_room(estimates: Mapping[str, Memory], memory: int) -> list[str]:
    """Sentences about contenders that may run out of memory.

    Args:
        estimates: of each contender (`carpool.train.plan.estimate`).
        memory: bytes of a rank.

    Raises:
        ValueError: parameters, gradients and AdamW alone are more than there is.
    """
    told = []
    for name, estimate in estimates.items():
        certain = sum(estimate[part] for part in CERTAIN)
        if certain > memory:
            parts = ", ".join(f"{part} {gib(estimate[part])}" for part in CERTAIN)
            raise ValueError(
                f"{name} does not fit: a rank would hold {gib(certain)} ({parts}), and has {gib(memory)}; lower "
                "--layers, raise --ranks, or use --set model.dtype=bfloat16"
            )
        if estimate["total"] > USABLE * memory:
            told.append(
                f"{name} may run out of memory: {gib(estimate['total'])} are predicted, and a rank has {gib(memory)}; "
                "lower --batch, --sequence or --layers if it does"
            )
    return told


def groups_that_fit(estimates: Mapping[str, Memory], memory: int) -> list[list[str]]:
    """Contenders whose models fit into memory beside each other, in order. One that fits nowhere is alone.

    What stays (parameters, optimizer, buffers) is there for all of a group; what a step needs besides, for one."""
    groups: list[list[str]] = []
    for name in estimates:
        if groups and _together([estimates[one] for one in [*groups[-1], name]]) <= USABLE * memory:
            groups[-1].append(name)
        else:
            groups.append([name])
    return groups


def _together(estimates: Sequence[Memory]) -> int:
    stays = [sum(estimate.get(part, 0) for part in STAYS) for estimate in estimates]
    return sum(stays) + max(estimate["total"] - own for estimate, own in zip(estimates, stays, strict=True))


def gib(size: float) -> str:
    return f"{size / 2**30:,.1f} GiB"
