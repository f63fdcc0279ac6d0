"""Dispatch: loads every token once and stores it to each rank that it visits.

    tokens    ROWS programs, tile by tile (BT tokens x BH words): for each rank, store the tile to the rows of the plan,
              while the next tile is loaded
    choices   OTHERS more programs, meanwhile: for each token K slots of the rank (-1: elsewhere) and K weights, in one
              piece of 8 K bytes; the number of tokens from here; when those of all peers have arrived, copy slots and
              weights from the buffer into tensors of the layer, and set slot -1 in rows past a slab's count
    signal    each program signals to each peer that its part is written; one waits for the programs of all peers

Eight programs fill the links, so of 16 the other 8 have time for the choices (T 8192, H 2048: 287 us instead of 304).
With 8 in all they do both: 7 + 1 was slower (533 us instead of 489 at T 4096, H 7168).

Tokens are copied as 4-byte words, for any dtype. Why push: a store needs no answer, so few programs fill the links
(8 CTAs: 487 us at T 4096, H 7168, where copy engines take 434; 16 CTAs 476; a pull with 8: 641).

A dispatch may have parts (`begins` of plan_kernel.py): tiles are sent in the order of tokens, and a program that
reaches a tile of a later part signals how many parts it has sent. The experts' kernels wait for a part instead of for
the end (`signals.wait_part`); choices are then sent ahead by a kernel of their own (`choices_kernel`).

There is one wait, at the end, and none at the start. A peer may write into a lease as soon as its own dispatch runs:
that is after its combine on the same lease, which waited for the signal that this rank's experts have finished with it.
In the same way the end of this dispatch implies that all peers have finished reading this lease's partial outputs.

Tokens for the own experts are not copied: kernels read them in the layer's input (`HiddenStates.home`). An SM stores
about 45 GB/s to any memory, so filling the own slab too would take a quarter of the throughput of 8 programs (8 CTAs:
582 us against 500 at T 4096, H 7168), and a concurrent copy was delayed by the kernel in one run of two.

Choices may be sent ahead of tokens in parts: then pairs can be sorted by expert before any token arrives.

    send      to every rank the K slots and weights of each token, the number of tokens from here, and the first row of
              each part (plan_kernel.py)
    wait      for those of all peers
    unpack    slots and weights into tensors of the layer, and the group of each choice, slot * parts + part, by which
              pairs are sorted

    2 parts, rows 0..2 of a slab, of which row 2 is the first of part 1      slots [[3, -1], [0, 1], [3, 0]]
                                                                             groups [[6, -1], [0, 2], [7, 1]]

`choices_kernel` is a kernel of its own because the computation waits for it, but not for the tokens, which a dispatch
without choices sends meanwhile. It has flags of its own. Peers may write choices into a lease when they may write
tokens.
"""

from __future__ import annotations

import triton
import triton.language as tl

from carpool.kernels.quick import quick
from carpool.kernels.signals import MARKS, count_sent, end_of, send, wait


@triton.jit
def _target(row, step, own, token, tokens, W: tl.constexpr):  # type: ignore[no-untyped-def]
    """The rows of a tile's tokens on the `step`-th rank after the own one; -1: not visited, or no such rank."""
    peer = (own + step) % W
    inside = (token < tokens) & (step < W)
    return tl.load(row + peer.to(tl.int64) * tokens + token, mask=inside, other=-1)


@triton.jit
def _buffer(bases, step, own, at, element, W: tl.constexpr):  # type: ignore[no-untyped-def]
    address = tl.load(bases + (own + step) % W) + at
    return tl.multiple_of(address.to(tl.pointer_type(element)), 16)


@triton.jit
def _store(buffer, target, column, value, PITCH: tl.constexpr, END: tl.constexpr):  # type: ignore[no-untyped-def]
    at = target.to(tl.int64)[:, None] * PITCH + column[None, :]
    tl.store(buffer + at, value, mask=(target >= 0)[:, None] & (column < END)[None, :])


@triton.jit
def _load(  # type: ignore[no-untyped-def]
    x, tile, tokens, PITCH: tl.constexpr, BEGIN: tl.constexpr, END: tl.constexpr, BT: tl.constexpr, BH: tl.constexpr
):
    """(value, token, column) of a tile; nothing past the last one."""
    across: tl.constexpr = (END - BEGIN + BH - 1) // BH
    token = (tile // across) * BT + tl.arange(0, BT)
    column = BEGIN + (tile % across) * BH + tl.arange(0, BH)
    inside = (token < tokens)[:, None] & (column < END)[None, :]
    return tl.load(x + token.to(tl.int64)[:, None] * PITCH + column[None, :], mask=inside, other=0), token, column


@triton.jit
def _send_rows(  # type: ignore[no-untyped-def]
    x,
    row,
    bases,
    x_at,
    tokens,
    own,
    flag_at,
    mark,
    length,
    PITCH: tl.constexpr,
    BEGIN: tl.constexpr,
    END: tl.constexpr,
    W: tl.constexpr,
    WP: tl.constexpr,
    BT: tl.constexpr,
    BH: tl.constexpr,
    ROWS: tl.constexpr,
    PARTED: tl.constexpr,
):
    """Send words BEGIN to END of every token of PITCH words, by ROWS programs. If PARTED, with a signal at `flag_at`
    after each `length` tokens: mark + number of parts sent."""
    across: tl.constexpr = (END - BEGIN + BH - 1) // BH
    tiles = tl.cdiv(tokens, BT) * across
    value, token, column = _load(x, tl.program_id(0), tokens, PITCH, BEGIN, END, BT, BH)
    for tile in range(tl.program_id(0), tiles, ROWS):
        # All loads precede the stores, and the compiler must not reorder them: they are then in flight together.
        following, next_token, next_column = _load(x, tile + ROWS, tokens, PITCH, BEGIN, END, BT, BH)
        # Ranks start with different peers, so that not all write to the same one. Three peers at a time.
        for step in tl.static_range(1, W, 3):
            target0 = _target(row, step, own, token, tokens, W)
            target1 = _target(row, step + 1, own, token, tokens, W)
            target2 = _target(row, step + 2, own, token, tokens, W)
            buffer0 = _buffer(bases, step, own, x_at, tl.int32, W)
            buffer1 = _buffer(bases, step + 1, own, x_at, tl.int32, W)
            buffer2 = _buffer(bases, step + 2, own, x_at, tl.int32, W)
            _store(buffer0, target0, column, value, PITCH, END)
            _store(buffer1, target1, column, value, PITCH, END)
            _store(buffer2, target2, column, value, PITCH, END)
        value, token, column = following, next_token, next_column
        if PARTED:
            # A tile belongs to the part of its first token. The last part ends with the program.
            sent = (tile + ROWS) // across * BT // length
            if (tile + ROWS < tiles) & (sent > tile // across * BT // length):
                send(bases, flag_at, mark + sent, W, WP)


@triton.jit
def _store_choices(  # type: ignore[no-untyped-def]
    bases,
    step,
    own,
    choice_at,
    target,
    chosen,
    bits,
    K: tl.constexpr,
    KP: tl.constexpr,
    S: tl.constexpr,
    W: tl.constexpr,
):
    column = tl.arange(0, 2 * KP)
    is_weight = (column >= KP)[None, :]
    choice = column % KP
    peer = (own + step) % W
    here = (chosen >= 0) & (chosen // S == peer)
    word = tl.where(is_weight, tl.where(here, bits, 0), tl.where(here, chosen % S, -1))
    at = target.to(tl.int64)[:, None] * (2 * K) + (is_weight.to(tl.int32) * K + choice[None, :])
    buffer = _buffer(bases, step, own, choice_at, tl.int32, W)
    tl.store(buffer + at, word, mask=(target >= 0)[:, None] & (choice < K)[None, :])


@triton.jit
def send_choices(  # type: ignore[no-untyped-def]
    slot,
    weight,
    row,
    bases,
    choice_at,
    tokens,
    capacity,
    most,
    own,
    S: tl.constexpr,
    K: tl.constexpr,
    KP: tl.constexpr,
    W: tl.constexpr,
    BC: tl.constexpr,
    FIRST: tl.constexpr,
):
    """Row r has 2 K words of choices: K slots, then the bits of K weights. The own slab has a row for every token."""
    column = tl.arange(0, 2 * KP)
    choice = column % KP
    for block in range(tl.program_id(0) - FIRST, tl.cdiv(tokens, BC), tl.num_programs(0) - FIRST):
        token = block * BC + tl.arange(0, BC)
        inside = (token < tokens)[:, None] & (choice < K)[None, :]
        at = token.to(tl.int64)[:, None] * K + choice[None, :]
        chosen = tl.load(slot + at, mask=inside, other=-1)
        bits = tl.load(weight + at, mask=inside & (column >= KP)[None, :], other=0.0).to(tl.int32, bitcast=True)
        at_home = tl.where(token < tl.minimum(tokens, most), (W - 1) * capacity + token, -1)
        for step in tl.static_range(1, W, 3):
            target0 = _target(row, step, own, token, tokens, W)
            target1 = _target(row, step + 1, own, token, tokens, W)
            target2 = _target(row, step + 2, own, token, tokens, W)
            _store_choices(bases, step, own, choice_at, target0, chosen, bits, K, KP, S, W)
            _store_choices(bases, step + 1, own, choice_at, target1, chosen, bits, K, KP, S, W)
            _store_choices(bases, step + 2, own, choice_at, target2, chosen, bits, K, KP, S, W)
        _store_choices(bases, 0, own, choice_at, at_home, chosen, bits, K, KP, S, W)


@triton.jit
def unpack(  # type: ignore[no-untyped-def]
    base,
    choice_at,
    count_at,
    begins_at,
    slot_out,
    weight_out,
    group_out,
    parts,
    capacity,
    most,
    K: tl.constexpr,
    KP: tl.constexpr,
    W: tl.constexpr,
    PARTED: tl.constexpr,
    BU: tl.constexpr,
    FIRST: tl.constexpr,
):
    """Copy each row's slots and weights; if PARTED, also slot * parts + part (-1: none)."""
    choices = (base + choice_at).to(tl.pointer_type(tl.int32))
    counts = (base + count_at).to(tl.pointer_type(tl.int32))
    choice = tl.arange(0, KP)
    rows = (W - 1) * capacity + most
    for block in range(tl.program_id(0) - FIRST, tl.cdiv(rows, BU), tl.num_programs(0) - FIRST):
        at_row = block * BU + tl.arange(0, BU)
        inside = at_row < rows
        slab = tl.minimum(at_row // capacity, W - 1)
        came = tl.load(counts + slab, mask=inside, other=0, cache_modifier=".cg")
        valid = (inside & (at_row - slab * capacity < came))[:, None] & (choice < K)[None, :]
        at = at_row.to(tl.int64)[:, None] * (2 * K) + choice[None, :]
        slot = tl.load(choices + at, mask=valid, other=-1, cache_modifier=".cg")
        bits = tl.load(choices + at + K, mask=valid, other=0, cache_modifier=".cg")
        out = at_row.to(tl.int64)[:, None] * K + choice[None, :]
        written = inside[:, None] & (choice < K)[None, :]
        tl.store(slot_out + out, slot, mask=written)
        tl.store(weight_out + out, bits.to(tl.float32, bitcast=True), mask=written)
        if PARTED:
            begins = (base + begins_at).to(tl.pointer_type(tl.int32)) + slab
            part = tl.zeros([BU], tl.int32)
            for number in range(1, parts):
                begin = tl.load(begins + number * W, mask=inside, other=0, cache_modifier=".cg")
                part += (at_row - slab * capacity >= begin).to(tl.int32)
            tl.store(group_out + out, tl.where(slot < 0, -1, slot * parts + part[:, None]), mask=written)


@triton.jit
def send_counts(bases, count_at, count, tokens, most, own, W: tl.constexpr, WP: tl.constexpr):  # type: ignore[no-untyped-def]
    """Send every rank the number of tokens from here, and the largest capacity that any slab would need."""
    peer = tl.arange(0, WP)
    here = peer < W
    rows = tl.load(count + peer, mask=here, other=0)
    fullest = tl.max(tl.load(count + W + peer, mask=here, other=0), 0)
    base = tl.load(bases + peer, mask=here, other=0)
    counts = (base + count_at).to(tl.pointer_type(tl.int32))
    slab = (own - peer - 1 + W) % W
    tl.store(counts + slab, tl.where(peer == own, tl.minimum(tokens, most), rows), mask=here)
    tl.store(counts + W + slab, tl.zeros([WP], tl.int32) + fullest, mask=here)


@triton.jit
def note_counts(base, count_at, received, needed, W: tl.constexpr, WP: tl.constexpr):  # type: ignore[no-untyped-def]
    """Store the counts that all ranks sent by `send_counts`; 0 for the own tokens, which are not sent."""
    peer = tl.arange(0, WP)
    counts = (base + count_at).to(tl.pointer_type(tl.int32))
    came = tl.load(counts + peer, mask=peer < W, other=0, volatile=True)
    wanted = tl.load(counts + W + peer, mask=peer < W, other=0, volatile=True)
    tl.store(received + peer, tl.where(peer == W - 1, 0, came), mask=peer < W)
    tl.atomic_max(needed, tl.max(wanted, 0))


@quick
@triton.jit(do_not_specialize=["tokens", "blocks", "capacity", "most", "own", "verb", "length"])
def dispatch_kernel(  # type: ignore[no-untyped-def]
    x,
    slot,
    weight,
    row,
    count,
    choices,
    bases,
    epochs,
    status,
    host_status,
    needed,
    tally,
    slot_out,
    weight_out,
    received,
    tokens,
    blocks,
    capacity,
    most,
    own,
    timeout,
    verb,
    length,
    x_at,
    choice_at,
    count_at,
    arrived_at,
    PITCH: tl.constexpr,
    MAIN: tl.constexpr,
    S: tl.constexpr,
    K: tl.constexpr,
    KP: tl.constexpr,
    W: tl.constexpr,
    WP: tl.constexpr,
    ROWS: tl.constexpr,
    OTHERS: tl.constexpr,
    CHOICES: tl.constexpr,
    PARTED: tl.constexpr,
    MAX_CTAS: tl.constexpr,
    PAD: tl.constexpr,
    BT: tl.constexpr,
    BH: tl.constexpr,
    BT_TAIL: tl.constexpr,
    BH_TAIL: tl.constexpr,
    BC: tl.constexpr,
    BU: tl.constexpr,
    SEND: tl.constexpr,
    RECEIVE: tl.constexpr,
    SPIN: tl.constexpr,
):
    """ROWS programs send tokens, OTHERS more send choices (0: the first do that too); the same on every rank.

    x: (T, PITCH) words, of which MAIN first, in wide tiles, then the rest (the scales of FP8). slot, weight: (T, K).
    row: (W, T), count: (2, W), choices: (blocks, W): from the plan. bases: (W,) addresses of the ranks' leases; *_at:
    byte offsets in a lease. epochs: (2,) of this lease. needed: (1,) the largest capacity that any rank would have
    needed so far. tally: (2, W) int64, tokens and choices. slot_out, weight_out: (R, K). received: (W,) tokens in each
    slab.
    CHOICES: False for gradients, whose slots are known, and for a dispatch in parts. length: tokens of a part, if
    PARTED.
    """
    LAST: tl.constexpr = ROWS + OTHERS - 1
    FIRST: tl.constexpr = ROWS if OTHERS > 0 else 0
    program = tl.program_id(0)
    peer = tl.arange(0, WP)
    epoch = tl.load(epochs) + 1
    if SEND:
        if CHOICES and program >= FIRST:
            send_choices(slot, weight, row, bases, choice_at, tokens, capacity, most, own, S, K, KP, W, BC, FIRST)
        if program < ROWS:
            flag_at = arrived_at + (own * MAX_CTAS + program) * 4
            mark = end_of(epoch) - MARKS
            _send_rows(
                x, row, bases, x_at, tokens, own, flag_at, mark, length, PITCH, 0, MAIN, W, WP, BT, BH, ROWS, PARTED
            )
            if MAIN < PITCH:
                _send_rows(
                    x, row, bases, x_at, tokens, own, flag_at, mark, length, PITCH, MAIN, PITCH, W, WP, BT_TAIL,
                    BH_TAIL, ROWS, False,
                )  # fmt: skip
        if CHOICES and program == LAST:
            send_counts(bases, count_at, count, tokens, most, own, W, WP)
        send(bases, arrived_at + (own * MAX_CTAS + program) * 4, end_of(epoch), W, WP)
        if program == LAST:
            rows = tl.load(count + peer, mask=peer < W, other=0)
            count_sent(tally, rows, choices, blocks, W, WP)
    if RECEIVE:
        base = tl.load(bases + own)
        mark = end_of(epoch)
        # One program waits for everything. Those that unpack wait for the choices alone, which arrive long before the
        # tokens, if other programs send them.
        awaited: tl.constexpr = OTHERS if OTHERS > 0 else ROWS
        if program == 0:
            wait(base, arrived_at, mark, timeout, status, host_status, verb, W, LAST + 1, MAX_CTAS, PAD, SPIN)
        elif CHOICES and program >= FIRST:
            sent_at = arrived_at + FIRST * 4
            wait(base, sent_at, mark, timeout, status, host_status, verb, W, awaited, MAX_CTAS, PAD, SPIN)
        if CHOICES and program >= FIRST:
            unpack(
                base, choice_at, count_at, 0, slot_out, weight_out, slot_out, 1, capacity, most, K, KP, W, False, BU,
                FIRST,
            )  # fmt: skip
        if program == 0:
            if CHOICES:
                note_counts(base, count_at, received, needed, W, WP)
            # The combine of this lease reads this epoch, and sets the epoch of the next dispatch.
            tl.store(epochs + 1, epoch)


@quick
@triton.jit(do_not_specialize=["tokens", "capacity", "most", "own", "verb", "parts"])
def choices_kernel(  # type: ignore[no-untyped-def]
    slot, weight, row, count, begins, bases, epochs, status, host_status, needed, slot_out, weight_out, group_out,
    begins_out, received, tokens, capacity, most, own, timeout, verb, parts, choice_at, count_at, begins_at, chosen_at,
    S: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, W: tl.constexpr, WP: tl.constexpr,
    PP: tl.constexpr, CTAS: tl.constexpr, MAX_CTAS: tl.constexpr, PAD: tl.constexpr, BC: tl.constexpr,
    BU: tl.constexpr, SEND: tl.constexpr, RECEIVE: tl.constexpr, SPIN: tl.constexpr,
):  # fmt: skip
    """CTAS programs. begins: (parts + 1, W) int32 of the plan, by rank; begins_out: the same, by slab of this rank.
    group_out: (R, K). PP: at least parts + 1. The rest as in `dispatch_kernel`."""
    program = tl.program_id(0)
    mark = end_of(tl.load(epochs) + 1)
    part, peer = tl.arange(0, PP)[:, None], tl.arange(0, WP)[None, :]
    there = (part <= parts) & (peer < W)
    if SEND:
        send_choices(slot, weight, row, bases, choice_at, tokens, capacity, most, own, S, K, KP, W, BC, 0)
        if program == 0:
            send_counts(bases, count_at, count, tokens, most, own, W, WP)
            begin = tl.load(begins + part * W + peer, mask=there, other=0)
            base = tl.load(bases + peer + part * 0, mask=there, other=0)
            target = (base + begins_at).to(tl.pointer_type(tl.int32)) + part * W + (own - peer - 1 + W) % W
            tl.store(target, begin, mask=there)
        send(bases, chosen_at + (own * MAX_CTAS + program) * 4, mark, W, WP)
    if RECEIVE:
        base = tl.load(bases + own)
        wait(base, chosen_at, mark, timeout, status, host_status, verb, W, CTAS, MAX_CTAS, PAD, SPIN)
        unpack(
            base, choice_at, count_at, begins_at, slot_out, weight_out, group_out, parts, capacity, most, K, KP, W,
            True, BU, 0,
        )  # fmt: skip
        if program == 0:
            note_counts(base, count_at, received, needed, W, WP)
            came = (base + begins_at).to(tl.pointer_type(tl.int32)) + part * W + peer
            tl.store(begins_out + part * W + peer, tl.load(came, mask=there, other=0, volatile=True), mask=there)
