"""One MoE layer of a transformers model: how its experts module gets its tokens.

In place of the module's forward `ExpertRides.forward` is called (`carpool.hf.seam.implementation`), with this rank's
tokens and the router's choices. FSDP2 has gathered the rank's experts, and shards and divides their gradients later.

    hidden_states (T, H), top_k_index (T, K), top_k_weights (T, K)   ->   (T, H)

Expert classes that carry transformers' experts decorator have two stacked weights, an activation or a gate function,
maybe biases; Carpool computes those itself (`carpool.ride.function.ride`). Any other class, or one whose weights are no
plain parameters any more, is called as it is on the tokens that arrived (`carpool.ride.ride_module`): its own
`forward(tokens, local ids, weights)` already means "the weighted sum over this token's local experts".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from functools import partial
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from carpool.experts import ExpertWeights
from carpool.experts.pairs import why_host_waits
from carpool.hf.seam.experts_module import (
    base_of,
    check_not_quantised,
    expert_function,
    projections_of,
    slices_of,
    weight_names,
)
from carpool.hf.seam.refusals import check_adapters, check_tensor_parallel_around
from carpool.layer.core import LayerCore
from carpool.layout import ExpertLayout
from carpool.parallel import fsdp
from carpool.ride.turns import HALF
from carpool.routing import Routing
from carpool.transport import Transport
from carpool.transport.nvlink import Buffers
from carpool.transport.token_capacity import TokenCapacity

Forward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class BeforeRide(Protocol):
    """Changes a routing between its router and its ride: a replay, or a limit (`carpool.hf.routing`)."""

    def before_ride(self, routing: Routing) -> Routing:
        """The routing that rides."""

    def remove(self) -> None:
        """Leave the router and the layer as they were."""


class Adapters(Protocol):
    """Adapters of a layer's experts: `carpool.hf.expert_adapters.ExpertAdapters`."""

    def factors(self) -> Sequence[torch.Tensor | None]:
        """Of `ExpertWeights`: a and b of up, a and b of down."""

    def parameters(self) -> Iterator[nn.Parameter]:
        """All of them; each has a row for each expert."""


class EarlyWork(Protocol):
    """Work that needs not wait for a ride: `carpool.hf.seam.shared.SharedExperts`."""

    def compute(self, x_TH: torch.Tensor) -> Any:
        """Do it now, while x_TH travels."""

    def offer(self, computed: Any) -> None:
        """The ride has ended: keep what `compute` returned until the model asks for it."""

    def remove(self) -> None:
        """Leave the model as it was."""


class ExpertRides(LayerCore):
    """The core of one MoE layer of a transformers model, and the adapter around it. `rides(model)` finds them.

    Args:
        experts: transformers' experts module; `experts.num_experts` is what this rank owns, experts or slices of them.
        experts_forward: its own forward, on local expert ids.
        group: the expert-parallel group; None for one rank.
        transport: "auto" or a key of `carpool.transport.TRANSPORTS`.

    Attributes, beside those of the core:
        adapters: those of the experts; None: there are none.
        shared: the block's shared experts, if they compute beside the ride.
        replay, router_limit: what changes the router's choices; None: nothing.
        token_slice: (i, n): of the layer's tokens, this rank's are part i of n equal ones.
        states_logical: whether the module's states are in logical order by hooks (`set_layout`).
        padded: whether a forward may have padding (`WithoutExperts`).
        row_group: the ranks among which its parameters are sharded, and maybe more; None: all ranks.
    """

    def __init__(self, experts: Any, experts_forward: Forward, group: dist.ProcessGroup | None, transport: str) -> None:
        if not isinstance(getattr(experts, "num_experts", None), int):
            raise ValueError(
                f"{type(experts).__name__} has no integer `num_experts`; carpool cannot tell its experts apart"
            )
        check_not_quantised(experts)
        ranks = dist.get_world_size(group) if group is not None else 1
        if (slices := slices_of(experts)) > 1:
            layout = ExpertLayout.sliced(experts.num_experts * ranks // slices, ranks // slices, slices)
        else:
            layout = ExpertLayout.chunked(getattr(experts, "_carpool_num_experts", experts.num_experts * ranks), ranks)
        super().__init__(layout, group, expert_function(experts), name=type(experts).__name__)
        self.experts, self.experts_forward = experts, experts_forward
        self.num_local_experts: int = experts.num_experts
        self.adapters: Adapters | None = None
        self.projections = projections_of(experts)
        self.shared: EarlyWork | None = None
        self.replay: BeforeRide | None = None
        self.router_limit: BeforeRide | None = None
        self.token_slice = (0, 1)
        self.row_group: dist.ProcessGroup | None = None
        self.states_logical = self.padded = False
        self._model_checked = False
        self.set_transport(transport)
        # Found again by `rides`. Set past nn.Module: it must not appear among submodules or in the state dict.
        object.__setattr__(experts, "_carpool_rides", self)

    def __deepcopy__(self, memo: dict[int, Any]) -> ExpertRides:
        raise TypeError(
            "a transformers model with Carpool's layers cannot be copied: its experts are reached through functions of "
            "this one. Load it a second time instead"
        )

    def prepare(self, top_k: int, hidden: int, device: torch.device | None = None) -> Transport:
        """Make the transport, if there is none. All ranks together. `device`: by default, where the experts are."""
        return self.transport or super().prepare(top_k, hidden, device or next(self.experts.parameters()).device)

    def check_layout(self, layout: ExpertLayout) -> None:
        """Raise ValueError if this layer cannot compute under `layout`."""
        super().check_layout(layout)
        if base_of(self.experts) and layout != self.layout:
            raise ValueError("experts that are quantised (adapter.base_dtype) stay where they are")
        sizes, own = ([len(rank) for rank in one.homes] for one in (layout, self.layout))
        if sizes != own:
            why = "FSDP shards experts evenly, so every rank must be home to equally many experts"
            raise ValueError(why if len(set(own)) == 1 else f"ranks are home to {own} experts each, and not to {sizes}")

    def forward(self, x_TH: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        """(T, H) rows, (T, K) global expert ids, (T, K) weights -> (T, H)."""
        if not self._model_checked and torch.is_grad_enabled():
            self._check_model()
        # Some routers mark "no expert" by -1, others by the number of experts.
        in_range_TK = (top_k_index >= 0) & (top_k_index < self.num_experts)
        if self.padded:
            top_k_index = choices_of_tokens(top_k_index, *self.token_slice)
            in_range_TK &= top_k_index >= 0
        routing = Routing(torch.where(in_range_TK, top_k_index, -1).int(), top_k_weights.float())
        if self.replay is not None:
            routing = self.replay.before_ride(routing)
        elif self.router_limit is not None:
            routing = self.router_limit.before_ride(routing)
        overlapped = None if self.shared is None else partial(self.shared.compute, x_TH)
        settings = {"training": self.experts.training, "replayed": self.replay is not None}
        y_TH, computed = self(x_TH, routing, self._home(), overlapped=overlapped, **settings)
        if self.shared is not None:
            self.shared.offer(computed)
        return y_TH

    @property
    def settled(self) -> bool:
        return self._model_checked and super().settled

    def settle(self) -> None:
        """Once all is chosen: make now what the next forward would make for the first time."""
        device = next(self.experts.parameters()).device
        self._check_model()
        self.layout.slot_E(device)
        if self.transport is not None:
            self.ride_setup(self.transport, device)

    # A walk over the whole model: traced by torch.compile, it took a minute and was different for each layer.
    @torch._disable_dynamo
    def _check_model(self) -> None:
        """What is known only once the model is whole: its adapters, and how FSDP shards it."""
        check_adapters(self.experts)
        fsdp.divide_once(self.experts)
        if self.token_slice[1] > 1:
            check_tensor_parallel_around(self.experts)
        self._model_checked = True

    def _home(self) -> ExpertWeights | Forward:
        """The parameters of this rank's homes; the model's own forward where they are no plain parameters."""
        names = weight_names(self.experts) if self.compute is not None else ()
        if self.compute is None or any(name and name not in self.experts._parameters for name in names):
            return self._own_forward
        # A list: torch 2.11 cannot compile what comes after a graph break in a generator.
        weights = [self.experts._parameters[name] if name else None for name in names]
        if not torch.compiler.is_compiling() and HALF.get() is not None:
            weights = self._of_this_pass(names, weights)
        if base := base_of(self.experts):
            factors = (None,) * 4 if self.adapters is None else self.adapters.factors()
            codes = [tensor for name in names[:2] if name for tensor in base[name]]
            if self.function is not None and self.function.transposed != self.experts.is_transposed:
                weights[:2] = [cast(Any, weight).transpose(1, 2) for weight in weights[:2]]  # stand-ins, as codes are
            return ExpertWeights.of([*weights, *factors, *codes])
        return ExpertWeights.of(weights if self.adapters is None else [*weights, *self.adapters.factors()])

    def _of_this_pass(self, names: Sequence[str | None], weights: list[Any]) -> list[Any]:
        """With nodes of autograd that this pass has made. Of two passes that take turns, the second finds local tensors
        that transformers has made for the first. Their nodes are of the other thread, so their place in the order of
        the backward is another one, and FSDP would reduce before their gradients have come."""
        whole = fsdp.gathered(self.experts)
        found = (whole.get(name, weight) if name else None for name, weight in zip(names, weights, strict=True))
        return [weight.to_local() if isinstance(weight, DTensor) else weight for weight in found]

    def adapter_parameters(self) -> list[nn.Parameter]:
        """The parameters of the experts' adapters; each has a row for each expert."""
        return [] if self.adapters is None else list(self.adapters.parameters())

    def _own_forward(self, x_RH: torch.Tensor, slot_RJ: torch.Tensor, weight_RJ: torch.Tensor) -> torch.Tensor:
        """The model's own experts on the rows that arrived; "no expert" is the number of local experts there."""
        if x_RH.shape[0] == 0:
            # One row for nobody keeps the parameters in the graph, so that this rank joins FSDP's reductions.
            x_1H, weight_11 = x_RH.sum(0, keepdim=True), weight_RJ.sum().view(1, 1)
            return self.experts_forward(x_1H, slot_RJ.new_zeros(1, 1).long(), weight_11.to(x_RH.dtype))[:0]
        ids_RJ = torch.where(slot_RJ < 0, self.num_local_experts, slot_RJ).long()
        return self.experts_forward(x_RH, ids_RJ, weight_RJ.to(x_RH.dtype))


def rides(model: nn.Module) -> dict[str, ExpertRides]:
    """The Carpool layers of a model by module name, such as "model.layers.0.mlp.experts", with adapters around them or
    without."""
    found = ((name, getattr(module, "_carpool_rides", None)) for name, module in model.named_modules())
    return {name.replace(".base_layer", ""): own for name, own in found if own is not None}


def required_rides(model: nn.Module) -> dict[str, ExpertRides]:
    """As `rides`, of a model that must have some. Raises ValueError if it has none."""
    if layers := rides(model):
        return layers
    raise ValueError('this model has no Carpool layers; load it with ep_implementation="carpool" and ep_size > 1')


def capacities_of_rides(layers: Iterable[ExpertRides]) -> list[TokenCapacity]:
    """What may have too few places for the rows of these layers, each once."""
    capacities = (capacity for own in layers if own.transport is not None for capacity in own.transport.capacities)
    return list({id(one): one for one in capacities}.values())


def buffers_of_rides(layers: Iterable[ExpertRides]) -> list[Buffers]:
    """Those of `capacities_of_rides` that are buffers of `nvlink`."""
    return [one for one in capacities_of_rides(layers) if isinstance(one, Buffers)]


def restart_arenas(layers: Iterable[ExpertRides]) -> None:
    """Let rows have their places from the beginning of each arena, before what a CUDA graph is to repeat and after it.

    Raises:
        RuntimeError: a layer keeps rows for a backward that has not run."""
    for buffers in buffers_of_rides(layers):
        for arena in buffers.arenas:
            arena.restart()


def why_experts_wait(own: ExpertRides) -> str | None:
    """Why the host waits for the device while the experts of a layer compute on a GPU; None: it does not."""
    return why_host_waits(own.compute, getattr(own.experts, weight_names(own.experts)[1]))


# ---------------------------------------------------------------------------------------------------------------------
# Padding takes no part in MoE layers: its tokens choose no expert.
#
#     padding_T               .   .   .   x           with WithoutExperts(padding_T):
#     the router's choices    30  12  01  23              model(input_ids=...)
#     what rides              30  12  01  --
#
# What has no choice does not travel, is computed by no expert, and counts in no load. Models hand no mask to their
# experts, so each layer looks here; so does what checkpointing computes again, maybe in another thread (`found_again`).

# Of this thread: two halves of a micro-batch are in the model at the same time (`carpool.ride.two_batch`).
_PADDING: ContextVar[torch.Tensor | None] = ContextVar("padding", default=None)


class WithoutExperts(AbstractContextManager[None]):
    """Inside, these tokens of this thread's forward choose no expert, as inside of `inner`. None: all choose. May be
    entered several times, which a context manager of a generator may not."""

    def __init__(self, padding_T: torch.Tensor | None, inner: AbstractContextManager[None] | None = None) -> None:
        self._padding_T, self._inner, self._before = padding_T, inner or nullcontext(), padding_T

    def __enter__(self) -> None:
        self._before = _PADDING.get()
        _PADDING.set(self._padding_T)
        self._inner.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._inner.__exit__(*error)
        _PADDING.set(self._before)


def found_again(inner: AbstractContextManager[None]) -> WithoutExperts:
    """`inner`, in which what is in its forward now is computed again; maybe several times."""
    return WithoutExperts(_PADDING.get(), inner)


def choices_of_tokens(expert_TK: torch.Tensor, part: int = 0, parts: int = 1) -> torch.Tensor:
    """(T, K) choices of experts with -1 in place of those of padding. Of tokens in equal parts, these are one."""
    if torch.compiler.is_compiling():
        # The graph asks each time that it runs.
        return _asked(expert_TK, part, parts)
    padding_T = _PADDING.get()
    if padding_T is None:
        return expert_TK
    each = -(-len(padding_T) // parts)
    return expert_TK.masked_fill(padding_T[part * each : (part + 1) * each].unsqueeze(1), -1)


@torch.library.custom_op("carpool::choices_of_tokens", mutates_args=())
def _asked(expert_TK: torch.Tensor, part: int, parts: int) -> torch.Tensor:
    # What an operator returns must be none of its arguments.
    found = choices_of_tokens(expert_TK, part, parts)
    return found.clone() if found is expert_TK else found


@_asked.register_fake
def _(expert_TK: torch.Tensor, part: int, parts: int) -> torch.Tensor:
    return torch.empty_like(expert_TK)
