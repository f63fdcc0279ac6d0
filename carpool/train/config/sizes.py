"""Sizes of memory as people write them: "70GiB"."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import BeforeValidator

UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}

# A number without a unit is text, too, so that the error says what it lacks.
Size = Annotated[str, BeforeValidator(lambda value: str(value) if type(value) in (int, float) else value)]


def size_of(text: str, what: str = "memory.budget") -> int:
    """Bytes of a size with its unit, such as "70GiB". `what`: whose size it is, for the error.

    Raises:
        ValueError: it is none."""
    found = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]+)\s*", text)
    units = {unit.lower(): factor for unit, factor in UNITS.items()}
    if found is None or found[2].lower() not in units or float(found[1]) == 0:
        raise ValueError(f"{what} = {text!r}: expected a size with its unit ({', '.join(UNITS)}), such as 70GiB")
    return int(float(found[1]) * units[found[2].lower()])
