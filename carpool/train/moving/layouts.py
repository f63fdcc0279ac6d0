"""Layouts of a run whose experts move: where experts start, and room for replicas that come and go."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from carpool.hf.seam.expert_rides import ExpertRides
from carpool.hf.seam.moved_experts import check_layouts
from carpool.layout import ExpertLayout
from carpool.layout.layouts import Layouts
from carpool.parallel.degrees import Degrees
from carpool.placement.trace import Array
from carpool.train.config.schema import Config


def check_layout_file(
    config: Config, model_type: str, experts: Mapping[str, int], degrees: Degrees
) -> list[ExpertLayout]:
    """The layouts of a run's layers if `moe.layout` is a file; else none. Needs neither weights nor data.

    Raises ValueError unless the file is of this model on these ranks, and, for placement.policy = "place", `carpool
    place` made it with placement.solver.

    Args:
        model_type: transformers' name of the model's kind.
        experts: number of experts of each MoE layer, by name.
    """
    file, ranks = config.moe.layout, degrees.expert_ranks
    if file == "contiguous":
        return []
    layouts = Layouts.load(file)
    if unknown := sorted(set(layouts) - experts.keys()):
        raise ValueError(
            f"{file}: there is a layout for {unknown[0]!r}, but this model's layers are {', '.join(experts)}"
        )
    for name, count in experts.items():
        if (here := (layouts[name].num_experts, layouts[name].num_ranks)) != (count, ranks):
            raise ValueError(
                f"{file}: layer {name}: the layout is for {here[0]} experts on {here[1]} ranks, but the model has "
                f"{count} experts there, on {ranks} ranks"
            )
        if layouts[name].slices != degrees.etp:
            raise ValueError(
                f"{file}: layer {name}: the layout cuts each expert into {layouts[name].slices} slices, but "
                f"parallelism.etp_size = {degrees.etp}"
            )
    found = [layouts[name] for name in experts]
    if config.placement.policy != "place":
        return found
    solver, about = config.placement.solver, layouts.about
    again = f"write it again with `carpool place TRACE --ranks {ranks} --solvers {solver}`"
    other = f"or leave placement.policy out: moe.layout={file} alone puts experts where the file says"
    solved_by = about.get("solver")
    if not isinstance(solved_by, Mapping):
        raise ValueError(f"{file}: placement.policy = 'place', but the file does not say which solver made it; {again}")
    for name in experts:
        if (by := solved_by.get(name)) != solver:
            raise ValueError(
                f"{file}: placement.solver = {solver!r}, but layer {name} was placed by {by!r}; {again}, {other}"
            )
    traced = (about.get("trace_meta") or {}).get("model_type", model_type)
    if traced != model_type:
        raise ValueError(
            f"{file} was made from a trace of the model type {traced!r}, but this model's is {model_type!r}; {again}"
        )
    return found


def first_layouts(config: Config, layers: dict[str, ExpertRides], saved: dict[str, Any]) -> tuple[Layouts, str]:
    """Where experts start, and what says so: `moe.layout`, or, of a run that has moved them, its checkpoint.

    A checkpoint's layouts are left aside if they are for other ranks, or if `moe.layout` is no longer what it was.

    Raises:
        ValueError: a file that is no layout, or not one for this model."""
    wanted = config.moe.layout
    placed = saved.get("placement") or {}
    if placed.get("layouts") and placed.get("moe_layout") == wanted:
        layouts = Layouts.from_dict(placed["layouts"], "the checkpoint's layouts")
        try:
            return check_layouts(layers, layouts), "checkpoint"
        except ValueError:
            pass  # it was written on other ranks
    if wanted != "contiguous":
        return check_layouts(layers, Layouts.load(wanted)), wanted
    return Layouts({name: one.layout for name, one in layers.items()}), wanted


def padded(layout: ExpertLayout, room: int) -> ExpertLayout:
    """With empty slots for as many replicas as there is room for, if it has any: how many they are changes often, and
    transports need not."""
    if not layout.num_replicas:
        return ExpertLayout(layout.homes, slices=layout.slices)
    pairs = zip(layout.homes, layout.slots, strict=True)
    slots = tuple((*s, *[-1] * (len(h) + room - len(s))) for h, s in pairs)
    return ExpertLayout(layout.homes, slots, layout.slices)


def load_ratio(load_E: Array, layout: ExpertLayout) -> float:
    """The fullest rank by the mean, copies sharing an expert's load."""
    each_E = np.array([load_E[e // layout.slices] / len(slots) for e, slots in enumerate(layout.slots_of)])
    load_W = np.array([sum(each_E[e] for e in rank if e != -1) for rank in layout.slots])
    return float(load_W.max() / max(1e-9, load_W.mean()))
