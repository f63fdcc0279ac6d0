"""Rides before reductions: FSDP reduces the same gradients, when the next ride's have arrived, and in pieces."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard import _fsdp_param_group

from carpool.hf import rides, set_schedule, set_transport
from carpool.ride.priority import RidesFirst
from carpool.ride.schedule import Schedule
from carpool.train.build import assemble
from carpool.train.config.schema_moe import MoeSection
from carpool.train.steps.training_objective import Objective
from carpool.transport import Pending
from tests.hf.parity import full_gradients
from tests.ranks import Ranks, on_ranks
from tests.schedule.test_two_batch import error, groups, halves, make_model, same


def rides_first(model: Any) -> RidesFirst:
    return RidesFirst(model, rides(model))


@contextmanager
def watched(model: Any) -> Iterator[list[str]]:
    """What happens in the backward: "ask 1", "came 1", "combine 1", "done 1" of a ride; "reduce NAME"."""
    seen: list[str] = []
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    changed: list[tuple[Any, str, Any]] = []

    def change(owner: Any, name: str, value: Callable[[Any], Any]) -> None:
        own = vars(owner).get(name)
        changed.append((owner, name, own))
        setattr(owner, name, value(getattr(owner, name)))

    def told(before: str, after: str) -> Callable[[Any], Any]:
        def wrap(verb: Any) -> Any:
            def called(*args: Any) -> Any:
                seen.append(before)
                pending = verb(*args)
                return Pending(lambda: (pending.wait(), seen.append(after))[0])

            return called

        return wrap

    def reduced(reduce: Any) -> Any:
        def called(params: Any, *args: Any) -> Any:
            seen.append(f"reduce {names[id(params[0].sharded_param)].removeprefix('model.')}")
            return reduce(params, *args)

        return called

    change(_fsdp_param_group, "foreach_reduce", reduced)
    for layer, own in enumerate(rides(model).values()):
        if own.transport is not None:
            change(own.transport, "dispatch_gradients", told(f"ask {layer}", f"came {layer}"))
            change(own.transport, "combine_gradients", told(f"combine {layer}", f"done {layer}"))
    try:
        yield seen
    finally:
        for owner, name, own in reversed(changed):
            if own is None:
                delattr(owner, name)
            else:
                setattr(owner, name, own)


def _trained(model: Any, first: Any = None) -> Any:
    """Losses and gradients of two micro-batches. Each has its backward."""
    model.zero_grad()
    losses = []
    for loss in halves(model):
        with nullcontext() if first is None else first:
            losses.append(loss())
            losses[-1].backward()
    return [value.item() for value in losses], full_gradients(model)


@pytest.mark.parametrize(
    ("folder", "mesh", "how", "changes"),
    [
        pytest.param("olmoe", {"fsdp": 4, "ep": 4}, "", {}, marks=pytest.mark.slow),
        # Experts are reduced, too; biases in attention; a mean over replicas.
        ("olmoe", {"fsdp": 4, "ep": 2}, "with reentry", {"attention_bias": True}),
        pytest.param("olmoe", {"fsdp": 2, "ep": 2}, "without reentry", {}, marks=pytest.mark.slow),
        pytest.param("olmoe", {"fsdp": 4, "ep": 4}, "chunks", {}, marks=pytest.mark.slow),
        # A dense layer first, and shared experts beside the others.
        ("deepseek_v3", {"fsdp": 4, "ep": 4}, "", {"first_k_dense_replace": 1}),
    ],
)
@on_ranks()
def test_gradients(folder: str, mesh: dict[str, Any], how: str, changes: dict[str, Any]) -> None:
    """Bit by bit, of two micro-batches."""
    model = make_model(folder, **mesh, **changes)
    set_transport(model, "dedup")
    if how == "chunks":
        set_schedule(model, Schedule("chunks", 2))
    elif how:
        model.activation_checkpointing_enable({"use_reentrant": how == "with reentry"})
    expected, theirs = _trained(model)
    first = rides_first(model)
    losses, ours = _trained(model, first)
    assert losses == expected and same(ours, theirs), error(ours, theirs)
    assert sum(gradient is not None for gradient in theirs.values()) > 20
    again, twice = _trained(model, first)
    assert again == losses and same(twice, ours)
    assert all(g.is_sharded for m in model.modules() if m is not model for g in groups(m))
    assert same(_trained(model)[1], theirs), "afterwards"


def _order(held: bool, chunks: int) -> list[str]:
    model = make_model()
    set_transport(model, "dedup")
    set_schedule(model, Schedule("chunks", chunks) if chunks > 1 else Schedule())
    loss = halves(model)[0]
    loss().backward()
    with watched(model) as seen, rides_first(model) if held else nullcontext():
        loss().backward()
    return seen


BLOCK = "self_attn.q_proj.weight"


def test_the_order_of_things(ranks: Ranks) -> None:
    """Layer 1's gradients are reduced beside layer 0's experts, not beside its dispatch."""
    (as_ever, *_), (held, *_) = (ranks(_order, how, 1) for how in (False, True))
    ride = {layer: [[f"ask {layer}", f"came {layer}"], [f"combine {layer}", f"done {layer}"]] for layer in (0, 1)}
    head, one, zero = "reduce norm.weight", f"reduce layers.1.{BLOCK}", f"reduce layers.0.{BLOCK}"
    experts = [f"reduce layers.{layer}.mlp.experts.gate_up_proj" for layer in (0, 1)]
    end = "reduce embed_tokens.weight"
    assert as_ever == [
        head, *ride[1][0], *ride[1][1], experts[1], one, *ride[0][0], *ride[0][1], experts[0], zero, end
    ]  # fmt: skip
    # Experts have no copies here, so theirs is no reduction, and is held, too.
    assert held == [
        *ride[1][0], head, *ride[1][1], *ride[0][0], experts[1], one, *ride[0][1], experts[0], zero, end
    ]  # fmt: skip


def test_the_order_of_things_in_chunks(ranks: Ranks) -> None:
    (seen, *_) = ranks(_order, True, 2)
    begin = seen.index("ask 0")
    assert seen[begin : begin + 2] == ["ask 0", "ask 0"]
    # Beside the experts of the last chunk.
    assert seen[begin + 2 : begin + 5] == ["came 0", "combine 0", "came 0"]
    assert seen[begin + 6 : begin + 8] == [f"reduce layers.1.{BLOCK}", "combine 0"]


# -- the trainer's objective -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("bf16", [False, pytest.param(True, marks=pytest.mark.slow)])
@on_ranks()
def test_objective_with_two_batches(bf16: bool) -> None:
    """Of two micro-batches, which are four halves: the reductions of half 1 run beside a ride."""
    model = make_model(bf16=bf16)
    generator = torch.Generator().manual_seed(dist.get_rank())
    batches = [{"input_ids": ids, "labels": ids} for ids in torch.randint(3, 90, (2, 2, 9), generator=generator)]
    found = []
    for moe in (MoeSection(), MoeSection(schedule="two-batch", priority=True)):
        first = assemble.rides_first(model, moe, 4)
        objective = Objective(model, top_k=2, aux_coef=0.1, dp_size=4, autocast=None, two_batch=True, rides_first=first)
        model.zero_grad()
        with watched(model) as seen:
            found.append((objective.backward(batches), full_gradients(model)))
    (expected, theirs), (losses, ours) = found
    assert losses == expected and same(ours, theirs)
    until = seen[: seen.index("reduce embed_tokens.weight")]
    # Of half 1, after it has asked for its gradients; then half 0's have come.
    begin = until.index("ask 0", until.index("ask 0") + 1)
    assert until[begin + 1] == "came 0"
    assert until[begin + 3 : begin + 5] == [f"reduce layers.1.{BLOCK}", "combine 0"]


@on_ranks()
def test_settings_that_cannot_act() -> None:
    model, settings = make_model(), MoeSection(priority=True)
    with pytest.raises(ValueError, match=r"parallelism\.fsdp_size = 1"):
        assemble.rides_first(model, settings, 1)
    for own in rides(model).values():
        own.compute = None
    with pytest.raises(ValueError, match=r"moe\.priority: the experts run their own forward"):
        assemble.rides_first(model, settings, 4)


# -- refusals --------------------------------------------------------------------------------------------------------


def test_a_model_without_fsdp_is_refused() -> None:
    with pytest.raises(ValueError, match="fully_shard"):
        RidesFirst(torch.nn.Linear(2, 2), {})
