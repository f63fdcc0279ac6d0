"""Experts' inputs as a transport hands them over that does not tell the host how much came, and the answer in float64.

Rows that nobody wants hold NaN, the number of pairs is only a bound, and what is kept lies in an arena that is full of
NaN. `ReferenceExperts` in float64, on the inputs as they were rounded, gives the answer.
"""

from __future__ import annotations

from copy import copy
from dataclasses import replace

import torch

from carpool.activations import Arena, HiddenStates
from carpool.experts import Activation, ExpertFunction, Experts, ExpertWeights, ReferenceExperts
from carpool.experts.base import NUM_TRAINED, ActivationFunction, stand_in
from carpool.experts.quantised import Kind, dequantised, quantise
from carpool.transport import Arrivals
from tests.no_waits import no_waits

ACTIVATIONS = {
    "SwiGLU": Activation("silu", gated=True),
    "GeGLU": Activation("gelu", gated=True),
    "gelu_tanh, gated": Activation("gelu_tanh", gated=True),
    "relu, gated": Activation("relu", gated=True),
    "relu2, interleaved": Activation("relu2", gated=True, interleaved=True),
    "gpt-oss": Activation("silu", gated=True, interleaved=True, limit=0.8, alpha=1.702, up_shift=1.0),
    "clamped": Activation("silu", gated=True, limit=0.5),
    "silu": Activation("silu"),
    "gelu": Activation("gelu"),
    "gelu_tanh": Activation("gelu_tanh"),
    "relu": Activation("relu"),
    "relu2": Activation("relu2"),
}


NAMES = ("partial", "dx", "dweight", "dup", "ddown", "dup_bias", "ddown_bias", "dup_a", "dup_b", "ddown_a", "ddown_b")


def draw_slots(pattern: str, generator: torch.Generator) -> tuple[torch.Tensor, int]:
    """slot_RJ and the number of slots."""
    rows, columns, slots = 37, 3, 5
    slot_RJ = torch.rand(rows, slots, generator=generator).argsort(1)[:, :columns]
    match pattern:
        case "random":
            slot_RJ[torch.rand(rows, columns, generator=generator) < 0.3] = -1
        case "full":
            pass
        case "one column":
            slot_RJ = slot_RJ[:, :1]
        case "one slot":
            slot_RJ[:] = -1
            slot_RJ[torch.arange(rows), torch.arange(rows) % columns] = 3
        case "idle slots":
            slot_RJ[(slot_RJ == 0) | (slot_RJ == 4)] = -1
        case "no pairs":
            slot_RJ[:] = -1
        case "no rows":
            slot_RJ = slot_RJ[:0]
        case "no slots":
            slot_RJ[:], slots = -1, 0
        case "single slot":
            slot_RJ, slots = torch.where(slot_RJ == 0, 0, -1), 1
    return slot_RJ.int(), slots


PATTERNS = ("random", "full", "one column", "one slot", "idle slots", "no pairs", "no rows", "no slots", "single slot")


class ExpertProblem:
    """Inputs of one computation, drawn in float64 and rounded to `dtype`; slots by one of `PATTERNS`, or as they are
    given. With `ranks`, up and down have adapters of these (0: none), and what they adapt is frozen if `frozen`."""

    def __init__(
        self,
        pattern: str | tuple[torch.Tensor, int],
        hidden: int,
        inner: int,
        activation: ActivationFunction,
        bias: bool,
        dtype: torch.dtype,
        transposed: bool = False,
        ranks: tuple[int, int] = (0, 0),
        frozen: bool = False,
        seed: int = 0,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.slot_RJ, slots = draw_slots(pattern, generator) if isinstance(pattern, str) else pattern
        self.function, self.dtype = ExpertFunction(activation, transposed), dtype
        self.wanted_R = (self.slot_RJ >= 0).any(1)
        gated = not isinstance(activation, Activation) or activation.gated
        rows, width = len(self.slot_RJ), inner * (2 if gated else 1)

        def draw(*shape: int, scale: float = 1.0) -> torch.Tensor:
            return (scale * torch.randn(*shape, generator=generator, dtype=torch.float64)).to(dtype)

        self.x_RH, self.dpartial_RH = draw(rows, hidden), draw(rows, hidden)
        weight = 0.1 + torch.rand(self.slot_RJ.shape, generator=generator, dtype=torch.float64)
        self.weight_RJ = torch.where(self.slot_RJ < 0, 0, weight).to(
            torch.float64 if dtype == torch.float64 else torch.float32
        )
        for tensor in (self.x_RH, self.dpartial_RH, self.weight_RJ):
            tensor[~self.wanted_R] = torch.nan
        up, down = draw(slots, width, hidden, scale=hidden**-0.5), draw(slots, hidden, inner, scale=inner**-0.5)
        if transposed:
            up, down = up.transpose(1, 2).contiguous(), down.transpose(1, 2).contiguous()
        biases = (draw(slots, width), draw(slots, hidden)) if bias else (None, None)
        factors = [draw(slots, rank, i, scale=i**-0.5) for rank, i in zip(ranks, (hidden, inner), strict=True)]
        factors_b = [draw(slots, o, rank, scale=0.5) for rank, o in zip(ranks, (width, hidden), strict=True)]
        of_up, of_down = zip(factors, factors_b, strict=True)
        none = (None, None)
        self.weights = ExpertWeights(
            up, down, *biases, *(of_up if ranks[0] else none), *(of_down if ranks[1] else none)
        )
        self.frozen = frozen

    def quantise(self, kind: Kind) -> ExpertProblem:
        """From now on the matrices are quantised.

        Returns:
            The same problem with what they are dequantised to."""
        up, down = (quantise(weight, kind) for weight in self.weights[:2])
        named = zip(("up_SFH", "down_SHF"), self.weights[:2], strict=True)
        stand_ins = {name: stand_in(w.shape, w.dtype, w.device) for name, w in named}
        self.weights = self.weights._replace(
            **stand_ins, up_code=up.code, up_scale=up.scale, down_code=down.code, down_scale=down.scale
        )
        twin = copy(self)
        twin.weights = dequantised(self.weights)
        return twin

    def run(
        self,
        experts: Experts,
        use_arena: bool,
        all_rows: bool,
        device: str = "cpu",
        dtype: torch.dtype | None = None,
        may_wait: bool = False,
    ) -> dict[str, torch.Tensor]:
        """Forward and backward; results by `NAMES`. Unless `all_rows`, the sums of rows that nobody wants need not be
        written: they start, and may end, as NaN. Unless `may_wait`, the host must not wait for a GPU meanwhile."""

        def put(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.to(device, dtype if dtype is not None else tensor.dtype, copy=True)

        count = int((self.slot_RJ >= 0).sum())
        x_RH, dpartial_RH = put(self.x_RH), put(self.dpartial_RH)
        rows = HiddenStates(x_RH, x_RH.shape[1], gaps=not all_rows)
        arrivals = Arrivals(rows, self.slot_RJ.to(device), put(self.weight_RJ), 4 * count + 5)
        weights = ExpertWeights._make(None if w is None else put(w) for w in self.weights)
        partial, dx = (torch.full_like(x_RH, torch.nan) for _ in range(2))
        arena, x = None, replace(rows, data=x_RH.clone())
        if use_arena:
            elements = x_RH.numel() + count * max(self.weights.up_SFH.shape[1:])
            arena = Arena(2 * elements * x_RH.element_size() + 10000, x_RH.device)
            arena.bytes.fill_(255)
            arena.reserve(3, x_RH.dtype, torch.ones(1, dtype=torch.int32, device=device))
            x = arena.reserve(x_RH.shape[1], x_RH.dtype, torch.full((1,), len(x_RH), device=device))
            x = replace(x, gaps=not all_rows)
            assert x.start is not None
            x.data[int(x.start) : int(x.start) + x_RH.numel()] = x_RH.flatten()
        with no_waits(device == "cuda" and not may_wait):
            saved = experts.forward(arrivals, weights, partial, arena)
            x_RH.fill_(torch.nan)  # it was leased
            dweight, finish = experts.backward(saved, x, weights, HiddenStates.of(dpartial_RH), dx, not self.frozen)
            assert finish is not None
            dpartial_RH.fill_(torch.nan)  # it was leased too
            gradients = finish()
        found = dict(zip(NAMES, (partial, dx, dweight, *gradients[:NUM_TRAINED]), strict=True))
        return {name: t.cpu() for name, t in found.items() if t is not None}

    def expected(self) -> dict[str, torch.Tensor]:
        return self.run(ReferenceExperts(self.function), False, True, dtype=torch.float64)

    def check(
        self,
        got: dict[str, torch.Tensor],
        tolerance: float,
        all_rows: bool,
        kinked: bool = False,
        want: dict[str, torch.Tensor] | None = None,
    ) -> None:
        """Largest error over largest value; of root mean squares, if `kinked`: where a pre-activation is rounded past a
        kink, the slope there is another one, and that element is as wrong as can be. `want`: default: `expected`."""
        want = self.expected() if want is None else want
        assert set(got) == set(want)
        for name, tensor in got.items():
            assert tensor.shape == want[name].shape, name
            if name in ("partial", "dx"):
                tensor, reference = tensor[self.wanted_R], want[name][self.wanted_R]
            else:
                reference = want[name]
            if tensor.numel():
                size = torch.linalg.vector_norm if kinked else torch.amax
                error = size((tensor.double() - reference).abs())
                scale = float(size(reference.abs())) or 1e-30
                assert error <= tolerance * scale, f"{name}: error {error / scale:.1e}, allowed {tolerance:.0e}"
        assert not got["dweight"][self.slot_RJ < 0].any(), "a weight that nobody uses has no gradient"
        if all_rows:
            assert not got["partial"][~self.wanted_R].any() and not got["dx"][~self.wanted_R].any()
