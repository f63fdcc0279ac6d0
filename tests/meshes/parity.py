"""One case of the matrix on the ranks of a pool: the trainer's own set-up and step beside one process.

What is under test is the trainer: `Step` is a run (`carpool.train.run.loop.Run`) with drawn data and without files, and
takes its first step as a run does, up to the norm of the gradient. The reference knows nothing of Carpool: the model of
transformers with the same weights, each document by itself, the balance loss as its formula says.

Errors are max-norm: max |ours - theirs| / max |theirs|. A gradient's denominator is at least 1/1000 of the largest
gradient of the model: where a gradient is zero but for rounding, its ratio means nothing.
"""

from __future__ import annotations

import functools
import math
from contextlib import nullcontext
from typing import Any, NamedTuple, cast

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers

from carpool.hf.architecture_changes import add_change
from carpool.hf.build_model import build_model
from carpool.hf.routing.router_balance import find_routers
from carpool.hf.seam.moved_experts import is_logical, logical_order
from carpool.hf.weights.model_config import make_config
from carpool.layout import ExpertLayout
from carpool.layout.layouts import Layouts
from carpool.parallel.replicated import sharded_parameters
from carpool.train.build.assemble import build, first_layouts
from carpool.train.config.schema import Config, DataSection, config_type
from carpool.train.data.corpus import Corpus, Marks
from carpool.train.data.loader import TrainLoader
from carpool.train.data.mixture import sequences_of
from carpool.train.run.loop import Run, gradients
from carpool.train.run.run import plan_on_ranks, with_data
from tests.full_tensor import full_tensor
from tests.hf.meshes import reuse_meshes
from tests.meshes import breakages
from tests.meshes.cases import MTP_WEIGHT, SEQUENCES, Case

EXPERTS, TOP_K, LENGTH = 8, 2, 16
COEF = 0.05
SIZES: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 32,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 4,
    "num_experts_per_tok": TOP_K,
    # Wide, so that no rounding flips a choice of experts.
    "initializer_range": 0.2,
    "attention_dropout": 0.0,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "olmoe": {"num_experts": EXPERTS, "intermediate_size": 16},
    "qwen3_moe": {
        "num_experts": EXPERTS,
        "moe_intermediate_size": 16,
        "intermediate_size": 32,
        "tie_word_embeddings": True,
        "norm_topk_prob": True,
    },
    "mixtral": {"num_local_experts": EXPERTS, "intermediate_size": 16},
    "deepseek_v3": {
        "n_routed_experts": EXPERTS,
        "moe_intermediate_size": 16,
        "intermediate_size": 32,
        "first_k_dense_replace": 1,
        "n_shared_experts": 1,
        "n_group": 4,
        "topk_group": 2,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 4,
        "qk_rope_head_dim": 4,
        "v_head_dim": 4,
        "head_dim": 4,
    },
    "glm4_moe": {
        "n_routed_experts": EXPERTS,
        "moe_intermediate_size": 16,
        "intermediate_size": 32,
        "first_k_dense_replace": 1,
        "use_qk_norm": True,
    },
    "gpt_oss": {"num_local_experts": EXPERTS, "intermediate_size": 16, "sliding_window": 8},
}
ORDER = [5, 2, 7, 0, 1, 6, 3, 4]


class Found(NamedTuple):
    """Loss, balance loss and those of layers as means over the batch, the norm of the gradient, and each parameter's
    gradient."""

    loss: float
    balance: list[float]
    norm: float
    gradients: dict[str, torch.Tensor]


def measure(cases: list[Case], folder: str, broken: str | None = None) -> list[dict[str, float] | str]:
    """On each rank: the errors of each case, by what they are of, over all ranks; or the error that it ended in."""
    transformers.logging.set_verbosity_error()
    reuse_meshes()
    return [_measure(case, folder, broken) for case in cases]


def _measure(case: Case, folder: str, broken: str | None) -> dict[str, float] | str:
    expected = reference(case.family, case.layers, case.packing, case.micro_batches, case.balance, case.depth)
    try:
        with breakages.BREAKAGES[broken].mistake() if broken else nullcontext():
            step = Step(case, folder)
            found = step.found()
    except Exception as error:  # which the test shows, case by case
        return f"{type(error).__name__}: {error}"
    errors = compare(found, expected)
    everyone: list[dict[str, float]] = [{}] * dist.get_world_size()
    dist.all_gather_object(everyone, errors)
    largest = {name: max(one.get(name, 0.0) for one in everyone) for one in everyone for name in one}
    # A stage of a pipeline has the gradients of its layers; together they have all.
    return largest | dict.fromkeys(expected.gradients.keys() - largest.keys(), math.inf)


def compare(found: Found, expected: Found) -> dict[str, float]:
    """The errors of this rank's numbers, by what they are of."""
    errors = {"loss": abs(found.loss / expected.loss - 1), "norm": abs(found.norm / expected.norm - 1)}
    pairs = enumerate(zip(found.balance, expected.balance, strict=True))
    errors |= {f"balance{number or ''}": abs(ours / theirs - 1) for number, (ours, theirs) in pairs if theirs}
    floor = max(float(gradient.abs().max()) for gradient in expected.gradients.values()) / 1000
    for name, gradient in found.gradients.items():
        theirs = expected.gradients[name]
        error = float((gradient - theirs).abs().max()) / max(float(theirs.abs().max()), floor)
        errors[name] = error if math.isfinite(error) else math.inf
    return errors


# ------------------------------------------------------------------------------------------------------ the trainer


class Step:
    """A run of a case with drawn data, up to its first gradient; nothing is written."""

    def __init__(self, case: Case, folder: str) -> None:
        plan, tokenizer, *_ = plan_on_ranks(config_of(case, folder), resumes=False)
        plan, data = with_data(plan, tokenizer, lambda *_: corpus_of(case.packing))

        def layouts(*args: Any) -> tuple[Layouts, str]:
            first, source = first_layouts(*args)
            if case.layout == "contiguous":
                return first, source
            return Layouts({name: permuted(one) for name, one in first.items()}), "the case"

        self.run = Run(plan, build(plan, {}, layouts), data, tokenizer)

    def found(self) -> Found:
        """What the step found, on every rank; gradients are whole."""
        run, model = self.run, self.run.built.model
        batches = [run.to_device(batch) for batch in next(run.data.train)]
        means, norm = gradients(run, batches)
        objective = run.built.objective
        loss, *balance = means[: objective.router_sums].tolist()
        further = means[objective.router_sums : objective.sums].view(-1, 2)
        balance += (further[:, 0] / further[:, 1]).tolist()
        with sharded_parameters(model):
            whole = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        if not is_logical(model):
            whole = logical_order(model, whole)
        run.data.train.close()
        return Found(loss, balance, float(norm), {name: full_tensor(one) for name, one in whole.items()})


def permuted(first: ExpertLayout) -> ExpertLayout:
    """Another layout with as many rows on each rank: experts or their slices elsewhere."""
    cut = first.slices
    homes = tuple(tuple(ORDER[row // cut] * cut + row % cut for row in rank) for rank in first.homes)
    return ExpertLayout(homes, slices=cut)


def config_of(case: Case, folder: str) -> Config:
    """The configuration of a case."""
    settings = case.settings
    settings["model"] = {"model_type": case.family, "config": model_of(case.family, case.layers)}
    settings["data"] |= {"sequence_length": LENGTH, "tokenizer": "bytes"}
    settings["training"] |= {"output_dir": folder, "max_steps": 2, "max_grad_norm": 0.0, "seed": 3}
    return config_type().model_validate(settings)


def model_of(family: str, layers: int) -> dict[str, Any]:
    """Keys of a model's configuration."""
    return {**SIZES, **FAMILIES[family], "num_hidden_layers": layers}


@functools.cache
def corpus_of(packing: str) -> Corpus:
    """Drawn tokens; examples of uneven lengths, of which some tokens are not learned."""
    generator = np.random.default_rng(11)
    tokens = generator.integers(2, 256, size=80 * LENGTH, dtype=np.uint16)
    if packing == "stream":
        return Corpus(tokens, tokens[:0], 1, 0, f"drawn-{packing}", "drawn tokens")
    lengths = generator.integers(3, LENGTH - 2, size=60)
    ends = np.cumsum(lengths)
    marks = Marks(generator.random(ends[-1]) < 0.7, ends)
    nothing = Marks(marks.learned[:0], ends[:0])
    return Corpus(tokens[: ends[-1]], tokens[:0], 60, 0, f"drawn-{packing}", "drawn tokens", marks, nothing)


# ---------------------------------------------------------------------------------------------------- one process


@functools.cache
def reference(family: str, layers: int, packing: str, micro_batches: int, balance: str, depth: int = 0) -> Found:
    """Computed by rank 0 alone, and known to all."""
    found: list[Found | None] = [None]
    if dist.get_rank() == 0:
        found = [_reference(family, layers, packing, micro_batches, balance, depth)]
    dist.broadcast_object_list(found)
    assert found[0] is not None
    return found[0]


def _reference(family: str, layers: int, packing: str, micro_batches: int, balance: str, depth: int) -> Found:
    config = make_config(family, model_of(family, layers) | dict.fromkeys(("bos_token_id", "pad_token_id")))
    if depth:
        add_change(config, "mtp", {"depth": depth})
    model: Any = build_model(config, distributed_config=None, dtype=torch.float32, seed=3)
    data = DataSection(packing=cast(Any, packing), sequence_length=LENGTH)
    loader = TrainLoader(
        sequences_of(corpus_of(packing), data),
        batch_size=SEQUENCES // micro_batches,
        accumulation=micro_batches,
        seed=3,
    )
    batches = next(loader)
    tokens = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in batches)
    loss, counts, further = torch.zeros(()), None, torch.zeros(depth, 2)
    for batch in batches:
        ce, logits_L, further_K2 = _forward(model, batch, depth)
        losses, counts = _of_routers(logits_L, batch, balance, family == "deepseek_v3", counts)
        of_layers = MTP_WEIGHT / max(depth, 1) * further_K2[:, 0].sum()
        ((ce + of_layers) / tokens + sum(coef * one for coef, one in losses) / micro_batches).backward()
        further += further_K2.detach()
        loss = loss + torch.stack([ce.detach() / tokens, *(one.detach() / micro_batches for _, one in losses)])
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    norm = math.sqrt(sum(float(one.double().square().sum()) for one in gradients.values()))
    means = loss.tolist()
    # Those of layers are means over them.
    balances = [means[1], *(one / len(logits_L) for one in means[2:]), *(further[:, 0] / further[:, 1]).tolist()]
    return Found(means[0], balances, norm, gradients)


def _forward(
    model: Any, batch: dict[str, torch.Tensor], depth: int
) -> tuple[torch.Tensor, list[list[torch.Tensor]], torch.Tensor]:
    """The sum of cross-entropies of a micro-batch, document by document; for each MoE layer the router's logits of the
    tokens of each sequence; and for each multi-token prediction layer the sum of its cross-entropies, and how
    many."""
    logits: dict[str, list[list[torch.Tensor]]] = {name: [] for name in find_routers(model)}
    hooks = [
        router.register_forward_hook(lambda _, args, out, name=name, at=at: logits[name][-1].append(out[at]))
        for name, (router, at) in find_routers(model).items()
    ]
    ce, further_K2 = torch.zeros(()), [[torch.zeros(())] * 2 for _ in range(depth)]
    for row in range(batch["input_ids"].shape[0]):
        ids, labels = batch["input_ids"][row], batch["labels"][row]
        starts = [0]
        if "position_ids" in batch:
            starts = (batch["position_ids"][row] == 0).nonzero().flatten().tolist()
        for found in logits.values():
            found.append([])
        for first, last in zip(starts, [*starts[1:], len(ids)], strict=True):
            hidden_LH = model.model(input_ids=ids[None, first:last], use_cache=False).last_hidden_state[0]
            ce = ce + F.cross_entropy(model.lm_head(hidden_LH)[:-1], labels[first + 1 : last], reduction="sum")
            end = last if "padding" not in batch else last - int(batch["padding"][row, first:last].sum())
            for k in range(1, depth + 1):
                later = [at + k if at + k < end else at for at in range(first, last)]
                hidden_LH = _further(model, k, hidden_LH, ids[later])
                targets = labels[first + 1 + k : last]
                logits_LV = model.lm_head(hidden_LH)[: len(targets)]
                one, number = further_K2[k - 1]
                further_K2[k - 1] = [
                    one + F.cross_entropy(logits_LV, targets, reduction="sum"), number + (targets != -100).sum(),
                ]  # fmt: skip
            if "padding" in batch:
                for found in logits.values():
                    found[-1][-1] = found[-1][-1].view(-1, EXPERTS)[~batch["padding"][row, first:last]]
    for hook in hooks:
        hook.remove()
    found_L = [[torch.cat([part.view(-1, EXPERTS) for part in row]) for row in rows] for rows in logits.values()]
    return ce, found_L, torch.stack([torch.stack(pair) for pair in further_K2]) if depth else torch.zeros(0, 2)


def _further(model: Any, k: int, hidden_LH: torch.Tensor, ids_L: torch.Tensor) -> torch.Tensor:
    """Section 2.2 of DeepSeek-V3 for one document: the hidden states of layer k, normalised."""
    config = model.config
    layer = model.model.layers[config.num_hidden_layers + k - 1]

    def norm(x_LH: torch.Tensor, module: Any) -> torch.Tensor:
        return x_LH * torch.rsqrt(x_LH.square().mean(-1, keepdim=True) + config.rms_norm_eps) * module.weight

    embedding_LH = F.embedding(ids_L, model.model.embed_tokens.weight)
    both = torch.cat([norm(embedding_LH, layer.enorm), norm(hidden_LH, layer.hnorm)], -1)
    joined_BLH = (both @ layer.eh_proj.weight.T)[None]
    positions = model.model.rotary_emb(joined_BLH, torch.arange(len(ids_L))[None])
    # Past what is hooked to the layer.
    out_BLH = layer.forward(joined_BLH, attention_mask=None, position_embeddings=positions)
    return norm(out_BLH[0], layer.shared_head.norm)


def _of_routers(
    logits_L: list[list[torch.Tensor]],
    batch: dict[str, torch.Tensor],
    balance: str,
    sigmoid: bool,
    counts: torch.Tensor | None,
) -> tuple[list[tuple[float, torch.Tensor]], torch.Tensor | None]:
    """Each loss with its weight, the balance loss first; and the choices of the step so far."""
    layers = [torch.cat(rows) for rows in logits_L]
    first = COEF, torch.zeros(())
    if balance in ("model", "layer"):
        groups = layers if balance == "layer" else [torch.cat(layers)]
        first = COEF, torch.stack([_balance(logits_TE) for logits_TE in groups]).mean()
    z = 0.02, torch.stack([logits_TE.logsumexp(-1).square().mean() for logits_TE in layers]).sum()
    if balance == "step":
        chosen_LE = torch.stack([_chosen(logits_TE).sum(0) for logits_TE in layers])
        counts = chosen_LE if counts is None else counts + chosen_LE
        f_LE = counts * TOP_K / counts.sum(1, keepdim=True)
        prob_LE = torch.stack([logits_TE.softmax(-1).mean(0) for logits_TE in layers])
        return [(COEF, EXPERTS * (f_LE * prob_LE).sum(1).mean()), z], counts
    if balance != "sequence":
        return [first], counts
    rows = [row for layer in logits_L for row in layer if len(row)]
    # Equations 17 to 20 of DeepSeek-V3, of each sequence of each layer.
    share = [row.sigmoid() / row.sigmoid().sum(-1, keepdim=True) if sigmoid else row.softmax(-1) for row in rows]
    f = [EXPERTS / TOP_K * _chosen(row).mean(0) for row in rows]
    own = torch.stack([(f_E * share_TE.mean(0)).sum() for f_E, share_TE in zip(f, share, strict=True)])
    return [first, z, (0.03, own.sum() / (len(rows) / len(layers)))], counts


def _chosen(logits_TE: torch.Tensor) -> torch.Tensor:
    """(T, E): 1 where a token chooses an expert."""
    return torch.zeros_like(logits_TE).scatter(1, logits_TE.topk(TOP_K, dim=-1).indices, 1.0).detach()


def _balance(logits_TE: torch.Tensor) -> torch.Tensor:
    """E * sum_e f_e * P_e (Switch Transformer, section 2.2)."""
    return EXPERTS * (_chosen(logits_TE).mean(0) * logits_TE.softmax(-1).mean(0)).sum()
