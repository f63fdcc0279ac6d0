"""matplotlib figures that live inside an HTML page: themed by CSS, with real text, and without clashes.

An SVG that matplotlib writes is a document of its own. To put several into one page and have them follow the page's
theme, `to_svg` changes five things:

- Colours. A figure is drawn in *roles* ("ink", "dispatch", "heat3"), each a made-up colour such as #0a0003 that occurs
  nowhere else. Afterwards each is replaced by a CSS variable, `var(--ink)`, which the page defines for light and dark.
- Text stays text (selectable, searchable, in the reader's font). Labels are laid out with the metrics of DejaVu Sans,
  which is wider than the usual system fonts, so what fits here fits there.
- Ids are prefixed with the figure's name, because the clip path of one figure would otherwise cut another; those that
  nothing refers to go. Artists with the gid "cells" get the class "cells" instead: the page draws them without seams.
- The `<style>` element goes (its `*` selector would reach the whole page), and so do the XML prolog, the namespaces and
  the metadata, which HTML does not want.
- Coordinates are cut to hundredths of a point: the same picture in half the bytes.
"""

from __future__ import annotations

import html
import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

HEAT_LEVELS = 9

ROLES = (
    "ink",
    "muted",
    "grid",
    "card",
    "dispatch",
    "experts",
    "combine",
    "rest",
    "loss",
    "heldout",
    "predicted",
    "mark",
    *(f"heat{i}" for i in range(HEAT_LEVELS)),
    *(f"diverge{i}" for i in range(HEAT_LEVELS)),
    "on-pale",
    "on-strong",
)
"""Every colour a figure may use; page.css defines each for both themes."""

WIDTH = 4.1
"""Inches, 295 points: enlarged a tenth on a narrow phone and two thirds on a desktop, legible on both."""


def role(name: str) -> str:
    """The stand-in colour of a role, for matplotlib's `color=` arguments."""
    return f"#0a{ROLES.index(name):04x}"


@contextmanager
def drawing(height: float) -> Iterator[tuple[Figure, Axes]]:
    """A figure of the page's width and one pair of axes, in the page's style; `height` in inches."""
    settings: Any = {
        "svg.fonttype": "none",
        "svg.hashsalt": "carpool",
        "font.family": "DejaVu Sans",
        "font.size": 9,
        "axes.titlesize": 9,
        "axes.labelsize": 9,
        "xtick.labelsize": 8.5,
        "ytick.labelsize": 8.5,
        "legend.fontsize": 8.5,
        "legend.frameon": False,
        "axes.edgecolor": role("muted"),
        "axes.labelcolor": role("muted"),
        "axes.titlecolor": role("ink"),
        "text.color": role("ink"),
        "xtick.color": role("muted"),
        "ytick.color": role("muted"),
        "grid.color": role("grid"),
        "grid.linewidth": 0.8,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.axisbelow": True,
        "hatch.linewidth": 1.0,
        "lines.linewidth": 1.6,
        "path.simplify": True,
    }
    with matplotlib.rc_context(settings):
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        yield figure, figure.add_subplot()


def to_svg(figure: Figure, name: str, alt: str) -> str:
    """The figure as an `<svg>` element to put into a page; `name` makes its ids unique, `alt` describes it in words."""
    buffer = io.StringIO()
    nothing: dict[str, None] = {"Creator": None, "Date": None, "Format": None, "Type": None}
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": f"carpool-{name}"}):
        figure.savefig(buffer, format="svg", metadata=nothing, transparent=True)
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<!--.*?-->|<metadata>.*?</metadata>|<style.*?</style>", "", text, flags=re.DOTALL)
    view_box = re.search(r'viewBox="[^"]*"', text)
    assert view_box, "matplotlib always writes a viewBox"
    label = html.escape(alt, quote=True)
    opening = f'<svg class="figure" {view_box.group()} role="img" aria-label="{label}">'
    text = re.sub(r"<svg[^>]*>", lambda _: opening, text, count=1)
    text = re.sub(r'\bid="cells"', 'class="cells"', text)
    used = set(re.findall(r"""(?:url\(|href=")#([^)"]+)""", text))
    text = re.sub(r' id="([^"]*)"', lambda m: m.group() if m.group(1) in used else "", text)
    text = re.sub(r'\bid="', f'id="{name}-', text)
    text = re.sub(r"url\(#", f"url(#{name}-", text)
    text = re.sub(r'(?:xlink:)?href="#', f'href="#{name}-', text)
    text = re.sub(r"font(-family)?: ?([^;\"]*)'DejaVu Sans'[^;\"]*", _page_font, text)
    # As an attribute of its own (hatches), a variable is safest in a style.
    text = re.sub(r'\b(fill|stroke)="(#0a00[0-9a-f]{2})"', r'style="\1: \2"', text)
    for i, known in enumerate(ROLES):
        text = text.replace(f"#0a{i:04x}", f"var(--{known})")
    text = re.sub(r' d="([^"]*)"', _shorter_path, text)
    return re.sub(r"\s*\n\s*", "\n", text).strip()


def _page_font(match: re.Match[str]) -> str:
    """Keeps the size of a `font` declaration and takes the page's font."""
    size = re.search(r"[\d.]+px", match.group(2))
    return f"font-size: {size.group()}" if size else "font-family: inherit"


def _shorter_path(match: re.Match[str]) -> str:
    path = re.sub(r"(\.\d\d)\d+", r"\1", match.group(1))
    return ' d="' + " ".join(path.split()) + '"'
