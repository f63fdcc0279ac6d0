"""Experts that serve every token, computed while the routed tokens travel.

Many blocks of transformers call their routed experts, then the shared ones on the same hidden states:

    routed = self.experts(x, ids, weights)          the ride
    return routed + self.shared_experts(x)

In that order, the shared experts would wait for the ride's end. So the ride calls them itself once its first tokens are
under way (`SharedExperts.compute`), and the block gets the result when it asks. Autograd comes to them while the ride's
last combine is under way. Sums of gradients may have another order: equal to rounding. Blocks that call the shared
experts first (Qwen2-MoE, AFMoE, ...) are left alone (`Family.shared_after_routed`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from carpool.families import family_of_class
from carpool.hf.seam.expert_rides import rides
from carpool.ride.turns import HALF


class _Early(NamedTuple):
    """What was computed ahead, and of what."""

    output: torch.Tensor
    rows: torch.Tensor
    version: int
    graph: bool

    def is_of(self, x: Any) -> bool:
        """Whether it is what the module would make of x now."""
        return _same(self.rows, x) and (x._version, torch.is_grad_enabled()) == (self.version, self.graph)


class SharedExperts:
    """Stands for the forward of a block's shared experts, from when it is made until `remove`.

    Args:
        block: calls its routed experts, then these, on the rows that it was given.
    """

    def __init__(self, block: nn.Module, module: nn.Module) -> None:
        self.module, self.own = module, module.forward
        # Of each of two halves (`carpool.ride.two_batch`), which are in the block at the same time.
        self._given: list[torch.Tensor | None] = [None, None]
        self._early: list[_Early | None] = [None, None]
        # An attribute of the instance, which nn.Module's call finds before the class's.
        module.forward = self
        self._hook = block.register_forward_pre_hook(self._remember)

    def _remember(self, _: nn.Module, args: tuple[Any, ...]) -> None:
        if not torch.compiler.is_compiling():
            self._given[_half()] = args[0] if args else None

    def compute(self, x_TH: torch.Tensor) -> _Early | None:
        """The output for the block's call that follows. None if x_TH, what the routed experts get, is not what the
        block was given (some get a projection of it): then there is nothing to compute yet."""
        if torch.compiler.is_compiling():
            return None
        half = _half()
        given, self._given[half] = self._given[half], None
        if given is None or not _same(given, x_TH):
            return None
        return _Early(self.own(x_TH), x_TH, x_TH._version, torch.is_grad_enabled())

    def offer(self, computed: _Early | None) -> None:
        """Keep what `compute` returned until the block asks. (A ride that fails never comes here, and neither does a
        checkpoint that computes again and has all that it wanted.)"""
        if not torch.compiler.is_compiling():
            self._early[_half()] = computed

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return self.own(*args, **kwargs)
        half = _half()
        early, self._early[half] = self._early[half], None
        if early is None or len(args) != 1 or kwargs or not early.is_of(args[0]):
            return self.own(*args, **kwargs)
        return early.output.view(*args[0].shape[:-1], early.output.shape[-1])

    def remove(self) -> None:
        """Leave the modules as they were."""
        self._hook.remove()
        del self.module.forward


def _half() -> int:
    half = HALF.get()
    return 0 if half is None else half.number


def _same(one: torch.Tensor, other: Any) -> bool:
    """Whether two tensors are the same rows, whatever their shape."""
    return isinstance(other, torch.Tensor) and (one.data_ptr(), one.numel(), one.dtype, one.requires_grad) == (
        other.data_ptr(), other.numel(), other.dtype, other.requires_grad,
    )  # fmt: skip


def shared_experts(block: nn.Module) -> nn.Module | None:
    """The shared experts of a block that calls them after its routed ones, on the same rows; None if it does not, or if
    nobody has looked."""
    # FSDP and users derive classes from a block's; what counts is whose forward it runs.
    owner = next(cls for cls in type(block).__mro__ if "forward" in vars(cls))
    known = family_of_class(owner)
    modules = (getattr(block, name, None) for name in known.shared_experts)
    module = next((module for module in modules if isinstance(module, nn.Module)), None)
    if module is None or not known.shared_after_routed:
        return None
    # One that FSDP shards by itself has its parameters only while it is called; another's forward may do anything.
    return None if isinstance(module, FSDPModule) or "forward" in vars(module) else module


def overlap_shared_experts(model: nn.Module, on: bool) -> list[str]:
    """Let shared experts overlap the rides of the model's layers, or no longer.

    Returns:
        The names of the layers (as of `carpool.hf.rides`) in which they do."""
    found = []
    for name, own in rides(model).items():
        if own.shared is not None:
            own.shared.remove()
            own.shared = None
        block = model.get_submodule(name.rpartition(".")[0])
        # Where tensor parallelism copies tokens, a ride has only a slice of them.
        if on and own.compute is not None and own.token_slice[1] == 1 and (module := shared_experts(block)) is not None:
            own.shared = SharedExperts(block, module)
            found.append(name)
    return found
