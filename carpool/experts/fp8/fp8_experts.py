"""Experts that compute in FP8. LOSSY: tokens, weights and activations are rounded to three bits of mantissa.

    tokens        packets of codes (e4m3) with a scale for 1 x 128 columns: as received, if the transport sends FP8,
                  else quantised after arrival
    weights       codes with a scale for 128 x 128, quantised in every forward and, transposed, in every backward; or
                  once, if the caller guarantees that they do not change (`weights_unchanged`)
    forward       h = x @ up + bias, rounded to the weights' dtype and saved;  a = act(h), quantised;  y = a @ down
    backward      dA = dy @ down and dx = dh @ up in FP8, dy and dh quantised (dy as received, if it was sent in FP8);
                  weight gradients in the weights' dtype, from the saved packets, which are decoded while gathered

Every product sums in float32 (DeepSeek-V3, arXiv 2412.19437, section 3.3, has the same groups and blocks). Sorting,
routing weights and saved activations are as in `GroupedExperts`. The derivative of the activation is that at h, without
regard to rounding.

The saved activations are packets of the tokens (half the bytes) and h. Codes of the weights are not saved: both orders
would take as much memory as the weights themselves, for every layer, including layers that FSDP has resharded. But
quantising them takes a third of the time of the forward's products, more for experts with few tokens, and they do not
change until the next optimizer step. So the caller may reuse them (`carpool train`: moe.fp8_cache_weights):

    with carpool.hf.seam.moved_experts.weights_unchanged(layers):
        ...                                       an evaluation, or all micro-batches of one optimizer step

Inside, columns of h are always [gate | up], and each of the two, as all of F and H, is filled up with zeros to a
multiple of 128, so that a group never has a part of both:

    F = 200, gated      h has 512 columns: gate at 0..199, up at 256..455
    interleaved         gate is every even row of the parameter; it is put in order while it is quantised

`fp8_products.py` defines the products in plain PyTorch, for any device; on CUDA there are kernels (gemm_kernels.py,
fp8_hopper_kernels.py). Both sum in float32, in different orders.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from carpool.activations import Arena, Arrivals, HiddenStates
from carpool.experts.base import Activation, ExpertFunction, ExpertWeights
from carpool.experts.fp8.fp8_products import (
    Columns,
    Quantised,
    Weight,
    activate_backward,
    gather_wide,
    gathered_product,
    product,
    quantise_weight,
    up_and_activate,
)
from carpool.experts.pairs import Pairs, count_pairs, grouped_outer, slot_sums, sort_pairs, sum_pairs


class _Held(NamedTuple):
    """Codes that are held, and of what.

    Attributes:
        source: holds its memory, so that no other tensor can come to lie there.
        state: where it lies, its shape and version: in-place operations count versions up."""

    source: torch.Tensor
    state: tuple[Any, ...]
    codes: Weight


class FP8Experts:
    """See the module's docstring.

    Raises:
        ValueError: an activation that no kernel knows.
    """

    name = "fp8"
    reads_packets = True
    lossy_reasons = ("experts compute in FP8",)

    def __init__(self, function: ExpertFunction) -> None:
        if not isinstance(function.activation, Activation):
            raise ValueError(
                f"experts='fp8' computes activations that carpool.experts.Activation describes, not "
                f"{function.activation!r}; use experts='grouped' for this model"
            )
        self.function, self.activation = function, function.activation
        self._held: dict[str, _Held] | None = None

    @contextmanager
    def weights_unchanged(self) -> Iterator[None]:
        """Context in which weights are quantised once, for all forwards and backwards of a step, or of an evaluation.

        The caller must guarantee that the weights do not change: writing through `.data`, or gathering new values into
        the same memory as FSDP does, cannot be detected. Other changes are detected, too: other tensors, in-place
        operations (`load_state_dict`), steps of PyTorch's optimizers. Codes are freed at the end of the outermost
        scope.
        """
        if self._held is not None:
            yield
            return
        held: dict[str, _Held] = {}
        self._held = held
        forget = register_optimizer_step_post_hook(lambda *_: held.clear())
        try:
            yield
        finally:
            self._held = None
            forget.remove()

    def forward(
        self,
        arrivals: Arrivals,
        weights: ExpertWeights,
        partial_RH: torch.Tensor,
        arena: Arena | None = None,
        backward: bool = True,
    ) -> tuple[Any, ...]:
        x, weight_RJ = arrivals.tokens.packed(), arrivals.weight_RJ.contiguous()
        hidden, dtype = partial_RH.shape[1], weights.up_SFH.dtype
        num_pairs = count_pairs(arrivals.slot_RJ, arrivals.num_pairs)
        pairs = sort_pairs(arrivals.slot_RJ, weights.up_SFH.shape[0], num_pairs)
        bias_SW = None if weights.up_bias_SF is None else self._columns(weights).spread(weights.up_bias_SF)

        up = self._straight("up", weights, backward)
        a, h = up_and_activate(self.activation, x, hidden, up, bias_SW, pairs, dtype, arena)
        y_PH = product(a, self._straight("down", weights, backward), pairs, hidden, dtype)
        sum_pairs(y_PH, pairs, partial_RH, not x.gaps, weight_RJ, weights.down_bias_SH)
        return weight_RJ, h, *pairs

    def backward(
        self,
        saved: tuple[Any, ...],
        x: HiddenStates,
        weights: ExpertWeights,
        dpartial: HiddenStates,
        dx_RH: torch.Tensor,
        needs_dweights: bool,
    ) -> tuple[torch.Tensor, Callable[[], ExpertWeights] | None]:
        weight_RJ, h, pairs = *saved[:2], Pairs._make(saved[2:])
        dtype, hidden = weights.up_SFH.dtype, dx_RH.shape[1]
        columns, biased = self._columns(weights), weights.down_bias_SH is not None

        down = self._turned("down", weights)
        dA_PF = gathered_product(dpartial.packed(), hidden, down, pairs, columns.padded, dtype)
        dy_PH = gather_wide(dpartial, hidden, pairs, dtype) if needs_dweights or biased else None
        dh, dh_PW, scaled_PF, dweight_RJ = activate_backward(
            self.activation, columns, h, dA_PF, dy_PH, weights.down_bias_SH, weight_RJ, pairs, needs_dweights
        )
        del dA_PF
        dx_PH = product(dh, self._turned("up", weights), pairs, hidden, dtype)
        sum_pairs(dx_PH, pairs, dx_RH, not x.gaps)
        del dx_PH, dh
        if not needs_dweights:
            return dweight_RJ, None

        assert dy_PH is not None
        ddown = grouped_outer(dy_PH, scaled_PF, pairs.offsets_S)
        ddown_bias = slot_sums(dy_PH, pairs, weight_RJ) if biased else None

        def finish() -> ExpertWeights:
            dup = columns.gather(grouped_outer(dh_PW, gather_wide(x, hidden, pairs, dtype), pairs.offsets_S))
            dup_bias = None if weights.up_bias_SF is None else columns.gather(slot_sums(dh_PW, pairs))
            if self.function.transposed:
                return ExpertWeights(dup.transpose(1, 2), ddown.transpose(1, 2), dup_bias, ddown_bias)
            return ExpertWeights(dup, ddown, dup_bias, ddown_bias)

        return dweight_RJ, finish

    def _columns(self, weights: ExpertWeights) -> Columns:
        inner = weights.down_SHF.shape[1 if self.function.transposed else 2]
        return Columns(2 if self.activation.gated else 1, inner, self.activation.interleaved)

    def _straight(self, which: str, weights: ExpertWeights, backward: bool) -> Quantised:
        """Codes of the up or the down projection as (S, out, in), for the forward. Where codes are held and a backward
        follows, its order is written from the same reading."""
        codes = self._quantised(which, weights, True, backward and self._held is not None).straight
        assert codes is not None
        return codes

    def _turned(self, which: str, weights: ExpertWeights) -> Quantised:
        """As (S, in, out), for the backward."""
        codes = self._quantised(which, weights, False, True).turned
        assert codes is not None
        return codes

    def _quantised(self, which: str, weights: ExpertWeights, straight: bool, turned: bool) -> Weight:
        """What is held, and what is missing of it quantised now. Inference tensors have no version: none are held."""
        source = weights.up_SFH if which == "up" else weights.down_SHF
        all_held, codes, state = self._held if not source.is_inference() else None, Weight(None, None), None
        if all_held is not None:
            state = source.data_ptr(), source.shape, source.stride(), source.dtype, source._version
            if which in all_held and all_held[which].state == state:
                codes = all_held[which].codes
        straight, turned = straight and codes.straight is None, turned and codes.turned is None
        if straight or turned:
            weight_SOI = source.transpose(1, 2) if self.function.transposed else source
            columns = self._columns(weights) if which == "up" else Columns(1, weight_SOI.shape[1], False)
            more = quantise_weight(weight_SOI, columns, straight, turned)
            codes = Weight(more.straight or codes.straight, more.turned or codes.turned)
            if all_held is not None and state is not None:
                all_held[which] = _Held(source.detach(), state, codes)
        return codes
