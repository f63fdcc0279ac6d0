"""Tokenizers: bytes, which need no file, and any `tokenizer.json` of the library `tokenizers`.

The loop needs six things of a tokenizer, which `Tokenizer` names: a vocabulary size, the token that ends a
document, what stands around each document, text to tokens, tokens to text, and a fingerprint by which cached tokens are
known again.

A document is what the tokenizer itself makes of its text, and an EOS after it. A text that names these tokens itself
does not get them twice.

    Llama     <s> The car </s>                tokenizer(text) puts <s> before each text
    GPT-2     The car <|endoftext|>           it puts nothing there

The bytes tokenizer is the embedded default. Token b is byte b; 256 ends a document (257, to begin one, is not used):

    "ké"  ->  [107, 195, 169]          vocab_size 320: 258 tokens, padded to a multiple of 64

A vocabulary that small makes a small model's embedding small too, so that nearly all of its parameters are layers.

Conversations and prompts take the tokenizer of transformers in a checkpoint's folder, with its chat template
(`read_pretrained`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from carpool.train.config.schema import Config, DataSection

Tokens = NDArray[np.uint32]
Frame = tuple[tuple[int, ...], tuple[int, ...]]

# Names of the end-of-document token in published tokenizers, tried in this order when no file beside them says it.
_USUAL_EOS = (
    "<|endoftext|>",
    "<|end_of_text|>",
    "</s>",
    "<eos>",
    "<|eos|>",
    "<|endofdocument|>",
    "<|im_end|>",
    "[SEP]",
)


class Tokenizer(Protocol):
    """What the trainer needs of a tokenizer."""

    @property
    def name(self) -> str:
        """For people: "bytes", or the path of its file."""

    @property
    def fingerprint(self) -> str:
        """Equal for two tokenizers only if they turn every text into the same tokens."""

    @property
    def vocab_size(self) -> int:
        """All tokens are below this."""

    @property
    def eos_id(self) -> int:
        """The token that ends a document."""

    @property
    def frame(self) -> Frame:
        """What stands before each document, and after it."""

    def encode(self, text: str) -> Tokens:
        """Tokens of one text, without any that begin or end it."""

    def encode_batch(self, texts: Sequence[str]) -> list[Tokens]:
        """`encode` of each, faster."""

    def decode(self, tokens: Iterable[int], special: bool = False) -> str:
        """The text of these tokens. `special`: with the names of special tokens, which are left out otherwise."""


def framed(ids: Tokens, begin: Sequence[int], end: Sequence[int]) -> Tokens:
    """Tokens of a text with what stands before it and after it, unless the text itself begins or ends so."""
    first = () if ids[: len(begin)].tolist() == list(begin) else begin
    last = () if ids[max(0, len(ids) - len(end)) :].tolist() == list(end) else end
    return np.concatenate([np.asarray(first, np.uint32), ids, np.asarray(last, np.uint32)])


def added_tokens(encode: Callable[[bool], list[int]]) -> Frame:
    """What a tokenizer puts before and after every text. `encode`: some text, with that (True) or without."""
    bare, whole = encode(False), encode(True)
    starts = (k for k in range(len(whole) - len(bare) + 1) if whole[k : k + len(bare)] == bare)
    start = next(starts, 0) if bare else len(whole)
    return tuple(whole[:start]), tuple(whole[start + len(bare) :])


class BytesTokenizer:
    """Token b is byte b of the text's UTF-8; see the module's docstring.

    Args:
        pad_to: The vocabulary's size is rounded up to a multiple of this (1: exactly 258), which the matrix units
            of accelerators like. The tokens added never occur.
    """

    name = "bytes"
    eos_id, eos_token = 256, "<|endoftext|>"
    bos_id, bos_token = 257, "<|startoftext|>"

    def __init__(self, pad_to: int = 64) -> None:
        self.vocab_size = -(-258 // pad_to) * pad_to
        self.fingerprint = "bytes-1"

    @property
    def frame(self) -> Frame:
        return (), (self.eos_id,)

    def encode(self, text: str) -> Tokens:
        # Half a surrogate pair, which JSON can hold, has no UTF-8: it becomes "?".
        return np.frombuffer(text.encode("utf-8", errors="replace"), dtype=np.uint8).astype(np.uint32)

    def encode_batch(self, texts: Sequence[str]) -> list[Tokens]:
        return [self.encode(text) for text in texts]

    def decode(self, tokens: Iterable[int], special: bool = False) -> str:
        names = {self.eos_id: self.eos_token.encode(), self.bos_id: self.bos_token.encode()} if special else {}
        raw = (bytes([token]) if token < 256 else names.get(token, b"") for token in map(int, tokens))
        return b"".join(raw).decode("utf-8", errors="replace")


class FileTokenizer:
    """A `tokenizer.json`, or a folder that holds one.

    Args:
        path: The file or the folder.
        eos_token: The token that ends a document. None: as `tokenizer_config.json` beside the file says, otherwise
            the first of the usual names that the vocabulary has.

    Raises:
        ValueError: no such file, a file that is no tokenizer, or no end-of-document token to be found.
    """

    def __init__(self, path: str | Path, eos_token: str | None = None) -> None:
        import tokenizers

        file = Path(path)
        if file.is_dir():
            file = file / "tokenizer.json"
        if not file.is_file():
            raise ValueError(
                f'tokenizer: {file} does not exist; give "bytes", a tokenizer.json or a folder that holds one'
            )
        content = file.read_bytes()
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(content.decode("utf-8"))
        except Exception as error:  # the library raises bare Exception
            raise ValueError(f"tokenizer: {file} is not a tokenizer.json: {error}") from None
        # What a checkpoint's tokenizer was told to do for inference would cut or pad documents here.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.name = str(path)
        self.vocab_size = 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=0)
        self.eos_token, self.eos_id = self._find_eos(file, eos_token)
        # As the file says, which transformers follows, too.
        begin, end = added_tokens(lambda special: list(self._tokenizer.encode("a", add_special_tokens=special).ids))
        self.frame: Frame = begin, end if end[-1:] == (self.eos_id,) else (*end, self.eos_id)
        self.fingerprint = hashlib.sha256(content + self.eos_token.encode()).hexdigest()

    def _find_eos(self, file: Path, eos_token: str | None) -> tuple[str, int]:
        candidates = (_eos_beside(file), *_USUAL_EOS) if eos_token is None else (eos_token,)
        for candidate in candidates:
            token_id = None if candidate is None else self._tokenizer.token_to_id(candidate)
            if candidate is not None and token_id is not None:
                return candidate, token_id
        if eos_token is not None:
            raise ValueError(f"eos_token: {eos_token!r} is not in the vocabulary of {file}")
        special = sorted(str(token) for token in self._tokenizer.get_added_tokens_decoder().values())
        raise ValueError(
            f"{file} does not say which token ends a document; name one of its tokens as eos_token"
            + (f" (its special ones are {', '.join(special[:8])})" if special else "")
        )

    def encode(self, text: str) -> Tokens:
        return np.asarray(self._tokenizer.encode(_storable(text), add_special_tokens=False).ids, dtype=np.uint32)

    def encode_batch(self, texts: Sequence[str]) -> list[Tokens]:
        encodings = self._tokenizer.encode_batch_fast([_storable(text) for text in texts], add_special_tokens=False)
        return [np.asarray(encoding.ids, dtype=np.uint32) for encoding in encodings]

    def decode(self, tokens: Iterable[int], special: bool = False) -> str:
        return str(self._tokenizer.decode([int(token) for token in tokens], skip_special_tokens=not special))


def load_tokenizer(tokenizer: str | None, model_path: str | None = None, eos_token: str | None = None) -> Tokenizer:
    """The tokenizer that `[data]` and `[model]` name.

    Args:
        tokenizer: `data.tokenizer`: "bytes", a path, or None for the one in `model_path`, otherwise bytes.
        model_path: `model.path`, or None for a model from scratch.
        eos_token: `data.eos_token`.

    Raises:
        ValueError: as `FileTokenizer`; weights without a tokenizer; or an `eos_token` for bytes, which have their own.
    """
    if tokenizer is None and model_path is not None:
        if (Path(model_path) / "tokenizer.json").is_file():
            tokenizer = model_path
        elif any(Path(model_path).glob("*.safetensors")):
            raise ValueError(
                f"{model_path} has weights and no tokenizer.json, so what its tokens mean is not known: copy the "
                "model's into it, or name its folder as the tokenizer, or bytes if the weights are "
                "random (data.tokenizer of a configuration, --tokenizer of carpool trace)"
            )
    if tokenizer is None or tokenizer == "bytes":
        if eos_token is not None:
            raise ValueError(f"eos_token = {eos_token!r} is given, but the bytes tokenizer has its own: leave it out")
        return BytesTokenizer()
    return FileTokenizer(tokenizer, eos_token)


def tokenizer_of(config: Config) -> Tokenizer:
    """The tokenizer of a run.

    Raises:
        ValueError: as `load_tokenizer`."""
    return load_tokenizer(config.data.tokenizer, config.model.path, config.data.eos_token)


def _eos_beside(file: Path) -> str | None:
    """`eos_token` of the `tokenizer_config.json` in the same folder, if there is one."""
    try:
        settings = json.loads((file.parent / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    token: Any = settings.get("eos_token") if isinstance(settings, dict) else None
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _storable(text: str) -> str:
    return text.encode("utf-8", errors="replace").decode("utf-8")


# One of these is in every folder that holds a tokenizer. Transformers makes an empty one where there is none.
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")


def check_has_tokenizer(folder: Path) -> None:
    """Raise ValueError if there is no tokenizer in the folder of a checkpoint."""
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise ValueError(
            f"{folder} has no tokenizer (none of {', '.join(TOKENIZER_FILES)}): copy those of the model that it was "
            "made from into it"
        )


def load_pretrained(data: DataSection, model_path: str | None) -> Any:
    """The tokenizer of transformers that `[data]` and `[model]` name.

    Raises:
        ValueError: there is none.
    """
    folder = data.tokenizer or model_path
    if folder is None or not Path(folder).is_dir():
        named = f"data.tokenizer = {folder!r} is none" if folder else "none is named"
        raise ValueError(
            "conversations and prompts need a folder with a tokenizer of transformers, and "
            f"{named}: set model.path to a checkpoint's folder, or data.tokenizer to a folder with a tokenizer's files"
        )
    return read_pretrained(Path(folder))


def read_pretrained(folder: Path) -> Any:
    """The tokenizer of transformers in the folder of a checkpoint. ValueError: there is none."""
    from transformers import AutoTokenizer

    check_has_tokenizer(folder)
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # whatever a damaged or missing file makes it raise
        raise ValueError(f"{folder} has no tokenizer that transformers can read: {error}") from None


def fingerprint_of(pretrained: Any) -> str:
    """Equal for two tokenizers of transformers only if they turn every text into the same tokens."""
    backend = getattr(pretrained, "backend_tokenizer", None)
    content = backend.to_str() if backend is not None else json.dumps(sorted(pretrained.get_vocab().items()))
    settings = json.dumps(pretrained.special_tokens_map, sort_keys=True, default=str)
    return hashlib.sha256((content + settings).encode("utf-8", errors="replace")).hexdigest()
