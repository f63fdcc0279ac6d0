"""Tokenizers: bytes, which need no file, and any `tokenizer.json` of the library `tokenizers`.

The loop needs five things of a tokenizer, which `Tokenizer` names: a vocabulary size, the token that ends a
document, text to tokens, tokens to text, and a fingerprint by which cached tokens are known again.

The bytes tokenizer is the embedded default. Token b is byte b; 256 ends a document and 257 begins one:

    "ké"  ->  [107, 195, 169]          vocab_size 320: 258 tokens, padded to a multiple of 64

A vocabulary that small makes a small model's embedding small too, so that nearly all of its parameters are layers.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.uint32]

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

    def encode(self, text: str) -> Tokens:
        """Tokens of one text, without any that begin or end it."""

    def encode_batch(self, texts: Sequence[str]) -> list[Tokens]:
        """`encode` of each, faster."""

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of these tokens; special tokens have none."""


class BytesTokenizer:
    """Token b is byte b of the text's UTF-8; see the module's docstring.

    Args:
        pad_to: The vocabulary's size is rounded up to a multiple of this (1: exactly 258), which the matrix units
            of accelerators like. The tokens added never occur.
    """

    name = "bytes"
    eos_id = 256
    bos_id = 257

    def __init__(self, pad_to: int = 64) -> None:
        self.vocab_size = -(-258 // pad_to) * pad_to
        self.fingerprint = "bytes-1"

    def encode(self, text: str) -> Tokens:
        # Half a surrogate pair, which JSON can hold, has no UTF-8: it becomes "?".
        return np.frombuffer(text.encode("utf-8", errors="replace"), dtype=np.uint8).astype(np.uint32)

    def encode_batch(self, texts: Sequence[str]) -> list[Tokens]:
        return [self.encode(text) for text in texts]

    def decode(self, tokens: Iterable[int]) -> str:
        return bytes(token for token in map(int, tokens) if token < 256).decode("utf-8", errors="replace")


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

    def decode(self, tokens: Iterable[int]) -> str:
        return str(self._tokenizer.decode([int(token) for token in tokens], skip_special_tokens=True))


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
