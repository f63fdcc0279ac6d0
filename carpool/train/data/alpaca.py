"""Questions with answers as Alpaca has them, as conversations that the chat template writes:

    {"instruction": "Add.", "input": "1 2", "output": "3", "system": "...", "history": [["Hi", "Hello"]]}
    ->  system ..., user "Hi", assistant "Hello", user "Add.\\n1 2", assistant "3"

All but instruction and output may be left out. Answers of the history are learned, too, unless data.loss is "last".
"""

from __future__ import annotations

from carpool.train.config.schema import DataSection
from carpool.train.data.chat import ANSWERS, Messages, check_messages
from carpool.train.data.examples import Conversations, Encoder, Format
from carpool.train.data.rows import Fields, Row
from carpool.train.data.tokenizer import Tokenizer, load_pretrained

_INSTRUCTION, _OUTPUT = "instruction", "output"


class Alpaca(Format):
    name, row = "alpaca", "question"

    def fields(self, data: DataSection) -> Fields:
        settings = "data.format to what its rows are"
        return Fields((_INSTRUCTION, _OUTPUT), ("input", "system", "history"), settings)

    def encoder(self, data: DataSection, tokenizer: Tokenizer, model_path: str | None) -> Encoder:
        return Conversations(data, load_pretrained(data, model_path), _messages, self.fields(data).required)


def _messages(row: Row) -> Messages:
    said = row.fields
    for name in (_INSTRUCTION, _OUTPUT, "input", "system"):
        if not isinstance(value := said.get(name), str) and (value is not None or name in (_INSTRUCTION, _OUTPUT)):
            raise ValueError(f"{row.where}: the field {name!r} holds {type(value).__name__}, not text")
    history = said.get("history") or []
    if not isinstance(history, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in history):
        raise ValueError(f"{row.where}: the field 'history' holds no list of pairs of a question and its answer")
    question = "\n".join(text for text in (said[_INSTRUCTION], said.get("input")) if text)
    found = [{"role": "system", "content": said["system"]}] if said.get("system") else []
    for asked, answer in [*history, (question, said[_OUTPUT])]:
        found += [{"role": "user", "content": asked}, {"role": ANSWERS, "content": answer}]
    return check_messages(found, _INSTRUCTION, row.where)
