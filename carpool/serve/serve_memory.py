"""Where the experts of a model that answers are, and what memory a rank needs, compared with what there is before
anything is read.

weights     non-expert parameters whole, and E / W of the experts
cache       keys and values of each layer: tokens x heads x (size of a key + size of a value)
rows        what rides of the largest forward hold: tokens x hidden size, for some buffers of it
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from carpool.activations.host_memory import check_host_memory
from carpool.experts.host_experts import HostExperts
from carpool.hf.seam.find_modules import experts_modules
from carpool.hf.weights.model_config import head_sizes
from carpool.memory.next_experts import PREDICTORS
from carpool.train.blueprint import meta_model
from carpool.train.launch.machine import rank_memory

Where = Literal["device", "host", "disk"]


@dataclass(frozen=True)
class ExpertTier:
    """Where experts are.

    Attributes:
        where: on the device, in host memory, or in the checkpoint's files.
        memory: bytes of the device for experts that stay there once they came.
        host_memory: of experts on disk, bytes of host memory for those that were read.
        predictor: of `PREDICTORS`.

    Raises:
        ValueError: an unknown name, or memory for what is on the device anyway.
    """

    where: Where = "device"
    memory: int = 0
    host_memory: int = 0
    predictor: str = "pairs"

    def __post_init__(self) -> None:
        assert self.where in get_args(Where) and self.predictor in PREDICTORS
        if self.where == "device" and (self.memory or self.predictor != "pairs"):
            raise ValueError(
                "--experts-memory and --predictor are about experts that come to the GPU: add --experts host (or disk)"
            )
        if self.where != "disk" and self.host_memory:
            raise ValueError("--experts-host-memory is for experts on disk: add --experts disk")

    @property
    def away(self) -> bool:
        return self.where != "device"


ON_DEVICE = ExpertTier()

# Rows that travel are held where they leave, where they arrive, and as sums on both sides; and so are a layer's own.
_COPIES = 8


def check_room(
    source: Path | PreTrainedConfig,
    dtype: torch.dtype,
    ranks: int,
    max_tokens: int,
    cached_tokens: int,
    experts: ExpertTier = ON_DEVICE,
) -> None:
    """Compare what a rank will need with what it has.

    Raises:
        ValueError: it does not suffice; the message has the sizes."""
    needed = rank_needs(source, dtype, ranks, max_tokens, cached_tokens, experts)
    if experts.away:
        what, advice = "the experts (--experts host)", "Use --experts disk"
        if experts.where == "disk":
            what, advice = "experts that were read (--experts disk)", "Lower --experts-host-memory"
        check_host_memory(host_bytes(source, dtype, experts), what, advice=advice)
    cuda = torch.cuda.is_available()
    memory = rank_memory(cuda, ranks)
    if (total := sum(needed.values())) > memory:
        parts = ", ".join(f"{name} {size / 2**30:.1f}" for name, size in needed.items())
        raise ValueError(
            f"a rank needs about {total / 2**30:.1f} GiB ({parts}), and has {memory / 2**30:.1f} GiB of "
            f"{'GPU' if cuda else 'host'} memory: use more ranks, a smaller --batch-size or fewer tokens, or "
            "--dtype bfloat16"
            + ("" if experts.away else ", or on one rank --experts host")
            + (", or a smaller --experts-memory" if experts.memory else "")
        )


def rank_needs(
    source: Path | PreTrainedConfig,
    dtype: torch.dtype,
    ranks: int,
    max_tokens: int,
    cached_tokens: int,
    experts: ExpertTier = ON_DEVICE,
) -> dict[str, int]:
    """As `needed_bytes`, with experts where they are.

    Raises:
        ValueError: experts that come when they are chosen, and the model has none."""
    needed = needed_bytes(source, dtype, ranks, max_tokens, cached_tokens)
    if experts.away:
        whole, two = _expert_bytes(source, dtype, experts)
        # Two layers' are on the GPU, and what stays there.
        needed["weights"] += two + min(experts.memory, whole) - whole
    return needed


def host_bytes(source: Path | PreTrainedConfig, dtype: torch.dtype, experts: ExpertTier) -> int:
    """Of host memory, for experts that are not on the device. ValueError: as `rank_needs`."""
    whole, two = _expert_bytes(source, dtype, experts)
    return whole if experts.where == "host" else min(max(experts.host_memory, two), whole)


def _expert_bytes(source: Path | PreTrainedConfig, dtype: torch.dtype, experts: ExpertTier) -> tuple[int, int]:
    """Of all experts, and of those of two layers."""
    elements, layers = expert_elements(source)
    if not layers:
        raise ValueError(f"--experts {experts.where}: {source} has no experts that Carpool could bring in")
    whole = elements * dtype.itemsize
    return whole, whole * min(2, layers) // layers


def needed_bytes(
    source: Path | PreTrainedConfig, dtype: torch.dtype, ranks: int, max_tokens: int, cached_tokens: int
) -> dict[str, int]:
    """Bytes of a rank, by what they hold."""
    model = meta_model(source)
    experts, _ = _expert_elements(model)
    dense = sum(parameter.numel() for parameter in model.parameters()) - experts
    config: Any = model.config.get_text_config(decoder=True)
    return {
        "weights": (dense + experts // ranks) * dtype.itemsize,
        "cache": cached_tokens * _cached_elements(config) * dtype.itemsize,
        "rows": max_tokens * config.hidden_size * _COPIES * dtype.itemsize,
    }


def expert_elements(source: Path | PreTrainedConfig) -> tuple[int, int]:
    """Elements of all experts, and how many layers have any."""
    return _expert_elements(meta_model(source))


def _expert_elements(model: PreTrainedModel) -> tuple[int, int]:
    names = experts_modules(model)
    return sum(one.numel() for name in names for one in model.get_submodule(name).parameters()), len(names)


def _cached_elements(config: Any) -> int:
    """Elements of keys and values of one token, in all layers."""
    key, value = head_sizes(config)
    heads = getattr(config, "num_key_value_heads", None) or getattr(config, "num_attention_heads", 0)
    return int(config.num_hidden_layers * heads * (key + value))


def what_came(experts: HostExperts) -> str:
    """What of the experts has travelled so far, in a line."""
    hits, text = experts.hits, f"experts: {experts.what_moved()}"
    if hits.chosen:
        kept, foretold = hits.kept / hits.chosen, hits.foretold / hits.chosen
        text += f"; of those that single tokens chose, {kept:.0%} were there, and {foretold:.0%} were foretold"
    return text
