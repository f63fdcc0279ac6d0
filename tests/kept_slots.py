"""Slots of all `carpool.MoE` layers of a model, kept from one update of the weights to the next."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.distributed.tensor import DTensor

from carpool.layer.module import LayerModule
from carpool.replicas.slot_steps import Home, Homes, keep_slots


@contextmanager
def slots_kept(model: nn.Module, prefetch: bool = True) -> Iterator[None]:
    """Inside, no weight changes: replicas are filled once and serve all forwards. All ranks together, around the
    micro-batches of a step. A layer must have its layout before.

    Args:
        prefetch: slots are filled ahead of their layer, and no backward waits for replicas' gradients: these are
            complete at the end. The same bits (carpool/replicas/slot_steps.py). Layers should run in the order in
            which the model registers them; in another one, fills may still be waited for."""

    def homes(moe: LayerModule) -> Homes | None:
        weights = moe.home_weights()._asdict().items()
        if any(isinstance(w, DTensor) for _, w in weights) or not prefetch:
            return None  # the former: somebody has sharded them
        return {name: Home(w, w.dtype, 1.0) for name, w in weights if w is not None}

    with keep_slots([(moe.core.filler, homes(moe)) for moe in model.modules() if isinstance(moe, LayerModule)]):
        yield
