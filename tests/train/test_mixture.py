"""Mixtures of sources: shares, order, and positions on any number of ranks; several held-out sets; what runs log."""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from carpool.report.page import render
from carpool.report.read import read_run
from carpool.train.config import load_config
from carpool.train.config.schema_data import DataSection
from carpool.train.data.corpus import Corpora, prepare_all
from carpool.train.data.loader import TrainLoader
from carpool.train.data.mixture import eval_sequences, train_sequences
from carpool.train.data.sequences import Sequences
from carpool.train.data.tokenizer import BytesTokenizer
from tests.ranks import Ranks
from tests.train.test_loop import records, start

LETTERS = "abc"
L = 9


def write(folder: Path, sizes: tuple[int, ...] = (640, 320, 64)) -> list[dict[str, Any]]:
    """A file of each letter, of `size` bytes, and its source."""
    for letter, size in zip(LETTERS, sizes, strict=False):
        (folder / f"{letter}.txt").write_text(letter * size)
    return [{"path": str(folder / f"{letter}.txt")} for letter, _ in zip(LETTERS, sizes, strict=False)]


def prepared(folder: Path, sources: list[dict[str, Any]], **settings: Any) -> tuple[Corpora, DataSection]:
    settings = {"eval_fraction": 0.0, "sequence_length": L, "cache_dir": str(folder / "cache")} | settings
    data = DataSection(sources=sources, **settings)
    return prepare_all(data, BytesTokenizer()), data


def mixed(folder: Path, sources: list[dict[str, Any]], **settings: Any) -> Sequences:
    return train_sequences(*prepared(folder, sources, **settings))


def weighted(sources: list[dict[str, Any]], key: str, *values: float) -> list[dict[str, Any]]:
    return [source | {key: value} for source, value in zip(sources, values, strict=True)]


def letters(step: Any) -> str:
    """The source of each sequence of a step."""
    return "".join(chr(int(row[1])) for batch in step for row in batch["input_ids"])


def test_shares_are_exact_in_every_step(tmp_path: Path) -> None:
    sequences = mixed(tmp_path, weighted(write(tmp_path), "weight", 2, 1, 1))
    assert sequences.per_epoch == 80 + 40 + 8
    loader = TrainLoader(sequences, batch_size=8, seed=1)
    seen: Counter[str] = Counter()
    for step in range(48):
        got = Counter(letters(next(loader)))
        assert abs(got["a"] - 4) <= 1 and abs(got["b"] - 2) <= 1 and abs(got["c"] - 2) <= 1, step
        seen += got
    assert seen == Counter(a=192, b=96, c=96), "three epochs of the mixture"
    assert loader.seen == {letter: count * (L - 1) for letter, count in seen.items()}


@pytest.mark.parametrize(
    ("key", "values", "drawn"),
    [("epochs", (1, 0.5, 3), (80, 20, 24)), ("weight", (1, 0, 1), (44, 0, 44)), ("name", "xyz", (80, 40, 8))],
)
def test_what_an_epoch_of_the_mixture_has(tmp_path: Path, key: str, values: Any, drawn: tuple[int, ...]) -> None:
    sequences = mixed(tmp_path, weighted(write(tmp_path), key, *values))
    first = np.cumsum([0, 80, 40, 8])
    uses: Counter[int] = Counter()
    for epoch in range(4):
        order = sequences.order(5, epoch)
        assert [int(((order >= a) & (order < b)).sum()) for a, b in pairwise(first.tolist())] == list(drawn)
        uses.update(order.tolist())
    for place, (a, b) in enumerate(pairwise(first.tolist())):
        counts = {uses[i] for i in range(a, b)}
        assert max(counts) - min(counts) <= 1, "no sequence is seen again before all others of its source were"
        assert sum(uses[i] for i in range(a, b)) == 4 * drawn[place]


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_same_batches_on_any_number_of_ranks_and_after_a_resume(tmp_path: Path, ranks: int) -> None:
    sequences = mixed(tmp_path, weighted(write(tmp_path), "weight", 0.6, 0.3, 0.1))
    whole = TrainLoader(sequences, batch_size=12, seed=1)
    shared = [TrainLoader(sequences, batch_size=12 // ranks, dp_rank=r, dp_size=ranks, seed=1) for r in range(ranks)]
    for step in range(25):
        if step == 13:
            state = json.loads(json.dumps(shared[0].state_dict()))
            shared = [TrainLoader(sequences, batch_size=12, seed=1)]
            shared[0].load_state_dict(state)
        (batch,) = next(whole)
        parts = [next(loader)[0]["input_ids"].tolist() for loader in shared]
        assert batch["input_ids"].tolist() == [rows[i] for i in range(12 // len(parts)) for rows in parts]
        assert shared[0].seen == whole.seen
    assert whole.epoch > 2


def test_another_mixture_does_not_continue_a_position(tmp_path: Path) -> None:
    sources = write(tmp_path)
    same = weighted(sources, "weight", 2, 1, 1)
    next(before := TrainLoader(mixed(tmp_path, same), batch_size=8))
    state = json.loads(json.dumps(before.state_dict(), sort_keys=True))
    renamed = TrainLoader(mixed(tmp_path, weighted(same, "name", *"zyx")), batch_size=8)
    renamed.load_state_dict(state)
    assert letters(next(renamed)) == letters(next(before))
    assert list(renamed.seen.items()) == [(name, before.seen[old]) for name, old in zip("zyx", LETTERS, strict=True)]
    other = TrainLoader(mixed(tmp_path, weighted(sources, "weight", 1, 1, 1)), batch_size=8)
    with pytest.raises(ValueError, match="trained on other data"):
        other.load_state_dict(state)


def test_a_source_of_weight_0_may_have_no_sequence(tmp_path: Path) -> None:
    sequences = mixed(tmp_path, weighted(write(tmp_path, (80, 3)), "weight", 1, 0))
    assert (len(sequences), sequences.order(0, 3).max()) == (10, 9)


def test_sources_of_several_formats_are_packed_as_examples(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text('{"input_ids": [1, 2, 3], "labels": [-100, 2, -100]}\n' * 4)
    text, tokens = write(tmp_path, (20,))[0], {"path": str(tmp_path / "t.jsonl")}
    with pytest.raises(ValueError, match=r'has labels: set data\.packing to "examples" or "off"'):
        mixed(tmp_path, [text, tokens], sequence_length=32)
    sequences = mixed(tmp_path, [text, tokens], sequence_length=32, packing="examples")
    assert sequences.packed and sequences.padded and len(sequences) == 2
    assert sequences[1].labels.tolist() == [-100, 2, -100] * 4
    assert sequences.source_tokens(np.array([0, 1])) == {"a": 21, "t": 12}


@pytest.mark.parametrize(
    ("sources", "message"),
    [
        ([], "data.sources is empty"),
        ([{"path": "a.txt", "weight": 0}, {"path": "b.txt", "weight": 0.0}], "every weight is 0"),
        (
            [{"path": "a.txt", "weight": 1}, {"path": "b.txt"}],
            "a has weight, b has none: give all weight, or all epochs",
        ),
        ([{"path": "a.txt", "weight": 1, "epochs": 1}], "has weight and epochs"),
        ([{"path": "a/*.txt"}, {"path": "x/a.txt"}], "two sources of the name 'a': give them names"),
        ([{"path": "a.txt", "wieght": 1}], "unknown key wieght of a source in data.sources; did you mean weight"),
        ([{"weight": 1}], "has no path"),
        (["a.txt"], "write tables"),
        ([{"path": "a.txt", "weight": -1}], "greater than or equal to 0"),
        ([{"path": "no.txt"}], r"data\.sources \(no\): no\.txt does not exist"),
        ([{"path": "a.txt", "weight": 1000}, {"path": "b.txt", "weight": 1}], "of which b gets none"),
        ([{"path": "a.txt", "format": "massages"}], "did you mean messages"),
    ],
)
def test_bad_mixtures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sources: Any, message: str) -> None:
    write(tmp_path)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=message):
        mixed(tmp_path, sources)


def test_held_out_sets_have_names(tmp_path: Path) -> None:
    sources = write(tmp_path)
    named = {"one": (sources[1]["path"],), "two": (sources[2]["path"],)}
    corpora, data = prepared(tmp_path, sources, eval=named)
    held = eval_sequences(corpora, data)
    assert {name: len(found) for name, found in held.items()} == {"one": 40, "two": 8}
    for empty in ({}, (), {"one": ()}):
        with pytest.raises(ValueError, match=r"data\.eval is empty"):
            prepared(tmp_path, sources, eval=empty)
    # A share of each source, where none is named.
    for letter in LETTERS:
        (tmp_path / f"{letter}.jsonl").write_text("".join(json.dumps({"text": letter * 50}) + "\n" for _ in range(10)))
    by_share = [{"path": str(tmp_path / f"{letter}.jsonl")} for letter in LETTERS]
    held = eval_sequences(*prepared(tmp_path, by_share, eval_fraction=0.1))
    assert {name: chr(found[0].ids[0]) for name, found in held.items()} == {"a": "a", "b": "b", "c": "c"}


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Of runs on a mixture with two held-out sets."""
    folder = tmp_path_factory.mktemp("mixed")
    sources = weighted(write(folder, (9000, 3000)), "weight", 3, 1)
    tables = ", ".join(f'{{path = "{one["path"]}", weight = {one["weight"]}}}' for one in sources)
    held = f'{{same = "{sources[0]["path"]}", other = "{sources[1]["path"]}"}}'
    return [f"data.sources=[{tables}]", f"data.eval={held}", f"data.cache_dir={folder}/cache"]


def test_runs_record_sources_and_named_sets(two_ranks: Ranks, settings: list[str], tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    assert start(two_ranks, whole, settings) == [""] * 2
    lines, evals = records(whole), records(whole, "eval")
    assert lines[6]["source_tokens"] == {"a": 18 * 31, "b": 6 * 31}
    last = evals[6]
    assert set(last["sets"]) == {"same", "other"} and min(last["sets"].values()) < last["loss"] < max(
        last["sets"].values()
    )
    config = load_config(whole / "config.toml")
    assert config.data.sources is not None and config.data.sources[0].weight == 3
    page = render(read_run(whole))
    assert "558 (75" in page.replace(",", "") and "Held-out loss of other" in page
