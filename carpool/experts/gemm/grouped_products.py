"""The matrix products of grouped experts over pairs sorted by slot (`carpool.experts.gemm.grouped`), with what is fused
to each.

There are six products, each with two implementations; `Choices` selects:

    up       h = gather(x) @ up + bias,  a = activation(h)                 forward
    down     y = a @ down
    dact     dA = gather(dy) @ down^T,  dh, weight * a and <dA, a>         backward
    dx       dh @ up^T
    dup      dh^T @ gather(x)
    ddown    gather(dy)^T @ (weight * a)

"library" is PyTorch's grouped product between kernels that gather, activate and so on, and what the fused kernels do
not take falls back to it. The fused side is one kernel that does all of it and reads arrivals where they are:
`up_kernels.py`, `product_kernels.py` (down and dx), `dact_kernels.py`, `outer_kernels.py` (dup and ddown);
`gemm_tiles.py` is what they share.

Adapters (`carpool.experts.base`) are two thin products beside each of the four that hidden states go through: one
before it, and one whose share is added inside the fused kernel (`adapter_kernels.py`), or to the library's product in a
pass of its own. Gradients of adapters are four thin products; those of frozen weights are not computed. Matrices of a
quantised base are dequantised for each product and freed after it (`carpool.experts.quantised`): for the fused side
some experts at a time, with a launch for each, and for the library's all at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from carpool.activations import Arena, HiddenStates, Ready
from carpool.experts import pairs as sides
from carpool.experts.base import Activation, ExpertFunction, ExpertWeights
from carpool.experts.gemm.choices import LIBRARY, Choices, default_choices
from carpool.experts.pairs import (
    Pairs,
    activate,
    activate_backward,
    gather_rows,
    grouped_mm,
    grouped_outer,
)
from carpool.experts.quantised import AT_ONCE, dequantise
from carpool.experts.slot_ranges import stack

# The gradients of an adapter's a and b.
OfAdapter = tuple[torch.Tensor | None, torch.Tensor | None]

if TYPE_CHECKING:
    from carpool.experts.gemm.adapter_kernels import Share
    from carpool.experts.gemm.gemm_tiles import Parts, Tiling
    from carpool.experts.gemm.table_kernels import RowAddresses


class GroupedProducts:
    """The grouped products of one forward or one backward, with what is fused to each.

    Args:
        choices: None: by the shape.
        tiles: of an earlier object for the same pairs, to be reused; see `table_kernels.tile_table`. For a dispatch in
            parts up, down, dact and dx must be fused.
        inner: likewise; see the attribute.
        after: products of the slots before these, if weights are those of a range. What `up`, `down`, `dact` and `dx`
            of both write is one tensor, which these get as `out`.
        first: the slot where the range begins.

    Attributes:
        inner: rows times the a of up's adapter, and of down's, (P, Q) each; None until `up` and `down` have made them.
        slots: the range of slots.
        bias_SH: the biases of down of all slots, known to the last range.
        addresses: of rows, for products that read them where they are; shared by ranges.
    """

    def __init__(
        self,
        function: ExpertFunction,
        weights: ExpertWeights,
        pairs: Pairs,
        choices: Choices | None = None,
        tiles: tuple[torch.Tensor, ...] | None = None,
        inner: tuple[torch.Tensor | None, ...] = (None, None),
        after: GroupedProducts | None = None,
        first: int = 0,
    ) -> None:
        self.function, self.weights, self.pairs, self.tiles, self.inner = function, weights, pairs, tiles, inner
        self.after, self.slots = after, slice(first, first + weights.up_SFH.shape[0])
        self.offsets_S = pairs.offsets_S[self.slots]
        self.last = self.slots.stop == pairs.offsets_S.shape[0]
        self.bias_SH = weights.down_bias_SH
        if after is not None and after.bias_SH is not None and self.bias_SH is not None:
            self.bias_SH = stack(after.bias_SH, first, self.bias_SH)
        self.addresses: dict[int, tuple[HiddenStates, Any]] = {} if after is None else after.addresses
        pairs_per_slot = pairs.order_P.shape[0] // max(1, weights.up_SFH.shape[0])
        self._up = weights.up_SFH, weights.up_code, weights.up_scale
        self._down = weights.down_SHF, weights.down_code, weights.down_scale
        fused = not (weights.up_a_SQH is weights.down_a_SQF is weights.up_code is None)
        self.choices = choices or default_choices(weights.up_SFH.device, pairs_per_slot, fused)
        self.dtype = weights.up_SFH.dtype
        self._dy_PH: torch.Tensor | None = None
        # Gradients of the adapters' inner rows, from the stage that makes them to the one that needs them again.
        self._du_up_PQ: torch.Tensor | None = None
        self._du_down_PQ: torch.Tensor | None = None
        self._dy_address_P: torch.Tensor | None = None

    def up(
        self,
        x: HiddenStates,
        arena: Arena | None,
        keep: bool,
        wants_a: bool = True,
        ready: Ready | None = None,
        out: tuple[torch.Tensor, HiddenStates] | None = None,
    ) -> tuple[torch.Tensor, HiddenStates]:
        """(a_PF = activation(h), h = x @ up + bias), h in the arena if there is one. Only the fused kernel omits h
        unless `keep`, omits a unless `wants_a`, and waits for tokens in flight (`ready`)."""
        function, weights, pairs, activation = self.function, self.weights, self.pairs, self.function.activation
        a_SQH, b_SFQ, bias_SF = weights.up_a_SQH, weights.up_b_SFQ, weights.up_bias_SF
        way = self._fused(self.choices.up, x)
        if way and isinstance(activation, Activation) and (a_SQH is None or _share_fits(a_SQH.shape[1])):
            from carpool.experts.gemm import up_kernels

            width = weights.up_SFH.shape[2 if function.transposed else 1]
            share = a_PF = None
            if out is not None:
                a_PF, h = out
            elif not keep:
                h = HiddenStates(x.data[:0], width)
            elif arena is None:
                h = HiddenStates(x.data.new_empty(pairs.order_P.shape[0], width, dtype=self.dtype), width)
            else:
                h = arena.reserve(width, self.dtype, pairs.count_1)
            rows = self._addresses(x)
            if a_SQH is not None and b_SFQ is not None:
                share = self._share(self._inner_of_up(rows.address_P, a_SQH), b_SFQ, turned=True)
            for slots, matrices, tiles_M4 in self._by_slots(of_up=True):
                bias = None if bias_SF is None else bias_SF[slots]
                a_PF = up_kernels.up(
                    rows.address_P, matrices, function.transposed, bias, activation, h if keep else None, tiles_M4,
                    wants_a, self._tiling(way), self._parts(ready), share and share.of(slots), a_PF,
                )  # fmt: skip
            del matrices
            assert a_PF is not None
            return a_PF, h
        x_PH = gather_rows(x, pairs, self.dtype)
        h_PF = grouped_mm(x_PH, self._turned(self._matrices(of_up=True), not function.transposed), self.offsets_S)
        if a_SQH is not None and b_SFQ is not None:
            self._add_thin(h_PF, self._inner_of_up(x_PH, a_SQH), b_SFQ, turned=True)
        return activate(activation, h_PF, weights.up_bias_SF, pairs, arena if keep else None)

    def down(self, a_PF: torch.Tensor, part: int | None = None, out_PH: torch.Tensor | None = None) -> torch.Tensor:
        """(P, H) = a @ down; of one part's pairs, into `out_PH`."""
        b_SHQ, thin = self.weights.down_b_SHQ, None
        if b_SHQ is not None:
            thin = (self.inner_of_down(a_PF), b_SHQ, True)
        return self._product(self.choices.down, a_PF, False, self.function.transposed, part, out_PH, thin)

    def inner_of_down(self, a_PF: torch.Tensor) -> torch.Tensor | None:
        """Rows times the a of down's adapter, for `inner`; None without one."""
        if (a_SQF := self.weights.down_a_SQF) is not None:
            out_PQ = None if self.after is None else self.after.inner[1]
            self.inner = self.inner[0], self._thin(a_PF, a_SQF, turned=True, out_PQ=out_PQ)
        return self.inner[1]

    def dy(self, dpartial: HiddenStates) -> torch.Tensor:
        """(P, H), each pair's row of the gradients; gathered once."""
        if self._dy_PH is None:
            self._dy_PH = gather_rows(dpartial, self.pairs, self.dtype)
        return self._dy_PH

    def dact(
        self,
        h: HiddenStates,
        dpartial: HiddenStates,
        weight_RJ: torch.Tensor,
        wants_scaled: bool,
        ready: Ready | None = None,
        out: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(dh_PF1, weight * a, dweight_RJ), as `pairs.activate_backward`, of dA = dy @ down^T. Of a range that is not
        the last, instead of dweight_RJ the shares that the last one adds up."""
        function, weights, pairs, activation = self.function, self.weights, self.pairs, self.function.activation
        down_a_SQF, down_b_SHQ = weights.down_a_SQF, weights.down_b_SHQ
        way = self._fused(self.choices.dact, dpartial)
        if way and isinstance(activation, Activation) and (down_a_SQF is None or _share_fits(down_a_SQF.shape[1])):
            from carpool.experts.gemm import dact_kernels, table_kernels

            rows, share = self._addresses(dpartial), None
            if down_a_SQF is not None and down_b_SHQ is not None:
                self._dy_address_P = rows.address_P
                out_PQ = None if self.after is None else self.after._du_down_PQ
                self._du_down_PQ = self._thin(rows.address_P, down_b_SHQ, out_PQ=out_PQ)
                share = self._share(self._du_down_PQ, down_a_SQF)
            for slots, matrices, tiles_M4 in self._by_slots(of_up=False):
                out = dact_kernels.down_backward(
                    rows.address_P, matrices, function.transposed, activation, h, weight_RJ, pairs.order_P,
                    tiles_M4, wants_scaled, self._tiling(way), self._parts(ready), share and share.of(slots), out,
                )  # fmt: skip
            del matrices
            assert out is not None
            if not self.last:
                return out
            dh_PF1, scaled_PF, share_NP = out
            bias_SH = self.bias_SH
            dy_PH = None if bias_SH is None else self.dy(dpartial)
            dweight_RJ = table_kernels.sum_shares(share_NP, pairs.position_RJ, pairs.slot_RJ, dy_PH, bias_SH)
            return dh_PF1, scaled_PF, dweight_RJ
        dy_PH = self.dy(dpartial)
        dA_PF = grouped_mm(dy_PH, self._turned(self._matrices(of_up=False), function.transposed), self.offsets_S)
        if down_a_SQF is not None and down_b_SHQ is not None:
            self._du_down_PQ = self._thin(dy_PH, down_b_SHQ)
            self._add_thin(dA_PF, self._du_down_PQ, down_a_SQF)
        return activate_backward(activation, h, dA_PF, dy_PH, weights.down_bias_SH, weight_RJ, pairs, wants_scaled)

    def dx(self, dh_PF1: torch.Tensor, part: int | None = None, out_PH: torch.Tensor | None = None) -> torch.Tensor:
        """(P, H) = dh @ up^T; as `down`."""
        a_SQH, b_SFQ, thin = self.weights.up_a_SQH, self.weights.up_b_SFQ, None
        if a_SQH is not None and b_SFQ is not None:
            self._du_up_PQ = self._thin(dh_PF1, b_SFQ, out_PQ=None if self.after is None else self.after._du_up_PQ)
            thin = (self._du_up_PQ, a_SQH, False)
        return self._product(self.choices.dx, dh_PF1, True, not self.function.transposed, part, out_PH, thin)

    def drop_weights(self) -> None:
        """What follows `dx` and `down_adapter_gradients` needs their shapes alone."""
        self.weights = ExpertWeights._make(None if w is None else w.new_empty(()).expand_as(w) for w in self.weights)
        del self._up, self._down

    def up_adapter_gradients(self, dh_PF1: torch.Tensor, x: HiddenStates) -> OfAdapter:
        """Of up's adapter, in the shapes of a and b, after `dx`; Nones without an adapter."""
        if self.weights.up_a_SQH is None:
            return None, None
        assert self._du_up_PQ is not None
        rows: torch.Tensor
        if self._kernels_take(x):
            rows = self._addresses(x).address_P
        else:
            rows = gather_rows(x, self.pairs, self.dtype)
        u_PQ = self.inner[0]
        assert u_PQ is not None, "kept from the forward"
        return self._thin_outer(self._du_up_PQ, rows, x.width), self._thin_outer(u_PQ, dh_PF1, turned=True)

    def down_adapter_gradients(
        self, dpartial: HiddenStates, scaled_a_PF: torch.Tensor, weight_RJ: torch.Tensor | None
    ) -> OfAdapter:
        """Of down's adapter, in the shapes of a and b, after `dact`; Nones without an adapter."""
        if self.weights.down_a_SQF is None:
            return None, None
        assert self._du_down_PQ is not None
        u_PQ = self.inner[1]
        if u_PQ is None or not self._kernels_take():
            u_PQ, weight_RJ = self._thin(scaled_a_PF, self.weights.down_a_SQF, turned=True), None
        dy = self.dy(dpartial) if self._dy_address_P is None else self._dy_address_P
        da = self._thin_outer(self._du_down_PQ, scaled_a_PF)
        return da, self._thin_outer(u_PQ, dy, dpartial.width, turned=True, weight_RJ=weight_RJ)

    def _inner_of_up(self, rows: torch.Tensor, a_SQH: torch.Tensor) -> torch.Tensor:
        """Rows of x, (P, H) or by their addresses, times the a of up's adapter; once for forward and backward."""
        inner_PQ = self.inner[0]
        if inner_PQ is None:
            out_PQ = None if self.after is None else self.after.inner[0]
            inner_PQ = self._thin(rows, a_SQH, turned=True, out_PQ=out_PQ)
            self.inner = inner_PQ, self.inner[1]
        return inner_PQ

    def _thin(
        self, rows: torch.Tensor, factor: torch.Tensor, turned: bool = False, out_PQ: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Rows, (P, I) or by their addresses, times an adapter's factor: (S, I, O), or if `turned` (S, O, I)."""
        if self._kernels_take():
            from carpool.experts.gemm import adapter_kernels

            return adapter_kernels.inner(rows, factor, not turned, self._tiles()[0], out_PQ)
        return grouped_mm(rows, factor.transpose(1, 2) if turned else factor, self.offsets_S)

    def _thin_outer(
        self,
        inner_PQ: torch.Tensor,
        rows: torch.Tensor,
        width: int | None = None,
        turned: bool = False,
        weight_RJ: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """For each slot u^T row over its pairs, (S, Q, width); if `turned`, (S, width, Q). `weight_RJ`: of pairs, by
        which u is multiplied; only where there are kernels."""
        if self._kernels_take():
            from carpool.experts.gemm import adapter_kernels

            weights = None if weight_RJ is None else (weight_RJ, self.pairs.order_P)
            return adapter_kernels.outer(inner_PQ, rows, width or rows.shape[1], turned, self._tiles()[1], weights)
        pair = (rows, inner_PQ) if turned else (inner_PQ, rows)
        return grouped_outer(*pair, self.offsets_S)

    def dup(self, dh_PF1: torch.Tensor, x: HiddenStates) -> torch.Tensor:
        """The gradient of up, in its shape."""
        if way := self._fused(self.choices.dup, x):
            return self._outer(way, x, dh_PF1, self.function.transposed)
        dup = grouped_outer(dh_PF1, gather_rows(x, self.pairs, self.dtype), self.offsets_S)
        return dup.transpose(1, 2) if self.function.transposed else dup

    def ddown(self, dpartial: HiddenStates, scaled_a_PF: torch.Tensor) -> torch.Tensor:
        """The gradient of down, in its shape."""
        if way := self._fused(self.choices.ddown, dpartial):
            return self._outer(way, dpartial, scaled_a_PF, not self.function.transposed)
        ddown = grouped_outer(self.dy(dpartial), scaled_a_PF, self.offsets_S)
        return ddown.transpose(1, 2) if self.function.transposed else ddown

    def _add_thin(
        self, out_PO: torch.Tensor, rows_PQ: torch.Tensor, factor: torch.Tensor, turned: bool = False
    ) -> None:
        """Add what `_thin` gives. On GPUs in one pass over the rows that are there."""
        pairs = self.pairs
        if sides.on_gpu(out_PO) and out_PO.dtype != torch.float64 and pairs.order_P.numel() and pairs.offsets_S.numel():
            from carpool.experts.gemm import adapter_kernels

            adapter_kernels.add(out_PO, self._share(rows_PQ, factor, turned), self._tiles()[0])
        else:
            out_PO += self._thin(rows_PQ, factor, turned)

    @staticmethod
    def _share(inner_PQ: torch.Tensor, factor: torch.Tensor, turned: bool = False) -> Share:
        """What `_thin` of these would give, for a product that adds it."""
        from carpool.experts.gemm.adapter_kernels import Share

        return Share(inner_PQ, factor, turned)

    def _product(
        self,
        way: str,
        rows_PK: torch.Tensor,
        of_up: bool,
        in_first: bool,
        part: int | None,
        out_PN: torch.Tensor | None,
        thin: tuple[Any, torch.Tensor, bool] | None = None,
    ) -> torch.Tensor:
        """A grouped product with up's or down's matrices, and what `_thin` gives of `thin`. They lie as (S, in, out) if
        `in_first`, else as (S, out, in)."""
        if way := self._fused(way):
            from carpool.experts.gemm import product_kernels

            starts_N = None if part is None else self._tiles()[2]
            tiling = self._tiling(way)
            share = None if thin is None or not _share_fits(thin[0].shape[1]) else self._share(*thin)
            thin = thin if share is None else None
            for slots, matrices, tiles_M4 in self._by_slots(of_up):
                out_PN = product_kernels.product(
                    rows_PK,
                    matrices,
                    in_first,
                    tiles_M4,
                    tiling,
                    starts_N,
                    part or 0,
                    out_PN,
                    share and share.of(slots),
                )
            del matrices
            assert out_PN is not None
            product_PN = out_PN
        else:
            assert part is None, "parts are fused"
            product_PN = grouped_mm(rows_PK, self._turned(self._matrices(of_up), not in_first), self.offsets_S)
        if thin is not None:
            self._add_thin(product_PN, *thin)
        return product_PN

    def _outer(self, way: str, gathered: HiddenStates, values_PN: torch.Tensor, gathered_first: bool) -> torch.Tensor:
        """(S, width of gathered, N), or (S, N, width) unless `gathered_first`: rows^T values, or values^T rows."""
        from carpool.experts.gemm import outer_kernels

        rows = self._addresses(gathered)
        operands = [(rows.address_P, gathered.width), (values_PN, values_PN.shape[1])]
        (a, m), (b, n) = operands if gathered_first else reversed(operands)
        tiling = self._tiling(way)
        return outer_kernels.outer(a, b, (m, n), self._tiles()[1], self.dtype, tiling)

    def _fused(self, way: str, rows: HiddenStates | None = None) -> str:
        """The tiling of the kernel, or "" where the library is chosen, or the kernels do not take what they get."""
        return way if way != LIBRARY and self._kernels_take(rows) else ""

    def _kernels_take(self, rows: HiddenStates | None = None) -> bool:
        """Whether there are kernels for these sizes, and for rows where they lie."""
        hidden, inner = self.weights.down_SHF.shape[1:]
        ours = rows is None or rows.data.dtype == self.dtype
        sizes = hidden % 8 == inner % 8 == 0 and self.pairs.order_P.shape[0] > 0 and self.offsets_S.shape[0] > 0
        return ours and sizes and has_kernels(self.weights.up_SFH)

    def take_ranges(self, rows: Sequence[HiddenStates]) -> bool:
        """Whether kernels compute all products of these rows; each takes a range of the slots."""
        fused = LIBRARY not in self.choices.to_dict().values() and isinstance(self.function.activation, Activation)
        # Last, for it imports kernels.
        factors = self.weights.up_a_SQH, self.weights.down_a_SQF
        return (
            fused and all(map(self._kernels_take, rows)) and all(a is None or _share_fits(a.shape[1]) for a in factors)
        )

    def _addresses(self, rows: HiddenStates) -> RowAddresses:
        """Where each pair's row is. Ranges share it, of all pairs."""
        from carpool.experts.gemm import table_kernels

        if self.last and self.after is None:
            return table_kernels.row_addresses(rows, *self._order)
        if id(rows) not in self.addresses:
            self.addresses[id(rows)] = rows, table_kernels.row_addresses(rows, *self._order)
        found: RowAddresses = self.addresses[id(rows)][1]
        return found

    def _tiles(self) -> tuple[torch.Tensor, ...]:
        if self.tiles is None:
            from carpool.experts.gemm import gemm_tiles, table_kernels

            given = self.pairs.order_P.shape[0], gemm_tiles.TILE_ROWS, 1, self.slots.start > 0
            self.tiles = table_kernels.tile_table(self.offsets_S, *given)[:2]
        return self.tiles

    def _tiling(self, way: str) -> Tiling:
        from carpool.experts.gemm import gemm_tiles

        return gemm_tiles.tiling(way, self.weights.up_SFH.device)

    def _parts(self, ready: Ready | None) -> Parts | None:
        if ready is None:
            return None
        from carpool.experts.gemm.gemm_tiles import Parts

        return Parts(ready.parts, self._tiles()[2], ready.awaited)

    @property
    def _order(self) -> tuple[torch.Tensor, torch.Tensor, int]:
        return self.pairs.order_P, self.pairs.offsets_S, self.pairs.slot_RJ.shape[1]

    def _matrices(self, of_up: bool) -> torch.Tensor:
        """Up's or down's matrices as they are stored. Of a quantised base they are made here, for one product."""
        stored, code, scale = self._up if of_up else self._down
        return stored if code is None or scale is None else dequantise(code, scale, self.dtype, self.offsets_S)

    def _by_slots(self, of_up: bool) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
        """(slots, their matrices, their tiles of pairs). Of a quantised base some slots at a time, whose matrices take
        the place of those before."""
        stored, code, scale = self._up if of_up else self._down
        made: torch.Tensor | None = None
        for slots, tiles_M4 in self._parts_of_slots:
            if code is not None and scale is not None:
                stored = made = dequantise(code[slots], scale[slots], self.dtype, self.offsets_S[slots], out=made)
            yield slots, stored, tiles_M4

    @cached_property
    def _parts_of_slots(self) -> list[tuple[slice, torch.Tensor]]:
        """Slots whose matrices are there at the same time, of up and of down, and their tiles of pairs."""
        slots, one = self.weights.up_SFH.shape[0], max(weight[0].numel() for weight in self.weights[:2])
        each = max(1, AT_ONCE // one)
        if not self.weights.quantised or each >= slots:
            return [(slice(None), self._tiles()[0])]
        from carpool.experts.gemm import gemm_tiles, table_kernels

        parts = [slice(first, first + each) for first in range(0, slots, each)]
        offsets_S, given = self.offsets_S, (self.pairs.order_P.shape[0], gemm_tiles.TILE_ROWS, 1)
        return [
            (part, table_kernels.tile_table(offsets_S[part], *given, self.slots.start + part.start > 0)[0])
            for part in parts
        ]

    @staticmethod
    def _turned(weight: torch.Tensor, turn: bool) -> torch.Tensor:
        """(S, in, out), which is how grouped products read them."""
        return weight.transpose(1, 2) if turn else weight


def _share_fits(rank: int) -> bool:
    """Whether the share of an adapter of this rank can be added inside a fused product."""
    from carpool.experts.gemm import adapter_kernels

    return rank <= adapter_kernels.MOST


def has_kernels(weights: torch.Tensor) -> bool:
    """bf16 on a GPU that multiplies it (Ampere and later); in the interpreter, on the CPU, any dtype."""
    if not weights.is_cuda:
        return sides.on_gpu(weights)
    return weights.dtype == torch.bfloat16 and torch.cuda.get_device_capability(weights.device)[0] >= 8
