"""The layouts of a whole model: one `ExpertLayout` for every MoE layer, or one that serves all of them.

Layers choose experts independently, so the best place of expert 3 in one layer says nothing about expert 3 in the next.
In a file:

    {"layers": {"model.layers.0.mlp.experts": {"homes": [[0, 2], [1, 3]]}, ...},
     "about": {"solver": "search", ...}}            what made it: free, for people and reports

or, for all layers alike, what `ExpertLayout.save` writes: `{"homes": ...}`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from carpool.layout.expert_layout import ExpertLayout
from carpool.plugins.nearest import nearest


class Layouts(Mapping[str, ExpertLayout]):
    """Immutable mapping of a layer's name to its layout. One layout for all answers to every name, and lists none.

    Args:
        layers: a layout for each layer by name, or one for all.
        about: what made them, JSON-able; takes no part in comparisons.
        source: the file they are from, for error messages.

    Raises:
        ValueError: no layers, or layers on different numbers of ranks.
    """

    def __init__(
        self,
        layers: Mapping[str, ExpertLayout] | ExpertLayout,
        about: Mapping[str, Any] | None = None,
        *,
        source: str | Path | None = None,
    ) -> None:
        self.same: ExpertLayout | None = layers if isinstance(layers, ExpertLayout) else None
        self._layers = {} if isinstance(layers, ExpertLayout) else dict(layers)
        self.about = dict(about or {})
        self.source = None if source is None else str(source)
        if self.same is None and not self._layers:
            raise ValueError(f"{self._prefix}layouts need at least one layer, or one layout for all")
        ranks = {name: layout.num_ranks for name, layout in self._layers.items()}
        if len(set(ranks.values())) > 1:
            first, *others = ranks
            other = next(name for name in others if ranks[name] != ranks[first])
            raise ValueError(
                f"{self._prefix}all layers must be laid out over the same ranks, but {first} has {ranks[first]} and "
                f"{other} has {ranks[other]}"
            )

    def __getitem__(self, layer: str) -> ExpertLayout:
        """The layout of a layer. Raises ValueError (with the file and the nearest name) if there is none."""
        if self.same is not None:
            return self.same
        if layer in self._layers:
            return self._layers[layer]
        near = nearest(layer, self._layers, cutoff=0)
        raise ValueError(
            f"{self._prefix}no layout for layer {layer!r}; there are {len(self._layers)} layers"
            + (f", the nearest name is {near!r}" if near else "")
        )

    def __contains__(self, layer: object) -> bool:
        return self.same is not None or layer in self._layers

    def get(self, layer: str, default: Any = None) -> Any:
        if layer not in self:
            return default
        return self[layer]

    def __iter__(self) -> Iterator[str]:
        return iter(self._layers)

    def __len__(self) -> int:
        return len(self._layers)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Layouts) and self.same == other.same and self._layers == other._layers

    def __hash__(self) -> int:
        return hash((self.same, frozenset(self._layers.items())))

    def __repr__(self) -> str:
        what = "one for all layers" if self.same is not None else f"{len(self)} layers"
        return f"Layouts({what}, {self.num_ranks} ranks)"

    @property
    def _prefix(self) -> str:
        return f"{self.source}: " if self.source else ""

    @property
    def num_ranks(self) -> int:
        return (self.same or next(iter(self._layers.values()))).num_ranks

    def with_layers(self, layers: Mapping[str, ExpertLayout]) -> Layouts:
        """The same with these layers in place of, or in addition to, those of the same names."""
        return Layouts({**self._layers, **layers}, self.about, source=self.source)

    # -- files ------------------------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        if self.same is not None:
            return {**self.same.to_dict(), **({"about": self.about} if self.about else {})}
        return {"layers": {name: layout.to_dict() for name, layout in self.items()}, "about": self.about}

    @classmethod
    def from_dict(cls, data: Any, source: str | Path | None = None) -> Layouts:
        """What `to_dict` gave. Raises ValueError naming the source and the layer that is wrong."""
        where = f"{source}: " if source else ""
        if not isinstance(data, Mapping) or not ("layers" in data or "homes" in data):
            raise ValueError(
                f'{where}not an expert layout: expected {{"layers": {{"model.layers.0.mlp.experts": {{"homes": '
                '[[0, 1], [2, 3]]}, ...}} or, for all layers, {"homes": [[0, 1], [2, 3]]}'
            )
        about = data.get("about", {})
        if not isinstance(about, Mapping):
            raise ValueError(f'{where}"about" must be an object, not {type(about).__name__}')
        if "homes" in data:
            if "layers" in data:
                raise ValueError(f'{where}has both "layers" and "homes"; give one of them')
            return cls(_layout(data, f"{source}" if source else "this"), about, source=source)
        if not isinstance(data["layers"], Mapping):
            raise ValueError(f'{where}"layers" must map names to layouts, not be a {type(data["layers"]).__name__}')
        layers = {name: _layout(one, f"{where}layer {name}") for name, one in data["layers"].items()}
        return cls(layers, about, source=source)

    def save(self, path: str | Path) -> None:
        """Write as JSON, which `moe.layout = "PATH"` accepts."""
        Path(path).write_text(json.dumps(self.to_dict()) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Layouts:
        """Read what `save`, or `ExpertLayout.save`, wrote. Raises ValueError naming file and layer."""
        try:
            data = json.loads(Path(path).read_text())
        except OSError as error:
            raise ValueError(f"cannot read the expert layout {path}: {error.strerror}") from error
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path} is not an expert layout: it is no JSON ({error})") from error
        return cls.from_dict(data, path)


def _layout(data: Any, where: str) -> ExpertLayout:
    try:
        return ExpertLayout.from_dict(data)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f'{where} is not an expert layout: expected {{"homes": [[0, 1], [2, 3]]}} ({error})'
        ) from error
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
