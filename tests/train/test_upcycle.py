"""`carpool upcycle`: a dense checkpoint as an MoE that Transformers loads and `carpool train` trains."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, MistralConfig, Olmo2Config, Qwen3Config

from carpool.train.checkpoints import upcycle as upcycling
from tests.ranks import Ranks
from tests.train.test_cli import carpool_command, error_of
from tests.train.test_loop import losses, run

SIZES: dict[str, Any] = {
    "vocab_size": 320, "hidden_size": 32, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.2, "pad_token_id": None,
    "bos_token_id": None, "eos_token_id": 256,
}  # fmt: skip
ROPE = {
    "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
DENSE = {
    "llama": LlamaConfig(**SIZES, tie_word_embeddings=True, rope_parameters=ROPE),
    "mistral": MistralConfig(**SIZES, sliding_window=8),
    "olmo2": Olmo2Config(**SIZES),
    "qwen3": Qwen3Config(**SIZES, head_dim=16, attention_bias=True),
}
COPY = ("--experts", "6", "--top-k", "2")
SPLIT = ("--experts", "8", "--top-k", "4", "--method", "split", "--parts", "2")


def dense_model(folder: Path, family: str, dtype: torch.dtype = torch.float32) -> Path:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(DENSE[family]).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():  # norms and biases would be 1 and 0
            parameter.add_(0.05 * torch.randn_like(parameter))
    model.save_pretrained(folder / family, max_shard_size="80KB")
    (folder / family / "tokenizer.json").write_text('{"a": 1}')
    return folder / family


def upcycled(dense: Path, out: Path, *options: str) -> str:
    result = carpool_command("upcycle", str(dense), "--out", str(out), *options)
    assert result.exit_code == 0, result.output
    return result.stdout


@torch.no_grad()
def logits(folder: Path) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return model(torch.arange(40).reshape(2, 20) * 7 % 320).logits


@pytest.mark.parametrize("options", [COPY, SPLIT, ("--experts", "8", "--top-k", "8", "--method", "split")])
@pytest.mark.parametrize("family", DENSE)
def test_logits_equal_the_dense_models(family: str, options: tuple[str, ...], tmp_path: Path) -> None:
    dense = dense_model(tmp_path, family)
    assert "equal but for rounding" in upcycled(dense, tmp_path / "moe", *options)
    config, (moe, target) = AutoConfig.from_pretrained(tmp_path / "moe"), upcycling.TARGETS[family]
    assert config.model_type == moe and config.num_experts_per_tok == int(options[3])
    parts = 1 if options is COPY else 2 if options is SPLIT else 8
    assert getattr(config, target.size_key) == 192 // parts
    assert (tmp_path / "moe" / "tokenizer.json").read_text() == '{"a": 1}'
    expected, found = logits(dense), logits(tmp_path / "moe")
    assert (found - expected).abs().max() < 1e-5 * expected.abs().max()


def test_files_of_bfloat16_and_noise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upcycling, "_FILE", 200_000)  # several files
    dense = dense_model(tmp_path, "qwen3", torch.bfloat16)
    assert "equal but for rounding" in upcycled(dense, tmp_path / "moe", *SPLIT)
    stored = {
        name: value for path in (tmp_path / "moe").glob("*-of-*.safetensors") for name, value in load_file(path).items()
    }
    assert {value.dtype for value in stored.values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "moe" / "config.json").read_text())["dtype"] == "bfloat16"
    # Three is no power of two: the experts' down projections are rounded, and nothing is promised.
    three = ("--experts", "6", "--top-k", "3", "--method", "split")
    assert "not promised" in upcycled(dense, tmp_path / "three", *three)
    assert "not promised" in upcycled(dense, tmp_path / "noise", *COPY, "--noise", "0.01")
    expected = logits(dense)
    for name in ("three", "noise"):
        assert 1e-4 < (logits(tmp_path / name) - expected).abs().max() / expected.abs().max() < 0.2


@pytest.mark.parametrize("mistake", ["scale", "order"])
def test_a_wrong_model_is_not_kept(mistake: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = upcycling._values

    def wrong(*args: Any) -> Any:
        read = values(*args)

        def changed(name: str) -> torch.Tensor:
            if mistake == "scale" and name.endswith("experts.3.down_proj.weight"):
                return read(name) * 1.01
            # As if gates and ups were exchanged.
            return read(name.replace(".gate_proj.", ".up_proj.")) if mistake == "order" else read(name)

        return changed

    monkeypatch.setattr(upcycling, "_values", wrong)
    dense = dense_model(tmp_path, "qwen3")
    assert "allows rounding alone" in error_of("upcycle", str(dense), "--out", str(tmp_path / "moe"), *SPLIT)
    assert [path.name for path in tmp_path.iterdir()] == ["qwen3"]


@pytest.mark.parametrize(("family", "options"), [("llama", COPY), ("qwen3", SPLIT)])
def test_it_trains_on(family: str, options: tuple[str, ...], one_rank: Ranks, text: list[str], tmp_path: Path) -> None:
    upcycled(dense_model(tmp_path, family), tmp_path / "moe", *options)
    settings = [
        f"model.path={tmp_path / 'moe'}", "data.tokenizer=bytes", "data.sequence_length=32", "training.max_steps=6",
        "training.per_device_train_batch_size=4", "training.learning_rate=1e-2", "moe.router_aux_loss_coef=0.01",
        "training.save_steps=none", "training.eval_steps=none", "training.sample_prompt=none",
    ]  # fmt: skip
    assert one_rank(run, str(tmp_path / "run"), [*text, *settings]) == [""]
    of_steps = [loss for loss, _ in losses(tmp_path / "run").values()]
    assert len(of_steps) == 6 and of_steps[-1] < of_steps[0] - 0.5
    for path in (tmp_path / "moe").glob("*.safetensors"):
        save_file({name: tensor * float("nan") for name, tensor in load_file(path).items()}, path, {"format": "pt"})
    (error,) = one_rank(run, str(tmp_path / "broken"), [*text, *settings])
    assert "are not finite" in error and error.endswith(f"Copy or download {tmp_path / 'moe'} again")


@pytest.mark.parametrize(
    ("family", "changes", "options", "message"),
    [
        ("llama", {"attention_bias": True}, COPY, "attention_bias=true, which mixtral does not compute"),
        ("qwen3", {"use_sliding_window": True}, COPY, "use_sliding_window=true, which qwen3_moe does not"),
        ("qwen3", {"model_type": "qwen3_moe"}, COPY, "these dense models can be upcycled: llama (to mixtral)"),
        ("qwen3", {}, ("--experts", "4", "--top-k", "5"), "--top-k 5: choose 1 to 4"),
        ("qwen3", {}, (*COPY, "--parts", "2"), "--parts needs --method split"),
        ("qwen3", {}, (*COPY, "--noise", "-1"), "--noise -1.0"),
        ("qwen3", {}, (*COPY, "--noise", "1e30"), "the MoE computes NaN or infinity: lower --noise 1e+30"),
        ("qwen3", {}, (*COPY, "--method", "split", "--parts", "4"), "--experts 6 is no multiple of 4 parts"),
        ("qwen3", {}, ("--experts", "8", "--top-k", "6", "--method", "split", "--parts", "4"), "--top-k 6 is no"),
        ("qwen3", {}, ("--experts", "10", "--top-k", "5", "--method", "split"), "cannot be divided into 5 equal parts"),
        ("qwen3", {"intermediate_size": 96}, COPY, "has shape (32, 192), and the configuration asks for (32, 96)"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_before_anything_is_written(
    family: str, changes: dict[str, Any], options: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    dense = dense_model(tmp_path, family)
    config = json.loads((dense / "config.json").read_text())
    (dense / "config.json").write_text(json.dumps(config | changes))
    assert message in error_of("upcycle", str(dense), "--out", str(tmp_path / "moe"), *options)
    assert not (tmp_path / "moe").exists()


@pytest.mark.parametrize(("option", "number"), [("--experts", "100000000"), ("--seed", str(2**64))])
def test_numbers_out_of_range_are_refused_before_anything_is_read(tmp_path: Path, option: str, number: str) -> None:
    result = carpool_command("upcycle", str(tmp_path), "--out", str(tmp_path / "moe"), *COPY, option, number)
    assert result.exit_code == 2 and "less than or equal to" in result.stderr


def test_missing_weights_and_folders_that_are_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dense = dense_model(tmp_path, "mistral")
    (tmp_path / "here").mkdir()
    with monkeypatch.context() as changed:
        changed.chdir(tmp_path / "here")
        assert "is the working folder" in error_of("upcycle", str(dense), "--out", ".", *COPY)
        changed.setattr(upcycling, "write_tensor_file", mock.Mock(side_effect=OSError(errno.ENOSPC, "No space left")))
        assert "../full: No space left" in error_of("upcycle", str(dense), "--out", "../full", *COPY)
    assert set(tmp_path.iterdir()) == {dense, tmp_path / "here"}
    assert "the folder is not empty" in error_of("upcycle", str(dense), "--out", str(dense), *COPY)
    assert "is no checkpoint folder" in error_of("upcycle", str(tmp_path / "no"), "--out", str(tmp_path / "a"), *COPY)
    for path in dense.glob("*.safetensors"):
        save_file({name: tensor * float("nan") for name, tensor in load_file(path).items()}, path, {"format": "pt"})
    assert "computes NaN or infinity" in error_of(
        "upcycle", str(dense), "--out", str(tmp_path / "a"), *COPY, "--noise", "0.01"
    )
    next(dense.glob("*.safetensors")).unlink()
    assert "is incomplete" in error_of("upcycle", str(dense), "--out", str(tmp_path / "a"), *COPY)
