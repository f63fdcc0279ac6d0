"""Tests see the same environment wherever they run: tests/conftest.py calls what is here.

What a user's shell, a Slurm job or an earlier run has left must not change what a test sees. So the variables that
programs read are removed or set, caches are folders of the test session, and a test's working directory is a folder of
its own: a relative path such as the default `runs/demo` is there, never in the checkout. Nothing that a test process
does may create or change a file of the checkout (`refuse_writes`), so that no test finds what another has left.
"""

from __future__ import annotations

import os
import sys
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TRACES = ROOT / "docs" / "traces"

# What decides how text looks (rich, click, pytest's captured terminal), who started a process (launchers), and which
# hub, plug-ins and caches are used.
REMOVED = (
    "FORCE_COLOR", "NO_COLOR", "PY_COLORS", "COLORTERM", "CLICOLOR", "CLICOLOR_FORCE", "TTY_COMPATIBLE",
    "TTY_INTERACTIVE", "LINES", "GITHUB_ACTIONS",  # Typer colours what it writes for the last
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT",
    "PYTHONIOENCODING", "TRANSFORMERS_CACHE", "TENSORBOARD_LOGGING_DIR", "CUBLAS_WORKSPACE_CONFIG",
)  # fmt: skip
REMOVED_PREFIXES = ("SLURM_", "OMPI_", "PMI_", "TORCHELASTIC_", "CARPOOL_", "HF_", "GLOO_", "_TYPER_")


def prepare_environment(environment: MutableMapping[str, str], caches: Path) -> None:
    """Makes the variables of a test process, and of those that it starts, the same everywhere.

    To be called before anything imports transformers, which reads HF_* then. caches: an empty folder of this session.
    """
    for name in list(environment):
        if name in REMOVED or name.startswith(REMOVED_PREFIXES):
            del environment[name]
    environment.update(
        TERM="xterm-256color",
        COLUMNS="80",
        LC_ALL="C.UTF-8",
        XDG_CACHE_HOME=str(caches),
        HF_HOME=str(caches / "huggingface"),
        HF_HUB_OFFLINE="1",
        # `python -m carpool`, `-m tests...` and `-m benchmarks...` are this checkout's from every working directory.
        PYTHONPATH=os.pathsep.join([str(ROOT), *filter(None, [environment.get("PYTHONPATH")])]),
    )
    environment.setdefault("OMP_NUM_THREADS", "1")


class WriteRefused(BaseException):
    """A test would have written into the checkout. Code that catches every Exception does not hide it."""


_refused = [False]  # an audit hook cannot be removed


def refuse_writes(root: Path) -> None:
    """From now on, this process and its forks write nothing below root, apart from what Python caches."""
    inside, allowed = f"{root.resolve()}{os.sep}", (f"{Path(sys.prefix)}{os.sep}", f"{root / '.venv'}{os.sep}")

    def refuse(event: str, arguments: tuple[Any, ...]) -> None:
        if not _refused[0] or event not in _PATH_OF:
            return
        if event == "open":
            _, mode, flags = arguments
            if not (set(mode or "") & set("wax+") or (flags or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)):
                return
        elif arguments[-1] != -1:
            return  # a name inside an open folder, as shutil.rmtree removes them
        path = arguments[_PATH_OF[event]]
        if not isinstance(path, str | bytes | os.PathLike):
            return  # an open file
        where = os.path.abspath(os.fsdecode(path))
        if where.startswith(inside) and not where.startswith(allowed) and "__pycache__" not in where:
            raise WriteRefused(f"a test writes into the checkout: {where} ({event}); give it a folder under tmp_path")

    _refused[0] = True
    sys.addaudithook(refuse)


def allow_writes() -> None:
    _refused[0] = False


# Which argument of an event of Python's audit is the path that is written.
_PATH_OF = {"open": 0, "os.mkdir": 0, "os.remove": 0, "os.rmdir": 0, "os.symlink": 1, "os.rename": 1, "os.link": 1}
