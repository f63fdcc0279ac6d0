"""Averages of weights: by their definition, on meshes beside whole weights, in runs that are cut and exported."""

from __future__ import annotations

import math
import shutil
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import nn
from typer.testing import CliRunner

from carpool import cli
from carpool.hf.seam.moved_experts import is_logical, logical_order
from carpool.optim import AdamW, Muon, ema
from carpool.optim.adamw_reference import join
from carpool.optim.base import Matrices
from carpool.optim.ema import WeightAverage, decay_at
from carpool.parallel import fsdp
from carpool.parallel.degrees import Degrees
from carpool.parallel.replicated import replicated
from carpool.train.checkpoints.state_tensors import average_tensors
from carpool.train.run.loop import gradients
from tests.full_tensor import full_tensor
from tests.hf.meshes import reuse_meshes
from tests.meshes.cases import Case
from tests.meshes.parity import Step
from tests.ranks import Ranks
from tests.train.test_loop import MODEL, losses, records, run, same_weights, start, start_two, weights
from tests.train.test_memory import _estimate
from tests.train.test_muon import whole
from tests.train.test_placement import PLACED, looks

RANKS_IMPORT = ("tests.meshes.parity", "tests.train.test_loop")
EMA = "training.ema_decay=0.6"  # reached at step 13


def plain(weights_of_steps: list[torch.Tensor], decay: float) -> torch.Tensor:
    """In float64, of the first weights and those after each step."""
    average = weights_of_steps[0].double()
    for step, weight in enumerate(weights_of_steps[1:], 1):
        d = min(decay, (1 + step) / (10 + step))
        average = d * average + (1 - d) * weight.double()
    return average.float()


@pytest.mark.parametrize("contiguous", [True, False])
@pytest.mark.parametrize("kind", ["torch", "one-pass", "muon"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_equals_its_definition(
    dtype: torch.dtype, kind: str, contiguous: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of masters where there are any, in pieces that end anywhere."""
    monkeypatch.setattr(ema, "_PIECE", 37)
    generator = torch.Generator().manual_seed(0)
    weight = nn.Parameter(torch.randn(24, 16, generator=generator).to(dtype))
    if not contiguous:
        if kind != "torch":
            pytest.skip("these have contiguous parameters")
        weight = nn.Parameter(weight.detach().t())
    make: dict[str, Any] = {
        "torch": partial(torch.optim.AdamW, lr=0.1),
        "one-pass": partial(AdamW, lr=0.1),
        "muon": lambda some: Muon(Muon.groups([("w", some[0])], 0.1, {"w": Matrices()}), lr=0.1),
    }
    optimizer = make[kind]([weight])

    def now() -> torch.Tensor:
        low = optimizer.state[weight].get("low_bits") if dtype == torch.bfloat16 else None
        assert (low is None) == (dtype == torch.float32 or kind == "torch")
        return weight.detach().float().clone() if low is None else join(weight.detach(), low)

    average = WeightAverage(optimizer, 0.3)
    taken = [now()]
    for step in range(1, 9):
        weight.grad = torch.randn(weight.shape, generator=generator).to(dtype)
        optimizer.step()
        average.update(step)
        taken.append(now())
    found = average.state[weight]["average"]
    assert found.dtype == torch.float32 and found.shape == weight.shape
    torch.testing.assert_close(found, plain(taken, 0.3), rtol=1e-6, atol=1e-6)
    average.begin()
    assert torch.equal(average.state[weight]["average"], taken[-1])
    assert [round(decay_at(step, 0.9), 3) for step in (1, 10, 80, 10**6)] == [0.182, 0.55, 0.9, 0.9]


@dataclass(frozen=True)
class Averaged(Case):
    """A case of the parity matrix whose run averages its weights."""

    more: tuple[tuple[str, Any], ...] = ()

    @property
    def settings(self) -> dict[str, dict[str, Any]]:
        found = super().settings
        found["training"] |= {"ema_decay": 0.6, "learning_rate": 0.02, **dict(self.more)}
        return found


MASTERS = (("optimizer", "one-pass"),)
MESHES = [
    Averaged(Degrees(fsdp=4, ep=2), family="gpt_oss", layout="permuted"),
    Averaged(Degrees(pp=2, fsdp=2, ep=2), micro_batches=2),
    Averaged(Degrees(fsdp=4, ep=2), family="qwen3_moe", dense="zero1", more=MASTERS),
    Averaged(Degrees(fsdp=2, tp=2, ep=2, etp=2), layout="permuted"),
    Averaged(Degrees(fsdp=4, ep=4), family="gpt_oss", dense="zero1"),
    Averaged(Degrees(fsdp=2, tp=2, ep=4), family="qwen3_moe"),
    Averaged(Degrees(dp_replicate=2, fsdp=2, ep=2), dense="zero1"),
    Averaged(Degrees(fsdp=2, cp=2, ep=4)),
    Averaged(Degrees(fsdp=4), family="deepseek_v3", balance="none", dense="zero1"),
]


def two_steps(cases: list[Averaged], folder: str) -> list[str]:
    transformers.logging.set_verbosity_error()
    return [_two_steps(case, folder) for case in cases]


def _two_steps(case: Averaged, folder: str) -> str:
    """What is wrong on this mesh, beside averages of whole weights."""
    reuse_meshes()
    run = Step(case, folder).run
    model, optimizer, average = run.built.model, run.built.optimizer, run.built.average
    assert average is not None
    batches = [run.to_device(batch) for batch in next(run.data.train)]

    def forward() -> torch.Tensor:
        model.eval()
        with torch.no_grad():
            ce = run.built.objective.forward(batches[0])[0].clone()
        model.train()
        return ce

    taken = [whole(model, "data")]
    for step in (1, 2):
        _, norm = gradients(run, batches)
        for group in optimizer.param_groups:
            group["lr"] = 0.02
        optimizer.clipped_step(norm, math.inf)
        optimizer.zero_grad(set_to_none=True)
        average.update(step)
        if (kept := replicated(model)) is not None:
            kept.write()
        taken.append(whole(model, "data"))
    run.data.train.close()
    ours = average_tensors(model, average)
    if not is_logical(model):
        ours = logical_order(model, ours)
    averages = {name: full_tensor(one).clone() for name, one in ours.items()}
    wrong = [] if averages.keys() == taken[0].keys() else ["names"]
    for name, found in averages.items():
        error = (found - plain([one[name] for one in taken], 0.6)).abs().max()
        wrong += [] if error < 1e-6 else [f"{name}: {error:.1e}"]
    before = forward()
    with average.shown(model):
        inside, shown = whole(model, "data"), forward()
    after = whole(model, "data")
    wrong += [f"{name} is not shown" for name in averages if not torch.equal(inside[name], averages[name])]
    wrong += [f"{name} has changed" for name in averages if not torch.equal(after[name], taken[-1][name])]
    wrong += [] if torch.equal(forward(), before) else ["the weights are not back"]
    # By hand: the model's weights are the averages for good.
    fsdp.reshard(model)
    with torch.no_grad():
        for parameter in average.state:
            local, own = (
                getattr(one, "_local_tensor", one) for one in (parameter, average.state[parameter]["average"])
            )
            local.detach().copy_(own)
    if kept is not None:
        kept.write()
    by_hand = forward()
    if bool(by_hand):  # else this stage has no loss
        wrong += [] if torch.equal(by_hand, shown) and not torch.equal(shown, before) else ["another loss is shown"]
    return "; ".join(wrong)


@pytest.mark.parametrize("meshes", [MESHES[:3], pytest.param(MESHES, marks=pytest.mark.slow)], ids=["some", "all"])
def test_meshes_average_whole_weights(ranks: Ranks, tmp_path: Path, meshes: list[Any]) -> None:
    assert ranks(two_steps, meshes, str(tmp_path), timeout=900.0) == [[""] * len(meshes)] * 4


def averages(output: Path, step: int) -> dict[str, torch.Tensor]:
    return {name: one for name, one in weights(output, step).items() if name.startswith("ema/")}


def close(ours: Path, theirs: Path) -> None:
    """Held-out losses are of averages."""
    found, expected = records(ours, "eval"), records(theirs, "eval")
    assert {step: one["loss"] for step, one in found.items()} == {
        step: pytest.approx(one["loss"], rel=1e-5) for step, one in expected.items()
    }
    mine, other = averages(ours, 6), averages(theirs, 6)
    assert mine.keys() == other.keys() and all((mine[name] - other[name]).abs().max() < 1e-4 for name in mine)


def test_runs_on_one_two_and_four_ranks(
    one_rank: Ranks, two_ranks: Ranks, ranks: Ranks, text: list[str], tmp_path: Path
) -> None:
    one, two, four, fewer = (tmp_path / name for name in ("one", "two", "four", "fewer"))
    every = [*text, EMA, "training.save_steps=1", "training.save_total_limit=none", "training.save_pretrained=true"]
    assert one_rank(run, str(one), [*MODEL, "training.per_device_train_batch_size=8", *every]) == [""]
    first = one_rank_weights(one, text, one_rank, tmp_path)
    taken = [first, *({n: w for n, w in weights(one, step).items()} for step in range(1, 7))]
    for name, found in averages(one, 6).items():
        expected = plain([of[name.replace("ema/", "model/")] for of in taken], 0.6)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert start_two(two_ranks, two, [*text, EMA, "parallelism.data_parallel=fsdp"]) == [""] * 2
    assert start(ranks, four, [*text, EMA, *PLACED, "training.stop_at_step=3"]) == [""] * 4
    shutil.copytree(four, fewer)
    more = [*text, EMA, "training.resume_from_checkpoint=last"]
    assert start(ranks, four, [*more, *PLACED]) == [""] * 4
    assert start_two(two_ranks, fewer, more) == [""] * 2
    assert any(look["event"] == "moved" for look in looks(four)), "experts take their averages with them"
    for other in (two, four, fewer):
        close(other, one)
    # Whoever exports has what was evaluated: a new run from there begins with that loss.
    last = records(one, "eval")[6]["loss"]
    again = [*text, f"model.path={one / 'model'}", "training.max_steps=1", "data.sequence_length=32"]
    again += ["training.per_device_train_batch_size=8", "training.sample_prompt=none", "training.save_pretrained=false"]
    again += ["data.tokenizer=bytes", "parallelism.device=cpu", "model.dtype=float32", "training.eval_on_start=true"]
    assert one_rank(run, str(tmp_path / "again"), again) == [""]
    assert records(tmp_path / "again", "eval")[0]["loss"] == pytest.approx(last, rel=1e-6)
    runner = CliRunner()
    for kind, part in (("ema", "ema"), ("trained", "model")):
        done = runner.invoke(cli.app, ["export", str(one), "--out", str(tmp_path / kind), "--weights", kind])
        assert done.exit_code == 0 and "read back" in done.output, done.output
        assert ("averaged" in done.output) == (kind == "ema")
        name = "model.layers.1.self_attn.q_proj.weight"
        assert torch.equal(load_file(tmp_path / kind / "model.safetensors")[name], weights(one, 6)[f"{part}/{name}"])


def one_rank_weights(one: Path, text: list[str], one_rank: Ranks, folder: Path) -> dict[str, torch.Tensor]:
    """The weights with which a run begins: those after a step that changes nothing."""
    still = [*MODEL, "training.per_device_train_batch_size=8", *text, "training.learning_rate=0"]
    assert one_rank(run, str(folder / "still"), [*still, "training.stop_at_step=1"]) == [""]
    return weights(folder / "still", 1)


def test_a_run_that_was_cut_has_the_same_bits(two_ranks: Ranks, text: list[str], tmp_path: Path) -> None:
    """With bfloat16 weights, whose masters are averaged."""
    settings = [*text, EMA, "model.dtype=bfloat16", "training.save_total_limit=none"]
    uncut, cut = tmp_path / "uncut", tmp_path / "cut"
    assert start_two(two_ranks, uncut, settings) == [""] * 2
    assert start_two(two_ranks, cut, [*settings, "training.stop_at_step=4"]) == [""] * 2
    more = [*settings, "training.resume_from_checkpoint=last"]
    assert start_two(two_ranks, cut, more) == [""] * 2
    assert losses(cut) == losses(uncut) and records(cut, "eval")[6]["loss"] == records(uncut, "eval")[6]["loss"]
    assert same_weights(cut, uncut, 6)
    # Averages change nothing of the training; a run that goes on without any says so, and one may begin later.
    without = [one for one in settings if one != EMA]
    assert start_two(two_ranks, tmp_path / "none", [*without, "training.stop_at_step=3"]) == [""] * 2
    assert losses(tmp_path / "none") == {step: one for step, one in losses(uncut).items() if step <= 3}
    assert start_two(two_ranks, tmp_path / "none", more) == [""] * 2
    assert losses(tmp_path / "none") == losses(uncut)
    begun, full = averages(tmp_path / "none", 6), averages(uncut, 6)
    assert begun.keys() == full.keys() and not all(torch.equal(begun[name], full[name]) for name in begun)


def test_its_memory_is_predicted() -> None:
    ours, without = (_estimate(some, 2) for some in ([EMA], []))
    found = ours("dedup", "fsdp")["optimizer"] - without("dedup", "fsdp")["optimizer"]
    assert found == pytest.approx(4 * ours.trained, rel=0.01)
