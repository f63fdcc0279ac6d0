"""Conversations become tokens by the checkpoint's own chat template, and what the assistant says is found in them.

A template writes a conversation as one text. Which tokens of it are answers is known in one of two ways.

Marks. A template with `{% generation %} ... {% endgeneration %}` around its answers says so itself, and transformers
hands out the mask.

Prefixes. Otherwise the template is asked what it writes before and after each answer, as a server asks it:

    before    <user>Hi<end><assistant>                          up to the answer, with a generation prompt
    after     <user>Hi<end><assistant>Hello<end>                up to the answer and with it
    all       <user>Hi<end><assistant>Hello<end><user>Bye<end>...

The answer is the tokens of `after` that `before` has not. That is right only if the tokens of `before` begin those of
`after`, and these begin those of the whole, which is checked for each answer. Templates that leave out earlier
thinking (Qwen3's) write an answer otherwise once another follows; with `data.turns = "apart"` each answer is then an
example of its own, with the conversation up to it, which is what the model sees when it gives that answer.

Which messages. Those of `data.roles_to_train`; of these, with `data.loss = "last"`, the last one; with "all", the whole
text. A message that has `"train": true` or false, or `"weight": 1` or 0, says it itself. Marks hold for all answers, so
that prefixes are used where not all answers are learned, or something else.

Tool calls. Data has their arguments as an object or, as OpenAI's interface answers, as the text of one. Templates
differ, too:

    {{ call.arguments | tojson }}       wants the object; of a text it makes "{\"x\": 1}", quoted, without an error
    {{ '(' + call.arguments + ')' }}    wants the text, and fails with an object

A message that calls tools may have no content, or null, which transformers leaves out. Some templates need a text.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from carpool.train.config.schema import DataSection
from carpool.train.data.rows import parse_json
from carpool.train.data.tokenizer import fingerprint_of

Messages = list[dict[str, Any]]
ANSWERS = "assistant"
_MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")
# Who speaks, as ShareGPT names them.
_ROLES = {
    "human": "user", "user": "user", "prompter": "user",
    "gpt": "assistant", "assistant": "assistant", "chatgpt": "assistant", "bing": "assistant", "bard": "assistant",
    "function_call": "assistant", "system": "system", "observation": "tool",
    "function_response": "tool", "tool": "tool",
}  # fmt: skip
_FLAGS = ("train", "weight")
# What a message may have in place of content.
_NO_CONTENT = ("tool_calls", "reasoning_content", "reasoning", "thinking")


def with_fitting_calls(messages: Messages, write: Callable[[Messages], str], where: str) -> Messages:
    """These messages, or the same as the template takes them: with the arguments of tool calls in the other form if it
    would quote or refuse them, and with a text as the content of messages that have none, or a list of texts.

    Args:
        write: what the template makes of messages; ValueError: it refuses them.
        where: for errors.

    Raises:
        ValueError: the template refuses all forms, or quotes a text that is no JSON object.
    """
    filled = [{**message, "content": _joined(message.get("content", ""))} for message in messages]
    if filled == messages and not list(_arguments(messages)):
        return messages
    refused = ValueError(f"{where}: the chat template quotes the arguments of tool calls")
    for form, other in itertools.product((messages, filled), (False, True)):
        try:
            these = _in_other_form(form, where) if other else form
            written = write(these)
        except ValueError as error:
            refused = error
        else:
            texts = (json.dumps(one, ensure_ascii=False) for one in _arguments(these) if isinstance(one, str))
            if not any(text in written for text in texts):
                return these
    raise refused


def _joined(content: Any) -> Any:
    """The text of a content that is a list of `{"type": "text", "text": ...}` alone; else the content."""
    if not isinstance(content, list):
        return content
    texts = [one["text"] for one in content if isinstance(one, dict) and isinstance(one.get("text"), str)]
    return "".join(texts) if len(texts) == len(content) else content


def _arguments(messages: Messages) -> Iterator[Any]:
    for message in messages:
        for call in message.get("tool_calls") or ():
            function = call.get("function", call) if isinstance(call, dict) else {}
            if isinstance(function, dict) and "arguments" in function:
                yield function["arguments"]


def _in_other_form(messages: Messages, where: str) -> Messages:
    """Texts as objects if there is any text; otherwise objects as texts."""
    to_objects = any(isinstance(one, str) for one in _arguments(messages))

    def changed(value: Any) -> Any:
        if not to_objects:
            return json.dumps(value, ensure_ascii=False)
        return _object(value, where) if isinstance(value, str) else value

    def call(one: Any) -> Any:
        if not isinstance(one, dict):
            return one
        if "function" in one:
            return one | {"function": call(one["function"])}
        return one | {"arguments": changed(one["arguments"])} if "arguments" in one else one

    return [
        message | {"tool_calls": [call(one) for one in message["tool_calls"]]} if message.get("tool_calls") else message
        for message in messages
    ]


def _object(text: str, where: str) -> dict[str, Any]:
    found = parse_json(text, f"{where}: the text {text!r} of a tool call's arguments") if text.strip() else {}
    if not isinstance(found, dict):
        raise ValueError(f"{where}: the arguments of a tool call are no JSON object: {text!r}")
    return found


def check_messages(messages: Any, field: str, where: str) -> Messages:
    """These messages, without what is null.

    Raises:
        ValueError: they are none, or one of them is not of the form that templates take.
    """
    found = []
    if not isinstance(messages, list) or not messages:
        what = "is empty" if isinstance(messages, list) else f"holds {type(messages).__name__}"
        raise ValueError(f"{where}: the field {field!r} {what}; a list of messages is needed")
    for number, message in enumerate((_with_role(one, where) for one in messages), 1):
        if not isinstance(message, dict):
            raise ValueError(
                f"{where}: message {number} of {field!r} is {type(message).__name__}; an object with role and content "
                "is needed"
            )
        if not isinstance(message.get("role"), str):
            raise ValueError(f"{where}: message {number} of {field!r} has no role, but {', '.join(message)}")
        told = {name: value for name, value in message.items() if value is not None}
        content = told.get("content", "" if any(told.get(name) for name in _NO_CONTENT) else None)
        if not isinstance(content, str | list | dict):
            what = f"message {number} of {field!r} has {'no' if content is None else 'a number as its'} content"
            raise ValueError(f"{where}: {what}: give it a text, or leave it out; it has {', '.join(told)}")
        found.append(told)
    return found


def _with_role(turn: Any, where: str) -> Any:
    """A message, also if it is written as ShareGPT has it: from and value."""
    if not isinstance(turn, dict) or "role" in turn or "from" not in turn:
        return turn
    role, text = _ROLES.get(str(turn["from"])), turn.get("value")
    if role is None:
        raise ValueError(f"{where}: a message is from {turn['from']!r}, which is none of {', '.join(_ROLES)}")
    rest = {name: value for name, value in turn.items() if name not in ("from", "value")}
    if turn["from"] != "function_call":
        return {"role": role, "content": text, **rest}
    calls = parse_json(str(text), f"{where}: a function_call")
    calls = calls if isinstance(calls, list) else [calls]
    if not all(isinstance(call, dict) and "name" in call for call in calls):
        raise ValueError(
            f"{where}: a function_call is {text!r}; an object with name and arguments, or a list, is needed"
        )
    return {"role": role, "tool_calls": [{"type": "function", "function": call} for call in calls], **rest}


class Conversation(NamedTuple):
    """Messages, tools that they may call, and where they stand. Answers before message `first` are not learned."""

    messages: Messages
    tools: list[Any] | None
    where: str
    first: int = 0


class _Example(NamedTuple):
    """What is known of an example before there are tokens: which messages are learned (with `data.loss = "all"`, which
    are not), whether by the template's marks, and texts to be tokenized."""

    conversation: Conversation
    answers: list[int]
    by_marks: bool
    texts: list[str]


class Chat:
    """Turns conversations into tokens and marks of what is learned.

    Args:
        data: `chat_template`, `chat_template_kwargs`, `loss`, `roles_to_train` and `turns` count.
        pretrained: a tokenizer of transformers.

    Raises:
        ValueError: there is no chat template.
    """

    def __init__(self, data: DataSection, pretrained: Any) -> None:
        self._tokenizer, self._loss, self._apart = pretrained, data.loss, data.turns == "apart"
        self._options, self._roles = dict(data.chat_template_kwargs), data.roles_to_train
        self._template = read_template(data)
        self._name = data.chat_template or getattr(pretrained, "name_or_path", "the tokenizer")
        template = self._template or pretrained.chat_template
        if not template:
            raise ValueError(
                f"the tokenizer of {self._name} has no chat template, so it does not say how a conversation is "
                "written: take a checkpoint that has one (those that were trained to chat), or set data.chat_template "
                "to a Jinja file"
            )
        # A tokenizer may have several templates by name, of which one is for tools.
        texts = template.values() if isinstance(template, dict) else [template]
        self._marked = all(_MARKS.search(text) for text in texts)
        roles = [] if self._roles == (ANSWERS,) else [self._roles]
        settings = json.dumps([template, self._options, data.loss, data.turns, _FLAGS, *roles], sort_keys=True)
        self.fingerprint = fingerprint_of(pretrained) + hashlib.sha256(settings.encode()).hexdigest()

    def encode(self, conversations: Iterable[Conversation]) -> Iterator[tuple[list[int], list[bool]]]:
        """(tokens, which are learned) of each conversation; with `data.turns = "apart"`, of each of its answers.

        Texts of many conversations go to the tokenizer at once, because it then uses all cores.

        Raises:
            ValueError: there is no answer, the template cannot write a conversation, or answers cannot be found.
        """
        examples = [example for conversation in conversations for example in self._examples(conversation)]
        ids = iter(self._tokens([text for example in examples for text in example.texts]))
        for example in examples:
            if example.by_marks:
                yield self._by_marks(example, [next(ids) for _ in example.texts])
            else:
                yield self._by_prefixes(example, [next(ids) for _ in example.texts])

    def _examples(self, conversation: Conversation) -> Iterator[_Example]:
        messages, tools, where, first = conversation
        answers = [i for i, message in enumerate(messages) if message["role"] in self._roles and i >= first]
        flags = {i: flag for i, message in enumerate(messages) if (flag := _flag(message, where)) is not None}
        if not answers and not any(flags.values()):
            roles = ", ".join(dict.fromkeys(message["role"] for message in messages))
            raise ValueError(
                f'{where}: the conversation has no answer (no message of the role "{" or ".join(self._roles)}", but '
                f"{roles}), so there is nothing to learn; add one, or leave the conversation out"
            )
        if self._loss == "last":
            answers = answers[-1:]
        if self._loss == "all":
            answers = [i for i, flag in flags.items() if not flag]  # those that are left out
        else:
            answers = [i for i in range(first, len(messages)) if flags.get(i, i in answers)]
        messages = [{name: value for name, value in one.items() if name not in _FLAGS} for one in messages]
        messages = with_fitting_calls(messages, lambda these: self._write(these, tools, where), where)
        if self._apart:
            for answer in answers:
                yield self._example(Conversation(messages[: answer + 1], tools, where, answer), [answer])
        else:
            yield self._example(conversation._replace(messages=messages), answers)

    def _example(self, conversation: Conversation, answers: list[int]) -> _Example:
        """What the template writes of the whole, and, where that is needed, before and after each answer."""
        messages, tools, where, first = conversation
        texts = [self._write(messages, tools, where)]
        if (ignored := self._ignored(messages, texts[0], tools)) is not None:
            raise ValueError(
                f"{where}: the chat template of {self._name} writes nothing of message {ignored + 1}, whose role is "
                f"{messages[ignored]['role']!r}: leave it out, or set data.chat_template to one that does"
            )
        all_answers = [i for i in range(first, len(messages)) if messages[i]["role"] == ANSWERS]
        if self._marked and self._loss != "all" and answers == all_answers:
            before = [self._write(messages[:first], tools, where, prompt=True)] if first else []
            return _Example(conversation, answers, True, texts + before)
        for answer in answers:
            is_answer, is_last = messages[answer]["role"] == ANSWERS, answer == len(messages) - 1
            if answer == 0 and is_answer:
                raise ValueError(
                    f"{where}: the first message is an answer, before which nothing is asked; leave it out"
                )
            texts.append(self._write(messages[:answer], tools, where, prompt=is_answer) if answer else "")
            texts.append(texts[0] if is_last else self._write(messages[: answer + 1], tools, where))
        return _Example(conversation, answers, False, texts)

    def _ignored(self, messages: Messages, text: str, tools: list[Any] | None) -> int | None:
        """The first message without which the template writes the same text."""
        for number, message in enumerate(messages):
            if isinstance(content := message.get("content"), str) and (content.strip() or "\0") not in text:
                with contextlib.suppress(ValueError):  # a template may refuse what is left
                    if self._write(messages[:number] + messages[number + 1 :], tools, "") == text:
                        return number
        return None

    def _by_marks(self, example: _Example, tokens: list[list[int]]) -> tuple[list[int], list[bool]]:
        messages, tools, where, first = example.conversation
        found = self._apply(messages, tools, where, return_dict=True, return_assistant_tokens_mask=True)
        ids, learned = list(found["input_ids"]), [bool(mark) for mark in found["assistant_masks"]]
        if first:
            self._check_prefix(tokens[1], ids, where, first, example.texts[1], example.texts[0])
            learned = [mark and place >= len(tokens[1]) for place, mark in enumerate(learned)]
        if not any(learned):
            raise ValueError(f"{where}: the {{% generation %}} marks of the chat template enclose no token")
        return ids, learned

    def _by_prefixes(self, example: _Example, tokens: list[list[int]]) -> tuple[list[int], list[bool]]:
        where, texts = example.conversation.where, example.texts
        ids, *parts = tokens
        learned = [self._loss == "all"] * len(ids)
        for place, answer in enumerate(example.answers):
            before_ids, after_ids = parts[2 * place], parts[2 * place + 1]
            before, after = texts[1 + 2 * place], texts[2 + 2 * place]
            self._check_prefix(before_ids, after_ids, where, answer, before, after)
            if after_ids != ids[: len(after_ids)]:
                raise ValueError(
                    f"{where}: the chat template of {self._name} writes message {answer + 1}, an answer, otherwise "
                    f"once others follow {_difference(after, texts[0])}, as those do that leave out earlier thinking; "
                    'set data.turns="apart", which makes each answer an example with the conversation before it, or '
                    "data.chat_template to a template with {% generation %} marks"
                )
            learned[len(before_ids) : len(after_ids)] = [self._loss != "all"] * (len(after_ids) - len(before_ids))
        return ids, learned

    def _check_prefix(
        self, before_ids: list[int], after_ids: list[int], where: str, answer: int, before: str, after: str
    ) -> None:
        if after_ids[: len(before_ids)] == before_ids:
            return
        if after.startswith(before):
            how = f"the answer shares a token with what is before it, {before[-16:]!r}"
        else:
            how = f"what it writes before the answer is not how the answer begins {_difference(before, after)}"
        raise ValueError(
            f"{where}: with the chat template of {self._name} it cannot be told where message {answer + 1}, an answer, "
            f"begins: {how}; set data.chat_template to a template with {{% generation %}} marks"
        )

    def _write(self, messages: Messages, tools: list[Any] | None, where: str, prompt: bool = False) -> str:
        """What the template makes of these messages."""
        text: str = self._apply(messages, tools, where, add_generation_prompt=prompt, tokenize=False)
        for content in (message.get("content") for message in messages):
            if content and not isinstance(content, str) and str(content) in text:
                raise ValueError(
                    f"{where}: the chat template of {self._name} takes texts, and would quote the content "
                    f"{str(content)[:60]!r}: give it a text"
                )
        return text

    def _apply(self, messages: Messages, tools: list[Any] | None, where: str, **how: Any) -> Any:
        import jinja2

        try:
            return self._tokenizer.apply_chat_template(
                messages, tools=tools, chat_template=self._template, **self._options, **how
            )
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"the chat template of {self._name} is wrong in line {error.lineno}: {error}") from None
        except Exception as error:  # a template may do anything with a message
            raise ValueError(
                f"{where}: the chat template of {self._name} does not take this conversation: "
                f"{type(error).__name__}: {error}"
            ) from None

    def _tokens(self, texts: list[str]) -> list[list[int]]:
        if not texts:
            return []
        found: list[list[int]] = self._tokenizer(texts, add_special_tokens=False)["input_ids"]
        return found


def _flag(message: dict[str, Any], where: str) -> bool | None:
    """Whether a message says of itself that it is learned; None: it says nothing."""
    for name in _FLAGS:
        if (value := message.get(name)) is not None:
            if value not in (0, 1):
                raise ValueError(f"{where}: {name} of a message is {value!r}; true, false, 1 or 0 is needed")
            return bool(value)
    return None


def read_template(data: DataSection) -> str | None:
    """The chat template that `[data]` names in place of the tokenizer's own."""
    if data.chat_template is None:
        return None
    try:
        return Path(data.chat_template).expanduser().read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ValueError(f"data.chat_template: the file {data.chat_template} does not exist") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"data.chat_template: {data.chat_template} cannot be read: {error}") from None


def _difference(one: str, other: str) -> str:
    """Where two texts part, for people."""
    place = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    start = max(0, place - 12)
    return f"({one[start : place + 20]!r}, then {other[start : place + 20]!r})"
