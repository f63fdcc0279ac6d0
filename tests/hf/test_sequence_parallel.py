"""Tokens divided over tensor-parallel ranks: loss and every gradient of one process, and fewer bytes."""

from __future__ import annotations

import dataclasses
import functools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import carpool
from carpool.hf.build_model import build_model
from carpool.hf.tensor_parallel import sequence_shard
from carpool.parallel.degrees import Degrees
from carpool.train.config import load_config
from carpool.train.launch.machine import imagine_machine
from carpool.train.plan.division import distributed_config
from carpool.train.plan.start_checks import foresee
from carpool.train.steps.training_objective import Objective
from carpool_systems.mechanisms import load
from carpool_systems.resolve import resolve
from tests.hf.fake_ranks import PASSED, REFUSED
from tests.hf.meshes import reuse_meshes
from tests.hf.parity import full_gradients, gradient_errors, quiet
from tests.hf.tiny_models import discover, tiny_config
from tests.ranks import Ranks

BOUND = 1e-5


@dataclasses.dataclass(frozen=True)
class Case:
    """What runs on the ranks."""

    folder: str = "qwen3_moe"
    tp: int = 2
    ep: int = 2
    on: bool = True
    config: tuple[tuple[str, Any], ...] = ()
    aux: float = 0.0
    packed: bool = False
    micro_batches: int = 1
    recompute: str = ""
    loss_chunk_size: int | None = None
    duplicates: bool = False


def batches(case: Case, dp_rank: int, dp: int) -> list[dict[str, torch.Tensor]]:
    """Micro-batches of one data-parallel rank, of four sequences of 7 tokens over all."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for _ in range(case.micro_batches):
        ids = torch.randint(3, 90, (4, 7), generator=generator)
        labels = ids.clone()
        labels[0, 3:5] = -100
        batch = {"input_ids": ids, "labels": labels}
        if case.packed:
            batch["position_ids"] = torch.tensor([0, 1, 2, 0, 1, 2, 3]).expand(4, 7).contiguous()
        each = 4 // dp
        found.append({name: value[dp_rank * each : (dp_rank + 1) * each] for name, value in batch.items()})
    return found


def blueprint(case: Case) -> Any:
    """The configuration of a case's model."""
    return tiny_config(discover()[case.folder], **dict(case.config))


def gradients_of(case: Case, degrees: Degrees | None, rank: int = 0) -> tuple[Any, Any]:
    """The model after one step's backward, and its losses."""
    config = None if degrees is None else distributed_config(degrees, bf16=False)
    model = build_model(
        blueprint(case),
        distributed_config=config,
        dtype=torch.float32,
        seed=0,
        sequence_parallel=degrees is not None and case.on,
    )
    dp = 1 if degrees is None else degrees.dp
    if case.recompute:
        keep = {"context_fn": carpool.keep_rides} if case.recompute == "save" else {}
        model.gradient_checkpointing_enable({"use_reentrant": False, **keep})
    objective = Objective(
        model, top_k=2, aux_coef=case.aux, dp_size=dp, autocast=None, loss_chunk_size=case.loss_chunk_size
    )
    for own in carpool.hf.rides(model).values() if case.duplicates else ():
        own.token_slice = (0, 1)  # every token rides from each of the ranks that have it
    dp_rank = 0 if degrees is None else degrees.dp_rank(rank)
    return model, objective.backward(batches(case, dp_rank, dp))


def on_rank(case: Case) -> Any:
    """Loss, balance loss and whole gradients; of rank 0."""
    quiet()
    reuse_meshes()
    world, rank = dist.get_world_size(), dist.get_rank()
    degrees = Degrees(fsdp=world // case.tp, tp=case.tp, ep=case.ep)
    model, losses = gradients_of(case, degrees, rank)
    assert (sequence_shard(model) is not None) == case.on
    gradients = full_gradients(model)
    return None if rank else (losses.loss, losses.aux_loss, gradients)


def errors_of(ranks: Ranks, case: Case) -> dict[str, float]:
    """Errors of losses and gradients, by name, against one process."""
    loss, aux, gradients = ranks(on_rank, case)[0]
    reference, expected = reference_of(dataclasses.replace(case, recompute="", on=False))
    errors, missing = gradient_errors(reference, gradients)
    assert not missing, missing
    errors["loss"] = abs(loss - expected.loss) / expected.loss
    if case.aux:
        errors["aux"] = abs(aux - expected.aux_loss) / expected.aux_loss
    return errors


@functools.cache
def reference_of(case: Case) -> tuple[Any, Any]:
    return gradients_of(case, None)


def wrong(errors: dict[str, float]) -> dict[str, float]:
    return {name: error for name, error in errors.items() if not error <= BOUND}


# Families that tests/meshes does not draw, which has all settings and meshes.
QUICK = [
    Case(aux=0.3, micro_batches=2),
    Case("glm4_moe", config=(("use_qk_norm", True),), packed=True, recompute="save"),
]
SLOW = [
    Case("deepseek_v2"),
    Case("mimo_v2_flash"),
    Case("laguna"),
    Case("dots1", micro_batches=2),
    Case(loss_chunk_size=0, aux=0.3),
]


@pytest.mark.parametrize("case", [*QUICK, *(pytest.param(one, marks=pytest.mark.slow) for one in SLOW)], ids=str)
def test_gradients(two_ranks: Ranks, case: Case) -> None:
    errors = errors_of(two_ranks, case)
    assert not wrong(errors), wrong(errors)


# -------------------------------------------------------------------------------------------------------------- bytes


class Sent(TorchDispatchMode):
    """Bytes that a rank of a ring sends in collectives, by kind, without all-to-all (rides)."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.ranks = dict.fromkeys(("all_reduce", "all_gather", "reduce_scatter"), 0), dist.get_world_size()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(one is DTensor for one in types):
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        name = func._schema.name.split("::")[1]
        kind = name.strip("_").replace("allreduce", "all_reduce").replace("allgather", "all_gather")
        kind = next((one for one in self.bytes if kind.startswith(one)), "")
        if func.namespace in ("c10d", "_c10d_functional") and kind:
            tensors = [one for one in torch.utils._pytree.tree_leaves((args, out)) if isinstance(one, torch.Tensor)]
            whole = max(one.numel() * one.itemsize for one in tensors)
            ways = 2 if kind == "all_reduce" else 1
            self.bytes[kind] += whole * ways * (self.ranks - 1) // self.ranks
        return out


def sent(cases: list[Case]) -> list[tuple[int, int]]:
    """On each rank: bytes in collectives of a step, and of rides, under each case."""
    quiet()
    reuse_meshes()
    found = []
    for case in cases:
        with Sent() as mode:
            model, _ = gradients_of(case, Degrees(tp=2, ep=2), dist.get_rank())
        traffic = [own.stats.traffic for own in carpool.hf.rides(model).values()]
        rows = sum(int(one.remote(one.rows, "dispatch")) for one in traffic)
        found.append((sum(mode.bytes.values()), rows))
    return found


def test_what_is_sent(two_ranks: Ranks) -> None:
    """What a recomputed layer brought is not sent again; and without sequence parallelism more is sent."""
    plain, plain_kept, on, again, kept = sent_by(
        two_ranks,
        Case(on=False),
        Case(on=False, recompute="save"),
        Case(),
        Case(recompute="again"),
        Case(recompute="save"),
    )
    config = blueprint(Case())
    tokens, item, layers = 4 * 7, 4, config.num_hidden_layers
    rows = tokens * config.hidden_size * item // 2  # what one all-gather, or one reduce-scatter, of all tokens sends
    assert again[0] - on[0] == 2 * layers * rows, "a gather and a sum of each layer, again"
    assert kept == on and plain_kept == plain, "nothing is sent twice, rides included"
    assert again[1] == 2 * on[1]
    assert on[0] < 0.75 * plain[0]
    assert plain[1] == on[1], "rides take a rank's slice of the tokens either way"


def test_deepspeed_ted(two_ranks: Ranks) -> None:
    """Its mechanisms, each by what travels without it."""
    config = resolve(load("deepspeed-ted"))
    assert (config.parallelism.tp_size, config.parallelism.sequence_parallel) == (2, "off")
    assert (
        config.memory.policies["layer_activations"] == "recompute" and config.memory.policies["moe_outputs"] == "save"
    )
    ted = Case(on=False, recompute="save")
    both, sent_again, duplicated = sent_by(
        two_ranks, ted, dataclasses.replace(ted, recompute="again"), dataclasses.replace(ted, duplicates=True)
    )
    assert sent_again[0] > both[0] and sent_again[1] == 2 * both[1], "communication-aware checkpointing"
    assert duplicated[1] > 1.7 * both[1], "duplicate token dropping: every token rode from each of its two ranks"


def sent_by(ranks: Ranks, *cases: Case) -> list[tuple[int, int]]:
    """Of rank 0."""
    found: list[tuple[int, int]] = ranks(sent, list(cases))[0]
    return found


# --------------------------------------------------------------------------------------------------------------------
# Tensor parallelism over every model: it either computes, or is refused before anything is built.


# What fails inside and is not refused, and why.
FAILS = {
    "diffusion_gemma": "its decoder has no rule in the plan and reads the encoder's keys, which are in shards; no run "
    "trains it, because it is no causal language model"
}
ONE_KEY_HEAD = ["model.config.num_attention_heads=4", "model.config.num_key_value_heads=1"]


@pytest.mark.parametrize("pairs", [["2,1", "4,4"], pytest.param(["2,4", "4,2"], marks=pytest.mark.slow)], ids=str)
def test_every_model_computes_or_is_refused(pairs: list[str]) -> None:
    """With so many tensor-parallel ranks, and key-value heads."""
    command = [sys.executable, "-m", "tests.hf.fake_ranks", *pairs]
    root = Path(__file__).parents[2]
    ran = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300, cwd=root)
    for pair, found in zip(pairs, json.loads(ran.stdout.splitlines()[-1]), strict=True):
        tp, key_heads = map(int, pair.split(","))
        failed = {folder: how for folder, how in found.items() if how != PASSED and not how.startswith(REFUSED)}
        assert failed.keys() <= FAILS.keys(), failed
        assert sum(how == PASSED for how in found.values()) > 30
        for folder in ("mixtral", "glm4_moe", "qwen2_moe") if key_heads < tp else ():
            assert f"tp_size = {tp} does not divide the {key_heads} key-value heads" in found[folder]


@pytest.mark.parametrize("model_type", ["mixtral", "glm4_moe", "qwen2_moe"])
def test_heads_that_ranks_do_not_divide_are_refused_before_a_run(model_type: str) -> None:
    sizes = ["hidden_size=32", "num_hidden_layers=2", "num_experts_per_tok=2", "head_dim=8"]
    config = load_config(
        None,
        [
            f"model.config.model_type={model_type}", *(f"model.config.{one}" for one in sizes), *ONE_KEY_HEAD,
            "parallelism.num_ranks=4", "parallelism.tp_size=2", "parallelism.device=cpu",
        ],
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"tp_size = 2 does not divide the 1 key-value heads .* tp_size can be 1 "):
        foresee(config, [], imagine_machine(config, None))


def test_a_tied_vocabulary_that_ranks_do_not_divide_is_refused_before_a_run() -> None:
    config = load_config(
        None,
        ["model.config.vocab_size=1001", "model.config.tie_word_embeddings=true", "parallelism.data_parallel=fsdp",
         "parallelism.num_ranks=4", "parallelism.device=cpu", "data.tokenizer=bytes"],
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"is tied, and FSDP cannot shard its \d+ rows evenly over 4 ranks"):
        foresee(config, [], imagine_machine(config, None))
