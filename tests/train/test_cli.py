"""The command line: help that is complete, and errors that are one line."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

import carpool
from carpool import cli
from carpool.cli import doctor_checks as doctor
from carpool.train.config import describe
from carpool.train.config.load import searched_words
from carpool.train.launch.failure import Interrupted, RankFailure

ROOT = Path(__file__).parents[2]


def carpool_command(*args: str) -> Result:
    # Wide, because messages are wrapped to the terminal's width where they are tables.
    return CliRunner(env={"COLUMNS": "1000", "TERMINAL_WIDTH": "1000", "NO_COLOR": "1"}).invoke(cli.app, list(args))


def error_of(*args: str) -> str:
    result = carpool_command(*args)
    assert result.exit_code == 1, result.output
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    return result.stderr


def test_help_is_complete():
    result = carpool_command("--version")
    assert (result.exit_code, result.stdout) == (0, f"carpool {carpool.__version__}\n")
    for group, commands in (((), cli.app), (("bench",), cli.bench), (("recipes",), cli.recipes)):
        shown = carpool_command(*group, "--help").stdout
        for command in commands.registered_commands:
            name = command.name or command.callback.__name__
            assert re.search(rf"\b{name}\b", shown), name
            assert carpool_command(*group, name, "--help").exit_code == 0
    shown = carpool_command("train", "--help-config").stdout
    for name, _, default, description in describe():
        assert f"{name} = {default}" in shown
        assert description in shown


SEARCHED = (
    "muon|adamw|learning rate|warmup|wsd|cosine|polynomial|inverse_sqrt|min_lr|weight decay|clip|z_loss|z-loss",
    "aux_loss|load balanc|sequence-wise|global-batch|epoch|checkpoint|resume|save_total_limit|eval|wandb|tensorboard",
    "lora|dora|rslora|quantis|nf4|mxfp4|int8|fp8|bf16|packing|streaming|mixture|chat template|completion|tokenizer",
    "seed|determinism|fsdp|zero1|tensor parallel|pipeline|context|ep_size|torch_compile|cuda_graph|offload|recompute",
    "gradient_checkpointing|deepspeed|capacity|router|nvlink|all-to-all|batch size|accumulation|sequence_length|hub",
    "mlflow|trackio|comet|ema|distillation|rank_pattern|alpha_pattern|layers_to_transform|new tokens|loraplus|qlora",
    "dpo|grpo|sft|prompt tuning|pissa|lion|sgd|curriculum|model soup|rope|gguf|profiler|mtp|cpu offload|nvme|ddp",
    "sharegpt|alpaca|interleave|resize embeddings|merge adapters|several adapters|accelerate|unsloth|loss spike",
    "max_steps|freeze|attention|mfu|timeout|logging|neftune|label smoothing|liger|early stopping|best model|ema",
)


@pytest.mark.parametrize("word", [word for line in SEARCHED for word in line.split("|")])
def test_settings_are_found_by_the_words_of_a_user(word: str) -> None:
    shown = carpool_command("train", "--help-config", *word.split())
    answer = rf"^(  \w+\.\w+ = |TrainingArguments\.|{re.escape(word)}: )"
    assert shown.exit_code == 0 and re.search(answer, shown.stdout, re.M), shown.output
    assert shown.stdout.count("\n  ") < 200


def test_answers_to_words_name_settings_that_there_are() -> None:
    known = {name for name, *_ in describe()}
    for words, said in searched_words().items():
        for key in re.findall(r"\b(?:training|data|adapter|moe|memory|parallelism)\.\w+", said):
            assert key in known, key
        for command in re.findall(r"carpool (\w+)", said):
            assert command in {one.name or one.callback.__name__ for one in cli.app.registered_commands}, said
        assert words == words.lower()
    for word in ("teleport", "swa"):  # the latter is in "as warm-up"
        assert error_of("train", "--help-config", word).startswith(f"error: no setting mentions {word}")


def test_errors_of_the_input_are_one_line(tmp_path, monkeypatch):
    file = tmp_path / "my.toml"
    file.write_text("[training]\nmax_step = 3\n")
    expected = f"error: unknown key training.max_step in {file}; did you mean training.max_steps?\n"
    assert error_of("train", "--config", str(file)) == expected
    assert error_of("train", "--config", str(tmp_path / "no.toml")) == (
        f"error: configuration file {tmp_path / 'no.toml'} does not exist\n"
    )
    empty = f"training.output_dir={tmp_path / 'run'}"
    assert error_of("train", empty, "parallelism.num_ranks=2", "parallelism.ep_size=4").startswith(
        "error: parallelism.ep_size = 4 is larger than the number of ranks, 2"
    )
    debug = carpool_command("train", "--debug", "training.max_step=3")
    assert isinstance(debug.exception, ValueError), "with --debug the error itself, hence its traceback"
    assert error_of("report", str(tmp_path)).startswith("error: ")
    assert error_of("generate", str(tmp_path), "--prompt", "def ").startswith("error: ")
    monkeypatch.setenv("RANK", "3")
    assert error_of("train", "training.max_step=3").startswith("error (rank 3): unknown key")


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("data.train={}/no.txt", "data.train: {}/no.txt does not exist"),
        ("data.train=", "data.train has a name that is empty"),
        ("model.path={}", "model.path: {} is no checkpoint folder"),
        (
            "model.path=some/OLMoE-1B",
            "model.path: some/OLMoE-1B is no checkpoint folder (it has no config.json); if that is a name of the "
            "Hugging Face Hub, download it first: hf download some/OLMoE-1B --local-dir DIR",
        ),
        ("distillation.teacher={}", "distillation.teacher: {} is no checkpoint folder"),
        ("model.path={}/run", "model.path: {}/run is no checkpoint folder (it has no config.json); the model of that"),
        ("moe.layout={}/no.json", "moe.layout: the file {}/no.json does not exist"),
        ("training.resume_from_checkpoint={}/no", "training.resume_from_checkpoint: {}/no is no folder"),
        ("data.tokenizer={}", "tokenizer: {}/tokenizer.json does not exist"),
        ("training.output_dir={}/run", "{}/run already holds a run: continue it with"),
        ("training.output_dir={}/file", "training.output_dir = {}/file: nothing can be written to it"),
        ("data.chat_template={}/no.jinja", "data.chat_template: the file {}/no.jinja does not exist"),
        ("parallelism.hardware=H2000", "hardware 'H2000' is not known; did you mean H200?"),
        ("parallelism.num_ranks=100000", "parallelism.num_ranks = 100000 processes take"),
        ("parallelism.ep_size=3", "parallelism.ep_size = 3 must divide"),
        ("--config=lancett", "--config lancett: there is no such file, and no such recipe (did you mean lancet?)"),
    ],
)
def test_paths_are_checked_before_ranks_are_started(monkeypatch, tmp_path, setting, message):
    monkeypatch.setattr("carpool.train.launch.start.run", pytest.fail)
    # A busy machine takes long enough for that to speak.
    monkeypatch.setattr(sys.modules["carpool.cli.train"], "said_if_slow", contextlib.nullcontext)
    (tmp_path / "run" / "model").mkdir(parents=True)
    (tmp_path / "run" / "metrics.jsonl").touch()
    (tmp_path / "file").touch()
    free = [] if "output_dir" in setting else [f"training.output_dir={tmp_path / 'new'}"]
    found = error_of("train", setting.format(tmp_path), *free)
    assert found.startswith(f"error: {message.format(tmp_path)}")
    assert len(found.splitlines()) == 1


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ("export {0}/no --out {0}/new", "there is no folder {0}/no"),
        ("export {0} --out {0}/new", "{0} has no checkpoints; name the folder of a run"),
        ("export {0}/run --out {0}/run", "--out {0}/run: the folder is not empty"),
        ("merge {0}/run --out {0}/file", "--out {0}/file is a file; name a folder"),
        ("generate {0}/run --prompt x --out {0}/no/x", "--out {0}/no/x: there is no folder {0}/no; make it"),
        ("generate {0}/run --prompts {0}/no", "--prompts: there is no file {0}/no"),
        ("eval {0}/run --data {0}/no", "--data: there is no file {0}/no"),
        ("chat {0}", "{0} has neither a config.json"),
        ("trace {0}/run --out {0}/run", "--out {0}/run is a folder: name a file in it"),
        ("place {0}/no --ranks 2 --out {0}/file", "--out {0}/file is a file; name a folder"),
        ("plan --model x --gpus 4 --tokens-per-batch 4K --out {0}/file", "--out {0}/file is a file; name a folder"),
        ("simulate {0}/no --out {0}/file", "--out {0}/file is a file; name a folder"),
        ("simulate {0}/no --out {0}/new --mtbf-hours nan", "--mtbf-hours nan must be a positive number"),
        ("doctor --measure --out {0}/no/x.json", "--out {0}/no/x.json: there is no folder {0}/no; make it"),
    ],
)
def test_what_a_command_reads_and_writes_is_checked_before_its_work(tmp_path, asked, message):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.toml").touch()
    (tmp_path / "run" / "checkpoints").mkdir()
    (tmp_path / "file").touch()
    found = error_of(*asked.format(tmp_path).split())
    assert found.startswith(f"error: {message.format(tmp_path)}")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "run"]


def failing(*, user_error: bool) -> RankFailure:
    text = "what was [wrong]"
    return RankFailure(text, rank=1, pid=5, exit_code=1, user_error=user_error, traceback="Traceback: there")


@pytest.mark.parametrize(
    ("error", "debug", "code", "shown"),
    [
        (failing(user_error=True), False, 1, "error: what was [wrong]\n"),
        (failing(user_error=True), True, 1, "Traceback: there\nerror: what was [wrong]\n"),
        (failing(user_error=False), False, 1, "Traceback: there\nerror: what was [wrong]\n"),
        (Interrupted("stopped by Ctrl-C", 2), False, 130, "error: stopped by Ctrl-C\n"),
        (KeyboardInterrupt(), False, 130, "error: stopped by Ctrl-C\n"),
        (ImportError("needs jinja2"), False, 1, "error: needs jinja2\n"),
        (FloatingPointError("loss is NaN"), False, 1, "error: loss is NaN\n"),
        (RuntimeError("a bug"), False, None, ""),
        (ConnectionResetError("a peer"), False, None, ""),
    ],
)
def test_how_failures_are_shown(monkeypatch, tmp_path, error, debug, code, shown):
    def failed(*args: object, **kwargs: object) -> None:
        raise error

    # What starts the ranks raises these (tests/train/test_launch.py has it raise them for real).
    monkeypatch.setattr("carpool.train.launch.start.run", failed)
    monkeypatch.setattr(sys.modules["carpool.cli.train"], "look_ahead", lambda *_, **__: contextlib.nullcontext())
    monkeypatch.setattr(sys.modules["carpool.cli.train"], "read_data", lambda config: None)
    result = carpool_command("train", f"training.output_dir={tmp_path}", *["--debug"] * debug)
    if code is None:
        assert result.exception is error, "a bug keeps its traceback"
    else:
        assert (result.exit_code, result.stderr) == (code, shown)


def test_the_command_is_installed_and_returns_its_exit_code():
    command = [sys.executable, "-c", "from carpool.cli import main; main()", "train", "x=1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, env=dict(os.environ))
    assert done.returncode == 1
    assert done.stderr.startswith("error: unknown key x on the command line")


def test_an_error_that_keeps_its_traceback_is_not_taken_for_one_of_the_terminal(monkeypatch):
    error = FileNotFoundError(2, "No such file or directory", "there")

    def failed(*args: object) -> None:
        raise error

    left: list[int] = []
    monkeypatch.setattr("carpool.train.config.resolve_config", failed)
    monkeypatch.setattr("os._exit", left.append)
    monkeypatch.setattr("sys.argv", ["carpool", "train", "--debug"])
    with pytest.raises(FileNotFoundError, match="there"):
        cli.main()
    assert not left


@pytest.mark.parametrize(("output", "code"), [(">&-", 0), (">/dev/full", 1)])
def test_output_that_goes_nowhere(output, code):
    command = f"{sys.executable} -c 'from carpool.cli import main; main()' --version {output}"
    done = subprocess.run(["sh", "-c", command], cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == code
    assert done.stderr == ("error: the output cannot be written: No space left on device\n" if code else "")


def test_doctor_finds_this_machine_fit():
    result = carpool_command("doctor")
    assert result.exit_code == 0, result.stdout
    for found in (r"ok +torch +\d", r"ok +transformers +\d", "ok +gloo +available", "two ranks exchanged rows"):
        assert re.search(found, result.stdout), found
    assert "FAIL" not in result.stdout


@pytest.mark.skipif(os.path.exists("/dev/nvidia0"), reason="there is a GPU")
def test_nvlink_needs_gpus(tmp_path):
    check = doctor._nvlink(torch)
    assert (check.color, check.name) == (doctor.YELLOW, "nvlink transport")
    assert check.text == "there is no CUDA device: transport auto uses dedup"
    refused = error_of("train", "--dry-run", "moe.transport=nvlink")
    assert refused == (
        "error: transport 'nvlink' cannot be used here: there is no CUDA device; use 'auto' or 'dedup' (if the run is "
        "meant for GPUs of another machine: --gpu h100, or what they are)\n"
    )
    shown = carpool_command("train", "--dry-run", "nvlink.capacity=0.5").stdout
    assert "# transport dedup: one row per token" in shown and "capacity = 0.5" in shown


def test_doctor_says_what_is_wrong(monkeypatch):
    monkeypatch.setattr(doctor, "_installed", {"torch": "2.3.1", "transformers": None}.get)
    found = {check.name: check for check in doctor._versions()}
    assert (found["torch"].color, found["torch"].text) == (
        doctor.RED,
        "2.3.1, but 2.11 or newer is needed: pip install -U torch",
    )
    assert found["transformers"].color == doctor.RED
    assert found["triton"].color == doctor.YELLOW
    assert "pip install" in found["transformers"].text
    monkeypatch.setattr(doctor, "check_all", lambda: iter(found.values()))
    result = carpool_command("doctor")
    assert result.exit_code == 1
    assert re.search(r"FAIL +torch", result.stdout) and re.search(r"note +triton", result.stdout)


@pytest.mark.skipif(os.path.exists("/dev/nvidia0"), reason="there is a GPU")
def test_doctor_tells_an_exchange_that_fails(monkeypatch):
    check = doctor._exchange("cuda")
    assert check.color == doctor.RED
    assert "PyTorch finds no GPU here" in check.text
    monkeypatch.setattr(doctor, "_EXCHANGE_SECONDS", 0.2)
    assert "within 0.2 s" in doctor._exchange("cpu").text
