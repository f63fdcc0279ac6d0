"""Which experts tokens choose: the same choices for all contenders.

balanced   forced: every expert serves equally many tokens of each rank, and choices differ from token to token and
           from layer to layer. Published speeds are measured so. Weights are the router's own
learned    what the routers choose. Those of random weights are skewed as they come; nobody has balanced them
TRACE      forced: what a recording says (`carpool place` reads the same files). Its layers are taken in their
           order, again from the first where the model has more, and rank r takes the tokens of the sequences that
           the recording deals to it
"""

from __future__ import annotations

import torch
from torch import nn

from carpool.hf.routing.forced import balanced_choices, force_choices
from carpool.placement.trace import Trace


def check_routing(experts: dict[str, int], top_k: int, routing: str, world: int) -> None:
    """Raise ValueError if the routers of a model cannot be made to choose so; arguments as of `route`."""
    if routing == "learned":
        return
    if len(set(experts.values())) > 1:
        raise ValueError(f"--routing {routing}: this model's layers have different numbers of experts; use learned")
    if routing != "balanced":
        trace, num_experts = Trace.load(routing), next(iter(experts.values()))
        for rank in range(world):
            recorded_choices(trace, 0, 1, num_experts, top_k, rank, world)


def route(
    model: nn.Module, experts: dict[str, int], top_k: int, tokens: int, routing: str, rank: int, world: int
) -> None:
    """Force the choices of a model's routers, unless they are left to them.

    Args:
        experts: E by the name of the experts module.
        tokens: T, of one forward of this rank.
        routing: "balanced", "learned", or the file of a trace.
        rank, world: of all ranks; each has choices of its own.

    Raises:
        ValueError: as of `check_routing`, or a router that is not known.
    """
    check_routing(experts, top_k, routing, world)
    if routing == "learned":
        return
    trace = None if routing == "balanced" else Trace.load(routing)
    choices, num_experts = {}, next(iter(experts.values()))
    for number, name in enumerate(experts):
        if trace is None:
            seed = 1_000_003 * (number + 1) + rank
            choices[name] = balanced_choices(tokens, num_experts, top_k, seed)
        else:
            choices[name] = recorded_choices(trace, number, tokens, num_experts, top_k, rank, world)
    device = next(model.parameters()).device
    force_choices(model, {name: expert_TK.to(device) for name, expert_TK in choices.items()}, num_experts)


def recorded_choices(
    trace: Trace, number: int, tokens: int, num_experts: int, top_k: int, rank: int, world: int
) -> torch.Tensor:
    """expert_TK (T, K) int64 of a layer of the model on a rank; tokens are taken again from the first if there are not
    enough.

    Raises:
        ValueError: the trace is of other sizes, or has nothing for this rank."""
    layer = trace.layer(number % trace.num_layers)
    if (layer.num_experts, layer.top_k) != (num_experts, top_k):
        raise ValueError(
            f"the trace chooses {layer.top_k} of {layer.num_experts} experts, and the model {top_k} of {num_experts}; "
            "give a trace of such a model, or --routing balanced"
        )
    expert_TK = torch.from_numpy(layer.expert_TK[layer.source_T(world) == rank].astype("int64"))
    if not len(expert_TK):
        raise ValueError(f"the trace has fewer sequences than there are ranks ({world}); record more of them")
    return expert_TK[torch.arange(tokens) % len(expert_TK)]
