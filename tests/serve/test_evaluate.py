"""`carpool eval`: perplexity against a token-by-token reference, what it refuses, and ranks with unequally many
forwards."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner, Result

from carpool.cli import app
from carpool.serve.eval_tasks import InStep
from carpool.serve.evaluate import Perplexity, Window, perplexity, windows
from carpool.serve.prompts import Text
from carpool.serve.served_model import find_source, open_model
from carpool.train.checkpoints.run_source import keep_source
from tests.hf.meshes import reuse_meshes
from tests.ranks import Ranks
from tests.serve.checkpoints import save, tokenizer

RANKS_IMPORT = ("carpool.serve.evaluate", "carpool.serve.served_model")
TEXTS = ["The first document is a little longer than one window.", "Short.", "x", "Another one, of some length."]


def test_windows_predict_each_token_once() -> None:
    assert list(windows([0, 1, 2, 3, 4, 5], 4, 2)) == [Window([0, 1, 2, 3], 1), Window([2, 3, 4, 5], 2)]
    for length in range(1, 20):
        seen = []
        for start, one in enumerate(windows(range(length), 7, 3)):
            assert len(one.tokens) <= 7 and (start == 0 or one.first >= 7 - 3)
            seen += one.tokens[one.first :]
        assert seen == list(range(1, length))


@torch.no_grad()
def _reference(folder: Path, length: int, stride: int) -> tuple[float, int]:
    """The negative log-likelihood of all tokens, one forward for each, and their number."""
    model, text = save(folder, "qwen3_moe"), tokenizer()
    total, count = 0.0, 0
    for one in TEXTS:
        tokens = text(one)["input_ids"]
        for place in range(1, len(tokens)):
            start = 0 if place < length else stride * -(-(place + 1 - length) // stride)
            logits = model(torch.tensor([tokens[start:place]])).logits[0, -1]
            total -= float(logits.double().log_softmax(-1)[tokens[place]])
            count += 1
    return total, count


def _perplexity(folder: str, length: int, stride: int) -> Perplexity:
    reuse_meshes()
    source = find_source(Path(folder))
    model = open_model(source, max_tokens=64)
    return perplexity(model, source.text, TEXTS, length=length, stride=stride, batch_size=2)


def test_perplexity_is_that_of_single_forwards(two_ranks: Ranks, tmp_path: Path) -> None:
    total, count = _reference(tmp_path, 17, 5)
    for found in (_perplexity(str(tmp_path), 17, 5), *two_ranks(_perplexity, str(tmp_path), 17, 5)):
        assert (found.tokens, found.documents) == (count, len(TEXTS))
        assert found.bytes == sum(map(len, TEXTS)) - len(TEXTS)
        assert found.loss == pytest.approx(total / count, rel=1e-5)
        assert found.perplexity == pytest.approx(math.exp(total / count), rel=1e-4)
        # A token is a byte here.
        assert 2**found.bits_per_byte == pytest.approx(found.perplexity, rel=1e-6)


def test_a_document_may_begin_inside_a_character(tmp_path: Path) -> None:
    """Its first token is a byte, which nothing predicts; the others are all that counts."""
    save(tmp_path, "qwen3_moe", vocab_size=259)
    keep_source(tmp_path / "run", None, "bytes")
    for file in (tmp_path / "run" / "source").glob("tokenizer*"):
        shutil.copyfile(file, tmp_path / file.name)
    source = find_source(tmp_path)
    model = open_model(source, max_tokens=64)
    texts = ["\u20ac 5", "\ufffd\ufffd", "plain"]
    found = perplexity(model, source.text, texts, length=17, stride=5, batch_size=2)
    assert found.bytes == found.tokens == (3 + 2 - 1) + (6 - 1) + (5 - 1)


def test_bytes_of_tokens_that_are_bytes_by_number(tmp_path: Path) -> None:
    vocabulary = {"a": 0, "\u20ac": 1, **{f"<0x{byte:02X}>": 2 + byte for byte in range(256)}}
    plain = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    plain.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    PreTrainedTokenizerFast(tokenizer_object=plain, eos_token="a").save_pretrained(tmp_path)
    text = Text(tmp_path)
    assert [text.bytes_of(token) for token in (1, 2 + 0xE2, 2 + 0x41)] == [3, 1, 1]
    assert text.bytes_of(0) == 0, "a special token"


def _run(*arguments: object) -> Result:
    return CliRunner(env={"COLUMNS": "1000", "NO_COLOR": "1"}).invoke(app, ["eval", *map(str, arguments)])


def test_the_command(tmp_path: Path) -> None:
    total, count = _reference(tmp_path / "model", 16, 8)
    lines, plain = tmp_path / "text.jsonl", tmp_path / "plain.txt"
    lines.write_text("".join(json.dumps({"body": text}) + "\n\n" for text in TEXTS[1:]))
    plain.write_text(TEXTS[0])
    data = ("--data", lines, "--data", plain, "--text-field", "body", "--window", 16)
    found = json.loads(_run(tmp_path / "model", *data, "--json").stdout)["perplexity"]
    assert (found["tokens"], found["window"], found["stride"]) == (count, 16, 8)
    assert found["loss"] == pytest.approx(total / count, rel=1e-5)
    shown = _run(tmp_path / "model", *data).stdout
    assert (
        f"perplexity {found['perplexity']:.4f} per token" in shown and "windows of 16 tokens, each 8 further" in shown
    )


def test_bad_input(tmp_path: Path) -> None:
    save(tmp_path / "model", "qwen3_moe")
    model, file = tmp_path / "model", tmp_path / "text.jsonl"

    def error(*arguments: object) -> str:
        result = _run(model, *arguments)
        assert result.exit_code == 1 and "Traceback" not in result.stderr, result.output
        return result.stderr

    assert "give --data FILE for perplexity, or --tasks" in error()
    assert "there is no file" in error("--data", file)
    for bad, says in (
        ("{", "is not JSON"),
        ("[" * 100_000, "is nested too deeply"),
        ('{"txt": "x"}', "has no text in the field 'text'"),
    ):
        file.write_text(f'{{"text": "fine"}}\n{bad}\n')
        assert f"line 2 of {file} {says}" in error("--data", file)
    file.write_text("")
    assert "there is no text in" in error("--data", file)
    file.write_text('{"text": "x"}')
    assert "no document has two tokens" in error("--data", file)
    assert "--window 65 is more than the 64 tokens that the model sees" in error("--data", file, "--window", 65)
    assert "--stride 8 must be at least 1 and less than the window of 8" in error(
        "--data", file, "--window", 8, "--stride", 8
    )
    file.write_text('{"text": "xyz"}')
    weights = {name: tensor * math.inf for name, tensor in load_file(model / "model.safetensors").items()}
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    assert "so the model computes nonsense" in error("--data", file)


def test_tasks_without_the_harness(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, "qwen3_moe")
    monkeypatch.setattr("carpool.serve.eval_tasks.find_spec", lambda _: None)
    result = _run(tmp_path, "--tasks", "hellaswag")
    assert result.exit_code == 1 and "--tasks needs lm-evaluation-harness" in result.stderr


# Of each rank.
UNEQUAL = [[[1, 2, 3, 4, 5], [6, 7, 8], [9, 10]], []]


def _logits(folder: str) -> list[torch.Tensor]:
    """Of this rank's texts, and of a second time, when the other rank has them."""
    reuse_meshes()
    model = open_model(find_source(Path(folder)), max_tokens=64)
    steps, found = InStep(model), []
    for turn in range(2):
        with torch.no_grad(), steps.work():
            for text in UNEQUAL[(dist.get_rank() + turn) % 2]:
                found.append(model(input_ids=torch.tensor([text]), use_cache=False).logits)
    steps.remove()
    return found


def test_a_rank_without_work_takes_part_in_the_forwards_of_others(two_ranks: Ranks, tmp_path: Path) -> None:
    model = save(tmp_path, "qwen3_moe")
    with torch.no_grad():
        alone = [model(input_ids=torch.tensor([text]), use_cache=False).logits for text in UNEQUAL[0]]
    for found in two_ranks(_logits, str(tmp_path)):
        assert len(found) == len(alone)
        for ours, theirs in zip(found, alone, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def _failures(folder: str) -> list[str]:
    """What each rank sees if one fails after its first forward, the others being at work or done."""
    reuse_meshes()
    model = open_model(find_source(Path(folder)), max_tokens=64)
    steps, found = InStep(model), []
    for forwards in (3, 0):
        try:
            with torch.no_grad(), steps.work():
                for number in range(2 if dist.get_rank() else forwards):
                    model(input_ids=torch.tensor([[1, 2, 3]]), use_cache=False)
                    if dist.get_rank():
                        raise KeyError(number)
        except (KeyError, RuntimeError) as error:
            found.append(f"{type(error).__name__}: {error}")
    steps.remove()
    return found


def test_if_a_rank_fails_between_forwards_the_others_do_not_wait(two_ranks: Ranks, tmp_path: Path) -> None:
    save(tmp_path, "qwen3_moe")
    other, failed = two_ranks(_failures, str(tmp_path))
    assert failed == ["KeyError: 0"] * 2
    assert other == ["RuntimeError: another rank has failed between two forwards: its error says why"] * 2
