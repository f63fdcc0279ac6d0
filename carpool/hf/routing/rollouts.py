"""The routing of a rollout, for `carpool.hf.replay`: the experts that served each token during generation.

An updated router chooses other experts, and so does rounding in a batch against decoding token by token. The likelihood
ratio of reinforcement learning then compares two models. Replayed routing makes it one (routing replay, arXiv
2507.18071; for rollouts R3, arXiv 2510.11370). The routing comes from the model's `generate` or from a server:

    with carpool.hf.record_rollout(model) as rollout:                           # on all ranks
        ids_BL = model.generate(**prompts)
    recordings = rollout.routings(ids_BL.shape[1], mask_BL)

    recordings = carpool.hf.routed_experts(model, returned, mask_BL)            # `returned`: one array per sequence

A token without recorded routing has -1, and its router chooses. This concerns padding and the last token of a sequence,
which no sampler computes. For a prompt of P tokens and G generated tokens, servers return

    vLLM      `enable_return_routed_experts` (vllm-project/vllm#28284): `CompletionOutput.routed_experts`, a numpy array
              (P + G - 1, num_hidden_layers, K) of int32, later uint8 or uint16, with zeros for layers without experts.
              Its HTTP server sends base64 of `numpy.save`. The first tokens may be missing:
              `routed_experts_prompt_start` (#51906).
    vLLM 0.21 `RequestOutput.prompt_routed_experts` (P, MoE layers, K) of int16, and `routed_experts` of the generated
              tokens, which the caller joins; -1 for tokens from the prefix cache.
    SGLang    `return_routed_experts`: base64 of int32, or of `routed_experts_dtype`, which
              `extract_routed_experts_from_meta_info` decodes to an array: `.reshape(-1, num_hidden_layers, K)`

according to their sources and documentation in November 2026. Ids are those of the checkpoint, also with EPLB.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, cast

import numpy as np
import torch
from torch import nn
from torch.nn.functional import pad
from transformers import PreTrainedModel

from carpool.families import family_of
from carpool.hf.routing.replay import Replayed, replay
from carpool.hf.seam.expert_rides import required_rides
from carpool.hf.seam.find_modules import list_number
from carpool.parallel.ranks import together
from carpool.routing import Routing


def _layers(model: nn.Module) -> dict[str, int]:
    """The MoE layers that samplers compute, by name, with their index among all decoder layers. The layers after the
    last one are multi-token prediction layers, which run in training alone."""
    rides = required_rides(model)
    indices = {name: int(name.split(".")[list_number(name) or 0]) for name in rides}
    hidden_layers = cast(PreTrainedModel, model).config.get_text_config().num_hidden_layers
    indices = {name: index for name, index in indices.items() if index < hidden_layers}
    if len(set(indices.values())) < len(indices):
        raise ValueError("a layer of this model has several modules of experts, but a rollout has the routing of one")
    if any(layer.token_slice[1] > 1 for layer in rides.values()):
        raise ValueError("under tensor parallelism each rank has a slice of the tokens, so no rollout can be replayed")
    return indices


class Rollout:
    """The routing of all forwards of one generation. `record_rollout` constructs it."""

    def __init__(self, model: nn.Module) -> None:
        layers = required_rides(model)
        self._layers = {name: layers[name] for name in _layers(model)}
        self._chosen: dict[str, list[torch.Tensor]] = {name: [] for name in self._layers}

    def _after_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        ids_BL = kwargs.get("input_ids", args[0] if args else None)
        if ids_BL is None:
            raise ValueError("a rollout is recorded of input_ids; generate from tokens, not from inputs_embeds")
        for name, layer in self._layers.items():
            assert layer.routing is not None
            self._chosen[name].append(layer.routing.expert_TK.reshape(*ids_BL.shape, -1))

    def routings(self, length: int, attention_mask: torch.Tensor | None = None) -> dict[str, Routing]:
        """Returns the recordings for `carpool.hf.replay` of a forward over sequences of `length` tokens with padding.
        `attention_mask`: (B, length), zero for padding.

        Raises:
            ValueError: the model read fewer tokens, the mask has another shape, or there were several generations."""
        recordings = {}
        for name, chosen in self._chosen.items():
            if len({len(one_BLK) for one_BLK in chosen}) > 1 or any(one_BLK.shape[1] > 1 for one_BLK in chosen[1:]):
                raise ValueError("a rollout holds one generation: record each separately, and with use_cache=True")
            read = sum(one_BLK.shape[1] for one_BLK in chosen)
            if not read or (length > read + 1 if attention_mask is None else attention_mask[:, read + 1 :].any()):
                raise ValueError(f"the model read {read} tokens of each sequence, so {length} cannot be replayed")
            chosen_BLK = pad(torch.cat(chosen, 1), (0, 0, 0, max(1, length - read)), value=-1)[:, :length]
            if attention_mask is not None and attention_mask.shape != (shape := chosen_BLK.shape[:2]):
                raise ValueError(f"attention_mask has shape {tuple(attention_mask.shape)}, the rollout {tuple(shape)}")
            if attention_mask is not None:
                chosen_BLK = chosen_BLK.masked_fill(attention_mask.unsqueeze(-1) == 0, -1)
            recordings[name] = Routing(chosen_BLK.flatten(0, 1), None)
        return recordings


@contextmanager
def record_rollout(model: nn.Module) -> Iterator[Rollout]:
    """Record the routing of one `model.generate` inside. Collective; each rank records its own sequences. Beam search
    and decode steps in CUDA graphs cannot be recorded. ValueError: the model has no layers of Carpool, several modules
    of experts in a layer, or tensor parallelism."""
    rollout = Rollout(model)
    # With adapters of peft, `generate` runs the forward of the wrapped model.
    base: Any = getattr(model, "get_base_model", lambda: model)()
    handle = base.register_forward_hook(rollout._after_forward, with_kwargs=True)
    try:
        yield rollout
    finally:
        handle.remove()


@together(ValueError, "")
def routed_experts(model: nn.Module, returned: Sequence[Any], attention_mask: torch.Tensor) -> dict[str, Routing]:
    """Returns the recordings for `carpool.hf.replay` of a forward over a padded batch, from the arrays that vLLM or
    SGLang returned for its sequences. Collective; each rank passes its own batch.

    Args:
        returned: for each sequence of the batch, an array (tokens, layers, K) of expert ids, nested lists, or the
            string of vLLM's server (see the module's docstring). -1, or None for a whole sequence: nothing is recorded.
        attention_mask: (B, L), not zero for tokens. Padding may be on either side, or on both.

    Raises:
        ValueError: on all ranks, if any rank's array does not fit its sequence or this model, or a token has fewer than
            K different experts.
    """
    if not isinstance(attention_mask, torch.Tensor):
        raise ValueError(f"attention_mask must be a tensor (B, L), not zero for tokens, but is {attention_mask!r}")
    layers, rides, mask_BL = _layers(model), required_rides(model), attention_mask.cpu().bool()
    config, chosen_BLXK = cast(PreTrainedModel, model).config.get_text_config(), None
    top_k = getattr(config, family_of(config).top_k_key(config) or "", None)
    experts_X = torch.tensor([rides[name].num_experts for name in layers])
    if len(returned) != len(mask_BL):
        raise ValueError(f"routed experts of {len(returned)} sequences were given, but the batch has {len(mask_BL)}")
    for sequence, (value, mask_L) in enumerate(zip(returned, mask_BL, strict=True)):
        if value is None:
            continue
        try:
            given_TXK = torch.from_numpy(_ids(value, layers, config.num_hidden_layers, top_k).astype(np.int32))
            count, place_T = len(given_TXK), mask_L.nonzero().flatten()
            read = len(place_T) - 1
            if count not in (read, read + 1):
                raise ValueError(
                    f"the array has {count} tokens, but the sampler read {read} of this sequence: give arrays in the "
                    "order of the batch, and -1 for first tokens that the server left out"
                )
            ids_TXK = given_TXK.sort(2).values
            valid_TX = (ids_TXK[..., 0] >= 0) & (ids_TXK[..., -1] < experts_X) & (ids_TXK.diff(dim=2) > 0).all(2)
            for token, layer in (~valid_TX & (given_TXK != -1).any(2)).nonzero().tolist():
                raise ValueError(
                    f"token {token} chose {given_TXK[token, layer].tolist()} in {list(layers)[layer]}, but must "
                    f"have different ids of 0..{int(experts_X[layer]) - 1}; zeros mean no recorded routing: give None"
                )
        except ValueError as refused:
            raise ValueError(f"routed experts of sequence {sequence}: {refused}") from refused
        if chosen_BLXK is None:
            chosen_BLXK = torch.full((*mask_BL.shape, *given_TXK.shape[1:]), -1, dtype=torch.int32)
        chosen_BLXK[sequence, place_T[:count]] = given_TXK
    if chosen_BLXK is None:
        raise ValueError("no sequence has routed experts: start the server with --enable-return-routed-experts")
    chosen = chosen_BLXK.to(attention_mask.device).flatten(0, 1).unbind(1)
    return {name: Routing(expert_TK.contiguous(), None) for name, expert_TK in zip(layers, chosen, strict=True)}


def _ids(returned: Any, layers: dict[str, int], hidden_layers: int, top_k: int | None) -> np.ndarray[Any, Any]:
    """Decodes any of the forms of `returned` to (tokens, MoE layers, K). It may hold all decoder layers."""
    if isinstance(returned, str):
        try:
            returned = np.load(io.BytesIO(base64.b64decode(returned, validate=True)), allow_pickle=False)
        except (ValueError, EOFError) as error:
            raise ValueError(
                "a string must be base64 of numpy.save, as vLLM sends it; decode others to an array"
            ) from error
    array = np.asarray(returned.cpu() if isinstance(returned, torch.Tensor) else returned)
    known = array.ndim == 3 and np.issubdtype(array.dtype, np.integer)
    if not known or array.shape[1] not in (hidden_layers, len(layers)) or top_k not in (None, array.shape[2]):
        raise ValueError(
            f"the shape is {array.shape} of {array.dtype}, but must be (tokens, layers, K = {top_k}) of whole numbers, "
            f"for all {hidden_layers} layers or the {len(layers)} with experts: does the server have this model?"
        )
    return array[:, list(layers.values())] if array.shape[1] == hidden_layers else array


class ReplayedRollouts:
    """Replays rollouts in TRL's GRPOTrainer (1.16): `class Trainer(carpool.hf.ReplayedRollouts, GRPOTrainer)`. Losses,
    and likelihoods of the policy before a step, use the routing of the rollouts. Images and tools are not supported.

    The routing comes from the model's `generate`, or from `rollout_func`, which returns `routed_experts` for each
    sequence (see `carpool.hf.routed_experts`). TRL's vLLM does not request it. A reference model uses its own routing,
    unless it is the model without its adapters.

    Logs `routing/differing_routers` and `routing/differing_tokens` (`carpool.hf.routing.replay.Differing`)."""

    model: Any
    ref_model: Any
    _metrics: Any
    # The routing of the batch that is being generated, and the lengths of its prompts and completions.
    _rollout: tuple[Any, list[torch.Tensor]] | None = None

    def _generate(self, prompts: list[Any]) -> Any:
        with record_rollout(self.model) as rollout:
            generated: Any = super()._generate(prompts)  # type: ignore[misc]
        lengths = [torch.tensor([[len(ids)] for ids in sequences]) for sequences in generated[:2]]
        self._rollout = generated[5].pop("routed_experts", rollout), lengths
        return generated

    def _chosen(self, mask_BL: torch.Tensor, generated: int) -> torch.Tensor:
        """Returns the routing (B, L, layers, K) of the batch with TRL's padding, which ends with `generated` tokens."""
        assert self._rollout is not None
        rollout, (prompt_B1, completion_B1) = self._rollout
        if isinstance(rollout, Rollout):
            recordings = rollout.routings(mask_BL.shape[1], mask_BL)
        else:
            # The mask would leave out truncated completions (`mask_truncated_completions`).
            place_L = torch.arange(mask_BL.shape[1]) - mask_BL.shape[1] + generated
            tokens_BL = (place_L >= -prompt_B1) & (place_L < completion_B1)
            recordings = routed_experts(self.model, rollout, tokens_BL.to(mask_BL.device))
        chosen_BLXK = torch.stack([routing.expert_TK.unflatten(0, mask_BL.shape) for routing in recordings.values()], 2)
        return chosen_BLXK.masked_fill((mask_BL == 0)[:, :, None, None], -1)

    def _replay(self, chosen_BLXK: torch.Tensor) -> AbstractContextManager[Replayed]:
        layers = zip(_layers(self.model), chosen_BLXK.flatten(0, 1).unbind(1), strict=True)
        return replay(self.model, {name: Routing(expert_TK, None) for name, expert_TK in layers})

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        batch: dict[str, Any] = super()._generate_and_score_completions(inputs)  # type: ignore[misc]
        mask_BL = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
        batch["routed_experts"] = self._chosen(mask_BL, batch["completion_mask"].shape[1])
        self._rollout = None
        return batch

    def _get_per_token_logps_and_entropies(
        self, model: Any, ids_BL: Any, mask_BL: Any, keep: int, batch_size: int | None = None, **more: Any
    ) -> Any:
        likelihoods: Any = super()._get_per_token_logps_and_entropies  # type: ignore[misc]
        if self._rollout is None or model is self.ref_model:
            return likelihoods(model, ids_BL, mask_BL, keep, batch_size, **more)
        # This runs before a step. TRL would compute shards of the batch itself, but each shard needs its own replay.
        chosen_BLXK, shards = self._chosen(mask_BL, keep), []
        for rows in torch.arange(len(ids_BL)).split(batch_size or len(ids_BL)):
            with self._replay(chosen_BLXK[rows]):
                shards.append(likelihoods(model, ids_BL[rows], mask_BL[rows], keep, **more)[0])
        return torch.cat(shards), None, None

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        replayed = self._until_backward.enter_context(self._replay(inputs["routed_experts"]))
        loss: torch.Tensor = super()._compute_loss(model, inputs)  # type: ignore[misc]
        metrics, differing = self._metrics["train" if self.model.training else "eval"], replayed.differing()
        metrics["routing/differing_routers"].append(differing.routers)
        metrics["routing/differing_tokens"].append(differing.tokens)
        return loss

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        with ExitStack() as self._until_backward:
            return super().training_step(*args, **kwargs)  # type: ignore[misc]

    def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
        with ExitStack() as self._until_backward:
            return super().prediction_step(*args, **kwargs)  # type: ignore[misc]
