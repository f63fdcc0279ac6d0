"""Activations of decoder layers in host memory: the same gradients, and little that stays on the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from carpool import KeptPolicies
from carpool.activations.host_memory import HostPool
from carpool.activations.offload import Away, Offloader
from carpool.hf import install, offload_layers, rides, set_kept
from carpool.hf.decoder_layers import offloaders
from carpool.hf.seam.find_modules import decoder_layers
from tests.hf.parity import quiet
from tests.hf.tiny_models import discover, tiny_batch, tiny_model


def gradients(model: Any, batch: dict[str, torch.Tensor], autocast: bool) -> dict[str, torch.Tensor]:
    model.zero_grad()
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(**batch).loss
        loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(("folder", "autocast"), [("olmoe", True), ("deepseek_v3", False)])
def test_the_gradients_are_those_without(folder: str, autocast: bool) -> None:
    quiet()
    model: Any = tiny_model(discover()[folder]).train()
    install(model)
    batch = tiny_batch(model)
    want = gradients(model, batch, autocast)
    offload, put = offload_layers(model), []
    plain = offload.offloader.put
    offload.offloader.put = lambda items, lane=0: put.append([item.data for item in items]) or plain(items, lane)  # type: ignore[method-assign, func-returns-value]
    for policies in (KeptPolicies(), KeptPolicies("offload", "offload")):
        put.clear()
        set_kept(model, policies)
        got = gradients(model, batch, autocast)
        assert got.keys() == want.keys() and all(torch.equal(got[name], want[name]) for name in want)
        assert len(put) == 2 * len(decoder_layers(model)), "once for each layer and forward"
        assert not offload.offloader._parcels and not offload.offloader._lanes[0].here
    # Neither weights, nor their copies in another dtype, nor what rides keep by a policy of their own.
    tokens, hidden = batch["input_ids"].numel(), model.config.hidden_size
    for weight in model.parameters():
        same = [
            t.shape
            for tensors in put
            for t in tensors
            for turned in (weight.detach(), weight.detach().mT if weight.dim() > 1 else weight.detach())
            if t.numel() == turned.numel() and torch.equal(t, turned.flatten().to(t.dtype))
        ]
        assert not same or weight.dim() == 1
    assert all(sum(t.numel() >= tokens * hidden for t in tensors) >= 4 for tensors in put)
    addresses = [t.data_ptr() for t in put[0]]
    assert len(set(addresses)) == len(addresses), "each once"


def test_steps_copy_to_the_same_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a CUDA graph must: it knows addresses."""
    quiet()
    model: Any = tiny_model(discover()["olmoe"]).train()
    install(model)
    offload_layers(model)
    set_kept(model, KeptPolicies("offload", "offload"))
    batch, found = tiny_batch(model), []
    of_layers, of_rides = (one for one in offloaders(model))
    assert of_layers is not of_rides
    plain = Offloader.put

    def put(offloader: Offloader, *args: Any) -> list[Away]:
        away = plain(offloader, *args)
        found.append([item.data.data_ptr() for item in offloader._parcels[int(away[0].data)].host])
        return away

    monkeypatch.setattr(Offloader, "put", put)
    steps = []
    for _ in range(3):
        found.clear()
        gradients(model, batch, False)
        for offloader in (of_layers, of_rides):
            offloader.join()
            assert not any(lane.here for lane in offloader._lanes.values())
        taken = [0 if one._pool is None else one._pool.bytes for one in (of_layers, of_rides)]
        steps.append((list(found), taken))
    assert steps[0][1] == steps[1][1] == steps[2][1] and all(steps[0][1])
    assert steps[1][0] == steps[2][0]
    # Of two forwards with a backward in between, the second takes what the first has given back.
    addresses = [address for item in steps[0][0] for address in item if address]
    assert len(set(addresses)) == len(addresses) // 2


def test_a_buffer_is_not_taken_for_much_less() -> None:
    pool = HostPool(torch.device("cpu"))
    first, second = pool.take(1000), pool.take(600)
    pool.give(first)
    pool.give(second)
    assert pool.take(500) is not first and pool.take(501) is first and pool.take(900).numel() == 900
    assert pool.bytes == 2500


def test_rows_that_are_kept_stay() -> None:
    quiet()
    model: Any = tiny_model(discover()["olmoe"]).train()
    install(model)
    offload, sizes = offload_layers(model), {}
    for policies in (KeptPolicies(), KeptPolicies("offload", "offload")):
        set_kept(model, policies)
        loss = model(**tiny_batch(model)).loss
        parcels = offload.offloader._parcels.values()
        sizes[policies] = sorted(item.data.nbytes for parcel in parcels for item in parcel.host)
        del loss
        assert not parcels, "nothing outlives its graph"
    assert len(set(map(tuple, sizes.values()))) == 1, "what layers offload does not depend on what rides do"
    assert all(own.policies.rows == "offload" for own in rides(model).values())


def test_without_gradients_nothing_is_offloaded() -> None:
    quiet()
    model: Any = tiny_model(discover()["olmoe"])
    install(model)
    offload = offload_layers(model)
    with torch.no_grad():
        model(**tiny_batch(model))
    assert not offload.offloader._lanes
