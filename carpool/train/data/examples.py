"""From rows to examples: tokens, and which of them are learned.

An example is what a model sees at once: a conversation as the chat template writes it, a prompt with its completion, or
a document. `learned` is true for the tokens that the loss is of. With `data.loss = "answers"` these are what an
assistant says, to the token that ends it; with "all", and in documents, all of them. A `Format` says what rows are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from carpool.train.config.schema import DataSection
from carpool.train.data.chat import Chat, Conversation, Messages, check_messages
from carpool.train.data.rows import Fields, Row, parse_json
from carpool.train.data.tokenizer import Tokenizer, added_tokens, fingerprint_of, framed, load_pretrained

TOOLS = "tools"


class Example(NamedTuple):
    """Token ids, and which are learned; both of one dimension and equally long. None: all are."""

    ids: NDArray[np.uint32]
    learned: NDArray[np.bool_] | None = None


class Encoder(Protocol):
    """Makes examples of rows.

    Attributes:
        fingerprint: equal for two encoders only if they make the same of every row.
        vocab_size: all tokens are below this.
        marks: do examples stay apart, with marks of what is learned? Otherwise they are one stream of tokens.
    """

    fingerprint: str
    vocab_size: int
    marks: bool

    def encode(self, rows: Sequence[Row]) -> Iterator[Example]:
        """The examples of these rows, in order; a row may give several. ValueError for a row that cannot be used."""

    def size(self, row: Row) -> int:
        """Bytes of text in a row, or about as many; 0: there is nothing in it, and it is passed over."""


class Format:
    """What rows of one kind are.

    Attributes:
        name: in the registry (`carpool.train.data.formats`).
        row: what a row is called, for people.
        streams: are its examples laid end to end where `data.packing` says nothing?
    """

    name: ClassVar[str]
    row: ClassVar[str]
    streams: ClassVar[bool] = False

    def fields(self, data: DataSection) -> Fields:
        """What is read of each row."""
        raise NotImplementedError

    def encoder(self, data: DataSection, tokenizer: Tokenizer, model_path: str | None) -> Encoder:
        """What makes examples of rows.

        Args:
            tokenizer: for documents. Conversations and prompts take the one of transformers in the same folder.
            model_path: `model.path`.

        Raises:
            ValueError: no tokenizer of transformers, no chat template, or settings that this format has no use for.
        """
        raise NotImplementedError


class TextFormat(Format):
    name, row, streams = "text", "document", True

    def fields(self, data: DataSection) -> Fields:
        settings = (
            "data.text_field to the one that holds the text (of conversations: data.messages_field; of questions with "
            "answers: data.prompt_field and data.completion_field)"
        )
        return Fields((data.text_field,), (), settings, data.text_field)

    def encoder(self, data: DataSection, tokenizer: Tokenizer, model_path: str | None) -> Encoder:
        return Documents(data, tokenizer)


class MessagesFormat(Format):
    name, row = "messages", "conversation"

    def fields(self, data: DataSection) -> Fields:
        return Fields((data.messages_field,), (TOOLS,), "data.messages_field to the one that holds the messages")

    def encoder(self, data: DataSection, tokenizer: Tokenizer, model_path: str | None) -> Encoder:
        def messages(row: Row) -> Messages:
            return check_messages(row.fields[data.messages_field], data.messages_field, row.where)

        return Conversations(data, load_pretrained(data, model_path), messages, self.fields(data).required)


class PromptFormat(Format):
    name, row = "prompt", "prompt"

    def fields(self, data: DataSection) -> Fields:
        settings = "data.prompt_field and data.completion_field to those that hold them"
        return Fields((data.prompt_field, data.completion_field), (TOOLS,), settings)

    def encoder(self, data: DataSection, tokenizer: Tokenizer, model_path: str | None) -> Encoder:
        return Prompts(data, load_pretrained(data, model_path))


class Documents:
    """Plain text: each as the tokenizer itself begins it, and an end-of-document token after it."""

    def __init__(self, data: DataSection, tokenizer: Tokenizer) -> None:
        self._tokenizer, self._field = tokenizer, data.text_field
        self.marks, self.vocab_size = data.packing not in (None, "stream"), tokenizer.vocab_size
        self.fingerprint = f"{tokenizer.fingerprint} {tokenizer.frame} {tokenizer.vocab_size}"

    def encode(self, rows: Sequence[Row]) -> Iterator[Example]:
        for ids in self._tokenizer.encode_batch([row.fields[self._field] for row in rows]):
            yield Example(framed(ids, *self._tokenizer.frame))

    def size(self, row: Row) -> int:
        text = row.fields[self._field]
        if text is None:
            return 0
        if not isinstance(text, str):
            raise ValueError(f"{row.where}: the field {self._field!r} holds {type(text).__name__}, not text")
        return 0 if text.isspace() else len(text.encode("utf-8", errors="replace"))


class Conversations:
    """Messages, as the chat template writes them.

    Args:
        messages: the conversation that a row is.
        fields: that hold it.
    """

    marks = True

    def __init__(
        self, data: DataSection, pretrained: Any, messages: Callable[[Row], Messages], fields: Sequence[str]
    ) -> None:
        self._chat, self._messages, self._fields = Chat(data, pretrained), messages, fields
        self.fingerprint, self.vocab_size = self._chat.fingerprint, len(pretrained)

    def encode(self, rows: Sequence[Row]) -> Iterator[Example]:
        conversations = (Conversation(self._messages(row), _tools(row), row.where) for row in rows)
        for ids, learned in self._chat.encode(conversations):
            yield _example(ids, learned)

    def size(self, row: Row) -> int:
        return sum(len(str(row.fields[field])) for field in self._fields) + 1


class Prompts:
    """Prompts with completions: two texts, or two lists of messages."""

    marks = True

    def __init__(self, data: DataSection, pretrained: Any) -> None:
        self._data, self._pretrained, self.vocab_size = data, pretrained, len(pretrained)
        self._prompt, self._completion = data.prompt_field, data.completion_field
        self._chat: Chat | None = None
        end = data.eos_token or pretrained.eos_token
        self._end: Any = pretrained.convert_tokens_to_ids(end) if end else None
        if self._end is None or self._end == pretrained.unk_token_id != pretrained.eos_token_id:
            raise ValueError(
                f"the tokenizer has no token {end!r} that ends a text: set data.eos_token to one of its tokens"
            )
        self._begin, _ = added_tokens(lambda special: pretrained("a", add_special_tokens=special)["input_ids"])
        # Lists of messages need a template, texts do not.
        if data.chat_template is not None or pretrained.chat_template:
            self._chat = Chat(data, pretrained)
        of_chat = "" if self._chat is None else self._chat.fingerprint
        self.fingerprint = f"{fingerprint_of(pretrained)} {self._end} {data.loss} {of_chat}"

    def encode(self, rows: Sequence[Row]) -> Iterator[Example]:
        for row in rows:
            prompt, completion = row.fields[self._prompt], row.fields[self._completion]
            if isinstance(prompt, str) and isinstance(completion, str):
                yield self._texts(prompt, completion, row.where)
            elif isinstance(prompt, list) and isinstance(completion, list):
                before = check_messages(prompt, self._prompt, row.where)
                messages = [*before, *check_messages(completion, self._completion, row.where)]
                self._chat = self._chat or Chat(self._data, self._pretrained)
                conversation = Conversation(messages, _tools(row), row.where, len(before))
                for ids, learned in self._chat.encode([conversation]):
                    yield _example(ids, learned)
            else:
                raise ValueError(
                    f"{row.where}: {self._prompt!r} holds {type(prompt).__name__} and {self._completion!r} "
                    f"{type(completion).__name__}; both must be text, or both lists of messages"
                )

    def _texts(self, prompt: str, completion: str, where: str) -> Example:
        if not completion:
            raise ValueError(f"{where}: the field {self._completion!r} is empty, so there is nothing to learn")
        before, together = self._pretrained([prompt, prompt + completion], add_special_tokens=False)["input_ids"]
        if together[: len(before)] != before:
            raise ValueError(
                f"{where}: the prompt ends inside a token: {prompt[-16:]!r} and {completion[:16]!r} have a token in "
                "common, so the model would not be asked what it has learned; end prompts at the end of a word, and "
                "begin completions with the white space that separates them"
            )
        begun = framed(np.asarray(together, dtype=np.uint32), self._begin, ())
        ids = framed(begun, (), (self._end,))
        learned = np.ones(len(ids), dtype=bool)
        if self._data.loss == "answers":
            learned[: len(begun) - len(together) + len(before)] = False
        return Example(ids, learned)

    def size(self, row: Row) -> int:
        return len(str(row.fields[self._prompt])) + len(str(row.fields[self._completion])) + 1


def _example(ids: list[int], learned: list[bool]) -> Example:
    return Example(np.asarray(ids, dtype=np.uint32), np.asarray(learned, dtype=bool))


def _tools(row: Row) -> list[Any] | None:
    """Tools that a row offers: JSON schemas, or a text of them."""
    tools = row.fields.get(TOOLS)
    if isinstance(tools, str):
        tools = parse_json(tools, f"{row.where}: the text in the field {TOOLS!r}") if tools.strip() else None
    if tools is not None and not isinstance(tools, list):
        raise ValueError(f"{row.where}: the field {TOOLS!r} holds {type(tools).__name__}, not a list of JSON schemas")
    return tools or None
