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
  - **Experts** that are not copied reduce nothing, but before their end, too, FSDP lets the computation wait for the
    reduction before. So it is held with their layer's: then a reduction has the time of a whole layer. Cost: their
    gathered parameters stay while attention's backward runs. Where they have copies (efsdp), they are reduced when
    their ride has ended, as ever.
  - **Pieces**: a reduction that takes longer than the experts meets the combine. So it is cut into equal pieces, and
    before each, the reductions' stream looks at a word on the device, which is 1 from before a ride until the
    computation has waited for it. Rides never wait: they write the word. A piece under way is not interrupted (Lina,
    USENIX ATC 2023, cuts all-reduces like this, and starts one only while no all-to-all is under way). To look in vain
    ends after some 20 ms (`priority_kernel`): if streams share a hardware queue, the ride's end may lie behind it.
  - Weight gradients of linear layers that are put off (`carpool.schedule.delayed`) are computed before the module that
    waits is reduced. Without holding there would be no time to put them off to.

The host asks for all of that in one order, the same on every rank. A rank may look at its word earlier than another:
its piece waits for the other's then, and keeps the links free as well.

Bits: holding changes none. Nor do pieces with gloo; NCCL may add an element's terms in another order in a message of
another size, so there pieces change gradients to rounding, unless two ranks reduce (a sum of two has one order). Two
runs with pieces of one size are equal.

Only reductions wait, not FSDP's gathers: the computation needs these soon. With several replicas (dp_replicate_size),
the all-reduce between them is held, but not cut. Without FSDP (`carpool.reduce_gradients`) reductions come after the
backward, when there are no rides to yield to. On a CPU the order is the same, and nothing runs beside anything: no
piece looks.

`FSDPModule.set_custom_reduce_scatter` is made for such pieces, but not for holding: what it is given must be reduced
when it returns, for FSDP reads it next (a cast, a sum with earlier micro-batches). So this stands for FSDP's hooks
themselves, as `carpool.schedule.shared_shards` does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from carpool.observe.meter import shown
from carpool.parallel import fsdp
from carpool.ride.hooks import NO_HOOKS, RideHooks
from carpool.ride.turns import HALF
from carpool.schedule.delayed import Delayed

ALIGNED = 64  # elements


class Links:
    """Whether a ride of this rank has the links: a word on the device, written by one stream and read by another.

    Attributes:
        looked: (2,) int32, the word, and how often a reduction has looked in vain. None on a CPU.
        taken: what the word was set to last.
    """

    def __init__(self, device: torch.device) -> None:
        self.looked = torch.zeros(2, dtype=torch.int32, device=device) if device.type == "cuda" else None
        self.taken = False

    def set(self, taken: bool) -> None:
        """From here on in the current stream."""
        if self.looked is not None and taken != self.taken:
            self.looked[:1].fill_(int(taken))
        self.taken = taken

    def wait(self) -> None:
        """Let the current stream wait until they are free, or for some 20 ms."""
        if self.looked is not None:
            from carpool.schedule.priority_kernel import launch

            launch(self.looked)


class Pieces(fsdp.ReduceScatter):
    """A reduce-scatter in pieces, each of which begins when no ride has the links. FSDP calls it.

    Args:
        most_bytes: of the gradients that one piece reduces.
    """

    def __init__(self, most_bytes: int, links: Links) -> None:
        self.most_bytes, self.links, self.on = most_bytes, links, False
        # New in PyTorch 2.13, where the other is deprecated.
        self._reduce: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        if not self.on:
            work: dist.Work | None = self._reduce(output_tensor, input_tensor, op=op, group=group, async_op=async_op)
            return work
        assert not async_op, "FSDP's stream is asynchronous, not its calls"
        # One row for each rank; a piece is some columns of it.
        input_WN = input_tensor.view(group.size(), -1)
        size = input_tensor.numel() * input_tensor.element_size()
        for start, end in cut(output_tensor.numel(), size, self.most_bytes):
            with shown("carpool::reduce-gradients"):
                self.links.wait()
                piece = input_WN[:, start:end].contiguous().view(-1)
                self._reduce(output_tensor[start:end], piece, op=op, group=group)
        return None


def cut(elements: int, size: int, most: int) -> list[tuple[int, int]]:
    """Equal pieces, but for the last, of `elements` that have `size` bytes: (first, end) of each.

    (1000, 4000, 2000) -> [(0, 512), (512, 1000)]"""
    pieces = max(1, -(-size // most))
    each = max(ALIGNED, -(-elements // pieces // ALIGNED) * ALIGNED)
    return [(start, min(start + each, elements)) for start in range(0, elements, each)]


class Rides(Protocol):
    """A layer that rides."""

    hooks: RideHooks


class RidesFirst(RideHooks):
    """Inside, forward and backward of `model` run as the module's docstring says. All ranks alike.

    Args:
        model: plain, or sharded by FSDP2.
        layers: the layers that ride, by the names of their modules, such as "model.layers.3.mlp.experts".
        piece_bytes: of the gradients that FSDP reduces at once; None: it reduces them uncut.
        delayed: the linear layers whose weight gradients wait for a ride, if any are to.

    Raises:
        ValueError: nothing can wait: the model is not sharded by FSDP2, and no weight gradient is put off.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Mapping[str, Rides],
        piece_bytes: int | None = None,
        delayed: Delayed | None = None,
    ) -> None:
        if piece_bytes is not None and piece_bytes < 1:
            raise ValueError(f"piece_bytes={piece_bytes} must be positive; None leaves reductions uncut")
        self.delayed = delayed
        self.layers = list(layers.values())
        self.links = Links(next(model.parameters()).device)
        sharded = {name: module for name, module in model.named_modules() if isinstance(module, FSDPModule)}
        if not sharded and (delayed is None or piece_bytes is not None):
            raise ValueError(
                "rides can only come before reductions that FSDP2 (fully_shard) starts during the backward; without "
                "it, gradients are reduced after the backward, beside no ride"
            )
        self._states = fsdp.states(model)
        self._groups = [group for state in self._states for group in fsdp.groups(state)]
        self._riding = {id(group) for name in layers for group in fsdp.groups_of(sharded.get(name))}
        self.pieces = None if piece_bytes is None else Pieces(piece_bytes, self.links)
        self._modules = list(sharded.values())
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
        if self.pieces is not None:
            self.pieces.on = True
            for module in self._modules:
                module.set_custom_reduce_scatter(self.pieces)
        if self.delayed is not None:
            self.delayed.start()
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        try:
            if error is None:
                self._go_on()
        finally:
            self._held.clear()
            self._module_waits = False
            self.links.set(False)
            if self.pieces is not None:
                self.pieces.on = False
            if self.delayed is not None:
                self.delayed.stop()
            self._replaced.restore()
            for layer in self.layers:
                layer.hooks = NO_HOOKS

    # -- what rides say -------------------------------------------------------------------------------------------

    def before_verb(self) -> None:
        if self.pieces is not None:
            self.links.set(True)

    def gradients_under_way(self) -> None:
        if self.delayed is not None:
            self.delayed.compute()

    def before_experts(self, links_free: bool) -> None:
        if links_free:
            self.links.set(False)
        self._go_on()

    def after_last_verb(self) -> None:
        self.links.set(False)

    # -- what FSDP does -------------------------------------------------------------------------------------------

    def _hold(self, group: Any) -> Callable[..., None]:
        post_backward = group.post_backward
        riding = id(group) in self._riding
        alone = fsdp.is_alone(group)

        def held(*_: Any) -> None:
            half = HALF.get()
            if half is not None and half.number == 0:
                # Not reduced: the other half's gradients are added first (`carpool.schedule.shared_shards`).
                self._do([post_backward])
            elif self._closing or (riding and not alone):
                # Experts' gradients are there when their ride has ended: nothing is in their way.
                self._do([post_backward])
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
                self._do([final_callback])
            finally:
                self._closing = False

        return closing

    def _go_on(self) -> None:
        """What has waited is done now."""
        held, self._held, self._module_waits = self._held, [], False
        self._do(held)

    def _do(self, held: Sequence[Callable[[], None]]) -> None:
        """With the gradients complete that were put off, and the links free: FSDP lets the computation wait for a
        reduction before the last, which may look at them."""
        if self.delayed is not None:
            self.delayed.compute()
        taken = self.links.taken
        self.links.set(False)
        for one in held:
            one()
        self.links.set(taken)
