"""Prompts: from a file, and to ranks.

A file has one JSON object per line, `{"prompt": "text"}` or `{"messages": [{"role": "user", "content": "..."}]}`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from carpool.serve.text import Text
from carpool.train.data.rows import parse_json

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
    return {kinds[0]: content}


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
