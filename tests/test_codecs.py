"""Rows as bytes: what travels is as long as the codec says, and changes the answer by its rounding alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import carpool
from carpool import ActivationPolicies, ExpertLayout, Routing
from carpool.layout.topology import Topology
from carpool.placement import predict
from carpool.planner.machine.cost import RIDES, CostModel
from carpool.ride.schedule import Schedule
from carpool.train.config import load_config
from carpool.transport import Codecs, NVLinkOptions, TransportOptions, make_transport, unfit_transports
from carpool.transport.codecs import CODECS, PLAIN, TOKEN_VERBS
from tests.ranks import WORLD_SIZE, Ranks, mesh

H, F, E, K = 200, 24, 8, 3
SIZES = (5, 0, 9, 3)
LAYOUT = ExpertLayout.contiguous(E, WORLD_SIZE)
NODES = Topology.even(WORLD_SIZE, 2)
FP8 = Codecs("fp8", "fp8", "fp8", "fp8")
MIXED = Codecs(dispatch="fp8", combine="bf16", combine_backward="fp8", inter_node="nodes")
# transport, codecs, schedule, what rides keep
CASES: list[tuple[str, Codecs, Schedule, ActivationPolicies]] = [
    ("dedup", FP8, Schedule(), ActivationPolicies()),
    ("alltoall", Codecs(dispatch="fp8", dispatch_backward="bf16"), Schedule(), ActivationPolicies()),
    ("hierarchical", FP8, Schedule(), ActivationPolicies()),
    ("hierarchical", MIXED, Schedule(), ActivationPolicies()),
    ("dedup", FP8, Schedule("chunks", 3, 2), ActivationPolicies(expert_inputs="resend")),
]


def problem() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    tokens = sum(SIZES)
    expert_TK = torch.rand(tokens, E, generator=generator).argsort(1)[:, :K].int()
    expert_TK[::4, 1] = -1
    shapes = {
        "x_TH": (tokens, H),
        "weight_TK": (tokens, K),
        "dy_TH": (tokens, H),
        "up_EFH": (E, 2 * F, H),
        "down_EHF": (E, H, F),
    }
    return {"expert_TK": expert_TK} | {key: torch.randn(*shape, generator=generator) for key, shape in shapes.items()}


def with_weights(moe: Any, given: dict[str, torch.Tensor], homes: slice) -> Any:
    with torch.no_grad():
        moe.up_proj.copy_(given["up_EFH"][homes] / H**0.5)
        moe.down_proj.copy_(given["down_EHF"][homes] / F**0.5)
    return moe


def ride_with_codecs(cases: list[Any]) -> list[dict[str, Any]]:
    """Outputs, gradients and counted bytes of this rank."""
    rank, given, found = dist.get_rank(), problem(), []
    mine = slice(sum(SIZES[:rank]), sum(SIZES[: rank + 1]))
    homes = slice(rank * E // WORLD_SIZE, (rank + 1) * E // WORLD_SIZE)
    ep_mesh = mesh((1, WORLD_SIZE), ("edp", "ep"))["ep"]
    for name, codecs, schedule, kept in cases:
        options = TransportOptions(codecs=codecs)
        moe = carpool.MoE(
            H,
            F,
            E,
            K,
            ep_mesh=ep_mesh,
            transport=name,
            transport_options=options,
            schedule=schedule,
            activation_policies=kept,
        )
        with_weights(moe, given, homes)
        x_TH, weight_TK = (given[key][mine].clone().requires_grad_() for key in ("x_TH", "weight_TK"))
        y_TH = moe(x_TH, routing=Routing(given["expert_TK"][mine], weight_TK))
        y_TH.backward(given["dy_TH"][mine])
        leaves = {"dx": x_TH, "dweight": weight_TK, "dup": moe.up_proj, "ddown": moe.down_proj}
        one = {"y": y_TH.detach()} | {key: leaf.grad for key, leaf in leaves.items()}
        traffic = moe.core.stats.traffic
        found.append(one | {"bytes": traffic.bytes, "baseline": traffic.baseline})
    return found


class Hop(torch.autograd.Function):
    """Rows that leave their rank, rounded by hand: on the way by one codec, their gradients back by another."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, there: str, back: str) -> torch.Tensor:
        ctx.back = back
        return rounded(rows, there)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return rounded(gradient, ctx.back), None, None


def rounded(rows: torch.Tensor, codec: str) -> torch.Tensor:
    return CODECS[codec].decode(CODECS[codec].encode(rows), rows.shape[1], rows.dtype)


def by_hand(transport: str, codecs: Codecs) -> dict[str, torch.Tensor]:
    """One process, token by token."""
    given, one = problem(), with_weights(carpool.MoE(H, F, E, 1), problem(), slice(None))
    x_TH, weight_TK = (given[key].clone().requires_grad_() for key in ("x_TH", "weight_TK"))

    def out(row: torch.Tensor, moves: bool) -> torch.Tensor:
        return Hop.apply(row, codecs.dispatch, codecs.dispatch_backward) if moves else row

    def home(row: torch.Tensor, moves: bool) -> torch.Tensor:
        return Hop.apply(row, codecs.combine, codecs.combine_backward) if moves else row

    def expert(row: torch.Tensor, token: int, choice: int) -> torch.Tensor:
        routing = Routing(given["expert_TK"][token, choice].view(1, 1), torch.ones(1, 1))
        return one(row, routing=routing) * weight_TK[token, choice]

    def on_rank(row: torch.Tensor, token: int, rank: int) -> torch.Tensor:
        return sum((expert(row, token, k) for k, at in enumerate(rank_TK[token]) if at == rank), torch.zeros(1, H))

    rank_TK = torch.where(given["expert_TK"] < 0, -1, given["expert_TK"] // (E // WORLD_SIZE)).tolist()
    sources = [rank for rank, size in enumerate(SIZES) for _ in range(size)]
    y = []
    for token, source in enumerate(sources):
        x = x_TH[token : token + 1]
        ranks, sums = sorted({rank for rank in rank_TK[token] if rank >= 0}), torch.zeros(1, H)
        if transport == "alltoall":
            for k, rank in enumerate(rank_TK[token]):
                if rank >= 0:
                    sums = sums + home(expert(out(x, rank != source), token, k), rank != source)
        elif transport == "dedup":
            for rank in ranks:
                sums = sums + home(on_rank(out(x, rank != source), token, rank), rank != source)
        else:
            for node in sorted({rank // 2 for rank in ranks}):
                middle, coded = node * 2 + source % 2, codecs.inter_node == "all"
                there, part = out(x, middle != source), torch.zeros(1, H)
                for rank in (rank for rank in ranks if rank // 2 == node):
                    on = coded and rank != middle
                    part = part + home(on_rank(out(there, on), token, rank), on)
                sums = sums + home(part, middle != source)
        y.append(sums)
    y_TH = torch.cat(y)
    y_TH.backward(given["dy_TH"])
    leaves = {"dx": x_TH, "dweight": weight_TK, "dup": one.up_proj, "ddown": one.down_proj}
    return {"y": y_TH.detach()} | {key: leaf.grad for key, leaf in leaves.items() if leaf.grad is not None}


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got - want).norm() / want.norm())


@pytest.fixture(scope="module")
def rides(ranks: Ranks) -> list[list[dict[str, Any]]]:
    return ranks(ride_with_codecs, CASES)


@pytest.mark.parametrize("number", range(len(CASES)))
def test_the_answer_is_that_of_rounding_by_hand(rides: list[list[dict[str, Any]]], number: int) -> None:
    name, codecs, *_ = CASES[number]
    want, exact = by_hand(name, codecs), by_hand(name, PLAIN)
    for key, right in want.items():
        got = torch.cat([of_rank[number][key] for of_rank in rides])
        assert error(got, right) < 3e-4, key  # where the order of a sum decides a rounding, an element is another
        assert error(exact[key], right) > 3e-3, f"{key}: the codec changes nothing that this test could see"


@pytest.mark.parametrize("number", range(len(CASES) - 1))
def test_counted_bytes_are_those_that_were_predicted(rides: list[list[dict[str, Any]]], number: int) -> None:
    name, codecs, *_ = CASES[number]
    routings = list(problem()["expert_TK"].split(SIZES))
    shape: dict[str, Any] = {"hidden": H, "element_size": 4, "topology": NODES}
    volume = predict(name, routings, LAYOUT, **shape, options=TransportOptions(codecs=codecs))
    plain = predict(name, routings, LAYOUT, **shape)
    for verb in TOKEN_VERBS:
        counted = np.array([of_rank[number]["bytes"][verb] for of_rank in rides])
        np.testing.assert_array_equal(counted, volume.bytes_WW[verb], err_msg=verb)
        assert (volume.bytes_remote(verb) < plain.bytes_remote(verb)) == (getattr(codecs, verb) != "none"), verb
        # What is saved is saved of rows as they are.
        every = predict("alltoall", routings, LAYOUT, **shape)
        assert sum(of_rank[number]["baseline"][verb] for of_rank in rides) == every.bytes_remote(verb)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("hidden", [3, 128, 200])
@pytest.mark.parametrize("name", list(CODECS))
def test_rows_that_are_encoded_again_do_not_change_again(name: str, hidden: int, dtype: torch.dtype) -> None:
    codec, generator = CODECS[name], torch.Generator().manual_seed(hidden)
    x_NH = torch.randn(37, hidden, generator=generator) * torch.logspace(-6, 6, 37)[:, None]
    x_NH[5] = 0
    x_NH = x_NH.to(dtype)
    coded = codec.encode(x_NH)
    assert coded[0].numel() * coded.element_size() == codec.row_bytes(hidden, dtype.itemsize)
    once = codec.decode(coded, hidden, dtype)
    assert once.dtype == dtype and torch.equal(codec.decode(codec.encode(once), hidden, dtype), once)
    most = x_NH.float().abs().amax(1, keepdim=True)
    assert ((once.float() - x_NH.float()).abs() <= x_NH.float().abs() / 16 + most / 2**15).all()
    assert torch.equal(once, x_NH) == (not codec.lossy or (name == "bf16" and dtype == torch.bfloat16))
    assert codec.encode(x_NH[:0]).shape[0] == 0 == codec.decode(codec.encode(x_NH[:0]), hidden, dtype).shape[0]


def test_what_travels_otherwise_is_said() -> None:
    assert PLAIN.plain and not PLAIN.lossy_reasons
    assert MIXED.lossy_reasons == [
        "tokens to experts are sent as FP8 inter-node",
        "outputs of experts are sent as bfloat16 inter-node",
        "gradients of MoE outputs are sent as FP8 inter-node",
    ]
    assert MIXED.for_element_size(4) == MIXED
    assert MIXED.for_element_size(2).lossy_reasons == [MIXED.lossy_reasons[0], MIXED.lossy_reasons[2]]


def test_codecs_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match=r"codec dispatch = 'fp9'.*did you mean fp8"):
        Codecs(dispatch="fp9")
    with pytest.raises(ValueError, match=r"codec\.combine = 'fp9'.*expected"):
        load_config(None, ["codec.combine=fp9"])
    for settings, message in {
        ("moe.transport=gather", "codec.dispatch=fp8"): r"transport 'gather' does not take these codecs.*dedup",
        ("moe.transport=nvlink", "codec.combine=fp8"): "what travels out to experts",
        ("moe.transport=nvlink", "codec.dispatch=bf16"): "what travels out to experts",
        ("moe.transport=dedup", "codec.inter_node=nodes"): "over one hop",
        ("codec.inter_node=nodes",): r"moe\.transport=hierarchical",
    }.items():
        with pytest.raises(ValueError, match=message):
            load_config(None, list(settings))
    taken = load_config(
        None, ["moe.transport=hierarchical", "codec.inter_node=nodes", "codec.combine=bf16"]
    ).codec.codecs
    assert taken == Codecs(combine="bf16", inter_node="nodes")
    with pytest.raises(ValueError, match="transport 'gather' does not take"):
        make_transport("gather", None, 1, TransportOptions(codecs=FP8))


def test_auto_leaves_out_what_cannot_encode(ranks: Ranks) -> None:
    """On a CPU nvlink is out either way; why is asked of the codecs first."""
    assert all("what travels out" in reason for reason in ranks(why_not_nvlink))


def why_not_nvlink() -> str:
    options = NVLinkOptions(max_tokens=8, codecs=Codecs(combine="fp8"))
    return unfit_transports(dist.group.WORLD, H, options)["nvlink"]


def test_the_cost_of_rides_is_that_of_coded_rows() -> None:
    plain = CostModel(hidden=H, element_size=4, transport="dedup")
    rows_WW = 1000 * (np.ones((WORLD_SIZE, WORLD_SIZE)) - np.eye(WORLD_SIZE))
    row = CODECS["fp8"].row_bytes(H, 4)
    assert replace(plain, codecs=FP8).row_bytes == row < plain.row_bytes == 4 * H
    network = plain.hardware.rate("network")
    for codecs, size in ((FP8, row), (replace(FP8, inter_node="nodes"), row), (PLAIN, 4 * H)):
        seconds = replace(plain, codecs=codecs).ride_seconds(rows_WW, NODES)
        assert seconds == pytest.approx(RIDES * (network.latency + 2000 * size / network.bytes_per_second))
    nodes_only = replace(plain, codecs=replace(FP8, inter_node="nodes"))
    assert nodes_only.row_bytes == 4 * H
    ratio = nodes_only.network_weight(NODES) / plain.network_weight(NODES)
    assert ratio == pytest.approx(row / (4 * H))
