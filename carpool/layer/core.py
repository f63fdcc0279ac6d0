"""The core of an MoE layer: MoE outputs from tokens and a routing.

    slot_TK = assign(expert_TK)    where each chosen expert is: rank and slot               carpool/layout/
    y_TH = ride(x_TH, ...)         dispatch, experts, combine                               carpool/ride/

`carpool.MoE` is a router, parameters and this core. An experts module of transformers is an adapter around it
(`carpool.hf.seam.expert_rides`). Settings (transport, schedule, layout, experts, limit, drops), counters, and balancing
of routers by biases are implemented here for both.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from carpool.activations import SAVE_ALL, ActivationPolicies, Offloader
from carpool.experts import Choices, ExpertFunction, Experts, ExpertWeights, make_experts
from carpool.experts.base import NUM_BASE, NUM_TRAINED
from carpool.experts.slices import weights_of_slices
from carpool.layout import ExpertLayout, assign
from carpool.metrics.counters import LayerStats, add_once, new_counter
from carpool.metrics.host import device_name
from carpool.planner.machine.cost import GEMM_PASSES, RIDES, slot_costs
from carpool.planner.machine.hardware import hardware_of
from carpool.planner.transports import automatic_transport
from carpool.replicas.slot_links import CollectiveLinks
from carpool.replicas.slot_plan import Costs
from carpool.ride.balanced import BalancedOrder, SpareSlotOptions, SpareSlots, check_spare_slots
from carpool.ride.function import WaitingRides, ride
from carpool.ride.ride_module import ride_module
from carpool.ride.schedule import Schedule
from carpool.ride.setup import NO_HOOKS, DeferredGradients, RideHooks, RideSetup
from carpool.routing import DropOptions, Routing
from carpool.routing.limit import LimitOptions, RoutingLimit
from carpool.routing.router import count_choices
from carpool.transport import (
    Transport,
    TransportOptions,
    check_transport,
    choose_transport,
    find_transport,
    make_transport,
    topology_of,
    unfit_transports,
    why_not_nodes,
)
from carpool.transport.codecs import Merge

Result = TypeVar("Result")
# Settings that a copy of a core takes as they are.
_TAKEN = ("schedule", "requested", "options", "limit", "drops", "projections", "spare_options")
# Projections of hidden states before dispatch, (T, H) -> (T, D), and of MoE outputs after combine, (T, D) -> (T, H).
Projections = tuple[Callable[[torch.Tensor], torch.Tensor], Callable[[torch.Tensor], torch.Tensor]]
# (tokens that arrived, their local slots or -1, their weights) -> the weighted sum over each token's slots.
OwnForward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class LayerCore:
    """Computes one MoE layer on one rank. All ranks of the group construct and call it together.

    Args:
        group: the expert-parallel process group; None for one rank.
        function: of an expert; None if only the owner's forward implements it.
        name: of the owner, for errors.

    Attributes:
        rank, num_ranks, num_experts: this rank in the group, and the layer's sizes.
        layout: see `move_to`.
        transport: None until the first forward, or `prepare`.
        requested, options, why: the requested transport and its options, and why the actual one was chosen.
        schedule: of rides. Those of the owner's own forward have one piece.
        compute: the expert computation; None if the owner's forward computes.
        policies, offloader: see `set_activation_policies`.
        limit: limits the routing to few ranks, LOSSY; None: no limit. Routers call `choose`.
        merger: merges similar tokens before the dispatch, LOSSY; None: none. From the codecs of the options.
        spare_options, spare: of spare slots, and those of the transport at hand; None: there are none.
        drops: drops choices between router and ride, LOSSY; None: none.
        dropped: the number of dropped choices since `reset_counts`: a scalar on the device; None before the first.
        whole_rides: whether what `wrap_experts` wraps needs all tokens that arrive at once.
        projections: of hidden states before dispatch, and of MoE outputs after combine; None: none. Transport and
            experts then have hidden states of the size in between.
        hooks: callbacks of the backwards of rides.
        deferred: collects weight gradients; None: backwards compute them.
        stats: counters of this layer.
        load_E: choices of each expert by this rank's tokens in training, (E,) int64, for balancing by biases, until
            `update_biases` sets it to zero; None: not counted (`set_balance`). Evaluation and recomputation by
            activation checkpointing are not counted.
        routing: of this rank's tokens in the last forward, detached, after drops: a recording, which can be replayed.
        on_choice: called with (T, K) numbers of experts before they compute; -1: none.
    """

    def __init__(
        self,
        layout: ExpertLayout,
        group: dist.ProcessGroup | None,
        function: ExpertFunction | None,
        *,
        name: str = "the layer",
    ) -> None:
        self.layout, self.group, self.function, self.name = layout, group, function, name
        self.num_ranks, self.num_experts = layout.num_ranks, layout.num_experts
        self.rank = dist.get_rank(group) if group is not None else 0
        self.stats = LayerStats(self.num_experts, self.num_ranks, self.rank)
        self.schedule = Schedule()
        self.hooks: RideHooks = NO_HOOKS
        self.deferred: DeferredGradients | None = None
        self._setup: RideSetup | None = None
        self.requested, self.why = "auto", ""
        self.options: TransportOptions | None = None
        self.transport: Transport | None = None
        self.compute: Experts | None = None
        self.limit: RoutingLimit | None = None
        self.drops: DropOptions | None = None
        self.spare_options: SpareSlotOptions | None = None
        self.spare: SpareSlots | None = None
        self.merger: Merge | None = None
        self.dropped: torch.Tensor | None = None
        self.projections: Projections | None = None
        self.load_E: torch.Tensor | None = None
        self.routing: Routing | None = None
        self.on_choice: Callable[[torch.Tensor], None] | None = None
        self.whole_rides = False
        # Whether each of this rank's slices is the first one of its expert, where experts are sliced.
        self._first_S1 = torch.ones(0, 1, dtype=torch.bool)
        self._wrap: Callable[[Experts], Experts] | None = None
        self._computed_by: Experts | None = None
        self._waiting = WaitingRides()
        self.policies = SAVE_ALL
        self.offloader: Offloader | None = None
        self._experts_asked: tuple[str, dict[str, Any]] = ("auto", {})
        self.set_experts("auto")

    # -- settings: collective, between steps -----------------------------------------------------------------------

    def set_transport(self, name: str, options: TransportOptions | None = None) -> None:
        """Change the transport. `options`: unchanged, unless given.

        Raises ValueError for a name that is unknown, or that cannot be used here."""
        check_transport(name, self.group)
        self.requested, self.options, self.transport = name, options or self.options, None

    def set_schedule(self, schedule: Schedule) -> None:
        """Change the schedule, which overlaps communication with computation."""
        if schedule != self.schedule:
            self.schedule, self.transport = schedule, None

    def set_spare_slots(self, options: SpareSlotOptions | None) -> None:
        """Balance each ride by replicas of experts in spare slots (`carpool.ride.balanced`), or no longer. One rank
        has nothing to balance.

        Raises ValueError if this layer cannot have spare slots."""
        if options is not None and self.function is None:
            raise ValueError(f"{self.name} runs its own forward: no spare slots")
        if options is not None and self.num_ranks > 1:
            check_spare_slots(self.layout)
            self._check_limit_alone(self.limit is not None)
        if options != self.spare_options:
            self.spare_options, self.spare, self.transport = options, None, None

    def _check_limit_alone(self, other: bool) -> None:
        if other:
            raise ValueError(
                f"{self.name} limits the ranks that a token visits, and spare slots send tokens to further ones: use "
                "one of the two"
            )

    def set_activation_policies(self, policies: ActivationPolicies, offloader: Offloader | None = None) -> None:
        """Change the policies for saved activations. Rides in flight are not changed.

        Args:
            offloader: shared by the layers of a model. None: this layer's own, if a policy needs one.

        Raises ValueError for policies that the experts do not support."""
        if self.function is None and policies != SAVE_ALL:
            raise ValueError(
                f"{self.name} runs its own forward, whose activations autograd saves: save both, or use activation "
                "checkpointing"
            )
        before, self.policies = self.policies, policies
        try:
            self.set_experts(self._experts_asked[0], **self._experts_asked[1])
        except ValueError:
            self.policies = before
            raise
        self.offloader = (offloader or self.offloader or Offloader()) if policies.offloads else None
        if policies.expert_inputs != before.expert_inputs:
            self.transport = None
        self._setup = None

    def set_experts(self, name: str, choices: Choices | None = None, **others: Any) -> None:
        """Change the expert computation: "auto" or another name for `carpool.experts.make_experts`. "auto" is exact;
        experts of unknown function run the owner's forward.

        Args:
            choices: of kernels, which only affect speed. The owner's forward ignores them.
            others: options of a plug-in.

        Raises ValueError for a name that is unknown, or for options that cannot be used here."""
        self._experts_asked = name, {"choices": choices, **others}
        if self.function is not None:
            recompute = self.policies.expert_activations == "recompute"
            self.compute = make_experts(name, self.function, choices, recompute, **others)
        elif name != "auto":
            raise ValueError(f"{self.name} runs its own forward: experts={name!r} cannot replace it")

    def wrap_experts(self, wrap: Callable[[Experts], Experts]) -> None:
        """Wrap the experts of further rides by `wrap`, which may compute some of them elsewhere."""
        self._wrap, self._setup = wrap, None

    def set_limit(self, options: LimitOptions | None) -> list[str]:
        """Limit the routing to few ranks or nodes per token (LOSSY; carpool/routing/limit.py), or no longer.

        Returns:
            How this changes the layer's function, for logs."""
        self.limit = None
        if options is None:
            return []
        options.check(self.num_ranks)
        if options.active(self.num_ranks) and self.layout.slices > 1:
            raise ValueError(
                f"a token visits every slice of its experts, and {self.name} cuts each into {self.layout.slices}: the "
                "ranks per token cannot be limited"
            )
        if options.active(self.num_ranks):
            self._check_limit_alone(self.spare_options is not None)
            self.limit = RoutingLimit(options, self.num_ranks)
        return options.lossy_reasons(self.num_ranks)

    def set_drops(self, options: DropOptions | None) -> None:
        """Drop choices from now on (LOSSY), or no longer."""
        self.drops = options if options is not None and options.active else None

    def reset_counts(self) -> None:
        """Reset the counters of `stats`, of spare slots and of drops."""
        self.stats.reset()
        if self.spare is not None:
            self.spare.reset()
        if self.dropped is not None:
            self.dropped.zero_()

    def set_balance(self, on: bool, device: torch.device | None = None) -> None:
        """Start or stop to count `load_E` on `device`."""
        self.load_E = torch.zeros(self.num_experts, dtype=torch.int64, device=device) if on else None

    def check_layout(self, layout: ExpertLayout) -> None:
        """Raise ValueError if this layer cannot compute under `layout`."""
        if (layout.num_experts, layout.num_ranks) != (self.num_experts, self.num_ranks):
            raise ValueError(
                f"the layout is for {layout.num_experts} experts on {layout.num_ranks} ranks, the layer has "
                f"{self.num_experts} experts on {self.num_ranks}"
            )
        if self.spare_options is not None and self.num_ranks > 1:
            check_spare_slots(layout)
        if layout.slices != self.layout.slices:
            raise ValueError(
                f"the layout cuts each expert into {layout.slices} slices, the layer has {self.layout.slices}: their "
                "number is part of the parameters' shape and cannot change"
            )

    def why_not_move(self) -> str:
        """Why experts cannot move now: the backward of a forward has not run, whose gradients belong to the old homes.
        "" if they can. Ranks may differ, so all must agree before a move (`check_can_move`)."""
        if number := self._waiting.count():
            return (
                f"{self.name}: {number} forward(s) wait for their backward, whose gradients would reach other experts; "
                "change the layout after backward(), or delete their outputs"
            )
        return ""

    def move_to(self, layout: ExpertLayout) -> None:
        """Use `layout` from now on. The parameters must already be in its home order."""
        self.check_layout(layout)
        self.layout, self.transport = layout, None

    # -- transport -------------------------------------------------------------------------------------------------

    def prepare(self, top_k: int, hidden: int, device: torch.device) -> Transport:
        """Make the transport, if there is none. All ranks together. top_k: the router's."""
        return self.transport or self._make_transport(top_k, hidden, device)

    # What it makes outlives the call: torch.compile must not take its tensors for values of a graph.
    @torch._disable_dynamo
    def _make_transport(self, top_k: int, hidden: int, device: torch.device) -> Transport:
        own = self.function is None
        if self.requested == "auto":
            several = why_not_nodes(self.group) is None and self.group is not None
            most, size = None if self.options is None else self.options.max_tokens, 2 if device.type == "cuda" else 4
            name, self.why = automatic_transport(
                self.num_ranks,
                top_k,
                unfit_transports(self.group, hidden, self.options, own_forward=own),
                topology_of(self.group) if several else None,
                hidden=hidden,
                element_size=size,
                tokens=most,
                hardware=hardware_of(device_name(device)),
                limited=self.limit is not None,
            )
        else:
            check_transport(self.requested, self.group)
            name, self.why = choose_transport(self.requested, self.num_ranks, top_k)
        top_k *= self.layout.slices
        options = find_transport(name).own_options(self.options)
        if options is not None:
            options, note = options.settled(self.group, top_k, hidden, own)
            self.why += f"; {note}" if note else ""
        if options is not None and not own:
            options = options.under(self.schedule, self.policies.expert_inputs == "resend")
        # The buffers are used in training too, even if the first forward is in inference mode.
        with torch.inference_mode(False):
            spare = 0 if self.spare_options is None or self.num_ranks == 1 else self.spare_options.number
            transport = make_transport(name, self.group, self.layout.slots_per_rank + spare, options)
            self.spare = self._make_spare_slots(transport, top_k, device) if spare else None
        if (slices := self.layout.slices) > 1:
            first = [row % slices == 0 for row in self.layout.homes[self.rank]]
            self._first_S1 = torch.tensor(first, dtype=torch.bool, device=device).unsqueeze(1)
        self._make_setup(transport, device)
        self.merger = None if self.options is None else self.options.codecs.merger()
        self.transport = transport
        return transport

    def _make_spare_slots(self, transport: Transport, top_k: int, device: torch.device) -> SpareSlots:
        asked, group = self.spare_options, self.group
        assert asked is not None and group is not None
        topology = topology_of(group)
        hardware = hardware_of(device_name(device))

        def price(weights: ExpertWeights) -> Costs:
            hidden = weights.up_SFH.shape[1 if self.function is not None and self.function.transposed else 2]
            # From shapes: a rank may be home to no expert, and all ranks need the same answer.
            size = [0 if w is None else w.element_size() * math.prod(w.shape[1:]) for w in weights]
            fetched = sum(size[2 if weights.quantised else 0 :])
            returned = sum(size[NUM_BASE:NUM_TRAINED] if weights.adapted else size[:NUM_BASE])
            flops = 2 * GEMM_PASSES * sum(math.prod(w.shape[1:]) for w in weights[:2] if w is not None)
            # Choices of a token share its rides: an average over uniform routing.
            shared = transport.ranks_per_token(self.num_experts, top_k, self.num_ranks) / top_k
            row = shared * RIDES * hidden * weights.up_SFH.element_size()
            return slot_costs(hardware, topology, flops, row, 2 * fetched + returned)

        own, meter = self.layout, self.stats.meter
        links = transport.slot_links(own, asked.number, meter) or CollectiveLinks(own, group, meter)
        return SpareSlots(self.layout, self.rank, asked, links, price, torch.tensor(topology.node_of))

    @torch._disable_dynamo
    def _make_setup(self, transport: Transport, device: torch.device) -> RideSetup:
        schedule = self.schedule if self.function is not None else Schedule()
        order = schedule.order(transport, device)
        if self.spare is not None:
            order = BalancedOrder(order, self.spare)
        self._computed_by = experts = self.compute
        if experts is not None and self._wrap is not None:
            experts = self._wrap(experts)
        self._setup = RideSetup(
            transport, experts, self.stats, order, self.hooks, self.policies, self.offloader, self.deferred
        )
        return self._setup

    def ride_setup(self, transport: Transport, device: torch.device) -> RideSetup:
        """The current components of this layer's rides."""
        if self._setup is None or self._setup.transport is not transport or not self.settled:
            return self._make_setup(transport, device)
        return self._setup

    @property
    def settled(self) -> bool:
        """Whether the next forward constructs nothing, which would be a graph break of `torch.compile`."""
        setup = self._setup
        if self.transport is None or setup is None or setup.transport is not self.transport:
            return False
        return self._computed_by is self.compute and setup.hooks is self.hooks and setup.deferred is self.deferred

    @property
    def reads_plans(self) -> bool:
        """Whether the host waits in each ride to make or read the plan of its spare slots, which no CUDA graph can
        hold."""
        return self.spare is not None and (self.spare.links.waits_for_host or self.spare.planner.on_host)

    # -- the forward -----------------------------------------------------------------------------------------------

    def choose(self, score_TE: torch.Tensor, share_TE: torch.Tensor, top_k: int) -> torch.Tensor:
        """A router's choices within the limit: see `RoutingLimit.choose`."""
        assert self.limit is not None
        return self.limit.choose(score_TE, share_TE, top_k, self.layout)

    def __call__(
        self,
        x_TH: torch.Tensor,
        routing: Routing,
        home: ExpertWeights | OwnForward,
        *,
        training: bool,
        replayed: bool = False,
        overlapped: Callable[[], Result] | None = None,
    ) -> tuple[torch.Tensor, Result | None]:
        """Compute the MoE output: the weighted sum of each token's experts.

        Args:
            x_TH: (T, H) this rank's tokens; T may differ between ranks, and be 0.
            routing: with weights.
            home: the parameters of this rank's homes; or the owner's forward.
            training: whether to count `load_E` and to drop at random, as in training.
            replayed: the routing is a recording, whose choices were dropped before.
            overlapped: independent work, which is called after the first dispatch was launched. With the owner's
                forward it is called afterwards.

        Returns:
            y_TH, and the result of `overlapped`."""
        assert routing.weight_TK is not None
        if self.projections is not None:
            x_TH = self.projections[0](x_TH)
        transport = self.prepare(routing.expert_TK.shape[1], x_TH.shape[1], x_TH.device)
        if self.load_E is not None and training:
            count_choices(self.load_E, routing.expert_TK)
        if self.drops is not None and not replayed:
            routing, dropped = self.drops.drop(routing, self.num_experts, training)
            if self.dropped is None:
                self.dropped = new_counter((), torch.int64, dropped.device)
            add_once(self.dropped, dropped)
        self.routing = routing.detach()
        if self.on_choice is not None:
            self.on_choice(self.routing.expert_TK)
        slot_TK = assign(routing.expert_TK, self.layout)
        setup = self.ride_setup(transport, x_TH.device)
        weights = home if isinstance(home, ExpertWeights) else None
        if weights is not None and self.layout.slices > 1:
            weights = weights_of_slices(weights, self._first_S1)

        def one_ride(
            x_TH: torch.Tensor, routing: Routing, slot_TK: torch.Tensor, setup: RideSetup
        ) -> tuple[torch.Tensor, Result | None]:
            if isinstance(home, ExpertWeights):
                assert weights is not None
                y_TH, made = ride(x_TH, routing, slot_TK, weights, setup, overlapped)
            else:
                y_TH = ride_module(x_TH, routing, slot_TK, home, setup)
                made = None if overlapped is None else overlapped()
            self._waiting.add(y_TH)
            return y_TH, made

        if self.merger is None:
            y_TH, made = one_ride(x_TH, routing, slot_TK, setup)
        else:
            y_TH, made = self.merger.ride(x_TH, routing, slot_TK, setup, one_ride)
        return (y_TH if self.projections is None else self.projections[1](y_TH)), made

    # -- copying ---------------------------------------------------------------------------------------------------

    def __deepcopy__(self, memo: dict[int, Any]) -> LayerCore:
        """A core with the same settings, in the same group, with counters at zero."""
        twin = LayerCore(self.layout, self.group, self.function, name=self.name)
        memo[id(self)] = twin
        twin._take(self._settings() | {"projections": copy.deepcopy(self.projections, memo)})
        # Layers that are copied together share one offloader again.
        twin.set_activation_policies(self.policies, copy.deepcopy(self.offloader, memo))
        return twin

    def __getstate__(self) -> dict[str, Any]:
        """Its settings, to be pickled.

        Raises:
            TypeError: with several ranks, whose process group exists in these processes only."""
        if self.group is not None:
            raise TypeError(
                f"{self.name} cannot be pickled: its process group exists in these processes only. Save "
                "logical_state_dict(), and load it into a layer that is constructed on the new ranks"
            )
        return self._settings()

    def __setstate__(self, state: dict[str, Any]) -> None:
        LayerCore.__init__(self, state["layout"], None, state["function"], name=state["name"])
        self._take(state)

    def _settings(self) -> dict[str, Any]:
        names = ("layout", "function", "name", "policies", *_TAKEN)
        return {name: getattr(self, name) for name in names} | {"experts": self._experts_asked}

    def _take(self, settings: dict[str, Any]) -> None:
        name, options = settings["experts"]
        self.set_experts(name, **options)
        self.set_activation_policies(settings["policies"])
        for name in _TAKEN:
            setattr(self, name, settings[name])
