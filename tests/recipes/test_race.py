"""`carpool recipes race`: who takes part with which settings, and a race of four recipes on two ranks."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from carpool.bench.model.model_contest import ModelBenchmark
from carpool.bench.model.model_results import Case, KindRow, Row, StepTimes, Times
from carpool.bench.model.model_settings import ModelSettings as Settings
from carpool.cli import app
from carpool.recipes import names, path_of, read
from carpool.replicas.slot_costs import Costs
from carpool.replicas.slot_planners import SLOT_PLANNERS
from carpool_systems.mechanisms import BY_NAME, MECHANISMS, find, load
from carpool_systems.observe import Recorder, SpareRide, check_rank, observe
from carpool_systems.race import find_field, libraries, sameness, table
from carpool_systems.resolve import in_effect
from tests.ranks import Ranks


def settings(folder: Path, **changes: Any) -> Settings:
    return Settings(
        model="demo", layers=1, ranks=2, device="cpu", sequence=16, batch=2, routing="learned", steps=1, rounds=1,
        out=str(folder), json_only=True, **changes,
    )  # fmt: skip


def field_of(folder: Path, *recipes: str, transport: str = "alltoall") -> Any:
    return find_field(settings(folder), [load(name) for name in recipes], transport)


def test_a_transport_that_is_a_recipes_point_runs_beside_the_races(tmp_path: Path) -> None:
    found = field_of(tmp_path, "lancet", "carpool", "tutel-2dh")
    assert list(found.own) == ["lancet", "carpool", "carpool over alltoall", "tutel-2dh", "tutel-2dh over alltoall"]
    race = settings(tmp_path, own=found.own)
    ways = [race.config_of(name).moe.transport for name in found.own]
    assert ways == ["alltoall", "dedup", "alltoall", "2dh", "alltoall"]
    assert all(race.config_of(name).moe.chunks == 2 for name in list(found.own)[3:])
    # Over dedup it is all others that are changed.
    assert list(field_of(tmp_path, "lancet", "carpool", transport="dedup").own) == [
        "lancet", "lancet over dedup", "carpool",
    ]  # fmt: skip


def test_recipes_that_come_to_the_same_run_share_a_row(tmp_path: Path) -> None:
    found = field_of(tmp_path, "hetumoe", "fastmoe", "deepspeed-moe")
    assert list(found.own) == [
        "hetumoe",
        "hetumoe over alltoall, fastmoe, deepspeed-moe over alltoall",
        "deepspeed-moe",
    ]
    race = settings(tmp_path, own=found.own)
    runs = [in_effect(race.config_of(name)) | {"training.output_dir": ""} for name in found.own]
    assert all(one != other for number, one in enumerate(runs) for other in runs[:number])
    own = field_of(tmp_path, "fastmoe", "tutel-2dh").own
    of_one = settings(tmp_path, own=own, contenders=tuple(own), overrides=("moe.chunks=3",))
    of_one.check_set()  # of tutel-2dh
    of_none = settings(tmp_path, own=own, contenders=tuple(own), overrides=("moe.limit_by=groups",))
    with pytest.raises(ValueError, match=r"--set moe.limit_by changes nothing without moe.limit_ranks"):
        of_none.check_set()


def test_every_recipe_races_or_says_why_not(tmp_path: Path) -> None:
    for name in (name for name in names() if not read(name).missing):
        if read(name).get("placement", "policy") == "place":
            with pytest.raises(ValueError, match=rf"{name} cannot be raced as it is.*carpool recipes show {name}"):
                field_of(tmp_path, name)
        elif name == "bigmac":
            with pytest.raises(ValueError, match="no recipe can be raced: bigmac: it is another model"):
                field_of(tmp_path, name)
        elif name in ("ez-moe", "megatron-folding"):
            with pytest.raises(ValueError, match=rf"no recipe can be raced: {name}: parallelism.ep_size = . is larger"):
                field_of(tmp_path, name)
        elif name == "dualpipe":
            with pytest.raises(ValueError, match=r"dualpipe: 2 ranks cannot be divided by .* = 1 . 1 . 4"):
                field_of(tmp_path, name)
        else:
            assert name in field_of(tmp_path, name).own


def test_weights_are_the_same_and_other_functions_say_so(tmp_path: Path) -> None:
    found = field_of(tmp_path, "switch", "es-moe", "fastmoe")
    race = settings(tmp_path, own=found.own)
    own, plain = race.config_of("switch").model, race.config_of("fastmoe").model
    assert own.num_experts_per_tok == 1 and own.config["norm_topk_prob"] is False
    assert own.config["initializer_range"] == plain.config["initializer_range"] == 0.06
    assert found.dtype == "bfloat16" and race.config_of("es-moe").model.dtype is None, "one dtype, for all"
    assert [bool(one.changes) for one in found.own.values()] == [True, False, False]
    assert "model.num_experts_per_tok = 1" in found.own["switch"].changes


def row(label: str, loss: float, norm: float = 1.0, changes: tuple[str, ...] = ()) -> Row:
    kinds = [KindRow("rides", 3.0, 7.0)]
    times = Times.of([StepTimes(10.0, 1.0)])
    return Row(
        label, 0, loss=loss, grad_norm=norm, times=times, kinds=kinds, changes=list(changes), bytes_remote=2_500_000
    )


def test_the_table_says_what_is_exposed_and_what_is_the_same() -> None:
    rows = [row("a", 2.0), row("b, c", 2.0), row("d", 2.000001), row("e", 3.0), row("f", 3.0, changes=("top-k",))]
    case = Case("demo", "X", 10, 5, 1, 2, 3, 4, "learned", 1, None, "", {}, [], rows=[*rows, Row("g", 0)])
    case.different = ["e: loss of the first step is 3"]
    case.compare()
    headings, found = table(case)
    assert [one[-1] for one in found] == ["bitwise", "bitwise", "5e-07", "NO", "LOSSY", "not\navailable"]
    assert found[1][0] == "b\nc"
    assert dict(zip(headings, found[0], strict=True))["exposed\nms"] == "3.0"
    assert dict(zip(headings, found[0], strict=True))["sent\nMB"] == "2.50"
    assert sameness(row("x", 2.0), None, []) == "LOSSY"
    asked = {"A": ("no_such_package", ""), "B": ("torch", ""), "C": ("torch", "no_such_file.py")}
    assert libraries(asked).startswith("Not raced: A, C (not installed). Not raced: B (installed")


def run(asked: dict[str, Any]) -> dict[str, Any]:
    race = Settings.from_json(asked)
    return dataclasses.asdict(ModelBenchmark(race, torch.device("cpu"), "test").measure())


def test_recipes_race_on_two_ranks(two_ranks: Ranks, tmp_path: Path) -> None:
    recipes = [load(name) for name in ("fastmoe", "carpool", "fastermoe-shadow", "switch")]
    own = find_field(settings(tmp_path), recipes).own
    del own["carpool over alltoall"]
    race = settings(tmp_path, own=own)
    case = two_ranks(run, dataclasses.asdict(dataclasses.replace(race, contenders=tuple(own))))[0]
    found = {one["label"]: one for one in case["rows"]}
    assert list(found) == ["fastmoe", "carpool", "fastermoe-shadow", "switch"]
    assert case["different"] == [] and all(one["unavailable"] is None and one["times"] for one in found.values())
    exact = [found[name]["loss"] for name in found if name != "switch"]
    assert exact == [exact[0]] * 3 and found["switch"]["loss"] != exact[0]
    assert "dropped" in " ".join(found["switch"]["changes"]) and not found["carpool"]["changes"]
    sent = {name: one["bytes_remote"] for name, one in found.items()}
    assert 0 < sent["carpool"] < sent["fastmoe"] and sent["switch"] < sent["fastmoe"]
    assert sent["fastermoe-shadow"] != sent["fastmoe"], "copies of busy experts travelled while it warmed up"


RANKS_IMPORT = ("carpool_systems.mechanisms",)
FOLLOWED = [name for name in names() if not read(name).missing]
# Kernels that need a GPU.
ON_GPUS = ["flux-comet-triton"]
# Two nodes of two ranks, or loads that two ranks do not have; others show as much on two ranks.
ON_FOUR = {
    "deepep", "deepseek-v3-dispatch", "deepspeed-moe", "fsmoe", "hecate", "hetumoe", "hiermoe", "hybrid-ep", "laer-moe",
    "llep", "luffy", "megatron-folding", "moesys", "netmoe", "occult-pruned", "prophet", "schemoe", "tutel-2dh",
    "ultraep",
}  # fmt: skip
# What a run without a recipe does already, on CPUs: shown not to be there in a run that chooses otherwise.
DEFAULT = {"transport:dedup", "experts:grouped"}
OTHERWISE = ["moe.transport=gather", "moe.experts=reference"]


def observe_on_rank(recipe: str | None, folder: str, overrides: list[str]) -> set[str]:
    os.chdir(folder)
    return observe(None if recipe is None else read(recipe), Path(folder), overrides)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("observed"))


@pytest.mark.parametrize("name", [name for name in FOLLOWED if name not in ON_GPUS])
def test_every_mechanism_of_a_recipe_is_observed(name: str, ranks: Ranks, two_ranks: Ranks, folder: str) -> None:
    found = (ranks if name in ON_FOUR else two_ranks)(observe_on_rank, name, folder, [])
    assert all(one == found[0] for one in found)
    assert set(read(name).mechanisms) <= found[0]


def test_a_run_without_a_recipe_shows_none_of_them(ranks: Ranks, folder: str) -> None:
    assert ranks(observe_on_rank, None, folder, [])[0] == DEFAULT
    other = ranks(observe_on_rank, None, folder, [*OTHERWISE, f"training.output_dir={folder}/otherwise"])[0]
    assert other == {"transport:gather", "experts:reference"}


def test_a_recipe_without_its_setting_shows_less(ranks: Ranks, two_ranks: Ranks, folder: str) -> None:
    """A mechanism is what a run does, not what its file says."""
    for name, without, lacks in (
        ("apx-overlap", ["moe.chunks=1"], {"schedule:chunks"}),
        ("gshard", ["moe.first_choices_first=false"], {"capacity:first-choices-first"}),
        ("janus", ["moe.spare_weights=save"], {"spare:refetched"}),
        ("hecate", ["moe.spare_plan=balance"], {"spare:needed"}),
    ):
        pool, output = ranks if name in ON_FOUR else two_ranks, f"training.output_dir={folder}/{name}-without"
        found = pool(observe_on_rank, name, folder, [*without, output])[0]
        assert set(read(name).mechanisms) - found == lacks


@pytest.mark.parametrize("name", SLOT_PLANNERS)
def test_plans_of_spare_slots_are_told_apart(name: str) -> None:
    """Eight rides of other loads each: what slots hold is what one system puts there, and no other one."""
    generator, home_E, node_W = torch.Generator().manual_seed(0), torch.arange(12) // 3, torch.arange(4) // 2
    kind = SLOT_PLANNERS[name]
    planner = kind(**({"every": 1} if "every" in kind.options else {}))
    seen = Recorder()
    # Where there is room for all that is wanted, fetching pays if tokens cost more.
    spare, costs = (9, Costs(trip=400, fetch=100)) if name in ("fetch", "all") else (2, Costs(trip=4, fetch=16))
    for _ in range(8):
        load_WE = (torch.rand(4, 12, generator=generator) ** 4 * 100).int()
        plan = planner.plan(load_WE, home_E, spare, costs, node_W)
        seen.spare_rides.append(SpareRide.of(0, load_WE, home_E, node_W, plan, stayed=name in ("fetch", "all")))
    seen.called = lambda function, by=None: getattr(kind, "change", None) is function  # type: ignore[method-assign]
    assert {one for one in MECHANISMS if one.startswith("spare:") and MECHANISMS[one](seen)} == {f"spare:{name}"}


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


def test_the_command_says_what_was_not_observed(two_ranks: Ranks, tmp_path: Path) -> None:
    recipe = path_of("fastmoe").read_text().replace('"transport:alltoall"', '"transport:alltoall", "schedule:chunks"')
    (tmp_path / "mine.toml").write_text(recipe)
    said = two_ranks(check, ["fastmoe", f"{tmp_path}/mine.toml"], str(tmp_path))
    assert said == ["not observed in a run of 3 steps: mine: schedule:chunks"] * 2


def test_each_mechanism_is_of_a_recipe() -> None:
    named = {mechanism for name in FOLLOWED for mechanism in load(name).mechanisms}
    # Of pangu-ultra-moe and hexa-moe, which lack other things.
    assert named >= set(MECHANISMS) - {"saved:activations-recomputed", "sliced:experts"}
    assert all(one in MECHANISMS or one.partition(":")[0] in BY_NAME for one in named)
    assert find("magic:x") is None
    seen = Recorder()
    seen.events = ["dispatch", "dispatch", "shared experts", "dispatch came", "experts", "dispatch came", "experts"]
    assert seen.during("shared experts", "dispatch") == seen.during("experts", "dispatch") == 1
    assert seen.directly_before("dispatch came", "experts") and not seen.directly_before("experts", "dispatch")
