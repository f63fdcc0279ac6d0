"""Launching: real processes, real signals. Each launch costs the start of two processes that import torch."""

from __future__ import annotations

import ast
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from carpool.train.config import Config, load_config
from carpool.train.launch.failure import first_cause, rank_failure, resume_hint
from carpool.train.launch.start import RankFailure, find_world, local_ranks, run
from carpool.train.launch.stopping import EXIT_STOPPED
from carpool.train.launch.worker import entry_name, record_error
from carpool.train.launch.world import first_host
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
    return [int(path.read_text()) for path in sorted(folder.glob("pid*")) if path.read_text()]


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


@pytest.fixture
def forever(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """An agent whose two ranks exchange without end, and have begun to."""
    process = agent("exchange_forever", str(tmp_path))
    wait_for(lambda: len(pids(tmp_path)) == 2 or process.poll() is not None)
    yield process
    process.kill()
    process.wait()


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


def test_a_killed_rank_is_named_and_the_others_stop(tmp_path):
    checkpoint = tmp_path / "checkpoints" / "step-00000100"
    checkpoint.mkdir(parents=True)
    killed = []

    def kill() -> None:
        wait_for(lambda: len(pids(tmp_path)) == 2)
        killed.append(time.monotonic())
        os.kill(pids(tmp_path)[1], signal.SIGKILL)

    handlers = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]
    thread = threading.Thread(target=kill)
    thread.start()
    with pytest.raises(RankFailure) as caught:
        run(config(tmp_path), launch_entries.exchange_forever, folder=str(tmp_path))
    assert time.monotonic() - killed[0] < STOP_SECONDS
    thread.join()
    failure = caught.value
    victim, peer = pids(tmp_path)[1], pids(tmp_path)[0]
    assert (failure.rank, failure.pid, failure.exit_code) == (1, victim, -signal.SIGKILL)
    assert not failure.user_error
    first, *_, last = str(failure).splitlines()
    assert first.startswith(f"rank 1 (pid {victim}) was killed by SIGKILL")
    assert last == f"Continue from {checkpoint} with the same command and training.resume_from_checkpoint=last"
    assert not lives(peer)
    assert [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)] == handlers
    assert "GLOO_SOCKET_IFNAME" not in os.environ, "the environment is as before"


@pytest.mark.parametrize("how", [pytest.param("bug", marks=pytest.mark.slow), "crash"])
def test_the_error_of_a_rank_is_told_once(tmp_path, how, capfd):
    with pytest.raises(RankFailure) as caught:
        run(config(tmp_path), launch_entries.fail, rank=1, how=how)
    failure, text = caught.value, str(caught.value)
    assert failure.rank == 1 and not failure.user_error
    if how == "bug":
        assert text.startswith(f"rank 1 (pid {failure.pid}) failed: RuntimeError: a bug of our own; the other rank was")
        assert failure.traceback.count("RuntimeError: a bug of our own") == 1
        assert "launch_entries.py" in failure.traceback
        assert text.endswith(f"No checkpoint was written to {tmp_path} yet, so start again")
    else:
        assert "was killed by SIGSEGV" in text
        assert "  last words" in text, "what a rank wrote before it crashed"
        assert "in fail" in text, "and where it was"
    shown = capfd.readouterr()
    assert "Traceback" not in shown.err + shown.out, "the caller decides what is shown"


def test_ranks_die_with_their_agent(tmp_path, forever):
    workers = pids(tmp_path)
    forever.kill()
    wait_for(lambda: not any(map(lives, workers)), STOP_SECONDS)


def test_ctrl_c_ends_all(tmp_path, forever):
    workers = pids(tmp_path)
    forever.send_signal(signal.SIGINT)
    output, _ = forever.communicate(timeout=STOP_SECONDS)
    assert forever.returncode == 130
    assert output == f"Interrupted: stopped by Ctrl-C; no checkpoint was written to {tmp_path} yet, so start again\n"
    assert not any(map(lives, workers))


def started(tmp_path: Path, entry: str, *words: str, command: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    """What starts two ranks, which have begun to take steps. With a command, that starts them."""
    process = agent(entry, str(tmp_path), *words, command=command)
    wait_for(lambda: len(pids(tmp_path)) == 2 or process.poll() is not None)
    assert process.poll() is None, process.communicate()[0]
    return process


def asked(folder: Path) -> list[str]:
    """The step at which each rank learned that it shall stop."""
    return [path.read_text() for path in sorted(folder.glob("asked*"))]


def test_sigterm_reaches_all_ranks_at_the_same_step(tmp_path):
    """Also a rank that gets it twice, from outside and from the agent."""
    process = started(tmp_path, "until_asked")
    os.kill(pids(tmp_path)[1], signal.SIGTERM)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == EXIT_STOPPED, output
    assert output.splitlines()[-1] == "Stopped: stopped by signal 15"
    assert len(asked(tmp_path)) == 2 and len(set(asked(tmp_path))) == 1
    assert not any(map(lives, pids(tmp_path)))


def test_a_second_signal_leaves_at_once(tmp_path):
    process = started(tmp_path, "until_asked", "in vain")
    process.send_signal(signal.SIGUSR1)
    wait_for(lambda: len(asked(tmp_path)) == 2)
    time.sleep(1.1)  # less would be the same wish, sent to a process group
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 128 + signal.SIGTERM
    assert "SIGUSR1: the step is finished and a checkpoint written; once more to leave at once" in output
    assert output.splitlines()[-1].startswith("Interrupted: stopped by SIGTERM; no checkpoint")
    assert not any(map(lives, pids(tmp_path)))


def test_sigterm_ends_at_once_what_does_not_listen(tmp_path, forever):
    workers = pids(tmp_path)
    forever.send_signal(signal.SIGTERM)
    output, _ = forever.communicate(timeout=PATIENCE)
    assert forever.returncode == 128 + signal.SIGTERM
    assert output.startswith("Interrupted: stopped by SIGTERM; ")
    assert not any(map(lives, workers))


TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")


def test_a_signal_to_one_rank_of_torchrun_stops_both(tmp_path):
    process = started(tmp_path, "until_asked", command=TORCHRUN)
    os.kill(pids(tmp_path)[1], signal.SIGUSR1)
    output, _ = process.communicate(timeout=PATIENCE)
    assert len(asked(tmp_path)) == 2 and len(set(asked(tmp_path))) == 1, output
    assert output.count("Stopped: stopped by signal 10") >= 1


def test_under_torchrun_this_process_is_the_rank(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m"]
    subprocess.run(
        [*command, "tests.train.launch_agent", "report_in", str(tmp_path), "torchrun"],
        cwd=ROOT,
        env=clean_environment(),
        check=True,
        timeout=PATIENCE,
        capture_output=True,
    )
    found = [ast.literal_eval((tmp_path / f"rank{rank}").read_text()) for rank in range(2)]
    assert [line[:4] for line in found] == [[0, 2, 3, "torchrun"], [1, 2, 3, "torchrun"]]


def test_under_slurm_each_task_is_a_rank(tmp_path):
    tasks = [
        agent(
            "report_in",
            str(tmp_path),
            "slurm",
            SLURM_PROCID=str(rank),
            SLURM_LOCALID=str(rank),
            SLURM_NTASKS="2",
            SLURM_STEP_ID="0",
            SLURM_JOB_ID="4711",
            SLURM_STEP_NODELIST="localhost",
            # Derived from the job otherwise, which another process of this machine may have taken.
            MASTER_PORT=str(port),
        )
        for port in [free_port()]
        for rank in range(2)
    ]
    for task in tasks:
        output, _ = task.communicate(timeout=PATIENCE)
        assert task.returncode == 0, output
    found = [ast.literal_eval((tmp_path / f"rank{rank}").read_text()) for rank in range(2)]
    assert [line[:4] for line in found] == [[0, 2, 3, "slurm"], [1, 2, 3, "slurm"]]


# ---------------------------------------------------------------------------------------------------------- parts


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
    with pytest.raises(ValueError, match=r"launcher's environment variables.*'x'"):
        find_world({"RANK": "x", "WORLD_SIZE": "8"})


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


def test_an_error_of_the_input_is_told_as_it_was_raised(tmp_path):
    lost = RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:42390")
    wrong = ValueError("data.train: something to put right")
    failures = {0: failed(tmp_path, 0, 1, lost), 1: failed(tmp_path, 1, 1, wrong)}
    failure = rank_failure(failures, 2, config(tmp_path), tmp_path, 0.0)
    assert failure.rank == 1 and failure.user_error
    assert str(failure) == "data.train: something to put right"
    assert "ValueError" in failure.traceback


def test_recorded_errors_keep_the_first_and_are_readable_by_pytorch(tmp_path, monkeypatch):
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


def test_resume_hint_names_the_newest_whole_checkpoint(tmp_path):
    assert "no checkpoint was written" in resume_hint(config(tmp_path))
    for name in ("step-00000100", "step-00000200", "step-00000300.tmp"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    assert f"{tmp_path / 'checkpoints' / 'step-00000200'} with" in resume_hint(config(tmp_path))


def test_number_of_local_ranks(tmp_path):
    assert local_ranks(config(tmp_path)) == 2
    assert local_ranks(config(tmp_path, "parallelism.num_ranks=none")) == 4


def test_ranks_that_do_not_fit_are_refused_before_any_is_started(tmp_path):
    with pytest.raises(ValueError, match="ep_size = 8 is larger than the number of ranks, 4"):
        run(config(tmp_path, "parallelism.num_ranks=none", "parallelism.ep_size=8"), launch_entries.fail)


@pytest.mark.skipif(os.path.exists("/dev/nvidia0"), reason="there is a GPU")
def test_gpus_that_are_not_there(tmp_path):
    with pytest.raises(ValueError, match="PyTorch finds no GPU"):
        run(config(tmp_path, "parallelism.device=cuda"), launch_entries.fail)


def test_entries_must_be_importable():
    assert entry_name(launch_entries.fail) == "tests.train.launch_entries:fail"
    with pytest.raises(ValueError, match="cannot be imported by the ranks"):
        entry_name(lambda config: None)
