"""Rides in tiles in Triton's interpreter: the kernels that send, sort and compute by part, and whole rides against
those without parts. Nothing waits here: a kernel that finds a part missing says so, as it would after its time is up.

Written as test_nvlink.py and test_gemm.py are.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from carpool.activations import ActivationPolicies, Arena, Offloader
from carpool.experts import Activation, ExpertFunction, ExpertWeights, GroupedExperts, make_activation
from carpool.experts.gemm import table_kernels
from carpool.experts.gemm.choices import Choices
from carpool.metrics.counters import LayerStats, Traffic
from carpool.ride.chunks import PLAIN
from carpool.ride.function import ride
from carpool.ride.schedule import Schedule
from carpool.ride.setup import RideSetup
from carpool.routing import Routing
from carpool.transport import Codecs, RankMissingError, make_transport
from carpool.transport.nvlink import NVLinkOptions
from carpool_systems.tiled_experts import Forward, fused
from carpool_systems.tiles import TiledOrder, require
from tests.interpreted.emulated import CPU, Meeting, emulate, on_threads, verb
from tests.interpreted.test_experts import close, nan_in_fresh_memory  # noqa: F401
from tests.interpreted.test_gemm import tiny_tiles
from tests.interpreted.test_nvlink import Setting

# -- one kernel at a time -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("parts", [1, 2, 5])
@pytest.mark.parametrize(
    "setting",
    [
        Setting((70, 0, 41), top_k=3, slots=2, hidden=16, seed=1),
        Setting((33, 95), top_k=1, slots=3, hidden=8, seed=2, capacity=25),
    ],
    ids=str,
)
def test_choices_say_of_which_part_a_row_is(setting: Setting, parts: int) -> None:
    transports = setting.transports()
    routes = [
        t.plan(setting.slot[rank], setting.weight[rank], Traffic(setting.ranks, rank), parts)
        for rank, t in enumerate(transports)
    ]
    lengths = [-(-size // (16 * parts)) * 16 for size in setting.tokens]
    assert [route.part_length for route in routes] == lengths
    arrivals = verb(transports, lambda r, t: t.dispatch(setting.x[r], routes[r]))
    part_of = torch.full((setting.ranks, setting.all_rows), -1)
    for source in range(setting.ranks):
        for (rank, token), row in setting.destinations(source).items():
            part_of[rank, row] = token // lengths[source]
    for rank, arrived in enumerate(arrivals):
        ready = arrived.ready
        assert ready is not None and ready.parts == parts
        wanted = arrived.slot_RJ >= 0
        assert torch.equal(wanted.any(1), part_of[rank] >= 0)
        group = arrived.slot_RJ * parts + part_of[rank][:, None]
        assert torch.equal(ready.group_RJ, torch.where(wanted, group, -1).int())
        begins = ready.begins_NW
        assert begins.shape == (parts + 1, setting.ranks) and not begins[0].any()
        for slab in range(setting.ranks):
            for part in range(parts):
                rows = slab * setting.rows + torch.arange(int(begins[part, slab]), int(begins[part + 1, slab]))
                here = part_of[rank, rows]
                # The rows at home are tokens, which not all want to stay.
                assert torch.isin(here, torch.tensor([part, -1] if slab == setting.ranks - 1 else [part])).all()
        assert int((begins[-1] - begins[0]).sum()) >= int((part_of[rank] >= 0).sum())
    assert not any(int(t.buffers.status) for t in transports)


@pytest.mark.parametrize(("slots", "parts"), [(1, 3), (5, 4), (3, 16)])
def test_every_pair_is_in_one_tile_of_its_part(slots: int, parts: int) -> None:
    generator = torch.Generator().manual_seed(slots)
    counts = torch.randint(0, 9, (slots, parts), generator=generator)
    ends = counts.flatten().cumsum(0).int()
    tiles, ranked, starts = table_kernels.tile_table(ends, int(ends[-1]) + 7, 4, parts)
    covered: list[int] = []
    for part in range(parts):
        for slot, first, end, _ in tiles[1 + int(starts[part]) : 1 + int(starts[part + 1])].tolist():
            group = slot * parts + part
            begin = int(ends[group - 1]) if group else 0
            assert end == ends[group] and begin <= first < end and (first - begin) % 4 == 0
            covered += range(first, min(end, first + 4))
    assert sorted(covered) == list(range(int(ends[-1]))) and int(starts[-1]) == int(tiles[0, 0])
    sizes = counts.sum(1)
    assert ranked[:, 0].tolist() == sorted(range(slots), key=lambda s: (-int(sizes[s]), s))
    assert torch.equal(ranked[:, 2] - ranked[:, 1], sizes[ranked[:, 0].long()].int())


# -- whole rides ----------------------------------------------------------------------------------------------------


class Layer:
    """One layer's numbers on several emulated ranks, and its rides with or without parts, on the same leases."""

    def __init__(
        self,
        tokens: tuple[int, ...],
        slots: int = 2,
        top_k: int = 2,
        activation: Activation | None = None,
        bias: bool = False,
        recompute: bool = False,
        arena: bool = False,
        transposed: bool = False,
        rows: str = "save",
        hidden: str = "save",
        **options: Any,
    ) -> None:
        self.tokens, self.slots, self.ranks = tokens, slots, len(tokens)
        self.policies = ActivationPolicies(rows, hidden)  # type: ignore[arg-type]
        self.offloaders = [Offloader() for _ in tokens]
        self.hidden, inner, experts = 16, 8, slots * len(tokens)
        activation = activation or make_activation("silu", True)
        self.experts = GroupedExperts(ExpertFunction(activation, transposed), Choices.all("flat"), recompute)
        generator = torch.Generator().manual_seed(sum(tokens) + slots)

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator)

        width = inner * (2 if activation.gated else 1)
        up, down = draw(experts, width, self.hidden), draw(experts, self.hidden, inner)
        if transposed:
            up, down = up.transpose(1, 2).contiguous(), down.transpose(1, 2).contiguous()
        biases = (draw(experts, width), draw(experts, self.hidden)) if bias else (None, None)
        self.weights = ExpertWeights(up, down, *biases)
        self.slot = [torch.rand(n, experts, generator=generator).argsort(1)[:, :top_k].int() for n in tokens]
        for slot in self.slot:
            slot[::5, 0] = -1
        self.x, self.dy = ([draw(n, self.hidden) for n in tokens] for _ in range(2))
        self.weight = [draw(n, top_k).abs() for n in tokens]
        sizes: dict[str, Any] = {"capacity": max(1, *tokens), "row_bytes": 4 * self.hidden, "top_k": top_k}
        # Sent and received by two launches, a combine gives its lease back only when it is waited for.
        self.transports = emulate(self.ranks, slots, num_leases=2, filled=0xFF, **sizes, **options)
        self.meeting = Meeting(self.ranks)
        for transport in self.transports:
            transport._run = transport._run_here = self.meeting  # type: ignore[method-assign]
            if arena:
                transport.buffers.arena = Arena(1 << 18, CPU)
                transport.buffers.arena.bytes.fill_(0xFF)

    def ride(self, parts: int, dweights: bool = True) -> list[dict[str, torch.Tensor]]:
        """Output and gradients of each rank; parts 0: the plain ride."""

        def work(rank: int) -> dict[str, torch.Tensor]:
            transport = self.transports[rank]
            homes = slice(rank * self.slots, (rank + 1) * self.slots)
            own = ExpertWeights._make(
                None if w is None else w[homes].clone().requires_grad_(dweights) for w in self.weights
            )
            x, weight = (t[rank].clone().requires_grad_() for t in (self.x, self.weight))
            stats = LayerStats(self.ranks * self.slots, self.ranks, rank)
            order = TiledOrder(parts) if parts else PLAIN
            setup = RideSetup(
                transport, self.experts, stats, order, policies=self.policies, offloader=self.offloaders[rank]
            )
            y, _ = ride(x, Routing(self.slot[rank], weight), self.slot[rank], own, setup)
            y.backward(self.dy[rank])
            rows = {verb: list(stats.traffic.rows[verb]) for verb in stats.traffic.rows}
            named = {"y": y.detach(), "dx": x.grad, "dweight": weight.grad, "rows": torch.tensor(list(rows.values()))}
            named |= {f"d{name}": w.grad for name, w in own._asdict().items() if w is not None and dweights}
            return named

        results = on_threads(self.ranks, work, self.meeting)
        for transport in self.transports:
            transport.buffers.check()
            assert not transport.buffers.busy and not int(transport.buffers.status)
        return results


def check(got: list[dict[str, torch.Tensor]], want: list[dict[str, torch.Tensor]]) -> None:
    """To rounding: a row of numpy's products, which the interpreter takes, depends on where in its tile it is. On GPUs
    rows are compared bit by bit (tests/gpu/test_tiles_gpu.py)."""
    for ours, theirs in zip(got, want, strict=True):
        assert ours.keys() == theirs.keys()
        assert torch.equal(ours["rows"], theirs["rows"])
        for name in ours:
            close(ours[name], theirs[name], 2e-6)


@pytest.fixture(autouse=True)
def _small() -> Iterator[None]:
    with tiny_tiles():
        yield


@pytest.mark.parametrize(
    ("tokens", "parts", "options"),
    [
        ((40, 17), (2,), {"rows": "resend", "bias": True}),
        ((33,), (2,), {"recompute": True}),
        ((29, 12), (2,), {"rows": "offload", "hidden": "offload", "arena": True}),
        (
            (20, 30),
            (2,),
            {"activation": Activation("silu", gated=True, interleaved=True, limit=7.0), "transposed": True},
        ),
        ((0, 0), (3,), {}),
        ((0, 20), (5,), {"slots": 1, "rows": "resend", "recompute": True}),
    ],
    ids=str,
)
def test_a_ride_in_tiles_is_the_plain_ride(
    tokens: tuple[int, ...], parts: tuple[int, ...], options: dict[str, Any]
) -> None:
    layer = Layer(tokens, **options)
    want = layer.ride(0)
    assert not any(t.isnan().any() for result in want for t in result.values() if t.is_floating_point())
    for number in parts:
        check(layer.ride(number), want)


def test_without_gradients_of_weights() -> None:
    layer = Layer((18, 24))
    check(layer.ride(2, dweights=False), layer.ride(0, dweights=False))


def test_rides_on_the_same_leases_in_other_numbers_of_parts() -> None:
    """And they are what one rank computes."""
    layer = Layer((45, 0, 28), arena=True)
    got, every = layer.ride(3), layer.ranks * layer.slots
    for parts in (1, 0, 2):
        check(layer.ride(parts), got)
    transport = make_transport("dedup", None, every)
    weights = ExpertWeights._make(None if w is None else w.clone().requires_grad_() for w in layer.weights)
    x, slot, weight = (torch.cat(parts) for parts in (layer.x, layer.slot, layer.weight))
    x.requires_grad_()
    setup = RideSetup(transport, layer.experts, LayerStats(every, 1, 0))
    y, _ = ride(x, Routing(slot, weight), slot, weights, setup)
    y.backward(torch.cat(layer.dy))
    close(torch.cat([one["y"] for one in got]), y.detach(), 1e-5)
    close(torch.cat([one["dx"] for one in got]), x.grad, 1e-5)  # type: ignore[arg-type]
    close(torch.cat([one["dup_SFH"] for one in got]), weights.up_SFH.grad, 1e-5)  # type: ignore[arg-type]


def test_a_kernel_that_misses_a_part_says_whose() -> None:
    """Rank 1 does not get to sending its rows; its choices are there, as they may be."""
    layer = Layer((40, 40))
    transports = layer.transports
    routes = []
    for rank, transport in enumerate(transports):
        del transport._run, transport._run_here
        routes.append(transport.plan(layer.slot[rank], layer.weight[rank], Traffic(2, rank), 2))
    from carpool.transport.nvlink import launch

    pending = [t.dispatch(layer.x[rank], routes[rank]) for rank, t in enumerate(transports)]
    lease = transports[0].buffers._leases[0]
    flags = lease.view(lease.regions.arrived, (2, 64), torch.int32)
    assert launch.SPIN is False and flags[1, :3].tolist() == [16, 16, 16]
    arrivals = pending[0].wait()
    flags[1, 2] = 1  # of three programs that send for rank 1, the last has only come to the end of its first part
    homes = ExpertWeights._make(None if w is None else w[:2] for w in layer.weights)
    partial = routes[0].new_partial(layer.hidden, torch.float32, CPU)
    Forward(layer.experts, arrivals, homes, partial, None, True)
    with pytest.raises(RankMissingError, match="dispatch") as raised:
        transports[0].buffers.check()
    assert raised.value.ranks == (1,)


# -- where tiles cannot be used ---------------------------------------------------------------------------------------


def test_what_tiles_require() -> None:
    experts = GroupedExperts(ExpertFunction(make_activation("silu", True)))
    own = GroupedExperts(ExpertFunction(lambda h: h[..., ::2] * h[..., 1::2]))
    fits = ExpertWeights(torch.zeros(2, 16, 16), torch.zeros(2, 16, 8))
    narrow = ExpertWeights(torch.zeros(2, 10, 16), torch.zeros(2, 16, 5))
    require(experts, fits)
    with pytest.raises(ValueError, match=r"multiples of 8.*'chunks'"):
        require(experts, narrow)
    with pytest.raises(ValueError, match="activation"):
        require(own, fits)
    with pytest.raises(ValueError, match="'chunks'"):
        NVLinkOptions(codecs=Codecs(dispatch="fp8")).under(Schedule("tiles", 2))
    options = NVLinkOptions(max_tokens=100).under(Schedule("tiles", 4))
    assert options.side_stream and options.max_tokens == 100
    with pytest.raises(ValueError, match=r"1\.\.16"):
        Schedule("tiles", 17)


def test_kernels_that_wait_have_a_multiprocessor_for_themselves() -> None:
    """Two programs of "square" fit on one, so as many as there are for half the multiprocessors may take all."""
    assert fused(Choices.all("square")) == Choices("flat", "square", "flat", "square", "square", "square")
    assert fused(Choices(up="wide")) == Choices("wide", "flat", "flat", "flat")
