"""A number that a plug-in package measures once a step, recorded and drawn with the run's own.

    class RouterNorm(Metric):
        name, help, unit = "router_norm", "Norm of all routers' weights.", "norm"

        def measure(self, model):
            return max(p.norm() for name, p in model.named_parameters() if name.endswith("gate.weight"))

    carpool.metrics.metric.register(RouterNorm)

A registered metric is in each "train" record as `metrics.router_norm`, in trackers as `metrics/router_norm`, and has a
chart in the report. Values stay on the device until the step's other numbers are read, so that nothing waits for them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from carpool.metrics.host import ToHost
from carpool.plugins import Registry

__all__ = ["METRICS", "LaterMetrics", "Metric", "register", "start_metrics"]


class Metric:
    """One number of each step.

    Attributes:
        name: an identifier; help: one sentence; unit: for the axis of its chart.
        over_ranks: how the ranks' values become one.
    """

    name: ClassVar[str]
    help: ClassVar[str]
    unit: ClassVar[str] = ""
    over_ranks: ClassVar[Literal["mean", "sum", "max"]] = "mean"

    def measure(self, model: nn.Module) -> torch.Tensor | float | None:
        """The value on this rank, a number or a tensor of one element; None where the rank has none, such as a stage
        of a pipeline without the layer. A sharded parameter is a DTensor, and so may the value be. Called on all ranks
        between the backward and the optimizer's update."""
        raise NotImplementedError


def _check(name: str, cls: type[Metric]) -> None:
    if cls.measure is Metric.measure:
        raise ValueError(f"metric {name!r} ({cls.__name__}) has no `measure`")
    if not name.isidentifier() or not getattr(cls, "help", ""):
        raise ValueError(f"metric {name!r} ({cls.__name__}) needs name, an identifier, and help, one sentence")
    if cls.over_ranks not in ("mean", "sum", "max"):
        raise ValueError(f"metric {name!r}: over_ranks = {cls.over_ranks!r}: expected mean, sum or max")


METRICS: Registry[type[Metric]] = Registry("metric", "carpool.metrics", {}, _check, Metric)
register = METRICS.register


class LaterMetrics:
    """Values of one step on their way to the host."""

    def __init__(self, metrics: Sequence[Metric], values: ToHost) -> None:
        self._metrics, self._values = metrics, values

    def read(self) -> dict[str, float]:
        """Each metric's value over all ranks, without those that no rank has. Waits until they are there."""
        found = {}
        for metric, total, ranks, largest in zip(self._metrics, *self._values.read().tolist(), strict=True):
            if ranks:
                found[metric.name] = {"mean": total / ranks, "sum": total, "max": largest}[metric.over_ranks]
        return found


@torch.no_grad()
def start_metrics(metrics: Sequence[Metric], model: nn.Module, device: torch.device) -> LaterMetrics:
    """Measure all on this rank and reduce them over ranks, without waiting for the device. Collective."""
    own = [metric.measure(model) for metric in metrics]
    sums_2M = torch.zeros(2, len(own), dtype=torch.float64, device=device)
    largest_M = torch.full((len(own),), -math.inf, dtype=torch.float64, device=device)
    for column, value in enumerate(own):
        if isinstance(value, DTensor):
            value = value.full_tensor()
        if value is not None:
            sums_2M[0, column], sums_2M[1, column], largest_M[column] = value, 1, value
    if dist.is_initialized():
        dist.all_reduce(sums_2M)
        dist.all_reduce(largest_M, op=dist.ReduceOp.MAX)
    return LaterMetrics(metrics, ToHost(torch.cat([sums_2M, largest_M[None]])))
