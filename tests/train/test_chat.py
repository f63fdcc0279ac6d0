"""Conversations and prompts: the template's own tokens, exactly the answers learned, and errors that say where."""

from __future__ import annotations

import contextlib
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from carpool.cli import app
from carpool.cli.train import read_data
from carpool.train.config import load_config
from carpool.train.config.schema import DataSection
from carpool.train.data.chat import Chat, Conversation
from carpool.train.data.corpus import Corpus, prepare_all
from carpool.train.data.show import show
from carpool.train.data.tokenizer import BytesTokenizer
from examples.tiny_chat_model import CONVERSATIONS, TEMPLATE, make_tokenizer
from tests.train.test_data import write_parquet

ROWS = [json.loads(line) for line in CONVERSATIONS.read_text(encoding="utf-8").splitlines()]
USER, HI, BYE = ({"role": "user", "content": text} for text in ("Hello?", "What now?", "Bye."))
ONE, TWO = ({"role": "assistant", "content": text} for text in ("Hi! 😬", "Nothing."))
GOOD: dict[str, Any] = {"messages": [USER, ONE]}
MARKED = TEMPLATE.replace(
    "        {{- '<|im_start|>' + message.role + '\\n' + message.content }}",
    "        {{- '<|im_start|>' + message.role + '\\n' }}{% if message.role == 'assistant' %}{% generation %}"
    "{{- message.content + '<|im_end|>' }}{% endgeneration %}{{- '\\n' }}{% continue %}{% endif %}"
    "{{- message.content }}",
)
# As Qwen3's: what the assistant thought is left out once more is asked.
THINKING = """\
{%- set asked = namespace(last=-1) %}
{%- for m in messages %}{%- if m.role == 'user' %}{%- set asked.last = loop.index0 %}{%- endif %}{%- endfor %}
{%- for m in messages %}
    {{- '<|im_start|>' + m.role + '\\n' }}
    {%- if m.role == 'assistant' and loop.index0 > asked.last %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
    {{- m.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer().save_pretrained(path)
    return path


def encode(messages: list[dict[str, Any]], template: str = TEMPLATE, tools: Any = None, **data: Any) -> list[list[str]]:
    """The stretches of text that are learned, of each example."""
    pretrained = make_tokenizer(template)
    found = []
    for ids, learned in Chat(DataSection(**data), pretrained).encode([Conversation(messages, tools, "here")]):
        assert len(ids) == len(learned)
        stretches: list[list[int]] = []
        for place, (token, mark) in enumerate(zip(ids, learned, strict=True)):
            if mark:
                if place == 0 or not learned[place - 1]:
                    stretches.append([])
                stretches[-1].append(token)
        found.append([pretrained.decode(stretch) for stretch in stretches])
        if data.get("turns") != "apart":
            assert ids == pretrained.apply_chat_template(messages, tools=tools)["input_ids"]
    return found


def test_answers_alone_are_learned_to_the_token_that_ends_them() -> None:
    system = {"role": "system", "content": "Be <|brief|>."}
    assert encode([system, USER, ONE, HI, TWO, BYE]) == [["Hi! 😬<|im_end|>\n", "Nothing.<|im_end|>\n"]]
    assert encode([USER, ONE], loss="all") == [
        ["<|im_start|>user\nHello?<|im_end|>\n<|im_start|>assistant\nHi! 😬<|im_end|>\n"]
    ]
    with_tools = next(row for row in ROWS if "tools" in row)
    (call, answer) = encode(with_tools["messages"], tools=with_tools["tools"])[0]
    assert call == (
        '<tool_call>\n{"name": "find_book", "arguments": {"title": "Middlemarch"}}\n</tool_call><|im_end|>\n'
    )
    assert answer == "Yes. It is on shelf E 14, and nobody has it.<|im_end|>\n"
    assert encode([USER, ONE, HI, TWO], MARKED) == [["Hi! 😬<|im_end|>", "Nothing.<|im_end|>"]]
    with pytest.raises(ValueError, match=r"here: weight of a message is 0\.5; true, false, 1 or 0"):
        encode([USER, ONE | {"weight": 0.5}])
    with pytest.raises(ValueError, match='no message of the role "tool or system", but user, assistant'):
        encode([USER, ONE], roles_to_train=("tool", "system"))


def test_arguments_of_tools_are_objects_or_texts_as_the_template_takes_them() -> None:
    def asked(*calls: Any) -> list[dict[str, Any]]:
        return [USER, {"role": "assistant", "content": "", "tool_calls": list(calls)}, HI, TWO]

    given: Any = {"title": "Ä", "of": [1]}
    both = (given, json.dumps(given), json.dumps(given, ensure_ascii=False))
    text = '{"title": "Ä", "of": [1]}'
    quoting = "<tool_call>\n{}\n</tool_call><|im_end|>\n"
    wants_text = TEMPLATE.replace("call.function | tojson", "call.function.name + ':' + call.function.arguments")
    wants_items = TEMPLATE.replace("call.function | tojson", "call.function.arguments.items() | first | first")
    assert wants_text != TEMPLATE != wants_items
    for arguments in both:
        call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
        for template, wanted in (
            (TEMPLATE, f'{{"name": "f", "arguments": {text}}}'),
            (wants_text, f"f:{arguments if isinstance(arguments, str) else text}"),
            (wants_items, "title"),
        ):
            assert encode(asked(call), template, turns="apart")[0] == [quoting.format(wanted)]
    for arguments, message in (("{", "the text '{' of a tool call's arguments is not JSON"), ("[1]", "no JSON object")):
        with pytest.raises(ValueError, match=f"here: .*{message}"):
            encode(asked({"function": {"name": "f", "arguments": arguments}}))


# As many: a content that is not there is written as nothing.
PRINTS = TEMPLATE.replace("{{- '<|im_start|>' + message.role + '\\n' + message.content }}",
                          "{{- '<|im_start|>' + message.role + '\\n' }}{{- message.content }}")  # fmt: skip


@pytest.mark.parametrize("template", [TEMPLATE, PRINTS])
def test_content_in_parts_is_never_learned_as_python_prints_it(template: str) -> None:
    text = {"type": "text", "text": "Hi! "}
    parts = {"role": "assistant", "content": [text, text]}
    assert encode([USER, parts], template, turns="apart") == [["Hi! Hi! <|im_end|>\n"]]
    with pytest.raises(ValueError, match=r"here: .*(takes texts, and would quote the content|TypeError)"):
        encode([USER, parts | {"content": [text, {"type": "image", "image": "a.png"}]}], template)


def test_a_message_that_the_template_leaves_out_is_refused() -> None:
    silent = TEMPLATE.replace("raise_exception('unexpected role ' + message.role)", "''")
    for messages in ([BYE | {"role": "bot"}, USER, ONE], [USER, ONE, HI, BYE | {"role": "bot"}, TWO]):
        number = 1 + next(i for i, one in enumerate(messages) if one["role"] == "bot")
        with pytest.raises(ValueError, match=f"here: .* writes nothing of message {number}, whose role is 'bot'"):
            encode(messages, silent)
    assert encode(
        [USER | {"content": "Hello "}, ONE], silent.replace("+ message.content }}", "+ message.content|trim }}")
    )


@pytest.mark.parametrize("nulls", ["null", "left out", "of a table"])
@pytest.mark.parametrize("arguments", [{"x": 1}, '{"x": 1}'])
def test_messages_that_call_tools_may_have_no_content(tmp_path: Path, nulls: str, arguments: Any) -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    calling: dict[str, Any] = {"role": "assistant", "content": None, "tool_calls": [call]}
    # As OpenAI's interface answers.
    calling |= {"refusal": None, "function_call": None}
    if nulls == "left out":
        del calling["content"]
    answer = {"role": "assistant", "content": "It is 1.", "tool_calls": None}
    messages = [USER, calling, {"role": "tool", "content": "1"}, answer]
    if nulls == "of a table":
        path = write_parquet(tmp_path / "a.parquet", messages=[messages])
    else:
        path = lines(tmp_path / "a.jsonl", {"messages": messages})
    first = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call><|im_end|>\n'
    for name, template in (("concatenates", TEMPLATE), ("prints", PRINTS)):
        pretrained = make_tokenizer(template)
        pretrained.save_pretrained(tmp_path / name)
        (ids, learned), *_ = examples(corpus(tmp_path / name, path))
        text = pretrained.decode([token for token, mark in zip(ids, learned, strict=True) if mark])
        assert text.startswith(first) and text[len(first) :].startswith("It is 1."), name


def test_a_template_that_rewrites_answers_is_refused_unless_they_are_apart() -> None:
    thought = "<think>\n\n</think>\n\n"
    assert encode([USER, ONE], THINKING) == [[f"{thought}Hi! 😬<|im_end|>\n"]]
    with pytest.raises(ValueError, match=r'here: .* writes message 2, an answer, otherwise .*set data\.turns="apart"'):
        encode([USER, ONE, HI, TWO], THINKING)
    both = [[f"{thought}Hi! 😬<|im_end|>\n"], [f"{thought}Nothing.<|im_end|>\n"]]
    assert encode([USER, ONE, HI, TWO], THINKING, turns="apart") == both
    assert encode([USER, ONE, HI, TWO], MARKED, turns="apart") == [["Hi! 😬<|im_end|>"], ["Nothing.<|im_end|>"]]
    other = TEMPLATE.replace(
        "{{- '<|im_start|>assistant\\n' }}{%- endif %}", "{{- '<|im_start|>Answer:' }}{%- endif %}"
    )
    assert other != TEMPLATE
    with pytest.raises(ValueError, match=r"where message 2, an answer, begins: what it writes before .*Answer:"):
        encode([USER, ONE], other)
    # Without a token of its own between question and answer.
    joined = "{% for m in messages %}{{ m.content }}{% endfor %}"
    with pytest.raises(ValueError, match=r"shares a token with what is before it, ' th'"):
        encode([{"role": "user", "content": " th"}, {"role": "assistant", "content": "e book"}], joined)


def corpus(folder: Path, path: Path, **data: Any) -> Corpus:
    settings = {"train": (str(path),), "eval_fraction": 0.0, "cache_dir": str(path.parent / "cache")}
    return prepare_all(DataSection(**(settings | data)), BytesTokenizer(), str(folder)).sources[0]


def lines(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def examples(found: Corpus) -> list[tuple[list[int], list[bool]]]:
    marks = found.train_marks
    assert marks is not None
    starts = [0, *marks.ends[:-1].tolist()]
    places = [slice(start, end) for start, end in zip(starts, marks.ends.tolist(), strict=True)]
    return [(found.train[place].tolist(), marks.learned[place].tolist()) for place in places]


def test_lines_tables_and_datasets_give_the_same_examples(folder: Path, tmp_path: Path) -> None:
    import datasets

    jsonl = lines(tmp_path / "a.jsonl", *ROWS)
    # Tables give all calls the same arguments; what a call has not is null, and tools are often kept as text.
    rows = [row | {"tools": json.dumps(row["tools"]) if "tools" in row else None} for row in ROWS]
    table = datasets.Dataset.from_list(rows)
    table.to_parquet(str(tmp_path / "b.parquet"))
    datasets.DatasetDict({"train": table, "test": table.select([0])}).save_to_disk(str(tmp_path / "c"))
    found = corpus(folder, jsonl)
    assert found.train_documents == len(examples(found)) == len(ROWS)
    pretrained = make_tokenizer()
    first = ROWS[0]["messages"]
    assert examples(found)[0][0] == pretrained.apply_chat_template(first)["input_ids"]
    for other in (tmp_path / "b.parquet", tmp_path / "c"):
        assert examples(corpus(folder, other)) == examples(found), other
    both = DataSection(train=(str(jsonl),), eval=(str(tmp_path / "c"),), cache_dir=str(tmp_path / "cache"))
    (held,) = prepare_all(both, BytesTokenizer(), str(folder)).held_out
    assert held.train_documents == 1 and held.train.tolist() == examples(found)[0][0]
    assert corpus(folder, jsonl, eval_fraction=0.1).eval_documents == 2
    apart = corpus(folder, jsonl, turns="apart")
    answers = sum(message["role"] == "assistant" for row in ROWS for message in row["messages"])
    assert len(examples(apart)) == answers > len(ROWS) == apart.train_documents


def test_documents_may_be_examples_too(folder: Path, tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", {"text": "ab"}, {"text": " "}, {"text": "cde"})
    found = corpus(folder, path, packing="examples")
    assert examples(found) == [([97, 98, 256], [True] * 3), ([99, 100, 101, 256], [True] * 4)]
    assert corpus(folder, path).train_marks is None


def test_prompts_are_texts_or_messages(folder: Path, tmp_path: Path) -> None:
    pretrained = make_tokenizer()
    rows = [{"prompt": "Question:", "completion": " works 😬"}, {"prompt": [USER, ONE, HI], "completion": [TWO]}]
    (text, text_learned), (chat, chat_learned) = examples(corpus(folder, lines(tmp_path / "a.jsonl", *rows)))
    assert pretrained.decode(text) == "Question: works 😬<|im_end|>"
    assert pretrained.decode([i for i, mark in zip(text, text_learned, strict=True) if mark]) == " works 😬<|im_end|>"
    assert chat == pretrained.apply_chat_template([USER, ONE, HI, TWO])["input_ids"]
    assert pretrained.decode([i for i, mark in zip(chat, chat_learned, strict=True) if mark]) == "Nothing.<|im_end|>\n"
    ((_, learned), _) = examples(corpus(folder, tmp_path / "a.jsonl", loss="all"))
    assert all(learned)
    for row, message in [
        ({"prompt": " th", "completion": "e book"}, r"line 1: the prompt ends inside a token: ' th' and 'e book'"),
        ({"prompt": "a", "completion": ""}, "'completion' is empty"),
        ({"prompt": "a", "completion": [TWO]}, "'prompt' holds str and 'completion' list"),
        ({"prompt": [ONE], "completion": [USER]}, "has no answer"),
    ]:
        with pytest.raises(ValueError, match=message):
            corpus(folder, lines(tmp_path / "b.jsonl", row))


@pytest.mark.parametrize(
    ("content", "settings", "message"),
    [
        ([GOOD, {"messages": [USER]}], {}, r"a\.jsonl, line 2: the conversation has no answer"),
        ([GOOD, {"messages": [USER, ONE | {"content": None}]}], {}, r"line 2: message 2 of 'messages' has no content"),
        ([{"messages": [{"role": "user"}, ONE]}], {}, r"line 1: message 1 of 'messages' has no content"),
        ([{"messages": [{"role": "user", "text": "a"}, ONE]}], {}, "1 of 'messages' has no content: .* has role, text"),
        ([{"conversations": [USER, {"from": "gpt", "train": True}]}], {}, "2 of 'conversations' has no content"),
        ([{"messages": [USER | {"content": 5}, ONE]}], {}, "1 of 'messages' has a number as its content: give"),
        (
            '{"messages": [{"role": "user", "content": "\\ud83d"}, {"role": "assistant", "content": "a"}]}', {},
            r"a\.jsonl, line 1 has '\\ud83d', half of a surrogate pair: write the whole, or",
        ),
        ([GOOD, {"text": "a"}], {}, r"line 2 has no field 'messages'; it has text: set data\.mess"),
        ([{"chat": [USER, ONE]}], {"format": "messages"}, "has no field 'messages'; it has chat"),
        ([{"messages": []}], {}, "line 1: the field 'messages' is empty"),
        ([{"messages": "hi"}], {}, "'messages' holds str; a list of messages"),
        ([{"messages": ["hi"]}], {}, "message 1 of 'messages' is str; an object"),
        ([{"messages": [{"speaker": "human"}]}], {}, "message 1 of 'messages' has no role, but speaker"),
        ([{"messages": [ONE, USER]}], {}, "the first message is an answer"),
        ([{"messages": [USER | {"role": "critic"}, ONE]}], {}, "line 1: .* TemplateError: unexpected role critic"),
        ([GOOD | {"tools": "{"}], {}, "the text in the field 'tools' is not JSON"),
        ([GOOD | {"tools": 3}], {}, "'tools' holds int, not a list"),
        ([GOOD | {"text": "a"}], {}, r"several formats \(text, messages\): set data\.format"),
        ([GOOD], {"packing": "stream"}, "messages rows, which are not laid end to end"),
        ([GOOD], {"chat_template": "no.jinja"}, r"data\.chat_template: the file no\.jinja does not exist"),
        ([GOOD], {"eval": ("EMPTY.jsonl",)}, r"data\.eval \(.*\) has no text"),
        ([GOOD], {"tokenizer": "bytes"}, "need a folder with a tokenizer of transformers"),
        ("", {}, r"data\.train \(.*\) has no text: every file"),
        ("plain\n", {"format": "text", "train": ("TEXT",), "eval": None}, None),
    ],
)  # fmt: skip
def test_bad_data(folder: Path, tmp_path: Path, content: Any, settings: Any, message: str | None) -> None:
    path = tmp_path / "a.jsonl"
    if isinstance(content, str):
        path.write_text(content)
    else:
        lines(path, *content)
    (tmp_path / "TEXT").write_text("plain")
    (tmp_path / "EMPTY.jsonl").write_text("")
    named = {key: tuple(str(tmp_path / one) for one in settings[key]) for key in ("train", "eval") if settings.get(key)}
    if message is None:
        assert corpus(folder, path, **(settings | named)).train_marks is None
        return
    with pytest.raises(ValueError, match=message):
        corpus(folder, path, **(settings | named))
    assert "eval" in named or not list((tmp_path / "cache").glob("*"))


def test_bad_templates(folder: Path, tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", {"messages": [USER, ONE]})
    with pytest.raises(ValueError, match=r"TEXT is a text file, which has no field messages"):
        (tmp_path / "TEXT").write_text("plain")
        corpus(folder, path, train=(str(path), str(tmp_path / "TEXT")))
    (tmp_path / "wrong.jinja").write_text("\n{% for m in messages %}")
    with pytest.raises(ValueError, match=r"template of .*wrong\.jinja is wrong in line 2"):
        corpus(folder, path, chat_template=str(tmp_path / "wrong.jinja"))
    make_tokenizer(None).save_pretrained(tmp_path / "base")
    with pytest.raises(ValueError, match=r"has no chat template, .* or set data\.chat_template to a Jinja file"):
        corpus(tmp_path / "base", path)
    (tmp_path / "own.jinja").write_text(THINKING)
    found = corpus(tmp_path / "base", path, chat_template=str(tmp_path / "own.jinja"))
    assert make_tokenizer().decode(examples(found)[0][0]).endswith("</think>\n\nHi! 😬<|im_end|>\n")
    with pytest.raises(ValueError, match=r"has no tokenizer \(none of tokenizer\.json"):
        corpus(tmp_path, path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match="has no tokenizer that transformers can read"):
        corpus(tmp_path, path)
    (tmp_path / "other.jinja").write_text("as it pleases")
    with pytest.raises(ValueError, match=r"line 1: the chat template of .*other\.jinja writes nothing of message 1"):
        corpus(folder, path, chat_template=str(tmp_path / "other.jinja"))


def test_what_is_learned_is_shown_and_data_is_read_before_ranks_start(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = lines(tmp_path / "a.jsonl", *[{"messages": [USER, ONE, HI, TWO]}] * 3)
    named = [f"data.train={path}", f"data.tokenizer={folder}", f"data.cache_dir={tmp_path}/cache"]
    named.append("data.eval_fraction=0")
    config = load_config(None, [*named, "data.sequence_length=96"])
    with Console(
        record=True, width=200, force_terminal=True, color_system="truecolor", file=open("/dev/null", "w")
    ) as out:
        show(config, 2, out)
    colored = out.export_text(styles=True, clear=False)
    text = out.export_text()
    assert text.count("assistant\n»Hi! 😬<|im_end|>\n«") == 2 and "example 2: " in text and "example 3" not in text
    assert "3 examples, " in text and "\x1b[" in colored
    read_data(config)
    with pytest.raises(ValueError, match=r"3 of 3 examples are longer than data\.sequence_length = 16; the longest"):
        read_data(load_config(None, [*named, "data.sequence_length=16"]))
    bad = lines(tmp_path / "bad.jsonl", {"messages": [USER]})
    monkeypatch.setattr("carpool.train.launch.start.run", lambda *_, **__: pytest.fail("ranks were started"))
    monkeypatch.setattr(sys.modules["carpool.cli.train"], "look_ahead", lambda *_, **__: contextlib.nullcontext())
    for argument in ([], ["--show-examples", "2"]):
        overrides = [*named, f"data.train={bad}", f"training.output_dir={tmp_path}/run"]
        done = CliRunner().invoke(app, ["train", *overrides, *argument])
        assert done.exit_code == 1 and "bad.jsonl, line 1: the conversation has no answer" in done.output
    stream = load_config(
        None, [f"data.train={tmp_path}/a.txt", "data.sequence_length=8", f"data.cache_dir={tmp_path}/c"]
    )
    (tmp_path / "a.txt").write_text("wörter 😬")
    with pytest.raises(ValueError, match="a single document"):
        show(stream, 1, out)


SYSTEM = {"role": "system", "content": "Be brief."}


@pytest.mark.parametrize("template", [TEMPLATE, MARKED])
@pytest.mark.parametrize(
    ("flags", "settings", "learned"),
    [
        ({}, {"loss": "last"}, ["Nothing."]),
        ({1: {"train": False}}, {}, ["Nothing."]),
        ({1: {"weight": 0}, 3: {"weight": 1}}, {}, ["Nothing."]),
        ({3: {"train": False}}, {"loss": "last"}, []),
        (
            {1: {"train": False}, 3: {"weight": 0}},
            {"loss": "all"},
            ["user\nHello?", "<|im_start|>user\nWhat's up?", ""],
        ),
        ({}, {"loss": "last", "turns": "apart"}, ["Nothing."]),
        ({}, {"roles_to_train": ("user",)}, ["user\nHello?", "user\nWhat's up?"]),
        ({2: {"train": True}, 1: {"train": False}}, {"loss": "last"}, ["user\nWhat's up?", "Nothing."]),
    ],
)
def test_which_messages_are_learned(template: str, flags: Any, settings: Any, learned: list[str]) -> None:
    hi = {"role": "user", "content": "What's up?"}
    messages = [message | flags.get(i, {}) for i, message in enumerate([USER, ONE, hi, TWO])]
    chat = Chat(DataSection(**settings), pretrained := make_tokenizer(template))
    found = [
        one
        for ids, marks in chat.encode([Conversation(messages, None, "here")])
        for one in [pretrained.decode([token for token, mark in zip(ids, marks, strict=True) if mark])]
    ]
    text = "".join(found)
    parts = [part for part in re.split(r"<\|im_end\|>\n?", text) if part]
    assert [part.removeprefix("<|im_start|>").removeprefix("assistant\n") for part in parts] == learned


def test_sharegpt_and_alpaca_are_conversations(folder: Path, tmp_path: Path) -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    wanted = [
        {"messages": [SYSTEM, USER, ONE]},
        {"messages": [USER, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "1"}, ONE]},
    ]
    said = {"from": "gpt", "value": ONE["content"]}
    given = [
        {"system": "Be brief.", "conversations": [{"from": "human", "value": "Hello?"}, said]},
        {"conversations": [
            USER, {"from": "function_call", "value": '{"name": "f", "arguments": {"x": 1}}'},
            {"from": "observation", "value": "1"}, said,
        ]},
    ]  # fmt: skip
    expected = examples(corpus(folder, lines(tmp_path / "a.jsonl", *wanted)))
    assert examples(corpus(folder, lines(tmp_path / "b.jsonl", *given))) == expected
    renamed = {"messages": given[1]["conversations"]}
    assert examples(corpus(folder, lines(tmp_path / "b2.jsonl", renamed))) == expected[1:]
    asked = {"instruction": "Add.", "input": "1 2", "output": "3", "system": "Be brief.", "history": [["Hi", "Ho"]]}
    turns = [("user", "Hi"), ("assistant", "Ho"), ("user", "Add.\n1 2"), ("assistant", "3")]
    same = {"messages": [SYSTEM, *({"role": role, "content": text} for role, text in turns)]}
    plain = {"messages": [{"role": "user", "content": "Add."}, {"role": "assistant", "content": "3"}]}
    expected = examples(corpus(folder, lines(tmp_path / "c.jsonl", same, plain)))
    array = tmp_path / "d.json"
    array.write_text(json.dumps([asked, {"instruction": "Add.", "input": "", "output": "3"}], indent=1))
    assert examples(corpus(folder, array)) == expected
    (tmp_path / "e.csv").write_text('instruction,output,input\r\n"Add.",3,\r\n')
    assert examples(corpus(folder, tmp_path / "e.csv")) == expected[1:]
    for row, message in (
        ({"conversations": [{"from": "cat", "value": "x"}]}, "line 1: a message is from 'cat', which is none of human"),
        ({"conversations": [{"from": ["cat"], "value": "x"}]}, "a message is from .'cat'., which is none of human"),
        ({"instruction": "a", "output": "b", "history": "c"}, "'history' holds no list of pairs"),
        ({"conversations": [{"from": "function_call", "value": "5"}]}, "a function_call is '5'; an object with name"),
        ({"instruction": 3, "output": "b"}, "line 1: the field 'instruction' holds int, not text"),
        ({"instruction": "a", "output": None}, "the field 'output' holds NoneType, not text"),
    ):
        with pytest.raises(ValueError, match=message):
            corpus(folder, lines(tmp_path / "f.jsonl", row))
