"""Fine-tuning: defaults, where each is from, data that must be said, and epochs; and on packed conversations it equals
a plain loop of transformers on the conversations one by one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from carpool.train.blueprint import Blueprint
from carpool.train.config import Config, TrainingSection, load_config, resolve_config
from carpool.train.config.fine_tuning import defaults
from carpool.train.data.corpus import prepare
from carpool.train.data.loader import TrainLoader
from carpool.train.data.mixture import sequences_of
from carpool.train.data.tokenizer import load_tokenizer
from carpool.train.lr_schedules import learning_rate
from carpool.train.plan.dry_run import dry_run
from carpool.train.steps.training_objective import Objective
from examples.tiny_chat_model import CONVERSATIONS, make_tokenizer, write
from tests.hf.tiny_models import discover, tiny_model
from tests.ranks import Ranks
from tests.train.test_loop import records, run


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


def test_what_a_checkpoint_needs_and_brings(checkpoint: Path) -> None:
    settings = {"model": {"path": str(checkpoint)}, "data": {"train": ["a"]}}
    rate = "training", "learning_rate"
    full, adapter = (defaults({**settings, **more})[rate][0] for more in ({}, {"adapter": {"kind": "lora"}}))
    assert adapter == pytest.approx(10 * full)
    with pytest.raises(ValueError, match=rf"carpool train model.path={checkpoint} data.train=my-data.jsonl"):
        load_config(None, [f"model.path={checkpoint}"])
    mixture = resolve_config(
        None, [f"model.path={checkpoint}", "data.sources=[{path = 'a.jsonl'}]"]
    ).config.data.sources
    assert mixture is not None and mixture[0].path == ("a.jsonl",)
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


RANKS, STEPS = 2, 3
AUX, RATE, DECAY, CLIP = 0.02, 2e-3, 0.1, 0.5
SETTINGS = [
    "data.eval_fraction=0.1", "data.sequence_length=176", "training.per_device_train_batch_size=1",
    "training.per_device_eval_batch_size=1", "training.gradient_accumulation_steps=2", f"training.max_steps={STEPS}",
    f"training.learning_rate={RATE}", f"training.weight_decay={DECAY}", f"training.max_grad_norm={CLIP}",
    "training.eval_steps=none", "training.save_steps=none", "training.save_pretrained=false",
    f"moe.router_aux_loss_coef={AUX}",
]  # fmt: skip


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Of runs on the conversations without tools, which are short, and on their beginnings."""
    folder = tmp_path_factory.mktemp("chat")
    write(folder / "tiny")
    rows = [json.loads(line) for line in CONVERSATIONS.read_text(encoding="utf-8").splitlines()]
    with open(folder / "chats.jsonl", "w", encoding="utf-8") as file:
        for messages in (row["messages"] for row in rows if "tools" not in row):
            for end in range(len(messages), 1, -2):
                file.write(json.dumps({"messages": messages[:end]}) + "\n")
    named = [f"model.path={folder}/tiny", f"data.train={folder}/chats.jsonl", f"data.cache_dir={folder}/cache"]
    return [*named, *SETTINGS]


def answers(ids: list[int], tokenizer: Any) -> list[bool]:
    """Which tokens are an assistant's, by the tokens around them."""
    begin = tokenizer("<|im_start|>assistant\n")["input_ids"]
    end = tokenizer("<|im_end|>\n")["input_ids"]
    found, place = [False] * len(ids), 0
    while place < len(ids):
        if ids[place : place + len(begin)] != begin:
            place += 1
            continue
        place += len(begin)
        while ids[place : place + len(end)] != end:
            found[place] = True
            place += 1
        found[place : place + len(end)] = [True] * len(end)
    return found


def plain_steps(settings: list[str], reads: list[int]) -> Iterator[tuple[float, float, float]]:
    """(loss, balance loss, norm of the gradient) of each step, in one process, one conversation after the other.
    `reads` gets how many tokens each step has."""
    config = load_config(None, settings)
    path = str(config.model.path)
    pretrained = AutoTokenizer.from_pretrained(path)
    with open(config.data.train[0], encoding="utf-8") as file:
        rows = [json.loads(line)["messages"] for line in file]
    known = {tuple(pretrained.apply_chat_template(messages)["input_ids"]) for messages in rows}
    corpus = prepare(config.data, load_tokenizer(None, path), path)
    loader = TrainLoader(sequences_of(corpus, config.data), batch_size=RANKS, accumulation=2, seed=0)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, experts_implementation="eager")
    decays = [p for n, p in model.named_parameters() if p.dim() >= 2]
    others = [p for n, p in model.named_parameters() if p.dim() < 2]
    groups = [{"params": decays, "weight_decay": DECAY}, {"params": others, "weight_decay": 0.0}]
    training = config.training
    optimizer = torch.optim.AdamW(groups, betas=(training.adam_beta1, training.adam_beta2), eps=training.adam_epsilon)
    for step in range(1, STEPS + 1):
        documents = [list(split(batch)) for batch in next(loader)]
        assert {ids for batch in documents for ids in batch} <= known, "whole conversations, as the template has them"
        reads.append(sum(len(ids) for batch in documents for ids in batch))
        total = sum(sum(answers(list(ids), pretrained)) for batch in documents for ids in batch)
        ce, aux = torch.zeros(()), torch.zeros(())
        for batch in documents:
            logits_L: list[list[torch.Tensor]] = [[] for _ in range(model.config.num_hidden_layers)]
            for ids in batch:
                out = model(input_ids=torch.tensor([ids]), use_cache=False, output_router_logits=True)
                for layer, logits in zip(logits_L, out.router_logits, strict=True):
                    layer.append(logits)
                learned = torch.tensor(answers(list(ids), pretrained))[1:]
                ce = ce + F.cross_entropy(out.logits[0, :-1][learned], torch.tensor(ids[1:])[learned], reduction="sum")
            layers = tuple(torch.cat(layer) for layer in logits_L)
            aux = aux + load_balancing_loss_func(layers, model.config.num_experts, 2) / len(documents)
        optimizer.zero_grad()
        (ce / total + AUX * aux).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, training)
        optimizer.step()
        yield (ce / total).item(), aux.item(), norm.item()


def split(batch: dict[str, torch.Tensor]) -> Iterator[tuple[int, ...]]:
    """The documents of a packed batch."""
    alone_BL = torch.arange(batch["input_ids"].shape[1]).expand_as(batch["input_ids"])
    positions_BL = batch.get("position_ids", alone_BL)
    for ids, positions, padding in zip(batch["input_ids"], positions_BL, batch["padding"], strict=True):
        size = int((~padding).sum())
        starts = [i for i in range(size) if positions[i] == 0]
        for start, end in zip(starts, [*starts[1:], size], strict=True):
            yield tuple(ids[start:end].tolist())


# How two ranks compute the same global batch.
BOTH = ["training.per_device_train_batch_size=2"]
COMPILED = ["training.torch_compile=true", "training.torch_compile_backend=aot_eager"]
WAYS = {
    "plain": [], "again": ["memory.layer_activations=recompute", "memory.moe_outputs=recompute"],
    "again, rides kept": ["memory.layer_activations=recompute", "memory.moe_outputs=save"],
    "two-batch": ["moe.schedule=two-batch"], "compiled": COMPILED,
    "compiled, again": [*COMPILED, "memory.layer_activations=recompute"], "ep 1": ["parallelism.ep_size=1"],
    "tp": ["parallelism.tp_size=2", *BOTH],
    "tp, tokens whole": ["parallelism.tp_size=2", "parallelism.sequence_parallel=off", *BOTH],
    "cp": ["parallelism.cp_size=2", *BOTH], "cp, compiled": ["parallelism.cp_size=2", *BOTH, *COMPILED],
    "pp": ["parallelism.pp_size=2", *BOTH],
}  # fmt: skip
QUICK = {("examples", "plain"), ("off", "again"), ("off", "tp, tokens whole"), ("off", "pp")}


@pytest.mark.parametrize(
    ("packing", "way"),
    [
        pytest.param(packing, way, marks=() if (packing, way) in QUICK else pytest.mark.slow)
        for packing in ("examples", "off")
        for way in WAYS
    ],
)
def test_padding_takes_no_ride_and_steps_equal_one_by_one_in_plain_transformers(
    two_ranks: Ranks, settings: list[str], tmp_path: Path, packing: str, way: str
) -> None:
    settings = [*settings, f"data.packing={packing}"]
    assert two_ranks(run, str(tmp_path / "a"), [*settings, *WAYS[way]]) == [""] * RANKS
    steps = list(records(tmp_path / "a").values())
    found = [(line["loss"], line["aux_loss"], line["grad_norm"]) for line in steps]
    reads: list[int] = []
    expected = list(plain_steps(settings, reads))
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=2e-5, atol=0)
    assert found[-1][0] < found[0][0] - 0.1, "it learns"
    evals = records(tmp_path / "a", "eval")
    assert evals[STEPS]["loss"] < evals[0]["loss"]
    layers = records(tmp_path / "a", "layers")
    assert layers, "loads of experts are recorded"
    for step, line in layers.items():
        # Two layers, and two choices of each token that there is.
        assert [sum(load_E) for load_E in line["load"]] == [2 * reads[step - 1]] * 2
        copies = steps[step - 1]["copies_per_token"]
        assert copies == 1 if way in ("ep 1", "pp") else 1 < copies < 2
