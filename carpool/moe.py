"""A Mixture-of-Experts layer over several ranks. Follow one token through `MoE.forward`:

    routing = router(x)            K experts for each token, with K weights                 carpool/routing/
    slot_TK = assign(...)          where each expert is: rank and slot                      carpool/layout/
    y = ride(...)                  dispatch: the token's hidden state goes once to each     carpool/ride/
                                   rank that holds any of them; the experts there compute
                                   and add their outputs; combine: one partial sum per rank
                                   comes back
    y += shared(x)                 experts that serve every token compute on its own rank, during the dispatch

`assign` and `ride` are called by the layer's core (`carpool.layer.core`), which layers of Transformers' models have,
too. What a layer offers beside its forward (settings, counters, state) is in `carpool.layer.module`.

Shapes: T tokens of this rank, H hidden, F expert hidden, E experts, K per token (carpool/layout has the legend).
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from carpool.activations import SAVE_ALL, ActivationPolicies
from carpool.experts import Choices, ExpertFunction, make_activation
from carpool.experts.slices import check_slices
from carpool.layer.checks import check_dtype, check_replay, check_types
from carpool.layer.core import LayerCore
from carpool.layer.module import LayerModule, SharedExpert, check_mesh, group_of
from carpool.layout import ExpertLayout
from carpool.ride.balanced import SpareSlotOptions
from carpool.ride.schedule import Schedule
from carpool.routing import Router, Routing
from carpool.routing.limit import LimitOptions
from carpool.transport import TransportOptions

__all__ = ["MoE"]


class MoE(LayerModule):
    """A drop-in MoE feed-forward layer whose experts live on the ranks of `ep_mesh`.

    Every rank calls the layer with its own tokens, also with none. Each rank holds the parameters of its own
    experts, so after `backward()` their gradients are those of all tokens of the expert-parallel group; call
    `carpool.reduce_gradients` to get the gradients of the mean loss over ranks.

    Args:
        hidden_size, intermediate_size, num_experts, num_experts_per_tok: H, F, E, K.
        ep_mesh: one-dimensional mesh of the expert-parallel group. None: one rank holds all experts.
        edp_mesh: mesh of the ranks that hold copies of this rank's experts, if there are any (balance statistics
            are over the whole batch).
        layout: where experts live; default contiguous. With `ExpertLayout.sliced`, each rank has a part of the hidden
            dimension of experts (expert tensor parallelism), and there may be more ranks than experts.
        transport: "auto", "gather", "alltoall", "dedup", "nvlink", "hierarchical", "local".
        max_tokens: the most tokens that any rank will ever have. Given this, "auto" picks "nvlink" where it can be
            used; its buffers have a fixed size. If a rank gets more, outputs are NaN, and
            `carpool.transport.check_overflow` raises.
        transport_options: of the transport, such as `carpool.transport.NVLinkOptions`.
        schedule: what runs beside what (carpool/ride/schedule.py): `Schedule("chunks", 2)` lets one half of the tokens
            travel while the experts compute on the other. The same sums; weight gradients to rounding. Default: in
            turn.
        experts: "auto", "grouped", "reference"; "fp8", which is LOSSY (carpool/experts/fp8/fp8_experts.py).
        activation_policies: what happens to the tokens and the pre-activations that the backward needs
            (carpool/activations/__init__.py): they are saved, computed or sent again, or offloaded to host memory. The
            same bits.
        expert_choices: of "grouped", the way of each stage (carpool/experts/gemm/choices.py). Default: by the shape;
            `carpool.experts.measure_choices` finds the fastest.
        activation, gated, bias: of the experts: silu, gelu, gelu_tanh, relu, relu2; SwiGLU-like or plain.
        shared_intermediate_size: hidden size of a shared expert, of the same activation and without biases, that serves
            every token. 0: none.
        router: keyword arguments of `carpool.routing.Router` (score, normalize, aux_loss_coef, ...).
        limit: limit the routing to few ranks or nodes per token. LOSSY (carpool/routing/limit.py).
        spare_slots: of each rank, which are filled with replicas of experts for each batch of tokens, so that no rank
            has more to compute than others (carpool/ride/balanced.py). The same sums. 0: none.

    Example:
        >>> moe = MoE(256, 512, num_experts=16, num_experts_per_tok=4, ep_mesh=mesh["ep"])
        >>> y = moe(x)                               # (..., 256) -> (..., 256)
        >>> (y.square().mean() + moe.aux_loss).backward()

    Activation checkpointing works with and without reentry. With reentry the first forward builds no graph, so
    `aux_loss` has a gradient only if the checkpointed function returns it beside the output.

    Raises:
        ValueError: sizes, layout or names that do not fit, saying which.
        TypeError: an argument of another type.
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
        transport_options: TransportOptions | None = None,
        schedule: Schedule | None = None,
        experts: str = "auto",
        activation_policies: ActivationPolicies = SAVE_ALL,
        expert_choices: Choices | None = None,
        activation: str = "silu",
        gated: bool = True,
        bias: bool = False,
        shared_intermediate_size: int = 0,
        router: dict[str, Any] | None = None,
        limit: LimitOptions | None = None,
        spare_slots: int | SpareSlotOptions = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        given = dict(locals())
        super().__init__()
        num_ranks = check_mesh(ep_mesh, "ep_mesh")
        check_mesh(edp_mesh, "edp_mesh")
        check_types(MoE.__init__, given)
        check_dtype(dtype)
        if max_tokens is not None and max_tokens < 1:
            raise ValueError(f"{max_tokens=} must be at least 1: the most tokens that any rank will ever have")
        if hidden_size < 1 or intermediate_size < 1:
            raise ValueError(f"{hidden_size=} and {intermediate_size=} must both be at least 1")
        if shared_intermediate_size < 0:
            raise ValueError(f"{shared_intermediate_size=} must be 0 (no shared expert) or more")
        layout = layout or ExpertLayout.contiguous(num_experts, num_ranks)
        if (layout.num_experts, layout.num_ranks) != (num_experts, num_ranks):
            raise ValueError(
                f"the layout is for {layout.num_experts} experts on {layout.num_ranks} ranks, "
                f"the layer has {num_experts} experts and ep_mesh {num_ranks} ranks"
            )
        if device is None and ep_mesh is not None:
            device = ep_mesh.device_type
        group, edp_group = group_of(ep_mesh), group_of(edp_mesh)
        groups = [one for one in (group, edp_group) if one is not None]
        place: dict[str, Any] = {"device": device, "dtype": dtype}
        act = make_activation(activation, gated)
        function = ExpertFunction(act)
        check_slices(function, intermediate_size, layout.slices, "MoE")
        self.core = LayerCore(layout, group, function, name="MoE")

        self.router = Router(hidden_size, num_experts, num_experts_per_tok, groups=groups, **place, **(router or {}))
        inner = intermediate_size // layout.slices
        rows, width = len(layout.homes[self.rank]), inner * (2 if gated else 1)
        self.up_proj = nn.Parameter(torch.empty(rows, width, hidden_size, **place))
        self.down_proj = nn.Parameter(torch.empty(rows, hidden_size, inner, **place))
        self.up_bias = nn.Parameter(torch.empty(rows, width, **place)) if bias else None
        self.down_bias = nn.Parameter(torch.empty(rows, hidden_size, **place)) if bias else None
        self.hidden_size = hidden_size
        self.shared = None
        if shared_intermediate_size:
            self.shared = SharedExpert(hidden_size, shared_intermediate_size, act, gated, place)
        self.reset_parameters()
        self._make_equal(edp_group)

        self.core.set_experts(experts, expert_choices)
        self.core.set_activation_policies(activation_policies)
        self.core.set_schedule(schedule or Schedule())
        self.core.set_spare_slots(SpareSlotOptions.of(spare_slots))
        options = transport_options or TransportOptions()
        self.set_transport(transport, options if max_tokens is None else replace(options, max_tokens=max_tokens))
        self.set_limit(limit)

    def forward(self, x: torch.Tensor, routing: Routing | None = None) -> torch.Tensor:
        """(..., H) -> (..., H). With `routing`, replay it: recorded weights are used as they are, and where a
        recording has none the router computes them for the recorded choices."""
        self._check_not_replicated()
        self._check_input(x)
        x_TH = x.reshape(-1, x.shape[-1])
        replayed = routing is not None
        if routing is not None:
            if not isinstance(routing, Routing):
                raise TypeError(f"routing is a {type(routing).__name__}, not a carpool.Routing such as `moe.routing`")
            check_replay(routing, x_TH.shape[0], self.core.num_experts, self.core.group)
        if routing is None or routing.weight_TK is None:
            choose = None if self.core.limit is None else self.core.choose
            routing = self.router(x_TH, None if routing is None else routing.expert_TK, choose)
            self.aux_loss = self.router.aux_loss
        else:
            self.aux_loss = x_TH.new_zeros(())
        overlapped = None if self.shared is None else partial(self.shared, x_TH)
        y_TH, shared_TH = self.core(
            x_TH, routing, self.home_weights(), training=self.training, replayed=replayed, overlapped=overlapped
        )
        return (y_TH if shared_TH is None else y_TH + shared_TH).view_as(x)
