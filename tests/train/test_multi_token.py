"""Multi-token prediction layers: what a run saves, resumes and exports, and who reads that. Their gradients:
tests/meshes."""

from __future__ import annotations

import json
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig
from transformers.modeling_layers import MtpModel

from carpool.hf.architecture_changes import add_change
from carpool.hf.build_model import build_model
from carpool.hf.multi_token import unknown_weights
from carpool.hf.weights.original_layout import OriginalLayout
from carpool.layout import ExpertLayout
from carpool.layout.layouts import Layouts
from carpool.train.blueprint import meta_model
from carpool.train.checkpoints.record_trace import load_run, record
from carpool.train.config import load_config
from carpool.train.run.finish import sample
from carpool.train.steps.training_objective import Objective
from tests.full_tensor import full_tensor
from tests.hf.tiny_models import discover, tiny_config
from tests.ranks import Ranks
from tests.train.test_cli import error_of
from tests.train.test_loop import goes_on, records, run, weights

TINY = [
    "model.model_type=deepseek_v3", "model.config.hidden_size=32", "model.config.intermediate_size=32",
    "model.config.moe_intermediate_size=16", "model.config.num_hidden_layers=2", "model.config.num_attention_heads=4",
    "model.config.num_key_value_heads=4", "model.config.n_routed_experts=8", "model.config.num_experts_per_tok=2",
    "model.config.n_shared_experts=1", "model.config.n_group=2", "model.config.topk_group=1",
    "model.config.first_k_dense_replace=1", "model.config.q_lora_rank=16", "model.config.kv_lora_rank=16",
    "model.config.qk_nope_head_dim=8", "model.config.qk_rope_head_dim=8", "model.config.v_head_dim=8",
]  # fmt: skip
STEPS = [
    "data.sequence_length=32", "training.per_device_train_batch_size=2", "training.max_steps=4",
    "training.save_steps=2", "training.eval_steps=none", "training.warmup_steps=1", "training.sample_prompt=none",
    "training.save_pretrained=true", "training.learning_rate=0.01",
]  # fmt: skip
DEPTH = 2

# As published checkpoints of DeepSeek-V3 and GLM-4.5 name them, of a layer behind the last one.
FURTHER = "embed_tokens enorm hnorm eh_proj shared_head.norm shared_head.head input_layernorm post_attention_layernorm"
MLP = "gate_proj up_proj down_proj"
ATTENTION = {
    "deepseek_v3": "q_a_proj q_a_layernorm q_b_proj kv_a_proj_with_mqa kv_a_layernorm kv_b_proj o_proj",
    "glm4_moe": "q_proj k_proj v_proj o_proj",
}


def with_layers(config: Any, depth: int) -> Any:
    add_change(config, "mtp", {"depth": depth})
    return config


@pytest.mark.parametrize(("family", "tied"), [("deepseek_v3", False), ("glm4_moe", True)])
def test_names_of_files(family: str, tied: bool) -> None:
    config = tiny_config(discover()[family], tie_word_embeddings=tied)
    number, experts = config.num_hidden_layers, config.n_routed_experts
    plain = OriginalLayout(meta_model(config), None, {})
    layout = OriginalLayout(meta_model(with_layers(config, 1)), None, {})
    found, before = ({name for file in one.files.values() for name in file} for one in (layout, plain))
    modules = [*FURTHER.split(), *(f"self_attn.{one}" for one in ATTENTION[family].split()), "mlp.gate"]
    modules += [f"mlp.shared_experts.{one}" for one in MLP.split()]
    modules += [f"mlp.experts.{expert}.{one}" for expert in range(experts) for one in MLP.split()]
    expected = {f"model.layers.{number}.{one}.weight" for one in modules}
    expected.add(f"model.layers.{number}.mlp.gate.e_score_correction_bias")
    assert found - before == expected and before <= found
    assert (plain.config_keys, layout.config_keys) == tuple({"num_nextn_predict_layers": n} for n in (0, 1))


def printed(output: str, overrides: list[str]) -> tuple[str, str]:
    with redirect_stdout(StringIO()) as text:
        return run(output, overrides), text.getvalue()


@pytest.fixture(scope="module")
def trained(two_ranks: Ranks, text: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("further") / "run"
    settings = [*TINY, *STEPS, *text, f"mtp.depth={DEPTH}", "training.gradient_accumulation_steps=2"]
    for error, said in two_ranks(printed, str(output), settings):
        assert error == "", error
        assert not said or "2 MTP layers (mtp.depth); vLLM gives all but the first one other hidden" in said
    return output


def test_a_run_records_their_losses_and_goes_on(
    two_ranks: Ranks, trained: Path, text: list[str], tmp_path: Path
) -> None:
    lines = records(trained)
    assert all(len(line["mtp_losses"]) == DEPTH for line in lines.values())
    assert all(ours < first for ours, first in zip(lines[4]["mtp_losses"], lines[1]["mtp_losses"], strict=True))
    settings = [*TINY, *STEPS, *text, f"mtp.depth={DEPTH}", "training.gradient_accumulation_steps=2"]
    goes_on(two_ranks, trained, tmp_path / "more", settings, 2)
    assert {at: line["mtp_losses"] for at, line in records(tmp_path / "more").items()} == {
        at: line["mtp_losses"] for at, line in lines.items() if at > 2
    }


def test_an_evaluation_passes_them_by(trained: Path) -> None:
    model, tokenizer, _ = load_run(trained)
    assert "def " in sample(model.eval(), tokenizer, "def ", max_new_tokens=2)
    assert list(record(trained, tokens=32).layers) == ["model.layers.1.mlp.experts"]


def test_transformers_reads_what_is_exported(trained: Path) -> None:
    """The model without these layers, and its own module for drafts with them: the same weights, and losses."""
    folder = trained / "model"
    config = json.loads((folder / "config.json").read_text())
    assert config["num_nextn_predict_layers"] == DEPTH and "carpool_changes" not in config
    model: Any = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa")
    stored = weights(trained, 4)
    assert all(torch.equal(one, stored[f"model/{name}"].to(one.dtype)) for name, one in model.named_parameters())

    model._keys_to_ignore_on_load_unexpected = [r"model\.layers\.[23]\..*"]  # of published sizes it knows them
    drafts: Any = MtpModel.from_pretrained(model)
    ids_BL = torch.randint(0, 256, (2, 12), generator=torch.Generator().manual_seed(1))
    expected, positions = [], torch.arange(12)[None]
    with torch.no_grad():
        hidden_BLH = model.model(ids_BL, use_cache=False).last_hidden_state
        for k in range(1, DEPTH + 1):
            hidden_BLH = drafts.forward_layer(k - 1, hidden_BLH, positions, None, input_ids=ids_BL.roll(-k, 1))
            logits = model.lm_head(hidden_BLH)[:, : -1 - k].flatten(0, 1)
            expected.append(float(F.cross_entropy(logits, ids_BL[:, 1 + k :].flatten(), reduction="sum")))

    changes = {"mtp": {"depth": DEPTH}}
    ours = build_model(folder, distributed_config=None, dtype=torch.float32, seed=0, changes=changes)
    objective = Objective(ours, top_k=2, aux_coef=0.0, dp_size=1, autocast=None)
    objective.train_mtp(0.3)
    _, _, predicted = objective._computed({"input_ids": ids_BL, "labels": ids_BL})
    assert predicted is not None
    losses, numbers = predicted.sums.view(-1, 2).unbind(1)
    assert numbers.tolist() == [20, 18] and losses.tolist() == pytest.approx(expected, rel=1e-5)


def begun(folder: str, depth: int, sizes: dict[str, int]) -> dict[str, torch.Tensor]:
    """On a rank: the whole tensors of a checkpoint's model with so many layers."""
    mesh = DistributedConfig(**sizes, ep_implementation="carpool")
    changes: Any = {"mtp": {"depth": depth}}
    model = build_model(folder, distributed_config=mesh, dtype=torch.float32, seed=3, changes=changes)
    return {name: full_tensor(one).detach().clone() for name, one in model.named_parameters()}


def test_a_checkpoints_layers_are_trained_on_and_others_begin_at_random(
    two_ranks: Ranks, trained: Path, text: list[str], tmp_path: Path
) -> None:
    folder, stored = trained / "model", weights(trained, 4)
    of_two = two_ranks(begun, str(folder), DEPTH + 1, {"fsdp_size": 2, "ep_size": 2})[0]
    changes: Any = {"mtp": {"depth": DEPTH + 1}}
    one: Any = build_model(folder, distributed_config=None, dtype=torch.float32, seed=3, changes=changes)
    fresh = {name for name in of_two if f"model/{name}" not in stored}
    assert fresh and all(name.startswith("model.layers.4.") for name in fresh)
    for name, parameter in one.named_parameters():
        assert torch.equal(of_two[name], parameter) and (
            name in fresh or torch.equal(of_two[name], stored[f"model/{name}"])
        )
    assert one.model.layers[4].eh_proj.weight.std() > 0 and bool((one.model.layers[4].enorm.weight == 1).all())
    # And without.
    (error, said), _ = two_ranks(
        printed, str(tmp_path / "run"), [f"model.path={folder}", *STEPS, *text, "training.max_steps=1"]
    )
    assert error == "" and "2 of the 2 MTP layers of" in said and "mtp.depth=2 trains them" in said
    # Where experts are may come from a trace, which has no such layers.
    Layouts({"model.layers.1.mlp.experts": ExpertLayout.permuted([7, 6, 5, 4, 3, 2, 1, 0], 2)}).save(
        tmp_path / "layout"
    )
    settings = [f"model.path={folder}", *STEPS, *text, "training.max_steps=2", "mtp.depth=1"]
    assert two_ranks(run, str(tmp_path / "one"), [*settings, f"moe.layout={tmp_path / 'layout'}"]) == [""] * 2
    assert load_run(tmp_path / "one")[0].config.num_nextn_predict_layers == 1
    config = json.loads((tmp_path / "run" / "model" / "config.json").read_text())
    assert config["num_nextn_predict_layers"] == 0


def test_weights_of_other_families_are_found() -> None:
    config = tiny_config(discover()["qwen3_next"])
    further = ["mtp.fc.weight", "mtp.layers.0.mlp.gate.weight", f"model.layers.{config.num_hidden_layers}.norm.weight"]
    assert unknown_weights(config, ["model.layers.0.mlp.gate.weight", "model.norm.weight", *further]) == further


def test_what_cannot_be_is_refused() -> None:
    for wrong, why in {
        "parallelism.tp_size=2": "does not shard multi-token prediction layers",
        "training.loss_chunk_size=0": "MTP losses need chunks",
        "adapter.kind=lora": "an adapter leaves MTP layers out",
    }.items():
        with pytest.raises(ValueError, match=why):
            load_config(None, [*TINY, "mtp.depth=1", wrong])
    assert "mtp.depth = 31, but data.sequence_length allows 30" in error_of(
        "train", *TINY, *STEPS, "mtp.depth=31", "--dry-run"
    )
    with pytest.raises(
        ValueError, match=r"mtp\.depth = 1: .* OlmoeForCausalLM name MTP layers, .* deepseek_v3, glm4_moe"
    ):
        meta_model(with_layers(tiny_config(discover()["olmoe"]), 1))
