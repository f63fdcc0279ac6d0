"""Runs that learn from a teacher: files and a second model give the losses of one process, and what does not fit is
refused before a step."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, OlmoeConfig

from carpool.train.build.teacher import write_logits
from carpool.train.config import load_config
from carpool.train.config.schema_distillation import DistillationSection
from carpool.train.data.teacher_logits import TeacherLogits, write_rows
from examples.tiny_chat_model import CONVERSATIONS, make_tokenizer
from examples.tiny_chat_model import write as write_model
from tests.bench.started import check_train
from tests.ranks import Ranks
from tests.train.test_cli import error_of
from tests.train.test_data import write_parquet
from tests.train.test_loop import MODEL, records, run

VOCABULARY = 320
NAN, INF = float("nan"), float("inf")
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 24, "intermediate_size": 24, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 2, "initializer_range": 0.4,
    "pad_token_id": None, "bos_token_id": None,
}  # fmt: skip
SHORT = [
    *MODEL, "training.max_steps=3", "training.eval_steps=3", "training.save_strategy=no", "data.max_bytes=6000",
    "moe.router_aux_loss_coef=0",
]  # fmt: skip
WHOLE = [f"distillation.top_k={VOCABULARY}", "distillation.temperature=2", "distillation.weight=0.7"]


def write(overrides: Sequence[str], teacher: str) -> str:
    """On a rank: the command."""
    try:
        write_logits(load_config(None, list(overrides)), teacher=teacher)
    except ValueError as error:
        return str(error)
    return ""


@pytest.fixture(scope="module")
def teachers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("teachers")
    torch.manual_seed(0)
    configs = {
        "moe": OlmoeConfig(**SIZES, num_experts=4, num_experts_per_tok=2), "dense": LlamaConfig(**SIZES),
        "narrow": LlamaConfig(**SIZES | {"vocab_size": 200}),
    }  # fmt: skip
    for name, config in configs.items():
        AutoModelForCausalLM.from_config(config).save_pretrained(folder / name)
    shutil.copytree(folder / "moe", folder / "other")
    make_tokenizer().save_pretrained(folder / "other")
    return folder


@pytest.fixture(scope="module")
def files(two_ranks: Ranks, teachers: Path, text: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("logits")
    settings = [*SHORT, *text, *WHOLE, f"distillation.logits={folder}"]
    assert two_ranks(write, settings, str(teachers / "moe")) == [""] * 2
    return folder


def numbers(output: Path) -> list[float]:
    return [line[key] for line in records(output).values() for key in ("loss", "distillation_loss", "grad_norm")]


@pytest.fixture(scope="module")
def of_one(one_rank: Ranks, files: Path, text: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("runs") / "one"
    settings = [*SHORT, *text, *WHOLE, f"distillation.logits={files}", "training.per_device_train_batch_size=8"]
    assert one_rank(run, str(output), settings) == [""]
    return output


WAYS = {
    "files, ep 2, accumulated": ("FILES", "training.gradient_accumulation_steps=2"),
    "online, ep 2": ("ONLINE", "training.per_device_train_batch_size=4"),
    "online, cp 2, fsdp": (
        "ONLINE", "training.per_device_train_batch_size=8", "parallelism.cp_size=2", "parallelism.data_parallel=fsdp"
    ),
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_ranks_and_ways_to_have_a_teacher_give_the_numbers_of_one_process(
    way: str, two_ranks: Ranks, of_one: Path, files: Path, teachers: Path, text: list[str], tmp_path: Path
) -> None:
    source, *own = WAYS[way]
    has = f"distillation.logits={files}" if source == "FILES" else f"distillation.teacher={teachers / 'moe'}"
    assert two_ranks(run, str(tmp_path), [*SHORT, *text, *WHOLE, has, *own]) == [""] * 2
    assert numbers(tmp_path) == pytest.approx(numbers(of_one), rel=1e-4)
    first, last = records(of_one)[1], records(of_one, "eval")[3]["loss"]
    assert first["distillation_loss"] > 1 and last == pytest.approx(records(tmp_path, "eval")[3]["loss"], rel=1e-4)


def test_the_top_k_of_a_dense_teacher_and_of_its_files_are_the_same(
    one_rank: Ranks, teachers: Path, text: list[str], tmp_path: Path
) -> None:
    settings = [*SHORT, *text, "distillation.top_k=9"]
    files = f"distillation.logits={tmp_path / 'logits'}"
    assert one_rank(write, [*settings, files, "distillation.top_k=12"], str(teachers / "dense")) == [""]
    for name, has in (("files", files), ("online", f"distillation.teacher={teachers / 'dense'}")):
        assert one_rank(run, str(tmp_path / name), [*settings, has]) == [""]
    assert numbers(tmp_path / "files") == pytest.approx(numbers(tmp_path / "online"), rel=1e-4)
    # Written again, there is nothing to do; and without a file, the rest stays as it is.
    first = next((tmp_path / "logits").iterdir())
    before = first.stat().st_mtime_ns
    assert one_rank(write, [*settings, files], str(teachers / "dense")) == [""] and first.stat().st_mtime_ns == before
    assert one_rank(write, [*settings, files, "distillation.top_k=13"], str(teachers / "dense"))[0].endswith("at most")


def test_what_does_not_fit_is_refused_before_a_step(
    one_rank: Ranks, files: Path, teachers: Path, text: list[str], tmp_path: Path
) -> None:
    def refusal(*settings: str) -> str:
        (error,) = one_rank(run, str(tmp_path / "run"), [*SHORT, *text, *WHOLE, *settings])
        assert not (tmp_path / "run" / "metrics.jsonl").exists()
        return error

    has = f"distillation.logits={files}"
    assert "has other tokens than the data" in refusal(has, "data.sequence_length=64")
    assert "have 320 log-probabilities for each token" in refusal(has, "distillation.top_k=321")
    assert "at temperature 2, but" in refusal(has, "distillation.temperature=1")
    part = tmp_path / "part"
    part.mkdir()
    shutil.copy(next(files.glob("*.parquet")), part)
    assert "has no row for" in refusal(f"distillation.logits={part}")
    assert "another tokenizer" in refusal(f"distillation.teacher={teachers / 'other'}")
    assert "a vocabulary of 320 tokens, and the model one of 384" in refusal(
        f"distillation.teacher={teachers / 'moe'}", "model.config.vocab_size=384"
    )
    # `carpool teach` refuses the same.
    for teacher, why in (
        ("moe", "has other tokens than the data"),
        ("narrow", "of 200 tokens, and the model one of 320"),
    ):
        (error,) = one_rank(write, [*SHORT, *text, *WHOLE, has, "data.sequence_length=64"], str(teachers / teacher))
        assert why in error
    flash = ["model.attn_implementation=flash_attention_2", "data.packing=examples", f"data.train={CONVERSATIONS}"]
    write_model(tmp_path / "tiny")
    with pytest.raises(ValueError, match="take other tokens of packed rows than a teacher"):
        check_train([
            f"model.path={tmp_path / 'tiny'}", f"distillation.teacher={tmp_path / 'tiny'}", *flash,
            "parallelism.num_ranks=2", "parallelism.cp_size=2",
        ])  # fmt: skip
    assert "chunks" in error_of("train", f"distillation.teacher={teachers / 'moe'}", "training.loss_chunk_size=0")


@pytest.mark.parametrize("kind", ["moe", "dense"])
def test_a_teacher_that_is_not_whole_or_another_one_is_refused(
    kind: str, two_ranks: Ranks, files: Path, teachers: Path, text: list[str], tmp_path: Path
) -> None:
    whole = load_file(teachers / kind / "model.safetensors")
    name = next(name for name in whole if name.endswith("up_proj.weight"))
    absent = {key: value for key, value in whole.items() if key != name}
    changed = {
        "another teacher than": {key: torch.randn_like(value) for key, value in whole.items()},
        f"has NaN or infinity in model.layers.0.mlp.{'experts.gate_' if kind == 'moe' else ''}up_proj": (
            absent | {name: whole[name] * NAN}
        ),
        f"{name} is in none of the files"
        if kind == "moe"
        else f"lacks 1 of the weights of LlamaForCausalLM: {name}": absent,
    }
    for number, (why, tensors) in enumerate(changed.items()):
        teacher = shutil.copytree(teachers / kind, tmp_path / str(number))
        save_file(tensors, teacher / "model.safetensors", {"format": "pt"})
        settings = [*SHORT, *text, *WHOLE, f"distillation.logits={files}"]
        assert all(why in error for error in two_ranks(write, settings, str(teacher)))


@pytest.mark.parametrize(
    ("ids", "log_probs", "why"),
    [
        ([[1, 2], [3, 4], [5, 5]], [[-1, -1], [-INF, -INF], [NAN, 9]], ""),  # values of the last token are not read
        ([[1, 2], [3, 4]], [[-1, -1], [-1, -1]], "equally many"),
        ([[1, 2, 3], [4], [5, 6]], [[-2, -2, -2], [-2], [-2, -2]], "equally many"),
        ([[1], [2], [3]], [[-1, -1]] * 3, "equally many"),
        ([[1, None], [3, 4], [5, 6]], [[-1, -1]] * 3, "equally many"),
        (None, [[-1, -1]] * 3, "equally many"),
        ([[1], [2], [3]], [[-1]] * 3, "1 log-probabilities for each token, and other rows have 2"),
        ([[1, -2], [3, 4], [5, 6]], [[-1, -1]] * 3, "token id -2, but ids are 0 to 319"),
        ([[1, 2], [3, 4], [5, 6]], [[-1, NAN], [-1, -1], [-1, -1]], "are NaN"),
        ([[1, 2], [3, 4], [5, 6]], [[-1, 0.5], [-1, -1], [-1, -1]], "more than 1"),
    ],
)
def test_a_row_that_cannot_be_used_is_named(ids: Any, log_probs: Any, why: str, tmp_path: Path) -> None:
    columns: dict[str, list[Any]] = {"sequence": [0, 1], "input_ids": [[7, 8, 9]] * 2}
    columns |= {"token_ids": [[[1, 2]] * 3, ids], "log_probs": [[[-1.0, -1.0]] * 3, log_probs]}
    path, settings = tmp_path / "rows.parquet", DistillationSection(logits=str(tmp_path))
    write_parquet(path, **columns)
    sequences: Any = [SimpleNamespace(ids=[7, 8, 9])] * 2
    for look in (lambda logits: logits[1], lambda logits: logits.check(sequences)):
        try:
            assert len(look(TeacherLogits(settings, VOCABULARY))) != 1 and not why
        except ValueError as error:
            assert why and str(error).startswith(f"{path}: the row of sequence 1 ") and why in str(error)
            assert "let `carpool teach` write its sequences" in str(error)
    for wrong in ({"log_probs": ["x", "y"]}, {"sequence": [1, 1]}, {"token_ids": None}):
        write_parquet(path, **{name: column for name, column in (columns | wrong).items() if column is not None})
        with pytest.raises(ValueError, match=str(path)):
            TeacherLogits(settings, VOCABULARY)


@pytest.mark.parametrize(
    ("ids", "log_probs", "why"),
    [
        ([5, 320], [-1, -1], "has the token id 320, but ids are 0 to 319"),
        ([5], [-1], "1 log-probabilities"),
        ([5, 6], [-1, 0.5], "more than"),
    ],
)
def test_a_wrong_row_among_many_is_found_before_a_step(ids: Any, log_probs: Any, why: str, tmp_path: Path) -> None:
    """By statistics: the first row of the file and the last one of its row group are right."""
    rows, tokens = 8, [7, 8, 9]
    columns = {"sequence": [*range(rows)], "input_ids": [tokens] * rows, "token_ids": [[[1, 2]] * 3] * rows}
    columns["log_probs"] = [[[-1.0, -1.0]] * 3] * rows
    columns["token_ids"][4], columns["log_probs"][4] = [ids] * 3, [log_probs] * 3
    write_parquet(tmp_path / "rows.parquet", **columns)
    logits = TeacherLogits(DistillationSection(logits=str(tmp_path)), VOCABULARY)
    sequences: Any = [SimpleNamespace(ids=tokens)] * rows
    assert logits.check(sequences, 1, 2) == []  # the other rank has these rows
    with pytest.raises(ValueError, match=f"rows.parquet: the row of sequence 4 .*{why}"):
        logits.check(sequences, 0, 2)


def test_a_full_disk_is_named(tmp_path: Path) -> None:
    (tmp_path / "sequence-000000007.writing").symlink_to("/dev/full")
    row = (7, np.zeros(2, np.int32), np.zeros((2, 1), np.int32), np.zeros((2, 1), np.float32))
    with pytest.raises(OSError, match="No space left on device") as full:
        write_rows(tmp_path, [row], 1.0)
    assert full.value.filename == str(tmp_path) and not list(tmp_path.glob("*.parquet"))


def test_a_script_may_write_the_files(one_rank: Ranks, files: Path, text: list[str], tmp_path: Path) -> None:
    """Plain lists of Python, in another order; ids outside the vocabulary and repeated ids are refused."""
    import pyarrow.parquet

    rows = [row for path in sorted(files.glob("*.parquet")) for row in pyarrow.parquet.read_table(path).to_pylist()]
    columns = {name: [row[name] for row in rows[::-1]] for name in rows[0]}
    settings = [*SHORT, *text, f"distillation.logits={tmp_path}"]
    for name, wrong, why in (
        ("good", None, ""), ("beyond", 400, "the token id 400"), ("twice", 5, "id twice"), ("other", 5, "other tokens"),
    ):  # fmt: skip
        if wrong is not None:
            for ids_LK in columns["token_ids"]:
                ids_LK[3][:2] = [5, wrong]
        if name == "other":
            columns["input_ids"][7][0] ^= 1
        write_parquet(tmp_path / "rows.parquet", **columns)
        (error,) = one_rank(run, str(tmp_path / name), settings)
        assert (why in error) and bool(error) == bool(why), error
        assert (tmp_path / name / "metrics.jsonl").exists() != bool(why)
    assert json.loads((tmp_path / "good" / "summary.json").read_text())["steps"] == 3
