"""Kernels for spare slots in symmetric memory: exchange of loads, push of experts, sum of their gradients, and signals.

`peer_slots.py` has the order in which they are launched. Each piece of memory has an epoch on the device, the number of
its use that is under way, which is the mark of its signals (`carpool.kernels.signals`): so a CUDA graph may repeat
them. `home` is (E,) int32, the place of each expert among the homes of all ranks: rank * HOMES + row. `expert` is a
plan's (W * S,) int32, the expert in each spare slot, -1: none.
"""

from __future__ import annotations

import triton
import triton.language as tl

from carpool.kernels.quick import quick
from carpool.kernels.signals import send, wait


@quick
@triton.jit(do_not_specialize=["own", "verb"])
def gate_kernel(  # type: ignore[no-untyped-def]
    bases, epoch, status, host_status, own, timeout, verb, wait_at, send_at, WAIT: tl.constexpr, NEXT: tl.constexpr,
    SEND: tl.constexpr, W: tl.constexpr, WP: tl.constexpr, EACH: tl.constexpr, PAD: tl.constexpr, SPIN: tl.constexpr,
):  # fmt: skip
    """One program: if WAIT, until the EACH flags of all ranks at byte `wait_at` have this epoch; if NEXT, begin the
    next epoch; if SEND, raise this rank's flag at byte `send_at` of all ranks."""
    mark = tl.load(epoch)
    if WAIT:
        wait(tl.load(bases + own), wait_at, mark, timeout, status, host_status, verb, W, EACH, EACH, PAD, SPIN)
    if NEXT:
        mark += 1
        tl.store(epoch, mark)
    if SEND:
        send(bases, send_at + own * 4, mark, W, WP)


@quick
@triton.jit(do_not_specialize=["own", "verb"])
def loads_kernel(  # type: ignore[no-untyped-def]
    load, gathered, bases, epoch, status, host_status, own, timeout, verb, came_at, loads_at, E: tl.constexpr,
    W: tl.constexpr, WP: tl.constexpr, BLOCK: tl.constexpr, SEND: tl.constexpr, RECEIVE: tl.constexpr,
    SPIN: tl.constexpr,
):  # fmt: skip
    """One program: write load (E,) to all ranks, and read (W, E) of all. Epochs take turns with two places, because a
    rank may send its next loads while another one still reads."""
    mark = tl.load(epoch)
    if SEND:
        mark += 1
    place_at = loads_at + (mark & 1) * (W * E * 4)
    if SEND:
        for start in range(0, E, BLOCK):
            column = start + tl.arange(0, BLOCK)
            value = tl.load(load + column, mask=column < E, other=0)
            for peer in range(W):
                target = (tl.load(bases + peer) + place_at).to(tl.pointer_type(tl.int32)) + own * E
                tl.store(target + column, value, mask=column < E)
        send(bases, came_at + own * 4, mark, W, WP)
        tl.store(epoch, mark)
    if RECEIVE:
        wait(tl.load(bases + own), came_at, mark, timeout, status, host_status, verb, W, 1, 1, WP, SPIN)
        source = (tl.load(bases + own) + place_at).to(tl.pointer_type(tl.int32))
        for start in range(0, W * E, BLOCK):
            column = start + tl.arange(0, BLOCK)
            tl.store(gathered + column, tl.load(source + column, mask=column < W * E, other=0), mask=column < W * E)


@quick
@triton.jit(do_not_specialize=["own"])
def push_kernel(  # type: ignore[no-untyped-def]
    rows, expert, home, bases, epoch, own, slots_at, came_at, ROW: tl.constexpr, HOMES: tl.constexpr, S: tl.constexpr,
    W: tl.constexpr, WP: tl.constexpr, CTAS: tl.constexpr, BLOCK: tl.constexpr, ALIGNED: tl.constexpr,
    LAST: tl.constexpr,
):  # fmt: skip
    """Copy rows (homes, ROW) of this rank's experts to the spare slots (S, ROW) at byte `slots_at`, a multiple of
    ALIGNED, of the ranks that hold replicas, the next rank's first; if LAST, raise a flag of each program. Rows are
    words of any integer dtype."""
    program, column = tl.program_id(0), tl.arange(0, BLOCK)
    word: tl.constexpr = rows.dtype.element_ty
    for turn in range(W * S):
        slot = (turn + (own + 1) * S) % (W * S)
        which = tl.load(expert + slot)
        row = tl.load(home + tl.maximum(which, 0)) - own * HOMES
        if (which >= 0) & (row >= 0) & (row < HOMES):
            source = rows + row.to(tl.int64) * ROW
            address = (tl.load(bases + slot // S) + slots_at).to(tl.pointer_type(word))
            address = tl.multiple_of(address, ALIGNED)
            target = address + tl.cast(slot % S, tl.int64) * ROW
            for start in range(program * BLOCK, ROW, CTAS * BLOCK):
                inside = start + column < ROW
                tl.store(target + start + column, tl.load(source + start + column, mask=inside, other=0), mask=inside)
    if LAST:
        send(bases, came_at + (own * CTAS + program) * 4, tl.load(epoch), W, WP)


@triton.jit
def _count(expert, which, end, P: tl.constexpr):  # type: ignore[no-untyped-def]
    """How many of the slots before `end` hold this expert."""
    slot = tl.arange(0, P)
    return tl.sum((tl.load(expert + slot, mask=slot < end, other=-1) == which).to(tl.int32), 0)


@quick
@triton.jit(do_not_specialize=["own", "verb"])
def sum_kernel(  # type: ignore[no-untyped-def]
    dhome, expert, home, bases, epoch, status, host_status, own, timeout, verb, slots_at, came_at, free_at,
    ROW: tl.constexpr, HOMES: tl.constexpr, S: tl.constexpr, W: tl.constexpr, WP: tl.constexpr, P: tl.constexpr,
    CTAS: tl.constexpr, BLOCK: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr, SPIN: tl.constexpr,
):  # fmt: skip
    """Add to dhome (homes, ROW), this rank's own terms, those of replicas from the spare slots (S, ROW) at byte
    `slots_at` of all ranks, in order of (rank, slot). Wait before it, if FIRST; raise a flag of each program after it,
    if LAST. P: W * S, rounded up."""
    program, column = tl.program_id(0), tl.arange(0, BLOCK)
    element: tl.constexpr = dhome.dtype.element_ty
    wide: tl.constexpr = tl.float64 if element == tl.float64 else tl.float32
    mark = tl.load(epoch)
    if FIRST:
        wait(tl.load(bases + own), came_at, mark, timeout, status, host_status, verb, W, 1, 1, WP, SPIN)
    for slot in range(W * S):
        which = tl.load(expert + slot)
        row = tl.load(home + tl.maximum(which, 0)) - own * HOMES
        # Each expert once, at its first replica.
        if (which >= 0) & (row >= 0) & (row < HOMES) & (_count(expert, which, slot, P) == 0):
            target = dhome + row.to(tl.int64) * ROW
            alone = _count(expert, which, W * S, P) == 1
            only = tl.multiple_of((tl.load(bases + slot // S) + slots_at).to(tl.pointer_type(element)), 16)
            only += tl.cast(slot % S, tl.int64) * ROW
            for start in range(program * BLOCK, ROW, CTAS * BLOCK):
                inside = start + column < ROW
                total = tl.zeros((BLOCK,), wide)
                if alone:
                    # Two terms have one sum in either order, and neither load waits for the other.
                    mine = tl.load(target + start + column, mask=inside, other=0.0)
                    its = tl.load(only + start + column, mask=inside, other=0.0)
                    total += mine.to(wide) + its.to(wide)
                else:
                    for term in range(W * S):
                        if term == own * S:
                            total += tl.load(target + start + column, mask=inside, other=0.0).to(wide)
                        if tl.load(expert + term) == which:
                            address = (tl.load(bases + term // S) + slots_at).to(tl.pointer_type(element))
                            source = tl.multiple_of(address, 16) + tl.cast(term % S, tl.int64) * ROW
                            total += tl.load(source + start + column, mask=inside, other=0.0).to(wide)
                tl.store(target + start + column, total.to(element), mask=inside)
    if LAST:
        send(bases, free_at + (own * CTAS + program) * 4, mark, W, WP)
