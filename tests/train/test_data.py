"""Data: every kind of source, the token cache, packing, the loaders' order and state, and errors that say where."""

from __future__ import annotations

import csv
import fcntl
import gzip
import io
import json
import math
import multiprocessing
import os
import random
import sysconfig
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from carpool.serve.prompts import Text
from carpool.train.config import load_config
from carpool.train.config.schema import DataSection
from carpool.train.data.corpus import Corpora, Corpus, check_sources, default_cache_dir, prepare, prepare_all
from carpool.train.data.examples import TextFormat
from carpool.train.data.formats import FORMATS, fields_of
from carpool.train.data.loader import EvalLoader, Prefetch, TrainLoader, count_targets
from carpool.train.data.order import permutation
from carpool.train.data.readers import READERS, Source, read_rows
from carpool.train.data.rows import PIECE_BYTES, Fields, Reader, Row, open_file
from carpool.train.data.sequences import Stream
from carpool.train.data.show import show
from carpool.train.data.sources import describe_sources, find_sources
from carpool.train.data.tokenizer import BytesTokenizer, FileTokenizer, load_tokenizer

BYTES = BytesTokenizer()
EOS = BYTES.eos_id


def corpus(folder: Path, **settings) -> Corpus:
    settings.setdefault("eval_fraction", 0.0)
    return prepare(DataSection(cache_dir=str(folder / "cache"), **settings), BYTES)


def corpora(folder: Path, **settings) -> Corpora:
    return prepare_all(DataSection(cache_dir=str(folder / "cache"), **settings), BYTES)


def texts_of(tokens) -> list[str]:
    """The documents in an array of byte tokens."""
    parts = "".join(map(chr, tokens)).split(chr(EOS))
    assert parts.pop() == "", "the array ends with EOS"
    return [part.encode("latin-1").decode() for part in parts]


def write_lines(path: Path, rows: list[object]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_parquet(path: Path, **columns) -> Path:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table(columns), path, row_group_size=2)
    return path


def test_bytes_tokenizer():
    assert BYTES.encode("ké").tolist() == [107, 195, 169]
    assert BYTES.decode([107, 195, 169, EOS, BYTES.bos_id, 300]) == "ké"
    assert BYTES.decode([107, EOS, BYTES.bos_id, 300], special=True) == "k<|endoftext|><|startoftext|>"
    assert BYTES.decode([195]) == "�"
    assert (BYTES.vocab_size, BytesTokenizer(pad_to=1).vocab_size) == (320, 258)
    text = "".join(chr(random.Random(0).randrange(0x10000)) for _ in range(2)) + "def f():\r\n\t日本🚗\0"
    assert BYTES.decode(BYTES.encode(text)) == text
    assert BYTES.decode(BYTES.encode("a\ud800b")) == "a?b"
    assert [t.tolist() for t in BYTES.encode_batch(["a", ""])] == [[97], []]


def make_tokenizer(folder: Path, eos: str = "<|endoftext|>", config: object = None) -> Path:
    import tokenizers

    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=[eos, "<x>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the car the pool the carpool"] * 5, trainer)
    tokenizer.enable_truncation(2)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder / "tokenizer.json"


def save_tokenizer(folder: Path, single: str | None) -> Path:
    """A tokenizer of letters, which puts around each text what `single` says, in the words of `tokenizers`."""
    import tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: number for number, token in enumerate(("<s>", "</s>", "<unk>", *"abcdefgh "))}
    plain = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    plain.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    plain.decoder = tokenizers.decoders.Fuse()
    if single is not None:
        special = [("<s>", 0), ("</s>", 1)]
        plain.post_processor = tokenizers.processors.TemplateProcessing(single=single, special_tokens=special)
    PreTrainedTokenizerFast(tokenizer_object=plain, bos_token="<s>", eos_token="</s>").save_pretrained(folder)
    return folder


@pytest.mark.parametrize("packing", [None, "examples", "off"])
@pytest.mark.parametrize("single", ["<s> $A", None, "<s> $A </s>", "$A </s>"])
def test_documents_are_what_the_tokenizer_itself_makes_of_them(tmp_path, single, packing):
    from transformers import AutoTokenizer

    folder = save_tokenizer(tmp_path / "tokenizer", single)
    own, pretrained = load_tokenizer(str(folder)), AutoTokenizer.from_pretrained(folder)
    texts = ["abc", "a", "h b", "<s>ab", "ab</s>"]
    path = write_lines(tmp_path / "a.jsonl", [{"text": text} for text in texts])
    data = DataSection(cache_dir=str(tmp_path / "cache"), train=[str(path)], eval_fraction=0.0, packing=packing)
    found = prepare(data, own).train.tolist()
    expected = []
    for text in texts:
        ids = pretrained(text)["input_ids"]
        # Text that names these tokens itself does not get them twice.
        ids = ids[1:] if ids[:2] == [0, 0] else ids
        ids = ids[:-1] if ids[-2:] == [1, 1] else ids
        expected += ids if ids[-1] == 1 else [*ids, 1]
    assert found == expected
    assert found.count(0) == (len(texts) if "<s>" in str(single) else 1) and found.count(1) == 5
    # The same file under the same name in the same place, but for what the tokenizer adds: other tokens.
    other = load_tokenizer(str(save_tokenizer(tmp_path / "other", None if "<s>" in str(single) else "<s> $A")))
    assert prepare(data, other).train.tolist() != found
    assert own.decode(found, special=True).startswith("<s>abc</s>" if found[0] == 0 else "abc</s>")
    assert own.decode(found) == "abcah babab"
    with Console(record=True, width=80, file=io.StringIO()) as console:
        named = [f"data.tokenizer={folder}", f"data.train={path}", f"data.cache_dir={tmp_path}/cache"]
        packed = [] if packing is None else [f"data.packing={packing}"]
        show(load_config(None, [*named, *packed, "data.eval_fraction=0", "data.sequence_length=8"]), 1, console)
    shown = console.export_text().split("\n")[1]
    assert shown.startswith("<s>»abc</s>" if found[0] == 0 else "a»bc</s>")


@pytest.mark.parametrize("prompt, completion", [("ab", "cd"), ("<s>ab", "cd"), ("ab", "cd</s>"), ("<s>ab", "cd</s>")])
def test_prompts_that_name_the_special_tokens_do_not_get_them_twice(tmp_path, prompt, completion):
    folder = save_tokenizer(tmp_path / "tokenizer", "<s> $A")
    path = write_lines(tmp_path / "a.jsonl", [{"prompt": prompt, "completion": completion}])
    data = DataSection(cache_dir=str(tmp_path / "cache"), train=[str(path)], eval_fraction=0.0, tokenizer=str(folder))
    found = prepare(data, load_tokenizer(str(folder)))
    assert found.train.tolist() == [0, 3, 4, 5, 6, 1]
    assert found.train_marks is not None and found.train_marks.learned.tolist() == [False] * 3 + [True] * 3
    assert Text(folder).encode(prompt) == [0, 3, 4], "as it is asked afterwards"


def test_tokenizer_files(tmp_path):
    path = make_tokenizer(tmp_path / "a")
    tokenizer = load_tokenizer(str(path))
    assert tokenizer.decode(tokenizer.encode("the carpool ü\ud800")) == "the carpool ü?"
    assert len(tokenizer.encode("the car the pool")) > 2, "truncation that the file asks for is off"
    assert tokenizer.encode("the car").tolist() == tokenizer.encode_batch(["x", "the car"])[1].tolist()
    assert tokenizer.eos_id == 0
    assert max(tokenizer.encode("the carpool")) < tokenizer.vocab_size
    folder = load_tokenizer(None, model_path=str(tmp_path / "a"))
    assert folder.fingerprint == tokenizer.fingerprint
    assert load_tokenizer(None, model_path=str(tmp_path)).name == "bytes"
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ValueError, match=r"has weights and no tokenizer\.json"):
        load_tokenizer(None, model_path=str(tmp_path))
    assert load_tokenizer(str(path), eos_token="<x>").eos_id == 1
    assert load_tokenizer(str(path), eos_token="<x>").fingerprint != tokenizer.fingerprint
    for said in ("<end>", {"content": "<end>"}):
        assert FileTokenizer(make_tokenizer(tmp_path / "end", "<end>", {"eos_token": said})).eos_token == "<end>"


def test_bad_tokenizers(tmp_path):
    with pytest.raises(ValueError, match=r"tokenizer.json does not exist"):
        load_tokenizer(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"is not a tokenizer\.json"):
        load_tokenizer(str(tmp_path))
    path = make_tokenizer(tmp_path / "b", "<end>")
    with pytest.raises(ValueError, match=r"name one of its tokens as eos_token \(its special ones are <end>, <x>"):
        load_tokenizer(str(path))
    with pytest.raises(ValueError, match="'<no>' is not in the vocabulary"):
        load_tokenizer(str(path), eos_token="<no>")
    with pytest.raises(ValueError, match="bytes tokenizer has its own"):
        load_tokenizer("bytes", eos_token="<x>")


def test_every_kind_of_source_gives_its_texts(tmp_path):
    import datasets

    texts = ["one", "zwei ü🚗", "three\nlines\n"]
    rows = [{"text": text, "n": 3} for text in texts]
    (tmp_path / "a.txt").write_text(texts[0])
    (tmp_path / "b.jsonl").write_text("\n".join(json.dumps(row) for row in rows) + "\n\n")
    with gzip.open(tmp_path / "c.jsonl.gz", "wt", encoding="utf-8") as file:
        file.write("\n".join(json.dumps(row, ensure_ascii=False) for row in rows))
    write_parquet(tmp_path / "d.parquet", n=[1, 2, 3], text=texts)
    datasets.Dataset.from_list(rows).save_to_disk(str(tmp_path / "e"))
    splits = {"train": datasets.Dataset.from_list(rows), "test": datasets.Dataset.from_list(rows[:1])}
    datasets.DatasetDict(splits).save_to_disk(str(tmp_path / "f"))
    (tmp_path / "g.json").write_text(json.dumps(rows, indent=1))
    with open(tmp_path / "h.csv", "w", newline="") as file:
        csv.DictWriter(file, ["n", "text"]).writerows([{"n": "n", "text": "text"}, *rows])
    expected = {"a.txt": texts[:1], "f": texts} | dict.fromkeys(
        ["b.jsonl", "c.jsonl.gz", "d.parquet", "e", "g.json", "h.csv"], texts
    )
    for name, want in expected.items():
        got = corpus(tmp_path, train=[str(tmp_path / name)])
        assert texts_of(got.train) == want, name
        assert got.train_documents == len(want)
    (held,) = corpora(tmp_path, train=[str(tmp_path / "a.txt")], eval=[str(tmp_path / "f")]).held_out
    assert texts_of(held.train) == texts[:1], "the held-out split of a dataset folder"


def test_folders_and_globs_are_read_in_sorted_order_each_file_once(tmp_path):
    for name in ("b/2.txt", "a/1.md", "c.py", ".hidden/x.txt", "a/skip.dat", "d.jsonl"):
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).write_text(name if name != "d.jsonl" else '{"text": "d"}')
    whole = str(tmp_path / "in")
    assert texts_of(corpus(tmp_path, train=[whole]).train) == ["a/1.md", "b/2.txt", "c.py", "d"]
    mixed = [f"{whole}/**/*.txt", f"{whole}/a/skip.dat", whole]
    assert texts_of(corpus(tmp_path, train=mixed).train) == ["b/2.txt", "a/skip.dat", "a/1.md", "c.py", "d"]


def test_a_folder_that_vanishes_while_it_is_read_is_passed_over(tmp_path, monkeypatch):
    """Another rank renames its half-written cache, which may lie beside the texts."""
    for name in ("in/a.txt", "in/cache/half.tmp/tokens.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    real = os.scandir

    def vanishing(path):
        if str(path).endswith("half.tmp"):
            raise FileNotFoundError(2, "No such file or directory", str(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", vanishing)
    files = find_sources([str(tmp_path / "in")], "data.train")
    assert [source.path.name for source in files] == ["a.txt"]


def test_long_text_files_are_cut_at_line_ends(tmp_path):
    lines = [f"{i} " + "ü" * 40 for i in range(5000)]
    path = tmp_path / "long.txt"
    path.write_bytes(b"\xef\xbb\xbf" + "\r\n".join(lines).encode())
    rows = read_rows([Source("text", path)], fields_of(DataSection(), "text"), ())
    pieces = [row.fields["text"] for row in rows]
    assert "".join(pieces) == "\n".join(lines), "nothing lost, no mark at the beginning, plain line ends"
    assert len(pieces) == math.ceil(path.stat().st_size / (PIECE_BYTES + 50))
    assert all(piece.endswith("\n") for piece in pieces[:-1])


def test_the_standard_library_is_the_embedded_default(tmp_path):
    files = find_sources(["stdlib"], "data.train")
    root = Path(sysconfig.get_paths()["stdlib"])
    names = [file.path.relative_to(root).as_posix() for file in files]
    assert names == sorted(names, key=lambda name: Path(name))
    assert "ast.py" in names and "json/decoder.py" in names
    assert not any("site-packages" in name or "test" in name.split("/") for name in names)
    got = corpus(tmp_path, train=["stdlib"], max_bytes=300_000, eval_fraction=0.1)
    total = len(got.train) + len(got.eval)
    assert 300_000 <= total <= 300_000 + PIECE_BYTES + 10_000, "whole documents, until the limit is reached"
    assert "def " in "".join(texts_of(got.train))
    assert got.source == describe_sources(["stdlib"])
    assert "standard library" in got.source


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"fine\n\xff\xfe", r"a\.txt is not UTF-8 text: byte 0xff at offset 5"),
        ("a.txt", b"", "has no text"),
        ("a.txt", b" \n\n", "has no text"),
        ("a.jsonl", b'{"text": "a"}\n{"text": ', r"a\.jsonl, line 2 is not JSON"),
        ("a.jsonl", b'{"text": "a"}\n{"text": "bc\n', r"line 2 is not JSON: Unt.* column 10; it ends .*: it was cut"),
        ("a.jsonl", b'{\n"text": "a"\n}\n', r"line 1 is not JSON: .* column 2; .* or goes over several lines"),
        ("a.jsonl", rb'{"text": "a \uD83D b"}', r"a\.jsonl, line 1 has '\\ud83d', half of a surrogate pair"),
        ("a.jsonl", b'{"text": "a", "x": ' + b"[" * 100_000, r"a\.jsonl, line 1 is nested too deeply"),
        ("a.jsonl", b'{"body": "a", "id": 3}\n', r"line 1 has no field 'text'; it has body, id: set data\.text_field"),
        ("a.jsonl", b"{}\n", "it has no fields at all"),
        ("a.jsonl", b'{"text": 3}\n', "the field 'text' holds int, not text"),
        ("a.jsonl", b'["text"]\n', "line 1 is a JSON list; one object per line"),
        ("a.jsonl", b'[\n{"text": "a"}]', r"a JSON array is read from a \.json file"),
        ("a.json", b'[\n{"text": "a"}, 3]', r"a\.json, item 2 is a JSON int; one object"),
        ("a.json", b'[\n{"text": "a"}, ', r"a\.json, line 2, is not JSON: .* column \d+$"),
        ("a.json", b'\n[\n{"text": "a"},\n{"text" "b"}]', r"a\.json, line 4, is not JSON: .* in column 9$"),
        ("a.json", b'[{"text": "a"} {"text": "b"}]', r"a\.json, line 1, is not JSON: .* in column 16$"),
        ("a.jsonl", b'{"input_ids": 5}', "line 1: the field 'input_ids' holds no list of whole numbers"),
        ("a.jsonl", b'{"input_ids": [1, [2]]}', "line 1: the field 'input_ids' holds no list of whole numbers"),
        ("a.csv", b"text,n\na,1,2\n", r"a\.csv, line 2 has not as many values as the first line has columns \(2\)"),
        ("a.csv", b"body\na\n", r"a\.csv has no column 'text'; it has body: set data\.text_field"),
        ("a.csv", b"text\n\xff\n", r"a\.csv is no CSV of UTF-8: "),
        ("a.idx", b"MMIDIDX", r"a\.idx has no a\.bin beside it"),
        ("a.bin", b"x" * 2000, r"a\.bin is no shard of tokens"),
        ("a.jsonl", b'{"text": null}\n', "has no text"),
        ("a.jsonl.gz", b"no gzip", r"a\.jsonl\.gz is no intact gzip file"),
        ("a.txt.gz", gzip.compress(b"text " * 999, mtime=0)[:-9], r"a\.txt\.gz is no intact gzip file"),
        ("a.parquet", b"no parquet", r"a\.parquet is no readable Parquet file"),
    ],
)
def test_unreadable_files(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        corpus(tmp_path, train=[str(tmp_path / name)])
    cached = list((tmp_path / "cache").glob("*"))
    assert cached == [], "a build that failed leaves nothing behind"


def test_a_parquet_file_whose_name_is_a_pattern(tmp_path):
    for name in ("a[1].parquet", "a1.parquet"):
        write_parquet(tmp_path / name, text=[name])
    assert texts_of(corpus(tmp_path, train=[str(tmp_path / "a[1].parquet")]).train) == ["a[1].parquet"]


def test_tables_without_the_field(tmp_path):
    import datasets

    path = write_parquet(tmp_path / "a.parquet", body=["a"], text=[3])
    with pytest.raises(ValueError, match=r"a\.parquet, row 0: the field 'text' holds int"):
        corpus(tmp_path, train=[str(path)])
    with pytest.raises(ValueError, match=r"has no column 'content'; it has body, text: set data\.text_field"):
        corpus(tmp_path, train=[str(path)], text_field="content")
    datasets.Dataset.from_dict({"body": ["a"]}).save_to_disk(str(tmp_path / "d"))
    with pytest.raises(ValueError, match="has no column 'text'; it has body"):
        corpus(tmp_path, train=[str(tmp_path / "d")])
    datasets.DatasetDict({"dev": datasets.Dataset.from_dict({"text": ["a"]})}).save_to_disk(str(tmp_path / "e"))
    with pytest.raises(ValueError, match=r"has no split train, but dev; name the folder of one split, such as .*e/dev"):
        corpus(tmp_path, train=[str(tmp_path / "e")])
    assert texts_of(corpus(tmp_path, train=[str(tmp_path / "e" / "dev")]).train) == ["a"]
    (tmp_path / "d" / "state.json").write_text("{}")
    with pytest.raises(ValueError, match="is no readable Hugging Face dataset folder"):
        corpus(tmp_path, train=[str(tmp_path / "d")])


def test_paths_where_nothing_is(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "x.c").write_text("int x;")
    (tmp_path / "t.bin.gz").write_bytes(b"\0\1")
    os.mkfifo(tmp_path / "pipe.txt")
    for named, message in [
        (tmp_path / "no.txt", r"data\.train: .*no\.txt does not exist \(seen from [^)]*\)$"),
        ("some-body/chats_v1", "download it first: hf download some-body/chats_v1 --repo-type dataset --local-dir DIR"),
        ("https://example.org/chats.jsonl", "that is an address: download it first"),
        ("data/chats.jsonl", r"does not exist \(seen from [^)]*\)$"),
        (tmp_path / "t.bin.gz", r"t\.bin\.gz is a binary file of a kind that is not read \(\.jsonl, .*\.idx"),
        (tmp_path / "*.gz", r"t\.bin\.gz is a binary file"),
        (tmp_path / "*.no", "no file matches"),
        (tmp_path / "pipe.txt", "pipe.txt is no file, but a pipe or a device"),
        (tmp_path / "empty", "empty is empty"),
        (tmp_path / "odd", r'no text, JSON-lines, CSV or Parquet file, but \.c; if these are text, name them .*\*\.c"'),
    ]:
        with pytest.raises(ValueError, match=message):
            check_sources(DataSection(train=(str(named),)))
    (tmp_path / "a.txt").write_text("a")
    with pytest.raises(ValueError, match=r"data\.eval: .*no\.txt does not exist"):
        check_sources(DataSection(train=(str(tmp_path / "a.txt"),), eval=(str(tmp_path / "no.txt"),)))


@pytest.mark.parametrize(("count", "share", "held"), [(7, 0.4, [2, 4]), (40, 0.05, [19, 39]), (3, 0.05, [2])])
def test_whole_documents_are_held_out_evenly(tmp_path, count, share, held):
    path = write_lines(tmp_path / "a.jsonl", [{"text": f"doc {i}"} for i in range(count)])
    got = corpus(tmp_path, train=[str(path)], eval_fraction=share)
    assert texts_of(got.eval) == [f"doc {i}" for i in held]
    assert texts_of(got.train) == [f"doc {i}" for i in range(count) if i not in held]
    assert (got.train_documents, got.eval_documents) == (count - len(held), len(held))


def test_what_cannot_be_held_out_and_what_is_left_out(tmp_path):
    (tmp_path / "a.txt").write_text("alone")
    with pytest.raises(ValueError, match=r"has a single document.*data\.eval, or set data\.eval_fraction=0"):
        corpus(tmp_path, train=[str(tmp_path / "a.txt")], eval_fraction=0.05)
    assert len(corpus(tmp_path, train=[str(tmp_path / "a.txt")]).eval) == 0
    (tmp_path / "b.txt").write_text("")
    with pytest.raises(ValueError, match=r"data\.eval .* has no text"):
        corpora(tmp_path, train=[str(tmp_path / "a.txt")], eval=[str(tmp_path / "b.txt")])
    path = write_lines(tmp_path / "a.jsonl", [{"text": "üü"}] * 9)
    assert texts_of(corpus(tmp_path, train=[str(path)], max_bytes=9).train) == ["üü"] * 3


def test_the_cache_is_used_until_something_changes(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", [{"text": f"doc {i}", "other": f"{i}"} for i in range(5)])
    settings = {"train": [str(path)], "eval_fraction": 0.3}
    first = corpus(tmp_path, **settings)
    (entry,) = (tmp_path / "cache").iterdir()
    stamp = entry.stat().st_mtime_ns
    assert corpus(tmp_path, **settings).fingerprint == first.fingerprint
    assert entry.stat().st_mtime_ns == stamp
    assert corpus(tmp_path, **settings, text_field="other").fingerprint != first.fingerprint
    assert corpus(tmp_path, train=[str(path)], eval_fraction=0.5).fingerprint != first.fingerprint
    os.utime(path, ns=(1, 1))
    assert corpus(tmp_path, **settings).fingerprint == first.fingerprint, "read again, with the same tokens"
    assert len(list((tmp_path / "cache").iterdir())) == 4
    write_lines(path, [{"text": "new", "other": "1"}] * 5)
    assert corpus(tmp_path, **settings).fingerprint != first.fingerprint


def test_a_damaged_entry_is_built_again(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", [{"text": "doc"}] * 5)
    corpus(tmp_path, train=[str(path)])
    (entry,) = (tmp_path / "cache").iterdir()
    with open(entry / "train.bin", "r+b") as file:
        file.truncate(3)
    assert texts_of(corpus(tmp_path, train=[str(path)]).train) == ["doc"] * 5
    (entry / "meta.json").write_text("{")
    assert texts_of(corpus(tmp_path, train=[str(path)]).train) == ["doc"] * 5


def _prepare_into(data: DataSection, start, results) -> None:
    start.wait()
    results.put(prepare(data, BYTES).fingerprint)


def test_several_builders_at_once(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", [{"text": f"document {i} " * 50} for i in range(2000)])
    data = DataSection(train=(str(path),), cache_dir=str(tmp_path / "cache"))
    context = multiprocessing.get_context("fork")
    start, results = context.Event(), context.Queue()
    builders = [context.Process(target=_prepare_into, args=(data, start, results)) for _ in range(4)]
    for builder in builders:
        builder.start()
    start.set()
    fingerprints = {results.get(timeout=240) for _ in builders}
    for builder in builders:
        builder.join(timeout=60)
        assert builder.exitcode == 0
    assert fingerprints == {prepare(data, BYTES).fingerprint}
    assert len(list((tmp_path / "cache").iterdir())) == 1, "one entry, nothing unfinished"


def test_what_killed_builders_left_is_removed(tmp_path):
    """Not what others build now, or built a moment ago, or what people have there."""
    killed, alive, recent = (f"{'0123456789ab' * 2}.{word:_<8}" for word in ("killed", "alive", "recent"))
    for name in (killed, alive, recent, "books.v2"):
        (tmp_path / "cache" / name).mkdir(parents=True)
        (tmp_path / "cache" / name / "train.bin").touch()
        if name != recent:
            os.utime(tmp_path / "cache" / name / "train.bin", (0, 0))
    path = write_lines(tmp_path / "a.jsonl", [{"text": "doc"}] * 5)
    with (tmp_path / "cache" / alive / "train.bin").open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        corpus(tmp_path, train=[str(path)])
    left = {folder.name for folder in (tmp_path / "cache").glob("*.*")}
    assert left == {alive, recent, "books.v2"}


def test_where_the_cache_is_and_who_builds_it(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", "/some/cache")
    assert default_cache_dir() == Path("/some/cache/carpool")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_cache_dir() == Path.home() / ".cache" / "carpool"
    path = write_lines(tmp_path / "a.jsonl", [{"text": "doc"}] * 5)
    data = DataSection(train=(str(path),), cache_dir=str(tmp_path / "cache"), eval_fraction=0.2)
    with pytest.raises(ValueError, match="another rank should have built"):
        prepare(data, BYTES, build=False)

    prepare(data, BYTES)
    waited = prepare(data, BYTES, build=False)
    assert texts_of(waited.train) == ["doc"] * 4
    path = write_lines(tmp_path / "a.jsonl", [{"text": "doc"}] * 5)
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"cannot keep tokens in .*set data\.cache_dir"):
        prepare(DataSection(train=(str(path),), cache_dir=str(tmp_path / "file")), BYTES)


def test_large_vocabularies_take_32_bits(tmp_path):
    class Wide(BytesTokenizer):
        def __init__(self) -> None:
            super().__init__()
            self.vocab_size, self.eos_id, self.fingerprint = 100_000, 99_999, "wide"

    path = write_lines(tmp_path / "a.jsonl", [{"text": "ab"}] * 2)
    got = prepare(DataSection(train=(str(path),), cache_dir=str(tmp_path), eval_fraction=0.0), Wide())
    assert got.train.dtype == np.uint32
    assert got.train.tolist() == [97, 98, 99_999] * 2


L = 5


def train_loader(tokens, fingerprint: str = "f", length: int = L, **settings: Any) -> TrainLoader:
    return TrainLoader(Stream(tokens, length, fingerprint), **({"batch_size": 2, "seed": 3} | settings))


def rows(step) -> list[tuple[int, ...]]:
    return [tuple(row) for batch in step for row in batch["input_ids"].tolist()]


def test_every_token_is_predicted_once_per_epoch():
    tokens = np.arange(100, 100 + 4 * 9 + 1 + 2, dtype=np.uint16)  # 9 sequences and 2 tokens of a tail
    loader = train_loader(tokens, batch_size=3)
    assert loader.num_sequences == 9
    seen: Counter[int] = Counter()
    for _ in range(3):
        (batch,) = next(loader)
        assert batch["input_ids"].dtype == batch["labels"].dtype == torch.int64
        assert batch["input_ids"].shape == (3, L)
        assert torch.equal(batch["input_ids"], batch["labels"])
        assert batch["input_ids"].data_ptr() != batch["labels"].data_ptr()
        seen.update(batch["labels"][:, 1:].flatten().tolist())
        assert count_targets(batch["labels"]) == 3 * (L - 1)
    assert seen == Counter(range(101, 137))
    assert loader.epoch == 1.0


def test_the_order_depends_on_seed_and_epoch_only():
    tokens = np.arange(4 * 20 + 1, dtype=np.uint32)

    def epochs(seed):
        loader = train_loader(tokens, seed=seed, batch_size=10)
        return [rows(next(loader)) + rows(next(loader)) for _ in range(3)]

    first, again, other = epochs(3), epochs(3), epochs(4)
    assert first == again
    assert first[0] != other[0]
    assert first[0] != first[1] != first[2]
    assert sorted(first[0]) == sorted(first[1]) == sorted(other[2])
    assert sorted(permutation(1000, 7, 0)) == list(range(1000))
    # Known values: an order that changed would silently reorder the rest of every resumed run.
    assert permutation(10, 0, 0).tolist() == [4, 8, 0, 1, 7, 6, 2, 5, 3, 9]
    assert permutation(10, 1, 5).tolist() == [9, 5, 4, 6, 7, 3, 8, 2, 1, 0]
    spread = np.mean([permutation(100, 0, epoch)[:10].mean() for epoch in range(200)])
    assert 47 < spread < 52


def test_batches_that_are_made_ahead_are_the_same_and_the_state_is_of_those_handed_out():
    tokens = np.arange(4 * 31 + 1, dtype=np.uint32)
    plain, ahead = train_loader(tokens, batch_size=6), Prefetch(train_loader(tokens, batch_size=6), torch.device("cpu"))
    assert ahead.state_dict() == plain.state_dict()
    for _ in range(7):  # into the second epoch
        assert rows(next(ahead)) == rows(next(plain))
        assert ahead.state_dict() == plain.state_dict()
    state = json.loads(json.dumps(ahead.state_dict()))
    expected = [rows(next(plain)) for _ in range(3)]
    assert [rows(next(ahead)) for _ in range(3)] == expected
    ahead.load_state_dict(state)
    assert [rows(next(ahead)) for _ in range(3)] == expected
    ahead.close()


def test_an_error_of_the_thread_that_makes_batches_ends_the_step():
    tokens = np.arange(4 * 31 + 1, dtype=np.uint32)
    loader = train_loader(tokens, batch_size=6)
    ahead = Prefetch(loader, torch.device("cpu"))
    next(ahead)
    ahead._next.result()
    loader.sequences._array = None
    next(ahead)
    with pytest.raises(TypeError, match="NoneType"):
        next(ahead)
    ahead.close()


def test_other_and_too_little_data_are_refused():
    tokens = np.arange(4 * 7 + 1, dtype=np.uint32)
    train_loader(tokens, batch_size=7)
    with pytest.raises(ValueError, match=r"29 tokens, 7 sequences .* one step takes 8 sequences .*2 \* .*1 \* 4 ranks"):
        train_loader(tokens, batch_size=2, dp_size=4)
    with pytest.raises(ValueError, match="0 tokens, 0 sequences"):
        train_loader(np.empty(0, dtype=np.uint32))
    state = train_loader(tokens).state_dict()
    with pytest.raises(ValueError, match="trained on other data"):
        train_loader(tokens, fingerprint="g").load_state_dict(state)
    with pytest.raises(ValueError, match=r"data\.sequence_length = 5, now it is 4.*set data\.sequence_length=5"):
        train_loader(tokens, length=4).load_state_dict(state)
    with pytest.raises(ValueError, match=r"set training\.seed=3"):
        train_loader(tokens, seed=4).load_state_dict(state)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("size", [0, 1, 2, 5, 6, 23, 41])
def test_evaluation_sees_each_target_once_on_any_number_of_ranks(size, ranks):
    tokens = np.arange(100, 100 + size, dtype=np.uint16)
    loaders = [
        EvalLoader(Stream(tokens, L, partial=True), batch_size=2, dp_rank=rank, dp_size=ranks, pad_id=9)
        for rank in range(ranks)
    ]
    assert len({len(loader) for loader in loaders}) == 1
    # No rows that would be empty on all ranks.
    rows = min(2, max(1, -(-loaders[0].num_sequences // ranks)))
    seen: Counter[int] = Counter()
    for loader in loaders:
        batches = list(loader)
        assert len(batches) == len(loader)
        for batch in batches:
            ids_BL, labels_BL = batch["input_ids"], batch["labels"]
            assert ids_BL.shape == labels_BL.shape == (rows, L)
            assert torch.equal(ids_BL == 9, labels_BL == -100)
            assert torch.equal(ids_BL[labels_BL != -100], labels_BL[labels_BL != -100])
            targets = labels_BL[:, 1:][labels_BL[:, 1:] != -100]
            assert count_targets(labels_BL) == len(targets)
            seen.update(targets.tolist())
        assert [b["input_ids"].tolist() for b in loader] == [b["input_ids"].tolist() for b in batches]
    assert seen == Counter(range(101, 100 + size))


def test_evaluation_can_be_limited_to_a_spread_of_sequences():
    tokens = np.arange(4 * 20 + 1, dtype=np.uint16)
    sequences = Stream(tokens, L, partial=True)
    loader = EvalLoader(sequences, batch_size=2, max_sequences=4)
    first = [row[0] for batch in loader for row in batch["input_ids"].tolist()]
    assert first == [0, 20, 40, 60]
    assert EvalLoader(sequences, batch_size=2, max_sequences=99).num_sequences == 20


def test_stores_and_the_hub_are_read_if_a_key_asks(tmp_path, monkeypatch):
    import datasets
    import fsspec

    store = fsspec.filesystem("memory")
    texts = ["one", "two"]
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    store.pipe({"/in/a.jsonl": lines, "/in/b/c.jsonl.gz": gzip.compress(lines), "/odd/x.o": b"x"})
    with fsspec.open("memory://in/d.parquet", "wb") as file:
        datasets.Dataset.from_dict({"text": texts}).to_parquet(file)
    for named, count in (("memory://in/a.jsonl", 1), ("memory://in/*.jsonl", 1), ("memory://in", 3)):
        got = corpus(tmp_path, train=[named], allow_download=True)
        assert texts_of(got.train) == texts * count, named
        with pytest.raises(ValueError, match=r"that is an address: .*, or set data\.allow_download=true"):
            corpus(tmp_path, train=[named])
    store.pipe({"/in/a.jsonl": lines * 2})
    assert len(texts_of(corpus(tmp_path, train=["memory://in/a.jsonl"], allow_download=True).train)) == 4
    for named, message in (
        ("memory://no.txt", "there is no file at memory://no.txt"),
        ("memory://odd/x.o", "is a file of a kind that is not read"),
        ("nostore://a", "nostore://a cannot be read: Protocol not known"),
        ("some-body/chats:other", "cannot be read from the Hugging Face Hub: "),
    ):
        with pytest.raises(ValueError, match=message):
            corpora(tmp_path, train=[named], allow_download=True)
    # A data set of the Hub has the form of a folder, which stands for it here.
    (tmp_path / "hub").mkdir()
    for split in ("train", "test"):
        (tmp_path / "hub" / f"{split}.jsonl").write_bytes(lines if split == "train" else lines[:16])
    builder = datasets.load_dataset_builder
    monkeypatch.setattr(datasets, "load_dataset_builder", lambda name, *a, **k: builder(str(tmp_path / "hub"), *a))
    data = {"train": ["some-body/chats"], "eval": ["some-body/chats@main"], "allow_download": True}
    found = corpora(tmp_path, **data)
    assert texts_of(found.sources[0].train) == texts and texts_of(found.held_out[0].train) == texts[:1]
    with pytest.raises(ValueError, match=r"hf download some-body/chats .*, or set data\.allow_download=true"):
        corpora(tmp_path, **data | {"allow_download": False})


def test_megatrons_files_and_shards_of_tokens(tmp_path):
    documents = [np.arange(5), np.arange(70, 73), np.array([9])]
    tokens = np.concatenate(documents).astype("<u2")
    sizes = np.array([3, 2, 3, 1], "<i4")  # sequences, of which the first two are the first document
    counts = np.array([4, 4], "<i8").tobytes()
    offsets = (2 * np.cumsum([0, *sizes[:-1]])).astype("<i8").tobytes()
    index = b"MMIDIDX\0\0" + (1).to_bytes(8, "little") + bytes([8]) + counts + sizes.tobytes() + offsets
    (tmp_path / "a.idx").write_bytes(index + np.array([0, 2, 3, 4], "<i8").tobytes())
    (tmp_path / "a.bin").write_bytes(tokens.tobytes())
    for named in ("a.idx", "a"):
        got = corpus(tmp_path, train=[str(tmp_path / named)], eval_fraction=0.34)
        assert (got.train_documents, got.eval.tolist()) == (2, [9]) and got.train.tolist() == tokens[:-1].tolist()
    with pytest.raises(ValueError, match=r"a\.bin is no shard of tokens: .*; name the \.idx beside it"):
        corpus(tmp_path, train=[str(tmp_path / "a.bin")])
    header = np.zeros(256, "<i4")
    header[:3] = 20240520, 1, len(tokens)
    (tmp_path / "b.bin").write_bytes(header.tobytes() + tokens.tobytes())
    assert corpus(tmp_path, train=[str(tmp_path / "b.bin")]).train.tolist() == tokens.tolist()
    (tmp_path / "b.bin").write_bytes(header.tobytes() + tokens[:-1].tobytes())
    with pytest.raises(ValueError, match=r"b\.bin has 1,040 bytes; 1,042 bytes of tokens are needed"):
        corpus(tmp_path, train=[str(tmp_path / "b.bin")])
    write_lines(tmp_path / "c.jsonl", [{"input_ids": [1, 400]}])
    with pytest.raises(ValueError, match=r"line 1 has tokens 1 to 400, but the tokenizer bytes has 320"):
        corpus(tmp_path, train=[str(tmp_path / "c.jsonl")])


def test_a_kind_of_file_and_a_format_from_outside_the_package(tmp_path, monkeypatch):
    monkeypatch.setattr(READERS, "_things", dict(READERS._things))
    monkeypatch.setattr(FORMATS, "_things", dict(FORMATS._things))

    class Lyrics(Reader):
        name, what, endings = "lyrics", "file of songs", (".lrc",)

        def rows(self, path, wanted, splits):
            with open_file(path) as file:
                for number, line in enumerate(file, start=1):
                    yield Row({"line": line.decode().strip()}, f"{path}, line {number}")

    class Songs(TextFormat):
        name, row = "songs", "line"

        def fields(self, data):
            return Fields(("line",), (), "the field line")

        def encoder(self, data, tokenizer, model_path):
            return super().encoder(data.model_copy(update={"text_field": "line"}), tokenizer, model_path)

    READERS.register(Lyrics)
    FORMATS.register(Songs)
    (tmp_path / "a.lrc").write_text("la\nli\n")
    for named in (tmp_path, tmp_path / "a.lrc"):
        assert texts_of(corpus(tmp_path, train=[str(named)]).train) == ["la", "li"]
    assert DataSection(format="songs").format == "songs"
