"""Numbers as people read them: three significant digits and a unit that keeps them short.

    bytes_text(1_234_567)  -> "1.23 MB"      decimal units, as links and disks are sold
    count_text(1_638_400)  -> "1.64M"
    ms_text(0.412)         -> "412 µs"
    percent_text(0.0423)   -> "4.2 %"

Every function takes None, for what was not measured, and answers "–". NaN was measured, and stays "NaN".
"""

from __future__ import annotations

import math

MISSING = "–"


def _special(value: float) -> str:
    return "NaN" if math.isnan(value) else "∞" if value > 0 else "-∞"


def _scaled(value: float, units: tuple[str, ...], base: float = 1000.0) -> tuple[str, str]:
    """The largest unit that keeps the number at least 1, with three significant digits."""
    if not math.isfinite(value):
        return _special(value), units[0]
    size, index = abs(value), 0
    # 999.6 rounds to "1000", which belongs to the next unit.
    while index + 1 < len(units) and float(f"{size:.3g}") >= base:
        size /= base
        index += 1
    digits = 0 if size >= 99.95 else 1 if size >= 9.995 else 2
    text = f"{size:.{digits}f}"
    return ("-" if value < 0 else "") + text, units[index]


def bytes_text(value: float | None) -> str:
    """Bytes in decimal units: 1 kB is 1000 B."""
    if value is None:
        return MISSING
    if abs(value) < 999.5:
        return f"{value:.0f} B"
    number, unit = _scaled(value, ("B", "kB", "MB", "GB", "TB", "PB"))
    return f"{number} {unit}"


def count_text(value: float | None) -> str:
    """A count; whole below a thousand."""
    if value is None:
        return MISSING
    if abs(value) < 999.5:
        return f"{value:.0f}"
    number, unit = _scaled(value, ("", "k", "M", "B", "T"))
    return number + unit


def ms_text(value: float | None) -> str:
    """A duration given in milliseconds."""
    if value is None:
        return MISSING
    if not math.isfinite(value):
        return f"{_special(value)} ms"
    if abs(value) >= 120_000:
        return f"{value / 60_000:.1f} min"
    number, unit = _scaled(value * 1000, ("µs", "ms", "s"))
    return f"{number} {unit}"


def percent_text(value: float | None) -> str:
    """A share of 1 in per cent."""
    if value is None:
        return MISSING
    if not math.isfinite(value):
        return _special(value)
    return f"{100 * value:.1f} %" if abs(value) < 0.0995 else f"{100 * value:.0f} %"


def plain_text(value: float | None, digits: int = 2) -> str:
    """A plain number with so many decimals."""
    if value is None:
        return MISSING
    return f"{value:.{digits}f}" if math.isfinite(value) else _special(value)
