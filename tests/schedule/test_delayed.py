"""Weight gradients that wait for a ride: the bits of autograd's, computed in the window that they are put off to."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import carpool
from carpool.schedule import delayed as module
from carpool.schedule.delayed import Delayed, decoder_layer
from carpool.schedule.priority import RidesFirst
from tests.ranks import Ranks, mesh

HIDDEN, INNER, EXPERTS = 16, 24, 8


class Block(nn.Module):
    """Linear layers, two of which may be used twice, and then a ride."""

    def __init__(self, ep_mesh: Any, uses: int) -> None:
        super().__init__()
        self.uses = uses
        self.up, self.down = nn.Linear(HIDDEN, INNER), nn.Linear(INNER, HIDDEN, bias=False)
        self.frozen = nn.Linear(HIDDEN, HIDDEN).requires_grad_(False)
        self.moe = carpool.MoE(HIDDEN, 8, EXPERTS, 2, ep_mesh=ep_mesh)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.uses):
            x = x + self.down(F.silu(self.up(x)))
        return x + self.moe(self.frozen(F.layer_norm(x, (HIDDEN,))))


class Model(nn.Module):
    def __init__(self, ep_mesh: Any = None, checkpointed: str = "", uses: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Block(ep_mesh, uses) for _ in range(3))
        self.head = nn.Linear(HIDDEN, 5)
        self.checkpointed = checkpointed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if self.checkpointed:
                x = checkpoint(layer, x, use_reentrant=self.checkpointed == "with reentry")
            else:
                x = layer(x)
        return self.head(x).square().mean()


def layers_of(model: nn.Module) -> dict[str, Any]:
    return {name: m.core for name, m in model.named_modules() if isinstance(m, carpool.MoE)}


def rides_first(model: nn.Module) -> RidesFirst:
    layers = layers_of(model)
    return RidesFirst(model, layers, delayed=Delayed(model, layers))


def gradients(model: nn.Module) -> dict[str, torch.Tensor | None]:
    found = {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    return found


def equal(ours: dict[str, torch.Tensor | None], theirs: dict[str, torch.Tensor | None]) -> bool:
    return all(torch.equal(a, b) if a is not None and b is not None else a is b for a, b in zip(
        ours.values(), theirs.values(), strict=True))  # fmt: skip


def watched(monkeypatch: pytest.MonkeyPatch, model: Model) -> list[str]:
    """What happens: a ride asks for its gradients' dispatch, or a delayed weight gradient is computed."""
    done: list[str] = []

    def watch(owner: Any, name: str, what: str) -> None:
        original = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args: (done.append(what), original(*args))[1])

    watch(module, "_compute", "dW")
    for number, layer in enumerate(model.layers):
        watch(layer.moe.transport, "dispatch_gradients", f"ask {number}")
    return done


@pytest.mark.parametrize(
    ("how", "uses", "micro"),
    [("", 1, 2), ("", 2, 1), ("with reentry", 1, 2), ("without reentry", 1, 2), ("bfloat16", 1, 2), ("autocast", 1, 2)],
)
def test_bits_and_order(monkeypatch: pytest.MonkeyPatch, how: str, uses: int, micro: int) -> None:
    """With two micro-batches, a gradient that is there already is added to."""
    model = Model(checkpointed=how if "reentry" in how else "", uses=uses)
    model = model.bfloat16() if how == "bfloat16" else model
    dtype = next(model.parameters()).dtype
    batches = [torch.randn(2, 7, HIDDEN, dtype=dtype).requires_grad_() for _ in range(micro)]
    results, done = [], watched(monkeypatch, model)
    for context in (nullcontext(), rides_first(model)):
        done.clear()
        for x in batches:
            x.grad = None
            with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"), context:
                model(x).backward()
        results.append((gradients(model), [x.grad for x in batches]))
    (theirs, dx), (ours, our_dx) = results
    assert equal(ours, theirs) and sum(g is not None for g in theirs.values()) > 15
    assert all(torch.equal(a, b) for a, b in zip(our_dx, dx, strict=True) if a is not None and b is not None)
    # Those of a block are computed in the next ride's window, those of the first block at the end.
    block = ["dW"] * 2 * uses
    assert done == ["ask 2", "ask 1", *block, "ask 0", *block, *block] * micro
    # Afterwards all is as it was.
    assert not any("forward" in vars(m) for m in model.modules())
    for x in batches:
        with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
            model(x).backward()
    assert equal(gradients(model), theirs)


def _replicated() -> tuple[bool, int]:
    """All dense parameters on each rank, as without FSDP."""
    ep_mesh = mesh((4,), ("ep",))
    model = Model(ep_mesh)
    torch.manual_seed(torch.distributed.get_rank())
    x = torch.randn(3, 5, HIDDEN)
    model(x).backward()
    carpool.reduce_gradients(model, ep_mesh)
    theirs = gradients(model)
    with rides_first(model) as first:
        model(x).backward()
    carpool.reduce_gradients(model, ep_mesh)
    assert first.delayed is not None
    return equal(gradients(model), theirs), len(first.delayed.linears)


def test_on_four_ranks(ranks: Ranks) -> None:
    # The frozen ones are linear layers, too; the output layer is not in a decoder layer.
    assert ranks(_replicated) == [(True, 9)] * 4


def test_an_error_leaves_nothing_behind() -> None:
    model = Model()
    first = rides_first(model)
    with pytest.raises(ZeroDivisionError), first:
        model(torch.randn(4, HIDDEN)).backward()
        raise ZeroDivisionError
    assert not any("forward" in vars(m) for m in model.modules())
    assert first.delayed is not None and not first.delayed._waiting
    assert all(layer.hooks is carpool.ride.NO_HOOKS for layer in layers_of(model).values())


def test_refusals() -> None:
    with pytest.raises(ValueError, match="no weight gradients to put off"):
        Delayed(nn.ModuleList([carpool.MoE(HIDDEN, 8, EXPERTS, 2)]), ["0"])
    model = Model()
    with pytest.raises(ValueError, match="FSDP2"):
        RidesFirst(model, layers_of(model))
    with pytest.raises(ValueError, match="FSDP2"):
        RidesFirst(model, layers_of(model), 1 << 20, Delayed(model, layers_of(model)))


def test_decoder_layer() -> None:
    assert decoder_layer("model.layers.3.mlp.experts") == "model.layers.3"
    assert decoder_layer("lm_head") is None
