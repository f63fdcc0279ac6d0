"""Muon: its definition beside a plain one and PyTorch's, and on meshes beside one process."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from torch import nn

from carpool import ExpertLayout
from carpool.hf.layer_matrices import layer_matrices
from carpool.hf.seam.moved_experts import is_logical, logical_order
from carpool.layout.layouts import Layouts
from carpool.optim import OPTIMIZERS, Muon, muon
from carpool.optim.adamw_reference import join
from carpool.optim.base import Matrices
from carpool.optim.muon import orthogonalise
from carpool.parallel.degrees import Degrees
from carpool.parallel.replicated import replicated, sharded_parameters
from carpool.planner.candidate import Candidate
from carpool.planner.machine.hardware import HARDWARE
from carpool.planner.step.lengths import Lengths
from carpool.train.build.assemble import make_optimizer
from carpool.train.config import load_config
from carpool.train.config.schema_training import TrainingSection
from carpool.train.plan.resolve import check_layout_file
from carpool.train.run.loop import gradients
from tests.full_tensor import full_tensor
from tests.hf.meshes import reuse_meshes
from tests.hf.tiny_models import discover, tiny_model
from tests.meshes.cases import Case
from tests.meshes.parity import Step
from tests.planner import step_problem
from tests.ranks import Ranks
from tests.train.test_loop import MODEL, losses, run, start, start_two, weights
from tests.train.test_memory import _estimate
from tests.train.test_placement import PLACED, looks

RANKS_IMPORT = ("tests.meshes.parity", "tests.train.test_loop")
FLOAT32 = {"ns_dtype": "float32"}
RATE, DECAY = 0.02, 0.1


def newton_schulz(matrix: torch.Tensor, steps: int = 5) -> torch.Tensor:
    """As K. Jordan writes it, of one matrix, in its dtype."""
    x = matrix / (matrix.norm() + 1e-7)
    turned = x.shape[0] > x.shape[1]
    x = x.T if turned else x
    for _ in range(steps):
        a = x @ x.T
        b = -4.7750 * a + 2.0315 * a @ a
        x = 3.4445 * x + b @ x
    return x.T if turned else x


def plain(weight: torch.Tensor, grads: list[torch.Tensor], momentum: float = 0.95, nesterov: bool = True) -> Any:
    """The steps of one matrix in float32: its value and its momentum."""
    w, m = weight.clone(), torch.zeros_like(weight)
    for g in grads:
        m = momentum * m + (1 - momentum) * g
        u = momentum * m + (1 - momentum) * g if nesterov else m
        w = w - RATE * DECAY * w - RATE * 0.2 * max(w.shape) ** 0.5 * newton_schulz(u)
    return w, m


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# A stack of experts: one matrix each, gate and up behind each other, and alternating columns of a transposed stack.
STACKS = [
    ((5, 24, 16), Matrices(True)),
    ((5, 24, 16), Matrices(True, halves=1)),
    ((5, 16, 24), Matrices(True, halves=2, interleaved=True)),
    ((5, 16, 24), Matrices(True, halves=2)),
    ((16, 40), Matrices()),
    ((37, 11), Matrices()),
]


def apart(whole: torch.Tensor, of: Matrices) -> list[torch.Tensor]:
    """The matrices of a parameter, views of it, written out."""
    found = []
    for matrix in whole if of.stacked else [whole]:
        if of.halves == 0:
            found.append(matrix)
        elif of.interleaved:
            found += [matrix[:, 0::2], matrix[:, 1::2]]
        elif of.halves == 1:
            found += [matrix[: len(matrix) // 2], matrix[len(matrix) // 2 :]]
        else:
            found += [matrix[:, : matrix.shape[1] // 2], matrix[:, matrix.shape[1] // 2 :]]
    return found


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_equals_its_definition(dtype: torch.dtype, nesterov: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each expert, gate and up by themselves, in batches of a few; the masters of bfloat16 weights too. A vector is
    AdamW's."""
    monkeypatch.setattr("carpool.optim.muon.BATCH", 2 * 16 * 24)
    parameters = {f"p{i}": nn.Parameter(drawn(*shape, seed=i).to(dtype)) for i, (shape, _) in enumerate(STACKS)}
    parameters["norm"] = nn.Parameter(torch.ones(16, dtype=dtype))
    kinds = {f"p{i}": of for i, (_, of) in enumerate(STACKS)}
    before = {name: p.detach().float().clone() for name, p in parameters.items()}
    optimizer = Muon(Muon.groups(parameters.items(), DECAY, kinds), lr=RATE, nesterov=nesterov, **FLOAT32)
    for step in range(3):
        for i, p in enumerate(parameters.values()):
            p.grad = drawn(*p.shape, seed=100 * step + i).to(dtype)
        optimizer.step(factor=torch.tensor(0.5), zero_grads=True)
        assert all(not p.grad.any() for p in parameters.values())
    optimizer.step(factor=torch.tensor(torch.nan))
    assert set(optimizer.state[parameters["norm"]]) >= {"exp_avg", "exp_avg_sq"}
    for i, (shape, of) in enumerate(STACKS):
        p = parameters[f"p{i}"]
        state = optimizer.state[p]
        assert set(state) == {"momentum_buffer"} | ({"low_bits"} if dtype == torch.bfloat16 else set())
        ours = join(p.detach(), state["low_bits"]) if "low_bits" in state else p.detach()
        grads = [drawn(*shape, seed=100 * step + i).to(dtype).float() * 0.5 for step in range(3)]
        every = zip(
            apart(before[f"p{i}"], of),
            apart(ours, of),
            apart(state["momentum_buffer"], of),
            *(apart(g, of) for g in grads),
            strict=True,
        )
        for begun, end, momentum, *steps in every:
            w, m = plain(begun, steps, nesterov=nesterov)
            torch.testing.assert_close(end, w, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(momentum, m)


@pytest.mark.parametrize("nesterov", [True, False])
def test_without_a_gradient_a_rank_sends_its_momentum(nesterov: bool) -> None:
    """Of a matrix that others have a gradient of."""
    p = nn.Parameter(drawn(8, 4))
    optimizer = Muon(Muon.groups([("p", p)], DECAY, {"p": Matrices()}), lr=RATE, nesterov=nesterov)
    momentum, update = optimizer.state[p]["momentum_buffer"].copy_(drawn(8, 4, seed=1)), torch.empty(1, 8, 4)
    muon._Step(optimizer, optimizer._numbers(None)).take("p", 0, 1, update)
    assert torch.equal(update[0], momentum) and torch.equal(momentum, drawn(8, 4, seed=1))


@pytest.mark.parametrize("shape", [(64, 160), (160, 64), (96, 96)])
def test_it_equals_pytorchs(shape: tuple[int, int]) -> None:
    """In bfloat16, with equal settings."""
    ended = []
    for ours in (True, False):
        p = nn.Parameter(drawn(*shape))
        if ours:
            optimizer: Any = Muon(Muon.groups([("p", p)], DECAY, {"p": Matrices()}), lr=RATE)
        else:
            optimizer = torch.optim.Muon(
                [p], lr=RATE, weight_decay=DECAY, momentum=0.95, adjust_lr_fn="match_rms_adamw"
            )
        for step in range(4):
            p.grad = drawn(*shape, seed=step + 1) / 100
            optimizer.step()
        ended.append(p.detach())
    change = (ended[1] - drawn(*shape)).norm()
    assert (ended[0] - ended[1]).norm() < 0.01 * change


def test_singular_values_and_updates_are_as_large_as_said() -> None:
    found = orthogonalise(drawn(3, 64, 256), 5)
    values = torch.linalg.svdvals(found)
    assert values.min() > 0.6 and values.max() < 1.3
    assert not orthogonalise(torch.zeros(1, 8, 8)).any()
    # sqrt(64 / (64 * 256)) * 0.2 sqrt(256) = 0.2, AdamW's.
    assert (0.2 * 256**0.5 * found).square().mean().sqrt() == pytest.approx(0.2, rel=0.2)


@pytest.mark.parametrize("family", ["diffusion_gemma", "jamba", "qwen2_moe", "gpt_oss"])
def test_routers_and_embeddings_are_no_matrices_of_layers(family: str) -> None:
    """Routers that are linear layers, and embeddings of patches, too. One process, without Carpool's layers."""
    model = tiny_model(discover()[family])
    found = layer_matrices(model)
    experts = {name: of for name, of in found.items() if of.stacked}
    assert experts and not any(word in name for name in found for word in ("router", "embed", "lm_head", ".gate."))
    assert all((of.halves > 0) == ("gate_up" in name) for name, of in experts.items())
    assert len(found) > len(experts) and not any(name.endswith("bias") for name in found)


@dataclass(frozen=True)
class MuonCase(Case):
    """A case of the parity matrix whose run has Muon."""

    @property
    def settings(self) -> dict[str, dict[str, Any]]:
        found = super().settings
        found["training"] |= {"optimizer": "muon", "optimizer_options": FLOAT32, "learning_rate": RATE}
        return found


MESHES = [
    MuonCase(Degrees(fsdp=4, ep=4)),
    MuonCase(Degrees(fsdp=4, ep=2), family="qwen3_moe", dense="zero1"),
    MuonCase(Degrees(fsdp=4, ep=2), family="gpt_oss", layout="permuted"),
    MuonCase(Degrees(fsdp=4, ep=4), family="gpt_oss", dense="zero1"),
    MuonCase(Degrees(fsdp=2, tp=2, ep=4), family="qwen3_moe"),
    MuonCase(Degrees(fsdp=2, tp=2, ep=2)),
    MuonCase(Degrees(fsdp=4, ep=2, etp=2), layout="permuted"),
    MuonCase(Degrees(fsdp=2, tp=2, ep=1, etp=2), family="gpt_oss"),
    MuonCase(Degrees(dp_replicate=2, fsdp=2, ep=2), dense="zero1"),
    MuonCase(Degrees(dp_replicate=2, fsdp=2, ep=1, etp=2), family="mixtral"),
    MuonCase(Degrees(pp=2, fsdp=2, ep=2), micro_batches=2),
    MuonCase(Degrees(fsdp=2, cp=2, ep=4)),
    MuonCase(Degrees(fsdp=4), family="deepseek_v3", balance="none", dense="zero1"),
]


def whole(model: nn.Module, what: str) -> dict[str, torch.Tensor]:
    """Of each parameter "data" or "grad", with whole experts in logical order."""
    with sharded_parameters(model):
        found = {name: getattr(p, what) for name, p in model.named_parameters() if getattr(p, what) is not None}
    if not is_logical(model):
        found = logical_order(model, found)
    return {name: full_tensor(one).clone() for name, one in found.items()}


def kind(name: str, family: str) -> Matrices | None:
    """What a parameter is, written out."""
    if ".experts." in name and "bias" not in name:
        if not name.endswith("gate_up_proj"):
            return Matrices(True)
        return Matrices(True, 2, True) if family == "gpt_oss" else Matrices(True, 1)
    return Matrices() if "_proj" in name and "bias" not in name else None


def two_steps(cases: list[MuonCase], folder: str) -> list[tuple[str, int]]:
    """Of each case what differs from the plain steps with the same gradients, and how many matrices this rank made
    orthogonal."""
    transformers.logging.set_verbosity_error()
    found, counted = [], list[int]()

    def count(x: torch.Tensor, steps: int) -> torch.Tensor:
        counted.append(len(x))
        return orthogonalise(x, steps)

    with mock.patch.object(muon, "orthogonalise", count):
        for case in cases:
            counted.clear()
            found.append((_two_steps(case, folder), sum(counted)))
    return found


def _two_steps(case: MuonCase, folder: str) -> str:
    reuse_meshes()
    run = Step(case, folder).run
    model, optimizer = run.built.model, run.built.optimizer
    assert isinstance(optimizer, Muon)
    before, grads = whole(model, "data"), []
    for _ in range(2):
        batches = [run.to_device(batch) for batch in next(run.data.train)]
        _, norm = gradients(run, batches)
        grads.append(whole(model, "grad"))
        for group in optimizer.param_groups:
            group["lr"] = RATE
        optimizer.clipped_step(norm, math.inf)
        optimizer.zero_grad(set_to_none=True)
        if (kept := replicated(model)) is not None:
            kept.write()
    run.data.train.close()
    after, wrong = whole(model, "data"), []
    own = {matrix.name for matrix in optimizer._matrices.values()}
    for name, value in before.items():
        of = kind(name, case.family)
        if (of is not None) != (name in own):
            wrong.append(f"{name}: {of}")
        if of is None:
            continue
        steps = [apart(grad[name], of) for grad in grads]
        for begun, end, *some in zip(apart(value, of), apart(after[name], of), *steps, strict=True):
            error = (end - plain(begun, some)[0]).abs().max() / begun.abs().max()
            if not error < 1e-5:
                wrong.append(f"{name}: {error:.1e}")
    return "; ".join(wrong)


@pytest.mark.parametrize("meshes", [MESHES[::4], pytest.param(MESHES, marks=pytest.mark.slow)], ids=["some", "all"])
def test_meshes_equal_one_process(ranks: Ranks, tmp_path: Path, meshes: list[Any]) -> None:
    """Two steps of a run on each mesh, beside plain steps of whole matrices with the same gradients."""
    results = ranks(two_steps, meshes, str(tmp_path), timeout=900.0)
    assert [[what for what, _ in found] for found in results] == [[""] * len(meshes)] * 4
    for case, *numbers in zip(meshes, *results, strict=True):
        # Of 8 experts three matrices each, and four of attention; nobody does the work of another.
        own = [number for _, number in numbers]
        if case.family != "deepseek_v3":
            assert sum(own) == 2 * case.layers * (3 * 8 + 4), case
        assert max(own) <= 1.5 * sum(own) / 4, case


CHOSEN = ["training.optimizer=muon", "training.learning_rate=0.01"]
EXACT = [*CHOSEN, 'training.optimizer_options.ns_dtype="float32"']
ONE = [*MODEL, "training.per_device_train_batch_size=8"]


def test_a_run_of_four_ranks_goes_on_with_two(ranks: Ranks, two_ranks: Ranks, tmp_path: Path) -> None:
    """On as many ranks it has the same bits: test_features.py."""
    four, two = tmp_path / "four", tmp_path / "two"
    assert start(ranks, four, EXACT) == [""] * 4
    resume = f"training.resume_from_checkpoint={four}/checkpoints/step-00000003"
    assert start_two(two_ranks, two, [*EXACT, resume]) == [""] * 2
    close_to(two, four, range(4, 7))
    ours, theirs = weights(two, 6), weights(four, 6)
    assert ours.keys() == theirs.keys() and all((ours[name] - theirs[name]).abs().max() < 1e-4 for name in ours)
    kept = [name for name in ours if name.endswith(".momentum_buffer")]
    assert kept and any("experts.gate_up_proj" in name for name in kept) and not any("embed" in name for name in kept)


def close_to(ours: Path, theirs: Path, steps: range = range(1, 7)) -> None:
    found, expected = losses(ours), losses(theirs)
    assert [*found] == [*steps]
    for step in steps:
        assert found[step][0] == pytest.approx(expected[step][0], rel=1e-5), step


def test_runs_equal_one_process(one_rank: Ranks, two_ranks: Ranks, tmp_path: Path) -> None:
    """With float32 Newton–Schulz to rounding; in bfloat16 nearer than another seed."""
    for seed in (0, 1):
        settings = [*ONE, *CHOSEN, f"training.seed={seed}"]
        assert one_rank(run, str(tmp_path / f"one{seed}"), settings) == [""]
    assert one_rank(run, str(tmp_path / "one"), [*ONE, *EXACT]) == [""]
    fsdp = ["parallelism.ep_size=2", "parallelism.data_parallel=fsdp"]
    ways = {"fsdp": [*EXACT, *fsdp], "moved": [*EXACT, *PLACED]}
    for name, more in {**ways, "bf16": CHOSEN}.items():
        assert start_two(two_ranks, tmp_path / name, more) == [""] * 2
    for name in ways:
        close_to(tmp_path / name, tmp_path / "one")
    # Experts take their momentum with them.
    assert any(look["event"] == "moved" for look in looks(tmp_path / "moved"))
    ours, one, other = (losses(tmp_path / name) for name in ("bf16", "one0", "one1"))
    assert abs(ours[6][0] - one[6][0]) < 0.2 * abs(other[6][0] - one[6][0])


def test_what_cannot_be_orthogonalised_is_refused(tmp_path: Path) -> None:
    # A layout whose ranks have an expert's slices at different places, or several slices.
    together = ((0, 6), (1, 7), (2, 4), (3, 5))
    for number, homes in enumerate([together, ((0, 2), (3, 1), (4, 6), (5, 7)), ((0, 3), (1, 2), (4, 6), (5, 7))]):
        file = tmp_path / f"{number}.json"
        Layouts({"experts": ExpertLayout(homes, 2)}).save(file)
        config = load_config(None, [*CHOSEN, f"moe.layout={file}"])
        degrees = Degrees(fsdp=4, ep=2, etp=2)
        if homes is together:
            assert check_layout_file(config, "olmoe", {"experts": 4}, degrees)
            continue
        with pytest.raises(ValueError, match="'muon' needs whole experts, so ranks of an expert hold"):
            check_layout_file(config, "olmoe", {"experts": 4}, degrees)
    with pytest.raises(ValueError, match="no parameter that is trained is a matrix of a layer: take AdamW"):
        Muon(Muon.groups([("norm", nn.Parameter(torch.ones(4)))], 0.1))


def test_its_memory_and_time_are_predicted() -> None:
    config = load_config(None, CHOSEN)
    weight = nn.Parameter(drawn(64, 32))
    made = Muon(Muon.groups([("w", weight)], 0.1, {"w": Matrices()}))
    kept = sum(value.nbytes for value in made.state[weight].values()) / weight.numel()
    assert sum(config.training.state_bytes("float32", matrix=True).values()) == kept == 4
    ours, adamw = (_estimate(chosen, 2)("dedup", "fsdp")["optimizer"] for chosen in (CHOSEN, []))
    assert adamw / 2 < ours < 0.8 * adamw  # embedding and output layer of the demo have AdamW's
    # 5 steps of two products of 64 x 32 with 32 x 32, and of one of 32 x 32.
    assert OPTIMIZERS["muon"].update_flops(64, 32) == 5 * (2 * 2 * 64 * 32 * 32 + 2 * 32**3)
    assert OPTIMIZERS["one-pass"].update_flops(64, 32) == 0
    # Four ranks with a replica each divide matrices as four that shard them do.
    model = step_problem.shape("qwen3-30b-a3b", 2)
    one, shards, copies = (
        Lengths(model, HARDWARE["H200"], Candidate(degrees, 4096, 1, optimizer="muon"), 8).whole_matrices(model.layers)
        for degrees in (Degrees(), Degrees(fsdp=4, ep=4), Degrees(dp_replicate=2, fsdp=2, ep=2))
    )
    assert one == pytest.approx(4 * shards) == pytest.approx(4 * copies)
    assert one > 2 * 128 * 3 * OPTIMIZERS["muon"].update_flops(2048, 768)


def test_rates_of_lora_plus() -> None:
    training = TrainingSection(learning_rate=1e-3, loraplus_lr_ratio=16, learning_rates={"other.*": 5e-4})
    pair = {"lora_A": nn.Linear(2, 3, bias=False), "lora_B": nn.Linear(3, 2, bias=False)}
    model = nn.ModuleDict({"layer": nn.ModuleDict(pair), "other": nn.ModuleDict({"lora_B": nn.Linear(2, 2)})})
    groups = make_optimizer(model, training).param_groups
    assert [(group["lr_ratio"], len(group["params"])) for group in groups] == [(1, 1), (16, 1), (0.5, 1), (0.5, 1)]


def test_rates_by_patterns(two_ranks: Ranks, tmp_path: Path) -> None:
    """The first pattern that fits counts; a rate of 0 leaves the parameters as they are; one that fits none is refused,
    on all ranks."""
    rates = 'training.learning_rates={"*.experts.*" = 0.0, "*.layers.*" = 1e-3}'
    for name, more in (("some", [rates]), ("all", [])):
        assert start_two(two_ranks, tmp_path / name, [*CHOSEN, *more, "training.weight_decay=0.0"]) == [""] * 2
    first, some, whole_ = weights(tmp_path / "some", 3), weights(tmp_path / "some", 6), weights(tmp_path / "all", 3)
    for name in (one for one in first if one.startswith("model/") and first[one].dim() > 1):
        assert torch.equal(first[name], some[name]) == (".experts." in name), name
        assert not torch.equal(first[name], whole_[name])
    wrong = start_two(two_ranks, tmp_path / "wrong", ['training.learning_rates={"*.expert.*" = 0.0}'])
    assert all("'*.expert.*' fits no parameter that is trained" in text for text in wrong)
