"""What `model.path` means: defaults of fine-tuning, where each is from, data that must be said, and epochs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from carpool.train.blueprint import Blueprint
from carpool.train.config import Config, TrainingSection, load_config, resolve_config
from carpool.train.config.fine_tuning import defaults
from carpool.train.plan.dry_run import dry_run
from carpool.train.steps.training_objective import Objective
from examples.tiny_chat_model import make_tokenizer
from tests.hf.tiny_models import discover, tiny_model


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return make(tmp_path / "tiny", {"max_position_embeddings": 512, "dtype": "bfloat16"})


def make(folder: Path, changed: dict[str, Any]) -> Path:
    """A checkpoint's folder; its weights are none of the model's."""
    folder.mkdir(exist_ok=True)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    keys = {"model_type": "olmoe", "num_key_value_heads": 2, "num_experts": 8, "vocab_size": 300, **sizes, **changed}
    (folder / "config.json").write_text(json.dumps(keys))
    save_file({"a": torch.zeros(1)}, folder / "model.safetensors")
    return folder


def fill(folder: Path) -> None:
    """Give a checkpoint's folder the weights that its config.json says, and change nothing else."""
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    model.save_pretrained(folder / "whole")
    (folder / "whole" / "model.safetensors").replace(folder / "model.safetensors")


def test_a_checkpoint_is_fine_tuned_and_not_as_the_demo(checkpoint: Path) -> None:
    found = resolve_config(None, [f"model.path={checkpoint}", "data.train=chats.jsonl", "training.weight_decay=0.2"])
    training, demo = found.config.training, Config().training
    assert (training.learning_rate, training.num_train_epochs, training.max_steps) == (1e-5, 1.0, None)
    assert training.learning_rate < demo.learning_rate / 100 and training.sample_prompt is None
    assert training.output_dir == "runs/tiny" and training.weight_decay == 0.2
    assert found.config.model.dtype == "bfloat16" and found.config.data.sequence_length == 512
    # About as many tokens as one long sequence has.
    assert training.per_device_train_batch_size == 8
    said = {
        ("training", "learning_rate"): "default for fine-tuning", ("data", "sequence_length"): "from the checkpoint",
        ("model", "dtype"): "from the checkpoint", ("moe", "transport"): "default",
    }  # fmt: skip
    assert said.items() <= found.sources.items()
    mine = {("model", "path"), ("data", "train"), ("training", "weight_decay"), ("training", "max_steps")}
    assert not mine & set(found.sources)
    assert "from the demo" not in found.sources.values()


def test_a_long_context_is_not_taken_whole_and_parts_of_a_model_are_looked_into(tmp_path: Path) -> None:
    text = {"max_position_embeddings": 131_072, "dtype": "bfloat16"}
    folder = make(tmp_path / "long", {"text_config": text, "dtype": "float32"})
    found = resolve_config(None, [f"model.path={folder}", "data.train=a"])
    assert found.config.data.sequence_length == 4096 and found.config.training.per_device_train_batch_size == 1
    assert found.sources["data", "sequence_length"] == "default for fine-tuning"
    assert found.config.model.dtype == "bfloat16"


def test_adapters_learn_faster(checkpoint: Path) -> None:
    settings = {"model": {"path": str(checkpoint)}, "data": {"train": ["a"]}}
    rate = "training", "learning_rate"
    full, adapter = (defaults({**settings, **more})[rate][0] for more in ({}, {"adapter": {"kind": "lora"}}))
    assert adapter == pytest.approx(10 * full)


def test_a_checkpoint_needs_data(checkpoint: Path) -> None:
    with pytest.raises(ValueError, match=rf"carpool train model.path={checkpoint} data.train=my-data.jsonl"):
        load_config(None, [f"model.path={checkpoint}"])


def test_without_weights_it_is_the_demos_defaults_which_say_so(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").unlink()
    found = resolve_config(None, [f"model.path={checkpoint}"])
    assert found.config.data == Config().data and found.config.training == Config().training
    assert found.sources["training", "learning_rate"] == "from the demo"
    assert resolve_config(None).sources["model", "model_type"] == "from the demo"


def test_the_dry_run_says_where_values_are_from_and_can_be_read_back(checkpoint: Path, tmp_path: Path) -> None:
    rows = tmp_path / "a.jsonl"
    rows.write_text(f"{json.dumps({'text': 'word ' * 400})}\n" * 40)
    fill(checkpoint)
    found = resolve_config(
        None,
        [f"model.path={checkpoint}", f"data.train={rows}", "training.learning_rate=0.5", "parallelism.device=cpu",
         "parallelism.num_ranks=2", "data.tokenizer=bytes"],
    )  # fmt: skip
    text = dry_run(found.config, found.sources)
    assert "learning_rate = 0.5\n" in text and 'dtype = "bfloat16"  # from the checkpoint\n' in text
    assert "min_lr_ratio = 0.1  # default for fine-tuning\n" in text
    (tmp_path / "again.toml").write_text(text)
    again = resolve_config(tmp_path / "again.toml")
    assert again.config == found.config and again.sources == {}


def test_a_dry_run_refuses_conversations_without_a_template(checkpoint: Path, tmp_path: Path) -> None:
    rows = tmp_path / "a.jsonl"
    turns = [{"role": "user", "content": "word"}, {"role": "assistant", "content": "word " * 100}]
    rows.write_text(f"{json.dumps({'messages': turns})}\n" * 40)
    settings = [f"model.path={checkpoint}", f"data.train={rows}", "parallelism.device=cpu", "parallelism.num_ranks=2"]
    settings += ["training.per_device_train_batch_size=1", "training.gradient_accumulation_steps=1"]
    fill(checkpoint)
    make_tokenizer(None).save_pretrained(checkpoint)
    with pytest.raises(ValueError, match="has no chat template"):
        dry_run(load_config(None, settings))
    make_tokenizer().save_pretrained(checkpoint)
    assert "predicted memory" in dry_run(load_config(None, settings))


def test_one_of_steps_and_epochs(checkpoint: Path, tmp_path: Path) -> None:
    path, data = f"model.path={checkpoint}", "data.train=a"
    for steps in (["training.max_steps=7"], ["training.max_steps=7", "training.num_train_epochs=none"]):
        training = load_config(None, [path, data, *steps]).training
        assert (training.max_steps, training.num_train_epochs) == (7, None)
    assert load_config(None, ["training.num_train_epochs=2"]).training.max_steps is None
    with pytest.raises(ValueError, match=r"how long the run is, but both are given: .*num_train_epochs=2"):
        load_config(None, ["training.num_train_epochs=2", "training.max_steps=7"])
    with pytest.raises(ValueError, match="neither is given"):
        load_config(None, ["training.max_steps=none"])
    file = tmp_path / "run.toml"
    file.write_text("[training]\nnum_train_epochs = 2\n")
    assert load_config(file, ["training.max_steps=7"]).training.num_train_epochs is None, "the command line wins"


def test_epochs_become_steps_once_the_data_are_known() -> None:
    section = TrainingSection(num_train_epochs=1.5, warmup_steps=0.1)
    assert section.in_steps(10.3).max_steps == 16 and section.in_steps(10.3).warmup() == 2
    assert section.in_steps(0.01).max_steps == 1
    assert TrainingSection(max_steps=7).in_steps(10.3).max_steps == 7
    with pytest.raises(ValueError, match="warm-up would never end"):
        TrainingSection(num_train_epochs=1, warmup_steps=20).in_steps(10)


@pytest.mark.parametrize("says", [True, False, None])
@pytest.mark.parametrize("name", ["qwen2_moe", "mixtral", "olmoe"])
def test_the_balance_loss_of_a_checkpoint_is_transformers(name: str, says: bool | None, tmp_path: Path) -> None:
    changed = {} if says is None else {"output_router_logits": says}
    model = tiny_model(discover()[name], router_aux_loss_coef=0.25, **changed)
    model.save_pretrained(tmp_path)
    blueprint = Blueprint.of(tmp_path)
    weight, why = blueprint.balance_loss(None)
    ids = torch.randint(3, 90, (2, 9), generator=torch.Generator().manual_seed(0))
    output = model(input_ids=ids, labels=ids)
    logits = output.logits[:, :-1].flatten(0, 1).float()
    added = output.loss - torch.nn.functional.cross_entropy(logits, ids[:, 1:].flatten())
    aux = model(input_ids=ids, labels=ids, output_router_logits=True).aux_loss
    assert aux > 0.1
    torch.testing.assert_close(added, weight * aux, rtol=1e-4, atol=1e-6)
    assert (weight == 0.25) == bool(says) and ("output_router_logits is false" in why) == (not says)
    # The loss of a step, and its gradient.
    output.loss.backward()
    theirs = {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}
    model.zero_grad()
    objective = Objective(model, top_k=blueprint.top_k, aux_coef=weight, dp_size=1, autocast=None)
    step = objective.backward([{"input_ids": ids, "labels": ids}])
    assert step.loss + weight * (step.aux_loss or 0.0) == pytest.approx(output.loss.item(), abs=1e-5)
    for one, parameter in model.named_parameters():
        if one in theirs:
            torch.testing.assert_close(parameter.grad, theirs[one], rtol=1e-3, atol=1e-5)
    # What the user says counts, and a model from scratch is balanced.
    assert blueprint.balance_loss(0.5)[0] == 0.5
    assert Blueprint.of(model.config).balance_loss(None)[0] == 0.25
