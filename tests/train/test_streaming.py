"""Streamed data: the same batches on any number of ranks, after a resume and a kill, in shares, over several passes."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from carpool.train.config.declarations import check_effects
from carpool.train.config.load import resolve_config
from carpool.train.config.schema_data import DataSection
from carpool.train.data.streaming import StreamLoader, Streams, lanes_for
from carpool.train.data.tokenizer import BytesTokenizer

pytestmark = pytest.mark.timeout(900)
L = 17


def write(folder: Path, rows: int = 40, files: int = 3) -> list[dict[str, Any]]:
    """Files of two sources, which say in each row what it is; their weights are 3 and 1."""
    for letter in "ab":
        (folder / letter).mkdir()
        for file in range(files):
            texts = [f"{letter}{file}.{row} " * (3 + row % 5) for row in range(rows)]
            lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
            (folder / letter / f"{file}.jsonl").write_text(lines)
    return [{"path": str(folder / letter), "weight": weight} for letter, weight in (("a", 3), ("b", 1))]


def streams(sources: list[dict[str, Any]], **settings: Any) -> Streams:
    settings = {"stream_lanes": 4, "stream_buffer": 6, "sequence_length": L} | settings
    return Streams(DataSection(streaming=True, sources=sources, **settings), BytesTokenizer(), None)


def loaders(sources: list[dict[str, Any]], ranks: int, **settings: Any) -> list[StreamLoader]:
    return [
        StreamLoader(streams(sources, **settings), batch_size=12 // ranks, dp_rank=rank, dp_size=ranks, seed=2)
        for rank in range(ranks)
    ]


def merged(states: list[dict[str, Any]]) -> dict[str, Any]:
    """As `carpool.train.build.run_data.loader_state` merges those of ranks."""
    lanes = sorted((pair for state in states for pair in state["lanes"].items()), key=lambda pair: pair[1]["count"])
    return json.loads(json.dumps(states[0] | {"lanes": dict(lanes)}))  # type: ignore[no-any-return]


@pytest.mark.parametrize("packing", ["stream", "examples", "off"])
def test_steps_are_the_same_on_any_number_of_ranks_and_after_a_resume(tmp_path: Path, packing: str) -> None:
    sources = write(tmp_path)
    settings: dict[str, Any] = {"packing": packing} | ({} if packing == "stream" else {"too_long": "split"})
    (whole,), shared = loaders(sources, 1, **settings), loaders(sources, 2, **settings)
    assert [len(shared[0]._slots_GN[0]), shared[0]._lanes] == [6, 4]
    for step in range(90):
        if step in (1, 31, 60):
            state = merged([loader.state_dict() for loader in shared])
            shared = loaders(sources, {1: 3, 31: 4, 60: 2}[step], **settings)
            for loader in shared:
                loader.load_state_dict(state)
        (batch,), parts = next(whole), [next(loader)[0] for loader in shared]
        for name in ("input_ids", "labels"):
            expected = [row for rows in zip(*(part[name].tolist() for part in parts), strict=True) for row in rows]
            assert batch[name].tolist() == expected, step
        for loader in shared:
            assert (loader.targets, loader.tokens, loader.seen) == (whole.targets, whole.tokens, whole.seen)
        assert int((batch["labels"][:, 1:] != -100).sum()) == whole.targets
    if packing == "stream":
        assert whole.seen == {"a": 90 * 9 * (L - 1), "b": 90 * 3 * (L - 1)}
        assert all(len(loader._open) == 2 for loader in shared), "each of two ranks reads two of the four lanes"


def test_a_pass_has_every_row_once_before_it_begins_again(tmp_path: Path) -> None:
    (source, _) = write(tmp_path)
    data = streams([source | {"weight": None}], packing="off", too_long="truncate", stream_lanes=2, stream_buffer=7)
    loader, seen = StreamLoader(data, batch_size=10), Counter[str]()
    for step in range(24):
        for row in next(loader)[0]["input_ids"].tolist():
            seen[BytesTokenizer().decode(row).split()[0]] += 1
        # A block may have the last rows of one pass and the first ones of the next.
        if (passes := (step + 1) // 12) * 12 == step + 1:
            assert Counter(seen.values())[passes] >= 108 and max(seen.values()) <= passes + 1


@pytest.mark.parametrize("weights", [(1, 1), (3, 1), (1, 15)])
def test_all_rows_of_a_mixture_are_seen(tmp_path: Path, weights: tuple[int, int]) -> None:
    sources = [one | {"weight": weight} for one, weight in zip(write(tmp_path), weights, strict=True)]
    (loader,) = loaders(sources, 1, packing="off", too_long="truncate")
    seen = Counter[str]()
    while loader.state_dict()["position"] < 5 * 120 * sum(weights) // min(weights):
        for row in next(loader)[0]["input_ids"].tolist():
            seen[BytesTokenizer().decode(row).split()[0]] += 1
    assert len(seen) == 240, "three files of each source, of 40 rows each"
    for letter, weight in zip("ab", weights, strict=True):
        counts = [count for name, count in seen.items() if name[0] == letter]
        assert sum(counts) == loader.state_dict()["position"] * weight // sum(weights)
        assert max(counts) - min(counts) <= 4 + 0.2 * max(counts), "lanes read about equally much"


def test_blocks_without_a_token_to_learn_are_passed_over(tmp_path: Path) -> None:
    rows = [{"input_ids": [1] * 17, "labels": [1 if row == 37 else -100] * 17} for row in range(40)]
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = [{"path": str(tmp_path / "t.jsonl"), "weight": 1}]
    for lanes in (1, 2):
        loader = StreamLoader(
            streams(source, packing="off", too_long="truncate", stream_lanes=lanes, stream_buffer=2), batch_size=2
        )
        if lanes == 2:  # of which one has no other rows
            with pytest.raises(ValueError, match=r"none of its .* examples has a token to learn"):
                next(loader)
        else:
            assert (next(loader)[0]["labels"][:, 1:] == 1).all()


def test_what_a_stream_does_not_take(tmp_path: Path) -> None:
    sources = write(tmp_path, rows=2, files=1)
    with pytest.raises(ValueError, match=r"lane 2 of 4 gets no row with text: lower data\.stream_lanes"):
        loaders(sources, 1)[0].check()
    (tmp_path / "ids.jsonl").write_text('{"input_ids": [1, 2], "labels": [1, 2]}\n')
    with pytest.raises(ValueError, match=r"would end the run there; set data\.too_long to truncate"):
        streams([{"path": str(tmp_path / "ids.jsonl"), "weight": 1}], packing="off")
    (tmp_path / "more").mkdir()
    often = write(tmp_path / "more")[0] | {"weight": 9999}
    with pytest.raises(ValueError, match=r"data\.sources \(b\): lane 2 of 4 gets no row with text"):
        loaders([often, sources[1]], 1)[0].check()
    for wrong, message in (
        ([sources[0], {"path": "b", "epochs": 1}], "give all weight"),
        ([{"path": "a"}, {"path": "b"}], r"data\.sources with data\.streaming needs weights"),
    ):
        with pytest.raises(ValueError, match=message):
            streams(wrong)
    with pytest.raises(ValueError, match=r"less than 1/10,000 of the weight"):
        streams([sources[0] | {"weight": 1e6}, sources[1]])
    for overrides, message in (
        (["data.streaming=true", "training.num_train_epochs=2"], r"set training\.max_steps"),
        (["data.stream_lanes=2"], r"data\.stream_lanes = 2 .* changes nothing without data\.streaming"),
    ):
        with pytest.raises(ValueError, match=message):
            resolved = resolve_config(None, overrides)
            check_effects(resolved)
    (whole,) = loaders(sources, 1)
    other = StreamLoader(streams(sources, stream_buffer=9), batch_size=12)
    with pytest.raises(ValueError, match="trained on other data"):
        other.load_state_dict(whole.state_dict())
    assert [lanes_for(8, step) for step in (1, 6, 8, 12, 64)] == [1, 6, 8, 6, 8]
