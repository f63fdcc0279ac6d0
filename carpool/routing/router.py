"""Who serves a token: routers, balance losses, bias balancing, group-limited selection, capacity, replay.

A router turns each token's hidden state into a `Routing`: K expert ids and K weights. Whoever makes one, our
`Router`, a Hugging Face model or a recording, the rest of the layer treats alike.

Balance, three ways, all on *global* statistics (a mean over the batch of one rank is not the mean over the batch:
the auxiliary loss is a product of two means and therefore not linear in the batch):
  - auxiliary loss (Switch Transformer, section 2.2; GShard): E * sum_e f_e * P_e, where f_e is the share of
    choices that went to expert e and P_e the mean probability; 1.0 when balanced.
  - z-loss (ST-MoE, section 2.2): mean of logsumexp(logits)^2, which keeps the router's logits small.
  - bias (auxiliary-loss-free, DeepSeek-V3, section 2.1.2): a bias per expert, added for the selection only and
    moved after each step by `bias_update_rate * sign(mean load - load)`.

`route` says in plain PyTorch what becomes of logits. On CUDA `carpool.routing.kernel` does the same in one pass,
forward and backward. Both choose alike: of equal scores the lower expert id wins.

Lossy, off by default: `DropOptions` drop choices beyond an expert's capacity, or second choices at random (counted in
`dropped`), and `num_groups`/`topk_groups` restrict a token to the experts of a few groups, wherever they live. To few
ranks or nodes of a layout it is restricted by carpool/routing/limit.py.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from carpool.observe.stats import in_recompute

# (score_TE to select by, share_TE of the weight, K) -> expert_TK, best first.
Choose = Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]


@dataclass(frozen=True)
class Routing:
    """Which experts serve each token, and with which weight.

    Attributes:
        expert_TK: (T, K) int32, logical expert ids, -1 for none. A token names an expert at most once.
        weight_TK: (T, K) float32. None in a recording of choices only: the router then computes the weights.
    """

    expert_TK: torch.Tensor
    weight_TK: torch.Tensor | None

    def detach(self) -> Routing:
        """The same routing as a recording, which `moe(x, routing=...)` replays."""
        return Routing(self.expert_TK, None if self.weight_TK is None else self.weight_TK.detach())

    def check(self, num_tokens: int, num_experts: int) -> None:
        """Raise ValueError if this cannot route `num_tokens` tokens to `num_experts` experts.

        Looks at values (a host synchronisation), so it is for recordings and other input of a user, not for the
        hot path."""
        shape = tuple(self.expert_TK.shape)
        if len(shape) != 2 or shape[0] != num_tokens:
            raise ValueError(f"routing.expert_TK has shape {shape}, but the layer got {num_tokens} tokens")
        if self.expert_TK.dtype != torch.int32:
            raise ValueError(f"routing.expert_TK must be int32, not {self.expert_TK.dtype}; use .int()")
        if self.weight_TK is not None and tuple(self.weight_TK.shape) != shape:
            raise ValueError(f"routing.weight_TK has shape {tuple(self.weight_TK.shape)}, expert_TK has {shape}")
        if num_tokens and not -1 <= int(self.expert_TK.min()) <= int(self.expert_TK.max()) < num_experts:
            raise ValueError(
                f"routing.expert_TK holds ids from {int(self.expert_TK.min())} to {int(self.expert_TK.max())}; "
                f"experts are 0..{num_experts - 1}, and -1 means none"
            )
        sorted_TK = self.expert_TK.sort(dim=1).values
        if bool(((sorted_TK[:, 1:] == sorted_TK[:, :-1]) & (sorted_TK[:, 1:] >= 0)).any()):
            raise ValueError("routing.expert_TK names an expert twice for one token; add the two weights instead")


@dataclass(frozen=True)
class DropOptions:
    """Which choices are not served. LOSSY; the defaults drop nothing. What is kept is not weighed anew.

    Attributes:
        capacity_factor: at most ceil(capacity_factor * T * K / E) choices of each expert are kept among this rank's T
            tokens, and the others dropped. None: no limit.
        first_choices_first: who fills that capacity: all tokens' best choices, then all second ones, and so on
            (GShard, arXiv 2006.16668, algorithm 1). False: token after token.
        random_second: with K = 2 and while training, a token keeps its second choice with probability
            min(1, 2 w2 / (w1 + w2)) (GShard, "random routing"). One that is not kept takes no place.

    Example, E = 2, K = 1, T = 3, capacity_factor 1: each expert keeps ceil(3 / 2) = 2 choices; of 0, 0, 0 the third is
    dropped.
    """

    capacity_factor: float | None = None
    first_choices_first: bool = False
    random_second: bool = False

    def check(self, top_k: int) -> None:
        """Raise ValueError for what cannot be with K choices per token."""
        if self.capacity_factor is not None and self.capacity_factor <= 0:
            raise ValueError(f"capacity_factor={self.capacity_factor} must be positive, or None to drop nothing")
        if self.first_choices_first and self.capacity_factor is None:
            raise ValueError("first_choices_first says who fills a capacity, but capacity_factor is None; set it")
        if self.random_second and top_k != 2:
            raise ValueError(f"random_second drops second choices of two, but a token has {top_k}")

    @property
    def active(self) -> bool:
        return self.capacity_factor is not None or self.random_second

    @property
    def lossy_reasons(self) -> list[str]:
        """For logs and reports: how this changes the model's function."""
        reasons = []
        if self.capacity_factor is not None:
            reasons.append(f"choices beyond {self.capacity_factor:g} times an expert's even share are dropped")
        if self.random_second:
            reasons.append("second choices are dropped at random")
        return reasons

    @torch.no_grad()
    def kept(self, routing: Routing, num_experts: int, training: bool) -> torch.Tensor:
        """(T, K) bool: whether a choice is served. Looks at no value on the host; random numbers are the device's."""
        expert_TK, weight_TK = routing.expert_TK, routing.weight_TK
        kept_TK = expert_TK >= 0
        if self.random_second and training:
            assert weight_TK is not None
            share_T = weight_TK[:, 1] / weight_TK.sum(1).clamp(min=1e-20)
            kept_TK[:, 1] &= torch.rand_like(share_T) < 2 * share_T
        if self.capacity_factor is None:
            return kept_TK
        capacity = math.ceil(self.capacity_factor * expert_TK.numel() / num_experts)
        # N: choices in the order in which they take their places.
        order = (lambda matrix: matrix.t()) if self.first_choices_first else (lambda matrix: matrix)
        chosen_N, wanted_N = (order(matrix).reshape(-1) for matrix in (expert_TK.clamp(min=0).long(), kept_TK))
        chosen_NE = F.one_hot(chosen_N, num_experts) * wanted_N.unsqueeze(1)
        before_N = (chosen_NE.cumsum(0) * chosen_NE).sum(1) - 1
        fits_N = wanted_N & (before_N < capacity)
        return order(fits_N.view(order(expert_TK).shape))

    def drop(self, routing: Routing, num_experts: int, training: bool) -> tuple[Routing, torch.Tensor]:
        """(What is left, how many choices were dropped, as a scalar on the device)."""
        assert routing.weight_TK is not None
        kept_TK = self.kept(routing, num_experts, training)
        dropped = ((routing.expert_TK >= 0) & ~kept_TK).sum()
        left = Routing(routing.expert_TK.masked_fill(~kept_TK, -1), routing.weight_TK.masked_fill(~kept_TK, 0.0))
        return left, dropped


class Router(nn.Module):
    """A linear router with top-k selection.

    Args:
        hidden_size, num_experts, num_experts_per_tok: H, E, K.
        score: "softmax" over the experts (Mixtral, OLMoE), or "sigmoid" of each (DeepSeek-V3).
        normalize: divide the K weights by their sum.
        scaling_factor: multiply the weights (DeepSeek-V3 uses 2.5).
        num_groups, topk_groups: choose the `topk_groups` best of `num_groups` equal groups of experts first, by the
            sum of each group's two best scores (DeepSeek-V3, section 2.1.2: node-limited routing). 0: off.
        aux_loss_coef, z_loss_coef: weights of the two losses in `aux_loss`. 0: off.
        bias_update_rate: step of the bias in `update_bias`. 0: off, no bias.
        capacity_factor, first_choices_first, random_second: what is dropped, see `DropOptions`. By default nothing is.
        groups: process groups over which statistics are summed, one after another; together they must cover all
            ranks that hold tokens of the batch (the expert-parallel group and that of its copies).

    Attributes:
        aux_loss: scalar, differentiable, of the last forward. Its mean over the ranks is the loss of the whole
            batch, so it composes with a loss that is averaged over ranks (DDP, FSDP).
        dropped: scalar int64 tensor: choices dropped since the last `reset_counts`.
    """

    load_E: torch.Tensor
    bias_E: torch.Tensor | None
    dropped: torch.Tensor

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        num_experts_per_tok: int,
        *,
        score: Literal["softmax", "sigmoid"] = "softmax",
        normalize: bool = True,
        scaling_factor: float = 1.0,
        num_groups: int = 0,
        topk_groups: int = 0,
        aux_loss_coef: float = 0.0,
        z_loss_coef: float = 0.0,
        bias_update_rate: float = 0.0,
        capacity_factor: float | None = None,
        first_choices_first: bool = False,
        random_second: bool = False,
        groups: Sequence[dist.ProcessGroup] = (),
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if not 1 <= num_experts_per_tok <= num_experts:
            raise ValueError(f"num_experts_per_tok={num_experts_per_tok} must be between 1 and {num_experts} experts")
        if score not in ("softmax", "sigmoid"):
            raise ValueError(f"score={score!r} is not known; use 'softmax' or 'sigmoid'")
        if num_groups or topk_groups:
            _check_groups(num_experts, num_experts_per_tok, num_groups, topk_groups)
        self.drops = DropOptions(capacity_factor, first_choices_first, random_second)
        self.drops.check(num_experts_per_tok)
        self.num_experts, self.top_k = num_experts, num_experts_per_tok
        self.score, self.normalize, self.scaling_factor = score, normalize, scaling_factor
        self.num_groups, self.topk_groups = num_groups, topk_groups
        self.aux_loss_coef, self.z_loss_coef = aux_loss_coef, z_loss_coef
        self.bias_update_rate = bias_update_rate
        self.groups = tuple(groups)
        self.weight = nn.Parameter(torch.empty(num_experts, hidden_size, device=device, dtype=dtype))
        # Selection is sensitive to rounding, so the bias stays float32 whatever the weights are.
        self.register_buffer(
            "bias_E", torch.zeros(num_experts, device=device, dtype=torch.float32) if bias_update_rate else None
        )
        self.register_buffer("load_E", torch.zeros(num_experts, device=device, dtype=torch.int64), persistent=False)
        self.register_buffer("dropped", torch.zeros((), device=device, dtype=torch.int64), persistent=False)
        self.aux_loss = torch.zeros((), device=device)

    def forward(
        self, x_TH: torch.Tensor, expert_TK: torch.Tensor | None = None, choose: Choose | None = None
    ) -> Routing:
        """Route tokens; with `expert_TK`, keep those choices and compute only their weights (replay). `choose` chooses
        in place of the top-k (carpool/routing/limit.py)."""
        logits_TE = router_logits(x_TH, self.weight)
        rule = Rule(
            self.top_k, self.score, self.normalize, self.scaling_factor, self.num_groups, self.topk_groups,
            self.aux_loss_coef, self.z_loss_coef,
        )  # fmt: skip
        if choose is not None and expert_TK is None:
            with torch.no_grad():
                prob_TE = _scores(logits_TE, rule)
                plain = self.bias_E is None and rule.num_groups <= 1
                score_TE = prob_TE if plain else _selection(logits_TE, prob_TE, self.bias_E, rule)
                expert_TK = choose(score_TE, prob_TE, self.top_k).int()
        expert_TK, weight_TK, self.aux_loss, count_E = route(logits_TE, self.bias_E, expert_TK, rule, self.groups)
        if self.training and not in_recompute():
            # Activation checkpointing runs this forward twice; the tokens came once. Evaluation must not train.
            self.load_E += count_E
        routing = Routing(expert_TK, weight_TK)
        if self.drops.active:
            routing, dropped = self.drops.drop(routing, self.num_experts, self.training)
            if not in_recompute():
                self.dropped += dropped
        return routing

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Router:
        """`module.to(...)`: the bias follows to the device and keeps its dtype and digits."""
        bias_E = self.bias_E
        super()._apply(fn, recurse)
        if bias_E is not None and self.bias_E is not None and self.bias_E.dtype != bias_E.dtype:
            self.bias_E = bias_E.to(self.bias_E.device)
        return self

    @torch.no_grad()
    def update_bias(self) -> None:
        """Move the bias towards balance and forget the load. Call on every rank, once per optimizer step.

        The load of all ranks and of all micro-batches since the last call decides, each token counted once and those
        of an evaluation (`eval()`) not at all.
        """
        if self.bias_E is None:
            raise ValueError("this router has no bias: construct it with bias_update_rate > 0")
        load_E = self.load_E.clone()
        for group in self.groups:
            dist.all_reduce(load_E, group=group)
        self.bias_E += self.bias_update_rate * torch.sign(load_E.float().mean() - load_E.float())
        self.load_E.zero_()

    def reset_counts(self) -> None:
        """Forget load and drops counted so far."""
        self.load_E.zero_()
        self.dropped.zero_()


class Rule(NamedTuple):
    """How to score, select, weigh and balance; fields as the arguments of `Router`."""

    top_k: int
    score: Literal["softmax", "sigmoid"] = "softmax"
    normalize: bool = True
    scaling_factor: float = 1.0
    num_groups: int = 0
    topk_groups: int = 0
    aux_loss_coef: float = 0.0
    z_loss_coef: float = 0.0


class Routed(NamedTuple):
    """What becomes of logits.

    Attributes:
        expert_TK: (T, K) int32, best first.
        weight_TK: (T, K), differentiable.
        aux_loss: scalar, differentiable.
        count_E: (E,) int64, choices of each expert by these tokens.
    """

    expert_TK: torch.Tensor
    weight_TK: torch.Tensor
    aux_loss: torch.Tensor
    count_E: torch.Tensor


def on_gpu(tensor: torch.Tensor) -> bool:
    """Whether the kernels are used."""
    return tensor.is_cuda and importlib.util.find_spec("triton") is not None


def router_logits(x_TH: torch.Tensor, weight_EH: torch.Tensor) -> torch.Tensor:
    """(T, E) float32 logits, also under autocast: a bf16 softmax over hundreds of experts changes which are chosen.

    Tokens and weights of bfloat16 are multiplied on tensor cores on CUDA, others as float32; both add in float32."""
    with torch.autocast(x_TH.device.type, enabled=False):
        if x_TH.dtype == weight_EH.dtype == torch.bfloat16 and on_gpu(x_TH):
            from carpool.routing.logits import logits

            return logits(x_TH, weight_EH)
        return F.linear(x_TH.float(), weight_EH.float())


def route(
    logits_TE: torch.Tensor,
    bias_E: torch.Tensor | None,
    expert_TK: torch.Tensor | None,
    rule: Rule,
    groups: Sequence[dist.ProcessGroup] = (),
) -> Routed:
    """From logits to choices, weights and the balance loss: on CUDA by kernels, elsewhere (and for float64) by plain
    PyTorch, which defines what they compute.

    Args:
        bias_E: added to the scores for the selection, or None.
        expert_TK: keep these choices and weigh them (replay), or None: choose.
        groups: over which the statistics of the balance loss are summed.
    """
    if logits_TE.dtype == torch.float32 and on_gpu(logits_TE):
        from carpool.routing import kernel as routing_kernel

        return routing_kernel.route(logits_TE, bias_E, expert_TK, rule, groups)
    prob_TE = _scores(logits_TE, rule)
    if expert_TK is None:
        with torch.no_grad():
            expert_TK = _best(_selection(logits_TE, prob_TE, bias_E, rule), rule.top_k).int()
    index_TK = expert_TK.clamp(min=0).long()
    weight_TK = prob_TE.gather(1, index_TK).masked_fill(expert_TK < 0, 0.0)
    if rule.normalize:
        weight_TK = weight_TK / weight_TK.sum(-1, keepdim=True).clamp(min=1e-20)
    weight_TK = weight_TK * rule.scaling_factor
    count_E = torch.zeros(logits_TE.shape[1], dtype=torch.int64, device=logits_TE.device)
    count_E.scatter_add_(0, index_TK.reshape(-1), (expert_TK >= 0).long().reshape(-1))
    return Routed(expert_TK, weight_TK, _aux_loss(logits_TE, prob_TE, count_E, rule, groups), count_E)


def _scores(logits_TE: torch.Tensor, rule: Rule) -> torch.Tensor:
    return logits_TE.softmax(-1) if rule.score == "softmax" else logits_TE.sigmoid()


def _selection(logits_TE: torch.Tensor, prob_TE: torch.Tensor, bias_E: torch.Tensor | None, rule: Rule) -> torch.Tensor:
    """(T, E): what experts are selected by, the best K, best first. Of equal ones the lower id wins, and NaN is above
    all.

    Scores rise with logits, so where nothing is added to or among them logits are compared: they have fewer ties, and
    do not depend on how a device computes `exp`."""
    choice_TE = prob_TE if bias_E is not None or rule.num_groups > 1 else logits_TE
    if bias_E is not None:
        choice_TE = choice_TE + bias_E
    if rule.num_groups > 1:
        choice_TGe = choice_TE.unflatten(1, (rule.num_groups, -1))
        group_TG = choice_TGe.topk(min(2, choice_TGe.shape[-1]), dim=-1).values.sum(-1)
        best_TG = _best(group_TG, rule.topk_groups)
        open_TG = torch.zeros_like(group_TG, dtype=torch.bool).scatter_(1, best_TG, True)
        choice_TE = choice_TGe.masked_fill(~open_TG.unsqueeze(-1), -math.inf).flatten(1)
    return choice_TE


def _best(value_TN: torch.Tensor, count: int) -> torch.Tensor:
    """As `topk(count).indices`, which leaves open which of equal ones it takes."""
    return value_TN.sort(dim=-1, descending=True, stable=True).indices[:, :count]


def sum_over(total: torch.Tensor, groups: Sequence[dist.ProcessGroup]) -> int:
    """Sum in place over all ranks of the groups; how many they are."""
    ranks = 1
    for group in groups:
        dist.all_reduce(total, group=group)
        ranks *= dist.get_world_size(group)
    return ranks


def _aux_loss(
    logits_TE: torch.Tensor,
    prob_TE: torch.Tensor,
    count_E: torch.Tensor,
    rule: Rule,
    groups: Sequence[dist.ProcessGroup],
) -> torch.Tensor:
    if not (rule.aux_loss_coef or rule.z_loss_coef):
        return logits_TE.new_zeros(())
    num_experts = logits_TE.shape[1]
    prob_TE = prob_TE / prob_TE.sum(-1, keepdim=True)  # a no-op for softmax; makes sigmoid scores shares
    prob_E = prob_TE.sum(0)
    z = logits_TE.logsumexp(-1).square().sum()
    tokens = logits_TE.new_full((1,), float(logits_TE.shape[0]))
    total = torch.cat([count_E.to(z.dtype), prob_E.detach(), z.detach().view(1), tokens])
    ranks = sum_over(total, groups)
    count_all_E, prob_all_E, z_all, tokens_all = total.split([num_experts, num_experts, 1, 1])
    share_E = count_all_E / count_all_E.sum().clamp(min=1.0)
    # The loss is linear in P once f is global. So each rank differentiates its own part, scaled by the number
    # of ranks because the caller averages over them, and no gradient has to travel.
    scale = ranks / tokens_all.squeeze(0).clamp(min=1.0)
    own = rule.aux_loss_coef * num_experts * (share_E * prob_E).sum() * scale + rule.z_loss_coef * z * scale
    value = (
        rule.aux_loss_coef * num_experts * (share_E * prob_all_E).sum() + rule.z_loss_coef * z_all.squeeze(0)
    ) / tokens_all.squeeze(0).clamp(min=1.0)
    return own + (value - own).detach()


def _check_groups(num_experts: int, top_k: int, num_groups: int, topk_groups: int) -> None:
    if num_groups < 1:
        raise ValueError(f"topk_groups={topk_groups} chooses among groups, but num_groups={num_groups}")
    if num_experts % num_groups:
        raise ValueError(f"num_groups={num_groups} must divide num_experts={num_experts}")
    if not 1 <= topk_groups <= num_groups:
        raise ValueError(f"topk_groups={topk_groups} must be between 1 and num_groups={num_groups}")
    if topk_groups * (num_experts // num_groups) < top_k:
        raise ValueError(
            f"{topk_groups} groups of {num_experts // num_groups} experts hold fewer than {top_k} experts per token; "
            "raise topk_groups"
        )
