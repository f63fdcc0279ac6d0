"""`parallelism.data_parallel`: a run with whole non-expert parameters equals one with FSDP2."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from carpool.parallel.degrees import Degrees
from carpool.train.config.schema import Config
from carpool.train.plan.division import decide_data_parallel
from tests.ranks import Ranks
from tests.train import test_loop
from tests.train.test_loop import goes_on, losses, run, weights

MODEL = [
    *test_loop.MODEL, "training.gradient_accumulation_steps=2", "training.max_steps=4", "training.save_steps=2",
    "training.eval_steps=2", "training.warmup_steps=1", "training.max_grad_norm=0.5", 'training.sample_prompt="def "',
    # A large epsilon: no rounding decides a sign.
    "training.sample_tokens=3", "training.save_pretrained=true", "training.adam_epsilon=1e-4",
]  # fmt: skip


def start(ranks: Ranks, output: Path, *overrides: str) -> Path:
    assert ranks(run, str(output), [*MODEL, *overrides]) == [""] * ranks.world_size
    return output


def near(ours: dict[Any, Any], theirs: dict[Any, Any], bound: float = 1e-5) -> bool:
    assert ours.keys() == theirs.keys()
    return all(ours[step] == pytest.approx(theirs[step], rel=bound) for step in theirs)


@pytest.fixture(scope="module")
def by_fsdp(two_ranks: Ranks, text: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return start(two_ranks, tmp_path_factory.mktemp("runs") / "fsdp", *text, "parallelism.data_parallel=fsdp")


@pytest.fixture(scope="module")
def whole(two_ranks: Ranks, text: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return start(two_ranks, tmp_path_factory.mktemp("runs") / "whole", *text)


def test_losses_checkpoints_and_exports_are_equal(by_fsdp: Path, whole: Path) -> None:
    assert near(losses(whole), losses(by_fsdp))
    ours, theirs = weights(whole, 4), weights(by_fsdp, 4)
    assert ours.keys() == theirs.keys()
    assert all(torch.allclose(ours[name], value, rtol=1e-4, atol=1e-6) for name, value in theirs.items())
    sizes = [
        {
            path.relative_to(folder): path.stat().st_size
            for path in sorted((folder / "checkpoints").rglob("*.safetensors"))
        }
        for folder in (whole, by_fsdp)
    ]
    assert sizes[0] == sizes[1] and len(sizes[0]) == 2 * 2 * 2
    exported = [load_file(folder / "model" / "model.safetensors") for folder in (whole, by_fsdp)]
    assert exported[0].keys() == exported[1].keys()
    assert all(torch.allclose(exported[0][name], value, rtol=1e-4, atol=1e-6) for name, value in exported[1].items())


def test_the_record_says_which_and_why(by_fsdp: Path, whole: Path) -> None:
    infos = [json.loads((folder / "run.json").read_text()) for folder in (whole, by_fsdp)]
    told = [info["decisions"]["data_parallel"] for info in infos]
    assert [(one["name"], one["how"]) for one in told] == [("zero1", "default"), ("fsdp", "given")]
    assert "whole non-expert parameters fit: about" in infos[0]["decisions"]["data_parallel"]["why"]
    memory = [info["predicted"]["memory_per_rank_bytes"] for info in infos]
    # Of two layers, FSDP has both in full at a time.
    assert memory[0]["parameters"] == memory[1]["parameters"] and memory[0]["optimizer"] == memory[1]["optimizer"]
    assert memory[0]["gradients"] > memory[1]["gradients"]


def test_resumes_bit_by_bit(two_ranks: Ranks, text: list[str], whole: Path, tmp_path: Path) -> None:
    goes_on(two_ranks, whole, again := tmp_path / "again", [*MODEL, *text], 2)
    assert json.loads((again / "run.json").read_text())["decisions"]["data_parallel"]["why"].startswith("as recorded")


@pytest.mark.parametrize("dense", ["fsdp", "zero1"])
def test_the_setting_may_change_at_a_resume(
    two_ranks: Ranks, text: list[str], by_fsdp: Path, whole: Path, tmp_path: Path, dense: str
) -> None:
    before = whole if dense == "fsdp" else by_fsdp
    resume = f"training.resume_from_checkpoint={before}/checkpoints/step-00000002"
    again = start(two_ranks, tmp_path / "again", *text, resume, f"parallelism.data_parallel={dense}")
    assert near(losses(again), {step: value for step, value in losses(by_fsdp).items() if step > 2})


@pytest.mark.parametrize(
    "settings",
    [
        ["moe.schedule=two-batch", "memory.layer_activations=recompute"],
        ["parallelism.ep_size=2", "training.freeze=non_expert"],
        [
            "parallelism.ep_size=2",
            "training.optimizer_in_backward=true",
            "training.gradient_accumulation_steps=1",
            "training.max_grad_norm=0",
        ],
        pytest.param(
            ["placement.policy=migrate", "placement.every=1", "placement.solver=search"],
            marks=pytest.mark.slow,
        ),
        pytest.param(["parallelism.dp_replicate_size=2", "training.bf16=true"], marks=pytest.mark.slow),
    ],
    ids=["two-batch", "efsdp", "in-backward", "placement", "hsdp"],
)
def test_equals_fsdp_with(ranks: Ranks, two_ranks: Ranks, text: list[str], tmp_path: Path, settings: list[str]) -> None:
    few = ["max_steps=3", "save_steps=none", "save_pretrained=false", "eval_steps=none", "sample_prompt=none"]
    settings = [*(f"training.{one}" for one in few), *settings]
    # What divides a dimension of the mesh needs four ranks.
    pool = ranks if any("_size=" in setting for setting in settings) else two_ranks
    runs = [
        start(pool, tmp_path / dense, *text, *settings, f"parallelism.data_parallel={dense}")
        for dense in ("zero1", "fsdp")
    ]
    assert near(losses(runs[0]), losses(runs[1]), 3e-3 if "training.bf16=true" in settings else 1e-5)


SHARED = ["parallelism.ep_size=2", "training.sample_prompt=none", "training.save_pretrained=false"]


@pytest.fixture(scope="module")
def shared(ranks: Ranks, text: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Experts of two expert-parallel groups, with moments in int8."""
    settings = [*SHARED, "training.optimizer_state_dtype=int8", "model.dtype=bfloat16"]
    output = start(ranks, tmp_path_factory.mktemp("runs") / "shared", *text, *settings)
    record = json.loads((output / "run.json").read_text())["decisions"]["data_parallel"]
    assert record["name"] == "zero1" and "whole parameters, experts too, fit" in record["why"]
    return output


@pytest.mark.parametrize(
    "mesh",
    [
        [],
        ["parallelism.data_parallel=fsdp"],
        ["parallelism.ep_size=4"],
        pytest.param(["parallelism.ep_size=1"], marks=pytest.mark.slow),
        pytest.param(["parallelism.dp_replicate_size=2"], marks=pytest.mark.slow),
    ],
    ids=["same", "fsdp", "ep4", "ep1", "hsdp"],
)
def test_shared_experts_go_on_on_another_mesh(
    ranks: Ranks, text: list[str], shared: Path, tmp_path: Path, mesh: list[str]
) -> None:
    settings = [*SHARED, "training.optimizer_state_dtype=int8", "model.dtype=bfloat16", *mesh]
    if not mesh:
        goes_on(ranks, shared, tmp_path / "there", [*MODEL, *text, *settings], 2)
        return
    resume = f"training.resume_from_checkpoint={shared}/checkpoints/step-00000002"
    there = start(ranks, tmp_path / "there", *text, *settings, resume)
    assert near(losses(there), {step: value for step, value in losses(shared).items() if step > 2}, 2e-2)
    if mesh == ["parallelism.data_parallel=fsdp"]:
        further = [f"training.resume_from_checkpoint={there}/checkpoints/step-00000004", "training.max_steps=5"]
        back = start(ranks, tmp_path / "back", *text, *settings, "parallelism.data_parallel=zero1", *further)
        assert list(losses(back)) == [5]


@pytest.mark.parametrize(
    ("settings", "degrees", "memory", "answer", "why"),
    [
        ({}, Degrees(fsdp=4, ep=4), 100, "zero1", "fit"),
        ({}, Degrees(fsdp=4, ep=4), 99, "fsdp", "of a rank would be used, more than 80%"),
        ({}, Degrees(fsdp=4, ep=4), 79, "fsdp", "do not fit"),
        ({}, Degrees(fsdp=1), 100, "fsdp", "nothing to shard"),
        ({}, Degrees(fsdp=2, tp=2, ep=2), 100, "fsdp", "tensor parallelism"),
        ({"moe": {"priority": True}}, Degrees(fsdp=4, ep=4), 100, "fsdp", "moe.priority"),
        ({"parallelism": {"data_parallel": "zero1"}}, Degrees(fsdp=4, ep=4), 1, "zero1", "asked for"),
    ],
)
def test_auto_decides_by_memory(settings: dict[str, Any], degrees: Degrees, memory: int, answer: str, why: str) -> None:
    config = Config.model_validate({"model": {"model_type": "olmoe"}, "data": {"train": "x"}, **settings})
    found, reason = decide_data_parallel(config, degrees, {"zero1": 80, "fsdp": 1}.__getitem__, memory)
    assert found == answer and why in reason


def test_what_cannot_be_whole_is_refused() -> None:
    settings = {"model": {"model_type": "olmoe"}, "data": {"train": "x"}}
    config = Config.model_validate({**settings, "moe": {"priority": True}, "parallelism": {"data_parallel": "zero1"}})
    with pytest.raises(ValueError, match=r"moe\.priority .*use 'fsdp' or 'auto'"):
        decide_data_parallel(config, Degrees(fsdp=4, ep=4), lambda _: 0, 1)
