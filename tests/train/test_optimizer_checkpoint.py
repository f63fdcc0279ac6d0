"""Checkpoints of the one-pass optimizer: masters of bfloat16 weights and 8-bit moments, on the same ranks and on
others; states of PyTorch's AdamW; what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers.distributed import DistributedConfig

from carpool.hf.build_model import build_model
from carpool.hf.weights.model_config import make_config
from carpool.optim import AdamW
from carpool.train.checkpoints.checkpoint_files import CheckpointError
from carpool.train.checkpoints.manager import CheckpointManager
from carpool.train.checkpoints.reading import load
from carpool.train.checkpoints.state_tensors import model_tensors, optimizer_tensors
from tests.full_tensor import full_tensor
from tests.hf.meshes import reuse_meshes
from tests.ranks import Ranks
from tests.train.test_checkpoint import EP2, TINY, Layout

BFLOAT16 = torch.bfloat16


def _build(layout: Layout | None, moments: str, seed: int = 0, dtype: torch.dtype = BFLOAT16) -> tuple[Any, AdamW]:
    config = None
    if layout is not None:
        reuse_meshes()
        config = DistributedConfig.from_dict({"ep_implementation": "all_to_all", **layout})
    # Experts whose moments are in blocks, with one that ends in a row.
    sizes = TINY | {"hidden_size": 48, "intermediate_size": 272, "num_experts": 6, "num_hidden_layers": 1}
    model = build_model(make_config("olmoe", sizes), distributed_config=config, dtype=dtype, seed=seed)
    return model, AdamW(model.parameters(), lr=1e-2, moments=moments)


def _step(model: Any, optimizer: torch.optim.Optimizer, step: int) -> None:
    """With gradients that depend on the step and the place alone, whoever has which part."""
    for number, parameter in enumerate(model.parameters()):
        generator = torch.Generator().manual_seed(1000 * step + number)
        whole = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        parameter.grad = whole if not isinstance(parameter, DTensor) else _part(whole, parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def _part(whole: torch.Tensor, like: DTensor) -> DTensor:
    """The rows of a parameter's part, found by numbering them."""
    numbers = torch.arange(like.shape[0], dtype=torch.float32)
    rows = numbers.view(-1, *[1] * (like.dim() - 1)).expand(like.shape)
    plain = distribute_tensor(rows.contiguous(), like.device_mesh, like.placements, src_data_rank=None)
    local = plain.to_local()
    mine = whole[local.flatten(1)[:, 0].long()] if local.dim() > 1 else whole[local.long()]
    return DTensor.from_local(
        mine, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def _full(model: Any, optimizer: AdamW) -> dict[str, torch.Tensor]:
    tensors = model_tensors(model) | optimizer_tensors(model, optimizer)
    return {name: full_tensor(tensor).detach().clone() for name, tensor in tensors.items()}


def _save(folder: str, layout: Layout | None, moments: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Everything at the checkpoint, and two steps later."""
    model, optimizer = _build(layout, moments)
    for step in range(2):
        _step(model, optimizer, step)
    saved = _full(model, optimizer)
    CheckpointManager(folder).save(2, model, optimizer, {})
    for step in range(2, 4):
        _step(model, optimizer, step)
    return saved, _full(model, optimizer)


def _resume(path: str, layout: Layout | None, moments: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    model, optimizer = _build(layout, moments, seed=9)
    load(path, model, optimizer)
    loaded = _full(model, optimizer)
    for step in range(2, 4):
        _step(model, optimizer, step)
    return loaded, _full(model, optimizer)


def _assert_equal(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    assert not [name for name in ours if not torch.equal(ours[name], theirs[name])]


# Whole runs with bfloat16 moments resume in test_loop.py.
@pytest.mark.parametrize("moments", ["int8", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_it_resumes_bit_by_bit(ranks: Ranks, tmp_path: Path, moments: str) -> None:
    """On the same ranks, and in one process, whose stochastic rounding alone is another."""
    results = ranks(_save, str(tmp_path), EP2, moments)
    saved, end = results[0]
    assert any(name.endswith(".low_bits") and value.any() for name, value in saved.items())
    assert (moments == "int8") == any(name.endswith("exp_avg_sq_scale") for name in saved)
    path = str(CheckpointManager(tmp_path).latest())
    for loaded, resumed_end in ranks(_resume, path, EP2, moments):
        _assert_equal(loaded, saved)
        _assert_equal(resumed_end, end)
    loaded, resumed_end = _resume(path, None, moments)
    _assert_equal(loaded, saved)
    if moments == "int8":
        _assert_equal(resumed_end, end)


def _checkpoint(folder: Path, cls: Any, dtype: torch.dtype, **how: Any) -> tuple[Path, Any, Any]:
    torch.manual_seed(0)
    model = torch.nn.Linear(300, 64).to(dtype)
    optimizer = cls(model.parameters(), **how)
    for _ in range(3):
        model(torch.ones(300, dtype=dtype)).square().sum().backward()
        optimizer.step()
    return CheckpointManager(folder).save(3, model, optimizer, {}).path, model, optimizer


def test_a_checkpoint_of_torch_goes_on(tmp_path: Path) -> None:
    path, theirs, state = _checkpoint(tmp_path, torch.optim.AdamW, BFLOAT16)
    model = torch.nn.Linear(300, 64).bfloat16()
    ours = AdamW(model.parameters())
    for p in model.parameters():
        ours.state[p]["low_bits"].fill_(7)
    load(path, model, ours)
    for p, q in zip(model.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(p, q) and not ours.state[p]["low_bits"].any() and ours.state[p]["step"] == 3
        assert torch.equal(ours.state[p]["exp_avg"], state.state[q]["exp_avg"].float())


@pytest.mark.parametrize(
    ("saved", "wanted", "message"),
    [
        ("int8", "float32", "the checkpoint keeps the optimizer's moments in int8, and this run does not"),
        ("bfloat16", "int8", "this run keeps the optimizer's moments in int8, and the checkpoint does not"),
    ],
)
def test_codes_are_not_taken_for_numbers(tmp_path: Path, saved: str, wanted: str, message: str) -> None:
    path, model, _ = _checkpoint(tmp_path, AdamW, torch.float32, moments=saved)
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(CheckpointError, match=message):
        load(path, model, AdamW(model.parameters(), moments=wanted))
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


def test_masters_are_not_lost(tmp_path: Path) -> None:
    path, _, _ = _checkpoint(tmp_path, AdamW, BFLOAT16)
    model = torch.nn.Linear(300, 64)
    with pytest.raises(CheckpointError, match=r"float32 masters .* model\.dtype=\"bfloat16\""):
        load(path, model, torch.optim.AdamW(model.parameters()))


def test_moments_in_bfloat16_go_on_in_float32(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, _, theirs = _checkpoint(tmp_path, AdamW, torch.float32, moments="bfloat16")
    model = torch.nn.Linear(300, 64)
    ours = AdamW(model.parameters())
    load(path, model, ours)
    assert "from torch.bfloat16 to torch.float32" in caplog.text
    for p, q in zip(model.parameters(), theirs.param_groups[0]["params"], strict=True):
        assert torch.equal(ours.state[p]["exp_avg_sq"], theirs.state[q]["exp_avg_sq"].float())
