"""Fine-tuning on packed conversations equals a plain loop of transformers on the conversations one by one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from carpool.train.config import load_config
from carpool.train.data.corpus import prepare
from carpool.train.data.loader import TrainLoader
from carpool.train.data.sequences import train_sequences
from carpool.train.data.tokenizer import load_tokenizer
from carpool.train.run.loop import learning_rate
from examples.tiny_chat_model import CONVERSATIONS, write
from tests.ranks import Ranks
from tests.train.test_loop import records, run

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
    loader = TrainLoader(train_sequences(corpus, config.data), batch_size=RANKS, accumulation=2, seed=0)
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
    "cp": ["parallelism.cp_size=2", *BOTH], "pp": ["parallelism.pp_size=2", *BOTH],
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
