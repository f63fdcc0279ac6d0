"""A process of a run, most often a rank: joins the process group, does its work, leaves the group.

    python -m carpool.train.launch.worker JOB.json

`carpool.train.launch.start` starts these. A rank has three duties beside its work. It ends when its agent ends, because
nobody else would stop it. It leaves the process group, on errors too, because processes that exit inside one abort now
and then. If it fails, it writes the reason to a file and not to the terminal, where the other ranks write as well; the
agent tells the user, once.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import datetime
import faulthandler
import gc
import json
import logging
import os
import pkgutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

from carpool.plugins.redact import redact
from carpool.train.launch.failure import is_consequence, record_error
from carpool.train.launch.regroup import FORMED, LOST_SECONDS, enter_group
from carpool.train.launch.stopping import Stopped

if TYPE_CHECKING:
    from carpool.train.config import Config
    from carpool.transport.nvlink import Buffers

_PR_SET_PDEATHSIG = 1
_LEAVE_SECONDS, _END_SECONDS = 5.0, 20.0
# After which a rank says that it waits for others at the start.
_MEETING_SECONDS = 20.0
# NCCL cannot say which rank it waits for; so much later than the kernels of transport nvlink, which can, it gives up.
_NCCL_EXTRA_SECONDS = 30
# Between two looks of the watchdog, and what it leaves the main thread to fail by itself.
WATCHDOG_SECONDS, WATCHDOG_GRACE_SECONDS = 0.2, 10.0


def main() -> None:
    """Do the job whose file is the first argument: as a rank, if the agent says which, else for `look_ahead`."""
    job = json.loads(Path(sys.argv[1]).read_text())
    die_with(job["agent"])
    sys.path[:] = job["path"]
    faulthandler.enable()
    # Ctrl-C is the agent's to handle. Python's own handler would wait for a collective that may never end.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    from carpool.train.config.schema import config_type  # the command line imports this module, and need not wait

    code = 0
    try:
        with lasting_output():
            entry, kwargs = find_entry(job["entry"]), job["kwargs"]
            config = config_type().model_validate_json(json.dumps(job["config"]))
            if "RANK" in os.environ:
                run_rank(config, entry, kwargs)
            else:
                entry(config, **kwargs)
        # What asked to be called at the end is called.
        _within(_END_SECONDS, atexit._run_exitfuncs)
    except BaseException as error:
        record_error(error)
        code = error.exit_code if isinstance(error, Stopped) else 1
    leave(code)


def leave(code: int) -> NoReturn:
    """End the process. Not by sys.exit: it waits for threads, and one that is stuck in a collective would keep this
    rank alive; and while Python is taken down, a library's thread now and then aborts the process."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def end_process(error: BaseException) -> NoReturn:
    """Log and record an error, and leave, whatever the main thread waits for."""
    logging.getLogger("carpool").error("%s", error)
    record_error(error)
    leave(1)


class Watchdog:
    """A daemon thread that ends a process whose main thread cannot notice any more that a rank is missing.

    A kernel that waits in vain for a peer gives up and writes so to host memory (`Buffers.host_status`). The main
    thread looks there at its next ride, and raises. But it may be inside a collective with the same peer, which never
    gives up and cannot be interrupted. So this thread looks too: if a rank is missing and `stop` has not been called
    `grace` seconds later, it logs and records which, and ends the process with exit code 1.

    `buffers` gives the buffers of the moment.
    """

    def __init__(self, buffers: Callable[[], Sequence[Buffers]], grace: float = WATCHDOG_GRACE_SECONDS) -> None:
        self._buffers, self._grace = buffers, grace
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="carpool-watchdog", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Look no more. The thread lets go of what it looked at before this returns."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join(WATCHDOG_SECONDS)

    def _watch(self) -> None:
        from carpool.transport import RankMissingError  # ranks that have no such transport need not import it

        while not self._stopped.wait(WATCHDOG_SECONDS):
            try:
                for buffers in self._buffers():
                    buffers.check()
            except RankMissingError as error:
                if not self._stopped.wait(self._grace):
                    end_process(error)


def run_rank(config: Config, entry: Callable[..., None], kwargs: dict[str, Any]) -> None:
    """Call `entry(config, **kwargs)` inside the process group that RANK, WORLD_SIZE and the like describe."""
    import torch.distributed as dist

    from carpool.train.launch.roll_call import RollCall

    config, group = enter_group(config)
    if group is not None and group.idle:
        return group.wait()
    with process_group(config), contextlib.ExitStack() as stack:
        roll, section = None, config.parallelism
        if (ranks := dist.get_world_size()) > 1:
            store: Any = dist.distributed_c10d._get_default_store()
            seconds, per_node = float(section.timeout_seconds), section.ranks_per_node
            if group is not None:
                seconds = min(seconds, LOST_SECONDS)
            roll = RollCall(store.clone(), dist.get_rank(), ranks, seconds, end_process, per_node)
            roll.start()
            stack.callback(roll.stop)
        try:
            entry(config, **kwargs)
        except BaseException as error:
            # Recorded before the group is left: that makes the peers fail, and this is the cause.
            # The agents of an elastic run need no name, and the new group waits for this rank.
            if roll is not None and group is None and is_consequence(type(error).__name__, str(error)):
                lost = roll.explain(error)
                record_error(lost)
                raise lost from error
            record_error(error)
            raise
        if group is not None:
            group.release()


def _within(seconds: float, call: Callable[[], object]) -> None:
    """Calls it, and waits so long at most: what is left undone ends with the process."""
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(seconds)


def use_cuda(config: Config) -> bool:
    """Does this run use GPUs? ValueError if it is told to and there are none."""
    import torch

    if config.parallelism.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("parallelism.device = 'cuda', but PyTorch finds no GPU here; see `carpool doctor`")
    return config.parallelism.device != "cpu" and torch.cuda.is_available()


@contextlib.contextmanager
def process_group(config: Config) -> Iterator[None]:
    """The default process group: NCCL with this rank's GPU, or gloo; left at the end, on errors too. ValueError if
    this rank has no GPU of its own, or the ranks do not meet."""
    import torch
    import torch.distributed as dist

    seconds = config.parallelism.timeout_seconds
    options: dict[str, Any] = {"backend": "gloo", "timeout": datetime.timedelta(seconds=seconds)}
    if use_cuda(config):
        local_rank, gpus = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
        # A launcher may show each rank its own GPU only: then that one is number 0.
        index = 0 if gpus == 1 else local_rank
        if index >= gpus:
            raise ValueError(f"rank {os.environ['RANK']} is number {local_rank} on its machine, which has {gpus} GPUs")
        torch.cuda.set_device(index)
        options = {"backend": "nccl", "timeout": datetime.timedelta(seconds=seconds + _NCCL_EXTRA_SECONDS)}
        options["device_id"] = torch.device("cuda", index)
    with _meeting(seconds):
        dist.init_process_group(**options)
    patience = _LEAVE_SECONDS  # peers may be gone or stuck, and leaving may wait for them
    try:
        yield
        patience = _END_SECONDS  # all is done and written: what a library waits for now must not keep the job
    finally:
        if dist.is_initialized():
            _within(patience, dist.destroy_process_group)


@contextlib.contextmanager
def _meeting(timeout: float) -> Iterator[None]:
    """Ranks meet inside. Those that no agent has started wait for each other, which a person sees and may help with;
    ValueError if they do not meet. `timeout`: seconds that PyTorch waits. Elastic agents try another port."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" or FORMED in os.environ:
        yield
        return
    rank, ranks = f"rank {os.environ['RANK']}", f"{os.environ['WORLD_SIZE']} ranks"
    where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']} (MASTER_ADDR, MASTER_PORT)"

    def unmet(why: str) -> ValueError:
        return ValueError(
            f"the {ranks} did not meet at {where}: {why}. Was each rank started, with its own RANK and the same "
            "WORLD_SIZE; is the address that of rank 0, and the port free there and open to all nodes?"
        )

    # Where another program has the port and says nothing, PyTorch waits without end.
    late = timeout + _MEETING_SECONDS + _NCCL_EXTRA_SECONDS
    silent = f"{rank} got no answer there in {late:.0f} s; another program may have the port"
    timers = (
        threading.Timer(_MEETING_SECONDS, sys.stderr.write, (f"{rank} waits for all {ranks} at {where}\n",)),
        threading.Timer(late, lambda: end_process(unmet(silent))),
    )
    for timer in timers:
        timer.daemon = True
        timer.start()
    try:
        yield
    except RuntimeError as error:
        raise unmet(str(error).strip().splitlines()[0].rstrip(".")) from error
    finally:
        for timer in timers:
            timer.cancel()


def die_with(agent: int) -> None:
    """Lets this process end when its agent, process `agent`, does, however that ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != agent:  # it died before the line above
            os._exit(1)
        return

    def watch() -> None:
        while os.getppid() == agent:
            time.sleep(1.0)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def entry_name(entry: Callable[..., None]) -> str:
    """`module:function`, by which another process finds the function."""
    module, name = entry.__module__, entry.__qualname__
    if module == "__main__" or "." in name:
        raise ValueError(
            f"{module}.{name} cannot be imported by the ranks: it must be at the top level of a module that is not "
            "the running script"
        )
    return f"{module}:{name}"


def find_entry(name: str) -> Callable[..., None]:
    """The function that `entry_name` named."""
    with collector_paused():
        found: Callable[..., None] = pkgutil.resolve_name(name)
    return found


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """Without the collection of reference cycles, which takes a third of the time of importing Transformers."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class _Lasting:
    """A stream whose writes do not fail, and show no credentials."""

    def __init__(self, stream: TextIO, name: str, other: str) -> None:
        self._stream, self._name, self._other = stream, name, other

    def write(self, text: str) -> int:
        self._try(lambda: self._stream.write(redact(text)))
        return len(text)

    def flush(self) -> None:
        self._try(self._stream.flush)

    def _try(self, call: Callable[[], object]) -> None:
        try:
            call()
        except OSError as error:
            # Below Python: what is buffered still has to go somewhere, and native code writes, too.
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self._stream.fileno())
            os.close(null)
            text = f"warning: standard {self._name} cannot be written any more ({error.strerror}); the run goes on, and"
            print(text, "its numbers are in metrics.jsonl", file=getattr(sys, self._other), flush=True)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def lasting_output() -> Iterator[None]:
    """Inside, a closed standard output or error ends nothing: `carpool train ... | head`, a terminal that is gone, a
    full disk. Who reads the output is not who needs the run. The first write that fails is said on the other stream,
    and what follows goes to /dev/null; the numbers of a run are in its metrics.jsonl in any case."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            # Closed before Python started: a file of the run's must not get this number, here or in a rank.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # it takes the lowest number that is free
    # Python has None for what was closed, and libraries write to it.
    null: Any = open(os.devnull, "w")  # noqa: SIM115  (for as long as the process lives)
    before = sys.stdout or null, sys.stderr or null
    lasting: tuple[Any, Any] = _Lasting(before[0], "output", "stderr"), _Lasting(before[1], "error", "stdout")
    sys.stdout, sys.stderr = lasting
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


if __name__ == "__main__":
    main()
