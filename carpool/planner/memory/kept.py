"""How many bytes a model keeps for its backward, item by item, under which policies.

    dense     of every decoder layer: what autograd keeps of attention, norms and residuals    keep, recompute, offload
    rows      of every MoE layer: the rows that arrived                                        keep, resend, offload
    hidden    of every MoE layer: the experts' pre-activations                                 keep, recompute, offload
    sums      of every MoE layer that is computed again: what its ride returned                keep, recompute

`carpool.activations` says what the policies do. What is offloaded is on the device for two layers at a time. With
dense = "recompute" a layer keeps its input, and one layer at a time keeps all. If sums = "recompute", too, its ride is
repeated, and one layer at a time keeps rows and pre-activations.

    policies = {"expert_inputs": "resend", "expert_activations": "offload"}
    kept_bytes(LayerSizes(48, 48, 2048, 768, 8, 32, 4, 128, 2, 3.6), 8192, policies)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from carpool.planner.configuration.candidate import POLICIES


@dataclass(frozen=True)
class LayerSizes:
    """What the bytes depend on, besides the number of tokens.

    Attributes:
        layers, moe_layers: decoder layers, and those of them with experts.
        hidden, expert_hidden, top_k: H, F, K. Experts are gated.
        heads, key_heads, head_size: of attention.
        element_size: bytes of an element of an activation.
        copies: rows that arrive at a rank's experts for each of its tokens.
    """

    layers: int
    moe_layers: int
    hidden: int
    expert_hidden: int
    top_k: int
    heads: int
    key_heads: int
    head_size: int
    element_size: int
    copies: float


def kept_bytes(sizes: LayerSizes, tokens: int, policies: Mapping[str, str] | None = None) -> dict[str, int]:
    """Bytes that one rank keeps for the backward of a micro-batch.

    Args:
        tokens: of a rank in a micro-batch.
        policies: by item; an item that is not in it is kept.

    Returns:
        one for each item of `POLICIES`: bytes on the device. host: bytes in pinned host memory."""
    policy = {item: (policies or {}).get(item, "save") for item in POLICIES}
    again = policy["layer_activations"] == "recompute"
    row = tokens * sizes.hidden * sizes.element_size
    # 8 tensors of T x H (norms, residuals), 4 of queries and outputs, 4 of keys and values.
    attention = 4 * (sizes.heads + sizes.key_heads) * sizes.head_size
    layer = {
        "layer_activations": tokens * (8 * sizes.hidden + attention) * sizes.element_size,
        "expert_inputs": sizes.copies * row,
        "expert_activations": tokens * sizes.top_k * 2 * sizes.expert_hidden * sizes.element_size,
    }
    count = {
        "layer_activations": sizes.layers,
        "expert_inputs": sizes.moe_layers,
        "expert_activations": sizes.moe_layers,
    }
    if again and policy["moe_outputs"] == "recompute":
        count |= {"expert_inputs": 1, "expert_activations": 1}
    found = {"layer_activations": 0.0, "expert_inputs": 0.0, "expert_activations": 0.0, "moe_outputs": 0.0, "host": 0.0}
    for item, size in layer.items():
        if policy[item] == "save":
            found[item] = count[item] * size
        elif policy[item] == "offload":
            found[item] = min(2, count[item]) * size
            found["host"] += count[item] * size
    if again:
        found["layer_activations"] = sizes.layers * row + layer["layer_activations"]
        if policy["expert_inputs"] == "resend":
            # What is sent again is not computed again.
            found["expert_inputs"] = count["expert_inputs"] * row
        if policy["moe_outputs"] == "save":
            found["moe_outputs"] = sizes.moe_layers * row
    return {item: int(size) for item, size in found.items()}
