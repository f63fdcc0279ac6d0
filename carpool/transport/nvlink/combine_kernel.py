"""Combine: reads every token's partial outputs from the ranks that it visited, and adds them up.

    1  signal   the own experts have written their partial outputs: signal to every peer, then wait for all of them
    2  weights  in the backward, the K gradients of a token's weights, each from the rank that served the choice
    3  outputs  tile by tile (BT tokens x BH columns): load the tile from every rank's memory, add in float32 in rank
                order, store

Why pull: the token's rank reads the buffers that the experts wrote, and adds while it reads. Pushing partial outputs to
the token's rank and adding there takes a second pass over memory: 694 + 119 us against 503 us at T 4096, H 7168. A pull
needs many loads in flight: 1024 threads hold 32 KiB from each of four ranks in registers, and
as soon as a rank's part is added its registers take the next tile's. So the links never run dry between two tiles, and
the order does not depend on the compiler: the store of the sums, which may alias with anything, ends each turn. Loading
a whole tile and then adding it took 503 us with 16 CTAs and 641 with 8 (ceiling 434) when the compiler kept the loads
together, and 540 when it did not. Software pipelining through shared memory (8 x 512, four stages): the same with 16,
887 with 8. Half the tile: 818 with 16.

There is no wait at the end: the partial outputs of this lease are overwritten only after the next dispatch on it has
finished, which waits for every peer, after this combine. See dispatch_kernel.py.

A ride in parts has a combine for each part, a range of tokens: all ranks have signalled its partial outputs, while the
experts compute on the next part.

If a slab was too small on any rank (`needed` > capacity), or a plan of spare slots exceeded its limit (`pairs` >
most_pairs), tokens are missing, and the outputs are set to NaN.
"""

from __future__ import annotations

import triton
import triton.language as tl

from carpool.kernels.quick import quick
from carpool.kernels.signals import count_sent, end_of, send, wait


@triton.jit
def _place(tile, H: tl.constexpr, BT: tl.constexpr, BH: tl.constexpr):  # type: ignore[no-untyped-def]
    across: tl.constexpr = (H + BH - 1) // BH
    return (tile // across) * BT + tl.arange(0, BT), (tile % across) * BH + tl.arange(0, BH)


@triton.jit
def _source(row, peer, token, tokens, stride, W: tl.constexpr):  # type: ignore[no-untyped-def]
    """The tokens' rows on a rank; -1: not visited, or there is no such rank."""
    inside = (token < tokens) & (peer < W)
    return tl.load(row + (peer % W) * stride.to(tl.int64) + token, mask=inside, other=-1)


@triton.jit
def _rows_of(base, source, column, element, H: tl.constexpr):  # type: ignore[no-untyped-def]
    buffer = tl.multiple_of(base.to(tl.pointer_type(element)), 16)
    at = source.to(tl.int64)[:, None] * H + column[None, :]
    return tl.load(buffer + at, mask=(source >= 0)[:, None] & (column < H)[None, :], other=0.0)


@triton.jit
def _sum_rows(  # type: ignore[no-untyped-def]
    y,
    row,
    base0,
    base1,
    base2,
    base3,
    bases,
    partial_at,
    tokens,
    stride,
    poison,
    token,
    column,
    source0,
    source1,
    source2,
    source3,
    H: tl.constexpr,
    W: tl.constexpr,
    BT: tl.constexpr,
    BH: tl.constexpr,
):
    element: tl.constexpr = y.dtype.element_ty
    step = tl.num_programs(0)
    part0 = _rows_of(base0, source0, column, element, H)
    part1 = _rows_of(base1, source1, column, element, H)
    part2 = _rows_of(base2, source2, column, element, H)
    part3 = _rows_of(base3, source3, column, element, H)
    next_token, next_column = _place(tl.program_id(0) + step, H, BT, BH)
    source0 = _source(row, 0, next_token, tokens, stride, W)
    source1 = _source(row, 1, next_token, tokens, stride, W)
    source2 = _source(row, 2, next_token, tokens, stride, W)
    source3 = _source(row, 3, next_token, tokens, stride, W)
    tiles = tl.cdiv(tokens, BT) * ((H + BH - 1) // BH)
    for tile in range(tl.program_id(0), tiles, step):
        # The registers of a rank's part are free once it is added: load the next tile of that rank at once, and the row
        # numbers of the tile after that.
        after, after_column = _place(tile + 2 * step, H, BT, BH)
        total = part0.to(tl.float32) + poison
        part0 = _rows_of(base0, source0, next_column, element, H)
        source0 = _source(row, 0, after, tokens, stride, W)
        total += part1.to(tl.float32)
        part1 = _rows_of(base1, source1, next_column, element, H)
        source1 = _source(row, 1, after, tokens, stride, W)
        total += part2.to(tl.float32)
        part2 = _rows_of(base2, source2, next_column, element, H)
        source2 = _source(row, 2, after, tokens, stride, W)
        total += part3.to(tl.float32)
        part3 = _rows_of(base3, source3, next_column, element, H)
        source3 = _source(row, 3, after, tokens, stride, W)
        for peer in tl.static_range(4, W):
            base = tl.load(bases + peer) + partial_at
            source = _source(row, peer, token, tokens, stride, W)
            total += _rows_of(base, source, column, element, H).to(tl.float32)
        out = token.to(tl.int64)[:, None] * H + column[None, :]
        tl.store(y + out, total.to(element), mask=(token < tokens)[:, None] & (column < H)[None, :])
        token, column = next_token, next_column
        next_token, next_column = after, after_column


@triton.jit
def _fetch_weights(  # type: ignore[no-untyped-def]
    dweight,
    slot,
    row,
    bases,
    dweight_at,
    tokens,
    stride,
    S: tl.constexpr,
    K: tl.constexpr,
    KP: tl.constexpr,
    BC: tl.constexpr,
):
    choice = tl.arange(0, KP)
    for block in range(tl.program_id(0), tl.cdiv(tokens, BC), tl.num_programs(0)):
        token = block * BC + tl.arange(0, BC)
        inside = (token < tokens)[:, None] & (choice < K)[None, :]
        at = token.to(tl.int64)[:, None] * K + choice[None, :]
        chosen = tl.load(slot + at, mask=inside, other=-1)
        served = inside & (chosen >= 0)
        peer = tl.where(served, chosen // S, 0)
        source = tl.load(row + peer.to(tl.int64) * stride + token[:, None], mask=served, other=-1)
        served = served & (source >= 0)
        base = tl.load(bases + peer, mask=served, other=0)
        where = base + dweight_at + (source.to(tl.int64) * K + choice[None, :]) * 4
        value = tl.load(where.to(tl.pointer_type(tl.float32)), mask=served, other=0.0)
        tl.store(dweight + at, value, mask=inside)


@quick
@triton.jit(do_not_specialize=["tokens", "stride", "behind", "blocks", "capacity", "most_pairs", "own", "verb"])
def combine_kernel(  # type: ignore[no-untyped-def]
    y,
    dweight,
    slot,
    row,
    count,
    choices,
    received,
    bases,
    epochs,
    status,
    host_status,
    needed,
    pairs,
    tally,
    tokens,
    stride,
    behind,
    blocks,
    capacity,
    most_pairs,
    own,
    timeout,
    verb,
    partial_at,
    dweight_at,
    written_at,
    base0,
    base1,
    base2,
    base3,
    H: tl.constexpr,
    S: tl.constexpr,
    K: tl.constexpr,
    KP: tl.constexpr,
    W: tl.constexpr,
    WP: tl.constexpr,
    BT: tl.constexpr,
    BH: tl.constexpr,
    BC: tl.constexpr,
    WEIGHTS: tl.constexpr,
    SEND: tl.constexpr,
    RECEIVE: tl.constexpr,
    SPIN: tl.constexpr,
):
    """y: (T, H), out. dweight: (T, K) float32, out, if WEIGHTS. base0...3: the first four of `bases`, which no
    entry of `row` refers to where there is no such rank. stride: tokens from rank to rank in `row`; all arguments by
    token may be of a range of them. behind: distance of the mark of these outputs from the end of the ride; 0: all
    outputs, or the last part. The rest as in `dispatch_kernel`."""
    program = tl.program_id(0)
    peer = tl.arange(0, WP)
    epoch = tl.load(epochs + 1)
    mark = end_of(epoch) - behind
    if SEND and program == 0:
        send(bases, written_at + own * 4, mark, W, WP)
    if RECEIVE:
        poison = tl.where((tl.load(needed) > capacity) | (tl.load(pairs) > most_pairs), float("nan"), 0.0)
        # The row numbers of the first tile do not depend on other ranks.
        token, column = _place(program, H, BT, BH)
        source0 = _source(row, 0, token, tokens, stride, W)
        source1 = _source(row, 1, token, tokens, stride, W)
        source2 = _source(row, 2, token, tokens, stride, W)
        source3 = _source(row, 3, token, tokens, stride, W)
        wait(tl.load(bases + own), written_at, mark, timeout, status, host_status, verb, W, 1, 1, WP, SPIN)
        if WEIGHTS:
            _fetch_weights(dweight, slot, row, bases, dweight_at, tokens, stride, S, K, KP, BC)
        _sum_rows(
            y, row, base0 + partial_at, base1 + partial_at, base2 + partial_at, base3 + partial_at, bases, partial_at,
            tokens, stride, poison, token, column, source0, source1, source2, source3, H, W, BT, BH,
        )  # fmt: skip
        if (program == 0) & (behind == 0):
            # Tokens that this rank computed for each rank; for itself, its own tokens.
            came = tl.load(received + (peer - own - 1 + W) % W, mask=peer < W, other=0)
            rows = tl.where(peer == own, tl.load(count + peer, mask=peer < W, other=0), came)
            count_sent(tally, rows, choices, blocks, W, WP)
            tl.store(epochs, epoch)
