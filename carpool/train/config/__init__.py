"""A run's settings: the schema, and how TOML files and overrides become a `Config`."""

from carpool.train.config.load import describe, load_config, resolve_config
from carpool.train.config.schema import Config, ParallelismSection, TrainingSection

__all__ = ["Config", "ParallelismSection", "TrainingSection", "describe", "load_config", "resolve_config"]
