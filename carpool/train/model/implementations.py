"""Which of transformers' implementations computes attention, and whether a model has those that are named."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from carpool.hf.compute.attention import fused_attention
from carpool.hf.compute.documents import DOCUMENTS, why_no_bounds
from carpool.parallel.degrees import Degrees
from carpool.plugins.nearest import nearest
from carpool.train.config.schema import Config, ModelSection
from carpool.train.data.formats import are_packed


def attention_of(config: Config, degrees: Degrees, model: PreTrainedModel, cuda: bool) -> str | None:
    """What computes attention, as Transformers names it; None: its default."""
    if config.model.attn_implementation is not None:
        return config.model.attn_implementation
    packed, training = are_packed(config.data), config.training
    # Not shown to be right, or bitwise repeatable, with these.
    unsure = degrees.cp > 1 or training.full_determinism
    if packed and not unsure:
        half = config.model.dtype == "bfloat16" or training.computes_in_bf16(cuda)
        # Without a GPU the host reads where documents end, which no compiled layer can.
        compiled = training.torch_compile and not cuda
        return None if compiled or why_no_bounds(model, cuda, half) else DOCUMENTS
    return fused_attention(model) if cuda and not packed and not unsure else None


def planned_attention(config: Config, degrees: Degrees, model: PreTrainedModel, cuda: bool) -> str | None:
    """The same as the planner reads it (`carpool.planner.model.shape`), to which what is not "eager" is fused."""
    return attention_of(config, degrees, model, cuda) or ("eager" if fused_attention(model) else None)


def check_attention(model: ModelSection) -> None:
    """Raise ValueError for an attention that transformers does not know. Those with a slash are its kernels."""
    name, known = model.attn_implementation, ("eager", *ALL_ATTENTION_FUNCTIONS.valid_keys())
    if name is not None and name not in known and "/" not in name:
        close = nearest(name, known)
        hint = f" (did you mean {close}?)" if close else ""
        raise ValueError(f"model.attn_implementation = {name!r}: expected one of {', '.join(sorted(known))}{hint}")


def check_implementations(section: ModelSection, model: PreTrainedModel) -> None:
    """Raise ValueError for attention or experts that this model, or this machine, does not have. What names a kernel of
    a repository (with a slash) is known when it is loaded."""
    if (name := section.attn_implementation) is not None and "/" not in name:
        with _refused(f"model.attn_implementation = {name!r}"):
            model.get_correct_attn_implementation(name, is_init_check=True)
    if (name := section.experts_implementation) is not None and "/" not in name:
        with _refused(f"model.experts_implementation = {name!r}"):
            model.get_correct_experts_implementation(name)


@contextmanager
def _refused(setting: str) -> Iterator[None]:
    try:
        yield
    except (ValueError, ImportError) as error:
        raise ValueError(f"{setting}: {error}") from None
