"""What would stop a run is said before there are ranks, by the run and by its dry run alike; what a dry run predicts;
and what Carpool does not read is named in one line."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import sys
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import OlmoeConfig, OlmoeForCausalLM, TrainingArguments
from typer.testing import CliRunner

from carpool import cli
from carpool.layout.topology import Topology
from carpool.planner.candidate import FSDP
from carpool.train.checkpoints.checkpoint_files import CheckpointError
from carpool.train.checkpoints.manager import CheckpointManager
from carpool.train.checkpoints.reading import check_model
from carpool.train.config import Config, load, load_config, resolve_config
from carpool.train.config.schema import keys
from carpool.train.launch.start import look_ahead, said_if_slow
from carpool.train.launch.worker import find_entry
from carpool.train.plan.dry_run import dry_run
from carpool.train.plan.start_checks import check_run
from carpool.train.records.metrics_writer import Recorder
from carpool.transport.nodes import why_not_several
from tests.train.test_cli import carpool_command, error_of

REFUSED = [
    ("model.config.hiden_size=4", "the configuration of olmoe has no key 'hiden_size'"),
    ("model.config.hidden_act=sillu", "no activation of Transformers; did you mean 'silu'"),
    ("model.config.attention_dropout=3", "attention_dropout = 3 in the olmoe configuration must be at least 0 and"),
    ("model.attn_implementation=flex_attention", "model.attn_implementation = 'flex_attention': OlmoeForCausalLM"),
    ("model.attn_implementation=flex_atention", "'flex_atention'"),
    ("model.config.vocab_size=300", "vocab_size = 300 is smaller than the tokenizer's vocabulary of 320"),
    ("model.experts_implementation=loop", "model.experts_implementation = 'loop': "),
    ("training.report_to=tensorbord", "training.report_to names tensorbord, which transformers does not know"),
    ("training.cuda_graphs=on", "training.cuda_graphs = 'on', but steps cannot be captured: there is no GPU"),
    ("training.resume_from_checkpoint={0}", "{0} is not a Carpool checkpoint"),
    ("moe.layout={0}/file", "{0}/file is not an expert layout"),
    ("moe.transport=nvlink", "transport 'nvlink' cannot be used here"),
    ("moe.transport=hierarchical", "transport 'hierarchical' cannot be used here: by the settings all 4 ranks of the"),
    (
        "moe.transport=local",
        "transport 'local' cannot be used here: its rows stay where they are, and experts are",
    ),
    ("moe.schedule=two-batch training.per_device_train_batch_size=1", "moe.schedule = 'two-batch' cuts each rank's"),
    ("moe.bias_update_rate=0.1", "OlmoeForCausalLM has no bias per expert"),
    ("moe.balance_batch=global model.config.router_aux_loss_coef=0.0", "balance_batch = 'global' changes nothing"),
    ("moe.random_second=true", "random_second drops second choices of two, but a token has 4"),
    ("parallelism.etp_size=2 model.config.intermediate_size=33", "a hidden dimension of 33, which 2 slices do not"),
    (
        "moe.layout={0}/mixed.json memory.experts=host training.optimizer_in_backward=true training.max_grad_norm=0",
        'memory.experts = "host": experts that are loaded layer by layer cannot move between ranks',
    ),
    (
        "moe.layout={0}/mixed.json training.optimizer_offload=host",
        'training.optimizer_offload = "host" cannot be used with',
    ),
    (
        "moe.transport=hierarchical moe.transport_options.capacity=8 parallelism.ranks_per_node=2",
        "the capacity=8 of transport hierarchical is of a hop of fixed size, and first_hop='auto'",
    ),
    (
        "moe.transport=hierarchical moe.transport_options.node_rows=0.0 parallelism.ranks_per_node=2",
        "the node_rows=0.0 of transport hierarchical must be a positive number",
    ),
]


@pytest.mark.parametrize(("setting", "message"), REFUSED)
def test_the_run_and_its_dry_run_refuse_the_same(tmp_path: Path, setting: str, message: str) -> None:
    (tmp_path / "file").touch()
    homes = [[rank, *range(4 + 3 * rank, 7 + 3 * rank)] for rank in range(4)]
    (tmp_path / "mixed.json").write_text(json.dumps({"homes": homes}))
    settings = ["parallelism.device=cpu", f"training.output_dir={tmp_path / 'new'}", *setting.format(tmp_path).split()]
    found = resolve_config(None, settings)
    for ask in (
        lambda: check_run(found.config, found.fixed),
        lambda: dry_run(found.config, found.sources),
    ):
        with pytest.raises(ValueError) as refused:
            ask()
        assert message.format(tmp_path) in str(refused.value)
    assert not (tmp_path / "new").exists()


def test_the_command_looks_ahead_before_it_reads_data(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    @contextlib.contextmanager
    def here(config: Config, entry: str, *, debug: bool, **kwargs: Any) -> Iterator[None]:
        yield
        find_entry(entry)(config, **kwargs)

    command = sys.modules["carpool.cli.train"]
    monkeypatch.setattr(command, "look_ahead", here)
    monkeypatch.setattr(command, "read_data", pytest.fail)
    settings = ["model.config.hidden_size=33", "parallelism.device=cpu", f"training.output_dir={tmp_path}"]
    found = CliRunner(env={"COLUMNS": "1000"}).invoke(cli.app, ["train", *settings])
    assert found.exit_code == 1
    assert found.stderr.startswith("error: hidden_size = 33 in the olmoe configuration is no multiple")


@pytest.mark.parametrize(
    ("entry", "message"),
    [("refuse", "rank 0: no\nsecond line"), ("open_nothing", "/no/such/file: No such file or directory")],
)
def test_looking_ahead_brings_the_error_back(entry: str, message: str) -> None:
    with pytest.raises(ValueError) as refused, look_ahead(Config(), f"tests.train.ahead_entries:{entry}", rank=0):
        pass
    assert str(refused.value) == message


def test_what_ends_a_look_ahead(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with look_ahead(Config(), "tests.train.ahead_entries:fail", rank=0):
        pass
    with pytest.raises(KeyError), look_ahead(Config(), "tests.train.ahead_entries:sleep_long", rank=0):
        raise KeyError
    monkeypatch.setattr("carpool.train.launch.start._LIMIT_SECONDS", 0.2)
    with look_ahead(Config(), "tests.train.ahead_entries:sleep_long", rank=0):
        pass
    assert "did not answer for 0 s, and was ended; ranks start" in capsys.readouterr().err


def test_a_folder_is_one_run_s_at_a_time(tmp_path: Path) -> None:
    settings = [f"training.output_dir={tmp_path}", "training.resume_from_checkpoint=last", "parallelism.device=cpu"]
    found = resolve_config(None, settings)
    running = Recorder(tmp_path, True, [], {}, 1)
    with pytest.raises(ValueError, match=r"a run is writing into .* now: wait until it has ended"):
        check_run(found.config, found.fixed)
    with pytest.raises(ValueError, match="another run has just begun"):
        Recorder(tmp_path, True, [], {}, 1)
    running.close()
    with pytest.raises(ValueError, match="holds no checkpoint that can be read"):
        check_run(found.config, found.fixed)


def test_a_checkpoint_of_another_model_is_told_by_names_and_shapes(tmp_path: Path) -> None:
    def tiny(**sizes: int) -> OlmoeForCausalLM:
        sizes = {"hidden_size": 32, "num_hidden_layers": 2} | sizes
        heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
        return OlmoeForCausalLM(OlmoeConfig(vocab_size=64, intermediate_size=16, num_experts=4, **sizes, **heads))

    model = tiny()
    saved = CheckpointManager(tmp_path).save(1, model, torch.optim.AdamW(model.parameters()), {}).path
    check_model(saved, tiny())
    with pytest.raises(CheckpointError, match=r"lacks model\.layers\.2\..* and 8 more; was the model's config"):
        check_model(saved, tiny(num_hidden_layers=3))
    with pytest.raises(CheckpointError, match="of another model, which also has"):
        check_model(saved, tiny(num_hidden_layers=1))
    with pytest.raises(CheckpointError, match=r"has shape \(64, 32\) in the checkpoint"):
        check_model(saved, tiny(hidden_size=64))


DEEP = "[" * 5000 + "]" * 5000
OURS = {f"{section}.{key}" for section, _, key in keys()}
THEIRS = tomllib.loads(Path(load.__file__).with_name("training_arguments.toml").read_text())


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(TrainingArguments)])
def test_names_of_training_arguments_are_answered(name: str) -> None:
    if f"training.{name}" in OURS:
        assert name not in THEIRS
        return
    said = THEIRS[name]
    for given in (f"training.{name}=1", f"{name}=1"):
        with pytest.raises(ValueError) as refused:
            load_config(None, [given])
        assert said in str(refused.value) and "did you mean" not in str(refused.value)


def test_what_stands_for_training_arguments_exists() -> None:
    for name, said in THEIRS.items():
        assert f"training.{name}" not in OURS
        mentioned = re.findall(r"\b(?:model|data|training|parallelism|moe|memory)\.[a-z_0-9]+", said)
        assert set(mentioned) <= OURS and (" " in said or mentioned == [said]), (name, said)
    message = error_of("train", "training.label_smoothing_factor=0.1")
    assert "Carpool has no label_smoothing_factor: the loss is cross-entropy" in message


@pytest.mark.parametrize("kind", ["endless", "pipe", "large", "deep"])
def test_a_configuration_that_cannot_be_read_is_refused_at_once(tmp_path: Path, kind: str) -> None:
    file = Path("/dev/zero") if kind == "endless" else tmp_path / "settings.toml"
    if kind == "pipe":
        os.mkfifo(file)
    elif kind == "large":
        with file.open("wb") as out:
            out.truncate(2 << 30)
    elif kind == "deep":
        file.write_text(f"[training]\nseed = {DEEP}\n")
    said = {
        "endless": "a device",
        "pipe": "is a pipe",
        "large": "more than 1,048,576 bytes",
        "deep": "nested too deeply",
    }
    begin = time.monotonic()
    with pytest.raises(ValueError, match=f"{re.escape(str(file))} .*{said[kind]}"):
        load_config(file)
    assert time.monotonic() - begin < 5


def test_deep_values_and_files_of_models_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"the value of training\.seed is not read: .* nested too deeply"):
        load_config(None, [f"training.seed={DEEP}"])
    file = tmp_path / "config.json"
    file.write_text(f'{{"model_type": {DEEP}}}')
    for setting in (f"model.config={file}", f"model.path={tmp_path}", f"moe.layout={file}"):
        message = error_of("train", "--dry-run", setting)
        assert str(tmp_path) in message and "recursion" in message, message


@pytest.mark.parametrize("key", ["training.output_dir", "training.resume_from_checkpoint", "model.path"])
def test_a_path_is_not_empty(key: str) -> None:
    assert f"{key} = '' (on the command line): expected text that is not empty" in error_of("train", f'{key}=""')


def test_errors_are_safe_to_print_and_said_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "settings.toml"
    file.write_text("a = 1 \x1b[31m")
    for given in (["training.\x1b[31mx=3"], ["\x1b[31mx=3"], ["--config", str(file)], ["--config", "\x1b[31mx.toml"]):
        message = error_of("train", *given)
        assert "\x1b" not in message and r"\x1b[31m" in message
    message = error_of("train", "--dry-run", "training.report_to=mlflow")
    assert "training.report_to names mlflow, which is not installed: pip install mlflow" in message
    assert "Exception ignored" not in capfd.readouterr().err
    said = why_not_several(Topology.even(4))
    assert said is not None and "carpool.transport.set_topology" in said and "ep_size" not in said


def test_who_waits_is_told_why(capsys: pytest.CaptureFixture[str]) -> None:
    with said_if_slow(10):
        pass
    assert capsys.readouterr().err == ""
    with said_if_slow(0.01):
        time.sleep(0.3)
    assert "layer by layer; thousands of layers take minutes" in capsys.readouterr().err


LARGE = ["model.config=olmoe-1b-7b", "data.tokenizer=bytes", "parallelism.num_ranks=1", "--gpu", "h100"]


def test_a_run_that_does_not_fit_ends_with_an_error() -> None:
    shown = carpool_command("train", "--dry-run", *LARGE)
    assert shown.exit_code == 1 and "# does not fit in 79 GiB: " in shown.stdout
    assert shown.stderr.startswith("error: this run does not fit in 79 GiB: ") and "stands above" in shown.stderr
    assert carpool_command("train", "--dry-run", *LARGE, "training.check_memory=false").exit_code == 0


def test_data_of_less_than_a_step_is_refused_before_a_run(tmp_path: Path) -> None:
    file = tmp_path / "little.txt"
    file.write_text("three short sequences\n" * 40)
    asked = [f"data.train={file}", "data.eval_fraction=0", "data.sequence_length=256", "parallelism.device=cpu"]
    asked += ["training.gradient_accumulation_steps=32", "training.per_device_train_batch_size=1"]
    asked += [f"training.output_dir={tmp_path}/run", "parallelism.num_ranks=4"]
    message = r"881 tokens, 3 sequences of data.sequence_length = 256, but one step takes 128 sequences"
    for look in (dry_run, lambda config: check_run(config, [])):
        with pytest.raises(ValueError, match=message):
            look(load_config(None, asked))
    assert not (tmp_path / "run").exists()
    assert "one step takes 128 sequences" in error_of("train", "--dry-run", *asked)
    assert "fits in" in dry_run(
        load_config(None, [*asked, "parallelism.num_ranks=1", "training.gradient_accumulation_steps=3"])
    )


def test_what_was_sized_and_what_is_not_counted_is_said() -> None:
    settings = ["training.per_device_train_batch_size=3", "training.gradient_accumulation_steps=5"]
    shown = dry_run(load_config(None, [*settings, "parallelism.num_ranks=4"]), gpu="h100")
    assert "# 60 sequences per step: 4 data-parallel ranks x 5 micro-batches x 3\n" in shown
    assert "# predicted memory of one rank, which computes 3 sequences at a time:\n" in shown
    text = dry_run(load_config(None, ["parallelism.num_ranks=20", "parallelism.ep_size=4"]), gpu="h100")
    assert "fits in 79 GiB" in text and "# time of a step: " in text
    text = dry_run(load_config(None, ["parallelism.device=cpu", "parallelism.num_ranks=1"]))
    assert "\n# 1 rank: " in text and "per step: 1 data-parallel rank x 1 micro-batch x " in text
    assert "not counted: libraries loaded before the run" in text and "time of a step: not predicted" in text


@pytest.mark.parametrize(
    "settings",
    [[], ["parallelism.ep_size=4"], ["parallelism.dp_replicate_size=2"]],
    ids=["casts", "efsdp", "hsdp"],
)
def test_steps_are_graphs_unless_fsdp_gathers(settings: list[str]) -> None:
    for data_parallel, graphs in (("fsdp", f"none, because {FSDP}\n"), ("zero1", "forward and backward\n")):
        settings = ["model.dtype=bfloat16", "parallelism.num_ranks=8", *settings]
        shown = dry_run(load_config(None, [*settings, f"parallelism.data_parallel={data_parallel}"]), gpu="h100")
        assert f"# CUDA graphs: {graphs}" in shown and f"# data parallelism: {data_parallel}" in shown


DEMO_SHAPE = [
    "parallelism.device=cpu", "parallelism.num_ranks=2", "data.sequence_length=256", "model.config.num_experts=16",
    "model.config.num_hidden_layers=2", "model.config.num_attention_heads=4", "model.config.num_key_value_heads=4",
    "model.config.num_experts_per_tok=4", "model.model_type=olmoe",
]  # fmt: skip
UNEVEN = [
    "parallelism.num_ranks=3", "parallelism.ep_size=3", "model.config.num_experts=16", "training.freeze=non_expert",
    "training.optimizer_in_backward=true", "training.max_grad_norm=0",
]  # fmt: skip


def predicted(*settings: str) -> dict[str, float]:
    return sizes(dry_run(load_config(None, [*DEMO_SHAPE, *settings])))


def sizes(text: str) -> dict[str, float]:
    """MiB of one rank, by component."""
    return {name: float(size.replace(",", "")) for name, size in re.findall(r"#   (\w+) +([\d,.]+) MiB", text)}


@pytest.mark.parametrize(
    ("hidden", "batch", "measured"), [(128, 2, 96.5), (128, 16, 359.5), (512, 2, 512.8)], ids=["small", "long", "wide"]
)
def test_a_rank_on_a_cpu_takes_about_what_is_predicted(hidden: int, batch: int, measured: float) -> None:
    """Measured: the peak of four steps' resident set beyond the libraries, 2 ranks, 2 cores."""
    sizes = [f"model.config.{key}={hidden}" for key in ("hidden_size", "intermediate_size")]
    found = predicted(*sizes, f"training.per_device_train_batch_size={batch}")
    assert found["total"] == pytest.approx(measured, rel=0.2)
    assert found["total"] == pytest.approx(sum(size for name, size in found.items() if name != "total"), abs=1)


def test_two_micro_batches_at_a_time_take_the_memory_of_both() -> None:
    one = predicted("training.gradient_accumulation_steps=2")
    two = predicted("training.gradient_accumulation_steps=2", "moe.schedule=two-batch")
    halves = predicted("moe.schedule=two-batch")
    assert 1.4 * one["activations"] < two["activations"] < 2 * one["activations"]
    assert halves["activations"] == predicted()["activations"]


def test_it_refuses_what_the_run_would_refuse() -> None:
    speeds = ["parallelism.rank_speeds=[1.0, 0.4]", "training.per_device_train_batch_size=2"]
    with pytest.raises(ValueError, match=r"cuts each rank's only micro-batch in two, but by parallelism.rank_speeds"):
        predicted(*speeds, "moe.schedule=two-batch")
    with pytest.raises(ValueError, match=r"parallelism.ep_size = 3 does not divide the experts"):
        dry_run(load_config(None, ["memory.experts=host", *UNEVEN]), gpu="h100")


def test_ranks_that_share_sequences_divide_tokens(text: list[str], tmp_path: Path) -> None:
    (tmp_path / "long.txt").write_text("def f(x): return x\n" * 60_000)
    settings = [*DEMO_SHAPE[2:], *text, f"data.train={tmp_path}/long.txt", "data.sequence_length=4096"]
    settings += ["parallelism.num_ranks=8"]
    shared, whole = (dry_run(load_config(None, [*settings, f"parallelism.cp_size={cp}"]), gpu="h100") for cp in (4, 1))
    assert "each rank has 1/4 of every sequence, attention by ulysses" in shared
    assert "fsdp 2 x tp 1, experts ep 8 x efsdp 1, replicas 1, cp 4" in shared
    assert sizes(whole)["activations"] / 4.2 < sizes(shared)["activations"] < sizes(whole)["activations"] / 3.8
    with pytest.raises(ValueError, match=r"4096 or 4100 can"):
        dry_run(load_config(None, [*settings, "parallelism.cp_size=4", "data.sequence_length=4098"]), gpu="h100")
