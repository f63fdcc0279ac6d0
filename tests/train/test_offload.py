"""Optimizer state in host memory and gradients consumed in the backward: runs are the same, and say what they do."""

from __future__ import annotations

import json
import re
from pathlib import Path
from unittest import mock

import pytest
import torch

from carpool.activations import host_memory as host
from carpool.hf.seam.expert_rides import rides
from carpool.optim import in_backward as consumed
from carpool.optim import offloaded_state as streamed
from carpool.optim.in_backward import ConsumedGradients
from carpool.planner.decisions.chosen import Decisions
from carpool.train.config import load_config
from carpool_systems.cpu_experts import COUNTS, choose_few_tokens, measured_times, most_tokens
from tests.memory.test_host_experts import model_of
from tests.ranks import Ranks
from tests.train import test_loop
from tests.train.test_loop import losses, run, same_weights

MODEL = [
    *test_loop.MODEL, "model.dtype=bfloat16", "training.max_steps=3", "training.save_steps=none",
    "training.eval_steps=none", "training.eval_on_start=false", "training.max_grad_norm=0",
    "training.optimizer_state_dtype=int8",
]  # fmt: skip
FSDP = ["parallelism.data_parallel=fsdp"]
BOTH = ["training.optimizer_offload=host", "training.optimizer_in_backward=true"]


def _run_in_small_parts(output: str, overrides: list[str]) -> str:
    """Many tiles, and each gradient by itself; all experts are updated before the backward ends."""
    early: list[int] = []
    finish = ConsumedGradients.finish

    def count(gradients: ConsumedGradients) -> torch.Tensor:
        early.append(len(gradients.optimizer._early))
        return finish(gradients)

    small = mock.patch.object(consumed, "LEAST_ELEMENTS", 1), mock.patch.object(streamed, "TILE_BYTES", 9000)
    with small[0], small[1], mock.patch.object(ConsumedGradients, "finish", count):
        problem = run(output, overrides)
    return problem or f"{min(early) >= 2 * 2}"


@pytest.mark.parametrize(
    ("dense", "where"),
    [
        ("zero1", "host"),
        *(pytest.param(*one, marks=pytest.mark.slow) for one in (("fsdp", "host"), ("zero1", "disk"))),
    ],
)
def test_streaming_and_consuming_change_nothing(
    two_ranks: Ranks, text: list[str], tmp_path: Path, dense: str, where: str
) -> None:
    folders = []
    away = [
        f"training.optimizer_offload={where}",
        "training.optimizer_in_backward=true",
        f"memory.disk_folder={tmp_path}",
    ]
    away += [f"memory.experts={where}", "memory.expert_loading=popular"]
    for name, overrides in {"kept": [], "consumed": away}.items():
        folder = tmp_path / name
        settings = [*MODEL, *text, f"parallelism.data_parallel={dense}", *overrides]
        assert (
            two_ranks(_run_in_small_parts if overrides else run, str(folder), settings)
            == ["True" * bool(overrides)] * 2
        )
        folders.append(folder)
    kept, ours = (losses(folder) for folder in folders)
    assert len(kept) == 3 and [loss for loss, _ in kept.values()] == [loss for loss, _ in ours.values()]
    # The norm is added up in another order.
    assert [norm for _, norm in ours.values()] == pytest.approx([norm for _, norm in kept.values()], rel=1e-6)
    assert same_weights(*folders, 3)
    states = [json.loads((folder / "run.json").read_text())["optimizer"]["state"] for folder in folders]
    assert states == ["device", where]


def test_the_cpu_takes_experts_as_long_as_it_is_faster() -> None:
    times = {"cpu": dict.fromkeys(COUNTS, 1.0), "loaded": dict.fromkeys(COUNTS, 2.0)}
    assert most_tokens(times) == COUNTS[-1]
    times["cpu"] |= {8: 2.0}  # and faster again with 16: noise
    assert most_tokens(times) == 4
    assert most_tokens({**times, "loaded": dict.fromkeys(COUNTS, 0.5)}) == 0
    own = next(iter(rides(model_of()).values()))
    cpu = torch.device("cpu")
    measured = measured_times(own, torch.bfloat16, cpu)
    assert all(0 < time < 1e6 for of_counts in measured.values() for time in of_counts.values())
    # Where nothing would be loaded, nothing is measured; what a run has recorded is taken again.
    assert choose_few_tokens("auto", own, torch.bfloat16, cpu, Decisions()).answer == 0
    given = Decisions()
    assert choose_few_tokens(7, own, torch.bfloat16, cpu, given).answer == 7
    recorded = {**given.record()["cpu_expert_tokens"], "how": "measured"}
    assert (
        choose_few_tokens("auto", own, torch.bfloat16, cpu, Decisions(lambda: {"cpu_expert_tokens": recorded})).answer
        == 7
    )


@pytest.mark.slow
@pytest.mark.parametrize("where", ["host", "disk"])
def test_a_run_goes_on_from_host_memory_bit_by_bit(
    two_ranks: Ranks, text: list[str], tmp_path: Path, where: str
) -> None:
    """The norm of the step before is in the checkpoint, and so are state on disk and experts of both tiers."""
    settings = [
        *MODEL, *text, "training.optimizer_offload=disk", "training.optimizer_in_backward=true",
        f"memory.experts={where}",
    ]  # fmt: skip
    settings += ["training.grad_clipping=delayed", "training.max_grad_norm=0.5"]
    settings += ["training.max_steps=4", "training.save_steps=2"]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert two_ranks(run, str(whole), settings) == [""] * 2
    assert two_ranks(run, str(parts), [*settings, "training.stop_at_step=2"]) == [""] * 2
    assert two_ranks(run, str(parts), [*settings, "training.resume_from_checkpoint=last"]) == [""] * 2
    assert losses(whole) == losses(parts)
    assert same_weights(parts, whole, 4)
    assert "gradients are clipped by the norm of the step before" in (whole / "run.json").read_text()


@pytest.mark.parametrize("schedule", ["1F1B", pytest.param("ZBVZeroBubble", marks=pytest.mark.slow)])
def test_stages_take_frozen_experts_from_host_memory(
    two_ranks: Ranks, text: list[str], tmp_path: Path, schedule: str
) -> None:
    """Several micro-batches are under way; each finds the experts that it has chosen."""
    settings = [*MODEL, *text, "parallelism.pp_size=2", f"parallelism.pp_schedule={schedule}", "training.max_steps=2"]
    settings += [
        "training.gradient_accumulation_steps=4",
        "training.freeze=experts",
        "model.config.num_hidden_layers=4",
    ]
    settings += ["training.per_device_train_batch_size=1", "data.sequence_length=4"]
    away = ["memory.experts=host", "memory.expert_loading=popular"]
    for name, more in {"device": [], "host": away}.items():
        assert two_ranks(run, str(tmp_path / name), [*settings, *more]) == [""] * 2
    assert losses(tmp_path / "host") == losses(tmp_path / "device") and len(losses(tmp_path / "host")) == 2
    refused = [*settings, *away, "training.freeze=none"]
    with pytest.raises(ValueError, match=r"must be frozen \(training.freeze=experts\).*memory.experts = 'device'"):
        load_config(None, refused)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([], "the gradients of experts that are trained would be on the device all together"),
        (
            ["training.optimizer_in_backward=true", *FSDP, "parallelism.ep_size=1"],
            "data-parallel ranks shard or cast these experts",
        ),
        (
            ["training.optimizer_in_backward=true", "parallelism.data_parallel=zero1", "parallelism.ep_size=1"],
            "data-parallel ranks shard or cast these experts",
        ),
        (["training.optimizer_in_backward=true", "training.bf16=true", "model.dtype=float32"], "stored in float32"),
    ],
)
def test_experts_that_cannot_be_away(
    two_ranks: Ranks, text: list[str], tmp_path: Path, overrides: list[str], message: str
) -> None:
    found = two_ranks(run, str(tmp_path / "run"), [*MODEL, *text, "memory.experts=host", *overrides])
    assert len(set(found)) == 1 and message in found[0]
    assert not (tmp_path / "run").exists()


def _short(output: str, overrides: list[str]) -> str:
    disk = mock.patch("shutil.disk_usage", lambda _: mock.Mock(free=10_000))
    with mock.patch.object(host, "free_host_memory", lambda: 10_000), disk:
        return run(output, overrides)


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("host", "GiB of host memory, and 0.0 GiB are free"),
        ("disk", "GiB on disk, and .* has 0.0 GiB left: free some space, or name another folder"),
    ],
)
def test_too_little_memory_is_said_before_training(
    two_ranks: Ranks, text: list[str], tmp_path: Path, where: str, message: str
) -> None:
    found = two_ranks(_short, str(tmp_path / "run"), [*MODEL, *text, f"training.optimizer_offload={where}"])
    assert len(set(found)) == 1 and re.search(message, found[0])
    assert not (tmp_path / "run").exists()
