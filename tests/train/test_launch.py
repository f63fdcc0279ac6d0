"""Launching: real processes, real signals. Each launch costs the start of two processes that import torch."""

from __future__ import annotations

import ast
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from carpool.parallel.world import find_world, first_host
from carpool.train.config import Config, load_config
from carpool.train.launch import start, stopping
from carpool.train.launch.failure import (
    RankFailure,
    first_cause,
    is_consequence,
    rank_failure,
    record_error,
    resume_hint,
)
from carpool.train.launch.regroup import FORMED
from carpool.train.launch.start import local_ranks, run
from carpool.train.launch.stopping import STOP_SIGNALS, Relay, StopRequest
from carpool.train.launch.worker import _meeting, entry_name, process_group
from carpool.transport import RankMissingError
from tests.ranks import free_port
from tests.train import launch_entries

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.timeout(600)
# The bound on how long ranks may live on after one of them, or their agent, has died. By themselves they do for 600 s.
STOP_SECONDS = 90
# For a busy machine to start two ranks, or for what ends by itself to end.
PATIENCE = 240


def config(folder: Path, *overrides: str) -> Config:
    return load_config(
        None, ["parallelism.device=cpu", "parallelism.num_ranks=2", f"training.output_dir={folder}", *overrides]
    )


def wait_for(condition: Callable[[], object], seconds: float = PATIENCE) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.05)


def pids(folder: Path) -> list[int]:
    return [int(path.read_text()) for path in sorted(folder.glob("pid*"))]


def lives(pid: int) -> bool:
    """Is there such a process that is not merely waiting for its exit code to be read?"""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def clean_environment(**extra: str) -> dict[str, str]:
    launchers = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")
    env = {k: v for k, v in os.environ.items() if k not in launchers and not k.startswith("SLURM_")}
    return env | {"PYTHONPATH": str(ROOT)} | extra


def agent(*args: str, command: tuple[str, ...] = (), **env: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*(command or (sys.executable,)), "-m", "tests.train.launch_agent", *args],
        cwd=ROOT,
        env=clean_environment(**env),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


# ------------------------------------------------------------------------------------------------- whole launches


def test_all_ranks_run_and_only_rank_0_speaks(tmp_path, monkeypatch, capfd):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    run(config(tmp_path, "training.max_steps=77"), launch_entries.report_in, folder=str(tmp_path), word="hello")
    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    for rank in range(2):
        found = ast.literal_eval((tmp_path / f"rank{rank}").read_text())
        assert found == [rank, 2, 3, "hello", 77, "gloo", str(rank), str(threads), threads]
    shown = capfd.readouterr()
    assert shown.out == "rank 0 speaks\n"
    assert shown.err == "", "nothing else on the terminal"


@pytest.mark.parametrize("how", [pytest.param("bug", marks=pytest.mark.slow), "crash"])
def test_the_rank_that_failed_is_named_and_the_others_stop(tmp_path, how, capfd):
    checkpoint = tmp_path / "checkpoints" / "step-00000100"
    checkpoint.mkdir(parents=True)
    handlers = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]
    with pytest.raises(RankFailure) as caught:
        run(config(tmp_path), launch_entries.fail, folder=str(tmp_path), rank=1, how=how)
    assert time.time() - (tmp_path / "pid1").stat().st_mtime < STOP_SECONDS
    failure, text = caught.value, str(caught.value)
    victim, peer = pids(tmp_path)[1], pids(tmp_path)[0]
    assert (failure.rank, failure.pid, failure.user_error) == (1, victim, False)
    assert not lives(peer)
    if how == "bug":
        assert text.startswith(f"rank 1 (pid {victim}) failed: RuntimeError: a bug of our own; the other rank was")
        assert failure.traceback.count("RuntimeError: a bug of our own") == 1
        assert "launch_entries.py" in failure.traceback
    else:
        assert failure.exit_code == -signal.SIGSEGV
        assert text.startswith(f"rank 1 (pid {victim}) was killed by SIGSEGV")
        assert "  last words" in text, "what a rank wrote before it crashed"
        assert "in fail" in text, "and where it was"
    last = text.splitlines()[-1]
    assert last == f"Continue from {checkpoint} with the same command and training.resume_from_checkpoint=last"
    shown = capfd.readouterr()
    assert "Traceback" not in shown.err + shown.out, "the caller decides what is shown"
    assert [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)] == handlers
    assert "GLOO_SOCKET_IFNAME" not in os.environ, "the environment is as before"


def test_segments_grow_where_no_graph_holds_addresses(tmp_path, monkeypatch):
    """As one rank on a GPU gets it in its environment."""
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    eager, captured = config(tmp_path, "training.cuda_graphs=off"), config(tmp_path)
    assert start._allocator(eager, 1) == {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    assert start._allocator(eager, 2) == start._allocator(captured, 1) == {}
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:512")
    assert start._allocator(eager, 1) == {}


def test_a_rank_dies_with_its_agent(tmp_path):
    """A process that knows nothing of PyTorch stands for the agent."""
    job, settings = tmp_path / "job.json", config(tmp_path, "parallelism.num_ranks=1").model_dump(mode="json")
    content = {
        "entry": "tests.train.launch_entries:exchange_forever",
        "config": settings,
        "path": [str(ROOT), *sys.path],
    }
    job.write_text(json.dumps({**content, "kwargs": {"folder": str(tmp_path)}}))
    started = (
        "import json, os, pathlib, subprocess, sys; job = pathlib.Path(sys.argv[1]); "
        "job.write_text(json.dumps({**json.loads(job.read_text()), 'agent': os.getpid()})); "
        "subprocess.run([sys.executable, '-m', 'carpool.train.launch.worker', job])"
    )
    rank = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    env = clean_environment(**rank, MASTER_PORT=str(free_port()))
    parent = subprocess.Popen([sys.executable, "-c", started, str(job)], cwd=ROOT, env=env)
    try:
        wait_for(lambda: pids(tmp_path) or parent.poll() is not None)
        (worker,) = pids(tmp_path)
        assert lives(worker)
    finally:
        parent.kill()
        parent.wait()
    wait_for(lambda: not lives(worker), STOP_SECONDS)


def started(tmp_path: Path, entry: str, *words: str, command: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    """What starts two ranks, which have begun to take steps. With a command, that starts them."""
    process = agent(entry, str(tmp_path), *words, command=command)
    wait_for(lambda: len(pids(tmp_path)) == 2 or process.poll() is not None)
    assert process.poll() is None, process.communicate()[0]
    return process


def asked(folder: Path) -> list[str]:
    """The step at which each rank learned that it shall stop."""
    return [path.read_text() for path in sorted(folder.glob("asked*"))]


def test_a_signal_reaches_all_ranks_at_the_same_step_and_a_second_one_ends_them(tmp_path):
    """Also a rank that gets the first one twice, from outside and from the agent. That all then stop by themselves is
    seen in a whole run (test_kill.py)."""
    process = started(tmp_path, "until_asked", "in vain")
    os.kill(pids(tmp_path)[1], signal.SIGUSR1)
    process.send_signal(signal.SIGUSR1)
    wait_for(lambda: len(asked(tmp_path)) == 2)
    time.sleep(1.1)  # less would be the same wish, sent to a process group
    assert len(set(asked(tmp_path))) == 1
    assert process.poll() is None and all(map(lives, pids(tmp_path))), "one wish, though one rank was told twice"
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 128 + signal.SIGINT
    assert "SIGUSR1: the step is finished and a checkpoint written; once more to leave at once" in output
    assert output.splitlines()[-1].startswith("Interrupted: stopped by Ctrl-C; no checkpoint")
    assert not any(map(lives, pids(tmp_path)))


def test_a_signal_to_one_rank_of_torchrun_stops_both(tmp_path):
    """Each rank is the process that torchrun starts."""
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    process = started(tmp_path, "until_asked", command=torchrun)
    os.kill(pids(tmp_path)[1], signal.SIGUSR1)
    output, _ = process.communicate(timeout=PATIENCE)
    assert len(asked(tmp_path)) == 2 and len(set(asked(tmp_path))) == 1, output
    assert output.count("Stopped: stopped by signal 10") >= 1
    found = [ast.literal_eval((tmp_path / f"rank{rank}").read_text()) for rank in range(2)]
    assert [line[:4] for line in found] == [[0, 2, 3, ""], [1, 2, 3, ""]]


# ---------------------------------------------------------------------------------------------------------- parts


@pytest.fixture
def killed(monkeypatch) -> Iterator[list[tuple[int, int]]]:
    """Who would have been sent which signal; the test's own signal handlers do not outlive it."""
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: sent.append((pid, number)))
    before = [signal.getsignal(number) for number in STOP_SIGNALS]
    yield sent
    for number, handler in zip(STOP_SIGNALS, before, strict=True):
        signal.signal(number, handler)


def test_the_agent_passes_a_signal_on_and_leaves_at_the_second(tmp_path, monkeypatch, killed):
    """Two within a second are one wish. While a run is set up, not all listen, and there is nothing to lose."""
    clock, left = [100.0], []
    monkeypatch.setattr(stopping.time, "monotonic", lambda: clock[0])
    with Relay(tmp_path / "listeners", 2, left.append):
        (tmp_path / "listeners" / "11").touch()
        (tmp_path / "listeners" / "12").touch()
        for second in (100.0, 100.9, 101.1):
            clock[0] = second
            assert left == []
            signal.raise_signal(signal.SIGUSR1)
    assert set(killed) == {(11, signal.SIGUSR1), (12, signal.SIGUSR1)} and left == [signal.SIGUSR1]
    left.clear()
    (tmp_path / "listeners" / "12").unlink()
    with Relay(tmp_path / "listeners", 2, left.append) as relay:
        signal.raise_signal(signal.SIGTERM)
    assert left == [signal.SIGTERM] == [relay.signum] and relay.in_setup


def test_after_the_last_step_a_signal_changes_nothing(tmp_path, monkeypatch, killed):
    left, listeners = [], tmp_path / "listeners"
    monkeypatch.setenv(stopping.LISTENERS, str(listeners))
    with Relay(listeners, 1, left.append) as relay:
        agent = signal.getsignal(signal.SIGTERM)
        with StopRequest():
            pass
        signal.signal(signal.SIGTERM, agent)
        signal.raise_signal(signal.SIGTERM)
    assert (left, killed, relay.in_setup) == ([], [], False)


IN_SETUP = """
import ctypes, sys
from carpool.train.launch.stopping import StopRequest, leaves_setup
with leaves_setup():
    if "listens" in sys.argv:
        with StopRequest() as stop:
            print("ready", flush=True)
            while not stop.signum:
                pass
            print("asked")
            sys.exit(0)
    lock, libc = ctypes.create_string_buffer(64), ctypes.CDLL(None)
    print("ready", flush=True)
    libc.pthread_mutex_lock(lock)
    libc.pthread_mutex_lock(lock)  # for ever, and no signal wakes it
"""


FORKS = """
import os, signal, time
from carpool.train.launch.stopping import leaves_setup
with leaves_setup():
    ready, tell = os.pipe()
    if not (child := os.fork()):
        os.write(tell, b"1")
        time.sleep(60)
        os._exit(1)
    os.read(ready, 1)
    os.kill(child, signal.SIGTERM)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    time.sleep(0.5)
    print("goes on")
"""


def test_a_signal_to_a_forked_process_is_not_for_the_run():
    """As of a pool of processes that reads data and is ended."""
    ran = subprocess.run([sys.executable, "-c", FORKS], cwd=ROOT, capture_output=True, text=True, timeout=STOP_SECONDS)
    assert (ran.returncode, ran.stdout) == (0, f"{-signal.SIGTERM}\ngoes on\n"), ran.stderr


@pytest.mark.parametrize("number", STOP_SIGNALS)
@pytest.mark.parametrize("what", ["waits", "listens"])
def test_in_setup_a_signal_ends_a_rank_that_runs_no_python(what, number):
    """As one that waits for others. What listens is asked instead, as before."""
    process = subprocess.Popen(
        [sys.executable, "-c", IN_SETUP, what],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={name: value for name, value in os.environ.items() if name != "RANK"},
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    process.send_signal(number)
    shown, _ = process.communicate(timeout=STOP_SECONDS)
    if what == "listens":
        assert (process.returncode, shown) == (0, "asked\n")
    else:
        assert process.returncode == stopping.EXIT_STOPPED
        assert shown == stopping.in_setup(signal.Signals(number).name) + "\n"


def test_a_rank_notes_a_signal_and_dies_of_the_second(monkeypatch, killed):
    clock = [100.0]
    monkeypatch.setattr(stopping.time, "monotonic", lambda: clock[0])
    with StopRequest() as stop:
        for second in (100.0, 100.9, 101.1):
            clock[0] = second
            assert killed == []
            signal.raise_signal(signal.SIGTERM)
    assert stop.signum == signal.SIGTERM and killed == [(os.getpid(), signal.SIGTERM)]


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [
        ("login", "login"),
        ("login,gpu[1-3]", "login"),
        ("gpu[07-09,12],login", "gpu07"),
        ("gpu[3]", "gpu3"),
        ("r[1-2]n[05,07]-ib,x", "r1n05-ib"),
        ("a-b-[10-20]", "a-b-10"),
    ],
)
def test_first_host_of_slurms_notation(nodelist, host):
    assert first_host(nodelist) == host


def test_find_world():
    assert find_world({}) is None
    torchrun = find_world({"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "h", "MASTER_PORT": "5"})
    assert torchrun is not None
    assert (torchrun.rank, torchrun.world_size, torchrun.local_rank, torchrun.started_by) == (3, 8, 1, "torchrun")
    step = {"SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1", "SLURM_STEP_ID": "0"}
    slurm = find_world(step | {"SLURM_JOB_NODELIST": "gpu[07-08]", "SLURM_JOB_ID": "4711"})
    assert slurm is not None
    assert slurm.environment() == {
        "RANK": "5",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "1",
        "MASTER_ADDR": "gpu07",
        "MASTER_PORT": "19711",
    }
    told = find_world(step | {"MASTER_ADDR": "other", "MASTER_PORT": "7"})
    assert told is not None
    assert (told.master_addr, told.master_port) == ("other", 7)
    assert find_world(step | {"SLURM_NTASKS": "1"}) is None
    batch_script = {k: v for k, v in step.items() if k != "SLURM_STEP_ID"} | {"SLURM_PROCID": "0"}
    assert find_world(batch_script) is None, "nobody started the other tasks"
    for wrong, message in (
        ({"RANK": "x", "WORLD_SIZE": "8"}, "RANK='x' is no number"),
        ({"RANK": "8", "WORLD_SIZE": "8"}, "rank 8 of 8 ranks"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "rank 0 of 0 ranks"),
        ({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "-1"}, "local rank -1"),
        ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": "99999"}, r"port 99999 \(MASTER_PORT\)"),
        ({"RANK": "1"}, "RANK=1 is set, but WORLD_SIZE is not"),
        (step | {"SLURM_PROCID": "8"}, "rank 8 of 8 ranks"),
    ):
        with pytest.raises(ValueError, match=rf"launcher's environment variables.*{message}"):
            find_world(wrong)


def test_ranks_that_do_not_meet_say_where_they_waited(monkeypatch, capsys):
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "5"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    monkeypatch.setattr("carpool.train.launch.worker._MEETING_SECONDS", 0.0)
    with (
        pytest.raises(ValueError, match=r"the 2 ranks did not meet at h:5 \(.*\): timed out\. Was each rank"),
        _meeting(60.0),
    ):
        time.sleep(0.2)
        raise torch.distributed.DistNetworkError("timed out.")
    assert capsys.readouterr().err == "rank 1 waits for all 2 ranks at h:5 (MASTER_ADDR, MASTER_PORT)\n"
    monkeypatch.setenv(FORMED, "1.0")  # agents meet again, at another port
    with pytest.raises(torch.distributed.DistNetworkError), _meeting(60.0):
        raise torch.distributed.DistNetworkError("address already in use")


def test_a_rank_ends_where_another_program_has_the_port_and_says_nothing(monkeypatch):
    """PyTorch's store waits for its answer without end."""
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "5"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    monkeypatch.setattr("carpool.train.launch.worker._MEETING_SECONDS", 0.0)
    monkeypatch.setattr("carpool.train.launch.worker._NCCL_EXTRA_SECONDS", 0.0)
    ended: list[BaseException] = []
    monkeypatch.setattr("carpool.train.launch.worker.end_process", ended.append)
    with _meeting(0.1):
        wait_for(lambda: ended, 10)
    assert "rank 1 got no answer there in 0 s; another program may have the port. Was each rank" in str(ended[0])
    with _meeting(0.1):
        pass
    time.sleep(0.2)
    assert len(ended) == 1, "ranks that have met go on"


def failed(folder: Path, rank: int, exit_code: int, error: Exception | None = None) -> ProcessFailure:
    file = folder / f"error{rank}.json"
    if error is not None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
            record_error(error)
    return ProcessFailure(local_rank=rank, pid=1000 + rank, exitcode=exit_code, error_file=str(file))


def test_the_cause_is_told_from_its_consequences(tmp_path):
    lost = RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:42390")
    failures = {
        0: failed(tmp_path, 0, 1, lost),
        1: failed(tmp_path, 1, -signal.SIGTERM),
        2: failed(tmp_path, 2, 1, RuntimeError("the bug")),
        3: failed(tmp_path, 3, 1, ValueError("later, because of it")),
        4: failed(tmp_path, 4, -signal.SIGABRT),
        5: failed(tmp_path, 5, 7),
        6: failed(tmp_path, 6, -signal.SIGKILL),
        7: failed(tmp_path, 7, 1, RankMissingError("rank 6 did not arrive at combine within 9 s", [6])),
    }
    order = []
    while failures:
        order.append(first_cause(failures))
        del failures[order[-1]]
    assert order == [6, 2, 3, 4, 5, 7, 0, 1]


def test_a_rank_that_got_sigterm_by_itself_is_the_cause(tmp_path):
    """It came first, when the agent had told nobody yet to stop."""
    lost = RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:42390")
    failures = {1: failed(tmp_path, 1, -signal.SIGTERM), 0: failed(tmp_path, 0, 1, lost)}
    failures[2] = failed(tmp_path, 2, -signal.SIGTERM)
    assert first_cause(failures) == 1
    failure = rank_failure(failures, 3, config(tmp_path), tmp_path, 0.0)
    assert str(failure).startswith("rank 1 (pid 1001) was killed by SIGTERM; the other 2 ranks were stopped")
    assert failure.traceback == ""


def test_a_rank_that_merely_hangs_is_named_by_who_waited(tmp_path):
    text = "rank 2 did not arrive at dispatch within 9 s; rank 1 waited in vain"
    failures = {
        0: failed(tmp_path, 0, 1, RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer")),
        1: failed(tmp_path, 1, 1, RankMissingError(text, [2])),
        2: failed(tmp_path, 2, -signal.SIGTERM),
    }
    failure = rank_failure(failures, 3, config(tmp_path), tmp_path, 0.0)
    assert failure.rank == 1 and not failure.user_error
    assert f"RankMissingError: {text}; the other 2 ranks were stopped" in str(failure)
    # One that stands still does not hear SIGTERM, and is killed some seconds later.
    killed = failed(tmp_path, 2, -signal.SIGKILL)
    killed.timestamp += 10
    assert first_cause(failures | {2: killed}) == 1


def test_a_second_collective_after_one_that_took_too_long_is_no_cause():
    assert is_consequence("RuntimeError", "Application timeout caused pair closure")


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory."), MemoryError()], ids=str)
def test_too_little_memory_comes_with_what_to_do(tmp_path, error):
    failure = rank_failure({0: failed(tmp_path, 0, 1, error)}, 1, config(tmp_path), tmp_path, 0.0)
    assert f"failed: {type(error).__name__}" in str(failure) and "Less is needed with memory=auto" in str(failure)


def test_an_error_of_the_input_is_told_as_it_was_raised(tmp_path):
    lost = RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:42390")
    wrong = ValueError("data.train: something to put right")
    failures = {0: failed(tmp_path, 0, 1, lost), 1: failed(tmp_path, 1, 1, wrong)}
    failure = rank_failure(failures, 2, config(tmp_path), tmp_path, 0.0)
    assert failure.rank == 1 and failure.user_error
    assert str(failure) == "data.train: something to put right"
    assert "ValueError" in failure.traceback


def test_recorded_errors_keep_the_first_and_are_readable_by_pytorch(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    record_error(OSError(28, "No space left on device"))
    record_error(RuntimeError("what followed"))
    ours = json.loads((tmp_path / "error.json").read_text())["carpool"]
    assert (ours["type"], ours["user_error"]) == ("OSError", True)
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=1, error_file=str(tmp_path / "error.json"))
    assert "No space left" in str(failure.message)
    (tmp_path / "error.json").unlink()
    record_error(ConnectionResetError("a peer"))
    assert json.loads((tmp_path / "error.json").read_text())["carpool"]["user_error"] is False
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "gone" / "error.json"))
    record_error(RuntimeError("what cannot be written"))
    assert "what cannot be written" in caplog.text and "No such file" in caplog.text


def test_resume_hint_names_the_newest_whole_checkpoint(tmp_path):
    assert "no checkpoint was written" in resume_hint(config(tmp_path))
    (tmp_path / "metrics.jsonl").touch()
    assert "begin again with the same command and training.resume_from_checkpoint=auto" in resume_hint(config(tmp_path))
    for name in ("step-00000100", "step-00000200", "step-00000300.tmp"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    assert f"{tmp_path / 'checkpoints' / 'step-00000200'} with" in resume_hint(config(tmp_path))


def test_folders_of_agents_that_were_killed_are_removed(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for name, agent in (("carpool-killed", 2**30), ("carpool-alive", os.getpid()), ("carpool-elsewhere", 2**30)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "job.json").write_text(json.dumps({"agent": agent}))
    (tmp_path / "carpool-foreign").mkdir()
    (tmp_path / "carpool-foreign" / "job.json").write_text("[]")
    with (tmp_path / "carpool-elsewhere" / "job.json").open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        start._remove_left_folders()
    assert sorted(one.name for one in tmp_path.iterdir()) == ["carpool-alive", "carpool-elsewhere", "carpool-foreign"]


def test_number_of_local_ranks(tmp_path):
    assert local_ranks(config(tmp_path)) == 2
    assert local_ranks(config(tmp_path, "parallelism.num_ranks=none")) == 4


def test_ranks_that_do_not_fit_are_refused_before_any_is_started(tmp_path):
    with pytest.raises(ValueError, match="ep_size = 8 is larger than the number of ranks, 4"):
        run(config(tmp_path, "parallelism.num_ranks=none", "parallelism.ep_size=8"), launch_entries.fail)


def test_a_launcher_decides_how_many_ranks_there_are(tmp_path, monkeypatch):
    """A file that says how many one machine starts is a cluster's, too; what does not fit its ranks is refused."""
    with pytest.raises(ValueError, match="ep_size = 8 is larger than the number of ranks, 2"):
        config(tmp_path, "parallelism.ep_size=8")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    asked = config(tmp_path, "parallelism.ep_size=8")
    with pytest.raises(ValueError, match="ep_size = 8 is larger than the number of ranks, 4"):
        run(asked, launch_entries.fail)


@pytest.mark.skipif(os.path.exists("/dev/nvidia0"), reason="there is a GPU")
def test_gpus_that_are_not_there(tmp_path):
    with pytest.raises(ValueError, match="PyTorch finds no GPU"):
        run(config(tmp_path, "parallelism.device=cuda"), launch_entries.fail)
    # A launcher's rank refuses, too, and does not train on the CPU.
    with (
        pytest.raises(ValueError, match="PyTorch finds no GPU"),
        process_group(config(tmp_path, "parallelism.device=cuda")),
    ):
        pass


def test_entries_must_be_importable():
    assert entry_name(launch_entries.fail) == "tests.train.launch_entries:fail"
    with pytest.raises(ValueError, match="cannot be imported by the ranks"):
        entry_name(lambda config: None)
