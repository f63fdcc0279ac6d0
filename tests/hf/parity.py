"""One architecture on four ranks against itself on one: logits, loss and every gradient.

`measure` runs on every rank of the pool (tests/ranks.py). Rank 0 draws a tiny model, saves it, loads it again as any
user would, and computes the reference on the whole batch. Then all ranks load the same folder with expert
parallelism, each takes its part of the batch, and rank 0 compares. FSDP averages gradients over the ranks, and the
reference's loss is the mean over the batch, so the two must be equal.

Errors are max-norm: max |ours - theirs| / max |theirs|. Where a gradient is mathematically zero (a key bias under
softmax), what remains is rounding, and its ratio means nothing; so the denominator of a gradient's error is at least
1/1000 of the largest gradient in the model. A wrong factor of 2 still shows in any gradient larger than 1e-8 of it.

`HANDLING` says what a few architectures need, and `EXCEPTIONS` which ones cannot run and why. Both end up in
docs/models.md.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.distributed import DistributedConfig
from transformers.distributed.sharding_utils import DtensorShardOperation

import carpool.hf
from carpool import conformance
from carpool.hf.seam.experts_module import expert_function
from tests.hf.meshes import reuse_meshes
from tests.hf.tiny_models import MoEArchitecture, discover, tiny_batch, tiny_model

full_gradients, relative_error = conformance.full_gradients, conformance.relative_error
IMPLEMENTATION = "carpool"
BOUND = 1e-5


@dataclasses.dataclass(frozen=True)
class Handling:
    """What an architecture needs beyond `DistributedConfig(fsdp_size=4, ep_size=4, ep_implementation="carpool")`.

    experts_only_plan: leave only the experts in `config.base_model_ep_plan`.
    fsdp_plan: rules for `DistributedConfig.fsdp_plan`.
    cannot_load: what transformers does wrong when it shards a checkpoint of this architecture while reading it. The
        test checks that it still does, then puts the right weights in place and goes on.
    bound: of the errors, where float32 leaves more than `BOUND`.
    note: for the table in the docs.
    """

    experts_only_plan: bool = False
    fsdp_plan: dict[str, str] | None = None
    cannot_load: str = ""
    bound: float = BOUND
    note: str = ""


_CONV1D = (
    "loading a checkpoint under FSDP: transformers shards the q, k and v convolutions one by one and then concatenates "
    "the shards, so `conv1d.weight` is silently wrong; training from scratch is right"
)
_VISION = (
    "loading a checkpoint under FSDP: transformers shards the q, k and v weights of the vision tower first and "
    "{} them then, so they are silently wrong"
)
_DENSE_RULES = (
    "its own EP plan also splits the dense MLP as tensor parallelism does, which needs ep_size == tp_size; for "
    "ep_size > tp_size, leave only the experts in `config.base_model_ep_plan`"
)

HANDLING: dict[str, Handling] = {
    "bailing_hybrid": Handling(cannot_load=_CONV1D),
    "diffusion_gemma": Handling(
        experts_only_plan=True,
        fsdp_plan={
            "model.encoder.language_model.layers.*": "keep_full_weight",
            "model.decoder.layers.*": "keep_full_weight",
        },
        bound=5e-5,
        note=_DENSE_RULES + ". The decoder reads the encoder's keys and values past the module outputs to which FSDP2 "
        "hooks its backward, so with or without EP its layers must keep their weights (`fsdp_plan` rules "
        "`keep_full_weight`), or backward crashes",
    ),
    "ernie4_5_vl_moe": Handling(
        cannot_load="loading a checkpoint under FSDP: transformers transposes and splits the router weights after "
        "sharding them, and reports a size mismatch",
        note="its text and vision experts run only if this rank's batch has such tokens; with images on some ranks "
        "only, the ranks' exchanges would not match",
    ),
    "gemma4": Handling(experts_only_plan=True, bound=5e-5, note=_DENSE_RULES),
    "glm5_next": Handling(cannot_load=_CONV1D),
    "kimi_linear": Handling(cannot_load=_CONV1D),
    "mistral_large4": Handling(cannot_load=_VISION.format("permutes")),
    "qwen3_vl_moe": Handling(
        cannot_load="loading a checkpoint that transformers saved, under FSDP or EP: it decides by the shard's shape "
        "whether the experts are stored transposed, and reports a size mismatch (the original checkpoints load)"
    ),
    "step3p7": Handling(cannot_load=_VISION.format("splits")),
    "unlimited_ocr": Handling(cannot_load=_VISION.format("splits")),
}

EXCEPTIONS: dict[str, str] = {
    "dbrx": "no EP plan in transformers: all experts are rows of one flat matrix, which cannot be sharded by expert",
    "doge": "no EP plan in transformers: an expert is one row of an embedding; its routing also mixes tokens of the "
    "batch, so even data parallelism changes the result",
    "jetmoe": "no EP plan in transformers: experts take sorted rows and their counts, and attention has experts too",
    "llama4": "no EP plan in transformers: every expert runs on every token, weighted by 0 where not chosen; there is "
    "no list of choices to dispatch by",
    "longcat_flash": "no EP plan in transformers: identity experts share the numbering of the real ones, and the two "
    "projections hold different numbers of experts",
    "nllb_moe": "no EP plan in transformers: a dictionary of separate expert modules",
    "switch_transformers": "no EP plan in transformers: a dictionary of separate expert modules, and a capacity that "
    "drops tokens",
    "vitpose_backbone": "no router: a pose estimator whose experts are chosen by the name of the data set",
}

# Experts classes that no model above holds, although their folder is tested.
UNTESTED_CLASSES: dict[str, str] = {
    "Qwen3OmniMoeTalkerTextExperts": "the speech decoder takes the hidden states of the thinker and has no loss of its "
    "own in transformers; the code is the thinker's"
}


@dataclasses.dataclass(frozen=True)
class Mesh:
    """Sizes of a `DistributedConfig` over four ranks."""

    fsdp: int = 4
    tp: int = 1
    ep: int = 4

    def config(self, implementation: str, handling: Handling) -> DistributedConfig:
        return DistributedConfig(
            fsdp_size=self.fsdp,
            tp_size=self.tp,
            ep_size=self.ep,
            ep_implementation=implementation,
            fsdp_plan=handling.fsdp_plan,
        )


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What rank 0 found. The errors are as in the module's docstring.

    experts: the class of the experts, with what distinguishes it.
    plan: "experts", or "experts and others" if the model's own expert-parallel plan has rules for more than experts.
    computed_by: "Carpool" if its kernels know the class, else "the model".
    loading: what went wrong when the checkpoint was loaded sharded; empty if all weights are right.
    missing: parameters that have a gradient on one side only.
    rows: that travelled between ranks in the forward pass, over all ranks and layers.
    """

    logits: float
    loss: float
    gradient: float
    worst_gradient: str
    experts: str
    plan: str
    computed_by: str
    loading: str
    missing: list[str]
    rows: int

    @property
    def error(self) -> float:
        return max(self.logits, self.loss, self.gradient)


def measure(folder: str, path: str, mesh: Mesh, implementation: str = IMPLEMENTATION) -> Outcome | None:
    """Runs on each of the four ranks, with one empty directory `path` for all. The outcome is rank 0's."""
    quiet()
    architecture, rank = discover()[folder], dist.get_rank()
    handling = HANDLING.get(folder, Handling()) if mesh.ep > mesh.tp else Handling()
    reference = None
    if rank == 0:
        tiny_model(architecture).save_pretrained(path)
        reference = architecture.model_class.from_pretrained(path, dtype=torch.float32).train()
        expected_logits, expected_loss = loss_of(reference, tiny_batch(reference))
        expected_loss.backward()
    dist.barrier()

    model, loading = load(architecture, path, mesh, implementation, handling)
    own = slice(rank // mesh.tp * mesh.tp, (rank // mesh.tp + 1) * mesh.tp)
    logits, loss = loss_of(model, {name: value[own] for name, value in tiny_batch(model).items()})
    loss.backward()

    all_logits = [torch.empty_like(logits) for _ in range(dist.get_world_size())]
    dist.all_gather(all_logits, logits.detach().contiguous())
    loss = loss.detach().clone()
    dist.all_reduce(loss)
    loss /= dist.get_world_size()
    gradients = full_gradients(model)
    traffic = [ride.stats.traffic for ride in carpool.hf.rides(model).values()]
    rows = torch.tensor(sum(layer.remote(layer.rows, "dispatch") for layer in traffic))
    dist.all_reduce(rows)
    if reference is None:
        return None

    errors, missing = gradient_errors(reference, gradients)
    worst = max(errors, key=lambda name: errors[name])
    experts = experts_modules(reference)[0]
    return Outcome(
        logits=relative_error(torch.cat(all_logits[:: mesh.tp]), expected_logits.detach()),
        loss=relative_error(loss, expected_loss.detach()),
        gradient=errors[worst],
        worst_gradient=worst,
        experts=describe(experts),
        plan="experts" if all("experts" in name for name in reference.ep_plan) else "experts and others",
        computed_by="the model" if expert_function(experts) is None else "Carpool",
        loading=loading,
        missing=missing,
        rows=int(rows),
    )


def refusal(folder: str, path: str, mesh: Mesh) -> str:
    """What loading an architecture of `EXCEPTIONS` with expert parallelism says. Runs on each rank."""
    quiet()
    architecture = discover()[folder]
    if dist.get_rank() == 0:
        tiny_model(architecture).save_pretrained(path)
    dist.barrier()
    try:
        load(architecture, path, mesh, IMPLEMENTATION, Handling())
    except ValueError as error:
        return str(error)
    return ""


def load(
    architecture: MoEArchitecture, path: str, mesh: Mesh, implementation: str, handling: Handling
) -> tuple[PreTrainedModel, str]:
    """The model as a user loads it, and what was wrong with its weights then: they are put right."""
    reuse_meshes()
    config = None
    if handling.experts_only_plan:
        config = AutoConfig.from_pretrained(path)
        keep_experts_only(config)
    from_pretrained = functools.partial(
        architecture.model_class.from_pretrained,
        path,
        config=config,
        dtype=torch.float32,
        distributed_config=mesh.config(implementation, handling),
    )
    try:
        model, problem = from_pretrained().train(), ""
    except RuntimeError as error:
        if not handling.cannot_load:
            raise
        model, problem = from_pretrained(ignore_mismatched_sizes=True).train(), str(error)
    wrong = restore(model, tiny_model(architecture))
    return model, problem or (f"wrong without an error: {', '.join(wrong)}" if wrong else "")


def keep_experts_only(config: PreTrainedConfig) -> None:
    """Drop what is not about experts from the EP plans of a configuration and its text configuration."""
    for part in (config, config.get_text_config()):
        if part.base_model_ep_plan:
            plan = {name: style for name, style in part.base_model_ep_plan.items() if "experts" in name}
            part.base_model_ep_plan = plan  # type: ignore[misc]


@torch.no_grad()
def restore(model: PreTrainedModel, source: PreTrainedModel) -> list[str]:
    """Give a sharded model the weights of a whole one. Returns what that changed on any rank. Collective."""
    changed = []
    for name, value in [*model.named_parameters(), *model.named_buffers()]:
        whole = source.get_parameter_or_buffer(name)
        local = value
        if isinstance(value, DTensor):
            local = value.to_local()
            whole = DtensorShardOperation(value).shard_tensor(whole)
        if not torch.equal(local, whole):
            changed.append(name)
            local.copy_(whole)
    everywhere: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everywhere, changed)
    return sorted({name for names in everywhere for name in names})


def loss_of(model: PreTrainedModel, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and the model's own loss; a diffusion model has none, and gets the cross entropy of its canvas."""
    output = model(**batch)
    if "labels" in batch:
        return output.logits, output.loss
    return output.logits, F.cross_entropy(output.logits.flatten(0, 1), batch["decoder_input_ids"].flatten())


def gradient_errors(
    reference: nn.Module, gradients: dict[str, torch.Tensor | None]
) -> tuple[dict[str, float], list[str]]:
    """(error of each gradient that both have, relative to its largest element; those that only one has)."""
    return conformance.gradient_errors({name: p.grad for name, p in reference.named_parameters()}, gradients)


def experts_modules(model: PreTrainedModel) -> list[nn.Module]:
    """The modules that the model's own expert-parallel plan dispatches to."""
    plan = model._expand_parallel_plan(model.ep_plan or {})
    return [model.get_submodule(name) for name, style in plan.items() if style == "ep_dispatch_experts"]


def describe(experts: Any) -> str:
    """An experts module in a few words: "OlmoeExperts: gated"."""
    if not hasattr(experts, "has_gate"):
        return f"{type(experts).__name__}: own forward, not decorated"
    traits = ["gated" if experts.has_gate else "no gate"]
    if type(experts)._apply_gate.__module__ != "transformers.integrations.moe":
        traits.append("own gate function")
    for flag, trait in (("is_transposed", "transposed"), ("has_bias", "biases"), ("has_post_expert_norm", "norm")):
        if getattr(experts, flag):
            traits.append(trait)
    if not experts.is_concatenated:
        traits.append("interleaved")
    return f"{type(experts).__name__}: {', '.join(traits)}"


def quiet() -> None:
    """Tiny models provoke many warnings of transformers about unusual sizes."""
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
