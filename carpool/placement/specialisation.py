"""How specialised a routing is. Placement can only exploit what is not uniform.

    load_entropy            entropy of the load by expert, as a share of log E: 1.0 when balanced
    load_gini               Gini coefficient of the load: 0.0 when balanced
    load_max_mean           largest load by mean load
    choice_information      what a token's first choice tells about its second: their mutual information by the second
                            choice's entropy, less what the same choices tell when shuffled
    neighbour_information   the same for the first choices of a token and of the next token of its sequence

Informations are 0.0 for random routing and 1.0 if the one choice determines the other. What shuffled choices tell is
taken off because a sample is never quite independent.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


def specialisation(expert_TK: Array, sequence_T: Array, load_E: Array) -> dict[str, float]:
    """The measures of the module's docstring.

    Args:
        expert_TK: (T, K) choices, best first.
        sequence_T: (T,) which sequence each token is of.
        load_E: (E,) tokens that chose each expert.
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
    """Mutual information of two choices by the entropy of the second, less that of shuffled ones; 0 if constant."""
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
