"""Rides before reductions: FSDP reduces the same gradients, when the next ride's have arrived, and in pieces."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard import _fsdp_param_group

from carpool.hf import rides, set_schedule, set_transport
from carpool.hf.layouts import slots_kept
from carpool.schedule import Schedule
from carpool.schedule import delayed as delayed_module
from carpool.schedule.delayed import Delayed
from carpool.schedule.priority import Links, Pieces, RidesFirst, cut
from carpool.train.config.schema_moe import MoeSection
from carpool.train.run import schedules
from carpool.train.run.step import Objective
from tests.hf.meshes import reuse_meshes
from tests.hf.parity import full_gradients
from tests.ranks import Ranks
from tests.schedule.test_two_batch import error, groups, halves, make_model, same

PIECE = 2048


def rides_first(model: Any, how: str) -> RidesFirst:
    layers = rides(model)
    delayed = Delayed(model, layers) if "delayed" in how else None
    return RidesFirst(model, layers, PIECE if "pieces" in how else None, delayed)


@contextmanager
def watched(model: Any) -> Iterator[list[str]]:
    """What happens in the backward: "ask 1", "came 1", "combine 1", "done 1" of a ride; "reduce NAME"; "dW"."""
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
                finish = pending.finish
                pending.finish = lambda: (finish(), seen.append(after))[0]
                return pending

            return called

        return wrap

    def reduced(reduce: Any) -> Any:
        def called(params: Any, *args: Any) -> Any:
            seen.append(f"reduce {names[id(params[0].sharded_param)].removeprefix('model.')}")
            return reduce(params, *args)

        return called

    change(_fsdp_param_group, "foreach_reduce", reduced)
    change(delayed_module, "_compute", lambda compute: lambda put: (seen.append("dW"), compute(put))[1])
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


def _trained(model: Any, first: Any = None, keep: Any = nullcontext) -> Any:
    """Losses and gradients of two micro-batches. Each has its backward."""
    model.zero_grad()
    losses = []
    with keep():
        for loss in halves(model):
            with nullcontext() if first is None else first:
                losses.append(loss())
                losses[-1].backward()
    return [value.item() for value in losses], full_gradients(model)


def _parity(folder: str, mesh: dict[str, Any], how: str, ways: tuple[str, ...], changes: dict[str, Any]) -> Any:
    model = make_model(folder, **mesh, **changes)
    set_transport(model, "dedup")
    keep: Callable[[], AbstractContextManager[None]] = nullcontext
    if how == "chunks":
        set_schedule(model, Schedule("chunks", 2))
    elif how == "slots kept":
        keep = lambda: slots_kept(model)  # noqa: E731
    elif how:
        model.activation_checkpointing_enable({"use_reentrant": how == "with reentry"})
    expected, theirs = _trained(model, keep=keep)
    found: dict[str, Any] = {}
    for way in ways:
        first = rides_first(model, way)
        losses, ours = _trained(model, first, keep)
        twice = _trained(model, first, keep)
        found[way] = {
            "losses": losses == expected,
            "same": same(ours, theirs),
            "error": error(ours, theirs),
            "same twice": twice[0] == losses and same(twice[1], ours),
            "trained": sum(gradient is not None for gradient in theirs.values()),
            "freed": all(g.is_sharded for m in model.modules() if m is not model for g in groups(m)),
        }
    found["afterwards"] = same(_trained(model, keep=keep)[1], theirs)
    return found


@pytest.mark.parametrize(
    ("folder", "mesh", "how", "changes"),
    [
        pytest.param("olmoe", {"fsdp": 4, "ep": 4}, "", {}, marks=pytest.mark.slow),
        # Experts are reduced, too; biases in attention; a mean over replicas.
        ("olmoe", {"fsdp": 4, "ep": 2}, "with reentry", {"attention_bias": True}),
        pytest.param("olmoe", {"fsdp": 2, "ep": 2}, "without reentry", {}, marks=pytest.mark.slow),
        pytest.param("olmoe", {"fsdp": 4, "ep": 4}, "chunks", {}, marks=pytest.mark.slow),
        pytest.param("olmoe", {"fsdp": 4, "ep": 2, "bf16": True}, "slots kept", {}, marks=pytest.mark.slow),
        # A dense layer first, and shared experts beside the others.
        ("deepseek_v3", {"fsdp": 4, "ep": 4}, "", {"first_k_dense_replace": 1}),
    ],
)
def test_gradients(ranks: Ranks, folder: str, mesh: dict[str, Any], how: str, changes: dict[str, Any]) -> None:
    """Bit by bit, of two micro-batches."""
    ways = ("held, delayed", "pieces")
    for found in ranks(_parity, folder, mesh, how, ways, changes):
        assert found.pop("afterwards")
        for way, one in found.items():
            assert one["losses"] and one["same twice"] and one["freed"] and one["trained"] > 20, way
            # gloo adds a piece in the order in which it adds the whole.
            assert one["same"], (way, one["error"])


def _order(how: str, chunks: int) -> list[str]:
    model = make_model()
    set_transport(model, "dedup")
    set_schedule(model, Schedule("chunks", chunks) if chunks > 1 else Schedule())
    loss = halves(model)[0]
    loss().backward()
    with watched(model) as seen, rides_first(model, how) if how else nullcontext():
        loss().backward()
    return seen


BLOCK = "self_attn.q_proj.weight"
DELAYED = ["dW"] * 4  # q, k, v and o


def test_the_order_of_things(ranks: Ranks) -> None:
    """Layer 1's gradients are reduced beside layer 0's experts, not beside its dispatch."""
    (as_ever, *_), (held, *_), (delayed, *_) = (ranks(_order, how, 1) for how in ("", "held", "held, delayed"))
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
    assert delayed == [
        *ride[1][0], head, *ride[1][1],
        ride[0][0][0], *DELAYED, ride[0][0][1], experts[1], one, *ride[0][1], *DELAYED, experts[0], zero, end,
    ]  # fmt: skip


def test_the_order_of_things_in_chunks(ranks: Ranks) -> None:
    (seen, *_) = ranks(_order, "held, delayed", 2)
    begin = seen.index("ask 0")
    assert seen[begin : begin + 6] == ["ask 0", "ask 0", *DELAYED]
    # Beside the experts of the last chunk.
    assert seen[begin + 6 : begin + 9] == ["came 0", "combine 0", "came 0"]
    assert seen[begin + 10 : begin + 12] == [f"reduce layers.1.{BLOCK}", "combine 0"]


def _word(chunks: int) -> list[str]:
    model = make_model()
    set_transport(model, "dedup")
    set_schedule(model, Schedule("chunks", chunks) if chunks > 1 else Schedule())
    loss = halves(model)[0]
    loss().backward()
    first = rides_first(model, "pieces")
    with watched(model) as seen:
        write = first.links.set

        def written(taken: bool) -> None:
            if taken != first.links.taken:
                seen.append("taken" if taken else "free")
            write(taken)

        first.links.set = written  # type: ignore[method-assign]
        with first:
            loss().backward()
    return seen


def test_the_word_that_pieces_look_at(ranks: Ranks) -> None:
    """It says "taken" from before a ride until that has been waited for, never while FSDP lets the computation wait."""
    whole, chunked = (ranks(_word, chunks)[0] for chunks in (1, 2))
    of_ride = [word for word in whole if not word.startswith("reduce")]
    assert of_ride == [
        word
        for n in (1, 0)
        for word in ("taken", f"ask {n}", f"came {n}", "free", "taken", f"combine {n}", f"done {n}", "free")
    ]
    for seen in (whole, chunked):
        state = "free"
        for word in seen:
            state = word if word in ("taken", "free") else state
            assert state == ("free" if word.startswith("reduce") else state)
            assert state == ("taken" if word.startswith(("ask", "combine")) else state)


# -- the trainer's objective -----------------------------------------------------------------------------------------


def _objective(bf16: bool, settings: dict[str, Any]) -> tuple[bool, bool, list[str]]:
    """Two micro-batches, or four halves: (losses equal, gradients the same bits, what happened)."""
    model = make_model(bf16=bf16)
    generator = torch.Generator().manual_seed(dist.get_rank())
    batches = [{"input_ids": ids, "labels": ids} for ids in torch.randint(3, 90, (2, 2, 9), generator=generator)]
    two = settings.get("schedule") == "two-batch"
    found, happened = [], []
    for moe in (MoeSection(), MoeSection(**settings)):
        first = schedules.rides_first(model, moe, 4)
        objective = Objective(model, top_k=2, aux_coef=0.1, dp_size=4, autocast=None, two_batch=two, rides_first=first)
        model.zero_grad()
        with watched(model) as seen:
            found.append((objective.backward(batches), full_gradients(model)))
        happened.append(seen)
    (expected, theirs), (losses, ours) = found
    return expected == losses, same(ours, theirs), happened[1]


@pytest.mark.parametrize("bf16", [pytest.param(False, marks=pytest.mark.slow), True])
def test_objective(ranks: Ranks, bf16: bool) -> None:
    settings = {"priority": True, "piece_mib": None, "delay_dense": True}
    for equal, bits, seen in ranks(_objective, bf16, settings):
        assert equal and bits and seen.count("dW") == 2 * 2 * len(DELAYED)


@pytest.mark.parametrize("bf16", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_objective_with_two_batches(ranks: Ranks, bf16: bool) -> None:
    """Half 0's weight gradients are computed when its layer ends, half 1's beside a ride, as are the reductions."""
    settings = {"schedule": "two-batch", "priority": True, "piece_mib": None, "delay_dense": True}
    for equal, bits, seen in ranks(_objective, bf16, settings):
        assert equal and bits and seen.count("dW") == 2 * 2 * 2 * len(DELAYED)
        first = seen[: seen.index("reduce embed_tokens.weight")]
        begin = first.index("ask 0")
        assert first[begin - len(DELAYED) : begin] == DELAYED
        # Of half 1, after it has asked for its gradients; then half 0's have come.
        begin = first.index("ask 0", begin + 1)
        assert first[begin + 1 : begin + 6] == [*DELAYED, "came 0"]
        assert first[begin + 7 : begin + 9] == [f"reduce layers.1.{BLOCK}", "combine 0"]


def test_settings_that_cannot_act(ranks: Ranks) -> None:
    for own_forward, alone in ranks(_cannot_act):
        assert "moe.delay_dense: the experts run their own forward" in own_forward
        assert "parallelism.fsdp_size = 1" in alone


def _cannot_act() -> list[str]:
    model, texts = make_model(), []
    for settings, fsdp_size in (({"delay_dense": True}, 4), ({"priority": True}, 1)):
        for own in rides(model).values():
            own.compute = None if fsdp_size == 4 else object()  # type: ignore[assignment]  # something
        try:
            schedules.rides_first(model, MoeSection(**settings), fsdp_size)
        except ValueError as reason:
            texts.append(str(reason))
    return texts


# -- pieces ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("elements", "size", "most", "expected"),
    [
        (1000, 4000, 2000, [(0, 512), (512, 1000)]),
        (1000, 4000, 4000, [(0, 1000)]),
        (130, 4 * 130, 1, [(0, 64), (64, 128), (128, 130)]),
        (0, 0, 10, []),
    ],
)
def test_cut(elements: int, size: int, most: int, expected: list[tuple[int, int]]) -> None:
    assert cut(elements, size, most) == expected


def _reduced(elements: int, most: int) -> tuple[bool, bool, list[int]]:
    """Whole numbers: a sum of them has one value, in any order."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    given = torch.randint(-9, 9, (4 * elements,), generator=generator).float()
    outputs, sizes = [], []
    for on in (False, True):
        pieces = Pieces(most, Links(torch.device("cpu")))
        pieces.on, reduce = on, pieces._reduce
        pieces._reduce = lambda out, part, reduce=reduce, **rest: (
            sizes.append(part.numel()),
            reduce(out, part, **rest),
        )[1]
        outputs.append(pieces.allocate((elements,), dtype=given.dtype, device=given.device))
        pieces(outputs[-1], given.clone(), dist.group.WORLD, dist.ReduceOp.SUM)
    total = given.clone()
    dist.all_reduce(total)
    expected = total.view(4, -1)[dist.get_rank()]
    return torch.equal(outputs[0], expected), torch.equal(outputs[1], expected), sizes


def test_pieces_are_the_whole(ranks: Ranks) -> None:
    for whole, cut_up, sizes in ranks(_reduced, 300, 1600):
        assert whole and cut_up and sizes == [1200, 512, 512, 176]


def _counts(how: str) -> tuple[int, int]:
    """Of the reductions of a step: how many there are, and how many calls of gloo's they take."""
    model, calls = make_model(), 0
    first = rides_first(model, how)
    loss = halves(model)[0]
    if first.pieces is not None:
        reduce = first.pieces._reduce

        def counted(*args: Any, **rest: Any) -> Any:
            nonlocal calls
            calls += 1
            return reduce(*args, **rest)

        first.pieces._reduce = counted
    with watched(model) as seen, first:
        loss().backward()
    return sum(word.startswith("reduce") for word in seen), calls


def test_fsdp_reduces_in_pieces(ranks: Ranks) -> None:
    for reductions, calls in ranks(_counts, "pieces"):
        assert calls > reductions > 4
    assert ranks(_counts, "held") == [(reductions, 0)] * 4


# -- refusals --------------------------------------------------------------------------------------------------------


def _refused() -> tuple[str, str]:
    reuse_meshes()
    model = make_model()
    texts = []
    for bad in (lambda: RidesFirst(model, {}, 0), lambda: RidesFirst(torch.nn.Linear(2, 2), {}, 1)):
        try:
            bad()
        except ValueError as reason:
            texts.append(str(reason))
    return texts[0], texts[1]


def test_refusals(ranks: Ranks) -> None:
    for positive, fsdp in ranks(_refused):
        assert "piece_bytes=0 must be positive" in positive
        assert "fully_shard" in fsdp
