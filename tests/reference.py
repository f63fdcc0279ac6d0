"""The whole MoE layer on the whole batch in one process: the answer that every way of computing it must give.

Plain PyTorch, float64, differentiated by autograd: a loop over experts, a sort per token, formulas as in the papers.
Nothing here is shared with the code that it checks. `Problem` holds one layer's numbers (parameters in logical
expert order, the tokens of each rank, a random projection of each rank's output that makes gradients generic), and
`solve` gives outputs and gradients of

    loss = mean over ranks of [ sum(y * projection + y^2 / 2) / size of y ]  +  balance losses of the whole batch
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

# Two scores closer than this may be ranked differently after rounding; tokens with such a near-tie are not drawn.
NEAR_TIE = {torch.float32: 1e-4, torch.bfloat16: 1e-4}


@dataclass(frozen=True)
class Spec:
    """What a layer computes; nothing about ranks. Fields as the arguments of `carpool.MoE` and its router."""

    hidden: int = 32
    inner: int = 24
    experts: int = 12
    top_k: int = 3
    score: str = "softmax"
    normalize: bool = True
    scaling: float = 1.0
    num_groups: int = 0
    topk_groups: int = 0
    selection_bias: bool = False
    aux: float = 0.0
    z: float = 0.0
    activation: str = "silu"
    gated: bool = True
    bias: bool = False
    shared: int = 0


@dataclass
class Problem:
    """Numbers for a `Spec`. Floating tensors are already rounded to the dtype under test.

    Attributes:
        parameters: by name, experts in logical order; "selection_bias" is no parameter but lives here too.
        x, projection: of each rank, (T_r, H).
        expert, weight: of each rank, (T_r, K), or None: the router chooses, or the router weighs.
    """

    spec: Spec
    parameters: dict[str, torch.Tensor]
    x: list[torch.Tensor]
    projection: list[torch.Tensor]
    expert: list[torch.Tensor] | None = None
    weight: list[torch.Tensor] | None = None


@dataclass
class Answer:
    """What the layer must give. `gradients` holds parameters by name; "x r" and "weight r" are those of rank r."""

    y: list[torch.Tensor]
    expert: list[torch.Tensor]
    aux: torch.Tensor
    gradients: dict[str, torch.Tensor]


def draw_parameters(spec: Spec, generator: torch.Generator, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    width = spec.inner * (2 if spec.gated else 1)
    shapes = {
        "router.weight": (spec.experts, spec.hidden),
        "up_proj": (spec.experts, width, spec.hidden),
        "down_proj": (spec.experts, spec.hidden, spec.inner),
    }
    if spec.bias:
        shapes |= {"up_bias": (spec.experts, width), "down_bias": (spec.experts, spec.hidden)}
    if spec.shared:
        shared_width = spec.shared * (2 if spec.gated else 1)
        shapes |= {"shared.up.weight": (shared_width, spec.hidden), "shared.down.weight": (spec.hidden, spec.shared)}
    parameters = {}
    for name, shape in shapes.items():
        scale = 0.5 if name.endswith("bias") else 1.5 / math.sqrt(shape[-1])
        parameters[name] = (scale * torch.randn(shape, generator=generator, dtype=torch.float64)).to(dtype)
    if spec.selection_bias:
        parameters["selection_bias"] = (0.1 * torch.randn(spec.experts, generator=generator)).float()
    return parameters


def draw_tokens(
    spec: Spec, parameters: dict[str, torch.Tensor], count: int, generator: torch.Generator, dtype: torch.dtype
) -> torch.Tensor:
    """(count, H) tokens whose K choices no rounding error can change."""
    kept: list[torch.Tensor] = []
    while sum(len(x) for x in kept) < count:
        x_TH = torch.randn(2 * count + 8, spec.hidden, generator=generator, dtype=torch.float64).to(dtype)
        scores_TE = router_scores(spec, x_TH.double() @ parameters["router.weight"].double().t())
        _, margin_T = select(spec, scores_TE, parameters.get("selection_bias"))
        kept.append(x_TH[margin_T > NEAR_TIE[dtype]])
    return torch.cat(kept)[:count] if kept else torch.zeros(0, spec.hidden, dtype=dtype)


def router_scores(spec: Spec, logits_TE: torch.Tensor) -> torch.Tensor:
    if spec.score == "sigmoid":
        return 1 / (1 + torch.exp(-logits_TE))
    powers_TE = torch.exp(logits_TE - logits_TE.max(1, keepdim=True).values) if len(logits_TE) else logits_TE
    return powers_TE / powers_TE.sum(1, keepdim=True)


def select(
    spec: Spec, scores_TE: torch.Tensor, selection_bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The K best experts of each token, best first, and by how much the closest decision was taken."""
    chosen, margins = [], []
    for scores in scores_TE.detach().tolist():
        margin = math.inf
        if selection_bias is not None:
            scores = [s + b for s, b in zip(scores, selection_bias.tolist(), strict=True)]
        candidates = list(range(spec.experts))
        if spec.num_groups:
            size = spec.experts // spec.num_groups
            groups = [candidates[start : start + size] for start in range(0, spec.experts, size)]
            value = [sum(sorted((scores[e] for e in group), reverse=True)[:2]) for group in groups]
            order = sorted(range(spec.num_groups), key=lambda g: -value[g])
            if spec.topk_groups < spec.num_groups:
                margin = value[order[spec.topk_groups - 1]] - value[order[spec.topk_groups]]
            candidates = [e for g in order[: spec.topk_groups] for e in groups[g]]
        candidates.sort(key=lambda e: -scores[e])
        if spec.top_k < len(candidates):
            margin = min(margin, scores[candidates[spec.top_k - 1]] - scores[candidates[spec.top_k]])
        chosen.append(candidates[: spec.top_k])
        margins.append(margin)
    expert_TK = torch.tensor(chosen, dtype=torch.int64).view(len(chosen), spec.top_k)
    return expert_TK, torch.tensor(margins, dtype=torch.float64)


def solve(problem: Problem) -> Answer:
    """Outputs, balance losses and gradients of the loss in the module's docstring."""
    spec, ranks = problem.spec, len(problem.x)
    leaves = {
        name: value.double().requires_grad_() for name, value in problem.parameters.items() if name != "selection_bias"
    }
    inputs = [x.double().requires_grad_() for x in problem.x]
    sizes = [len(x) for x in inputs]
    x_TH = torch.cat(inputs)

    logits_TE = x_TH @ leaves["router.weight"].t()
    scores_TE = router_scores(spec, logits_TE)
    if problem.expert is None:
        expert_TK, _ = select(spec, scores_TE, problem.parameters.get("selection_bias"))
    else:
        expert_TK = torch.cat(problem.expert).long()
    real_TK = expert_TK >= 0
    given = None
    if problem.weight is None:
        weight_TK = torch.where(real_TK, scores_TE.gather(1, expert_TK.clamp(min=0)), 0.0)
        if spec.normalize:
            total_T1 = weight_TK.sum(1, keepdim=True)
            weight_TK = weight_TK / torch.where(total_T1 > 0, total_T1, 1.0)
        weight_TK = weight_TK * spec.scaling
        aux = balance_losses(spec, logits_TE, scores_TE, expert_TK)
    else:
        given = [w.double().requires_grad_() for w in problem.weight]
        weight_TK = torch.cat(given)
        aux = torch.zeros((), dtype=torch.float64)

    y_TH = torch.zeros_like(x_TH)
    for e in range(spec.experts):
        token_P, choice_P = (expert_TK == e).nonzero(as_tuple=True)
        out_PH = expert(spec, leaves, e, x_TH[token_P]) * weight_TK[token_P, choice_P].unsqueeze(1)
        y_TH = y_TH + torch.zeros_like(y_TH).index_put((token_P,), out_PH, accumulate=True)
    if spec.shared:
        h_TF = activate(spec, x_TH @ leaves["shared.up.weight"].t())
        y_TH = y_TH + h_TF @ leaves["shared.down.weight"].t()

    y = list(y_TH.split(sizes))
    losses = [rank_loss(y_r, p.double()) for y_r, p in zip(y, problem.projection, strict=True)]
    (sum(losses) / ranks + aux).backward()

    def grad(tensor: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad

    gradients = {name: grad(leaf) for name, leaf in leaves.items()}
    gradients |= {f"x {r}": grad(x) for r, x in enumerate(inputs)}
    gradients |= {f"weight {r}": grad(w) for r, w in enumerate(given or [])}
    return Answer([t.detach() for t in y], list(expert_TK.split(sizes)), aux.detach(), gradients)


def rank_loss(y: torch.Tensor, projection: torch.Tensor) -> torch.Tensor:
    """The loss of one rank; zero, but part of the graph, on a rank without tokens."""
    return (y * projection + y * y / 2).sum() / max(1, y.numel())


def expert(spec: Spec, leaves: dict[str, torch.Tensor], e: int, x_PH: torch.Tensor) -> torch.Tensor:
    h_PF = x_PH @ leaves["up_proj"][e].t()
    if spec.bias:
        h_PF = h_PF + leaves["up_bias"][e]
    y_PH = activate(spec, h_PF) @ leaves["down_proj"][e].t()
    return y_PH + leaves["down_bias"][e] if spec.bias else y_PH


def activate(spec: Spec, h: torch.Tensor) -> torch.Tensor:
    inner = h.shape[1] // (2 if spec.gated else 1)
    gate = h[:, :inner]
    match spec.activation:
        case "silu":
            out = gate / (1 + torch.exp(-gate))
        case "gelu":
            out = gate / 2 * (1 + torch.erf(gate / math.sqrt(2)))
        case "gelu_tanh":
            out = gate / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)))
        case "relu":
            out = torch.where(gate > 0, gate, 0.0)
        case "relu2":
            out = torch.where(gate > 0, gate * gate, 0.0)
        case other:
            raise ValueError(other)
    return out * h[:, inner:] if spec.gated else out


def balance_losses(
    spec: Spec, logits_TE: torch.Tensor, scores_TE: torch.Tensor, expert_TK: torch.Tensor
) -> torch.Tensor:
    """Of the whole batch: E * sum_e (share of choices) * (mean probability), and the mean squared logsumexp."""
    tokens = len(logits_TE)
    if tokens == 0:
        return torch.zeros((), dtype=torch.float64)
    count_E = torch.stack([(expert_TK == e).sum() for e in range(spec.experts)]).double()
    share_E = count_E / max(1.0, float(count_E.sum()))
    mean_E = (scores_TE / scores_TE.sum(1, keepdim=True)).mean(0)
    z = logits_TE.exp().sum(1).log().square().mean()
    return spec.aux * spec.experts * (share_E * mean_E).sum() + spec.z * z
