"""Recorded choices replayed by transformers' models: the same bits, the router's gradients, and errors on all ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import carpool.hf
from carpool.hf import drop_choices, limit_routing, record_rollout, replay, rides
from carpool.routing import DropOptions, Routing
from carpool.routing.limit import LimitOptions
from tests.hf.parity import EXCEPTIONS
from tests.hf.test_behaviours import _model, _own, _save
from tests.hf.test_limit import NOT_ANSWERED
from tests.hf.tiny_models import discover, tiny_batch, tiny_model
from tests.ranks import Ranks

FEW = ("olmoe", "gpt_oss", "deepseek_v3", "gemma4", "phimoe")


def recorded(model: Any) -> dict[str, Routing]:
    return {name: own.routing for name, own in rides(model).items() if own.routing is not None}


@pytest.mark.parametrize(
    "folder",
    [
        pytest.param(n, marks=() if n in FEW else pytest.mark.slow)
        for n in sorted(discover().keys() - EXCEPTIONS.keys())
    ],
)
def test_every_router_replays(folder: str) -> None:
    """The same bits for the same choices; and other choices are taken, too."""
    model: Any = tiny_model(discover()[folder]).eval()
    carpool.hf.install(model)
    with torch.no_grad():
        want = model(**tiny_batch(model))[0]
        recordings = recorded(model)
        with replay(model, recordings, weights=True):
            assert torch.equal(model(**tiny_batch(model))[0], want)
        if folder in NOT_ANSWERED:
            alone = pytest.raises(ValueError, match="has no top-k over experts that could be answered")
            with alone, replay(model, recordings):
                model(**tiny_batch(model))
            return
        with replay(model, recordings):
            assert torch.equal(model(**tiny_batch(model))[0], want)
        others = {name: Routing((one.expert_TK + 1) % 8, None) for name, one in recordings.items()}
        with replay(model, others):
            model(**tiny_batch(model))
        assert all(torch.equal(one.expert_TK, others[name].expert_TK) for name, one in recorded(model).items())
        assert torch.equal(model(**tiny_batch(model))[0], want)


def test_choices_train_the_router_and_weights_do_not() -> None:
    model: Any = tiny_model(discover()["olmoe"]).train()
    carpool.hf.install(model)
    want = model(**tiny_batch(model)).loss
    want.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    recordings = recorded(model)
    for weights in (False, True):
        model.zero_grad(set_to_none=True)
        with replay(model, recordings, weights=weights):
            loss = model(**tiny_batch(model)).loss
            loss.backward()
        assert torch.equal(loss, want)
        for name, parameter in model.named_parameters():
            if weights and ".gate." in name:
                assert parameter.grad is None or not parameter.grad.any()
            elif not weights:
                assert torch.equal(parameter.grad, gradients[name]), name


def _several(path: str, how: str) -> tuple[list[bool], list[str]]:
    """Replays on two ranks, with layers computed again; of a limited or dropping model, without that; errors."""
    _save("olmoe", path)
    model, same, said = _model("olmoe", path), [], []
    if how == "limited":
        limit_routing(model, LimitOptions(limit_ranks=1))
    if how == "dropped":
        drop_choices(model, DropOptions(capacity_factor=0.5), 2)
    model.activation_checkpointing_enable({"use_reentrant": False})
    batch = _own(model)
    want = model(**batch).loss
    recordings = recorded(model)
    name, rank = next(iter(recordings)), dist.get_rank()
    for weights in (True,) if how == "dropped" else (False, True):
        model.zero_grad(set_to_none=True)
        with replay(model, recordings, weights=weights):
            loss = model(**batch).loss
            loss.backward()
        same.append(torch.equal(loss, want))

    def attempt(bad: dict[str, Routing], **options: Any) -> None:
        try:
            with replay(model, bad, **options), torch.no_grad():
                model(**batch)
        except ValueError as error:
            said.append(str(error))
        else:
            said.append("")

    good = recordings[name].expert_TK
    attempt({name: Routing(good[: len(good) - rank], None)})
    attempt({name: Routing(torch.full_like(good, 8) if rank == 1 else good, None)})
    attempt({name: recordings[name]} if rank else {}, weights=True)
    attempt({"model.layers.9": recordings[name]})
    attempt({name: Routing(good, None)}, weights=True)
    attempt({name: Routing(good.masked_fill(good == good[0, 0], -1), None)})
    with torch.no_grad():
        same.append(torch.allclose(model(**batch).loss, want))
    return same, said


@pytest.mark.parametrize("how", ["plain", "limited", "dropped"])
def test_replays_on_several_ranks(two_ranks: Ranks, tmp_path: Path, how: str) -> None:
    for rank, (same, said) in enumerate(two_ranks(_several, str(tmp_path), how)):
        assert all(same), (rank, same)
        if how == "plain":
            assert "fit" in said[0] or "but the layer got" in said[0]
            assert "experts are 0..7" in said[1] and ("rank 1 cannot replay" in said[1]) == (rank != 1)
            assert "must replay the same layers alike" in said[2]
            assert "recording for 'model.layers.9', but this model's layers are" in said[3]
            assert "the recording has no weights" in said[4]
            assert "some recorded choices are -1" in said[5]


# --------------------------------------------------------------------------------------------------------------------
# A rollout's choices, replayed in one forward over the whole texts.


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
