"""One process per device, whoever starts them: torchrun, Slurm, or Carpool itself on this machine.

`run(config, entry)` calls `entry(config, **kwargs)` once in every rank, inside an initialised process group:

- started by **torchrun** (RANK and WORLD_SIZE are set): this process is one rank, and `entry` is called here;
- started by **Slurm** (`srun carpool train ...` with several tasks): likewise, after the variables that PyTorch
  reads have been derived from Slurm's;
- otherwise PyTorch's elastic agent starts the ranks on this machine: one per GPU, or `parallelism.num_ranks`
  processes on CPU, each running `carpool.train.launch.worker`. This process becomes the agent. It only watches.

When a rank dies, the agent stops the others at once (a dead peer leaves them in a collective that cannot end), and
`run` raises one `RankFailure` that names the rank which failed first, not the ones that fell over it. A rank whose
agent dies is killed by the kernel. Under torchrun these are torchrun's tasks; under Slurm the other ranks notice, and
end (`carpool.train.launch.roll_call`).

Ranks other than 0 write to temporary files instead of the terminal; if one dies without a Python error (a crash in
native code), the last lines that it wrote are part of the message. With `debug` all write to the terminal.

A look ahead (`look_ahead`) calls a function of the run in a process of its own before there are ranks:

    carpool train  --settings-->  this process: imports the model's code, asks the GPU  --an error, or nothing-->

The agent lives as long as the run. What the look ahead imports, and what it keeps of a GPU's memory, goes with its
process. The agent does meanwhile what else it has to do.
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
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from carpool.parallel.world import World, find_world
from carpool.train.config import Config
from carpool.train.config.schema import config_type
from carpool.train.launch.failure import Interrupted, RankFailure, rank_failure, resume_hint, stopped_text
from carpool.train.launch.stopping import LISTENERS, Relay, Stopped, in_setup
from carpool.train.launch.worker import (
    die_with,
    entry_name,
    find_entry,
    is_user_error,
    job_of,
    leave,
    record_error,
    run_rank,
)

__all__ = ["Interrupted", "RankFailure", "Stopped", "World", "find_world", "local_ranks", "run", "use_cuda"]

CPU_RANKS = 4
# Of an agent's folder for its ranks, and of the file there that says what they do.
_PREFIX, _JOB = "carpool-", "job.json"
# Of libraries and their buffers, measured.
_RANK_BYTES = 330 * 2**20
# How long ranks that were told to stop may take before they are killed.
_STOP_SECONDS = 10


def run(config: Config, entry: Callable[..., None] | str, *, debug: bool = False, **kwargs: Any) -> None:
    """Calls `entry(config, **kwargs)` in every rank and returns when all have returned.

    Args:
        config: `[parallelism]` says how many ranks and on which device.
        entry: A function at the top level of an importable module, or "module:function", which spares the agent from
            importing what only the ranks need.
        debug: All ranks write to the terminal, and the agent logs.
        kwargs: Further arguments, which must be JSON.

    Raises:
        ValueError: the degrees of parallelism do not fit the ranks, or there are too few GPUs.
        RankFailure: a rank failed (only where this process started the ranks; otherwise the error itself).
        Interrupted: a signal ended the run (likewise).
        Stopped: SIGTERM or SIGUSR1 ended the run, after a checkpoint (`carpool.train.launch.stopping`).
    """
    name = entry if isinstance(entry, str) else entry_name(entry)
    world = find_world(os.environ)
    if world is None:
        _start(config, name, kwargs, startable_ranks(config), debug)
        return
    config.parallelism.check_ranks(world.world_size)
    os.environ.update(world.environment())
    try:
        run_rank(config, find_entry(name), kwargs)
    except Exception as error:
        record_error(error)
        raise


def use_cuda(config: Config) -> bool:
    """Does this run use GPUs? ValueError if it is told to and there are none."""
    import torch

    if config.parallelism.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("parallelism.device = 'cuda', but PyTorch finds no GPU here; see `carpool doctor`")
    return config.parallelism.device != "cpu" and torch.cuda.is_available()


def local_ranks(config: Config) -> int:
    """How many ranks this machine starts for `config`.

    Raises:
        ValueError: more ranks than GPUs.
    """
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
    """`local_ranks`, if this machine can start so many.

    Raises:
        ValueError: it cannot, or the degrees of parallelism do not fit their number."""
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


def _start(config: Config, entry: str, kwargs: dict[str, Any], ranks: int, debug: bool) -> None:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    started = time.time()
    if sys.platform == "linux":
        _remove_left_folders()
    with (
        tempfile.TemporaryDirectory(prefix=_PREFIX, ignore_cleanup_errors=True) as folder,
        (job := Path(folder) / _JOB).open("w") as file,
    ):
        # Says to agents in other containers that this one lives.
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        json.dump(job_of(config, entry, kwargs), file)
        file.flush()
        redirects = {rank: Std.NONE if debug or rank == 0 else Std.ALL for rank in range(ranks)}
        launch_config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=ranks,
            run_id=f"carpool-{os.getpid()}",
            rdzv_backend="c10d",
            # Port 0: the agent's store takes a free one itself, so that no other process can be faster.
            rdzv_endpoint="127.0.0.1:0",
            local_addr="127.0.0.1",
            max_restarts=0,
            monitor_interval=0.1,
            logs_specs=DefaultLogsSpecs(log_dir=str(Path(folder) / "logs"), redirects=redirects),
        )
        # It writes them into the environment. SIGTERM is the relay's, and `nohup` has SIGHUP ignored.
        ends = ("SIGINT", "SIGHUP", "SIGQUIT")
        heard = (name for name in ends if signal.getsignal(signal.Signals[name]) != signal.SIG_IGN)
        launch_config.signals_to_handle = ",".join(heard)
        if hasattr(launch_config, "shutdown_timeout"):
            launch_config.shutdown_timeout = _STOP_SECONDS
        worker = ("-P", "-m", "carpool.train.launch.worker", str(job))
        listeners = Path(folder) / "listeners"

        def leave(signum: int) -> None:
            # What the ranks are sent: they would note a SIGTERM and go on to the end of the step.
            raise SignalException(f"signal {signum}", sigval=signal.SIGKILL)

        variables = {**_worker_environment(ranks), LISTENERS: str(listeners), "TORCHELASTIC_SIGNALS_TO_HANDLE": ""}
        with _environment(variables), _signals_restored(), _quiet_agent(debug), Relay(listeners, ranks, leave) as relay:
            try:
                elastic_launch(launch_config, sys.executable)(*worker)
            except ChildFailedError as failed:
                _show_cursor()
                if (text := stopped_text(failed.failures)) is not None:
                    raise Stopped(text) from None
                raise rank_failure(failed.failures, ranks, config, Path(folder) / "logs", started) from None
            except SignalException as stopped:
                _show_cursor()
                signum = relay.signum or int(stopped.sigval)
                name = "Ctrl-C" if signum == signal.SIGINT else signal.Signals(signum).name
                if relay.in_setup:
                    raise Stopped(in_setup(name), name) from None
                raise Interrupted(f"stopped by {name}; {resume_hint(config)}", signum) from None


def _remove_left_folders() -> None:
    """Remove the folders of agents that were killed with SIGKILL, and so could not."""
    for job in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*/{_JOB}"):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError), job.open() as file:
            agent = json.load(file)["agent"]
            if not Path(f"/proc/{agent}").exists():
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(job.parent, ignore_errors=True)


def _worker_environment(ranks: int) -> dict[str, str]:
    package_root = str(Path(__file__).resolve().parents[3])
    paths = [package_root, *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {"PYTHONPATH": os.pathsep.join(paths)}
    if "OMP_NUM_THREADS" not in os.environ:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        env["OMP_NUM_THREADS"] = str(max(1, cores // ranks))
    if sys.platform == "linux" and "GLOO_SOCKET_IFNAME" not in os.environ:
        # All ranks are on this machine: works without a resolvable hostname, and behind any firewall.
        env["GLOO_SOCKET_IFNAME"] = "lo"
    return env


@contextlib.contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """The agent hands its own environment to the ranks; these are in it for as long as it runs."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _signals_restored() -> Iterator[None]:
    """The agent installs signal handlers and leaves them behind."""
    names = [name for name in ("SIGTERM", "SIGUSR1", "SIGINT", "SIGHUP", "SIGQUIT") if hasattr(signal, name)]
    before = {name: signal.getsignal(getattr(signal, name)) for name in names}
    try:
        yield
    finally:
        # Only the main thread may set handlers, and only there has the agent done so.
        with contextlib.suppress(ValueError):
            for name, handler in before.items():
                signal.signal(getattr(signal, name), handler)


@contextlib.contextmanager
def _quiet_agent(debug: bool) -> Iterator[None]:
    """Keeps the agent's log off the terminal: what it has to say is said once, by `RankFailure`."""
    logger = logging.getLogger("torch.distributed.elastic")
    before, handler = logger.propagate, logging.NullHandler()
    if not debug:
        logger.propagate = False
        logger.addHandler(handler)
    try:
        yield
    finally:
        logger.propagate = before
        logger.removeHandler(handler)


def _show_cursor() -> None:
    """A progress display hides the cursor, and one that was killed has not shown it again."""
    if sys.stdout.isatty():
        sys.stdout.write("\x1b[?25h\n")
        sys.stdout.flush()


# A look ahead takes seconds, or a minute where files come from afar.
_LIMIT_SECONDS = 300.0


@contextlib.contextmanager
def look_ahead(config: Config, entry: str, *, debug: bool = False, **kwargs: Any) -> Iterator[None]:
    """Calls `entry(config, **kwargs)`, "module:function", in a process of its own, beside what is done inside.

    Args:
        debug: The error's text is its traceback, and the process writes to the terminal.
        kwargs: Must be JSON.

    Raises:
        ValueError: at the end, what `entry` raised, if a user can put it right. Ranks meet any other error, too, and
            report it, as they do where the process does not answer in time.
    """
    job = {**job_of(config, entry, kwargs), "debug": debug}
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", f"import sys; sys.path[:] = {job['path']!r}; from {__name__} import main; main()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=None if debug else subprocess.DEVNULL,
        text=True,
    )
    with process:
        assert process.stdin is not None and process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            json.dump(job, process.stdin)
            process.stdin.close()
        process.stdin = None  # or `communicate` would flush it
        try:
            yield
            refused, _ = process.communicate(timeout=_LIMIT_SECONDS)
        except subprocess.TimeoutExpired:
            # It stands still, or waits for a file or a GPU that does not answer.
            process.kill()
            refused = ""
            print(
                f"the settings could not be checked ahead: process {process.pid} did not answer for "
                f"{_LIMIT_SECONDS:.0f} s, and was ended; ranks start, and check them again",
                file=sys.stderr,
            )
        except BaseException:
            process.kill()
            raise
    if refused:
        raise ValueError(refused)


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


def main() -> None:
    """Does one job, which is on standard input, and writes why it was refused to standard output."""
    job = json.load(sys.stdin)
    die_with(job["agent"])
    # What libraries print is no answer.
    answer = os.dup(1)
    os.dup2(2, 1)
    try:
        find_entry(job["entry"])(config_type().model_validate_json(json.dumps(job["config"])), **job["kwargs"])
    except Exception as error:
        if is_user_error(error) or isinstance(error, ImportError):
            os.write(answer, (traceback.format_exc() if job["debug"] else text_of(error)).encode())
    leave(0)


def text_of(error: BaseException) -> str:
    """An error that a user can put right, in words."""
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return str(error)
