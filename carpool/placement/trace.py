"""A trace: the experts that each token chose, per layer. Placement is solved and evaluated on traces.

A trace is one compressed `.npz` file:

    expert_LTK  uint8 (uint16 from 257 experts on)   L layers, T sampled tokens, K choices, best first
    weight_LTK  float16, may be missing              routing weights
    sequence_T  int32                                the sequence of each token; a sequence's tokens are consecutive
    token_T     int32, may be missing                token ids
    layers      names of the L layers
    meta        JSON: num_experts, and the origin of the trace (model, data, steps, seed, ...)

    32 768 tokens of 8 layers, top-8 of 64 experts, are 2 MB before compression, weights not counted.

Sequences are distributed to ranks in turn, as by a data loader (`source_T`); a held-out half is every second sequence
(`split`), which has other data of the same steps.
"""

from __future__ import annotations

import json
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class LayerTrace:
    """The choices of one layer.

    Attributes:
        expert_TK: (T, K) int16 or wider, best first.
        sequence_T: (T,) the sequence of each token.
        num_experts: E.
        weight_TK: (T, K) float32 routing weights, or None.
    """

    expert_TK: Array
    sequence_T: Array
    num_experts: int
    name: str = "layer"
    weight_TK: Array | None = None

    @property
    def num_tokens(self) -> int:
        return int(self.expert_TK.shape[0])

    @property
    def top_k(self) -> int:
        return int(self.expert_TK.shape[1])

    def source_T(self, num_ranks: int) -> Array:
        """(T,) the rank that holds each token: sequences in turn, counted from the first of the trace."""
        return source_ranks(self.sequence_T, num_ranks)

    @cached_property
    def load_E(self) -> Array:
        """(E,) int64: tokens that chose each expert."""
        return np.bincount(self.expert_TK.ravel(), minlength=self.num_experts).astype(np.int64)

    @cached_property
    def coactivation_EE(self) -> Array:
        """(E, E) int64: tokens that chose both experts. The diagonal is the load."""
        chosen_TE = np.zeros((self.num_tokens, self.num_experts), dtype=np.float32)
        chosen_TE[np.arange(self.num_tokens)[:, None], self.expert_TK] = 1
        return np.rint(chosen_TE.T @ chosen_TE).astype(np.int64)  # exact below 2**24 tokens

    def subset(self, keep_T: Array) -> LayerTrace:
        """These tokens alone (a mask or indices)."""
        weight_TK = None if self.weight_TK is None else self.weight_TK[keep_T]
        return LayerTrace(self.expert_TK[keep_T], self.sequence_T[keep_T], self.num_experts, self.name, weight_TK)

    def specialisation(self) -> dict[str, float]:
        """Statistics of how far the routing is from uniform: see `specialisation`."""
        return specialisation(self.expert_TK, self.sequence_T, self.load_E)


@dataclass(frozen=True)
class Trace:
    """The choices of all recorded layers. The constructor validates them.

    Attributes: see the module's docstring; `meta` is a dictionary here.

    Raises:
        ValueError: inconsistent shapes, ids out of range, an expert twice for one token, non-consecutive sequences.
    """

    expert_LTK: Array
    sequence_T: Array
    layers: tuple[str, ...]
    meta: Mapping[str, Any] = field(default_factory=dict)
    weight_LTK: Array | None = None
    token_T: Array | None = None

    def __post_init__(self) -> None:
        expert_LTK, sequence_T = np.asarray(self.expert_LTK), np.asarray(self.sequence_T)
        if expert_LTK.ndim != 3 or not np.issubdtype(expert_LTK.dtype, np.integer):
            raise ValueError(f"expert_LTK must be (L, T, K) integers, not {expert_LTK.shape} {expert_LTK.dtype}")
        if not np.issubdtype(sequence_T.dtype, np.integer):
            raise ValueError(f"sequence_T must be integers, not {sequence_T.dtype}")
        num_layers, num_tokens, top_k = expert_LTK.shape
        if not num_layers * num_tokens * top_k:
            raise ValueError(f"a trace needs layers, tokens and choices; expert_LTK has the shape {expert_LTK.shape}")
        experts = self.meta.get("num_experts")
        if not isinstance(experts, int) or experts < 1:
            raise ValueError(f"meta must tell num_experts, a positive integer; it is {experts!r}")
        low, high = int(expert_LTK.min()), int(expert_LTK.max())
        if low < 0 or high >= experts:
            raise ValueError(f"expert_LTK holds ids from {low} to {high}, but experts are 0..{experts - 1}")
        ordered_LTK = np.sort(expert_LTK, axis=2)
        if (ordered_LTK[..., 1:] == ordered_LTK[..., :-1]).any():
            layer, token, _ = np.argwhere(ordered_LTK[..., 1:] == ordered_LTK[..., :-1])[0]
            raise ValueError(f"token {token} of layer {layer} names an expert twice: {expert_LTK[layer, token]}")
        if len(self.layers) != num_layers or len(set(self.layers)) != num_layers:
            raise ValueError(f"{num_layers} layers need as many different names, not {list(self.layers)}")
        for name, of, shape in (
            ("sequence_T", sequence_T, (num_tokens,)),
            ("token_T", self.token_T, (num_tokens,)),
            ("weight_LTK", self.weight_LTK, expert_LTK.shape),
        ):
            if of is not None and np.shape(of) != shape:
                raise ValueError(f"{name} has the shape {np.shape(of)}, but expert_LTK asks for {shape}")
        starts = 1 + np.count_nonzero(np.diff(sequence_T))
        if len(np.unique(sequence_T)) != starts:
            raise ValueError("tokens of a sequence must be consecutive in a trace; sequence_T comes back to one")
        dtype = np.uint8 if experts <= 256 else np.uint16
        object.__setattr__(self, "expert_LTK", expert_LTK.astype(dtype, copy=False))
        object.__setattr__(self, "sequence_T", sequence_T.astype(np.int32, copy=False))
        object.__setattr__(self, "layers", tuple(map(str, self.layers)))
        if self.weight_LTK is not None:
            object.__setattr__(self, "weight_LTK", np.asarray(self.weight_LTK).astype(np.float16, copy=False))
        if self.token_T is not None:
            object.__setattr__(self, "token_T", np.asarray(self.token_T).astype(np.int32, copy=False))

    # -- access -----------------------------------------------------------------------------------------------

    @property
    def num_layers(self) -> int:
        return int(self.expert_LTK.shape[0])

    @property
    def num_tokens(self) -> int:
        return int(self.expert_LTK.shape[1])

    @property
    def top_k(self) -> int:
        return int(self.expert_LTK.shape[2])

    @property
    def num_experts(self) -> int:
        return int(self.meta["num_experts"])

    @property
    def num_sequences(self) -> int:
        return int(1 + np.count_nonzero(np.diff(self.sequence_T)))

    def source_T(self, num_ranks: int) -> Array:
        """(T,) the rank that holds each token: sequence i (counted from the first of this trace) is on i % W."""
        return source_ranks(self.sequence_T, num_ranks)

    def layer(self, which: int | str) -> LayerTrace:
        """One layer, by number or by name. Raises ValueError for an unknown one."""
        if isinstance(which, str):
            if which not in self.layers:
                raise ValueError(f"the trace has no layer {which!r}; it has {', '.join(self.layers)}")
            which = self.layers.index(which)
        elif not 0 <= which < self.num_layers:
            raise ValueError(f"the trace has no layer {which}; it has 0..{self.num_layers - 1}")
        weight_TK = None if self.weight_LTK is None else self.weight_LTK[which].astype(np.float32)
        return LayerTrace(
            self.expert_LTK[which].astype(np.int16 if self.num_experts <= 32767 else np.int32),
            self.sequence_T,
            self.num_experts,
            self.layers[which],
            weight_TK,
        )

    def split(self, parts: int = 2) -> tuple[Trace, ...]:
        """`parts` traces with whole sequences, distributed in turn. Raises ValueError if there are too few
        sequences."""
        if not 1 <= parts <= self.num_sequences:
            raise ValueError(f"{self.num_sequences} sequences cannot be split into {parts} parts")
        number_T = _numbers(self.sequence_T) % parts
        return tuple(self.subset(number_T == part) for part in range(parts))

    def subset(self, keep_T: Array) -> Trace:
        """These tokens alone (a mask or ascending indices), of all layers."""
        return Trace(
            self.expert_LTK[:, keep_T],
            self.sequence_T[keep_T],
            self.layers,
            self.meta,
            None if self.weight_LTK is None else self.weight_LTK[:, keep_T],
            None if self.token_T is None else self.token_T[keep_T],
        )

    # -- files ------------------------------------------------------------------------------------------------

    def save(self, path: str | Path) -> None:
        """Write the `.npz` file of the module's docstring."""
        arrays: dict[str, Array] = {
            "expert_LTK": self.expert_LTK,
            "sequence_T": self.sequence_T,
            "layers": np.array(self.layers),
            "meta": np.array(json.dumps(dict(self.meta))),
        }
        if self.weight_LTK is not None:
            arrays["weight_LTK"] = self.weight_LTK
        if self.token_T is not None:
            arrays["token_T"] = self.token_T
        with Path(path).open("wb") as file:
            np.savez_compressed(file, **arrays)  # type: ignore[arg-type]

    @classmethod
    def load(cls, path: str | Path) -> Trace:
        """Read a file written by `save`. Raises ValueError with the file's name if it is not a trace."""
        try:
            with Path(path).open("rb") as file:
                # NumPy reads other files as an array or a pickle, and its error advises to allow pickles.
                if not zipfile.is_zipfile(file):
                    raise ValueError("it is no .npz file, as `carpool trace` writes it")
                file.seek(0)
                data = np.load(file, allow_pickle=False)
                if missing := {"expert_LTK", "sequence_T", "layers", "meta"} - set(data.files):
                    raise ValueError(f"it lacks {', '.join(sorted(missing))}")
                return cls(
                    data["expert_LTK"],
                    data["sequence_T"],
                    tuple(str(name) for name in np.atleast_1d(data["layers"])),
                    _meta(str(data["meta"])),
                    data["weight_LTK"] if "weight_LTK" in data.files else None,
                    data["token_T"] if "token_T" in data.files else None,
                )
        except OSError as error:
            raise ValueError(f"cannot read the trace {path}: {error.strerror or error}") from error
        except (ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
            raise ValueError(f"{path} is not a routing trace: {error}") from error


def source_ranks(sequence_T: Array, num_ranks: int) -> Array:
    """(T,) int64: the rank that holds each token, with sequences distributed in turn."""
    if num_ranks < 1:
        raise ValueError(f"tokens need at least one rank, not {num_ranks}")
    return _numbers(sequence_T) % num_ranks


def concatenate(parts: Sequence[Trace]) -> Trace:
    """Concatenate traces of the same layers, and renumber their sequences."""
    first = parts[0]
    if any(part.layers != first.layers or part.num_experts != first.num_experts for part in parts):
        raise ValueError("traces of different layers or numbers of experts cannot be joined")
    number_T, offset = [], 0
    for part in parts:
        number_T.append(_numbers(part.sequence_T) + offset)
        offset += part.num_sequences
    weights = [part.weight_LTK for part in parts if part.weight_LTK is not None]
    tokens = [part.token_T for part in parts if part.token_T is not None]
    return Trace(
        np.concatenate([part.expert_LTK for part in parts], axis=1),
        np.concatenate(number_T),
        first.layers,
        first.meta,
        np.concatenate(weights, axis=1) if len(weights) == len(parts) else None,
        np.concatenate(tokens) if len(tokens) == len(parts) else None,
    )


def _numbers(sequence_T: Array) -> Array:
    """Sequences renumbered 0, 1, 2, ... in order."""
    return np.concatenate([[0], np.cumsum(np.diff(sequence_T) != 0)]).astype(np.int64)[: len(sequence_T)]


def _meta(text: str) -> dict[str, Any]:
    try:
        meta = json.loads(text)
    except ValueError as error:
        raise ValueError(f"its meta is no JSON: {error}") from error
    if not isinstance(meta, dict):
        raise ValueError(f"its meta must be an object, not a {type(meta).__name__}")
    return meta


def specialisation(expert_TK: Array, sequence_T: Array, load_E: Array) -> dict[str, float]:
    """How far a routing is from uniform, which is all that placement can exploit.

    Args:
        expert_TK, sequence_T: as of `LayerTrace`.
        load_E: (E,) tokens that chose each expert.

    Returns:
        load_entropy: entropy of the load by expert, as a share of log E: 1.0 when balanced.
        load_gini: Gini coefficient of the load: 0.0 when balanced.
        load_max_mean: largest load by mean load.
        choice_information: mutual information of a token's first and second choice over the second choice's entropy,
            less that of shuffled choices, which corrects for the finite sample. 0.0 for random routing, 1.0 if one
            choice determines the other.
        neighbour_information: the same for the first choices of a token and of the next token of its sequence.
    """
    num_experts, top_k = len(load_E), expert_TK.shape[1]
    sorted_E = np.sort(load_E).astype(np.float64)
    share_E = sorted_E / max(1.0, sorted_E.sum())
    rank_E = np.arange(1, num_experts + 1)
    gini = (2 * (rank_E * share_E).sum() - (num_experts + 1) * share_E.sum()) / num_experts
    measures = {
        "load_entropy": float(_entropy(share_E) / np.log(num_experts)) if num_experts > 1 else 1.0,
        "load_gini": float(gini),
        "load_max_mean": float(sorted_E[-1] / max(sorted_E.mean(), 1e-9)),
    }
    first_T = expert_TK[:, 0]
    if top_k > 1:
        measures["choice_information"] = _information(first_T, expert_TK[:, 1], num_experts)
    same_T = sequence_T[1:] == sequence_T[:-1]
    measures["neighbour_information"] = _information(first_T[:-1][same_T], first_T[1:][same_T], num_experts)
    return measures


def _entropy(share: Array) -> float:
    positive = share[share > 0]
    return float(-(positive * np.log(positive)).sum())


def _information(a_T: Array, b_T: Array, num_experts: int) -> float:
    """Mutual information of two choices over the entropy of the second, less that of shuffled ones; 0 if constant."""
    if len(a_T) == 0:
        return 0.0
    entropy = _entropy(np.bincount(b_T, minlength=num_experts) / len(b_T))
    shuffled_T = np.random.default_rng(0).permutation(b_T)
    excess = _mutual(a_T, b_T, num_experts) - _mutual(a_T, shuffled_T, num_experts)
    return float(excess / entropy) if entropy > 1e-12 else 0.0


def _mutual(a_T: Array, b_T: Array, num_experts: int) -> float:
    both = np.bincount(a_T.astype(np.int64) * num_experts + b_T, minlength=num_experts**2) / len(a_T)
    both_EE = both.reshape(num_experts, num_experts)
    return _entropy(both_EE.sum(0)) + _entropy(both_EE.sum(1)) - _entropy(both)
