"""Fine-tuning a model whose routers prefer the experts of one rank, with spare slots: even loads, equal losses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from carpool.cli import app
from carpool.report import write_report
from tests.hf.tiny_models import discover, tiny_model
from tests.ranks import WORLD_SIZE, Ranks
from tests.train.test_loop import goes_on, losses, records, run

SIZES = {"hidden_size": 64, "moe_intermediate_size": 64, "num_experts": 32, "num_experts_per_tok": 4}
SETTINGS = [
    "data.tokenizer=bytes", "data.sequence_length=32", "data.max_bytes=20000", "training.per_device_train_batch_size=8",
    "training.gradient_accumulation_steps=1", "training.max_steps=3", "training.save_steps=2", "training.eval_steps=2",
    "training.sample_prompt='def '", "training.sample_tokens=8", "parallelism.ep_size=4", "training.learning_rate=1e-3",
    "training.save_pretrained=false", "moe.router_aux_loss_coef=0",
]  # fmt: skip
SPARE = "moe.spare_slots=2"
TWICE = "training.gradient_accumulation_steps=2"
AGAIN = ["memory.layer_activations=recompute", "memory.moe_outputs=recompute"]
LORA = ["adapter.kind=lora", "adapter.rank=4"]
LOSSES_ALONE = ["training.save_steps=none", "training.sample_prompt=none"]


@pytest.fixture(scope="module")
def specialised(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its hidden states have a common part, which all routers take for the second rank's experts."""
    torch.manual_seed(0)
    model = tiny_model(discover()["qwen3_moe"], vocab_size=320, head_dim=32, tie_word_embeddings=False, **SIZES)
    common_H = torch.randn(64)
    with torch.no_grad():
        model.get_input_embeddings().weight += common_H * model.get_input_embeddings().weight.std()
        for layer in model.model.layers:
            gate = layer.mlp.gate.weight
            gate -= (gate @ common_H).unsqueeze(1) * common_H / common_H.square().sum()
            gate[8:16] += 0.15 * common_H
    folder = tmp_path_factory.mktemp("specialised")
    model.save_pretrained(folder)
    return folder


def start(ranks: Ranks, base: Path, output: Path, *overrides: str) -> Path:
    assert ranks(run, str(output), [f"model.path={base}", *SETTINGS, *overrides]) == [""] * WORLD_SIZE
    return output


@pytest.fixture(scope="module")
def stayed(ranks: Ranks, specialised: Path, text: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return start(ranks, specialised, tmp_path_factory.mktemp("runs") / "stayed", *text)


@pytest.fixture(scope="module")
def balanced(ranks: Ranks, specialised: Path, text: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return start(ranks, specialised, tmp_path_factory.mktemp("runs") / "balanced", *text, SPARE)


def check_even(output: Path, least: float = 1.4) -> None:
    for step, line in records(output, "layers").items():
        for load in line["spare"]:
            assert load["before"] > least and load["after"] <= 1.1 and not load["beyond"], (step, load)


def check_equal(found: Path, expected: Path) -> None:
    for step, loss in losses(expected).items():
        assert losses(found)[step] == pytest.approx(loss, rel=1e-4), step
    for step, line in records(expected, "eval").items():
        assert records(found, "eval")[step]["loss"] == pytest.approx(line["loss"], rel=1e-4), step


def test_ranks_are_even_and_losses_the_same(stayed: Path, balanced: Path) -> None:
    check_even(balanced)
    check_equal(balanced, stayed)
    for step, line in records(balanced).items():
        assert line["rank_load_before"] == pytest.approx(records(stayed)[step]["rank_load_max_over_mean"], rel=0.02)
        assert line["rank_load_max_over_mean"] == pytest.approx(line["rank_load_after"]) and line["ms"]["fill"]["total"]
        layers = records(balanced, "layers")[step]
        assert sum(layers["rank_load"]) == sum(map(sum, layers["load"]))
        # Two matrices of weights are fetched twice, and their gradients go home: 3 H F floats each time.
        replicas = sum(load["replicas"] * load["rides"] for load in layers["spare"])
        assert line["bytes_replicas"] == replicas * 3 * (3 * 64 * 64 * 4)
    assert "spare" not in records(stayed, "layers")[1] and "fill" not in records(stayed)[1]["ms"]
    assert all(line["text"] for line in records(balanced, "sample").values()) and records(balanced, "sample")
    assert "without spare slots" in write_report(balanced).read_text()


def test_a_resumed_run_is_the_same(
    ranks: Ranks, specialised: Path, balanced: Path, text: list[str], tmp_path: Path
) -> None:
    goes_on(ranks, balanced, tmp_path / "resumed", [f"model.path={specialised}", *SETTINGS, *text, SPARE], 2)


@pytest.mark.parametrize(
    "settings",
    [
        [TWICE, "memory.layer_activations=recompute", "moe.schedule=chunks", "moe.spare_weights=save"],
        [TWICE, *AGAIN, "moe.schedule=two-batch", "memory.expert_inputs=resend"],
        pytest.param(LORA, marks=pytest.mark.slow),
        [*LORA, "adapter.base_dtype=nf4"],
    ],
    ids=" ".join,
)
def test_other_ways_to_train_have_it_too(
    ranks: Ranks, specialised: Path, text: list[str], tmp_path: Path, settings: list[str]
) -> None:
    plain = [one for one in settings if "spare" not in one]
    expected = start(ranks, specialised, tmp_path / "plain", *text, *LOSSES_ALONE, *plain)
    found = start(ranks, specialised, tmp_path / "spare", *text, *LOSSES_ALONE, *settings, SPARE)
    check_even(found)
    check_equal(found, expected)
    if LORA[0] in settings:
        a, b = (load_file(one / "adapter" / "adapter_model.safetensors") for one in (found, expected))
        assert a.keys() == b.keys() and any("experts" in name for name in a)
        for name, value in b.items():
            torch.testing.assert_close(a[name], value, rtol=0, atol=3e-4, msg=name)
        merged = CliRunner().invoke(app, ["merge", str(found), "--out", str(tmp_path / "merged")])
        assert merged.exit_code == 0, merged.output
        base, new = (load_file(one / "model.safetensors") for one in (specialised, tmp_path / "merged"))
        assert any("experts" in name and not torch.equal(value, base[name].to(value)) for name, value in new.items())


def test_it_is_said_once_that_slots_do_not_suffice(
    ranks: Ranks, specialised: Path, text: list[str], tmp_path: Path
) -> None:
    said: list[Any] = ranks(_said, str(specialised), str(tmp_path / "few"), text)
    assert said[0].count("moe.spare_slots=1 do not keep every rank to moe.balance_limit=1.01 times the mean") == 1
    assert not any(said[1:])
    assert records(tmp_path / "few")[2]["rides_beyond_limit"] > 0


def _said(base: str, output: str, text: list[str]) -> str:
    import contextlib
    import io

    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        few = ["moe.spare_slots=1", "moe.balance_limit=1.01", "training.max_steps=2"]
        assert not run(output, [f"model.path={base}", *SETTINGS, *text, *few])
    return out.getvalue().replace("\n", "")
