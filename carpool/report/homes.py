"""Where experts live, as a picture: a row for each layer, a block of places for each rank.

    layer   rank 0        rank 1
      0     0  1  2  3    4  5  6  7        pale: where it was when the run began
      1     0  6  2  3    4  5  1  7        strong: moved here (6, 1)

Each recorded layout is one picture: at the start, and after each move. Of many moves, the last ones are drawn.
"""

from __future__ import annotations

from carpool.report.charts import MARGIN_EM, WIDTH, colour, every, hover_cells, legend, num, svg, tag
from carpool.report.figures import layer_names
from carpool.report.read import Run
from carpool.report.record_types import LayerLayout, Layout

PICTURES = 4
"""At most so many layouts are drawn: the first, and the last ones."""

_HEAD = 20.0


def pictures(run: Run) -> list[tuple[str, str]]:
    """(title, HTML) of the layouts to draw; none with one rank, or if no layout was recorded."""
    layouts = [(one, by_layer(run, one)) for one in run.layouts]
    if not layouts or len(layouts[-1][1][0].homes) < 2:
        return []
    # A run that was resumed on other ranks begins anew.
    shape = _shape(layouts[-1][1])
    layouts = [pair for pair in layouts if _shape(pair[1]) == shape]
    origin = [
        {expert: rank for rank, experts in enumerate(layer.homes) for expert in experts} for layer in layouts[0][1]
    ]
    # A restart writes the layout again: it is drawn only where it differs from the one before.
    changed = [pair for i, pair in enumerate(layouts) if i == 0 or pair[1] != layouts[i - 1][1]]
    shown = changed if len(changed) <= PICTURES else [changed[0], *changed[1 - PICTURES :]]
    widest = [max(len(layer.homes[rank]) for _, layers in shown for layer in layers) for rank in range(shape[1])]
    titles = ["At the start", *(f"From step {one.step + 1}" for one, _ in shown[1:])]
    return [(title, draw(run, layers, origin, widest)) for title, (_, layers) in zip(titles, shown, strict=True)]


def by_layer(run: Run, layout: Layout) -> list[LayerLayout]:
    """The layout of each layer, in order of the model."""
    if layout.layers:
        return list(layout.layers.values())
    layers = max(1, len(run.info.model.moe_layers))
    return [LayerLayout(homes=layout.homes, slices=layout.slices)] * layers


def _shape(layers: list[LayerLayout]) -> tuple[int, int, list[int]]:
    """Layers, ranks, and each layer's experts."""
    return len(layers), len(layers[0].homes), [sum(map(len, layer.homes)) for layer in layers]


def draw(run: Run, layers: list[LayerLayout], origin: list[dict[int, int]], widest: list[int]) -> str:
    """One picture.

    Args:
        origin: of each layer, the rank where each expert was when the run began.
        widest: experts of each rank that the picture has room for.
    """
    names, ranks = layer_names(run, len(layers)), len(widest)
    left = 8 + MARGIN_EM * max(len(name) for name in names)
    block = min(10.0, 60.0 / ranks)
    w = (WIDTH - 2 - left - block * (ranks - 1)) / sum(widest)
    h = max(2.0, min(22.0, w, 400 / len(layers)))
    starts, x = [], left
    for rank in range(ranks):
        starts.append(x)
        x += w * widest[rank] + block
    parts = []
    for rank in range(0, ranks, max(1, -(-ranks // 8))):
        middle = starts[rank] + w * widest[rank] / 2
        word = f"rank {rank}" if w * widest[rank] > MARGIN_EM * 7 else str(rank)
        parts.append(tag("text", word, x=middle, y=_HEAD - 7, text_anchor="middle"))
    paths: dict[str, list[str]] = {"home": [], "moved": []}
    texts: list[str | None] = []
    gap = 0.06 * min(w, h)
    for row, (layer, was) in enumerate(zip(layers, origin, strict=True)):
        y = _HEAD + row * h
        for rank in range(ranks):
            for place in range(widest[rank]):
                if place >= len(layer.homes[rank]):
                    texts.append(None)
                    continue
                expert = layer.homes[rank][place]
                kind = "moved" if was[expert] != rank else "home"
                at = starts[rank] + place * w
                size = f"h{num(w - 2 * gap)}v{num(h - 2 * gap)}h{num(2 * gap - w)}z"
                paths[kind].append(f"M{num(at + gap)} {num(y + gap)}{size}")
                if w >= 12 and h >= 11:
                    parts.append(_number(expert // layer.slices, at + w / 2, y + h / 2, kind))
                texts.append(_told(expert, kind, was, layer))
        if row % every(16 / h) == 0:
            parts.append(tag("text", names[row], x=left - 6, y=y + h / 2 + 4, text_anchor="end"))
    shapes = [
        tag("path", class_=kind, d="".join(found), style=f"{_STYLE[kind]}") for kind, found in paths.items() if found
    ]
    places = [(rank, starts[rank] + i * w) for rank in range(ranks) for i in range(widest[rank])]
    columns = [f"rank {rank}" for rank, _ in places]
    hover = hover_cells([at for _, at in places], w, _HEAD, h, [f"layer {name}" for name in names], columns, texts)
    picture = svg([*shapes, *parts], _HEAD + h * len(layers) + 6, "Experts by layer and rank", hover)
    entries = [(text, role, form) for kind, (text, role, form) in _LEGEND.items() if paths[kind]]
    return legend(entries) + '<p class="unit">layer</p>' + picture


_STYLE = {
    "home": f"fill: {colour('heat2')}",
    "moved": f"fill: {colour('diverge7')}",
}
_LEGEND = {
    "home": ("where it was at the start", "heat2", "area"),
    "moved": ("moved here", "diverge7", "area"),
}


def _number(expert: int, x: float, y: float, kind: str) -> str:
    style = f"fill: {colour('ink' if kind != 'moved' else 'on-strong')}"
    return tag("text", str(expert), class_="cell", x=x, y=y + 3.2, text_anchor="middle", style=style)


def _told(expert: int, kind: str, was: dict[int, int], layer: LayerLayout) -> str:
    name = f"expert {expert // layer.slices}"
    if layer.slices > 1:
        name += f", slice {expert % layer.slices + 1} of {layer.slices}"
    return name + (f", from rank {was[expert]}" if kind == "moved" else "")
