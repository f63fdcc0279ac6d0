"""Conversations as ShareGPT has them, which many published data sets have taken over:

    {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}], "system": "..."}
    ->  [{"role": "system", ...}, {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]

Messages that already have a role and a content stay as they are, and so does what else a message has (`train`,
`weight`). A function_call becomes an answer that calls the tools in its JSON.
"""

from __future__ import annotations

from typing import Any

from carpool.train.config.schema import DataSection
from carpool.train.data.chat import Messages, check_messages
from carpool.train.data.examples import TOOLS, Conversations, Encoder, Format
from carpool.train.data.rows import Fields, Row, parse_json
from carpool.train.data.tokenizer import Tokenizer, load_pretrained

_ROLES = {
    "human": "user", "user": "user", "prompter": "user",
    "gpt": "assistant", "assistant": "assistant", "chatgpt": "assistant", "bing": "assistant", "bard": "assistant",
    "function_call": "assistant", "system": "system", "observation": "tool",
    "function_response": "tool", "tool": "tool",
}  # fmt: skip


class ShareGPT(Format):
    name, row = "sharegpt", "conversation"

    def fields(self, data: DataSection) -> Fields:
        field = _field(data)
        return Fields((field,), ("system", TOOLS), "data.messages_field to the one that holds the conversation")

    def encoder(self, data: DataSection, tokenizer: Tokenizer, model_path: str | None) -> Encoder:
        field = _field(data)

        def messages(row: Row) -> Messages:
            turns, system = row.fields[field], row.fields.get("system")
            found = [_message(turn, row.where) for turn in turns] if isinstance(turns, list) else turns
            if system and isinstance(found, list):
                found = [{"role": "system", "content": system}, *found]
            return check_messages(found, field, row.where)

        return Conversations(data, load_pretrained(data, model_path), messages, self.fields(data).required)


def _field(data: DataSection) -> str:
    """`data.messages_field`, whose default is the name of another format's."""
    return "conversations" if data.messages_field == "messages" else data.messages_field


def _message(turn: Any, where: str) -> Any:
    if not isinstance(turn, dict) or "from" not in turn:
        return turn
    role, text = _ROLES.get(turn["from"]), turn.get("value")
    if role is None:
        raise ValueError(f"{where}: a message is from {turn['from']!r}, which is none of {', '.join(_ROLES)}")
    rest = {name: value for name, value in turn.items() if name not in ("from", "value")}
    if turn["from"] != "function_call":
        return {"role": role, "content": text, **rest}
    calls = parse_json(str(text), f"{where}: a function_call")
    calls = calls if isinstance(calls, list) else [calls]
    return {"role": role, "tool_calls": [{"type": "function", "function": call} for call in calls], **rest}
