"""Prompts: from a file, to tokens by the tokenizer in a folder and its chat template, and to ranks.

A file has one JSON object per line, `{"prompt": "text"}` or `{"messages": [{"role": "user", "content": "..."}]}`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from transformers import GenerationConfig

from carpool.train.config.schema import DataSection
from carpool.train.data.rows import parse_json
from carpool.train.data.tokenizer import FileTokenizer, read_pretrained

Messages = Sequence[dict[str, Any]]


class Text:
    """A tokenizer of Transformers.

    Args:
        folder: of a checkpoint, or what a run keeps of one.
        run: the `[data]` of that run, whose documents may end with another token than the tokenizer's.

    Attributes:
        end: tokens that end a text: what generation_config.json names, which may be more than the tokenizer does; and
            the token that ends the documents of the run.
        vocabulary: tokens from here on mean nothing: a model's vocabulary may be padded to a round size.

    Raises:
        ValueError: there is no tokenizer in the folder, or Transformers cannot read it."""

    def __init__(self, folder: Path, run: DataSection | None = None) -> None:
        self.folder, self.tokenizer = folder, read_pretrained(folder)
        own = None
        if (folder / "generation_config.json").is_file():
            own = GenerationConfig.from_pretrained(folder, local_files_only=True).eos_token_id
        end = _as_list(self.tokenizer.eos_token_id if own is None else own)
        if run is not None:
            end.append(FileTokenizer(folder, run.eos_token).eos_id)
        self.end = tuple(dict.fromkeys(end))
        self.vocabulary = 1 + max(self.tokenizer.get_vocab().values())

    def encode(self, text: str) -> list[int]:
        """Tokens of a text that is to be continued, at least one."""
        tokens: list[int] = self.tokenizer(text)["input_ids"]
        begin = self.tokenizer.bos_token_id
        if begin is not None and tokens[:2] == [begin, begin]:
            # The text names it itself, as training allows, too.
            tokens = tokens[1:]
        return tokens or _as_list(self.tokenizer.eos_token_id if begin is None else begin)

    def bytes_of(self, token: int) -> int:
        """Bytes of UTF-8 that a token stands for, also if it is a part of a character; 0: a special token."""
        shown = self.decode([token])
        if "\ufffd" not in shown:
            return len(shown.encode())
        # A byte by its number, of tokenizers that fall back to bytes; else one letter for each byte.
        piece = str(self.tokenizer.convert_ids_to_tokens(token))
        return 1 if re.fullmatch("<0x[0-9A-F]{2}>", piece) else len(piece)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens, without special ones."""
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=True))

    def chat(self, messages: Messages) -> list[int]:
        """Tokens of a conversation whose next message is the model's.

        Raises:
            ValueError: there is no template, or it refuses the conversation."""
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
            raise ValueError(f"the chat template in {self.folder} refuses the conversation: {error}") from error
        return made


def _as_list(token: Any) -> list[int]:
    return [] if token is None else list(token) if isinstance(token, list | tuple) else [int(token)]


Prompt = dict[str, Any]


def read_prompts(file: Path) -> list[Prompt]:
    """The prompts of a JSON-lines file; empty lines are passed over.

    Raises:
        ValueError: no such file, a line that is no prompt (with its number), or no prompt at all."""
    if not file.is_file():
        raise ValueError(f"--prompts: there is no file {file}")
    found = []
    for number, line in enumerate(file.read_bytes().splitlines(), 1):
        if not line.strip():
            continue
        try:
            found.append(_prompt(parse_json(line.decode(), "it")))
        except ValueError as error:  # of JSON, of UTF-8, or ours
            raise ValueError(f"--prompts: line {number} of {file} is no prompt: {error}") from None
    if not found:
        raise ValueError(f"--prompts: {file} has no prompts")
    return found


def _prompt(value: Any) -> Prompt:
    kinds = [kind for kind in ("prompt", "messages") if isinstance(value, dict) and kind in value]
    if len(kinds) != 1:
        raise ValueError('give {"prompt": "text"} or {"messages": [...]}')
    content = value[kinds[0]]
    if kinds[0] == "prompt":
        if not isinstance(content, str):
            raise ValueError('"prompt" must be a text')
    elif not isinstance(content, list) or not content or not all(_is_message(one) for one in content):
        raise ValueError('"messages" must be a list of {"role": "...", "content": ...}')
    if "adapter" not in value:
        return {kinds[0]: content}
    if not isinstance(value["adapter"], str | None):
        raise ValueError('"adapter" must be the name of one that --adapter gives, or null')
    return {kinds[0]: content, "adapter": value["adapter"]}


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("role"), str) and "content" in value


def encode(prompts: Sequence[Prompt], text: Text) -> list[list[int]]:
    """The tokens of each prompt.

    Raises:
        ValueError: no chat template for messages."""
    return [text.encode(one["prompt"]) if "prompt" in one else text.chat(one["messages"]) for one in prompts]


def check_length(what: str, length: int, max_new_tokens: int, context: int | None) -> None:
    """Raise ValueError if a prompt and its continuation are longer than the model's context."""
    if context is not None and length + max_new_tokens > context:
        raise ValueError(
            f"{what} has {length} tokens, and {max_new_tokens} more were asked for, but the model sees {context} "
            "(max_position_embeddings): shorten it, or lower --max-new-tokens"
        )


class Round(NamedTuple):
    """Prompts that are continued together: for each rank the numbers of its own, which may be none."""

    of_rank: list[list[int]]


def deal(lengths: Sequence[int], ranks: int, batch_size: int) -> list[Round]:
    """Which rank continues which prompts, in which round.

    Prompts of similar length are in one round, so that few tokens are padding, and ranks take them in turn.

    Example: lengths [5, 9, 3], 2 ranks, batches of 1: [[[1], [0]], [[2], []]]
    """
    order = sorted(range(len(lengths)), key=lambda number: -lengths[number])
    together = ranks * batch_size
    starts = range(0, len(order), together)
    return [Round([order[start : start + together][rank::ranks] for rank in range(ranks)]) for start in starts]
