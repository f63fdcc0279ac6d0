"""Fewer rows to each other node than a rank has tokens: the same bits, the bytes that were said, no silent loss; and
hops of pieces that are under way."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

import carpool
from carpool.layout import ExpertLayout
from carpool.layout.topology import Topology
from carpool.placement import VERBS, predict
from carpool.ride.schedule import Schedule
from carpool.routing import Routing
from carpool.train.run import loop
from carpool.train.steps.capacity import full_capacity
from carpool.transport import BufferOverflowError, Hierarchical, HierarchicalOptions, set_topology
from carpool.transport.base import Pending
from carpool.transport.multi_hop import Chunk, Relay, Relays
from carpool.transport.token_capacity import NodeCapacity
from tests.ranks import Ranks
from tests.train.test_loop import MODEL, losses, records, start, weights
from tests.train.test_loop import run as train_run

H, F, EXPERTS, TOP_K, RANKS, MOST = 8, 6, 8, 2, 4, 13
SIZES = (9, 0, MOST, 2)


def routing_of(rank: int) -> torch.Tensor:
    """Tokens of each rank that mostly stay on their node, the first of two: (T, K)."""
    generator = torch.Generator().manual_seed(rank)
    near = torch.rand(SIZES[rank], EXPERTS, generator=generator)
    near[:, EXPERTS // 2 :] -= 0.3 if rank < RANKS // 2 else -0.3
    expert_TK = near.topk(TOP_K).indices.int()
    expert_TK[::5, 1] = -1
    return expert_TK


def rows_needed() -> int:
    """Of the (rank, other node) with most."""
    node_of_E = torch.arange(EXPERTS) // (EXPERTS // 2)
    most = 0
    for rank in range(RANKS):
        expert_TK = routing_of(rank)
        far_TK = (expert_TK >= 0) & (node_of_E[expert_TK.long()] != rank // 2)
        most = max(most, int(far_TK.any(1).sum()))
    return most


def ride(
    options: HierarchicalOptions, chunks: int, evaluates: bool = False
) -> tuple[list[torch.Tensor], dict[str, Any], int | None]:
    """Output and gradients of a layer on this rank, bytes that were counted, and what `check` said was needed."""
    group_mesh = dist.device_mesh.init_device_mesh("cpu", (RANKS,), mesh_dim_names=("ep",))["ep"]
    set_topology(group_mesh.get_group(), Topology.even(RANKS, 2))
    torch.manual_seed(0)
    schedule = Schedule("chunks", chunks) if chunks > 1 else Schedule()
    moe = carpool.MoE(
        H, F, EXPERTS, TOP_K, ep_mesh=group_mesh, transport="hierarchical", transport_options=options, schedule=schedule
    )
    with nullcontext() if not evaluates else full_capacity([cast(Hierarchical, moe.transport).node_capacity]):
        return forward_and_backward(moe)


def forward_and_backward(moe: carpool.MoE) -> tuple[list[torch.Tensor], dict[str, Any], int | None]:
    """See `ride`."""
    with mock.patch.object(dist, "all_reduce", side_effect=AssertionError("there is no tensor on the device yet")):
        carpool.transport.check_overflow(moe.transport)
    expert_TK = routing_of(dist.get_rank())
    generator = torch.Generator().manual_seed(dist.get_rank())
    x = torch.randn(len(expert_TK), H, generator=generator).requires_grad_()
    weight_TK = torch.rand(expert_TK.shape, generator=generator).requires_grad_()
    y = moe(x, routing=Routing(expert_TK, weight_TK))
    y.square().sum().backward()
    needed = None
    try:
        carpool.transport.check_overflow(moe.transport)
    except BufferOverflowError as error:
        needed = error.needed
    found = [y.detach(), x.grad, weight_TK.grad, *(p.grad for p in moe.parameters())]
    return [one for one in found if one is not None], moe.core.stats.traffic.bytes, needed


def said(options: HierarchicalOptions | None) -> dict[str, np.ndarray]:
    """Bytes of each verb from rank to rank, as the transport says them before."""
    return predict(
        "hierarchical", [routing_of(rank) for rank in range(RANKS)], ExpertLayout.contiguous(EXPERTS, RANKS),
        hidden=H, element_size=4, options=options, topology=Topology.even(RANKS, 2),
    ).bytes_WW  # fmt: skip


@pytest.mark.parametrize("chunks", [1, 3])
def test_room_for_fewer_rows_gives_the_same_bits_and_sends_what_it_says(ranks: Ranks, chunks: int) -> None:
    whole = ranks(ride, HierarchicalOptions(MOST, first_hop="fixed"), chunks)
    rows = 3 * -(-rows_needed() // 3) if chunks == 3 else rows_needed()
    rows = min(MOST, rows + (3 if chunks == 3 else 0))
    assert rows < MOST
    options = HierarchicalOptions(MOST, first_hop="fixed", inside="dedup", capacity=rows)
    fewer = ranks(ride, options, chunks)
    for (want, _, _), (got, _, needed) in zip(whole, fewer, strict=True):
        assert needed is None and len(want) == len(got) > 3
        assert all(torch.equal(one, other) for one, other in zip(want, got, strict=True))
    for verb in VERBS[1:]:
        np.testing.assert_array_equal([counted[verb] for _, counted, _ in fewer], said(options)[verb], err_msg=verb)


def test_evaluations_send_what_was_chosen_and_no_step_of_padding(ranks: Ranks) -> None:
    """Whatever the capacity is, even if it is too small; the same bits."""
    whole = ranks(ride, HierarchicalOptions(MOST, first_hop="fixed"), 1)
    for options in (HierarchicalOptions(99, first_hop="fixed"), HierarchicalOptions(99, first_hop="fixed", capacity=1)):
        found = ranks(ride, options, 1, True)
        for (want, _, _), (got, _, needed) in zip(whole, found, strict=True):
            assert needed is None and all(torch.equal(one, other) for one, other in zip(want, got, strict=True))
        for verb in VERBS:
            np.testing.assert_array_equal([sent[verb] for _, sent, _ in found], said(None)[verb], err_msg=verb)


def test_rows_without_a_place_are_noticed_by_all_ranks(ranks: Ranks) -> None:
    found = ranks(ride, HierarchicalOptions(MOST, first_hop="fixed", capacity=rows_needed() - 1), 1)
    assert [needed for _, _, needed in found] == [rows_needed()] * RANKS
    assert any(one[0].isnan().all() for one, _, _ in found if len(one[0]))


def test_the_number_of_rows_follows_what_steps_need() -> None:
    room = NodeCapacity(2000, step_tokens=1000)
    assert [room.fit(n) for n in (400, 600)] == [False, True] and room.capacity == 675
    assert [room.fit(610) for _ in range(4)] == [False] * 4 and room.capacity == 675, "it would save less than a tenth"
    assert not room.note(torch.tensor(225), 3) and room.needed.item() == 673 and room.note(torch.tensor(226), 3)
    room.grow(900)
    assert room.capacity == 900 and not room.overflowed()
    assert [room.fit(10) for _ in range(16)] == [False] * 15 + [True] and room.capacity == 12
    stays = NodeCapacity(1000)
    assert not stays.counted and not any(stays.fit(10) for _ in range(99)) and stays.capacity == 1000


def test_a_run_sends_as_many_rows_as_its_steps_need(two_ranks: Ranks, text: list[str], tmp_path: Path) -> None:
    """From too many, and from too few: then a step is repeated with more. Losses, weights, their average, moments and
    drop-out are the same."""
    settings = [*text, "moe.transport=hierarchical", "parallelism.ranks_per_node=1", "training.max_steps=3"]
    settings += ["training.eval_steps=none", "training.save_steps=3", "model.config.num_hidden_layers=1"]
    settings += ["training.gradient_accumulation_steps=2", "model.config.attention_dropout=0.2"]
    settings += ["training.ema_decay=0.9"]
    settings += ["model.config.num_experts_per_tok=1", "moe.transport_options.first_hop=fixed"]
    whole, cramped = tmp_path / "whole", tmp_path / "cramped"
    assert start(two_ranks, whole, settings) == [""] * 2
    assert start(two_ranks, cramped, [*settings, "moe.transport_options.capacity=3"]) == [""] * 2
    assert losses(cramped) == losses(whole)
    one, other = weights(whole, 3), weights(cramped, 3)
    assert one.keys() == other.keys() and all(torch.equal(other[name], tensor) for name, tensor in one.items())
    repeats, fewer = (
        [line for line in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()) if line["kind"] == kind]
        for run, kind in ((cramped, "repeat"), (whole, "node_rows"))
    )
    assert repeats[0]["step"] == 1 and repeats[0]["capacity"] is None and 3 < repeats[0]["node_rows"] <= 64
    assert not records(whole, "repeat") and fewer[0]["step"] == 2 and fewer[0]["rows"] < 0.9 * 64
    sent = {step: line["bytes_remote"] for step, line in records(whole).items()}
    row = 4 * 32
    verbs = (row + 8) + row + row + (row + 4)
    assert sent[1] - sent[3] == 2 * 2 * (64 - fewer[0]["rows"]) * verbs, "micro-batches' rows of both ranks"


def evaluated(output: str, overrides: list[str]) -> list[int]:
    """Bytes that this rank sends to the other node in each evaluation of a run, with its sample."""
    found, evaluate = [], loop.evaluate

    def counted(run: Any) -> bool:
        def sent() -> int:
            first = 2 * (1 - dist.get_rank() // 2)
            of_layers = [own.stats.traffic.bytes for own in run.built.rides]
            return sum(int(sum(one[verb][first : first + 2])) for one in of_layers for verb in VERBS)

        before, better = sent(), evaluate(run)
        found.append(sent() - before)
        return better

    with mock.patch.object(loop, "evaluate", counted):
        assert train_run(output, overrides) == ""
    return found


def test_evaluations_of_a_run_send_no_more_than_each_choice_needs(
    ranks: Ranks, text: list[str], tmp_path: Path
) -> None:
    """On two emulated nodes of two ranks, whose steps send a fixed number of tokens to the other one."""
    settings = [*MODEL, *text, "parallelism.ranks_per_node=2", "parallelism.ep_size=4", "training.max_steps=2"]
    settings += ["training.eval_steps=1", "training.eval_on_start=true", "training.save_steps=none"]
    settings += ["training.sample_prompt=a", "training.sample_tokens=4"]
    ways = {
        "dedup": ["moe.transport=dedup"],
        "hops": ["moe.transport=hierarchical", "moe.transport_options.first_hop=fixed"],
    }
    sent = {name: ranks(evaluated, str(tmp_path / name), [*settings, *way]) for name, way in ways.items()}
    for dedup, hops in zip(sent["dedup"], sent["hops"], strict=True):
        assert len(dedup) == len(hops) == 2 and all(0 < two <= one for one, two in zip(dedup, hops, strict=True)), sent


def ride_of(relays: Relays, started: list[str], name: str, numbers: int, fails: str = "") -> list[Pending]:
    """Chunks of one piece and two hops. `started` gets each second hop as it starts."""
    ride = object()

    def second(hop: str) -> Callable[[str], Pending]:
        def start(came: str) -> Pending:
            if hop == fails:
                raise ConnectionError(hop)
            started.append(hop)
            return Pending(lambda: f"{came} {hop}")

        return start

    def piece(number: int) -> Pending:
        first = Pending(lambda: f"1.{name}{number}")
        return relays.add(Relay(Chunk(ride, "dispatch", number, 1), first, [second(f"2.{name}{number}")]))

    return [piece(number) for number in range(numbers)]


def test_second_hops_start_with_the_neighbour_that_is_waited_for() -> None:
    relays, started = Relays(), list[str]()
    pieces = ride_of(relays, started, "a", 3)
    assert pieces[0].wait() == "1.a0 2.a0" and started == ["2.a0", "2.a1"]
    assert pieces[1].wait() == "1.a1 2.a1" and started == ["2.a0", "2.a1", "2.a2"]
    assert pieces[2].wait() == "1.a2 2.a2" and not relays._under_way


def test_a_ride_that_ended_with_an_error_leaves_no_hops_to_the_next() -> None:
    relays, started = Relays(), list[str]()
    pieces = ride_of(relays, started, "a", 3, fails="2.a1")
    with pytest.raises(ConnectionError, match=r"2\.a1"):
        pieces[0].wait()
    with pytest.raises(RuntimeError, match="dispatch: a hop of this message has failed before"):
        pieces[1].wait()
    assert started == ["2.a0"]
    del pieces
    again = ride_of(relays, started, "b", 2)
    assert [piece.wait() for piece in again] == ["1.b0 2.b0", "1.b1 2.b1"]
    assert started == ["2.a0", "2.b0", "2.b1"], "2.a2 was left behind, and is not started"
