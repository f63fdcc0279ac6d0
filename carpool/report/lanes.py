"""A step as lanes: one for each stream of each rank, time from left to right, as an `<svg>` element.

There are thousands of rectangles, each with a text for the pointer (`data-tip`, read by page.js). Colours are those
of the page's style sheet; a rectangle's class is its kind.

    rank 0   stream 7: computation   [####  ####### ###...]
             stream 20: rides        [    ==        ==    ]
"""

from __future__ import annotations

import html

from carpool.profile.numbers import Profile
from carpool.report.svg import ticks
from carpool.report.units import ms_text

NAMES = {
    "dispatch": "ride: dispatch",
    "combine": "ride: combine",
    "experts": "experts",
    "packing": "packing for rides",
    "computation": "other computation",
    "other": "other communication",
}
"""Kinds of work, as the legend says them, in its order."""

_LEFT, _WIDTH, _LANE, _GAP, _AXIS = 256, 1000, 16, 4, 24


def lanes(profile: Profile, until_ms: float, name: str) -> str:
    """The picture. `until_ms`: what the width stands for; equal in pictures that are to be compared."""
    scale = _WIDTH / until_ms
    rows: list[str] = []
    y = _GAP
    for one in profile.ranks:
        rows.append(f'<text class="rank" x="0" y="{y + _LANE - 3}">rank {one.rank}</text>')
        for lane in one.lanes:
            end = one.times.step * scale
            rows.append(f'<text x="{_LEFT - 8}" y="{y + _LANE - 3}" text-anchor="end">{html.escape(lane.name)}</text>')
            rows.append(f'<rect class="idle" x="{_LEFT}" y="{y}" width="{end:.2f}" height="{_LANE}"/>')
            for start, stop, kind, label in lane.runs:
                what = NAMES.get(kind, kind) + (f": {label}" if label else "")
                told = html.escape(f"{what}, {ms_text(stop - start)} from {start:.2f} ms")
                place = f'x="{_LEFT + start * scale:.2f}" y="{y}" width="{(stop - start) * scale:.2f}"'
                rows.append(f'<rect class="{html.escape(kind)}" {place} height="{_LANE}" data-tip="{told}"/>')
            y += _LANE + _GAP
        y += 2 * _GAP
    marks = [
        f'<line x1="{_LEFT + at * scale:.2f}" x2="{_LEFT + at * scale:.2f}" y1="0" y2="{y}"/>'
        f'<text x="{_LEFT + at * scale:.2f}" y="{y + 14}" text-anchor="middle">{at:g}</text>'
        for at in ticks(0, until_ms, 11)
    ]
    alt = html.escape(f"{name}: lanes of {len(profile.ranks)} ranks over {profile.mean().step:.1f} milliseconds")
    return (
        f'<svg class="lanes" viewBox="0 0 {_LEFT + _WIDTH + 20} {y + _AXIS}" role="img" aria-label="{alt}">\n'
        + "\n".join([*marks, *rows])
        + f'\n<text x="{_LEFT - 8}" y="{y + 14}" text-anchor="end">ms</text>\n</svg>'
    )
