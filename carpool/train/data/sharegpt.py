"""Conversations as ShareGPT has them, which many published data sets have taken over:

    {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}], "system": "..."}
    ->  [{"role": "system", ...}, {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]

Messages that already have a role and a content stay as they are, and so does what else a message has (`train`,
`weight`). A function_call becomes an answer that calls the tools in its JSON. `carpool.train.data.chat` reads messages.
"""

from __future__ import annotations

from carpool.train.config.schema import DataSection
from carpool.train.data.chat import Messages, check_messages
from carpool.train.data.examples import TOOLS, Conversations, Encoder, Format
from carpool.train.data.rows import Fields, Row
from carpool.train.data.tokenizer import Tokenizer, load_pretrained


class ShareGPT(Format):
    name, row = "sharegpt", "conversation"

    def fields(self, data: DataSection) -> Fields:
        field = _field(data)
        return Fields((field,), ("system", TOOLS), "data.messages_field to the one that holds the conversation")

    def encoder(self, data: DataSection, tokenizer: Tokenizer, model_path: str | None) -> Encoder:
        field = _field(data)

        def messages(row: Row) -> Messages:
            found = check_messages(row.fields[field], field, row.where)
            system = row.fields.get("system")
            return [{"role": "system", "content": system}, *found] if system else found

        return Conversations(data, load_pretrained(data, model_path), messages, self.fields(data).required)


def _field(data: DataSection) -> str:
    """`data.messages_field`, whose default is the name of another format's."""
    return "conversations" if data.messages_field == "messages" else data.messages_field
