"""Every recipe runs for three steps on four ranks, and each mechanism that it names is observed in what ranks do."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from carpool.cli import app
from carpool.recipes import names, path_of, read
from carpool_systems.mechanisms import BY_NAME, MECHANISMS, find, load
from carpool_systems.observe import Recorder, check_rank, observe
from tests.ranks import Ranks

RANKS_IMPORT = ("carpool_systems.mechanisms",)
FOLLOWED = [name for name in names() if not read(name).missing]
# Kernels that need a GPU.
ON_GPUS = ["flux-comet-triton"]
# What a run without a recipe does already, on CPUs: shown not to be there in a run that chooses otherwise.
DEFAULT = {"transport:dedup", "experts:grouped"}
OTHERWISE = ["moe.transport=gather", "moe.experts=reference"]


def run(recipe: str | None, folder: str, overrides: list[str]) -> set[str]:
    os.chdir(folder)
    return observe(None if recipe is None else read(recipe), Path(folder), overrides)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("observed"))


@pytest.mark.parametrize("name", [name for name in FOLLOWED if name not in ON_GPUS])
def test_every_mechanism_of_a_recipe_is_observed(name: str, ranks: Ranks, folder: str) -> None:
    found = ranks(run, name, folder, [])
    assert all(one == found[0] for one in found)
    assert set(read(name).mechanisms) <= found[0]


def test_a_run_without_a_recipe_shows_none_of_them(ranks: Ranks, folder: str) -> None:
    assert ranks(run, None, folder, [])[0] == DEFAULT
    other = ranks(run, None, folder, [*OTHERWISE, f"training.output_dir={folder}/otherwise"])[0]
    assert other == {"transport:gather", "experts:reference"}


def test_a_recipe_without_its_setting_shows_less(ranks: Ranks, folder: str) -> None:
    """A mechanism is what a run does, not what its file says."""
    for name, without, lacks in (
        ("apx-overlap", ["moe.chunks=1"], {"schedule:chunks"}),
        ("gshard", ["moe.first_choices_first=false"], {"capacity:first-choices-first"}),
        ("prophet", ["placement.prefetch=false"], {"prefetch:blockwise"}),
    ):
        found = ranks(run, name, folder, [*without, f"training.output_dir={folder}/{name}-without"])[0]
        assert set(read(name).mechanisms) - found == lacks


@pytest.mark.gpu
@pytest.mark.parametrize("name", ON_GPUS)
def test_mechanisms_of_kernels(name: str) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    done = CliRunner().invoke(app, ["recipes", "check", name, "--device", "cuda", "--ranks", "2"])
    assert done.exit_code == 0, done.output


def check(names: list[str], folder: str) -> str:
    from carpool.train.config import load_config

    try:
        check_rank(load_config(None, ["parallelism.device=cpu"]), names, folder)
    except ValueError as error:
        return str(error)
    return ""


def test_the_command_says_what_was_not_observed(ranks: Ranks, tmp_path: Path) -> None:
    recipe = path_of("fastmoe").read_text().replace('"transport:alltoall"', '"transport:alltoall", "schedule:chunks"')
    (tmp_path / "mine.toml").write_text(recipe)
    said = ranks(check, ["fastmoe", f"{tmp_path}/mine.toml"], str(tmp_path))
    assert said == ["not observed in a run of 3 steps: mine: schedule:chunks"] * 4


def test_each_mechanism_is_of_a_recipe() -> None:
    named = {mechanism for name in FOLLOWED for mechanism in load(name).mechanisms}
    assert named >= set(MECHANISMS) - {"saved:activations-recomputed"}, "of pangu-ultra-moe, which lacks other things"
    assert all(one in MECHANISMS or one.partition(":")[0] in BY_NAME for one in named)
    assert find("magic:x") is None


def test_what_is_under_way_is_counted() -> None:
    seen = Recorder()
    seen.events = ["dispatch", "dispatch", "shared experts", "dispatch came", "experts", "dispatch came", "experts"]
    assert seen.during("shared experts", "dispatch") == seen.during("experts", "dispatch") == 1
    assert seen.directly_before("dispatch came", "experts") and not seen.directly_before("experts", "dispatch")
