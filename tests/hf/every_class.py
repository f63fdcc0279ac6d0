"""Imports the classes of all architectures: ranks forked from a process that has done so need not (tests/ranks.py)."""

from __future__ import annotations

from tests.hf.tiny_models import discover

CLASSES = [architecture.model_class for architecture in discover().values() if architecture.class_name]
