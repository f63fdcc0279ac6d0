"""`carpool.MoE` whose hidden states are projected to fewer elements before dispatch (BigMac, arXiv 2502.16927).

    router(x_TH), shared(x_TH)      of whole hidden states
    x_TD = descend(x_TH)            dispatched, computed by experts of D x F, and combined as (T, D)
    y_TH = ascend(y_TD)

The projections are replicated on all ranks, as the router is (`carpool.reduce_gradients`).
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from carpool.experts import make_activation
from carpool.layer.checks import check_types
from carpool.layer.module import SharedExpert, group_of
from carpool.moe import MoE
from carpool.routing import Router
from carpool.routing.router import draw_weight


class ProjectedMoE(MoE):
    """See the module's docstring.

    Args:
        hidden_size, intermediate_size, num_experts, num_experts_per_tok: H, F, E, K.
        projected_size: D, elements of a hidden state that is dispatched.
        edp_mesh, shared_intermediate_size, router, settings: as of `carpool.MoE`.

    Raises:
        ValueError, TypeError: as `carpool.MoE`.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int,
        num_experts_per_tok: int,
        *,
        projected_size: int,
        edp_mesh: DeviceMesh | None = None,
        shared_intermediate_size: int = 0,
        router: dict[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        check_types(ProjectedMoE.__init__, {"hidden_size": hidden_size, "projected_size": projected_size})
        if hidden_size < 1 or projected_size < 1:
            raise ValueError(f"{hidden_size=} and {projected_size=} must both be at least 1")
        # Experts, transport and buffers are those of a layer of the projected size.
        super().__init__(
            projected_size, intermediate_size, num_experts, num_experts_per_tok, edp_mesh=edp_mesh,
            shared_intermediate_size=shared_intermediate_size, router=router, **settings,
        )  # fmt: skip
        place: dict[str, Any] = {"device": self.up_proj.device, "dtype": self.up_proj.dtype}
        self.hidden_size = hidden_size
        groups = self.router.groups
        self.router = Router(hidden_size, num_experts, num_experts_per_tok, groups=groups, **place, **(router or {}))
        if shared_intermediate_size:
            act: Any = make_activation(settings.get("activation", "silu"), settings.get("gated", True))
            self.shared = SharedExpert(hidden_size, shared_intermediate_size, act, act.gated, place)
        self.descend = nn.Linear(hidden_size, projected_size, bias=False, **place)
        self.ascend = nn.Linear(projected_size, hidden_size, bias=False, **place)
        self.core.projections = self.descend, self.ascend
        self.reset_parameters()
        self._make_equal(group_of(edp_mesh))

    def reset_parameters(self) -> None:
        super().reset_parameters()
        # The constructor of the base class draws before there are projections.
        for name in ("descend", "ascend"):
            if name in self._modules:
                draw_weight(getattr(self, name).weight)
