"""The contract of an expert computation, and the function of an expert.

    partial_R = sum over the token's slots s of  weight_Rs * (down_s @ activation(up_s @ x_R + up_bias_s) + down_bias_s)

accumulated in float32 and rounded once to the dtype of `partial_RH`. The routing weight is applied on the expert's
rank, so that combine sends one partial output per (token, rank).

Experts may have adapters of low rank (LoRA: Hu et al., arXiv 2106.09685): `up_s` is then `up_s + b_s @ a_s`, and
`down_s` likewise. The sum is never made: a row is multiplied by a, and that by b.

Matrices that are frozen may be kept in 4 or 8 bits (`carpool.experts.quantised`). Then `up_SFH` and `down_SHF` only
stand for their shape, dtype and device, and codes and scales come beside them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F

from carpool.activations import Arena, Arrivals, HiddenStates
from carpool.plugins.nearest import did_you_mean


class ExpertWeights(NamedTuple):
    """Weights of this rank's slots. F1 is 2F for gated experts ([gate; up]), else F. Q is the rank of an adapter.

    Attributes:
        up_SFH: (S, F1, H), or (S, H, F1) if the function is `transposed`.
        down_SHF: (S, H, F), or (S, F, H) if `transposed`.
        up_bias_SF: (S, F1) or None.
        down_bias_SH: (S, H) or None.
        up_a_SQH, up_b_SFQ: the adapter of up, (S, Q, H) and (S, F1, Q) whether `transposed` or not; or None.
        down_a_SQF, down_b_SHQ: the adapter of down, (S, Q, F) and (S, H, Q); or None.
        up_code, up_scale, down_code, down_scale: of matrices that are quantised (`carpool.experts.quantised`), for
            which `up_SFH` and `down_SHF` are stand-ins without memory; or None.
    """

    up_SFH: torch.Tensor
    down_SHF: torch.Tensor
    up_bias_SF: torch.Tensor | None = None
    down_bias_SH: torch.Tensor | None = None
    up_a_SQH: torch.Tensor | None = None
    up_b_SFQ: torch.Tensor | None = None
    down_a_SQF: torch.Tensor | None = None
    down_b_SHQ: torch.Tensor | None = None
    up_code: torch.Tensor | None = None
    up_scale: torch.Tensor | None = None
    down_code: torch.Tensor | None = None
    down_scale: torch.Tensor | None = None

    @classmethod
    def of(cls, tensors: Iterable[torch.Tensor | None]) -> ExpertWeights:
        """The first ones, in order; those that are not given are None."""
        given = tuple(tensors)
        return cls._make(given + (None,) * (len(cls._fields) - len(given)))

    @property
    def adapted(self) -> bool:
        """Whether there is an adapter."""
        return self.up_a_SQH is not None or self.down_a_SQF is not None

    @property
    def quantised(self) -> bool:
        """Whether the matrices are quantised."""
        return self.up_code is not None

    def to(self, dtype: torch.dtype) -> ExpertWeights:
        """What computes in `dtype`. Codes and scales stay as they are."""
        tensors = [None if w is None else w.to(dtype) for w in self[2:NUM_TRAINED]]
        if not self.quantised:
            return ExpertWeights.of((self.up_SFH.to(dtype), self.down_SHF.to(dtype), *tensors))
        stand_ins = (w if w.dtype == dtype else stand_in(w.shape, dtype, w.device) for w in self[:2])
        return ExpertWeights.of((*stand_ins, *tensors, *self[NUM_TRAINED:]))


# Of `ExpertWeights`, those that are not adapters; those that may have gradients.
NUM_BASE, NUM_TRAINED = 4, 8


def stand_in(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor of this shape, dtype and device without memory, for a matrix that is stored otherwise. All elements are
    one NaN, so that using it by mistake has a visible effect."""
    return torch.full((), torch.nan, dtype=dtype, device=device).expand(*shape)


ActivationFunction = Callable[[torch.Tensor], torch.Tensor]

ACTIVATIONS: dict[str, ActivationFunction] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda h: F.gelu(h, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda h: F.relu(h).square(),
}


@dataclass(frozen=True)
class Activation:
    """An activation function with a description, from which kernels can compute it.

        plain       a = act(h)
        gated       a = act(gate) * (up + up_shift), gate and up clamped first if there is a `limit`

    Calling it is the definition, in PyTorch: (P, F1) -> (P, F).

    Attributes:
        name: act, a key of `ACTIVATIONS`.
        gated: h is [gate; up], twice as wide as the result.
        interleaved: gate is every even column of h and up every odd one, instead of its halves.
        limit: gate is clamped to at most `limit`, up to `-limit`..`limit`. None: no clamping.
        alpha: of silu, which is `gate * sigmoid(alpha * gate)`.
        up_shift: is added to up.

    Raises:
        ValueError: an unknown name, or fields that do not apply to it.

    Example: gpt-oss is Activation("silu", gated=True, interleaved=True, limit=7.0, alpha=1.702, up_shift=1.0)
    """

    name: str
    gated: bool = False
    interleaved: bool = False
    limit: float | None = None
    alpha: float = 1.0
    up_shift: float = 0.0

    def __post_init__(self) -> None:
        if self.name not in ACTIVATIONS:
            hint = did_you_mean(str(self.name), ACTIVATIONS)
            raise ValueError(f"activation={self.name!r} is not known; use one of {', '.join(ACTIVATIONS)}{hint}")
        if not self.gated and (self.interleaved or self.limit is not None or self.up_shift):
            raise ValueError("interleaved, limit and up_shift are of gated activations; pass gated=True or leave them")
        if self.alpha != 1 and self.name != "silu":
            raise ValueError(f"alpha={self.alpha} is a factor in silu's sigmoid; {self.name} has none")

    def __call__(self, h_PF1: torch.Tensor) -> torch.Tensor:
        if not self.gated:
            return self._act(h_PF1)
        if self.interleaved:
            gate_PF, up_PF = h_PF1[..., ::2], h_PF1[..., 1::2]
        else:
            gate_PF, up_PF = h_PF1.chunk(2, dim=-1)
        if self.limit is not None:
            gate_PF, up_PF = gate_PF.clamp(max=self.limit), up_PF.clamp(-self.limit, self.limit)
        if self.up_shift:
            up_PF = up_PF + self.up_shift
        return self._act(gate_PF) * up_PF

    def _act(self, h: torch.Tensor) -> torch.Tensor:
        return h * torch.sigmoid(h * self.alpha) if self.alpha != 1 else ACTIVATIONS[self.name](h)


def make_activation(name: str, gated: bool) -> Activation:
    """`act(h)`, or for gated experts `act(gate) * up` of h = [gate, up] (SwiGLU: Shazeer, arXiv 2002.05202).

    Raises ValueError for an unknown name."""
    return Activation(name, gated)


@dataclass(frozen=True)
class ExpertFunction:
    """The function of an expert without its weights.

    Attributes:
        activation: (P, F1) -> (P, F), differentiable, independent for each row. Gated activations take [gate, up]
            concatenated, or in the order of the weights. On CUDA kernels compute an `Activation` in one pass; PyTorch
            computes any other callable, on the worst-case number of rows.
        transposed: weights are stored (in, out) instead of (out, in).
    """

    activation: ActivationFunction
    transposed: bool = False


class Experts(Protocol):
    """Computes partial outputs of arrived tokens, forward and backward, without autograd.

    The caller saves the arrived tokens x for the backward; the experts save the rest. Experts with an attribute
    `reads_packets` that is True get tokens and gradients as packets of FP8, if there are any. Only experts whose
    `computes_adapters` is True get weights with adapters, or quantised ones. CUDA graphs cannot contain experts whose
    `counts_on_host` is True. Forwards of those whose `can_defer` is True may get a list `deferred`, to which they then
    add what writes the partial outputs. Those whose `computes_ranges` is True may get weights in two ranges of slots
    (`carpool.experts.slot_ranges`), and then return gradients by range."""

    name: str

    def forward(
        self,
        arrivals: Arrivals,
        weights: ExpertWeights,
        partial_RH: torch.Tensor,
        arena: Arena | None = None,
        backward: bool = True,
    ) -> tuple[Any, ...]:
        """Write the partial output of every token into `partial_RH`; return the saved activations except x.

        Args:
            arena: memory for activations with one row per pair, if `arrivals.num_pairs` is only a bound.
            backward: whether one will follow. If not, nothing needs to be saved.
        """
        ...

    def backward(
        self,
        saved: tuple[Any, ...],
        x: HiddenStates,
        weights: ExpertWeights,
        dpartial: HiddenStates,
        dx_RH: torch.Tensor,
        needs_dweights: bool,
    ) -> tuple[torch.Tensor, Callable[[], ExpertWeights] | None]:
        """Write the gradients of tokens into `dx_RH`; return dweight_RJ (float32), and a function that computes the
        gradients of the weights: None if there are none. Gradients of adapters are always computed.

        So the gradients of tokens can be sent first. The function may still read x, but neither dpartial nor spare
        slots.

        Args:
            saved: the result of `forward`: tensors, `HiddenStates`, or None.
            x: the tokens that arrived in the forward, saved by the caller.
            dpartial: gradients of the partial outputs, in the order of x.
            needs_dweights: whether gradients of weights other than adapters are needed."""
        ...


def reads_packets(experts: Experts) -> bool:
    """Whether these experts read packets of FP8 (`carpool.kernels.packets`)."""
    return bool(getattr(experts, "reads_packets", False))
