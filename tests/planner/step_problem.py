"""Models by name; and a step that can be counted by hand: attention, dispatch, experts, combine, one reduction."""

from __future__ import annotations

from carpool.planner.model.shape import ModelShape
from carpool.planner.simulator.sampling import Spread
from carpool.planner.simulator.simulate import Step
from carpool.planner.step.events import Graph, Group
from carpool.train.config.published import read_keys

ATTENTION, RIDE, EXPERTS, REDUCTION = 2e-3, 1e-3, 3e-3, 5e-3


def shape(name: str, layers: int | None = None) -> ModelShape:
    """A published model; of its first layers, if a number is given."""
    return ModelShape.read(read_keys(name if layers is None else {"from": name, "num_hidden_layers": layers}))


def build(
    gpus: int, layers: int = 3, ep: int = 4, stages: int = 1, ranks_per_node: int = 8, num_experts: int = 8
) -> Step:
    """Raises ValueError where groups of 4 ranks do not divide the GPUs."""
    if gpus % (ep * stages):
        raise ValueError(f"{gpus} GPUs cannot be divided by {ep * stages}: take a multiple of it")
    ranks = gpus // stages
    graph = Graph()
    last: tuple[int, ...] = ()
    for phase in ("forward", "backward"):
        for layer in range(layers) if phase == "forward" else reversed(range(layers)):
            stage = layer * stages // layers
            for kind, seconds, group in (
                ("attention", ATTENTION, None),
                ("dispatch", RIDE, Group(ep)),
                ("experts", EXPERTS, None),
                ("combine", RIDE, Group(ep)),
            ):
                name = f"layers.{layer}::{phase}::{kind}"
                fixed = 0.1 * seconds if group else 0.0
                last = (
                    graph.add(
                        name, kind, seconds, last, low=0.9 * seconds, high=1.2 * seconds, fixed=fixed, layer=layer,
                        phase=phase, stage=stage, group=group,
                    ),
                )  # fmt: skip
    for stage in range(stages):
        graph.add("step::update::reduce", "reduction", REDUCTION, last, phase="update", stage=stage, group=Group(ranks))
    return Step(gpus, graph, Spread(ranks, Group(ep), num_experts, 2, 1024, ranks_per_node), 1024 * gpus, f"ep {ep}")


def balanced(layers: int = 3) -> float:
    """Seconds of a step whose ranks are alike."""
    return 2 * layers * (ATTENTION + 2 * RIDE + EXPERTS) + REDUCTION
