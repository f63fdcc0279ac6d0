"""The parts of `carpool.MoE` other than its forward: settings, counters, state dicts, and gradient reduction.

**State.** Stacked expert parameters are in the order of the layout's homes. A plain `state_dict()` has this order, so
it fits no other layout: it records its order, unless that is the contiguous one, and `load_state_dict` refuses another.
`logical_state_dict` has all experts in logical order, and loads under any layout.

**Gradient reduction without FSDP.** The loss of the batch is the mean over ranks of each rank's loss. So
  - the gradient of a non-expert parameter (router, shared experts, attention), which every rank has, is the mean over
    *all* ranks;
  - the gradient of an expert parameter, on its home, already has the contributions of all tokens of its expert-parallel
    group. It must be summed over the data-parallel replicas of that group, and divided by the number of all ranks.
Averaging experts over all ranks, or not dividing them at all, gives gradients that are wrong by the expert-parallel
degree, with a loss curve that looks normal.

    4 ranks = 2 replicas x 2 expert-parallel ranks      ranks 0 1 | 2 3
    non-expert: mean over 0 1 2 3        expert on rank 0: (its gradient + rank 2's) / 4
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from carpool.activations import ActivationPolicies, Offloader
from carpool.experts import Experts, ExpertWeights
from carpool.experts.slices import cut, join
from carpool.layer.core import LayerCore
from carpool.layout import ExpertLayout
from carpool.metrics.counters import RideStats
from carpool.replicas.migrate import Moved, RowMove, Stopwatch, check_can_move, move_experts
from carpool.ride.balanced import SpareSlotOptions
from carpool.ride.schedule import Schedule
from carpool.routing import DropOptions, Router, Routing
from carpool.routing.limit import LimitOptions
from carpool.routing.router import draw_weight
from carpool.transport import Transport, TransportOptions

# Expert parameters by name, with their fields of `ExpertWeights`.
PARAMETERS = {
    "up_proj": "up_SFH", "down_proj": "down_SHF", "up_bias": "up_bias_SF", "down_bias": "down_bias_SH",
}  # fmt: skip
# The entry of a state dict with the order of its experts, rank after rank.
ORDER = "expert_order"


def home_order(layout: ExpertLayout) -> torch.Tensor | None:
    """(2, E) int32: rank and row of each expert's (or slice's) home; None for the contiguous layout."""
    if layout.slices == 1 and layout.homes == ExpertLayout.contiguous(layout.num_experts, layout.num_ranks).homes:
        return None
    return torch.tensor(layout.home_of, dtype=torch.int32).t().contiguous()


def order_error(state: dict[str, Any], prefix: str, layout: ExpertLayout) -> str | None:
    """Why a plain state dict must not be loaded under `layout`; None if it may. Removes the order from `state`."""
    saved, own = state.pop(prefix + ORDER, None), home_order(layout)
    if (saved is None and own is None) or (saved is not None and own is not None and torch.equal(saved.cpu(), own)):
        return None
    return (
        "the experts of this state lie in the order of another layout than the layer's; save logical_state_dict() and "
        "load it with load_logical_state_dict(), which fit any layout"
    )


def gather_homes(home: torch.Tensor, layout: ExpertLayout, group: dist.ProcessGroup | None) -> torch.Tensor:
    """The parameters of all experts (or slices) in logical order, on every rank. Collective.

    Example: homes [[2, 0], [1]], parameters [[c, a], [b]]  ->  [a, b, c]
    """
    most = max(len(rank) for rank in layout.homes)
    padded = home.new_zeros(most, *home.shape[1:])
    padded[: home.shape[0]] = home
    parts = [padded]
    if group is not None:
        parts = [torch.empty_like(padded) for _ in layout.homes]
        dist.all_gather(parts, padded, group=group)
    return torch.stack([parts[rank][row] for rank, row in layout.home_of])


log = logging.getLogger("carpool")


class LayerModule(nn.Module):
    """A router, the stacked parameters of this rank's experts, and a core. The subclass `carpool.MoE` constructs them.

    Attributes:
        core: settings, counters and the computation (`carpool.layer.core.LayerCore`).
        router: `carpool.routing.Router`.
        aux_loss: of the last forward, see `Router`.
    """

    core: LayerCore
    router: Router
    shared: nn.Module | None
    up_proj: nn.Parameter
    down_proj: nn.Parameter
    up_bias: nn.Parameter | None
    down_bias: nn.Parameter | None
    aux_loss: torch.Tensor

    # -- settings: collective, between steps -----------------------------------------------------------------------

    def set_transport(self, name: str, options: TransportOptions | None = None) -> None:
        """Change the transport. `options`: unchanged, unless given.

        Raises ValueError for a name that is unknown, or that cannot be used here."""
        self.core.set_transport(name, options)
        self._prepare()

    def set_schedule(self, schedule: Schedule) -> None:
        """Change the schedule, which overlaps communication with computation."""
        self.core.set_schedule(schedule)
        self._prepare()

    def set_spare_slots(self, options: SpareSlotOptions | None) -> None:
        """Balance each ride by replicas of experts in spare slots (carpool/ride/balanced.py), or no longer."""
        self.core.set_spare_slots(options)
        self._prepare()

    def set_activation_policies(self, policies: ActivationPolicies, offloader: Offloader | None = None) -> None:
        """Change the policies for saved activations (carpool/activations/__init__.py).

        Args:
            offloader: shared by the layers of a model, so that one layer's activations are prefetched during the
                backward of the next one. None: this layer's own."""
        self.core.set_activation_policies(policies, offloader)
        self._prepare()

    def set_limit(self, options: LimitOptions | None) -> list[str]:
        """Limit the routing to few ranks or nodes per token (LOSSY; carpool/routing/limit.py), or no longer.

        Returns:
            How this changes the layer's function, for logs."""
        return self.core.set_limit(options)

    def set_drops(self, options: DropOptions | None) -> None:
        """Drop choices after the router (LOSSY), or no longer; in addition to those that the router drops."""
        if options is not None:
            options.check(self.router.top_k)
        self.core.set_drops(options)

    def set_layout(self, layout: ExpertLayout, optimizer: torch.optim.Optimizer | None = None) -> Moved:
        """Move experts, with their state in `optimizer`, to the homes of another layout.
        Collective, between an optimizer step and the next forward, with gradients set to None.

        If numbers of experts per rank change, the parameters change their shape, but stay the same objects.

        Raises:
            ValueError: another number of experts or ranks, a forward whose backward has not run, or anything that
                cannot move; nothing has moved then."""
        core, moved = self.core, Moved()
        core.check_layout(layout)
        if layout != core.layout:
            watch = Stopwatch(self.up_proj.device)
            move = RowMove(core.layout.homes, layout.homes, core.rank)
            problem = core.why_not_move()
            # With one rank nothing is collective, even if the world has more.
            if core.group is not None:
                check_can_move(self.expert_parameters(), optimizer, core.group, problem)
            elif problem:
                raise ValueError(problem)
            size = move_experts(self.expert_parameters(), move, optimizer, core.group)
            core.move_to(layout)
            self._prepare()
            moved = Moved(1, move.travelling, size, watch.seconds())
        return moved

    def update_bias(self) -> None:
        """Auxiliary-loss-free balancing; see `Router.update_bias`."""
        self.router.update_bias()

    # -- properties and counters -----------------------------------------------------------------------------------

    @property
    def layout(self) -> ExpertLayout:
        """The layout of experts."""
        return self.core.layout

    @property
    def rank(self) -> int:
        """This rank's number in the expert-parallel group."""
        return self.core.rank

    @property
    def transport(self) -> Transport:
        """The transport."""
        return self._prepare()

    @property
    def experts(self) -> Experts:
        """The expert computation."""
        assert self.core.compute is not None
        return self.core.compute

    @property
    def routing(self) -> Routing | None:
        """The routing of this rank's tokens in the last forward, which `moe(x, routing=...)` replays."""
        return self.core.routing

    def stats(self, reset: bool = False) -> RideStats:
        """Ranks per token, sends, bytes and expert load of this rank's tokens since the last reset."""
        core = self.core
        summary = replace(core.stats.summary(), dropped=int(self.router.dropped.item()) + int(core.dropped or 0))
        if reset:
            core.reset_counts()
            self.router.dropped.zero_()
        return summary

    def extra_repr(self) -> str:
        transport = self.core.requested if self.core.transport is None else self.core.transport.name
        return f"layout={self.layout.kind}, {transport=!s}, experts={self.experts.name}"

    # -- parameters ------------------------------------------------------------------------------------------------

    def expert_parameters(self) -> Iterator[nn.Parameter]:
        """This rank's expert parameters. All other parameters of the layer are replicated on every rank."""
        return (w for w in (self.up_proj, self.down_proj, self.up_bias, self.down_bias) if w is not None)

    def home_weights(self) -> ExpertWeights:
        """The parameters of this rank's homes."""
        return ExpertWeights(self.up_proj, self.down_proj, self.up_bias, self.down_bias)

    def reset_parameters(self) -> None:
        """Draw all parameters from the default generator, and set the router's bias and all counters to zero. Every
        rank draws every expert and uses its own, so that the same seed gives the same model on any number of ranks.

        Also initialises a layer that was constructed on "meta", after `to_empty`."""
        layout, function = self.layout, self.core.function
        assert function is not None
        rows, slices = {name: row for row, name in enumerate(layout.homes[self.rank])}, layout.slices
        self.router.reset_parameters()
        with torch.no_grad():
            for expert in range(layout.num_experts):
                mine = [(i, rows[expert * slices + i]) for i in range(slices) if expert * slices + i in rows]
                for name, field in PARAMETERS.items():
                    if (weight := getattr(self, name)) is None:
                        continue
                    if slices == 1:
                        draw_weight(weight[rows[expert]] if mine else weight.new_empty(weight.shape[1:]))
                        continue
                    whole_1 = join(field, weight.new_empty(slices, *weight.shape[1:]), slices, function)
                    draw_weight(whole_1[0])
                    cut_C = cut(field, whole_1, slices, function)
                    for i, row in mine:
                        weight[row] = cut_C[i]
        if isinstance(self.shared, nn.Module):
            self.shared.reset_parameters()  # type: ignore[operator]
        self.aux_loss = torch.zeros((), device=self.up_proj.device)

    @torch.no_grad()
    def logical_state_dict(self) -> dict[str, torch.Tensor]:
        """The whole layer's state, experts in logical order, the same whatever the layout. Collective."""
        plain = {k: v for k, v in self.state_dict().items() if k not in (*PARAMETERS, ORDER)}
        state = {k: v.detach().clone() for k, v in plain.items()}
        assert self.core.function is not None
        for name, field in PARAMETERS.items():
            if (home := getattr(self, name)) is not None:
                rows = gather_homes(home, self.layout, self.core.group)
                state[name] = join(field, rows, self.layout.slices, self.core.function)
        return state

    @torch.no_grad()
    def load_logical_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Load this rank's part of a `logical_state_dict`, under any layout."""
        assert self.core.function is not None
        mine, order = list(self.layout.homes[self.rank]), home_order(self.layout)
        local = dict(state)
        for name, field in PARAMETERS.items():
            if name not in state:
                continue
            if len(state[name]) != self.layout.num_experts:
                raise ValueError(
                    f"{name} in the state has {len(state[name])} experts, the layer has {self.layout.num_experts}"
                )
            local[name] = cut(field, state[name], self.layout.slices, self.core.function)[mine]
        self.load_state_dict(local | ({} if order is None else {ORDER: order}))

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if (order := home_order(self.layout)) is not None:
            destination[prefix + ORDER] = order

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        has_experts = any(prefix + name in state_dict for name in PARAMETERS)
        if has_experts and (error := order_error(state_dict, prefix, self.layout)) is not None:
            error_msgs.append(f"{prefix.rstrip('.') or 'MoE'}: {error}")
            return
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )

    # -- copying, and unsupported wrappers -------------------------------------------------------------------------

    def __deepcopy__(self, memo: dict[int, Any]) -> LayerModule:
        """An independent layer with equal parameters, in the same process groups."""
        twin = self.__class__.__new__(self.__class__)
        memo[id(self)] = twin
        kept = self.__dict__ | {"aux_loss": self.aux_loss.detach()}
        twin.__dict__.update({name: copy.deepcopy(value, memo) for name, value in kept.items()})
        return twin

    def __getstate__(self) -> dict[str, Any]:
        self.core.__getstate__()  # raises before pickle reaches a process group
        return self.__dict__ | {"aux_loss": self.aux_loss.detach()}

    def _check_not_replicated(self) -> None:
        """Raise RuntimeError inside DistributedDataParallel, which would make all parameters equal on all ranks."""
        wrapper: Any = getattr(DistributedDataParallel, "_active_ddp_module", None)
        if wrapper is not None and self.core.group is not None:
            raise RuntimeError(
                "DistributedDataParallel makes all parameters equal on all ranks, also the experts, of which each rank "
                "has others: they are overwritten. Leave it out, and call carpool.reduce_gradients(model, ep_mesh) "
                "after backward(); or shard the model with FSDP2"
            )

    def _check_input(self, x: torch.Tensor) -> None:
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"x is a {type(x).__name__}, not a tensor of shape (..., {self.hidden_size})")
        if x.dim() == 0 or x.shape[-1] != self.hidden_size:
            raise ValueError(f"the layer's hidden size is {self.hidden_size}, but x has shape {tuple(x.shape)}")
        if x.dtype != self.up_proj.dtype and not torch.is_autocast_enabled(x.device.type):
            raise ValueError(f"x is {x.dtype}, the layer's parameters are {self.up_proj.dtype}; convert one of them")
        if x.device != self.up_proj.device:
            raise ValueError(
                f"x is on {x.device}, the layer's parameters are on {self.up_proj.device}; move one of them"
            )
        if x.layout != torch.strided:
            raise ValueError(f"x is {x.layout}; the layer takes strided tensors: pass x.to_dense()")

    def _prepare(self) -> Transport:
        core = self.core
        if core.transport is None:
            core.prepare(self.router.top_k, self.up_proj.shape[2], self.up_proj.device)
            if core.requested == "auto" and core.rank == 0:
                log.info("transport %s: %s", core.transport.name, core.why)  # type: ignore[attr-defined]
        assert core.transport is not None
        return core.transport

    def _make_equal(self, edp_group: dist.ProcessGroup | None) -> None:
        """Broadcast replicated parameters, in case ranks were seeded differently: experts to their replicas, all others
        to all ranks."""
        experts = set(self.expert_parameters())
        for parameter in self.parameters():
            if parameter.device.type == "meta":
                continue
            for group in (edp_group,) if parameter in experts else (edp_group, self.core.group):
                if group is not None:
                    dist.broadcast(parameter.data, group=group, group_src=0)


def check_mesh(mesh: DeviceMesh | None, name: str) -> int:
    """The number of ranks of a mesh; 1 for None.

    Raises TypeError if it is not a mesh, ValueError if it has several dimensions."""
    if mesh is None:
        return 1
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(
            f'{name} is {mesh!r}, not a DeviceMesh; make one with init_device_mesh("cuda", (ranks,), '
            'mesh_dim_names=("ep",))["ep"]'
        )
    if mesh.ndim != 1:
        raise ValueError(f'{name} has {mesh.ndim} dimensions; pass one, such as mesh["ep"] of a named mesh')
    return mesh.size()


def group_of(mesh: DeviceMesh | None) -> dist.ProcessGroup | None:
    """The process group of a mesh; None for one rank."""
    return mesh.get_group() if mesh is not None and mesh.size() > 1 else None


def expert_parameters(model: nn.Module) -> set[nn.Parameter]:
    """The parameters of a model that belong to experts of `carpool.MoE` layers."""
    return {p for module in model.modules() if isinstance(module, LayerModule) for p in module.expert_parameters()}


@torch.no_grad()
def reduce_gradients(model: nn.Module, ep_mesh: DeviceMesh | None, edp_mesh: DeviceMesh | None = None) -> None:
    """Turn each rank's gradients into those of the mean loss over all ranks. Call on every rank, after backward.

    Args:
        model: holds `carpool.MoE` layers built on `ep_mesh`; all other parameters are replicated on every rank.
        ep_mesh: the one-dimensional expert-parallel mesh. None: one rank has all experts.
        edp_mesh: the mesh of ranks that hold the same experts, if there are several.

    Raises:
        TypeError: an argument is not a mesh.
        ValueError: a mesh of several dimensions.
    """
    num_ranks = check_mesh(ep_mesh, "ep_mesh") * check_mesh(edp_mesh, "edp_mesh")
    groups = [mesh.get_group() for mesh in (ep_mesh, edp_mesh) if mesh is not None]
    experts = expert_parameters(model)
    for parameter in model.parameters():
        if parameter.grad is None:
            if not parameter.requires_grad:
                continue
            # A rank without tokens participates, too.
            parameter.grad = torch.zeros_like(parameter)
        for group in groups[1:] if parameter in experts else groups:
            dist.all_reduce(parameter.grad, group=group)
        parameter.grad /= num_ranks


class SharedExpert(nn.Module):
    """A shared expert, which every rank applies to all of its tokens.

    Args:
        hidden_size, size: H, and its own hidden size.
        activation, gated: as of the layer's experts.
        place: device and dtype."""

    def __init__(
        self,
        hidden_size: int,
        size: int,
        activation: Callable[[torch.Tensor], torch.Tensor],
        gated: bool,
        place: dict[str, Any],
    ) -> None:
        super().__init__()
        self.activation = activation
        self.up = nn.Linear(hidden_size, size * (2 if gated else 1), bias=False, **place)
        self.down = nn.Linear(size, hidden_size, bias=False, **place)

    def forward(self, x_TH: torch.Tensor) -> torch.Tensor:
        """(T, H) -> (T, H)."""
        y_TH: torch.Tensor = self.down(self.activation(self.up(x_TH)))
        return y_TH

    def reset_parameters(self) -> None:
        """Draw all weights from the default generator."""
        for parameter in self.parameters():
            draw_weight(parameter)
