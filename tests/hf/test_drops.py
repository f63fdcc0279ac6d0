"""Dropped choices and routers in float32, in transformers' models: as one process that does the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import carpool.hf
from carpool.hf import drop_choices, limit_routing, rides, route_in_float32
from carpool.hf.ride_metrics import RideMetrics
from carpool.hf.seam.find_modules import experts_modules, find_router
from carpool.routing import DropOptions, Routing
from carpool.routing.limit import LimitOptions
from tests.hf.parity import BOUND, full_gradients, relative_error
from tests.hf.test_behaviours import _alone, _model, _own, _save
from tests.ranks import Ranks

CASES = [
    ("olmoe", 2, DropOptions(capacity_factor=0.5)),
    ("olmoe", 2, DropOptions(capacity_factor=0.5, first_choices_first=True, random_second=True)),
    ("qwen3_moe", 2, DropOptions(random_second=True)),
    ("deepseek_v3", 2, DropOptions(capacity_factor=0.75)),
]


def _drop_alone(model: nn.Module, options: DropOptions) -> None:
    """The same in a model without Carpool: what is dropped weighs nothing."""
    for name in experts_modules(model):  # type: ignore[arg-type]
        experts: Any = model.get_submodule(name)

        def drop(module: Any, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
            x, expert_TK, weight_TK = args
            kept_TK = options.kept(Routing(expert_TK.int(), weight_TK.float()), module.num_experts, module.training)
            return x, expert_TK, weight_TK.masked_fill(~kept_TK, 0.0)

        experts.register_forward_pre_hook(drop)


def _measure(path: str, folder: str, top_k: int, options: DropOptions) -> dict[str, Any]:
    _save(folder, path, num_experts_per_tok=top_k)
    model, reference = _model(folder, path), _alone(folder, path)
    plain = float(model(**_own(model)).loss)
    metrics = RideMetrics(model)
    metrics.reset()
    reasons = drop_choices(model, options, top_k)
    _drop_alone(reference, options)
    losses = []
    for one in (model, reference):
        torch.manual_seed(5)
        losses.append(one(**_own(one)).loss)
        losses[-1].backward()
    worst, ours = 0.0, full_gradients(model)
    for name, parameter in reference.named_parameters():
        theirs = parameter.grad
        assert (theirs is None) == (ours[name] is None), name
        if theirs is not None:
            dist.all_reduce(theirs)
            worst = max(worst, relative_error(ours[name], theirs / 2, 1e-6))
    unserved = sum(int((own.routing.expert_TK < 0).sum()) for own in rides(model).values() if own.routing is not None)
    total = torch.tensor(unserved)
    dist.all_reduce(total)
    dropped = metrics.collect(torch.device("cpu")).record["dropped_tokens"]
    assert drop_choices(model, DropOptions(), top_k) == []
    again = float(model(**_own(model)).loss)
    return {
        "loss": relative_error(losses[0].detach(), losses[1].detach()), "worst": worst, "reasons": reasons,
        "dropped": dropped, "unserved": int(total), "changed": abs(float(losses[0]) - plain), "again": again - plain,
    }  # fmt: skip


@pytest.mark.parametrize(("folder", "top_k", "options"), CASES, ids=[f"{f}-{o}" for f, _, o in CASES])
def test_as_one_process_that_drops_the_same(
    two_ranks: Ranks, tmp_path: Path, folder: str, top_k: int, options: DropOptions
) -> None:
    for seen in two_ranks(_measure, str(tmp_path), folder, top_k, options):
        assert seen["loss"] <= BOUND and seen["worst"] <= BOUND, seen
        assert seen["dropped"] == seen["unserved"] > 0 and seen["reasons"] == options.lossy_reasons
        assert seen["changed"] > 1e-6 and seen["again"] == 0.0


def _checkpointed(path: str) -> tuple[bool, int, int]:
    """Activations computed again: the same gradients and the same number of drops?"""
    _save("olmoe", path, num_experts_per_tok=2)
    found = []
    for again in (False, True):
        model = _model("olmoe", path)
        if again:
            model.activation_checkpointing_enable({"use_reentrant": False, "context_fn": carpool.keep_rides})
        drop_choices(model, DropOptions(capacity_factor=0.75, random_second=True), 2)
        torch.manual_seed(7)
        model(**_own(model)).loss.backward()
        found.append((full_gradients(model), sum(int(own.dropped or 0) for own in rides(model).values())))
    (ours, dropped), (theirs, other) = found
    same = all(
        torch.equal(ours[name], grad) if grad is not None else ours[name] is None for name, grad in theirs.items()
    )
    return same, dropped, other


def test_recomputation_drops_the_same(two_ranks: Ranks, tmp_path: Path) -> None:
    for same, dropped, other in two_ranks(_checkpointed, str(tmp_path)):
        assert same and dropped == other > 0


def _float32(path: str, folder: str) -> dict[str, Any]:
    _save(folder, path)
    model = _model(folder, path, dtype=torch.bfloat16)
    name = next(iter(rides(model)))
    router, experts = find_router(model, name), rides(model)[name].num_experts
    assert router is not None
    seen: list[torch.Tensor] = []
    router.register_forward_pre_hook(lambda _, args: seen.append(args[0].detach().flatten(0, -2)))
    plain = [out for out in _logits(model, router, experts)]
    route_in_float32(model)
    ours = [out for out in _logits(model, router, experts)]
    limit_routing(model, LimitOptions(limit_ranks=1))
    limited = [out for out in _logits(model, router, experts)]
    limit_routing(model, None)
    model(**_own(model)).loss.backward()
    grads = full_gradients(model)
    weight = next(p for n, p in model.named_parameters() if n.endswith("gate.weight"))
    whole = weight.full_tensor() if hasattr(weight, "full_tensor") else weight
    exact = torch.nn.functional.linear(seen[1].float(), whole.detach().float())
    return {
        "dtypes": (plain[0].dtype, ours[0].dtype, limited[0].dtype),
        "exact": float((ours[0] - exact).abs().max()),
        "rounded": float((plain[0].float() - exact).abs().max()),
        "gradient": all(g is not None for n, g in grads.items() if n.endswith("gate.weight")),
    }


def _logits(model: Any, router: nn.Module, experts: int) -> list[torch.Tensor]:
    """What the router's forward gives that has a column for each expert."""
    found: list[torch.Tensor] = []

    def look(_: nn.Module, __: Any, out: Any) -> None:
        outs = out if isinstance(out, tuple) else (out,)
        found.extend(one.detach() for one in outs if one.dim() == 2 and one.shape[1] == experts)

    handle = router.register_forward_hook(look)
    with torch.no_grad():
        model(**_own(model))
    handle.remove()
    return found


@pytest.mark.parametrize("folder", ["olmoe", "qwen3_moe"])
def test_logits_in_float32(two_ranks: Ranks, tmp_path: Path, folder: str) -> None:
    for seen in two_ranks(_float32, str(tmp_path), folder):
        assert seen["dtypes"] == (torch.bfloat16, torch.float32, torch.float32)
        assert seen["exact"] <= 1e-5 < 1e-4 < seen["rounded"] and seen["gradient"]
