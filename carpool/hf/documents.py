"""Several documents in one sequence, each as if it were alone, and the attention that computes them.

Without an attention mask, a model's forward looks at its position ids for the seams of packed documents
(`transformers.masking_utils`), and a token then attends to its own document only:

    tokens           a b c | d e | f g h        three documents in a sequence of 8
    position_ids     0 1 2 | 0 1 | 0 1 2        a position that does not follow the one before begins a document

Looking makes the host wait for the device at the beginning of each forward. `with unpacked():` and `with packed():` say
what the sequences hold, and nobody looks.

Only attention looks at documents. A layer that carries a state from token to token carries it over seams:
`why_not_packed` says which models have such layers. Some models do not show the position ids to their masks
(`masks_without_positions`), and so attend over seams without a word; `packed_settings` makes their masks for them.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from itertools import pairwise
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AttentionInterface, AttentionMaskInterface, masking_utils
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from carpool.families import family_of
from carpool.hf.weights.model_config import head_sizes

# Of this thread: two halves of a micro-batch are in the model at the same time (`carpool.ride.two_batch`).
_KNOWN: ContextVar[Literal["unpacked", "packed"] | None] = ContextVar("known", default=None)
_look = masking_utils.find_packed_sequence_indices

# `layer_types` of a configuration whose tokens look at their own document only. A test watches all models.
WITHIN_DOCUMENTS = {"full_attention", "sliding_attention"}


def unpacked() -> AbstractContextManager[None]:
    """Inside, models take each row for one document."""
    return _known("unpacked")


def packed() -> AbstractContextManager[None]:
    """Inside, models take each row for as many documents as its position ids say."""
    return _known("packed")


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
    in the way lets tokens see others past attention, so context parallelism cannot be used either."""
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
        ends_BD: as of `bounds`.
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


def takes_lengths(model: Any) -> bool:
    """Whether that attention takes the documents of a batch from `row_lengths`, and reads none on the host."""
    return one_row_only(model) and bool(model._supports_attention_backend)


def row_lengths(rows: int, length: int, ends_BD: torch.Tensor | None, device: torch.device) -> dict[str, Any]:
    """For the forward of a model that `takes_lengths`, whose rows are given as one: where documents end, equally many
    numbers for each batch. ends_BD: as of `bounds`; None: each row is one document."""
    if ends_BD is None:
        ends_BD = torch.full((rows, 1), length, device=device)
    ends = bounds(torch.empty(rows, length, device="meta"), ends_BD).flatten()
    return {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": length, "max_length_k": length}


# ---------------------------------------------------------------------------------------------------------------------
# Attention of packed documents without a mask: it gets the bounds of documents, and goes no further.
#
#     a sequence of 8, documents of 3, 2 and 3 tokens     bounds 0 3 5 8, of all sequences one after the other
#     a mask                                              8 x 8 entries, of which 15 say yes
#
# A mask has an entry for each two tokens, attention computes all of them, and each layer rounds and keeps the mask
# anew: 8 GB for 48 layers and 4 sequences of 4,096 tokens. With bounds, which layers share, the triangle of each
# document is computed. On GPUs PyTorch's flash attention takes them (`cu_seqlens`); their number is fixed and those
# left over are empty, so a CUDA graph holds it. Elsewhere each document is computed by itself, which defines the
# result.
#
# Bounds go to the layers in the place of a mask: transformers hands on what has four dimensions. `DOCUMENTS` in its
# registry tells bounds, which are whole numbers, from masks, and is `sdpa` for all else.

DOCUMENTS = "carpool_documents"
# Of PyTorch's flash attention.
WIDEST_HEAD = 256


def why_no_bounds(model: Any, cuda: bool, half: bool) -> str | None:
    """Why a model of Transformers cannot take bounds in place of masks; None: it can. `half`: attention is computed in
    16 bits."""
    if not (model._supports_sdpa and model._supports_attention_backend):
        return f"{type(model).__name__} does not let others compute its attention"
    text = model.config.get_text_config()
    known = family_of(text)
    if known.more_in_mask:
        return f"{type(model).__name__} has more in its mask than documents"
    if known.window_in_mask and "sliding_attention" in (text.layer_types or ()):
        return f"{type(model).__name__} has its sliding window in its mask alone"
    if not cuda:
        return None
    try:
        widest = max(head_sizes(text))
    except AttributeError:
        return "widths of heads differ between layers"
    if not half or widest > WIDEST_HEAD or widest % 8:
        return f"flash attention takes 16 bits and heads of a multiple of 8, at most {WIDEST_HEAD}"
    return None


def takes_bounds(model: Any) -> bool:
    """Whether the model's attention is `DOCUMENTS`."""
    return bool(model.config.get_text_config()._attn_implementation == DOCUMENTS)


def bounds(position_BL: torch.Tensor, ends_BD: torch.Tensor | None = None) -> torch.Tensor:
    """(1, 1, 1, N + 1) int32: 0, then where each document ends among the tokens of all rows.

    Args:
        position_BL: the position of each token in its document.
        ends_BD: where the documents of each row end, filled up with L. None: the host looks, and waits for the device.

    Example: positions 0 1 2 0 1 in one row  ->  0 3 5
    """
    rows, length = position_BL.shape
    if ends_BD is None:
        firsts = (position_BL.reshape(-1) == 0).nonzero().flatten()
        found = torch.cat([firsts, firsts.new_tensor([rows * length])])
    else:
        begins_B1 = torch.arange(0, rows * length, length, device=ends_BD.device).unsqueeze(1)
        found = F.pad((ends_BD + begins_B1).flatten(), (1, 0))
    return found.int().view(1, 1, 1, -1)


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """As transformers' attention functions.

    Args:
        query: (B, heads, L, width); key and value may have fewer heads, and value another width.
        attention_mask: bounds. Anything else goes to `sdpa`.
        sliding_window: a token sees so many, itself included.

    Returns:
        (B, L, heads, width of a value).
    """
    if attention_mask is None or attention_mask.dtype != torch.int32:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, sliding_window=sliding_window, **others
        )
    for name in ("softcap", "s_aux", "position_bias"):
        if others.get(name) is not None:
            raise ValueError(f"{type(module).__name__} computes attention with {name}, which {DOCUMENTS} has not")
    kernel = _flash if query.is_cuda else _each_alone
    return kernel((query, key, value), attention_mask.flatten(), dropout, scaling, sliding_window), None


Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _flash(
    qkv: Tensors, bounds_N: torch.Tensor, dropout: float, scaling: float | None, window: int | None
) -> torch.Tensor:
    query, key, value = qkv
    rows, heads, length, width = query.shape
    if query.dtype == torch.float32 or value.dtype == torch.float32:
        half = torch.get_autocast_dtype("cuda")  # which PyTorch's attention is cast to by itself
        query, key, value = query.to(half), key.to(half), value.to(half)
    scaling = 1 / math.sqrt(width) if scaling is None else scaling
    width_of_value = value.shape[-1]
    if width_of_value < width:
        value = F.pad(value, (0, width - width_of_value))
    q, k, v = (x.transpose(1, 2).reshape(rows * length, x.shape[1], x.shape[3]) for x in (query, key, value))
    out = torch.ops.aten._flash_attention_forward(
        q, k, v, bounds_N, bounds_N, length, length, dropout, True, False, scale=scaling,
        window_size_left=None if window is None else window - 1, window_size_right=None if window is None else 0,
    )[0]  # fmt: skip
    return out.view(rows, length, heads, -1)[..., :width_of_value].contiguous()


def _each_alone(
    qkv: Tensors, bounds_N: torch.Tensor, dropout: float, scaling: float | None, window: int | None
) -> torch.Tensor:
    query, key, value = qkv
    length, groups = query.shape[2], query.shape[1] != key.shape[1]
    found, ends = [], [int(end) for end in bounds_N]
    for first, end in pairwise(ends):
        if first == end:
            continue
        row, place = divmod(first, length)
        q, k, v = (x[row : row + 1, :, place : place + end - first] for x in (query, key, value))
        mask = None
        if window is not None and end - first > window:
            mask = torch.ones(end - first, end - first, dtype=torch.bool, device=q.device).tril().triu(1 - window)
        found.append(
            F.scaled_dot_product_attention(
                q, k, v, mask, dropout, is_causal=mask is None, scale=scaling, enable_gqa=groups
            )
        )
    # Documents follow each other, also from row to row.
    heads_first = torch.cat([one[0] for one in found], 1)
    return heads_first.transpose(0, 1).contiguous().view(query.shape[0], length, query.shape[1], -1)


AttentionInterface.register(DOCUMENTS, attend)
AttentionMaskInterface.register(DOCUMENTS, sdpa_mask)


# ---------------------------------------------------------------------------------------------------------------------
# Which kernels compute attention.
#
# Models with sinks (gpt-oss) cannot take PyTorch's fused attention, and Transformers then writes the whole matrix of
# scores. Its `flex_attention` does not, and skips what a sliding window hides. For all others on Hopper and Blackwell,
# cuDNN's kernels are faster than PyTorch's choice and exact, but their backward is not bitwise repeatable: a
# deterministic run, other dtypes and other masks take PyTorch's choice.

_IN_ORDER = [
    SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH,
]  # fmt: skip
FLEX = "flex_attention"


def fused_attention(model: Any) -> str | None:
    """The fused attention on GPUs for a model of Transformers, or its class, whose default is not fused; None: it
    is."""
    return FLEX if model._supports_flex_attn and not model._supports_sdpa else None


@contextmanager
def attention_of_any_length(model: Any) -> Iterator[None]:
    """Inside, a model that takes `flex_attention` computes attention as written down: token by token, flex attention
    would be compiled for each length anew."""
    text = model.config.get_text_config()
    before = text._attn_implementation
    if before == FLEX:
        text._attn_implementation = "eager"
    try:
        yield
    finally:
        text._attn_implementation = before


def fastest_attention(device: torch.device) -> AbstractContextManager[None]:
    """Inside, `scaled_dot_product_attention` takes cuDNN's kernels where they are faster and can be used."""
    if device.type != "cuda" or torch.are_deterministic_algorithms_enabled():
        return nullcontext()
    if torch.cuda.get_device_capability(device) < (9, 0) or torch.version.cuda is None:
        return nullcontext()
    inside: AbstractContextManager[None] = sdpa_kernel(_IN_ORDER, set_priority=True)
    return inside
