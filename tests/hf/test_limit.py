"""Limited routing of transformers' models: as one process with the same limit, and never more copies than allowed."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn

import carpool.hf
from carpool.hf import drop_choices, limit_routing, rides, route_in_float32
from carpool.hf.ride_metrics import RideMetrics
from carpool.hf.routing.router_limits import LayerLimit
from carpool.hf.seam.expert_rides import ExpertRides
from carpool.hf.seam.find_modules import experts_modules, find_router
from carpool.layout import ExpertLayout
from carpool.layout.topology import Topology
from carpool.routing import DropOptions, Routing
from carpool.routing.limit import LimitOptions, RoutingLimit, drop_outside
from tests.hf.parity import (
    BOUND,
    EXCEPTIONS,
    HANDLING,
    Handling,
    Mesh,
    full_gradients,
    gradient_errors,
    load,
    loss_of,
    quiet,
    relative_error,
)
from tests.hf.test_behaviours import _alone, _model, _own, _save
from tests.hf.tiny_models import discover, tiny_batch, tiny_model
from tests.ranks import Ranks, on_ranks

ONE, TWO = LimitOptions(limit_ranks=1), LimitOptions(limit_ranks=2)
# Softmax, then top-k; a softmax of the chosen logits; sigmoid with a bias and groups; a router beside the layer; hash
# routing; a sampler. The last two have no top-k that could be answered.
CASES = [
    ("olmoe", ONE, Mesh()),
    ("olmoe", ONE, Mesh(fsdp=2, tp=2, ep=4)),
    ("gpt_oss", ONE, Mesh()),
    ("gpt_oss", LimitOptions(limit_nodes=1, topology=Topology.even(4, 2), limit_by="groups"), Mesh()),
    ("deepseek_v3", LimitOptions(limit_ranks=1, limit_by="groups"), Mesh()),
    ("gemma4", ONE, Mesh()),
    ("deepseek_v4", ONE, Mesh()),
    ("phimoe", ONE, Mesh()),
]
# Routers without a top-k over experts in some layer or in all: choices outside the limit are dropped there.
NOT_ANSWERED = ("deepseek_v4", "phimoe", "zaya")


def _reference(folder: str, path: str, options: LimitOptions) -> Any:
    """The model in one process, its routing limited as if its experts were on four ranks."""
    model = discover()[folder].model_class.from_pretrained(path, dtype=torch.float32).train()
    for name in experts_modules(model):
        experts, router = model.get_submodule(name), find_router(model, name)
        assert router is not None
        own = SimpleNamespace(num_experts=experts.num_experts, layout=ExpertLayout.contiguous(experts.num_experts, 4))
        layer = LayerLimit(cast(ExpertRides, own), router, RoutingLimit(options, 4))
        layer.install()
        experts.register_forward_pre_hook(_Drop(layer))
    return model


@pytest.mark.parametrize("folder", sorted(discover().keys() - EXCEPTIONS.keys()))
def test_every_router_is_answered(folder: str) -> None:
    """All choices of a token on one of four ranks, its K experts distinct, whatever the router's rule is."""
    model = tiny_model(discover()[folder]).eval()
    seen: dict[str, torch.Tensor] = {}
    limits: dict[str, LayerLimit] = {}
    for name in experts_modules(model):
        experts = cast(Any, model.get_submodule(name))
        layout = ExpertLayout.contiguous(experts.num_experts, 4)
        own = SimpleNamespace(num_experts=experts.num_experts, layout=layout)
        limits[name] = LayerLimit(cast(ExpertRides, own), find_router(model, name), RoutingLimit(ONE, 4))
        limits[name].install()
        experts.register_forward_pre_hook(
            lambda _, args, kwargs, name=name: seen.__setitem__(name, (*args, *kwargs.values())[1]), with_kwargs=True
        )
    with torch.no_grad():
        model(**tiny_batch(model))
    answered = [name for name in seen if limits[name]._answered]
    assert seen and (len(answered) == len(seen)) == (folder not in NOT_ANSWERED), find_router(model, next(iter(seen)))
    for name in answered:
        rank_TK = seen[name] // (limits[name].own.num_experts // 4)
        assert (rank_TK == rank_TK[:, :1]).all() and (seen[name].sort(1).values.diff(dim=1) > 0).all()


class _Drop:
    """What Carpool's layers do where the router has no top-k: choices without weight, in place of none."""

    def __init__(self, layer: LayerLimit) -> None:
        self.layer = layer

    def __call__(self, module: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        answered, self.layer._answered = self.layer._answered, False
        if answered:
            return args
        x_TH, index_TK, weight_TK = args
        kept_TK, scaled_TK = drop_outside(self.layer.limit, index_TK, weight_TK, self.layer.own.layout)
        assert (kept_TK < 0).any(), "nothing to drop, so nothing is tested"
        return x_TH, index_TK, scaled_TK


def _measure(folder: str, path: str, mesh: Mesh, options: LimitOptions) -> dict[str, Any] | None:
    quiet()
    architecture, rank = discover()[folder], dist.get_rank()
    handling = HANDLING.get(folder, Handling()) if mesh.ep > mesh.tp else Handling()
    reference = None
    if rank == 0:
        tiny_model(architecture).save_pretrained(path)
        reference = _reference(folder, path, options)
        _, expected_loss = loss_of(reference, tiny_batch(reference))
        expected_loss.backward()
    dist.barrier()
    model, _ = load(architecture, path, mesh, "carpool-dedup", handling)
    own = slice(rank // mesh.tp * mesh.tp, (rank // mesh.tp + 1) * mesh.tp)
    batch = {name: value[own] for name, value in tiny_batch(model).items()}
    with torch.no_grad():
        _, free = loss_of(model, batch)
    before = [ride.stats.summary().copies_per_token for ride in carpool.hf.rides(model).values()]
    for ride in carpool.hf.rides(model).values():
        ride.stats.reset()
    reasons = limit_routing(model, options)
    _, loss = loss_of(model, batch)
    loss.backward()
    copies = [ride.stats.summary().copies_per_token for ride in carpool.hf.rides(model).values()]
    losses = torch.stack([loss.detach(), free])
    dist.all_reduce(losses)
    losses /= dist.get_world_size()
    gradients = full_gradients(model)
    # And back again: not a trace of it is left.
    assert limit_routing(model, None) == []
    with torch.no_grad():
        _, again = loss_of(model, batch)
    dist.all_reduce(again)
    result = {"copies": copies, "before": before, "reasons": reasons, "again": float(again) / 4, "free": losses[1]}
    if reference is None:
        return result
    errors, missing = gradient_errors(reference, gradients)
    worst = max(errors, key=lambda name: errors[name])
    return result | {
        "loss": relative_error(losses[0], expected_loss.detach()),
        "changed": relative_error(losses[0], losses[1]),
        "worst": (worst, errors[worst]),
        "missing": missing,
        "router": [name for name in errors if "gate" in name or "router" in name],
    }


@pytest.mark.parametrize(
    ("folder", "options", "mesh"),
    [
        pytest.param(*case, id="-".join(map(str, case)), marks=pytest.mark.slow if number > 3 else [])
        for number, case in enumerate(CASES)
    ],
)
def test_as_one_process_with_the_same_limit(
    ranks: Ranks, tmp_path: Path, folder: str, options: LimitOptions, mesh: Mesh
) -> None:
    results = ranks(_measure, folder, str(tmp_path), mesh, options)
    first = results[0]
    bound = HANDLING.get(folder, Handling()).bound
    assert not first["missing"] and first["router"], "the router got no gradient"
    assert first["loss"] <= bound and first["worst"][1] <= bound, first
    assert first["changed"] > 1e-6, "the limit changed nothing"
    limit = options.limit_ranks or 2
    for result in results:
        assert result["reasons"] == options.lossy_reasons(4) != []
        assert all(copies <= limit for copies in result["copies"])
    assert any(copies > limit for result in results for copies in result["before"]) or options.limit_nodes
    assert first["again"] == pytest.approx(float(first["free"]), rel=1e-6)


def test_errors_come_before_anything_changes() -> None:
    model = tiny_model(discover()["olmoe"])
    with pytest.raises(ValueError, match="has no Carpool layers"):
        limit_routing(model, ONE)
    carpool.hf.install(model)
    # On one rank every limit is none.
    assert limit_routing(model, TWO) == []
    assert all(ride.limit is None for ride in carpool.hf.rides(model).values())
    with pytest.raises(ValueError, match="topology of the limit has 4 ranks, but the expert-parallel group 1"):
        limit_routing(model, LimitOptions(limit_nodes=1, topology=Topology.even(4, 2)))


# --------------------------------------------------------------------------------------------------------------------
# Dropped choices and routers in float32, in transformers' models: as one process that does the same.


DROP_CASES = [
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


@pytest.mark.parametrize(("folder", "top_k", "options"), DROP_CASES, ids=[f"{f}-{o}" for f, _, o in DROP_CASES])
@on_ranks("two_ranks")
def test_as_one_process_that_drops_the_same(path: str, folder: str, top_k: int, options: DropOptions) -> None:
    _save(folder, path, num_experts_per_tok=top_k)
    model, reference = _model(folder, path), _alone(folder, path)
    plain = float(model(**_own(model)).loss)
    metrics = RideMetrics(model)
    metrics.reset()
    assert drop_choices(model, options, top_k) == options.lossy_reasons
    _drop_alone(reference, options)
    losses = []
    for one in (model, reference):
        torch.manual_seed(5)
        losses.append(one(**_own(one)).loss)
        losses[-1].backward()
    assert abs(float(losses[0]) - plain) > 1e-6, "nothing that matters was dropped"
    assert relative_error(losses[0].detach(), losses[1].detach()) <= BOUND
    ours = full_gradients(model)
    for name, parameter in reference.named_parameters():
        theirs = parameter.grad
        assert (theirs is None) == (ours[name] is None), name
        if theirs is not None:
            dist.all_reduce(theirs)
            assert relative_error(ours[name], theirs / 2, 1e-6) <= BOUND, name
    unserved = sum(int((own.routing.expert_TK < 0).sum()) for own in rides(model).values() if own.routing is not None)
    total = torch.tensor(unserved)
    dist.all_reduce(total)
    assert metrics.collect(torch.device("cpu")).record["dropped_tokens"] == int(total) > 0
    assert drop_choices(model, DropOptions(), top_k) == []
    assert float(model(**_own(model)).loss) == plain


@on_ranks("two_ranks")
def test_recomputation_drops_the_same(path: str) -> None:
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
    for name, grad in theirs.items():
        assert torch.equal(ours[name], grad) if grad is not None else ours[name] is None, name
    assert dropped == other > 0


@pytest.mark.parametrize("folder", ["olmoe", "qwen3_moe"])
@on_ranks("two_ranks")
def test_logits_in_float32(path: str, folder: str) -> None:
    _save(folder, path)
    model = _model(folder, path, dtype=torch.bfloat16)
    name = next(iter(rides(model)))
    router, experts = find_router(model, name), rides(model)[name].num_experts
    assert router is not None
    seen: list[torch.Tensor] = []
    router.register_forward_pre_hook(lambda _, args: seen.append(args[0].detach().flatten(0, -2)))
    plain = _logits(model, router, experts)[0]
    route_in_float32(model)
    ours = _logits(model, router, experts)[0]
    limit_routing(model, LimitOptions(limit_ranks=1))
    limited = _logits(model, router, experts)[0]
    limit_routing(model, None)
    model(**_own(model)).loss.backward()
    grads = full_gradients(model)
    weight = next(p for n, p in model.named_parameters() if n.endswith("gate.weight"))
    whole = weight.full_tensor() if hasattr(weight, "full_tensor") else weight
    exact = torch.nn.functional.linear(seen[1].float(), whole.detach().float())
    assert (plain.dtype, ours.dtype, limited.dtype) == (torch.bfloat16, torch.float32, torch.float32)
    assert (ours - exact).abs().max() <= 1e-5 < 1e-4 < (plain.float() - exact).abs().max()
    assert all(g is not None for n, g in grads.items() if n.endswith("gate.weight"))


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
