"""One process per device, whoever starts them: torchrun, Slurm, or Carpool itself on this machine.

`run(config, entry)` calls `entry(config, **kwargs)` once in every rank, inside an initialised process group:

- started by **torchrun** (RANK and WORLD_SIZE are set): this process is one rank, and `entry` is called here;
- started by **Slurm** (`srun carpool train ...` with several tasks): likewise, after the variables that PyTorch
  reads have been derived from Slurm's;
- otherwise PyTorch's elastic agent (`elastic_launch`) starts the ranks on this machine: one per GPU, or
  `parallelism.num_ranks` processes on CPU, each running `carpool.train.launch.worker`. This process becomes the agent.

When a rank dies, the agent stops the others at once (a dead peer leaves them in a collective that cannot end), and
`run` raises one `RankFailure` that names the rank which failed first, not the ones that fell over it; if it died
without a Python error (a crash in native code), with the last lines that it wrote: ranks other than 0 write to
temporary files. A rank whose agent dies is killed by the kernel. Under torchrun these are torchrun's tasks; under Slurm
the other ranks notice, and end (`carpool.train.launch.roll_call`).
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from carpool.parallel.world import find_world
from carpool.train.config import Config
from carpool.train.launch.failure import (
    Interrupted,
    first_cause,
    rank_failure,
    record_error,
    recorded,
    resume_hint,
)
from carpool.train.launch.regroup import FULL, check_groups
from carpool.train.launch.stopping import LISTENERS, Relay, Stopped, in_setup
from carpool.train.launch.worker import entry_name, find_entry, run_rank, use_cuda
from carpool.train.records.run_folder import SUMMARY, last_record

CPU_RANKS = 4
_WORKER = ("-P", "-m", "carpool.train.launch.worker")
# Of an agent's folder for its ranks, and of the file there that says what they do.
_PREFIX, _JOB = "carpool-", "job.json"
# Of libraries and their buffers, measured.
_RANK_BYTES = 330 * 2**20
# How long ranks that were told to stop may take before they are killed.
_STOP_SECONDS = 10
# A look ahead takes seconds, or a minute where files come from afar.
_LIMIT_SECONDS = 300.0


def run(
    config: Config,
    entry: Callable[..., None] | str,
    *,
    debug: bool = False,
    elastic: tuple[int, int] | None = None,
    **kwargs: Any,
) -> None:
    """Calls `entry(config, **kwargs)` in every rank and returns when all have returned.

    Args:
        config: `[parallelism]` says how many ranks and on which device.
        entry: A function at the top level of an importable module, or "module:function", which spares the agent from
            importing what only the ranks need.
        debug: All ranks write to the terminal, and the agent logs.
        elastic: The fewest and the most agents of an elastic run (`carpool.train.launch.elastic`), of which this is
            one, or, under torchrun, of which a rank is here. None: the run ends with any of its ranks.
        kwargs: Further arguments, which must be JSON.

    Raises:
        ValueError: the degrees of parallelism do not fit the ranks, or there are too few GPUs.
        RankFailure: a rank failed (only where this process started the ranks; otherwise the error itself).
        Interrupted: a signal ended the run (likewise).
        Stopped: SIGTERM or SIGUSR1 ended the run, after a checkpoint (`carpool.train.launch.stopping`).
    """
    name = entry if isinstance(entry, str) else entry_name(entry)
    # Under Slurm each task of an elastic run is an agent.
    world = find_world(os.environ) if elastic is None or "RANK" in os.environ else None
    if world is None:
        ranks = startable_ranks(config) if elastic is None else agent_ranks(config, elastic)
        _start(config, name, kwargs, ranks, debug, elastic)
        return
    if elastic is None:
        config.parallelism.check_ranks(world.world_size)
    else:
        os.environ[FULL] = str(elastic[1] * int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    os.environ.update(world.environment())
    try:
        run_rank(config, find_entry(name), kwargs)
    except Exception as error:
        record_error(error)
        raise


def local_ranks(config: Config) -> int:
    """How many ranks this machine starts for `config`. ValueError for more ranks than GPUs."""
    asked = config.parallelism.num_ranks
    if not use_cuda(config):
        return CPU_RANKS if asked is None else asked
    import torch

    gpus = torch.cuda.device_count()
    if asked is not None and asked > gpus:
        raise ValueError(
            f"parallelism.num_ranks = {asked}, but this machine has {gpus} GPUs; lower it, or set "
            "parallelism.device=cpu, or start the ranks of several machines with torchrun or srun"
        )
    return gpus if asked is None else asked


def startable_ranks(config: Config) -> int:
    """`local_ranks`; ValueError if this machine cannot start so many, or the degrees of parallelism do not fit."""
    ranks = local_ranks(config)
    config.parallelism.check_ranks(ranks)
    needed, memory = ranks * _RANK_BYTES, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > memory:
        raise ValueError(
            f"parallelism.num_ranks = {ranks} processes take {needed / 1e9:,.0f} GB before they train anything, and "
            f"this machine has {memory / 1e9:,.0f} GB: lower it, or start the ranks of several machines with torchrun "
            "or srun"
        )
    return ranks


def agent_ranks(config: Config, elastic: tuple[int, int]) -> int:
    """How many ranks each agent of an elastic run starts. parallelism.num_ranks is of all agents.

    Raises:
        ValueError: they have not equally many, or a group that is allowed could not go on."""
    fewest, most = elastic
    section, cuda = config.parallelism, use_cuda(config)
    full = section.num_ranks or most * (local_ranks(config) if cuda else max(1, CPU_RANKS // most))
    if full % most:
        raise ValueError(
            f"parallelism.num_ranks = {full} is of all {most} agents of --elastic, and does not divide into them"
        )
    ranks = full // most
    if cuda:
        local_ranks(config.changed("parallelism", num_ranks=ranks))
    check_groups(config, full, fewest * ranks, ranks)
    return ranks


def _start(
    config: Config, entry: str, kwargs: dict[str, Any], ranks: int, debug: bool, elastic: tuple[int, int] | None = None
) -> None:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousClosedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    def leave(signum: int) -> None:
        # What the ranks are sent: they would note a SIGTERM and go on to the end of the step.
        raise SignalException(f"signal {signum}", sigval=signal.SIGKILL)

    started = time.time()
    # SIGTERM is the relay's, and `nohup` has SIGHUP ignored.
    ends = (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    heard = [number.name for number in ends if signal.getsignal(number) != signal.SIG_IGN]
    redirects = {rank: Std.NONE if debug or rank == 0 else Std.ALL for rank in range(ranks)}
    with (
        _job_file(config, entry, kwargs) as job,
        _agent_state(
            {**_environment(ranks, elastic), **_allocator(config, ranks), LISTENERS: str(job.with_name("listeners"))},
            debug,
        ),
        Relay(job.with_name("listeners"), ranks, leave) as relay,
    ):
        logs = job.with_name("logs")
        fewest, most = elastic or (1, 1)
        launch_config = LaunchConfig(
            min_nodes=fewest,
            max_nodes=most,
            nproc_per_node=ranks,
            run_id="carpool" if elastic else f"carpool-{os.getpid()}",
            rdzv_backend="c10d",
            # Port 0: the agent's store takes a free one itself, so that no other process can be faster.
            rdzv_endpoint="127.0.0.1:0",
            local_addr="127.0.0.1",
            max_restarts=0,
            signals_to_handle=",".join(heard),
            logs_specs=DefaultLogsSpecs(log_dir=str(logs), redirects=redirects),
        )
        try:
            if elastic is None:
                elastic_launch(launch_config, sys.executable)(*_WORKER, str(job))
            else:
                from carpool.train.launch.elastic import launch, own_address

                launch_config.local_addr = own_address()
                launch(launch_config, config, [*_WORKER, str(job)], relay.folder)
        except RendezvousClosedError:
            ended = last_record(config.training.folder)
            if ended.get("signal"):
                raise Stopped(ended["why"], ended["signal"]) from None
            if not (config.training.folder / SUMMARY).exists():
                raise ValueError("another agent has ended the run; what it writes says why") from None
        except (ChildFailedError, SignalException) as ended:
            # A progress display hides the cursor, and one that was killed has not shown it again.
            if sys.stdout.isatty():
                print("\x1b[?25h", flush=True)
            if isinstance(ended, ChildFailedError):
                cause = recorded(ended.failures[first_cause(ended.failures)])
                if cause.get("type") == Stopped.__name__:
                    raise Stopped(cause["text"]) from None
                raise rank_failure(ended.failures, ranks, config, logs, started) from None
            signum = relay.signum or int(ended.sigval)
            name = "Ctrl-C" if signum == signal.SIGINT else signal.Signals(signum).name
            if relay.in_setup:
                raise Stopped(in_setup(name), name) from None
            raise Interrupted(f"stopped by {name}; {resume_hint(config)}", signum) from None


@contextlib.contextmanager
def _job_file(config: Config, entry: str, kwargs: dict[str, Any]) -> Iterator[Path]:
    """A file that tells another process to call `entry(config, **kwargs)`, alone in a folder that goes at the end, or
    when a later agent finds that this process was killed."""
    if sys.platform == "linux":
        _remove_left_folders()
    path = [str(Path(one).absolute()) for one in sys.path]
    job = {"entry": entry, "config": config.model_dump(mode="json"), "kwargs": kwargs, "agent": os.getpid()}
    with (
        tempfile.TemporaryDirectory(prefix=_PREFIX, ignore_cleanup_errors=True) as folder,
        Path(folder, _JOB).open("w") as file,
    ):
        # Says to agents in other containers that this one lives.
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        json.dump({**job, "path": path}, file)
        file.flush()
        yield Path(file.name)


def _remove_left_folders() -> None:
    """Remove the folders of agents that were killed with SIGKILL, and so could not."""
    for job in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*/{_JOB}"):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError), job.open() as file:
            agent = json.load(file)["agent"]
            if not Path(f"/proc/{agent}").exists():
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(job.parent, ignore_errors=True)


def _environment(ranks: int, elastic: tuple[int, int] | None = None) -> dict[str, str]:
    """Variables that processes of this machine get."""
    paths = [str(Path(__file__).resolve().parents[3]), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {"PYTHONPATH": os.pathsep.join(paths), "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(_STOP_SECONDS)}
    if "OMP_NUM_THREADS" not in os.environ:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        env["OMP_NUM_THREADS"] = str(max(1, cores // ranks))
    if elastic is not None:
        env[FULL] = str(elastic[1] * ranks)
    elif sys.platform == "linux" and "GLOO_SOCKET_IFNAME" not in os.environ:
        # All ranks are on this machine: works without a resolvable hostname, and behind any firewall.
        env["GLOO_SOCKET_IFNAME"] = "lo"
    return env


def _allocator(config: Config, ranks: int) -> dict[str, str]:
    """For one rank whose addresses no CUDA graph holds: PyTorch's allocator lengthens what it has reserved, instead of
    reserving anew beside it. A user who has told it something is not overruled."""
    told = any(name in os.environ for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"))
    alone = ranks == 1 and config.training.cuda_graphs == "off"
    return {"PYTORCH_ALLOC_CONF": "expandable_segments:True"} if alone and not told else {}


@contextlib.contextmanager
def _agent_state(variables: dict[str, str], debug: bool) -> Iterator[None]:
    """What the agent needs of this process, which is as before at the end: it hands its environment, with these
    variables, to the ranks; and what its log says is said once, by `RankFailure`, unless `debug`."""
    before, logger, silent = dict(os.environ), logging.getLogger("torch.distributed.elastic"), logging.NullHandler()
    propagate = logger.propagate
    os.environ.update(variables)
    if not debug:
        logger.propagate = False
        logger.addHandler(silent)
    try:
        yield
    finally:
        logger.propagate = propagate
        logger.removeHandler(silent)
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


@contextlib.contextmanager
def look_ahead(config: Config, entry: str, *, debug: bool = False, **kwargs: Any) -> Iterator[None]:
    """Calls `entry(config, **kwargs)`, "module:function", in a process of its own, beside what is done inside. What it
    imports, and what it keeps of a GPU's memory, goes with that process; the agent lives as long as the run.

    Args:
        debug: The error's text is its traceback, and the process writes to the terminal.
        kwargs: Must be JSON.

    Raises:
        ValueError: at the end, what `entry` raised, if a user can put it right. Ranks meet any other error, too, and
            report it, as they do where the process does not answer in time.
    """
    output = None if debug else subprocess.DEVNULL
    with _job_file(config, entry, kwargs) as job:
        answer = job.with_name("error.json")
        env = {**os.environ, **_environment(1), "TORCHELASTIC_ERROR_FILE": str(answer)}
        command = [sys.executable, *_WORKER, str(job)]
        process = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
        try:
            yield
            process.wait(_LIMIT_SECONDS)
        except subprocess.TimeoutExpired:
            # It stands still, or waits for a file or a GPU that does not answer.
            print(
                f"the settings could not be checked ahead: process {process.pid} did not answer for "
                f"{_LIMIT_SECONDS:.0f} s, and was ended; ranks start, and check them again",
                file=sys.stderr,
            )
        finally:
            process.kill()
            process.wait()
        error = json.loads(answer.read_text())["carpool"] if answer.exists() else {}
    if error and (error["user_error"] or error["type"] in ("ImportError", "ModuleNotFoundError")):
        raise ValueError(error["traceback"] if debug else error["text"])


@contextlib.contextmanager
def said_if_slow(seconds: float = 10.0) -> Iterator[None]:
    """A line on standard error if what is inside takes longer."""
    text = "still looking at the settings and the shapes of the model, layer by layer; thousands of layers take minutes"
    timer = threading.Timer(seconds, print, (text,), {"file": sys.stderr, "flush": True})
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
