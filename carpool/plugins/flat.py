"""Nested tables as one. Here because every package may import this one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def flat(table: Mapping[str, Any], joint: str = ".", before: str = "") -> dict[str, Any]:
    """`{"model": {"config": {"hidden_size": 64}}}` -> `{"model.config.hidden_size": 64}`."""
    found: dict[str, Any] = {}
    for key, value in table.items():
        name = f"{before}{key}"
        found |= flat(value, joint, f"{name}{joint}") if isinstance(value, dict) else {name: value}
    return found
