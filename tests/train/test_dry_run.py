"""What a dry run says goes together, and what it predicts against what runs of the same shapes took."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from carpool.planner.candidate import FSDP
from carpool.train.config import load_config
from carpool.train.plan.dry_run import dry_run
from carpool.train.plan.start_checks import check_run
from tests.train.test_cli import carpool_command, error_of

LARGE = ["model.config=olmoe-1b-7b", "data.tokenizer=bytes", "parallelism.num_ranks=1", "--gpu", "h100"]


def test_a_run_that_does_not_fit_ends_with_an_error() -> None:
    shown = carpool_command("train", "--dry-run", *LARGE)
    assert shown.exit_code == 1 and "# does not fit in 79 GiB: " in shown.stdout
    assert shown.stderr.startswith("error: this run does not fit in 79 GiB: ") and "stands above" in shown.stderr
    assert carpool_command("train", "--dry-run", *LARGE, "training.check_memory=false").exit_code == 0


def test_data_of_less_than_a_step_is_refused_before_a_run(tmp_path: Path) -> None:
    file = tmp_path / "little.txt"
    file.write_text("three short sequences\n" * 40)
    asked = [f"data.train={file}", "data.eval_fraction=0", "data.sequence_length=256", "parallelism.device=cpu"]
    asked += ["training.gradient_accumulation_steps=32", "training.per_device_train_batch_size=1"]
    asked += [f"training.output_dir={tmp_path}/run", "parallelism.num_ranks=4"]
    message = r"881 tokens, 3 sequences of data.sequence_length = 256, but one step takes 128 sequences"
    for look in (dry_run, lambda config: check_run(config, [])):
        with pytest.raises(ValueError, match=message):
            look(load_config(None, asked))
    assert not (tmp_path / "run").exists()
    assert "one step takes 128 sequences" in error_of("train", "--dry-run", *asked)
    assert "fits in" in dry_run(
        load_config(None, [*asked, "parallelism.num_ranks=1", "training.gradient_accumulation_steps=3"])
    )


def test_what_was_sized_is_said() -> None:
    settings = ["training.per_device_train_batch_size=3", "training.gradient_accumulation_steps=5"]
    shown = dry_run(load_config(None, [*settings, "parallelism.num_ranks=4"]), gpu="h100")
    assert "# 60 sequences per step: 4 data-parallel ranks x 5 micro-batches x 3\n" in shown
    assert "# predicted memory of one rank, which computes 3 sequences at a time:\n" in shown


@pytest.mark.parametrize(
    "settings",
    [[], ["parallelism.ep_size=4"], ["parallelism.dp_replicate_size=2"]],
    ids=["casts", "efsdp", "hsdp"],
)
def test_steps_are_graphs_unless_fsdp_gathers(settings: list[str]) -> None:
    for data_parallel, graphs in (("fsdp", f"none, because {FSDP}\n"), ("zero1", "forward and backward\n")):
        settings = ["model.dtype=bfloat16", "parallelism.num_ranks=8", *settings]
        shown = dry_run(load_config(None, [*settings, f"parallelism.data_parallel={data_parallel}"]), gpu="h100")
        assert f"# CUDA graphs: {graphs}" in shown and f"# data parallelism: {data_parallel}" in shown


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
    return sizes(dry_run(load_config(None, [*DEMO_SHAPE, *settings])))


def sizes(text: str) -> dict[str, float]:
    """MiB of one rank, by component."""
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


def test_ranks_that_share_sequences_divide_tokens(text: list[str], tmp_path: Path) -> None:
    (tmp_path / "long.txt").write_text("def f(x): return x\n" * 60_000)
    settings = [*DEMO_SHAPE[2:], *text, f"data.train={tmp_path}/long.txt", "data.sequence_length=4096"]
    settings += ["parallelism.num_ranks=8"]
    shared, whole = (dry_run(load_config(None, [*settings, f"parallelism.cp_size={cp}"]), gpu="h100") for cp in (4, 1))
    assert "each rank has 1/4 of every sequence, attention by ulysses" in shared
    assert "fsdp 2 x tp 1, experts ep 8 x efsdp 1, replicas 1, cp 4" in shared
    assert sizes(whole)["activations"] / 4.2 < sizes(shared)["activations"] < sizes(whole)["activations"] / 3.8
    with pytest.raises(ValueError, match=r"4096 or 4100 can"):
        dry_run(load_config(None, [*settings, "parallelism.cp_size=4", "data.sequence_length=4098"]), gpu="h100")
