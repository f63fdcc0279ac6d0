"""Transformers' models under context parallelism (`carpool.parallel.context`): a model's forward is given this rank's
part of every sequence, and its attention sees whole ones.

    context = ContextParallel(model, Cut(2, rank), group)
    with context.whole(length):                             masks are of whole sequences
        model(input_ids=context.cut.part(ids_BL), **context.settings(ids_BL))

The model asks transformers for an attention function (`AttentionInterface.get_interface`) and gets the one that it
would have got between two all-to-alls: it runs on whole sequences with some of the heads. What the function reads of
the attention layer, and what there is for each head (attention sinks), is of these heads. Ring attention
(`carpool.parallel.context`) takes the place of the function, and there are no masks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn
from transformers import masking_utils
from transformers.modeling_utils import AttentionInterface

from carpool.hf.documents import one_row_only, why_not_packed
from carpool.hf.seam.find_modules import decoder_layers
from carpool.parallel.context import Cut, Group, Shapes, Way, kv_repeats, ring_attention, to_heads, to_tokens

Attention = Callable[..., tuple[torch.Tensor, Any]]
Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

_OWN, _POSITIONS = "_carpool_context", "carpool_positions"
# Kinds of rotary embedding whose frequencies follow the largest position that they are given.
_BY_LARGEST = ("dynamic", "longrope")
# What attention functions of transformers are asked for beside a causal mask and a scale.
_BEYOND_RING = ("s_aux", "softcap", "position_bias")


@dataclass
class _Whole:
    """Of the sequences whose parts are in a model: their tokens, and positions in documents, if they are packed. Of
    this forward so far: decoder layers that have begun, and calls of attention."""

    length: int
    position_BL: torch.Tensor | None
    layers: int = 0
    calls: int = 0


# Of this thread: two halves of a micro-batch are in the model at the same time (`carpool.ride.two_batch`).
_WHOLE: ContextVar[_Whole | None] = ContextVar("whole", default=None)
_preprocess = masking_utils._preprocess_mask_arguments
_packed_function = masking_utils.packed_sequence_compatibility_function
_get_interface = AttentionInterface.get_interface


class ContextParallel:
    """Makes a model that `choose_way` has nothing against compute parts of sequences. All ranks of the group construct
    it alike.

    Args:
        cut: what part of a sequence this rank has.
        group: the ranks that share sequences, in the order of their parts.
    """

    def __init__(self, model: nn.Module, cut: Cut, group: Group) -> None:
        self.cut, self.group, self._on = cut, group, True
        # Whose attention sees documents by positions, and not by a mask.
        self._needs_positions = one_row_only(model)
        for module in model.modules():
            vars(module)[_OWN] = self
        for layer in decoder_layers(model):
            # Of a stage of a pipeline, layers of other stages have nothing.
            if any(True for _ in layer.parameters()):
                layer.register_forward_pre_hook(_count_layer)
        AttentionInterface.get_interface = _interface  # type: ignore[method-assign]
        masking_utils._preprocess_mask_arguments = _preprocess_whole
        masking_utils.packed_sequence_compatibility_function = _packed_whole

    def settings(self, like_BL: torch.Tensor, position_BL: torch.Tensor | None = None) -> dict[str, Any]:
        """What the model's forward needs beside tokens. Of whole sequences, and the position of each token in its
        document; None: rows are single documents."""
        batch, length = like_BL.shape
        if position_BL is None:
            positions_BL = torch.arange(length, device=like_BL.device).expand(batch, -1)
            return {"position_ids": self.cut.part(positions_BL)}
        more = {_POSITIONS: position_BL} if self._needs_positions else {}
        return {"position_ids": self.cut.part(position_BL), **more}

    @contextmanager
    def whole(self, length: int, position_BL: torch.Tensor | None = None) -> Iterator[None]:
        """Inside, one forward of the model makes masks of sequences of that length, or of these documents.

        Raises:
            RuntimeError: not every layer has asked transformers for attention."""
        whole = _Whole(length, position_BL)
        token = _WHOLE.set(whole)
        try:
            yield
        finally:
            _WHOLE.reset(token)
        if whole.calls != whole.layers:
            raise RuntimeError(
                f"{whole.layers} layers asked transformers for attention {whole.calls} times, so context parallelism "
                "does not know all that mixes tokens in this model: set parallelism.cp_size=1"
            )

    @contextmanager
    def off(self) -> Iterator[None]:
        """Inside, all ranks give the model whole sequences, the same ones."""
        self._on = False
        try:
            yield
        finally:
            self._on = True

    def attend(
        self,
        own: Attention,
        module: nn.Module,
        query_BHlD: torch.Tensor,
        key_BHlD: torch.Tensor,
        value_BHlD: torch.Tensor,
        attention_mask: Any,
        **settings: Any,
    ) -> tuple[torch.Tensor, None]:
        """In the place of an attention function of transformers."""
        if (whole := _WHOLE.get()) is not None:
            whole.calls += 1
        qkv_BHlD = query_BHlD, key_BHlD, value_BHlD
        if self.cut.way == "ring":
            return self._ring(module, qkv_BHlD, attention_mask, settings), None
        return self._ulysses(own, module, qkv_BHlD, attention_mask, settings), None

    def _ulysses(
        self, own: Attention, module: nn.Module, qkv_BHlD: Tensors, mask: Any, settings: dict[str, Any]
    ) -> torch.Tensor:
        query_BHlD, key_BHlD, value_BHlD = qkv_BHlD
        ranks, heads = self.cut.ranks, query_BHlD.shape[1]
        if heads % ranks:
            raise ValueError(f"{heads} heads of attention cannot be divided among parallelism.cp_size = {ranks} ranks")
        repeats = kv_repeats(heads, key_BHlD.shape[1], ranks)
        if repeats > 1:
            key_BHlD, value_BHlD = (x.repeat_interleave(repeats, dim=1) for x in (key_BHlD, value_BHlD))
        query_BHLD, key_BHLD, value_BHLD = to_heads(self.group, query_BHlD, key_BHlD, value_BHlD)
        length = query_BHLD.shape[2]
        if isinstance(mask, torch.Tensor) and mask.shape[-2:] != (length, length):
            raise ValueError(
                f"{type(module).__name__} has a mask of {tuple(mask.shape)} for sequences of {length} tokens, of which "
                "each rank has a part: set parallelism.cp_size=1"
            )
        of_rank = partial(_of_rank, heads=heads, ranks=ranks, rank=self.cut.rank)
        # Flash attention takes the ends of documents from positions, and must not see those of a part.
        settings["position_ids"] = settings.pop(_POSITIONS, None)
        settings = {name: of_rank(value) for name, value in settings.items()}
        local = _Local(module, query_BHLD.shape[1] // key_BHLD.shape[1], of_rank)
        out_BLHD, _ = own(local, query_BHLD, key_BHLD, value_BHLD, mask, **settings)
        return to_tokens(self.group, out_BLHD)

    def _ring(self, module: nn.Module, qkv_BHlD: Tensors, mask: Any, settings: dict[str, Any]) -> torch.Tensor:
        query_BHlD, key_BHlD, value_BHlD = qkv_BHlD
        more = [name for name in _BEYOND_RING if settings.get(name) is not None]
        more += ["attention_mask"] if mask is not None else []
        more += ["dropout"] if settings.get("dropout") else []
        causal = settings.get("is_causal")
        if more or not (getattr(module, "is_causal", True) if causal is None else causal):
            raise ValueError(
                f"{type(module).__name__} asks for attention with {', '.join(more) or 'no causal mask'}, which ring "
                "attention does not have: set parallelism.cp_attention=ulysses"
            )
        scale = settings.get("scaling") or query_BHlD.shape[-1] ** -0.5
        # Flash attention has values as wide as keys; zeros beside them change nothing.
        size = value_BHlD.shape[-1]
        value_BHlD = F.pad(value_BHlD, (0, query_BHlD.shape[-1] - size))
        if isinstance(self.group, Shapes):
            out_BHlD = F.scaled_dot_product_attention(query_BHlD, key_BHlD, value_BHlD, scale=scale, enable_gqa=True)
        else:
            out_BHlD = ring_attention(self.group, query_BHlD, key_BHlD, value_BHlD, scale)
        return out_BHlD[..., :size].transpose(1, 2).contiguous()


def choose_way(
    model: nn.Module,
    ranks: int,
    length: int,
    asked: Literal["auto", "ulysses", "ring"] = "auto",
    *,
    heads_divided: int = 1,
    packed: bool = False,
    implementation: str | None = None,
) -> Way:
    """How ranks that share sequences compute attention.

    Args:
        model: may be on the meta device.
        length: tokens of a whole sequence.
        asked: auto: ulysses, if the ranks divide the heads.
        heads_divided: tensor-parallel ranks, which divide the heads already.
        packed: several documents in a sequence.
        implementation: of attention; None: as the model's configuration says.

    Raises:
        ValueError: says what the model, or these sequences, have that cannot be computed so, and what can.
    """
    config: Any = model.config
    text = config.get_text_config()
    size = f"parallelism.cp_size = {ranks}"
    if why := why_not_packed(model):
        raise ValueError(f"{size} gives each rank a part of every sequence, but {why}: set parallelism.cp_size=1")
    limit = _rotary_limit(text)
    if limit is not None and length > limit:
        raise ValueError(
            f"{size}: {type(model).__name__} takes other rotary frequencies for sequences of more than {limit} tokens, "
            "which a rank with a part does not see: set parallelism.cp_size=1, or data.sequence_length to at most "
            f"{limit}"
        )
    heads = attention_heads(text) // heads_divided
    way: Way = "ulysses" if asked == "ulysses" or (asked == "auto" and heads % ranks == 0) else "ring"
    implementation = implementation or text._attn_implementation or "sdpa"
    if way == "ulysses" and heads % ranks:
        fits = [str(n) for n in range(2, heads + 1) if heads % n == 0]
        raise ValueError(
            f"{size} does not divide the {heads} heads of attention, as parallelism.cp_attention = 'ulysses' asks: "
            f"cp_size can be {', '.join(fits) or 'nothing but 1'}, or use cp_attention=auto"
        )
    if way == "ring" and (why := _why_no_ring(model, length, packed, implementation)):
        instead = "cp_attention=ulysses" if heads % ranks == 0 else f"cp_size={math.gcd(heads, ranks)}"
        raise ValueError(
            f"{size} asks for ring attention, which is causal and nothing else ({why}): set parallelism.{instead}, "
            f"which divides the {heads} heads"
        )
    divisor = Cut(ranks, 0, way).divisor
    if length % divisor:
        below, above = length // divisor * divisor, -(-length // divisor) * divisor
        raise ValueError(
            f"data.sequence_length = {length} cannot be cut into {divisor} equal parts, as {size} with {way} attention "
            f"asks: {f'{below} or ' if below else ''}{above} can"
        )
    return way


def attention_heads(text: Any) -> int:
    """Heads of a language model's configuration; where layers have different numbers, their greatest divisor."""
    found = [value for name, value in text.to_dict().items() if "attention_heads" in name and value]
    return math.gcd(*(one for value in found for one in (value if isinstance(value, list) else [value])))


def _rotary_limit(text: Any) -> int | None:
    """Beyond how many tokens rotary embeddings depend on the length of the sequence; None: they never do."""
    given = getattr(text, "rope_parameters", None) or {}
    # Some have one for each kind of layers.
    each = [given, *(one for one in given.values() if isinstance(one, dict))]
    return min(
        (
            one.get("original_max_position_embeddings") or text.max_position_embeddings
            for one in each
            if one.get("rope_type") in _BY_LARGEST
        ),
        default=None,
    )


def _why_no_ring(model: nn.Module, length: int, packed: bool, implementation: str) -> str | None:
    text = model.config.get_text_config()  # type: ignore[operator, union-attr]
    if packed:
        return "documents are packed, which need masks"
    if implementation != "sdpa":
        return f"attention is computed by {implementation!r}, and the ring's is sdpa's"
    kinds = getattr(text, "layer_types", None)
    window = getattr(text, "sliding_window", None)
    if window and window < length and (kinds is None or "sliding_attention" in kinds):
        return f"tokens see a window of {window} only"
    if getattr(text, "attention_dropout", 0.0):
        return "the model drops out attention"
    return None


def _count_layer(*_: Any) -> None:
    if (whole := _WHOLE.get()) is not None:
        whole.layers += 1


class _Local:
    """An attention layer as it looks to a function that has some of its heads."""

    def __init__(self, module: nn.Module, groups: int, of_rank: Callable[[Any], Any]) -> None:
        self._module, self._of_rank = module, of_rank
        # Query heads for each head of keys and values.
        self.num_key_value_groups = groups

    def __getattr__(self, name: str) -> Any:
        return self._of_rank(getattr(self._module, name))


def _of_rank(value: Any, heads: int, ranks: int, rank: int) -> Any:
    """Of what there is one for each head, those of a rank; anything else as it is."""
    if isinstance(value, torch.Tensor) and value.shape == (heads,):
        return value.chunk(ranks)[rank]
    return value


def _interface(self: AttentionInterface, implementation: str, default: Attention) -> Attention:
    """In the place of transformers' own."""
    own: Attention = _get_interface(self, implementation, default)
    return partial(_attend, own)


def _attend(own: Attention, module: nn.Module, *args: Any, **settings: Any) -> tuple[torch.Tensor, Any]:
    # Other models of this process are compiled as ever: nothing here breaks their graphs.
    if getattr(module, _OWN, None) is None:
        return own(module, *args, **settings)
    return _attend_parts(own, module, *args, **settings)


@torch._disable_dynamo
def _attend_parts(own: Attention, module: nn.Module, *args: Any, **settings: Any) -> tuple[torch.Tensor, Any]:
    context: ContextParallel = getattr(module, _OWN)
    if not context._on:
        return own(module, *args, **settings)
    return context.attend(own, module, *args, **settings)


def _preprocess_whole(config: Any, inputs_embeds: torch.Tensor, attention_mask: Any, *args: Any, **kwargs: Any) -> Any:
    """In the place of transformers' own: what it finds out of a part, of whole sequences."""
    found = _preprocess(config, inputs_embeds, attention_mask, *args, **kwargs)
    whole, early = _WHOLE.get(), found[0]
    if whole is None or early:
        return found
    packed = None
    if whole.position_BL is not None:
        packed = masking_utils.find_packed_sequence_indices(whole.position_BL)
    return early, found[1], packed, whole.length, whole.length, 0, 0


def _packed_whole(mask_function: Any, position_ids: torch.Tensor, packed_sequence_mask: torch.Tensor) -> Any:
    """In the place of transformers' own."""
    whole = _WHOLE.get()
    if whole is not None and whole.position_BL is not None:
        position_ids = whole.position_BL
    return _packed_function(mask_function, position_ids, packed_sequence_mask)
