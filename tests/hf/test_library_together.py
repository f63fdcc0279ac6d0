"""Ways to train a model that `from_pretrained` sharded, together: any two values of them meet in some case, and each
has the loss and the gradients of one process with Transformers' eager experts."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import carpool
import carpool.hf
from carpool.activations import ActivationPolicies
from carpool.conformance import gradient_errors
from carpool.layout import ExpertLayout
from tests.full_tensor import full_tensor
from tests.hf.parity import BOUND, relative_error
from tests.hf.test_behaviours import _alone, _model, _save
from tests.hf.tiny_models import VOCAB_SIZE
from tests.pairwise import all_pairs
from tests.ranks import Ranks

FACTORS: dict[str, list[str]] = {
    "sizes": ["fsdp=4 ep=4", "fsdp=4 ep=2", "fsdp=2 tp=2 ep=4", "fsdp=1 tp=4 ep=4", "dp_replicate=2 fsdp=2 ep=2"],
    "family": ["mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss", "olmoe", "granitemoe"],
    "dtype": ["float32", "float64"],
    "batch": ["plain", "padded", "one token", "nothing predicted", "packed"],
    "micro_batches": ["2", "1", "3"],
    "reduced": ["each", "last"],  # micro-batches
    "checkpointing": ["none", "reentrant", "not reentrant", "rides kept"],
    "between": ["nothing", "evaluation", "generation", "no_grad", "both forwards", "retained graph"],
    "transport": ["auto", "alltoall", "dedup", "gather"],
    "schedule": ["none", "chunks"],
    "policies": ["save save", "resend recompute", "offload offload"],
    "spare_slots": ["0", "1"],
    "layout": ["contiguous", "moved"],
    "frozen": ["nothing", ".experts.", "down_proj", "self_attn", "mlp.gate."],
}
FORBIDDEN = [
    {"dtype": "float64", "batch": "padded"},  # Transformers' eager mask is NaN
    *({"sizes": "fsdp=1 tp=4 ep=4", "batch": batch} for batch in ("one token", "nothing predicted")),  # of all ranks
]


def batches(case: dict[str, Any], ranks: int) -> list[list[dict[str, torch.Tensor]]]:
    """Of each micro-batch, what each data-parallel rank has of it."""
    generator, found = torch.Generator().manual_seed(7), list[list[dict[str, torch.Tensor]]]()
    for number in range(int(case["micro_batches"])):
        found.append([])
        for rank in range(ranks):
            special = rank == number % ranks
            shape = (1, 1) if case["batch"] == "one token" and special else (2, 9)
            ids = torch.randint(3, VOCAB_SIZE, shape, generator=generator)
            one = {"input_ids": ids, "labels": ids.clone()}
            if case["batch"] == "padded":
                one["attention_mask"] = (torch.arange(9) >= torch.tensor([[2], [number + rank]])).long()
                one["labels"][one["attention_mask"] == 0] = -100
            if case["batch"] == "nothing predicted" and special:
                one["labels"][:] = -100
            if case["batch"] == "packed":
                one["position_ids"] = torch.cat([torch.arange(4), torch.arange(5)]).expand(2, 9)
            found[-1].append(one)
    return found


def train(model: Any, case: dict[str, Any], micro_batches: list[list[Any]], predicted: int, scale: int) -> torch.Tensor:
    """Forward and backward of a step. Each micro-batch has the inputs of one or of all ranks. Returns the loss."""
    losses, waiting, between = [], list[torch.Tensor](), case["between"]
    for number, parts in enumerate(micro_batches):
        inputs = [{key: value for key, value in part.items() if key != "labels"} for part in parts]
        if between in ("evaluation", "generation", "no_grad") and hasattr(model, "_mesh_manager"):
            model.train(between == "no_grad")
            with torch.no_grad():
                if between == "generation":
                    model.generate(parts[0]["input_ids"], max_new_tokens=2, do_sample=False, pad_token_id=0)
                else:
                    model(**inputs[0], use_cache=False)
            model.train()
        if hasattr(model, "set_requires_gradient_sync"):
            model.set_requires_gradient_sync(case["reduced"] == "each" or number == len(micro_batches) - 1)
        logits = [model(**one, use_cache=False).logits for one in inputs]
        ends = [
            (one[:, :-1].flatten(0, 1), part["labels"][:, 1:].flatten())
            for one, part in zip(logits, parts, strict=True)
        ]
        loss = torch.stack([F.cross_entropy(*end, reduction="sum") for end in ends]).sum() / predicted
        losses.append(loss.detach())
        if between == "retained graph":
            (loss * scale / 2).backward(retain_graph=True)
            loss = loss / 2
        waiting.append(loss * scale)
        if between != "both forwards":
            waiting.pop().backward()
    for loss in waiting:
        loss.backward()
    return torch.stack(losses).sum()


def measure(path: str, case: dict[str, Any]) -> dict[str, float]:
    """The errors of a case above the bound."""
    sizes = {f"{name}_size": int(number) for name, number in (word.split("=") for word in case["sizes"].split())}
    tp, dtype = sizes.get("tp_size", 1), getattr(torch, case["dtype"])
    ranks, transport = dist.get_world_size() // tp, case["transport"]
    _save(case["family"], path)
    eager = {"dtype": dtype, "attn_implementation": "eager"}
    reference = _alone(case["family"], path, experts_implementation="eager", **eager)
    model = _model(
        case["family"], path, "carpool" if transport == "auto" else f"carpool-{transport}", sizes=sizes, **eager
    )
    for one in (model, reference):
        for name, parameter in one.named_parameters():
            parameter.requires_grad_(case["frozen"] not in name)
    if case["checkpointing"] != "none":
        kept = {"context_fn": carpool.keep_rides} if case["checkpointing"] == "rides kept" else {}
        model.gradient_checkpointing_enable({"use_reentrant": case["checkpointing"] == "reentrant", **kept})
    carpool.hf.set_activation_policies(model, ActivationPolicies(*case["policies"].split()))
    carpool.hf.set_spare_slots(model, int(case["spare_slots"]))
    if case["schedule"] == "chunks":
        carpool.hf.set_schedule(model, carpool.Schedule("chunks", 2))
    order = list(range(8))
    if case["layout"] == "moved":
        random.Random(3).shuffle(order)
        moved = {name: ExpertLayout.permuted(order, own.num_ranks) for name, own in carpool.hf.rides(model).items()}
        carpool.hf.set_layout(model, moved)
    parts = batches(case, ranks)
    predicted = sum(int((part["labels"][:, 1:] != -100).sum()) for row in parts for part in row)
    expected = train(reference, case, parts, predicted, 1)
    loss = train(model, case, [[row[dist.get_rank() // tp]] for row in parts], predicted, ranks)
    dist.all_reduce(loss)
    gradients = {name: None if p.grad is None else full_tensor(p.grad) for name, p in model.named_parameters()}
    wanted = {name: p.grad for name, p in reference.named_parameters()}
    wanted |= {
        n: grad[order] for n, grad in wanted.items() if ".experts." in n and grad is not None and grad.shape[0] == 8
    }
    errors, missing = gradient_errors(wanted, gradients)
    errors |= {"loss": relative_error(loss / tp, expected)} | dict.fromkeys(missing, float("inf"))
    return {name: error for name, error in errors.items() if error > 2 * BOUND}


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_each_way_has_the_gradients_of_one_process(ranks: Ranks, tmp_path: Path) -> None:
    different: list[Any] = []
    for number, case in enumerate(all_pairs(FACTORS, FORBIDDEN)):
        different += [(case, errors) for errors in ranks(measure, str(tmp_path / f"{number}"), case) if errors]
    assert not different
