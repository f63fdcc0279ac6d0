"""Keeping the rows that arrived until the backward needs them.

What a transport gives as a tensor of its own (`Arrivals.leased` is False) is kept as it is. Rows in a leased buffer
will be overwritten by the next dispatch, so they are copied: those that came, not the places of those that could have.
A rank's rows for itself are its own tokens, which autograd keeps anyway. Experts that compute in FP8 read packets
(`Arrivals.packed`), and packets are what is kept for them: half the bytes.

    with an arena     memory follows the rows that came
    without           a tensor of the worst case: a slab for each other rank

Cost on an H200: reading and writing 120 MB, about 60 us, beside a dispatch of 300.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from carpool.memory.arena import Arena, Rows
from carpool.memory.arrivals import Arrivals


def keep_rows(arrivals: Arrivals, arena: Arena | None) -> Rows:
    """The rows of `arrivals`, to be read after its lease has gone to others."""
    if not arrivals.leased:
        return arrivals.rows
    x_RH, came_W = arrivals.x_RH, arrivals.came_W
    width, slab = x_RH.shape[1], arrivals.slab
    if came_W is None:
        return Rows(x_RH.clone(), width, home=arrivals.home_TH, home_row=arrivals.home_row)
    if arena is None:
        kept = Rows(torch.empty_like(x_RH), width)
    else:
        kept = arena.reserve(width, x_RH.dtype, came_W, slab)
    if x_RH.is_cuda:
        from carpool.memory.keep_kernel import copy_slabs

        copy_slabs(x_RH, came_W, slab, kept)
    else:
        for number, came in enumerate(came_W.tolist()):
            start = number * slab * width if kept.start is None else int(kept.start[number])
            if start >= 0:
                # `.data`: what other layers keep in the arena must not look modified to autograd.
                source = x_RH[number * slab : number * slab + came].reshape(-1)
                kept.data.data.view(-1)[start : start + source.numel()] = source
    return replace(kept, home=arrivals.home_TH, home_row=arrivals.home_row)
