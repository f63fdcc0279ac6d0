"""The plan: which buffer row each token gets on each rank. One kernel, without communication or a host read-back.

Every rank's buffer has one slab of `capacity` rows for each other rank, in the order of the ranks that follow it, and
at the end one of `most` rows for its own tokens. A sender fills its slab from the front, in the order of its tokens, so
a token's place is a prefix sum over the sender's own tokens. A rank's own tokens are not copied.

    rank 1 of 3, capacity 4, most 4, slots 0..1 on rank 0, 2..3 on rank 1, 4..5 on rank 2
    slabs      on rank 0: [1, 2, 0]      on rank 1: [2, 0, 1]      on rank 2: [0, 1, 2]

    slot_TK              row_WT: on rank 0    on rank 1    on rank 2
    token 0: [0, 1]              0            -1           -1
    token 1: [2, 4]              -1           8 + 1        4
    token 2: [1, 5]              1            -1           4 + 1
    count                        2            1            2

For a dispatch in parts, tokens are cut into ranges of `length`: `begins` has the first row of each part in each slab,
which is the number of earlier tokens that go there. (Parts of 1 token above: on rank 0 [0, 1, 1, 2].)

A program handles BLOCK tokens. It counts the choices of all blocks before it by itself, which reads K int32 per token
from the L2 cache, and needs neither a second kernel nor a wait for other programs. This is quadratic, and cheap up to
some hundred thousand tokens.

A slab that is too small is not an error here: tokens past the capacity get no row (-1), and `needed` gives every rank
    the
capacity that would have sufficed. At most 63 ranks: a token's ranks are one bit each.
"""

from __future__ import annotations

import triton
import triton.language as tl

from carpool.kernels.quick import quick


@triton.jit
def _or(a, b):  # type: ignore[no-untyped-def]
    return a | b


@triton.jit
def _bit(chosen, S: tl.constexpr):  # type: ignore[no-untyped-def]
    """int64 with the bit of the rank that a slot is on."""
    one = tl.zeros_like(chosen).to(tl.int64) + 1
    return tl.where(chosen < 0, 0, one << (tl.maximum(chosen, 0) // S).to(tl.int64))


@triton.jit
def _pack(bits, first: tl.constexpr, FIELDS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Bits first, first + 1, ... of an int64, each in a field of its own: FIELDS counters that add up together."""
    packed = (bits >> first) & 1
    for field in tl.static_range(1, FIELDS):
        packed |= ((bits >> (first + field)) & 1) << (64 // FIELDS * field)
    return packed


@triton.jit
def _field(packed, field: tl.constexpr, FIELDS: tl.constexpr):  # type: ignore[no-untyped-def]
    return ((packed >> (64 // FIELDS * field)) & ((1 << (64 // FIELDS)) - 1)).to(tl.int32)


@quick
@triton.jit(do_not_specialize=["tokens", "capacity", "most", "own", "length", "parts"])
def plan_kernel(  # type: ignore[no-untyped-def]
    slot,
    row,
    count,
    choices,
    begins,
    tokens,
    capacity,
    most,
    own,
    length,
    parts,
    S: tl.constexpr,
    K: tl.constexpr,
    KP: tl.constexpr,
    W: tl.constexpr,
    BLOCK: tl.constexpr,
    AHEAD: tl.constexpr,
    FIELDS: tl.constexpr,
    PARTED: tl.constexpr,
    PP: tl.constexpr,
):
    """slot: (T, K) int32. row: (W, T) int32, out. count: (2, W) int32, out: tokens to each rank, and the capacity that
    the slab for each rank would need. choices: (blocks, W) int32, out: choices of a block's tokens on each rank. own:
    this rank. begins: (parts + 1, W) int32, out, if PARTED, of `length` tokens. AHEAD: tokens before the own block that
    are counted at once. FIELDS: counters in an int64, 4 for fewer than 2^16 tokens, else 2, because scans and sums
    dominate the time. PP: at least parts + 1."""
    block = tl.program_id(0)
    first = block * BLOCK
    token = first + tl.arange(0, BLOCK)
    column = tl.arange(0, KP)
    ahead = tl.arange(0, AHEAD)

    for group in tl.static_range(0, W, FIELDS):
        before = tl.zeros([AHEAD], tl.int64)
        for start in range(0, first, AHEAD):
            inside = (start + ahead < first)[:, None] & (column < K)[None, :]
            at = (start + ahead).to(tl.int64)[:, None] * K + column[None, :]
            chosen = tl.load(slot + at, mask=inside, other=-1)
            before += _pack(tl.reduce(_bit(chosen, S), 1, _or), group, FIELDS)
        base = tl.sum(before, 0)

        # Column by column, one number per token, which is the layout of the scan.
        bits = tl.zeros([BLOCK], tl.int64)
        chosen_here = tl.zeros([BLOCK], tl.int64)
        for k in tl.static_range(K):
            bit = _bit(tl.load(slot + token.to(tl.int64) * K + k, mask=token < tokens, other=-1), S)
            bits |= bit
            chosen_here += _pack(bit, group, FIELDS)
        packed = _pack(bits, group, FIELDS)
        through = tl.cumsum(packed, 0)
        all_rows = base + tl.sum(packed, 0)
        all_choices = tl.sum(chosen_here, 0)
        for field in tl.static_range(FIELDS):
            if group + field < W:
                rank = group + field
                # The slab for itself is the last, and not filled from the front: token t is its row t.
                position = _field(base, field, FIELDS) + _field(through, field, FIELDS) - 1
                position = tl.where(own == rank, token, position)
                room = tl.where(own == rank, most, capacity)
                wanted = _field(packed, field, FIELDS) > 0
                slab = (own - rank - 1 + W) % W
                destination = tl.where(wanted & (position < room), slab * capacity + position, -1)
                tl.store(row + rank * tokens.to(tl.int64) + token, destination, mask=token < tokens)
                tl.store(choices + block * W + rank, _field(all_choices, field, FIELDS))
                if PARTED:
                    begin = tl.minimum(tl.where(own == rank, token, position + 1 - wanted.to(tl.int32)), room)
                    first_of_part = (token < tokens) & (token % length == 0)
                    tl.store(begins + token // length * W + rank, begin, mask=first_of_part)
                if block == tl.num_programs(0) - 1:
                    rows = _field(all_rows, field, FIELDS)
                    tl.store(count + rank, tl.where(own == rank, rows, tl.minimum(rows, capacity)))
                    needed = tl.where(own == rank, tl.where(tokens > most, tokens, 0), rows)
                    tl.store(count + W + rank, needed)
                    if PARTED:
                        # Parts that begin after the last token, the one after the last among them.
                        part = tl.arange(0, PP)
                        end = tl.minimum(tl.where(own == rank, tokens, rows), room) + part * 0
                        tl.store(begins + part * W + rank, end, mask=(part <= parts) & (part * length >= tokens))
