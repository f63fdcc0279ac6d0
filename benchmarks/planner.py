"""Is the step that the planner predicts the step that a run takes? Predictions beside points that were measured.

    python -m benchmarks.planner points.json --hardware hardware.json        --hardware H200 for the shipped profile

`points.json` is what `python -m benchmarks.points` writes: configurations of `carpool train`, their milliseconds a step
and their peak of memory. Nothing here looks at the times before it predicts. Printed are each point, the median and the
worst error of steps and of memory, and how often two points whose times differ by more than 5 % are in the right order.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from rich.console import Console

from benchmarks.script import make_parser
from carpool.bench.result_files import print_table
from carpool.parallel.degrees import Degrees
from carpool.placement.trace import Trace
from carpool.planner.candidate import KEEP, Candidate
from carpool.planner.machine.hardware import Hardware, find_hardware
from carpool.planner.model.routes import Routes
from carpool.planner.model.shape import ModelShape
from carpool.planner.step.peak import memory_of
from carpool.planner.step.prediction import Prediction, predict
from carpool.train.config.load import translated
from carpool.train.config.published import read_keys

ROOT = Path(__file__).resolve().parents[1]  # which paths of traces in points are relative to
DIFFERENT = 0.05
# Of a peak.
UNSURE = 0.01


class Compared(NamedTuple):
    """A point. Seconds; bytes of PyTorch's tensors, measured None where they are not known."""

    name: str
    measured: float
    prediction: Prediction
    measured_bytes: float | None
    predicted_bytes: float

    @property
    def error(self) -> float:
        """(predicted - measured) / measured."""
        return self.prediction.seconds.middle / self.measured - 1

    @property
    def memory_error(self) -> float | None:
        return None if self.measured_bytes is None else self.predicted_bytes / self.measured_bytes - 1

    @property
    def inside(self) -> bool:
        """Whether the interval contains what was measured."""
        return self.prediction.seconds.low <= self.measured <= self.prediction.seconds.high


def candidate_of(point: Mapping[str, Any]) -> tuple[ModelShape, Candidate, Routes]:
    """What a measured point was."""
    config = translated(point["config"])
    training, memory = config.get("training", {}), config.get("memory", {})
    keys = config["model"]["config"]
    keys = read_keys(keys) if isinstance(keys, str) else {**keys}
    if config["model"].get("model_type"):
        keys["model_type"] = config["model"]["model_type"]
    sizes = {name.removesuffix("_size"): size for name, size in point["degrees"].items()}
    degrees = Degrees(**{name: sizes[name] for name in ("dp_replicate", "fsdp", "tp", "ep", "cp", "pp", "etp")})
    candidate = Candidate(
        degrees,
        config["data"]["sequence_length"],
        training["per_device_train_batch_size"],
        training.get("gradient_accumulation_steps", 1),
        transport=point["transport"],
        schedule=point["schedule"].split("=")[0],
        data_parallel="fsdp" if point["dense"] == "fsdp" else "zero1",
        policies={**KEEP, **{item: memory[item] for item in KEEP if item in memory}},
        moments=training.get("optimizer_state_dtype", "float32"),
        optimizer="torch" if training.get("optimizer") == "torch" else "one-pass",
        optimizer_offload=training.get("optimizer_offload", "none"),
        optimizer_in_backward=training.get("optimizer_in_backward", False),
        max_grad_norm=training.get("max_grad_norm", 1.0),
        compiled=training.get("torch_compile", False) in (True, "on"),
        eager="asked for" if training.get("cuda_graphs", "auto") == "off" else None,
        experts=config.get("moe", {}).get("experts", "grouped"),
        chunks=config.get("moe", {}).get("chunks", 1),
        pipeline=config.get("parallelism", {}).get("pp_schedule", "1F1B"),
    )
    shape, routes = ModelShape.read(keys, config["model"].get("attn_implementation")), Routes()
    if point["routing"] != "balanced":
        trace = Trace.load(ROOT / point["routing"])
        routes = Routes.of(trace, point["routing"], shape.num_experts, shape.top_k)
    return shape, candidate, routes


def compare(points: Sequence[Mapping[str, Any]], hardware: Hardware, per_node: int) -> list[Compared]:
    """Predict every point."""
    found = []
    for point in points:
        shape, candidate, routes = candidate_of(point)
        prediction = predict(shape, hardware, candidate, per_node, routes)
        memory = memory_of(shape, candidate, routes)
        found.append(Compared(point["point"], point["milliseconds"] / 1e3, prediction, _peak(point), memory.tensors))
    return found


def _peak(point: Mapping[str, Any]) -> float | None:
    """The measured peak of a point; None if it is not known within `UNSURE`.

    Earlier points leave memory behind, which may be given back during a later one. Points without `left_bytes` do not
    say how much, and they counted arenas twice."""
    peak, left = point["peak_bytes"], point.get("left_bytes")
    return None if not peak or left is None or left > UNSURE * peak else float(peak)


def order_agreement(compared: Sequence[Compared]) -> tuple[int, int]:
    """(pairs in the right order, pairs) of those of one model whose measured times differ by more than `DIFFERENT`."""
    right = pairs = 0
    for one, other in combinations(compared, 2):
        if _model(one.name) != _model(other.name):
            continue
        slow, fast = sorted((one, other), key=lambda each: -each.measured)
        if slow.measured > (1 + DIFFERENT) * fast.measured:
            pairs += 1
            right += slow.prediction.seconds.middle > fast.prediction.seconds.middle
    return right, pairs


def _model(name: str) -> str:
    return name.partition("/")[2].split(",")[0]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = make_parser(__doc__)
    parser.add_argument("points", nargs="+", type=Path)
    parser.add_argument("--hardware", default="H200", help="a GPU's name, or a file of 'carpool doctor --measure'")
    parser.add_argument("--gpus-per-node", type=int, default=8)
    asked = parser.parse_args(arguments)
    points = [point for path in asked.points for point in json.loads(path.read_text())["points"]]
    show(compare(points, find_hardware(asked.hardware), asked.gpus_per_node), Console(width=150))


def show(compared: Sequence[Compared], console: Console) -> None:
    rows = []
    for one in compared:
        seconds = one.prediction.seconds
        rows.append([
            one.name, f"{1e3 * one.measured:,.1f}", f"{1e3 * seconds.middle:,.1f}",
            f"{1e3 * seconds.low:,.0f} to {1e3 * seconds.high:,.0f}", f"{100 * one.error:+.1f} %",
            "" if one.inside else "outside",
            "–" if one.measured_bytes is None else f"{one.measured_bytes / 2**30:.1f}",
            f"{one.predicted_bytes / 2**30:.1f}",
            "–" if one.memory_error is None else f"{100 * one.memory_error:+.1f} %",
        ])  # fmt: skip
    columns = ["point", "measured, ms", "predicted", "interval", "error", "", "peak, GiB", "predicted", "error"]
    print_table(console, "a step", columns, rows)
    errors = [abs(one.error) for one in compared]
    of_memory = [abs(error) for one in compared if (error := one.memory_error) is not None]
    right, pairs = order_agreement(compared)
    console.print(
        f"steps: median error {100 * median(errors):.1f} %, worst {100 * max(errors):.1f} %; "
        f"{sum(one.inside for one in compared)} of {len(compared)} inside their interval; "
        f"{right} of {pairs} pairs of one model in the right order",
        highlight=False,
    )
    if of_memory:
        console.print(
            f"memory: median error {100 * median(of_memory):.1f} %, worst {100 * max(of_memory):.1f} %", highlight=False
        )


if __name__ == "__main__":
    main()
