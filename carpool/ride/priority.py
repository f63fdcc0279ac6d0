"""Rides before reductions: in the backward, FSDP2's gradient reductions wait while a ride uses the same links.

FSDP reduces a layer's gradients at the end of the layer's backward, when the next ride begins on the same links. The
whole computation waits for this ride, while no one needs the reduction before the step's end. So here

    as FSDP does      ... attn 4 | reduce 4 . . .
                                 | dispatch . . . . . . | experts 3        | combine | attn 3 ...
    rides first       ... attn 4 | dispatch . . . | experts 3              | combine | attn 3 ...
                                                  | reduce 4 . . .                              -> next: reduce 3

  - **Delayed reductions.** FSDP's hook at the end of a module's backward (`post_backward`: it reduces gradients, and
    frees the gathered parameters) is delayed until the gradients of the next ride have arrived. By then the
    computation's stream has waited for them, and FSDP's reductions wait for that stream, so this works with any
    transport. At most one layer is delayed. Without a next ride (layers without one, the last layers of the backward)
    the hook runs when the next layer ends, or before FSDP's final callback. Cost: a layer's gathered parameters and
    gradients stay in memory for the length of a dispatch.
  - **Experts** without data-parallel replicas reduce nothing, but if FSDP has them (`carpool.hf.sharding`), it lets the
    computation wait for the previous reduction at their end, too. So their hook is delayed with their layer's, and a
    reduction can take as long as a whole layer. Cost: their gathered parameters stay in memory during attention's
    backward. Experts with data-parallel replicas (efsdp) are reduced when their ride has ended, as usual.

The host enqueues all of this in one order, the same on every rank. Results do not change.

Tried and removed (docs/log.md, 2026-11-22): reductions in pieces that wait for idle links (Lina, USENIX ATC 2023), and
weight gradients of linear layers deferred into the next ride (LANCET, arXiv 2404.19429). Neither made any measured step
faster than delayed reductions alone.

Only reductions are delayed, not FSDP's all-gathers, which the computation needs soon. Without FSDP
(`carpool.reduce_gradients`) reductions run after the backward, when there are no rides. On a CPU the order is the same,
without overlap. This replaces FSDP's private hooks, as `carpool.ride.two_batch` does.
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
    """A layer with rides."""

    hooks: RideHooks


class RidesFirst(RideHooks):
    """Context in which reductions of `model` are delayed; see the module's docstring. On all ranks.

    Args:
        model: sharded by FSDP2.
        layers: the MoE layers, by the names of their modules, such as "model.layers.3.mlp.experts".

    Raises:
        ValueError: the model is not sharded by FSDP2.
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

    # -- hooks of rides -------------------------------------------------------------------------------------------

    def before_experts(self) -> None:
        self._go_on()

    # -- hooks of FSDP --------------------------------------------------------------------------------------------

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
                # Gradients of experts are complete when their ride has ended, so that no ride competes.
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
        """Run the delayed hook now."""
        held, self._held, self._module_waits = self._held, [], False
        for one in held:
            one()
