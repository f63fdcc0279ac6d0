"""Several documents in one row, each as if it were alone; and rows of which it is known that there is only one in each.

Without an attention mask, a model's forward looks at its position ids for the seams of packed documents
(`transformers.masking_utils`), and a token then attends to its own document only:

    tokens           a b c | d e | f g h        three documents in a row of 8
    position_ids     0 1 2 | 0 1 | 0 1 2        a position that does not follow the one before begins a document

What it finds decides what is computed, so the host waits for the device at the beginning of each forward. Whoever knows
what is in the rows says so, and nobody looks:

    with unpacked():
        model(input_ids=...)                        rows are single documents
    with packed():
        model(input_ids=..., position_ids=...)      rows may hold several

The mask that keeps them apart has an entry for each two tokens. Attention that knows where documents end needs none
(`carpool.hf.compute.documents`).

Only attention looks at documents. A layer that carries a state from token to token carries it over seams:
`why_not_packed` says which models have such layers. Some
models do not show the position ids to their masks (`masks_without_positions`), and so attend over seams without a
word; `packed_settings` makes their masks for them.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Literal

import torch
from torch import nn
from transformers import masking_utils

from carpool.families import family_of
from carpool.hf.compute.documents import bounds, takes_bounds

# Of this thread: two halves of a micro-batch are in the model at the same time (`carpool.ride.two_batch`).
_KNOWN: ContextVar[Literal["unpacked", "packed"] | None] = ContextVar("known", default=None)
_look = masking_utils.find_packed_sequence_indices

# `layer_types` of a configuration whose tokens look at their own document only. A test watches all models.
WITHIN_DOCUMENTS = {"full_attention", "sliding_attention"}


@contextmanager
def unpacked() -> Iterator[None]:
    """Inside, models take each row for one document."""
    with _known("unpacked"):
        yield


@contextmanager
def packed() -> Iterator[None]:
    """Inside, models take each row for as many documents as its position ids say."""
    with _known("packed"):
        yield


@contextmanager
def _known(what: Literal["unpacked", "packed"]) -> Iterator[None]:
    masking_utils.find_packed_sequence_indices = _find
    token = _KNOWN.set(what)
    try:
        yield
    finally:
        _KNOWN.reset(token)


def _find(position_ids: torch.Tensor) -> torch.Tensor | None:
    """In the place of transformers' own."""
    known = None if torch.compiler.is_compiling() else _KNOWN.get()
    if known == "unpacked":
        return None
    if known == "packed":
        seams = torch.diff(position_ids, prepend=position_ids[:, :1] - 1, dim=-1) != 1
        return seams.cumsum(-1)
    found: torch.Tensor | None = _look(position_ids)
    return found


def why_not_packed(model: nn.Module) -> str | None:
    """Why a model of transformers cannot compute documents of one row as if each were alone; None: it can. What stands
    in the way lets tokens see others past attention, so context parallelism asks, too (`carpool.hf.axes.context`)."""
    config: Any = model.config
    name = type(model).__name__
    text = config.get_text_config()
    if config.is_encoder_decoder:
        return f"{name} has an encoder, which looks at whole rows"
    if family_of(model).own_positions or "position_ids" not in inspect.signature(model.forward).parameters:
        return f"{name} does not take the positions of tokens in their documents"
    others = sorted(set(getattr(text, "layer_types", None) or ()) - WITHIN_DOCUMENTS)
    if others or getattr(model, "_is_stateful", False):
        return f"{name} has layers ({', '.join(others) or 'with a state'}) in which a token sees others of its row"
    return None


def packed_settings(
    model: nn.Module, position_ids_BL: torch.Tensor, ends_BD: torch.Tensor | None = None
) -> dict[str, Any]:
    """For the forward of a model that `why_not_packed` has nothing against: what makes it see the documents.

    Args:
        position_ids_BL: the position of each token in its document. For flash attention of transformers, B must be 1.
        ends_BD: as `carpool.hf.compute.documents.bounds`.
    """
    settings: dict[str, Any] = {"position_ids": position_ids_BL}
    config: Any = model.config
    apart = family_of(model).masks_without_positions
    if takes_bounds(model):
        mask = bounds(position_ids_BL, ends_BD)
        settings["attention_mask"] = {"full_attention": mask, "sliding_attention": mask} if apart else mask
    elif apart:
        # Of the embeddings only shape, dtype and device matter. bfloat16 has zero and nearly -inf, hence does for all.
        like = torch.empty((*position_ids_BL.shape, 1), dtype=torch.bfloat16, device=position_ids_BL.device)
        asked = {"config": config, "inputs_embeds": like, "attention_mask": None, "past_key_values": None}
        settings["attention_mask"] = {
            "full_attention": masking_utils.create_causal_mask(**asked, position_ids=position_ids_BL),
            "sliding_attention": masking_utils.create_sliding_window_causal_mask(**asked, position_ids=position_ids_BL),
        }
    return settings


def one_row_only(model: nn.Module) -> bool:
    """Does the model's attention look for documents in batches of one row only, as flash attention of transformers?"""
    config: Any = model.config
    return "flash" in (getattr(config.get_text_config(), "_attn_implementation", None) or "")
