"""Tool calls in the form that a chat template takes: their arguments, and the content of messages that have none.

Data has them as an object or, as OpenAI's interface answers, as the text of one. Templates differ, too:

    {{ call.arguments | tojson }}       wants the object; of a text it makes "{\\"x\\": 1}", quoted, without an error
    {{ '(' + call.arguments + ')' }}    wants the text, and fails with an object

A message that calls tools may have no content, or null, which transformers leaves out. Some templates need a text.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

from carpool.train.data.rows import parse_json

Messages = list[dict[str, Any]]


def with_fitting_calls(messages: Messages, write: Callable[[Messages], str], where: str) -> Messages:
    """As `with_fitting_arguments`, and with an empty text as the content of messages that have none, if the template
    would refuse them otherwise."""
    filled = [{"content": "", **message} for message in messages]
    if filled == messages:
        return with_fitting_arguments(messages, write, where)
    try:
        found = with_fitting_arguments(messages, write, where)
        write(found)
        return found
    except ValueError:
        return with_fitting_arguments(filled, write, where)


def with_fitting_arguments(messages: Messages, write: Callable[[Messages], str], where: str) -> Messages:
    """These messages, or the same with the arguments of their tool calls in the other form, if the template would quote
    or refuse them as they are.

    Args:
        write: what the template makes of messages; ValueError: it refuses them.
        where: for errors.

    Raises:
        ValueError: the template refuses both forms, or quotes a text that is no JSON object.
    """
    given = list(_arguments(messages))
    if not given:
        return messages
    try:
        written = write(messages)
    except ValueError:
        if (other := _in_other_form(messages, where)) != messages:
            try:
                write(other)
            except ValueError:
                pass
            else:
                return other
        raise
    quoted = any(isinstance(one, str) and json.dumps(one, ensure_ascii=False) in written for one in given)
    return _in_other_form(messages, where) if quoted else messages


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
