"""Balancing without a loss, for the routers of transformers that have a bias per expert (carpool/routing/bias.py).

    balance = BiasBalance(model, 0.001)         # on all ranks, before the first step
    ...                                         # forward, backward, optimizer.step()
    balance.step()                              # on all ranks, once per optimizer step

DeepSeek-V3 and its relatives add such a bias to the scores before they choose experts. Their checkpoints hold it, but
transformers never moves it: a model that is trained from scratch keeps it at zero. Here each layer counts the load of
the tokens that it trains on, and `step` moves the bias against the load of the whole batch: of all ranks and all
micro-batches, each token once, also where activation checkpointing computes a layer twice.

The bias is a buffer of the model (of some models a frozen parameter), so checkpoints and `save_pretrained` have it. It
is equal on all ranks, because all add the same to it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from carpool.families import family_of
from carpool.hf.seam.rides import ExpertRides, required_rides
from carpool.parallel.replicated import sharded_parameters
from carpool.routing.bias import update_biases


def find_biases(model: nn.Module, experts: Mapping[str, int] | None = None) -> dict[str, tuple[nn.Module, str]]:
    """For each MoE layer that has a bias, by the name of its experts module: the module that holds it, and its name
    there. The holder is the block around the experts, or something in it (the router).

    Args:
        experts: E of each experts module, by name. None: the model has Carpool's layers, which know it."""
    found: dict[str, tuple[nn.Module, str]] = {}
    if experts is None:
        experts = {layer: own.num_experts for layer, own in required_rides(model).items()}
    for layer, number in experts.items():
        block = model.get_submodule(layer.rpartition(".")[0])
        for holder in block.modules():
            for name in family_of(model).selection_bias:
                bias = getattr(holder, name, None)
                if isinstance(bias, torch.Tensor) and bias.numel() == number and not bias.requires_grad:
                    found.setdefault(layer, (holder, name))
    return found


def check_biases(model: nn.Module, found: Collection[str]) -> None:
    """Raise ValueError if no router of a model has a bias. `found`: what `find_biases` found."""
    if not found:
        names = " or ".join(family_of(model).selection_bias)
        raise ValueError(
            f"{type(model).__name__} has no bias per expert that its routers choose by ({names}), so "
            "there is nothing to move; balance it by a loss instead"
        )


class BiasBalance:
    """Moves the biases of a model's routers. All ranks construct and call it together.

    Args:
        model: with Carpool's layers.
        rate: the step, 0.001 in DeepSeek-V3.
        group: the ranks that have the same layers, of a stage of a pipeline; None: all.

    Raises:
        ValueError: no router of the model has a bias, or a rate that is not positive."""

    def __init__(self, model: nn.Module, rate: float, group: dist.ProcessGroup | None = None) -> None:
        if rate <= 0:
            raise ValueError(f"the rate {rate:g} must be positive: it is what a bias moves by in a step")
        self.model, self.rate, self.group, layers = model, rate, group, required_rides(model)
        self.holders = find_biases(model)
        check_biases(model, self.holders)
        self.layers: dict[str, ExpertRides] = {name: layers[name] for name in self.holders}
        for name, (holder, attribute) in self.holders.items():
            bias = getattr(holder, attribute)
            if attribute in holder._buffers and bias.dtype in (torch.bfloat16, torch.float16):
                # A step would be lost in the rounding of anything larger than a few steps.
                bias = holder._buffers[attribute] = bias.float()
            self.layers[name].set_balance(True, bias.device)

    def step(self) -> None:
        """Move all biases against the load since the last step, and forget it. Collective."""
        loads = []
        for own in self.layers.values():
            assert own.load_E is not None
            loads.append(own.load_E)
        moves = [torch.zeros(load.shape, device=load.device) for load in loads]
        update_biases(moves, loads, self.rate, (self.group,) if dist.is_initialized() else ())
        parameters = any(attribute in holder._parameters for holder, attribute in self.holders.values())
        with torch.no_grad(), sharded_parameters(self.model, write=True) if parameters else nullcontext():
            for (holder, attribute), move_E in zip(self.holders.values(), moves, strict=True):
                bias = getattr(holder, attribute)
                _add(bias, move_E.view(bias.shape))

    def forget(self) -> None:
        """Forget the load since the last step: its forwards are void."""
        for own in self.layers.values():
            assert own.load_E is not None
            own.load_E.zero_()

    def spread(self) -> float:
        """Largest bias minus smallest, in the layer where that is most: how far they have moved. Waits for the device;
        collective for biases that FSDP shards."""
        widths = []
        for holder, attribute in self.holders.values():
            bias = getattr(holder, attribute).detach()
            whole = bias.full_tensor() if isinstance(bias, DTensor) else bias
            widths.append(whole.max() - whole.min())
        return float(torch.stack(widths).max())


def _add(bias: torch.Tensor, move: torch.Tensor) -> None:
    """`bias += move`, where every rank has all of `move` and maybe a shard of `bias`."""
    if isinstance(bias, DTensor):
        mesh = bias.device_mesh
        whole = DTensor.from_local(move, mesh, [Replicate()] * mesh.ndim, run_check=False)
        bias.to_local().add_(whole.redistribute(placements=bias.placements).to_local())
    else:
        bias.add_(move)
