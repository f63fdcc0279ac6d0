"""The ride as a custom operator of PyTorch, which `torch.compile` does not trace.

A compiled graph contains tensors and numbers. A ride also needs a `RideSetup`, and saves objects for its backward that
are not tensors of the graph (routes, reservations in an arena). So

    setup         has a number (`Numbered`), by which the operator finds it
    activations   are stored here under a ticket, a tensor of one number, which the graph saves in their place. They are
                  freed with the ticket's memory: after the backward, or at once if there is none
    inputs        belong to the graph, which may reuse their memory. So they are not stored here: the graph saves or
                  recomputes them, and passes them to the backward

    carpool::ride           (tokens, weights, slots, parameters, number)                     -> (outputs, ticket)
    carpool::ride_backward  (gradient of the outputs, ticket, tokens, weights, slots, ...)   -> gradients

Both have fake implementations for shapes, and the second is registered as the derivative of the first. They run the
setup's `Order`, as without a compiler.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from carpool.activations import HiddenStates
from carpool.activations.whole_layers import checkpointed
from carpool.experts.base import NUM_BASE, NUM_TRAINED, ExpertWeights
from carpool.kernels.numbered import by_number
from carpool.ride.chunks import PLAIN, bring_back, offload_saved
from carpool.ride.setup import RideSetup
from carpool.transport.base import Route

# Saved activations of compiled graphs, by ticket. Entries are removed as the module's docstring says.
_SAVED: dict[int, tuple[Any, RideSetup]] = {}
_tickets = itertools.count(1)
# Autograd is disabled inside an operator; experts may enable it for an activation function of the user.
_OUTSIDE = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()


@torch.library.custom_op("carpool::ride", mutates_args=())
def ride_operator(
    x_TH: torch.Tensor,
    weight_TK: torch.Tensor,
    slot_TK: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    up_a: torch.Tensor | None,
    up_b: torch.Tensor | None,
    down_a: torch.Tensor | None,
    down_b: torch.Tensor | None,
    up_code: torch.Tensor | None,
    up_scale: torch.Tensor | None,
    down_code: torch.Tensor | None,
    down_scale: torch.Tensor | None,
    expert_TK: torch.Tensor,
    setup: torch.Tensor,
    backward: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(y_TH, ticket): see `carpool.ride.function.ride`. `backward`: whether one will follow."""
    of_base, codes = (up, down, up_bias, down_bias), (up_code, up_scale, down_code, down_scale)
    weights = ExpertWeights(*of_base, up_a, up_b, down_a, down_b, *codes)
    found: RideSetup = by_number(setup)
    # Slices of an expert have its weight.
    slices = weight_TK.shape[1] // max(1, expert_TK.shape[1])
    found.stats.count(expert_TK, weight_TK[:, ::slices])

    def take() -> tuple[torch.Tensor, Any]:
        inputs = x_TH, weight_TK, slot_TK
        started = (found.order or PLAIN).start(*inputs, weights, found)
        y_TH, activations = (found.order or PLAIN).forward(started, weights, found, backward)
        return y_TH, None if activations is None else _swap(
            offload_saved(activations, found), lambda tensor: _lend(tensor, inputs)
        )

    region = checkpointed.get() if backward else None
    with torch._C._ForceDispatchKeyGuard(*_OUTSIDE), torch.no_grad():
        # The graph may overwrite the returned tensor, but the region returns it once more.
        y_TH, activations = take() if region is None else _apart(*region.ride(take))
    number = next(_tickets)
    ticket = torch.tensor([number], device="cpu")
    if activations is not None:
        # With the setup, which the layer may replace before the backward runs.
        _SAVED[number] = activations, found
        # On the storage: the tensor that autograd returns shares it, but is another object.
        weakref.finalize(ticket.untyped_storage(), _SAVED.pop, number, None).atexit = False
    return y_TH, ticket


def _apart(y_TH: torch.Tensor, activations: Any) -> tuple[torch.Tensor, Any]:
    return y_TH.clone(), activations


@ride_operator.register_fake
def _(x_TH: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    ticket = torch.empty(1, dtype=torch.int64, device="cpu")
    return torch.empty(x_TH.shape, dtype=x_TH.dtype, device=x_TH.device), ticket


@torch.library.custom_op("carpool::ride_backward", mutates_args=())
def ride_backward_operator(
    dy_TH: torch.Tensor,
    ticket: torch.Tensor,
    x_TH: torch.Tensor,
    weight_TK: torch.Tensor,
    slot_TK: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    up_a: torch.Tensor | None,
    up_b: torch.Tensor | None,
    down_a: torch.Tensor | None,
    down_b: torch.Tensor | None,
    up_code: torch.Tensor | None,
    up_scale: torch.Tensor | None,
    down_code: torch.Tensor | None,
    down_scale: torch.Tensor | None,
    needs_dweights: bool,
) -> list[torch.Tensor]:
    """[dx_TH, dweight_TK, and with needs_dweights the gradients of the given parameters]."""
    found = _SAVED.get(int(ticket))
    if found is None:
        raise RuntimeError(
            "the backward of a compiled ride ran after what its forward kept was let go: either it ran before "
            "(a second time takes retain_graph=True), or a hook on saved tensors (save_on_cpu, offloading) put a copy "
            "in the place of the ride's ticket; use such hooks without torch.compile"
        )
    inputs = [tensor.contiguous() for tensor in (x_TH, weight_TK, slot_TK)]
    activations, setup = _swap(found[0], lambda held: _take_back(held, inputs)), found[1]
    of_base, codes = (up, down, up_bias, down_bias), (up_code, up_scale, down_code, down_scale)
    weights = ExpertWeights(*of_base, up_a, up_b, down_a, down_b, *codes)
    with torch._C._ForceDispatchKeyGuard(*_OUTSIDE), torch.no_grad():
        coming, dweights = (setup.order or PLAIN).backward(
            dy_TH, weights, bring_back(activations, setup), setup, needs_dweights
        )
        dx_TH, dweight_TK = coming.wait()
    # A compiled ride defers no gradients.
    assert not callable(dweights)
    gradients = [dx_TH, dweight_TK.to(weight_TK.dtype), *(w for w in dweights or () if w is not None)]
    return [gradient.contiguous() for gradient in gradients]


@ride_backward_operator.register_fake
def _(dy_TH: torch.Tensor, _ticket: Any, _x_TH: Any, weight_TK: torch.Tensor, _slot_TK: Any, *rest: Any) -> Any:
    *weights, needs_dweights = rest
    wanted = zip(weights, _with_gradient(weights, needs_dweights), strict=True)
    like = [dy_TH, weight_TK, *(w for w, want in wanted if want)]
    return [torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device) for tensor in like]


def _with_gradient(weights: Sequence[torch.Tensor | None], needs_dweights: bool) -> list[bool]:
    """Which of the weights get a gradient in a backward: see `carpool.experts.base.Experts`."""
    first = 0 if needs_dweights else NUM_BASE
    return [w is not None and first <= place < NUM_TRAINED for place, w in enumerate(weights)]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    ctx.save_for_backward(output[1], *inputs[: 3 + len(ExpertWeights._fields)])


def _backward(ctx: Any, dy_TH: torch.Tensor, _: Any) -> tuple[Any, ...]:
    ticket, *inputs = ctx.saved_tensors
    weights = inputs[3:]
    needs_dweights = any(ctx.needs_input_grad[3 : 3 + NUM_BASE])
    dx_TH, dweight_TK, *rest = ride_backward_operator(dy_TH.contiguous(), ticket, *inputs, needs_dweights)
    gradients = iter(rest)
    dweights = [next(gradients) if want else None for want in _with_gradient(weights, needs_dweights)]
    return dx_TH, dweight_TK, None, *dweights, None, None, None


ride_operator.register_autograd(_backward, setup_context=_setup_context)


@dataclass(frozen=True)
class _Lent:
    """A range of rows of one of (x_TH, weight_TK, slot_TK), in place of a view of it."""

    number: int
    start: int
    rows: int


def _swap(what: Any, change: Callable[[Any], Any]) -> Any:
    """`what` with its tensors changed: those in tuples, `HiddenStates` and routes."""
    if isinstance(what, (torch.Tensor, _Lent)):
        return change(what)
    if isinstance(what, (HiddenStates, Route)):
        return replace(what, **{field.name: _swap(getattr(what, field.name), change) for field in fields(what)})
    if isinstance(what, tuple):
        items = [_swap(item, change) for item in what]
        return what._make(items) if hasattr(what, "_make") else tuple(items)
    return what


def _lend(tensor: torch.Tensor, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor | _Lent:
    """The tensor, if it shares no memory with the inputs; else its range in an input, or a copy."""
    for number, given in enumerate(inputs):
        if tensor.numel() and tensor.untyped_storage().data_ptr() == given.untyped_storage().data_ptr():
            layout, theirs = ((t.dtype, t.shape[1:], t.stride()) for t in (tensor, given))
            start, offset = divmod(int(tensor.storage_offset() - given.storage_offset()), max(1, given.stride(0)))
            rows = layout == theirs and offset == 0 and 0 <= start <= given.shape[0] - tensor.shape[0]
            return _Lent(number, start, tensor.shape[0]) if rows else tensor.clone()
    return tensor


def _take_back(held: torch.Tensor | _Lent, inputs: list[torch.Tensor]) -> torch.Tensor:
    if isinstance(held, _Lent):
        return inputs[held.number][held.start : held.start + held.rows]
    return held
