"""The examples run as they stand: `main` in the shared ranks, and with `slow` by the commands in their docstrings."""

from __future__ import annotations

import contextlib
import io
import math
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import distribute_tensor

from tests.ranks import Ranks

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
SCRIPTS = ("layer", "transformers_trainer", "place_experts")
WITH_TRL = ("trl_sft", "trl_dpo", "trl_grpo")
RANKS_IMPORT = ("tests.hf.meshes", "carpool.hf", "transformers")


def _main(name: str) -> str:
    """What the example prints on this rank."""
    return _script(name)[1]


def _script(name: str, steps: int = 6, changes: Mapping[str, str] = MappingProxyType({})) -> tuple[dict[str, Any], str]:
    """The example's names, and what it prints on this rank. The pool's process group stands in for its own.
    `changes`: other text in its source."""
    from tests.hf.meshes import reuse_meshes

    reuse_meshes()
    os.environ["STEPS"] = str(steps)
    init, destroy = dist.init_process_group, dist.destroy_process_group
    functions: Any = dist
    functions.init_process_group = functions.destroy_process_group = lambda *_: None
    sys.path.insert(0, str(EXAMPLES))
    printed, path = io.StringIO(), EXAMPLES / f"{name}.py"
    source, names = path.read_text(), {"__name__": "__main__", "__file__": str(path)}
    for old, new in changes.items():
        assert source.count(old) == 1
        source = source.replace(old, new)
    try:
        with contextlib.redirect_stdout(printed):
            exec(compile(source, path, "exec"), names)
    finally:
        sys.path.remove(str(EXAMPLES))
        functions.init_process_group, functions.destroy_process_group = init, destroy
    return names, printed.getvalue()


def _check(name: str, text: str) -> None:
    """The loss falls; placement leaves fewer ranks per token; what is rewarded becomes more."""
    pattern = r"ranks per token ([0-9.]+) -> ([0-9.]+)" if name == "place_experts" else r"loss ([0-9.]+)"
    found = re.findall(r"reward ([0-9.]+)", text)[::-1] if name == "trl_grpo" else re.findall(pattern, text)
    assert len(found) >= 2, text
    pairs = found if name == "place_experts" else [(found[0], found[-1])]
    assert all(float(after) < float(before) for before, after in pairs), text


@pytest.mark.parametrize("name", SCRIPTS)
def test_example(name: str, ranks: Ranks) -> None:
    _check(name, ranks(_main, name)[0])


def _grpo(rollouts: str) -> tuple[str, dict[str, float]]:
    """The example, and what its trainer then computes of one more batch, whose likelihoods are known from before."""
    os.environ["ROLLOUTS"] = rollouts
    padded = {} if rollouts else {"num_iterations=2": "num_iterations=2, pad_to_multiple_of=8"}
    names, printed = _script("trl_grpo", 12, padded)
    trainer: Any = names["trainer"]
    batch = trainer._generate_and_score_completions(next(iter(trainer.get_train_dataloader())))

    def gradients(coefficient: float = 0.0, recompute: bool = True) -> dict[str, Any]:
        trainer.router_aux_loss_coef, trainer.aux_loss_enabled = coefficient, coefficient > 0
        trainer.model.gradient_checkpointing_enable() if recompute else trainer.model.gradient_checkpointing_disable()
        trainer.model.zero_grad()
        with contextlib.ExitStack() as trainer._until_backward:
            loss = trainer._compute_loss(trainer.model, batch)
            loss.backward()
        grads = [p.grad.to_local().flatten() for p in trainer.model.parameters() if p.grad is not None]
        logged = {key: values[-1] for key, values in trainer._metrics["train"].items()}
        return {**logged, "loss": loss.detach(), "grads": torch.cat(grads)}

    ids, mask = (torch.cat([batch[f"prompt_{of}"], batch[f"completion_{of}"]], 1) for of in ("ids", "mask"))
    keep = batch["completion_ids"].shape[1]
    with torch.no_grad(), trainer._replay(batch["routed_experts"]):
        likelihoods, *_ = trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, keep)
    ratio = ((likelihoods - batch["old_per_token_logps"]) * batch["completion_mask"]).exp()
    still = gradients()
    for name, parameter in trainer.model.named_parameters():
        if name.endswith("gate.weight"):
            noise = 0.005 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0))
            noise = distribute_tensor(noise, parameter.device_mesh, parameter.placements)
            parameter.data.to_local().add_(noise.to_local())
    plain, whole, balanced = gradients(), gradients(recompute=False), gradients(0.01)
    trainer.mask_truncated_completions = True
    evaluated = trainer.evaluate(trainer.train_dataset.select(range(2)))
    return printed, {
        "evaluated": evaluated["eval_routing/differing_tokens"],
        "ratio": float((ratio - 1).abs().max()), "still": still["routing/differing_tokens"],
        "moved": plain["routing/differing_tokens"], "aux_loss": balanced["aux_loss"],
        "recomputed": float((plain["grads"] - whole["grads"]).norm() / whole["grads"].norm()),
        "balance": float(balanced["loss"] - plain["loss"]),
    }  # fmt: skip


@pytest.mark.parametrize("rollouts", ["", "arrays"])
def test_grpo(rollouts: str, two_ranks: Ranks) -> None:
    """Rewards rise. Choices and likelihoods are those from before the step until a router moves; then the choices are
    replayed all the same, also by layers that are computed again. The balance loss is added with its coefficient."""
    pytest.importorskip("trl")
    (text, found), (_, other) = two_ranks(_grpo, rollouts)
    _check("trl_grpo", text)
    assert all(0 < float(share) < 100 for share in re.findall(r"([0-9.]+)% of the tokens", text))
    assert found["still"] == found["evaluated"] == 0 and 0.02 < found["moved"] < 1
    assert found["ratio"] < 1e-4 and found["recomputed"] < 1e-5
    assert (found["balance"] + other["balance"]) / 2 == pytest.approx(0.01 * found["aux_loss"], rel=1e-3)
    assert found["aux_loss"] > 1.9


def _dpo(batch_size: int) -> list[dict[str, float]]:
    """The log lines of DPO without the balance loss, which is of each rank's own tokens."""
    changes = {"batch_size=4": f"batch_size={batch_size}", "coef=0.01": "coef=0.0", "line['aux_loss']": "0"}
    trainer = _script("trl_dpo", 4, changes)[0]["trainer"]
    return [entry for entry in trainer.state.log_history if "loss" in entry]


def test_dpo(two_ranks: Ranks, one_rank: Ranks) -> None:
    """At first the model is the reference, so the loss is ln 2 and the balance loss. Two ranks train as one does."""
    pytest.importorskip("trl")
    text = two_ranks(_main, "trl_dpo")[0]
    _check("trl_dpo", text)
    first = [float(number) for number in re.findall(r" (-?[0-9.]+)", text.splitlines()[-3])][1:]
    assert first == pytest.approx([math.log(2) + 0.01 * first[2], 0, first[2]], abs=2e-3) and first[2] > 1.9
    for found, alone in zip(two_ranks(_dpo, 4)[0], one_rank(_dpo, 8)[0], strict=True):
        for key in ("loss", "rewards/margins", "grad_norm"):
            assert found[key] == pytest.approx(alone[key], rel=5e-3, abs=1e-3), key


@pytest.mark.slow
@pytest.mark.parametrize("name", [*SCRIPTS, *WITH_TRL])
def test_example_under_torchrun(name: str) -> None:
    if name in WITH_TRL:
        pytest.importorskip("trl")
    text = (EXAMPLES / f"{name}.py").read_text()
    command = re.search(r"torchrun (.*)", text)
    assert command is not None
    _check(name, _run("-m", "torch.distributed.run", *command[1].split()))


@pytest.mark.slow
def test_an_example_on_one_device() -> None:
    pytest.importorskip("trl")
    text = _run("examples/trl_lora.py")
    eager, fast = (line.split(",")[0].split("loss", 1)[1] for line in text.splitlines() if " loss " in line)
    assert eager == fast and "no CUDA graphs, because there is no GPU" in text
    _check("trl_lora", text)


@pytest.mark.slow
def test_training_from_a_configuration(tmp_path: Path) -> None:
    toml = EXAMPLES / "train_from_config" / "olmoe_tiny.toml"
    assert f"carpool train --config {toml.relative_to(ROOT)}" in toml.read_text()
    text = _run("-m", "carpool.cli", "train", "--config", str(toml), f"training.output_dir={tmp_path}/run")
    assert (tmp_path / "run" / "summary.json").is_file() and "ranks per token" in text


def test_the_configuration_is_valid() -> None:
    from carpool.train.config import load_config

    config = load_config(EXAMPLES / "train_from_config" / "olmoe_tiny.toml", [])
    assert config.parallelism.ep_size == 2


def test_the_large_configuration_fits() -> None:
    """At most 12 keys, and on two H200 there is little room: whatever a run takes more of is seen here."""
    from carpool.train.config import load_config
    from carpool.train.plan.dry_run import dry_run

    path = EXAMPLES / "train_from_config" / "qwen3_30b_a3b.toml"
    assert sum(map(len, tomllib.loads(path.read_text()).values())) <= 12
    said = dry_run(load_config(path, ["parallelism.num_ranks=2"]), gpu="h200").splitlines()
    assert re.fullmatch(r"# fits in 139 GiB \(1[23][0-9]\.[0-9] GiB at the peak\)", said[-1]), said[-1]
    assert any("parameters, 3,353,032,704 active per token" in line for line in said)
    assert "# CUDA graphs: forward and backward" in said


def test_examples_are_short() -> None:
    for path in EXAMPLES.glob("*.py"):
        assert len(path.read_text().splitlines()) < 80, path


def _run(*arguments: str) -> str:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
