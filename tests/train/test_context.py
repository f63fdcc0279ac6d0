"""A training step of ranks that share sequences: its loss, its balance loss, the norm and every gradient are those of
one process with all sequences. And whole runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from carpool.hf.build_model import build_model
from carpool.hf.context_parallel import ContextParallel
from carpool.hf.decoder_layers import compile_layers, recompute_layers
from carpool.hf.documents import packed, packed_settings, unpacked
from carpool.hf.routing.router_balance import RouterLogits
from carpool.hf.sharding import keep_experts, replicate_dense
from carpool.hf.tensor_parallel import why_not_sequence_parallel
from carpool.optim.clip import grad_norm
from carpool.parallel.context import Cut, Way
from carpool.parallel.degrees import Degrees
from carpool.parallel.meshes import Meshes
from carpool.parallel.replicated import sharded_parameters
from carpool.train.config import load_config
from carpool.train.plan.division import distributed_config
from carpool.train.plan.dry_run import dry_run
from carpool.train.steps.training_objective import Objective
from tests.full_tensor import full_tensor
from tests.hf.meshes import reuse_meshes
from tests.hf.parity import gradient_errors, quiet
from tests.hf.tiny_models import VOCAB_SIZE, discover, tiny_model
from tests.ranks import Ranks
from tests.train.test_loop import losses, records, start

BOUND, LENGTH, COEF = 1e-5, 24, 0.1
# In one sequence: three documents, and padding, which is one by itself.
DOCUMENTS = [11, 4, 6, 3]
Batch = dict[str, torch.Tensor]


def _batch(sequences: int, is_packed: bool) -> Batch:
    ids_BL = torch.randint(3, VOCAB_SIZE, (sequences, LENGTH), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": ids_BL, "labels": ids_BL.clone()}
    if is_packed:
        position_L = torch.cat([torch.arange(n) for n in DOCUMENTS])
        batch["position_ids"] = position_L.expand(sequences, -1)
        batch["padding"] = (torch.arange(LENGTH) >= LENGTH - DOCUMENTS[-1]).expand(sequences, -1)
        batch["labels"][(position_L == 0).expand(sequences, -1) | batch["padding"]] = -100
    return batch


def _reference(model: Any, batch: Batch, coef: float) -> tuple[float, float]:
    """(mean cross-entropy, balance loss) by transformers, whose gradients the model then has."""
    settings, collector = {}, RouterLogits(model) if coef else None
    if "position_ids" in batch:
        settings = packed_settings(model, batch["position_ids"])
    with packed() if settings else unpacked():
        if collector is None:
            logits = model(input_ids=batch["input_ids"], use_cache=False, **settings).logits
        else:
            with collector.collect() as router_logits:
                logits = model(input_ids=batch["input_ids"], use_cache=False, **settings).logits
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())
    balance = torch.zeros(())
    if collector is not None:
        real_T = ~batch["padding"].flatten() if settings else slice(None)
        balance = load_balancing_loss_func(tuple(one[real_T] for one in router_logits), 8, 2)  # type: ignore[assignment]
    (loss + coef * balance).backward()
    return float(loss), float(balance)


def _step(
    name: str, path: str, degrees: Degrees, dense: str, is_packed: bool, way: Way, how: str, config: dict[str, Any]
) -> tuple[dict[str, float], list[str]]:
    """(relative errors, parameters with a gradient on one side only). `how`: what is done otherwise, or wrong."""
    quiet()
    reuse_meshes()
    rank, architecture = dist.get_rank(), discover()[name]
    reference: Any = tiny_model(architecture, **config).train()
    if rank == 0:
        reference.save_pretrained(path)
    dist.barrier()
    coef = COEF if name in ("olmoe", "qwen3_moe", "mixtral", "gpt_oss") else 0.0
    each = 2
    whole = _batch(each * degrees.dp, is_packed)
    loss, balance = _reference(reference, whole, coef)

    meshes = Meshes(degrees, "cpu")
    divided = degrees.tp > 1 and why_not_sequence_parallel(reference, degrees.ep) is None
    model = build_model(
        Path(path),
        distributed_config=distributed_config(degrees, bf16=False),
        dtype=torch.float32,
        seed=0,
        dense=dense,  # type: ignore[arg-type]
        meshes=meshes,
        sequence_parallel=divided,
    )
    kept = replicate_dense(model, bfloat16=False) if dense == "zero1" else keep_experts(model)
    group = meshes.group("cp")
    assert group is not None
    if how == "recomputed":
        recompute_layers(model, True)
    elif how == "compiled":
        compile_layers(model, "eager")
    context = ContextParallel(model, Cut(degrees.cp, degrees.coordinate(rank, "cp"), way), group)
    settings: dict[str, Any] = {"dp_size": degrees.dp_cp, "context": context, "two_batch": how == "two batches"}
    objective = Objective(model, top_k=2, aux_coef=coef, autocast=None, **settings)
    if how == "mean over dp":
        objective.dp_size = degrees.dp
    elif how == "tokens of each rank":
        objective.ranks_per_sequence = objective.ranks_per_copy
    mine = {key: value[degrees.dp_rank(rank) :: degrees.dp] for key, value in whole.items()}
    found = objective.backward([mine])
    if kept is not None:
        kept.finish()
    with sharded_parameters(model):
        parameters = dict(model.named_parameters())
        norm = grad_norm(parameters.values(), degrees.stage_size)
        gradients = {key: full_tensor(p.grad) for key, p in parameters.items() if p.grad is not None}
    errors, missing = gradient_errors(reference, gradients)
    expected_norm = torch.stack([p.grad.norm() for p in reference.parameters() if p.grad is not None]).norm()
    errors |= {
        "loss": abs(found.loss - loss) / loss,
        "balance loss": abs((found.aux_loss or 0.0) - balance),
        "norm": float((norm - expected_norm).abs() / expected_norm),
    }
    return errors, missing


SHARED = Degrees(cp=2, ep=2)
CASES = [
    ("olmoe", SHARED, "fsdp", False, {}),
    ("gpt_oss", SHARED, "zero1", True, {}),
    ("qwen3_moe", Degrees(cp=4, ep=2), "fsdp", True, {"num_key_value_heads": 2}),
]
MORE = [
    ("mixtral", SHARED, "fsdp", True, {"num_key_value_heads": 1}),
    ("glm4_moe", SHARED, "zero1", False, {"num_key_value_heads": 2}),
    ("olmoe", Degrees(cp=4, ep=2), "zero1", True, {}),
    ("mixtral", Degrees(cp=2, dp_replicate=2, ep=2), "fsdp", False, {}),
    ("qwen3_moe", Degrees(cp=2, tp=2, ep=4), "fsdp", True, {}),
    ("qwen3_moe", Degrees(cp=2, tp=2, ep=1), "fsdp", False, {}),
    *(
        (name, degrees, dense, is_packed, config)
        for name in ("olmoe", "qwen3_moe", "mixtral", "gpt_oss", "glm4_moe", "deepseek_v3")
        for degrees in (SHARED, Degrees(cp=4, ep=4), Degrees(cp=2, fsdp=2, ep=2))
        for dense in ("fsdp", "zero1")
        for is_packed in (False, True)
        for config in ({}, {"num_key_value_heads": 2})
        # Latent attention has all heads of keys.
        if not (name == "deepseek_v3" and config)
    ),
]


@pytest.mark.parametrize(
    ("name", "degrees", "dense", "is_packed", "config"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE)],
)
def test_a_step_is_that_of_one_process(
    ranks: Ranks,
    two_ranks: Ranks,
    tmp_path: Path,
    name: str,
    degrees: Degrees,
    dense: str,
    is_packed: bool,
    config: dict[str, Any],
) -> None:
    pool = two_ranks if degrees.world_size == 2 else ranks
    for errors, missing in pool(_step, name, str(tmp_path), degrees, dense, is_packed, "ulysses", "", config):
        assert max(errors.values()) < BOUND and not missing, errors


def test_a_step_with_ring_attention(two_ranks: Ranks, tmp_path: Path) -> None:
    for errors, missing in two_ranks(_step, "olmoe", str(tmp_path), SHARED, "fsdp", False, "ring", "", {}):
        assert max(errors.values()) < BOUND and not missing, errors


# Two batches at a time have a balance loss each, so a model without one.
@pytest.mark.slow
@pytest.mark.parametrize("how", ["recomputed", "two batches", "compiled"])
@pytest.mark.parametrize("way", ["ulysses", "ring"])
def test_a_step_whose_layers_run_otherwise(two_ranks: Ranks, tmp_path: Path, way: str, how: str) -> None:
    for errors, missing in two_ranks(_step, "glm4_moe", str(tmp_path), SHARED, "fsdp", False, way, how, {}):
        assert max(errors.values()) < BOUND and not missing, errors


@pytest.mark.parametrize("wrong", ["mean over dp", "tokens of each rank"])
def test_a_mean_over_other_ranks_shows(two_ranks: Ranks, tmp_path: Path, wrong: str) -> None:
    for errors, _ in two_ranks(_step, "olmoe", str(tmp_path), SHARED, "fsdp", False, "ulysses", wrong, {}):
        assert errors["lm_head.weight"] > 0.1 and errors["norm"] > 0.1


def test_a_run_is_that_of_ranks_with_whole_sequences(two_ranks: Ranks, text: list[str], tmp_path: Path) -> None:
    """Also in what it evaluates, counts, records and samples."""
    common = [*text, "training.max_steps=2", "training.save_steps=none", "training.eval_steps=1"]
    common += ['training.sample_prompt="def "', "training.sample_tokens=4"]
    shared = ["parallelism.cp_size=2", "training.per_device_train_batch_size=4"]
    assert start(two_ranks, tmp_path / "whole", common) == [""] * 2
    assert start(two_ranks, tmp_path / "parts", [*common, *shared]) == [""] * 2
    for step, (loss, norm) in losses(tmp_path / "whole").items():
        assert losses(tmp_path / "parts")[step] == pytest.approx((loss, norm), rel=1e-5)
    for kind in ("train", "eval", "sample"):
        whole, parts = (records(tmp_path / name, kind) for name in ("whole", "parts"))
        assert whole.keys() == parts.keys() and whole
        for step, line in whole.items():
            assert parts[step].get("text") == line.get("text")
            for key in {"loss", "aux_loss", "tokens", "tokens_seen"} & line.keys():
                assert parts[step][key] == pytest.approx(line[key], rel=1e-5), key
    info = json.loads((tmp_path / "parts" / "run.json").read_text())["parallelism"]
    assert (info["cp_size"], info["fsdp_size"], info["ep_size"], info["cp_attention"]) == (2, 1, 2, "ulysses")


@pytest.mark.slow
def test_a_run_goes_on_with_other_ranks_that_share_sequences(two_ranks: Ranks, text: list[str], tmp_path: Path) -> None:
    common = [*text, "training.max_steps=3", "training.save_steps=1", "training.eval_steps=none"]
    shared = ["parallelism.cp_size=2", "training.per_device_train_batch_size=4"]
    assert start(two_ranks, tmp_path / "whole", common) == [""] * 2
    last = "training.resume_from_checkpoint=last"
    for step, own in ((1, []), (2, [*shared, last]), (3, [last])):
        stop = f"training.stop_at_step={step}"
        assert start(two_ranks, tmp_path / "turns", [*common, *own, stop]) == [""] * 2
    turns = losses(tmp_path / "turns")
    for step, expected in losses(tmp_path / "whole").items():
        assert turns[step] == pytest.approx(expected, rel=1e-5)


def test_a_dry_run_divides_tokens(text: list[str], tmp_path: Path) -> None:
    (tmp_path / "long.txt").write_text("def f(x): return x\n" * 60_000)
    settings = ["model.model_type=olmoe", "model.config.num_hidden_layers=2", *text, f"data.train={tmp_path}/long.txt"]
    settings += ["parallelism.num_ranks=8", "data.sequence_length=4096"]
    shared = dry_run(load_config(None, [*settings, "parallelism.cp_size=4"]), gpu="h100")
    whole = dry_run(load_config(None, settings), gpu="h100")
    assert "each rank has 1/4 of every sequence, attention by ulysses" in shared
    assert "fsdp 2 x tp 1, experts ep 8 x efsdp 1, replicas 1, cp 4" in shared
    kept, four_times = (_mib(one, "activations") for one in (shared, whole))
    assert four_times / 4.2 < kept < four_times / 3.8
    with pytest.raises(ValueError, match=r"4096 or 4100 can"):
        dry_run(load_config(None, [*settings, "parallelism.cp_size=4", "data.sequence_length=4098"]), gpu="h100")


def _mib(said: str, name: str) -> float:
    line = next(line for line in said.splitlines() if line.startswith(f"#   {name}"))
    return float(line.split()[-2].replace(",", ""))
