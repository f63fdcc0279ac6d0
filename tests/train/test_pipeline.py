"""Runs through the stages of a pipeline are those of ranks with all layers; pairs of micro-batches run at the same
time; and what is recorded of stages. Steps, and every gradient: tests/meshes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from carpool.hf.pipeline_stages import cut_model
from carpool.parallel.schedules import PAIRED, SCHEDULES
from carpool.train.config import load_config
from carpool.train.plan.dry_run import dry_run
from tests.hf.parity import EXCEPTIONS
from tests.hf.tiny_models import discover, tiny_config
from tests.ranks import Ranks
from tests.train.pipeline_worker import Pairs, compare_pairs, compare_with_one_process, compiled_error, replay
from tests.train.test_loop import MODEL, losses, records, run, start, weights

RANKS_IMPORT = ["tests.hf.every_class"]

# The ride of each micro-batch is under way while the other one computes.
LAYER_OF_PAIR = [
    *(("dispatch_gradients", 1), ("attention", 0), ("dispatch", 0), ("experts' backward", 1)),
    *(("combine_gradients", 1), ("experts", 0), ("combine", 0)),
]


# Why stages cannot have them. All others that a run can load are compared.
_MORE = "alone from layer to layer"
NOT_CUT = {
    "deepseek_v4": "get what other stages do not have", "gemma4": "get what other stages do not have",
    "diffusion_gemma": _MORE, "glm5_next": _MORE, "glm_moe_dsa": _MORE, "hy_v4": _MORE, "mistral_large4": _MORE,
    "zaya": _MORE, "inkling2": "get what other stages do not have", "openai_privacy_filter": "no output layer",
    "qwen4_exp": "hidden states of another shape",
}  # fmt: skip
CUT = sorted(
    folder
    for folder, one in discover().items()
    if one.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and folder not in EXCEPTIONS.keys() | NOT_CUT.keys()
)


def test_stages_of_every_family(two_ranks: Ranks) -> None:
    """Losses and gradients of two stages are those of one process."""
    assert len(CUT) > 40
    for found in two_ranks(compare_with_one_process, CUT):
        assert {family: error for family, error in found.items() if error > 1e-5} == {}


@pytest.mark.parametrize("family", NOT_CUT)
def test_families_that_cannot_be_cut(family: str) -> None:
    architecture = discover()[family]
    with torch.device("meta"):
        model = architecture.model_class(tiny_config(architecture))
    with pytest.raises(ValueError, match=NOT_CUT[family]):
        cut_model(model, 2)


def test_layers_that_read_tokens_are_not_cut() -> None:
    """Also where the model leaves out, without a word, what it makes of token ids."""
    architecture = discover()["olmoe"]
    with torch.device("meta"):
        model = architecture.model_class(tiny_config(architecture))
    own = model.model.forward

    def forward(input_ids: torch.Tensor | None = None, **given: Any) -> Any:
        return own(input_ids=input_ids, unknown=None if input_ids is None else input_ids == 0, **given)

    assert len(cut_model(model, 2)) == 2
    model.model.forward = forward
    with pytest.raises(ValueError, match="something else without token ids"):
        cut_model(model, 2)


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
    # Embeddings of future tokens travel beside what the layers have made. Deferred gradients of shared experts read
    # the gradient that a stage receives.
    assert two_ranks(replay, "deepseek_v3", "ZBVZeroBubble", 4, aux=0.0, further=2) == [[True] * 4] * 2
    # All ranks go on eagerly, with the same bits, and say why.
    assert two_ranks(replay, "olmoe", "DualPipeV", 4, fails=True, paired=True) == [[True] * 4] * 2


@pytest.mark.parametrize("schedule", PAIRED)
def test_recorded_pairs(two_ranks: Ranks, schedule: str) -> None:
    """A pair is recorded by two threads, as one piece of work."""
    assert two_ranks(replay, "olmoe", schedule, 4, paired=True) == [[True] * 4] * 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "paired"), [*((one, False) for one in SCHEDULES), *((one, True) for one in PAIRED)]
)
def test_recorded_stages_of_two_ranks(ranks: Ranks, schedule: str, paired: bool) -> None:
    assert ranks(replay, "gpt_oss", schedule, 4, ep=2, dense="zero1", paired=paired) == [[True] * 4] * 4


@pytest.mark.parametrize(
    ("schedule", "how"),
    [
        ("1F1B", {}),
        *(
            pytest.param(schedule, how, marks=pytest.mark.slow)
            for schedule, how in (
                ("ZBVZeroBubble", {"recompute": "rides kept"}),
                ("Interleaved1F1B", {"paired": True}),
                ("DualPipeV", {"paired": True}),
            )
        ),
    ],
)
def test_compiled_stages(two_ranks: Ranks, schedule: str, how: dict[str, Any]) -> None:
    """Recorded, they have the bits of compiled steps, and the loss and gradients of eager ones."""
    assert two_ranks(replay, "olmoe", schedule, 4, compiled="eager", **how) == [[True] * 4] * 2
    for error in two_ranks(compiled_error, "olmoe", schedule, 4, **how):
        assert error < 1e-6


def test_tied_embeddings_are_on_one_rank() -> None:
    settings = ["parallelism.num_ranks=2", "parallelism.pp_size=2", "parallelism.device=cpu", "data.tokenizer=bytes"]
    settings += [*MODEL, "training.gradient_accumulation_steps=4", "model.config.num_hidden_layers=4"]
    settings.append("model.config.tie_word_embeddings=true")
    assert "DualPipeV" in dry_run(load_config(None, [*settings, "parallelism.pp_schedule=DualPipeV"]))
    with pytest.raises(ValueError, match=r"ties the weights .* on two ranks: set parallelism.pp_schedule"):
        dry_run(load_config(None, settings))


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
