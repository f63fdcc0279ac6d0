"""Several adapters of one model, with weights, as one adapter that peft reads: peft's `add_weighted_adapter`, which has
none of experts.

    cat       w1 s1 b1 a1 + w2 s2 b2 a2       exactly; its rank is the sum of theirs
    linear    (t1 b1 + t2 b2)(t1 a1 + t2 a2)  with t = sqrt(w s), s = alpha / rank: as large as one of them, which must
                                              have the same ranks; products of one's b and the other's a are added, too

A tensor that some adapters do not change is changed by the others.
"""

from __future__ import annotations

import math
import re
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from torch import nn

from carpool.train.checkpoints.adapter_files import NAME, AdapterModules, adapted_model, base_folder, merge_adapter
from carpool.train.checkpoints.export import Exported
from carpool.train.checkpoints.run_source import SOURCE, keep_source
from carpool.train.config.fine_tuning import adapter_folder, base_of_adapter
from carpool.train.records.run_folder import ADAPTER

Combination = Literal["cat", "linear"]


# a (E * Q, I) and b (O, Q * E), as in peft's files, of E experts; 1: of no experts. And weight times scaling.
_Factors = tuple[torch.Tensor, torch.Tensor, int, float]


def combine_adapters(
    base: Path, adapters: Sequence[Path], weights: Sequence[float], how: Combination, out: Path
) -> None:
    """Write the weighted sum of adapters of one model into a new folder.

    Raises:
        ValueError: one is no adapter of this model, or they cannot be added so."""
    from peft import LoraConfig

    found: dict[str, list[_Factors]] = {}
    parameters: set[str] = set()
    for folder, weight in zip(adapters, weights, strict=True):
        modules = AdapterModules(base, folder)
        if modules.replaced:
            name = min(modules.replaced)
            raise ValueError(f"{folder} has trained {name} itself, which cannot be added to another adapter")
        for name, (module, own) in modules.layers.items():
            if module.lora_magnitude_vector:
                raise ValueError(f"{folder} is a DoRA adapter, whose magnitudes cannot be added: merge it by itself")
            stored = module.get_base_layer()._parameters[own]
            with modules.filled(name, nn.Parameter(stored, requires_grad=False)):
                a, b = module.lora_A[NAME].weight.data, module.lora_B[NAME].weight.data
            experts = len(stored) if stored.ndim == 3 else 1
            found.setdefault(name, []).append((a, b, experts, weight * module.scaling[NAME]))
            if hasattr(module, "parameter_name"):
                parameters.add(name)
    combined = {name: _combine(name, some, how) for name, some in found.items()}
    ranks = {name: len(a) // found[name][0][2] for name, (a, _) in combined.items()}
    layers = {name: name if name in parameters else name.removesuffix(".weight") for name in ranks}
    pattern = {re.escape(layers[name]): rank for name, rank in ranks.items()}
    rank = max(ranks.values())
    config = LoraConfig(
        r=rank, lora_alpha=rank, rank_pattern=pattern, alpha_pattern=dict(pattern), task_type="CAUSAL_LM",
        target_modules=sorted(layers[name] for name in ranks if name not in parameters),
        target_parameters=sorted(parameters) or None, base_model_name_or_path=str(base), inference_mode=True,
    )  # fmt: skip
    names, adapted, keys = adapted_model(base, config)
    tensors: dict[str, torch.Tensor] = {}
    for module in adapted.modules():
        if hasattr(module, "lora_A") and len(module.lora_A):
            one: Any = module
            name = names[id(one.get_base_layer()._parameters[getattr(one, "parameter_name", "weight")])]
            for linears, value in zip((one.lora_A, one.lora_B), combined[name], strict=True):
                tensors[keys[id(linears[NAME].weight)]] = value.contiguous()
    out.mkdir(parents=True)
    save_file(tensors, out / "adapter_model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(str(out))


def _combine(name: str, some: list[_Factors], how: Combination) -> tuple[torch.Tensor, torch.Tensor]:
    """a and b of the sum, which is scaled by 1."""
    if how == "cat":
        a_EQI = torch.cat([a.unflatten(0, (experts, -1)) * scale for a, _, experts, scale in some], 1)
        b_OQE = torch.cat([b.unflatten(1, (-1, experts)) for _, b, experts, _ in some], 1)
        return a_EQI.flatten(0, 1), b_OQE.flatten(1)
    if len(ranks := {len(a) // experts for a, _, experts, _ in some}) > 1:
        raise ValueError(
            f"{name} has adapters of rank {' and '.join(map(str, sorted(ranks)))}, and linear adds those of one rank: "
            "use --combination cat"
        )
    # Only a has the sign, or the two would cancel.
    a_sum = sum(a * math.copysign(abs(scale) ** 0.5, scale) for a, _, _, scale in some)
    return a_sum, sum(b * abs(scale) ** 0.5 for _, b, _, scale in some)  # type: ignore[return-value]


def merge_adapters(
    runs: Sequence[Path],
    weights: Sequence[float],
    how: Combination,
    target: Path,
    *,
    base: Path | None = None,
    into: Literal["trained", "original"] = "trained",
    dtype: Literal["mxfp4", "nf4", "int8"] | None = None,
) -> Exported:
    """As `merge_adapter`, of the weighted sum of several adapters. `runs`: folders of runs that have trained one, or
    of adapters as peft writes them. ValueError, besides: they are of different models, or cannot be added."""
    if len(runs) != len(weights) or not all(map(math.isfinite, weights)):
        given = ", ".join(f"{weight:g}" for weight in weights)
        raise ValueError(f"--weights: {given} for {len(runs)} adapters: each needs one finite number")
    folders = [adapter_folder(str(run)) for run in runs]
    bases = [base_folder(folder, base, to_merge=True).resolve() for folder in folders]
    for run, other in zip(runs, bases, strict=True):
        if other != bases[0]:
            raise ValueError(f"{run} is of {other}, and {runs[0]} of {bases[0]}: adapters of one model are merged")
        if (kind := base_of_adapter(run).get("base_dtype")) is not None and into == "trained":
            owner = run.resolve().parent if run.resolve().name == ADAPTER else run
            raise ValueError(
                f"{run} was trained beside a base in {kind}, and adapters with --weights, several adapters and their "
                f"folders are merged into the model as its files have it: `carpool merge {owner} --out {target}` "
                f"merges it into the base in {kind}, and --into original into the files"
            )
    with tempfile.TemporaryDirectory() as temporary:
        run = Path(temporary)
        if (runs[0] / SOURCE).is_dir():
            shutil.copytree(runs[0] / SOURCE, run / SOURCE)
        else:
            keep_source(run, bases[0], str(bases[0]) if any(bases[0].glob("tokenizer*")) else None)
        if len(folders) == 1 and weights[0] == 1:
            shutil.copytree(folders[0], run / ADAPTER)
        else:
            combine_adapters(bases[0], folders, weights, how, run / ADAPTER)
        return merge_adapter(run, target, base=bases[0], logits=True, into=into, dtype=dtype)
