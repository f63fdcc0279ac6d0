"""The ride as an operator of PyTorch's: compiled equals eager bit by bit, and nothing stays behind."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

import carpool
from carpool.activations import ActivationPolicies, Arena
from carpool.experts import (
    ExpertFunction,
    ExpertWeights,
    exact_experts,
    make_activation,
    make_experts,
    reference_experts,
)
from carpool.kernels.numbered import by_number
from carpool.metrics.counters import LayerStats
from carpool.ride import operator as ride_operator
from carpool.ride.function import ride
from carpool.ride.ride_module import ride_module
from carpool.ride.setup import RideSetup
from carpool.routing import Routing
from carpool.transport import make_transport
from carpool.transport.local import Local


class WithArena(Local):
    """Pre-activations go into an arena, if it is given one."""

    arena: Any = None


SLOTS, HIDDEN, INNER, TOP_K = 5, 16, 24, 3
TRANSPORTS: dict[str, Callable[[], Any]] = {
    "gather": lambda: make_transport("gather", None, SLOTS),
    "dedup": lambda: make_transport("dedup", None, SLOTS),
    "alltoall": lambda: make_transport("alltoall", None, SLOTS),
    "home": lambda: WithArena(None, SLOTS),  # whose arrivals are the very inputs
}


@pytest.fixture(autouse=True)
def nothing_stays_behind() -> Iterator[None]:
    torch._dynamo.reset()
    assert not ride_operator._SAVED
    yield
    if ride_operator._SAVED:
        gc.collect()
    assert not ride_operator._SAVED


class Case:
    """One layer's experts and inputs, and the function that only rides."""

    def __init__(
        self, transport: str = "dedup", experts: str = "grouped", tokens: int = 13, bias: bool = False,
        dtype: torch.dtype = torch.float32, weight_dtype: torch.dtype = torch.float32,
    ) -> None:  # fmt: skip
        generator = torch.Generator().manual_seed(tokens)

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator).to(dtype)

        self.leaves = [draw(tokens, HIDDEN), draw(tokens, TOP_K).abs().to(weight_dtype)]
        self.leaves += [draw(SLOTS, 2 * INNER, HIDDEN), draw(SLOTS, HIDDEN, INNER)]
        self.leaves += [draw(SLOTS, 2 * INNER), draw(SLOTS, HIDDEN)] if bias else []
        self.slot = torch.rand(tokens, SLOTS, generator=generator).argsort(1)[:, :TOP_K].int()
        if transport != "home":  # which leaves rows that nobody wants as they are
            self.slot[1::4, 1] = -1
            self.slot[2:3] = -1
        self.dy = draw(tokens, HIDDEN)
        experts_made = make_experts(experts, ExpertFunction(make_activation("silu", gated=True)))
        self.stats = LayerStats(SLOTS, 1, 0)
        self.transport = TRANSPORTS[transport]()
        self.setup = RideSetup(self.transport, experts_made, self.stats)

    def ride(self, x_TH: torch.Tensor, weight_TK: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        given = ExpertWeights(*weights)
        return ride(x_TH, Routing(self.slot, weight_TK), self.slot, given, self.setup)[0]

    def compiled(self, backend: str = "aot_eager") -> Callable[..., torch.Tensor]:
        return torch.compile(self.ride, backend=backend, fullgraph=True)

    def train(self, call: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
        """The output and every gradient."""
        leaves = [leaf.clone().requires_grad_() for leaf in self.leaves]
        y = call(*leaves)
        y.backward(self.dy.to(y.dtype))
        gradients = [leaf.grad for leaf in leaves]
        assert all(g is not None and g.dtype == leaf.dtype for g, leaf in zip(gradients, leaves, strict=True))
        return [y.detach(), *gradients]


NUM_WEIGHTS = len(ExpertWeights._fields)


def assert_same(got: list[torch.Tensor], want: list[torch.Tensor]) -> None:
    for ours, theirs in zip(got, want, strict=True):
        assert ours.dtype == theirs.dtype and torch.equal(ours, theirs)


def pairs(transports: list[str]) -> list[Any]:
    """Each transport with each computation of experts; every other pair, such that each is in one, is not slow."""
    return [
        pytest.param(transport, experts, marks=[pytest.mark.slow] if (i + j) % 2 else [])
        for i, transport in enumerate(transports)
        for j, experts in enumerate(exact_experts())
    ]


@pytest.mark.parametrize(("transport", "experts"), pairs(list(TRANSPORTS)))
def test_compiled_equals_eager(transport: str, experts: str) -> None:
    case = Case(transport, experts, bias=experts == "grouped")
    want = case.train(case.ride)
    assert_same(case.train(case.compiled()), want)


def test_compiled_adapters_of_frozen_experts_equal_eager() -> None:
    case, generator = Case(bias=True), torch.Generator().manual_seed(1)
    shapes = (SLOTS, 4, HIDDEN), (SLOTS, 2 * INNER, 4), (SLOTS, 4, INNER), (SLOTS, HIDDEN, 4)
    frozen = case.leaves[2:]
    case.leaves[2:] = [torch.randn(*shape, generator=generator) for shape in shapes]

    def train(call: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
        return case.train(lambda x, weight, *adapters: call(x, weight, *frozen, *adapters))

    assert_same(train(case.compiled()), train(case.ride))


@pytest.mark.parametrize(("transport", "experts"), pairs(["gather", "dedup"]))
def test_a_compiled_layer_equals_eager(transport: str, experts: str) -> None:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"shared_intermediate_size": 8, "bias": True, "router": {"aux_loss_coef": 0.01}}
    moe = carpool.MoE(HIDDEN, INNER, 8, 2, transport=transport, experts=experts, **sizes)
    net = torch.nn.Sequential(torch.nn.Linear(HIDDEN, HIDDEN), moe, torch.nn.Linear(HIDDEN, HIDDEN))
    results = []
    for call in (net, torch.compile(net, backend="aot_eager")):
        net.zero_grad()
        x = torch.randn(7, HIDDEN, generator=torch.Generator().manual_seed(1)).requires_grad_()
        y = call(x)
        (y.square().mean() + moe.aux_loss).backward()
        assert x.grad is not None
        results.append([y.detach(), x.grad, *(p.grad.clone() for p in net.parameters() if p.grad is not None)])
    assert len(results[0]) == 2 + len(list(net.parameters()))
    assert_same(results[1], results[0])


@pytest.mark.parametrize("again", [False, True])
def test_a_whole_layer_is_one_graph_and_counts_its_tokens_once(again: bool) -> None:
    from torch.utils.checkpoint import checkpoint

    torch.manual_seed(0)
    moe = carpool.MoE(HIDDEN, INNER, 8, 2, shared_intermediate_size=8)
    x = torch.randn(7, HIDDEN, requires_grad=True)
    moe(x)  # the transport is made in the first forward
    moe.router.load_E.zero_()
    compiled = torch.compile(moe, backend="aot_eager", fullgraph=True)
    y = checkpoint(compiled, x, use_reentrant=False) if again else compiled(x)
    y.square().sum().backward()
    assert int(moe.router.load_E.sum()) == 7 * 2


def test_other_numbers_of_tokens_are_compiled_for_once() -> None:
    """The first forward compiles for its size, the second, of another size, for any; no later one compiles."""
    torch.manual_seed(0)
    moe = carpool.MoE(HIDDEN, INNER, 8, 2)
    compiled, frames = torch.compile(moe, backend="aot_eager"), []
    for tokens in (7, 12, 9, 30, 2):
        x = torch.randn(tokens, HIDDEN)
        assert_same(train_once(moe, compiled, x), train_once(moe, moe, x))
        frames.append(torch._dynamo.utils.counters["frames"]["ok"])
    assert frames[0] < frames[1] == frames[2] == frames[4]


def train_once(moe: carpool.MoE, layer: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> list[torch.Tensor]:
    moe.zero_grad()
    y = layer(x)
    y.square().sum().backward()
    return [y.detach(), *(p.grad for p in moe.expert_parameters() if p.grad is not None)]


def test_a_layer_can_be_compiled_before_its_first_forward() -> None:
    torch.manual_seed(0)
    moe = carpool.MoE(HIDDEN, INNER, 8, 2)
    x = torch.randn(7, HIDDEN, requires_grad=True)
    torch.compile(moe, backend="aot_eager", fullgraph=True)(x).square().sum().backward()
    assert x.grad is not None
    got, x.grad = x.grad, None
    assert int(moe.router.load_E.sum()) == 7 * 2
    moe(x).square().sum().backward()
    torch.testing.assert_close(got, x.grad)


def test_many_layers_share_one_graph() -> None:
    """More layers than the compiler would compile anew, each with transport, experts and counters of its own."""
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("aot_eager")
    cases = [Case("dedup") for _ in range(10)]
    for case in cases:
        torch.compile(case.ride, backend=counter, fullgraph=True)(*case.leaves)
    assert counter.frame_count == 1
    assert [sum(case.stats.load_E) for case in cases] == [int((cases[0].slot >= 0).sum())] * 10


@pytest.mark.parametrize(
    "given", [{"tokens": 0}, {"tokens": 1}, {"dtype": torch.bfloat16, "weight_dtype": torch.bfloat16}], ids=str
)
def test_few_tokens_and_routing_weights_of_another_dtype(given: dict[str, Any]) -> None:
    case = Case("dedup", **given)
    assert_same(case.train(case.compiled()), case.train(case.ride))


def test_autocast() -> None:
    case = Case("dedup")

    def half(*leaves: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return case.ride(*leaves)

    want = case.train(half)
    assert want[0].dtype == torch.bfloat16
    assert_same(case.train(torch.compile(half, backend="aot_eager", fullgraph=True)), want)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("inside", [False, True])
def test_activation_checkpointing(reentrant: bool, inside: bool) -> None:
    if reentrant and inside:
        pytest.skip("torch.compile does not look into checkpoints with reentry")
    from torch.utils.checkpoint import checkpoint

    case = Case("dedup")
    want = case.train(case.ride)

    def again(call: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *leaves: checkpoint(call, *leaves, use_reentrant=reentrant)

    if inside:
        got = case.train(torch.compile(again(case.ride), backend="aot_eager", fullgraph=True))
    else:
        got = case.train(again(case.compiled()))
    assert_same(got, want)


@pytest.mark.parametrize("compiled", [False, True])
def test_nothing_is_kept_where_no_backward_will_follow(compiled: bool) -> None:
    case = Case("home")
    case.transport.arena = Arena(2**20, torch.device("cpu"))
    call = case.compiled() if compiled else case.ride
    leaves = [leaf.clone().requires_grad_() for leaf in case.leaves]
    with torch.no_grad():
        y = call(*leaves)
    assert not ride_operator._SAVED and not int(case.transport.arena.needed)
    with torch.inference_mode():
        assert torch.equal(call(*leaves), y)
    assert not ride_operator._SAVED and not int(case.transport.arena.needed)
    assert torch.equal(call(*leaves).detach(), y) and int(case.transport.arena.needed)


def test_what_is_kept_goes_with_the_output_that_nobody_wanted() -> None:
    case = Case("dedup")
    y = case.compiled()(*[leaf.clone().requires_grad_() for leaf in case.leaves])
    assert len(ride_operator._SAVED) == 1
    del y
    gc.collect()
    assert not ride_operator._SAVED


def test_a_second_backward_is_refused() -> None:
    case = Case("dedup")
    y = case.compiled()(*[leaf.clone().requires_grad_() for leaf in case.leaves])
    y.backward(case.dy)
    with pytest.raises(RuntimeError, match="second time"):
        y.backward(case.dy)


@pytest.mark.parametrize("transport", ["dedup", "home"])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_graph_that_is_retained_can_be_differentiated_twice(compiled: bool, transport: str) -> None:
    case = Case(transport)
    leaves = [leaf.clone().requires_grad_() for leaf in case.leaves]
    y = (case.compiled() if compiled else case.ride)(*leaves)
    first = torch.autograd.grad(y, leaves, case.dy, retain_graph=True)
    assert_same(list(torch.autograd.grad(y, leaves, case.dy)), list(first))


@pytest.mark.parametrize("loss", ["linear", "square"])
@pytest.mark.parametrize("way", ["plain", "beside", "module", "compiled"])
def test_gradients_of_gradients_are_refused(way: str, loss: str) -> None:
    """With a linear loss no gradient that comes in requires one itself, and nothing but create_graph tells."""
    case = Case("dedup")
    leaves = [leaf.clone().requires_grad_() for leaf in case.leaves]
    x, weight, *weights = leaves
    routing = Routing(case.slot, weight)
    if way == "beside":
        y, shared = ride(x, routing, case.slot, ExpertWeights(*weights), case.setup, lambda: x.square())
        assert shared is not None
        y = y + shared
    elif way == "module":
        function = ExpertFunction(make_activation("silu", gated=True))

        def module(x_RH: torch.Tensor, slot_RJ: torch.Tensor, weight_RJ: torch.Tensor) -> torch.Tensor:
            return reference_experts(x_RH, slot_RJ, weight_RJ, ExpertWeights(*weights), function)

        y = ride_module(x, routing, case.slot, module, case.setup)
    else:
        y = (case.ride if way == "plain" else case.compiled())(*leaves)
    scalar = y.square().sum() if loss == "square" else (y * case.dy).sum()
    with pytest.raises(RuntimeError, match=r"no gradients of gradients|double backward"):
        (dx,) = torch.autograd.grad(scalar, leaves[:1], create_graph=True)
        dx.square().sum().backward()


def test_the_transport_may_be_replaced_between_forward_and_backward() -> None:
    case = Case("dedup")
    want = case.train(case.ride)

    def then_replaced(*leaves: torch.Tensor) -> torch.Tensor:
        y = compiled(*leaves)
        case.setup = replace(case.setup, transport=make_transport("gather", None, SLOTS))
        gc.collect()
        return y

    compiled = case.compiled()
    assert_same(case.train(then_replaced), want)


# -- the operators themselves ---------------------------------------------------------------------------------------


def arguments(case: Case) -> tuple[Any, ...]:
    x, weight, *weights = case.leaves
    return x, weight, case.slot, *weights, *(None,) * (NUM_WEIGHTS - len(weights)), case.slot, case.setup.number, True


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("transport", list(TRANSPORTS))
def test_opcheck(transport: str, dtype: torch.dtype) -> None:
    case = Case(transport, bias=True, weight_dtype=dtype)
    # Not `test_aot_dispatch_dynamic`, which compares the tickets of two calls.
    utilities = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(ride_operator.ride_operator, arguments(case), test_utils=utilities)
    for needs_dweights in (False, True):
        _, ticket = ride_operator.ride_operator(*arguments(case))
        given = case.dy, ticket, *arguments(case)[: 3 + NUM_WEIGHTS], needs_dweights
        torch.library.opcheck(ride_operator.ride_backward_operator, given, test_utils=utilities)


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("transport", list(TRANSPORTS))
def test_inputs_may_be_overwritten_as_soon_as_the_operator_has_returned(transport: str, again: bool) -> None:
    """A compiler that was told that an operator is functional uses its inputs' memory for others."""
    case = Case(transport)
    if again:
        case.setup = replace(case.setup, policies=ActivationPolicies(expert_inputs="resend"))
    _, *want = case.train(case.ride)
    x, weight, slot, *rest = arguments(case)
    inputs = [tensor.clone() for tensor in (x, weight, slot)]
    _, ticket = ride_operator.ride_operator(*inputs, *rest)
    for tensor in inputs:
        tensor.fill_(-1)
    elsewhere = [tensor.clone() for tensor in (x, weight, slot)]
    got = ride_operator.ride_backward_operator(case.dy, ticket, *elsewhere, *rest[:NUM_WEIGHTS], True)
    assert_same(got, want)


def test_a_backward_without_its_ticket_is_refused() -> None:
    case = Case("dedup")
    _, ticket = ride_operator.ride_operator(*arguments(case))
    copied = ticket.clone()
    del ticket
    with pytest.raises(RuntimeError, match="what its forward kept was let go"):
        ride_operator.ride_backward_operator(case.dy, copied, *arguments(case)[: 3 + NUM_WEIGHTS], True)


def test_a_default_device_is_not_the_tickets() -> None:
    case = Case("dedup")
    with torch.device("meta"):
        _, ticket = ride_operator.ride_operator(*arguments(case))
    assert ticket.device.type == "cpu"


# -- numbers --------------------------------------------------------------------------------------------------------


def test_copies_have_numbers_of_their_own() -> None:
    setup = Case().setup
    for other in (copy.copy(setup), copy.deepcopy(setup), replace(setup), pickle.loads(pickle.dumps(setup))):
        assert other.number != setup.number
        assert by_number(other.number) is other and by_number(setup.number) is setup


def test_a_copy_of_a_compiled_layer_counts_for_itself() -> None:
    torch.manual_seed(0)
    moe = carpool.MoE(HIDDEN, INNER, 8, 2)
    other = copy.deepcopy(moe)
    torch.compile(other, backend="aot_eager")(torch.randn(7, HIDDEN))
    assert moe.stats().rows_dispatched == 0 and other.stats().rows_dispatched == 7


def test_what_is_gone_has_no_number() -> None:
    number = Case().setup.number
    gc.collect()
    with pytest.raises(RuntimeError, match="replaced or its layer freed"):
        by_number(number)
