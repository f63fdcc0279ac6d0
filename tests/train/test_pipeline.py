"""Training through the stages of a pipeline: everything as on one process."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from carpool.hf.routing.router_balance import router_statistics
from carpool.parallel.schedules import SCHEDULES
from carpool.train.steps.pipeline_objective import PipelineObjective
from tests.ranks import Ranks
from tests.train.pipeline_worker import Pairs, compare_pairs, measure, replay
from tests.train.test_loop import losses, records, run, start, weights

BOUND = 5e-6


def check(found: list[dict[str, float]]) -> None:
    assert max(max(one.values()) for one in found) < BOUND, found


@pytest.mark.parametrize(
    ("family", "schedule", "micro_batches", "more"),
    [
        ("olmoe", "1F1B", 3, {}),
        ("gpt_oss", "DualPipeV", 4, {"packed": True, "padded": True, "paired": True}),
    ],
)
def test_two_stages(two_ranks: Ranks, family: str, schedule: str, micro_batches: int, more: dict[str, Any]) -> None:
    check(two_ranks(measure, family, schedule, micro_batches, **more))


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["GPipe", "1F1B", "Interleaved1F1B", "ZBVZeroBubble", "DualPipeV"])
@pytest.mark.parametrize("family", ["olmoe", "qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss"])
def test_every_schedule_of_every_family(two_ranks: Ranks, family: str, schedule: str) -> None:
    aux = 0.0 if family == "deepseek_v3" else 0.3
    check(two_ranks(measure, family, schedule, 4, aux=aux))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "schedule", "more"),
    [
        ("olmoe", "1F1B", {"ep": 2}),
        ("olmoe", "DualPipeV", {"ep": 2, "dense": "zero1", "per_layer": True}),
        ("qwen3_moe", "ZBVZeroBubble", {"ep": 2, "packed": True}),
        ("qwen3_moe", "Interleaved1F1B", {"ep": 1, "tie_word_embeddings": False, "paired": True}),
        ("deepseek_v3", "InterleavedZeroBubble", {"ep": 2, "aux": 0.0}),
        ("gpt_oss", "GPipe", {"ep": 2, "dense": "zero1", "padded": True}),
        ("olmoe", "1F1B", {"cp": 2, "ep": 2, "length": 8}),
        ("qwen3_moe", "ZBVZeroBubble", {"cp": 2, "ep": 1, "length": 8, "packed": True}),
        (
            "gpt_oss",
            "DualPipeV",
            {"cp": 2, "ep": 2, "length": 10, "packed": True, "padded": True, "dense": "zero1"},
        ),
        ("olmoe", "1F1B", {"ep": 2, "priority": True, "offload": True}),
        ("qwen3_moe", "ZBVZeroBubble", {"ep": 2, "priority": True, "offload": True}),
        ("qwen3_moe", "DualPipeV", {"tp": 2, "ep": 2, "paired": True}),
        ("qwen3_moe", "DualPipeV", {"ep": 1, "tie_word_embeddings": True, "paired": True}),
        ("deepseek_v3", "DualPipeV", {"ep": 2, "aux": 0.0, "recompute": "with rides", "paired": True}),
        ("olmoe", "DualPipeV", {"cp": 2, "ep": 2, "length": 8, "paired": True}),
        ("olmoe", "1F1B", {"tp": 2, "ep": 2, "sequence": False, "padded": True}),
        ("deepseek_v3", "Interleaved1F1B", {"tp": 2, "ep": 2, "aux": 0.0, "packed": True}),
    ],
)
def test_two_stages_of_two_ranks(ranks: Ranks, family: str, schedule: str, more: dict[str, Any]) -> None:
    check(ranks(measure, family, schedule, 4, **more))


# The ride of each micro-batch is under way while the other one computes.
LAYER_OF_PAIR = [
    *(("dispatch_gradients", 1), ("attention", 0), ("dispatch", 0), ("experts' backward", 1)),
    *(("combine_gradients", 1), ("experts", 0), ("combine", 0)),
]


def check_pairs(found: list[Pairs], pairs: tuple[int, int] = (3, 3)) -> None:
    """Of 2 layers in each stage. `pairs`: how many a rank of the first stages has, and one of the last."""
    for rank, one in enumerate(found):
        # Attention that is computed again is the backward's.
        assert one.equal and one.whole
        assert [what for what in one.order if what != ("attention", 1)] == pairs[
            2 * rank // len(found)
        ] * 2 * LAYER_OF_PAIR


# PyTorch's interleaved order of 4 micro-batches on 2 ranks; in some of its pairs both are in one stage.
INTERLEAVED = (3, 5)


def test_pairs_run_at_the_same_time(two_ranks: Ranks) -> None:
    check_pairs(two_ranks(compare_pairs, "olmoe", "DualPipeV", 4))
    check_pairs(two_ranks(compare_pairs, "olmoe", "Interleaved1F1B", 4), INTERLEAVED)


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "pairs"), [("DualPipeV", (3, 3)), ("Interleaved1F1B", INTERLEAVED)])
@pytest.mark.parametrize(
    ("family", "how"),
    [
        ("olmoe", {"ep": 2}),
        # Shared experts need the layer's weights after the ride, when the backward may be done.
        ("deepseek_v3", {"ep": 2, "shared_beside": False}),
        ("olmoe", {"ep": 1, "priority": True}),
        ("olmoe", {"ep": 2, "dense": "zero1"}),
        ("olmoe", {"ep": 2, "recompute": "rides kept", "priority": True}),
        ("olmoe", {"ep": 2, "offload": True}),
    ],
)
def test_pairs_of_two_ranks(
    ranks: Ranks, family: str, how: dict[str, Any], schedule: str, pairs: tuple[int, int]
) -> None:
    check_pairs(ranks(compare_pairs, family, schedule, 4, **how), pairs)


def test_recorded_stages(two_ranks: Ranks) -> None:
    """What a graph computes needs GPUs (tests/gpu/test_pipeline_gpu.py). What is recorded, in which order, and between
    which tensors, does not."""
    assert two_ranks(replay, "olmoe", "DualPipeV", 4) == [[True] * 4] * 2


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_recorded_stages_of_two_ranks(ranks: Ranks, schedule: str) -> None:
    assert ranks(replay, "gpt_oss", schedule, 4, ep=2, dense="zero1") == [[True] * 4] * 4


@pytest.mark.slow
def test_tied_embeddings_on_one_rank(two_ranks: Ranks) -> None:
    check(two_ranks(measure, "qwen3_moe", "DualPipeV", 4, tie_word_embeddings=True))


def test_tied_embeddings_on_two_ranks_are_refused(two_ranks: Ranks) -> None:
    with pytest.raises(RuntimeError, match=r"ties the weights .* on two ranks: set parallelism.pp_schedule"):
        two_ranks(measure, "qwen3_moe", "1F1B", 2, tie_word_embeddings=True)


def balance_alone(objective: PipelineObjective) -> None:
    """The balance loss of the last stage's layers only."""
    add = objective._add_statistics

    def own(stage: int, received: Any, logits: Any, padding_T: Any) -> torch.Tensor:
        statistics_LS = add(stage, received, logits, padding_T)
        rows = objective.rows[stage]
        mine_LS = router_statistics(logits, objective.top_k, padding_T)
        return torch.cat([statistics_LS[: rows.start].detach(), mine_LS, statistics_LS[rows.stop :]])

    objective._add_statistics = own  # type: ignore[method-assign]


def divided_again(objective: PipelineObjective) -> None:
    """Gradients that PyTorch divides by micro-batches once more."""
    make = objective.pipeline._make

    def scaled(*args: Any) -> Any:
        made = make(*args)
        made.scale_grads = True
        # Without a module's parameters PyTorch finds nothing to divide.
        for stage in getattr(made, "_stages", None) or [made._stage]:
            stage.submod.register_module("model", objective.model)
        return made

    objective.pipeline._make = scaled  # type: ignore[method-assign,assignment]


def without_travelling_gradient(objective: PipelineObjective) -> None:
    """Hidden states that are cut off from the stage that made them."""
    compute = objective.pipeline._modules[0].compute
    for module in objective.pipeline._modules:
        module.compute = lambda stage, number, received: compute(
            stage, number, tuple(0.5 * one + 0.5 * one.detach() for one in received)
        )


def weights_forgotten(objective: PipelineObjective) -> None:
    """What the first backward leaves to later is never computed."""
    split = objective.split
    assert split is not None
    right, calls = split.weights, itertools.count()

    def weights() -> Any:
        compute = right()
        return compute if next(calls) else lambda: None

    objective.pipeline.work = objective.pipeline.work._replace(weights=weights)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "breakage"),
    [
        ("1F1B", balance_alone),
        ("1F1B", divided_again),
        ("1F1B", without_travelling_gradient),
        ("ZBVZeroBubble", weights_forgotten),
    ],
)
def test_a_wrong_reduction_is_caught(two_ranks: Ranks, schedule: str, breakage: Any) -> None:
    found = two_ranks(measure, "olmoe", schedule, 3, breakage=breakage)
    assert max(one["gradient"] for one in found) > 100 * BOUND
    assert max(one["norm"] for one in found) > 10 * BOUND


def test_a_run_is_that_of_ranks_with_all_layers(two_ranks: Ranks, text: list[str], tmp_path: Path) -> None:
    """Losses, norms, evaluation, records, the checkpoint; and it goes on with other stages."""
    common = [*text, "training.max_steps=4", "training.save_steps=2", "training.eval_steps=2"]
    whole = [*common, "training.per_device_train_batch_size=2", "training.gradient_accumulation_steps=2"]
    cut = [*common, "parallelism.pp_size=2", "training.per_device_train_batch_size=4"]
    cut += ["training.gradient_accumulation_steps=2"]
    assert start(two_ranks, tmp_path / "whole", whole) == [""] * 2
    assert start(two_ranks, tmp_path / "cut", cut) == [""] * 2
    for step, (loss, norm) in losses(tmp_path / "whole").items():
        assert losses(tmp_path / "cut")[step] == pytest.approx((loss, norm), rel=1e-5)
    for kind in ("train", "eval"):
        one, other = (records(tmp_path / name, kind) for name in ("whole", "cut"))
        assert one.keys() == other.keys() and one
        for step, line in one.items():
            for key in {
                "loss",
                "aux_loss",
                "tokens",
                "tokens_seen",
                "load_max_over_mean",
                "router_entropy",
            } & line.keys():
                assert other[step][key] == pytest.approx(line[key], rel=1e-4), key
    assert len(records(tmp_path / "cut", "layers")[1]["load"]) == len(records(tmp_path / "whole", "layers")[1]["load"])
    info = [json.loads((tmp_path / name / "run.json").read_text()) for name in ("whole", "cut")]
    assert info[0]["model"] == info[1]["model"] and info[1]["parallelism"]["pp_schedule"] == "1F1B"
    stored = weights(tmp_path / "cut", 2)
    for name, weight in weights(tmp_path / "whole", 2).items():
        torch.testing.assert_close(stored[name], weight, rtol=1e-4, atol=1e-5)
    checkpoint = tmp_path / "cut" / "checkpoints" / "step-00000002"
    on = [*whole, f"training.resume_from_checkpoint={checkpoint}"]
    assert start(two_ranks, tmp_path / "on", on) == [""] * 2
    assert losses(tmp_path / "on")[4] == pytest.approx(losses(tmp_path / "cut")[4], rel=1e-5)


DEEPSEEK = {
    "hidden_size": 32, "intermediate_size": 32, "moe_intermediate_size": 16, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 4, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2,
    "topk_group": 1, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8,
    "v_head_dim": 8, "first_k_dense_replace": 0,
}  # fmt: skip


@pytest.mark.slow
def test_biases_move_by_the_load_of_their_own_layer(two_ranks: Ranks, text: list[str], tmp_path: Path) -> None:
    """Layers of two stages are not added up."""
    common = [
        *text,
        "model.model_type=deepseek_v3",
        *(f"model.config.{key}={value}" for key, value in DEEPSEEK.items()),
    ]
    common += ["data.sequence_length=32", "moe.bias_update_rate=0.01", "training.gradient_accumulation_steps=2"]
    common += ["training.max_steps=3", "training.save_steps=3", "training.sample_prompt=none"]
    for name, own in {"whole": 2, "cut": 4}.items():
        more = [f"training.per_device_train_batch_size={own}", f"parallelism.pp_size={own // 2}"]
        assert two_ranks(run, str(tmp_path / name), [*common, *more]) == [""] * 2
    whole, cut = ({k: v for k, v in weights(tmp_path / name, 3).items() if "bias" in k} for name in ("whole", "cut"))
    assert len(whole) == 4 and all(bias.abs().max() > 0 for bias in whole.values())
    assert all(torch.equal(cut[name], bias) for name, bias in whole.items())
