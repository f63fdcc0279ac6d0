"""Signals between ranks: how one kernel tells another, on another GPU, that rows are in place.

A signal is one int32 in the memory of whoever waits for it. Senders write, waiters poll their own memory, so waiting
costs no traffic on the links. What is written is a *mark*, a number that only grows: nothing has to be reset, a signal
that comes early stays, and a CUDA graph can be replayed, because the epoch behind it is counted on the device.

    sender                                        waiter
    ... stores rows into peers ...                loop: are all flags >= mark?  (acquire, at system scope)
    barrier of the program's threads              barrier of the program's threads
    release, at system scope: flag = mark         ... reads the rows ...

Ride number `epoch` of a lease ends with mark 16 * epoch. If it has parts, its part p is there at 16 * (epoch - 1) + p +
1, so up to 16 parts have marks of their own, and rides with other parts, or none, may follow on the same lease. Marks
are compared by the sign of their difference, which stays right when int32 overflows.

Each program (CTA) of a dispatch raises a flag of its own at every peer, and a receiver waits for all of them: that
saves counting the programs that have finished before anything can be said, 2 us on an H200.

Every wait is bounded. A program that waits in vain notes which ranks are missing, in host memory that the process reads
at its next call (`Buffers.check`), and goes on without them; programs after it do not wait any more. Whether to stop is
decided from one reduced value, because threads that left a loop at different turns would meet different barriers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from carpool.kernels import MAX_PARTS

# In the interpreter no program may wait for another: everything it waits for has been sent before.
SPIN = not triton.knobs.runtime.interpret
MARKS = tl.constexpr(MAX_PARTS)  # of one ride
# Contribution of a lane that is late and out of patience; more than all lanes that are merely late.
EXPIRED = tl.constexpr(1 << 20)


@triton.jit
def nanoseconds():  # type: ignore[no-untyped-def]
    return tl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1)


@triton.jit
def _read(flags, SPIN: tl.constexpr):  # type: ignore[no-untyped-def]
    """Flags as they are now; what their senders wrote before is visible to this thread then."""
    if SPIN:
        return tl.inline_asm_elementwise(
            "ld.acquire.sys.global.b32 $0, [$1];", "=r,l", [flags], dtype=tl.int32, is_pure=False, pack=1
        )
    else:
        return tl.load(flags)


@triton.jit
def end_of(epoch):  # type: ignore[no-untyped-def]
    """The mark of a ride that has no parts, or of the end of all its parts."""
    return epoch * MARKS


@triton.jit
def send(bases, at, mark, W: tl.constexpr, WP: tl.constexpr):  # type: ignore[no-untyped-def]
    """Write `mark` at byte `at` of every rank's buffer, after everything that this program wrote before.

    bases: (W,) int64 addresses of the ranks' buffers. WP: W rounded up to a power of two."""
    tl.debug_barrier()
    peer = tl.arange(0, WP)
    address = tl.load(bases + peer, mask=peer < W, other=0) + at
    flag = address.to(tl.pointer_type(tl.int32))
    tl.atomic_xchg(flag, tl.zeros([WP], tl.int32) + mark, mask=peer < W, sem="release", scope="sys")


@triton.jit
def wait(  # type: ignore[no-untyped-def]
    base,
    at,
    mark,
    timeout,
    status,
    host_status,
    verb,
    W,
    EACH,
    STRIDE: tl.constexpr,
    PAD: tl.constexpr,
    SPIN: tl.constexpr,
):
    """Wait until the EACH flags of each of W sources, at byte `at` of the own buffer, are at least `mark`.

    timeout: nanoseconds. status: int32 on the device, not 0 once a wait has failed. host_status: (1 + W,) int32 in host
    memory: [0] becomes 1, [1 + source] the verb in which that rank was missing. STRIDE: flags from source to source.
    PAD: W * EACH rounded up. SPIN: whether to wait at all; the interpreter runs one program after the other, so
    there every signal must have been sent before."""
    lane = tl.arange(0, PAD)
    # Lanes past the last flag look at the last one.
    flag = tl.minimum(lane, W * EACH - 1)
    source = flag // EACH
    flags = (base + at).to(tl.pointer_type(tl.int32)) + source * STRIDE + flag % EACH
    late = (_read(flags, SPIN) - mark < 0).to(tl.int32)
    total = tl.sum(late, 0)
    # After a failure nobody waits, and nobody is blamed for what is merely on its way.
    failed = tl.load(status)
    if SPIN:
        limit = tl.where(failed != 0, 0, timeout)
        begin = nanoseconds()
        while (total > 0) & (total < EXPIRED):
            late = (_read(flags, SPIN) - mark < 0).to(tl.int32)
            expired = ((nanoseconds() - begin) > limit).to(tl.int32)
            total = tl.sum(late * (1 + expired * EXPIRED), 0)
    if (total > 0) & (failed == 0):
        tl.store(host_status + 1 + source, tl.zeros([PAD], tl.int32) + verb, mask=late > 0)
        tl.store(status, 1)
        tl.store(host_status, 1)
    tl.debug_barrier()


@triton.jit
def wait_part(  # type: ignore[no-untyped-def]
    flags, epochs, part, timeout, status, host_status, verb, sources, each, STRIDE: tl.constexpr, PAD: tl.constexpr,
    SPIN: tl.constexpr,
):  # fmt: skip
    """Wait, in a kernel that reads rows, until part `part` of those under way has come from all sources.

    flags, epochs: of the lease; its ride has not been combined yet, so it is the one after the last that was. The rest
    as in `wait`."""
    mark = end_of(tl.load(epochs)) + part + 1
    wait(flags.to(tl.int64), 0, mark, timeout, status, host_status, verb, sources, each, STRIDE, PAD, SPIN)


@triton.jit
def count_sent(tally, rows, choices, blocks, W: tl.constexpr, WP: tl.constexpr):  # type: ignore[no-untyped-def]
    """Add rows (WP,) and the sum over blocks of choices (blocks, W) to tally (2, W) int64."""
    peer = tl.arange(0, WP)
    here = peer < W
    total = tl.zeros([WP], tl.int64)
    for start in range(0, blocks, 32):
        block = start + tl.arange(0, 32)
        inside = (block < blocks)[:, None] & here[None, :]
        total += tl.sum(tl.load(choices + block[:, None] * W + peer[None, :], mask=inside, other=0), 0).to(tl.int64)
    tl.atomic_add(tally + peer, rows.to(tl.int64), mask=here)
    tl.atomic_add(tally + W + peer, total, mask=here)
