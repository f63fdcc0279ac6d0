"""Steps that go wrong take a run back, without the batches; a slow rank is named."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from carpool.train.checkpoints.checkpoint_files import read_state, write_state
from carpool.train.config import load_config
from carpool.train.run import loop
from carpool.train.run.rollback import Spikes, Stragglers
from carpool.train.run.run import train
from tests.ranks import Ranks
from tests.train.test_loop import MODEL, losses, records, same_weights, start

pytestmark = pytest.mark.timeout(600)
G = 4  # sequences of a step
SETTINGS = [
    "training.max_steps=14",
    "training.save_steps=4",
    "training.eval_steps=none",
    "training.save_total_limit=none",
]


def test_what_is_a_spike_and_who_is_slow() -> None:
    spikes = Spikes(1.5)
    assert [spikes.add(loss) for loss in (9.0, 5.0, 2.0, 2.1, 1.9, 2.0, 2.2, 1.8)] == [None] * 8
    for _ in range(2):
        assert "loss 3.2 is 1.56 times the median" in str(spikes.add(3.2))
    assert spikes.add(3.0) is None
    slow = Stragglers(4, (0, 0, 1, 1))
    # Once is chance, and all ranks are slow at times.
    found = [slow.add(work) for work in ([10, 11, 10, 30], [10, 9, 10, 10], [90, 90, 91, 90], [10, 10, 10, 11])]
    assert found == [None] * 4
    found = [slow.add([10, 10.5, 10, 15]) for _ in range(6)]
    assert [one and (one["rank"], one["node"], one["steps"]) for one in found if one] == [(3, 1, 4)], found
    assert Stragglers(None, (0,)).add([1.0]) is None


def _train(output: str, settings: list[str], wrong: tuple[int, ...], factor: float, slow: float) -> str:
    """On a rank: train, with weights that are multiplied before the batches of these steps; rank 1 is slow."""
    config = load_config(None, [*MODEL, *settings, f"training.output_dir={output}"])
    gradients = loop.gradients

    def spoilt(run: Any, batches: Any) -> Any:
        if run.data.train.state_dict()["position"] // G in wrong:
            with torch.no_grad():
                list(run.built.model.parameters())[-1].mul_(factor)
        if dist.get_rank() == 1:
            time.sleep(slow)
        return gradients(run, batches)

    loop.gradients = spoilt
    try:
        train(config, command="test")
    except ArithmeticError as error:
        return str(error)
    finally:
        loop.gradients = gradients
    return ""


@pytest.mark.parametrize(("factor", "settings"), [(float("nan"), []), (300.0, ["training.spike_factor=1.2"])])
def test_a_wrong_step_takes_the_run_back(
    two_ranks: Ranks, text: list[str], tmp_path: Path, factor: float, settings: list[str]
) -> None:
    settings = [*text, *SETTINGS, *settings, "training.max_rollbacks=2"]
    output, other = tmp_path / "run", tmp_path / "other"
    # The batches of step 10, and of the second step after the checkpoint of step 8.
    assert two_ranks(_train, str(output), settings, (10, 12), factor, 0.0) == [""] * 2
    assert {step: one["wrong"] for step, one in records(output, "rollback").items()} == {8: 10}
    assert len([line for line in (output / "metrics.jsonl").read_text().splitlines() if "rollback" in line]) == 2
    # By hand: to step 8, then on without the batches of steps 9 to 12.
    assert start(two_ranks, other, [*settings, "training.stop_at_step=8"]) == [""] * 2
    checkpoint = other / "checkpoints" / "step-00000008"
    content = read_state(checkpoint)
    content["state"]["loader"]["position"] += 4 * G
    write_state(checkpoint, content)
    assert start(two_ranks, other, [*settings, "training.resume_from_checkpoint=last"]) == [""] * 2
    assert losses(output) == losses(other)
    assert same_weights(output, other, 14)


def test_too_many_wrong_steps_end_the_run(two_ranks: Ranks, text: list[str], tmp_path: Path) -> None:
    settings, output = [*text, *SETTINGS, "training.max_rollbacks=1"], tmp_path / "run"
    errors = two_ranks(_train, str(output), settings, (6, 7), float("nan"), 0.0)
    assert len(set(errors)) == 1 and "step 5: loss nan" in errors[0] and "step-00000004" in errors[0], errors
    assert records(output, "stopped")


def test_a_slow_rank_is_named(two_ranks: Ranks, text: list[str], tmp_path: Path) -> None:
    settings, output = [*text, *SETTINGS, "training.straggler_steps=4", "training.save_steps=none"], tmp_path / "run"
    assert two_ranks(_train, str(output), settings, (), 1.0, 0.15) == [""] * 2
    ((_, found),) = records(output, "straggler").items()
    assert found["rank"] == 1 and found["ratio"] > 1.3 and found["steps"] == 4, found
    work = records(output, "layers")[10]["rank_ms"]["work"]
    assert work[1] - work[0] > 100, work
