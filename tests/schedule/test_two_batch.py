"""Two halves of a micro-batch at the same time: the gradients are those of two micro-batches."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.distributed import DistributedConfig

import carpool
from carpool.activations import Arena
from carpool.hf import rides, set_transport
from carpool.hf.build_model import build_model
from carpool.hf.sharding import replicate_dense
from carpool.hf.step_graphs import StepGraphs
from carpool.parallel import fsdp
from carpool.parallel.replicated import sharded_parameters
from carpool.ride.turns import HALF, handover
from carpool.ride.two_batch import TwoBatch
from carpool.train.steps.training_objective import Objective, in_two
from tests.hf.meshes import reuse_meshes
from tests.hf.parity import full_gradients, quiet, relative_error
from tests.hf.tiny_models import VOCAB_SIZE, discover, tiny_config
from tests.ranks import Ranks, on_ranks
from tests.replayed import Again

RANKS_IMPORT = ["transformers.models.olmoe.modeling_olmoe", "transformers.models.deepseek_v3.modeling_deepseek_v3"]
BOUND = 1e-6
SEQUENCES, LENGTH, HIDDEN = 3, 9, 16
Gradients = dict[str, torch.Tensor | None]
VERBS = ("dispatch", "combine", "dispatch_gradients", "combine_gradients")


def make_model(folder: str = "olmoe", fsdp: int = 4, ep: int = 4, bf16: bool = False, **changes: Any) -> Any:
    quiet()
    reuse_meshes()
    config = tiny_config(discover()[folder], **changes)
    sizes = DistributedConfig(
        fsdp_size=fsdp, dp_replicate_size=4 // fsdp, ep_size=ep, ep_implementation="carpool", fsdp_mixed_precision=bf16
    )
    return build_model(config, distributed_config=sizes, dtype=torch.float32, seed=3)


def halves(model: PreTrainedModel) -> list[Callable[[], torch.Tensor]]:
    """The losses of two parts of this rank's batch, of 2 sequences and of 1."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    ids = torch.randint(3, VOCAB_SIZE, (SEQUENCES, LENGTH), generator=generator)

    def loss_of(part: torch.Tensor) -> Callable[[], torch.Tensor]:
        def loss() -> torch.Tensor:
            logits = model(input_ids=part, use_cache=False).logits[:, :-1].float()
            return F.cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten(), reduction="sum") / ids.numel()

        return loss

    return [loss_of(ids[:2]), loss_of(ids[2:])]


def one_by_one(model: Any, reduce_once: bool = False) -> list[torch.Tensor]:
    """Two micro-batches, as in accumulation of gradients. `reduce_once`: with the second only."""
    values = []
    for number, loss in enumerate(halves(model)):
        if reduce_once:
            model.set_requires_gradient_sync(number == 1)
        values.append(loss())
        values[-1].backward()
    return [value.detach() for value in values]


def same(ours: Gradients, theirs: Gradients) -> bool:
    """Bit by bit."""
    return all(
        torch.equal(ours[name], other) if ours[name] is not None and other is not None else ours[name] is other
        for name, other in theirs.items()
    )


def error(ours: Gradients, theirs: Gradients) -> float:
    """The largest of any gradient; infinite if one exists on one side only."""
    worst = 0.0
    for name, other in theirs.items():
        if other is not None and ours[name] is not None:
            worst = max(worst, relative_error(ours[name], other, 1e-6))
        elif ours[name] is not other:
            return float("inf")
    return worst


@contextmanager
def watched(model: Any, counts: dict[str, int]) -> Iterator[list[tuple[str, int, int]]]:
    """(verb, layer, half) in the order in which rides ask for them. And how many reductions there were by the last."""
    seen: list[tuple[str, int, int]] = []

    def watch(transport: Any, verb: str, layer: int) -> None:
        original = getattr(transport, verb)

        def called(*args: Any) -> Any:
            half = HALF.get()
            seen.append((verb, layer, -1 if half is None else half.number))
            counts["reduced beside rides"] = counts["foreach_reduce"]
            return original(*args)

        setattr(transport, verb, called)

    transports = [own.transport for own in rides(model).values()]
    for layer, transport in enumerate(transports):
        for verb in VERBS:
            watch(transport, verb, layer)
    try:
        yield seen
    finally:
        for transport in transports:
            for verb in VERBS:
                delattr(transport, verb)


@contextmanager
def counted() -> Iterator[dict[str, int]]:
    """How often FSDP gathers parameters and reduces gradients."""
    counts = dict.fromkeys(("foreach_all_gather", "foreach_reduce"), 0)
    originals = {name: getattr(_fsdp_param_group, name) for name in counts}

    def counting(name: str) -> Callable[..., Any]:
        def called(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return originals[name](*args, **kwargs)

        return called

    for name in counts:
        setattr(_fsdp_param_group, name, counting(name))
    try:
        yield counts
    finally:
        for name, original in originals.items():
            setattr(_fsdp_param_group, name, original)


def groups(module: Any) -> list[Any]:
    return fsdp.groups_of(module)


def in_turns(*verbs_and_layers: tuple[str, int]) -> list[tuple[str, int, int]]:
    return [(verb, layer, half) for verb, layer in verbs_and_layers for half in (0, 1)]


FORWARD = ("dispatch", "combine")
BACKWARD = ("dispatch_gradients", "combine_gradients")


@pytest.mark.parametrize(
    ("folder", "mesh", "transport", "how", "changes"),
    [
        pytest.param("olmoe", {"fsdp": 4, "ep": 4}, "dedup", "no checkpoints", {}, marks=pytest.mark.slow),
        pytest.param("olmoe", {"fsdp": 4, "ep": 2}, "alltoall", "with reentry", {}, marks=pytest.mark.slow),
        pytest.param("olmoe", {"fsdp": 2, "ep": 2}, "dedup", "without reentry", {}, marks=pytest.mark.slow),
        ("olmoe", {"fsdp": 4, "ep": 2}, "alltoall", "rides kept", {}),
        # A dense layer first, and shared experts beside the others.
        ("deepseek_v3", {"fsdp": 4, "ep": 4}, "dedup", "no checkpoints", {"first_k_dense_replace": 1}),
        pytest.param("olmoe", {"fsdp": 4, "ep": 4}, "alltoall", "own forward", {}, marks=pytest.mark.slow),
    ],
)
@on_ranks()
def test_gradients_are_those_of_two_micro_batches(
    folder: str, mesh: dict[str, Any], transport: str, how: str, changes: dict[str, Any]
) -> None:
    model = make_model(folder, **mesh, **changes)
    set_transport(model, transport)
    if how == "own forward":
        for own in rides(model).values():
            own.compute = None
    elif how != "no checkpoints":
        context = {"context_fn": carpool.keep_rides} if how == "rides kept" else {}
        model.activation_checkpointing_enable({"use_reentrant": how == "with reentry", **context})
    expected = one_by_one(model)
    theirs = full_gradients(model)
    model.zero_grad()
    one_by_one(model, reduce_once=True)
    reduced_once = full_gradients(model)
    two = TwoBatch(model)
    runs = []
    for _ in range(2):
        model.zero_grad()
        with counted() as travelled, watched(model, travelled) as seen:
            values = two.backward(halves(model))
        runs.append(full_gradients(model))
    freed = [group.is_sharded for module in model.modules() if module is not model for group in groups(module)]
    # Afterwards FSDP's hooks are its own again.
    model.zero_grad()
    with counted() as for_one, watched(model, for_one):
        halves(model)[0]().backward()
    halves(model)[1]().backward()
    assert all(torch.equal(a, b) for a, b in zip(values, expected, strict=True))
    assert same(runs[0], reduced_once) and same(runs[0], runs[1]), "as reduced once, and the same twice"
    assert error(runs[0], theirs) <= BOUND and sum(gradient is not None for gradient in theirs.values()) > 20
    assert same(full_gradients(model), theirs) and all(freed) and len(freed) > 2
    # Parameters and gradients travel as for one micro-batch, and not later.
    assert travelled == for_one and min(for_one.values()) > 0
    layers = range(1 if changes else 2)
    order = in_turns(*((verb, layer) for layer in layers for verb in FORWARD))
    for layer in reversed(layers):
        if how in ("with reentry", "without reentry"):
            order += in_turns(*((verb, layer) for verb in FORWARD))
        order += in_turns(*((verb, layer) for verb in BACKWARD))
    assert seen == order


@on_ranks()
def test_mixed_precision() -> None:
    """Gradients of both halves are added in the dtype of the reduction, as FSDP adds those of micro-batches."""
    model = make_model(ep=2, bf16=True)
    expected = one_by_one(model)
    theirs = full_gradients(model)
    model.zero_grad()
    values = TwoBatch(model).backward(halves(model))
    ours = full_gradients(model)
    model.zero_grad()
    one_by_one(model, reduce_once=True)
    assert all(torch.equal(a, b) for a, b in zip(values, expected, strict=True))
    assert error(ours, full_gradients(model)) <= 1e-2 and error(ours, theirs) <= 1e-2


# -- the trainer's objective -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("aux_coef", "micro_batches", "side_by_side"),
    [
        (0.1, 1, [0, 1]),
        pytest.param(0.0, 2, [0, 1], marks=pytest.mark.slow),
        # The last has no other beside it.
        (0.1, 3, [0, 1, -1]),
        pytest.param(0.1, 4, [0, 1, 0, 1], marks=pytest.mark.slow),
    ],
)
@on_ranks()
def test_objective(aux_coef: float, micro_batches: int, side_by_side: list[int]) -> None:
    model = make_model()
    generator = torch.Generator().manual_seed(dist.get_rank())
    ids = torch.randint(3, VOCAB_SIZE, (micro_batches, 3, LENGTH), generator=generator)
    batches = [{"input_ids": one, "labels": one} for one in ids]
    results, seen = [], []
    model.register_forward_pre_hook(lambda *_: seen.append(-1 if HALF.get() is None else HALF.get().number))
    for two_batch in (False, True):
        objective = Objective(model, top_k=2, aux_coef=aux_coef, dp_size=4, autocast=None, two_batch=two_batch)
        model.zero_grad()
        seen.clear()
        # Only the halves of a single micro-batch are other micro-batches than without.
        micro = batches if two_batch or micro_batches > 1 else in_two(batches[0])
        results.append((objective.backward(micro), full_gradients(model)))
    (expected, theirs), (found, ours) = results
    assert expected == found and error(ours, theirs) <= BOUND and seen == side_by_side
    with pytest.raises(ValueError, match=r"training\.gradient_accumulation_steps to 2"):
        objective.backward([{name: value[:1] for name, value in batches[0].items()}])


def _replayed(aux_coef: float, micro_batches: int) -> list[tuple[bool, list[int]]]:
    """Of each step that replays what the third one has recorded: whether it is that of micro-batches one by one, bit by
    bit, and in which halves its forwards were."""
    quiet()
    reuse_meshes()
    sizes = DistributedConfig(fsdp_size=4, ep_size=4, ep_implementation="carpool")
    config = tiny_config(discover()["olmoe"])
    model = build_model(config, distributed_config=sizes, dtype=torch.float32, seed=3, dense="zero1")
    whole = replicate_dense(model, False)
    settings: dict[str, Any] = {"top_k": 2, "aux_coef": aux_coef, "dp_size": 4, "autocast": None}
    plain, paired = Objective(model, **settings), Objective(model, **settings, two_batch=True)
    generator = torch.Generator().manual_seed(dist.get_rank())
    ids = torch.randint(3, VOCAB_SIZE, (2, micro_batches, 3, LENGTH), generator=generator)
    steps = [[{"input_ids": one, "labels": one} for one in step] for step in ids]

    def step(objective: Objective, batches: Any) -> tuple[Any, Gradients]:
        model.zero_grad()
        loss = objective.backward(batches)
        whole.finish()
        with sharded_parameters(model):
            gradients = {name: p.grad for name, p in model.named_parameters()}
        return loss, {name: None if g is None else g.to_local().clone() for name, g in gradients.items()}

    expected = [step(plain, batches if micro_batches > 1 else in_two(batches[0])) for batches in steps]
    told: list[str | None] = []
    paired.graphs = StepGraphs(
        model, list(rides(model).values()), paired.run_together, told.append, True, recorder=Again, at_once=2
    )
    seen: list[int] = []
    model.register_forward_pre_hook(lambda *_: seen.append(-1 if HALF.get() is None else HALF.get().number))
    found = []
    for number in (0, 1, 1, 0):
        seen.clear()
        loss, gradients = step(paired, steps[number])
        equal = loss == expected[number][0] and same(gradients, expected[number][1])
        found.append((equal and any(gradient is not None for gradient in gradients.values()), list(seen)))
    assert told == [None], told
    return found


@pytest.mark.parametrize(
    ("micro_batches", "forwards"),
    [
        # The halves of one, which are not equal.
        pytest.param(1, [0, 1], marks=pytest.mark.slow),
        (3, [0, 1, -1]),
        pytest.param(5, [0, 1, 0, 1, -1], marks=pytest.mark.slow),
    ],
)
def test_two_batches_are_recorded_together(ranks: Ranks, micro_batches: int, forwards: list[int]) -> None:
    """As CUDA graphs are, which tests/gpu/test_graphs_gpu.py captures."""
    for steps in ranks(_replayed, 0.1, micro_batches):
        assert all(equal for equal, _ in steps)
        # Two eager steps, one that is recorded and then replayed, and one that is replayed.
        assert [seen for _, seen in steps] == [forwards, forwards, 2 * forwards, forwards]


# -- on one rank, without FSDP ---------------------------------------------------------------------------------------


class Stack(nn.Module):
    """MoE layers of different sizes, with drop-out before and after each ride."""

    def __init__(self, dropout: float = 0.0, checkpointed: bool = False, layers: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(carpool.MoE(HIDDEN, 8 * (1 + i), 4 * (1 + i), 2) for i in range(layers))
        self.dropout, self.checkpointed = nn.Dropout(dropout), checkpointed

    def layer(self, x: torch.Tensor, moe: nn.Module) -> torch.Tensor:
        return x + self.dropout(moe(self.dropout(F.layer_norm(x, (HIDDEN,)))))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for moe in self.layers:
            x = checkpoint(self.layer, x, moe, use_reentrant=False) if self.checkpointed else self.layer(x, moe)
        return x.square().mean()


def parts() -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(13, HIDDEN, generator=torch.Generator().manual_seed(1))
    return x[:7], x[7:]


def trained(model: nn.Module, losses: list[Callable[[], torch.Tensor]] | None = None) -> Gradients:
    torch.manual_seed(5)
    model.zero_grad()
    TwoBatch(model).backward([partial(model, part) for part in parts()] if losses is None else losses)
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("how", ["eager", "checkpointed", pytest.param("compiled", marks=pytest.mark.slow)])
def test_plain_layers_bit_by_bit(how: str) -> None:
    model = Stack(checkpointed=how == "checkpointed", layers=1 if how == "compiled" else 3)
    ours = trained(torch.compile(model, backend="aot_eager", dynamic=True) if how == "compiled" else model)
    ours = {name.removeprefix("_orig_mod."): gradient for name, gradient in ours.items()}
    model.zero_grad()
    for part in parts():
        model(part).backward()
    assert same(ours, {name: parameter.grad for name, parameter in model.named_parameters()})
    assert all(own.stats().tokens == 2 * 13 for own in model.layers)


def test_each_half_has_random_numbers_of_its_own() -> None:
    """A layer that is computed again drops what it dropped before, though the other half drew in between."""
    plain, again = trained(Stack(dropout=0.3)), trained(Stack(dropout=0.3, checkpointed=True))
    assert same(plain, again)
    assert not same(plain, trained(Stack()))


def test_random_numbers_go_on_from_half_0() -> None:
    model, after = Stack(dropout=0.3), []
    for _ in range(2):
        trained(model)
        after.append(torch.rand(3))
    assert torch.equal(*after)


class Oops(Exception):
    pass


def fail(*_: Any) -> Any:
    raise Oops("here")


@pytest.mark.parametrize("where", ["before", "between", "after", "backward"])
@pytest.mark.parametrize("half", [0, 1])
def test_an_error_in_one_half_ends_both(half: int, where: str) -> None:
    model, threads = Stack(), threading.active_count()

    def failing() -> torch.Tensor:
        if where == "before":
            fail()
        if where == "between":
            handle = model.layers[1].register_forward_pre_hook(lambda *_: fail() if HALF.get().number == half else None)
        x = parts()[half].clone().requires_grad_()
        try:
            loss = model(x)
        finally:
            if where == "between":
                handle.remove()
        if where == "backward":
            x.register_hook(fail)
        return fail() if where == "after" else loss

    losses: list[Any] = [partial(model, part) for part in parts()]
    losses[half] = failing
    with pytest.raises(Oops, match="here"):
        trained(model, losses)
    assert HALF.get() is None
    # Nothing is left over: it works the next time.
    assert same(trained(model), trained(Stack()))
    gc.collect()
    # A thread ends some time after its pool is gone.
    deadline = time.monotonic() + 10
    while threading.active_count() > threads + 1 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() <= threads + 1


def test_handing_over_alone_does_nothing() -> None:
    handover()
    assert HALF.get() is None


def test_autocast_of_the_caller_is_that_of_both_halves() -> None:
    model, seen = nn.Linear(4, 4), []

    def loss() -> torch.Tensor:
        out = model(torch.ones(2, 4))
        seen.append(out.dtype)
        return out.float().sum()

    with torch.autocast("cpu", torch.bfloat16):
        TwoBatch(model).backward([loss, loss])
    assert seen == [torch.bfloat16] * 2


def test_losses_that_hand_over_unequally_often() -> None:
    """Nothing hangs; each goes on alone once the other has nothing more to do."""
    for layers in ((1, 3), (3, 1)):
        models = [Stack(layers=n) for n in layers]
        both = nn.ModuleList(models)
        TwoBatch(both).backward([partial(model, part) for model, part in zip(models, parts(), strict=True)])
        ours = {name: parameter.grad for name, parameter in both.named_parameters()}
        both.zero_grad()
        for model, part in zip(models, parts(), strict=True):
            model(part).backward()
        assert same(ours, {name: parameter.grad for name, parameter in both.named_parameters()})


def test_the_arena_gets_back_what_two_halves_held() -> None:
    """Half 0 lets go first, of what lies below half 1's."""
    arena = Arena(2**16, torch.device("cpu"))
    count = torch.tensor([3])
    held = [arena.reserve(64, torch.float32, count) for _ in range(6)]
    places = [int(rows.start[0]) for rows in held if rows.start is not None]
    for layer in (2, 1, 0):
        held[2 * layer] = held[2 * layer + 1] = None  # type: ignore[call-overload]
        again = arena.reserve(64, torch.float32, count)
        assert again.start is not None and int(again.start[0]) == places[2 * layer]
        del again


def test_one_loss_is_refused() -> None:
    with pytest.raises(ValueError, match="take two losses, not 1"):
        TwoBatch(Stack()).backward([lambda: Stack()(parts()[0])])


@on_ranks()
def test_a_model_wrapped_by_ddp_is_refused() -> None:
    outer = nn.Module()
    outer.inner = DistributedDataParallel(nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"DistributedDataParallel \(module 'inner'\)(.|\n)*fully_shard"):
        TwoBatch(outer)
