"""From a folder of text files to what train.py reads: a tokenizer, and tokens for training and for validation.

    python examples/nanochat_moe/prepare.py FOLDER DATA

FOLDER holds .txt and .md files in UTF-8, each of them one document. DATA then holds

    tokenizer.json     byte-level BPE with 32,768 tokens, trained on documents of the training part
    train.bin          documents one after another, each behind a <|bos|>, as uint16
    validation.bin     the same of other documents, not of the ends of the ones above
    data.json          number of tokens and bytes of each part, and the bytes of each token

Documents are ordered by a hash of their names, so the split does not change with the machine. The loss is given in bits
per byte of text, which does not depend on the tokenizer: nats / ln 2 / bytes, where <|bos|> has no bytes.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

BOS = "<|bos|>"
DOCUMENTS_AT_ONCE = 64


def split_documents(folder: Path, validation_share: float) -> tuple[list[Path], list[Path]]:
    """(training, validation) documents of a folder; at least one of each.

    Raises:
        SystemExit: there are fewer than two documents."""
    found = [path for path in folder.rglob("*") if path.suffix in (".txt", ".md") and path.is_file()]
    if len(found) < 2:
        raise SystemExit(
            f"{folder} has {len(found)} .txt and .md files: one is needed for training, one for validation"
        )
    found.sort(key=lambda path: hashlib.sha256(str(path.relative_to(folder)).encode()).digest())
    end = np.cumsum([path.stat().st_size for path in found])
    number = min(len(found) - 1, 1 + int((end < validation_share * end[-1]).sum()))
    return found[number:], found[:number]


def texts(documents: list[Path]) -> Iterator[str]:
    for path in documents:
        yield path.read_text(encoding="utf-8", errors="replace")


def train_tokenizer(documents: list[Path], vocabulary: int, megabytes: int) -> Tokenizer:
    """Byte-level BPE with GPT-2's rule for splitting, from the first so many megabytes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocabulary, special_tokens=[BOS], initial_alphabet=alphabet)

    def some() -> Iterator[str]:
        left = megabytes * 1_000_000
        for text in texts(documents):
            yield text
            left -= len(text)
            if left <= 0:
                break

    tokenizer.train_from_iterator(some(), trainer)
    return tokenizer


def write_tokens(documents: list[Path], tokenizer: Tokenizer, out: Path, most_tokens: int | None) -> int:
    """Write documents as uint16 until there are `most_tokens`; returns the number of tokens."""
    bos, count = tokenizer.token_to_id(BOS), 0
    with out.open("wb") as file:
        for start in range(0, len(documents), DOCUMENTS_AT_ONCE):
            for encoded in tokenizer.encode_batch_fast(list(texts(documents[start : start + DOCUMENTS_AT_ONCE]))):
                tokens = np.array([bos, *encoded.ids], dtype=np.uint16)
                if most_tokens is not None:
                    tokens = tokens[: most_tokens - count]
                file.write(tokens.tobytes())
                count += len(tokens)
            if most_tokens is not None and count >= most_tokens:
                break
    return count


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="of .txt and .md files")
    parser.add_argument("data", type=Path, help="folder to write")
    parser.add_argument("--vocabulary", type=int, default=32768, help="number of tokens, at most 65,536")
    parser.add_argument("--tokenizer-megabytes", type=int, default=100, help="text that the tokenizer is trained on")
    parser.add_argument("--validation-share", type=float, default=0.01, help="of all bytes")
    parser.add_argument("--most-tokens", type=int, help="of training.bin; default: all")
    given = parser.parse_args(arguments)
    if not 257 <= given.vocabulary <= 65536:
        parser.error(f"--vocabulary {given.vocabulary}: there are 256 bytes and {BOS}, and tokens are stored as uint16")

    training, validation = split_documents(given.folder, given.validation_share)
    try:
        given.data.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"nothing can be written to {given.data} ({error.strerror}): name another folder")
    tokenizer = train_tokenizer(training, given.vocabulary, given.tokenizer_megabytes)
    tokenizer.save(str(given.data / "tokenizer.json"))
    # A character of a byte-level token stands for one byte.
    size = tokenizer.get_vocab_size()
    bytes_of = [0 if (token := tokenizer.id_to_token(number)) == BOS else len(token) for number in range(size)]
    report: dict[str, object] = {"vocabulary": size, "bos": tokenizer.token_to_id(BOS)}
    for name, documents, most in (("train", training, given.most_tokens), ("validation", validation, None)):
        tokens = write_tokens(documents, tokenizer, given.data / f"{name}.bin", most)
        array = np.fromfile(given.data / f"{name}.bin", dtype=np.uint16)
        size_in_bytes = int(np.array(bytes_of)[array].sum())
        report[name] = {"documents": len(documents), "tokens": tokens, "bytes": size_in_bytes}
        print(f"{name}: {tokens:,} tokens, {size_in_bytes:,} bytes of text")
    (given.data / "data.json").write_text(json.dumps({**report, "bytes_of_token": bytes_of}))


if __name__ == "__main__":
    main()
