"""What holds an expert, and where a token finds it."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from carpool import ExpertLayout, assign
from tests.layouts import EXPERTS, LAYOUTS, layout_of

# 4 experts on 2 ranks: the example of `assign`.
EXAMPLE = ExpertLayout(((0, 1), (3, 2)))
FEASIBLE = [(name, ranks) for name in LAYOUTS for ranks in (4, 2, 1)]


def test_what_a_layout_says() -> None:
    layout = ExpertLayout(((0, 1), (3, 2, 4)))
    assert layout.expert_WS.tolist() == [[0, 1, -1], [3, 2, 4]] and layout.expert_WS.dtype == torch.int32
    assert layout.slots_per_rank == 3 and layout.kind == "uneven"
    assert layout.home_of == ((0, 0), (0, 1), (1, 1), (1, 0), (1, 2))
    assert layout.slot_E(torch.device("cpu")).tolist() == [0, 1, 4, 3, 5]


def test_contiguous_spreads_evenly_and_gives_the_first_ranks_one_more() -> None:
    assert ExpertLayout.contiguous(4, 2).homes == ((0, 1), (2, 3))
    assert ExpertLayout.contiguous(10, 4).homes == ((0, 1, 2), (3, 4, 5), (6, 7), (8, 9))
    assert ExpertLayout.contiguous(3, 1).homes == ((0, 1, 2),)
    assert ExpertLayout.contiguous(8, 4).kind == "contiguous"
    assert ExpertLayout.permuted([3, 1, 0, 2], 2).homes == ((3, 1), (0, 2)) and EXAMPLE.kind == "permuted"


def test_slices_of_experts() -> None:
    layout = ExpertLayout.sliced(4, 2, 2)
    assert layout.homes == ((0, 2), (1, 3), (4, 6), (5, 7)) and layout.kind == "sliced"
    assert (layout.num_experts, layout.num_rows, layout.slices) == (4, 8, 2)
    assert layout.expert_WS.tolist() == [[0, 1], [0, 1], [2, 3], [2, 3]]
    expert_TK = torch.tensor([[3, 0], [1, -1]], dtype=torch.int32)
    assert assign(expert_TK, layout).tolist() == [[5, 7, 0, 2], [1, 3, -1, -1]]
    # More ranks than experts; equal homes without slices differ.
    assert ExpertLayout.sliced(2, 2, 4).num_ranks == 8 and layout != ExpertLayout(layout.homes)
    whole = ExpertLayout(((0, 1), (2, 3)), slices=2)
    expert_TK = torch.tensor([[1, 0], [1, -1]], dtype=torch.int32)
    assert assign(expert_TK, whole).tolist() == [[2, 3, 0, 1], [2, 3, -1, -1]], "rank 1 computes all of expert 1"
    with pytest.raises(ValueError, match="homes name 3 slices, which are no experts of 2 slices each"):
        ExpertLayout(((0, 1), (2,)), slices=2)


def test_layouts_compare_and_hash_by_content() -> None:
    same = ExpertLayout([[0, 1], torch.tensor([3, 2])])  # type: ignore[arg-type]
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
        (lambda: ExpertLayout.contiguous(3, 4), "3 experts cannot be spread over 4 ranks.*use fewer"),
        (lambda: ExpertLayout.contiguous(3, 0), "cannot be spread over 0 ranks"),
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


def test_files_of_layouts_with_replicas_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "layout.json"
    path.write_text('{"homes": [[1, 0], [2]], "slots": [[1, 0], [2]]}')
    assert ExpertLayout.load(path) == ExpertLayout(((1, 0), (2,)))
    path.write_text('{"homes": [[1, 0], [2]], "slots": [[1, 0], [2, 0]]}')
    with pytest.raises(ValueError, match=r"layout.json: its slots hold replicas.*set moe.spare_slots"):
        ExpertLayout.load(path)


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


@pytest.mark.parametrize(("name", "ranks"), FEASIBLE)
def test_assign_finds_every_slice_of_every_choice(name: str, ranks: int) -> None:
    layout = layout_of(name, ranks)
    generator = torch.Generator().manual_seed(1)
    for top_k, tokens in ((1, 9), (3, 40), (8, 37), (2, 0)):
        expert_TK = torch.rand(tokens, EXPERTS, generator=generator).argsort(1)[:, :top_k].int()
        expert_TK[torch.rand(tokens, top_k, generator=generator) < 0.2] = -1
        before = expert_TK.clone()
        slot_TK = assign(expert_TK, layout)
        assert slot_TK.dtype == torch.int32 and slot_TK.shape == (tokens, top_k * layout.slices)
        for choices, slots in zip(expert_TK.tolist(), slot_TK.tolist(), strict=True):
            rows = [e * layout.slices + i if e >= 0 else -1 for e in choices for i in range(layout.slices)]
            for row, slot in zip(rows, slots, strict=True):
                rank, place = divmod(slot, layout.slots_per_rank)
                assert (slot == -1) if row == -1 else layout.homes[rank][place] == row
        assert torch.equal(expert_TK, before), "assign does not write into the routing"


def test_a_pickled_layout_has_no_tensors() -> None:
    """They may be on a GPU, which the process that reads it does not see."""
    layout = ExpertLayout(((0, 1), (2, 3)))
    layout.slot_E(torch.device("meta"))
    again = pickle.loads(pickle.dumps(layout))
    assert again == layout and not again._slots_by_device
