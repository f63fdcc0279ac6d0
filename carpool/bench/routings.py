"""Which experts tokens choose in a benchmark, drawn without a model: the same seed gives the same choices anywhere.

    uniform   K distinct experts, all equally likely: balanced up to chance
    zipf      expert number i of a random order is chosen in proportion to 1 / i ** exponent; K distinct ones
    skewed    rank 0 gets 3 times the mean number of choices, the last rank none, the others share the rest equally
    even      all experts have equally many choices, up to one: forced balance
    FILE.npz  what tokens of a trace chose, in the layer whose experts in order leave ranks most uneven
    hot       every token chooses expert 0, which so gets E / K times the mean; its other choices are uniform

Every token names K distinct experts, and its K weights are positive and sum to 1. Under `skewed` the number of a
token's choices on rank 0 is q = 3 K / W on average, and rounded so that all of a rank's tokens together make q T:

    W = 4, K = 2, so q = 1.5       token 0: 1 choice on rank 0, token 1: 2, token 2: 1, token 3: 2, ...
"""

from __future__ import annotations

import math

import torch

from carpool.bench.options import EXPERT_ROUTINGS, ROUTINGS
from carpool.layout import ExpertLayout
from carpool.routing import Routing

SKEW = 3


def make_routings(
    kind: str, tokens: int, top_k: int, layout: ExpertLayout, *, seed: int = 0, zipf_exponent: float = 1.0
) -> list[Routing]:
    """The routing of each rank's tokens, on the CPU.

    Args:
        kind: one of `ROUTINGS` or `EXPERT_ROUTINGS`, "even", or the path of a trace.
        tokens: T, tokens of each rank.
        layout: which experts there are, and on which ranks (what `skewed` looks at).
        seed: each rank draws from a generator of its own.
        zipf_exponent: 0 is uniform; larger is more unequal.

    Returns:
        W routings: expert_TK (T, K) int32, weight_TK (T, K) float32.

    Raises:
        ValueError: an unknown kind, K larger than E, or a skew that this layout cannot have.
    """
    if kind.endswith(".npz"):
        return _of_trace(kind, tokens, top_k, layout, seed)
    kinds = dict.fromkeys((*ROUTINGS, *EXPERT_ROUTINGS, "even"))
    if kind not in kinds:
        raise ValueError(f"routing {kind!r} is not known; use one of {', '.join(kinds)}")
    if not 1 <= top_k <= layout.num_experts:
        raise ValueError(f"top-k is {top_k}, but it must be 1..{layout.num_experts}, the number of experts")
    if kind == "skewed":
        check_skew(top_k, layout)
    popularity_E = torch.zeros(layout.num_experts)
    if kind == "zipf":
        order = torch.randperm(layout.num_experts, generator=torch.Generator().manual_seed(seed))
        popularity_E[order] = -zipf_exponent * torch.arange(1, layout.num_experts + 1).log()
    if kind == "hot":
        popularity_E[0] = torch.inf
    routings = []
    for rank in range(layout.num_ranks):
        generator = torch.Generator().manual_seed(1_000_003 * (seed + 1) + rank)
        # Gumbel noise: the K largest sums are K draws without replacement, in proportion to exp(popularity).
        uniform_TE = torch.rand(tokens, layout.num_experts, generator=generator).clamp(min=1e-20)
        score_TE = popularity_E - (-uniform_TE.log()).log()
        if kind == "even":
            # Neighbours in random circles of all experts, so that a token chooses an expert once.
            number, size = layout.num_experts, layout.num_experts // math.gcd(layout.num_experts, top_k)
            circle_CE = torch.rand(-(-tokens // size), number, generator=generator).argsort(1)
            place_TK = torch.arange(size * top_k).view(size, top_k) % number
            expert_TK = circle_CE[:, place_TK].flatten(0, 1)[:tokens]
        elif kind == "skewed":
            expert_TK = _skewed(score_TE, top_k, layout)
        else:
            expert_TK = score_TE.topk(top_k, dim=1).indices
        # Best first would put the popular ones, or those of one rank, into the same columns.
        shuffle_TK = torch.rand(tokens, top_k, generator=generator).argsort(1)
        weight_TK = torch.randn(tokens, top_k, generator=generator).softmax(1)
        routings.append(Routing(expert_TK.gather(1, shuffle_TK).int(), weight_TK))
    return routings


def _of_trace(path: str, tokens: int, top_k: int, layout: ExpertLayout, seed: int) -> list[Routing]:
    """Ranks have sequences of a trace in turn, as often as tokens need."""
    from carpool.placement.trace import Trace

    trace = Trace.load(path)
    if (trace.num_experts, trace.top_k) != (layout.num_experts, top_k):
        raise ValueError(
            f"{path} has {trace.top_k} of {trace.num_experts} experts per token, and the shape {top_k} of "
            f"{layout.num_experts}: give a --shape like it"
        )
    home_E = torch.tensor([rank for rank, _ in layout.home_of])
    layers = [trace.layer(number) for number in range(trace.num_layers)]
    loads = [torch.bincount(home_E, torch.from_numpy(layer.load_E).double()).max() for layer in layers]
    layer = layers[int(torch.stack(loads).argmax())]
    routings, source_T = [], torch.from_numpy(layer.source_T(layout.num_ranks))
    for rank in range(layout.num_ranks):
        own_TK = torch.from_numpy(layer.expert_TK.astype("int32"))[source_T == rank]
        if not len(own_TK):
            raise ValueError(f"{path} has {trace.num_sequences} sequences, fewer than {layout.num_ranks} ranks")
        generator = torch.Generator().manual_seed(1_000_003 * (seed + 1) + rank)
        weight_TK = torch.randn(tokens, top_k, generator=generator).softmax(1)
        routings.append(Routing(own_TK.repeat(-(-tokens // len(own_TK)), 1)[:tokens], weight_TK))
    return routings


def check_skew(top_k: int, layout: ExpertLayout) -> None:
    """Raises ValueError, saying why, if one rank of `layout` cannot get 3 times the mean and another nothing."""
    num_ranks = layout.num_ranks
    hot, others = _experts_by_heat(layout)
    most, least = -(-SKEW * top_k // num_ranks), SKEW * top_k // num_ranks
    if num_ranks <= SKEW:
        why = f"needs more than {SKEW} ranks, and there are {num_ranks}"
    elif most > len(hot):
        why = f"a token would choose {most} experts on rank 0, which has {len(hot)}"
    elif top_k - least > len(others):
        why = f"a token would choose {top_k - least} experts on ranks 1 to {num_ranks - 2}, which have {len(others)}"
    else:
        return
    raise ValueError(
        f"routing 'skewed' gives one rank {SKEW} times the mean and one rank nothing, but {why}; use other sizes, or "
        "--routing uniform or zipf"
    )


def _experts_by_heat(layout: ExpertLayout) -> tuple[list[int], list[int]]:
    """Experts of rank 0, and of all ranks but the first and the last."""
    return list(layout.homes[0]), [expert for rank in layout.homes[1:-1] for expert in rank]


def _skewed(score_TE: torch.Tensor, top_k: int, layout: ExpertLayout) -> torch.Tensor:
    """(T, K): the best of rank 0's experts, then the best of the others'."""
    hot, others = (torch.tensor(experts) for experts in _experts_by_heat(layout))
    token_T = torch.arange(score_TE.shape[0])
    share, num_ranks = SKEW * top_k, layout.num_ranks
    hot_T1 = ((token_T + 1) * share // num_ranks - token_T * share // num_ranks).unsqueeze(1)
    best_hot_TE = hot[score_TE[:, hot].argsort(1, descending=True)]
    best_other_TE = others[score_TE[:, others].argsort(1, descending=True)]
    column_K = torch.arange(top_k).expand(len(token_T), -1)
    from_hot_TK = best_hot_TE.gather(1, column_K.clamp(max=len(hot) - 1))
    from_other_TK = best_other_TE.gather(1, (column_K - hot_T1).clamp(0, len(others) - 1))
    return torch.where(column_K < hot_T1, from_hot_TK, from_other_TK)
