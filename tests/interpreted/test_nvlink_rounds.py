"""The verbs of the `nvlink` transport one after another, in Triton's interpreter: several rounds on the same leases,
dispatches in flight at the same time, and what was counted. tests/gpu/nvlink_rides.py has the rides.

Written as test_nvlink.py is. Sums are float32 here: the interpreter cuts a float32 off where
a GPU rounds it to bfloat16.
"""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from carpool import ExpertLayout, assign
from carpool.metrics.counters import Traffic
from carpool.placement import VERBS, predict
from carpool.transport.nvlink import NVLink, NVLinkOptions
from tests.gpu.nvlink_rides import PATTERNS, Case, Mismatches, Ride, Shape, draw_routings, draw_sizes
from tests.interpreted.emulated import emulate
from tests.layouts import EXPERTS, layout_of

CPU = torch.device("cpu")


def transports_of(shape: Shape, **options: object) -> list[NVLink]:
    row_bytes = shape.hidden * shape.dtype.itemsize
    sizes = {"capacity": shape.tokens, "row_bytes": row_bytes, "top_k": shape.top_k}
    return emulate(shape.ranks, shape.slots, **sizes, **options)  # type: ignore[arg-type]


def draw_cases(shape: Shape, sizes: list[tuple[int, ...]], seed: int) -> list[Case]:
    generator = torch.Generator().manual_seed(seed)
    slot, weight = draw_routings(shape, sizes, generator, CPU)
    rows = torch.randn(len(sizes), 2, shape.ranks, shape.tokens, shape.hidden, generator=generator).to(shape.dtype)
    return [Case(size, slot[i], weight[i], rows[i, 0], rows[i, 1]) for i, size in enumerate(sizes)]


def rides_of(
    transports: list[NVLink], shape: Shape, case: Case, found: Mismatches, traffic: list[Traffic] | None = None
) -> list[Ride]:
    traffic = traffic or [Traffic(shape.ranks, rank) for rank in range(shape.ranks)]
    return [Ride(t, shape, case, traffic[rank], found) for rank, t in enumerate(transports)]


def step(rides: list[Ride]) -> None:
    """The next step of a case: every rank sends, then every rank receives."""
    pending = [ride.start() for ride in rides]
    for ride, sent in zip(rides, pending, strict=True):
        ride.finish(sent)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_two_dispatches_in_flight(pattern: str) -> None:
    shape, found = Shape(3, 16, 3, 2, torch.float32, 6), Mismatches(CPU)
    transports = transports_of(shape, num_leases=2)
    draw = random.Random(pattern)
    sizes = [draw_sizes(shape.ranks, shape.tokens, draw) for _ in range(4)]
    cases = draw_cases(shape, sizes, seed=len(pattern))
    for first in range(0, len(cases), 2):
        rides = {letter: rides_of(transports, shape, cases[first + i], found) for i, letter in enumerate("ab")}
        for letter in pattern:
            step(rides[letter])
    assert not found.counts.any(), str(found)
    assert all(lease.epochs[0] == lease.epochs[1] > 0 for lease in transports[0].buffers._leases)


def test_three_leases_and_any_order_of_combines() -> None:
    shape, found = Shape(2, 8, 2, 3, torch.float32, 4), Mismatches(CPU)
    transports = transports_of(shape, num_leases=3)
    for seed, order in enumerate(((2, 0, 1), (1, 2, 0))):
        rides = [rides_of(transports, shape, c, found) for c in draw_cases(shape, [(4, 2), (0, 4), (3, 3)], seed)]
        for several in (range(3), order, order[::-1], order):
            for number in several:
                step(rides[number])
    assert not found.counts.any(), str(found)


def test_a_wrong_byte_is_noticed() -> None:
    """Of what a peer wrote, and of what a peer reads: the rides would otherwise prove nothing."""
    shape = Shape(2, 8, 1, 2, torch.float32, 4)
    case = Case(
        (4, 4), torch.tensor([[[2]] * 4, [[0]] * 4], dtype=torch.int32), torch.full((2, 4, 1), 0.5),
        *torch.randn(2, 2, 4, 8),
    )  # fmt: skip
    for spoil, kind in (("tokens", "rows"), ("partial", "sums")):
        found, transports = Mismatches(CPU), transports_of(shape, num_leases=1)
        rides = rides_of(transports, shape, case, found)
        if spoil == "partial":
            step(rides)
        pending = [ride.start() for ride in rides]
        lease = transports[0].buffers._leases[0]
        lease.bytes[getattr(lease.regions, spoil)] ^= 64  # of the first row from rank 1
        for ride, sent in zip(rides, pending, strict=True):
            ride.finish(sent)
        assert f"'{kind}': 1" in str(found), str(found)


COUNTED = [
    ("contiguous", 4, (7, 0, 11, 3), 3, torch.bfloat16),
    ("permuted", 4, (7, 0, 11, 3), 2, torch.float32),
    ("uneven", 4, (2, 5, 0, 3), 3, torch.float32),
    ("uneven", 4, (2, 5, 0, 3), 8, torch.bfloat16),
    ("permuted", 4, (4, 1, 0, 6), 4, torch.float32),
    ("contiguous", 2, (0, 4), 1, torch.float32),
    ("uneven", 1, (6,), 4, torch.float32),
    ("sliced 2", 4, (7, 0, 5, 3), 2, torch.float32),
    ("eight ranks", 8, (1, 0, 3, 2, 0, 0, 4, 1), 5, torch.float32),
]


@pytest.mark.parametrize(("name", "num_ranks", "sizes", "top_k", "dtype"), COUNTED)
def test_what_is_counted_is_what_is_predicted(
    name: str, num_ranks: int, sizes: tuple[int, ...], top_k: int, dtype: torch.dtype
) -> None:
    """Also with slots that hold no expert, and ranks that hold none; a plan is not exchanged, so it has no bytes."""
    layout = ExpertLayout.contiguous(16, 8) if num_ranks == 8 else layout_of(name, num_ranks)
    generator = torch.Generator().manual_seed(0)
    hidden = 20 if dtype == torch.float32 else 24
    shape = Shape(num_ranks, hidden, top_k * layout.slices, layout.slots_per_rank, dtype, max(sizes))
    case = draw_cases(shape, [sizes], 0)[0]
    routings = []
    for rank, size in enumerate(sizes):
        picks = [torch.randperm(EXPERTS, generator=generator)[:top_k] for _ in range(size)]
        expert_TK = torch.stack(picks).int() if picks else torch.zeros(0, top_k, dtype=torch.int32)
        expert_TK[torch.rand(expert_TK.shape, generator=generator) < 0.2] = -1
        routings.append(expert_TK)
        case.slot_WTK[rank] = -1
        case.slot_WTK[rank, :size] = assign(expert_TK, layout)

    traffic, found = [Traffic(num_ranks, rank) for rank in range(num_ranks)], Mismatches(CPU)
    rides = rides_of(transports_of(shape), shape, case, found, traffic)
    for _ in range(4):
        step(rides)
    wrong = found.counts.clone()
    if dtype == torch.bfloat16:
        wrong[[4, 6]] = 0  # sums: see the module's docstring
    assert not wrong.any(), str(found)
    predicted = predict("dedup", routings, layout, hidden=hidden, element_size=dtype.itemsize)
    plain = predict("alltoall", routings, layout, hidden=hidden, element_size=dtype.itemsize)
    np.testing.assert_array_equal([t.rows["dispatch"] for t in traffic], predicted.rows_WW)
    for verb in VERBS[1:]:
        np.testing.assert_array_equal([t.bytes[verb] for t in traffic], predicted.bytes_WW[verb], err_msg=verb)
        assert sum(t.baseline[verb] for t in traffic) == plain.bytes_remote(verb), verb
    assert not any(sum(t.bytes["plan"]) for t in traffic)


@pytest.mark.parametrize(("hidden", "dtype"), [(12, torch.bfloat16), (37, torch.float32), (1, torch.float64)])
def test_rows_that_are_no_multiple_of_16_bytes_are_refused(hidden: int, dtype: torch.dtype) -> None:
    shape = Shape(2, hidden, 1, 1, dtype, 2)
    transport = transports_of(shape)[0]
    route = transport.plan(torch.zeros(2, 1, dtype=torch.int32), torch.ones(2, 1), Traffic(2, 0))
    with pytest.raises(ValueError, match=f"{hidden} x {dtype} are .* bytes.*multiple of 8.*'dedup'"):
        transport.dispatch(torch.zeros(2, hidden, dtype=dtype), route)


def test_a_lease_that_others_have_taken_is_not_released_by_a_late_wait() -> None:
    """A combine may be waited for after the next dispatch has taken its lease. One rank, which waits for nobody, so
    that its combine can be one kernel here too."""
    shape, found = Shape(1, 8, 1, 2, torch.float32, 4), Mismatches(CPU)
    transport = transports_of(shape, num_leases=1)[0]
    first, second = (Ride(transport, shape, case, Traffic(1, 0), found) for case in draw_cases(shape, [(4,), (3,)], 0))
    first.step()
    first.transport = NVLink(None, shape.slots, NVLinkOptions(combine_ctas=1), transport.buffers)
    pending = first.start()
    second.step()  # takes the lease
    first.finish(pending)
    first.transport = transport
    with pytest.raises(RuntimeError, match="num_leases"):
        first.start()
    second.step()
    assert not found.counts.any(), str(found)
