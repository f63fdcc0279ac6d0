"""`carpool chat`: what goes into the model in each turn, and what comes out, in a pipe."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import TextStreamer
from typer.testing import CliRunner, Result

from carpool.cli import app
from tests.serve.checkpoints import greedy, save, tokenizer


def _chat(folder: Path, said: str, *arguments: str) -> Result:
    options = ("--max-new-tokens", "6", "--temperature", "0", *arguments)
    return CliRunner(env={"COLUMNS": "1000", "NO_COLOR": "1"}).invoke(app, ["chat", str(folder), *options], input=said)


def _answers(folder: Path, *conversations: str) -> list[str]:
    """What Transformers alone answers to each conversation as the template writes it; {} is the answer before."""
    model, text, answers = save(folder, "qwen3_moe"), tokenizer(), [""]
    for one in conversations:
        tokens = greedy(model, text(one.format(*answers))["input_ids"], 6)
        answers.append(text.decode(tokens, skip_special_tokens=True))
    return answers[1:]


def test_a_conversation(tmp_path: Path) -> None:
    want = _answers(tmp_path, "s:be\nu:hi\na:", "s:be\nu:hi\na:{1}\nu:so?\na:", "s:be\nu:new\na:")
    result = _chat(tmp_path, "hi\n\nso?\n/reset\nnew\n/exit\nnever\n", "--system", "be")
    assert result.exit_code == 0, result.output
    assert result.stdout == "".join(f"{answer}\n" for answer in want)
    assert "prefill" in result.stderr and "tokens/s" in result.stderr


def test_what_cannot_be_said(tmp_path: Path) -> None:
    (want,) = _answers(tmp_path, "u:hi\na:")
    result = _chat(tmp_path, f"{'x' * 70}\n/foo\nhi\n")
    assert result.exit_code == 0 and result.stdout == f"{want}\n"
    assert "the conversation has 75 tokens, and 6 more were asked for, but the model sees 64" in result.stderr
    assert "or start anew with /reset" in result.stderr and "there is no /foo" in result.stderr
    save(tmp_path / "plain", "qwen3_moe", template=None)
    result = _chat(tmp_path / "plain", "hi\n")
    assert result.exit_code == 1 and "has no chat template" in result.stderr
    save(tmp_path / "picky", "qwen3_moe", template="{{ raise_exception('no empty messages') }}")
    assert "refuses the conversation: no empty messages" in _chat(tmp_path / "picky", "hi\n").stderr


def test_an_answer_that_is_interrupted_stays_as_far_as_it_came(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (whole,) = _answers(tmp_path, "u:hi\na:")
    put, count = TextStreamer.put, [0]

    def put_and_interrupt(self: Any, value: Any) -> None:
        put(self, value)
        count[0] += 1
        if count[0] == 4:  # the prompt, and three tokens
            os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patched:
        patched.setattr(TextStreamer, "put", put_and_interrupt)
        result = _chat(tmp_path, "hi\nso?\n")
    assert result.exit_code == 0, result.output
    begun, again = result.stdout.splitlines()
    assert whole.startswith(begun) and 0 < len(begun) < len(whole)
    assert [whole, again] == _answers(tmp_path, "u:hi\na:", f"u:hi\na:{begun}\nu:so?\na:")


@pytest.mark.slow
def test_over_two_ranks(tmp_path: Path) -> None:
    want = _answers(tmp_path, "u:hi\na:", "u:hi\na:{1}\nu:so?\na:")
    command = [sys.executable, "-m", "carpool", "chat", str(tmp_path), "--ranks", "2"]
    options = ["--max-new-tokens", "6", "--temperature", "0"]
    done = subprocess.run(
        [*command, *options], input="hi\nso?\n", capture_output=True, text=True, timeout=200, env=dict(os.environ)
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "".join(f"{answer}\n" for answer in want)
