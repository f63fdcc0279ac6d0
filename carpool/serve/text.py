"""From text to tokens and back: a tokenizer of Transformers, or one that a run was trained with."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from transformers import AutoTokenizer

from carpool.train.data.tokenizer import Tokenizer

# One of these is in every folder that holds a tokenizer. Transformers makes an empty one where there is none.
_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")

Messages = Sequence[dict[str, Any]]


class Text(Protocol):
    """What is asked of a tokenizer."""

    @property
    def end(self) -> tuple[int, ...]:
        """Tokens that end a text."""

    @property
    def vocabulary(self) -> int | None:
        """Tokens from here on mean nothing; None: nobody knows."""

    def encode(self, text: str) -> list[int]:
        """Tokens of a text that is to be continued, at least one."""

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens, without special ones."""

    def chat(self, messages: Messages) -> list[int]:
        """Tokens of a conversation whose next message is the model's. Raises ValueError: there is no template."""


class FolderText:
    """The tokenizer in a checkpoint's folder, with its chat template.

    Raises:
        ValueError: there is none, or Transformers cannot read it."""

    vocabulary = None

    def __init__(self, folder: Path) -> None:
        if not has_tokenizer(folder):
            raise ValueError(
                f"{folder} has no tokenizer (none of {', '.join(_FILES)}): copy those of the model that it was made "
                "from into it"
            )
        self.folder = folder
        try:
            self.tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        except Exception as error:  # each tokenizer fails in its own way
            raise ValueError(f"Transformers cannot read the tokenizer in {folder}: {error}") from error
        self.end = tuple(_ends(folder)) or tuple(_as_list(self.tokenizer.eos_token_id))

    def encode(self, text: str) -> list[int]:
        tokens: list[int] = self.tokenizer(text)["input_ids"]
        begin = self.tokenizer.bos_token_id
        return tokens or _as_list(self.tokenizer.eos_token_id if begin is None else begin)

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=True))

    def chat(self, messages: Messages) -> list[int]:
        if self.tokenizer.chat_template is None:
            raise ValueError(
                f"the tokenizer in {self.folder} has no chat template: give a text to continue (carpool generate "
                "--prompt), or put the template into chat_template.jinja there"
            )
        try:
            made: list[int] = self.tokenizer.apply_chat_template(
                list(messages), add_generation_prompt=True, tokenize=True, return_dict=False
            )
        except Exception as error:  # templates raise what they like
            raise ValueError(f"the chat template of {self.folder} refuses the conversation: {error}") from error
        return made


class RunText:
    """A run's own tokenizer, such as bytes. It has no chat template."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer, self.end, self.vocabulary = tokenizer, (tokenizer.eos_id,), tokenizer.vocab_size

    def encode(self, text: str) -> list[int]:
        return [int(token) for token in self.tokenizer.encode(text)] or [self.tokenizer.eos_id]

    def decode(self, tokens: Sequence[int]) -> str:
        return self.tokenizer.decode(tokens)

    def chat(self, messages: Messages) -> list[int]:
        raise ValueError(
            f"the tokenizer {self.tokenizer.name} has no chat template: give a text to continue (carpool generate "
            "--prompt)"
        )


def has_tokenizer(folder: Path) -> bool:
    """Does the folder hold the files of a tokenizer?"""
    return any((folder / name).is_file() for name in _FILES)


def _ends(folder: Path) -> list[int]:
    """What generation_config.json names, which may be more than the tokenizer does (the end of an answer)."""
    from transformers import GenerationConfig

    if not (folder / "generation_config.json").is_file():
        return []
    return _as_list(GenerationConfig.from_pretrained(folder, local_files_only=True).eos_token_id)


def _as_list(token: Any) -> list[int]:
    return [] if token is None else list(token) if isinstance(token, list | tuple) else [int(token)]
