"""Draws the rooms of Carpool from its imports, and refuses a circle or an arrow up.

    python -m tools.draw_rooms             # checks, and writes docs/rooms.svg
    python -m tools.draw_rooms --check     # checks alone

A room is a folder of `carpool/`, or a file at its root. The rooms stand in layers (`ORDER`), and a file may import from
its own room, from a layer below, and from a room of the same layer as long as that makes no circle. Neither do folders
inside a room import each other in a circle.

What counts: every import statement of every file, wherever it stands, also inside functions, because it runs one day.
What does not: `if TYPE_CHECKING:` blocks, which never run. Imports against the order
would be listed in `EXCEPTIONS`, one file and one room at a time; there are none. An exception that no import needs is
refused, too.
"""

from __future__ import annotations

import ast
import functools
import sys
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "carpool"
PICTURE = PACKAGE.parent / "docs" / "rooms.svg"

# From the top down; the rooms of one line may import each other, but not in a circle.
ORDER: tuple[tuple[str, ...], ...] = (
    ("cli",),
    ("bench", "serve", "recipes", "conformance"),
    ("train",),
    ("report", "profile", "hf"),
    ("moe", "layer"),
    ("ride",),
    ("placement", "planner", "parallel", "optim", "replicas"),
    ("routing", "transport", "experts", "memory", "activations"),
    ("metrics",),
    ("layout",),
    ("families", "kernels", "plugins"),
)
LEVEL = {room: number for number, line in enumerate(ORDER) for room in line}

# Of the package itself: names that are imported when they are asked for, and `python -m carpool`.
NO_ROOMS = {"__init__", "__main__", "__pycache__"}

# (file, room): imports against the order.
EXCEPTIONS: frozenset[tuple[str, str]] = frozenset()


def room_of(module: str) -> str:
    """`carpool.ride.function` is of the room `ride`, `carpool` alone of none."""
    return [*module.split("."), ""][1]


def imports(source: str, path: str = "<source>", package: str = "carpool", names: bool = False) -> Iterator[str]:
    """The modules of a package that a file imports when it runs.

    Args:
        names: say also which names are taken from them: `carpool.a.b` for `from carpool.a import b`."""
    for node in _statements(source, path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == package)
        elif node.level == 0 and node.module:
            if node.module == package or (names and node.module.startswith(f"{package}.")):
                yield from (f"{node.module}.{alias.name}" for alias in node.names)
            elif node.module.startswith(f"{package}."):
                yield node.module


@functools.cache
def _statements(source: str, path: str) -> list[ast.Import | ast.ImportFrom]:
    """The import statements that run."""
    nodes = list(ast.walk(ast.parse(source, path)))
    never: set[ast.AST] = set()
    for node in nodes:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            never.update(inner for statement in node.body for inner in ast.walk(statement))
    return [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom) and node not in never]


def arrows(package: Path = PACKAGE) -> dict[tuple[str, str], list[str]]:
    """(room, room that it imports) -> the files that do."""
    rooms = {path.stem if path.is_file() else path.name for path in package.iterdir()} - NO_ROOMS
    found: dict[tuple[str, str], list[str]] = defaultdict(list)
    for path in sorted(package.rglob("*.py")):
        file = path.relative_to(package).as_posix()
        room = room_of("carpool." + file.removesuffix(".py").replace("/", "."))
        if room in NO_ROOMS:
            continue
        for module in imports(path.read_text(), file):
            other = room_of(module)
            if other in rooms and other != room and file not in found[room, other]:
                found[room, other].append(file)
    return {pair: files for pair, files in found.items() if files}


def file_circles(package: Path = PACKAGE) -> list[str]:
    """Circles of files, one sentence each. `from carpool.a import b` leads to a/b.py if there is one, else to a's file;
    what the packages around a file import does not count."""
    return [f"a circle: {' -> '.join(circle)}" for circle in circles(_file_graph(package))]


def folder_circles(package: Path = PACKAGE) -> list[str]:
    """Circles of the folders inside a room, one sentence each. Files that lie in the room itself do not count: they are
    what several of its folders share, or what holds them together."""
    graph: dict[str, set[str]] = defaultdict(set)
    for file, others in _file_graph(package).items():
        own = file.split("/")[:-1][:2]
        for other in others:
            theirs = other.split("/")[:-1][:2]
            if len(own) == len(theirs) == 2 and own[0] == theirs[0] and own != theirs:
                graph["/".join(own)].add("/".join(theirs))
    return [f"a circle of folders: {' -> '.join(circle)}" for circle in circles(graph)]


def _file_graph(package: Path) -> dict[str, set[str]]:
    """file -> the files that it imports."""
    graph: dict[str, set[str]] = {}
    for path in sorted(package.rglob("*.py")):
        file = path.relative_to(package).as_posix()
        found = {_file_of(module, package) for module in imports(path.read_text(), file, names=True)}
        graph[file] = {other for other in found if other is not None and other != file}
    return graph


def _file_of(module: str, package: Path) -> str | None:
    """The file of `carpool.a.b`: a/b.py, a/b/__init__.py, or, if b is a name in it, a's."""
    parts = module.split(".")[1:]
    for length in (len(parts), len(parts) - 1):
        place = package.joinpath(*parts[:length])
        for found in (place.with_suffix(".py"), place / "__init__.py"):
            if length and found.is_file():
                return found.relative_to(package).as_posix()
    return None


def strangers(package: Path = PACKAGE) -> list[str]:
    """Imports of transformers by `carpool.moe` or a room below it, and of `carpool_systems` by any file: one sentence
    each."""
    wrong: list[str] = []
    for path in sorted(package.rglob("*.py")):
        file = path.relative_to(package).as_posix()
        wrong += [f"{file} imports {name}" for name in imports(path.read_text(), file, "carpool_systems")]
        if LEVEL.get(room_of("carpool." + file.removesuffix(".py").replace("/", ".")), -1) >= LEVEL["moe"]:
            wrong += [f"{file} imports {name}" for name in imports(path.read_text(), file, "transformers")]
    return wrong


def problems(
    found: Mapping[tuple[str, str], list[str]], exceptions: frozenset[tuple[str, str]] = EXCEPTIONS
) -> list[str]:
    """What is wrong with the arrows, one sentence each. Empty: nothing."""
    wrong = [
        f"the room {room!r} has no place in ORDER" for room in sorted({r for p in found for r in p} - LEVEL.keys())
    ]
    used: set[tuple[str, str]] = set()
    kept: dict[str, set[str]] = defaultdict(set)
    for (room, other), files in sorted(found.items()):
        used |= {(file, other) for file in files} & exceptions
        files = [file for file in files if (file, other) not in exceptions]
        if not files:
            continue
        kept[room].add(other)
        if LEVEL.get(other, 0) < LEVEL.get(room, 0):
            wrong.append(f"{room} imports {other}, which is above it: {', '.join(files)}")
    wrong += [f"a circle: {' -> '.join(circle)}" for circle in circles(kept)]
    wrong += [f"the exception {pair} is not needed any more: delete it" for pair in sorted(exceptions - used)]
    return wrong


def circles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """One circle for each pair of rooms that reach each other, as a path that ends where it began."""
    found: list[list[str]] = []
    seen: set[frozenset[str]] = set()
    for start in sorted(graph):
        paths = [[start]]
        visited = {start}
        while paths:
            path = paths.pop(0)
            for other in sorted(graph.get(path[-1], ())):
                if other == start and frozenset(path) not in seen:
                    seen.add(frozenset(path))
                    found.append([*path, start])
                elif other not in visited:
                    visited.add(other)
                    paths.append([*path, other])
    return found


def direct(pairs: Collection[tuple[str, str]]) -> set[tuple[str, str]]:
    """The arrows that do not follow from others: a -> c is left out where there are a -> b and b -> ... -> c."""
    below: dict[str, set[str]] = defaultdict(set)
    for room, other in pairs:
        below[room].add(other)

    def reaches(start: str, goal: str, without: str) -> bool:
        seen, waiting = {without}, [start]
        while waiting:
            room = waiting.pop()
            if room == goal:
                return True
            if room not in seen:
                seen.add(room)
                waiting += below[room]
        return False

    return {(a, c) for a, c in pairs if not any(reaches(b, c, a) for b in below[a] - {c})}


def draw(found: Mapping[tuple[str, str], list[str]], exceptions: frozenset[tuple[str, str]] = EXCEPTIONS) -> str:
    """An SVG with one box per room and a line of boxes per layer. Arrows that follow from others are left out;
    exceptions are dashed."""
    found = {pair: files for pair, files in found.items() if LEVEL.keys() >= set(pair)}
    lines = [line for line in ([r for r in line if any(r in pair for pair in found)] for line in ORDER) if line]
    width, height, box_w, box_h = 820, 84 * len(lines) + 20, 104, 38
    middle: dict[str, tuple[float, float]] = {}
    for row, line in enumerate(lines):
        for column, room in enumerate(line):
            middle[room] = (width * (column + 0.5 + 0.12 * (row % 2)) / (len(line) + 0.12), 84 * row + 42)
    svg = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="system-ui, sans-serif" '
        'font-size="14" role="img" aria-label="The rooms of Carpool and what they import">',
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerUnits="userSpaceOnUse" '
        'markerWidth="10" markerHeight="10" orient="auto">'
        '<path d="M0 0 8 4 0 8z" fill="#8a94a6"/></marker></defs>',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
    ]
    odd = {pair for pair, files in found.items() if all((file, pair[1]) in exceptions for file in files)}
    for room, other in sorted(direct(found.keys() - odd) | odd):
        (x1, y1), (x2, y2) = middle[room], middle[other]
        side = y1 == y2
        half = box_h / 2 if y1 < y2 else -box_h / 2
        y1, y2 = (y1, y2) if side else (y1 + half, y2 - half)
        if side:
            x1, x2 = (x1 + box_w / 2, x2 - box_w / 2) if x1 < x2 else (x1 - box_w / 2, x2 + box_w / 2)
        bend = (y1 + y2) / 2
        curve = f"Q{(x1 + x2) / 2:.0f} {y1 - 40:.0f}" if side else f"C{x1:.0f} {bend:.0f} {x2:.0f} {bend:.0f}"
        dashed = ' stroke-dasharray="4 4"' if (room, other) in odd else ""
        svg.append(
            f'<path d="M{x1:.0f} {y1:.0f} {curve} {x2:.0f} {y2:.0f}" fill="none" stroke="#8a94a6" stroke-width="1.4"'
            f'{dashed} marker-end="url(#tip)"><title>{room} imports {other}</title></path>'
        )
    for room, (x, y) in middle.items():
        svg.append(
            f'<rect x="{x - box_w / 2:.0f}" y="{y - box_h / 2:.0f}" width="{box_w}" height="{box_h}" rx="7" '
            f'fill="#e8eefc" stroke="#3457b2"/><text x="{x:.0f}" y="{y + 5:.0f}" text-anchor="middle" '
            f'fill="#14213d">{room}</text>'
        )
    return "\n".join([*svg, "</svg>", ""])


def main() -> int:
    found = arrows()
    wrong = problems(found) + file_circles() + folder_circles() + strangers()
    for sentence in wrong:
        print(sentence, file=sys.stderr)
    if "--check" not in sys.argv:
        PICTURE.write_text(draw(found))
        print(f"wrote {PICTURE.name}: {len({room for pair in found for room in pair})} rooms, {len(found)} arrows")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
