"""Packing: every example whole and once, what is too long said, and every learned token predicted exactly once."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import numpy as np
import pytest

from carpool.train.build.run_data import check_vocabulary
from carpool.train.config.schema import DataSection
from carpool.train.data.corpus import Corpora, Corpus, Marks
from carpool.train.data.loader import EvalLoader, TrainLoader, count_targets
from carpool.train.data.mixture import eval_sequences, sequences_of
from carpool.train.data.sequences import Examples, best_fit, cut

SIZES = [5, 1, 9, 3, 2, 4, 17, 8, 2, 6]


def make_corpus(sizes: list[int] = SIZES, seed: int = 0) -> Corpus:
    """Tokens 100, 101, ...; about half are learned, of each example the last."""
    tokens = np.arange(100, 100 + sum(sizes), dtype=np.uint16)
    ends = np.cumsum(sizes)
    learned = np.random.default_rng(seed).random(len(tokens)) < 0.5
    learned[ends - 1] = True
    marks = Marks(learned, ends)
    return Corpus(tokens, tokens[:20], len(sizes), 2, "f", "here", marks, Marks(learned[:20], np.array([9, 20])))


def section(**data: Any) -> DataSection:
    return DataSection(**({"sequence_length": 9, "too_long": "split"} | data))


def predicted(corpus: Corpus) -> set[int]:
    """Learned tokens that another token of their example stands before."""
    marks = corpus.train_marks
    assert marks is not None
    starts = {0, *marks.ends.tolist()}
    return {100 + place for place in np.flatnonzero(marks.learned).tolist() if place not in starts}


@pytest.mark.parametrize("size", [20, 37, 128])
def test_best_fit_puts_each_piece_somewhere(size: int) -> None:
    rng = np.random.default_rng(size)
    lengths = rng.integers(2, size + 1, 501)
    found = best_fit(lengths, size)
    assert sorted(piece for sequence in found for piece in sequence) == list(range(501))
    sums = [sum(lengths[piece] for piece in sequence) for sequence in found]
    # Half of the pieces are longer than half a sequence, and no two of these fit into one.
    assert max(sums) <= size and len(found) <= max(1.03 * lengths.sum() / size + 1, (lengths > size / 2).sum() + 2)
    assert best_fit(np.array([5, 9, 3, 2, 4]), 9) == [[1], [0, 4], [2, 3]]
    assert best_fit(lengths, size) == found
    assert best_fit(np.array([5, 9]), 10**15) == [[1, 0]]


def test_pieces_of_examples_that_are_too_long() -> None:
    corpus = make_corpus()
    marks = corpus.train_marks
    assert marks is not None
    with pytest.raises(
        ValueError, match=r"^data\.train: 1 of 10 examples are longer .* = 9; the longest has 17 tokens"
    ):
        cut(marks, 9, "refuse", "data.train")
    split = cut(marks, 9, "split", "data.train")
    assert split.too_long == 1 and split.cut_tokens == 0 and split.targets.sum() == len(predicted(corpus))
    # 17 tokens are 16 predictions: two parts of 9, which share a token.
    where = split.start.tolist().index(24)
    assert split.length.tolist()[where : where + 1] == [9]
    truncated = cut(marks, 9, "truncate", "data.train")
    assert truncated.too_long == 1 and truncated.targets.sum() + truncated.cut_tokens == split.targets.sum()
    assert truncated.without >= 1, "an example of one token has nothing to learn"
    with pytest.raises(ValueError, match="none of its 1 examples has a token to learn"):
        cut(Marks(np.zeros(5, dtype=bool), np.array([5])), 9, "refuse", "data.train")
    exact = cut(Marks(np.ones(9, dtype=bool), np.array([9])), 9, "refuse", "data.train")
    assert exact.length.tolist() == [9] and exact.targets.tolist() == [8]


@pytest.mark.parametrize("packing", ["examples", "off"])
@pytest.mark.parametrize("length", [4, 9, 40])
def test_each_learned_token_is_predicted_once_from_its_own_example(length: int, packing: str) -> None:
    corpus = make_corpus()
    sequences = sequences_of(corpus, section(sequence_length=length, packing=packing))
    assert isinstance(sequences, Examples) and sequences.packed == (packing == "examples")
    seen: Counter[int] = Counter()
    for index in range(len(sequences)):
        ids, labels, positions = sequences[index]
        assert len(ids) <= length
        assert sequences.targets(np.array([index])) == (labels[1:] != -100).sum() and labels[0] == -100
        if positions is None:
            positions = np.arange(len(ids))
        for place in np.flatnonzero(labels != -100):
            assert labels[place] == ids[place] and positions[place] == positions[place - 1] + 1
            assert ids[place] == ids[place - 1] + 1, "the token before it is of the same example"
            seen[int(labels[place])] += 1
    assert set(seen) == predicted(corpus) and max(seen.values()) == 1
    told = sequences.numbers()
    assert told["examples"] == len(SIZES) and told["learned_tokens"] == len(seen)
    text = sequences.describe()
    assert f"{sum(size > length for size in SIZES):,} examples were too long and split" in text or length == 40


def test_batches_are_padded_by_a_document_of_padding() -> None:
    loader = TrainLoader(sequences_of(make_corpus(), section(sequence_length=12)), batch_size=3, pad_id=7)
    (batch,) = next(loader)
    assert {name: value.dtype.is_floating_point for name, value in batch.items()} == dict.fromkeys(
        ("input_ids", "labels", "position_ids", "document_ends", "padding"), False
    )
    for positions, ends in zip(batch["position_ids"].tolist(), batch["document_ends"].tolist(), strict=True):
        # Filled up with the length, after which nothing begins.
        firsts = [place for place, position in enumerate(positions) if position == 0]
        assert sorted({0, *ends}) == [*firsts, 12] and ends == sorted(ends)
    names = ("input_ids", "labels", "position_ids", "padding")
    for ids, labels, positions, padding in zip(*(batch[name].tolist() for name in names), strict=True):
        size = padding.index(True) if True in padding else 12
        assert ids[size:] == [7] * (12 - size) and labels[size:] == [-100] * (12 - size)
        assert positions[size:] == list(range(12 - size)) and not any(padding[:size])
    apart = sequences_of(make_corpus(), section(sequence_length=12, packing="off"))
    (single,) = next(TrainLoader(apart, batch_size=3))
    assert set(single) == {"input_ids", "labels", "padding"} and single["padding"].any()
    assert loader.targets == count_targets(batch["labels"]) and loader.tokens == int((~batch["padding"]).sum())


def test_positions_of_what_is_packed_otherwise_are_refused() -> None:
    sequences = sequences_of(make_corpus(SIZES * 3), section())
    state = json.loads(json.dumps(TrainLoader(sequences, batch_size=4, seed=5).state_dict()))
    for other in (section(packing="off"), section(too_long="truncate")):
        with pytest.raises(ValueError, match="how they are packed"):
            TrainLoader(sequences_of(make_corpus(SIZES * 3), other), batch_size=1).load_state_dict(state)


def unlike(seed: int = 0) -> Corpus:
    """Of 203 examples of 2 to 60 tokens."""
    return make_corpus(np.random.default_rng(seed).integers(2, 61, 203).tolist(), seed)


def step_of(step: list[dict[str, Any]]) -> list[tuple[int, ...]]:
    """The examples of a rank's batches."""
    rows = [(ids, padding) for one in step for ids, padding in zip(one["input_ids"], one["padding"], strict=True)]
    return [tuple(ids[~padding].tolist()) for ids, padding in rows]


@pytest.mark.parametrize("grouped", [True, False])
def test_batches_are_as_long_as_their_longest_and_steps_of_similar_lengths(grouped: bool) -> None:
    data = section(packing="off", sequence_length=60, group_by_length=grouped)
    sequences = sequences_of(unlike(), data)
    full = sequences_of(unlike(), section(packing="off", sequence_length=60, pad_to="sequence_length"))

    def loaders(ranks: int, **settings: Any) -> list[TrainLoader]:
        same = {"accumulation": 8 // ranks, "dp_size": ranks, "seed": 3} | settings
        return [TrainLoader(sequences, batch_size=2, dp_rank=rank, **same) for rank in range(ranks)]

    one, four, alike = loaders(1), loaders(4), loaders(2, alike=True)
    seen: Counter[tuple[int, ...]] = Counter()
    computed = 0
    state = {}
    for number in range(3 * len(sequences) // 16 + 1):
        if number == 17:
            state = json.loads(json.dumps(four[1].state_dict()))
        steps = [next(loader) for loader in four]
        mine = [example for step in steps for example in step_of(step)]
        assert sorted(mine) == sorted(step_of(next(one[0]))), "the same set on any number of ranks"
        assert one[0].tokens == four[0].tokens == sum(map(len, mine))
        assert four[1].targets == sum(count_targets(batch["labels"]) for step in steps for batch in step)
        for together in zip(*steps, strict=True):
            sizes = {batch["input_ids"].shape for batch in together}
            longest = max(int((~batch["padding"]).sum(1).max()) for batch in together)
            assert sizes == {(2, min(60, -(-longest // 8) * 8))}
            computed += sum(batch["input_ids"].numel() for batch in together)
        assert len({batch["input_ids"].shape for loader in alike for batch in next(loader)}) == 1
        seen.update(mine)
    assert len(seen) == 203 and min(seen.values()) >= 2, "each epoch has each of them once"
    share = sum(map(len, seen.elements())) / computed
    assert share > 0.77 if grouped else share < 0.7
    resumed = loaders(2)
    for loader in resumed:
        loader.load_state_dict(state)
    again = loaders(1)[0]
    for _ in range(17):
        next(again)
    for _ in range(20):
        assert sorted(x for loader in resumed for x in step_of(next(loader))) == sorted(step_of(next(again)))
    # With other batches, what is left of the epoch is what was left of it.
    other = TrainLoader(sequences, batch_size=3, seed=3)
    other.load_state_dict(state)
    plain = loaders(1)[0]
    stream = [example for _ in range(30) for example in step_of(next(plain))]
    assert [x for _ in range(20) for x in step_of(next(other))] == stream[17 * 16 :][:60]
    (batch,) = next(TrainLoader(full, batch_size=2))
    assert batch["input_ids"].shape == (2, 60)
    changed = section(packing="off", sequence_length=60, group_by_length=not grouped)
    with pytest.raises(ValueError, match=r"earlier versions .* had data\.group_by_length=false"):
        TrainLoader(sequences_of(unlike(), changed), batch_size=2, seed=3).load_state_dict(state)


def test_tokens_that_the_model_has_not_are_refused() -> None:
    corpus = Corpora((make_corpus(),))
    last = 99 + sum(SIZES)
    check_vocabulary(corpus, last + 1)
    with pytest.raises(ValueError, match=rf"makes token {last} of the data, but the model has {last} tokens"):
        check_vocabulary(corpus, last)


def test_held_out_examples_are_evaluated_whole() -> None:
    corpus = make_corpus()
    held = eval_sequences(Corpora((corpus,)), section(sequence_length=11))["eval"]
    loaders = [EvalLoader(held, batch_size=1, dp_rank=rank, dp_size=3) for rank in range(3)]
    assert [len(loader) for loader in loaders] == [1, 1, 1]
    batches = [batch for loader in loaders for batch in loader]
    assert sum(count_targets(batch["labels"]) for batch in batches) == held.targets(np.arange(len(held)))
    assert batches[2]["padding"].all() and len(held) == 2
    settings = section(sequence_length=10, too_long="refuse", eval={"x": ("y",)})
    corpus = Corpus(corpus.eval, corpus.eval[:0], 2, 0, "f", "here", corpus.eval_marks, None, settings.eval_sets()[0])
    with pytest.raises(ValueError, match=r"^data\.eval\.x: 1 of 2 examples"):
        eval_sequences(Corpora((), (corpus,)), settings)
    corpus = unlike()
    corpus = Corpus(corpus.train, corpus.train, 1, 203, "f", "here", corpus.train_marks, corpus.train_marks)
    held = eval_sequences(Corpora((corpus,)), section(packing="off", sequence_length=60))["eval"]
    loaders = [EvalLoader(held, batch_size=3, dp_rank=rank, dp_size=2) for rank in range(2)]
    batches = list(zip(*loaders, strict=True))
    assert len(batches) == 34 and {one["input_ids"].shape == two["input_ids"].shape for one, two in batches} == {True}
    assert sum(count_targets(one["labels"]) for both in batches for one in both) == held.targets(np.arange(203))
    assert {one["input_ids"].shape[1] for one, _ in batches} <= {8, 16, 24, 32, 40, 48, 56, 60}
    assert min(one["input_ids"].shape[1] for one, _ in batches) < 60
