"""Tests do not depend on the shell, the folder or the checkout that they are started in."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from rich.console import Console

from tests.environment import ROOT, WriteRefused, prepare_environment
from tests.ranks import Ranks

PROGRAM = """
import os
from pathlib import Path
from rich.console import Console


def test_it(tmp_path):
    console = Console()
    assert (console.width, console.is_terminal, console.color_system) == (80, False, None)
    assert Path.cwd() == tmp_path and not os.listdir()
    assert "SLURM_PROCID" not in os.environ and "HF_TOKEN" not in os.environ
"""


def test_relative_paths_are_in_a_folder_of_the_test(tmp_path: Path) -> None:
    assert Path.cwd() == tmp_path and ROOT not in tmp_path.parents


@pytest.mark.parametrize("how", ["file", "folder", "rename"])
def test_a_test_that_writes_into_the_checkout_is_refused(how: str, tmp_path: Path) -> None:
    (tmp_path / "here").write_text("")
    there = ROOT / "runs" if how == "folder" else ROOT / "written-by-a-test"
    before = there.exists()
    with pytest.raises(WriteRefused, match=r"writes into the checkout: .*tmp_path"):
        if how == "file":
            there.write_text("")
        elif how == "folder":
            there.mkdir(exist_ok=True)
        else:
            os.rename(tmp_path / "here", there)
    assert there.exists() == before


def test_ranks_are_refused_as_well_and_have_a_folder_elsewhere(two_ranks) -> None:
    assert all(ROOT not in (Path(folder), *Path(folder).parents) for folder in two_ranks(os.getcwd))
    with pytest.raises(RuntimeError, match="writes into the checkout"):
        two_ranks(os.mkdir, str(ROOT / "made-by-a-rank"))
    assert not (ROOT / "made-by-a-rank").exists()


def test_variables_of_a_shell_are_removed_and_other_ones_stay(tmp_path: Path) -> None:
    found = {"FORCE_COLOR": "1", "HF_TOKEN": "x", "SLURM_PROCID": "3", "CUDA_VISIBLE_DEVICES": "1", "COLUMNS": "33"}
    prepare_environment(found, tmp_path)
    assert not {"FORCE_COLOR", "HF_TOKEN", "SLURM_PROCID"} & set(found)
    assert found["CUDA_VISIBLE_DEVICES"] == "1" and found["COLUMNS"] == "80"
    assert found["XDG_CACHE_HOME"] == str(tmp_path)


@pytest.mark.parametrize(
    "shell", [{"FORCE_COLOR": "1", "COLUMNS": "33", "TTY_COMPATIBLE": "1"}, {"SLURM_PROCID": "1", "HF_TOKEN": "x"}]
)
def test_a_session_in_another_shell_and_folder(shell: dict[str, str], tmp_path: Path) -> None:
    """pytest with this conftest, started elsewhere, in a shell that has set what shells set."""
    assert Console().width == 80
    (tmp_path / "test_shell.py").write_text(PROGRAM)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "COLUMNS"))}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "tests.conftest"]
    done = subprocess.run(
        [*command, "--rootdir", str(tmp_path), "-c", "/dev/null", str(tmp_path / "test_shell.py")],
        env=environment | shell,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def _total(x: int) -> float:
    t = torch.tensor(float(dist.get_rank() + x))
    dist.all_reduce(t)
    return t.item()


def _fail_on_rank_one() -> None:
    if dist.get_rank() == 1:
        raise ValueError("only rank 1 says so")
    dist.barrier()


def test_results_errors_and_recovery(ranks: Ranks) -> None:
    assert ranks(_total, 1) == [10.0] * 4
    with pytest.raises(RuntimeError, match="only rank 1 says so"):
        ranks(_fail_on_rank_one)
    assert ranks(_total, 2) == [14.0] * 4
