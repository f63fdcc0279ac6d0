"""Rides before reductions: in the backward, FSDP2's reductions of gradients keep off the links that rides need.

FSDP reduces a layer's gradients when its backward has ended. That is the moment at which the next ride begins, on the
same links, and for this ride the whole computation waits; for the reduction nobody does until the step's end. So here

    as FSDP does      ... attn 4 | reduce 4 . . .
                                 | dispatch . . . . . . | experts 3        | combine | attn 3 ...
    rides first       ... attn 4 | dispatch . . . | experts 3              | combine | attn 3 ...
                                                  | reduce 4 . . .                              -> next: reduce 3

  - **Held**: what FSDP does at the end of a module's backward (`post_backward`: it reduces, and frees the gathered
    parameters) waits for the next ride of the backward, until its gradients have arrived. The computation's stream has
    waited for them then, and FSDP's reductions wait for that stream: no more is needed, on any transport. At most one
    layer waits; what no ride releases (layers without one, the last layers of the backward) goes on when the next
    layer ends, or before FSDP closes its books. Cost: a layer's gathered parameters and gradients stay for the length
    of a dispatch.
  - **Experts** that are not copied reduce nothing, but where FSDP has them (`carpool.hf.sharding`), it lets the
    computation wait for the reduction before at their end, too. So it is held with their layer's: then a reduction has
    the time of a whole layer. Cost: their gathered parameters stay while attention's backward runs. Where they have
    copies (efsdp), they are reduced when their ride has ended, as ever.

The host asks for all of that in one order, the same on every rank. Holding changes no bits.

Tried and taken out (docs/log.md, 2026-11-22): reductions cut into pieces that look at the links before each one (Lina,
USENIX ATC 2023), and weight gradients of linear layers that are put off into the next ride (LANCET, arXiv 2404.19429).
Neither made any measured step faster than holding alone.

Only reductions wait, not FSDP's gathers: the computation needs these soon. Without FSDP (`carpool.reduce_gradients`)
reductions come after the backward, when there are no rides to yield to. On a CPU the order is the same, and nothing
runs beside anything. This replaces FSDP's private hooks, as `carpool.ride.two_batch` does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from torch import nn
from torch.distributed.fsdp import FSDPModule

from carpool.parallel import fsdp
from carpool.ride.setup import NO_HOOKS, RideHooks
from carpool.ride.turns import HALF


class Rides(Protocol):
    """A layer that rides."""

    hooks: RideHooks


class RidesFirst(RideHooks):
    """Inside, forward and backward of `model` run as the module's docstring says. All ranks alike.

    Args:
        model: sharded by FSDP2.
        layers: the layers that ride, by the names of their modules, such as "model.layers.3.mlp.experts".

    Raises:
        ValueError: nothing can wait: the model is not sharded by FSDP2.
    """

    def __init__(self, model: nn.Module, layers: Mapping[str, Rides]) -> None:
        self.layers = list(layers.values())
        sharded = {name: module for name, module in model.named_modules() if isinstance(module, FSDPModule)}
        if not sharded:
            raise ValueError(
                "rides can only come before reductions that FSDP2 (fully_shard) starts during the backward; without "
                "it, gradients are reduced after the backward, beside no ride"
            )
        self._states = fsdp.states(model)
        self._groups = [group for state in self._states for group in fsdp.groups(state)]
        self._riding = {id(group) for name in layers for group in fsdp.groups_of(sharded.get(name))}
        self._held: list[Callable[[], None]] = []
        self._module_waits = self._closing = False
        self._replaced = fsdp.Replaced()

    def __enter__(self) -> RidesFirst:
        for layer in self.layers:
            layer.hooks = self
        for state in self._states:
            self._replaced.replace(state, fsdp.FINAL_CALLBACK, self._close(state))
        for group in self._groups:
            self._replaced.replace(group, "post_backward", self._hold(group))
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        try:
            if error is None:
                self._go_on()
        finally:
            self._held.clear()
            self._module_waits = False
            self._replaced.restore()
            for layer in self.layers:
                layer.hooks = NO_HOOKS

    # -- what rides say -------------------------------------------------------------------------------------------

    def before_experts(self) -> None:
        self._go_on()

    # -- what FSDP does -------------------------------------------------------------------------------------------

    def _hold(self, group: Any) -> Callable[..., None]:
        post_backward = group.post_backward
        riding = id(group) in self._riding
        alone = fsdp.is_alone(group)

        def held(*_: Any) -> None:
            half = HALF.get()
            if half is not None and half.number == 0:
                # Not reduced: the other half's gradients are added first (`carpool.ride.two_batch`).
                post_backward()
            elif self._closing or (riding and not alone):
                # Experts' gradients are there when their ride has ended: nothing is in their way.
                post_backward()
            else:
                if self._module_waits and not riding:
                    self._go_on()
                self._held.append(post_backward)
                self._module_waits |= not riding

        return held

    def _close(self, state: Any) -> Callable[[], None]:
        final_callback = getattr(state, fsdp.FINAL_CALLBACK)

        def closing() -> None:
            self._closing = True
            try:
                self._go_on()
                final_callback()
            finally:
                self._closing = False

        return closing

    def _go_on(self) -> None:
        """What has waited is done now."""
        held, self._held, self._module_waits = self._held, [], False
        for one in held:
            one()
