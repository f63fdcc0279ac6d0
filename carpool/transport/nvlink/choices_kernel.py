"""Choices that go ahead of rows which ride in parts: then the experts can be told apart before a row is there.

    send      beside each row of every rank its K slots and weights, how many rows come from here, and where in them
              each part begins (plan_kernel.py)
    wait      for those of all peers
    unpack    slots and weights into tensors of the layer, and of each choice its group, slot * parts + part, by which
              pairs are sorted

    2 parts, rows 0..2 of a slab, of which row 2 is the first of part 1      slots [[3, -1], [0, 1], [3, 0]]
                                                                             groups [[6, -1], [0, 2], [7, 1]]

It is a kernel of its own because the computation waits for it, but not for the rows, which a dispatch without choices
sends meanwhile. It has flags of its own. Peers may write choices into a lease as they may rows (dispatch_kernel.py).
"""

from __future__ import annotations

import triton
import triton.language as tl

from carpool.kernels.quick import quick
from carpool.kernels.signals import end_of, send, wait
from carpool.transport.nvlink.dispatch_kernel import note_counts, send_choices, send_counts, unpack


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
