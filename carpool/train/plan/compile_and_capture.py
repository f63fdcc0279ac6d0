"""Whether a run compiles its decoder layers (`training.torch_compile = "auto"`), whether its steps are CUDA graphs
(`carpool.hf.step_graphs`), and what is recorded of both.

on a GPU -> nothing that is set excludes it -> tensor-parallel ranks do not divide tokens -> the run is long enough

A run that goes on takes what it has recorded, whatever its length is now: compiled layers round less often, and a
resumed run has the bits of one that was never stopped.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import nn

from carpool.hf.decoder_layers import draws_random_numbers
from carpool.hf.documents import takes_lengths, why_not_packed
from carpool.hf.seam.expert_rides import ExpertRides
from carpool.hf.step_graphs import why_model_waits
from carpool.parallel.degrees import Degrees
from carpool.planner.candidate import FSDP, RANDOM, Candidate, by_settings
from carpool.planner.decisions.chosen import Chosen, Decisions, Kind
from carpool.planner.decisions.configured import candidate_of
from carpool.planner.decisions.rules import compiled_by_rule
from carpool.planner.model.shape import ModelShape
from carpool.train.blueprint import Blueprint, planned_attention
from carpool.train.config.schema import Config
from carpool.train.data.corpus import check_sources
from carpool.train.launch.machine import Machine
from carpool.train.plan.division import divides_tokens

GRAPHS_KIND: Kind[bool | None] = Kind("cuda_graphs", lambda used: {"used": used}, lambda record: bool(record["used"]))
COMPILE_KIND: Kind[bool] = Kind("torch_compile", lambda on: {"on": on}, lambda record: bool(record["on"]))
# Of text, for the number of steps of an epoch, before data are read.
BYTES_PER_TOKEN = 4


def with_compile(config: Config, on: bool) -> Config:
    """The configuration of a run whose layers are compiled, or are not."""
    return config.changed("training", torch_compile="on" if on else "off")


def choose_compile(
    config: Config, degrees: Degrees, blueprint: Blueprint, machine: Machine, decisions: Decisions
) -> Chosen[bool]:
    """Whether layers are compiled. All ranks together."""
    asked = config.training.torch_compile
    shape = {
        "device": machine.hardware.name,
        "model": blueprint.architecture,
        "ranks": machine.ranks,
        "tokens": math.prod(config.micro_batch_shape),
    }

    def decide(kept: Chosen[bool] | None, note: str) -> tuple[Chosen[bool], bool]:
        if kept is not None and (asked == "auto" or kept.answer == (asked == "on")):
            return kept, False
        if asked != "auto":
            return Chosen(asked == "on", shape, "given", "asked for"), False
        on, why = _by_rule(config, degrees, blueprint, machine)
        return Chosen(on, shape, "default", why + note), False

    return decisions.choose(COMPILE_KIND, shape, decide)


def _by_rule(config: Config, degrees: Degrees, blueprint: Blueprint, machine: Machine) -> tuple[bool, str]:
    settings = config.model_dump()
    sizes = {f"parallelism.{axis}_size": size for axis, size in degrees.sizes.items()}
    if reason := config.declared.why_refused({**config.flat(), **sizes, "training.torch_compile": "on"}):
        return False, reason
    if reason := why_not_packed(blueprint.model):
        # Whatever goes through tokens one after the other is unrolled: 4,096 tokens would not come to an end.
        return False, f"{reason}, and compilation unrolls what goes from token to token"
    if divides_tokens(with_compile(config, False), degrees, blueprint.model).answer:
        return False, "tensor-parallel ranks divide tokens, which compiled layers do not"
    per_node, settings["training"]["max_steps"] = machine.topology.node_size(0), _steps(config, degrees)
    try:
        attention = planned_attention(config, degrees, blueprint.model, machine.cuda)
        shape = ModelShape.read(blueprint.model.config.to_dict(), attention)
        settings["training"]["torch_compile"] = "off"
        candidate, _ = candidate_of(settings, degrees, shape, machine.hardware, per_node)
        return compiled_by_rule(settings, shape, machine.hardware, candidate, per_node)
    except ValueError as error:
        return False, f"a step cannot be predicted: {error}"


def _steps(config: Config, degrees: Degrees) -> int:
    """Of the whole run: as asked for, or about as many as the files of `data.train` will give."""
    training = config.training
    if training.num_train_epochs is None:
        return training.steps
    sources = check_sources(config.data)
    tokens = sum(size for source in sources for _, size, _ in source.signature()) / BYTES_PER_TOKEN
    a_step = config.rank_tokens * degrees.dp
    return max(1, math.ceil(training.num_train_epochs * tokens / a_step))


def note_graphs(decisions: Decisions, used: bool | None, why_not: str | None) -> None:
    """Note whether steps are CUDA graphs. `used`: None until the first one has been captured; `why_not`: None if they
    can be."""
    why = why_not or ("captured" if used else "as soon as a step is captured")
    decisions.add(GRAPHS_KIND, Chosen(used, {}, "default", why))


def why_no_graphs(config: Config, candidate: Candidate, model: nn.Module, layers: Sequence[ExpertRides]) -> str | None:
    """Why the steps of a run are not captured; None: they can be. `candidate`: the run in the planner's words, with
    the schedule that it has."""
    gpu = next(model.parameters()).device.type == "cuda"
    degrees = candidate.degrees
    if reason := by_settings(config.model_dump(), gpu, degrees.world_size // degrees.tp):
        return reason
    if reason := why_model_waits(model, layers, takes_lengths(model) and candidate.degrees.cp == 1):
        return candidate.why_fsdp or reason if reason == FSDP else reason
    if candidate.recomputes_stages and draws_random_numbers(model):
        return RANDOM
    return candidate.why_eager_by_plan


def describe_graphs(why_not: str | None) -> str:
    """A line for people. `why_not`: why steps are not captured; None: they are."""
    return f"CUDA graphs: {'forward and backward' if why_not is None else f'none, because {why_not}'}"


def check_graphs(why_not: str | None) -> None:
    """Raise ValueError if steps that are to be captured cannot be."""
    if why_not is not None:
        raise ValueError(f"training.cuda_graphs = 'on', but steps cannot be captured: {why_not}; use 'auto'")
