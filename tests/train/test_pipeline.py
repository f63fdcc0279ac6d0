"""Training through the stages of a pipeline: everything as on one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from carpool.hf.balance import router_statistics
from carpool.train.run.pipeline import PipelineObjective
from tests.ranks import Ranks
from tests.train.pipeline_worker import measure

BOUND = 5e-6


def check(found: list[dict[str, float]]) -> None:
    assert max(max(one.values()) for one in found) < BOUND, found


@pytest.mark.parametrize(
    ("family", "schedule", "micro_batches", "more"),
    [
        ("olmoe", "1F1B", 3, {}),
        ("gpt_oss", "DualPipeV", 4, {"packed": True, "padded": True}),
    ],
)
def test_two_stages(two_ranks: Ranks, family: str, schedule: str, micro_batches: int, more: dict[str, Any]) -> None:
    check(two_ranks(measure, family, schedule, micro_batches, **more))


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["GPipe", "1F1B", "Interleaved1F1B", "ZBVZeroBubble", "DualPipeV"])
@pytest.mark.parametrize("family", ["olmoe", "qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_every_schedule_of_every_family(two_ranks: Ranks, family: str, schedule: str) -> None:
    aux = 0.0 if family == "deepseek_v3" else 0.3
    check(two_ranks(measure, family, schedule, 4, aux=aux))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "schedule", "more"),
    [
        ("olmoe", "1F1B", {"ep": 2}),
        ("olmoe", "DualPipeV", {"ep": 2, "dense": "replicate", "per_layer": True}),
        ("qwen3_moe", "ZBVZeroBubble", {"ep": 2, "packed": True}),
        ("qwen3_moe", "Interleaved1F1B", {"ep": 1, "tie_word_embeddings": False}),
        ("deepseek_v3", "InterleavedZeroBubble", {"ep": 2, "aux": 0.0}),
        ("gpt_oss", "GPipe", {"ep": 2, "dense": "replicate", "padded": True}),
    ],
)
def test_two_stages_of_two_ranks(ranks: Ranks, family: str, schedule: str, more: dict[str, Any]) -> None:
    check(ranks(measure, family, schedule, 4, **more))


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


@pytest.mark.slow
@pytest.mark.parametrize("breakage", [balance_alone, divided_again, without_travelling_gradient])
def test_a_wrong_reduction_is_caught(two_ranks: Ranks, breakage: Any) -> None:
    found = two_ranks(measure, "olmoe", "1F1B", 3, breakage=breakage)
    assert max(one["gradient"] for one in found) > 100 * BOUND
    assert max(one["norm"] for one in found) > 10 * BOUND
