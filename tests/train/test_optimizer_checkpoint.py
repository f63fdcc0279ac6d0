"""The optimizer of a run: which one it gets, what it keeps, and its checkpoints (masters of bfloat16 weights and 8-bit
moments, on the same ranks and on others; states of PyTorch's AdamW; what is refused)."""

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
from carpool.optim.adamw import TorchAdamW
from carpool.train.build.assemble import make_optimizer
from carpool.train.checkpoints.checkpoint_files import CheckpointError
from carpool.train.checkpoints.manager import CheckpointManager
from carpool.train.checkpoints.reading import load
from carpool.train.config import load_config
from carpool.train.plan.estimate import state_bytes
from tests.hf.meshes import reuse_meshes
from tests.ranks import Ranks
from tests.train.test_checkpoint import EP2, TINY, Layout, _full

BFLOAT16 = torch.bfloat16
Tensors = dict[str, torch.Tensor]


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


def _save(folder: str, layout: Layout | None, moments: str) -> tuple[Tensors, Tensors]:
    """Everything at the checkpoint, and two steps later."""
    model, optimizer = _build(layout, moments)
    for step in range(2):
        _step(model, optimizer, step)
    saved = _full(model, optimizer)
    CheckpointManager(folder).save(2, model, optimizer, {})
    for step in range(2, 4):
        _step(model, optimizer, step)
    return saved, _full(model, optimizer)


def _resume(path: str, layout: Layout | None, moments: str) -> tuple[Tensors, Tensors]:
    model, optimizer = _build(layout, moments, seed=9)
    load(path, model, optimizer)
    loaded = _full(model, optimizer)
    for step in range(2, 4):
        _step(model, optimizer, step)
    return loaded, _full(model, optimizer)


def _assert_equal(ours: Tensors, theirs: Tensors) -> None:
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


def test_states_of_other_optimizers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, theirs, state = _checkpoint(tmp_path, torch.optim.AdamW, BFLOAT16)
    model = torch.nn.Linear(300, 64).bfloat16()
    ours = AdamW(model.parameters())
    for p in model.parameters():
        ours.state[p]["low_bits"].fill_(7)
    load(path, model, ours)
    for p, q in zip(model.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(p, q) and not ours.state[p]["low_bits"].any() and ours.state[p]["step"] == 3
        assert torch.equal(ours.state[p]["exp_avg"], state.state[q]["exp_avg"].float())
    path, _, _ = _checkpoint(tmp_path, AdamW, BFLOAT16)
    model = torch.nn.Linear(300, 64)
    with pytest.raises(CheckpointError, match=r"float32 masters .* model\.dtype=\"bfloat16\""):
        load(path, model, torch.optim.AdamW(model.parameters()))
    path, _, theirs = _checkpoint(tmp_path, AdamW, torch.float32, moments="bfloat16")
    model = torch.nn.Linear(300, 64)
    ours = AdamW(model.parameters())
    load(path, model, ours)
    assert "from torch.bfloat16 to torch.float32" in caplog.text
    for p, q in zip(model.parameters(), theirs.param_groups[0]["params"], strict=True):
        assert torch.equal(ours.state[p]["exp_avg_sq"], theirs.state[q]["exp_avg_sq"].float())


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


def _model(dtype: str) -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(512, 128), torch.nn.LayerNorm(128)).to(getattr(torch, dtype))


@pytest.mark.parametrize(
    ("dtype", "optimizer", "moments", "cls", "lossy"),
    [
        ("float32", "auto", "float32", TorchAdamW, ""),
        ("float16", "auto", "float32", TorchAdamW, ""),
        ("float32", "auto", "int8", AdamW, "moments are kept in int8"),
        ("float32", "one-pass", "float32", AdamW, ""),
        ("bfloat16", "auto", "float32", AdamW, ""),
        ("bfloat16", "auto", "bfloat16", AdamW, "moments are kept in bfloat16"),
        ("bfloat16", "auto", "int8", AdamW, "moments are kept in int8"),
        ("bfloat16", "torch", "float32", TorchAdamW, "without masters"),
    ],
)
def test_who_updates_and_what_it_keeps(dtype: str, optimizer: str, moments: str, cls: Any, lossy: str) -> None:
    settings = [f"model.dtype={dtype}", f"training.optimizer={optimizer}", f"training.optimizer_state_dtype={moments}"]
    config = load_config(None, settings)
    model = _model(dtype)
    made = make_optimizer(model, config.training)
    assert type(made) is cls and [group["weight_decay"] for group in made.param_groups] == [0.1, 0.0]
    said, reasons = made.describe()
    assert len(reasons) == bool(lossy) and all(lossy in reason for reason in reasons)
    assert said["masters"] == (dtype == "bfloat16" and cls is AdamW)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    made.step()
    weight = model[0].weight  # type: ignore[index]
    kept = sum(value.nbytes for name, value in made.state[weight].items() if name != "step")
    assert kept / weight.numel() == state_bytes(config)
