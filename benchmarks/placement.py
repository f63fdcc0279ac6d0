"""Placement on real routing: solvers and load predictors on the traces of docs/traces. CPU only, minutes.

    python -m benchmarks.placement --out placement.json

    solvers       `carpool place`, each trace, 4 and 8 ranks: ranks per token and load on the half that nobody solved,
                  with the load limited to 1.1 of the mean, and on 4 ranks without a limit
    predictors    how far each foretells the loads of the next step, and what a placement made from that is worth
    time          256 experts, 20 000 tokens, 8 ranks, on the cores that there are

Numbers are means over layers, the load the largest of them.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.script import make_parser, write_results
from carpool.layout.topology import Topology
from carpool.placement.policies import PREDICTORS, checked_history, forecast
from carpool.placement.solvers import default_solvers, solve
from carpool.placement.solvers.plain import pack
from carpool.placement.table import place
from carpool.placement.trace import Array, LayerTrace

TRACES = Path(__file__).parents[1] / "docs" / "traces"


NO_LIMIT = 1e9


def compare(history_NE: Array, num_ranks: int, *, warmup: int = 8, every: int = 1) -> list[dict[str, float | str]]:
    """Each predictor on each step after `warmup`, given the steps before it.

    Returns:
        for each predictor, and for "oracle", which knows the next step: `error`, the sum of absolute errors by the
        sum of loads; `load_ratio`, max by mean of the rank loads in the next step if experts are placed by LPT from the
        prediction. Means over steps.
    """
    loads_NE = checked_history(history_NE)
    if not 1 <= warmup < len(loads_NE):
        raise ValueError(f"a history of {len(loads_NE)} steps leaves nothing to predict after {warmup}")
    num_experts = loads_NE.shape[1]
    capacity_W = np.full(num_ranks, -(-num_experts // num_ranks))
    records: list[dict[str, float | str]] = []
    for name in (*PREDICTORS, "oracle"):
        rows = []
        for step in range(warmup, len(loads_NE), every):
            real_E = loads_NE[step]
            guess_E = real_E if name == "oracle" else forecast(name, loads_NE[:step])
            load_W = np.bincount(pack(guess_E, capacity_W), weights=real_E, minlength=num_ranks)
            share_E = guess_E / max(guess_E.sum(), 1e-12) * real_E.sum()
            error = np.abs(share_E - real_E).sum() / max(real_E.sum(), 1e-12)
            rows.append((error, load_W.max() / max(load_W.mean(), 1e-12)))
        error, ratio = np.mean(rows, axis=0)
        records.append({"name": name, "error": float(error), "load_ratio": float(ratio)})
    return records


def solvers(path: Path, ranks: int, load_limit: float) -> list[dict[str, Any]]:
    """Each solver, means over layers."""
    names: tuple[str, ...] = ("occult", "search", "hypergraph+search") if load_limit == NO_LIMIT else default_solvers()
    result = place(path, ranks=ranks, solvers=names, load_limit=load_limit)
    rows = []
    for row in result.means():
        if row.unavailable is None:
            about = {
                "trace": path.stem,
                "ranks": ranks,
                "limit": load_limit,
                "solver": row.solver,
            }
            numbers = {
                "ranks_per_token": row.ranks_per_token,
                "remote": row.remote,
                "load": row.load,
                "solved_load": row.solved_load,
            }
            rows.append({**about, **numbers, "layer_us": row.layer_us, "seconds": row.seconds})
    return rows


def loads_of(path: Path) -> np.ndarray[Any, Any]:
    """(S, L, E) choices of each expert in the last steps of a run: from its folder, or a file NAME-loads.npz."""
    if path.is_dir():
        lines = map(json.loads, (path / "metrics.jsonl").read_text().splitlines())
        return np.array([line["load"] for line in lines if line["kind"] == "layers"], dtype=np.float64)
    with np.load(path) as data:
        loads_SLE, step_S = data["load_SLE"].astype(np.float64), data["step_S"]
    gaps = np.flatnonzero(np.diff(step_S) > 1)
    return loads_SLE[gaps[-1] + 1 if len(gaps) else 0 :]


def predictors(path: Path, ranks: int = 4) -> list[dict[str, Any]]:
    """On the last steps of a run, mean over layers; every 8th step, from the 64 before it."""
    late_SLE = loads_of(path)[-256:]
    layers = [compare(late_SLE[:, layer], ranks, warmup=64, every=8) for layer in range(late_SLE.shape[1])]
    rows = []
    for same in zip(*layers, strict=True):
        numbers = {key: float(np.mean([one[key] for one in same])) for key in ("error", "load_ratio")}
        rows.append({"loads": path.stem, "predictor": same[0]["name"], **numbers})
    return rows


def timing(seed: int = 0) -> dict[str, Any]:
    """Random choices with topics: the search's work depends on sizes more than on what they are of."""
    generator = np.random.default_rng(seed)
    experts, tokens, top_k = 256, 20_000, 8
    topic_T = generator.integers(0, 32, tokens)
    score_TE = generator.random((tokens, experts)) + 2.0 * (np.arange(experts)[None] % 32 == topic_T[:, None])
    chosen_TK = np.argsort(-score_TE, axis=1)[:, :top_k].astype(np.int16)
    trace = LayerTrace(chosen_TK, np.arange(tokens) // 256, experts)
    seconds = {}
    for name in ("occult", "search"):
        begin = time.perf_counter()
        solve(name, trace, Topology.even(8))
        seconds[name] = time.perf_counter() - begin
    return seconds


def show(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        print("  ".join(f"{v:.3f}" if isinstance(v, float) else f"{v!s:>18}" for v in row.values()), flush=True)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--traces", type=Path, default=TRACES)
    parser.add_argument("--names", nargs="+", default=None, help="files of the folder, without .npz; default: all")
    parser.add_argument("--runs", type=Path, nargs="*", default=[], help="whose loads are foretold, too")
    args = parser.parse_args()
    files = [path for path in sorted(args.traces.glob("*.npz")) if not args.names or path.stem in args.names]
    found: dict[str, Any] = {"solvers": [], "predictors": []}
    for path in [*files, *args.runs]:
        if path.is_dir() or path.stem.endswith("-loads"):
            found["predictors"] += (rows := predictors(path))
            show(rows)
            continue
        for ranks, limit in ((4, 1.1), (8, 1.1), (4, NO_LIMIT)):
            found["solvers"] += (rows := solvers(path, ranks, limit))
            show(rows)
    found["seconds, 256 experts, 20000 tokens, 8 ranks"] = timing()
    print(found["seconds, 256 experts, 20000 tokens, 8 ranks"])
    write_results(args, torch.device("cpu"), **found)


if __name__ == "__main__":
    main()
