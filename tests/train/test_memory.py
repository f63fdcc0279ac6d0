"""`memory.budget`: what a run takes, records and takes again; what a dry run says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from carpool.planner.candidate import POLICIES
from carpool.planner.decisions.chosen import Decisions
from carpool.planner.machine.hardware import CPU
from carpool.train.blueprint import expert_counts, meta_model, model_source
from carpool.train.build.policy_times import small_config, small_model
from carpool.train.config import load_config
from carpool.train.config.schema_base import size_of
from carpool.train.data.tokenizer import load_tokenizer
from carpool.train.plan.dry_run import dry_run
from carpool.train.plan.estimate import MemoryEstimate
from carpool.train.plan.memory_fit import MEMORY_KIND, choose_memory
from carpool.train.plan.start_checks import decisions_of
from carpool.train.run.run import start_run
from tests.ranks import Ranks
from tests.train.test_loop import MODEL


@pytest.mark.parametrize(
    ("size", "number"), [("70GiB", 70 * 2**30), ("1.5 GB", 1_500_000_000), ("300mib", 300 * 2**20), ("7B", 7)]
)
def test_sizes(size: str, number: int) -> None:
    assert size_of(size, "") == number


def run(output: str, settings: list[str]) -> dict[str, Any]:
    """What run.json says of a run that has begun."""
    config = load_config(None, [*MODEL, *settings, f"training.output_dir={output}"])
    one = start_run(config, None, "test")
    one.close()
    kept = {own.policies for own in one.built.rides}
    assert len(kept) == 1 and kept.pop() == one.config.memory.activation_policies
    info: dict[str, Any] = json.loads((Path(output) / "run.json").read_text()) if one.main else {}
    return info


def test_a_run_takes_what_fits(two_ranks: Ranks, text: list[str], tmp_path: Path) -> None:
    settings = [*text, "parallelism.data_parallel=fsdp", "data.sequence_length=64"]
    total = _estimate(settings, 2)("dedup", "fsdp")["total"]
    found = two_ranks(run, str(tmp_path / "run"), [*settings, f"memory.budget={total // 2**10 - 20}KiB"])[0]
    assert found["decisions"]["memory"]["how"] == "measured" and "(measured)" in found["decisions"]["memory"]["why"]
    times = found["decisions"]["memory"]["milliseconds"]
    assert {item: list(one) for item, one in times.items()} == {
        "expert_inputs": ["resend", "offload"], "expert_activations": ["recompute", "offload"],
        "layer_activations": ["recompute", "offload"],
        "moe_outputs": ["recompute"],
    }  # fmt: skip
    assert all(ms >= 0 for one in times.values() for ms in one.values())
    assert found["predicted"]["memory_per_rank_bytes"]["total"] <= total - 20 * 2**10
    assert [
        found["decisions"]["memory"][item]
        for item in ("expert_inputs", "expert_activations", "layer_activations", "moe_outputs")
    ] != ["save"] * 4
    with pytest.raises(ValueError, match=r"memory.budget = 1 MiB is not enough.*memory.budget=\d+MiB, which takes"):
        choose_memory(_estimate([*settings, "memory.budget=1MiB"]), "dedup", CPU, Decisions())


def test_a_resumed_run_takes_what_it_recorded(tmp_path: Path) -> None:
    estimate = _estimate(["memory.budget=10GiB", "memory.expert_activations=recompute"])
    first = choose_memory(estimate, "dedup", CPU, Decisions())
    assert first.answer == {
        "expert_inputs": "save",
        "expert_activations": "recompute",
        "layer_activations": "save",
        "moe_outputs": "save",
    }
    # As if that run had measured.
    record = MEMORY_KIND.record(first) | {
        "expert_inputs": "offload",
        "how": "measured",
        "milliseconds": {"expert_inputs": {}},
    }
    (tmp_path / "run.json").write_text(json.dumps({"decisions": {"memory": record}}))
    again = choose_memory(estimate, "dedup", CPU, decisions_of([tmp_path]))
    assert again.answer["expert_inputs"] == "offload" and again.why == "as recorded in this run (measured)"
    assert again.times == {"expert_inputs": {}}
    larger = choose_memory(_estimate(["memory.budget=11GiB"]), "dedup", CPU, decisions_of([tmp_path]))
    assert larger.answer["expert_inputs"] == "save" and "budget was 10GiB, is 11GiB" in larger.why


def test_what_is_measured_decides() -> None:
    shape = [
        "parallelism.data_parallel=fsdp",
        "model.config.num_hidden_layers=6",
        "training.per_device_train_batch_size=64",
    ]
    plain = _estimate(shape, 4)("dedup", "fsdp")["total"]
    estimate = _estimate([*shape, f"memory.budget={plain // 2**10 - 20}KiB"], 4)
    every = {item: dict.fromkeys(policies[1:], 5.0) for item, policies in POLICIES.items()}
    taken = []
    for item, policy in (
        ("expert_activations", "recompute"),
        ("expert_inputs", "offload"),
        ("layer_activations", "recompute"),
    ):
        times = {**every, item: {**every[item], policy: 1.0}}
        chosen = choose_memory(estimate, "dedup", CPU, Decisions(), measure_times=lambda: times)  # noqa: B023
        assert chosen.how == "measured" and chosen.times == times and "for 1.0 ms more" in chosen.why
        taken.append([one for one in POLICIES if chosen.answer[one] != "save"])
    assert taken == [["expert_activations"], ["expert_inputs"], ["layer_activations"]]
    # What two batches offload cannot be captured.
    shape = [
        *shape,
        "parallelism.data_parallel=zero1",
        "moe.schedule=two-batch",
        "training.gradient_accumulation_steps=2",
    ]
    plain, answers = _estimate(shape, 4, True)("nvlink", "zero1")["total"], []
    times = {**every, "expert_activations": {"recompute": 9.0, "offload": 1.0}}
    for graphs in ("auto", "on"):
        settings = [*shape, f"memory.budget={plain // 2**10 - 20}KiB", f"training.cuda_graphs={graphs}"]
        chosen = choose_memory(
            _estimate(settings, 4, True),
            "nvlink",
            CPU,
            Decisions(),
            measure_times=lambda: times,
        )
        answers.append(chosen.answer["expert_activations"])
    assert answers == ["offload", "save"]

    def never() -> Any:
        raise AssertionError("what fits costs nothing")

    fits = choose_memory(_estimate(["memory.budget=10GiB"]), "dedup", CPU, Decisions(), measure_times=never)
    assert set(fits.answer.values()) == {"save"} and fits.how == "default"


def test_what_is_measured_is_a_step_of_a_small_model_alone() -> None:
    given = [
        "training.cuda_graphs=on", "placement.every=10", "training.gradient_accumulation_steps=4",
        "memory.budget=1GiB", "memory.expert_inputs=resend",
    ]  # fmt: skip
    small = small_config(load_config(None, [*MODEL, *given]))
    assert small.placement.every is None and small.moe.layout == "contiguous"
    assert small.training.gradient_accumulation_steps == 1 and small.training.cuda_graphs == "auto"
    assert small.memory.budget is None and set(small.memory.policies.values()) == {"save"}
    config = AutoConfig.for_model("deepseek_v3", num_hidden_layers=9, first_k_dense_replace=2, vocab_size=5000)
    small = small_model(config, 2)
    assert (small.num_hidden_layers, small.vocab_size, small.pad_token_id) == (5, 256, None)
    kinds = ["sliding_attention", "full_attention"] * 4
    config = AutoConfig.for_model("gpt_oss", num_hidden_layers=8, layer_types=kinds)
    assert small_model(config, 0).layer_types == kinds[:3] and config.num_hidden_layers == 8


def _estimate(settings: list[str], num_ranks: int = 1, cuda: bool = False) -> Any:
    config = load_config(None, [*MODEL, *settings])
    model = meta_model(model_source(config, load_tokenizer("bytes", None, None)))
    degrees = config.parallelism.resolve(num_ranks, min(expert_counts(model).values()))
    return MemoryEstimate(config, degrees, model, cuda)


def test_a_dry_run_shows_what_was_chosen_and_what_it_costs() -> None:
    shown = dry_run(load_config(None, [*MODEL, "memory.budget=70GB", "memory.expert_activations=offload"]), gpu="h100")
    line = next(line for line in shown.splitlines() if line.startswith("# memory: "))
    assert (
        "expert_activations offload, layer_activations save" in line
        and "of 66,757 MiB, for " in line
        and "ms more in a micro" in line
    )
    assert "# host memory of one rank" in shown and "# fits in 65 GiB" in shown


def test_a_dry_run_for_other_machines_says_how() -> None:
    config = load_config(None, [*MODEL, "parallelism.num_ranks=2", "moe.transport=nvlink"])
    with pytest.raises(ValueError, match=r"nvlink.*no CUDA device.*meant for GPUs of another machine: --gpu h100"):
        dry_run(config)
    assert "fits in 79 GiB" in dry_run(config, None, "h100")
