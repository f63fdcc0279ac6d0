"""The kernels of the `nvlink` transport in Triton's interpreter, with 2, 3, 4 and 8 ranks, against what they define.

tests/conftest.py chooses the interpreter where there is no GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from carpool.metrics.counters import Traffic
from carpool.transport import Arrivals, Codecs
from carpool.transport.nvlink import NVLink, launch
from tests.interpreted.emulated import emulate, verb


@dataclass
class Setting:
    """A routing over emulated ranks, and everything that travels, drawn at random."""

    tokens: tuple[int, ...]
    top_k: int
    slots: int
    hidden: int
    dtype: torch.dtype = torch.bfloat16
    holes: float = 0.2
    seed: int = 0
    capacity: int | None = None

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)
        self.ranks = len(self.tokens)
        everywhere = self.ranks * self.slots
        self.slot, self.weight, self.x = [], [], []
        for tokens in self.tokens:
            slot = torch.rand(tokens, everywhere, generator=generator).argsort(1)[:, : self.top_k].int()
            slot[torch.rand(slot.shape, generator=generator) < self.holes] = -1
            self.slot.append(slot)
            self.weight.append(torch.rand(slot.shape, generator=generator))
            self.x.append(torch.randn(tokens, self.hidden, generator=generator).to(self.dtype))
        self.most = max(1, *self.tokens)
        self.rows = self.capacity or self.most
        self.all_rows = (self.ranks - 1) * self.rows + self.most
        self.partial = torch.randn(self.ranks, self.all_rows, self.hidden, generator=generator).to(self.dtype)
        self.dweight = torch.randn(self.ranks, self.all_rows, self.top_k, generator=generator)

    def transports(self, **options: object) -> list[NVLink]:
        return emulate(
            self.ranks,
            self.slots,
            capacity=self.rows,
            most=self.most,
            row_bytes=self.hidden * self.dtype.itemsize,
            top_k=self.top_k,
            **options,
        )

    def destinations(self, source: int) -> dict[tuple[int, int], int]:
        """(rank, token) -> row, from the definition: slabs in the order of the ranks that follow, filled in the order
        of tokens; the own one the last, by token."""
        found: dict[tuple[int, int], int] = {}
        filled = [0] * self.ranks
        for token, slots in enumerate(self.slot[source].tolist()):
            for rank in sorted({slot // self.slots for slot in slots if slot >= 0}):
                place = token if rank == source else filled[rank]
                slab = (source - rank - 1) % self.ranks
                if place < (self.most if rank == source else self.rows):
                    found[rank, token] = slab * self.rows + place
                filled[rank] += 1
        return found


SETTINGS = [
    Setting((5, 3), top_k=2, slots=3, hidden=8),
    Setting((0, 7), top_k=1, slots=1, hidden=24, seed=1),
    Setting((4, 9, 6), top_k=3, slots=2, hidden=72, seed=2),
    Setting((13, 0, 1, 8), top_k=8, slots=5, hidden=136, seed=3),
    Setting((6, 6, 6, 6), top_k=4, slots=2, hidden=32, dtype=torch.float32, seed=4, holes=0.0),
    Setting((3, 1, 0, 2, 5, 4, 2, 1), top_k=5, slots=3, hidden=16, seed=5),
    Setting((0, 0, 0), top_k=2, slots=2, hidden=8, seed=6),
    Setting((150, 131), top_k=2, slots=2, hidden=8, seed=7),
    Setting((12, 9, 14, 3), top_k=2, slots=3, hidden=16, seed=11, capacity=10),
]


def plan(setting: Setting, transports: list[NVLink]) -> tuple[list, list[Traffic]]:  # type: ignore[type-arg]
    traffic = [Traffic(setting.ranks, rank) for rank in range(setting.ranks)]
    return [
        transport.plan(setting.slot[rank], setting.weight[rank], traffic[rank])
        for rank, transport in enumerate(transports)
    ], traffic


def rows_of(arrivals: Arrivals) -> torch.Tensor:
    return arrivals.tokens.contiguous(arrivals.slot_RJ.shape[0])


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_the_plan_is_the_prefix_sum(setting: Setting) -> None:
    routes, _ = plan(setting, setting.transports())
    for source, route in enumerate(routes):
        want = torch.full((setting.ranks, setting.tokens[source]), -1, dtype=torch.int32)
        for (rank, token), row in setting.destinations(source).items():
            want[rank, token] = row
        assert torch.equal(route.row_WT, want)
        on_rank = torch.stack([(setting.slot[source] // setting.slots == r).sum() for r in range(setting.ranks)])
        assert torch.equal(route.count_2W[0], (want >= 0).sum(1).int())
        assert torch.equal(route.choices_BW.sum(0).int(), on_rank.int())
        needed = (want >= 0).sum(1)
        needed[source] = 0  # a token has always a place at home
        assert torch.equal(route.count_2W[1], needed.int())


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_rows_arrive_once_per_rank_with_their_slots_and_weights(setting: Setting) -> None:
    transports = setting.transports()
    routes, traffic = plan(setting, transports)
    arrivals = verb(transports, lambda r, t: t.dispatch(setting.x[r], routes[r]))
    for rank, arrived in enumerate(arrivals):
        came = set()
        for source in range(setting.ranks):
            for (to, token), row in setting.destinations(source).items():
                if to == rank:
                    came.add(row)
                    slots = setting.slot[source][token]
                    here = slots // setting.slots == rank
                    assert torch.equal(rows_of(arrived)[row], setting.x[source][token])
                    assert torch.equal(arrived.slot_RJ[row], torch.where(here, slots % setting.slots, -1))
                    assert torch.equal(arrived.weight_RJ[row], torch.where(here, setting.weight[source][token], 0.0))
        absent = [row for row in range(len(arrived.slot_RJ)) if row not in came]
        assert (arrived.slot_RJ[absent] == -1).all() and not arrived.weight_RJ[absent].any()
        assert int((arrived.slot_RJ >= 0).sum()) <= arrived.num_pairs
        counted = [sum(to == rank for to, _ in setting.destinations(s)) for s in range(setting.ranks)]
        by_slab = [counted[(rank + 1 + slab) % setting.ranks] for slab in range(setting.ranks - 1)]
        assert routes[rank].received_W.tolist() == [*by_slab, 0]  # the own ones stayed at home
        assert traffic[rank].rows["dispatch"] == [
            sum(to == other for to, _ in setting.destinations(rank)) for other in range(setting.ranks)
        ]


def test_a_verb_takes_as_many_blocks_as_its_option_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is left of the multiprocessors is the computation's."""
    grids: list[int] = []

    class Watched:
        def __init__(self, kernel: Any) -> None:
            self.kernel = kernel

        def __getitem__(self, grid: tuple[int]) -> Any:
            grids.append(grid[0])
            return self.kernel[grid]

    for name in ("dispatch_kernel", "combine_kernel"):
        monkeypatch.setattr(launch, name, Watched(getattr(launch, name)))
    setting = SETTINGS[0]
    for out, back in ((3, 2), (5, 7)):
        transports = setting.transports(dispatch_ctas=out, combine_ctas=back)
        routes, _ = plan(setting, transports)
        verb(transports, lambda r, t, routes=routes: t.dispatch(setting.x[r], routes[r]))
        assert set(grids) == {out}
        grids.clear()
        partials = [route.new_partial(setting.hidden, setting.dtype, torch.device("cpu")).zero_() for route in routes]
        verb(transports, lambda r, t, routes=routes, partials=partials: t.combine(routes[r], partials[r]))
        assert set(grids) == {back}
        grids.clear()


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_sums_come_home_and_so_do_gradients(setting: Setting) -> None:
    transports = setting.transports()
    routes, _ = plan(setting, transports)

    def written(rank: int) -> torch.Tensor:
        partial = routes[rank].new_partial(setting.hidden, setting.dtype, torch.device("cpu"))
        return partial.copy_(setting.partial[rank])

    verb(transports, lambda r, t: t.dispatch(setting.x[r], routes[r]))
    partials = [written(rank) for rank in range(setting.ranks)]
    sums = verb(transports, lambda r, t: t.combine(routes[r], partials[r]))
    pending = verb(transports, lambda r, t: t.dispatch_gradients(setting.x[r], routes[r]))
    gradients = [rows.contiguous(setting.all_rows) for rows in pending]
    partials = [written(rank) for rank in range(setting.ranks)]
    back = verb(transports, lambda r, t: t.combine_gradients(routes[r], partials[r], setting.dweight[r]))

    for source in range(setting.ranks):
        want = torch.zeros(setting.tokens[source], setting.hidden)
        dweight = torch.zeros(setting.tokens[source], setting.top_k)
        for (rank, token), row in sorted(setting.destinations(source).items()):
            want[token] += setting.partial[rank, row].float()
            here = setting.slot[source][token] // setting.slots == rank
            dweight[token] += torch.where(here, setting.dweight[rank, row], 0.0)
            assert torch.equal(gradients[rank][row], setting.x[source][token])
        # The interpreter cuts a float32 off where a GPU rounds it to bfloat16.
        step = 2**-7 if setting.dtype == torch.bfloat16 else 0.0
        torch.testing.assert_close(sums[source].float(), want, rtol=step, atol=0.0)
        assert torch.equal(back[source][0], sums[source])
        assert torch.equal(back[source][1], dweight)


def test_a_lease_is_free_again_after_its_combine_and_only_then() -> None:
    setting = SETTINGS[0]
    transports = setting.transports(num_leases=2)
    routes, _ = plan(setting, transports)
    again, _ = plan(setting, transports)
    verb(transports, lambda r, t: t.dispatch(setting.x[r], routes[r]))
    verb(transports, lambda r, t: t.dispatch(setting.x[r], again[r]))
    assert routes[0].lease is not again[0].lease
    with pytest.raises(RuntimeError, match="num_leases"):
        transports[0].dispatch(setting.x[0], routes[0])


def test_larger_rows_do_not_ride_beside_smaller_ones() -> None:
    buffers = SETTINGS[0].transports(num_leases=2)[0].buffers
    bytes_, choices = buffers._row
    buffers.acquire(bytes_, choices)
    with pytest.raises(RuntimeError, match="largest rows alone first"):
        buffers.acquire(2 * bytes_, choices)


def test_an_overflow_is_known_to_all_ranks_and_spoils_the_sums() -> None:
    setting = Setting((9, 2, 5), top_k=3, slots=2, hidden=8, holes=0.0, capacity=4, seed=8)
    transports = setting.transports()
    routes, _ = plan(setting, transports)
    arrivals = verb(transports, lambda r, t: t.dispatch(setting.x[r], routes[r]))
    assert all((a.slot_RJ.shape[0]) == 2 * 4 + 9 for a in arrivals)
    partials = [route.new_partial(8, setting.dtype, torch.device("cpu")).fill_(1.0) for route in routes]
    sums = verb(transports, lambda r, t: t.combine(routes[r], partials[r]))
    most = max(int((setting.slot[0] // 2 == rank).any(1).sum()) for rank in (1, 2))
    for transport, y in zip(transports, sums, strict=True):
        assert transport.buffers.overflow() == most > 4
        assert y.isnan().all()


@pytest.mark.parametrize("hidden", [8, 136, 256])
def test_rows_as_fp8_carry_codes_and_scales(hidden: int) -> None:
    """Values that e4m3 holds exactly, with the largest of each group at 448 times a power of two: rounding is looked at
    on GPUs, the interpreter's own is wrong."""
    setting = Setting((6, 3, 4), top_k=2, slots=2, hidden=hidden, seed=9)
    generator = torch.Generator().manual_seed(0)
    for x in setting.x:
        mantissa = torch.randint(8, 16, x.shape, generator=generator)
        exponent = torch.randint(0, 5, x.shape, generator=generator)
        sign = 1 - 2 * torch.randint(2, x.shape, generator=generator)
        x.copy_(sign * mantissa * 2.0 ** (exponent - 4))
        x[:, ::128] = 448 * 2.0**-4
    transports = setting.transports(codecs=Codecs(dispatch="fp8", combine_backward="fp8"))
    routes, traffic = plan(setting, transports)
    arrivals = verb(transports, lambda r, t: t.dispatch(setting.x[r], routes[r]))
    got = [rows_of(a.readable(False, setting.dtype)) for a in arrivals]
    partials = [route.new_partial(hidden, setting.dtype, torch.device("cpu")).zero_() for route in routes]
    verb(transports, lambda r, t: t.combine(routes[r], partials[r]))
    pending = verb(transports, lambda r, t: t.dispatch_gradients(setting.x[r], routes[r]))
    gradients = [rows.widened(setting.dtype).contiguous(setting.all_rows) for rows in pending]
    for source in range(setting.ranks):
        for (rank, token), row in setting.destinations(source).items():
            assert torch.equal(got[rank][row], setting.x[source][token])
            assert torch.equal(gradients[rank][row], setting.x[source][token])
    rows = traffic[0].rows["dispatch"]
    packet = {8: 16, 136: 144, 256: 272}[hidden]
    assert traffic[0].bytes["dispatch"] == [n * (packet + 16) for n in rows]
