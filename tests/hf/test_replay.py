"""Recorded choices replayed by transformers' models: the same bits, the router's gradients, and errors on all ranks."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model

import carpool.hf
from carpool.hf import drop_choices, limit_routing, record_rollout, replay, rides
from carpool.hf.routing.replay import _LayerReplay
from carpool.routing import DropOptions, Routing
from carpool.routing.limit import LimitOptions
from tests.hf.parity import EXCEPTIONS
from tests.hf.test_behaviours import _model, _own, _save
from tests.hf.test_limit import NOT_ANSWERED
from tests.hf.tiny_models import discover, tiny_batch, tiny_model
from tests.no_waits import Reads, no_waits
from tests.ranks import Ranks

# How far logits may be from those of float32 on the CPU.
ON_A_DEVICE = [(torch.float32, 1e-4), (torch.bfloat16, 0.1)]
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
            alone = pytest.raises(ValueError, match="has no top-k over experts to replace")
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


def reads(model: Any, batch: dict[str, torch.Tensor], recordings: dict[str, Routing], weights: bool) -> list[int]:
    """How often the host reads what tensors hold: when a replay begins, and in a forward more than without one."""
    with torch.no_grad():
        with Reads() as plain:
            model(**batch)
        with Reads() as beginning:
            context = replay(model, recordings, weights=weights)
            context.__enter__()
        with Reads() as replayed:
            model(**batch)
        context.__exit__(None, None, None)
    return [beginning.count, replayed.count - plain.count]


@pytest.mark.parametrize("weights", [False, True])
def test_a_forward_that_replays_does_not_wait(weights: bool) -> None:
    model: Any = tiny_model(discover()["olmoe"], num_hidden_layers=3).eval()
    carpool.hf.install(model)
    batch = tiny_batch(model)
    model(**batch)
    # It began with four reads for each layer, and a forward had three.
    assert reads(model, batch, recorded(model), weights) == [3, 0]


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
        with replay(model, recordings, weights=weights) as replayed:
            loss = model(**batch).loss
            loss.backward()
        same += [torch.equal(loss, want), replayed.differing().tokens == 0]
    if how != "dropped":
        # Of nothing that was recorded, routers choose, within their limit.
        nothing = {name: Routing(torch.full_like(one.expert_TK, -1), None) for name, one in recordings.items()}
        with replay(model, nothing), torch.no_grad():
            same.append(torch.equal(model(**batch).loss, want))

    # Before a forward sends anything, ranks tell each other once whether their tokens are as many.
    same += [reads(model, batch, recordings, weights)[1] == 2 for weights in (False, True) if how == "plain"]

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
    unlike: list[Any] = [Routing(good + 8, None), None]
    attempt({name: unlike[rank]})
    with replay(model, recordings, weights=True):
        attempt({name: Routing(good, None)})
    with torch.no_grad():
        same.append(torch.allclose(model(**batch).loss, want))
    return same, said


@pytest.mark.parametrize("how", ["plain", "limited", "dropped"])
def test_replays_on_several_ranks(two_ranks: Ranks, tmp_path: Path, how: str) -> None:
    for rank, (same, said) in enumerate(two_ranks(_several, str(tmp_path), how)):
        assert all(same), (rank, same)
        if how == "plain":
            assert "fit" in said[0] or "but the layer got" in said[0]
            assert said[1].startswith("rank 1: model.layers.0") and "experts are 0..7" in said[1]
            assert "must replay the same layers alike" in said[2]
            assert "recording for 'model.layers.9', but this model's layers are" in said[3]
            assert "the recording has no weights" in said[4]
            assert "some recorded choices are -1" in said[5]
            assert all(one in said[6] for one in ("rank 0: ", "experts are 0..7", "; rank 1: ", "is no recording"))
            assert "is replayed already" in said[7]


# --------------------------------------------------------------------------------------------------------------------
# A rollout's choices, replayed in one forward over the whole texts.


PROMPTS = [[0, 0, 5, 9, 11], [7, 3, 8, 4, 20], [0, 6, 6, 30, 12]]


def _rollout(model: Any, rows: slice, count: int = 6) -> tuple[torch.Tensor, torch.Tensor, Any]:
    ids_BL = torch.tensor(PROMPTS[rows], device=model.device)
    with record_rollout(model) as rollout:
        out_BL = model.generate(
            ids_BL, attention_mask=(ids_BL > 0).long(), max_new_tokens=count, eos_token_id=None, pad_token_id=0,
            do_sample=False, use_cache=True,
        )  # fmt: skip
    return out_BL, torch.cat([ids_BL > 0, ids_BL.new_ones(len(ids_BL), count) > 0], 1), rollout


def _logits(model: Any, out_BL: torch.Tensor, mask_BL: torch.Tensor) -> torch.Tensor:
    """Of the tokens that a generation has read."""
    position_BL = (mask_BL.cumsum(1) - 1).clamp(min=0)
    return model(input_ids=out_BL, attention_mask=mask_BL.long(), position_ids=position_BL).logits[_read(mask_BL)]


def _read(mask_BL: torch.Tensor) -> torch.Tensor:
    """All tokens that a generation has read: no padding, and not the last one."""
    return torch.cat([mask_BL[:, :-1], mask_BL[:, :1] & False], 1)


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
        read_T = read_BL.flatten()
        assert torch.equal(own.routing.expert_TK[read_T], recordings[name].expert_TK[read_T])
        assert not torch.equal(before[read_T], own.routing.expert_TK[read_T])
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
    last_BK = next(iter(rollout.routings(9).values())).expert_TK.view(2, 9, 2)[:, -1]
    assert (last_BK == -1).all()
    mask_BL = torch.arange(12).expand(2, 12) < torch.tensor([[8], [9]])
    padded_BLK = next(iter(rollout.routings(12, mask_BL).values())).expert_TK.view(2, 12, 2)
    assert (padded_BLK[:, 8:] == -1).all() and (padded_BLK[:, :8] >= 0).all()
    for length, mask in ((10, None), (12, torch.ones(2, 12))):
        with pytest.raises(ValueError, match=f"read 8 tokens of each sequence, so {length} cannot be replayed"):
            rollout.routings(length, mask)
    with pytest.raises(ValueError, match=r"attention_mask has shape \(2, 8\), the rollout \(2, 9\)"):
        rollout.routings(9, torch.ones(2, 8))
    with record_rollout(model) as twice:
        for _ in range(2):
            model(input_ids=torch.tensor(PROMPTS))
    with pytest.raises(ValueError, match="record each separately"):
        twice.routings(5)
    with pytest.raises(ValueError, match="no Carpool layers"), record_rollout(tiny_model(discover()["olmoe"])):
        pass
    next(iter(rides(model).values())).token_slice = (0, 2)
    several = tiny_model(discover()["ernie4_5_vl_moe"])
    carpool.hf.install(several)
    for refused, why in ((model, "a slice of the tokens"), (several, "several modules of experts")):
        with pytest.raises(ValueError, match=why), record_rollout(refused):
            pass


def test_a_rollout_with_adapters() -> None:
    """`generate` of peft's model runs the forward of the model inside."""
    model: Any = tiny_model(discover()["qwen3_moe"]).eval()
    carpool.hf.install(model)
    model = get_peft_model(model, LoraConfig(target_modules=["q_proj"]))
    out_BL, mask_BL, rollout = _rollout(model, slice(0, 3))
    recordings = rollout.routings(out_BL.shape[1], mask_BL)
    with replay(model, recordings) as replayed:
        _logits(model, out_BL, mask_BL)
    assert list(recordings) == list(rides(model)) and replayed.differing().tokens == 0


# --------------------------------------------------------------------------------------------------------------------
# What servers return of a rollout, and the share of tokens that would have chosen otherwise.


def _returned(model: Any, rollout: Any, mask_BL: torch.Tensor) -> list[np.ndarray]:
    """As vLLM: all decoder layers, zeros for those without experts, all tokens but the last."""
    recordings = rollout.routings(mask_BL.shape[1])
    chosen = np.zeros((*mask_BL.shape, model.config.num_hidden_layers, model.config.num_experts_per_tok), np.uint8)
    for name, one in recordings.items():
        chosen[:, :, int(name.split(".")[2])] = one.expert_TK.view(*mask_BL.shape, -1).numpy().astype(np.uint8)
    return [row[real][:-1] for row, real in zip(chosen, mask_BL.numpy(), strict=True)]


def _encoded(array: np.ndarray) -> str:
    buffer = io.BytesIO()
    np.save(buffer, array)
    return base64.b64encode(buffer.getvalue()).decode()


def test_what_servers_return() -> None:
    """The recordings of a rollout come back from each form, also with padding on both sides."""
    model: Any = tiny_model(discover()["deepseek_v3"], num_hidden_layers=3, first_k_dense_replace=1).eval()
    carpool.hf.install(model)
    out_BL, mask_BL, rollout = _rollout(model, slice(0, 3))
    mask_BL[1, -2:] = False
    layers, length = list(rides(model)), out_BL.shape[1]
    assert len(layers) < model.config.num_hidden_layers
    read_BL = mask_BL & torch.cat([mask_BL[:, 1:], mask_BL[:, :1] & False], 1)
    arrays, want = _returned(model, rollout, mask_BL), rollout.routings(length, read_BL)
    with_experts = [int(name.split(".")[2]) for name in layers]
    forms: list[list[Any]] = [
        arrays,
        [_encoded(one) for one in arrays],
        [one[:, with_experts].tolist() for one in arrays],
        [torch.from_numpy(one.astype(np.int32)) for one in arrays],
    ]
    for form in forms:
        found = carpool.hf.routed_experts(model, form, mask_BL.long())
        assert list(found) == layers
        assert all(torch.equal(found[name].expert_TK, want[name].expert_TK) for name in layers)
    # Nothing may be known of some tokens, and of a text; and the last token may be there.
    part = arrays[0].astype(np.int64)
    part[:2] = part[4] = -1
    found = carpool.hf.routed_experts(model, [np.concatenate([part, part[:1]]), None, arrays[2]], mask_BL)
    for name in layers:
        chosen_BLK, want_BLK = (one[name].expert_TK.view(3, length, -1).clone() for one in (found, want))
        first = mask_BL[0].nonzero()[0, 0]
        want_BLK[0, : first + 2] = want_BLK[0, first + 4] = want_BLK[1] = -1
        assert torch.equal(chosen_BLK, want_BLK)
    with replay(model, found) as replayed:
        _logits(model, out_BL, mask_BL)
    assert replayed.differing().routers == 0


def check_on(device: str, dtype: torch.dtype, bound: float) -> None:
    """Choices of a rollout of the CPU, as a server returns them, replayed on `device` after the routers have moved: the
    same choices as on the CPU, and the same logits up to `bound` of the largest."""
    found = []
    for place, kind in (("cpu", torch.float32), (device, dtype)):
        # Multiples of 8, which grouped products of bfloat16 take.
        model: Any = tiny_model(discover()["deepseek_v3"], hidden_size=64, moe_intermediate_size=32)
        model = model.to(place, kind).eval()
        carpool.hf.install(model)
        if not found:
            out_BL, mask_BL, rollout = _rollout(model, slice(0, 3))
            returned = _returned(model, rollout, mask_BL)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("gate.weight"):
                    noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0))
                    parameter.add_(noise.to(parameter))
            ids_BL, there_BL = out_BL.to(place), mask_BL.to(place)
            recordings = carpool.hf.routed_experts(model, returned, there_BL)
            own = _logits(model, ids_BL, there_BL)
            choose = no_waits(place == "cuda")(_LayerReplay._choose)
            with mock.patch.object(_LayerReplay, "_choose", choose), replay(model, recordings) as replayed:
                logits = _logits(model, ids_BL, there_BL)
        read_T, differing = _read(mask_BL).flatten(), replayed.differing()
        assert differing.tokens > 0.5 and not torch.equal(own, logits)
        chosen = [one.routing.expert_TK.cpu()[read_T] for one in rides(model).values()]
        assert all(
            torch.equal(one, other.expert_TK.cpu()[read_T])
            for one, other in zip(chosen, recordings.values(), strict=True)
        )
        found.append((chosen, logits.float().cpu(), differing.routers))
    (theirs, want, often), (ours, got, differed) = found
    assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))
    assert float((got - want).abs().max()) <= bound * float(want.abs().max())
    assert differed == pytest.approx(often, abs=0 if dtype == torch.float32 else 0.1)


@pytest.mark.parametrize(("dtype", "bound"), ON_A_DEVICE)
def test_the_same_choices_in_another_type(dtype: torch.dtype, bound: float) -> None:
    """And on a GPU: tests/gpu/test_replay_gpu.py."""
    check_on("cpu", dtype, bound)


def test_layers_behind_the_last_one_have_no_choices() -> None:
    """Transformers runs the first `num_hidden_layers` of its list. Later ones are multi-token prediction layers."""
    model: Any = tiny_model(discover()["qwen3_moe"], num_hidden_layers=3).eval()
    model.config.num_hidden_layers = 2
    carpool.hf.install(model)
    out_BL, mask_BL, rollout = _rollout(model, slice(0, 3))
    found = carpool.hf.routed_experts(model, _returned(model, rollout, mask_BL), mask_BL)
    assert list(found) == list(rides(model))[:2]
    with replay(model, found) as replayed:
        _logits(model, out_BL, mask_BL)
    assert replayed.differing().tokens == 0


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda arrays: arrays[:2], "of 2 sequences were given, but the batch has 3"),
        (lambda arrays: [arrays[0], arrays[1], arrays[0]], "sequence 2: the array has 8 tokens, but .* read 9"),
        (lambda arrays: [arrays[1], *arrays[1:]], "sequence 0: the array has 10 tokens, but the sampler read 8"),
        (lambda arrays: [one[:, :1] for one in arrays], r"shape is \(8, 1, 2\) of uint8, .* for all 2 layers"),
        (lambda arrays: [one[:, :, :1] for one in arrays], r"shape is \(8, 2, 1\) .* K = 2\) of whole .* this model"),
        (lambda arrays: [one.astype(np.float32) for one in arrays], "of float32, but must be .* of whole numbers"),
        (lambda arrays: [one[0] for one in arrays], r"shape is \(2, 2\) of uint8, but .* \(tokens, layers, K"),
        (lambda arrays: [one + 7 for one in arrays], r"token 0 chose \[.*\] in model.layers.0.mlp.experts.* 0\.\.7"),
        (lambda arrays: [one.astype(int) * 2 - 1 for one in arrays], r"token 0 chose \[-1, 1\] in .* different ids"),
        (lambda arrays: [one * 0 for one in arrays], r"token 0 chose \[0, 0\] in .*no recorded routing: give"),
        (lambda arrays: ["bm9uZQ=="] * 3, "sequence 0: a string must be base64 of numpy.save"),
        (lambda arrays: [None] * 3, "no sequence has routed experts"),
    ],
)  # fmt: skip
def test_arrays_that_do_not_fit_the_sequences(change: Any, said: str) -> None:
    model: Any = tiny_model(discover()["qwen3_moe"])
    carpool.hf.install(model)
    mask_BL = torch.arange(11) >= torch.tensor([[2], [0], [1]])
    some = torch.arange(2).expand(11, model.config.num_hidden_layers, 2).numpy().astype(np.uint8)
    arrays = [some[:8], some[:10], some[:9]]
    carpool.hf.routed_experts(model, arrays, mask_BL)
    with pytest.raises(ValueError, match=said):
        carpool.hf.routed_experts(model, change(arrays), mask_BL)
    with pytest.raises(ValueError, match="not zero for tokens, but is None"):
        carpool.hf.routed_experts(model, arrays, None)  # type: ignore[arg-type]


def _one_bad(path: str) -> list[str]:
    """What each rank raises, if the array of rank 1 is bad; and that of both."""
    _save("qwen3_moe", path)
    model, rank, said = _model("qwen3_moe", path), dist.get_rank(), []
    good = np.broadcast_to(np.arange(2), (3, model.config.num_hidden_layers, 2))
    for arrays in ([good[:, :, rank:]], [good[:, :1]], [good]):
        try:
            carpool.hf.routed_experts(model, arrays, torch.ones(1, 4))
            said.append("")
        except ValueError as error:
            said.append(str(error))
    return said


def test_all_ranks_refuse_what_one_cannot_use(two_ranks: Ranks, tmp_path: Path) -> None:
    (one, both, none), others = two_ranks(_one_bad, str(tmp_path))
    assert one.startswith("rank 1: routed experts of sequence 0: the shape is (3, 2, 1)") and both.startswith(
        "routed experts of"
    )
    assert others == [one, both, none] and none == ""


def _differing(path: str) -> tuple[Any, Any, bool]:
    """On rank r, r + 1 of 12 tokens recorded another expert in the last layer; the first 2 tokens are not recorded."""
    _save("olmoe", path)
    model = _model("olmoe", path).eval()
    ids_BL = torch.randint(1, 32, (2, 7), generator=torch.Generator().manual_seed(dist.get_rank()))
    with torch.no_grad():
        model(input_ids=ids_BL)
        recordings = recorded(model)
        last = list(recordings)[-1]
        mixed = {name: Routing(one.expert_TK.clone(), None) for name, one in recordings.items()}
        for token in range(3, 4 + dist.get_rank()):
            mine = mixed[last].expert_TK[token]
            mine[0] = next(expert for expert in range(8) if expert not in mine.tolist())
        for one in mixed.values():
            one.expert_TK[:2] = -1
        with replay(model, mixed) as replayed:
            model(input_ids=ids_BL)
        chosen = rides(model)[last].routing.expert_TK
        same = torch.equal(chosen[:2].sort(1).values, recordings[last].expert_TK[:2].sort(1).values)
        # Recorded weights: only what the layers before have changed differs.
        with replay(model, {name: Routing(mixed[name].expert_TK, one.weight_TK) for name, one in recordings.items()},
                    weights=True) as weighed:  # fmt: skip
            model(input_ids=ids_BL)
    return replayed.differing(), weighed.differing(), same


def test_how_many_would_have_chosen_otherwise(two_ranks: Ranks, tmp_path: Path) -> None:
    for differing, weighed, same in two_ranks(_differing, str(tmp_path)):
        first, last = differing.layers
        assert same and differing.layers == {first: 0.0, last: 3 / 24}
        assert (differing.routers, differing.tokens) == (3 / 48, 3 / 24)
        assert weighed.layers[first] == 0 and weighed.layers[last] >= 3 / 24


def test_equal_scores_do_not_differ() -> None:
    """Experts 1 to 7 have the same score. Two of them are as good as any others, but not where expert 0 is better."""
    model: Any = tiny_model(discover()["olmoe"], num_hidden_layers=1).eval()
    carpool.hf.install(model)
    model.model.layers[0].mlp.gate.weight.data[1:] = 0
    model(**tiny_batch(model))
    ((name, recorded_first),) = recorded(model).items()
    better_T = (recorded_first.expert_TK == 0).any(1)
    others_TK = torch.tensor([[3, 5]]).repeat(len(better_T), 1).int()
    with replay(model, {name: Routing(others_TK, None)}) as replayed:
        model(**tiny_batch(model))
    assert replayed.differing().tokens == int(better_T.sum()) / len(better_T) and 0 < better_T.sum() < len(better_T)


def test_the_balance_loss_is_of_what_routers_choose_themselves() -> None:
    """With other choices replayed, a layer's balance loss and its gradient are the same bits."""
    model: Any = tiny_model(discover()["olmoe"], num_hidden_layers=1).train()
    carpool.hf.install(model)
    batch, found = tiny_batch(model), []
    router = model.model.layers[0].mlp.gate.weight
    others: dict[str, Routing] = {}
    for recordings in (others, others):
        model.zero_grad(set_to_none=True)
        with replay(model, recordings) as replayed:
            out = model(**batch, output_router_logits=True)
        out.aux_loss.backward()
        found.append((out.aux_loss.detach(), router.grad, out.logits))
        others |= {name: Routing((one.expert_TK + 1) % 8, None) for name, one in recorded(model).items()}
    assert replayed.differing().tokens > 0.5 and found[0][1].abs().sum() > 0
    assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][1], found[1][1])
    assert not torch.equal(found[0][2], found[1][2])
    with replay(model, others) as unused, pytest.raises(ValueError, match="no forward has been replayed"):
        unused.differing()
