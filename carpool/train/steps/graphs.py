"""Whether the steps of a run are CUDA graphs (`carpool.hf.step_graphs`), why not, and what is recorded of it."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from carpool.hf.decoder_layers import draws_random_numbers
from carpool.hf.seam.expert_rides import ExpertRides
from carpool.hf.step_graphs import why_model_waits
from carpool.planner.candidate import FSDP, RANDOM, RANDOM_HALVES, Candidate, by_settings
from carpool.planner.decisions.chosen import Chosen, Decisions, Kind
from carpool.train.config.schema import Config

GRAPHS_KIND: Kind[bool | None] = Kind("cuda_graphs", lambda used: {"used": used}, lambda record: bool(record["used"]))


def note_graphs(decisions: Decisions, used: bool | None, why_not: str | None) -> None:
    """Note whether steps are CUDA graphs. `used`: None until the first one has been captured; `why_not`: None if they
    can be."""
    why = why_not or ("captured" if used else "as soon as a step is captured")
    decisions.add(GRAPHS_KIND, Chosen(used, {}, "default", why))


def why_no_graphs(config: Config, candidate: Candidate, model: nn.Module, layers: Sequence[ExpertRides]) -> str | None:
    """Why the steps of a run are not captured; None: they can be. `candidate`: the run in the planner's words, with
    the schedule that it has."""
    gpu = next(model.parameters()).device.type == "cuda"
    if reason := by_settings(config.model_dump(), gpu):
        return reason
    if reason := why_model_waits(model, layers):
        return candidate.why_fsdp or reason if reason == FSDP else reason
    again, halves = candidate.policies["layer_activations"] == "recompute", candidate.schedule == "two-batch"
    if (again or halves) and draws_random_numbers(model):
        return RANDOM if again else RANDOM_HALVES
    return candidate.why_eager_by_plan


def describe_graphs(why_not: str | None) -> str:
    """A line for people. `why_not`: why steps are not captured; None: they are."""
    return f"CUDA graphs: {'forward and backward' if why_not is None else f'none, because {why_not}'}"


def check_graphs(why_not: str | None) -> None:
    """Raise ValueError if steps that are to be captured cannot be."""
    if why_not is not None:
        raise ValueError(f"training.cuda_graphs = 'on', but steps cannot be captured: {why_not}; use 'auto'")
