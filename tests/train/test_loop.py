"""The main job end to end on two ranks: same answer twice, resumed anywhere, stopped with a reason, recorded truly.

Other ways to compute it go on from the checkpoint of two ranks on four, with the same batches."""

from __future__ import annotations

import fcntl
import json
import math
import os
import shutil
import time
from collections.abc import Sequence
from contextlib import redirect_stdout
from datetime import timedelta
from io import StringIO
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from typer.testing import CliRunner

from carpool import cli
from carpool.layout import ExpertLayout
from carpool.layout.layouts import Layouts
from carpool.report import write_report
from carpool.report.headline import summarise
from carpool.report.page import checks_of
from carpool.report.read import read_run
from carpool.train.checkpoints.manager import CheckpointManager
from carpool.train.checkpoints.record_trace import load_run
from carpool.train.config import load_config
from carpool.train.data import corpus as corpora
from carpool.train.records.run_folder import why_not_writable
from carpool.train.run.finish import sample
from carpool.train.run.run import train
from carpool.train.run.run_records import _earlier_starts
from tests.ranks import Ranks

MODEL = [
    "model.model_type=olmoe", "model.config.hidden_size=32", "model.config.intermediate_size=32",
    "model.config.num_hidden_layers=2", "model.config.num_attention_heads=4", "model.config.num_key_value_heads=4",
    "model.config.num_experts=8", "model.config.num_experts_per_tok=3", "model.config.router_aux_loss_coef=0.05",
    "data.sequence_length=32", "training.per_device_train_batch_size=2", "training.max_steps=6",
    "training.save_steps=3", "training.eval_steps=3", "training.warmup_steps=2", "training.sample_prompt=none",
    "training.save_pretrained=false",
]  # fmt: skip
# The reference run has all there is, and others must equal it without.
EVERYTHING = ['training.sample_prompt="def "', "training.sample_tokens=8", "training.save_pretrained=true"]


# On two ranks a step has as many tokens as on four without it.
TWO = [*MODEL, "training.per_device_train_batch_size=4"]


def run(output: str, overrides: Sequence[str], compare: str | None = None) -> str:
    """On a rank: train, and give back the error's text if it ends in one."""
    try:
        train(load_config(None, [f"training.output_dir={output}", *overrides]), compare=compare, command="test")
    except (ValueError, ArithmeticError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def start(ranks: Ranks, output: Path, overrides: Sequence[str], compare: str | None = None) -> list[str]:
    return ranks(run, str(output), [*MODEL, *overrides], compare)


def start_two(two_ranks: Ranks, output: Path, overrides: Sequence[str], compare: str | None = None) -> list[str]:
    return two_ranks(run, str(output), [*TWO, *overrides], compare)


def records(output: Path, kind: str = "train") -> dict[int, dict[str, Any]]:
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line for line in lines if line["kind"] == kind}


def losses(output: Path) -> dict[int, tuple[float, float]]:
    return {step: (line["loss"], line["grad_norm"]) for step, line in records(output).items()}


def weights(output: Path, step: int) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, whole: shards of a tensor lie in several files."""
    from torch.distributed.checkpoint import HuggingFaceStorageReader

    found: dict[str, torch.Tensor] = {}
    for folder in (output / "checkpoints" / f"step-{step:08d}").glob("*/"):
        part = folder.name
        metadata = HuggingFaceStorageReader(str(folder)).read_metadata()
        assert metadata.storage_data is not None
        for index, stored in metadata.storage_data.items():
            size = metadata.state_dict_metadata[index.fqn].size
            whole = found.setdefault(f"{part}/{index.fqn}", torch.full(tuple(size), math.nan))
            with safe_open(stored.relative_path, "pt") as file:
                piece = file.get_tensor(index.fqn)
            place = tuple(slice(o, o + n) for o, n in zip(index.offset, piece.shape, strict=True))
            whole[place] = piece.float()
    assert found and not any(t.isnan().any() for t in found.values())
    return found


def same_weights(ours: Path, theirs: Path, step: int) -> bool:
    """Bit by bit, with all that the optimizer keeps."""
    first, second = weights(ours, step), weights(theirs, step)
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def goes_on(ranks: Ranks, whole: Path, output: Path, settings: Sequence[str], step: int) -> None:
    """A run that goes on from a checkpoint of another one has its losses, and ends with its bits."""
    resume = f"training.resume_from_checkpoint={whole}/checkpoints/step-{step:08d}"
    assert ranks(run, str(output), [*settings, resume]) == [""] * ranks.world_size
    expected = {at: line for at, line in losses(whole).items() if at > step}
    assert expected and losses(output) == expected and same_weights(output, whole, max(expected))


@pytest.fixture(scope="module")
def reference(two_ranks: Ranks, text: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("runs") / "reference"
    settings = [*text, *EVERYTHING, "training.report_to=tensorboard"]
    assert start_two(two_ranks, output, settings, compare="alltoall") == [""] * 2
    return output


def test_learns_and_records_what_it_did(two_ranks: Ranks, reference: Path) -> None:
    train_lines, evals = records(reference), records(reference, "eval")
    assert list(train_lines) == [1, 2, 3, 4, 5, 6] and set(evals) == {0, 3, 6}
    assert evals[6]["loss"] < evals[0]["loss"] - 0.3
    info = json.loads((reference / "run.json").read_text())
    summary = json.loads((reference / "summary.json").read_text())
    line = train_lines[6]
    # 8 sequences of 32 tokens per step, the last of each predicts nothing
    assert line["tokens"] == 8 * 31 and summary["tokens"] == 6 * 8 * 31
    # top-3 of 8 experts: the busiest can have every token, 8/3 of the mean
    assert 1 <= line["copies_per_token"] <= 3 and 1 <= line["load_max_over_mean"] <= 8 / 3 + 1e-9
    assert 0 < line["bytes_remote"] < line["bytes_remote_alltoall"]
    assert summary["bytes_remote"] == sum(r["bytes_remote"] for r in train_lines.values())
    layers = records(reference, "layers")[6]
    assert [sum(load) for load in layers["load"]] == [8 * 32 * 3] * 2
    rows = torch.tensor(layers["traffic_rows"])
    assert rows.shape == (2, 2) and int(rows.sum() - rows.diagonal().sum()) == line["rows_remote"]
    # Experts in order, four on each rank.
    assert layers["rank_load"] == torch.tensor(layers["load"]).view(2, 2, 4).sum((0, 2)).tolist()
    assert max(layers["rank_ms"]["experts"]) == line["ms"]["experts"]["total"] and min(layers["rank_ms"]["experts"]) > 0
    assert len(layers["rank_ms"]["rides"]) == 2 and min(layers["rank_ms"]["rides"]) > 0
    assert line["router_entropy"] <= math.log(3) + 1e-6
    assert "; not nvlink: " in info["decisions"]["transport"]["why"]
    assert info["transport"]["buffer_bytes"] == summary["buffer_bytes"] == 0
    assert info["model"]["architecture"] == "OlmoeForCausalLM" and info["exact"] and info["parallelism"]["ep_size"] == 2
    assert summary["compare"]["transport"] == "alltoall" and summary["compare"]["repetitions"] == 5
    probes = [json.loads(x) for x in (reference / "metrics.jsonl").read_text().splitlines() if '"probe"' in x]
    moved = {probe["transport"]: probe["bytes_remote"] for probe in probes}
    assert moved["dedup"] < moved["alltoall"]
    assert list((reference / "tensorboard").glob("events*"))
    assert two_ranks(os.getenv, "TENSORBOARD_LOGGING_DIR") == [None] * 2, "the next run has a folder of its own"
    assert set(records(reference, "sample")) == {0, 3, 6}
    assert "EXACT" in write_report(reference).read_text()


def test_resumes_as_if_nothing_had_happened(two_ranks: Ranks, reference: Path, text: list[str], tmp_path: Path) -> None:
    output = tmp_path / "resumed"
    assert start_two(two_ranks, output, [*text, "training.stop_at_step=3"]) == [""] * 2
    with (output / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "step": 4, "lo')  # what a killed writer leaves
    assert start_two(two_ranks, output, [*text, "training.resume_from_checkpoint=last"]) == [""] * 2
    assert losses(output) == losses(reference)
    assert same_weights(output, reference, 6)
    assert json.loads((output / "summary.json").read_text())["tokens"] == 6 * 8 * 31
    assert [entry["from_step"] for entry in json.loads((output / "run.json").read_text())["history"]] == [0, 3]


def _said(output: str, overrides: Sequence[str]) -> str:
    """On a rank: train, and give back what it prints."""
    with redirect_stdout(StringIO()) as out:
        assert run(output, overrides) == ""
    return out.getvalue()


def test_a_resumed_run_with_other_batches_says_so(two_ranks: Ranks, text: list[str], tmp_path: Path) -> None:
    again = ["training.resume_from_checkpoint=last"]
    accumulate = ["training.gradient_accumulation_steps=2"]
    for step, more in enumerate(([], again, [*again, *accumulate]), start=1):
        settings = [*TWO, *text, *more, f"training.stop_at_step={step}"]
        said, _ = two_ranks(_said, str(tmp_path), settings)
        assert ("a step takes 16 sequences, and took 8: " in said) == (step == 3), said


def test_masters_and_rounded_moments_resume_bit_by_bit(
    two_ranks: Ranks, reference: Path, text: list[str], tmp_path: Path
) -> None:
    """bfloat16 weights learn almost as float32's do; random roundings and low bits come back."""
    settings = [*text, "model.dtype=bfloat16", "training.optimizer_state_dtype=bfloat16"]
    assert start_two(two_ranks, tmp_path / "whole", settings) == [""] * 2
    goes_on(two_ranks, tmp_path / "whole", tmp_path / "parts", [*TWO, *settings], 3)
    kept = weights(tmp_path / "whole", 6)
    assert any(name.endswith("low_bits") and value.any() for name, value in kept.items())
    info = json.loads((tmp_path / "whole" / "run.json").read_text())
    assert info["optimizer"] == {"name": "one-pass", "masters": True, "moments": "bfloat16", "state": "device"}
    assert info["lossy_reasons"] == ["the optimizer's moments are kept in bfloat16"]
    ours, exact = losses(tmp_path / "whole"), losses(reference)
    assert [loss for loss, _ in ours.values()] == pytest.approx([loss for loss, _ in exact.values()], rel=0.02)


WAYS = ["ep_size=2", "alltoall", "permuted", "checkpointing", "rides first", "chunks", "offload"]
# Ways that do not get in each other's way, several in one run.
TOGETHER = [
    "ep_size=2 and alltoall and checkpointing",
    "permuted and rides first and offload",
    "accumulate",
    "chunks and cp",
]


@pytest.mark.parametrize("other", [*TOGETHER, *(pytest.param(way, marks=pytest.mark.slow) for way in WAYS)])
def test_another_way_to_compute_it_gives_the_same_losses(
    ranks: Ranks, reference: Path, text: list[str], tmp_path: Path, other: str
) -> None:
    permuted = ExpertLayout.permuted([3, 6, 0, 5, 1, 7, 2, 4], 4), ExpertLayout.permuted([5, 4, 7, 6, 1, 0, 2, 3], 4)
    layers = [f"model.layers.{i}.mlp.experts" for i in range(2)]
    Layouts(dict(zip(layers, permuted, strict=True))).save(tmp_path / "layout.json")
    ways = other.split(" and ")
    changes = {
        "ep_size=2": ["parallelism.ep_size=2"],
        "alltoall": ["moe.transport=alltoall"],
        "permuted": [f"moe.layout={tmp_path}/layout.json"],
        "accumulate": ["training.per_device_train_batch_size=1", "training.gradient_accumulation_steps=2"],
        "checkpointing": ["memory.layer_activations=recompute", "memory.expert_activations=offload"],
        "rides first": ["moe.priority=true"],
        "offload": [
            "memory.layer_activations=offload",
            "memory.expert_inputs=offload",
            "memory.expert_activations=offload",
        ],
        "chunks": ["moe.schedule=chunks", "moe.chunks=3", "moe.backward_chunks=2"],
        # Ranks that share sequences sample and evaluate as those with whole ones do.
        "cp": ["parallelism.cp_size=2", "training.per_device_train_batch_size=4", *EVERYTHING[:2]],
    }
    change = [setting for way in ways for setting in changes[way]]
    output = tmp_path / "other"
    # From the reference's checkpoint, so that resuming on more ranks, another mesh and layout is tested as well.
    resume = f"training.resume_from_checkpoint={reference}/checkpoints/step-00000003"
    assert start(ranks, output, [*text, resume, *change]) == [""] * 4
    # The balance loss of a micro-batch is not that of the whole batch, and it is a part of what is minimised.
    tolerance = 1e-3 if "accumulate" in ways else 2e-5
    for step in (4, 5, 6):
        assert losses(output)[step] == pytest.approx(losses(reference)[step], rel=tolerance), step
    for step, line in records(output, "eval").items():
        assert line["loss"] == pytest.approx(records(reference, "eval")[step]["loss"], rel=tolerance), step
    for step, line in records(output, "sample").items():
        assert line["text"] == records(reference, "sample")[step]["text"]
    if "accumulate" not in ways:
        first, second = weights(reference, 6), weights(output, 6)
        for name in first:
            if name.startswith("model/"):
                torch.testing.assert_close(second[name], first[name], rtol=0, atol=2e-4, msg=name)


def test_fp8_experts_learn_almost_the_same(two_ranks: Ranks, reference: Path, text: list[str], tmp_path: Path) -> None:
    assert start_two(two_ranks, tmp_path / "fp8", [*text, "moe.experts=fp8"]) == [""] * 2
    assert json.loads((tmp_path / "fp8" / "run.json").read_text())["lossy_reasons"] == ["experts compute in FP8"]
    exact, lossy = losses(reference), losses(tmp_path / "fp8")
    assert all(lossy[step][0] != exact[step][0] for step in exact)
    assert [loss for loss, _ in lossy.values()] == pytest.approx([loss for loss, _ in exact.values()], rel=0.02)


def test_stops_when_the_loss_is_no_number(two_ranks: Ranks, text: list[str], tmp_path: Path) -> None:
    output = tmp_path / "nan"
    change = ["learning_rate=1e30", "warmup_steps=0", "save_steps=1", "eval_steps=none"]
    errors = start_two(two_ranks, output, [*text, *(f"training.{one}" for one in change)])
    assert len(set(errors)) == 1 and errors[0].startswith("NonFiniteError: step 2: loss")
    assert "model." in errors[0] and "checkpoints/step-00000001" in errors[0]
    assert (output / "checkpoints" / "step-00000001").is_dir()
    last = json.loads((output / "metrics.jsonl").read_text().splitlines()[-1])
    assert (last["kind"], last["step"]) == ("stopped", 2) and errors[0].endswith(last["why"])
    run = read_run(output)
    states = {check.name: check.state for check in checks_of(run, summarise(run))}
    assert states["Ended"] == states["Finite"] == "bad", "the page shows no green mark for numbers that ended the run"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["parallelism.ep_size=3"], "parallelism.ep_size = 3 is larger than the number of ranks, 2"),
        (["training.resume_from_checkpoint=last"], "holds no checkpoint that can be read"),
        (["training.per_device_train_batch_size=100000"], "per_device_train_batch_size"),
    ],
)
def test_bad_input_is_refused_before_any_work(
    two_ranks: Ranks, text: list[str], tmp_path: Path, change: list[str], message: str
) -> None:
    errors = start_two(two_ranks, tmp_path / "run", [*text, *change])
    assert all(error.startswith("ValueError: ") and message in error for error in errors), errors
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_a_run_that_was_killed_at_its_end_is_finished(
    two_ranks: Ranks, reference: Path, text: list[str], tmp_path: Path
) -> None:
    """After its last checkpoint, while it wrote the model."""
    output = tmp_path / "run"
    shutil.copytree(reference, output)
    before = json.loads((output / "summary.json").read_text())
    (output / "summary.json").unlink()
    (output / "model").rename(output / ".tmp-model-0123abcd")
    settings = [*text, "training.save_pretrained=true", "training.resume_from_checkpoint=last"]
    assert start_two(two_ranks, output, settings) == [""] * 2
    assert json.loads((output / "summary.json").read_text()) == before | {"compare": None}
    weights = "model.safetensors"
    assert (output / "model" / weights).read_bytes() == (reference / "model" / weights).read_bytes()
    assert not list(output.glob(".tmp-*"))
    assert all("at step 6 already" in one and "nothing to do" in one for one in start_two(two_ranks, output, settings))


def test_a_damaged_checkpoint_names_the_one_before(
    two_ranks: Ranks, reference: Path, text: list[str], tmp_path: Path
) -> None:
    output = tmp_path / "run"
    shutil.copytree(reference, output)
    checkpoints = output / "checkpoints"
    (shard,) = (checkpoints / "step-00000006" / "model").glob("shard-00002-*")
    content = bytearray(shard.read_bytes())
    content[-5] ^= 1
    shard.write_bytes(content)
    settings = [*text, "training.max_steps=7", "training.resume_from_checkpoint=last"]
    errors = start_two(two_ranks, output, settings)
    assert len(set(errors)) == 1 and f"{shard} is damaged (wrong checksum)" in errors[0]
    assert f"The one before is training.resume_from_checkpoint={checkpoints / 'step-00000003'}" in errors[0]


def _without_a_look(output: str, overrides: Sequence[str]) -> str:
    with mock.patch("carpool.train.plan.start_checks.check_idle"):
        return run(output, overrides)


def test_of_two_runs_that_begin_at_the_same_time_one_is_refused(
    two_ranks: Ranks, reference: Path, text: list[str], tmp_path: Path
) -> None:
    """On all of its ranks. Both have seen nobody there."""
    output = tmp_path / "run"
    shutil.copytree(reference, output)
    settings = [*TWO, *text, "training.max_steps=7", "training.resume_from_checkpoint=last"]
    with (output / "metrics.jsonl").open("rb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        for said in two_ranks(_without_a_look, str(output), settings):
            assert f"another run has just begun to write into {output}" in said


def _unlike(output: str, overrides: Sequence[str]) -> str:
    return run(output, [*overrides, "training.seed=7", "model.config.num_experts=4"] if dist.get_rank() else overrides)


def test_ranks_with_other_settings_are_refused(two_ranks: Ranks, text: list[str], tmp_path: Path) -> None:
    for said in two_ranks(_unlike, str(tmp_path / "run"), [*TWO, *text]):
        assert said.startswith("ValueError: rank 1 was started with other settings than rank 0: "), said
        assert "training.seed = 7, not 0" in said and "model.config.num_experts = 4, not 8" in said
    assert not (tmp_path / "run").exists()


def _tokenize_slowly(output: str, overrides: Sequence[str]) -> str:
    """A collective may take a second, and tokens two. `RuntimeError` leaves the group unusable."""
    group = dist.distributed_c10d._get_default_group()
    build = corpora._build

    def slowly(*args: Any) -> None:
        time.sleep(2)
        build(*args)

    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=1), group)
    try:
        with mock.patch.object(corpora, "_build", slowly), mock.patch.dict(os.environ, LOCAL_RANK=str(dist.get_rank())):
            return run(output, overrides)
    finally:
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=600), group)


def test_tokenizing_may_take_longer_than_a_collective(two_ranks: Ranks, text: list[str], tmp_path: Path) -> None:
    settings = [
        *TWO, *text, f"data.cache_dir={tmp_path}/cache", "training.stop_at_step=1", "training.eval_on_start=false",
    ]  # fmt: skip
    assert two_ranks(_tokenize_slowly, str(tmp_path / "run"), settings) == [""] * 2


def test_a_run_is_not_overwritten(two_ranks: Ranks, reference: Path, text: list[str]) -> None:
    before = (reference / "metrics.jsonl").read_bytes()
    errors = start_two(two_ranks, reference, text)
    assert all("already holds a run" in error for error in errors)
    assert (reference / "metrics.jsonl").read_bytes() == before


def _starts(folder: str) -> list[Any] | str:
    """Of a folder that each rank sees in another state, as if rank 0 were writing it."""
    try:
        return _earlier_starts(Path(folder, str(dist.get_rank())))
    except ValueError as error:
        return str(error)


def test_a_folder_that_can_be_written_to_is_left_as_it_was(tmp_path: Path) -> None:
    assert why_not_writable(tmp_path / "a" / "b") is None and why_not_writable(tmp_path) is None
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("")
    assert why_not_writable(tmp_path / "file" / "run") == "nothing can be written to it (Not a directory)"


def test_rank_0_alone_reads_what_it_will_replace(two_ranks: Ranks, tmp_path: Path) -> None:
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
        (tmp_path / str(rank) / "run.json").write_text("")
    history = [{"started": "2026-01-01", "from_step": 0}]
    (tmp_path / "0" / "run.json").write_text(json.dumps({"history": history}))
    assert two_ranks(_starts, str(tmp_path)) == [history] * 2
    (tmp_path / "0" / "run.json").write_text(json.dumps({"history": {"started": 1}}))
    for message in two_ranks(_starts, str(tmp_path)):
        assert message.startswith(f"{tmp_path}/0/run.json is damaged (its history is no list of starts)")


def _resume_of_what_each_sees(output: str, overrides: Sequence[str]) -> str:
    """Train on, other ranks than 0 not seeing the newest checkpoint yet, as on a filesystem of several nodes."""
    seen = CheckpointManager.list
    with mock.patch.object(CheckpointManager, "list", lambda self: seen(self)[: None if dist.get_rank() == 0 else 1]):
        return run(output, overrides)


def test_all_ranks_go_on_from_the_same_checkpoint(
    two_ranks: Ranks, reference: Path, text: list[str], tmp_path: Path
) -> None:
    shutil.copytree(reference, output := tmp_path / "run")
    settings = [
        *TWO, *text, "training.resume_from_checkpoint=last", "training.max_steps=7", "training.eval_steps=none",
    ]  # fmt: skip
    assert two_ranks(_resume_of_what_each_sees, str(output), settings) == [""] * 2
    assert json.loads((output / "run.json").read_text())["history"][-1]["from_step"] == 6


def test_generates_from_the_newest_checkpoint(reference: Path) -> None:
    model, tokenizer, _ = load_run(reference)
    want = sample(model, tokenizer, "def f", max_new_tokens=12, temperature=0)
    command = ["generate", str(reference), "--prompt", "def f", "--max-new-tokens", "12", "--temperature", "0"]
    result = CliRunner().invoke(cli.app, command)
    assert result.exit_code == 0 and result.stdout == f"{want}\n" and want.startswith("def f")
    with pytest.raises(ValueError, match="is not a run directory"):
        load_run(reference / "checkpoints")
