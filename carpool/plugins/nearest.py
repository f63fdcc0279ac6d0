"""The known names nearest to one that is not known, for errors. Here because every package may import this one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest_names(word: str, known: Iterable[str], most: int = 3, cutoff: float = 0.6) -> list[str]:
    """The closest first. `cutoff`: 0 takes any name, 1 only equal ones."""
    return difflib.get_close_matches(word, list(known), n=most, cutoff=cutoff)


def nearest(word: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The closest, or None if none is close."""
    return next(iter(nearest_names(word, known, 1, cutoff)), None)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The end of an error, "; did you mean dedup?"; empty if none is close."""
    close = nearest(word, known)
    return f"; did you mean {close}?" if close else ""
