"""What holds an expert, and which of its slots serves a token."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from carpool import ExpertLayout, Routing, assign
from tests.layouts import EXPERTS, LAYOUTS, layout_of

# 4 experts on 2 ranks, expert 1 replicated on rank 1: the example of the module's docstring.
EXAMPLE = ExpertLayout(((0, 1), (2, 3))).with_replicas([(1, 1)])
FEASIBLE = [(name, ranks) for name in LAYOUTS for ranks in (4, 2, 1) if ranks > 1 or not name.startswith("replicated")]


def test_the_example_of_the_docstring() -> None:
    assert EXAMPLE.homes == ((0, 1), (2, 3)) and EXAMPLE.slots == ((0, 1), (2, 3, 1))
    assert EXAMPLE.expert_WS.tolist() == [[0, 1, -1], [2, 3, 1]] and EXAMPLE.expert_WS.dtype == torch.int32
    assert EXAMPLE.slots_per_rank == 3 and EXAMPLE.num_replicas == 1 and EXAMPLE.kind == "replicated"
    assert EXAMPLE.slots_of == ((0,), (1, 5), (3,), (4,))
    assert EXAMPLE.home_of == ((0, 0), (0, 1), (1, 0), (1, 1))
    assert EXAMPLE.copies_EC(torch.device("cpu")).tolist() == [[0, -1], [1, 5], [3, -1], [4, -1]]
    assert not EXAMPLE.slot_is_home


def test_contiguous_spreads_evenly_and_gives_the_first_ranks_one_more() -> None:
    assert ExpertLayout.contiguous(4, 2).homes == ((0, 1), (2, 3))
    assert ExpertLayout.contiguous(10, 4).homes == ((0, 1, 2), (3, 4, 5), (6, 7), (8, 9))
    assert ExpertLayout.contiguous(3, 1).homes == ((0, 1, 2),)
    assert ExpertLayout.contiguous(8, 4).slot_is_home and ExpertLayout.contiguous(8, 4).kind == "contiguous"
    assert ExpertLayout.permuted([3, 1, 0, 2], 2).homes == ((3, 1), (0, 2))


@pytest.mark.parametrize(
    ("layout", "kind"),
    [
        (ExpertLayout.contiguous(8, 4), "contiguous"),
        (ExpertLayout.permuted([1, 0, 2, 3], 2), "permuted"),
        (ExpertLayout(((0, 1), (2, 3)), ((1, 0), (2, 3))), "permuted"),
        (ExpertLayout(((0, 1, 2), (3,))), "uneven"),
        (ExpertLayout(((0, 1, 2, 3), ())), "uneven"),
        (EXAMPLE, "replicated"),
    ],
)
def test_kind_is_one_word(layout: ExpertLayout, kind: str) -> None:
    assert layout.kind == kind


def test_slices_of_experts() -> None:
    layout = ExpertLayout.sliced(4, 2, 2)
    assert layout.homes == ((0, 2), (1, 3), (4, 6), (5, 7)) and layout.slot_is_home and layout.kind == "sliced"
    assert (layout.num_experts, layout.num_rows, layout.slices, layout.num_replicas) == (4, 8, 2, 0)
    assert layout.expert_WS.tolist() == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert layout.slice_WS.tolist() == [[0, 0], [1, 1], [0, 0], [1, 1]]
    routing = Routing(torch.tensor([[3, 0], [1, -1]], dtype=torch.int32), None)
    assert assign(routing, layout, 0).tolist() == [[5, 7, 0, 2], [1, 3, -1, -1]]
    # More ranks than experts; equal homes without slices differ; empty slots have none.
    assert ExpertLayout.sliced(2, 2, 4).num_ranks == 8 and layout != ExpertLayout(layout.homes)
    assert ExpertLayout(((0, 1),), ((1, -1, 0),), slices=2).slice_WS.tolist() == [[1, -1, 0]]
    whole = ExpertLayout(((0, 2), (1, 3)), ((0, 1), (2, 3)), slices=2)
    routing = Routing(torch.tensor([[1, 0], [1, -1]], dtype=torch.int32), None)
    assert assign(routing, whole, 0).tolist() == [[2, 3, 0, 1], [2, 3, -1, -1]], "rank 1 computes all of expert 1"
    with pytest.raises(ValueError, match="homes name 3 slices, which are no experts of 2 slices each"):
        ExpertLayout(((0, 1), (2,)), slices=2)
    with pytest.raises(ValueError, match=r"slices \[1\] have no slot"):
        ExpertLayout(((0, 1),), ((0,),), slices=2)


def test_layouts_compare_and_hash_by_content() -> None:
    same = ExpertLayout([[0, 1], torch.tensor([2, 3])], [[0, 1], [2, 3, 1]])  # type: ignore[arg-type]
    assert same == EXAMPLE and hash(same) == hash(EXAMPLE) and same != ExpertLayout.contiguous(4, 2)
    with pytest.raises(AttributeError):
        same.homes = ()  # type: ignore[misc]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ExpertLayout(()), "at least one expert"),
        (lambda: ExpertLayout(((), ())), "at least one expert"),
        (lambda: ExpertLayout(((0, 1), (1, 2))), r"0\.\.3 exactly once.*\[1\] more than once, \[3\] not at all"),
        (lambda: ExpertLayout(((0, 1), (5, 2))), r"\[3\] not at all, and \[5\], which do not exist"),
        (lambda: ExpertLayout(((0, -1), (1,))), r"\[-1\], which do not exist"),
        (lambda: ExpertLayout(((0,), (1,)), ((0,), (1,), ())), "homes name 2 ranks but slots name 3"),
        (lambda: ExpertLayout(((0,), (1,)), ((0, 2), (1,))), r"slots of rank 0 name experts \[2\].*0\.\.1"),
        (lambda: ExpertLayout(((0,), (1,)), ((0,), (1, -2))), r"slots of rank 1 name experts \[-2\]"),
        (lambda: ExpertLayout(((0,), (1,)), ((0, 1, 0), (1,))), r"slots of rank 0 hold an expert twice: \[0, 1, 0\]"),
        (lambda: ExpertLayout(((0,), (1,)), ((0,), (0, -1))), r"experts \[1\] have no slot"),
        (lambda: ExpertLayout.contiguous(3, 4), "3 experts cannot be spread over 4 ranks.*use fewer"),
        (lambda: ExpertLayout.contiguous(3, 0), "cannot be spread over 0 ranks"),
        (lambda: EXAMPLE.with_replicas([(0, 2)]), r"expert 0 on rank 2: ranks are 0\.\.1"),
        (lambda: EXAMPLE.with_replicas([(4, 0)]), r"cannot replicate expert 4: experts are 0\.\.3"),
        (lambda: EXAMPLE.with_replicas([(-1, 0)]), r"cannot replicate expert -1"),
        (lambda: EXAMPLE.with_replicas([(0, 0)]), "hold an expert twice"),
    ],
)
def test_an_impossible_layout_is_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_fractions_of_experts_are_refused() -> None:
    with pytest.raises(TypeError):
        ExpertLayout(((0.0, 1.5),))  # type: ignore[arg-type]


# -- files ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "ranks"), FEASIBLE)
def test_a_layout_survives_its_file(name: str, ranks: int, tmp_path: Path) -> None:
    layout = layout_of(name, ranks)
    layout.save(tmp_path / "layout.json")
    assert ExpertLayout.load(tmp_path / "layout.json") == layout
    assert json.loads((tmp_path / "layout.json").read_text()) == layout.to_dict()


def test_a_file_may_leave_out_the_slots(tmp_path: Path) -> None:
    path = tmp_path / "layout.json"
    path.write_text('{"homes": [[1, 0], [2]]}')
    assert ExpertLayout.load(path) == ExpertLayout(((1, 0), (2,)))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not an expert layout"),
        (b'{"homes": [[0, 1], [2', "is not an expert layout"),
        (b"\xff\xfe\x00", "layout.json"),
        (b"[[0, 1]]", "is not an expert layout"),
        (b'{"slots": [[0]]}', "is not an expert layout.*homes"),
        (b'{"homes": [0, 1]}', "is not an expert layout"),
        (b'{"homes": [["a"]]}', "is not an expert layout"),
        (b'{"homes": [[0.5]]}', "is not an expert layout"),
        (b'{"homes": {"0": [1]}}', "is not an expert layout"),
        (b'{"homes": [[0]], "slots": null}', "is not an expert layout"),
        (b'{"homes": [[0], [0]]}', "exactly once"),
    ],
)
def test_a_corrupt_file_is_named(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "layout.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message) as error:
        ExpertLayout.load(path)
    assert str(path) in str(error.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cannot read the expert layout .*nowhere\.json: No such file"):
        ExpertLayout.load(tmp_path / "nowhere.json")
    with pytest.raises(ValueError, match=r"cannot read the expert layout .*directory"):
        ExpertLayout.load(tmp_path)


# -- assign ---------------------------------------------------------------------------------------------------------


def test_assign_of_the_docstring() -> None:
    routing = Routing(torch.tensor([[1, 2], [3, -1]], dtype=torch.int32), None)
    assert assign(routing, EXAMPLE, 0).tolist() == [[1, 3], [4, -1]]
    assert assign(Routing(routing.expert_TK[:1], None), EXAMPLE, 1).tolist() == [[5, 3]]


def best_slots(layout: ExpertLayout, experts: list[int], token: int, source: int) -> list[int]:
    """The rule of `assign` in words, for one token."""
    holders = {e: {slot // layout.slots_per_rank: slot for slot in layout.slots_of[e]} for e in experts if e >= 0}
    visited = {source} | {next(iter(ranks)) for ranks in holders.values() if len(ranks) == 1}
    while True:
        left = {e: ranks for e, ranks in holders.items() if not visited & ranks.keys()}
        holds = {rank: [e for e in left if rank in left[e]] for rank in range(layout.num_ranks)}
        alternatives = {e: sum(len(holds[rank]) for rank in left[e]) for e in left}

        def preference(rank: int, holds: Any = holds, alternatives: Any = alternatives) -> tuple[int, int, int]:
            turn = (rank ^ token) % (1 << (layout.num_ranks - 1).bit_length())
            return -len(holds[rank]), sum(alternatives[e] for e in holds[rank]), turn

        best = min(holds, key=preference)
        if len(holds[best]) < 2:
            break
        visited.add(best)

    def best_slot(expert: int) -> int:
        ranks = sorted(holders[expert])
        in_turn = [ranks[(token + i) % len(ranks)] for i in range(len(ranks))]
        for wanted in ({source}, visited, set(ranks)):
            for rank in in_turn:
                if rank in wanted:
                    return holders[expert][rank]
        raise AssertionError("an expert without a slot")

    return [best_slot(e) if e >= 0 else -1 for e in experts]


@pytest.mark.parametrize(("name", "ranks"), FEASIBLE)
def test_assign_follows_its_rule_and_picks_a_copy_that_exists(name: str, ranks: int) -> None:
    layout = layout_of(name, ranks)
    generator = torch.Generator().manual_seed(1)
    for top_k, tokens in ((1, 9), (3, 40), (8, 37), (2, 0)):
        expert_TK = torch.rand(tokens, EXPERTS, generator=generator).argsort(1)[:, :top_k].int()
        expert_TK[torch.rand(tokens, top_k, generator=generator) < 0.2] = -1
        before = expert_TK.clone()
        for source in range(ranks):
            slot_TK = assign(Routing(expert_TK, None), layout, source)
            assert slot_TK.dtype == torch.int32 and slot_TK.shape == (tokens, top_k * layout.slices)
            for token, (choices, slots) in enumerate(zip(expert_TK.tolist(), slot_TK.tolist(), strict=True)):
                experts = [e * layout.slices + i if e >= 0 else -1 for e in choices for i in range(layout.slices)]
                assert slots == best_slots(layout, experts, token, source)
                for e, slot in zip(experts, slots, strict=True):
                    where = divmod(slot, layout.slots_per_rank)
                    assert (slot == -1) if e == -1 else layout.slots[where[0]][where[1]] == e
            assert torch.equal(slot_TK, assign(Routing(expert_TK, None), layout, source)), "assign is a pure function"
            assert torch.equal(expert_TK, before), "assign does not write into the routing"


def test_copies_share_the_load_in_turn() -> None:
    """Tokens whose rank has no copy and that go nowhere else anyway take the copies one after the other."""
    layout = ExpertLayout(((0,), (1,), (2,), (3,))).with_replicas([(0, 1), (0, 2)])
    slot_TK = assign(Routing(torch.zeros(7, 1, dtype=torch.int32), None), layout, 3)
    assert (slot_TK // layout.slots_per_rank).flatten().tolist() == [0, 1, 2, 0, 1, 2, 0]


def test_a_replica_on_a_rank_that_is_visited_anyway_shares_the_ride() -> None:
    layout = ExpertLayout(((0,), (1,), (2,), (3,))).with_replicas([(0, 1), (0, 2)])
    routing = Routing(torch.tensor([[0, 2]] * 5, dtype=torch.int32), None)
    assert (assign(routing, layout, 3) // layout.slots_per_rank).tolist() == [[2, 2]] * 5


def test_a_pickled_layout_has_no_tensors() -> None:
    """They may be on a GPU, which the process that reads it does not see."""
    layout = ExpertLayout(((0, 1), (2, 3)), ((0, 1, 2), (2, 3, 0)))
    layout.copies_EC(torch.device("meta"))
    layout.slot_EW(torch.device("meta"))
    again = pickle.loads(pickle.dumps(layout))
    assert again == layout and not again._copies_by_device and not again._slots_by_device
