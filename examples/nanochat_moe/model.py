"""A small language model in the manner of nanochat, whose MLPs may be `carpool.MoE`.

From nanochat (github.com/karpathy/nanochat, nanochat/gpt.py of July 2026) it has: depth d and width 64 d, heads of 128,
rotary positions, normalised queries and keys, MLPs of four times the width with relu^2, no biases, norms without
weights, value embeddings in every second layer, learned shares of the residual stream and of the embedding at each
layer, an output layer of its own, and logits capped at 15. It leaves out: attention in windows (PyTorch's attention has
none), the smear of the previous token's embedding, the subtraction of the middle layer, and FP8.

The two variants differ in one line of `Block`:

    dense    up 4 W, relu^2, down                      every token
    MoE      carpool.MoE: E routed experts, K of them for each token, and S shared ones, each of 4 W / (K + S)

So both multiply a token with equally many parameters. The router is DeepSeek-V3's, as in nanochat's own trial
(dev/LOG.md, 2026-02-19): sigmoid scores, and a bias for each expert that is moved towards balance after each step.
Weights of a token's experts sum to K, because a dense MLP is the sum of its slices with weight 1 each.

Shapes: B sequences, S tokens of each, W width, N heads, D head size, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

import carpool

SOFTCAP = 15.0
GATE_CHANNELS = 12  # of the input, from which the gate of a value embedding is computed


@dataclass(frozen=True, kw_only=True)
class Config:
    """Sizes of the model.

    Attributes:
        depth: the number of layers; the width is 64 times that, rounded up to whole heads.
        experts: E, the number of routed experts in each layer; 0: the dense model.
        top_k, shared: K and S.
    """

    depth: int = 18
    vocabulary: int = 32768
    sequence: int = 2048
    head_size: int = 128
    experts: int = 0
    top_k: int = 8
    shared: int = 1

    @property
    def width(self) -> int:
        return -(-64 * self.depth // self.head_size) * self.head_size

    @property
    def expert_size(self) -> int:
        """4 W / (K + S), rounded to a multiple of 128 (nanochat's rule)."""
        return max(1, round(4 * self.width / (self.top_k + self.shared) / 128)) * 128


def norm(x: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, (x.shape[-1],))


def rotate(x_BSND: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary positions: element i and i + D / 2 of a head turn together."""
    first, second = x_BSND.chunk(2, dim=-1)
    return torch.cat([first * cos + second * sin, second * cos - first * sin], dim=-1)


class Attention(nn.Module):
    """Causal attention, with a value embedding in every second layer and in the last one."""

    def __init__(self, config: Config, layer: int) -> None:
        super().__init__()
        width, self.head_size = config.width, config.head_size
        heads = width // self.head_size
        self.query, self.key, self.value, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.value_embedding = self.value_gate = None
        if layer % 2 == (config.depth - 1) % 2:
            self.value_embedding = nn.Embedding(config.vocabulary, width)
            self.value_gate = nn.Linear(GATE_CHANNELS, heads, bias=False)

    def forward(
        self, x_BSW: torch.Tensor, tokens_BS: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> torch.Tensor:
        heads = (*tokens_BS.shape, -1, self.head_size)
        q, k, v = (project(x_BSW).view(heads) for project in (self.query, self.key, self.value))
        if self.value_embedding is not None and self.value_gate is not None:
            gate_BSN = 3 * torch.sigmoid(self.value_gate(x_BSW[..., :GATE_CHANNELS]))
            v = v + gate_BSN.unsqueeze(-1) * self.value_embedding(tokens_BS).view(heads)
        q, k = (norm(rotate(one, cos, sin)) * 1.2 for one in (q, k))
        y = F.scaled_dot_product_attention(*(one.transpose(1, 2) for one in (q, k, v)), is_causal=True)
        return self.out(y.transpose(1, 2).reshape(x_BSW.shape))


class MLP(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.relu(self.up(x)).square())


def make_moe(config: Config) -> carpool.MoE:
    """The drop-in for `MLP`."""
    return carpool.MoE(
        config.width,
        config.expert_size,
        config.experts,
        config.top_k,
        activation="relu2",
        gated=False,
        shared_intermediate_size=config.shared * config.expert_size,
        router={"score": "sigmoid", "scaling_factor": float(config.top_k), "bias_update_rate": 0.01},
    )


class Block(nn.Module):
    def __init__(self, config: Config, layer: int) -> None:
        super().__init__()
        depth = layer / max(1, config.depth - 1)
        self.residual = nn.Parameter(torch.tensor(1.15 - 0.10 * depth))
        self.embedding_share = nn.Parameter(torch.tensor(0.20 - 0.15 * depth))
        self.attention = Attention(config, layer)
        self.mlp = make_moe(config) if config.experts else MLP(config.width)

    def forward(
        self, x_BSW: torch.Tensor, embedding_BSW: torch.Tensor, tokens_BS: torch.Tensor, cos: torch.Tensor,
        sin: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        x = self.residual * x_BSW + self.embedding_share * embedding_BSW
        x = x + self.attention(norm(x), tokens_BS, cos, sin)
        return x + self.mlp(norm(x))


class Model(nn.Module):
    """Tokens and the tokens that follow them to the loss of each token.

    Scalars are float32; all other parameters have the dtype of `to`."""

    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.depth))
        self.output = nn.Linear(config.width, config.vocabulary, bias=False)
        rate = 100_000 ** -torch.arange(0, 1, 2 / config.head_size)
        angle = torch.outer(torch.arange(config.sequence, dtype=torch.float32), rate).unsqueeze(1)
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)
        self.draw_weights()

    @torch.no_grad()
    def draw_weights(self) -> None:
        """nanochat's start: what writes to the residual stream is zero; routers have Carpool's."""
        bound = math.sqrt(3 / self.config.width)  # of a uniform distribution with deviation 1 / sqrt(W)
        for name, weight in self.named_parameters():
            if name.endswith(("out.weight", "down.weight", "down_proj")):
                weight.zero_()
            elif name.endswith(("up.weight", "up_proj")):
                weight.uniform_(-0.4 * bound, 0.4 * bound)
            elif name.endswith("value_gate.weight"):
                weight.uniform_(0.0, 0.02)
            elif name in ("embedding.weight", "output.weight"):
                weight.normal_(std=0.8 if name == "embedding.weight" else 0.001)
            elif weight.dim() == 2 and not name.endswith("router.weight"):
                weight.uniform_(-bound, bound)

    def narrow(self, dtype: torch.dtype) -> Model:
        """Convert all but scalars."""
        scalars = [p for p in self.parameters() if p.dim() == 0]
        kept = [p.data for p in scalars]
        self.to(dtype)
        for parameter, data in zip(scalars, kept, strict=True):
            parameter.data = data
        return self

    def forward(self, tokens_BS: torch.Tensor, target_BS: torch.Tensor) -> torch.Tensor:
        """(B, S) twice -> (B * S,) float32 losses in nats."""
        embedding_BSW = norm(self.embedding(tokens_BS))
        x_BSW = embedding_BSW.clone()  # two tensors, as in all other layers, so that these share their compiled graphs
        for block in self.blocks:
            x_BSW = block(x_BSW, embedding_BSW, tokens_BS, self.cos, self.sin)
        return self.losses(x_BSW, target_BS)

    def losses(self, x_BSW: torch.Tensor, target_BS: torch.Tensor) -> torch.Tensor:
        logits_TV = self.output(norm(x_BSW)).float().flatten(0, 1)
        logits_TV = SOFTCAP * torch.tanh(logits_TV / SOFTCAP)
        return F.cross_entropy(logits_TV, target_BS.flatten(), reduction="none")

    # -- what is counted -------------------------------------------------------------------------------------------

    def matrix_parameters(self) -> tuple[int, int]:
        """(those that a token is multiplied with, all): of layers and the output layer, without embeddings."""
        active = total = 0
        for name, weight in self.named_parameters():
            if weight.dim() < 2 or name.endswith("embedding.weight"):
                continue
            total += weight.numel()
            routed = weight.dim() == 3  # a stack of experts
            active += weight.numel() * self.config.top_k // self.config.experts if routed else weight.numel()
        return active, total

    def flops_per_token(self, causal: bool = True) -> float:
        """Of forward and backward: 6 for each active matrix parameter, and attention's two products, 12 S W a layer.
        Causal attention needs half of these; nanochat counts all."""
        attention = 12 * self.config.depth * self.config.sequence * self.config.width
        return 6 * self.matrix_parameters()[0] + attention / (2 if causal else 1)
