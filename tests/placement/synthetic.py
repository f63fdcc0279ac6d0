"""Routing traces with topics, for tests: loads by Zipf's law, topics by sequence, a few topics in each."""

from __future__ import annotations

import numpy as np

from carpool.placement.trace import LayerTrace, Trace


def topics(
    experts: int = 64,
    top_k: int = 8,
    tokens: int = 20_000,
    layers: int = 1,
    seed: int = 0,
    length: int = 32,
    strength: float = 3.0,
    zipf: float = 0.4,
    balanced: bool = False,
) -> Trace:
    """Tokens choose the top K of: popularity of the expert (Zipf) + affinity of the token's topic + noise.

    A sequence mixes two topics, and a token belongs to one of them, so neighbours are alike. `strength` of 0 is a
    routing without topics, `zipf` of 0 one with equal popularity. `balanced`: each expert is in exactly two topics."""
    draw = np.random.default_rng(seed)
    num_topics = max(4, experts // 6)
    sequence_T = np.arange(tokens) // length
    pair_S2 = draw.integers(0, num_topics, (sequence_T[-1] + 1, 2))
    topic_T = pair_S2[sequence_T, draw.integers(0, 2, tokens)]
    chosen = []
    for _ in range(layers):
        popularity_E = -zipf * np.log(1 + draw.permutation(experts))
        member_PE = draw.random((num_topics, experts)) < 1.5 * top_k / experts
        if balanced:
            member_PE = np.zeros((num_topics, experts), dtype=bool)
            for half in np.array_split(np.arange(num_topics), 2):
                for topic, members in zip(half, np.array_split(draw.permutation(experts), len(half)), strict=True):
                    member_PE[topic, members] = True
        affinity_PE = strength * member_PE
        score_TE = popularity_E + affinity_PE[topic_T] + draw.gumbel(size=(tokens, experts)).astype(np.float32)
        chosen.append(np.argsort(-score_TE, axis=1)[:, :top_k])
    names = tuple(f"model.layers.{i}.mlp.experts" for i in range(layers))
    return Trace(np.stack(chosen), sequence_T, names, {"num_experts": experts, "seed": seed})


def layer(*args: object, **options: object) -> LayerTrace:
    """The first layer of `topics`."""
    return topics(*args, **options).layer(0)  # type: ignore[arg-type]
