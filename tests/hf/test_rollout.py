"""A rollout's choices, replayed in one forward over the whole texts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import carpool.hf
from carpool.hf import record_rollout, replay, rides
from tests.hf.test_behaviours import _model, _save
from tests.hf.tiny_models import discover, tiny_model
from tests.ranks import Ranks

PROMPTS = [[0, 0, 5, 9, 11], [7, 3, 8, 4, 20], [0, 6, 6, 30, 12]]


def _rollout(model: Any, rows: slice, count: int = 6) -> tuple[torch.Tensor, torch.Tensor, Any]:
    ids_BL = torch.tensor(PROMPTS[rows])
    with record_rollout(model) as rollout:
        out_BL = model.generate(
            ids_BL, attention_mask=(ids_BL > 0).long(), max_new_tokens=count, eos_token_id=None, pad_token_id=0,
            do_sample=False, use_cache=True,
        )  # fmt: skip
    return out_BL, torch.cat([ids_BL > 0, torch.ones(len(ids_BL), count, dtype=torch.bool)], 1), rollout


def _logits(model: Any, out_BL: torch.Tensor, mask_BL: torch.Tensor) -> torch.Tensor:
    """Of the tokens that a generation has read."""
    position_BL = (mask_BL.cumsum(1) - 1).clamp(min=0)
    return model(input_ids=out_BL, attention_mask=mask_BL.long(), position_ids=position_BL).logits[_read(mask_BL)]


def _read(mask_BL: torch.Tensor) -> torch.Tensor:
    """All tokens that a generation has read: no padding, and not the last one."""
    return torch.cat([mask_BL[:, :-1], torch.zeros(len(mask_BL), 1, dtype=torch.bool)], 1)


@pytest.mark.parametrize("folder", ["qwen3_moe", "deepseek_v3"])
def test_a_rollout_is_replayed(folder: str) -> None:
    """The choices are those of a forward over the whole texts. When routers have moved, they still are, and the router
    learns from them."""
    model: Any = tiny_model(discover()[folder]).eval()
    carpool.hf.install(model)
    out_BL, mask_BL, rollout = _rollout(model, slice(0, 3))
    recordings = rollout.routings(out_BL.shape[1])
    read_BL = _read(mask_BL)
    want = _logits(model, out_BL, mask_BL)
    for name, own in rides(model).items():
        mine_BLK = own.routing.expert_TK.view(*out_BL.shape, -1).sort(-1).values
        theirs_BLK = recordings[name].expert_TK.view(*out_BL.shape, -1).sort(-1).values
        assert torch.equal(mine_BLK[read_BL], theirs_BLK[read_BL])
    with replay(model, recordings):
        torch.testing.assert_close(_logits(model, out_BL, mask_BL), want, rtol=1e-4, atol=1e-5)
    routers = [p for name, p in model.named_parameters() if name.endswith("gate.weight")]
    with torch.no_grad():
        for router in routers:
            router.add_(torch.randn(router.shape, generator=torch.Generator().manual_seed(0)))
    _logits(model, out_BL, mask_BL)
    moved = [own.routing.expert_TK.clone() for own in rides(model).values()]
    with replay(model, recordings):
        _logits(model, out_BL, mask_BL).square().mean().backward()
    for before, (name, own) in zip(moved, rides(model).items(), strict=True):
        assert torch.equal(own.routing.expert_TK, recordings[name].expert_TK) and not torch.equal(
            before, own.routing.expert_TK
        )
    assert all(router.grad is not None and router.grad.abs().sum() > 0 for router in routers)


def _over_ranks(path: str) -> bool:
    """Each rank has a prompt, or two; the texts are of other lengths."""
    _save("qwen3_moe", path)
    model = _model("qwen3_moe", path).eval()
    rank = dist.get_rank()
    out_BL, mask_BL, rollout = _rollout(model, slice(rank % 2, rank % 2 + 1 + rank // 2), 3 + rank)
    recordings = rollout.routings(out_BL.shape[1])
    want = _logits(model, out_BL, mask_BL)
    with replay(model, recordings):
        return torch.allclose(_logits(model, out_BL, mask_BL), want, rtol=1e-4, atol=1e-5)


def test_over_ranks(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(_over_ranks, str(tmp_path)) == [True] * 4


def test_what_was_not_read_is_not_replayed() -> None:
    model: Any = tiny_model(discover()["olmoe"]).eval()
    carpool.hf.install(model)
    _, _, rollout = _rollout(model, slice(0, 2), 4)
    name = next(iter(rides(model)))
    assert rollout.choices(name, 9).shape == (2, 9, 2)
    with pytest.raises(ValueError, match="read 8 tokens of each sequence, so 10 cannot be replayed"):
        rollout.routings(10)
    with record_rollout(model) as twice:
        for _ in range(2):
            model(input_ids=torch.tensor(PROMPTS))
    with pytest.raises(ValueError, match="record each for itself"):
        twice.routings(5)
    with pytest.raises(ValueError, match="no Carpool layers"), record_rollout(tiny_model(discover()["olmoe"])):
        pass
