"""`carpool generate`: the same tokens as Transformers in one process, whatever the ranks and batches."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.filesize import decimal
from safetensors.torch import load_file, save_file
from transformers import TextStreamer
from transformers.modeling_outputs import MoeCausalLMOutputWithPast
from typer.testing import CliRunner, Result

from carpool.cli import app
from carpool.hf import generation as decode_graph
from carpool.hf.generation import DecodeGraphs, Sampling, generate
from carpool.serve import generate_dry_run, serve_memory, served_model
from carpool.serve.generate_answers import answer
from carpool.serve.prompts import deal
from carpool.serve.served_model import find_source, open_model
from carpool.train.checkpoints.run_source import keep_source
from carpool.train.config import load_config
from tests.hf.meshes import reuse_meshes
from tests.ranks import Ranks
from tests.serve.checkpoints import greedy, save, tokenizer

RANKS_IMPORT = ("carpool.serve.served_model",)
LENGTHS = (5, 1, 11, 3, 8, 2)


def _prompts(count: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 96, (length,), generator=generator).tolist() for length in LENGTHS[:count]]


def _answers(folder: str, counts: list[int], sampling: Sampling, end: int = 2) -> list[list[list[int]]]:
    """On each rank: the tokens of the first prompts, for each count."""
    reuse_meshes()
    found = find_source(Path(folder))
    found.text.end = (end,)
    model = open_model(found, max_tokens=64)
    return [answer(model, found.text, _prompts(count), sampling, batch_size=2)[0] for count in counts]


@pytest.mark.parametrize(
    "architecture", ["qwen3_moe", "olmoe", "deepseek_v3", pytest.param("gpt_oss", marks=pytest.mark.slow)]
)
def test_greedy_over_ranks_is_transformers_in_one_process(ranks: Ranks, tmp_path: Path, architecture: str) -> None:
    """Six prompts on four ranks, which is more than one for some; three, which leaves a rank with none. One ends early,
    and its rank goes on for the others."""
    model = save(tmp_path, architecture)
    end = greedy(model, _prompts(1)[0], 3)[2]
    want = [greedy(model, prompt, 7, end) for prompt in _prompts(6)]
    assert min(map(len, want)) < 7 == max(map(len, want))
    for six, three in ranks(_answers, str(tmp_path), [6, 3], Sampling(max_new_tokens=7), end):
        assert six == want
        assert three == want[:3]


def test_a_drawn_text_is_the_same_on_any_number_of_ranks(two_ranks: Ranks, tmp_path: Path) -> None:
    save(tmp_path, "qwen3_moe")
    sampling = Sampling(max_new_tokens=6, temperature=1.5, top_k=40, top_p=0.95, seed=3)
    found = find_source(tmp_path)
    model = open_model(found, max_tokens=64)
    alone = answer(model, found.text, _prompts(5), sampling, batch_size=5)[0]
    assert alone != answer(model, found.text, _prompts(5), Sampling(max_new_tokens=6), batch_size=5)[0]
    assert two_ranks(_answers, str(tmp_path), [5], sampling) == [[alone]] * 2


def test_draws_follow_the_probabilities(tmp_path: Path) -> None:
    """4,000 draws of a first token, against the model's own softmax: no share is off by more than chance allows."""
    model = save(tmp_path, "olmoe")
    prompt = [[7, 9, 11]]
    share = model(torch.tensor(prompt)).logits[0, -1].float().softmax(-1)
    sampling = Sampling(max_new_tokens=1, temperature=1.0)
    drawn = generate(model, prompt * 4000, sampling, end=(), numbers=range(4000)).tokens
    counts = torch.bincount(torch.tensor(drawn).flatten(), minlength=len(share))
    spread = (share * (1 - share) / 4000).sqrt()
    assert ((counts / 4000 - share).abs() < 4.5 * spread + 1e-3).all()
    top = generate(model, prompt * 200, Sampling(max_new_tokens=1, temperature=1.0, top_k=2), end=()).tokens
    assert {one[0] for one in top} == set(share.topk(2).indices.tolist())


def test_decode_steps_through_fixed_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same tokens where steps read the tensors of a capture, for prompts of other lengths after one another.

    A function stands for the CUDA graph. A capture runs nothing; a replay gives what it makes in the same object."""
    model = save(tmp_path, "qwen3_moe")
    captures = []

    def capture(forward: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        output = MoeCausalLMOutputWithPast()
        captures.append(forward)
        return lambda: [setattr(output, name, value) for name, value in forward().items()] and None, output

    batches = [_prompts(3), _prompts(6)[3:], _prompts(2)]
    want = [[greedy(model, prompt, 7) for prompt in batch] for batch in batches]
    monkeypatch.setattr(decode_graph, "why_not", lambda _: None)
    monkeypatch.setattr(type(model), "_valid_auto_compile_criteria", lambda *_: True)
    graphs, sampling = DecodeGraphs(capture), Sampling(max_new_tokens=7)
    assert [generate(model, batch, sampling, end=(2,), graphs=graphs).tokens for batch in batches] == want
    assert len(captures) == 2, "one for each batch size"
    assert "get_compiled_call" not in vars(model)


def test_what_cannot_be_a_graph_says_why(tmp_path: Path) -> None:
    olmoe, windowed = save(tmp_path / "a", "olmoe"), save(tmp_path / "b", "gpt_oss")
    assert decode_graph.why_not(olmoe) == "there is no GPU"
    assert decode_graph.why_no_static_cache(olmoe) is None
    assert "StaticSlidingWindowLayer" in str(decode_graph.why_no_static_cache(windowed))

    def capture(forward: Callable[[], Any]) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    graphs = DecodeGraphs(capture)
    assert graphs.capture(lambda: None) is None
    assert graphs.why_not == "the step cannot be captured: operation not permitted when stream is capturing"


def test_prompts_are_dealt_by_length() -> None:
    assert deal([5, 9, 3], 2, 1) == [([[1], [0]],), ([[2], []],)]
    rounds = deal([*LENGTHS, *LENGTHS], 4, 2)
    assert len(rounds) == 2 and sorted(n for one in rounds for rank in one.of_rank for n in rank) == list(range(12))


def _run(*arguments: object) -> Result:
    return CliRunner(env={"COLUMNS": "1000", "NO_COLOR": "1"}).invoke(app, ["generate", *map(str, arguments)])


def _error(*arguments: object) -> str:
    result = _run(*arguments)
    assert result.exit_code == 1 and "Traceback" not in result.stderr, result.output
    return result.stderr


def test_the_command(tmp_path: Path) -> None:
    model = save(tmp_path / "model", "olmoe")
    file, out = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    file.write_text('{"prompt": "hello"}\n\n{"messages": [{"role": "user", "content": "hi"}]}\n')
    options = ("--prompts", file, "--out", out, "--max-new-tokens", 5, "--temperature", 0)
    result = _run(tmp_path / "model", *options)
    assert result.exit_code == 0, result.output
    assert "prefill" in result.stderr and "tokens/s (decode steps are eager: there is no GPU)" in result.stderr
    text = tokenizer()
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    for line, prompt in zip(lines, ("hello", "u:hi\na:"), strict=True):
        assert line["text"] == text.decode(greedy(model, text(prompt)["input_ids"], 5), skip_special_tokens=True)
    assert lines[0]["prompt_tokens"] == 5 and lines[1]["messages"][0]["content"] == "hi"
    shown = _run(tmp_path / "model", "--prompt", "hello", "--max-new-tokens", 5, "--temperature", 0)
    assert shown.stdout == f"hello{lines[0]['text']}\n"


def test_bad_input(tmp_path: Path) -> None:
    save(tmp_path / "model", "olmoe", template=None)
    model, file = tmp_path / "model", tmp_path / "prompts.jsonl"
    assert "give --prompt TEXT, or --prompts FILE.jsonl" in _error(model)
    for bad, says in (
        ("hello", "Expecting value"),
        ('{"promt": "x"}', '{"prompt": "text"}'),
        ('{"messages": []}', "must be a list of"),
        ('{"prompt": 3}', "must be a text"),
    ):
        file.write_text('{"prompt": "fine"}\n' + bad)
        assert f"line 2 of {file} is no prompt: " in _error(model, "--prompts", file)
        assert says in _error(model, "--prompts", file)
    file.write_text('{"messages": [{"role": "user", "content": "hi"}]}')
    assert "has no chat template" in _error(model, "--prompts", file)
    assert "the prompt has 60 tokens, and 10 more were asked for, but the model sees 64" in _error(
        model, "--prompt", "x" * 60, "--max-new-tokens", 10
    )
    assert "--dtype: 'float23' is not known; use bfloat16, float16 or float32" in _error(
        model, "--prompt", "x", "--dtype", "float23"
    )
    (model / "tokenizer.json").unlink()
    assert "has no tokenizer (none of tokenizer.json" in _error(model, "--prompt", "x")


@pytest.mark.parametrize("where", ["device", "host"])
def test_weights_that_hold_nan_are_refused(tmp_path: Path, where: str) -> None:
    save(tmp_path, "olmoe")
    weights = load_file(tmp_path / "model.safetensors")
    weights["model.layers.1.mlp.experts.5.down_proj.weight"][0, 0] = torch.nan
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    says = f"error: {tmp_path}: model.layers.1.mlp.experts.down_proj holds NaN: copy or download the weights again"
    assert says in _error(tmp_path, "--prompt", "x", "--experts", where, "--ranks", 1)


def test_too_little_memory_is_told_before_weights_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = save(tmp_path, "qwen3_moe")
    size = 4 * sum(parameter.numel() for parameter in model.parameters())
    needed = serve_memory.needed_bytes(tmp_path, torch.float32, 1, 10, 20)
    # 2 layers of 4 heads with keys and values of 8 each.
    assert needed == {"weights": size, "cache": 20 * 2 * 4 * 16 * 4, "rows": 10 * 32 * 8 * 4}
    experts = 2 * 8 * (2 * 16 * 32 + 32 * 16) * 4
    assert serve_memory.needed_bytes(tmp_path, torch.float32, 4, 10, 20)["weights"] == size - experts * 3 // 4
    monkeypatch.setattr(serve_memory, "rank_memory", lambda *_: size)
    monkeypatch.setattr(served_model, "build_model", None)
    assert "GiB of host memory: use more ranks" in _error(tmp_path, "--prompt", "x")


def test_a_dry_run_says_whether_it_fits_and_loads_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, "qwen3_moe")
    monkeypatch.setattr(served_model, "build_model", None)
    asked = ("--prompt", "hello", "--prompt", "x", "--prompt", "y", "--max-new-tokens", 5, "--ranks", 2, "--dry-run")
    found = _run(tmp_path, *asked)
    assert found.exit_code == 0, found.stderr
    lines = found.stdout.splitlines()
    assert lines[0].startswith("prompts: 3, of ") and lines[0].endswith("and 5 new ones each at most")
    assert lines[1] == "ranks: 2, with 2 prompts at a time; rounds: 1" and lines[3].startswith("fits into the ")
    longest = len(find_source(tmp_path).text.encode("hello"))
    needs = serve_memory.needed_bytes(tmp_path, torch.float32, 2, 2 * longest, 2 * (longest + 5))
    assert lines[2].startswith(f"a rank takes {decimal(sum(needs.values()))}: weights {decimal(needs['weights'])}, ")
    monkeypatch.setattr(generate_dry_run, "rank_memory", lambda *_: sum(needs.values()) - 1)
    assert "does NOT fit into the" in _run(tmp_path, *asked).stdout
    assert "fits into the 79.0 GiB of H100\n" in _run(tmp_path, *asked, "--gpu", "h100").stdout
    assert " µs by H100's datasheet: prefill " in _run(tmp_path, *asked, "--gpu", "h100").stdout
    assert "8 experts leave one of 5 ranks without any" in _error(tmp_path, *asked[:-2], 5, "--dry-run")
    assert "ranks: 3, " in _run(tmp_path, *asked[:-2], 3, "--dry-run").stdout
    assert "did you mean h100" in _error(tmp_path, *asked, "--gpu", "h10")
    assert "give both, or neither" in _error(tmp_path, *asked[:-1], "--gpu", "h100")


def _run_folder(folder: Path, eos_token: str | None) -> Path:
    """A run from scratch whose tokenizer is a bare tokenizer.json, with the weights that it exported."""
    save(folder / "model", "qwen3_moe")
    (folder / "tokenizer").mkdir()
    shutil.copyfile(folder / "model" / "tokenizer.json", folder / "tokenizer" / "tokenizer.json")
    keep_source(folder, None, str(folder / "tokenizer"))
    config = load_config(None, [f"data.eos_token={eos_token}"] if eos_token else [])
    (folder / "config.toml").write_text(config.to_toml())
    return folder


def test_a_run_ends_texts_with_the_token_that_ends_its_documents(tmp_path: Path) -> None:
    run = _run_folder(tmp_path, "<begin>")
    assert find_source(run).text.end == (1,)
    (run / "source" / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))
    assert find_source(run).text.end == (2, 1), "and with the tokenizer's own"
    (run / "config.toml").write_text(load_config(None, []).to_toml())
    assert find_source(run).text.end == (2,)
    (run / "source" / "tokenizer_config.json").unlink()
    with pytest.raises(ValueError, match="does not say which token ends a document"):
        find_source(run)


def _chat(folder: Path, said: str, *arguments: str) -> Result:
    options = ("--max-new-tokens", "6", "--temperature", "0", *arguments)
    return CliRunner(env={"COLUMNS": "1000", "NO_COLOR": "1"}).invoke(app, ["chat", str(folder), *options], input=said)


def _chat_answers(folder: Path, *conversations: str) -> list[str]:
    """What Transformers alone answers to each conversation as the template writes it; {} is the answer before."""
    model, text, answers = save(folder, "qwen3_moe"), tokenizer(), [""]
    for one in conversations:
        tokens = greedy(model, text(one.format(*answers))["input_ids"], 6)
        answers.append(text.decode(tokens, skip_special_tokens=True))
    return answers[1:]


def test_a_conversation(tmp_path: Path) -> None:
    want = _chat_answers(tmp_path, "s:be\nu:hi\na:", "s:be\nu:hi\na:{1}\nu:so?\na:", "s:be\nu:new\na:")
    result = _chat(tmp_path, "hi\n\nso?\n/reset\nnew\n/exit\nnever\n", "--system", "be")
    assert result.exit_code == 0, result.output
    assert result.stdout == "".join(f"{answer}\n" for answer in want)
    assert "prefill" in result.stderr and "tokens/s" in result.stderr


def test_what_cannot_be_said(tmp_path: Path) -> None:
    (want,) = _chat_answers(tmp_path, "u:hi\na:")
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
    (whole,) = _chat_answers(tmp_path, "u:hi\na:")
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
    assert [whole, again] == _chat_answers(tmp_path, "u:hi\na:", f"u:hi\na:{begun}\nu:so?\na:")


@pytest.mark.slow
def test_over_two_ranks(tmp_path: Path) -> None:
    want = _chat_answers(tmp_path, "u:hi\na:", "u:hi\na:{1}\nu:so?\na:")
    command = [sys.executable, "-m", "carpool", "chat", str(tmp_path), "--ranks", "2"]
    options = ["--max-new-tokens", "6", "--temperature", "0"]
    done = subprocess.run(
        [*command, *options], input="hi\nso?\n", capture_output=True, text=True, timeout=200, env=dict(os.environ)
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "".join(f"{answer}\n" for answer in want)
