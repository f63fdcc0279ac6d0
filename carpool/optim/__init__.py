"""How parameters are updated: a registry of optimizers, and clipping.

`OPTIMIZERS` is the only list of what `training.optimizer` may name; `base.py` says what a class of it says of itself.
`register` adds one from outside the package (`carpool.plugins`).

`AdamW` is the package's own: exact AdamW in one pass, float32 masters of bfloat16 weights, moments in fewer bits, state
in host memory, updates inside of the backward. `Muon` is for the matrices of layers, with that AdamW for all else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from carpool.optim.base import AdamWFacts, MuonFacts, OptimizerBase, OptimizerSettings, TorchFacts
from carpool.plugins import Registry, unknown

if TYPE_CHECKING:
    from carpool.optim.adamw import AdamW, Moments
    from carpool.optim.muon import Muon

__all__ = ["OPTIMIZERS", "AdamW", "Moments", "Muon", "OptimizerBase", "OptimizerSettings", "find_optimizer", "register"]


def _check(name: str, cls: type[OptimizerBase]) -> None:
    if cls.state_bytes.__func__ is OptimizerBase.state_bytes.__func__:  # type: ignore[attr-defined]
        raise ValueError(f"optimizer {name!r} ({cls!r}) has no state_bytes: see carpool.optim.base")


OPTIMIZERS: Registry[type[OptimizerBase]] = Registry(
    "optimizer",
    "carpool.optimizers",
    {cls.name: cls for cls in (AdamWFacts, TorchFacts, MuonFacts)},
    _check,
    OptimizerBase,
)
register = OPTIMIZERS.register


def find_optimizer(
    name: str, dtype: str = "float32", moments: str = "float32", place: str = "none", in_backward: bool = False
) -> type[OptimizerBase]:
    """The class that `training.optimizer` means. "auto" is PyTorch's AdamW for parameters, moments and state that it
    can have, and the one-pass AdamW else.

    Args:
        dtype: of the parameters.
        moments, place: training.optimizer_state_dtype and training.optimizer_offload.
        in_backward: gradients are used in the backward.

    Raises:
        ValueError: nobody has registered the name."""
    if name == "auto":
        plain = (
            dtype != "bfloat16"
            and moments in TorchFacts.moments
            and place in TorchFacts.places
            and (TorchFacts.in_backward or not in_backward)
        )
        return TorchFacts if plain else AdamWFacts
    if name not in OPTIMIZERS:
        raise ValueError(unknown(OPTIMIZERS, name, "auto"))
    return OPTIMIZERS[name]


def __getattr__(name: str) -> Any:
    """PyTorch is imported once somebody wants what needs it."""
    if name in ("AdamW", "Moments"):
        from carpool.optim import adamw

        return getattr(adamw, name)
    if name == "Muon":
        from carpool.optim.muon import Muon

        return Muon
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
