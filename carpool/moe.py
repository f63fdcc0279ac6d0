"""A Mixture-of-Experts layer over several ranks. Follow one token through `MoE.forward`:

    routing = router(x)            who serves it: K experts, K weights                      carpool/routing/
    slot_TK = assign(...)          which copy of each expert: rank and slot                 carpool/layout/
    weights = fill_slots(...)      slots take their experts' parameters from the homes      carpool/parallel/slots.py
    y = ride(...)                  its row goes to each rank that holds any of them, the    carpool/ride/function.py
                                   experts there add up what they make of it, and one
                                   partial sum per rank comes back
    y += shared(x)                 experts that serve every token stay at home, and compute while rows travel

Shapes: T tokens of this rank, H hidden, F expert hidden, E experts, K experts per token (layout.py has the legend).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from carpool.experts import Choices, ExpertFunction, ExpertWeights, make_activation, make_experts
from carpool.layout import ExpertLayout, assign
from carpool.observe.stats import LayerStats, RideStats
from carpool.parallel.migrate import Moved, RowMove, Stopwatch, check_can_move, move_experts
from carpool.parallel.slot_steps import Home, Homes, keep_slots
from carpool.parallel.slots import SlotFiller, fill_slots
from carpool.ride.function import ride
from carpool.routing import Router, Routing
from carpool.routing.limit import LimitOptions, RoutingLimit, router_similarity
from carpool.schedule import Schedule, tiles
from carpool.transport import NVLinkOptions, make_transport, resolve_transport

log = logging.getLogger("carpool")


class MoE(nn.Module):
    """A drop-in MoE feed-forward layer whose experts live on the ranks of `ep_mesh`.

    Every rank calls the layer with its own tokens, also with none. Each rank holds the parameters of its own
    experts, so after `backward()` their gradients are those of all tokens of the expert-parallel group; call
    `carpool.reduce_gradients` to get the gradients of the mean loss over ranks.

    Args:
        hidden_size, intermediate_size, num_experts, num_experts_per_tok: H, F, E, K.
        ep_mesh: one-dimensional mesh of the expert-parallel group. None: one rank holds all experts.
        edp_mesh: mesh of the ranks that hold copies of this rank's experts, if there are any (balance statistics
            are over the whole batch).
        layout: where experts live; default contiguous.
        transport: "auto", "gather", "alltoall", "dedup", "nvlink".
        max_tokens: the most tokens that any rank will ever have. Given this, "auto" picks "nvlink" where it can be
            used; its buffers have a fixed size. With more, outputs are NaN: `carpool.transport.check_overflow` tells.
        transport_options: of "nvlink".
        schedule: what runs beside what (carpool/schedule): `Schedule("chunks", 2)` lets one half of the tokens travel
            while the experts compute on the other. The same sums; weight gradients to rounding. Default: in turn.
        experts: "auto", "grouped", "reference"; "fp8", which is LOSSY (carpool/experts/fp8/experts.py).
        recompute_experts: "grouped" keeps no pre-activation and computes it again in the backward: of what experts
            keep, only the rows that arrived are left, for one more product. The same bits.
        expert_choices: of "grouped", the way of each stage (carpool/experts/choices.py). Default: by the shape;
            `carpool.experts.measure_choices` finds the fastest.
        activation, gated, bias: of the experts: silu, gelu, gelu_tanh, relu, relu2; SwiGLU-like or plain.
        shared_intermediate_size: hidden size of a shared expert, of the same activation and without biases, that serves
            every token. 0: none.
        router: keyword arguments of `carpool.routing.Router` (score, normalize, aux_loss_coef, ...).
        limit: limit the routing to few ranks or nodes per token. LOSSY (carpool/routing/limit.py).

    Example:
        >>> moe = MoE(256, 512, num_experts=16, num_experts_per_tok=4, ep_mesh=mesh["ep"])
        >>> y = moe(x)                               # (..., 256) -> (..., 256)
        >>> (y.square().mean() + moe.aux_loss).backward()

    Activation checkpointing works with and without reentry. With reentry the first forward builds no graph, so
    `aux_loss` has a gradient only if the checkpointed function returns it beside the output.

    Raises:
        ValueError: sizes, layout or names that do not fit, saying which.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int,
        num_experts_per_tok: int,
        *,
        ep_mesh: DeviceMesh | None = None,
        edp_mesh: DeviceMesh | None = None,
        layout: ExpertLayout | None = None,
        transport: str = "auto",
        max_tokens: int | None = None,
        transport_options: NVLinkOptions | None = None,
        schedule: Schedule | None = None,
        experts: str = "auto",
        recompute_experts: bool = False,
        expert_choices: Choices | None = None,
        activation: str = "silu",
        gated: bool = True,
        bias: bool = False,
        shared_intermediate_size: int = 0,
        router: dict[str, Any] | None = None,
        limit: LimitOptions | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        _check_sizes(hidden_size, intermediate_size, shared_intermediate_size)
        num_ranks = _check_mesh(ep_mesh, "ep_mesh")
        _check_mesh(edp_mesh, "edp_mesh")
        if layout is None:
            layout = ExpertLayout.contiguous(num_experts, num_ranks)
        if (layout.num_experts, layout.num_ranks) != (num_experts, num_ranks):
            raise ValueError(
                f"the layout is for {layout.num_experts} experts on {layout.num_ranks} ranks, "
                f"the layer has {num_experts} experts and ep_mesh {num_ranks} ranks"
            )
        if device is None and ep_mesh is not None:
            device = ep_mesh.device_type
        self.layout = layout
        self.transport_options: NVLinkOptions | None = None
        self.group, edp_group = _group(ep_mesh), _group(edp_mesh)
        self.rank = dist.get_rank(self.group) if self.group is not None else 0
        groups = [group for group in (self.group, edp_group) if group is not None]
        place: dict[str, Any] = {"device": device, "dtype": dtype}

        self.router = Router(hidden_size, num_experts, num_experts_per_tok, groups=groups, **place, **(router or {}))
        rows, width = len(layout.homes[self.rank]), intermediate_size * (2 if gated else 1)
        self.up_proj = nn.Parameter(torch.empty(rows, width, hidden_size, **place))
        self.down_proj = nn.Parameter(torch.empty(rows, hidden_size, intermediate_size, **place))
        self.up_bias = nn.Parameter(torch.empty(rows, width, **place)) if bias else None
        self.down_bias = nn.Parameter(torch.empty(rows, hidden_size, **place)) if bias else None
        act = make_activation(activation, gated)
        self.shared = None
        if shared_intermediate_size:
            self.shared = SharedExpert(hidden_size, shared_intermediate_size, act, gated, place)

        self.experts = make_experts(experts, ExpertFunction(act), expert_choices, recompute_experts)
        self.stats_counter = LayerStats(num_experts, num_ranks, self.rank)
        self.filler = SlotFiller(layout, self.group, self.stats_counter.meter)
        self.schedule = schedule or Schedule()
        options = transport_options or NVLinkOptions()
        self.set_transport(transport, options if max_tokens is None else replace(options, max_tokens=max_tokens))
        self.routing: Routing | None = None
        self.aux_loss = torch.zeros((), device=device)
        self.reset_parameters()
        self._agree(edp_group)
        self.set_limit(limit)

    def forward(self, x: torch.Tensor, routing: Routing | None = None) -> torch.Tensor:
        """(..., H) -> (..., H). With `routing`, replay it: recorded weights are used as they are, and where a
        recording has none the router computes them for the recorded choices."""
        self._check_input(x)
        x_TH = x.reshape(-1, x.shape[-1])
        routing = self._route(x_TH) if routing is None else self._replay(x_TH, routing)
        self.routing = routing.detach()

        slot_TK = assign(routing, self.layout, self.rank, self._serving_TW)
        weights = fill_slots(ExpertWeights(*self._home_weights()), self.filler)
        served: list[torch.Tensor] = []
        shared = self.shared
        y_TH = ride(
            x_TH, routing, slot_TK, self.transport, self.experts, weights, self.stats_counter, self.schedule.chunks,
            beside=None if shared is None else lambda: served.append(shared(x_TH)),
            backward_chunks=self.schedule.backward_chunks,
        )  # fmt: skip
        self.filler.start_next()
        return sum(served, y_TH).view_as(x)

    # -- what is asked of it beside the forward -----------------------------------------------------------------

    def set_transport(self, name: str, options: NVLinkOptions | None = None) -> None:
        """Change how rows travel. All ranks together, between steps. `options`: as before, unless given."""
        self.transport_options = options or self.transport_options
        hidden, options = self.up_proj.shape[2], self.transport_options
        options = self.schedule.options(options)
        chosen, why = resolve_transport(name, self.group, self.router.top_k, hidden, options)
        if name == "auto" and self.rank == 0:
            log.info("transport %s: %s", chosen, why)
        self.transport = make_transport(chosen, self.group, self.layout.slots_per_rank, options)
        tiles.check(self.schedule, self.transport, self.up_proj.device)

    def set_schedule(self, schedule: Schedule) -> None:
        """Change what runs beside what. All ranks together, between steps."""
        self.schedule = schedule
        self.set_transport(self.transport.name)

    def set_layout(self, layout: ExpertLayout, optimizer: torch.optim.Optimizer | None = None) -> Moved:
        """Move experts to the homes of another layout, with what `optimizer` keeps of them, and compute in its slots
        from now on. All ranks together, between an optimizer's step and the next forward, gradients set to None.

        Ranks may get other numbers of experts: the parameters then change their shape, but stay the same objects.

        Raises:
            ValueError: another number of experts or ranks, or anything that cannot move; nothing has moved then."""
        if (layout.num_experts, layout.num_ranks) != (self.layout.num_experts, self.layout.num_ranks):
            raise ValueError(
                f"the layout is for {layout.num_experts} experts on {layout.num_ranks} ranks, the layer has "
                f"{self.layout.num_experts} experts on {self.layout.num_ranks}"
            )
        moved = Moved()
        if layout != self.layout:
            watch = Stopwatch(self.up_proj.device)
            move = RowMove(self.layout.homes, layout.homes, self.rank)
            # With one rank there is nobody to ask, whoever else is in the world.
            if self.group is not None:
                check_can_move(self.expert_parameters(), optimizer, self.group)
            size = move_experts(self.expert_parameters(), move, optimizer, self.group)
            self.layout, self.filler = layout, SlotFiller(layout, self.group, self.stats_counter.meter)
            self.set_transport(self.transport.name)
            moved = Moved(1, move.travelling, size, watch.seconds())
        return moved

    def stats(self, reset: bool = False) -> RideStats:
        """Copies per token, rows, bytes and expert load of this rank's tokens since the last reset."""
        summary = replace(self.stats_counter.summary(), dropped=int(self.router.dropped.item()))
        if reset:
            self.stats_counter.reset()
            self.router.dropped.zero_()
        return summary

    def set_limit(self, options: LimitOptions | None, similarity_EE: torch.Tensor | None = None) -> list[str]:
        """Limit the routing to few ranks or nodes per token (LOSSY; carpool/routing/limit.py), or no longer.

        Args:
            similarity_EE: for limit_by="similarity". Default: of the router's present rows.

        Returns:
            What that changes of the layer's function, for logs."""
        self.limit, ranks = None, self.layout.num_ranks
        if options is None:
            return []
        options.check(ranks)
        if options.active(ranks):
            if options.limit_by == "similarity" and similarity_EE is None:
                similarity_EE = router_similarity(self.router.weight)
            self.limit = RoutingLimit(options, ranks, self.rank, similarity_EE)
        return options.lossy_reasons(ranks)

    def update_bias(self) -> None:
        """Auxiliary-loss-free balancing; see `Router.update_bias`."""
        self.router.update_bias()

    def expert_parameters(self) -> Iterator[nn.Parameter]:
        """This rank's expert parameters. All others of the layer are replicated on every rank."""
        return (w for w in self._home_weights() if w is not None)

    @torch.no_grad()
    def logical_state_dict(self) -> dict[str, torch.Tensor]:
        """The whole layer's state, experts in logical order, the same whatever the layout. Collective."""
        state = {k: v.detach().clone() for k, v in self.state_dict().items() if k not in EXPERT_NAMES}
        for name in EXPERT_NAMES:
            if (home := getattr(self, name)) is not None:
                state[name] = gather_homes(home, self.layout, self.group)
        return state

    @torch.no_grad()
    def load_logical_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Take this rank's part of what `logical_state_dict` gave, also under another layout."""
        for name in EXPERT_NAMES:
            if name in state and len(state[name]) != self.layout.num_experts:
                raise ValueError(
                    f"{name} in the state has {len(state[name])} experts, the layer has {self.layout.num_experts}"
                )
        mine = list(self.layout.homes[self.rank])
        local = {k: v[mine] if k in EXPERT_NAMES else v for k, v in state.items()}
        self.load_state_dict(local)

    def reset_parameters(self) -> None:
        """Draw all parameters from the default generator. Every rank draws every expert and keeps its own, so that
        the same seed gives the same model on any number of ranks."""
        rows = {expert: row for row, expert in enumerate(self.layout.homes[self.rank])}
        with torch.no_grad():
            _draw(self.router.weight)
            for expert in range(self.layout.num_experts):
                for weight in self._home_weights():
                    if weight is not None:
                        row = weight[rows[expert]] if expert in rows else weight.new_empty(weight.shape[1:])
                        _draw(row)
        if self.shared is not None:
            self.shared.reset_parameters()

    def extra_repr(self) -> str:
        return f"layout={self.layout.kind}, transport={self.transport.name}, experts={self.experts.name}"

    def _route(self, x_TH: torch.Tensor) -> Routing:
        self._serving_TW: torch.Tensor | None = None
        routing = self.router(x_TH, choose=self._within_limit if self.limit is not None else None)
        self.aux_loss = self.router.aux_loss
        return routing

    def _within_limit(self, score_TE: torch.Tensor, share_TE: torch.Tensor, top_k: int) -> torch.Tensor:
        assert self.limit is not None
        expert_TK, self._serving_TW = self.limit.choose(score_TE, share_TE, top_k, self.layout)
        return expert_TK

    def _replay(self, x_TH: torch.Tensor, routing: Routing) -> Routing:
        routing.check(x_TH.shape[0], self.layout.num_experts)
        self._serving_TW, self.aux_loss = None, x_TH.new_zeros(())
        if routing.weight_TK is None:
            routing = self.router(x_TH, routing.expert_TK)
            self.aux_loss = self.router.aux_loss
        return routing

    def _home_weights(self) -> tuple[nn.Parameter, nn.Parameter, nn.Parameter | None, nn.Parameter | None]:
        return self.up_proj, self.down_proj, self.up_bias, self.down_bias

    def _check_input(self, x: torch.Tensor) -> None:
        if x.dim() == 0 or x.shape[-1] != self.up_proj.shape[2]:
            raise ValueError(f"the layer's hidden size is {self.up_proj.shape[2]}, but x has shape {tuple(x.shape)}")
        if x.dtype != self.up_proj.dtype and not torch.is_autocast_enabled(x.device.type):
            raise ValueError(f"x is {x.dtype}, the layer's parameters are {self.up_proj.dtype}; convert one of them")

    def _agree(self, edp_group: dist.ProcessGroup | None) -> None:
        """What several ranks hold starts equal on them even if they were seeded differently: an expert on its copies,
        everything else on all ranks."""
        experts = set(self.expert_parameters())
        for parameter in self.parameters():
            if parameter.device.type == "meta":
                continue
            for group in (edp_group,) if parameter in experts else (edp_group, self.group):
                if group is not None:
                    dist.broadcast(parameter.data, group=group, group_src=0)


EXPERT_NAMES = ("up_proj", "down_proj", "up_bias", "down_bias")


@contextmanager
def slots_kept(model: nn.Module, prefetch: bool = True) -> Iterator[None]:
    """Inside, no weight changes: replicas are filled once and serve all forwards. All ranks together, around the
    micro-batches of a step. A layer must have its layout before.

    Args:
        prefetch: slots are filled ahead of their layer, and no backward waits for replicas' gradients: these are
            complete at the end. The same bits (carpool/parallel/slot_steps.py). Layers should run in the order in
            which the model registers them; in another one, fills may still be waited for."""

    def homes(moe: MoE) -> Homes | None:
        weights = ExpertWeights(*moe._home_weights())._asdict().items()
        if any(isinstance(w, DTensor) for _, w in weights) or not prefetch:
            return None  # the former: somebody has sharded them
        return {name: Home(w, w.dtype, 1.0) for name, w in weights if w is not None}

    with keep_slots([(moe.filler, homes(moe)) for moe in model.modules() if isinstance(moe, MoE)]):
        yield


class SharedExpert(nn.Module):
    """A dense expert that serves every token at home."""

    def __init__(self, hidden_size: int, size: int, activation: Any, gated: bool, place: dict[str, Any]) -> None:
        super().__init__()
        self.activation = activation
        self.up = nn.Linear(hidden_size, size * (2 if gated else 1), bias=False, **place)
        self.down = nn.Linear(size, hidden_size, bias=False, **place)

    def forward(self, x_TH: torch.Tensor) -> torch.Tensor:
        return self.down(self.activation(self.up(x_TH)))

    def reset_parameters(self) -> None:
        with torch.no_grad():
            for parameter in self.parameters():
                _draw(parameter)


def gather_homes(home: torch.Tensor, layout: ExpertLayout, group: dist.ProcessGroup | None) -> torch.Tensor:
    """All experts' rows in logical order, on every rank. Collective.

    Example: homes [[2, 0], [1]], rows [[c, a], [b]]  ->  [a, b, c]
    """
    most = max(len(rank) for rank in layout.homes)
    padded = home.new_zeros(most, *home.shape[1:])
    padded[: home.shape[0]] = home
    parts = [padded]
    if group is not None:
        parts = [torch.empty_like(padded) for _ in layout.homes]
        dist.all_gather(parts, padded, group=group)
    return torch.stack([parts[rank][row] for rank, row in layout.home_of])


def _draw(weight: torch.Tensor) -> None:
    """Normal with the standard deviation of a linear layer's usual start; zeros for a bias."""
    if weight.dim() < 2:
        weight.zero_()
    else:
        weight.normal_(std=1 / math.sqrt(weight.shape[-1]))


def _check_sizes(hidden_size: int, intermediate_size: int, shared_intermediate_size: int) -> None:
    if hidden_size < 1 or intermediate_size < 1:
        raise ValueError(f"hidden_size={hidden_size} and intermediate_size={intermediate_size} must both be at least 1")
    if shared_intermediate_size < 0:
        raise ValueError(f"shared_intermediate_size={shared_intermediate_size} must be 0 (no shared expert) or more")


def _group(mesh: DeviceMesh | None) -> dist.ProcessGroup | None:
    """None where there is nobody to talk to."""
    return mesh.get_group() if mesh is not None and mesh.size() > 1 else None


def _check_mesh(mesh: DeviceMesh | None, name: str) -> int:
    if mesh is None:
        return 1
    if mesh.ndim != 1:
        raise ValueError(f'{name} has {mesh.ndim} dimensions; pass one, such as mesh["ep"] of a named mesh')
    return mesh.size()
