"""What a run is predicted to need, against what runs of the same shapes took."""

from __future__ import annotations

import re

import pytest

from carpool.train.config import load_config
from carpool.train.plan.dry_run import dry_run

DEMO_SHAPE = [
    "parallelism.device=cpu", "parallelism.num_ranks=2", "data.sequence_length=256", "model.config.num_experts=16",
    "model.config.num_hidden_layers=2", "model.config.num_attention_heads=4", "model.config.num_key_value_heads=4",
    "model.config.num_experts_per_tok=4", "model.model_type=olmoe",
]  # fmt: skip
UNEVEN = [
    "parallelism.num_ranks=3", "parallelism.ep_size=3", "model.config.num_experts=16", "training.freeze=non_expert",
    "training.optimizer_in_backward=true", "training.max_grad_norm=0",
]  # fmt: skip


def predicted(*settings: str) -> dict[str, float]:
    """MiB of one rank, by component."""
    text = dry_run(load_config(None, [*DEMO_SHAPE, *settings]))
    return {name: float(size.replace(",", "")) for name, size in re.findall(r"#   (\w+) +([\d,.]+) MiB", text)}


@pytest.mark.parametrize(
    ("hidden", "batch", "measured"), [(128, 2, 96.5), (128, 16, 359.5), (512, 2, 512.8)], ids=["small", "long", "wide"]
)
def test_a_rank_on_a_cpu_takes_about_what_is_predicted(hidden: int, batch: int, measured: float) -> None:
    """Measured: the peak of four steps' resident set beyond the libraries, 2 ranks, 2 cores."""
    sizes = [f"model.config.{key}={hidden}" for key in ("hidden_size", "intermediate_size")]
    found = predicted(*sizes, f"training.per_device_train_batch_size={batch}")
    assert found["total"] == pytest.approx(measured, rel=0.2)
    assert found["total"] == pytest.approx(sum(size for name, size in found.items() if name != "total"), abs=1)


def test_the_last_node_may_have_fewer_gpus() -> None:
    text = dry_run(load_config(None, ["parallelism.num_ranks=20", "parallelism.ep_size=4"]), gpu="h100")
    assert "fits in 79 GiB" in text and "# time of a step: " in text


def test_it_says_what_it_does_not_count() -> None:
    text = dry_run(load_config(None, ["parallelism.device=cpu"]))
    assert "not counted: libraries loaded before the run" in text and "time of a step" not in text


def test_two_micro_batches_at_a_time_take_the_memory_of_both() -> None:
    one = predicted("training.gradient_accumulation_steps=2")
    two = predicted("training.gradient_accumulation_steps=2", "moe.schedule=two-batch")
    halves = predicted("moe.schedule=two-batch")
    assert 1.4 * one["activations"] < two["activations"] < 2 * one["activations"]
    assert halves["activations"] == predicted()["activations"]


def test_it_refuses_what_the_run_would_refuse() -> None:
    speeds = ["parallelism.rank_speeds=[1.0, 0.4]", "training.per_device_train_batch_size=2"]
    with pytest.raises(ValueError, match=r"cuts each rank's only micro-batch in two, but by parallelism.rank_speeds"):
        predicted(*speeds, "moe.schedule=two-batch")
    with pytest.raises(ValueError, match=r"parallelism.ep_size = 3 does not divide the experts"):
        dry_run(load_config(None, ["memory.experts=host", *UNEVEN]), gpu="h100")
