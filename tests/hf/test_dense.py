"""Non-expert parameters that are whole on each rank: every gradient and step is FSDP2's, and that of one process."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

import carpool.hf  # noqa: F401  registers the layers
from carpool.hf.build_model import build_model
from carpool.hf.sharding import keep_experts, replicate_dense
from carpool.hf.weights.model_config import make_config
from carpool.optim.clip import clip_grad_norm
from carpool.parallel.replicated import sharded_parameters
from tests.full_tensor import full_tensor
from tests.hf.meshes import reuse_meshes
from tests.ranks import Ranks

TINY: dict[str, Any] = {
    "vocab_size": 60,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "pad_token_id": 0,
    "eos_token_id": 1,
}
MODELS: dict[str, dict[str, Any]] = {
    "olmoe": {"intermediate_size": 16},
    "qwen3_moe": {"moe_intermediate_size": 16, "tie_word_embeddings": True},
}
BY_FSDP = ("fsdp", "transformers")


def _steps(kind: str, dense: str, sizes: dict[str, int], dtype: str, bfloat16: bool) -> dict[str, torch.Tensor]:
    """Two steps of two micro-batches; dense: or "alone", one process on the batch of all; "transformers", its FSDP."""
    reuse_meshes()
    alone = dense == "alone"
    config = DistributedConfig(**sizes, ep_implementation="carpool", fsdp_mixed_precision=bfloat16)
    model: Any = build_model(
        make_config(kind, TINY | MODELS[kind]),
        distributed_config=None if alone else config,
        dtype=getattr(torch, dtype),
        seed=0,
        dense=dense if dense in ("fsdp", "zero1") else None,
    )
    kept = None
    if dense == "zero1":
        kept = replicate_dense(model, bfloat16, bucket_bytes=20_000)
    elif dense == "fsdp":
        kept = keep_experts(model)
        apart = sizes["fsdp_size"] == sizes["ep_size"] > 1 and len(sizes) == 2 and (dtype == "bfloat16") == bfloat16
        assert (kept is not None) == apart
    world, rank = math.prod(sizes.get(name, 1) for name in ("fsdp_size", "dp_replicate_size")), 0
    if not alone:
        rank = dist.get_rank()
    with sharded_parameters(model):
        named = dict(model.named_parameters())
    # A large eps: no rounding decides a sign.
    optimizer = torch.optim.AdamW(named.values(), lr=1e-2, eps=1e-3, foreach=False)
    found: dict[str, torch.Tensor] = {}
    for step in range(2):
        total = torch.zeros(())
        for micro in range(2):
            ids = torch.randint(2, 60, (world, 12), generator=torch.Generator().manual_seed(2 * step + micro))
            ids = ids if alone else ids[rank : rank + 1]
            if kept is not None:
                kept.begin(first=micro == 0, last=micro == 1)
            loss = model(input_ids=ids, labels=ids).loss
            (loss / 2 if kept is None else loss / 2 / world).backward()
            total += loss.detach()
        if kept is not None:
            kept.finish()
        if not alone:
            dist.all_reduce(total)
        found[f"loss {step}"] = total / 2 / (1 if alone else world)
        found[f"norm {step}"] = clip_grad_norm(named.values(), 0.5)
        for name, parameter in named.items():
            assert parameter.grad is not None, name
            found[f"{step} {name}"] = full_tensor(parameter.grad).clone()
        optimizer.step()
        optimizer.zero_grad()
        if kept is not None:
            kept.write()
    for name, tensor in model.state_dict().items():
        found[f"after {name}"] = full_tensor(tensor).clone()
    return found


def _errors(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> dict[str, float]:
    """Of each tensor, beside the largest number in it."""
    assert ours.keys() == theirs.keys()
    largest = {name: max(value.abs().max().item(), 1e-3) for name, value in theirs.items()}
    return {name: (ours[name] - value).abs().max().item() / largest[name] for name, value in theirs.items()}


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        ("olmoe", {"fsdp_size": 2, "ep_size": 2}),
        ("qwen3_moe", {"fsdp_size": 4, "ep_size": 2}),
        ("qwen3_moe", {"fsdp_size": 2, "ep_size": 1}),
        ("olmoe", {"fsdp_size": 2, "dp_replicate_size": 2, "ep_size": 2}),
    ],
    ids=["olmoe", "qwen3 tied, efsdp", "qwen3 tied, no ep", "olmoe, hsdp"],
)
def test_every_step_is_fsdps_and_one_processes(
    ranks: Ranks, two_ranks: Ranks, kind: str, sizes: dict[str, int]
) -> None:
    pool = two_ranks if len(sizes) == 2 and sizes["fsdp_size"] == 2 else ranks
    # Where FSDP has experts, it is transformers'.
    by_fsdp = BY_FSDP if sizes == {"fsdp_size": 2, "ep_size": 2} else ("fsdp",)
    ours, *others = (pool(_steps, kind, dense, sizes, "float32", False)[0] for dense in ("zero1", *by_fsdp))
    for theirs in (*others, _steps(kind, "alone", sizes, "float32", False)):
        errors = _errors(ours, theirs)
        assert max(errors.values()) < 1e-5, errors


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bfloat16_steps_are_fsdps(two_ranks: Ranks, dtype: str) -> None:
    """Stored in float32, experts are FSDP's, which casts them; stored in bfloat16, nothing is."""
    sizes = {"fsdp_size": 2, "ep_size": 2}
    by_fsdp = BY_FSDP if dtype == "bfloat16" else ("fsdp",)
    ours, *others = (two_ranks(_steps, "olmoe", dense, sizes, dtype, True)[0] for dense in ("zero1", *by_fsdp))
    for theirs in others:
        errors = _errors(ours, theirs)
        # A rounding may send a token to another expert, which then shows in the gradients of both.
        assert max(errors.values()) < 0.1, errors


def _saved(folder: str) -> dict[str, torch.Tensor]:
    reuse_meshes()
    config = DistributedConfig(fsdp_size=4, ep_size=4, ep_implementation="carpool")
    settings = {"distributed_config": config, "dtype": torch.float32, "seed": 0, "dense": "zero1"}
    model: Any = build_model(make_config("qwen3_moe", TINY | MODELS["qwen3_moe"]), **settings)  # type: ignore[arg-type]
    kept = replicate_dense(model, bfloat16=False)
    model.save_pretrained(folder)
    loaded: Any = build_model(folder, **settings)  # type: ignore[arg-type]
    replicate_dense(loaded, bfloat16=False)
    with kept.shards():
        whole = {name: full_tensor(parameter).detach().clone() for name, parameter in model.named_parameters()}
    for name, tensor in loaded.state_dict().items():
        assert name == "lm_head.weight" or torch.equal(full_tensor(tensor), whole[name]), name
    return whole


def test_save_pretrained_writes_whole_weights(ranks: Ranks, tmp_path: Path) -> None:
    whole = ranks(_saved, str(tmp_path))[0]
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert all(torch.equal(parameter, whole[name]) for name, parameter in plain.named_parameters())


def _adapted() -> str:
    reuse_meshes()
    config = DistributedConfig(fsdp_size=4, ep_size=4, ep_implementation="carpool")
    model: Any = build_model(
        make_config("olmoe", TINY | MODELS["olmoe"]),
        distributed_config=config,
        dtype=torch.float32,
        seed=0,
        dense="zero1",
    )
    replicate_dense(model, bfloat16=False)
    with pytest.raises(ValueError) as error:
        get_peft_model(model, LoraConfig(target_modules=["q_proj"]))
    return str(error.value)


def test_adapters_that_come_too_late_are_refused(ranks: Ranks) -> None:
    assert "before non-expert parameters are made whole" in ranks(_adapted)[0]


def _refused(rows: int, **settings: Any) -> str:
    reuse_meshes()
    config = make_config("qwen3_moe", TINY | MODELS["qwen3_moe"] | {"vocab_size": rows})
    distributed = DistributedConfig(**{"fsdp_size": 4, "ep_size": 4, "ep_implementation": "carpool"} | settings)
    try:
        build_model(
            config, distributed_config=distributed, dtype=torch.float32, seed=0, dense="fsdp" if rows % 2 else "zero1"
        )
    except ValueError as error:
        return str(error)
    return ""


def test_what_is_refused(ranks: Ranks) -> None:
    assert "is tied, and FSDP cannot shard its 61 rows evenly over 4 ranks" in ranks(_refused, 61)[0]
    assert "tensor parallelism divides non-expert parameters" in ranks(_refused, 60, fsdp_size=2, tp_size=2)[0]
