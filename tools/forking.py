"""Processes of the soak that are forked from one which has imported all, instead of started: a rank is there in
milliseconds, where Python, PyTorch and Transformers take seconds of a core.

    soak ── server ─┐             a server has one thread, imports before it serves, and forks twice: what it makes
     │              └> agent      becomes the child of whoever asked for it, which is a "subreaper"
     └─ agent ── server ─┐
          │              └> rank
          └─ rank

An agent ends, waits for and signals its ranks as if it had started them, and ranks end with their agent, as they do
otherwise: `ForkedPopen` is `subprocess.Popen` but for how the process begins. What a rank starts itself, such as the
writer of its checkpoints, is started. `python -m tools.soak --start` starts all.
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import gc
import importlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

RANK, AGENT, AHEAD, SERVER = "soak-rank-", "soak-agent", "soak-ahead", "soak-server"
_PR_SET_NAME, _PR_SET_CHILD_SUBREAPER, _PR_SET_PDEATHSIG = 15, 36, 1
_MOST_BYTES = 1 << 17


def _prctl(option: int, value: Any) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def import_all(names: Sequence[str]) -> None:
    """Import modules of these names, as far as they can be; the process must have one thread afterwards."""
    for name in names:
        if name == "__main__":
            continue
        try:
            importlib.import_module(name)
        except Exception:  # whatever a module that is imported by itself raises: ranks import it in their order
            sys.modules.pop(name, None)
    threads = len(os.listdir("/proc/self/task"))
    assert threads == 1, f"{threads} threads, and a process that is forked has one of them"


class Server:
    """Forks processes for this one, from its state at the moment of construction."""

    def __init__(self) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        owner = os.getpid()
        # Looking for garbage in what was imported would copy all of it into each process.
        gc.collect()
        gc.freeze()
        self.pid = os.fork()
        if self.pid == 0:
            self._socket.close()
            _prctl(_PR_SET_NAME, SERVER.encode())
            _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
                signal.signal(number, signal.SIG_DFL)
            _serve(theirs, owner)
        theirs.close()

    def fork(self, job: dict[str, Any], files: Sequence[int]) -> int:
        """A process that does a job (`_begin`), with these files as standard input, output and error; its id."""
        socket.send_fds(self._socket, [json.dumps(job).encode()], list(files))
        answer = self._socket.recv(_MOST_BYTES)
        if not answer:
            raise ChildProcessError("the server of forked processes is gone")
        return int(answer)


def _serve(theirs: socket.socket, owner: int) -> NoReturn:
    read, write = os.pipe()
    while True:
        message, files, _, _ = socket.recv_fds(theirs, _MOST_BYTES, 3)
        if not message:
            os._exit(0)
        if (between := os.fork()) == 0:
            if (pid := os.fork()) == 0:
                while os.getppid() != owner:
                    if not Path(f"/proc/{owner}").exists():
                        os._exit(1)
                    time.sleep(0.001)
                _begin(json.loads(message), files)
            os.write(write, f"{pid:<16}".encode())
            os._exit(0)
        os.waitpid(between, 0)  # now it is the owner's child
        theirs.send(os.read(read, 16))
        for one in files:
            os.close(one)


def _begin(job: dict[str, Any], files: Sequence[int]) -> NoReturn:
    """What `python ARGUMENTS` would do, of the two commands that a run has."""
    if job["session"]:
        os.setsid()
    for number, one in enumerate(files):
        os.dup2(one, number)
    os.closerange(3, 1 << 16)
    sys.stdout, sys.stderr = (open(number, "w", buffering=1, closefd=False) for number in (1, 2))  # noqa: SIM115
    os.chdir(job["folder"])
    os.environ.clear()
    os.environ.update(job["env"])
    random.seed()
    faulthandler.register(signal.SIGUSR2, sys.stderr)  # which says where it is
    _prctl(_PR_SET_NAME, job["name"].encode())
    code: object = 0
    try:
        if job["name"] == AGENT:
            _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            _run_agent(job["arguments"])
        else:
            _run_rank(job["arguments"])
    except SystemExit as left:
        code = left.code
    except BaseException:
        traceback.print_exc()
        code = 1
    atexit._run_exitfuncs()
    os._exit(code if isinstance(code, int) else 1)


def _run_agent(arguments: list[str]) -> None:
    """`-m carpool train ...`, whose ranks are forked."""
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous

    from carpool.cli import main
    from carpool.train.launch import start

    server = Server()

    class Ranks(ForkedPopen):
        def __init__(self, args: Sequence[str], **given: Any) -> None:
            super().__init__(server, args, **given)

    # Python's own `subprocess` stays as it is for all others.
    handler: Any = subprocess_handler
    handler.Popen = Ranks
    only_here: Any = type(sys)("subprocess")
    only_here.__dict__.update({**subprocess.__dict__, "Popen": Ranks})
    start.subprocess = only_here
    # For a name in its log, the rendezvous looks through all modules, of which an agent that is started has fewer.
    dynamic_rendezvous.get_method_name = lambda depth=2: sys._getframe(depth).f_code.co_name
    sys.argv = ["carpool", *arguments[2:]]
    main()


def _run_rank(arguments: list[str]) -> None:
    """`-P -m carpool.train.launch.worker JOB`."""
    from carpool.train.launch import worker

    sys.argv = [str(worker.__file__), *arguments[3:]]
    worker.main()


class ForkedPopen(subprocess.Popen[bytes]):
    """`subprocess.Popen` of a command of Carpool's, forked by a server."""

    def __init__(self, server: Server, args: Sequence[str], **given: Any) -> None:
        self._server = server
        super().__init__(args, **given)

    def _execute_child(
        self, args: Any, executable: Any, preexec_fn: Any, close_fds: Any, pass_fds: Any, cwd: Any, env: Any,
        startupinfo: Any, creationflags: Any, shell: Any, p2cread: int, p2cwrite: int, c2pread: int, c2pwrite: int,
        errread: int, errwrite: int, restore_signals: Any, gid: Any, gids: Any, uid: Any, umask: Any,
        start_new_session: bool, process_group: Any,
    ) -> None:  # fmt: skip
        arguments, env = list(args)[1:], dict(os.environ if env is None else env)
        worker = arguments[:3] == ["-P", "-m", "carpool.train.launch.worker"]
        name = AGENT if not worker else f"{RANK}{env['RANK']}" if "RANK" in env else AHEAD
        job = {
            "name": name, "arguments": arguments, "env": env, "folder": str(cwd or os.getcwd()),
            "session": start_new_session,
        }  # fmt: skip
        files = [own if given < 0 else given for own, given in enumerate((p2cread, c2pwrite, errwrite))]
        self.pid = self._server.fork(job, files)
        self._child_created = True
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)  # type: ignore[attr-defined]
