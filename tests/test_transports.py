"""Transports: counted sends and bytes equal the predicted ones, and the verbs keep their contract."""

from __future__ import annotations

import gc
import unittest.mock
import weakref
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import carpool
from carpool import ExpertLayout, Routing, assign
from carpool.experts import (
    ExpertFunction,
    ExpertWeights,
    GroupedExperts,
    ReferenceExperts,
    make_activation,
    reference_experts,
)
from carpool.kernels.device import ordered_sum
from carpool.layout.topology import Topology
from carpool.metrics.counters import LayerStats, Traffic
from carpool.placement import VERBS, predict
from carpool.replicas.slot_plan import Costs, count_choices, plan_slots, served_by
from carpool.ride.function import ride
from carpool.ride.ride_module import ride_module
from carpool.ride.schedule import Schedule
from carpool.ride.setup import RideSetup
from carpool.transport import (
    TRANSPORTS,
    BufferOverflowError,
    Codecs,
    HierarchicalOptions,
    NVLinkOptions,
    RankMissingError,
    TransportOptions,
    between_ranks,
    check_overflow,
    check_transport,
    choose_transport,
    make_transport,
    set_topology,
    unfit_transports,
)
from carpool.transport.nvlink import Buffers, NVLink
from carpool.transport.nvlink.buffers import OWNERS, buffers_of
from carpool.transport.nvlink.transport import packet_bytes
from tests.layouts import EXPERTS, layout_of
from tests.ranks import WORLD_SIZE, Ranks, mesh

# nvlink runs on GPUs: tests/gpu, tests/interpreted.
NAMES = tuple(name for name in between_ranks() if name != "nvlink")
ONE_ROW_PER_CHOICE = ("alltoall", "1d", "2d", "2dh")
H, F = 20, 12


def nodes_of(ep: int) -> Topology:
    """As `tests.ranks.mesh` has it."""
    return Topology.even(ep, 2 if ep > 1 else 1)


def draw_routings(sizes: tuple[int, ...], top_k: int, holes: float, seed: int) -> list[torch.Tensor]:
    """expert_TK of each rank, skewed towards low experts, with -1 entries."""
    generator = torch.Generator().manual_seed(seed)
    popularity = 1.0 / (1 + torch.arange(EXPERTS))
    routings = []
    for size in sizes:
        picks = [torch.multinomial(popularity, top_k, generator=generator) for _ in range(size)]
        expert_TK = torch.stack(picks).int() if picks else torch.zeros(0, top_k, dtype=torch.int32)
        expert_TK[torch.rand(expert_TK.shape, generator=generator) < holes] = -1
        routings.append(expert_TK)
    return routings


# -- honest bytes ---------------------------------------------------------------------------------------------------

VOLUME_CASES = [
    # transport, layout, ep, tokens per rank, K, share of -1, dtype
    (name, layout, 4, sizes, top_k, holes, dtype)
    for name in NAMES
    if name not in ONE_ROW_PER_CHOICE[1:]
    for layout, sizes, top_k, holes, dtype in [
        ("contiguous", (7, 5, 11, 3), 4, 0.0, torch.float32),
        ("permuted", (1, 0, 0, 6), 8, 0.3, torch.float32),
        ("uneven", (4, 4, 4, 4), 3, 0.1, torch.bfloat16),
        ("permuted", (3, 8, 5, 0), 5, 0.2, torch.bfloat16),
        ("contiguous", (0, 0, 0, 0), 2, 0.0, torch.float32),
        ("contiguous", (5, 2, 0, 1), 1, 1.0, torch.float32),
    ]
] + [(name, "permuted", 2, (9, 4, 0, 7), 3, 0.0, torch.float32) for name in NAMES]
VOLUME_CASES += [(name, "sliced 2", 4, (9, 4, 0, 7), 3, 0.1, torch.float32) for name in NAMES]
VOLUME_CASES += [("dedup", "sliced_uneven 4", 4, (3, 8, 5, 0), 2, 0.1, torch.float32)]
VOLUME_CASES += [(name, "permuted", 4, (1, 0, 9, 6), 5, 0.3, torch.float32) for name in ONE_ROW_PER_CHOICE[1:]]
VOLUME_CASES += [(name, "contiguous", 1, (3, 4, 0, 7), 2, 0.1, torch.float32) for name in NAMES]


def count_rides(cases: list[Any]) -> list[dict[str, Any]]:
    """Forward and backward of each case on this rank; what was counted."""
    rank, counted = dist.get_rank(), []
    for seed, (name, layout, ep, sizes, top_k, holes, dtype) in enumerate(cases):
        grid = mesh((WORLD_SIZE // ep, ep), ("edp", "ep"))
        place: dict[str, Any] = {"ep_mesh": grid["ep"], "layout": layout_of(layout, ep), "dtype": dtype}
        moe = carpool.MoE(H, F, EXPERTS, top_k, transport=name, **place)
        expert_TK = draw_routings(sizes, top_k, holes, seed)[rank]
        x = torch.randn(len(expert_TK), H, dtype=dtype, requires_grad=True)
        moe(x, routing=Routing(expert_TK, torch.ones(expert_TK.shape))).square().sum().backward()
        stats = moe.stats()
        traffic = moe.core.stats.traffic
        counted.append(
            {
                "rows": traffic.rows,
                "bytes": traffic.bytes,
                "baseline": traffic.baseline,
                "rows_remote": stats.rows_remote,
                "rows_dispatched": stats.rows_dispatched,
                "bytes_remote": stats.bytes_remote,
            }
        )
    return counted


def test_counted_rows_and_bytes_equal_the_predicted_ones(ranks: Ranks) -> None:
    counted = ranks(count_rides, VOLUME_CASES)
    for number, case in enumerate(VOLUME_CASES):
        name, layout, ep, sizes, top_k, holes, dtype = case
        routings = draw_routings(sizes, top_k, holes, number)
        for first in range(0, WORLD_SIZE, ep):  # every copy of the expert group on its own
            group = range(first, first + ep)
            shape = {"hidden": H, "element_size": dtype.itemsize}
            volume = predict(name, [routings[r] for r in group], layout_of(layout, ep), **shape, topology=nodes_of(ep))
            seen = [counted[r][number] for r in group]
            np.testing.assert_array_equal([s["rows"]["dispatch"] for s in seen], volume.rows_WW, err_msg=str(case))
            for verb in VERBS:
                got = np.array([s["bytes"][verb] for s in seen])
                np.testing.assert_array_equal(got, volume.bytes_WW[verb], err_msg=f"{case}: {verb}")
                assert sum(s["bytes_remote"][verb] for s in seen) == volume.bytes_remote(verb), f"{case}: {verb}"
            assert sum(s["rows_remote"] for s in seen) == volume.rows_remote
            assert sum(s["rows_dispatched"] for s in seen) == volume.ranks_per_token * max(1, sum(volume.tokens_W))
            # What alltoall would have moved is counted beside every transport, so that savings are of the same ride.
            baseline = predict("alltoall", [routings[r] for r in group], layout_of(layout, ep), **shape)
            for verb in VERBS[1:]:
                assert sum(s["baseline"][verb] for s in seen) == baseline.bytes_remote(verb), f"{case}: {verb}"


def test_predicted_rows_of_the_docstring() -> None:
    routings = [np.array([[0, 1], [1, 2], [1, 2]]), np.array([[0, 3]])]
    plain = ExpertLayout(((0, 1), (2, 3)))
    shape = {"hidden": 16, "element_size": 2}
    assert predict("dedup", routings, plain, **shape).rows_WW.tolist() == [[3, 2], [1, 1]]
    assert predict("alltoall", routings, plain, **shape).rows_WW.tolist() == [[4, 2], [1, 1]]
    assert predict("gather", routings, plain, **shape).rows_WW.tolist() == [[3, 3], [3, 3]]
    placed = predict("dedup", routings, ExpertLayout(((1, 2), (0, 3))), **shape)
    assert placed.rows_WW.sum() == 5 and placed.ranks_per_token == 5 / 4
    assert placed.bytes_WW["dispatch"].tolist() == [[3 * 48, 48], [0, 48]]
    assert placed.bytes_WW["dispatch_backward"].tolist() == [[3 * 40, 0], [40, 40]]
    assert placed.bytes_remote("combine") == 32 and placed.bytes_remote("plan") == 32


@pytest.mark.parametrize(("ep", "nodes"), [(4, 2), (6, 3), (4, 1)])
def test_hierarchical_sends_a_token_once_to_each_other_node(ep: int, nodes: int) -> None:
    """Against a loop over tokens. 2 nodes on 4 ranks are what `VOLUME_CASES` count."""
    routings, layout = draw_routings((9, 0, 13, 2, 5, 5)[:ep], 6, 0.1, 0), ExpertLayout.contiguous(EXPERTS, ep)
    topology, per_node = Topology.even(ep, nodes), ep // nodes
    expected_WW = np.zeros((ep, ep), int)
    for source, expert_TK in enumerate(routings):
        for row in assign(expert_TK, layout).tolist():
            ranks = {slot // layout.slots_per_rank for slot in row if slot >= 0}
            for node in {rank // per_node for rank in ranks}:
                gate = node * per_node + source % per_node
                expected_WW[source, gate] += node != source // per_node
                for rank in ranks:
                    expected_WW[gate, rank] += rank // per_node == node
    volume = predict("hierarchical", routings, layout, hidden=H, element_size=2, topology=topology)
    np.testing.assert_array_equal(volume.rows_WW, expected_WW)
    if nodes > 1:
        flat = predict("dedup", routings, layout, hidden=H, element_size=2, topology=topology)
        far_WW = np.not_equal.outer(topology.node_of, topology.node_of)
        assert 0 < volume.rows_WW[far_WW].sum() < flat.rows_WW[far_WW].sum()
        assert volume.bytes_WW["plan"][far_WW].sum() == ep * (nodes - 1) * 16


FIXED_CASES = [((7, 5, 11, 3), 4, 0.0, 11, 0), ((1, 0, 0, 6), 8, 0.3, 9, 3), ((0, 0, 0, 0), 2, 0.0, 1, 0)]


def count_fixed() -> list[dict[str, Any]]:
    """Forward and backward over two hops of which the first has a fixed size; what was counted, and why."""
    grid, counted = mesh((WORLD_SIZE,), ("ep",)), []
    for seed, (sizes, top_k, holes, most, chunks) in enumerate(FIXED_CASES):
        options = HierarchicalOptions(most, first_hop="fixed")
        schedule = Schedule("chunks", chunks) if chunks else Schedule()
        moe = carpool.MoE(
            H,
            F,
            EXPERTS,
            top_k,
            ep_mesh=grid["ep"],
            transport="hierarchical",
            transport_options=options,
            schedule=schedule,
        )
        expert_TK = draw_routings(sizes, top_k, holes, seed)[dist.get_rank()]
        x = torch.randn(len(expert_TK), H, requires_grad=True)
        moe(x, routing=Routing(expert_TK, torch.ones(expert_TK.shape))).square().sum().backward()
        counted.append({**moe.core.stats.traffic.bytes, "why": moe.core.why})
    return counted


def test_a_first_hop_of_fixed_size_sends_what_it_says(ranks: Ranks) -> None:
    counted = ranks(count_fixed)
    for number, (sizes, top_k, holes, most, chunks) in enumerate(FIXED_CASES):
        routings = draw_routings(sizes, top_k, holes, number)
        # Pieces are as large as those of the largest rank.
        options = HierarchicalOptions(-(-most // max(1, chunks)) * max(1, chunks), first_hop="fixed", inside="dedup")
        volume = predict(
            "hierarchical", routings, ExpertLayout.contiguous(EXPERTS, 4), hidden=H, element_size=4, options=options,
            topology=nodes_of(4),
        )  # fmt: skip
        for verb in VERBS[1:]:
            np.testing.assert_array_equal([c[number][verb] for c in counted], volume.bytes_WW[verb], err_msg=verb)
        far_WW = ~np.equal.outer(nodes_of(4).node_of, nodes_of(4).node_of)
        assert volume.bytes_WW["plan"][far_WW].sum() == 0
        np.testing.assert_array_equal(
            [c[number]["plan"] for c in counted], volume.bytes_WW["plan"] * max(1, chunks), err_msg="plan"
        )
        assert "intra-node dedup, not nvlink: " in counted[0][number]["why"]


def settle(nodes: int) -> list[str]:
    group = dist.new_group(list(range(WORLD_SIZE)))
    set_topology(group, Topology.even(WORLD_SIZE, nodes))
    notes = []
    for options, top_k in [
        (HierarchicalOptions(9), 8),
        (HierarchicalOptions(9), 1),
        (HierarchicalOptions(9, node_rows=0.8), 8),
        (HierarchicalOptions(), 8),
        (HierarchicalOptions(9, first_hop="counted"), 8),
    ]:
        settled, note = options.settled(group, top_k, H)
        assert settled.inside == "dedup" and settled.settled(group, top_k, H) == (settled, "")
        notes.append(f"{settled.first_hop}: {note}")
    return notes


def test_rows_between_nodes_are_counted_where_many_would_be_empty(ranks: Ranks) -> None:
    many, few, measured, unsaid, asked = ranks(settle, 2)[0]
    assert many.startswith("fixed: ") and "of 1 sends to other nodes a token needs 0.996" in many
    assert few.startswith("counted: ") and "needs 0.5, as are expected of uniform choices" in few
    assert measured.startswith("counted: ") and "needs 0.8, as were measured" in measured
    assert unsaid.startswith("counted: ") and "max_tokens" in unsaid
    assert asked.startswith("counted: intra-node dedup, not nvlink") and "inter-node" not in asked
    assert ranks(settle, 4)[0][0].startswith("fixed: ")  # 10 % are empty
    with pytest.raises(ValueError, match="first_hop='fixed' needs max_tokens"):
        HierarchicalOptions(first_hop="fixed")
    with pytest.raises(ValueError, match="inside='rail' is not known"):
        HierarchicalOptions(inside="rail")  # type: ignore[arg-type]


def too_many() -> str:
    group = mesh((WORLD_SIZE,), ("ep",)).get_group()
    transport = make_transport("hierarchical", group, 1, HierarchicalOptions(2, first_hop="fixed", inside="dedup"))
    try:
        transport.plan(torch.zeros(3, 1, dtype=torch.int32), torch.ones(3, 1), Traffic(WORLD_SIZE, dist.get_rank()))
    except ValueError as error:
        return str(error)
    return ""


def test_more_tokens_than_were_said_are_refused(ranks: Ranks) -> None:
    assert all("3 tokens on this rank, but at most max_tokens=2 were stated" in told for told in ranks(too_many))


def refusals() -> list[str]:
    """What the four ranks are told if they do not lie on equal nodes."""
    told = []
    for topology in (None, Topology.even(4, 1), Topology((0, 1, 0, 1), (0, 1, 0, 1)), Topology((0, 0, 0, 1), (0,) * 4)):
        group = dist.new_group(list(range(WORLD_SIZE)))
        if topology is not None:
            set_topology(group, topology)
        try:
            check_transport("hierarchical", group)
        except ValueError as error:
            told.append(str(error))
    return told


def test_hierarchical_is_refused_without_several_equal_nodes(ranks: Ranks) -> None:
    for unsaid, one, dealt, uneven in ranks(refusals):
        assert "by the hosts' names all 4 ranks" in unsaid and "on one node" in unsaid
        assert "by given all 4 ranks of the expert-parallel group are on one node" in one
        assert "equally many consecutive ranks" in dealt and "its nodes hold ranks 0, 2; ranks 1, 3" in dealt
        assert "its nodes hold ranks 0, 1, 2; ranks 3" in uneven and uneven.endswith("use 'auto' or 'dedup'")


def test_nvlink_moves_what_dedup_moves_without_a_plan() -> None:
    routings, layout = draw_routings((6, 0, 9, 3), 6, 0.1, 0), layout_of("permuted", 4)
    shape = {"hidden": 200, "element_size": 2}
    ours, dedup = predict("nvlink", routings, layout, **shape), predict("dedup", routings, layout, **shape)
    np.testing.assert_array_equal(ours.rows_WW, dedup.rows_WW)
    assert ours.bytes_remote("plan") == 0 < dedup.bytes_remote("plan")
    for verb in VERBS[1:]:
        np.testing.assert_array_equal(ours.bytes_WW[verb], dedup.bytes_WW[verb])
    # 200 columns: 200 codes and two scales, rounded up
    packet = packet_bytes(200)
    assert packet == 208
    half = predict("nvlink", routings, layout, **shape, options=NVLinkOptions(codecs=Codecs(dispatch="fp8")))
    np.testing.assert_array_equal(half.bytes_WW["dispatch"], ours.rows_WW * (packet + 6 * 8))
    np.testing.assert_array_equal(half.bytes_WW["combine_backward"], ours.bytes_WW["combine_backward"])
    back = predict("nvlink", routings, layout, **shape, options=NVLinkOptions(codecs=Codecs(combine_backward="fp8")))
    np.testing.assert_array_equal(back.bytes_WW["combine_backward"], ours.rows_WW * packet)
    np.testing.assert_array_equal(back.bytes_WW["dispatch"], ours.bytes_WW["dispatch"])
    any_transport = TransportOptions(codecs=Codecs(dispatch="fp8"))
    same = predict("nvlink", routings, layout, **shape, options=any_transport)
    np.testing.assert_array_equal(same.bytes_WW["dispatch"], half.bytes_WW["dispatch"])
    with pytest.raises(ValueError, match="'nvlink' has no options of type HierarchicalOptions"):
        predict("nvlink", routings, layout, **shape, options=HierarchicalOptions())


@pytest.mark.parametrize(
    ("transport", "routings", "message"),
    [
        ("pigeon", [[[0]], [[1]]], "pigeon.*alltoall, dedup, gather, hierarchical"),
        ("dedup", [[[0]]], "2 ranks, but there are routings of 1"),
        ("dedup", [[[0]], [[1, 2]]], "same K on all ranks.*1, 2"),
        ("dedup", [[[0]], [[4]]], r"rank 1 names experts 4 to 4.*0\.\.3"),
        ("dedup", [[[0]], [[-2]]], "rank 1 names experts -2"),
    ],
)
def test_a_volume_of_nonsense_is_refused(transport: str, routings: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tensors = [torch.tensor(r) for r in routings]
        predict(transport, tensors, ExpertLayout(((0, 1), (2, 3))), hidden=8, element_size=4)


# -- the contract of the verbs --------------------------------------------------------------------------------------


def slots_of(layout_name: str, ep: int, routings: list[torch.Tensor], rank: int) -> tuple[torch.Tensor, int]:
    """The slots that serve a rank's tokens, and how many a rank has; "spare": with two spare ones on each."""
    if layout_name != "spare":
        layout = layout_of(layout_name, ep)
        return assign(routings[rank], layout), layout.slots_per_rank
    layout, group = layout_of("contiguous", ep), routings[rank - rank % ep :][:ep]
    load_WE = torch.stack([count_choices(expert_TK, EXPERTS) for expert_TK in group])
    home_E, per_rank = torch.tensor([home for home, _ in layout.home_of]), layout.slots_per_rank + 2
    plan = plan_slots(load_WE, home_E, 2, Costs())
    places = [*layout.home_of, *((w, layout.slots_per_rank + place) for w in range(ep) for place in range(2))]
    names_N = torch.tensor([w * per_rank + place for w, place in places], dtype=torch.int32)
    assert (plan.expert_WS >= 0).any()
    return served_by(routings[rank], load_WE, home_E, plan, rank % ep, names_N), per_rank


def module_rides(name: str, layout_name: str, ep: int) -> dict[str, bool]:
    """`ride_module` around the reference experts against `ride` with them: outputs and gradients, bit for bit."""
    rank = dist.get_rank()
    grid = mesh((WORLD_SIZE // ep, ep), ("edp", "ep"))
    group, routings = grid["ep"].get_group() if ep > 1 else None, draw_routings((4, 7, 0, 5), 5, 0.2, 3)
    expert_TK, (slot_TK, own) = routings[rank], slots_of(layout_name, ep, routings, rank)
    generator = torch.Generator().manual_seed(rank)
    function = ExpertFunction(make_activation("silu", True))
    inputs = [(len(expert_TK), H), tuple(expert_TK.shape), (own, 2 * F, H), (own, H, F)]
    x, weight, up, down = [torch.randn(shape, generator=generator) for shape in inputs]
    results = []
    for way in ("ride", "module"):
        leaves = [t.clone().requires_grad_() for t in (x, weight, up, down)]
        transport = make_transport(name, group, own)
        setup = RideSetup(transport, ReferenceExperts(function), LayerStats(EXPERTS, ep, rank % ep))
        weights = ExpertWeights(leaves[2], leaves[3])
        if way == "ride":
            y, _ = ride(leaves[0], Routing(expert_TK, leaves[1]), slot_TK, weights, setup)
        else:

            def module(x_RH: torch.Tensor, slot_RJ: torch.Tensor, weight_RJ: torch.Tensor) -> torch.Tensor:
                return reference_experts(x_RH, slot_RJ, weight_RJ, weights, function)  # noqa: B023

            y = ride_module(leaves[0], Routing(expert_TK, leaves[1]), slot_TK, module, setup)
        # A gradient that is one number expanded is what `y.sum()` gives.
        y.sum().backward()
        traffic = setup.stats.traffic
        results.append((y.detach(), *(leaf.grad for leaf in leaves), traffic.bytes, traffic.baseline))
    names = ("y", "x", "weight", "up", "down")
    same = {n: torch.equal(a, b) for n, a, b in zip(names, results[0], results[1], strict=False)}
    return same | {"traffic": results[0][5:] == results[1][5:]}


@pytest.mark.parametrize(("layout", "ep"), [("contiguous", 4), ("spare", 2), ("permuted", 1)])
@pytest.mark.parametrize("name", NAMES)
def test_a_foreign_module_rides_like_our_own_experts(name: str, layout: str, ep: int, ranks: Ranks) -> None:
    for rank, same in enumerate(ranks(module_rides, name, layout, ep)):
        assert all(same.values()), f"rank {rank}: {[n for n, equal in same.items() if not equal]} differ"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("way", ["ride", "ride_module"])
def test_nothing_of_a_ride_survives_it(name: str, way: str) -> None:
    """A route that a cycle keeps alive would hold every layer's rows until the garbage collector comes by."""
    layout = ExpertLayout.contiguous(4, 1)
    transport = make_transport(name, None, layout.slots_per_rank)
    routes: list[weakref.ref[Any]] = []
    plan = transport.plan

    def spy(*args: Any) -> Any:
        planned = plan(*args)
        routes.append(weakref.ref(planned))
        return planned

    transport.plan = spy
    function = ExpertFunction(make_activation("silu", True))
    weights = ExpertWeights(torch.randn(4, 2 * F, H, requires_grad=True), torch.randn(4, H, F, requires_grad=True))
    x, weight_TK = torch.randn(5, H, requires_grad=True), torch.rand(5, 2, requires_grad=True)
    slot_TK = torch.tensor([[0, 1], [1, 2], [3, -1], [2, 0], [-1, -1]], dtype=torch.int32)
    gc.collect()
    gc.disable()
    try:
        setup = RideSetup(transport, GroupedExperts(function), LayerStats(4, 1, 0))
        if way == "ride":
            y, _ = ride(x, Routing(slot_TK, weight_TK), slot_TK, weights, setup)
        else:
            y = ride_module(
                x,
                Routing(slot_TK, weight_TK),
                slot_TK,
                lambda *rows: reference_experts(*rows, weights, function),
                setup,
            )
        y.sum().backward()
        del y
        assert [ref() for ref in routes] == [None]
    finally:
        gc.enable()


# -- choosing -------------------------------------------------------------------------------------------------------


def test_auto_names_its_reason() -> None:
    name, why = choose_transport("auto", 4, 8)
    assert name == "dedup" and "one row per token for each rank that holds any of its 8 experts" in why
    name, why = choose_transport("auto", 4, 1)
    assert name == "alltoall" and "one row per token either way" in why
    assert choose_transport("gather", 4, 8) == ("gather", "asked for")
    with pytest.raises(ValueError, match="'pigeon' is not known; use one of auto, nvlink, alltoall, dedup, gather"):
        choose_transport("pigeon", 4, 8)
    name, why = choose_transport("auto", 4, 8, {})
    assert name == "nvlink" and "4 ranks can use it" in why
    assert choose_transport("auto", 4, 1, {})[0] == "nvlink"
    assert choose_transport("dedup", 4, 8, {}) == ("dedup", "asked for")
    name, why = choose_transport("auto", 4, 8, {"nvlink": "there is no CUDA device"})
    assert name == "dedup" and why.endswith("; not nvlink: there is no CUDA device")


def _why_not() -> list[Any]:
    """On a rank: what auto says of nvlink here, one answer for all, asked once; and what asking for it does."""
    group = mesh((WORLD_SIZE,), ("ep",)).get_group()
    stated = NVLinkOptions(max_tokens=8)
    found = [unfit_transports(*arguments)["nvlink"] for arguments in
             [(None, 16, stated), (group, 16, None), (group, 16, NVLinkOptions()), (group, 12, stated)]]  # fmt: skip
    found.append(unfit_transports(group, 16, stated)["nvlink"])
    with unittest.mock.patch("carpool.transport.nvlink.transport.why_not", side_effect=AssertionError("asked again")):
        found.append(unfit_transports(group, 16, stated)["nvlink"])
    with pytest.raises(ValueError) as refused:
        carpool.MoE(16, F, EXPERTS, 3, ep_mesh=mesh((WORLD_SIZE,), ("ep",))["ep"], transport="nvlink")
    return [*found, str(refused.value)]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_nvlink_is_refused_where_it_cannot_be_used(ranks: Ranks) -> None:
    alone, unsaid, agreed, odd, nowhere, again, refused = ranks(_why_not)[1]
    assert alone == "one rank has nobody to send to" and "max_tokens" in unsaid and unsaid == agreed
    assert "24 bytes (12 elements) are not a multiple" in odd and nowhere == again == "there is no CUDA device"
    assert refused == "transport 'nvlink' cannot be used here: there is no CUDA device; use 'auto' or 'dedup'"
    with pytest.raises(ValueError, match="there is no CUDA device; use 'auto' or 'dedup'"):
        check_transport("nvlink", None)


def _asked_of_hierarchical() -> int:
    group, cls = dist.new_group(), TRANSPORTS["hierarchical"]  # of this group nothing is known
    with unittest.mock.patch.object(cls, "why_not", side_effect=cls.why_not) as asked:
        for _ in range(2):
            with pytest.raises(ValueError, match="on one node"):
                check_transport("hierarchical", group)
    return int(asked.call_count)


def test_ranks_are_asked_once_where_asking_finds_their_nodes(two_ranks: Ranks) -> None:
    assert two_ranks(_asked_of_hierarchical) == [1, 1]


def test_an_overflow_is_an_error_that_says_how_much_was_needed() -> None:
    transport = NVLink(None, 4, NVLinkOptions(), Buffers(None, torch.device("cpu"), max_tokens=4))
    check_overflow(transport)
    check_overflow(make_transport("dedup", None, 4))
    transport.buffers.needed.fill_(7)
    with pytest.raises(BufferOverflowError, match=r"hold 4 tokens of a rank, and 7 were needed.*max_tokens=7") as error:
        check_overflow(transport)
    assert error.value.needed == 7
    transport.buffers.grow(8)
    check_overflow(transport)
    transport.buffers.host_status.fill_(1)
    with pytest.raises(RankMissingError, match="did not arrive at dispatch"):
        check_overflow(transport)


# -- sums in a fixed order ------------------------------------------------------------------------------------------


def test_buffers_of_a_group_grow_with_what_is_asked_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """All layers of a group share them, whatever their schedules: one in more parts takes more leases."""
    group, cpu = type("Group", (), {})(), torch.device("cpu")
    monkeypatch.setitem(OWNERS, group, Buffers(None, cpu, num_leases=2, max_tokens=4))
    for asked, leases in ((1, 2), (6, 6), (2, 6)):
        assert buffers_of(group, cpu, num_leases=asked).num_leases == leases
    assert buffers_of(group, cpu, arena_bytes=4096).arena is not None


def test_ordered_sum_of_the_docstring() -> None:
    out = ordered_sum(torch.tensor([[1.0], [2.0], [4.0]]), torch.tensor([1, 0, 1]), 3)
    assert out.tolist() == [[2.0], [5.0], [0.0]]
    assert ordered_sum(torch.zeros(0, 2), torch.zeros(0, dtype=torch.int64), 3).tolist() == [[0.0, 0.0]] * 3
    assert ordered_sum(torch.zeros(0, 2), torch.zeros(0, dtype=torch.int64), 0).shape == (0, 2)
    assert ordered_sum(torch.ones(2, 3, dtype=torch.float64), torch.tensor([0, 0]), 1).dtype == torch.float64
    assert ordered_sum(torch.ones(2, 3, dtype=torch.bfloat16), torch.tensor([0, 0]), 1).dtype == torch.float32


def sequential_sum(values: torch.Tensor, index: torch.Tensor, num_rows: int) -> torch.Tensor:
    out = torch.zeros(num_rows, values.shape[1])
    for i, row in enumerate(index.tolist()):
        out[row] += values[i].float()
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ordered_sum_adds_in_order_of_position(dtype: torch.dtype) -> None:
    """Bit for bit the sum that a loop gives: terms of very different size make the order visible."""
    generator = torch.Generator().manual_seed(0)
    for n, width, rows in ((37, 5, 7), (1000, 3, 1), (199, 33, 250)):
        values = torch.randn(n, width, generator=generator) * 10 ** torch.randint(-4, 5, (n, 1), generator=generator)
        index = torch.randint(0, rows, (n,), generator=generator)
        assert torch.equal(ordered_sum(values.to(dtype), index, rows), sequential_sum(values.to(dtype), index, rows))


def _messages(name: str, chunks: int) -> list[str]:
    """The all-to-alls of a ride in chunks, forward and backward, by the width of a row."""
    schedule = Schedule("chunks", chunks)
    layer = carpool.MoE(8, 4, 8, 2, ep_mesh=mesh((4,), ("ep",))["ep"], transport=name, schedule=schedule)
    x_TH = torch.randn(9, 8, requires_grad=True)
    told: list[str] = []
    exchange, kinds = dist.all_to_all_single, {torch.float32: "rows", torch.int32: "choices", torch.int64: "counts"}

    def watched(out: torch.Tensor, rows: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        told.append(kinds[rows.dtype] if rows.dtype != torch.float32 or rows.shape[1] == 8 else "gradients")
        return exchange(out, rows, *args, **kwargs)

    with unittest.mock.patch.object(dist, "all_to_all_single", watched):
        layer(x_TH).sum().backward()
    return told


@pytest.mark.parametrize("name", ["dedup", "alltoall"])
def test_chunks_share_what_is_small(name: str, ranks: Ranks) -> None:
    for chunks in (1, 3):
        for told in ranks(_messages, name, chunks):
            assert Counter(told) == {"counts": 1, "choices": 1, "rows": 4 * chunks, "gradients": 1}
