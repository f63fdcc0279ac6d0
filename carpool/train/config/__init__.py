"""A run's settings: the schema, and how TOML files and overrides become a `Config`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from carpool.train.config.load import describe, load_config, resolve_config
    from carpool.train.config.schema import Config, ParallelismSection, TrainingSection

__all__ = ["Config", "ParallelismSection", "TrainingSection", "describe", "load_config", "resolve_config"]
_IN_LOAD = ("describe", "load_config", "resolve_config")


def __getattr__(name: str) -> Any:
    # When it is asked for: the schema needs PyTorch, and who only reads a published model's sizes does not.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(f"{__name__}.{'load' if name in _IN_LOAD else 'schema'}"), name)
    globals()[name] = value
    return value
